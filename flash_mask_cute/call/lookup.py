"""The key by which a prepared call is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.block_sparsity import from_block_mask
from flash_mask_cute.call.arguments import (
    NO_BACKWARD_OPTIONS,
    NO_LENGTHS,
    NO_OPTIONAL,
    AttentionCall,
    CallLengths,
    Masks,
)
from flash_mask_cute.call.check.inputs import tensors_of_masks
from flash_mask_cute.call.copies import misplaced
from flash_mask_cute.limits import ADDRESS_MASK
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.plain_tensors import are_plain


def mask_key(masks: Masks) -> tuple[Any, ...]:
    """A key that is equal for two calls only if one launch serves both, by these arguments.

    It holds the extents of tensors, but only the number of dimensions of aux tensors. Strides are
    run-time values. For callables it holds everything they reach, looked up anew each time. Raises
    AttributeError, TypeError, ValueError: no valid call has such arguments."""
    score_mod, mask_mod, aux_tensors, lists, columns = masks
    lists_key = columns_key = None
    if lists is not None:
        if isinstance(lists, SelectedBlocks):
            lists_key = SelectedBlocks, lists.block_size, *_meta(lists.indices)
        else:
            *tensors, block_size, seqlens, _ = from_block_mask(lists)
            tensors_key = (None if x is None else _meta(x) for x in tensors)
            lists_key = type(lists), block_size, seqlens, *tensors_key
    if columns is not None:
        columns_key = (
            (
                columns.causal,
                columns.documents,
                columns.seqlen_q,
                columns.one_sequence,
                *_meta(columns.startend_row_indices),
            )
            if isinstance(columns, ColumnMask)
            else _meta(columns)
        )
    return (
        None if score_mod is None else callable_key(score_mod),
        None if mask_mod is None else callable_key(mask_mod),
        None if aux_tensors is None else (type(aux_tensors), *map(_aux_meta, aux_tensors)),
        lists_key,
        columns_key,
    )


def _aux_meta(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.dtype, x.dim(), x.get_device(), x.layout, x.is_neg()


def _meta(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.get_device(), tensor.layout


def has_callables(key: tuple[Any, ...]) -> bool:
    """Whether the call of a key of `find_fwd` has a score_mod or a mask_mod."""
    of_masks = key[0]
    return of_masks is not None and not (of_masks[0] is of_masks[1] is None)


# bound here, because looking the name up in each call takes nearly as long as the answer
in_transform = torch._C._are_functorch_transforms_active


def find_fwd(
    prepared: Mapping[Any, Any], call: AttentionCall, key_of_masks: Any = None
) -> tuple[Any, Any]:
    """The prepared form of a forward, or None, and its key.

    prepared: by key, a `WithGivenOutputs` for calls that write tensors of the caller. key_of_masks:
    `mask_key(call.masks)`, if it is known.

    Calls have equal keys only if one prepared call serves them. They have the same metadata of all
    tensors, the same tensors among q, k and v aligned to 16 bytes, and the same other arguments.
    The key is None if an output is not aligned or shares memory, which is refused, or if no valid
    call has an argument of such a kind: a wrapper has the metadata of the tensor that it wraps.
    """
    key: Any = None
    try:
        tensors, masks, options, backward, _ = call
        q, k, v, sink, lengths, optional, out, lse, lse_low, max_scores, _ = tensors
        # types first, because `are_plain` takes longer
        if not (type(q) is type(k) is type(v) is Tensor or are_plain(q, k, v)) or in_transform():
            return None, None
        address: int = q.data_ptr() | k.data_ptr() | v.data_ptr()
        # addresses of all tensors, if some are outputs of the caller
        starts: Any = None
        if not (out is lse is lse_low is max_scores is None):
            start = 0 if out is None else out.data_ptr()
            if start & ADDRESS_MASK:
                # to be refused, however a call with the same metadata went
                return None, None
            starts = q.data_ptr(), k.data_ptr(), v.data_ptr(), start
            # which of these are given is part of the key
            is_alone = lse is lse_low is max_scores is sink is None
            if not (is_alone and lengths is NO_LENGTHS and optional is NO_OPTIONAL):
                others: Any = lse, lse_low, max_scores, sink, *optional, *lengths
                starts = *starts, *[x.data_ptr() for x in others if x is not None]
            if masks is not None:
                starts = *starts, *[x.data_ptr() for _, x in tensors_of_masks(masks)]
        key = (
            masks if masks is None else key_of_masks or mask_key(masks),
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            sink if sink is None else metadata(sink),
            None if lengths is NO_LENGTHS else _metadata_of_lengths(lengths),
            None if optional is NO_OPTIONAL else metadata_of(optional),
            out if out is None else metadata(out),
            lse if lse is None else metadata(lse),
            lse_low if lse_low is None else metadata(lse_low),
            max_scores if max_scores is None else metadata(max_scores),
            options,
        )  # fmt: skip
        if options.is_recorded and backward is not NO_BACKWARD_OPTIONS:
            # which the forward checks when it is prepared
            key = (*key, backward.deterministic, backward.config)
        if address & ADDRESS_MASK:
            # what copies them is another prepared call
            key = (*key, misplaced(q, k, v))
        found = prepared[key]
        return (found if starts is None else found.proved_for(starts, call)), key
    except KeyError:
        return None, key
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None


def metadata(tensor: Tensor) -> tuple[Any, ...]:
    """Metadata of an argument other than q. The device's index suffices, because calls are kept on
    CUDA only, as q shows. A kernel refuses another kind of device with the same index."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def metadata_of(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Of each, as `metadata`. Written out, as a comprehension and calls take a sixth longer."""
    found: list[Any] = []
    for x in tensors:
        found.append(None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.get_device()))
    return tuple(found)


