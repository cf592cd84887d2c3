"""Dense calls with documents in their column intervals, computed as packed sequences.

`mask_prep/documents.py` gives the reasons; `mask_bits.py` decides about documents of a mask_mod.

The host cannot know whether intervals hold documents without a wait. So they are declared, or the
call is so large that looking for them, and packed kernels where there are none, cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import (
    AttentionCall,
    Direction,
    Gradients,
    Masks,
    PreparedBwd,
    PreparedFwd,
    Tensors,
)
from flash_mask_cute.call.copies import new_gradient
from flash_mask_cute.call.execution_plan import Instead
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.masks import column_mask_of
from flash_mask_cute.limits import MAX_PACKED_ROWS, MAX_PACKED_SEQLEN
from flash_mask_cute.mask_prep.documents import DOCUMENT_STRIDE
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import NO_START
from flash_mask_cute.runtime.named_tuples import made, replaced

# -- which --------------------------------------------------------------------------------------

# Undeclared documents are looked for in calls with at least so many tokens in a sequence and so
# many operations of an unmasked forward. From this length on, packed kernels lose about 1 % or less
# if there are no documents
# (docs/facts/masks.md#packing-every-mask-costs-those-without-documents).
MIN_UNDECLARED_SEQLEN = 16384
# To find documents in a new mask takes 20 us, which is 1 % of 2 ms. A mask may hide three quarters
# of the scores. So without the mask the call must take 8 ms, at 600 TFLOP/s so many operations.
MIN_UNDECLARED_OPERATIONS = 5e12


def holds_documents(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, others: Iterable[object]
) -> bool:
    """Whether a mask may hold documents, and this call can be packed by them. causal: of the call;
    it must not hide more than the mask does. others: arguments that packed sequences cannot take
    unchanged."""
    indices, mask_is_causal, documents = mask, causal, None
    if isinstance(mask, ColumnMask):
        indices, mask_is_causal = mask.startend_row_indices, mask.causal
        documents = mask.documents
    if documents is False or any(x is not None for x in others):
        return False
    if causal is not False and causal is not mask_is_causal:
        return False
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v, indices)):
        return False
    batch, seqlen = q.shape[:2]
    of_mask, heads, num_keys, _ = indices.shape
    return (
        k.shape[:2] == v.shape[:2] == (batch, seqlen)
        and batch > 0
        and DOCUMENT_STRIDE < seqlen <= MAX_PACKED_SEQLEN
        and batch * seqlen < MAX_PACKED_ROWS
        and of_mask in (1, batch)
        and heads == 1
        and num_keys == seqlen
        and indices.device == q.device
        and rows_follow(q, k, v)
        and (documents is True or _is_large(q, v, mask_is_causal))
    )


def _is_large(q: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether documents are looked for that nobody declared."""
    batch, seqlen, heads, head_dim = q.shape
    scores = batch * heads * seqlen * seqlen // (2 if is_causal else 1)
    operations = 2 * scores * (head_dim + v.shape[3])
    return seqlen >= MIN_UNDECLARED_SEQLEN and operations >= MIN_UNDECLARED_OPERATIONS


def rows_follow(*tensors: Tensor | None) -> bool:
    """Whether the rows of all batch entries of a tensor (batch, row, ...) are contiguous."""
    return all(
        x is None or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors
    )


# -- how ----------------------------------------------------------------------------------------


def packs_declared_documents(call: AttentionCall) -> bool:
    """Whether documents of a call's mask become packed sequences, for operators. Only declared
    ones do: a limit on lengths would be a guard of the trace."""
    mask = None if call.masks is None else call.masks.startend_row_indices
    is_declared = isinstance(mask, ColumnMask) and mask.documents is True
    return is_declared and _may_hold_documents(call)


def _may_hold_documents(call: AttentionCall) -> bool:
    x, options, masks = call.tensors, call.options, call.masks
    if masks is None or options.q_start.shifts_square():
        return False
    others = (
        *x.lengths.of_sequences(),
        # sums are cut from the start of a sequence, and not of a document
        *(options.seqlen_k_per_split, options.max_seqlen_q, options.max_seqlen_k, *x.optional),
        *(masks.score_mod, masks.mask_mod, masks.block_sparse_tensors_torch),
    )
    return holds_documents(x.q, x.k, x.v, masks.startend_row_indices, options.causal, others)


def can_pack(call: AttentionCall) -> bool:
    """Whether documents may be sequences: all tensors that a packed batch does not copy have
    contiguous rows, and keys are not counted from the start of a sequence."""
    if call.options.seqlen_k_per_split is not None:
        return False
    x, of = call.tensors, call.tensors.gradients
    return rows_follow(x.q, x.k, x.v, x.out, of.dq, of.dk, of.dv)


def call_by_documents(facts: CallFacts) -> Instead | None:
    """The call with the documents of its mask as packed sequences, if it is computed so."""
    call, tensors = facts.call, facts.call.tensors
    if not (_may_hold_documents(call) and can_pack(call)):
        return None
    batch, seqlen = tensors.q.shape[:2]
    if call.direction is Direction.BACKWARD:
        tensors = as_rows_bwd(with_gradients(tensors))
    else:
        tensors = as_rows(tensors)
    tensors, masks = by_documents(tensors, call.masks, call.options.causal, batch)
    options = replaced(call.options, max_seqlen_q=seqlen, max_seqlen_k=seqlen, q_start=NO_START)
    packed = replaced(call, tensors=tensors, masks=masks, options=options)
    note = "the documents of the mask are packed sequences"
    return Instead(packed, packing(facts, facts.masks.is_causal), note)


