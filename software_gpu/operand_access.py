"""Values of operands, in a handler: of one lane, or as an instruction of one thread gives them."""

import numpy as np

from .operands import Mem, Reg
from .ptx_types import SIZE, Unsupported
from .state import SMEM_MAX


def place(p, x, size):
    """(offset in the registers of a warp, bytes) of an operand"""
    if isinstance(x, Mem):
        return p.addr(x)[:2]
    if isinstance(x, Reg):
        return p.src(x, SIZE[x.type]), SIZE[x.type]
    return p.src(x, size, exact=False), size


def is_uniform(W, places):
    """whether all 32 lanes have the same values there"""
    for o, size in places:
        values = W.R[o : o + 32 * size].tobytes()
        if values != values[:size] * 32:
            return False
    return True


def reader(p, x, size):
    """(warp, lane) -> value of an operand"""
    o, size = place(p, x, size)
    if size == 4:
        i = o >> 2
        return lambda W, lane: int(W.v32[i + lane])
    if size == 8:
        i = o >> 3
        return lambda W, lane: int(W.v64[i + lane])
    if size == 2:
        i = o >> 1
        return lambda W, lane: int(W.R.view(np.uint16)[i + lane])
    raise Unsupported("operand size")


def address(p, mem):
    """(warp, lane) -> address"""
    o, s, imm = p.addr(mem)
    if s == 4:
        i = o >> 2
        return lambda W, lane: (int(W.v32[i + lane]) + imm) & 0xFFFFFFFF
    i = o >> 3
    return lambda W, lane: (int(W.v64[i + lane]) + imm) & 0xFFFFFFFFFFFFFFFF


def first(mask):
    return (mask & -mask).bit_length() - 1


def where_shared(m, W, ins, addr):
    """(cta, offset) of a shared address"""
    a = addr & 0xFFFFFFFF
    r = a >> 24
    ctas = W.cta.cluster.ctas
    if r >= len(ctas) or (a & 0xFFFFFF) >= SMEM_MAX:
        m.fail(W, ins, f"bad shared address {addr:#x}")
    return ctas[r], a & 0xFFFFFF


def immediate(ctx, a) -> int:
    return int(a.value) if hasattr(a, "value") and not hasattr(a, "name") else ctx.scalar(a)


def boolean(ctx, a) -> bool:
    return bool(int(a.value)) if hasattr(a, "value") and not hasattr(a, "name") else ctx.true(a)


def items(a):
    for f in ("items", "operands", "elems", "args"):
        v = getattr(a, f, None)
        if v is not None and not callable(v):
            return list(v)
    return None