def _metadata_of_lengths(lengths: CallLengths) -> tuple[Any, ...]:
    """As `metadata_of`. Without a loop it takes a fifth less."""
    a, b, c, d, e, f = lengths
    return (
        a if a is None else (type(a), a.shape, a.stride(), a.dtype, a.get_device()),
        b if b is None else (type(b), b.shape, b.stride(), b.dtype, b.get_device()),
        c if c is None else (type(c), c.shape, c.stride(), c.dtype, c.get_device()),
        d if d is None else (type(d), d.shape, d.stride(), d.dtype, d.get_device()),
        e if e is None else (type(e), e.shape, e.stride(), e.dtype, e.get_device()),
        f if f is None else (type(f), f.shape, f.stride(), f.dtype, f.get_device()),
    )


def _aux_key(daux: Sequence[Tensor | None], masks: Masks | None) -> tuple[Any, ...]:
    """Key of gradients and their aux tensors; gradients are added at coordinates of these."""
    aux_tensors = () if masks is None or masks.aux_tensors is None else masks.aux_tensors
    pairs = zip(daux, aux_tensors, strict=True)
    return tuple(None if x is None else (metadata(x), aux.shape) for x, aux in pairs)


def find_bwd(prepared: Mapping[Any, Any], call: AttentionCall) -> tuple[Any, Any]:
    """As `find_fwd`, of a backward."""
    key: Any = None
    try:
        given: Any = call.tensors
        q, k, v, sink, lengths = given[:5]
        out, lse, lse_low = given.out, given.lse, given.lse_low
        dout, dlse, dq, dk, dv, dsink, daux = given.gradients
        masks, (score_mod_bwd, deterministic, config) = call.masks, call.backward
        if not (
            type(q) is type(k) is type(v) is type(out) is type(dout) is type(lse) is Tensor
            or are_plain(q, k, v, out, dout, lse)
        ) or in_transform():  # fmt: skip
            return None, None
        if dlse is not None:
            # raises for a batch of autograd's vmap, which is no transform of functorch
            dlse.data_ptr()
        starts: Any = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr()
        address = starts[0] | starts[1] | starts[2] | starts[3] | starts[4]
        if dq is dk is dv is dsink is daux is None:
            starts = None
        else:
            outputs = dq, dk, dv, dsink, *(daux or ())
            starts = starts, *[None if x is None else x.data_ptr() for x in outputs]
            for start in starts[1:4]:
                if start is not None and start & ADDRESS_MASK:
                    # to be refused, however a call with the same metadata went
                    return None, None
        key = (
            masks if masks is None else mask_key(masks),
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            out.shape, out.stride(), out.dtype, out.get_device(),
            dout.shape, dout.stride(), dout.dtype, dout.get_device(),
            lse.shape, lse.stride(), lse.dtype, lse.get_device(),
            None if lengths is NO_LENGTHS else _metadata_of_lengths(lengths),
            metadata_of((lse_low, sink, dlse, dq, dk, dv, dsink)),
            None if daux is None else _aux_key(daux, masks),
            call.options,
            None if score_mod_bwd is None else callable_key(score_mod_bwd),
            deterministic,
            config,
        )  # fmt: skip
        if address & ADDRESS_MASK:
            key = (*key, misplaced(q, k, v, out, dout))
        found = prepared[key]
        return (found if starts is None else found.proved_for(starts, call)), key
    except KeyError:
        return None, key
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None
