"""Cluster launch control: taking over the work of a cluster that has not started."""

import numpy as np

from .operand_access import items


def _try_cancel(instr, ctx):
    """Ask for a cluster that has not started.

    The answer is {x, y, z, 1}, or zeros: none left. The machine may offer ctx.try_cancel() -> first
    CTA id or None; without it every request is declined.
    """
    get = getattr(ctx, "try_cancel", None)
    got = get() if get else None
    words = np.array([*got, 1] if got else [0, 0, 0, 0], np.uint32)
    cta, off = ctx.peer(ctx.scalar(instr.args[0]))
    mcta, moff = ctx.peer(ctx.scalar(instr.args[1]))
    all_ = any(x.startswith("multicast::cluster") for x in instr.mods)
    targets = [(c, c) for c in ctx.cta.cluster.ctas] if all_ else [(cta, mcta)]

    def run():
        for c, mc in targets:
            c.smem[off : off + 16] = words.view(np.uint8)
            ctx.mark_written(c, off, 16)
            ctx.mbar_complete_tx(mc, moff, 16)

    ctx.defer("clc", run)


def _query_cancel(instr, ctx):
    """Operands: result(s), then the 128-bit handle (low and high 64-bit halves through ctx.vals128
    where the machine has it).
    """
    lo, hi = ctx.vals128(instr.args[1])
    if any("is_canceled" in x for x in instr.mods):
        ctx.set(instr.args[0], (hi >> np.uint64(32)).astype(np.uint32) != 0)
        return
    xyz = [
        (lo & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        (lo >> np.uint64(32)).astype(np.uint32),
        (hi & np.uint64(0xFFFFFFFF)).astype(np.uint32),
    ]
    dst = items(instr.args[0])
    if dst is None:
        axis = next("xyz".index(x[-1]) for x in instr.mods if x.startswith("get_first_ctaid::"))
        ctx.set(instr.args[0], xyz[axis])
        return
    for reg, val in zip(dst, xyz, strict=False):
        if getattr(reg, "name", "") != "_":
            ctx.set(reg, val)


LAUNCH_CONTROL = {"try_cancel": _try_cancel, "query_cancel": _query_cancel}
