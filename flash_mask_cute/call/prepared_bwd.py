"""A backward call with everything resolved that its metadata decide, like `launch` for the forward.

On a GPU a launch is three kernels: statistics of the query rows, the main one, and the conversion
of dQ; and a fourth one where new gradients are packed. What they share lives in scratch memory that
each call allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.call.config import BwdChoice, BwdConfig
from flash_mask_cute.call.copies import (
    Conversion,
    any_or_none,
    convert,
    input_conversion,
    misplaced,
    output_conversion,
    split_scale,
)
from flash_mask_cute.call.kernels_bwd import (
    BwdKernels,
    Tails,
    num_row_blocks,
    num_stats,
    stats_words,
)
from flash_mask_cute.call.masks import BwdMaskArguments, Masks, ResolvedMasks, mask_key
from flash_mask_cute.call.prepared import (
    Asked,
    StoreBits,
    count_writing,
    current_device,
    in_transform,
    metadata,
    tile_counter,
    unused_rows,
)
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.cpu.backward import flash_attn_bwd_cpu
from flash_mask_cute.limits import ADDRESS_MASK
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.plain_tensors import are_plain


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


@dataclass(frozen=True)
class ResolvedBwd:
    """A call after validation and all decisions, before anything is compiled.

    softmax_scale may have any sign; window sides are None where they are open. sink_dtype: of a
    sink whose gradient is asked for, or by which queries that see nothing are told, as kernels read
    it, a name of a torch dtype; sink_conversion: to that. choose: the tiles of another `mask_kind`
    with the same arguments. tails: see `Tails`. block_size: that of block lists, (queries, keys).
    """

    shapes: FwdShapes
    problem: AttentionProblem
    choice: BwdChoice
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    has_dlse: bool
    has_lse_low: bool
    sink_dtype: str | None
    score_mod_bwd: Callable[..., Any] | None
    choose: Callable[[str], BwdChoice]
    tails: Tails
    block_size: tuple[int, int] | None = None
    sink_conversion: Conversion | None = None


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
BwdLaunch: TypeAlias = Callable[[BwdOperands, BwdExtras, Masks | None], Gradients]


class BwdKernelLaunch:
    """Runs the compiled kernels on the current stream, after what stores bits for them if anything
    does.

    resolved: the call as the main kernel sees it.
    """

    __slots__ = (
        "_accum_shape", "_clears_dq", "_conversions", "_has_aux", "_kernels", "_mask_arguments",
        "_parts_shape", "_reads_query_early", "_scale", "_scale_dq", "_softcap", "_stats_shape",
        "_store_bits", "_tails", "_wants_aux", "_window_left", "_window_right",
    )  # fmt: skip

    def __init__(
        self,
        resolved: ResolvedBwd,
        kernels: BwdKernels,
        operands: BwdOperands,
        extras: BwdExtras,
        store_bits: StoreBits | None = None,
    ) -> None:
        choice, problem, shapes = resolved.choice, resolved.problem, resolved.shapes
        tile_m = choice.tiles.tile_m
        row_blocks = num_row_blocks(
            shapes.total_q if problem.varlen_q else shapes.seqlen_q,
            shapes.batch,
            problem.varlen_q,
            tile_m,
        )
        self._kernels = kernels
        self._store_bits = store_bits
        self._has_aux = bool(problem.aux)
        words = stats_words(tile_m, num_stats(problem), problem.may_empty_rows)
        self._stats_shape = shapes.heads_q, row_blocks, words
        self._reads_query_early = problem.may_empty_rows
        self._accum_shape = shapes.heads_q, row_blocks, tile_m * choice.tile_d
        self._parts_shape = (shapes.heads_q, row_blocks) if resolved.sink_dtype else None
        self._tails = resolved.tails
        self._clears_dq = choice.tiles.clears_dq
        self._wants_aux = problem.wants_aux
        factor, self._scale = split_scale(resolved.softmax_scale)
        # the main kernel sees q * factor, and sums dS K only
        self._scale_dq = resolved.softmax_scale
        self._window_left = resolved.window_left
        self._window_right = resolved.window_right
        self._softcap = resolved.softcap if problem.has_softcap else None
        self._mask_arguments = BwdMaskArguments(problem, choice.walk_n, resolved.block_size)
        q, *others, _ = operands
        self._conversions = any_or_none(
            input_conversion(q, factor),
            *map(input_conversion, others),
            *map(output_conversion, extras[6:9]),
            resolved.sink_conversion,
        )

    def __call__(
        self, operands: BwdOperands, extras: BwdExtras, masks: Masks | None = None
    ) -> Gradients:
        q, k, v, out, dout, lse = operands
        index = q.get_device()
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                return self(operands, extras, masks)
        (
            sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, dlse, dq, dk, dv, dsink,
            lse_low, daux,
        ) = extras  # fmt: skip
        if dq is None:
            dq = new_gradient(q)
        else:
            count_writing(dq)
        if dk is None:
            dk = new_gradient(k)
        else:
            count_writing(dk)
        if dv is None:
            dv = new_gradient(v)
        else:
            count_writing(dv)
        result = dq, dk, dv
        if dlse is not None and dlse.is_neg():
            # autograd negates lazily behind a conjugation; a copy of such a dout is no longer so
            dlse = dlse.resolve_neg()
        if self._conversions is not None:
            q, k, v, out, dout, dq, dk, dv, sink = convert(
                (q, k, v, out, dout, dq, dk, dv, sink), self._conversions
            )
        aux_tensors = columns = bits = parts = None
        if masks is not None:
            aux_tensors, columns, bits = self._mask_arguments(masks, cu_seqlens_k)
        stored = None
        if self._store_bits is not None:
            asked = Asked(aux_tensors, bits, (cu_seqlens_q, cu_seqlens_k))
            # the only part
            stored, _, found = next(self._store_bits.parts(q, asked))
            if found is not None:
                cu_seqlens_q = cu_seqlens_k = found
            bits, aux_tensors = None, aux_tensors if self._has_aux else None
        stats = q.new_empty(self._stats_shape, dtype=torch.float32)
        dq_accum = q.new_empty(self._accum_shape, dtype=torch.float32)
        if self._parts_shape is None:
            sink = None
        else:
            parts = q.new_empty(self._parts_shape, dtype=torch.float32)
        cleared = turns = None
        if self._clears_dq:
            cleared = dq_accum
        else:
            turns = q.new_empty(self._stats_shape[:2], dtype=torch.int32)
        aux_sums = aux_grads = None
        if daux is not None:
            aux_sums = _aux_sums(daux, self._wants_aux, torch.float32)
            aux_grads = tuple(aux_sums.values()) or None
        preprocess, main, postprocess, clear_tails = self._kernels
        preprocess(
            out, dout, lse, dlse, stats, cleared, turns, sink, parts, cu_seqlens_q, seqused_q,
            q if self._reads_query_early else None, lse_low,
        )  # fmt: skip
        main(
            q, k, v, dout, stats, dq_accum, turns, dk, dv, self._scale, cu_seqlens_q, cu_seqlens_k,
            seqused_q, seqused_k, self._window_left, self._window_right, aux_tensors,
            self._softcap, tile_counter(q, index), columns, bits, aux_grads, stored,
        )  # fmt: skip
        postprocess(dq_accum, turns, dq, self._scale_dq, cu_seqlens_q, seqused_q)
        if clear_tails is not None:
            has_dq, has_dk, has_dv = self._tails
            clear_tails(
                dq if has_dq else None, dk if has_dk else None, dv if has_dv else None,
                cu_seqlens_q if has_dq else None, cu_seqlens_k if has_dk or has_dv else None,
            )  # fmt: skip
        if dsink is not None and parts is not None:
            dsink.copy_(parts.sum(dim=1))
        if daux is not None and aux_sums is not None:
            _write_aux_gradients(daux, aux_sums)
        return result


class BwdEmptyLaunch:
    """Fills the gradients of a problem without keys or without queries."""

    def __init__(self, resolved: ResolvedBwd) -> None:
        self._resolved = resolved

    @torch.no_grad()
    def __call__(
        self, operands: BwdOperands, extras: BwdExtras, masks: Masks | None = None
    ) -> Gradients:
        dq, dk, dv = (
            x.new_zeros(x.shape) if given is None else given.zero_()
            for x, given in zip(operands[:3], extras[6:9], strict=True)
        )
        if extras.dsink is not None:
            extras.dsink.copy_(self._sink_gradient(operands, extras))
        if extras.daux is not None:
            _write_aux_gradients(extras.daux, {})
        return dq, dk, dv

    def _sink_gradient(self, operands: BwdOperands, extras: BwdExtras) -> Tensor:
        """Without keys the sink is all there is: out is 0, and lse the sink."""
        lse_by_row = operands.lse.transpose(-1, -2)
        if extras.dlse is None or self._resolved.shapes.batch == 0:
            return lse_by_row.new_zeros(lse_by_row.shape[-1:])
        seen = lse_by_row > -torch.inf
        if extras.cu_seqlens_q is not None:
            row = torch.arange(seen.shape[0], device=seen.device)
            seen = seen & (row < extras.cu_seqlens_q[-1])[:, None]
        if extras.seqused_q is not None:
            unused = unused_rows(lse_by_row, extras.cu_seqlens_q, extras.seqused_q)
            seen = seen & ~unused[..., None]
        terms = torch.where(seen, extras.dlse.transpose(-1, -2), 0.0)
        return terms.flatten(0, -2).sum(dim=0)


class BwdCpuLaunch:
    """Computes on CPU tensors, walking the tiles of the kernel's configuration."""

    def __init__(self, resolved: ResolvedBwd, masks: ResolvedMasks) -> None:
        self._resolved = resolved
        self._masks = masks

    @torch.no_grad()
    def __call__(
        self, operands: BwdOperands, extras: BwdExtras, masks: Masks | None = None
    ) -> Gradients:
        call = self._resolved
        daux = extras.daux or ()
        aux_sums = _aux_sums(daux, call.problem.wants_aux, torch.float64)
        dq, dk, dv, dsink = flash_attn_bwd_cpu(
            *operands,
            softmax_scale=call.softmax_scale,
            window_left=call.window_left,
            window_right=0 if call.problem.is_causal else call.window_right,
            softcap=call.softcap,
            learnable_sink=extras.learnable_sink,
            cu_seqlens_q=extras.cu_seqlens_q,
            cu_seqlens_k=extras.cu_seqlens_k,
            seqused_q=extras.seqused_q,
            seqused_k=extras.seqused_k,
            seqlen_q=call.shapes.seqlen_q,
            seqlen_k=call.shapes.seqlen_k,
            pack_gqa=1,
            tile_m=call.choice.tiles.tile_m,
            tile_n=call.choice.tile_n,
            dlse=extras.dlse,
            lse_low=extras.lse_low,
            score_mod_bwd=call.score_mod_bwd,
            aux_sums=aux_sums,
            **self._masks._asdict(),
            skip_blocks=call.choice.tiles.skip_blocks,
        )
        if extras.dsink is not None and dsink is not None:
            extras.dsink.copy_(dsink)
        _write_aux_gradients(daux, aux_sums)
        dq, dk, dv = (
            new if given is None else given.copy_(new)
            for new, given in zip((dq, dk, dv), extras[6:9], strict=True)
        )
        return dq, dk, dv


