"""Attention as torch operators, for calls that are traced or intercepted.

torch.compile, torch.export, dispatch modes and tensor subclasses see operators of the namespace
flash_mask_cute, whose arguments are tensors, numbers and strings only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.autograd.arguments import Call, Configs
from flash_mask_cute.autograd.mod_names import optional_mod, optional_name
from flash_mask_cute.autograd.passes import (
    gradients_of,
    new_lse_low,
    new_max_scores,
    refuse_dual_level,
    refuse_second_derivative,
    run_backward,
    run_forward,
)
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, from_block_mask
from flash_mask_cute.call.arguments import QStart
from flash_mask_cute.call.mask_extents import check_position
from flash_mask_cute.call.problem import END
from flash_mask_cute.interface import (
    BwdConfig,
    FwdConfig,
)
from flash_mask_cute.mask_prep.column_bounds import num_key_blocks
from flash_mask_cute.mask_prep.documents import DocumentTensors
from flash_mask_cute.masks.column_mask import ANY, ColumnMask, Documents
from flash_mask_cute.runtime.constant_result import assume_constant_result, is_symbol
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
    "str? score_mod_bwd, bool deterministic, bool? pack_gqa, str? config, SymInt? q_start, "
    "Tensor? q_starts, Tensor? page_table, int num_splits, bool wants_max, Tensor? scale"
)
# what stands for `ANY` and for `END` there
_ANY_SEQLEN = _END_POSITION = -1


class OperatorCall(NamedTuple):
    """The arguments of an operator by `_CALL_SCHEMA`, in its order. Callables are names of
    `mod_names`, config is text. Arguments without a default are in `Call` as well. scale: the
    softmax_scale in a 0-dim CPU tensor, where it is an input of a graph."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window_size_left: int | None
    window_size_right: int | None
    softcap: float
    score_mod: str | None
    mask_mod: str | None
    aux_tensors: list[Tensor]
    mask_block_cnt: Tensor | None = None
    mask_block_idx: Tensor | None = None
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_q: int | None = None
    block_k: int | None = None
    list_seqlens: Sequence[int] | None = None
    startend_row_indices: Tensor | None = None
    column_bounds: Tensor | None = None
    columns_causal: bool = False
    column_seqlen_q: int | None = None
    document_starts: Tensor | None = None
    document_rows: Tensor | None = None
    document_bounds: Tensor | None = None
    score_mod_bwd: str | None = None
    deterministic: bool = False
    pack_gqa: bool | None = None
    config: str | None = None
    q_start: int | None = None
    q_starts: Tensor | None = None
    page_table: Tensor | None = None
    num_splits: int = 0
    wants_max: bool = False
    scale: Tensor | None = None


_AUX_POSITION = OperatorCall._fields.index("aux_tensors")
_library = torch.library.Library("flash_mask_cute", "DEF")
# Caches of compiled graphs on disk know operators by name and schema: one whose results change
# their form gets another name.
_library.define(
    "block_bounds(Tensor startend_row_indices, bool causal, Tensor? cu_seqlens_k) -> Tensor"
)
_library.define(
    "split_documents(Tensor startend_row_indices, bool causal, SymInt batch) "
    "-> (Tensor cu_seqlens, Tensor rows, Tensor bounds)"
)
_library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, {_CALL_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor lse_low, Tensor max_scores)"
)
_library.define(
    "attention_bwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor out, Tensor lse, "
    f"Tensor? lse_low, Tensor dout, Tensor? dlse, int[] wants_aux, {_CALL_SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] daux)"
)


