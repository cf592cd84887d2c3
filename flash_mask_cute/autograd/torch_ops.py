"""Attention as operators of torch, for what traces or intercepts calls.

torch.compile, torch.export, dispatch modes and tensor subclasses see operators of the namespace
flash_mask_cute, whose arguments are tensors, numbers and strings only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.autograd.arguments import Call, Configs
from flash_mask_cute.autograd.mod_names import optional_mod, optional_name
from flash_mask_cute.autograd.passes import (
    gradients_of,
    new_lse_low,
    refuse_dual_level,
    refuse_second_derivative,
    run_backward,
    run_forward,
    save,
)
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, from_block_mask
from flash_mask_cute.interface import (
    BwdConfig,
    FwdConfig,
)
from flash_mask_cute.mask_prep.column_bounds import num_key_blocks
from flash_mask_cute.mask_prep.documents import Split
from flash_mask_cute.masks.column_mask import ANY, ColumnMask, Documents
from flash_mask_cute.runtime.plain_tensors import check_plain, own_memory

# Bounds of column intervals are an operand of the operators, so that a graph computes them once for
# all calls with a mask. Tiles of both directions have as many keys for head dimensions up to 128,
# but for those of a forward with a score_mod up to 64; what it lacks, the forward computes itself.
_TILE_N = 128

# torch looks for subclasses in a Tensor[], but not in a Tensor[]?: an empty one is aux_tensors None
_CALL_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt? window_size_left, SymInt? window_size_right, float softcap, "
    "str? score_mod, str? mask_mod, Tensor[] aux_tensors, "
    "Tensor? mask_block_cnt, Tensor? mask_block_idx, Tensor? full_block_cnt, "
    "Tensor? full_block_idx, SymInt? block_q, SymInt? block_k, SymInt[]? list_seqlens, "
    "Tensor? startend_row_indices, Tensor? column_bounds, bool columns_causal, "
    "SymInt? column_seqlen_q, "
    "Tensor? document_starts, Tensor? document_rows, Tensor? document_bounds, "
    "str? score_mod_bwd, bool deterministic, bool? pack_gqa, str? config, SymInt? q_start"
)
# what stands for `ANY` there
_ANY_SEQLEN = -1
# where they are in that
_SCORE_MOD_POSITION = Call._fields.index("score_mod")
_AUX_POSITION = Call._fields.index("aux_tensors")
_library = torch.library.Library("flash_mask_cute", "DEF")
_library.define(
    "column_bounds(Tensor startend_row_indices, bool causal, Tensor? cu_seqlens_k) -> Tensor"
)
_library.define(
    "column_documents(Tensor startend_row_indices, bool causal, SymInt batch) "
    "-> (Tensor cu_seqlens, Tensor rows, Tensor bounds)"
)
_library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, {_CALL_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor lse_low)"
)
_library.define(
    "attention_bwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor out, Tensor lse, "
    f"Tensor? lse_low, Tensor dout, Tensor? dlse, int[] wants_aux, {_CALL_SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] daux)"
)


class _BoundedMask(ColumnMask):
    """A mask of one call whose bounds for `_TILE_N` operators have computed, and its documents.

    seqlen_q: as an operator has it (`_operator_seqlen`).
    """

    def __init__(
        self,
        startend_row_indices: Tensor,
        causal: bool,
        given: Tensor,
        documents: Documents | None = None,
        seqlen_q: int | None = None,
    ) -> None:
        rows = ANY if seqlen_q == _ANY_SEQLEN else seqlen_q
        super().__init__(startend_row_indices, causal, documents is not None, rows)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "given_documents", documents)

    def bounds(self, tile_n: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
        given: Tensor = vars(self)["given"]
        return given if tile_n == _TILE_N else super().bounds(tile_n, cu_seqlens_k)

    def split(self, batch: int) -> Documents:
        given: Documents = vars(self)["given_documents"]
        return given

    def operator_documents(self) -> tuple[Tensor | None, ...]:
        """Starts of the documents, their rows and the bounds of these, if there are any."""
        documents: Documents | None = vars(self)["given_documents"]
        if documents is None:
            return None, None, None
        of_rows = documents.mask
        return documents.cu_seqlens, of_rows.startend_row_indices, of_rows.bounds(_TILE_N)


def _operator_seqlen(seqlen_q: Any) -> int | None:
    """`ColumnMask.seqlen_q` as a number."""
    return _ANY_SEQLEN if seqlen_q == ANY else seqlen_q


def to_operator(call: Call, batch: int | None = None) -> tuple[Any, ...]:
    """The arguments of an operator by `_CALL_SCHEMA`.

    batch: of sequences, where the operator is to pack the documents of its mask.
    """
    lists: tuple[Any, ...] = (None,) * 7
    if call.block_sparse_tensors_torch is not None:
        *tensors, block_size, seqlens = from_block_mask(call.block_sparse_tensors_torch)
        lists = (*tensors, *((None, None) if block_size is None else block_size), seqlens)
    mask: Any = call.startend_row_indices
    columns: tuple[Any, ...] = (None, None, False, None)
    documents: tuple[Any, ...] = (None, None, None)
    if isinstance(mask, _BoundedMask):
        seqlen_q = _operator_seqlen(mask.seqlen_q)
        columns = mask.startend_row_indices, mask.bounds(_TILE_N), mask.causal, seqlen_q
        documents = mask.operator_documents()
    elif mask is not None:
        indices, causal, seqlen_q = mask, call.causal, None
        if not isinstance(mask, Tensor):
            indices, causal = mask.startend_row_indices, mask.causal
            seqlen_q = _operator_seqlen(mask.seqlen_q)
        bounds = torch.ops.flash_mask_cute.column_bounds(indices, causal, call.cu_seqlens_k)
        columns = indices, bounds, causal, seqlen_q
        if batch is not None:
            documents = torch.ops.flash_mask_cute.column_documents(indices, causal, batch)
    aux_tensors = [] if call.aux_tensors is None else list(call.aux_tensors)
    return (
        *call[:11], optional_name(call.score_mod), optional_name(call.mask_mod), aux_tensors,
        *lists, *columns, *documents, optional_name(call.score_mod_bwd), call.deterministic,
        call.pack_gqa, _config_text(call.config), call.q_start,
    )  # fmt: skip


def _from_operator(arguments: Sequence[Any]) -> Call:
    """The call with these arguments of an operator by `_CALL_SCHEMA`."""
    score_mod, mask_mod, aux_tensors, *rest = arguments[11:]
    *list_tensors, block_q, block_k, list_seqlens = rest[:7]
    indices, bounds, causal, seqlen_q, starts, rows, row_bounds = rest[7:14]
    score_mod_bwd, deterministic, pack_gqa, config, q_start = rest[14:]
    lists = None
    if list_tensors[0] is not None:
        block_size = None if block_q is None else (block_q, block_k)
        lists = BlockSparseTensorsTorch(*list_tensors)._replace(
            block_size=block_size, seqlens=list_seqlens and tuple(list_seqlens)
        )
    mask = documents = None
    if starts is not None:
        documents = Documents(starts, _BoundedMask(rows, causal, row_bounds))
    if indices is not None:
        mask = _BoundedMask(indices, causal, bounds, documents, seqlen_q)
    mods = optional_mod(score_mod), optional_mod(mask_mod)
    configs = None if config is None else Configs.of(tuple(json.loads(config)))
    others = optional_mod(score_mod_bwd), deterministic, pack_gqa, configs, q_start
    return Call._make((*arguments[:11], *mods, aux_tensors or None, lists, mask, *others))


def _config_text(config: Any) -> str | None:
    if config is None:
        return None
    # Dynamo knows dictionaries as constants, but not dataclasses
    pair = config if isinstance(config, tuple) else (config, config)
    return _text_of(tuple(asdict(x) if isinstance(x, FwdConfig | BwdConfig) else x for x in pair))


@torch.compiler.assume_constant_result
def _text_of(pair: tuple[Any, ...]) -> str:
    return json.dumps([None if x is None else asdict(x) for x in Configs.of(pair)])


def _without_identity(call: Call) -> Call:
    """With block lists that nothing is remembered for.

    Retiled lists are found by the identity and version of tensors. A compiled graph writes new
    contents into a tensor that it no longer needs, and torch does not count that.
    """
    lists = call.block_sparse_tensors_torch
    if lists is None:
        return call
    fresh = (None if x is None else x.detach() for x in lists[:4])
    return call._replace(block_sparse_tensors_torch=type(lists)(*fresh, *lists[4:]))


def _own_memory(arguments: Iterable[Any]) -> list[Any]:
    """Of an operator, with plain tensors for subclasses that did not take it apart."""
    found = []
    for x in arguments:
        if isinstance(x, list):
            x = _own_memory(x)
        found.append(own_memory(x) if isinstance(x, Tensor) else x)
    return found


@torch.library.impl(_library, "column_bounds", "CompositeExplicitAutograd")
def _column_bounds(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    indices, cu_seqlens_k = _own_memory((indices, cu_seqlens_k))
    return ColumnMask(indices, causal).bounds(_TILE_N, cu_seqlens_k)


@torch.library.register_fake("flash_mask_cute::column_bounds", lib=_library)
def _(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    batch, heads, seqlen_k, num_vectors = indices.shape
    num_blocks = num_key_blocks(seqlen_k, _TILE_N, cu_seqlens_k)
    return indices.new_empty((batch, heads, 2 * num_vectors, num_blocks))


@torch.library.impl(_library, "column_documents", "CompositeExplicitAutograd")
def _column_documents(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    starts, mask = ColumnMask(own_memory(indices), causal).split(batch)
    return starts, mask.startend_row_indices, mask.bounds(_TILE_N, starts)


@torch.library.register_fake("flash_mask_cute::column_documents", lib=_library)
def _(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    return Split.empty_like(indices, batch)[2:]


@torch.library.impl(_library, "attention_fwd", "CompositeExplicitAutograd")
def _attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """lse_low has no elements where there is no score_mod."""
    q, k, v, sink, *of_call = _own_memory((q, k, v, sink, *arguments))
    # a compiled graph runs on what it is given
    refuse_dual_level()
    call = _without_identity(_from_operator(of_call))
    lse_low = new_lse_low(q, call)
    out, lse = run_forward(q, k, v, sink, call, lse_low=lse_low)
    return out, lse, q.new_empty(0, dtype=torch.float32) if lse_low is None else lse_low


@torch.library.register_fake("flash_mask_cute::attention_fwd", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *rows, heads_q, _ = q.shape
    out = q.new_empty((*rows, heads_q, v.shape[-1]))
    lse_shape = *rows[:-1], heads_q, rows[-1]
    low_shape = (0,) if arguments[_SCORE_MOD_POSITION] is None else lse_shape
    lse, lse_low = (q.new_empty(shape, dtype=torch.float32) for shape in (lse_shape, low_shape))
    return out, lse, lse_low


@torch.library.impl(_library, "attention_bwd", "CompositeExplicitAutograd")
def _attention_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    wants_aux: list[int],
    *arguments: Any,
) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, lse_low, dout, dlse, *of_call = _own_memory(
        (q, k, v, sink, out, lse, lse_low, dout, dlse, *arguments)
    )
    call = _without_identity(_from_operator(of_call))
    dq, dk, dv, dsink, *daux = run_backward(
        q, k, v, sink, out, lse, lse_low, dout, dlse, wants_aux, call
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink, daux


@torch.library.register_fake("flash_mask_cute::attention_bwd", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    _, _, _, _, _, wants_aux, *of_call = arguments
    aux_tensors = of_call[_AUX_POSITION]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return dq, dk, dv, dsink, [torch.empty_like(aux_tensors[i]) for i in wants_aux]


@torch.library.impl(_library, "attention_bwd", "Batched")
def _refuse_batches(*arguments: Any) -> Any:
    """Of `torch.autograd.grad(is_grads_batched=True)`; the vmap of torch.func asks for each."""
    names = "q", "k", "v", "learnable_sink", "out", "lse", "lse_low", "dout", "dlse"
    for name, x in zip(names, arguments, strict=False):
        if x is not None:
            check_plain(name, x)


# of whom the errors are those of attention
IMPLEMENTATIONS = frozenset(
    implementation.__code__
    for implementation in (_attention_fwd, _attention_bwd, _column_bounds, _column_documents)
)


def run_backward_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    *others, call = arguments
    dq, dk, dv, dsink, daux = torch.ops.flash_mask_cute.attention_bwd(*others, *to_operator(call))
    return dq, dk, dv, None if others[3] is None else dsink, *daux


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, *arguments = inputs
    out, lse, lse_low = output
    call = _from_operator(arguments)
    save(ctx, q, k, v, sink, out, lse, None if call.score_mod is None else lse_low, call)
    ctx.num_arguments = len(arguments)


def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    others: list[Any] = [None] * ctx.num_arguments
    asked = ctx.needs_input_grad[4 + _AUX_POSITION]
    wants_aux = [i for i, is_asked in enumerate(asked) if is_asked]
    # nothing has a gradient by lse_low
    gradients, daux = gradients_of(ctx, grads[:2], run_backward_operator, wants_aux)
    others[_AUX_POSITION] = [daux.get(i) for i in range(len(asked))]
    return *gradients, *others


torch.library.register_autograd(
    "flash_mask_cute::attention_fwd",
    _operator_gradients,
    setup_context=_setup_operator,
    lib=_library,
)
torch.library.register_autograd(
    "flash_mask_cute::attention_bwd", refuse_second_derivative, lib=_library
)
