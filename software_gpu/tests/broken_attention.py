"""Damages the PTX of the small attention kernel for sm_100a and prints what is noticed."""

import re

import attention_sm100 as s
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

import software_gpu

c = cute.compile(
    s.Attn100(),
    *[s.T(cutlass.BFloat16) for _ in range(4)],
    make_fake_stream(use_tvm_ffi_env_stream=True),
    options="--enable-tvm-ffi",
)
P = c.__ptx__
torch.manual_seed(0)
q, k, v = [(torch.randn(n, 64) * 0.3).to(torch.bfloat16) for n in (128, 384, 384)]
ref = torch.exp2(q.float() @ k.float().T).to(torch.bfloat16).float() @ v.float()
mma = re.findall(r"\ttcgen05\.mma[^\n]*\n", P)
commits = re.findall(r"\ttcgen05\.commit[^\n]*\n", P)


def sub(old, new, count=1):
    assert old in P, old
    return P.replace(old, new, count)


waits = list(re.finditer(r"LAB_WAIT:[^}]*", P))
cases = [
    ("intact", P),
    ("no wait::st", sub("\ttcgen05.wait::st.sync.aligned;\n", "")),
    ("no wait::ld", sub("\ttcgen05.wait::ld.sync.aligned;\n", "", -1)),
    ("no dealloc", sub("\ttcgen05.dealloc.cta_group::1.sync.aligned.b32", "\t// ")),
    ("commit dropped", sub(commits[0], "\n")),
    ("K step of B forgotten", sub("add.s32 \t%r76, %r23, 2;", "add.s32 \t%r76, %r23, 0;")),
    ("alloc too small", P.replace("mov.b32 \t%r157, 256;", "mov.b32 \t%r157, 64;")),
    ("wrong idesc M", P.replace("136316048", str(136316048 - (7 << 24)))),
    ("no swizzle in descriptor", re.sub(r"46117\d{14}", lambda m: str(int(m[0]) - (2 << 61)), P)),
]
i = P.index("tcgen05.ld")
j = P.rindex("LAB_WAIT:", 0, P.rindex("LAB_WAIT:", 0, i))
cases.append(
    (
        "S not waited for",
        P[:j]
        + re.sub(r"mbarrier\.try_wait[^;]*;", "setp.eq.u32 P1, 0, 0;", P[j:i], count=1)
        + P[i:],
    )
)
for name, text in cases:
    for delay in (None, 3, 4):
        o = torch.zeros(128, 64, dtype=torch.bfloat16)
        try:
            r = software_gpu.run(c.inner, text, q, k, v, o, delay=delay)
            ok = bool((o.float() - ref).abs().max() < 0.15)
            print(repr((name, delay, ok, [w[0] for w in r["warnings"]])))
        except software_gpu.SimError as e:
            print(repr((name, delay, type(e).__name__, str(e)[:200])))
