"""The model of latencies: the shares that were predicted before it was written, and its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab import recorded_peer
from lab.events import RATES, Backward, Forward, Rates, WidePair, products
from lab.model import wide_launches

PARTS = {64: (32768,), 96: (16384,) * 3, 128: (16384,) * 4}
BY_BYTES = {64: 2176, 96: 3264, 128: 4096}
ORDER = "S dK' dQ' dV dP"


def backward(d: int, claims: bool = False, at_once: bool = False, order: str = ORDER) -> Backward:
    cycles = dict.fromkeys(("S", "dP", "dV", "dK", "dQ"), 4 * d)
    stages_do = 1 if d == 128 else 2
    over = "" if d == 64 else "dP"
    held = len(PARTS[d]) if at_once else 0
    return Backward(products(order, cycles), 1024, over, PARTS[d], held, claims, stages_do)


def shares(d: int, model: Backward, least: int) -> list[float]:
    return [100 * 20 * d / max(least, model.period(rates)) for rates in RATES]


@pytest.mark.parametrize(
    ("d", "keywords", "predicted"),
    [
        (64, {"claims": True}, (55, 52, 37)),
        (96, {"claims": True}, (45, 39, 32)),
        (128, {"claims": True}, (48, 41, 33)),
        (64, {}, (55, 55, 50)),
        (96, {}, (51, 45, 38)),
        (128, {}, (53, 46, 38)),
        (64, {"at_once": True, "order": "dV' S dK' dQ' dP"}, (59, 59, 50)),
        (96, {"at_once": True}, (59, 59, 46)),
        (128, {"at_once": True}, (62, 62, 46)),
    ],
)
def test_earlier_predictions(d: int, keywords: dict, predicted: tuple[int, ...]) -> None:  # type: ignore[type-arg]
    """By hand, before there was a command."""
    assert shares(d, backward(d, **keywords), BY_BYTES[d]) == pytest.approx(predicted, abs=3)


@pytest.mark.parametrize(
    ("row", "predicted"),
    list(zip(recorded_peer.BACKWARD[:3], [(53,) * 3, (59, 59, 44), (77,) * 3], strict=True)),
    ids=lambda x: getattr(x, "label", ""),
)
def test_earlier_predictions_of_a_peer(
    row: recorded_peer.BackwardRow, predicted: tuple[int, ...]
) -> None:
    assert row.model is not None
    assert shares(row.dims[0], row.model, row.shared_cycles) == pytest.approx(predicted, abs=3)


def test_what_waits_for_each_other() -> None:
    """Three parts of dQ are read before dP of the next block, unless dQ is in registers at once."""
    slow, faster = RATES[2], RATES[2]._replace(read=900)
    model = backward(128)
    assert model.period(slow) - model.period(faster) == 3 * 100
    at_once = replace(model, held=4)
    assert at_once.period(slow) - at_once.period(faster) == 4 * 100
    assert at_once.period(slow) < model.period(slow)
    # all but the first part: the four parts still decide, and tensor memory is free in time
    assert replace(model, held=3).period(slow) == at_once.period(slow)
    # products one after another, if threads and memory take no time
    quick = replace(at_once, exponentials=0, claims=False)
    assert quick.period(Rates(read=0, claim=0)) >= 5 * 512


def test_pairs_of_wide_heads_by_hand() -> None:
    """At 192/128 the products wait; at 256 shared memory takes longer, where bulk adds do not."""
    cycles = {"S": 768, "dP": 512, "dV": 512, "dK": 768, "dQ": 768}
    pair = WidePair(cycles, 1024, (8192,) * 6, 2, 0)
    p = 768 + 150 + 1024 + 146
    dk = p + 375 + 60 + 768
    assert pair.period(RATES[1]) == pytest.approx(dk + 768 + 150 + 250 / 3 + 60)
    # what is sent waits for dV, and its way ends while dK is computed, until it takes longer
    longest = dk - (p + 60 + 256 + 150) - 60
    assert replace(pair, exchange=longest).period(RATES[1]) == pair.period(RATES[1])
    later = replace(pair, exchange=longest + 100).period(RATES[1])
    assert later == pytest.approx(pair.period(RATES[1]) + 100)
    (folded,) = wide_launches(256, 256, cta_pair=True)
    assert (folded.shared, folded.tensor) == (600 * 1024, 2560)
    assert folded.model.period(RATES[0]) < folded.shared / 128 < folded.model.period(RATES[2])


def test_forward_by_hand() -> None:
    """A half waits for its softmax and both signals; its exponentials are shared with the other."""
    signals = RATES[1].product_signal + 60
    assert Forward(512, 512, 832).period(RATES[1]) == 2 * 512 + 832 + 250 + signals
    assert Forward(256, 256, 832).period(RATES[1]) == 2 * 832 + 250
    assert Forward(1024, 1024, 832, halves=1).period(RATES[1]) == 2048
    # a quarter of the exponentials beside the products
    early = Forward(512, 512, 832, early=0.25)
    assert early.period(RATES[1]) == 2 * 512 + 0.75 * 832 + 250 + signals
    # one place for keys: scores of the next block wait for their load
    assert Forward(768, 512, 832, stages=1).period(RATES[1]) > 2 * 1280
