"""A backward call with everything resolved that its metadata decide, like `launch` for the forward.

On a GPU a launch is three kernels: statistics of the query rows, the main one, and the conversion
of dQ; and a fourth one where new gradients are packed. What they share lives in scratch memory that
each call allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import BwdExtras, BwdOperands, Masks
from flash_mask_cute.call.copies import (
    any_or_none,
    convert,
    input_conversion,
    new_gradient,
    output_conversion,
    split_scale,
)
from flash_mask_cute.call.kernels_bwd import (
    BwdKernels,
    num_row_blocks,
    num_stats,
    stats_words,
)
from flash_mask_cute.call.masks import BwdMaskArguments, ResolvedMasks
from flash_mask_cute.call.prepared import count_writing, current_device, tile_counter, unused_rows
from flash_mask_cute.call.resolve import ResolvedBwd
from flash_mask_cute.cpu.backward import flash_attn_bwd_cpu
from flash_mask_cute.mask_prep.mask_bits import Asked, StoreBits

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
