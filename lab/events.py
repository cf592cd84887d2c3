"""When things happen in a block of the Blackwell kernels: a model of latencies, by events.

Products run one after another, in the order of their issue, each when what it waits for is there. A
product tells threads that it is complete after a signal's time, and threads tell the product warp
after another. Exponentials and dS of a block are phases of the compute warps. dQ leaves tensor
memory by way of staging memory of 16 KB a part; a part's place is free when its bulk add has read
it. The period of a steady state is the time of a block. Where bytes of shared memory take longer
than that, they decide (`lab.model`).

Cycles of an SM. Nothing was measured on Blackwell: rates that are not known are ranges (`RATES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# of a thread's arrival until the product warp goes on
THREAD_SIGNAL = 60
# dS of a block, and what the exponentials of a block take beside their rate
DS_PHASE, EXP_LATENCY = 450, 146
# dQ from tensor memory to registers, all columns
TO_REGISTERS = 250
# 16 KB into staging memory, and what passes between its filling, sending and next filling
STAGE, HAND_OVER = 169, 222
# from the release of a stage until its next Q or dO is there
LOAD = 900
PART = 16384
# of a pair, from its dS until the product of dQ may read that of both CTAs: a copy of 16 KB to the
# other CTA, and a warp there that tells the one that issues products. Not known for a B200.
EXCHANGE = 700
# what the softmax of a block takes beside the rate of exponentials: first load, last store
SOFTMAX_LATENCY = 250
BLOCKS = 64


class Rates(NamedTuple):
    """read: of shared memory by a bulk add of 16 KB. claim: the compare-and-swap that says whether
    a row block's sums are there. product_signal: from the end of a product to a waiting thread."""

    read: int
    claim: int
    product_signal: int = 150


# what a B200 is between, the second one as a bulk add on an H200 takes
RATES = (Rates(350, 500), Rates(600, 700), Rates(1000, 900))


class Product(NamedTuple):
    """lag: blocks behind the newest. cycles: on the tensor cores."""

    name: str
    lag: int
    cycles: int


def products(order: str, cycles: dict[str, int]) -> tuple[Product, ...]:
    """order: names, those of the previous block with an apostrophe: S dK' dQ' dV dP."""
    return tuple(
        Product(x.rstrip("'"), int(x.endswith("'")), cycles[x.rstrip("'")]) for x in order.split()
    )


@dataclass(frozen=True)
class Backward:
    """exponentials: cycles of a block at their rate. over: the product in whose columns dQ lies,
    and which waits until dQ has left: dP, S (of which dQ then waits until it has been read), S'
    (where all products of a block are issued together), or none. part_bytes: of the parts of dQ,
    for one staging place. held: the last so many parts leave tensor memory together, into
    registers, before they are staged. claims: see `Rates`. stages_do: dO in flight; stages_q: 1 if
    Q of the next block is loaded when this one's products have read theirs. ds_phase: of a
    block. exchange: from dS until dQ may read it."""

    order: tuple[Product, ...]
    exponentials: int
    over: str
    part_bytes: tuple[int, ...]
    held: int
    claims: bool
    stages_do: int = 2
    stages_q: int = 2
    ds_phase: int = DS_PHASE
    exchange: int = 0

    def period(self, rates: Rates) -> float:
        """Cycles of a block in the steady state."""
        ends: dict[tuple[str, int], float] = {}
        taken: dict[int, float] = {}
        state = _Drain()
        exp_end = ds_end = 0.0
        ready_p: dict[int, float] = {}
        ready_ds: dict[int, float] = {}
        now = 0.0
        for j in range(BLOCKS + 1):
            for name, lag, cycles in self.order:
                i = j - lag
                if i < 0:
                    continue
                waits = [now]
                if name in ("dV", "dP"):
                    # dO of the block, loaded when the products of an earlier one have read it
                    used = [ends.get((x, i - self.stages_do), 0.0) for x in ("dV", "dP")]
                    if i >= self.stages_do:
                        waits.append(max(used) + rates.product_signal + LOAD)
                if name == "dV":
                    waits.append(ready_p[i])
                if name == "dP" and self.over == "dP":
                    waits.append(taken.get(i - 1, 0.0))
                if name == "S" and self.over == "S'":
                    waits.append(taken.get(i - 1, 0.0))
                if name == "S" and self.stages_q == 1 and i:
                    read = ends.get(("dQ", i - 1), ends["S", i - 1])
                    waits.append(read + rates.product_signal + LOAD)
                if name == "S" and self.over == "S":
                    waits.append(taken.get(i - 2, 0.0))
                if name in ("dK", "dQ"):
                    waits.append(ready_ds[i] + (self.exchange if name == "dQ" else 0))
                if name == "dQ" and not self.over:
                    waits.append(taken.get(i - 1, 0.0))
                if name == "dQ" and self.over == "S":
                    waits.append(ready_p[j])
                now = max(waits) + cycles
                ends[name, i] = now
                told = now + rates.product_signal
                if name == "S":
                    exp_end = max(told, ds_end) + self.exponentials + EXP_LATENCY
                    ready_p[i] = exp_end + THREAD_SIGNAL
                elif name == "dP":
                    ds_end = max(told, exp_end) + self.ds_phase
                    ready_ds[i] = ds_end + THREAD_SIGNAL
                elif name == "dQ":
                    more = self.part_bytes, self.held, self.claims
                    taken[i] = _drain(state, told, rates, *more) + THREAD_SIGNAL
        half = BLOCKS // 2
        return (ends["S", BLOCKS] - ends["S", half]) / (BLOCKS - half)


