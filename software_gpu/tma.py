"""Tensor memory access (TMA): tensor maps, and tiles copied between global and shared memory.

The functions are pure. A tensor map is 128 bytes, of which host code of CuTe DSL 4.8 fills the
first 64 (read off maps of known tensors):
    u64[0]      global address in 57 bits, where one before address 0 (of a shifted view) wraps
    u32[2]      bit 1: set; 4-6: rank-1; 7-10: element type; 11-12: interleave; 13-14: swizzle;
                15: NaN fill; 17-18: L2 promotion; 21: the tensor is at least 128 KiB
    u32[3..6]   strides of dims 1..4, in 16 bytes, low 32 bits; u32[7]: their high 4 bits each
    u32[8..12]  dims 0..4, minus 1; bits 0-14 of u32[13]: element strides minus 1
    u8[55..59]  box 0..4, minus 1
Coordinates and dims are in PTX order: index 0 is the innermost, contiguous dimension.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import numpy as np

# type field -> (name, bytes); 3, 5, 8 and 11 are not written by CuTe DSL (s32 maps say u32) and are
# a guess
TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32.ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
    11: ("tf32", 4),
}
SWIZZLE = {0: 0, 1: 32, 2: 64, 3: 128}
ADDRESS_BITS = 57


class TmaError(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class TensorMap:
    addr: int
    dtype: str
    esize: int
    rank: int
    dims: tuple[int, ...]  # elements, innermost first
    strides: tuple[int, ...]  # bytes, innermost first; strides[0] == esize
    box: tuple[int, ...]
    estrides: tuple[int, ...]
    interleave: int
    swizzle: int  # bytes: 0, 32, 64, 128
    l2: int
    nan_fill: bool

    @property
    def tile(self) -> tuple[int, ...]:
        """Elements copied per dimension (element stride 0 is not used without interleave)."""
        return tuple(
            b if i == 0 else -(-b // e)
            for i, (b, e) in enumerate(zip(self.box, self.estrides, strict=True))
        )

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.tile)) * self.esize


def decode(desc: bytes) -> TensorMap:
    """Read a tensor map; raises TmaError for what hardware would refuse or what is not modelled."""
    d = bytes(desc[:64])
    addr, ctl = struct.unpack_from("<QI", d)
    rank, ty = (ctl >> 4 & 7) + 1, ctl >> 7 & 15
    if not ctl & 2 or rank > 5 or ty not in TYPES or ctl & ~0x26EFFF & 0xFFFFFFFF:
        raise TmaError(f"not a tensor map (control word {ctl:#010x})")
    name, es = TYPES[ty]
    lo, hi = struct.unpack_from("<4I", d, 12), struct.unpack_from("<I", d, 28)[0]
    strides = (es,) + tuple((lo[i] | (hi >> 4 * i & 15) << 32) << 4 for i in range(rank - 1))
    dims = tuple(x + 1 for x in struct.unpack_from("<5I", d, 32)[:rank])
    estr = struct.unpack_from("<I", d, 52)[0]
    tm = TensorMap(
        addr,
        name,
        es,
        rank,
        dims,
        strides,
        tuple(b + 1 for b in d[55 : 55 + rank]),
        tuple((estr >> 3 * i & 7) + 1 for i in range(rank)),
        ctl >> 11 & 3,
        SWIZZLE[ctl >> 13 & 3],
        ctl >> 17 & 3,
        bool(ctl >> 15 & 1),
    )
    if tm.interleave:
        raise TmaError("interleaved tensor maps are not modelled")
    if tm.nan_fill:
        raise TmaError("NaN fill is not modelled")
    if addr & 15:
        raise TmaError(f"global address {addr:#x} is not 16-byte aligned")
    inner = tm.box[0] * es
    if inner & 15:
        raise TmaError(f"inner box of {inner} bytes is not a multiple of 16")
    if tm.swizzle and inner > tm.swizzle:
        raise TmaError(f"inner box of {inner} bytes exceeds the {tm.swizzle}-byte swizzle")
    return tm


def encode(addr, dtype, dims, strides_bytes, box, swizzle=0, estrides=None) -> bytes:
    """Build a tensor map (for tests). strides_bytes: of dims 1.. (rank-1 values)."""
    r = len(dims)
    ty = {v[0]: k for k, v in TYPES.items()}[dtype]
    w = bytearray(128)
    struct.pack_into(
        "<QI",
        w,
        0,
        addr,
        2 | (r - 1) << 4 | ty << 7 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 13 | 2 << 17,
    )
    hi = 0
    for i, s in enumerate(strides_bytes):
        struct.pack_into("<I", w, 12 + 4 * i, s >> 4 & 0xFFFFFFFF)
        hi |= (s >> 36 & 15) << 4 * i
    struct.pack_into("<I", w, 28, hi)
    e = 0
    for i in range(r):
        struct.pack_into("<I", w, 32 + 4 * i, dims[i] - 1)
        e |= ((estrides[i] if estrides else 1) - 1) << 3 * i
    struct.pack_into("<I", w, 52, e)
    for i in range(r):
        w[55 + i] = box[i] - 1
    return bytes(w)


def replace(desc, field: str, value: int, index: int = 0) -> bytes:
    """tensormap.replace.tile: desc with one field changed (PTX field names)."""
    w = bytearray(desc)
    if field == "global_address":
        struct.pack_into("<Q", w, 0, value)
    elif field == "global_dim":  # the instruction takes the dim itself
        struct.pack_into("<I", w, 32 + 4 * index, value - 1 & 0xFFFFFFFF)
    elif field == "global_stride":  # bytes
        struct.pack_into("<I", w, 12 + 4 * index, value >> 4 & 0xFFFFFFFF)
        (hi,) = struct.unpack_from("<I", w, 28)
        struct.pack_into("<I", w, 28, hi & ~(15 << 4 * index) | (value >> 36 & 15) << 4 * index)
    elif field == "box_dim":
        w[55 + index] = value - 1 & 255
    else:
        raise TmaError(f"tensormap.replace of {field} is not modelled")
    return bytes(w)


def swizzle_address(addr, swizzle: int):
    """Shared-memory address bits after the swizzle (addr: int or integer array, absolute shared
    offset).
    """
    if swizzle == 0:
        return addr
    return addr ^ ((addr >> 7 & (swizzle // 16 - 1)) << 4)


def _smem_index(tm: TensorMap, off: int, nbytes: int) -> np.ndarray | slice:
    """Byte positions in shared memory of the packed box, by 16-byte pieces: array (nbytes/16, 16),
    or a slice.
    """
    if off & 127:
        raise TmaError(f"shared address {off:#x} of a TMA tile is not 128-byte aligned")
    if not tm.swizzle:
        return slice(off, off + nbytes)
    a = swizzle_address(off + 16 * np.arange(nbytes // 16, dtype=np.int64), tm.swizzle)
    return a[:, None] + np.arange(16)


def raw_memory(addr: int, nbytes: int) -> np.ndarray:
    """Default global memory: any address of this process, unchecked."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr))


