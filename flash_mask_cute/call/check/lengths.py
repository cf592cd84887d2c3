"""The lengths of a call's queries and keys, checked.

Contents of `cu_seqlens_*` and `seqused_*` are checked when they are CPU tensors; a CUDA tensor is
never read, so no check waits for the device. Errors are those of `validate.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.limits import MAX_PACKED_SEQLEN
from flash_mask_cute.runtime.checks import brief, check_device, check_int, check_tensor


class SideArguments(NamedTuple):
    """A call's arguments about its queries, or its keys. name: "q" or "k", of that shape."""

    name: str
    shape: tuple[int, ...]
    device: torch.device
    cu_seqlens: torch.Tensor | None
    seqused: torch.Tensor | None
    max_seqlen: int | None

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def batch(self) -> int:
        return self.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def batch_source(self) -> str:
        return f"cu_seqlens_{self.name}" if self.is_packed else f"the shape of {self.name}"

    @property
    def rows(self) -> tuple[int, int]:
        """Batch entries, and tokens per entry, of a tensor with this layout."""
        return (1, self.shape[0]) if self.is_packed else (self.shape[0], self.shape[1])

    @property
    def seqlen(self) -> int:
        """The bound on the length of one sequence."""
        if not self.is_packed:
            return self.shape[1]
        return self.shape[0] if self.max_seqlen is None else int(self.max_seqlen)

    @property
    def total(self) -> int:
        """Tokens of all sequences together."""
        return self.rows[0] * self.rows[1]


def check_lengths(
    queries: SideArguments, keys: SideArguments, head_dim_v: int, in_pages: bool
) -> FwdShapes:
    """Check the lengths of both sides, and return the problem's extents. in_pages: of keys."""
    sides = queries, keys
    for side in sides:
        if side.cu_seqlens is not None:
            check_cu_seqlens(f"cu_seqlens_{side.name}", side.cu_seqlens, side.device)
    has_shared_keys = queries.is_packed and not keys.is_packed and keys.batch == 1 and not in_pages
    if queries.batch != keys.batch and not has_shared_keys:
        raise ValueError(
            f"batch of q and k must be equal, got {queries.batch} from {queries.batch_source} and "
            f"{keys.batch} from {keys.batch_source}; only keys of one batch entry, beside "
            "cu_seqlens_q, may be those of all sequences"
        )
    for side in sides:
        if side.max_seqlen is not None:
            _check_max_seqlen(f"max_seqlen_{side.name}", side.max_seqlen)
    for side in sides:
        if side.seqused is not None:
            check_batch_vector(f"seqused_{side.name}", side.seqused, queries.batch, side.device)
    for side in sides:
        if side.device.type == "cuda":
            _check_packed_seqlen(side)
        else:
            _check_contents(side, queries.batch)
    return FwdShapes(
        batch=queries.batch,
        seqlen_q=queries.seqlen,
        seqlen_k=keys.seqlen,
        total_q=queries.total,
        total_k=keys.total,
        heads_q=queries.shape[-2],
        heads_kv=keys.shape[-2],
        head_dim=queries.shape[-1],
        head_dim_v=head_dim_v,
    )


def check_index_vector(name: str, value: object, device: torch.device) -> None:
    """Check a vector of lengths or indices: int32, 1-D, contiguous, on `device`."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} must have dtype int32, got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(value.shape)}")
    check_device(name, value, device)
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {value.stride(0)}")


def check_cu_seqlens(name: str, value: torch.Tensor, device: torch.device) -> None:
    """Check the starts of packed sequences, without their contents."""
    check_index_vector(name, value, device)
    if len(value) == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got (0,)")


def check_batch_vector(name: str, value: torch.Tensor, batch: int, device: torch.device) -> None:
    """Check a vector with a number for each sequence."""
    check_index_vector(name, value, device)
    if len(value) != batch:
        raise ValueError(f"{name} must have shape (batch,) = ({batch},), got ({len(value)},)")


def _check_packed_seqlen(side: SideArguments) -> None:
    """Refuse packed sequences that may be longer than TMA's view of one (`tma.ragged_rows`)."""
    if side.is_packed and side.seqlen > MAX_PACKED_SEQLEN:
        raise NotImplementedError(
            f"packed sequences of more than {MAX_PACKED_SEQLEN} rows are not supported, got "
            f"{side.seqlen} rows in {side.name}; if every sequence is shorter, give "
            f"max_seqlen_{side.name}"
        )


def _check_contents(side: SideArguments, batch: int) -> None:
    """Check the contents of CPU length vectors against each other."""
    if side.cu_seqlens is None and side.seqused is None:
        return
    if side.cu_seqlens is None:
        slots = [side.shape[1]] * batch
    else:
        name = f"cu_seqlens_{side.name}"
        slots = packed_lengths(name, side.cu_seqlens.tolist(), side.shape[0])
    used = slots
    if side.seqused is not None:
        used = side.seqused.tolist()
        for index, (length, slot) in enumerate(zip(used, slots, strict=True)):
            if not 0 <= length <= slot:
                raise ValueError(
                    f"seqused_{side.name} must lie between 0 and the length of its slot, got "
                    f"{length} for sequence {index} of length {slot}"
                )
    longest = max(used, default=0)
    if side.is_packed and side.max_seqlen is not None and side.max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side.name} must not be smaller than the longest sequence ({longest}), "
            f"got {side.max_seqlen}"
        )


def packed_lengths(name: str, offsets: list[int], total: int) -> list[int]:
    """The lengths of packed sequences, of checked offsets. total: rows of the packed tensor; those
    after the last sequence belong to none."""
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name} must not decrease, got {offsets[index]} followed by {offsets[index + 1]} "
                f"at position {index + 1}"
            )
    if offsets[-1] > total:
        raise ValueError(
            f"{name} must not end beyond the packed tensor of {total} rows, got {offsets[-1]}"
        )
    return lengths


def _check_max_seqlen(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a Python int, got {brief(value)}; compute it on the host when the "
            f"batch is built, because reading it here would wait for the device"
        )
    if check_int(name, value, "an int >= 0 or None") < 0:
        raise ValueError(f"{name} must be an int >= 0 or None, got {value}")
