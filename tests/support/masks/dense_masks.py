"""The masks and callables of a case: as a caller passes them, and dense in torch for the oracle."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case
from mask_cases import (
    COLUMNS,
    FULL,
    MASK_MODS,
    PARTIAL,
    SCORE_MODS,
    Extents,
    MaskRecipe,
    ScoreRecipe,
    hidden_by_columns,
    lists_of,
    make_columns,
    states_of,
)
from torch import Tensor


@dataclass(frozen=True)
class DenseMasks:
    """The masks and callables of a case, dense and in torch.

    columns: of each sequence (one for all if it is shared), int32 (heads, seqlen_k, n). states: of
    the blocks, (batch | 1, heads_q | 1, num_q_blocks, num_k_blocks). recipes: of mask_mods and
    score_mods by name. case: a Case, or what has the same names of masks.
    """

    case: Any
    columns: list[Tensor] | None
    aux: list[Tensor] | None
    states: Tensor | None
    device: torch.device = torch.device("cpu")
    recipes: tuple[dict[str, MaskRecipe], dict[str, ScoreRecipe]] = (MASK_MODS, SCORE_MODS)

    @staticmethod
    def create(case: Case, seed: int) -> DenseMasks:
        # a seed of its own, so that q, k and v of a case do not depend on its masks
        seed += zlib.crc32(case.id.encode())
        generator = torch.Generator().manual_seed(seed)
        extents = Extents(case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        recipes = [MASK_MODS.get(case.mask_mod or ""), SCORE_MODS.get(case.score_mod or "")]
        aux = [r.aux(extents, generator) for r in recipes if r is not None and r.aux is not None]
        columns = None
        if case.column is not None:
            heads = {"1": 1, "kv": case.heads_kv, "q": case.heads_q}[case.column_heads]
            lengths_q = case.seqused_q or case.lengths_q or (case.seqlen_q,) * case.batch
            lengths_k = case.lengths_k or (case.seqlen_k,) * case.batch
            recipe = COLUMNS[case.column]
            if recipe.is_shared and case.lengths_k is None:
                lengths_q, lengths_k = (max(lengths_q),), (case.seqlen_k,)
            columns = make_columns(recipe, heads, lengths_q, lengths_k, seed)
        masks = DenseMasks(case, columns, aux or None, None)
        if case.blocks is None:
            return masks
        return replace(masks, states=masks._make_states(case.blocks, random.Random(seed)))

    def to(self, device: torch.device | str) -> DenseMasks:
        return DenseMasks(
            self.case,
            None if self.columns is None else [x.to(device) for x in self.columns],
            None if self.aux is None else [x.to(device) for x in self.aux],
            None if self.states is None else self.states.to(device),
            torch.device(device),
        )

    def _make_states(self, block_size: tuple[int, int], rng: random.Random) -> Tensor:
        """From what mask_mod shows or, without one, a coarse random pattern per batch and head."""
        recipe = MASK_MODS.get(self.case.mask_mod or "")
        heads = range(self.case.heads_q if recipe is None or recipe.per_head else 1)
        batch = range(self.case.batch if recipe is None or recipe.per_batch else 1)
        shape = self.case.seqlen_q, self.case.seqlen_k
        generator = torch.Generator().manual_seed(rng.randrange(2**32))

        def dense(b: int, h: int) -> Tensor:
            if recipe is not None:
                return self._asked(b, h, *shape)
            coarse = torch.rand((shape[0] // 90 + 1, shape[1] // 90 + 1), generator=generator) < 0.6
            return coarse.repeat_interleave(90, 0).repeat_interleave(90, 1)[: shape[0], : shape[1]]

        states = [[states_of(dense(b, h), block_size, rng) for h in heads] for b in batch]
        return torch.stack([torch.stack(of_batch) for of_batch in states])

    def keywords(self) -> dict[str, Any]:
        """What a caller passes."""
        keywords: dict[str, Any] = {}
        if self.columns is not None:
            packed = self.case.lengths_k is not None
            join = (lambda c: torch.cat(c, dim=1)[None]) if packed else torch.stack
            keywords["startend_row_indices"] = join(self.columns)
            if self._has_fewer_queries:
                # a tensor does not tell its rows
                from flash_mask_cute import ColumnMask

                tensor, causal = keywords["startend_row_indices"], self.case.causal
                rows: Any = self.case.seqlen_q
                if self.case.lengths_q is not None:
                    rows = sum(self.case.lengths_q) if packed else "any"
                keywords["startend_row_indices"] = ColumnMask(tensor, causal, seqlen_q=rows)
        if self.case.mask_mod is not None:
            keywords["mask_mod"] = MASK_MODS[self.case.mask_mod].cute
        if self.case.score_mod is not None:
            keywords["score_mod"] = SCORE_MODS[self.case.score_mod].cute
        if self.aux is not None:
            keywords["aux_tensors"] = self.aux
        if self.states is not None:
            from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch

            partial, full = lists_of(self.states, PARTIAL), lists_of(self.states, FULL)
            keywords["block_sparse_tensors_torch"] = BlockSparseTensorsTorch(
                *partial, *full, block_size=self.case.blocks
            )
        return keywords

    @property
    def _has_fewer_queries(self) -> bool:
        """Whether the call has fewer queries than keys, all sequences together."""
        case = self.case
        rows_q = case.batch * case.seqlen_q if case.lengths_q is None else sum(case.lengths_q)
        rows_k = case.batch * case.seqlen_k if case.lengths_k is None else sum(case.lengths_k)
        return rows_q < rows_k

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k), what these masks leave of a head; lengths are those in use."""
        asked = self._asked(batch_idx, head_idx, seqlen_q, seqlen_k)
        if self.states is not None and self.case.blocks is not None:
            block_q, block_k = self.case.blocks
            states = self.states[
                min(batch_idx, self.states.shape[0] - 1), min(head_idx, self.states.shape[1] - 1)
            ]
            states = states.repeat_interleave(block_q, 0).repeat_interleave(block_k, 1)
            states = states[:seqlen_q, :seqlen_k]
            asked = (states == FULL) | ((states == PARTIAL) & asked)
        if self.columns is None:
            return asked
        columns = self.columns[min(batch_idx, len(self.columns) - 1)]
        mask_head = head_idx * columns.shape[0] // self.case.heads_q
        return asked & ~hidden_by_columns(columns[mask_head, :seqlen_k], seqlen_q, self.case.causal)

    def _asked(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        q = torch.arange(seqlen_q, device=self.device)[:, None]
        k = torch.arange(seqlen_k, device=self.device)
        visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=self.device)
        if self.case.mask_mod is None:
            return visible
        recipe = self.recipes[0][self.case.mask_mod]
        return visible & recipe.dense(batch_idx, head_idx, q, k, self.aux)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        """score_mod of one head's scores (seqlen_q, seqlen_k)."""
        if self.case.score_mod is None:
            return scores
        q = torch.arange(scores.shape[0], device=scores.device)[:, None]
        k = torch.arange(scores.shape[1], device=scores.device)
        recipe = self.recipes[1][self.case.score_mod]
        return recipe.dense(scores, batch_idx, head_idx, q, k, self.aux)