def new_gradient(like: Tensor) -> Tensor:
    # `new_empty` takes twice as long
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _aux_sums(
    daux: Sequence[Tensor | None], wants_aux: tuple[int, ...], dtype: torch.dtype
) -> dict[int, Tensor]:
    """Zeros to add the gradients of aux tensors to, by number."""
    wanted = ((i, daux[i]) for i in wants_aux)
    return {i: x.new_zeros(x.shape, dtype=dtype) for i, x in wanted if x is not None}


def _write_aux_gradients(daux: Sequence[Tensor | None], sums: Mapping[int, Tensor]) -> None:
    """Round the sums into their tensors; what has none, as no score_mod can read it, becomes 0."""
    for i, gradient in enumerate(daux):
        if gradient is not None:
            gradient.copy_(sums[i]) if i in sums else gradient.zero_()


def _aux_key(daux: Sequence[Tensor | None], masks: Masks | None) -> tuple[Any, ...]:
    """Of gradients and, as those are added to by the coordinates of these, of their aux tensors."""
    aux_tensors = () if masks is None or masks.aux_tensors is None else masks.aux_tensors
    pairs = zip(daux, aux_tensors, strict=True)
    return tuple(None if x is None else (metadata(x), aux.shape) for x, aux in pairs)


def find_bwd_launch(
    launches: Mapping[Any, BwdLaunch],
    operands: BwdOperands,
    extras: BwdExtras,
    masks: Masks | None,
    settings: tuple[Any, ...],
) -> tuple[BwdLaunch | None, Any]:
    """The launch for these arguments, if there is one, and its key; as `find_launch`.

    settings: the fields of `BwdSettings`.
    """
    q, k, v, out, dout, lse = operands
    *tensors, daux = extras
    dlse, dq, dk, dv = extras[5:9]
    try:
        if not (
            type(q) is type(k) is type(v) is type(out) is type(dout) is type(lse) is Tensor
            or are_plain(*operands)
        ):
            return None, None
        if in_transform():
            return None, None
        if dlse is not None:
            # the vmap of autograd is no transform of functorch; its batches have no address
            dlse.data_ptr()
        starts = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr()]
        address = starts[0] | starts[1] | starts[2] | starts[3] | starts[4]
        for gradient in (dq, dk, dv):
            if gradient is not None:
                start = gradient.data_ptr()
                if start & ADDRESS_MASK or start in starts:
                    # to be refused, however a call with the same metadata went
                    return None, None
                starts.append(start)
        for gradient in (extras.dsink, *(daux or ())):
            if gradient is not None:
                start = gradient.data_ptr()
                if start in starts:
                    return None, None
                starts.append(start)
        *others, score_mod_bwd, deterministic, config = settings
        key: Any = (
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            out.shape, out.stride(), out.dtype, out.get_device(),
            dout.shape, dout.stride(), dout.dtype, dout.get_device(),
            lse.shape, lse.stride(), lse.dtype, lse.get_device(),
            *[None if x is None else metadata(x) for x in tensors],
            None if daux is None else _aux_key(daux, masks),
            None if masks is None else mask_key(masks),
            *others,
            None if score_mod_bwd is None else callable_key(score_mod_bwd),
            deterministic,
            config,
        )  # fmt: skip
        if address & ADDRESS_MASK:
            key = key, misplaced(q, k, v, out, dout)
        return launches.get(key), key
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None
