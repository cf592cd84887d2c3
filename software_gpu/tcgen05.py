"""tcgen05 instructions: allocation of TMEM, loads and stores, products, commits, and their
checks.
"""

import functools

import numpy as np

from .launch_control import LAUNCH_CONTROL
from .operand_access import boolean, immediate, items
from .state import BLOCK
from .tensor_map_changes import change_tensor_map
from .umma import (
    COLUMNS,
    ES,
    KIND_K,
    LANES,
    SmemDesc,
    UmmaError,
    check_shape,
    cp,
    decode_idesc,
    decode_smem_desc,
    ld,
    mma,
    operand_offsets,
    split_addr,
    st,
    where_in_tmem,
)


def _st(cta) -> dict:
    s = cta.umma
    if "alloc" not in s:
        s.update(
            alloc={},
            permit=True,
            written=np.zeros((LANES, COLUMNS), bool),
            pending={},
            loads={},
            group=None,
            inflight=[],
            begun={"alloc": 0, "dealloc": 0},
            waits=set(),
            newest=None,
        )
    return s


def _race(ctx, cta, what, col, n, kinds):
    """Warn when TMEM columns are touched while an unfinished mma (delayed run) still reads or
    writes them.
    """
    for c0, c1, kind, line in _st(cta)["inflight"]:
        if kind in kinds and col < c1 and c0 < col + n:
            ctx.warn(
                f"{what} of TMEM columns that the unfinished tcgen05.mma of line {line} still "
                f"{'writes' if kind == 'd' else 'reads'}"
            )
            return


def find_columns(alloc: dict[int, int], n: int) -> int | None:
    """Lowest free n-column block (aligned to n), given {start: columns}."""
    for c in range(0, COLUMNS - n + 1, n):
        if all(c + n <= s or s + w <= c for s, w in alloc.items()):
            return c
    return None


def finish_warp(machine, warp) -> None:
    """Called when a warp ends: complains about stores never waited for and, with the last warp,
    about TMEM left allocated.
    """
    s, last = _st(warp.cta), warp.prog.kernel.instrs[-1]
    if s["pending"].get(warp.index):
        machine.warn(
            f"a warp ended with tcgen05.st not followed by tcgen05.wait::st (warp {warp.index})",
            last,
        )
        _flush(s, warp.index)
    if s["loads"].get(warp.index):
        machine.warn(
            f"a warp ended with tcgen05.ld not followed by tcgen05.wait::ld (warp {warp.index})",
            last,
        )
    if s["alloc"] and all(w.done for w in warp.cta.warps):
        machine.warn(
            f"TMEM still allocated when the CTA ended: {s['alloc']} (first column: columns)", last
        )


def _allocated(ctx, cta, col, n, what):
    for s, w in _st(cta)["alloc"].items():
        if s <= col and col + n <= s + w:
            return
    ctx.error(
        f"{what}: TMEM columns {col}..{col + n - 1} are not inside one allocation "
        f"{_st(cta)['alloc']}"
    )


def _flush(s, warp):
    for _, _, fn in s["pending"].pop(warp, ()):
        fn()


def _group(mods) -> int:
    return 2 if "cta_group::2" in mods else 1


def execute(instr, ctx):
    """Run one tcgen05.* / clusterlaunchcontrol.* / tensormap.* instruction (see machine.Ctx).

    Returns machine.BLOCK(...) to wait.
    """
    m = instr.mods
    try:
        if m[0] == "clusterlaunchcontrol":
            return LAUNCH_CONTROL[m[1]](instr, ctx)
        if m[0] == "tensormap":
            return change_tensor_map(instr, ctx)
        f = _OPS.get(m[1])
        if f is None:
            ctx.error(f"{instr.op} is not modelled")
        return f(instr, ctx)
    except UmmaError as e:
        ctx.error(f"{instr.op}: {e}")


def _full(instr, ctx):
    if not np.all(ctx.mask):
        ctx.error(f"{instr.op} needs all 32 lanes of the warp")


def _peer(ctx):
    return ctx.cta_at(ctx.cta.rank ^ 1)


def _begins(ctx, what) -> bool:
    """Whether this is the first try of an alloc or dealloc, which may have to wait."""
    return what not in _st(ctx.cta)["waits"]