def _drain(
    state: _Drain, told: float, rates: Rates, part_bytes: tuple[int, ...], held: int, claims: bool
) -> float:
    """When tensor memory is free; the parts of dQ go through staging memory meanwhile."""
    at = left = max(told, state.warps)
    alternating = len(part_bytes) - held
    for number, size in enumerate(part_bytes):
        share = size / PART
        if number == alternating:
            left = at + TO_REGISTERS
        at = max(at, state.place) + STAGE * share
        read = rates.read * share + (rates.claim if claims and number == 0 else 0)
        state.place = at + HAND_OVER + read
    state.warps = at
    return left if held else at


@dataclass(frozen=True)
class WidePair:
    """A block of a pair at 192/128 columns: S, dP, dV in two parts, dK, dQ.

    dP waits until S is in registers, S of the next block for the part of dQ that lies over it, and
    its dP for the rest. dS is sent, and kept in shared memory, when dV is complete. Q and dO have
    one place each. Q is loaded when dK and the other CTA have read what lies there, and dO when dQ
    has. cycles: of each product. over_scores: the first so many parts of dQ leave together, then
    the others.
    """

    cycles: dict[str, int]
    exponentials: int
    part_bytes: tuple[int, ...]
    over_scores: int
    exchange: int

    def period(self, rates: Rates) -> float:
        """Cycles of a block in the steady state."""
        cycles, signal, starts = self.cycles, rates.product_signal, []
        now = q_loaded = do_loaded = first_left = left = 0.0
        state = _Drain()
        for _ in range(BLOCKS + 1):
            now = max(now, first_left, q_loaded)
            starts.append(now)
            now += cycles["S"]
            told = now + signal
            taken = told + TO_REGISTERS / 2 + THREAD_SIGNAL
            now = max(now, taken, left, do_loaded) + cycles["dP"]
            dp_told = now + signal
            for part in (0.5, 1):
                p_end = told + self.exponentials * part + EXP_LATENCY
                now = max(now, p_end + THREAD_SIGNAL) + cycles["dV"] / 2
            # dS is computed when dP is there, and the last third stores it: first in TMEM, for dK,
            # then in shared memory; there what is kept waits until dV is complete.
            ds_start, dv_told = max(dp_told, p_end), now + signal
            in_tmem = ds_start + DS_PHASE * 5 / 6
            sent = max(in_tmem + DS_PHASE / 6, dv_told)
            kept = max(in_tmem, dv_told) + DS_PHASE / 6
            arrived = max(kept, sent + self.exchange) + THREAD_SIGNAL
            now = max(now, in_tmem + THREAD_SIGNAL) + cycles["dK"]
            q_loaded = max(now, arrived) + signal + LOAD
            now = max(now, arrived) + cycles["dQ"]
            do_loaded = now + signal + LOAD
            first_left, left = self._drain(state, now + signal, rates)
        half = BLOCKS // 2
        return (starts[BLOCKS] - starts[half]) / (BLOCKS - half)

    def _drain(self, state: _Drain, told: float, rates: Rates) -> tuple[float, float]:
        """When the first parts of dQ, and all, are in registers."""
        at, freed, first, count = max(told, state.warps), [], 0, len(self.part_bytes)
        for end in (self.over_scores, count):
            at += TO_REGISTERS * (end - first) / count
            freed.append(at + THREAD_SIGNAL)
            for size in self.part_bytes[first:end]:
                share = size / PART
                at = max(at, state.place) + STAGE * share
                state.place = at + HAND_OVER + rates.read * share
            first = end
        state.warps = at
        return freed[0], freed[1]


