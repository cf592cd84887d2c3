"""Keys and values on their way to the rows that see them, and their gradients on the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.parallel.key_rows import KeyRows
from flash_mask_cute.parallel.messages import Messages, Peers
from flash_mask_cute.parallel.routes import Routes


class Shard(NamedTuple):
    """The keys and values of this rank, or gradients of them: (batch, row, heads_kv, ...)."""

    k: Tensor
    v: Tensor

    def rows(self, chosen: KeyRows) -> Shard:
        return Shard(*map(chosen.of, self))

    def elements(self, count: int) -> int:
        return sum(shape.numel() for shape in self.shapes(count))

    def shapes(self, count: int) -> list[torch.Size]:
        """Of so many rows."""
        return [torch.Size((x.shape[0], count, *x.shape[2:])) for x in self]

    def packed(self) -> Tensor:
        return torch.cat([x.reshape(-1) for x in self])

    def unpacked(self, flat: Tensor, count: int) -> Shard:
        """So many rows of another rank, that it packed."""
        shapes = self.shapes(count)
        parts = flat.split([shape.numel() for shape in shapes])
        return Shard(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


class KeyMessages:
    """Keys for the rows that see them, or their gradients for the ranks of the keys.

    own: messages have its dtypes and shapes. step: None for all ranks at once; else messages go to
    the rank that is `step` further, and come from the one that is `step` back.
    """

    def __init__(self, own: Shard, peers: Peers, routes: Routes, what: str) -> None:
        self._own, self._peers, self._routes, self._what = own, peers, routes, what

    def send_keys(self, step: int | None = None) -> Arriving:
        """Start to send the own keys, and to receive those of others."""
        targets, sources = self._partners(step)
        sent = {r: self._own.rows(self._routes.sends[r]) for r in targets}
        return self._start(sent, {r: self._routes.receives[r] for r in sources}, "keys")

    def send_gradients(self, of_ranks: dict[int, Shard], step: int | None = None) -> Arriving:
        """Start to send gradients of keys of other ranks, and to receive those of the own keys."""
        targets, sources = self._partners(None if step is None else -step)
        counts = {r: len(self._routes.sends[r].index) for r in sources}
        return self._start({r: of_ranks[r] for r in targets}, counts, "gradients of keys")

    def _partners(self, step: int | None) -> tuple[list[int], list[int]]:
        rank, world = self._peers.rank, self._peers.world
        if step is None:
            others = [r for r in range(world) if r != rank]
            return others, others
        return [(rank + step) % world], [(rank - step) % world]

    def _start(self, sent: dict[int, Shard], counts: dict[int, int], name: str) -> Arriving:
        flat = {r: shard.packed() for r, shard in sent.items() if shard.k.shape[1]}
        lengths = {r: self._own.elements(count) for r, count in counts.items()}
        messages = Messages(self._peers, flat, lengths, self._own.k, f"{name}, {self._what}")
        return Arriving(messages, self._own, counts)


class Arriving(NamedTuple):
    """Messages that were started. counts: the rows of each rank that will come."""

    messages: Messages
    like: Shard
    counts: dict[int, int]

    def wait(self) -> dict[int, Shard]:
        received = self.messages.wait()
        return {r: self.like.unpacked(received[r], count) for r, count in self.counts.items()}


class Sums:
    """Gradients of the own keys, summed in float32 or wider."""

    def __init__(self, like: Shard) -> None:
        self._like = like
        self._totals = Shard(
            *(x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in like)
        )

    def add(self, chosen: KeyRows, part: Shard) -> None:
        for total, x in zip(self._totals, part, strict=True):
            chosen.add(total, x)

    def result(self) -> Shard:
        return Shard(*(x.to(y.dtype) for x, y in zip(self._totals, self._like, strict=True)))