class _BoundedMask(ColumnMask):
    """A mask of one call with its bounds for `_TILE_N`, computed by operators, and its documents.

    given: the bounds with their last two dimensions as one. Operators return them so, because torch
    makes another graph where a dimension is 1, as the number of blocks may be. seqlen_q: in the
    form of an operator (`_operator_seqlen`).
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
        extents = 2 * self.num_vectors
        given = given.unflatten(2, (extents, given.shape[2] // extents))
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "given_documents", documents)

    def bounds(self, tile_n: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
        given: Tensor = vars(self)["given"]
        return given if tile_n == _TILE_N else super().bounds(tile_n, cu_seqlens_k)

    def split(self, batch: int) -> Documents:
        given: Documents = vars(self)["given_documents"]
        return given

    def operator_documents(self) -> dict[str, Tensor]:
        """Starts of the documents, their rows and the bounds of the rows, if there are any."""
        documents: Documents | None = vars(self)["given_documents"]
        if documents is None:
            return {}
        rows = documents.mask
        return {
            "document_starts": documents.cu_seqlens,
            "document_rows": rows.startend_row_indices,
            "document_bounds": rows.bounds(_TILE_N).flatten(2),
        }


def _operator_seqlen(seqlen_q: Any) -> int | None:
    """`ColumnMask.seqlen_q` as a number."""
    return _ANY_SEQLEN if seqlen_q == ANY else seqlen_q


def to_operator(call: Call, batch: int | None = None, wants_max: bool = False) -> OperatorCall:
    """A call as the arguments of an operator.

    batch: number of sequences, if the operator packs the documents of its mask. wants_max: the
    forward also returns the largest score of each row.
    """
    return OperatorCall(
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqused_q=call.seqused_q,
        seqused_k=call.seqused_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        **_operator_scale(call.softmax_scale),
        causal=call.causal,
        window_size_left=call.window_size_left,
        window_size_right=call.window_size_right,
        softcap=call.softcap,
        score_mod=optional_name(call.score_mod),
        mask_mod=optional_name(call.mask_mod),
        aux_tensors=[] if call.aux_tensors is None else list(call.aux_tensors),
        score_mod_bwd=optional_name(call.score_mod_bwd),
        deterministic=call.deterministic,
        pack_gqa=call.pack_gqa,
        config=_config_text(call.config),
        page_table=call.page_table,
        num_splits=call.num_splits,
        wants_max=wants_max,
        **_operator_start(call.q_start),
        **_operator_lists(call),
        **_operator_columns(call, batch),
    )


def _operator_scale(scale: Any) -> dict[str, Any]:
    """The argument softmax_scale for an operator. Numbers of operators are constants of a graph if
    they are floats, so a float that changes goes in a tensor."""
    if isinstance(scale, Tensor):
        # a copy: what the caller's tensor holds when the backward runs does not matter
        return {"softmax_scale": None, "scale": scale.detach().clone()}
    if is_symbol(scale):
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return {"softmax_scale": None, "scale": one * scale}
    return {"softmax_scale": scale}


def _operator_start(q_start: Any) -> dict[str, Any]:
    """The argument q_start for an operator, which takes numbers and tensors.

    Raises:
        TypeError, ValueError: it is neither, nor `END`.
    """
    if q_start is None:
        return {}
    if isinstance(q_start, Tensor):
        return {"q_starts": q_start}
    check_position(q_start)
    return {"q_start": _END_POSITION if q_start == END else q_start}


def _start_of(given: OperatorCall) -> QStart:
    if given.q_starts is not None:
        return given.q_starts
    return END if given.q_start == _END_POSITION else given.q_start


def _operator_lists(call: Call) -> dict[str, Any]:
    if call.block_sparse_tensors_torch is None:
        return {}
    lists = from_block_mask(call.block_sparse_tensors_torch)
    block_q, block_k = (None, None) if lists.block_size is None else lists.block_size
    return {
        "mask_block_cnt": lists.mask_block_cnt,
        "mask_block_idx": lists.mask_block_idx,
        "full_block_cnt": lists.full_block_cnt,
        "full_block_idx": lists.full_block_idx,
        "block_q": block_q,
        "block_k": block_k,
        "list_seqlens": lists.seqlens,
    }


def _operator_columns(call: Call, batch: int | None) -> dict[str, Any]:
    mask: Any = call.startend_row_indices
    if mask is None:
        return {}
    if isinstance(mask, _BoundedMask):
        return {
            "startend_row_indices": mask.startend_row_indices,
            "column_bounds": mask.bounds(_TILE_N).flatten(2),
            "columns_causal": mask.causal,
            "column_seqlen_q": _operator_seqlen(mask.seqlen_q),
            **mask.operator_documents(),
        }
    indices, causal, seqlen_q = mask, call.causal, None
    if not isinstance(mask, Tensor):
        indices, causal = mask.startend_row_indices, mask.causal
        seqlen_q = _operator_seqlen(mask.seqlen_q)
    columns = {
        "startend_row_indices": indices,
        "column_bounds": torch.ops.flash_mask_cute.block_bounds(indices, causal, call.cu_seqlens_k),
        "columns_causal": causal,
        "column_seqlen_q": seqlen_q,
    }
    if batch is not None:
        starts, rows, bounds = torch.ops.flash_mask_cute.split_documents(indices, causal, batch)
        columns |= {
            "document_starts": starts, "document_rows": rows, "document_bounds": bounds,
        }  # fmt: skip
    return columns


def _from_operator(given: OperatorCall) -> Call:
    """The call with these arguments of an operator."""
    x = given
    lists = mask = documents = None
    if x.mask_block_cnt is not None and x.mask_block_idx is not None:
        block_size = None
        if x.block_q is not None and x.block_k is not None:
            block_size = x.block_q, x.block_k
        lists = BlockSparseTensorsTorch(
            x.mask_block_cnt,
            x.mask_block_idx,
            x.full_block_cnt,
            x.full_block_idx,
            block_size,
            tuple(x.list_seqlens) if x.list_seqlens else None,  # type: ignore[arg-type]
        )
    if x.document_starts is not None:
        rows: Any = x.document_rows
        bounds: Any = x.document_bounds
        documents = Documents(x.document_starts, _BoundedMask(rows, x.columns_causal, bounds))
    if x.startend_row_indices is not None:
        bounds = x.column_bounds
        mask = _BoundedMask(
            x.startend_row_indices, x.columns_causal, bounds, documents, x.column_seqlen_q
        )
    return Call(
        cu_seqlens_q=x.cu_seqlens_q,
        cu_seqlens_k=x.cu_seqlens_k,
        seqused_q=x.seqused_q,
        seqused_k=x.seqused_k,
        max_seqlen_q=x.max_seqlen_q,
        max_seqlen_k=x.max_seqlen_k,
        softmax_scale=x.softmax_scale if x.scale is None else x.scale.item(),
        causal=x.causal,
        window_size_left=x.window_size_left,
        window_size_right=x.window_size_right,
        softcap=x.softcap,
        score_mod=optional_mod(x.score_mod),
        mask_mod=optional_mod(x.mask_mod),
        aux_tensors=x.aux_tensors or None,
        block_sparse_tensors_torch=lists,
        startend_row_indices=mask,
        score_mod_bwd=optional_mod(x.score_mod_bwd),
        deterministic=x.deterministic,
        pack_gqa=x.pack_gqa,
        config=None if x.config is None else Configs.create(tuple(json.loads(x.config))),
        q_start=_start_of(x),
        page_table=x.page_table,
        num_splits=x.num_splits,
    )


def _config_text(config: Any) -> str | None:
    if config is None:
        return None
    pair = config if isinstance(config, tuple) else (config, config)
    return _text_of(tuple(_as_dictionary(x) for x in pair))


def _as_dictionary(config: Any) -> Any:
    """Dynamo knows dictionaries as constants, but not dataclasses, nor the copies that `asdict`
    makes before Python 3.12."""
    names = _NAMES.get(type(config))
    return config if names is None else {name: getattr(config, name) for name in names}


_NAMES = {kind: tuple(x.name for x in fields(kind)) for kind in (FwdConfig, BwdConfig)}


@assume_constant_result
def _text_of(pair: tuple[Any, ...]) -> str:
    return json.dumps([None if x is None else asdict(x) for x in Configs.create(pair)])


def _without_identity(call: Call) -> Call:
    """The call with block lists for which nothing is cached.

    Retiled lists are cached by the identity and version of tensors. A compiled graph reuses the
    memory of tensors, and torch does not count these writes.
    """
    lists = call.block_sparse_tensors_torch
    if lists is None:
        return call
    fresh = {name: x.detach() for name, x in lists._asdict().items() if isinstance(x, Tensor)}
    return call._replace(block_sparse_tensors_torch=lists._replace(**fresh))


def _own_memory(arguments: Iterable[Any]) -> list[Any]:
    """The arguments of an operator, with plain tensors for subclasses that did not unwrap it."""
    found = []
    for x in arguments:
        if isinstance(x, list):
            x = _own_memory(x)
        found.append(own_memory(x) if isinstance(x, Tensor) else x)
    return found


@torch.library.impl(_library, "block_bounds", "CompositeExplicitAutograd")
def _column_bounds(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    indices, cu_seqlens_k = _own_memory((indices, cu_seqlens_k))
    return ColumnMask(indices, causal).bounds(_TILE_N, cu_seqlens_k).flatten(2)


@torch.library.register_fake("flash_mask_cute::block_bounds", lib=_library)
def _(indices: Tensor, causal: bool, cu_seqlens_k: Tensor | None) -> Tensor:
    batch, heads, seqlen_k, num_vectors = indices.shape
    num_blocks = num_key_blocks(seqlen_k, _TILE_N, cu_seqlens_k)
    return indices.new_empty((batch, heads, 2 * num_vectors * num_blocks))


@torch.library.impl(_library, "split_documents", "CompositeExplicitAutograd")
def _column_documents(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    starts, mask = ColumnMask(own_memory(indices), causal).split(batch)
    return starts, mask.startend_row_indices, mask.bounds(_TILE_N, starts).flatten(2)


@torch.library.register_fake("flash_mask_cute::split_documents", lib=_library)
def _(indices: Tensor, causal: bool, batch: int) -> tuple[Tensor, ...]:
    split = DocumentTensors.empty_like(indices, batch)
    return split.cu_seqlens, split.rows, split.bounds.flatten(2)


@torch.library.impl(_library, "attention_fwd", "CompositeExplicitAutograd")
def _attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lse_low has no elements without a score_mod, max_scores has none unless requested."""
    q, k, v, sink, *call_args = _own_memory((q, k, v, sink, *arguments))
    # a compiled graph runs on what it is given
    refuse_dual_level()
    given = OperatorCall._make(call_args)
    call = _without_identity(_from_operator(given))
    lse_low, largest = new_lse_low(q, call), new_max_scores(q) if given.wants_max else None
    out, lse = run_forward(q, k, v, sink, call, lse_low=lse_low, max_scores=largest)
    absent = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in (lse_low, largest))
    return out, lse, *absent


