"""Attention as torch operators, for calls that are traced or intercepted.

torch.compile, torch.export, dispatch modes and tensor subclasses see operators of the namespace
flash_mask_cute, whose arguments are tensors, numbers and strings only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flash_mask_cute import interface
from flash_mask_cute.autograd.mod_names import named_in_graph, optional_mod, optional_name
from flash_mask_cute.autograd.passes import (
    lse_dtype,
    refuse_dual_level,
    refuse_second_derivative,
    run_backward,
    saveable,
    with_outputs,
)
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, from_block_mask
from flash_mask_cute.call.arguments import (
    NO_MASKS,
    AttentionCall,
    BackwardOptions,
    CallLengths,
    Gradients,
    Options,
    Tensors,
    masks_of,
    optional_of,
)
from flash_mask_cute.call.check.mask_extents import JOIN_MASKS, belongs_to_one
from flash_mask_cute.call.operands import OF_OPERATORS, of_bundle, plain_arguments
from flash_mask_cute.call.settings import BwdConfig, FwdConfig
from flash_mask_cute.mask_prep.column_bounds import num_key_blocks
from flash_mask_cute.mask_prep.documents import DocumentTensors
from flash_mask_cute.masks.column_mask import ANY, ColumnMask, Documents
from flash_mask_cute.masks.q_start import QStart
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.mods.aux_tensors import OutsideError
from flash_mask_cute.mods.signature import as_callable
from flash_mask_cute.runtime.checks import check_bool, check_list
from flash_mask_cute.runtime.constant_result import assume_constant_result, is_symbol
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.plain_tensors import check_plain, own_memory

# Bounds of column intervals are an operand of the operators, so that a graph computes them once for
# all calls with a mask. Most tiles have this many keys; calls with others compute their bounds.
_TILE_N = 128

# the first fields of `BlockSparseTensorsTorch`
_LISTS = "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"
# The arguments of an operator after q, k, v and learnable_sink, in its order: those of a call as
# they are, then its masks, callables (names of `mod_names`) and configs (text) in other forms.
# torch looks for subclasses in a Tensor[], but not in a Tensor[]?: empty is aux_tensors None.
_ARGUMENTS = {row.name: row.schema for row in OF_OPERATORS} | {
    "q_start": "SymInt?",
    "score_mod": "str?",
    "mask_mod": "str?",
    "score_mod_bwd": "str?",
    "aux_tensors": "Tensor[]",
    **dict.fromkeys(_LISTS, "Tensor?"),
    "block_q": "SymInt?",
    "block_k": "SymInt?",
    "list_seqlens": "SymInt[]?",
    "startend_row_indices": "Tensor?",
    "column_bounds": "Tensor?",
    "columns_causal": "bool?",
    "column_seqlen_q": "SymInt?",
    "document_starts": "Tensor?",
    "document_rows": "Tensor?",
    "document_bounds": "Tensor?",
    "config": "str?",
    "wants_max": "bool",
    "scale": "Tensor?",
}
CALL_SCHEMA = ", ".join(f"{schema} {name}" for name, schema in _ARGUMENTS.items())
# what stands for `ANY` there
_ANY_SEQLEN = -1

# What a backward takes before these: results of the forward and their gradients.
_RESULTS = {
    "out": "Tensor", "lse": "Tensor", "lse_low": "Tensor?", "dout": "Tensor", "dlse": "Tensor?",
}  # fmt: skip
_AUX_POSITION = list(_ARGUMENTS).index("aux_tensors")
_library = torch.library.Library("flash_mask_cute", "DEF")
# Caches of compiled graphs on disk know operators by name and schema: one with results of another
# form gets another name.
_library.define(
    "block_bounds(Tensor startend_row_indices, bool causal, Tensor? cu_seqlens_k) -> Tensor"
)
_library.define(
    "split_documents(Tensor startend_row_indices, bool causal, SymInt batch) "
    "-> (Tensor cu_seqlens, Tensor rows, Tensor bounds)"
)
_library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, {CALL_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor lse_low, Tensor max_scores)"
)
# in memory of the caller, without gradients
_library.define(
    "attention_fwd_into(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor(a!) out, "
    f"{CALL_SCHEMA}) -> (Tensor lse, Tensor max_scores)"
)
_library.define(
    "attention_bwd(Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, "
    + "".join(f"{schema} {name}, " for name, schema in _RESULTS.items())
    + f"int[] wants_aux, {CALL_SCHEMA}) "
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


def to_operator(
    call: AttentionCall, batch: int | None = None, wants_max: bool = False
) -> tuple[Any, ...]:
    """A call as the arguments of an operator, in the order of `_ARGUMENTS`.

    batch: number of sequences, if the operator packs the documents of its mask.
    """
    masks, own, options = call.masks or NO_MASKS, call.backward, call.options
    # torch would make a bool of any number
    check_bool("causal", options.causal)
    if options.pack_gqa is not None:
        check_bool("pack_gqa", options.pack_gqa)
    given = plain_arguments(call)
    given.update(_operator_scale(options.softmax_scale))
    given["q_start"] = options.q_start.operand()
    mods = {**masks.mods._asdict(), "score_mod_bwd": own.score_mod_bwd}
    for name, mod in mods.items():
        if not (mod is None or isinstance(mod, str) or torch.compiler.is_compiling()):
            as_callable(name, mod)
        given[name] = optional_name(mod)
    given["aux_tensors"] = []
    if masks.aux_tensors is not None:
        check_list("aux_tensors", masks.aux_tensors)
        given["aux_tensors"] = list(masks.aux_tensors)
    if not (options.config is own.config is None):
        given["config"] = _text_of((_as_dictionary(options.config), _as_dictionary(own.config)))
    given["wants_max"] = wants_max
    given.update(_operator_lists(masks.block_sparse_tensors_torch))
    given.update(_operator_columns(call, batch))
    return tuple([given.get(name) for name in _ARGUMENTS])


def _operator_scale(scale: Any) -> dict[str, Any]:
    """softmax_scale for an operator: a changing float goes in a tensor, others are constants."""
    if isinstance(scale, Tensor):
        # a copy: what the caller's tensor holds when the backward runs does not matter
        return {"softmax_scale": None, "scale": scale.detach().clone()}
    if is_symbol(scale):
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return {"softmax_scale": None, "scale": one * scale}
    return {"softmax_scale": scale}


def _operator_lists(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, SelectedBlocks):
        # lists have counts
        return {"mask_block_idx": given.indices, "block_k": given.block_size}
    lists = from_block_mask(given)
    block_q, block_k = (None, None) if lists.block_size is None else lists.block_size
    sizes = {"block_q": block_q, "block_k": block_k, "list_seqlens": lists.seqlens}
    return {**dict(zip(_LISTS, lists, strict=False)), **sizes}


def _operator_columns(call: AttentionCall, batch: int | None) -> dict[str, Any]:
    mask: Any = None if call.masks is None else call.masks.startend_row_indices
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
    indices, causal, seqlen_q = mask, call.options.causal, None
    if not isinstance(mask, ColumnMask) and not torch.compiler.is_compiling():
        ColumnMask(mask, causal)  # refuses what has no column intervals
    if not isinstance(mask, Tensor):
        starts = call.tensors.lengths.cu_seqlens_k
        # operators take a mask without this fact, and a trace has no lengths to be named
        if starts is not None and belongs_to_one(mask, starts.shape[0] - 1):
            raise ValueError(
                "startend_row_indices was made for one sequence, and cu_seqlens_k packs several, "
                f"{JOIN_MASKS}"
            )
        indices, causal = mask.startend_row_indices, mask.causal
        seqlen_q = _operator_seqlen(mask.seqlen_q)
    columns = {
        "startend_row_indices": indices,
        "column_bounds": torch.ops.flash_mask_cute.block_bounds(
            indices, causal, call.tensors.lengths.cu_seqlens_k
        ),
        "columns_causal": causal,
        "column_seqlen_q": seqlen_q,
    }
    if batch is not None:
        starts, rows, bounds = torch.ops.flash_mask_cute.split_documents(indices, causal, batch)
        columns |= {
            "document_starts": starts, "document_rows": rows, "document_bounds": bounds,
        }  # fmt: skip
    return columns


def _from_operator(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, arguments: Iterable[Any]
) -> AttentionCall:
    x = dict(zip(_ARGUMENTS, arguments, strict=True))
    lists: Any = None
    mask = documents = None
    if x["mask_block_cnt"] is None and x["mask_block_idx"] is not None:
        lists = SelectedBlocks(x["mask_block_idx"], x["block_k"])
    if x["mask_block_cnt"] is not None and x["mask_block_idx"] is not None:
        block_size = None
        if x["block_q"] is not None and x["block_k"] is not None:
            block_size = x["block_q"], x["block_k"]
        seqlens = tuple(x["list_seqlens"]) if x["list_seqlens"] else None
        lists = BlockSparseTensorsTorch(
            **{name: x[name] for name in _LISTS}, block_size=block_size, seqlens=seqlens
        )
    causal = bool(x["columns_causal"])
    if x["document_starts"] is not None:
        rows = _BoundedMask(x["document_rows"], causal, x["document_bounds"])
        documents = Documents(x["document_starts"], rows)
    if x["startend_row_indices"] is not None:
        bounds, seqlen_q = x["column_bounds"], x["column_seqlen_q"]
        mask = _BoundedMask(x["startend_row_indices"], causal, bounds, documents, seqlen_q)
    config, config_bwd = json.loads(x["config"] or "[null, null]")
    mods = optional_mod(x["score_mod"]), optional_mod(x["mask_mod"])
    start = QStart.from_operator(x["q_start"], x["q_starts"])
    if x["scale"] is not None:
        x["softmax_scale"] = x["scale"].item()
    lengths = CallLengths(**of_bundle("lengths", x))
    return AttentionCall(
        Tensors(q, k, v, sink, lengths, optional_of(of_bundle("optional", x).values())),
        masks_of(*mods, x["aux_tensors"] or None, lists, mask),
        Options(q_start=start, config=FwdConfig.from_value(config), **of_bundle("options", x)),
        BackwardOptions(
            optional_mod(x["score_mod_bwd"]),
            config=BwdConfig.from_value(config_bwd),
            **of_bundle("backward", x),
        ),
    )


def _as_dictionary(config: Any) -> Any:
    """As a dictionary, which Dynamo supports as a constant; it supports no dataclass."""
    names = _NAMES.get(type(config))
    return config if names is None else {name: getattr(config, name) for name in names}


_NAMES = {kind: tuple(x.name for x in fields(kind)) for kind in (FwdConfig, BwdConfig)}


@assume_constant_result
def _text_of(pair: tuple[Any, Any]) -> str:
    both = FwdConfig.from_value(pair[0]), BwdConfig.from_value(pair[1])
    return json.dumps([None if x is None else asdict(x) for x in both])


def call_of_operator(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, arguments: Iterable[Any]
) -> AttentionCall:
    """The call that runs for these arguments of an operator by `CALL_SCHEMA`."""
    q, k, v, sink = _own_memory((q, k, v, sink))
    return _without_identity(_from_operator(q, k, v, sink, _own_memory(arguments)))


def _without_identity(call: AttentionCall) -> AttentionCall:
    """The call with block lists for which nothing is cached.

    Retiled lists are cached by the identity and version of tensors. A compiled graph reuses the
    memory of tensors, and torch does not count these writes.
    """
    masks = call.masks
    if masks is None or masks.block_sparse_tensors_torch is None:
        return call
    lists = masks.block_sparse_tensors_torch
    fresh = {name: x.detach() for name, x in lists._asdict().items() if isinstance(x, Tensor)}
    masks = replaced(masks, block_sparse_tensors_torch=replaced(lists, **fresh))
    return replaced(call, masks=masks)


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
    """lse_low has no elements without a score_mod, max_scores has none unless requested. lse and
    lse_low are float64 beside float64 tensors."""
    # a compiled graph runs on what it is given
    refuse_dual_level()
    call = call_of_operator(q, k, v, sink, arguments)
    call = with_outputs(call, _argument("wants_max", arguments))
    out, lse = forward_of_graph(call, arguments)
    x = call.tensors
    lse_low = _or_nothing(x.lse_low, x.q, lse_dtype(x.q))
    return out, lse, lse_low, _or_nothing(x.max_scores, x.q)


@torch.library.impl(_library, "attention_fwd_into", "CompositeExplicitAutograd")
def _attention_fwd_into(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    refuse_dual_level()
    call = with_out(call_of_operator(q, k, v, sink, arguments), own_memory(out))
    call = with_outputs(call, _argument("wants_max", arguments), wants_low=False)
    _, lse = forward_of_graph(call, arguments)
    return lse, _or_nothing(call.tensors.max_scores, call.tensors.q)


def forward_of_graph(call: AttentionCall, arguments: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """`interface.forward`, with errors that name what mods captured."""
    try:
        out, lse = interface.forward(call)
    except OutsideError as error:
        names = _argument("score_mod", arguments), _argument("mask_mod", arguments)
        num_aux = len((call.masks or NO_MASKS).aux_tensors or ())
        raise named_in_graph(error, *names, num_aux) from None
    assert lse is not None
    return out, lse


def with_out(call: AttentionCall, out: Tensor | None) -> AttentionCall:
    """The call with memory for its result."""
    return call if out is None else replaced(call, tensors=replaced(call.tensors, out=out))


def _argument(name: str, arguments: Iterable[Any]) -> Any:
    return dict(zip(_ARGUMENTS, arguments, strict=True))[name]


def _computes(q: Tensor) -> bool:
    """Whether a fake operator has to compute: torch calls it for a meta tensor beside others, which
    the call itself refuses by name."""
    return type(q) is Tensor and not q.is_meta


def _or_nothing(x: Tensor | None, q: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x, or a tensor without elements: operators return no None."""
    return q.new_empty(0, dtype=dtype) if x is None else x


