"""wgmma.mma_async and mma.sync of a warp: decoding of the instruction; c/matrices.c computes.

One warp computes its own 16 rows of m64nNk(32 bytes); the four warps of the warpgroup need no
exchange. Types f16, bf16, tf32, e4m3, e5m2; f32 or f16 accumulators; A from shared memory or
registers; all swizzles, both majors.
"""

import re

import numpy as np

from . import interpreter
from .operands import Vec
from .ptx_types import Unsupported

TYPE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4}


def status(m, cta, st, ins, what):
    """report the bits returned by the operand decoder"""
    for bit, msg in (
        (1, "read of never-written shared memory"),
        (2, "async-proxy read of shared memory that was written without a fence.proxy.async"),
        (4, "shared address out of range"),
    ):
        if st & bit:
            m.warn(f"wgmma operand {what}: {msg}", ins)


def make_wgmma(m, p, ins):
    mods, a = ins.mods, ins.args
    shape = next(x for x in mods if re.fullmatch(r"m64n\d+k\d+", x))
    N = int(re.match(r"m64n(\d+)k", shape)[1])
    i = mods.index(shape)
    types = mods[i + 1 :]
    if (
        len(types) < 3
        or types[1] not in TYPE
        or types[2] not in TYPE
        or types[0] not in ("f32", "f16")
    ):
        raise Unsupported("wgmma types")
    ty, tyb = TYPE[types[1]], TYPE[types[2]]
    half = types[0] == "f16"
    d = list(a[0])
    if len(d) != (N // 4 if half else N // 2):
        raise Unsupported("number of accumulator registers")
    drow = np.array([p.dst(x, 4) for x in d], np.int32)
    rs = isinstance(a[1], Vec)
    aregs = [p.src(x, 4) for x in a[1]] if rs else None
    adesc = None if rs else p.src(a[1], 8)
    bdesc = p.src(a[2], 8)
    sd = a[3]
    sdp = p.pred(sd)
    neg = getattr(sd, "neg", False)
    imms = [x.value for x in a[4:]]
    imms += [1, 1][len(imms) :] if len(imms) < 2 else []
    sa, sb = imms[0], imms[1]
    tr = imms[2:]
    ta = tb = 0
    if tr:
        ta, tb = (0, tr[0]) if rs else (tr[0], tr[1])
    lib = interpreter.lib()
    dptr = drow.ctypes.data
    p.keep = getattr(p, "keep", [])
    p.keep.append(drow)
    run = lib.wgmma

    def wgmma(W, mask):
        if mask != 0xFFFFFFFF:
            m.fail(W, ins, "wgmma with inactive lanes")
        cta = W.cta
        bd = int(W.v64[bdesc >> 3])
        ad = 0 if rs else int(W.v64[adesc >> 3])
        for x in (ad, bd):
            if x >> 49 & 7:
                m.fail(W, ins, "descriptor base offset is not modelled")
        scaled = int(W.P[sdp]) & 1
        if neg:
            scaled ^= 1
        if rs:
            fr = np.concatenate([W.v32[o >> 2 : (o >> 2) + 32] for o in aregs])
            frp = fr.ctypes.data
        else:
            fr, frp = None, None
        Rp, wg = W.c.R, W.index & 3
        sm, sh = cta.smem.ctypes.data, cta.shadow.ctypes.data
        size = m.smem_size

        def go():
            st = run(
                Rp, dptr, N, ty, tyb, half, frp, ad, bd, ta, tb, sa, sb, scaled, sm, sh, size, wg
            )
            if st:
                status(m, cta, st & 15, ins, "A")
                status(m, cta, st >> 4, ins, "B")
            return fr

        if m.delay and (W.wg or any(W.wg_groups) or m.late()):  # in order
            W.wg.append(go)
        else:
            go()

    return wgmma


def make_mma(m, p, ins):
    """mma.sync.aligned.m16n8k16/k8.row.col.f32.(bf16|f16).(bf16|f16).f32"""
    mods, a = ins.mods, ins.args
    if (
        not ({"m16n8k16", "m16n8k8"} & set(mods))
        or mods[-1] != "f32"
        or mods[-2] not in ("f16", "bf16")
        or "row" not in mods
    ):
        return None
    K = 16 if "m16n8k16" in mods else 8
    arr = [
        np.array([p.dst(x, 4) if k == 0 else p.src(x, 4) for x in a[k]], np.int32) for k in range(4)
    ]
    p.keep = getattr(p, "keep", [])
    p.keep.append(arr)
    ptrs = [x.ctypes.data for x in arr]
    ty = TYPE[mods[-2]]
    lib = interpreter.lib()

    def mma(W, mask):
        lib.mma16816(W.c.R, *ptrs, ty, K, 0)

    return mma
