"""One case: its results are checked, its calls timed, its rows made."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch

from bench import DETERMINISTIC, Json, everyday, gate, paper, row_of, say, timing
from bench.cases import BenchCase, CaseTensors, make_tensors
from bench.gate import PEER_RULE, RULE, Verdict
from bench.peers import PEERS, Call, Peer, column_mask, save_forward
from bench.prep import PREPARERS
from bench.sweep import dense_case, draw_cases
from bench.tables import HOST_MS

SWEEP_ROWS = 8
OURS = ("ours", DETERMINISTIC)
# Whether a table wants a peer in a case.
TABLES: dict[str, Callable[[str, BenchCase], bool]] = {
    "paper": paper.takes_part,
    "shapes": lambda peer, case: everyday.takes_part(peer, case.name),
    "cudnn": lambda peer, case: True,
}
# (peer, its call, rule) -> verdict
Judge = Callable[[Peer, Call, float], Verdict]


class Refused(Exception):
    """Our result is wrong on this input, so its speed means nothing."""


@dataclass(frozen=True)
class Options:
    """seed: of the inputs. repeats, singles, shorts: rounds of the modes loop, single and short,
    none where 0. burst_s, load_s: seconds of a loop burst, and of the load under which clock and
    power are read (0: not read). gate_rows: how many random rows the gate of a forward samples.
    table: "", or a name in TABLES: only those peers take part that this table wants in a case, with
    bursts of one call and more."""

    peers: tuple[str, ...]
    seed: int
    repeats: int = 0
    singles: int = 0
    shorts: int = 0
    burst_s: float = 0.0
    load_s: float = 0.0
    gate_rows: int = 64
    table: str = ""

    def peers_of(self, case: BenchCase) -> tuple[str, ...]:
        """The peers that are wanted in a case, ours first."""
        wanted = [p for p in self.peers if not self.table or TABLES[self.table](p, case)]
        return tuple(sorted(wanted, key=lambda name: name != "ours"))

    def least_calls(self, case: BenchCase) -> int:
        """Of a loop burst."""
        return 1 if self.table or case.kind == "backward" else 3


class Inputs:
    """The tensors of the last case, for the next one of the same shape and seed."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tensors: CaseTensors | None = None

    def of(self, case: BenchCase, seed: int) -> CaseTensors:
        sizes = (case.lengths, case.key_lengths, case.varlen, case.heads, case.heads_kv)
        key = (*sizes, case.d, case.d_v, case.sink, case.dtype, seed)
        if self._tensors is None or self._key != key:
            self._tensors = None  # before others of the same size are made
            self._key, self._tensors = key, make_tensors(case, "cuda", seed)
        return self._tensors


def given(case: BenchCase, options: Options, inputs: Inputs) -> CaseTensors:
    """What the calls of a case are made of."""
    tensors = inputs.of(case, options.seed)
    return save_forward(case, tensors, options.seed) if case.returns_gradients else tensors


def admit(
    case: BenchCase, options: Options, inputs: Inputs
) -> tuple[dict[str, Call], dict[str, Verdict]]:
    """Ready calls of the peers that compute this case. Raises Refused where ours does not."""
    tensors = given(case, options, inputs)
    if case.returns_gradients:
        judge = gradient_judge(case, tensors, options.seed)
    else:
        judge = forward_judge(case, tensors, options.seed, options.gate_rows)
    calls: dict[str, Call] = {}
    verdicts: dict[str, Verdict] = {}
    for name in options.peers_of(case):
        peer, rule = PEERS[name], RULE if name in OURS else PEER_RULE
        try:
            if reason := peer.supports(case):
                raise NotImplementedError(reason)
            call = peer.prepare(case, tensors)
            verdict = judge(peer, call, rule)
            if not verdict.ok:
                raise Refused(f"{name}: {verdict.text}")
            calls[name], verdicts[name] = call, verdict
        except Exception as error:
            torch.cuda.synchronize()
            if name == "ours" or isinstance(error, Refused) and name in OURS:
                raise
            say(f"    {name} left out: {type(error).__name__}: {error}")
    return calls, verdicts


def forward_judge(case: BenchCase, tensors: CaseTensors, seed: int, rows: int) -> Judge:
    truth = gate.reference(case, tensors, seed, rows)

    def judge(peer: Peer, call: Call, rule: float) -> Verdict:
        gate.poison(case, tensors)
        out, lse = peer.unpack(call())
        if out.is_cuda:
            torch.cuda.synchronize()
        return gate.check(truth, out, lse, rule=rule)

    return judge


def gradient_judge(case: BenchCase, tensors: CaseTensors, seed: int) -> Judge:
    """Also of two calls that say they are deterministic: whether they are."""
    truth = gate.gradient_reference(case, tensors, seed)

    def judge(peer: Peer, call: Call, rule: float) -> Verdict:
        gate.poison(case, tensors)
        found = call()
        if found[0].is_cuda:
            torch.cuda.synchronize()
        if peer.name == DETERMINISTIC and not all(map(torch.equal, found, call())):
            return Verdict(False, "two calls differ")
        return gate.check_gradients(truth, found, rule=rule)

    return judge


