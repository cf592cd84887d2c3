"""How long cases take: a forecast before the first, corrected by those that are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.cases import BenchCase
from bench.flops import attention_flops
from bench.timing import LONG_ROUNDS

# Operations a second that a forecast assumes; no figure of anything.
ASSUMED = 5e14
# Imports, the context of the device, and kernels that nobody compiled before.
START_S = 30.0
OTHER_KIND_S = 20.0
# What a case costs beside its calls: inputs, its mask, and float64 on the sampled rows.
CASE_S = 0.4
# What a peer costs besides: FlexAttention is traced in every case, kernels cached or not; cuDNN is
# told row intervals, which numpy makes.
PEER_S = {"flex": 4.0, "flex_flash": 10.0, "cudnn_flex": 0.5}
# The gradients of a head over 131072 tokens, in float64 and in the dtype of the case.
GRADIENTS_S = 2.0 / 131072**2
MARGIN = 1.5
BAR = 30


def loop_calls(call_s: float, rounds: int, burst_s: float, least: int) -> float:
    """Calls of one peer in mode loop, as `bench.timing.time_loop` makes them."""
    if call_s > burst_s:
        rounds = min(rounds, LONG_ROUNDS)
    few = min(2, least)
    count = max(least, burst_s / call_s)
    return few + least + rounds * (count + max(few, count // 8))


def forecast(
    case: BenchCase, peers: Sequence[str], rounds: int, burst_s: float, least: int
) -> float:
    """Seconds of a case in mode loop, with these peers."""
    if case.kind not in ("attention", "backward"):
        return OTHER_KIND_S
    call_s = attention_flops(case) / ASSUMED
    seconds = CASE_S + sum(PEER_S.get(peer, 0.0) for peer in peers)
    seconds += len(peers) * call_s * (1 + loop_calls(call_s, rounds, burst_s, least))
    if case.kind == "backward":
        group = case.heads // case.heads_kv
        seconds += min(2, case.batch) * group * GRADIENTS_S * case.n * (case.n_k or case.n)
    return seconds


@dataclass
class Pace:
    """Of the cases of one process. expected: seconds by case, in order."""

    expected: Mapping[str, float]
    _took: dict[str, float] = field(default_factory=dict)

    def _scale(self) -> float:
        """Real seconds of a forecast one. The first case, which pays for the start, only counts
        while it is alone."""
        counted = list(self._took)[1:] or list(self._took)
        if not counted:
            return 1.0
        return sum(self._took[name] for name in counted) / sum(
            self.expected[name] for name in counted
        )

    def done(self, name: str, seconds: float) -> None:
        self._took[name] = seconds

    def needs(self, name: str) -> float:
        """Seconds to have in hand before a case is begun."""
        first = 0.0 if self._took else START_S
        return first + MARGIN * self.expected[name] * max(1.0, self._scale())

    def left(self) -> float:
        """Seconds of the cases that are not done."""
        rest = (self.expected[name] for name in self.expected if name not in self._took)
        return sum(rest) * self._scale()

    def bar(self) -> str:
        """How far the cases are by expected time, as `[####----] 12/144`."""
        total = sum(self.expected.values())
        share = sum(self.expected[name] for name in self._took) / total if total else 1.0
        full = int(share * BAR)
        return f"[{'#' * full}{'-' * (BAR - full)}] {len(self._took)}/{len(self.expected)}"
