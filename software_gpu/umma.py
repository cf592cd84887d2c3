"""Tensor memory and the matrix products of tcgen05 (sm_100a), on numpy arrays.

Tensor memory (TMEM) of a CTA is np.uint32[128, 512]: [lane, column]. An address is
lane << 16 | column. The functions here are pure: arrays in, arrays out or changed. tcgen05.py maps
PTX instructions onto them.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

LANES, COLUMNS = 128, 512


class UmmaError(Exception):
    pass


def new_tmem() -> np.ndarray:
    return np.zeros((LANES, COLUMNS), np.uint32)


SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}


@dataclasses.dataclass(frozen=True)
class SmemDesc:
    start: int  # bytes
    lbo: int  # bytes
    sbo: int  # bytes
    base_offset: int
    swizzle: int  # bytes: 0, 32, 64, 128


def decode_smem_desc(d: int) -> SmemDesc:
    """64-bit shared-memory matrix descriptor."""
    if d >> 46 & 7 != 1:
        raise UmmaError(f"smem descriptor {d:#018x}: bits 46-48 are {d >> 46 & 7}, not 1")
    if d >> 61 not in SWIZZLES:
        raise UmmaError(f"smem descriptor {d:#018x}: swizzle mode {d >> 61} is not modelled")
    if d >> 52 & 1:
        raise UmmaError(
            f"smem descriptor {d:#018x}: absolute leading-dimension mode is not modelled"
        )
    if d >> 53 & 0xFF or d >> 14 & 3 or d >> 30 & 3:
        raise UmmaError(f"smem descriptor {d:#018x}: reserved bits are set")
    r = SmemDesc(
        (d & 0x3FFF) << 4,
        (d >> 16 & 0x3FFF) << 4,
        (d >> 32 & 0x3FFF) << 4,
        d >> 49 & 7,
        SWIZZLES[d >> 61],
    )
    if r.base_offset:
        raise UmmaError(f"smem descriptor {d:#018x}: base offset {r.base_offset} is not modelled")
    return r


@dataclasses.dataclass(frozen=True)
class InstrDesc:
    m: int
    n: int
    d_type: str
    a_type: str
    b_type: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


def decode_idesc(d: int, kind: str = "f16") -> InstrDesc:
    """32-bit instruction descriptor of kind::f16, kind::tf32, and kind::f8f6f4 of 8-bit types."""
    if kind not in ("f16", "tf32", "f8f6f4"):
        raise UmmaError(f"kind::{kind} is not modelled")
    if d & 0xF or d >> 6 & 1 or d >> 23 & 1 or d >> 29:
        raise UmmaError(
            f"instruction descriptor {d:#010x}: sparsity, saturation, shift or reserved bits "
            "are set"
        )
    ab = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}[kind]
    try:
        r = InstrDesc(
            (d >> 24 & 31) << 4,
            (d >> 17 & 63) << 3,
            {0: "f16", 1: "f32"}[d >> 4 & 3],
            ab[d >> 7 & 7],
            ab[d >> 10 & 7],
            bool(d >> 13 & 1),
            bool(d >> 14 & 1),
            bool(d >> 15 & 1),
            bool(d >> 16 & 1),
        )
    except KeyError:
        raise UmmaError(
            f"instruction descriptor {d:#010x}: data types not allowed for kind::{kind}"
        ) from None
    if kind == "tf32" and r.d_type != "f32":
        raise UmmaError("kind::tf32 accumulates in f32 only")
    return r


def check_shape(i: InstrDesc, cta_group: int) -> None:
    ok = {1: {64: 8, 128: 16}, 2: {128: 32, 256: 32}}[cta_group]
    if i.m not in ok or i.n % ok[i.m] or not ok[i.m] <= i.n <= 256:
        raise UmmaError(f"shape M={i.m} N={i.n} is not allowed for cta_group::{cta_group}")


@functools.lru_cache(maxsize=1024)
def operand_offsets(
    phase: int, lbo: int, sbo: int, swizzle: int, rows: int, k: int, es: int, mn_major: bool
) -> np.ndarray:
    """Byte offset of element (row, k) from the start address less `phase`.

    phase: start & 1023, which sets the phase of the swizzle. rows: the M or N extent. k: the K
    extent in elements. es: bytes of an element.
    """
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :] * np.ones((rows, 1), np.int64)
    if not mn_major:
        kb = c * es  # byte along K
        if swizzle == 0:  # 8 rows x 16 bytes core matrices
            off = (r % 8) * 16 + (r // 8) * sbo + (kb // 16) * lbo + kb % 16
        else:
            off = (r % 8) * swizzle + (r // 8) * sbo + kb
    else:
        rb = r * es  # byte along M or N
        if swizzle == 0:  # 16 bytes x 8 k core matrices
            off = rb % 16 + (c % 8) * 16 + (rb // 16) * sbo + (c // 8) * lbo
        else:
            off = rb % swizzle + (rb // swizzle) * lbo + (c % 8) * swizzle + (c // 8) * sbo
    a = off.astype(np.int64) + phase
    if swizzle:
        a ^= (a >> 7 & (swizzle // 16 - 1)) << 4
    return a


def smem_offsets(desc: SmemDesc, rows: int, k: int, es: int, mn_major: bool) -> np.ndarray:
    """Absolute byte offsets in shared memory of the elements of a (rows, k) operand."""
    phase = desc.start & 1023
    return (
        operand_offsets(phase, desc.lbo, desc.sbo, desc.swizzle, rows, k, es, mn_major)
        + (desc.start - phase)
    ) & 0x3FFFF


@functools.cache
def _small_floats(dtype: str) -> np.ndarray:
    """The float32 of each of the 256 values of an 8-bit type."""
    mant, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[dtype]
    v = np.arange(256)
    e, m = v >> mant & (127 >> mant), v & (1 << mant) - 1
    x = np.where(e == 0, m * 2.0 ** (1 - bias - mant), (1 + m / (1 << mant)) * 2.0 ** (e - bias))
    if dtype == "e4m3":
        x[v & 127 == 127] = np.nan
    else:
        x[e == 31] = np.where(m[e == 31] == 0, np.inf, np.nan)
    return np.where(v >> 7, -x, x).astype(np.float32)


KIND_K = {"f16": 16, "tf32": 8, "f8f6f4": 32}  # K of an instruction
ES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}  # bytes of an element


def _as_f32(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in ("e4m3", "e5m2"):
        return _small_floats(dtype)[raw]
    if dtype == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)  # tf32: the low 13 bits are not read


def smem_matrix(
    smem: np.ndarray, desc: SmemDesc, rows: int, k: int, dtype: str, mn_major: bool
) -> np.ndarray:
    """float32 (rows, k) matrix a shared-memory descriptor names."""
    es = ES[dtype]
    idx = smem_offsets(desc, rows, k, es, mn_major)
    if int(idx.max()) + es > smem.nbytes:
        raise UmmaError(
            f"operand at shared offset {desc.start:#x} runs past the end of shared memory"
        )
    return _as_f32(smem.view(f"u{es}")[idx // es], dtype)


def split_addr(taddr: int) -> tuple[int, int]:
    return taddr >> 16 & 0xFFFF, taddr & 0xFFFF


def d_map(m: int, n: int, cta_group: int):
    """Where one CTA's part of D sits: blocks of (lanes, first row, n offset, n count).

    D[row, noff + j] is [lanes[i], col + j].
    cta_group::1: of M=128 row r is in lane r; of M=64 rows 16w..16w+15 are in lanes 32w..32w+15.
    cta_group::2, rows counted inside this CTA's half: of M=256 row r is in lane r; of M=128 rows
    0-63 are there twice: lanes 0-63 hold the first half of the columns, lanes 64-127 the second.
    """
    if m == 128 and cta_group == 1 or m == 256:
        return [(np.arange(128), np.arange(128), 0, n)]
    if m == 64:
        r = np.arange(64)
        return [(r // 16 * 32 + r % 16, r, 0, n)]
    r = np.arange(64)
    return [(r, r, 0, n // 2), (r + 64, r, n // 2, n // 2)]


def tmem_a_matrix(
    tmem: np.ndarray, taddr: int, lanes: np.ndarray, k: int, dtype: str
) -> np.ndarray:
    """float32 (len(lanes), k): A operand in TMEM, 16-bit elements two to a column (even K in the
    low half), 8-bit ones four.
    """
    lane, col = split_addr(taddr)
    es = ES[dtype]
    w = np.ascontiguousarray(tmem[lanes + lane, col : col + k * es // 4])
    return _as_f32(w.view(f"u{es}"), dtype)


def mma(
    ctas,
    idesc: InstrDesc,
    d_addr: int,
    a,
    b: SmemDesc,
    accumulate: bool,
    disable=None,
    scale_d: int = 0,
    kind: str = "f16",
    check=None,
) -> None:
    """D = A @ B^T (+ D).

    ctas: [(smem, tmem)] of one CTA, or of the even and the odd CTA for cta_group::2.
    a: SmemDesc, or a TMEM address.
    disable: bool for each (CTA, lane), flat; a lane that is True is not written.
    check(cta_index, what, lanes, col, ncols): is told of accesses to TMEM; what is 'd-read',
    'd-write' or 'a-read'.
    """
    g = len(ctas)
    check_shape(idesc, g)
    k = KIND_K[kind]
    bs = [smem_matrix(s, b, idesc.n // g, k, idesc.b_type, idesc.b_mn_major) for s, _ in ctas]
    bm = np.concatenate(bs) if g == 2 else bs[0]
    if idesc.negate_b:
        bm = -bm
    dl, dc = split_addr(d_addr)
    for ci, (smem, tmem) in enumerate(ctas):
        a_smem = (
            smem_matrix(smem, a, idesc.m // g, k, idesc.a_type, idesc.a_mn_major)
            if isinstance(a, SmemDesc)
            else None
        )
        for lanes, rows, noff, nn in d_map(idesc.m, idesc.n, g):
            ln = lanes + dl
            width = nn if idesc.d_type == "f32" else nn
            if ln.max() >= LANES or dc + width > COLUMNS:
                raise UmmaError(f"D at {d_addr:#x} (M={idesc.m} N={idesc.n}) runs out of TMEM")
            if a_smem is not None:
                am = a_smem[rows]
            else:
                al, ac = split_addr(a)
                if check:
                    check(ci, "a-read", lanes + al, ac, k * ES[idesc.a_type] // 4)
                am = tmem_a_matrix(tmem, a, lanes, k, idesc.a_type)
            if idesc.negate_a:
                am = -am
            with np.errstate(all="ignore"):
                p = am @ bm[noff : noff + nn].T
                cols = slice(dc, dc + nn)
                if accumulate:
                    if check:
                        check(ci, "d-read", ln, dc, nn)
                    old = tmem[ln, cols]
                    old = (
                        old.view(np.float32)
                        if idesc.d_type == "f32"
                        else (old & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
                    )
                    p = p + (old * np.float32(2.0**-scale_d) if scale_d else old)
                new = (
                    p.astype(np.float32).view(np.uint32)
                    if idesc.d_type == "f32"
                    else p.astype(np.float16).view(np.uint16).astype(np.uint32)
                )
            keep = np.ones(len(ln), bool) if disable is None else ~disable[ci * LANES + ln]
            if check:
                check(ci, "d-write", ln[keep], dc, nn)
            tmem[ln[keep], cols] = new[keep]


@functools.lru_cache(maxsize=256)
def ldst_map(shape: str, num: int, split: int = 0):
    """(lane[32, R], column[32, R]) of register r of thread t, relative to the address.

    Columns are of 32 bits; with .pack::16b or .unpack::16b they are packed columns.
    """
    t = np.arange(32)[:, None]
    if shape == "32x32b":
        r = np.arange(num)[None, :]
        return t + 0 * r, r + 0 * t
    if shape == "16x32bx2":
        r = np.arange(num)[None, :]
        return t % 16 + 0 * r, r + (t // 16) * split
    if shape == "16x64b":
        r = np.arange(num)[None, :]
        return t // 4 + (t % 2) * 8 + 0 * r, t // 2 % 2 + 2 * r
    if shape == "16x128b":
        r = np.arange(2 * num)[None, :]
        return t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    if shape == "16x256b":
        r = np.arange(4 * num)[None, :]
        return t // 4 + 8 * (r % 4 // 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    raise UmmaError(f"TMEM access shape {shape} is not modelled")


def where_in_tmem(taddr, shape, num, warp, split=0, pack=False):
    lane, col = split_addr(taddr)
    base = 32 * (warp % 4)
    if not (lane == base or shape != "32x32b" and lane == base + 16):
        raise UmmaError(
            f"warp {warp} may access TMEM lanes {base}..{base + 31}, not lane {lane} with "
            f"shape {shape}"
        )
    lanes, c = ldst_map(shape, num, split)
    width = (int(c.max()) + 1) * (2 if pack else 1)
    if col + width > COLUMNS:
        raise UmmaError(
            f"TMEM access to columns {col}..{col + width - 1} runs past column {COLUMNS - 1}"
        )
    return lane + lanes, col, c


def ld(
    tmem, taddr: int, shape: str, num: int, warp: int, pack: bool = False, split: int = 0
) -> np.ndarray:
    """Registers of a warp's tcgen05.ld: uint32 (32 threads, R)."""
    lanes, col, c = where_in_tmem(taddr, shape, num, warp, split, pack)
    if not pack:
        return tmem[lanes, col + c]
    return tmem[lanes, col + 2 * c] & 0xFFFF | tmem[lanes, col + 2 * c + 1] << 16


