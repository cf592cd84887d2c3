"""The mask arguments of a call beyond causal and window, and arguments that change scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.block_sparsity import (
    BlockSparseTensorsTorch,
    check_block_lists,
    from_block_mask,
)
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, Mods
from flash_mask_cute.call.tiles.arch import ArchSpec, BackwardKernel
from flash_mask_cute.call.tiles.config import BwdChoice, FwdChoice, FwdTiles
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import dtype_name


class ResolvedMasks(NamedTuple):
    """A call's masks after validation. block_lists: with their block size. selected: a selection of
    blocks in place of lists."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: tuple[Tensor, ...] | None
    column_mask: ColumnMask | None
    block_lists: BlockSparseTensorsTorch | None
    selected: SelectedBlocks | None = None

    @staticmethod
    def of(call: AttentionCall, shapes: FwdShapes) -> ResolvedMasks:
        """Of a call that passed `check_inputs`. Raises TypeError, ValueError: block lists do not
        fit the problem."""
        masks, options, lists, selected = call.masks or NO_MASKS, call.options, None, None
        columns = masks.startend_row_indices
        if isinstance(masks.block_sparse_tensors_torch, SelectedBlocks):
            selected = masks.block_sparse_tensors_torch
        elif masks.block_sparse_tensors_torch is not None:
            lists = check_block_lists(
                from_block_mask(masks.block_sparse_tensors_torch),
                shapes.batch,
                shapes.heads_q,
                None if options.q_start.is_given else shapes.seqlen_q,
                shapes.seqlen_k,
                call.tensors.q.device,
            )
        return ResolvedMasks(
            masks.score_mod,
            masks.mask_mod,
            tuple(masks.aux_tensors) if masks.aux_tensors else None,
            None if columns is None else column_mask_of(columns, options.causal),
            lists,
            selected,
        )

    @property
    def mods(self) -> Mods:
        return Mods(self.score_mod, self.mask_mod)

    @property
    def block_size(self) -> tuple[int, int] | None:
        return None if self.block_lists is None else self.block_lists.block_size

    @property
    def is_causal(self) -> bool:
        """Whether the column intervals come with causal masking."""
        return self.column_mask is not None and self.column_mask.causal

    def problem_fields(self) -> dict[str, Any]:
        """The fields of an `AttentionProblem` that describe masks."""
        columns, lists = self.column_mask, self.block_lists
        return {
            "intervals": None if columns is None else (columns.num_vectors, columns.causal),
            "score_mod": None if self.score_mod is None else callable_key(self.score_mod),
            "mask_mod": None if self.mask_mod is None else callable_key(self.mask_mod),
            "aux": tuple((dtype_name(x.dtype), x.dim()) for x in self.aux_tensors or ()),
            "has_lists": lists is not None,
            "has_full_lists": lists is not None and lists.full_block_cnt is not None,
            "has_selected": self.selected is not None,
        }

    def own_keys_of(
        self, problem: AttentionProblem, kernel: BackwardKernel
    ) -> tuple[int, int] | None:
        """The size of blocks of lists that each warpgroup's keys may have of their own."""
        owns = (
            problem.may_have_lists_per_warpgroup
            and kernel.has_lists_per_warpgroup
            and problem.score_modifier is None
        )
        return self.block_size if owns else None

    def with_form_of_lists(
        self, problem: AttentionProblem, choice: FwdChoice | BwdChoice, spec: ArchSpec
    ) -> AttentionProblem:
        """The problem with the form in which a kernel of these tiles takes block lists."""
        size, owns = self.block_size, problem.may_have_lists_per_warpgroup
        if isinstance(choice, BwdChoice):
            size = self.own_keys_of(problem, spec.backward)
            return replace(
                problem, lists_per_warpgroup=size is not None and choice.own_keys_nest_in(size)
            )
        if size is None:
            return replace(problem, has_bits=False, lists_per_warpgroup=False)
        owns = owns and spec.forward.has_lists_per_warpgroup and choice.tiles.own_rows_nest_in(size)
        are_bits = problem.q_start is not None or not choice.tiles.nest_in(size)
        return replace(problem, has_bits=are_bits and not owns, lists_per_warpgroup=owns)

    def describe(
        self, tiles: FwdTiles, are_bits: bool, has_lists_per_warpgroup: bool = False
    ) -> str:
        """The masks in words; empty if there are none. are_bits: block lists are read as bits by
        the kernel that makes mask bits before attention."""
        parts = []
        if self.column_mask is not None:
            batch, heads, _, num_vectors = self.column_mask.startend_row_indices.shape
            form = "causal" if self.column_mask.causal else "not causal"
            parts.append(
                f"column intervals of {num_vectors} vectors ({form}), batch {batch}, heads {heads}"
            )
        if self.block_size is not None:
            how = f"retiled to {tiles.cluster_tile_m} x {tiles.tile_n}"
            if are_bits:
                how = "taken as bits"
            elif tiles.nest_in(self.block_size):
                how = "made of whole tiles"
            elif has_lists_per_warpgroup:
                how = "of each warpgroup's rows"
            parts.append(f"block lists of {self.block_size[0]} x {self.block_size[1]}, {how}")
        if self.selected is not None:
            heads, _, k = self.selected.indices.shape[-3:]
            parts.append(
                f"{k} selected blocks of {self.selected.block_size} keys for each query, heads "
                f"{heads}, taken as bits"
            )
        for name, mod in (("mask_mod", self.mask_mod), ("score_mod", self.score_mod)):
            if mod is not None:
                parts.append(f"{name} {getattr(mod, '__qualname__', type(mod).__qualname__)}")
        if self.aux_tensors is not None:
            parts.append(f"{len(self.aux_tensors)} aux tensors")
        return "; ".join(parts)

    def rows_fit(self, seqlen_q: int) -> bool:
        """Whether block lists, if any, have as many block rows as a call."""
        if self.block_lists is None or self.block_size is None:
            return True
        return self.block_lists.mask_block_cnt.shape[2] == -(-seqlen_q // self.block_size[0])

    def unpackable(self, shapes: FwdShapes) -> str | None:
        """The argument, if any, that prevents query heads of a group from sharing a tile."""
        if self.block_lists is not None and self.block_lists.mask_block_cnt.shape[1] != 1:
            heads = self.block_lists.mask_block_cnt.shape[1]
            return f"block_sparse_tensors that differ by query head, of {heads} heads"
        if self.selected is not None and self.selected.heads not in (1, shapes.heads_kv):
            return f"block_sparse_tensors that differ by query head, of {self.selected.heads} heads"
        if self.column_mask is not None:
            heads = self.column_mask.startend_row_indices.shape[1]
            if heads == shapes.heads_q > shapes.heads_kv:
                return f"startend_row_indices that differ by query head, of {heads} heads"
        return None


def column_mask_of(value: Tensor | ColumnMask, causal: bool) -> ColumnMask:
    """The argument startend_row_indices as a mask. causal: of a tensor."""
    return value if isinstance(value, ColumnMask) else ColumnMask(value, causal)
