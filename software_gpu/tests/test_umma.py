"""Tensor memory and tcgen05 against CuTe: layouts, the constants in a compiled kernel, GEMMs."""

import re

import numpy as np
from own_process import run_program
from printed_layouts import byte_offsets, mode, parse
from test_tma_tiles import cute_layouts

from software_gpu import ptx, umma
from software_gpu.missing_fences import missing_fences
from software_gpu.unwaited_loads import unwaited_loads


def test_ldst_maps():
    rows = run_program("printed_tmem_layouts.py")
    for nm, n, kind, text in rows:
        _, shape, stride = parse(text)
        tv = mode(shape[0], stride[0])[:, None] + mode(shape[1], stride[1])[None, :]
        lanes = 32 if nm == "32x32b" else 16
        width = tv.size // lanes
        lane, c = umma.ldst_map(nm, n, split=n)
        assert np.array_equal(lane * width + c, tv), (nm, n, kind, text)
    assert len(rows) == 50


def test_ldst_round_trip():
    rng = np.random.default_rng(0)
    for shape in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"):
        for num in (1, 2, 8):
            for pack in (False, True):
                if pack and shape == "16x32bx2":
                    continue
                for warp in (0, 3, 6):
                    t = rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32) | 0x10001
                    addr = (32 * (warp % 4)) << 16 | 40
                    v = umma.ld(t, addr, shape, num, warp, pack, split=16)
                    u = np.zeros_like(t)
                    umma.st(u, addr, shape, num, warp, v, pack, split=16)
                    k = u != 0
                    assert k.sum() == v.size * (2 if pack else 1)
                    assert np.array_equal(u[k], (t & 0xFFFF if pack else t)[k])
                    assert k[: 32 * (warp % 4)].sum() == 0 and k[:, :40].sum() == 0
    for bad in ((1 << 16, "32x32b", 1, 0), (0, "32x32b", 1, 1), (505, "32x32b", 16, 0)):
        try:
            umma.ld(np.zeros((128, 512), np.uint32), *bad)
            raise SystemExit("accepted")
        except umma.UmmaError:
            pass


def make_desc(start, lbo, sbo, swizzle):
    return (
        start >> 4
        | (lbo >> 4) << 16
        | (sbo >> 4) << 32
        | 1 << 46
        | {0: 0, 128: 2, 64: 4, 32: 6}[swizzle] << 61
    )