def st(
    tmem,
    taddr: int,
    shape: str,
    num: int,
    warp: int,
    values: np.ndarray,
    unpack: bool = False,
    split: int = 0,
) -> None:
    lanes, col, c = where_in_tmem(taddr, shape, num, warp, split, unpack)
    if not unpack:
        tmem[lanes, col + c] = values
    else:
        tmem[lanes, col + 2 * c] = values & 0xFFFF
        tmem[lanes, col + 2 * c + 1] = values >> 16


def cp(tmem, smem, taddr: int, d: int, shape: str, multicast: str = "") -> None:
    """tcgen05.cp without format conversion.

    Shapes: 128x256b, 128x128b, 4x256b, 64x128b.warpx2 and 32x128b.warpx4. Rows of the source are
    K-major, of 32 or 16 bytes; row r goes to lane r, and to the copies that the warpx forms make.
    """
    desc = decode_smem_desc(d)
    rows, bits = int(shape.split("x")[0]), int(shape.split("x")[1][:-1])
    idx = smem_offsets(desc, rows, bits // 16, 2, False)
    words = np.ascontiguousarray(smem.view(np.uint16)[idx // 2]).view(np.uint32)
    lane, col = split_addr(taddr)
    r = np.arange(rows)
    if multicast == "":
        dst = [r]
    elif multicast == "warpx4":
        dst = [r + 32 * w for w in range(4)]
    elif multicast == "warpx2::02_13":
        dst = [r, (r + 64)]
    elif multicast == "warpx2::01_23":
        dst = [r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32]
    else:
        raise UmmaError(f"tcgen05.cp {shape}.{multicast} is not modelled")
    for x in dst:
        tmem[lane + x, col : col + bits // 32] = words