def _with_peer(instr, ctx, what):
    """An alloc or dealloc of a pair ends when both CTAs have begun theirs: BLOCK until then."""
    peer = _peer(ctx)
    s, of_peer = _st(ctx.cta), _st(peer)
    if _begins(ctx, what):
        s["begun"][what] += 1
        s["waits"].add(what)
    if of_peer["begun"][what] < s["begun"][what]:
        if peer.warps and all(w.done for w in peer.warps):
            ctx.error(f"tcgen05.{what} of cta_group::2: CTA rank {peer.rank} has ended without one")
        return BLOCK(f"tcgen05.{what} of CTA rank {peer.rank}")
    s["waits"].remove(what)
    return None


def _alloc(instr, ctx):
    _full(instr, ctx)
    s = _st(ctx.cta)
    n = immediate(ctx, instr.args[1])
    if n not in (32, 64, 128, 256, 512):
        ctx.error(f"tcgen05.alloc of {n} columns (a power of two from 32 to 512 is needed)")
    if not s["permit"]:
        ctx.error("tcgen05.alloc after relinquish_alloc_permit")
    g = _group(instr.mods)
    if s["group"] not in (None, g):
        ctx.error("tcgen05 instructions of one kernel must use one cta_group")
    s["group"] = g
    if g == 2 and not ctx.cta.cluster.bar_phase:
        ctx.error(
            "tcgen05.alloc of cta_group::2 before the CTAs of the cluster have met: "
            f"CTA rank {_peer(ctx).rank} may not have started"
        )
    if _begins(ctx, "alloc"):
        col = find_columns(s["alloc"], n)
        if col is None:
            return BLOCK(f"tcgen05.alloc of {n} columns: TMEM is full")
        s["alloc"][col] = n
        s["newest"] = col
        s["written"][:, col : col + n] = False
    if g == 2 and (waits := _with_peer(instr, ctx, "alloc")):
        return waits
    cta, off = ctx.peer(ctx.scalar(instr.args[0]))
    cta.smem[off : off + 4].view(np.uint32)[0] = s["newest"]
    ctx.mark_written(cta, off, 4)


def _dealloc(instr, ctx):
    _full(instr, ctx)
    s = _st(ctx.cta)
    lane, col = split_addr(ctx.scalar(instr.args[0]))
    n = immediate(ctx, instr.args[1])
    if lane or s["alloc"].get(col) != n:
        ctx.error(
            f"tcgen05.dealloc of {n} columns at lane {lane} column {col}: allocated are "
            f"{s['alloc']}"
        )
    if _group(instr.mods) == 2:
        if "alloc" in _st(_peer(ctx))["waits"]:
            ctx.error(
                "tcgen05.dealloc of cta_group::2 before the tcgen05.alloc of CTA rank "
                f"{_peer(ctx).rank} is complete"
            )
        if waits := _with_peer(instr, ctx, "dealloc"):
            return waits
    del s["alloc"][col]


def _relinquish(instr, ctx):
    _full(instr, ctx)
    _st(ctx.cta)["permit"] = False


def _nothing(instr, ctx):
    return None


def _wait(instr, ctx):
    _full(instr, ctx)
    s = _st(ctx.cta)
    if "wait::st" in instr.mods or "st" in instr.mods[2:3]:
        _flush(s, ctx.warp.index)
    else:
        for line, v, again in s["loads"].pop(ctx.warp.index, ()):
            if not np.array_equal(v, again()):
                ctx.warn(
                    f"TMEM that the tcgen05.ld of line {line} reads changed before its "
                    "tcgen05.wait::ld"
                )


def _shape_num(mods):
    shape = next(x for x in mods if x[:1].isdigit())
    num = int(next(x for x in mods if x[0] == "x" and x[1:].isdigit())[1:])
    return shape, num


