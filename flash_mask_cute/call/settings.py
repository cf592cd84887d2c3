"""What a caller may say about the tiles of a kernel: the argument `config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# fields of configs that are no numbers
BOOLEANS = ("share_qo", "cta_pair", "skip_blocks", "clears_dq", "splits_keys")


_Given = TypeVar("_Given", bound="_Config")


@dataclass(frozen=True)
class _Config:
    """A config of either direction, whose fields are checked."""

    def __post_init__(self) -> None:
        for name, number in given_fields(self).items():
            wanted = bool if name in BOOLEANS else int
            if type(number) is not wanted:
                raise TypeError(f"config.{name} must be of type {wanted.__name__}, got {number!r}")
            smallest = 0 if name in ("value_cols", "polynomial") else 1
            if wanted is int and number < smallest:
                raise ValueError(f"config.{name} must be at least {smallest}, got {number}")

    @classmethod
    def from_value(cls: type[_Given], value: _Given | Mapping[str, Any] | None) -> _Given | None:
        """The config that the argument `config` of a public function stands for.

        Raises:
            TypeError: it is no such config, mapping or None, or a value has the wrong type.
            ValueError: a mapping has a key that is not a field, or a number is too small.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"config must be a {cls.__name__}, a mapping or None, got {type(value).__name__}"
            )
        known = cls.__dataclass_fields__
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise ValueError(f"config has unknown keys {unknown}; it may have {list(known)}")
        return cls(**value)


@dataclass(frozen=True)
class FwdConfig(_Config):
    """Tile shape of a forward kernel; None lets the library choose that field.

    tile_m, tile_n: query rows (64, 128, 192 or 256) and keys (a multiple of 16) of a tile. On
    Blackwell they are 256 or 128, and 128; for heads wider than 192/128 they are 128 and 128.
    num_stages: key and value blocks in flight. stages_q: query tiles in flight, 1 or 2.
    share_qo: the output is staged in the query's shared memory.
    cta_pair: on Blackwell, two CTAs with adjacent query tiles walk over the keys together.
    polynomial: on Blackwell, how many of 128 exponentials are computed by a polynomial on the
    multiply-add pipes: a multiple of 4 up to 64, or 0.
    skip_blocks: skip hidden key blocks, and the masking of full ones.
    False visits and masks every block, with the same result as one pass, bit for bit.

    Raises:
        TypeError, ValueError: a value has the wrong type, or a number is not positive.

    Example:
        >>> import torch
        >>> from flash_mask_cute import FwdConfig, flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)
        >>> out = flash_attn_func(q, k, v, config=(FwdConfig(tile_m=64, tile_n=32), None))
    """

    tile_m: int | None = None
    tile_n: int | None = None
    num_stages: int | None = None
    stages_q: int | None = None
    share_qo: bool | None = None
    cta_pair: bool | None = None
    skip_blocks: bool | None = None
    polynomial: int | None = None


@dataclass(frozen=True)
class BwdConfig(_Config):
    """Tile shape of a backward kernel; None lets the library choose that field.

    tile_m: query rows of a block, 64 or 128. stages_q, stages_do: blocks of queries and of output
    gradients in flight. stages_kv: key tiles in flight. All stages are 1 or 2.
    value_cols: columns of the values that stay in registers, a multiple of 16, or 0.
    skip_blocks: as in `FwdConfig`.
    clears_dq: the sums of dQ are set to 0 first, and every CTA adds to them. Otherwise the first
    CTA to reach a sum stores it (docs/backward_sm90.md#where-dq-goes).
    cta_pair: two CTAs with adjacent keys sum dQ together. This requires clears_dq, scores that are
    neither modified nor capped, and head_dim above 128, but on Blackwell head_dim and head_dim_v of
    97 to 128 or above 192, or head_dim of 129 to 192 and head_dim_v up to 128.
    splits_keys: on Hopper, each MMA warpgroup has keys of its own though head_dim or head_dim_v is
    above 128. This requires tiles of at most 320 columns of keys and values together, as 192/128
    and 160 have, one CTA, and scores that are neither modified nor capped.
    group_splits: CTAs that share the query heads of a group, each with an equal number of them. It
    divides the group size.

    Raises:
        TypeError, ValueError: as by `FwdConfig`; value_cols may be 0.

    Example:
        >>> import torch
        >>> from flash_mask_cute import BwdConfig, flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8, requires_grad=True)
        >>> flash_attn_func(q, k, v, config=(None, BwdConfig(tile_m=64))).sum().backward()
    """

    tile_m: int | None = None
    stages_q: int | None = None
    stages_do: int | None = None
    stages_kv: int | None = None
    value_cols: int | None = None
    skip_blocks: bool | None = None
    clears_dq: bool | None = None
    cta_pair: bool | None = None
    splits_keys: bool | None = None
    group_splits: int | None = None


def given_fields(config: _Config | None) -> dict[str, Any]:
    """The fields that are not None."""
    found = {} if config is None else vars(config)
    return {name: value for name, value in found.items() if value is not None}
