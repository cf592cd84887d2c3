"""Handlers of mbarriers, named barriers and cluster barriers."""

from typing import NamedTuple

from .context import Ctx, lanes_of
from .operand_access import address, first, is_uniform, place, reader, where_shared
from .operands import Mem, Pair, Sink
from .state import BLOCK, Cta, Mbar

ALL = 0xFFFFFFFF


def mbarrier(m, p, ins):
    make = {
        "init": mbarrier_init,
        "inval": mbarrier_inval,
        "arrive": mbarrier_arrive,
        "arrive_drop": mbarrier_arrive,
        "expect_tx": mbarrier_tx,
        "complete_tx": mbarrier_tx,
        "try_wait": mbarrier_wait,
        "test_wait": mbarrier_wait,
    }.get(ins.mods[1])
    return make and make(m, p, ins)


def mbarrier_init(m, p, ins):
    a = ins.args
    ad, cnt = address(p, a[0]), reader(p, a[1], 4)

    def init(W, mask):
        for lane in lanes_of(mask):
            cta, off = where_shared(m, W, ins, ad(W, lane))
            if off & 7:
                m.fail(W, ins, f"misaligned mbarrier {off:#x}")
            n = cnt(W, lane)
            if not 0 < n < 1 << 20:
                m.fail(W, ins, f"mbarrier arrival count {n}")
            cta.mbars[off] = Mbar(n, ins.line)
            cta.shadow[off : off + 8] = 1

    return init


def mbarrier_inval(m, p, ins):
    a = ins.args
    ad = address(p, a[0])

    def inval(W, mask):
        for lane in lanes_of(mask):
            cta, off = where_shared(m, W, ins, ad(W, lane))
            cta.mbars.pop(off, None)

    return inval


def mbarrier_arrive(m, p, ins):
    mods, a = ins.mods, ins.args
    what = ins.mods[1]
    has_dst = not isinstance(a[0], Mem)
    dst = a[0] if has_dst and not isinstance(a[0], Sink) else None
    rest = a[1:] if has_dst else a
    ad = address(p, rest[0])
    exp = "expect_tx" in mods
    num = reader(p, rest[1], 4) if len(rest) > 1 else None
    do = p.dst(dst, 8) if dst is not None else None

    def arrive(W, mask):
        cx = Ctx(m, p, ins, W, mask)
        if W.cta.umma and W.cta.umma.get("pending", {}).get(W.index):
            m.warn(
                "mbarrier.arrive while tcgen05.st of this warp is not waited for "
                "(tcgen05.wait::st)",
                ins,
            )
        for lane in lanes_of(mask):
            cta, off = where_shared(m, W, ins, ad(W, lane))
            b = cx.mbar(cta, off)
            if do is not None:
                W.v64[(do >> 3) + lane] = b.phase
            n = 1
            if num is not None:
                if exp:
                    b.tx += num(W, lane)
                else:
                    n = num(W, lane)
            if what == "arrive_drop":
                b.expected -= n
            cx.mbar_arrive(cta, off, n)

    return arrive


def mbarrier_tx(m, p, ins):
    a = ins.args
    what = ins.mods[1]
    ad, num = address(p, a[0]), reader(p, a[1], 4)

    def tx(W, mask):
        cx = Ctx(m, p, ins, W, mask)
        for lane in lanes_of(mask):
            cta, off = where_shared(m, W, ins, ad(W, lane))
            if what == "expect_tx":
                cx.mbar_expect_tx(cta, off, num(W, lane))
            else:
                cx.mbar_complete_tx(cta, off, num(W, lane))

    return tx


class Awaited(NamedTuple):
    """What lanes of a warp wait for, and in words why they do. A wait is tried many times, and asks
    for the same each time."""

    mbar: Mbar
    value: int
    by_parity: bool
    lanes: int
    cta: Cta
    offset: int

    def is_over(self):
        phase = self.mbar.phase & 1 if self.by_parity else self.mbar.phase
        return phase != self.value

    def is_there(self):
        return self.cta.mbars.get(self.offset) is self.mbar

    def __str__(self):
        return (
            f"mbarrier at {self.offset:#x} of CTA rank {self.cta.rank} for "
            f"{'parity' if self.by_parity else 'phase'} {self.value}; it is in {self.mbar}"
        )