def _ld(instr, ctx):
    _full(instr, ctx)
    shape, num = _shape_num(instr.mods)
    pack = "pack::16b" in instr.mods
    s = _st(ctx.cta)
    taddr = ctx.scalar(instr.args[1])
    split = immediate(ctx, instr.args[2]) if len(instr.args) > 2 else 0
    lanes, col, c = where_in_tmem(taddr, shape, num, ctx.warp.index, split, pack)
    w = (int(c.max()) + 1) * (2 if pack else 1)
    if any(c0 < col + w and col < c1 for c0, c1, _ in s["pending"].get(ctx.warp.index, ())):
        ctx.warn("tcgen05.ld of TMEM this warp stored to without a tcgen05.wait::st between")
        _flush(s, ctx.warp.index)
    _allocated(ctx, ctx.cta, col, w, instr.op)
    _race(ctx, ctx.cta, "tcgen05.ld", col, w, "d")
    if not s["written"][lanes, col + (2 * c if pack else c)].all():
        ctx.warn("tcgen05.ld of TMEM that was never written")
    regs = items(instr.args[0])
    regs = [instr.args[0]] if regs is None else regs
    if len(regs) != c.shape[1]:
        ctx.error(f"{instr.op}: {len(regs)} registers, {c.shape[1]} expected")

    def read():
        return ld(ctx.cta.tmem, taddr, shape, num, ctx.warp.index, pack, split)

    v = read()
    for r, reg in enumerate(regs):
        ctx.set(reg, np.ascontiguousarray(v[:, r]))
    if ctx.m.delay:  # hardware reads TMEM at any moment up to tcgen05.wait::ld
        s["loads"].setdefault(ctx.warp.index, []).append((instr.line, v, read))


def _store(instr, ctx):
    _full(instr, ctx)
    shape, num = _shape_num(instr.mods)
    unpack = "unpack::16b" in instr.mods
    s, warp, cta = _st(ctx.cta), ctx.warp.index, ctx.cta
    taddr = ctx.scalar(instr.args[0])
    split = immediate(ctx, instr.args[1]) if len(instr.args) > 2 else 0
    regs = items(instr.args[-1])
    regs = [instr.args[-1]] if regs is None else regs
    lanes, col, c = where_in_tmem(taddr, shape, num, warp, split, unpack)
    if len(regs) != lanes.shape[1]:
        ctx.error(f"{instr.op}: {len(regs)} registers, {lanes.shape[1]} expected")
    w = (int(c.max()) + 1) * (2 if unpack else 1)
    _allocated(ctx, cta, col, w, instr.op)
    _race(ctx, cta, "tcgen05.st", col, w, "da")
    v = np.stack([ctx.vals(r, np.uint32) for r in regs], axis=1)

    def run():
        st(cta.tmem, taddr, shape, num, warp, v, unpack, split)
        s["written"][lanes, col + (2 * c if unpack else c)] = True
        if unpack:
            s["written"][lanes, col + 2 * c + 1] = True

    s["pending"].setdefault(warp, []).append(
        (col, col + w, run)
    )  # takes effect at this warp's wait::st


def _pair(ctx, g):
    if g == 1:
        return [ctx.cta]
    r = ctx.cta.rank & ~1
    return [ctx.cta_at(r), ctx.cta_at(r | 1)]


