"""Prepared backwards, as `forward.py` for forwards.

On a GPU a backward runs three kernels: statistics of the query rows, the main kernel, and the
conversion of dQ. A fourth one runs if new gradients are packed. They share scratch memory that each
call allocates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import CallLengths, Masks, Tensors
from flash_mask_cute.call.aux_sums import new_sums, write_gradients
from flash_mask_cute.call.batch_sums import MakeSharedSums
from flash_mask_cute.call.build_backward import BwdKernels
from flash_mask_cute.call.copies import any_or_none, convert, new_gradient, split_scale
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import (
    count_writing,
    cpu_call,
    current_device,
    tile_counter,
    unused_rows,
)
from flash_mask_cute.call.mask_arguments import MaskArguments
from flash_mask_cute.call.query_lists import list_extents, list_facts
from flash_mask_cute.call.scratch import BwdScratch
from flash_mask_cute.call.tables import MakeDifferenceTables
from flash_mask_cute.cpu.backward import flash_attn_bwd_cpu
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.mask_prep.mask_bits import MakeMaskBits, MaskInputs
from flash_mask_cute.mask_prep.query_lists import ListLengths, QueryListMaker
from flash_mask_cute.masks.q_start import EACH

_CONVERTED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "learnable_sink")


class KernelBackward:
    """Runs the compiled kernels on the current stream, after that of mask bits, if any."""

    def __init__(
        self,
        plan: ExecutionPlan,
        kernels: BwdKernels,
        make_mask_bits: MakeMaskBits | None = None,
        make_tables: MakeDifferenceTables | None = None,
        make_shared: MakeSharedSums | None = None,
    ) -> None:
        self._make_tables = make_tables
        self._make_shared = make_shared
        problem, facts = plan.problem, plan.gradients
        assert facts is not None
        self._kernels = kernels
        self._make_mask_bits = make_mask_bits
        self._make_lists: QueryListMaker | None = None
        if problem.query_lists:
            extents = list_extents(problem, plan.shapes, plan.masks)
            arch = plan.target.arch if plan.device.type == "cuda" else None
            facts_of_lists = list_facts(problem)
            self._make_lists = QueryListMaker(facts_of_lists, extents, arch)
            self._lists_read_lse = facts_of_lists.has_lse
        self._has_aux = bool(problem.aux)
        self._scratch = BwdScratch.of(plan)
        self._reads_query_early = problem.may_empty_rows
        self._padding = facts.padding
        self._wants_aux = problem.wants_aux
        self._exact_aux = problem.exact_aux
        self._entry_aux = problem.entry_aux
        self._written = problem.exact_aux, problem.entry_aux
        if make_shared is not None:
            shared = make_shared.shared
            self._written = problem.exact_aux + shared.exact, problem.entry_aux + shared.once
        _, self._scale = split_scale(plan.softmax_scale)
        # the main kernel sees q times a factor of the scale, and sums dS K only
        self._scale_dq = plan.softmax_scale
        # or it stores dQ, times its part of the scale
        self._factor_dq = plan.softmax_scale / self._scale if problem.is_wide else 1.0
        self._window_left = plan.window_left
        self._window_right = plan.window_right
        self._q_start = plan.q_start.operand()
        self._reads_q_starts = plan.q_start.kind == EACH
        self._softcap = plan.softcap if problem.has_softcap else None
        self._mask_arguments = MaskArguments(plan)
        self._conversions = any_or_none(*(plan.conversions[name] for name in _CONVERTED))

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, sink, lengths = tensors[:5]
        out, lse, lse_low, gradients = tensors.out, tensors.lse, tensors.lse_low, tensors.gradients
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _, q_starts = lengths
        dout, dlse, dq, dk, dv, dsink, daux = gradients
        index = q.get_device()
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                return self(tensors, masks)
        dq = new_gradient(q) if dq is None else _counted(dq)
        dk = new_gradient(k) if dk is None else _counted(dk)
        dv = new_gradient(v) if dv is None else _counted(dv)
        result = dq, dk, dv
        if dlse is not None and dlse.is_neg():
            # autograd negates lazily after a conjugation; a copy of such a dout is no longer so
            dlse = dlse.resolve_neg()
        if self._conversions is not None:
            q, k, v, out, dout, dq, dk, dv, sink = convert(
                (q, k, v, out, dout, dq, dk, dv, sink), self._conversions
            )
        aux_tensors = columns = bits = parts = None
        if masks is not None:
            _, aux_tensors, columns, _, bits = self._mask_arguments(
                masks, cu_seqlens_k, cu_seqlens_q
            )
        mask_bits = None
        if self._make_mask_bits is not None:
            mask_inputs = MaskInputs(aux_tensors, bits, (cu_seqlens_q, cu_seqlens_k))
            # the only chunk
            mask_bits, _, found = next(self._make_mask_bits(q, mask_inputs))
            if found is not None:
                cu_seqlens_q = cu_seqlens_k = found
            bits, aux_tensors = None, aux_tensors if self._has_aux else None
        if self._make_lists is not None:
            assert masks is not None
            bits = self._query_lists(masks, lengths, lse)
        own_aux = aux_tensors
        if self._make_tables is not None and aux_tensors is not None:
            aux_tensors = self._make_tables(aux_tensors)
        scratch = self._scratch
        stats = q.new_empty(scratch.stats, dtype=torch.float32)
        dq_accum = None
        if scratch.dq_sums is not None:
            dq_accum = q.new_empty(scratch.dq_sums, dtype=torch.float32)
        if scratch.sink_parts is None:
            sink = None
        else:
            parts = q.new_empty(scratch.sink_parts, dtype=torch.float32)
        cleared = semaphores = None
        if scratch.semaphores is None:
            cleared = dq_accum
        else:
            semaphores = q.new_empty(scratch.semaphores, dtype=torch.int32)
        aux_sums: dict[int, Tensor] | None = None
        aux_grads: Any = None
        if daux is not None:
            entries = dict.fromkeys(self._entry_aux, q.shape[0])
            aux_sums = new_sums(daux, self._wants_aux, torch.float32, self._exact_aux, entries)
            aux_grads = tuple(aux_sums.values()) or None
        preprocess, main, postprocess, zero_padding, add_parts = self._kernels
        dq_accum = dq if dq_accum is None else dq_accum
        dk_sums, dv_sums = dk, dv
        if scratch.dk_parts is not None and scratch.dv_parts is not None:
            # CTAs with query lists add to sums, others store theirs
            new = q.new_empty if self._make_lists is None else q.new_zeros
            dk_sums = new(scratch.dk_parts, dtype=torch.float32)
            dv_sums = new(scratch.dv_parts, dtype=torch.float32)
        preprocess(
            out, dout, lse, dlse, stats, cleared, semaphores, sink, parts, cu_seqlens_q, seqused_q,
            q if self._reads_query_early else None, lse_low,
        )  # fmt: skip
        if main is not None:
            main(
                q, k, v, dout, stats, dq_accum, semaphores, dk_sums, dv_sums, self._scale,
                cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, self._window_left,
                self._window_right, aux_tensors, self._softcap, tile_counter(q, index), columns,
                bits, aux_grads, mask_bits, q_starts if self._reads_q_starts else self._q_start,
            )  # fmt: skip
            if self._factor_dq != 1.0:
                dq.mul_(self._factor_dq)
        if self._make_shared is not None and (aux_sums is not None or main is None):
            aux_sums = (aux_sums or {}) | self._make_shared(
                daux or (), (q, k, v, dout, stats), (dq_accum, dk, dv), own_aux,
                (self._scale, self._scale_dq), self._window_left, self._window_right, mask_bits,
            )  # fmt: skip
        if postprocess is not None:
            postprocess(dq_accum, semaphores, dq, self._scale_dq, cu_seqlens_q, seqused_q)
        if add_parts is not None:
            add_parts(dk_sums, dv_sums, dk, dv, cu_seqlens_k, seqused_k)
        if zero_padding is not None:
            has_dq, has_dk, has_dv = self._padding
            zero_padding(
                dq if has_dq else None, dk if has_dk else None, dv if has_dv else None,
                cu_seqlens_q if has_dq else None, cu_seqlens_k if has_dk or has_dv else None,
            )  # fmt: skip
        if dsink is not None and parts is not None:
            dsink.copy_(parts.sum(dim=1))
        if daux is not None and aux_sums is not None:
            write_gradients(daux, aux_sums, *self._written)
        return result

    def _query_lists(
        self, masks: Masks, lengths: CallLengths, lse: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The lists of this call's selection, as the kernel takes them."""
        assert self._make_lists is not None
        of_call = ListLengths(
            *(*lengths[:4], self._window_left, self._window_right),
            lengths.q_starts if self._reads_q_starts else self._q_start,
            lse if self._lists_read_lse else None,
        )
        return tuple(self._make_lists(masks.block_sparse_tensors_torch.by_entry, of_call))