@torch.library.register_fake("flash_mask_cute::attention_fwd", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rows, heads_q, _ = q.shape
    out = q.new_empty((*rows, heads_q, v.shape[-1]))
    lse_shape, given = (*rows[:-1], heads_q, rows[-1]), OperatorCall._make(arguments)
    low_shape = (0,) if given.score_mod is None else lse_shape
    max_shape = lse_shape if given.wants_max else (0,)
    shapes = lse_shape, low_shape, max_shape
    lse, lse_low, largest = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return out, lse, lse_low, largest


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
    q, k, v, sink, out, lse, lse_low, dout, dlse, *call_args = _own_memory(
        (q, k, v, sink, out, lse, lse_low, dout, dlse, *arguments)
    )
    call = _without_identity(_from_operator(OperatorCall._make(call_args)))
    dq, dk, dv, dsink, *daux = run_backward(
        q, k, v, sink, out, lse, lse_low, dout, dlse, wants_aux, call
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink, daux


@torch.library.register_fake("flash_mask_cute::attention_bwd", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    _out, _lse, _lse_low, _dout, _dlse, wants_aux, *call_args = arguments
    aux_tensors = OperatorCall._make(call_args).aux_tensors
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return dq, dk, dv, dsink, [torch.empty_like(aux_tensors[i]) for i in wants_aux]


@torch.library.impl(_library, "attention_bwd", "Batched")
def _refuse_batches(*arguments: Any) -> Any:
    """Refuse `torch.autograd.grad(is_grads_batched=True)`; the vmap of torch.func calls once for
    each."""
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
    """As `run_backward`, by the operator."""
    *others, call = arguments
    return _run_backward_operator(*others, to_operator(call))


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the operator's arguments as they are. In a trace their numbers may be symbols, which no
    `Call`, and no mask, is made of."""
    q, k, v, sink, *arguments = inputs
    out, lse, lse_low, _ = output
    given = OperatorCall._make(arguments)
    # inference tensors cannot be saved, and nothing tells when they change
    ctx.places = [i for i, x in enumerate(given) if isinstance(x, Tensor) and not x.is_inference()]
    tensors = [given[i] for i in ctx.places]
    low = None if given.score_mod is None else lse_low
    ctx.save_for_backward(q, k, v, sink, out, lse, low, *given.aux_tensors, *tensors)
    others: list[Any] = [None if i in ctx.places else x for i, x in enumerate(given)]
    ctx.given = OperatorCall._make(others)._replace(aux_tensors=[])
    ctx.num_aux = len(given.aux_tensors)
    ctx.set_materialize_grads(False)


def _restored(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, sink, out, lse, lse_low and the other arguments of the operator."""
    q, k, v, sink, out, lse, lse_low, *more = ctx.saved_tensors
    arguments: list[Any] = list(ctx.given)
    arguments[_AUX_POSITION] = more[: ctx.num_aux]
    for i, x in zip(ctx.places, more[ctx.num_aux :], strict=True):
        arguments[i] = x
    return q, k, v, sink, out, lse, lse_low, OperatorCall._make(arguments)


def _run_backward_operator(*arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sink, *others, given = arguments
    dq, dk, dv, dsink, daux = torch.ops.flash_mask_cute.attention_bwd(
        q, k, v, sink, *others, *given
    )
    return dq, dk, dv, None if sink is None else dsink, *daux


def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    others: list[Any] = [None] * len(OperatorCall._fields)
    _, _, _, _, *wanted_inputs = ctx.needs_input_grad
    wanted = wanted_inputs[_AUX_POSITION]
    wants_aux = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    dout, dlse, *_ = grads
    gradients, daux = gradients_of(ctx, (dout, dlse), _restored, _run_backward_operator, wants_aux)
    others[_AUX_POSITION] = [daux.get(i) for i in range(len(wanted))]
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
