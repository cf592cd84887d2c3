"""Arguments of the public backward."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Inputs

NAN = float("nan")


def bwd_keywords(inputs: Inputs) -> dict[str, Any]:
    keywords = inputs.bwd_keywords
    if inputs.case.sink is not None:
        keywords["dsink"] = torch.full_like(keywords["learnable_sink"], NAN)
    return keywords


def square_scores(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score * score


def square_scores_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad * score * 2.0