def mbarrier_wait(m, p, ins):
    mods, a = ins.mods, ins.args
    d = p.pred(a[0].a if isinstance(a[0], Pair) else a[0])
    ad = address(p, a[1])
    par = "parity" in mods
    size = 4 if par else 8
    val = reader(p, a[2], size)
    places = place(p, a[1], 4), place(p, a[2], size)

    def awaited(W, mask):
        lanes = {}
        if mask == ALL and is_uniform(W, places):
            lanes[ad(W, 0), val(W, 0)] = mask
        else:
            for lane in lanes_of(mask):
                key = ad(W, lane), val(W, lane)
                lanes[key] = lanes.get(key, 0) | 1 << lane
        found = []
        for (at, v), mine in lanes.items():
            cta, off = where_shared(m, W, ins, at)
            b = cta.mbars.get(off)
            if b is None:
                m.fail(
                    W,
                    ins,
                    f"wait on shared offset {off:#x} of CTA rank {cta.rank}, where no "
                    "mbarrier is initialised",
                )
            if par and v > 1:
                m.fail(W, ins, f"parity {v}")
            found.append(Awaited(b, v, par, mine, cta, off))
        return found

    def wait(W, mask):
        tried, waits = W.state.get(ins.pc, (0, ()))
        if tried != mask or not all(x.is_there() for x in waits):
            waits = awaited(W, mask)
        ok = sum(x.lanes for x in waits if x.is_over())
        if not ok:
            if not W.allow_false and not (
                m.delay and m.rng.random() < 0.4
            ):  # try_wait may time out at any moment
                W.state[ins.pc] = mask, waits
                return BLOCK(waits[-1], soft=True)
            W.allow_false = False
            W.set_pred(d, mask, 0)
            W.state.pop(ins.pc, None)
            W.why[ins.pc] = waits[-1]
            return False
        W.set_pred(d, mask, ok)

    return wait


def barrier(m, p, ins):
    mods, a = ins.mods, ins.args
    if mods[1] == "cluster":
        return cluster_barrier(m, p, ins)
    kind = next((x for x in mods if x in ("sync", "arrive", "red")), None)
    if kind is None:
        return None
    if kind == "red":
        op = next(x for x in mods if x in ("popc", "and", "or"))
        d, rest, pr = a[0], a[1:-1], a[-1]
    else:
        rest = a
    bid = reader(p, rest[0], 4)
    cnt = reader(p, rest[1], 4) if len(rest) > 1 else None

    def bar(W, mask):
        cta = W.cta
        st = W.state.get(ins.pc)
        if st is None:
            i = bid(W, first(mask))
            n = cnt(W, first(mask)) if cnt else len(cta.warps) * 32
            if i > 15 or n % 32 or n == 0:
                m.fail(W, ins, f"barrier {i} with {n} threads")
            b = cta.bars.get(i)
            if b is None:
                b = cta.bars[i] = {
                    "gen": 0,
                    "n": None,
                    "arrived": 0,
                    "warps": [],
                    "val": [],
                    "res": {},
                }
            if b["n"] is None:
                b["n"] = n
            elif b["n"] != n:
                m.fail(W, ins, f"barrier {i}: thread count {n}, others gave {b['n']}")
            g = b["gen"]
            b["arrived"] += 32
            b["warps"].append(W.index)
            if kind == "red":
                v = int(W.P[p.pred(pr)])
                v = (~v if pr.neg else v) & mask
                b["val"].append((v, mask))
            m.epoch += 1
            if b["arrived"] > b["n"]:
                m.fail(
                    W,
                    ins,
                    f"barrier {i}: {b['arrived']} threads arrived, expected {b['n']} (warps "
                    f"{b['warps']})",
                )
            if b["arrived"] == b["n"]:
                if kind == "red" or b["val"]:
                    b["res"] = {g: list(b["val"])}
                b.update(gen=g + 1, n=None, arrived=0, warps=[], val=[])
                # a CTA barrier also publishes what the warps wrote; nothing to do, memory is
                # coherent
            if kind == "arrive":
                return None
            st = W.state[ins.pc] = (b, g, i)
        b, g, i = st
        if b["gen"] > g:
            if kind == "red":
                vs = b["res"].get(g, [])
                if op == "popc":
                    r = sum(bin(v).count("1") for v, _ in vs)
                    o = p.dst(d, 4) >> 2
                    for lane in lanes_of(mask):
                        W.v32[o + lane] = r
                else:
                    r = all(v == k for v, k in vs) if op == "and" else any(v for v, k in vs)
                    W.set_pred(p.pred(d), mask, bool(r))
            return None
        return BLOCK(
            f"barrier {i}: {b['arrived']} of {b['n']} threads arrived (warps {b['warps']})"
        )

    return bar


def cluster_barrier(m, p, ins):
    if "arrive" in ins.mods:

        def arrive(W, mask):
            C = W.cta.cluster
            key = (W.cta.rank, W.index)
            if key in C.bar_arrived:
                m.fail(W, ins, "second barrier.cluster.arrive without a wait")
            W.cl_arrived = C.bar_phase + 1
            C.bar_arrived.add(key)
            m.cluster_check(C)

        return arrive

    def wait(W, mask):
        C = W.cta.cluster
        if not W.cl_arrived:
            m.fail(W, ins, "barrier.cluster.wait without an arrive")
        if C.bar_phase >= W.cl_arrived:
            W.cl_arrived = 0
            return None
        return BLOCK(
            f"cluster barrier: {len(C.bar_arrived)} of {sum(not w.done for w in C.warps)} "
            "warps arrived"
        )

    return wait
