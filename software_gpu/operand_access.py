"""Values of operands, in a handler: of one lane, or as an instruction of one thread gives them."""

import numpy as np

from .operands import Reg
from .ptx_types import SIZE, Unsupported
from .state import SMEM_MAX


def reader(p, x, size):
    """(warp, lane) -> value of an operand"""
    o = p.src(x, size, exact=False) if not isinstance(x, Reg) else p.src(x, SIZE[x.type])
    size = SIZE[x.type] if isinstance(x, Reg) else size
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
