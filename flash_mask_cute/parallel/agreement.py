"""Whether all ranks call with the same mask, plan and options.

Sizes of messages follow from these. Ranks with different masks would take messages of other sizes,
which ends a process or leaves memory unwritten, or compute by different masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flash_mask_cute.lowering.watch import is_capturing
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.messages import Messages, Peers
from flash_mask_cute.parallel.planning import Plan
from flash_mask_cute.parallel.routes import version_of
from flash_mask_cute.parallel.settings import Settings

_Key = tuple[str, str, Plan, Settings, int | None]
_OF_MASKS: WeakKeyDictionary[ColumnMask, set[_Key]] = WeakKeyDictionary()
_WITHOUT_MASK: set[_Key] = set()
# by group, digests of what its ranks have agreed on
_OF_CONTENTS: set[tuple[str, tuple[int, ...]]] = set()
_MOST_KEPT, _MOST_CONTENTS = 64, 4096
# What is compared, in the order of the numbers that are sent.
_COMPARED = "arguments (method, plan, options, shapes, dtypes)", "contents of mask"


def check_agreement(
    peers: Peers,
    method: str,
    plan: Plan,
    settings: Settings,
    mask: ColumnMask | None,
    operands: Sequence[Tensor],
) -> None:
    """Compare with the other ranks, once for a mask and its contents. With a new mask it waits for
    the device; ranks may pass an object again while others pass an equal copy. It is left out
    in the capture of a CUDA graph.

    Raises:
        ValueError: in all ranks; names those that differ.
        RuntimeError: as `Messages.wait`.
    """
    if peers.world == 1 or is_capturing():
        return
    key = peers.group.group_name, method, plan, settings, version_of(mask)
    agreed = _WITHOUT_MASK if mask is None else _OF_MASKS.setdefault(mask, set())
    if key in agreed:
        return
    own = _digests(method, plan, settings, mask, operands)
    contents = peers.group.group_name, tuple(own.tolist())
    if contents not in _OF_CONTENTS:
        _compare(peers, method, own)
        if len(_OF_CONTENTS) >= _MOST_CONTENTS:
            _OF_CONTENTS.clear()
        _OF_CONTENTS.add(contents)
    if len(agreed) >= _MOST_KEPT:
        agreed.clear()
    agreed.add(key)


def _compare(peers: Peers, method: str, own: Tensor) -> None:
    """Raise the errors of `check_agreement`. own: the digests of this rank."""
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    sent, lengths = dict.fromkeys(others, own), dict.fromkeys(others, own.numel())
    found = Messages(peers, sent, lengths, own, f"arguments, method {method}").wait()
    numbers = torch.stack([found.get(rank, own) for rank in range(peers.world)]).tolist()
    differences = [
        f"rank {rank} has other {what}"
        for rank in range(1, peers.world)
        for what, number, first in zip(_COMPARED, numbers[rank], numbers[0], strict=True)
        if number != first
    ]
    if differences:
        raise ValueError(
            f"context_parallel_attention: {', '.join(differences)} than rank 0; all ranks of a "
            "group pass the same ones, of the whole sequence"
        )


@torch.no_grad()
def _digests(
    method: str,
    plan: Plan,
    settings: Settings,
    mask: ColumnMask | None,
    operands: Sequence[Tensor],
) -> Tensor:
    """int64 (2,), on the device of the operands, by _COMPARED."""
    facts: list[object] = [method, plan.rows, settings]
    facts += [(tuple(x.shape), x.dtype) for x in operands]
    device = operands[0].device
    contents = torch.zeros((), dtype=torch.int64, device=device)
    if mask is not None:
        facts += [mask.causal, tuple(mask.startend_row_indices.shape)]
        numbers = mask.startend_row_indices.flatten().long()
        # an odd weight for each place; sums of int64 wrap around
        place = torch.arange(1, len(numbers) + 1, device=device)
        contents = ((numbers + 1) * (place * 0x2545F4914F6CDD1D * 2 + 1)).sum()
    text = hashlib.sha256(repr(facts).encode()).digest()[:8]
    of_facts = torch.tensor(int.from_bytes(text, "little", signed=True), device=device)
    return torch.stack((of_facts, contents))