def test_operands_against_cute_layouts():
    """For every sm_100 layout: the descriptor of each K step fetches that slice.

    Its start address is from the layout; LBO and SBO are canonical.
    """
    rng = np.random.default_rng(0)
    n = 0
    for es, kmajor, rows, k, text in cute_layouts():
        sw, shape, stride = parse(text)
        if es != 2 or len(shape) != 4:
            continue
        width = {(1, 4, 3): 32, (2, 4, 3): 64, (3, 4, 3): 128}[sw]
        base = 4096
        addr = (
            byte_offsets(text, 2, base)
            .reshape(16, rows, k // 16, 2)
            .transpose(1, 2, 0, 3)
            .reshape(rows, k, 2)
        )  # (row, k, stage)
        plain = (
            byte_offsets(text.split(" o ")[-1], 2, base)
            .reshape(16, rows, k // 16, 2)
            .transpose(1, 2, 0, 3)
            .reshape(rows, k, 2)
        )
        smem = rng.integers(0, 256, 1 << 18, dtype=np.uint8)
        mat = rng.integers(0, 0x7F00, (rows, k, 2), dtype=np.uint16)
        smem.view(np.uint16)[addr // 2] = mat
        for stage in (0, 1):
            for j in range(k // 16):
                start = int(plain[0, 16 * j, stage])
                if kmajor:  # 8-row groups SBO apart; LBO unused with a swizzle
                    d = make_desc(start, 16, 8 * width, width)
                else:  # 8-k groups SBO apart; spans of `width` bytes LBO apart
                    lbo = int(plain[width // 2, 0, 0] - plain[0, 0, 0]) if rows * 2 > width else 16
                    d = make_desc(start, lbo, 8 * width, width)
                got = umma.smem_matrix(smem, umma.decode_smem_desc(d), rows, 16, "bf16", not kmajor)
                want = (mat[:, 16 * j : 16 * j + 16, stage].astype(np.uint32) << 16).view(
                    np.float32
                )
                assert np.array_equal(got, want), (text, stage, j)
        n += 1
    print("sm_100 operand layouts:", n)
    assert n >= 60


def test_descriptors_in_ptx():
    """Constants that CuTe folded into PTX: descriptors of Q (K-major), V (MN-major), products."""
    rows = run_program("printed_constants.py", is_active=True)
    ptx = rows[-1][1]
    lq, lk, lp, lv = [t for _, t in rows[:-1]]
    idesc = {int(x) for x in re.findall(r"mov\.b32\s+%r\d+, (13[56]\d{6});", ptx)}
    got = {umma.decode_idesc(x) for x in idesc}

    def mk(n, tb):
        return umma.InstrDesc(128, n, "f32", "bf16", "bf16", False, False, False, tb)

    assert got == {mk(128, False), mk(64, True)}, got
    # Q: or.b64 %rdA, %rdB, const (bits 0-13: the start address, taken from %rdB, plus the K step)
    q = sorted({int(x) for x in re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (46117\d{14});", ptx)})
    assert len(q) == 4
    rng = np.random.default_rng(0)
    smem = rng.integers(0, 256, 1 << 18, dtype=np.uint8)
    mat = rng.integers(0, 0x7F00, (128, 64), dtype=np.uint16)
    base = 8192
    addr = (
        byte_offsets(lq, 2, base)[..., 0, :, 0]
        .reshape(16, 128, 4)
        .transpose(1, 2, 0)
        .reshape(128, 64)
    )
    smem.view(np.uint16)[addr // 2] = mat
    for j, d in enumerate(q):
        m = umma.smem_matrix(smem, umma.decode_smem_desc(d | base >> 4), 128, 16, "bf16", False)
        assert np.array_equal(
            m, (mat[:, 16 * j : 16 * j + 16].astype(np.uint32) << 16).view(np.float32)
        )
    # V: the high word is a constant, the low word has LBO in its upper half
    hi = int(re.search(r"mov\.b32\s+%r\d+, (10737\d{5});", ptx)[1])
    d = umma.decode_smem_desc(hi << 32 | base >> 4 | 1 << 16)
    assert (d.sbo, d.swizzle) == (1024, 128)
    mat = rng.integers(0, 0x7F00, (64, 128), dtype=np.uint16)
    addr = (
        byte_offsets(lv, 2, base)[..., 0, :, 0]
        .reshape(16, 64, 8)
        .transpose(1, 2, 0)
        .reshape(64, 128)
    )
    smem.view(np.uint16)[addr // 2] = mat
    for j in range(8):
        m = umma.smem_matrix(
            smem,
            umma.decode_smem_desc(hi << 32 | (base >> 4) + 128 * j | 1 << 16),
            64,
            16,
            "bf16",
            True,
        )
        assert np.array_equal(
            m, (mat[:, 16 * j : 16 * j + 16].astype(np.uint32) << 16).view(np.float32)
        )


def test_mma_layouts():
    """Where D is, for every group and M; A from either memory; accumulate, negate, disable."""
    rng = np.random.default_rng(3)

    def f(*s):
        return rng.integers(-4, 5, s).astype(np.float32)

    def bf(x):
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)

    for g, m, n in ((1, 128, 48), (1, 64, 24), (2, 256, 64), (2, 128, 96)):
        for a_tmem in (False, True):
            a, b, d0 = f(m, 16), f(n, 16), f(m, n)
            ctas = [(np.zeros(1 << 18, np.uint8), umma.new_tmem()) for _ in range(g)]
            da, db, dc, ac = make_desc(0, 16, 256, 32), make_desc(16384, 16, 256, 32), 64, 8
            for c, (smem, tmem) in enumerate(ctas):
                for mat, d in (
                    (a[c * m // g : (c + 1) * m // g], da),
                    (b[c * n // g : (c + 1) * n // g], db),
                ):
                    s = umma.decode_smem_desc(d)
                    smem.view(np.uint16)[umma.smem_offsets(s, len(mat), 16, 2, False) // 2] = bf(
                        mat
                    )
                for r in range(m // g):  # slow definition of the placements
                    row = c * m // g + r
                    lanes = (
                        [r] if m // g == 128 else [r // 16 * 32 + r % 16] if g == 1 else [r, r + 64]
                    )
                    for li, lane in enumerate(lanes):
                        tmem[lane, ac : ac + 8] = bf(a[row]).view(np.uint32)
                        w = n // len(lanes)
                        tmem[lane, dc : dc + w] = d0[row, li * w : (li + 1) * w].view(np.uint32)
            for acc, neg, scale in ((False, False, 0), (True, False, 0), (True, True, 3)):
                work = [(s, t.copy()) for s, t in ctas]
                i = umma.decode_idesc(
                    1 << 4 | 1 << 7 | 1 << 10 | neg << 13 | (n >> 3) << 17 | (m >> 4) << 24
                )
                dis = np.zeros(128 * g, bool)
                dis[5] = acc
                umma.mma(
                    work,
                    i,
                    dc,
                    ac if a_tmem else umma.decode_smem_desc(da),
                    umma.decode_smem_desc(db),
                    acc,
                    dis,
                    scale,
                )
                want = (-1 if neg else 1) * (a @ b.T) + (d0 * 2.0**-scale if acc else 0)
                for c, (_, tmem) in enumerate(work):
                    for r in range(m // g):
                        row = c * m // g + r
                        lanes = (
                            [r]
                            if m // g == 128
                            else [r // 16 * 32 + r % 16]
                            if g == 1
                            else [r, r + 64]
                        )
                        for li, lane in enumerate(lanes):
                            w = n // len(lanes)
                            x = tmem[lane, dc : dc + w].view(np.float32)
                            y = d0[row] if acc and c == 0 and lane == 5 else want[row]
                            assert np.array_equal(x, y[li * w : (li + 1) * w]), (
                                g,
                                m,
                                n,
                                a_tmem,
                                acc,
                                row,
                            )
    for bad in (
        umma.InstrDesc(64, 12, "f32", "bf16", "bf16", 0, 0, 0, 0),
        umma.InstrDesc(256, 64, "f32", "bf16", "bf16", 0, 0, 0, 0),
    ):
        try:
            umma.check_shape(bad, 1)
            raise SystemExit("accepted")
        except umma.UmmaError:
            pass


def test_gemms():
    rows = run_program("gemm_sm100.py", is_active=True)
    for r in rows:
        print("  gemm", *r)
    assert len(rows) >= 20 and all(r[-1] for r in rows), [r for r in rows if not r[-1]]


def test_f8f6f4():
    """8-bit operands from both memories, each type with each, against conversions of torch."""
    import torch

    rng = np.random.default_rng(1)
    types = {"e4m3": (0, torch.float8_e4m3fn), "e5m2": (1, torch.float8_e5m2)}
    for name, (_, dt) in types.items():
        got = umma._as_f32(np.arange(256, dtype=np.uint8), name)
        assert np.array_equal(
            got, torch.arange(256, dtype=torch.uint8).view(dt).float().numpy(), equal_nan=True
        ), name
    for (an, (ac, at)), (bn, (bc, bt)) in ((x, y) for x in types.items() for y in types.items()):
        a, b = (
            torch.from_numpy(rng.standard_normal((128, 32)).astype(np.float32)).to(t)
            for t in (at, bt)
        )
        i = umma.decode_idesc(
            1 << 4 | ac << 7 | bc << 10 | (128 >> 3) << 17 | (128 >> 4) << 24, "f8f6f4"
        )
        assert (i.a_type, i.b_type) == (an, bn)
        smem = np.zeros(65536, np.uint8)
        da, db = (
            umma.SmemDesc(o, 128, 256, 0, 0) for o in (1024, 16384)
        )  # K-major, core matrices of 8 rows x 16 bytes
        for d, x in ((da, a), (db, b)):
            smem[umma.smem_offsets(d, 128, 32, 1, False)] = x.view(torch.uint8).numpy()
        want = a.float().numpy() @ b.float().numpy().T
        tmem = umma.new_tmem()
        tmem[:, 256:264] = np.ascontiguousarray(a.view(torch.uint8).numpy()).view(np.uint32)
        for src in (da, 256):
            umma.mma([(smem, tmem)], i, 0, src, db, False, kind="f8f6f4")
            assert np.allclose(tmem[:, :128].view(np.float32), want, rtol=1e-6, atol=1e-5), (
                an,
                bn,
                src,
            )


LOADS = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p)
{
    .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .pred %p<2>;
LOOP:
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r5];
    mov.b64 %rd1, {%r1, %r2};
    WAIT0
    mov.b64 {%r3, %r4}, %rd1;
    add.s32 %r6, %r3, %r7;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r5];
    setp.eq.u32 %p1, %r6, 0;
    @%p1 bra LOOP;
    WAIT1
    add.s32 %r8, %r1, 1;
    ret;
}
"""


def test_loads_read_too_early():
    """Either wait of two loads may be missing; a mov before a wait is a habit of the compiler."""
    wait = "tcgen05.wait::ld.sync.aligned;"
    for w0, w1 in ((wait, wait), ("", wait), (wait, ""), ("", "")):
        k = ptx.parse(LOADS.replace("WAIT0", w0).replace("WAIT1", w1)).kernels["k"]
        got = {i.mods[0] + "." + repr(i.args[0]) for i, _ in unwaited_loads(k.instrs)[0]}
        assert got == {x for x, w in (("add.%r6", w0), ("add.%r8", w1)) if not w}, (w0, w1, got)


def test_loads_that_are_only_stored():
    """Apart from the others: proven kernels do this."""
    text = LOADS.replace("WAIT0", "").replace("WAIT1", "")
    text = text.replace("add.s32 %r8, %r1, 1;", "st.global.b32 [%rd2], %r1;")
    computed, stored = unwaited_loads(ptx.parse(text).kernels["k"].instrs)
    assert [i.mods[0] for i, _ in computed] == ["add"]
    assert [i.mods[0] for i, _ in stored] == ["st"]


FENCES = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k()
{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;
    @!%p1 bra AGAIN;
    AFTER
    tcgen05.mma.cta_group::1.kind::f16 [%r3], [%r4], %rd1, %r5, %p1;
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;
    tcgen05.mma.cta_group::1.kind::f16 [%r3], %rd2, %rd1, %r5, %p1;
    AFTER
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    @%p2 bra AGAIN;
    BEFORE
    bar.warp.sync 0xffffffff;
    mbarrier.arrive.shared::cta.b64 %rd3, [%r1];
    ret;
}
"""


def test_fences_beside_barriers():
    """One is missing on each side of a barrier; what shared memory holds needs none."""
    before, after = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
    expected = {
        (before, after): [],
        ("", after): ["mbarrier.arrive"],
        (before, ""): ["tcgen05.ld", "tcgen05.mma"],
    }
    for (first, second), names in expected.items():
        k = ptx.parse(FENCES.replace("BEFORE", first).replace("AFTER", second)).kernels["k"]
        found = [".".join(i.mods[:2]) for i, _ in missing_fences(k.instrs)]
        assert sorted(found) == names, (first, second, found)


def test_broken_kernels():
    """Damaged PTX must not pass: wrong numbers, a warning, an error or a deadlock."""
    rows = run_program("broken_attention.py", is_active=True)
    clean = {}
    for r in rows:
        print("  ", *r)
        clean.setdefault(r[0], []).append(r[2] is True and not r[3])
    assert all(clean.pop("intact"))
    # a missing wait only shows when asynchronous work is late (delay)
    for name, runs in clean.items():
        assert not all(runs) and (name == "S not waited for" or not any(runs)), (name, runs)
    assert len(clean) == 9
