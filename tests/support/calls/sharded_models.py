"""Models of transformers whose rows lie in several processes, against eager attention in one."""

from __future__ import annotations

from typing import Any

import tiny_models as tiny
import torch
import torch.distributed as dist

from flash_mask_cute import ColumnMask, builders
from flash_mask_cute.parallel import Plan, sharded

SEQLEN, PARTS = 24, [15, 9]
ROWS = Plan([[(0, 4), (16, 24)], [(4, 16)]])
MODELS = ("llama", "mistral", "gemma2", "gpt_oss")


def compare(rank: int) -> dict[str, tuple[float, float]]:
    """The largest errors of logits and of the gradient of the embeddings, by model and method."""
    found = {}
    ids = torch.randint(3, 97, (1, SEQLEN), generator=torch.Generator().manual_seed(2))
    for name in MODELS:
        pair = tiny.decoder(name)
        # gpt_oss of transformers finds no documents in positions
        parts = [SEQLEN] if name == "gpt_oss" else PARTS
        positions = torch.cat([torch.arange(n) for n in parts])[None]
        mask = builders.causal_document(parts)
        for method in ("all_gather", "ring"):
            errors = _errors(pair, rank, ids, positions, mask, method)
            found[f"{name}, {method}"] = errors
    return found


def _errors(
    pair: Any, rank: int, ids: torch.Tensor, positions: torch.Tensor, mask: ColumnMask, method: Any
) -> tuple[float, float]:
    own = {"input_ids": ROWS.shard(ids, rank), "position_ids": ROWS.shard(positions, rank)}
    with sharded(ROWS, mask=mask, method=method):
        logits = pair.ours(**own, use_cache=False).logits
    pair.ours.zero_grad()
    logits.square().sum().backward()
    weight = pair.ours.get_input_embeddings().weight
    dist.all_reduce(weight.grad)
    wanted = pair.eager(ids, position_ids=positions, use_cache=False).logits
    pair.eager.zero_grad()
    wanted.square().sum().backward()
    of_eager = pair.eager.get_input_embeddings().weight.grad
    return (
        tiny.relative(logits.detach(), ROWS.shard(wanted.detach(), rank)),
        tiny.relative(weight.grad, of_eager),
    )
