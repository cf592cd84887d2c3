"""Which warp runs next: turns, delays, slow roles; deadlocks and what they look like.

Several groups of lanes of one warp may be at different places; the lowest that can run goes first,
so divergent code reconverges.
"""

import collections

from . import interpreter
from .state import BLOCK, Deadlock, SimError
from .tcgen05 import finish_warp


class Scheduler:
    """Runs the warps of the active clusters in turns. Its state is that of Machine."""

    def schedule(self):
        """run the active clusters until one finishes or a new one is admitted"""
        idle = falses = 0
        rng, hold = self.rng, bool(self.slow)
        while True:
            progress = spinning = finished = False
            n0 = self.executed
            for C in self.active:
                alive = False
                warps = C.warps
                if self.delay:
                    warps = warps[:]
                    rng.shuffle(warps)
                for W in warps:
                    if W.done:
                        continue
                    if W.cta.starts_in or (hold and self.is_slow(W)):
                        alive = True
                        continue
                    e = self.epoch
                    r = self.step(
                        W,
                        50
                        if self.is_slow(W)
                        else rng.choice((20, 200, 2000, self.budget))
                        if self.delay
                        else self.budget,
                    )
                    if self.epoch != e:
                        progress = True
                    if r == interpreter.BUDGET:
                        spinning = True
                    if W.done:
                        progress = True
                    else:
                        alive = True
                    if self.delay and self.pending and rng.random() < 0.03:
                        self.run_pending()
                for cta in C.ctas:
                    if cta.starts_in:
                        cta.starts_in -= 1
                        progress = True
                if not alive:
                    finished = True
            if finished:
                for C in [c for c in self.active if all(w.done for w in c.warps)]:
                    while any(k[0].cta.cluster is C for k, _ in self.pending):
                        self.run_pending(
                            next(
                                i for i, (k, _) in enumerate(self.pending) if k[0].cta.cluster is C
                            )
                        )
                    for cta in C.ctas:
                        cta.warps = []
                    self.active.remove(C)
                return
            if self.max_instructions and self.executed > self.max_instructions:
                raise SimError(self.report("instruction limit reached"))
            if progress:
                idle = falses = 0
                hold = bool(self.slow)
                continue
            if self.pending:
                self.run_pending()
                hold = bool(self.slow)
                continue
            if hold:
                hold = False
                continue
            early = [cta for C in self.active for cta in C.ctas if cta.is_early and _waits(cta)]
            if early:
                for cta in early:
                    cta.is_early = False
                continue
            idle += self.executed - n0
            if spinning and idle < 1_000_000:
                continue
            soft = [W for C in self.active for W in C.warps if not W.done and W.soft]
            if soft and falses < 3:
                falses += 1
                for W in soft:
                    W.allow_false = True
                continue
            if self.todo and len(self.active) < self.resident + self.spare:
                self.admit()
                idle = falses = 0
                continue
            if spinning and idle < 20_000_000:
                continue
            raise Deadlock(
                self.report(
                    "livelock: warps only spin" if spinning else "deadlock: no warp can proceed"
                )
            )

    def is_slow(self, W):
        slow = self.slow
        return bool(slow) and (W.index in slow or (W.cta.rank, W.index) in slow)

    def step(self, W, budget):
        c = W.c
        c.blocked = 0
        starved = (
            W.starved & c.alive
        )  # lanes that used up a whole budget let the other lanes of the warp go first
        W.starved = 0
        if starved == c.alive:
            starved = 0
        c.blocked = starved
        W.soft = False
        i0 = c.icount
        try:
            return self.step1(W, c, budget, starved)
        finally:
            self.executed += c.icount - i0

    def step1(self, W, c, budget, starved):
        run, ptr = self.run, W.ptr
        hs = W.prog.handlers
        st0 = c.stores
        while True:
            r = run(ptr, self.cpp_early if W.cta.is_early else self.cpp, budget)
            if r == interpreter.TRAP:
                pc = c.trap_pc
                res = hs[pc](W, c.mask)
                if res is None:
                    self.epoch += 1
                    self.traps[W.prog.kernel.instrs[pc].op] += 1
                    if W.state or W.why:
                        W.state.pop(pc, None)
                        W.why.pop(pc, None)
                    c.resume = 1
                    if self.delay and self.rng.random() < 0.15:  # another warp may get in here
                        return interpreter.BUDGET
                elif type(res) is BLOCK:
                    W.why[pc] = res.reason
                    W.soft |= res.soft
                    c.blocked |= c.group
                else:
                    c.resume = 1  # done, but no progress (a try_wait that returned false)
            elif r == interpreter.BUDGET:
                if c.stores != st0:
                    self.epoch += 1
                if c.group != c.alive:
                    W.starved = c.group
                return r
            elif r == interpreter.EXIT:
                W.done = True
                self.epoch += 1
                self.finish_warp(W)
                return r
            elif r == interpreter.BLOCKED:
                if starved:  # nobody else could go: the lanes that were held back may
                    c.blocked &= ~starved
                    starved = 0
                    continue
                if c.stores != st0:
                    self.epoch += 1
                return r
            else:
                self.fault(W)

    def finish_warp(self, W):
        if self.delay and (W.wg or any(W.wg_groups)):
            self.warnings[("a warp exits with wgmma in flight", 0, "")] += 1
        for g in W.wg_groups + [W.wg]:
            for fn in g:
                fn()
        W.wg_groups, W.wg = [], []
        left = [fn for g in W.bulk_groups + [W.bulk] for fn in g]
        if left:
            self.notes[
                "warps that exit with bulk stores not waited for (no cp.async.bulk.wait_group)"
            ] += 1
        for fn in left:
            if fn:
                fn()
        W.bulk_groups, W.bulk = [], []
        W.copies.finish(W.copies.started)
        self.note_uninit(W)
        if W.cta.umma:
            finish_warp(self, W)
        if W.cta.cluster.bar_arrived:
            self.cluster_check(W.cta.cluster)

    def note_uninit(self, W):
        if W.c.uninit:
            i = W.prog.kernel.instrs[W.c.uninit_pc]
            self.warnings[("ld.shared of never-written shared memory", i.line, i.text[:120])] += (
                int(W.c.uninit)
            )

    def fault(self, W):
        c = W.c
        ins = W.prog.kernel.instrs[c.trap_pc]
        a = c.fault_addr
        kind = {
            1: "misaligned address",
            2: "global address outside every registered tensor",
            3: "shared address out of range",
            4: "shared::cta address of another CTA",
            5: "local address out of range",
        }.get(c.fault_kind, "bad address")
        near = ""
        if c.fault_kind == 2 and W.cta.is_early:
            near = "; it precedes griddepcontrol.wait"
        elif c.fault_kind == 2:
            best = min(
                ((lo - a if a < lo else a - hi + 1, lo, hi) for lo, hi in self.ranges.tolist()),
                default=None,
            )
            if best:
                near = f"; nearest allocation [{best[1]:#x}, {best[2]:#x}) is {best[0]} bytes away"
        raise SimError(
            f"{kind}: {a:#x}, lane {c.fault_lane}{near}\n  at kernel "
            f"{W.prog.kernel.name[:60]}, CTA {W.cta.ctaid} rank {W.cta.rank}, warp {W.index}, "
            f"{ins!r}"
        )

    def report(self, head):
        out = [head + f" (kernel {self.prog.kernel.name[:80]})"]
        for C in self.active:
            for W in C.warps:
                if W.done:
                    continue
                groups = collections.defaultdict(int)
                for lane in range(32):
                    if W.c.alive >> lane & 1:
                        groups[W.c.pc[lane]] |= 1 << lane
                for pc, m in sorted(groups.items()):
                    ins = W.prog.kernel.instrs[pc] if pc < len(W.prog.kernel.instrs) else None
                    why = W.why.get(pc)
                    if why is None:
                        rest = W.c.alive & ~m
                        sync = ins and (
                            W.prog.ins[pc]["flags"] & 1
                            or ins.mods[0] in ("shfl", "vote", "elect", "redux", "match")
                            or ins.mods[:2] == ["bar", "warp"]
                        )
                        why = (
                            f"waits for other lanes of the warp ({rest:#010x})"
                            if sync and rest
                            else "runs"
                        )
                    else:
                        why = f"waits: {why}"
                    out.append(
                        f"  CTA {W.cta.ctaid} rank {W.cta.rank} warp {W.index} lanes {m:#010x} "
                        f"pc {pc} {ins!r}"[:260]
                        + f"\n      {why}"
                    )
        for C in self.active:
            for cta in C.ctas:
                for off, b in sorted(cta.mbars.items()):
                    out.append(f"  CTA {cta.ctaid} rank {cta.rank} mbarrier at {off:#x}: {b}")
        return "\n".join(out)


def _waits(cta):
    """Whether a warp is at griddepcontrol.wait."""
    return any("the launch before" in W.why.values() for W in cta.warps if not W.done)
