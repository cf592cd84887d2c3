"""The interpreter on hand-written PTX: arithmetic against numpy, divergence, barriers, mbarriers,
TMA, and the errors that a broken kernel must produce. Needs no CuTe DSL.
"""

import numpy as np

from software_gpu import Deadlock, Machine, SimError, driver, tma

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def launch(
    ptx,
    params,
    grid=(1, 1, 1),
    block=(32, 1, 1),
    cluster=(1, 1, 1),
    smem=0,
    arrays=(),
    name="k",
    **opt,
):
    m = Machine(HEAD + ptx, [(a.ctypes.data, a.nbytes) for a in arrays], **opt)
    raw = [
        np.uint64(p.ctypes.data).tobytes()
        if isinstance(p, np.ndarray) and p.dtype != np.uint8
        else bytes(p)
        for p in params
    ]
    m.launch(driver.Launch(name, grid, block, cluster, smem, raw, 0))
    return m


def lanes(body, a, b=None, c=None, out="b32", n=None, **opt):
    """Runs `body` once per thread: %a %b %c hold inputs (b32 or b64 by dtype), %o the result."""
    b = a if b is None else b
    c = a if c is None else c
    n = n or len(a)
    t = {2: "b16", 4: "b32", 8: "b64"}
    o = np.zeros(n, {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}[out])
    ld = ""
    for nm, x in (("a", a), ("b", b), ("c", c)):
        s = x.dtype.itemsize
        ld += f"mad.wide.u32 %p{nm}, %t, {s}, %b{nm};\n ld.global.{t[s]} %{nm}, [%p{nm}];\n"
    ptx = f"""
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 po) {{
 .reg .pred %p, %q; .reg .b32 %t, %x, %y; .reg .b64 %pa, %pb, %pc, %po, %ba, %bb, %bc, %bo, %lx;
 .reg .b16 %h, %g;
 .reg .{t[a.dtype.itemsize]} %a; .reg .{t[b.dtype.itemsize]} %b; .reg .{t[c.dtype.itemsize]} %c;
 .reg .{out} %o;
 ld.param.u64 %ba, [pa]; ld.param.u64 %bb, [pb]; ld.param.u64 %bc, [pc]; ld.param.u64 %bo, [po];
 mov.u32 %t, %tid.x;
 {ld}
 {body}
 mad.wide.u32 %po, %t, {o.itemsize}, %bo; st.global.{out} [%po], %o;
 ret;
}}"""
    launch(ptx, [a, b, c, o], block=(n, 1, 1), arrays=(a, b, c, o), **opt)
    return o


