"""Each role of each kernel for Blackwell, the slowest of its CTA once, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from slow_roles import ISLANDS, Slowed, check_backward, check_forward

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

FORWARD = "sm100.flash_fwd.kernel"
BACKWARD = "sm100.flash_bwd.kernel"
FORWARDS = {
    "two-queries-in-flight": Slowed(
        ISLANDS | {"lengths_q": (300, 9, 260), "lengths_k": (400, 20, 300), "head_dim": 64}
    ),
    "pairs-of-ctas": Slowed(
        {
            "heads_q": 1, "heads_kv": 1, "lengths_q": (300, 520, 9), "lengths_k": (140, 200, 20),
            "mask_mod": "checks", "softmax_scale": 0.5,
        },
        {"cta_pair": True},
    ),
    "one-half": Slowed(
        ISLANDS | {"lengths_q": (130, 9, 140), "lengths_k": (300, 20, 200), "head_dim": 256,
                   "softmax_scale": 0.5},
        {"cta_pair": False},
    ),
}  # fmt: skip


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_forward(simulator, monkeypatch, FORWARD, name, FORWARDS[name])


# More work tiles for a CTA than a ring has stages; dQ in columns of its own and in those of dP, all
# of it in registers at once, all but its first part, and in turn; S and dP one after the other, and
# together. Pairs of CTAs. Of wide heads dQ over dP and over S, and two launches.
BACKWARDS = {
    "dq-of-its-own": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "heads_q": 6, "heads_kv": 6,
                   "head_dim": 64}
    ),
    "dq-in-place-of-dp-in-order": Slowed(
        ISLANDS | {"lengths_q": (130, 0, 200), "lengths_k": (150, 70, 130), "head_dim": 96},
        more={"deterministic": True},
    ),
    "dq-behind-a-first-part": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "head_dim": 128}
    ),
    "dq-in-turn": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "head_dim": 96, "softcap": 20.0}
    ),
    "scores-and-gradients-together": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "head_dim": 64, "column": None,
                   "score_mod": "slopes"},
        more={"daux": True},
    ),
    "pairs-of-ctas": Slowed(
        ISLANDS | {"lengths_q": (130, 9, 200), "lengths_k": (150, 20, 300), "head_dim": 128},
        {"cta_pair": True, "clears_dq": True},
    ),
    **{
        f"pairs-of-wide-heads-{d}": Slowed(
            ISLANDS | {"lengths_q": (130, 9, 200), "lengths_k": (150, 20, 300), "head_dim": d,
                       "head_dim_v": d_v},
            {"cta_pair": True, "clears_dq": True},
        )
        for d, d_v in ((192, 128), (256, 256))
    },
    **{
        f"pairs-in-order-{d}": Slowed(
            ISLANDS | {"lengths_q": (130, 9, 200), "lengths_k": (300, 20, 520), "head_dim": d,
                       "head_dim_v": d_v},
            {"cta_pair": True},
            {"deterministic": True},
            # a run takes ten seconds
            shares=3,
        )
        for d, d_v in ((128, 128), (192, 128), (256, 256))
    },
    **{
        f"wide-{d}-{d_v}": Slowed(
            ISLANDS | {"batch": 1, "seqlen_q": 140, "seqlen_k": 150, "heads_q": 3, "heads_kv": 3,
                       "head_dim": d, "head_dim_v": d_v},
            {"cta_pair": False},
        )
        for d, d_v in ((192, 128), (192, 192), (256, 256))
    },
}  # fmt: skip


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_backward(simulator, monkeypatch, BACKWARD, name, BACKWARDS[name])