@dataclass(frozen=True)
class FoldedPair:
    """A block of a pair at 256 columns, whose CTAs have 64 keys: S, dP, dK, dV, dQ.

    Q and dO by columns are loaded into the place of those by rows, when S and dP have read these,
    and the next ones by rows when dK and dQ are complete. P and dS are operands in shared memory,
    of which the other CTA's mma warp tells after as long as the exchange takes. held: see
    `Backward`.
    """

    cycles: dict[str, int]
    exponentials: int
    part_bytes: tuple[int, ...]
    held: int
    exchange: int

    def period(self, rates: Rates) -> float:
        """Cycles of a block in the steady state."""
        cycles, signal, starts = self.cycles, rates.product_signal, []
        now = q_loaded = do_loaded = left = 0.0
        state = _Drain()
        for _ in range(BLOCKS + 1):
            now = max(now, q_loaded)
            starts.append(now)
            now += cycles["S"]
            exp_end = now + signal + self.exponentials + EXP_LATENCY
            q_columns = now + signal + LOAD
            now = max(now, do_loaded) + cycles["dP"]
            do_columns = now + signal + LOAD
            # a thread has half of the scores of other kernels
            there = max(now + signal, exp_end) + DS_PHASE / 2 + THREAD_SIGNAL + self.exchange
            now = max(now, there, q_columns) + cycles["dK"]
            q_loaded = now + signal + LOAD
            now = max(now, do_columns) + cycles["dV"]
            now = max(now, left) + cycles["dQ"]
            do_loaded = now + signal + LOAD
            drained = _drain(state, now + signal, rates, self.part_bytes, self.held, False)
            left = drained + THREAD_SIGNAL
        half = BLOCKS // 2
        return (starts[BLOCKS] - starts[half]) / (BLOCKS - half)


@dataclass
class _Drain:
    """When the reduce warps and the staging place are free."""

    warps: float = 0.0
    place: float = 0.0


@dataclass(frozen=True)
class Forward:
    """A walk over full blocks: two halves take turns, or one half with two buffers of scores.

    scores, values: cycles of S and of P V of a half. exponentials: of a half, at their rate, which
    the halves share. stages: key blocks in flight. early: share of the exponentials that is still
    to come when the first part of P is multiplied. search: cycles before the first exponential, of
    a maximum of the whole block.
    """

    scores: int
    values: int
    exponentials: int
    halves: int = 2
    stages: int = 2
    early: float = 0.0
    search: int = 0

    def period(self, rates: Rates) -> float:
        """Cycles of a key block, of all halves, in the steady state."""
        phase = self.exponentials + SOFTMAX_LATENCY + self.search
        now, starts = 0.0, []
        ready = dict.fromkeys(range(self.halves), 0.0)
        read: list[float] = []
        # one half works on a block while the scores of the next are computed
        ahead = self.halves == 1
        busy = 0.0
        for j in range(BLOCKS + 1):
            starts.append(now)
            for half in range(self.halves):
                if not ahead and j:
                    now = max(now, ready[half]) + self.values
                if j >= self.stages:
                    now = max(now, read[j - self.stages] + rates.product_signal + LOAD)
                now += self.scores
                told = now + rates.product_signal
                if ahead and j:
                    now = max(now, ready[half]) + self.values
                busy = max(told, busy) + phase if ahead else told + phase
                ready[half] = busy - self.early * self.exponentials + THREAD_SIGNAL
            read.append(now)
        half_way = BLOCKS // 2
        period = (starts[BLOCKS] - starts[half_way]) / (BLOCKS - half_way)
        if ahead:
            return period
        return max(period, 2 * self.exponentials + SOFTMAX_LATENCY + self.search)
