"""Attention of transformers models by this package: `register`, and masks for compiled models.

    from flash_mask_cute.integrations.transformers import register
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mask_cute")

docs/integrations.md says what is computed, what is refused, and what is fast.
"""

from __future__ import annotations

import functools
from typing import Any

from flash_mask_cute.runtime.packages import require_extra

require_extra("transformers")

# ruff: noqa: E402
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from flash_mask_cute.integrations.transformers.attention import layer_attention
from flash_mask_cute.integrations.transformers.masks import (
    AttentionMask,
    CallersMask,
    CallersMasks,
    Found,
    make_mask,
)
from flash_mask_cute.masks.column_mask import ColumnMask

__all__ = ["AttentionMask", "masks_for", "register"]

_THEIRS = ("eager", "sdpa", "flex_attention")


def register(name: str = "mask_cute", *, wide_layers: str = "refuse") -> str:
    """Register this package as an `attn_implementation` of transformers, under a name.

    It registers attention and masks. Attention alone would get no masks for padding, windows and
    packed documents, and transformers would not say so.

    wide_layers: what layers do that are too wide for the kernels: on a GPU a head dimension above
    256, on Hopper above 512. "refuse": they raise. "sdpa": transformers' `sdpa_attention_forward`
    computes them, with a warning once in a process.
    A mask that is not plainly causal becomes a dense one there. Registering a name again replaces
    what it did.

    Returns:
        The name.

    Raises:
        TypeError: name is no string.
        ValueError: name has "flash" in it, or "paged|", or is one of transformers' own; wide_layers
            is neither "refuse" nor "sdpa".

    Example:
        >>> from flash_mask_cute.integrations.transformers import register  # doctest: +SKIP
        >>> model = AutoModel.from_config(config, attn_implementation=register())  # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if "flash" in name:
        raise ValueError(
            f"name={name!r} has 'flash' in it, and transformers takes such names for packages of "
            "flash attention: it asks for a kernel of its hub and makes other masks. Take another "
            "name, such as 'mask_cute'"
        )
    if not name or name in _THEIRS or name.startswith("paged|"):
        raise ValueError(f"name={name!r} means something else in transformers: take another name")
    if wide_layers not in ("refuse", "sdpa"):
        raise ValueError(f"wide_layers must be 'refuse' or 'sdpa', got {wide_layers!r}")
    attention = functools.partial(layer_attention, wide_layers=wide_layers)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    return name


def masks_for(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    mask: ColumnMask | None = None,
    **more: Any,
) -> AttentionMask | dict[str, AttentionMask]:
    """The masks of a decoder for a batch, to pass to it as attention_mask, compiled or not.

    model: loaded with the registered attn_implementation. input_ids: (batch, queries); only its
    shape and device count. attention_mask: (batch, queries) of the padding, or None. position_ids:
    (batch or 1, queries); they begin anew with each packed document, which counts if there is no
    attention_mask. more: other arguments that the masks of the model depend on, such as
    token_type_ids. mask: a mask of `builders` over the tokens of input_ids, which takes the place
    of the model's causal mask; layers with a sliding window hide keys outside of it, too.

    A compiled model that makes its own masks makes dense ones. These masks stay windows and
    intervals, as without compilation. They hold for one batch without a cache.

    Returns:
        A mask, or a dict of masks for models with several kinds of layers.

    Raises:
        TypeError: mask is no ColumnMask.
        ValueError: the model has another attn_implementation, or is no decoder; mask was made for
            other lengths, or is given beside what transformers would make a mask of.
        NotImplementedError: mask is given, and a layer attends in chunks.

    Example:
        >>> masks = masks_for(model, input_ids, position_ids=position_ids)  # doctest: +SKIP
        >>> compiled(input_ids, attention_mask=masks, position_ids=position_ids)  # doctest: +SKIP

        >>> masks = masks_for(model, input_ids, mask=builders.image_blocks(ids))  # doctest: +SKIP
        >>> model(input_ids, attention_mask=masks).logits  # doctest: +SKIP
    """
    if mask is not None:
        _check_mask(
            mask, input_ids, {"attention_mask": attention_mask, "position_ids": position_ids} | more
        )
    config = model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    if AttentionMaskInterface._global_mapping.get(implementation) is not make_mask:
        raise ValueError(
            f"model has attn_implementation={implementation!r}, which register() did not make: "
            "masks_for makes masks for that of register()"
        )
    decoder = model.get_decoder()
    is_encoder = any(getattr(x, "is_causal", True) is False for x in decoder.modules())
    if config.is_encoder_decoder or is_encoder:
        raise ValueError(
            f"masks_for is for decoders, and {type(model).__name__} has layers that are not causal"
        )
    # where a model has its own way of making masks for generation, it takes more into account
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    batch, num_rows = input_ids.shape
    embeds = torch.empty((batch, num_rows, 0), dtype=model.dtype, device=input_ids.device)
    # the fourth argument, the cache, has another name in older releases
    made = make(model.config, embeds, attention_mask, None, position_ids=position_ids, **more)
    if mask is None:
        return made
    if isinstance(made, dict):
        return CallersMasks((kind, _with_columns(kind, x, mask)) for kind, x in made.items())
    return _with_columns("attention", made, mask)


def _check_mask(mask: ColumnMask, input_ids: Tensor, others: dict[str, Any]) -> None:
    if not isinstance(mask, ColumnMask):
        raise TypeError(f"mask must be a ColumnMask, as builders make them, got {mask!r}")
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"mask says all that a token sees, and masks_for got {', '.join(given)} beside it: say "
            "padding and documents in mask, and give position_ids to the model alone"
        )
    (batch, num_rows), (of_batch, _, keys, _) = input_ids.shape, mask.startend_row_indices.shape
    rows = mask.seqlen_q
    if keys != num_rows or (isinstance(rows, int) and rows != num_rows):
        raise ValueError(f"mask was made for {mask.extents}, and input_ids have {num_rows} tokens")
    if of_batch not in (1, batch):
        raise ValueError(f"mask has {of_batch} batch entries, and input_ids have {batch}")


def _with_columns(kind: str, made: AttentionMask, mask: ColumnMask) -> CallersMask:
    """A mask of the caller in layers of a kind, for which transformers made another one."""
    window = made.found.window
    if window is None:
        raise NotImplementedError(
            f"layers of kind {kind!r} see {made.form}, and only windows are supported beside mask"
        )
    found = Found("the caller's column intervals", columns=mask, left=window[0])
    return CallersMask(made._shape, made._function, found, made.device)
