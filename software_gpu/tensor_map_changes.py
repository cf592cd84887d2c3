"""Tensor maps that a kernel changes: tensormap.replace and tensormap.cp_fenceproxy."""

import numpy as np

from . import tma
from .operand_access import immediate


def change_tensor_map(instr, ctx):
    """tensormap.replace.tile.* (map in shared memory) and tensormap.cp_fenceproxy (shared to
    global, 128 bytes).
    """

    addr = ctx.scalar(instr.args[0])
    if instr.mods[1] == "cp_fenceproxy":
        cta, off = ctx.peer(ctx.scalar(instr.args[1]))
        ctx.m.mem(addr, 128, ctx.warp, instr)[:] = cta.smem[off : off + 128]
        return
    if instr.mods[1] != "replace" or not any(x.startswith("shared") for x in instr.mods):
        ctx.error(f"{instr.op} is not modelled")
    field = instr.mods[3]
    cta, off = ctx.peer(addr)
    indexed = len(instr.args) > 2
    value = immediate(ctx, instr.args[-1])
    try:
        new = tma.replace(
            cta.smem[off : off + 128].tobytes(),
            field,
            value,
            immediate(ctx, instr.args[1]) if indexed else 0,
        )
    except tma.TmaError as e:
        ctx.error(f"{instr.op}: {e}")
    cta.smem[off : off + 128] = np.frombuffer(new, np.uint8)
    ctx.mark_written(cta, off, 128)