def measure_calls(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """Kinds attention, backward, host, host_train and cold."""
    calls, verdicts = admit(case, options, inputs)
    if case.kind == "cold":
        for name in calls:
            for variant, seconds in timing.time_cold(name, case.name).items():
                yield row_of(case, name, variant, seconds * 1e6, ())
        return
    least = options.least_calls(case)
    modes: dict[str, Callable[[], timing.Samples]] = {
        "loop": lambda: timing.time_loop(calls, options.repeats, options.burst_s, least),
        "single": lambda: timing.time_short(calls, options.singles, count=1),
        "short": lambda: timing.time_short(calls, options.shorts),
    }
    if case.kind in ("host", "host_train"):
        modes = {"warm": lambda: timing.time_host(calls)}
    quickest = math.inf
    for variant, take in modes.items():
        if options.table and variant == "short" and HOST_MS <= quickest < math.inf:
            # tables take the figures of loop there
            continue
        for name, values in take().items():
            if values:
                middle, how, load = timing.median(values), "", ""
                quickest = min(quickest, middle)
                if variant == "loop":
                    how = f"bursts of {options.burst_s:g} s"
                    load = timing.load_note(calls[name], middle, options.load_s)
                spread = f"spread {timing.spread(values):.1%}"
                remarks = (spread, how, load, verdicts[name].text)
                yield row_of(case, name, variant, middle, remarks)


def measure_sweep(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """Ours over every draw and over full attention, all of them in turns, half as many rounds."""
    ours = PEERS["ours"]
    tensors = inputs.of(case, options.seed)
    drawn = {drawn.name: drawn for drawn in (dense_case(case), *draw_cases(case))}
    calls = {}
    for name, each in drawn.items():
        calls[name] = ours.prepare(each, tensors)
        judge = forward_judge(each, tensors, options.seed, SWEEP_ROWS)
        if not (verdict := judge(ours, calls[name], RULE)).ok:
            raise Refused(f"{name}: {verdict.text}")
    torch.cuda.synchronize()
    for name, values in timing.time_sweep(calls, max(1, options.repeats // 2)).items():
        remarks = (f"spread {timing.spread(values):.1%}",)
        yield row_of(drawn[name], "ours", "sweep", timing.median(values), remarks)


def measure_prep(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """Wall time, launches and bytes of preparing the mask; a peer that fails leaves a note."""
    for name in (name for name in PREPARERS if name in options.peers):
        try:
            prepared = PREPARERS[name](case, "cuda")
            size = prepared.size(prepared.call())
            values = timing.time_wall(prepared.call)
            launches = timing.count_launches(prepared.call)
            remarks = (f"spread {timing.spread(values):.1%}",)
            row = row_of(case, name, "wall", timing.median(values), remarks)
            yield row | {"bytes": size, "launches": launches}
        except Exception as error:
            if name == "ours":
                raise
            torch.cuda.synchronize()
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield row_of(case, name, "wall", None, (f"failed: {first_line[:200]}",))


def measure_steps(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """Wall time of a training step, and beside it its device time, in the same turns."""
    calls, verdicts = admit(case, options, inputs)
    for name, call in calls.items():
        try:
            ways = {"step": call, "replay": timing.captured(call)}
            taken = timing.time_steps(ways, timing.STEP_ROUNDS, timing.STEPS)
        except RuntimeError as error:
            if name == "ours":
                raise
            say(f"    {name} left out: {type(error).__name__}: {error}")
            continue
        spreads = (f"spread of {way} {timing.spread(taken[way]):.1%}" for way in taken)
        row = row_of(
            case, name, "step", timing.median(taken["step"]), (*spreads, verdicts[name].text)
        )
        yield row | {"device_us": round(timing.median(taken["replay"]), 2)}


def measure_memory(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """The most bytes allocated until a call ended, beyond what it was given and what it returned:
    by a forward since its mask was made, by a backward since it began."""
    calls, verdicts = admit(case, options, inputs)
    names = list(calls)
    calls.clear()
    tensors = given(case, options, inputs)
    for name in names:
        column_mask.cache_clear()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peer = PEERS[name]
        call = peer.prepare(case, tensors)
        if case.returns_gradients:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = call()
        else:
            results = peer.unpack(call())
        torch.cuda.synchronize()
        returned = sum(x.numel() * x.element_size() for x in results if x is not None)
        extra = torch.cuda.max_memory_allocated() - before - returned
        del call, results
        yield row_of(case, name, "peak", None, (verdicts[name].text,)) | {"bytes": extra}


def measure(case: BenchCase, options: Options, inputs: Inputs) -> Iterator[Json]:
    """Gate and time one case; each row as soon as it is known. `inputs` goes from case to case."""
    kinds = {
        "sweep": measure_sweep,
        "host_step": measure_steps,
        "prep": measure_prep,
        "memory": measure_memory,
        "memory_backward": measure_memory,
    }
    return kinds.get(case.kind, measure_calls)(case, options, inputs)
