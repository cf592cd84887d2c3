"""Whether all ranks call with the same mask, plan and options.

Ranks with different masks would take messages of other sizes, which ends a process or leaves memory
unwritten.

A comparison waits for the device and for the other ranks, so only some calls make it: those with a
mask that is new to the group, and calls 1, 2, 4, 8, and so on. It covers all earlier calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flash_mask_cute.lowering.watch import is_capturing
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.messages import Messages, Peers
from flash_mask_cute.parallel.planning import Plan
from flash_mask_cute.parallel.routes import Settings, version_of

Digests = tuple[int, int]
_Kept = dict[tuple[Any, ...], Digests]
_MOST_KEPT, _MOST_CONTENTS = 64, 4096
# What is compared, in the order of the numbers that are sent.
_COMPARED = (
    "arguments (method, plan, options; shapes, dtypes and recorded gradients of q, k, v and "
    "learnable_sink)",
    "contents of mask",
    "calls before this one",
)


@dataclass
class _Agreed:
    """contents: digests that the ranks of a group have compared. of_masks, without_mask: digests by
    arguments. history: a digest of all calls, in their order."""

    contents: set[Digests] = field(default_factory=set)
    of_masks: WeakKeyDictionary[ColumnMask, _Kept] = field(default_factory=WeakKeyDictionary)
    without_mask: _Kept = field(default_factory=dict)
    calls: int = 0
    history: int = 0


_OF_GROUPS: WeakKeyDictionary[torch.distributed.ProcessGroup, _Agreed] = WeakKeyDictionary()


def check_agreement(
    peers: Peers,
    method: str,
    plan: Plan,
    settings: Settings,
    mask: ColumnMask | None,
    operands: Sequence[Tensor | None],
    device: torch.device,
) -> None:
    """Compare with the other ranks, if it is time for it or these arguments and contents of the
    mask are new. A new mask waits for the device. The capture of a CUDA graph makes no comparison.

    Raises:
        ValueError: in all ranks; names those that differ.
        RuntimeError: as `Messages.wait`.
    """
    if peers.world == 1 or is_capturing():
        return
    agreed = _OF_GROUPS.setdefault(peers.group, _Agreed())
    kept = agreed.without_mask if mask is None else agreed.of_masks.setdefault(mask, {})
    version = version_of(mask)
    facts = tuple(map(_facts_of, operands))
    key = method, plan, settings, version, *facts
    # torch counts no changes of a tensor of inference mode
    own = kept.get(key) if version != -1 else None
    if own is None:
        own = _digests(method, plan, settings, mask, facts)
        if len(kept) >= _MOST_KEPT:
            kept.clear()
    calls = agreed.calls + 1
    if own not in agreed.contents or calls & (calls - 1) == 0:
        _compare(peers, method, own, agreed, device)
        if len(agreed.contents) >= _MOST_CONTENTS:
            agreed.contents.clear()
        agreed.contents.add(own)
    kept[key] = own
    agreed.calls, agreed.history = calls, hash((agreed.history, *own))


def _compare(
    peers: Peers, method: str, own: Digests, agreed: _Agreed, device: torch.device
) -> None:
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    numbers = torch.tensor([*own, agreed.history], device=device)
    sent, lengths = dict.fromkeys(others, numbers), dict.fromkeys(others, numbers.numel())
    found = Messages(peers, sent, lengths, numbers, f"arguments, method {method}").wait()
    of_ranks = torch.stack([found.get(rank, numbers) for rank in range(peers.world)]).tolist()
    differences = [
        f"rank {rank} has other {what}"
        for rank in range(1, peers.world)
        for what, number, first in zip(_COMPARED, of_ranks[rank], of_ranks[0], strict=True)
        if number != first
    ]
    if differences:
        # all ranks learn it, and begin anew
        agreed.calls = agreed.history = 0
        raise ValueError(
            f"context_parallel_attention: {', '.join(differences)} than rank 0; all ranks of a "
            "group pass the same ones, of the whole sequence, in the same order"
        )


def _facts_of(x: Tensor | None) -> object:
    """What decides about messages and formulas of an operand, which may be missing."""
    records = torch.is_grad_enabled() and x is not None and x.requires_grad
    return None if x is None else (tuple(x.shape), x.dtype, records)


@torch.no_grad()
def _digests(
    method: str,
    plan: Plan,
    settings: Settings,
    mask: ColumnMask | None,
    of_operands: Sequence[object],
) -> Digests:
    """64 bits of the arguments, and 64 of the contents of the mask."""
    facts: list[object] = [method, plan.rows, settings, *of_operands]
    contents: Tensor | int = 0
    if mask is not None:
        facts += [mask.causal, tuple(mask.startend_row_indices.shape)]
        numbers = mask.startend_row_indices.flatten().long()
        # an odd weight for each place; sums of int64 wrap around
        place = torch.arange(1, len(numbers) + 1, device=numbers.device)
        contents = ((numbers + 1) * (place * 0x2545F4914F6CDD1D * 2 + 1)).sum()
    text = hashlib.sha256(repr(facts).encode()).digest()[:8]
    return int.from_bytes(text, "little", signed=True), int(contents)
