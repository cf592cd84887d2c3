"""The arguments of a host call, in the bundles in which they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.call.config import BwdConfig, FwdConfig
from flash_mask_cute.call.problem import (
    Mods,
)
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.checks import number_of


class FwdOperands(NamedTuple):
    """The tensors that every forward has."""

    q: Tensor
    k: Tensor
    v: Tensor


class Extras(NamedTuple):
    """The tensors of a call that may be absent."""

    learnable_sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    lse_low: Tensor | None = None


class Settings(NamedTuple):
    """The other arguments of a call, but for masks; page_table is known and not supported yet."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int | None = None
    window_size_right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_start: int | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None
    return_lse: bool = True
    page_table: Any = None
    config: FwdConfig | None = None


class BwdOperands(NamedTuple):
    """The tensors that every backward has."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor


class BwdExtras(NamedTuple):
    """The tensors of a call that may be absent."""

    learnable_sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    lse_low: Tensor | None = None
    daux: Sequence[Tensor | None] | None = None


class BwdSettings(NamedTuple):
    """The other arguments of a call, but for masks."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int | None = None
    window_size_right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_start: int | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    deterministic: bool = False
    config: BwdConfig | None = None


class Masks(NamedTuple):
    """Arguments of the public call, as they are."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    block_sparse_tensors_torch: Any = None
    startend_row_indices: Tensor | ColumnMask | None = None

    @property
    def mods(self) -> Mods:
        return Mods(self.score_mod, self.mask_mod)


NO_MASKS = Masks()


def window_sides(window_size: Any) -> tuple[int | None, int | None]:
    """Left and right, as the host calls take them, of a pair in which -1 may stand for None.

    Raises:
        ValueError: it is no pair.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError):
        wrong = f"window_size must be (left, right), got {window_size!r}"
        if isinstance(window_size, bool):
            wrong += (
                "; arguments by position are those of flash-attn-4, which has no dropout_p before "
                "softmax_scale and causal: pass them by keyword"
            )
        raise ValueError(wrong) from None
    return None if left == -1 else left, None if right == -1 else right


def bundle(keywords: Mapping[str, Any]) -> tuple[Extras, Masks, Settings]:
    """Keywords of the public call in the form that the host path passes on.

    Raises:
        TypeError: a keyword is none of the call's, or config is no configuration.
    """
    extras, masks, settings = _sort_keywords(keywords, Extras, Masks, Settings)
    return extras, masks, _settled(settings, FwdConfig)


def bundle_bwd(keywords: Mapping[str, Any]) -> tuple[BwdExtras, Masks, BwdSettings]:
    """Keywords of the public backward in the form that the host path passes on; as `bundle`."""
    extras, masks, settings = _sort_keywords(keywords, BwdExtras, Masks, BwdSettings)
    return extras, masks, _settled(settings, BwdConfig)


def _settled(settings: Any, kind: type[FwdConfig] | type[BwdConfig]) -> Any:
    """With a number and a configuration for what may stand for them."""
    scale = number_of("softmax_scale", settings.softmax_scale)
    return settings._replace(softmax_scale=scale, config=kind.of(settings.config))


def _sort_keywords(keywords: Mapping[str, Any], *bundles: Any) -> list[Any]:
    """The named tuples `bundles`, each with its fields of the keywords."""
    unknown = sorted(keywords.keys() - {name for kind in bundles for name in kind._fields})
    if unknown:
        raise TypeError(f"unexpected keyword arguments {unknown}")
    return [
        kind(**{name: keywords[name] for name in kind._fields if name in keywords})
        for kind in bundles
    ]