def _region(tm: TensorMap, coords, mem):
    """(tile slices, strided view of the elements in bounds), or (None, None) if there are none.

    Both are indexed outermost dimension first and end in a byte axis.
    """
    if len(coords) != tm.rank:
        raise TmaError(f"{len(coords)} coordinates for a rank-{tm.rank} tensor map")
    tile = tm.tile
    lo_off, hi_off, shape, steps, where = 0, 0, [], [], []
    for i in range(tm.rank):
        c, e = int(coords[i]), (tm.estrides[i] if i else 1)
        first = max(0, -(c // e)) if c < 0 else 0  # first tile index with coordinate >= 0
        while c + first * e < 0:
            first += 1
        last = min(tile[i] - 1, (tm.dims[i] - 1 - c) // e)
        if last < first:
            return None, None
        lo_off += (c + first * e) * tm.strides[i]
        hi_off += (c + last * e) * tm.strides[i]
        shape.append(last - first + 1)
        steps.append(e * tm.strides[i])
        where.append(slice(first, last + 1))
    view = mem((tm.addr + lo_off) & (2**ADDRESS_BITS - 1), hi_off - lo_off + tm.esize)
    v = np.lib.stride_tricks.as_strided(
        view, shape=tuple(shape[::-1]) + (tm.esize,), strides=tuple(steps[::-1]) + (1,)
    )
    return tuple(where[::-1]), v


def load(tm: TensorMap, coords, smem: np.ndarray, off: int, mem=raw_memory) -> int:
    """Global to shared tile copy; out-of-bounds elements become zero.

    Returns the bytes completed: always the full box.
    """
    tile = np.zeros(tm.tile[::-1] + (tm.esize,), np.uint8)
    where, v = _region(tm, coords, mem)
    if where is not None:
        tile[where] = v
    n = tm.nbytes
    idx = _smem_index(tm, off, n)
    smem[idx] = tile.reshape(-1) if isinstance(idx, slice) else tile.reshape(-1, 16)
    return n


def read_tile(tm: TensorMap, smem: np.ndarray, off: int) -> np.ndarray:
    """The box in shared memory, unswizzled: uint8 array (outermost..innermost, esize)."""
    return np.ascontiguousarray(smem[_smem_index(tm, off, tm.nbytes)]).reshape(
        tm.tile[::-1] + (tm.esize,)
    )


def store(tm: TensorMap, coords, smem: np.ndarray, off: int, mem=raw_memory) -> int:
    """Shared to global tile copy; out-of-bounds elements are dropped.

    Returns the bytes read from shared memory.
    """
    tile = read_tile(tm, smem, off)
    where, v = _region(tm, coords, mem)
    if where is not None:
        v[...] = tile[where]
    return tm.nbytes


def _gather(tm, coords, fn, smem, off, mem):
    """tile::gather4 / scatter4: coords = (column, row0..row3), a rank-2 map whose box has one
    row.
    """
    if tm.rank != 2 or tm.box[1] != 1 or len(coords) != 5:
        raise TmaError("gather4/scatter4 needs a rank-2 map with a one-row box and 5 coordinates")
    four = dataclasses.replace(tm, box=(tm.box[0], 4), estrides=(1, 1))
    tile = (
        np.zeros((4, tm.box[0], tm.esize), np.uint8) if fn == "load" else read_tile(four, smem, off)
    )
    for r in range(4):
        where, v = _region(tm, (coords[0], coords[1 + r]), mem)
        if where is None:
            continue
        if fn == "load":
            tile[r : r + 1][where] = v
        else:
            v[...] = tile[r : r + 1][where]
    if fn == "load":
        idx = _smem_index(four, off, four.nbytes)
        smem[idx] = tile.reshape(-1) if isinstance(idx, slice) else tile.reshape(-1, 16)
    return four.nbytes


def load_gather4(tm, coords, smem, off, mem=raw_memory):
    return _gather(tm, coords, "load", smem, off, mem)


def store_scatter4(tm, coords, smem, off, mem=raw_memory):
    return _gather(tm, coords, "store", smem, off, mem)


def bf16_to_f32(x):
    return (np.asarray(x, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest even; NaN stays NaN (0x7FFF)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), r)


_NP = {
    "u8": "u1",
    "u16": "u2",
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f16": "f2",
    "f32": "f4",
    "f32.ftz": "f4",
    "f64": "f8",
    "tf32": "f4",
    "bf16": "u2",
}


def reduce_elements(dtype: str, op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Elementwise reduction of uint8 arrays (..., esize); returns uint8 (..., esize)."""
    shape = old.shape
    t = np.dtype(_NP[dtype])
    a, b = (
        np.ascontiguousarray(old).reshape(-1).view(t),
        np.ascontiguousarray(new).reshape(-1).view(t),
    )
    if op in ("and", "or", "xor"):
        r = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](a, b)
    elif op == "inc":
        r = np.where(a >= b, 0, a + 1).astype(t)
    elif op == "dec":
        r = np.where((a == 0) | (a > b), b, a - 1).astype(t)
    else:
        f = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
        with np.errstate(all="ignore"):
            if dtype == "bf16":
                r = f32_to_bf16(f(bf16_to_f32(a), bf16_to_f32(b)))
            elif dtype == "f16":
                r = f(a.astype(np.float32), b.astype(np.float32)).astype(np.float16)
            else:
                r = f(a, b).astype(t)
    return r.view(np.uint8).reshape(shape)


def reduce(
    tm: TensorMap, coords, smem: np.ndarray, off: int, op: str = "add", mem=raw_memory
) -> int:
    """cp.reduce.async.bulk.tensor: in-bounds global elements become global <op> shared."""
    tile = read_tile(tm, smem, off)
    where, v = _region(tm, coords, mem)
    if where is not None:
        v[...] = reduce_elements(tm.dtype, op, v, tile[where])
    return tm.nbytes


def reduce_add(tm: TensorMap, coords, smem: np.ndarray, off: int, mem=raw_memory) -> int:
    return reduce(tm, coords, smem, off, "add", mem)