@torch.library.register_fake("flash_mask_cute::attention_fwd", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _computes(q):
        return _attention_fwd(q, k, v, sink, *arguments)
    *rows, heads_q, _ = q.shape
    out = q.new_empty((*rows, heads_q, v.shape[-1]))
    lse_shape = (*rows[:-1], heads_q, rows[-1])
    low_shape = (0,) if _argument("score_mod", arguments) is None else lse_shape
    max_shape = lse_shape if _argument("wants_max", arguments) else (0,)
    lse, lse_low = (q.new_empty(shape, dtype=lse_dtype(q)) for shape in (lse_shape, low_shape))
    return out, lse, lse_low, q.new_empty(max_shape, dtype=torch.float32)


@torch.library.register_fake("flash_mask_cute::attention_fwd_into", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    if _computes(q):
        return _attention_fwd_into(q, k, v, sink, out, *arguments)
    *rows, heads_q, _ = q.shape
    lse_shape = (*rows[:-1], heads_q, rows[-1])
    max_shape = lse_shape if _argument("wants_max", arguments) else (0,)
    lse, largest = (q.new_empty(x, dtype=torch.float32) for x in (lse_shape, max_shape))
    return lse, largest


@torch.library.impl(_library, "attention_bwd", "CompositeExplicitAutograd")
def _attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any
) -> tuple[Any, ...]:
    results, wants_aux, rest = _split_backward(_own_memory(arguments))
    call = call_of_operator(q, k, v, sink, rest)
    gradients = Gradients(results.pop("dout"), results.pop("dlse"))
    call = replaced(call, tensors=replaced(call.tensors, **results, gradients=gradients))
    dq, dk, dv, dsink, *daux = run_backward(call, wants_aux)
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink, daux


def _split_backward(arguments: Sequence[Any]) -> tuple[dict[str, Any], Any, Sequence[Any]]:
    """Results and their gradients by name, the indices of wanted aux gradients, and the arguments
    of the call."""
    count = len(_RESULTS)
    results = dict(zip(_RESULTS, arguments[:count], strict=True))
    return results, arguments[count], arguments[count + 1 :]


@torch.library.register_fake("flash_mask_cute::attention_bwd", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    if _computes(q):
        return _attention_bwd(q, k, v, sink, *arguments)
    _, wants_aux, rest = _split_backward(arguments)
    aux_tensors = _argument("aux_tensors", rest)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return dq, dk, dv, dsink, [torch.empty_like(aux_tensors[i]) for i in wants_aux]


@torch.library.impl(_library, "attention_bwd", "Batched")
def _refuse_batches(*arguments: Any) -> Any:
    """Refuse `torch.autograd.grad(is_grads_batched=True)`; vmap of torch.func calls one by one."""
    names = "q", "k", "v", "learnable_sink", *_RESULTS
    for name, x in zip(names, arguments, strict=False):
        if x is not None:
            check_plain(name, x)


# their errors are those of attention
IMPLEMENTATIONS = frozenset(
    implementation.__code__
    for implementation in (
        _attention_fwd,
        _attention_fwd_into,
        _attention_bwd,
        _column_bounds,
        _column_documents,
    )
)


def run_backward_operator(
    call: AttentionCall, wants_aux: Sequence[int]
) -> tuple[Tensor | None, ...]:
    """`run_backward` as an operator."""
    x = call.tensors
    sink, given = x.learnable_sink, x.by_name()
    results = [given[name] for name in _RESULTS]
    dq, dk, dv, dsink, daux = torch.ops.flash_mask_cute.attention_bwd(
        x.q, x.k, x.v, sink, *results, wants_aux, *to_operator(call)
    )
    return dq, dk, dv, None if sink is None else dsink, *daux


def save_inputs(ctx: Any, inputs: tuple[Any, ...], *results: Tensor | None) -> list[Tensor]:
    """Save results and inputs of an operator, and return the saved tensors. Inputs are saved as
    they are: in a trace their numbers may be symbols."""
    leaves, ctx.spec = pytree.tree_flatten((results, inputs))
    ctx.leaves = [Tensor if isinstance(x, Tensor) else x for x in leaves]
    tensors = saveable([x for x in leaves if isinstance(x, Tensor)])
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    return tensors


def saved_inputs(ctx: Any) -> Any:
    """The results and the inputs of `save_inputs`."""
    saved = iter(ctx.saved_tensors)
    leaves = [next(saved) if x is Tensor else x for x in ctx.leaves]
    return pytree.tree_unflatten(leaves, ctx.spec)


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, lse_low, _ = output
    has_mod = _argument("score_mod", inputs[4:]) is not None
    save_inputs(ctx, inputs, out, lse, lse_low if has_mod else None)


def _operator_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
    others: list[Any] = [None] * len(_ARGUMENTS)
    _, _, _, needs_sink, *wanted_inputs = ctx.needs_input_grad
    wanted = wanted_inputs[_AUX_POSITION]
    wants_aux = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    if dout is None and dlse is None:
        others[_AUX_POSITION] = [None] * len(wanted)
        return None, None, None, None, *others
    (out, lse, lse_low), (q, k, v, sink, *arguments) = saved_inputs(ctx)
    # lse holds the sink for the backward
    sink = sink if needs_sink else None
    dout = torch.zeros_like(out) if dout is None else dout
    results = out, lse, lse_low, dout, dlse
    dq, dk, dv, dsink, daux = torch.ops.flash_mask_cute.attention_bwd(
        q, k, v, sink, *results, wants_aux, *arguments
    )
    of_aux = dict(zip(wants_aux, daux, strict=True))
    others[_AUX_POSITION] = [of_aux.get(i) for i in range(len(wanted))]
    return dq, dk, dv, None if sink is None else dsink, *others


torch.library.register_autograd(
    "flash_mask_cute::attention_fwd",
    _operator_gradients,
    setup_context=_setup_operator,
    lib=_library,
)
torch.library.register_autograd(
    "flash_mask_cute::attention_bwd", refuse_second_derivative, lib=_library
)