R = np.random.default_rng(0)
I32 = R.integers(0, 1 << 32, 64, dtype=np.uint32)
J32 = np.where(
    R.random(64) < 0.3,
    R.integers(0, 40, 64, dtype=np.uint32),
    R.integers(0, 1 << 32, 64, dtype=np.uint32),
).astype(np.uint32)
K32 = R.integers(0, 1 << 32, 64, dtype=np.uint32)
I64 = R.integers(0, 1 << 63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
J64 = R.integers(0, 1 << 63, 64, dtype=np.uint64)
FA = (R.standard_normal(64) * 10.0 ** R.integers(-3, 4, 64)).astype(np.float32)
FB = (R.standard_normal(64) * 10.0 ** R.integers(-3, 4, 64)).astype(np.float32)
FC = (R.standard_normal(64) * 10.0 ** R.integers(-3, 4, 64)).astype(np.float32)
FA[:4] = [np.inf, -np.inf, np.nan, -0.0]
FB[:4] = [1.0, np.inf, 2.0, 0.0]


def same(got, want, what):
    got, want = np.asarray(got), np.asarray(want)
    if want.dtype.kind == "f":
        g = got.view(want.dtype)
        ok = (g == want) | (np.isnan(g) & np.isnan(want))
    else:
        ok = got.view(want.dtype) == want
    assert ok.all(), (
        f"{what}: lane {np.flatnonzero(~ok)[:4]} got {got.view(want.dtype)[~ok][:4]} "
        f"want {want[~ok][:4]}"
    )


def test_integer():
    a, b, c = I32, J32, K32

    def s(x):
        return x.view(np.int32)

    with np.errstate(all="ignore"):
        same(lanes("add.s32 %o, %a, %b;", a, b), a + b, "add")
        same(lanes("mad.lo.s32 %o, %a, %b, %c;", a, b, c), a * b + c, "mad")
        same(
            lanes("mul.hi.u32 %o, %a, %b;", a, b),
            ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32),
            "mul.hi",
        )
        same(
            lanes("mul.wide.s32 %o, %a, %b;", a, b, out="b64"),
            (s(a).astype(np.int64) * s(b)).view(np.uint64),
            "mul.wide",
        )
        same(
            lanes("shl.b32 %o, %a, %b;", a, b),
            np.where(b > 31, 0, a << (b & 31)).astype(np.uint32),
            "shl",
        )
        same(
            lanes("shr.s32 %o, %a, %b;", a, b),
            (s(a) >> np.minimum(b, 31).astype(np.int32)),
            "shr.s",
        )
        same(
            lanes("shr.u64 %o, %a, %b;", I64, b, c, out="b64"),
            np.where(b > 63, 0, I64 >> (b & np.uint32(63)).astype(np.uint64)),
            "shr.u64",
        )
        same(lanes("min.s32 %o, %a, %b;", a, b), np.minimum(s(a), s(b)), "min")
        same(lanes("abs.s32 %o, %a;", a), np.abs(s(a)), "abs")
        same(lanes("popc.b32 %o, %a;", a), np.bitwise_count(a).astype(np.uint32), "popc")
        same(
            lanes("clz.b32 %o, %b;", a, b),
            np.array([32 - int(x).bit_length() for x in b], np.uint32),
            "clz",
        )
        same(lanes("bfe.u32 %o, %a, 5, 9;", a), (a >> 5) & 511, "bfe.u")
        same(lanes("bfe.s32 %o, %a, 5, 9;", a), (s(a << np.uint32(18)) >> 23), "bfe.s")
        same(
            lanes("bfi.b32 %o, %a, %b, 4, 8;", a, b),
            (b & ~np.uint32(0xFF0)) | ((a & 255) << 4),
            "bfi",
        )
        same(lanes("lop3.b32 %o, %a, %b, %c, 0xE8;", a, b, c), (a & b) | (b & c) | (a & c), "lop3")
        same(
            lanes("prmt.b32 %o, %a, %b, 0x7610;", a, b),
            (a & 0xFFFF) | (b & np.uint32(0xFFFF0000)),
            "prmt",
        )
        same(lanes("prmt.b32 %o, %a, %b, 0x0123;", a, b), a.byteswap(), "prmt rev")
        same(lanes("shf.r.wrap.b32 %o, %a, %b, 8;", a, b), (a >> 8) | (b << 24), "shf")
        same(lanes("div.u32 %o, %a, 7;", a), a // 7, "div")
        same(lanes("rem.s32 %o, %a, 7;", a), np.fmod(s(a), 7), "rem")
        same(
            lanes("setp.lt.s32 %p, %a, %b; selp.b32 %o, 1, 0, %p;", a, b),
            (s(a) < s(b)).astype(np.uint32),
            "setp",
        )
        same(
            lanes(
                "setp.gt.u32 %p, %a, 77; setp.lt.and.u32 %q, %a, %b, !%p; selp.b32 %o, %a, %b, %q;",
                a,
                b,
            ),
            np.where((a < b) & (a <= 77), a, b),
            "setp and",
        )
        same(
            lanes("{.reg .b16 l, h; mov.b32 {l, h}, %a; mov.b32 %o, {h, l};}", a),
            (a << 16) | (a >> 16),
            "mov pack",
        )
        same(
            lanes("cvt.s64.s32 %o, %a;", a, out="b64"),
            s(a).astype(np.int64).view(np.uint64),
            "cvt.s64",
        )
        same(
            lanes("cvt.u16.u32 %h, %a; cvt.s32.s16 %o, %h;", a),
            a.astype(np.uint16).view(np.int16).astype(np.int32),
            "cvt 16",
        )
        same(
            lanes("cvt.u16.u32 %h, %a; cvt.s16.s8 %g, %h; cvt.s32.s16 %o, %g;", a),
            a.astype(np.uint8).view(np.int8).astype(np.int32),
            "cvt s8",
        )
        same(
            lanes("mul.hi.u64 %o, %a, %b;", I64, J64, out="b64"),
            np.array([(int(x) * int(y)) >> 64 for x, y in zip(I64, J64, strict=True)], np.uint64),
            "mul.hi.u64",
        )


def test_float():
    a, b, c = FA, FB, FC
    with np.errstate(all="ignore"):
        same(lanes("add.f32 %o, %a, %b;", a, b), a + b, "add")
        same(lanes("mul.f32 %o, %a, 0f3FB8AA3B;", a), a * np.float32(1.4426950408889634), "mul")
        same(lanes("max.f32 %o, %a, %b;", a, b), np.fmax(a, b), "max")
        same(lanes("min.NaN.f32 %o, %a, %b;", a, b), np.minimum(a, b), "min.NaN")
        same(lanes("max.f32 %o, %a, %b, %c;", a, b, c), np.fmax(np.fmax(a, b), c), "max3")
        from fractions import Fraction

        fin = np.isfinite(a) & np.isfinite(b)

        def rnd(fr, mode):
            x = np.float32(float(fr)) if fr else np.float32(0)
            lo = x if Fraction(float(x)) <= fr else np.nextafter(x, np.float32(-np.inf))
            hi = x if Fraction(float(x)) >= fr else np.nextafter(x, np.float32(np.inf))
            if mode == "rn":
                d = Fraction(float(hi)) - fr, fr - Fraction(float(lo))
                return (
                    lo
                    if d[1] < d[0]
                    else hi
                    if d[0] < d[1]
                    else (lo if not lo.view(np.uint32) & 1 else hi)
                )
            return {"rm": lo, "rp": hi, "rz": lo if fr > 0 else hi}[mode]

        ex = [
            Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) if f else None
            for x, y, z, f in zip(a, b, c, fin, strict=True)
        ]
        for mode in ("rn", "rz", "rm", "rp"):
            got = lanes(f"fma.{mode}.f32 %o, %a, %b, %c;", a, b, c).view(np.float32)
            want = np.array([rnd(x, mode) if x is not None else 0 for x in ex], np.float32)
            same(got[fin], want[fin], "fma." + mode)
        s = [
            Fraction(float(x)) + Fraction(float(y)) if f else None
            for x, y, f in zip(a, b, fin, strict=True)
        ]
        fin &= a != 0
        same(
            lanes("add.rm.f32 %o, %a, %b;", a, b).view(np.float32)[fin],
            np.array([rnd(x, "rm") if x is not None else 0 for x in s], np.float32)[fin],
            "add.rm",
        )
        e = lanes("ex2.approx.ftz.f32 %o, %a;", a).view(np.float32)
        w = np.exp2(a.astype(np.float64))
        ok = (w > 2.0**-125) & (w < 1e38)
        assert np.abs(e[ok] / w[ok] - 1).max() < 2e-7
        same(
            lanes("setp.neu.f32 %p, %a, %b; selp.f32 %o, 0f3F800000, 0f00000000, %p;", a, b),
            (a != b).astype(np.float32),
            "setp.neu",
        )
        same(
            lanes("setp.ne.f32 %p, %a, %b; selp.f32 %o, 0f3F800000, 0f00000000, %p;", a, b),
            ((a < b) | (a > b)).astype(np.float32),
            "setp.ne",
        )
        same(lanes("cvt.rzi.s32.f32 %o, %a;", a)[4:], np.trunc(a[4:]).astype(np.int32), "cvt.rzi")
        same(
            lanes("cvt.rn.f32.s32 %o, %a;", I32),
            I32.view(np.int32).astype(np.float32),
            "cvt.f32.s32",
        )
        same(lanes("sqrt.rn.f32 %o, %a;", np.abs(a)), np.sqrt(np.abs(a)), "sqrt")
        p = np.stack([a, b], 1).copy().view(np.uint64).ravel()
        q = np.stack([c, a], 1).copy().view(np.uint64).ravel()
        same(
            lanes("add.rn.f32x2 %o, %a, %b;", p, q, out="b64").view(np.float32),
            (p.view(np.float32) + q.view(np.float32)),
            "f32x2",
        )