def packing(facts: CallFacts, mask_causal: bool | None) -> Callable[[Any], Any]:
    """Makes a prepared call of that of a packed batch. mask_causal: as in `PackedForward`."""
    if facts.is_forward:
        return partial(PackedForward, needs_lse=facts.needs_lse, mask_causal=mask_causal)
    return partial(PackedBackward, mask_causal=mask_causal)


def by_documents(
    tensors: Tensors, masks: Masks | None, causal: bool, batch: int
) -> tuple[Tensors, Masks]:
    """The call with the documents of its mask as sequences. causal: of the call."""
    assert masks is not None and masks.startend_row_indices is not None
    mask = column_mask_of(masks.startend_row_indices, causal)
    starts, row_indices = mask.split(batch)
    lengths = replaced(tensors.lengths, cu_seqlens_q=starts, cu_seqlens_k=starts)
    return replaced(tensors, lengths=lengths), replaced(masks, startend_row_indices=row_indices)


def with_gradients(tensors: Tensors) -> Tensors:
    """The call with new tensors for missing gradients. Here no rows follow the last sequence, which
    a launch would clear in tensors of its own."""
    x, given = tensors, tensors.gradients
    gradients = replaced(
        given,
        dq=new_gradient(x.q) if given.dq is None else given.dq,
        dk=new_gradient(x.k) if given.dk is None else given.dk,
        dv=new_gradient(x.v) if given.dv is None else given.dv,
    )
    return replaced(x, gradients=gradients)


# The tensors of a dense call by their form in a packed batch: (batch, row, ...) becomes rows, and
# (batch, heads, row) becomes (heads, row). `_may_hold_documents` refuses all other tensors.
AS_ROWS = "q", "k", "v", "out", "dout", "dq", "dk", "dv"
BY_HEADS = "lse", "lse_low", "max_scores", "dlse"
UNCHANGED = "learnable_sink", "dsink", "daux"
# their places in `Tensors` and in `Gradients`
_ROWS, _HEADS = (
    [[i for i, x in enumerate(kind._fields) if x in names] for kind in (Tensors, Gradients)]
    for names in (AS_ROWS, BY_HEADS)
)


def as_rows(tensors: Tensors) -> Tensors:
    """The tensors of a forward in the form of a packed batch. By heads there are only outputs:
    those of several sequences are new memory."""
    return made(Tensors, _in_rows(tensors, _ROWS[0], _HEADS[0], _memory_by_heads))


def as_rows_bwd(tensors: Tensors) -> Tensors:
    """The tensors of a backward in the form of a packed batch. lse and dlse of several sequences
    are copied, and dout if its rows are not contiguous."""
    given, gradients = (
        _in_rows(bundle, rows, heads, lambda x: x.transpose(0, 1).flatten(1))
        for bundle, rows, heads in zip((tensors, tensors.gradients), _ROWS, _HEADS, strict=True)
    )
    return made(Tensors, given)._replace(gradients=made(Gradients, gradients))


def _in_rows(
    bundle: tuple[Any, ...],
    rows: list[int],
    heads: list[int],
    by_heads: Callable[[Tensor], Tensor],
) -> tuple[Any, ...]:
    """The fields of a bundle: those at `rows` (batch * row, ...), those at `heads` by heads."""
    fields = list(bundle)
    for i in rows:
        fields[i] = None if fields[i] is None else fields[i].flatten(0, 1)
    for i in heads:
        fields[i] = None if fields[i] is None else by_heads(fields[i])
    return tuple(fields)


def _memory_by_heads(output: Tensor) -> Tensor:
    """Memory (heads, batch * seqlen) for an output (batch, heads, seqlen): its own, if it can."""
    batch, heads, seqlen = output.shape
    return output[0] if batch == 1 else output.new_empty((heads, batch * seqlen))


# -- prepared calls ----------------------------------------------------------------------------


@dataclass(slots=True)
class PackedForward:
    """Runs the prepared call of a packed batch on dense tensors.

    needs_lse: the packed call computes LSE. mask_causal: what intervals in a plain tensor mean;
    None: the packed call itself finds documents in a mask_mod.
    """

    inner: PreparedFwd
    needs_lse: bool
    mask_causal: bool | None

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        batch, seqlen, heads, _ = q.shape
        # results of their own: autograd refuses to have a view changed in place
        out, lse = tensors.out, tensors.lse
        if out is None:
            out = q.new_empty((batch, seqlen, heads, tensors.v.shape[-1]))
        if lse is None and self.needs_lse:
            lse = q.new_empty((batch, heads, seqlen), dtype=torch.float32)
        packed = as_rows(tensors._replace(out=out, lse=lse))
        if self.mask_causal is not None:
            packed, masks = by_documents(packed, masks, self.mask_causal, batch)
        self.inner(packed, masks)
        if batch > 1:
            # a kernel would not ask in which mode the caller made them
            with torch.inference_mode():
                for given, by_head in zip(
                    (lse, tensors.max_scores), (packed.lse, packed.max_scores), strict=True
                ):
                    if given is not None and by_head is not None:
                        given.copy_(by_head.unflatten(1, (batch, -1)).transpose(0, 1))
        return out, lse


@dataclass(slots=True)
class PackedBackward:
    """As `PackedForward`, for a backward."""

    inner: PreparedBwd
    mask_causal: bool | None

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = with_gradients(tensors)
        given: Any = tensors.gradients
        if self.mask_causal is not None:
            batch = tensors.q.shape[0]
            tensors, masks = by_documents(tensors, masks, self.mask_causal, batch)
        self.inner(as_rows_bwd(tensors), masks)
        return given.dq, given.dk, given.dv