def _mma(instr, ctx):
    mods, args = instr.mods, list(instr.args)
    if (
        "ws" in mods
        or "sp" in mods
        or any(x.startswith("block_scale") or x.startswith("scale_vec") for x in mods)
    ):
        ctx.error(f"{instr.op} is not modelled")
    if int(np.count_nonzero(ctx.mask)) != 1:
        ctx.warn(f"{instr.op} issued by {int(np.count_nonzero(ctx.mask))} lanes")
    kind = next(x for x in mods if x.startswith("kind::"))[6:]
    g = _group(mods)
    if g == 2 and ctx.cta.rank & 1:
        ctx.warn("tcgen05.mma.cta_group::2 issued by the odd CTA of the pair")
    d_addr = ctx.scalar(args[0]) & 0xFFFFFFFF
    a_mem = hasattr(args[1], "base")
    a = ctx.scalar(args[1]) & 0xFFFFFFFF if a_mem else decode_smem_desc(ctx.scalar(args[1]))
    b = decode_smem_desc(ctx.scalar(args[2]))
    i = decode_idesc(ctx.scalar(args[3]) & 0xFFFFFFFF, kind)
    check_shape(i, g)
    rest, disable = args[4:], None
    v = items(rest[0]) if rest else None
    if v is not None:
        words = np.array([immediate(ctx, x) & 0xFFFFFFFF for x in v], np.uint32)
        if len(words) != 4 * g:
            ctx.error(f"{instr.op}: {len(words)} disable-output-lane words, {4 * g} expected")
        disable = (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(-1)
        if not disable.any():
            disable = None
        rest = rest[1:]
    acc = boolean(ctx, rest[0]) if rest else True
    scale = immediate(ctx, rest[1]) if len(rest) > 1 else 0
    if a_mem and i.a_mn_major:
        ctx.error(f"{instr.op}: A in TMEM cannot be transposed")
    ctas = _pair(ctx, g)
    k, es = KIND_K[kind], ES[i.a_type]

    def check(ci, what, lanes, col, n):
        c = ctas[ci]
        _allocated(ctx, c, col, n, f"{instr.op} ({what})")
        w = _st(c)["written"]
        if what == "d-write":
            w[lanes, col : col + n] = True
        elif not w[lanes, col : col + n].all():
            ctx.warn(f"tcgen05.mma {what} of TMEM that was never written")

    n_cols = i.n // 2 if g == 2 and i.m == 128 else i.n
    dc = d_addr & 0xFFFF
    marks = [(dc, dc + n_cols, "d", instr.line)]
    if not isinstance(a, SmemDesc):
        marks.append((a & 0xFFFF, (a & 0xFFFF) + 8, "a", instr.line))
    for c in ctas:
        _st(c)["inflight"].extend(marks)

    def run():
        for c in ctas:
            for x in marks:
                _st(c)["inflight"].remove(x)
            for desc, rows, mn in ((a, i.m // g, i.a_mn_major), (b, i.n // g, i.b_mn_major)):
                if isinstance(desc, SmemDesc):
                    _check_smem(ctx, c, desc, rows, k, es, mn)
        try:
            mma([(c.smem, c.tmem) for c in ctas], i, d_addr, a, b, acc, disable, scale, kind, check)
        except UmmaError as e:
            ctx.error(f"{instr.op}: {e}")

    ctx.defer("mma", run)


@functools.lru_cache(maxsize=1024)
def _runs(phase, lbo, sbo, swizzle, rows, k, es, mn_major):
    """Contiguous runs an operand covers: int64 (offset, bytes) pairs."""
    x = np.unique(operand_offsets(phase, lbo, sbo, swizzle, rows, k, es, mn_major))
    cut = np.flatnonzero(np.diff(x) != es) + 1
    return np.array([(p[0], p[-1] - p[0] + es) for p in np.split(x, cut)], np.int64)


def _check_smem(ctx, cta, d: SmemDesc, rows, k, es, mn):
    phase = d.start & 1023
    runs = _runs(phase, d.lbo, d.sbo, d.swizzle, rows, k, es, mn)
    if hasattr(ctx, "check_runs"):
        return ctx.check_runs(cta, runs, d.start - phase)
    for off, n in runs.tolist():
        ctx.check_read(cta, d.start - phase + off, n)


def _cp(instr, ctx):
    mods = instr.mods
    if any(x.startswith(("b8x16", "b4x16", "b6x16")) for x in mods):
        ctx.error(f"{instr.op}: format conversion is not modelled")
    shape = next(x for x in mods if x[:1].isdigit())
    mc = next((x for x in mods if x.startswith("warpx")), "")
    taddr, d = ctx.scalar(instr.args[0]), ctx.scalar(instr.args[1])
    ctas = _pair(ctx, _group(mods))

    def run():
        for c in ctas:
            cp(c.tmem, c.smem, taddr, d, shape, mc)
            col = taddr & 0xFFFF
            _st(c)["written"][:, col : col + 8] = True

    ctx.defer("mma", run)


def _commit(instr, ctx):
    addr = ctx.scalar(instr.args[0])
    if int(np.count_nonzero(ctx.mask)) != 1:
        ctx.warn(f"{instr.op} issued by {int(np.count_nonzero(ctx.mask))} lanes")
    cta, off = ctx.peer(addr)
    if "multicast::cluster" in instr.mods:
        mask = immediate(ctx, instr.args[1]) & 0xFFFF
        targets = [ctx.cta_at(r) for r in range(16) if mask >> r & 1]
    else:
        targets = [cta]

    def run():
        for c in targets:
            ctx.mbar_arrive(c, off, 1)

    ctx.defer("mma", run)


_OPS = {
    "alloc": _alloc,
    "dealloc": _dealloc,
    "relinquish_alloc_permit": _relinquish,
    "ld": _ld,
    "st": _store,
    "wait": _wait,
    "wait::ld": _wait,
    "wait::st": _wait,
    "fence": _nothing,
    "fence::before_thread_sync": _nothing,
    "fence::after_thread_sync": _nothing,
    "mma": _mma,
    "cp": _cp,
    "commit": _commit,
}