def test_half():
    import torch

    a = torch.from_numpy(FA.copy())
    h = torch.cat([a[4:], torch.tensor([1e-7, 6.1e-5, 65504.0, 65520.0])])
    A, B = h.numpy(), FB
    for t, d in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        got = lanes(f"cvt.rn.{t}x2.f32 %o, %a, %b;", A, B)
        want = (
            torch.stack([torch.from_numpy(B.copy()).to(d), torch.from_numpy(A.copy()).to(d)], 1)
            .view(torch.int32)
            .ravel()
            .numpy()
        )
        same(got, want.view(np.uint32), f"cvt {t}x2")
        x = torch.randn(64, 2).to(d)
        y = torch.randn(64, 2).to(d)
        z = torch.randn(64, 2).to(d)
        u = [v.view(torch.int32).ravel().numpy().view(np.uint32).copy() for v in (x, y, z)]
        same(
            lanes(f"add.rn.{t}x2 %o, %a, %b;", *u),
            (x + y).view(torch.int32).ravel().numpy().view(np.uint32),
            f"add {t}x2",
        )
        same(
            lanes(f"mul.rn.{t}x2 %o, %a, %b;", *u),
            (x * y).view(torch.int32).ravel().numpy().view(np.uint32),
            f"mul {t}x2",
        )
        w = x.double() * y.double() + z.double()
        w = w.float().to(d) if t == "bf16" else torch.from_numpy(w.numpy().astype(np.float16))
        same(
            lanes(f"fma.rn.{t}x2 %o, %a, %b, %c;", *u),
            w.view(torch.int32).ravel().numpy().view(np.uint32),
            f"fma {t}x2",
        )
        g = lanes(f"cvt.u16.u32 %h, %a; cvt.f32.{t} %o, %h;", u[0])
        same(g, x[:, 0].float().numpy(), f"cvt.f32.{t}")
    x = (torch.randn(64) * 100).float()
    for t, d in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        got = (
            lanes(
                f"cvt.rn.satfinite.{t}x2.f32 %h, %a, %b; cvt.u32.u16 %o, %h;", x.numpy(), x.numpy()
            )
            & 255
        )
        lim = 448 if t == "e4m3" else 57344
        same(got.astype(np.uint8), x.clamp(-lim, lim).to(d).view(torch.uint8).numpy(), t)


