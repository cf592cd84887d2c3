"""Processing of the scores in a backward: soft cap, score_mod, and their derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.score_gradients import Statistics
from flash_mask_cute.core.softmax import ScoreScales, rounded_difference
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods import ir_analysis
from flash_mask_cute.mods.aux_gradients import AuxSums
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.derivative import AuxTerm, call_score_mod_bwd, differentiate
from flash_mask_cute.mods.difference_sums import DifferenceSums
from flash_mask_cute.mods.line_gradients import AuxElements, LineGradients, counted
from flash_mask_cute.mods.line_sums import LineRead
from flash_mask_cute.mods.read_classes import SummedBy
from flash_mask_cute.mods.score_elements import Places
from flash_mask_cute.mods.walk_sums import NO_HEAD, WalkRead, WalkSums


@dataclass(frozen=True)
class ScoreChain:
    """The steps between the products and the softmax: soft cap and score_mod.

    aux: the elements of aux tensors whose gradients are summed. walk, by_difference, along: sums
    over a walk, by difference and along lines; there are none of listed queries. once: tensors in
    which each score of a batch entry reads another element. of_grads: all gradients of aux tensors
    are sums of dS times what does not depend on the score (`apply_to_grads`). is_exact: dS must not
    be made of a P in 16 bits, because others sum it.
    """

    scales: ScoreScales
    aux: AuxElements
    score_mod_bwd: cutlass.Constexpr[Callable[..., Any] | None]
    dtype: cutlass.Constexpr[type]
    places: Places
    along: LineGradients
    of_grads: cutlass.Constexpr[bool] = False
    walk: WalkSums | None = None
    by_difference: DifferenceSums | None = None
    once: cutlass.Constexpr[tuple[int, ...]] = ()
    is_exact: cutlass.Constexpr[bool] = False

    def of_queries(self, numbers: cute.Tensor) -> "ScoreChain":
        """The chain of a block of listed queries."""
        return replace(self, places=self.places.of_queries(numbers))

    @property
    def by_parts(self) -> bool:
        """Whether gradients of aux tensors need each score beside its dP, for one part of the
        columns after another (`apply_to_both`)."""
        return self.is_exact or (bool(self.aux.wants_aux) and not self.of_grads)

    @property
    def num_by_parts(self) -> int:
        """How many gradients take part in `by_parts`, at least 1."""
        return max(len(self.aux.wants_aux), 1) if self.by_parts else 0

    @property
    def is_empty(self) -> bool:
        return self.aux.score_mod is None and self.scales.cap is None

    @cute.jit
    def apply(
        self,
        work: Work,
        head_idx: Int32,
        m_block: Int32,
        scores: cute.Tensor,
        bits: tuple | None,
        statistics: Statistics,
        probs: cute.Tensor,
        first_col: cutlass.Constexpr[int] = 0,
    ) -> None:
        """Round P of these scores into words, and replace the scores by P times the derivative of
        the modified score.

        bits: the scores that count, None if all do. first_col: the thread's column of the block
        that is column 0 of scores.
        """
        if work.has_scores:
            place = partial(self.places.at, work, head_idx, m_block)
            step = partial(self._apply_each, place, scores, first_col, bits, probs)
            _by_reference(step, statistics)
        else:
            # no position to call a callable with
            probs.fill(0)
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = Float32(0.0)

    def _apply_each(self, place, scores, first_col, bits, probs, statistics) -> None:
        for r in range(self.places.elements.num_rows):
            for first in range(0, cute.size(scores, mode=[1]), 2):
                pair = []
                for i in (first, first + 1):
                    c = first_col + i
                    score, slope, _ = self._modified(scores[r, i], place(r, c), ())
                    prob = self._probability(score, statistics, bits, r, c)
                    if ir_analysis.constant(slope.ir_value()) is None:
                        # where nothing counts, the slope may be anything
                        scores[r, i] = cutlass.select_(prob > 0.0, prob * slope, Float32(0.0))
                    else:
                        scores[r, i] = prob * slope
                    pair.append(prob)
                self.places.elements.keep_pair(probs, self.dtype, r, first, *pair)

    def apply_to_both(
        self,
        block: tuple[Work, Int32, Int32],
        scores: cute.Tensor,
        grads: cute.Tensor,
        first_col: int,
        bits: tuple | None,
        statistics: Statistics,
        words: tuple[cute.Tensor, cute.Tensor],
    ) -> None:
        """Round P and dS of some columns into words, from S and dP, and add to the gradients of aux
        tensors. All threads of the warp must call it, for work tiles with scores.

        block: its work tile, head_idx and m_block. first_col: the thread's column of the block that
        is column 0 of scores and grads.
        """
        step = partial(self._apply_to_both, block, scores, grads, first_col, bits, words)
        _by_reference(step, statistics)

    def _apply_to_both(self, block, scores, grads, first_col, bits, words, statistics) -> None:
        sums, of_walk = self._aux_sums(block[0].batch_idx), self._zeros_of_walk()
        cols, rows = cute.size(scores, mode=[1]), range(self.places.elements.num_rows)
        of_lines, place = self.along.zeros(cols), partial(self.places.at, *block)
        # column by column, because of registers; but neighbours in a row often read one element
        order = [(r, first) for first in range(0, cols, 2) for r in rows]
        for r, first in sorted(order) if self.adds_by_score else order:
            if first == 0 and r > 0 and self.adds_by_score:
                # the statistics of the columns are loaded again, and not kept in registers
                cute.arch.sync_warp()
            pairs = []
            for i in (first, first + 1):
                c = first_col + i
                score, slope, terms = self._modified(scores[r, i], place(r, c), self.aux.wants_aux)
                prob = self._probability(score, statistics, bits, r, c)
                by_modified = prob * (grads[r, i] - statistics.delta[c])
                # where nothing counts, derivatives may be anything
                counts = prob > 0.0
                self._add_to_rows(of_walk, r, terms, by_modified, counts)
                self.along.add_score(of_lines, r, i, terms, by_modified, counts)
                sums.add(self._others(terms), by_modified, counts)
                if self.keeps_grads:
                    grads[r, i] = by_modified
                dscore = cutlass.select_(counts, by_modified * slope, Float32(0.0))
                pairs.append((prob, dscore))
            for kept, pair in zip(words, zip(*pairs, strict=True), strict=True):
                self.places.elements.keep_pair(kept, self.dtype, r, first_col + first, *pair)
        sums.flush()
        self.along.send(block, first_col, of_lines, grads)
        self._add_scores(block, first_col, grads)
        self._add_to_walk(of_walk)

    def apply_to_grads(
        self,
        work: Work,
        head_idx: Int32,
        m_block: Int32,
        probs: cute.Tensor,
        grads: cute.Tensor,
        delta: cute.Tensor,
        dscores: cute.Tensor,
    ) -> None:
        """Round dS of a block into words, from P (which `apply` has left in place of S) and dP, and
        add to the gradients of aux tensors. All threads of the warp must call it."""
        sums, of_walk = self._aux_sums(work.batch_idx), self._zeros_of_walk()
        of_lines = self.along.zeros(cute.size(grads, mode=[1]))
        place = partial(self.places.at, work, head_idx, m_block)
        are_known = (
            not sums.targets
            and all(read.factor.constant is not None for read in self._reads_of_walk)
            and all(group.is_constant for group in self.along.groups)
        )
        # row by row within the columns: what is no longer needed makes room for more
        for first in range(0, cute.size(grads, mode=[1]), 2):
            for r in range(self.places.elements.num_rows):
                pair = []
                for c in (first, first + 1):
                    prob, terms = probs[r, c], ()
                    dscore = prob * (grads[r, c] - delta[c])
                    if not are_known:
                        terms = self.aux.terms(place(r, c))
                    counts = prob > 0.0
                    self._add_to_rows(of_walk, r, terms, dscore, counts)
                    self.along.add_score(of_lines, r, c, terms, dscore, counts)
                    if self.keeps_grads:
                        grads[r, c] = dscore
                    sums.add(self._others(terms), dscore, counts)
                    pair.append(dscore)
                self.places.elements.keep_pair(dscores, self.dtype, r, first, *pair)
        sums.flush()
        self.along.send((work, head_idx, m_block), 0, of_lines, grads)
        self._add_scores((work, head_idx, m_block), 0, grads)
        self._add_to_walk(of_walk)

    # -- sums over a walk -----------------------------------------------------------------------

    @cute.jit
    def turn_to(self, work: Work, head_idx: Int32) -> None:
        """Called before the scores of a block of a head."""
        if const_expr(self.walk is not None):
            head = self.walk.head
            if head[0] != head_idx:
                self._send_walk(work, head[0])
                head[0] = head_idx
        if const_expr(self.by_difference is not None):
            of_sums = self.by_difference.head
            if of_sums[0] != head_idx:
                self.by_difference.send(work.batch_idx)
                of_sums[0] = head_idx

    @cute.jit
    def end_walk(self, work: Work) -> None:
        """Called at the end of a work tile, by all threads of its warps."""
        if const_expr(self.walk is not None):
            self._send_walk(work, self.walk.head[0])
        if const_expr(self.by_difference is not None):
            self.by_difference.send(work.batch_idx)
            self.by_difference.head[0] = Int32(NO_HEAD)
        for i in cutlass.range_constexpr(len(self.along.uniform)):
            self.along.uniform[i].send()

    @property
    def turns_to_heads(self) -> bool:
        """Whether `turn_to` has something to do."""
        return self.walk is not None or self.by_difference is not None

    @property
    def has_walk(self) -> bool:
        """Whether `end_walk` has something to do."""
        return self.turns_to_heads or bool(self.along.uniform)

    @cute.jit
    def _send_walk(self, work: Work, head_idx: Int32) -> None:
        """Send the sums of a head, if there are any, and begin with 0."""
        if head_idx != NO_HEAD:
            self._send_sums(work, head_idx)
            self.walk.clear()

    def _send_sums(self, work: Work, head_idx: Int32) -> None:
        elements, lane = self.places.elements, cute.arch.lane_idx()
        for r in range(elements.num_rows):
            key = self.places.first_key + elements.row_of(thread_in_warpgroup(), r)
            k_idx = cutlass.min(work.block * self.places.tiles[1] + key, work.seqlen_k - 1)
            # any query: no element depends on it
            place = ScorePlace(work.batch_idx, head_idx, work.position(Int32(0)), k_idx)
            terms = self.aux.terms(place)
            for i, read in enumerate(self.walk.reads):
                if r > 0 and not read.by_key:
                    continue
                lanes = elements.lanes_per_row if read.by_key else cute.arch.WARP_SIZE
                total = self.walk.of_row(i, r)
                total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
                _, coordinates, _ = terms[read.term]
                self.walk.send(i, coordinates, total, lane % lanes == 0)

    @property
    def _reads_of_walk(self) -> tuple[WalkRead, ...]:
        return () if self.walk is None else self.walk.reads

    @property
    def _known_reads(self) -> tuple[WalkRead | LineRead, ...]:
        return *self._reads_of_walk, *(read for group in self.along.groups for read in group.reads)

    def _aux_sums(self, batch_idx: Int32) -> AuxSums:
        """Sums of the tensors that are not summed over a walk or along lines."""
        targets = {n: x for n, x in self.aux.targets().items() if n in self._of_scores}
        return AuxSums(targets, batch_idx, self.once)

    @property
    def _of_scores(self) -> set[int]:
        """The tensors whose sums are found score by score."""
        known = {read.number for read in self._known_reads}
        return set(self.aux.wants_aux) - known - set(self._summed_by_score)

    @property
    def adds_by_score(self) -> bool:
        """Whether the element that a score gives to is found for each score."""
        return bool(self._of_scores)

    @property
    def adds_after_walk(self) -> bool:
        """Whether nothing is added to memory while the walk is at a head."""
        return not (self.along.groups or self.adds_by_score or self._summed_by_score)

    def _zeros_of_walk(self) -> list[list[Float32]]:
        """What a block gives to each read of the walk, from each row."""
        return [[Float32(0.0)] * self.places.elements.num_rows for _ in self._reads_of_walk]

    def _add_to_walk(self, of_walk: list[list[Float32]]) -> None:
        for i, of_rows in enumerate(of_walk):
            self.walk.add(i, of_rows)

    def _others(self, terms: Sequence[AuxTerm]) -> list[AuxTerm]:
        """The terms of reads that are not summed over the walk or along lines."""
        known, by_score = {read.term for read in self._known_reads}, self._summed_by_score
        others = [term for i, term in enumerate(terms) if i not in known]
        return [term for term in others if term[0] not in by_score]

    def _add_to_rows(
        self,
        of_walk: list[list[Float32]],
        r: int,
        terms: Sequence[AuxTerm],
        grad: Float32,
        counts: Boolean,
    ) -> None:
        """Add what a score in row r gives to each read of the walk; see `AuxSums.add`."""
        reads = self._reads_of_walk
        for values, read in zip(of_walk, reads, strict=True):
            factor = read.factor.constant
            if factor is None:
                factor = terms[read.term][2]
            more = grad if read.factor.constant == 1.0 else grad * factor
            values[r] = values[r] + counted(more, read, counts)

    # -- sums along lines -----------------------------------------------------------------------

    @property
    def keeps_grads(self) -> bool:
        """Whether sums are made of gradients of scores when all of these are known."""
        return any(group.cuts for group in self.along.groups) or bool(self._summed_by_score)

    @property
    def _summed_by_score(self) -> tuple[int, ...]:
        """The numbers of the tensors whose gradients are summed by difference score by score."""
        if self.by_difference is None:
            return ()
        reads = self.by_difference.reads
        return tuple(x.number for x in reads if x.summed.by is SummedBy.SCORES)

    def _add_scores(
        self, block: tuple[Work, Int32, Int32], first_col: int, grads: cute.Tensor
    ) -> None:
        """Add gradients of scores to the sums by difference that are made score by score."""
        if self._summed_by_score:
            self._add_columns(block, first_col, grads)

    @cute.jit
    def _add_columns(
        self, block: tuple, first_col: cutlass.Constexpr[int], grads: cute.Tensor
    ) -> None:
        place, elements = partial(self.places.at, *block), self.places.elements
        is_any = Boolean(False)
        for i in cutlass.range_constexpr(cute.size(grads)):
            is_any = is_any | (grads[i] != 0.0)
        # a warp may have none, of the last keys
        if cute.arch.vote_any_sync(is_any):
            for i in cutlass.range_constexpr(len(self.by_difference.reads)):
                if const_expr(self.by_difference.reads[i].number in self._summed_by_score):
                    for c in cutlass.range_constexpr(cute.size(grads, mode=[1])):
                        scores = tuple(
                            (grads[r, c], *place(r, first_col + c)[2:])
                            for r in range(elements.num_rows)
                        )
                        self.by_difference.add_column(i, scores, elements.lanes_per_row)

    # -- single scores --------------------------------------------------------------------------

    def _probability(
        self, score: Float32, statistics: Statistics, bits: tuple | None, r: int, c: int
    ) -> Float32:
        if statistics.reference is not None:
            score = rounded_difference(score, statistics.reference[c])
        exponent = cute.math.fma(score, self.scales.scale_log2, -statistics.lse[c])
        prob = cute.math.exp2(exponent, fastmath=True)
        if bits is not None:
            prob = cutlass.select_(self.places.elements.is_set(bits, r, c), prob, Float32(0.0))
        return prob

    def _modified(
        self, score: Float32, place: ScorePlace, wants_aux: tuple[int, ...]
    ) -> tuple[Float32, Float32, Sequence[AuxTerm]]:
        """The modified value of a raw product, which the softmax takes (divided by scale_log2), and
        its derivatives by the scaled product and by elements of wanted aux tensors."""
        slope, terms = None, ()
        if self.scales.cap is not None:
            score = self.scales.bounded(score)
            slope = cute.math.fma(-score, score, Float32(1.0))
        if self.aux.score_mod is not None:
            score = score * self.scales.scale_mod
            if self.score_mod_bwd is None:
                score, by_score, terms = differentiate(
                    self.aux.score_mod, score, place, self.aux.aux_tensors, wants_aux
                )
            else:
                # a derivative is linear in the gradient that it is given
                one = Float32(1.0)
                by_score = call_score_mod_bwd(
                    self.score_mod_bwd, one, score, place, self.aux.aux_tensors
                )
                score = call_score_mod(self.aux.score_mod, score, place, self.aux.aux_tensors)
            slope = by_score if slope is None else slope * by_score
        return score, slope, terms


@cute.jit
def _by_reference(step: cutlass.Constexpr[Callable[..., None]], statistics: Statistics) -> None:
    """A step without references, if it is known that no query of the block has one."""
    if const_expr(statistics.has_reference is None):
        step(statistics)
    else:
        near = statistics._replace(reference=None)
        if statistics.has_reference:
            step(statistics)
        else:
            step(near)
