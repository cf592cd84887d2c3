"""Messages between the ranks of a group, whose sizes both sides know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from flash_mask_cute.runtime.checks import brief


class Peers(NamedTuple):
    """A group, and this process in it."""

    group: dist.ProcessGroup
    rank: int
    world: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Peers:
        """Raises RuntimeError, TypeError or ValueError as `context_parallel_attention` does."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "context_parallel_attention needs torch.distributed: call init_process_group first"
            )
        # what new_group gives to a process that is not in the group is an int
        if group is not None and not isinstance(group, dist.ProcessGroup | int):
            raise TypeError(f"group must be a ProcessGroup or None, got {brief(group)}")
        found = dist.group.WORLD if group is None else group
        rank = dist.get_rank(found)
        if rank < 0 or found is None:
            raise ValueError("group does not have this process")
        return Peers(found, rank, dist.get_world_size(found))


class Messages:
    """Sends and receives that have started."""

    def __init__(
        self,
        peers: Peers,
        sent: Mapping[int, Tensor],
        lengths: Mapping[int, int],
        like: Tensor,
        what: str,
    ) -> None:
        """sent: a flat contiguous tensor for each rank that gets one. lengths: elements to receive,
        by rank. like: of their dtype and device. what: in errors."""
        self._peers, self._what = peers, what
        self._received = {r: like.new_empty(length) for r, length in lengths.items()}
        self._sent = sent  # kept until they have gone
        self._ranks: list[int] = []
        operations = []
        for distance in range(1, peers.world):
            # every rank has another partner at each distance
            target = (peers.rank + distance) % peers.world
            source = (peers.rank - distance) % peers.world
            if target in sent and sent[target].numel():
                operations.append(
                    dist.P2POp(dist.isend, sent[target], group=peers.group, group_peer=target)
                )
                self._ranks.append(target)
            if lengths.get(source, 0):
                taken = self._received[source]
                operations.append(
                    dist.P2POp(dist.irecv, taken, group=peers.group, group_peer=source)
                )
                self._ranks.append(source)
        self._works: list[dist.Work] = []
        if operations:
            try:
                self._works = dist.batch_isend_irecv(operations)
            except RuntimeError as error:
                raise RuntimeError(self._failed(self._ranks)) from error

    def wait(self) -> dict[int, Tensor]:
        """What was received, flat. Raises RuntimeError that names a rank which failed, or did not
        answer within the timeout of the group."""
        # NCCL has one piece of work for all of them
        is_each = len(self._works) == len(self._ranks)
        for i, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                ranks = [self._ranks[i]] if is_each else self._ranks
                raise RuntimeError(self._failed(ranks)) from error
        self._works = []
        return self._received

    def _failed(self, ranks: Iterable[int]) -> str:
        names = ", ".join(map(str, sorted(set(ranks))))
        return (
            f"context_parallel_attention: rank {self._peers.rank} of {self._peers.world} got no "
            f"answer from rank {names} ({self._what}): that rank failed, or was called with other "
            "arguments, or took longer than the timeout of the group; see its own error"
        )