def test_warp():
    a = I32
    w = a.reshape(-1, 32)
    same(lanes("shfl.sync.bfly.b32 %o, %a, 5, 31, -1;", a), w[:, np.arange(32) ^ 5].ravel(), "bfly")
    same(lanes("shfl.sync.idx.b32 %o, %a, 3, 31, -1;", a), np.repeat(w[:, 3], 32), "idx")
    same(
        lanes("shfl.sync.up.b32 %o, %a, 4, 0, -1;", a),
        np.where(np.arange(32) >= 4, np.roll(w, 4, 1), w).ravel(),
        "up",
    )
    same(
        lanes("shfl.sync.down.b32 %o, %a, 4, 0x181f, -1;", a),
        np.where(np.arange(32) % 8 < 4, np.roll(w, -4, 1), w).ravel(),
        "down width 8",
    )
    same(
        lanes("setp.gt.s32 %p, %a, 0; vote.sync.ballot.b32 %o, %p, -1;", a),
        np.repeat(
            np.packbits(w.view(np.int32) > 0, axis=1, bitorder="little").view(np.uint32).ravel(), 32
        ),
        "ballot",
    )
    same(
        lanes("redux.sync.max.s32 %o, %a, -1;", a), np.repeat(w.view(np.int32).max(1), 32), "redux"
    )
    same(
        lanes("mov.b32 %o, 0; elect.sync %x|%p, -1; @%p mov.b32 %o, 1;", a),
        np.tile([1] + [0] * 31, 2).astype(np.uint32),
        "elect",
    )
    # divergence: loops of different lengths reconverge, and the vote after them sees all lanes
    body = """and.b32 %x, %t, 7; mov.b32 %y, 0;
    L: setp.eq.s32 %p, %x, 0; @%p bra E; add.s32 %y, %y, %x; sub.s32 %x, %x, 1; bra L;
    E: setp.gt.s32 %p, %y, 9; vote.sync.ballot.b32 %x, %p, -1; add.s32 %o, %x, %y;"""
    t = np.arange(64) & 7
    y = t * (t + 1) // 2
    same(
        lanes(body, a),
        (y + int(np.packbits(y[:32] > 9, bitorder="little").view(np.uint32)[0])).astype(np.uint32),
        "divergence",
    )


