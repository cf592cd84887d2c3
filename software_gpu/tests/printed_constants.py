"""Prints the shared-memory layouts and the PTX of the small attention kernel for sm_100a."""

import attention_sm100 as s
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.runtime import make_fake_stream

lay = []

orig = {n: getattr(sm100, n) for n in ("make_smem_layout_a", "make_smem_layout_b")}


def spy(n):
    def f(*a, **k):
        r = orig[n](*a, **k)
        lay.append((n, str(r)))
        return r

    return f


for n in orig:
    setattr(sm100, n, spy(n))
c = cute.compile(
    s.Attn100(),
    *[s.T(cutlass.BFloat16) for _ in range(4)],
    make_fake_stream(use_tvm_ffi_env_stream=True),
    options="--enable-tvm-ffi",
)
for x in lay:
    print(repr(x))
print(repr(("ptx", c.__ptx__)))