class EmptyBackward:
    """Fills the gradients of a problem without keys or without queries."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._has_batch = plan.shapes.batch > 0

    @torch.no_grad()
    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, of = tensors, tensors.gradients
        if of.dsink is not None:
            of.dsink.copy_(self._sink_gradient(x))
        if of.daux is not None:
            write_gradients(of.daux, {})
        return _zeros(x.q, of.dq), _zeros(x.k, of.dk), _zeros(x.v, of.dv)

    def _sink_gradient(self, tensors: Tensors) -> Tensor:
        """The gradient of the sink without keys: out is then 0, and lse is the sink."""
        x, of, (cu_seqlens_q, _, seqused_q, *_) = tensors, tensors.gradients, tensors.lengths
        assert x.lse is not None
        lse_by_row = x.lse.transpose(-1, -2)
        if of.dlse is None or not self._has_batch:
            return lse_by_row.new_zeros(lse_by_row.shape[-1:])
        sees_keys = lse_by_row > -torch.inf
        if cu_seqlens_q is not None:
            row = torch.arange(sees_keys.shape[0], device=sees_keys.device)
            sees_keys = sees_keys & (row < cu_seqlens_q[-1])[:, None]
        if seqused_q is not None:
            unused = unused_rows(lse_by_row, cu_seqlens_q, seqused_q)
            sees_keys = sees_keys & ~unused[..., None]
        terms = torch.where(sees_keys, of.dlse.transpose(-1, -2), 0.0)
        return terms.flatten(0, -2).sum(dim=0)


class CpuBackward:
    """Computes on CPU tensors, walking the tiles of the kernel's configuration."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan

    @torch.no_grad()
    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, x, of = self._plan, tensors, tensors.gradients
        assert plan.gradients is not None
        daux = of.daux or ()
        aux_sums = new_sums(daux, plan.problem.wants_aux, torch.float64)
        chosen = plan.bwd_choice
        tiles = CpuTiles(chosen.tiles.tile_m, chosen.tile_n, skip_blocks=chosen.tiles.skip_blocks)
        call = cpu_call(plan, x, tiles)._replace(
            score_mod_bwd=plan.gradients.score_mod_bwd, aux_sums=aux_sums
        )
        dq, dk, dv, dsink = flash_attn_bwd_cpu(call)
        if of.dsink is not None and dsink is not None:
            of.dsink.copy_(dsink)
        write_gradients(daux, aux_sums)
        return _written(dq, of.dq), _written(dk, of.dk), _written(dv, of.dv)


def _counted(given: Tensor) -> Tensor:
    """The caller's tensor, to which a kernel writes."""
    count_writing(given)
    return given


def _zeros(like: Tensor, given: Tensor | None) -> Tensor:
    return like.new_zeros(like.shape) if given is None else given.zero_()


def _written(new: Tensor, given: Tensor | None) -> Tensor:
    """The new gradient, or the caller's tensor filled with it."""
    return new if given is None else given.copy_(new)