SM = """.visible .entry k(.param .u64 po) {{ .shared .align 128 .b8 buf[1024];
 .shared .align 8 .b64 bar; .reg .b32 %t, %x, %y, %w, %b, %m; .reg .b64 %po, %d;
 .reg .pred %p, %q; ld.param.u64 %po, [po]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;
 mov.u32 %b, buf; mov.u32 %m, bar; shl.b32 %x, %t, 2; add.s32 %x, %x, %b;
 mad.wide.u32 %po, %t, 4, %po;
{}
st.global.b32 [%po], %y; ret; }}"""


def sm(body, threads=64, **opt):
    o = np.zeros(threads, np.uint32)
    m = launch(SM.format(body), [o], block=(threads, 1, 1), arrays=(o,), **opt)
    return o, m


def test_barriers():
    for d in (None, 1, 2, 3):
        o, m = sm(
            "mul.lo.s32 %y, %t, 3; st.shared.b32 [%x], %y; bar.sync 0; xor.b32 %x, %x, 128; "
            "ld.shared.b32 %y, [%x];",
            delay=d,
        )
        same(o, ((np.arange(64) ^ 32) * 3).astype(np.uint32), "bar.sync")
        assert not m.warnings
    # producer / consumer on named barriers
    o, m = sm(
        "mov.b32 %y, 0; setp.eq.s32 %p, %w, 0; @%p bra P; bar.sync 3, 64; "
        "ld.shared.b32 %y, [%b]; bra E; P: mov.b32 %y, 77; st.shared.b32 [%b], %y; "
        "bar.arrive 3, 64; E:"
    )
    assert (o == 77).all()
    # mbarrier: warp 0 arrives, warp 1 waits
    wait = (
        "W: mbarrier.try_wait.parity.shared.b64 %q, [%m], 0; @%q bra D; bra W; "
        "D: ld.shared.b32 %y, [%b];"
    )
    init = (
        "setp.eq.s32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%m], 32; bar.sync 0; "
        "mov.b32 %y, 5; setp.eq.s32 %p, %w, 0; @!%p bra W;"
    )
    o, m = sm(init + "st.shared.b32 [%b], %y; mbarrier.arrive.shared.b64 _, [%m]; " + wait, delay=4)
    assert (o == 5).all()
    # never-written shared memory is reported
    o, m = sm("ld.shared.b32 %y, [%x];")
    assert any("never-written" in k[0] for k in m.warnings) and (o == 0xFFFFFFFF).all()


def fails(exc, text, fn, *a, **k):
    try:
        fn(*a, **k)
    except exc as e:
        assert text in str(e), f"wrong message: {e}"
        return str(e)
    raise AssertionError(f"no {exc.__name__}")


def test_errors():
    init = (
        "setp.eq.s32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%m], {}; bar.sync 0; mov.b32 %y, 5;"
    )
    wait = "W: mbarrier.try_wait.parity.shared.b64 %q, [%m], 0; @%q bra D; bra W; D:"
    # an arrival count that is never reached
    msg = fails(
        Deadlock,
        "of 65 arrivals",
        sm,
        init.format(65) + "mbarrier.arrive.shared.b64 _, [%m];" + wait,
    )
    assert "line" in msg and "warp 0" in msg and "warp 1" in msg
    # bytes announced that never come
    fails(
        Deadlock,
        "128 bytes outstanding",
        sm,
        init.format(1) + "@%p mbarrier.arrive.expect_tx.shared.b64 _, [%m], 128;" + wait,
    )
    # too many arrivals
    fails(
        SimError,
        "too many arrivals",
        sm,
        init.format(8) + "@%p mbarrier.arrive.shared.b64 _, [%m], 9;",
    )
    # waiting on something that is no barrier
    fails(SimError, "no mbarrier", sm, wait)
    # a barrier that one warp skips
    fails(
        Deadlock,
        "32 of 64 threads",
        sm,
        "mov.b32 %y, 0; setp.eq.s32 %p, %w, 0; @%p bra E; bar.sync 1, 64; E:",
    )
    # bad addresses
    fails(SimError, "outside every registered", sm, "mov.b32 %y, 0; add.s64 %po, %po, 4096;")
    fails(SimError, "out of range", sm, "ld.shared.b32 %y, [%x+1048576];")
    fails(SimError, "misaligned", sm, "ld.shared.b32 %y, [%x+2];")
    # an instruction nobody knows
    fails(Exception, "line", sm, "frobnicate.b32 %y, %x;")
    # more CTAs than a grid can have in this dimension
    fails(SimError, "at most 65535 CTAs", sm, "mov.b32 %y, 5;", grid=(1, 65536, 1))
    # a warp-aligned barrier in divergent code
    fails(
        Deadlock,
        "other lanes",
        sm,
        "mov.b32 %y, 0; and.b32 %x, %t, 1; setp.eq.s32 %p, %x, 1; @%p bra E; "
        "L: bar.sync 1, 64; bra F; E: bar.sync 2, 64; F:",
    )


