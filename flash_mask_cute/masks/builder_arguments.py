"""Arguments of builders, checked: numbers, and lengths as lists or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.masks.runs import MAX_INT32
from flash_mask_cute.runtime.checks import INTS

Device: TypeAlias = torch.device | str | None


def check_int(name: str, value: Any, at_least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, INTS):
        raise TypeError(f"{name}={value!r} is not an int")
    if value < at_least:
        raise ValueError(f"{name}={value} is less than {at_least}")


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool")
    return value


def device_of(device: Device) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def sizes_of(
    name: str,
    value: Any,
    seqlen: int | None,
    device: Device,
    *,
    depth: int,
    adds_up: bool = True,
) -> tuple[Tensor, int, torch.device]:
    """An argument as int32 (batch, ...) with `depth` more dimensions, with seqlen and the mask's
    device.

    Lists stay on the CPU. adds_up: all numbers of a batch entry make up seqlen or less.
    """
    if seqlen is not None:
        check_int("seqlen", seqlen)
    if isinstance(value, Tensor):
        if seqlen is None:
            raise ValueError(f"seqlen is needed where {name} is a tensor")
        _check_integers(name, value, (depth, depth + 1))
        if device is not None and torch.empty(0, device=device).device != value.device:
            raise ValueError(f"{name} is on {value.device}, device={device}")
        if 0 in value.shape:
            raise ValueError(f"{name} is empty: shape {tuple(value.shape)}")
        sizes = value.to(torch.int32)
        return (sizes if value.dim() > depth else sizes[None]), seqlen, value.device
    if not is_list(value):
        raise TypeError(f"{name}={value!r} is no list of ints and no integer tensor")
    levels = _levels(name, value)
    if levels not in (depth, depth + 1):
        raise ValueError(f"{name}={value!r} is not {depth} or {depth + 1} lists deep")
    rows = _rectangle(value if levels > depth else [value], depth)
    sizes = torch.tensor(rows, dtype=torch.int32, device="cpu")
    if 0 in sizes.shape:
        raise ValueError(f"{name}={value!r} is empty")
    flat = sizes.flatten(1)
    needed = int((flat.sum(1) if adds_up else flat.amax(1)).max())
    if seqlen is None:
        seqlen = needed
        if seqlen > MAX_INT32:
            raise ValueError(f"{name} adds up to {needed}, more than {MAX_INT32}")
    elif adds_up and needed > seqlen:
        raise ValueError(f"{name} adds up to {needed}, more than seqlen={seqlen}")
    return sizes, seqlen, device_of(device)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _levels(name: str, value: Any) -> int:
    """Depth of nested lists, which must be the same everywhere and hold non-negative numbers."""
    if not is_list(value):
        check_int(f"a number in {name}", value)
        if value > MAX_INT32:
            raise ValueError(f"a number in {name}={value} is more than {MAX_INT32}")
        return 0
    levels = {_levels(name, item) for item in value}
    if len(levels) > 1:
        raise ValueError(f"{name}={value!r} mixes numbers and lists")
    return 1 + max(levels, default=0)


def _rectangle(rows: Any, depth: int) -> list[Any]:
    """Pad lists with zeros: empty documents before the others, empty answers after the others."""
    filler: Any = 0
    if depth == 2:
        width = max((len(parts) for row in rows for parts in row), default=0)
        filler = [0] * width
        rows = [[[*parts, *filler[len(parts) :]] for parts in row] for row in rows]
    longest = max((len(row) for row in rows), default=0)
    return [[*[filler] * (longest - len(row)), *row] for row in rows]


def _check_integers(name: str, value: Tensor, dims: tuple[int, int]) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {value.dtype}; it holds integers")
    if value.dim() not in dims:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, not {dims[0]} or {dims[1]} dims")


def token_rows(name: str, value: Any) -> Tensor:
    """A tensor with an integer for each token, as (batch, seqlen)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    _check_integers(name, value, (1, 2))
    if 0 in value.shape:
        raise ValueError(f"{name} is empty: shape {tuple(value.shape)}")
    return value if value.dim() == 2 else value[None]
