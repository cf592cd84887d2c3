"""tma.py against slow Python definitions and against CuTe's shared-memory layouts."""

import itertools
import random

import numpy as np
from own_process import run_program
from printed_layouts import byte_offsets, element_offsets, parse

from software_gpu import tma


def slow_tile(tm, coords, get):
    """[(shared offset of the element's byte 0, its key or None)], by the definition."""
    out = []
    tiles = itertools.product(*[range(n) for n in tm.tile[::-1]])
    for lin, idx in enumerate(tiles):
        idx = idx[::-1]
        c = [coords[i] + idx[i] * (tm.estrides[i] if i else 1) for i in range(tm.rank)]
        inside = all(0 <= x < d for x, d in zip(c, tm.dims, strict=True))
        out.append((lin * tm.esize, get(c) if inside else None))
    return out


def slow_swizzle(a, sw):
    for bit, (dst, src) in enumerate([(4, 7), (5, 8), (6, 9)]):
        if sw >= 32 << bit:
            a ^= (a >> src & 1) << dst
    return a


def test_random_tiles():
    rng = random.Random(1)
    np_rng = np.random.default_rng(1)
    for _ in range(300):
        rank = rng.randint(1, 5)
        dtype, es = rng.choice([("bf16", 2), ("f16", 2), ("f32", 4), ("u32", 4), ("u8", 1)])
        sw = rng.choice([0, 32, 64, 128])
        inner = (
            rng.choice([x for x in (16, 32, 64, 128) if not sw or x <= sw])
            if sw
            else rng.choice([16, 32, 48, 64, 128, 256])
        )
        dims = [rng.randint(1, 3 * inner // es)] + [rng.randint(1, 7) for _ in range(rank - 1)]
        strides, s = [], (dims[0] * es + 15) // 16 * 16 + rng.choice([0, 16, 48])
        for d in dims[1:]:
            strides.append(s)
            s = s * d + rng.choice([0, 16])
        box = [inner // es] + [rng.randint(1, 5) for _ in range(rank - 1)]
        estr = [1] + [rng.choice([1, 1, 2, 3]) for _ in range(rank - 1)]
        g = np_rng.integers(0, 256, s + 64, dtype=np.uint8)
        base = (-g.ctypes.data) % 16
        tm = tma.decode(tma.encode(g.ctypes.data + base, dtype, dims, strides, box, sw, estr))
        assert (tm.dims, tm.strides, tm.box, tm.swizzle, tm.estrides) == (
            tuple(dims),
            (es, *strides),
            tuple(box),
            sw,
            tuple(estr),
        )
        coords = [rng.randint(-box[i], dims[i] + 1) for i in range(rank)]

        def pos(c, base=base, strides=tm.strides):
            return base + sum(x * t for x, t in zip(c, strides, strict=True))

        off = 1024 * rng.randint(0, 3) + rng.choice([0, 128, 256, 896])
        smem = np_rng.integers(0, 256, 1 << 18, dtype=np.uint8)
        want = smem.copy()
        n = 0
        for o, p in slow_tile(tm, coords, pos):
            for b in range(es):
                want[slow_swizzle(off + o + b, sw)] = 0 if p is None else g[p + b]
                n += 1

        def mem(a, k, base=base, g=g):
            assert base <= a - g.ctypes.data and a + k <= g.ctypes.data + g.nbytes
            return tma.raw_memory(a, k)

        assert tma.load(tm, coords, smem, off, mem) == n == tm.nbytes
        assert np.array_equal(smem, want)
        # store what is there now to a fresh tensor: only in-bounds elements move
        before = g.copy()
        smem = np_rng.integers(0, 256, 1 << 18, dtype=np.uint8)
        ref = before.copy()
        for o, p in slow_tile(tm, coords, pos):
            if p is not None:
                for b in range(es):
                    ref[p + b] = smem[slow_swizzle(off + o + b, sw)]
        assert tma.store(tm, coords, smem, off, mem) == n
        assert np.array_equal(g, ref)
        # reduce add
        ref = g.copy()
        num = {
            "u8": lambda b: int(b[0]),
            "u32": lambda b: int(b.view(np.uint32)[0]),
            "f32": lambda b: b.view(np.float32)[0],
            "f16": lambda b: b.view(np.float16)[0],
            "bf16": lambda b: tma.bf16_to_f32(b.view(np.uint16))[0],
        }[dtype]
        with np.errstate(all="ignore"):
            for o, p in slow_tile(tm, coords, pos):
                if p is None:
                    continue
                x = np.array([smem[slow_swizzle(off + o + b, sw)] for b in range(es)], np.uint8)
                a = num(ref[p : p + es].copy()) + num(x)
                r = {
                    "u8": lambda a: np.array([a & 255], np.uint8),
                    "u32": lambda a: np.array([a & 0xFFFFFFFF], np.uint32),
                    "f32": lambda a: np.array([a], np.float32),
                    "f16": lambda a: np.array([a], np.float16),
                    "bf16": lambda a: tma.f32_to_bf16(np.array([a], np.float32)),
                }[dtype](a)
                ref[p : p + es] = r.view(np.uint8)
            tma.reduce_add(tm, coords, smem, off, mem)
        if dtype in ("u8", "u32"):
            assert np.array_equal(g, ref)
        else:  # NaN payloads may differ
            t = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
            f = (lambda v: tma.bf16_to_f32(v)) if dtype == "bf16" else (lambda v: v)
            k = len(g[base:]) // es * es
            x, y = f(g[base : base + k].view(t)), f(ref[base : base + k].view(t))
            assert np.array_equal(np.nan_to_num(x), np.nan_to_num(y)) and np.array_equal(
                np.isnan(x), np.isnan(y)
            )


def test_limits():
    """Negative coordinates, dims and strides beyond 32 bits, maps that must be refused."""
    g = np.arange(256, dtype=np.uint8)
    base = (-g.ctypes.data) % 16
    tm = tma.decode(tma.encode(g.ctypes.data + base, "u8", (16, 8), (16,), (16, 4)))
    smem = np.zeros(1024, np.uint8)
    tma.load(tm, (0, -2), smem, 0)
    assert (smem[:32] == 0).all() and np.array_equal(smem[32:64], g[base : base + 32])
    big = tma.decode(tma.encode(1 << 20, "bf16", (64, 1 << 31), (1 << 37,), (64, 2), 128))
    assert big.dims == (64, 1 << 31) and big.strides == (2, 1 << 37)
    for bad in (
        (8, "u8", (16, 8), (16,), (16, 4)),
        (16, "bf16", (64, 8), (128,), (64, 4), 64),
        (16, "u8", (8, 8), (16,), (8, 4)),
    ):
        try:
            tma.decode(tma.encode(*bad))
            raise SystemExit(f"accepted {bad}")
        except tma.TmaError:
            pass


def test_replace():
    d = tma.encode(4096, "bf16", (64, 100), (128,), (64, 8), 128)
    m = tma.decode(
        tma.replace(
            tma.replace(tma.replace(d, "global_address", 8192), "global_dim", 7, 1),
            "global_stride",
            256,
            0,
        )
    )
    assert (m.addr, m.dims, m.strides) == (8192, (64, 7), (2, 256))


def test_gather():
    rng = np.random.default_rng(0)
    g = rng.integers(0, 256, (40, 128), dtype=np.uint8)
    buf = np.zeros(40 * 128 + 16, np.uint8)
    o = (-buf.ctypes.data) % 16
    buf[o : o + 40 * 128] = g.reshape(-1)
    tm = tma.decode(tma.encode(buf.ctypes.data + o, "bf16", (64, 40), (128,), (64, 1), 128))
    smem = np.zeros(4096, np.uint8)
    assert tma.load_gather4(tm, (0, 7, 39, -1, 40), smem, 1024) == 512
    want = np.stack([g[7], g[39], 0 * g[0], 0 * g[0]])
    got = smem[tma.swizzle_address(1024 + np.arange(512), 128)].reshape(4, 128)
    assert np.array_equal(got, want)


def cute_layouts():
    return run_program("printed_smem_layouts.py")


def test_cute_layouts():
    """A (rows, K) operand loaded box by box lands where CuTe's layout looks for it."""
    rng = np.random.default_rng(2)
    n = 0
    for es, kmajor, rows, k, text in cute_layouts():
        sw, shape, stride = parse(text)
        if sw == (2, 5, 2):  # 128-byte swizzle of 32-byte pieces (tf32, MN-major): not modelled
            continue
        width = {None: 0, (1, 4, 3): 32, (2, 4, 3): 64, (3, 4, 3): 128}[sw]
        mat = rng.integers(0, 256, (rows, k, es), dtype=np.uint8)
        mem = np.ascontiguousarray(
            mat if kmajor else mat.transpose(1, 0, 2)
        )  # the global tensor: contiguous in K or in M/N
        buf = np.zeros(mem.nbytes + 16, np.uint8)
        o = (-buf.ctypes.data) % 16
        buf[o : o + mem.nbytes] = mem.reshape(-1)
        inner, outer = (k, rows) if kmajor else (rows, k)
        w = min(width // es, inner)  # one box: a swizzle span wide, all of the other extent
        tm = tma.decode(
            tma.encode(
                buf.ctypes.data + o,
                "bf16" if es == 2 else "f32",
                (inner, outer),
                (inner * es,),
                (w, outer),
                width,
            )
        )
        smem = np.zeros(1 << 18, np.uint8)
        elems, _ = element_offsets(text)
        stages = elems.shape[-1]
        base = 2048
        for stage in range(stages):
            flat = elems[..., stage].reshape(-1)
            start = int(flat.min()) * es
            for j in range(inner // w):
                tma.load(tm, (j * w, 0), smem, base + start + j * w * outer * es)
        addr = byte_offsets(text, es, base)
        for stage in range(stages):
            a = addr[..., stage]
            if (
                len(shape) == 3
            ):  # sm90: (rows), (k), (1, stages): mode 2 was flattened with its size-1 part
                a = a.reshape(rows, k)
            else:  # sm100: ((rows, i), 1, k/i), i = 32 bytes: first mode flattened rows fastest
                a = a.reshape(32 // es, rows, -1).transpose(1, 2, 0).reshape(rows, k)
            assert a.shape == (rows, k), (text, a.shape)
            got = smem[a[..., None] + np.arange(es)]
            assert np.array_equal(got, mat), (text, stage)
        n += 1
    print("CuTe layouts checked:", n)
    assert n >= 40


def test_addresses_wrap():
    """The base of a view lies before address 0 if its first row in use is far behind it."""
    memory = np.arange(64, dtype=np.uint8)
    address, stride, row = 0x3E07_0680, 1 << 32, 3
    base = address - row * stride
    assert base < 0
    for kept in (base % 2**tma.ADDRESS_BITS, base % 2**64):  # as CuTe DSL writes it, and whole
        view = tma.decode(tma.encode(kept, "u8", [64, 8], [stride], [64, 1]))

        def mem(found, count):
            assert (found, count) == (address, 64)
            return memory

        smem = np.zeros(64, np.uint8)
        tma.load(view, [0, row], smem, 0, mem)
        assert np.array_equal(smem, memory)