TMA = """.visible .entry k(.param .align 64 .b8 map[128], .param .u64 po) {{
 .shared .align 1024 .b8 buf[4096]; .shared .align 8 .b64 bar; .reg .b32 %t, %x, %y, %b, %m;
 .reg .b64 %po, %d, %dm; .reg .pred %p, %q;
 ld.param.u64 %po, [po]; mov.u32 %t, %tid.x; mov.u32 %b, buf; mov.u32 %m, bar; mov.b64 %d, map;
 cvta.param.u64 %dm, %d;
 setp.eq.s32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%m], 1; bar.sync 0;
 @%p mbarrier.arrive.expect_tx.shared.b64 _, [%m], {tx};
 @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
 [%b], [%dm, {{0, 1}}], [%m];
 {wait}
 shl.b32 %x, %t, 2; add.s32 %x, %x, %b; ld.shared.b32 %y, [%x+256];
 mad.wide.u32 %po, %t, 4, %po; st.global.b32 [%po], %y; ret; }}"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %q, [%m], 0; @%q bra D; bra W; D:"


def tma_case(tx=1024, wait=WAIT, **opt):
    src = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    d = np.frombuffer(tma.encode(src.ctypes.data, "f32", (64, 32), (256,), (64, 4)), np.uint8)
    o = np.zeros(32, np.uint32)
    m = launch(TMA.format(tx=tx, wait=wait), [d, o], arrays=(src, o), **opt)
    return o.view(np.float32), src, m


def test_tma():
    for d in (None, 1, 2, 3):
        o, src, m = tma_case(delay=d)
        same(o, src[2, :32], "tma")
        assert not m.warnings
    # wrong byte count: the wait hangs; no wait at all: stale data with delays, and a warning about
    # bytes that were not written
    fails(Deadlock, "bytes outstanding", tma_case, tx=2048)
    fails(Deadlock, "bytes outstanding", tma_case, tx=512)
    stale = warned = 0
    for d in range(8):
        o, src, m = tma_case(wait="", delay=d)
        stale += not np.array_equal(o, src[2, :32])
        warned += any("never-written" in k[0] for k in m.warnings)
    assert stale >= 4 and warned >= 4


ROWS = """.visible .entry k(.param .u64 pi, .param .u64 po) {{
 .shared .align 16 .b8 buf[1024]; .shared .align 8 .b64 bar; .reg .b32 %t, %x, %y, %b, %m;
 .reg .b64 %pi, %po; .reg .pred %p, %q;
 ld.param.u64 %pi, [pi]; ld.param.u64 %po, [po]; mov.u32 %t, %tid.x; mov.u32 %b, buf;
 mov.u32 %m, bar; setp.eq.s32 %p, %t, 0; @%p mbarrier.init.shared.b64 [%m], 32;
 bar.warp.sync -1; shl.b32 %x, %t, 4; add.s32 %y, %x, %b; cvt.u64.u32 %po, %x;
 add.u64 %pi, %pi, %po; ld.param.u64 %po, [po]; cp.async.cg.shared.global [%y], [%pi], 16;
 cp.async.commit_group; cp.async.cg.shared.global [%y+512], [%pi+512], 16;
 {wait}
 bar.warp.sync -1; xor.b32 %x, %t, 31; shl.b32 %x, %x, 4; add.s32 %x, %x, %b;
 ld.shared.b32 %y, [%x+{at}]; mad.wide.u32 %po, %t, 4, %po; st.global.b32 [%po], %y; ret; }}"""


def test_cp_async():
    """Rows of other lanes, of the first copy or of the second one."""
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%m]; "
    for wait, at, is_right in (
        ("cp.async.wait_group 0;", 0, True), ("cp.async.wait_group 1;", 0, False),
        ("cp.async.commit_group; cp.async.wait_group 1;", 0, True),
        ("cp.async.commit_group; cp.async.wait_group 1;", 512, False),
        ("cp.async.wait_all;", 512, True), (arrive + WAIT, 512, True), (arrive, 512, False),
    ):  # fmt: skip
        wrong = 0
        for d in (None, *range(8)):
            src, o = np.arange(256, dtype=np.uint32), np.zeros(32, np.uint32)
            launch(ROWS.format(wait=wait, at=at), [src, o], arrays=(src, o), delay=d)
            wrong += not np.array_equal(o, src.reshape(64, 4)[at // 16 :][:32, 0][::-1])
        assert (wrong == 0) == is_right, (wait, at, wrong)


def test_proxy_fence():
    body = """.visible .entry k(.param .u64 po) {{ .shared .align 128 .b8 buf[128];
 .reg .b32 %t, %x, %b; .reg .b64 %po; .reg .pred %p; ld.param.u64 %po, [po]; mov.u32 %t, %tid.x;
 mov.u32 %b, buf; shl.b32 %x, %t, 2; add.s32 %x, %x, %b; st.shared.b32 [%x], %t;
 {} bar.warp.sync -1; setp.eq.s32 %p, %t, 0;
 @%p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%po], [%b], 128;
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret; }}"""
    for fence in ("fence.proxy.async.shared::cta;", ""):
        o = np.ones(32, np.uint32)
        m = launch(body.format(fence), [o], arrays=(o,))
        same(o, np.arange(32, dtype=np.uint32) + 1, "bulk reduce")
        assert bool(m.warnings) == (not fence), m.warnings


def test_cluster():
    ptx = """.visible .entry k(.param .u64 po) { .shared .align 8 .b64 bar; .shared .b32 v;
 .reg .b32 %r, %o, %a, %b, %t, %y; .reg .b64 %po; .reg .pred %p, %q;
 ld.param.u64 %po, [po]; mov.u32 %t, %tid.x; mov.u32 %r, %cluster_ctarank; xor.b32 %o, %r, 1;
 mov.u32 %a, bar; mov.u32 %b, v; setp.eq.s32 %p, %t, 0;
 @%p mbarrier.init.shared.b64 [%a], 1; fence.mbarrier_init.release.cluster;
 barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
 @!%p bra W; mapa.shared::cluster.u32 %y, %b, %o; add.s32 %t, %r, 100;
 st.shared::cluster.b32 [%y], %t; mapa.shared::cluster.u32 %y, %a, %o;
 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%y];
 W: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @%q bra D; bra W;
 D: ld.shared.b32 %y, [%b]; mov.u32 %t, %ctaid.x; mad.wide.u32 %po, %t, 4, %po;
 st.global.b32 [%po], %y;
 barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret; }"""
    for d in (None, 1, 2):
        o = np.zeros(4, np.uint32)
        launch(ptx, [o], grid=(4, 1, 1), cluster=(2, 1, 1), arrays=(o,), delay=d)
        same(o, np.array([101, 100, 101, 100], np.uint32), "cluster")


def test_atomics():
    o = np.zeros(4, np.float32)
    ptx = """.visible .entry k(.param .u64 po) { .reg .b32 %t, %x; .reg .b64 %po;
 ld.param.u64 %po, [po]; mov.u32 %t, %tid.x; cvt.rn.f32.u32 %x, %t;
 red.global.add.f32 [%po], %x; atom.global.max.s32 %t, [%po+4], %t;
 red.relaxed.gpu.global.add.v2.f32 [%po+8], {%x, 0f3F800000}; ret; }"""
    launch(ptx, [o], grid=(2, 1, 1), block=(64, 1, 1), arrays=(o,))
    assert o[0] == 4032 and o.view(np.uint32)[1] == 63 and o[2] == 4032 and o[3] == 128
