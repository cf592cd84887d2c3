"""Processing of the scores in a backward: soft cap, score_mod, and their derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.score_gradients import Statistics
from flash_mask_cute.core.softmax import ScoreScales, rounded_difference
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods import ir_analysis, line_sums
from flash_mask_cute.mods.aux_gradients import AuxSums, offset_in
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.derivative import AuxTerm, call_score_mod_bwd, differentiate
from flash_mask_cute.mods.diagonals import Ahead, UniformDiagonals, add_runs, factor_of, total_of
from flash_mask_cute.mods.difference_sums import DifferenceSums
from flash_mask_cute.mods.line_sums import Line, LineGroup, LineRead, Lines, next_cut
from flash_mask_cute.mods.read_classes import SummedBy
from flash_mask_cute.mods.score_elements import Elements, ListedQueries
from flash_mask_cute.mods.walk_sums import NO_HEAD, WalkRead, WalkSums


@dataclass(frozen=True)
class ScoreChain:
    """The steps between the products and the softmax: soft cap and score_mod.

    wants_aux: indices of the aux tensors whose gradients are summed, in aux_grads. tiles: (tile_m,
    tile_n). first_key, first_query: this warpgroup's first key in the work tile and first query in
    the block. walk, by_difference: sums over a walk, and by difference. once: tensors in which each
    score of a batch entry reads another element. groups: of reads that are summed along lines.
    listed: where blocks have listed queries; head_idx is then a group of heads, and nothing is
    summed over a walk or along lines. of_grads: all gradients of aux tensors are sums of dS times
    what does not depend on the score (`apply_to_grads`). is_exact: dS must not be made of a P in 16
    bits, because others sum it. reduces_diagonals: these warps sum within grid rectangles in this
    block (`SummedBy.TURNS`). uniform: of groups with uniform diagonals; ahead: what is known of a
    block.
    """

    scales: ScoreScales
    aux_tensors: Any
    aux_grads: tuple[cute.Tensor, ...] | None
    wants_aux: cutlass.Constexpr[tuple[int, ...]]
    score_mod: cutlass.Constexpr[Callable[..., Any] | None]
    score_mod_bwd: cutlass.Constexpr[Callable[..., Any] | None]
    dtype: cutlass.Constexpr[type]
    tiles: cutlass.Constexpr[tuple[int, int]]
    elements: cutlass.Constexpr[Elements]
    first_key: Int32
    first_query: Int32
    of_grads: cutlass.Constexpr[bool] = False
    walk: WalkSums | None = None
    by_difference: DifferenceSums | None = None
    groups: cutlass.Constexpr[tuple[LineGroup, ...]] = ()
    lines: cutlass.Constexpr[Lines | None] = None
    once: cutlass.Constexpr[tuple[int, ...]] = ()
    listed: ListedQueries | None = None
    is_exact: cutlass.Constexpr[bool] = False
    reduces_diagonals: Boolean | bool = True
    uniform: tuple[UniformDiagonals, ...] = ()
    ahead: tuple[Ahead, ...] = ()

    def of_queries(self, numbers: cute.Tensor) -> "ScoreChain":
        """The chain of a block of listed queries."""
        return replace(self, listed=self.listed._replace(numbers=numbers))

    @property
    def by_parts(self) -> bool:
        """Whether gradients of aux tensors need each score beside its dP, for one part of the
        columns after another (`apply_to_both`)."""
        return self.is_exact or (bool(self.wants_aux) and not self.of_grads)

    @property
    def num_by_parts(self) -> int:
        """How many gradients take part in `by_parts`, at least 1."""
        return max(len(self.wants_aux), 1) if self.by_parts else 0

    @property
    def is_empty(self) -> bool:
        return self.score_mod is None and self.scales.cap is None

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
            place = partial(self._place, work, head_idx, m_block)
            step = partial(self._apply_each, place, scores, first_col, bits, probs)
            _by_reference(step, statistics)
        else:
            # no position to call a callable with
            probs.fill(0)
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = Float32(0.0)

    def _apply_each(self, place, scores, first_col, bits, probs, statistics) -> None:
        for r in range(self.elements.num_rows):
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
                self.elements.keep_pair(probs, self.dtype, r, first, *pair)

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
        cols, rows = cute.size(scores, mode=[1]), range(self.elements.num_rows)
        of_lines, place = self._zeros_of_lines(cols), partial(self._place, *block)
        # column by column, because of registers; but neighbours in a row often read one element
        order = [(r, first) for first in range(0, cols, 2) for r in rows]
        for r, first in sorted(order) if self.adds_by_score else order:
            if first == 0 and r > 0 and self.adds_by_score:
                # the statistics of the columns are loaded again, and not kept in registers
                cute.arch.sync_warp()
            pairs = []
            for i in (first, first + 1):
                c = first_col + i
                score, slope, terms = self._modified(scores[r, i], place(r, c), self.wants_aux)
                prob = self._probability(score, statistics, bits, r, c)
                by_modified = prob * (grads[r, i] - statistics.delta[c])
                # where nothing counts, derivatives may be anything
                counts = prob > 0.0
                self._add_to_rows(of_walk, r, terms, by_modified, counts)
                self._add_to_lines(of_lines, r, i, terms, by_modified, counts)
                sums.add(self._others(terms), by_modified, counts)
                if self.keeps_grads:
                    grads[r, i] = by_modified
                dscore = cutlass.select_(counts, by_modified * slope, Float32(0.0))
                pairs.append((prob, dscore))
            for kept, pair in zip(words, zip(*pairs, strict=True), strict=True):
                self.elements.keep_pair(kept, self.dtype, r, first_col + first, *pair)
        sums.flush()
        self._send_lines(block, first_col, of_lines, grads)
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
        of_lines = self._zeros_of_lines(cute.size(grads, mode=[1]))
        place = partial(self._place, work, head_idx, m_block)
        are_known = (
            not sums.targets
            and all(read.factor.constant is not None for read in self._reads_of_walk)
            and all(group.is_constant for group in self.groups)
        )
        # row by row within the columns: what is no longer needed makes room for more
        for first in range(0, cute.size(grads, mode=[1]), 2):
            for r in range(self.elements.num_rows):
                pair = []
                for c in (first, first + 1):
                    prob, terms = probs[r, c], ()
                    dscore = prob * (grads[r, c] - delta[c])
                    if not are_known:
                        _, _, terms = self._differentiate(Float32(0.0), place(r, c), self.wants_aux)
                    counts = prob > 0.0
                    self._add_to_rows(of_walk, r, terms, dscore, counts)
                    self._add_to_lines(of_lines, r, c, terms, dscore, counts)
                    if self.keeps_grads:
                        grads[r, c] = dscore
                    sums.add(self._others(terms), dscore, counts)
                    pair.append(dscore)
                self.elements.keep_pair(dscores, self.dtype, r, first, *pair)
        sums.flush()
        self._send_lines((work, head_idx, m_block), 0, of_lines, grads)
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
        for i in cutlass.range_constexpr(len(self.uniform)):
            self.uniform[i].send()

    @property
    def turns_to_heads(self) -> bool:
        """Whether `turn_to` has something to do."""
        return self.walk is not None or self.by_difference is not None

    @property
    def has_walk(self) -> bool:
        """Whether `end_walk` has something to do."""
        return self.turns_to_heads or bool(self.uniform)

    @cute.jit
    def _send_walk(self, work: Work, head_idx: Int32) -> None:
        """Send the sums of a head, if there are any, and begin with 0."""
        if head_idx != NO_HEAD:
            self._send_sums(work, head_idx)
            self.walk.clear()

    def _send_sums(self, work: Work, head_idx: Int32) -> None:
        elements, lane = self.elements, cute.arch.lane_idx()
        for r in range(elements.num_rows):
            key = self.first_key + elements.row_of(thread_in_warpgroup(), r)
            k_idx = cutlass.min(work.block * self.tiles[1] + key, work.seqlen_k - 1)
            # any query: no element depends on it
            place = ScorePlace(work.batch_idx, head_idx, work.position(Int32(0)), k_idx)
            _, _, terms = self._differentiate(Float32(0.0), place, self.wants_aux)
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
        return *self._reads_of_walk, *(read for group in self.groups for read in group.reads)

    def _targets(self) -> dict[int, cute.Tensor]:
        """The sums of each wanted tensor, by its number."""
        return dict(zip(self.wants_aux, self.aux_grads, strict=True))

    def _aux_sums(self, batch_idx: Int32) -> AuxSums:
        """Sums of the tensors that are not summed over a walk or along lines."""
        targets = {n: x for n, x in self._targets().items() if n in self._of_scores}
        return AuxSums(targets, batch_idx, self.once)

    @property
    def _of_scores(self) -> set[int]:
        """The tensors whose sums are found score by score."""
        known = {read.number for read in self._known_reads}
        return set(self.wants_aux) - known - set(self._summed_by_score)

    @property
    def adds_by_score(self) -> bool:
        """Whether the element that a score gives to is found for each score."""
        return bool(self._of_scores)

    @property
    def adds_after_walk(self) -> bool:
        """Whether nothing is added to memory while the walk is at a head."""
        return not (self.groups or self.adds_by_score or self._summed_by_score)

    def _zeros_of_walk(self) -> list[list[Float32]]:
        """What a block gives to each read of the walk, from each row."""
        return [[Float32(0.0)] * self.elements.num_rows for _ in self._reads_of_walk]

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
            values[r] = values[r] + _counted(more, read, counts)

    # -- sums along lines -----------------------------------------------------------------------

    @property
    def keeps_grads(self) -> bool:
        """Whether sums are made of gradients of scores when all of these are known."""
        return any(group.cuts for group in self.groups) or bool(self._summed_by_score)

    def _zeros_of_lines(self, cols: int) -> list[list[Float32]]:
        """A thread's parts of the lines, for each group without cuts, of so many columns."""
        groups = (group for group in self.groups if not group.cuts)
        return [[Float32(0.0)] * self.lines.num_parts(group.line, cols) for group in groups]

    def _add_to_lines(
        self,
        of_lines: list[list[Float32]],
        r: int,
        c: int,
        terms: Sequence[AuxTerm],
        grad: Float32,
        counts: Boolean,
    ) -> None:
        """Add what a score gives to each group of reads without cuts; see `AuxSums.add`."""
        groups = (group for group in self.groups if not group.cuts)
        for parts, group in zip(of_lines, groups, strict=True):
            read, more = group.reads[0], grad
            if not group.is_constant:
                more = grad * terms[read.term][2]
            i = self.lines.part_of(group.line, r, c)
            parts[i] = parts[i] + _counted(more, read, counts)

    def _send_lines(
        self,
        block: tuple[Work, Int32, Int32],
        first_col: int,
        of_lines: list[list[Float32]],
        grads: cute.Tensor,
    ) -> None:
        """Add the sums along the lines of a warp's scores to their elements.

        first_col: the thread's column of the block that is their column 0. grads: gradients of the
        scores, where lines have cuts.
        """
        sums = iter(of_lines)
        uniform = [x.group for x in self.uniform]
        for group in self.groups:
            if group.cuts:
                self._send_within_rectangles(block, first_col, group, grads)
            elif group in uniform:
                self._send_diagonals(block, uniform.index(group), tuple(next(sums)))
            else:
                totals = self.lines.totals(group.line, next(sums))
                self._send_totals(block, first_col, group, totals, (Int32(0), Int32(0)))

    def look_ahead(self, work: Work, head_idx: Int32, m_block: Int32) -> "ScoreChain":
        """The chain of a block that knows whether its diagonals have the same elements. It
        may be called while products are in flight."""
        block = work, head_idx, m_block
        ahead = (x.ahead(self._offsets_of_diagonals(block, x.group)) for x in self.uniform)
        return replace(self, ahead=tuple(ahead)) if self.uniform else self

    def _offsets_of_diagonals(
        self, block: tuple[Work, Int32, Int32], group: LineGroup
    ) -> list[list[Int64]]:
        """Where the sums of the elements of this lane's diagonals are, of each read of a group."""
        found: list[list[Int64]] = [[] for _ in group.reads]
        targets, corner = self._targets(), (Int32(0), Int32(0))
        for number in self.lines.diagonals(self.tiles[0] // self.elements.lanes_per_row):
            place = self._place_on_line(block, group.line, 0, number, corner)
            _, _, terms = self._differentiate(Float32(0.0), place, self.wants_aux)
            for offsets, read in zip(found, group.reads, strict=True):
                _, coordinates, _ = terms[read.term]
                offsets.append(offset_in(targets[read.number], coordinates))
        return found

    @cute.jit
    def _send_diagonals(
        self, block: tuple, i: cutlass.Constexpr[int], parts: tuple[Float32, ...]
    ) -> None:
        """`_send_lines` of the whole block, of the group with number i in `even`."""
        uniform, ahead = self.uniform[i], self.ahead[i]
        if ahead.is_uniform:
            uniform.add(ahead, block[1], total_of(parts))
        else:
            totals = self.lines.in_order(parts)
            offsets = self._offsets_of_diagonals(block, uniform.group)
            for n, target in enumerate(uniform.targets):
                factor = factor_of(uniform.group, n)
                found = [x * factor for x in totals]
                add_runs(target, tuple(zip(found, offsets[n], strict=True)))

    @cute.jit
    def _send_within_rectangles(
        self,
        block: tuple,
        first_col: cutlass.Constexpr[int],
        group: cutlass.Constexpr[LineGroup],
        grads: cute.Tensor,
    ) -> None:
        """`_send_lines` of a group with cuts, by the warps whose turn it is."""
        if self.reduces_diagonals:
            self._send_moved(block, first_col, group, self.lines.along_diagonals(grads))

    @cute.jit
    def _send_moved(
        self,
        block: tuple,
        first_col: cutlass.Constexpr[int],
        group: cutlass.Constexpr[LineGroup],
        grads: cute.Tensor,
    ) -> None:
        """The sums along the lines of each grid rectangle. grads: moved along diagonals, once."""
        work = block[0]
        q_idx, k_idx = self._first_of(block, first_col)
        k_idx = k_idx + self.lines.first_row()
        # the threads of a row have all columns of each eight
        cols = cute.size(grads, mode=[1]) - self.lines.more_cols
        end_q = q_idx + cols * self.elements.lanes_per_row
        end_q = cutlass.min(end_q, work.seqlen_q)
        behind = k_idx + self.lines.rows_of_warp
        end_k = cutlass.min(behind, work.seqlen_k)
        while k_idx < end_k:
            next_k = next_cut(group.cuts, True, k_idx, end_k)
            last_k = next_k
            if const_expr(self.by_difference is not None):
                last_k = next_cut(group.cuts, True, next_k, end_k)
            from_q = q_idx
            while from_q < end_q:
                next_q = next_cut(group.cuts, False, from_q, end_q)
                first, second = (from_q, next_q, k_idx, next_k), (from_q, next_q, next_k, last_k)
                if const_expr(self.by_difference is None):
                    self._send_rectangles(block, first_col, group, grads, (first,))
                elif next_k == behind:
                    self._send_rectangles(block, first_col, group, grads, ((*first[:3], None),))
                else:
                    # two at once: a warp's steps wait for each other, and all warps for the slowest
                    self._send_rectangles(block, first_col, group, grads, (first, second))
                from_q = next_q
            k_idx = last_k

    def _send_rectangles(
        self,
        block: tuple,
        first_col: int,
        group: LineGroup,
        grads: cute.Tensor,
        rectangles: tuple[tuple[Int32, Int32, Int32, Int32 | None], ...],
    ) -> None:
        """Send the sums along the lines of some rectangles; sides: see `_between`."""
        parts = [self._between(block, first_col, group, grads, sides) for sides in rectangles]
        totals = [self.lines.totals(group.line, x, are_moved=True) for x in parts]
        q_idx, first_k = self._first_of(block, first_col)
        found = []
        for lines, (from_q, _, from_k, _) in zip(totals, rectangles, strict=True):
            self._send_totals(block, first_col, group, lines, (from_q, from_k))
            apart = (q_idx - from_q) - (first_k - from_k)
            found.append((tuple((x, number + apart) for x, number in lines), (from_q, from_k)))
        for i, read in enumerate(self.by_difference.reads if self.by_difference else ()):
            of_lines = read.summed.by is not SummedBy.SCORES
            if of_lines and read.number in {x.number for x in group.reads}:
                self.by_difference.add(i, tuple(found))

    def _between(
        self,
        block: tuple[Work, Int32, Int32],
        first_col: int,
        group: LineGroup,
        grads: cute.Tensor,
        sides: tuple[Int32, Int32, Int32, Int32 | None],
    ) -> list[Float32]:
        """A thread's parts of the lines in a rectangle. sides: its ends; None: all keys."""
        first_q, end_q, first_k, end_k = sides
        q_idx, k_idx = self._first_of(block, first_col)
        queries = (q_idx + x for x in self.lines.moved_cols(cute.size(grads, mode=[1])))
        has_query = [(q >= first_q) & (q < end_q) for q in queries]
        has_key: list[Boolean | None] = [None] * self.elements.num_rows
        if end_k is not None:
            rows = (self.elements.row_of(thread_in_warpgroup(), r) for r in range(len(has_key)))
            has_key = [(k_idx + r >= first_k) & (k_idx + r < end_k) for r in rows]
        return line_sums.parts_between(self.lines, group.line, grads, has_key, has_query)

    def _send_totals(
        self,
        block: tuple[Work, Int32, Int32],
        first_col: int,
        group: LineGroup,
        totals: list[tuple[Float32, Int32]],
        corner: tuple[Int32, Int32],
    ) -> None:
        """Add totals of lines to elements (`Lines.totals`). corner: their first query and key."""
        targets = self._targets()
        others = group.reads
        if group.cuts and self.by_difference is not None:
            summed = self.by_difference.reads
            others = tuple(x for x in others if all(x.number != y.number for y in summed))
        sums = [AuxSums({read.number: targets[read.number]}) for read in others]
        for total, number in totals:
            if not others:
                break
            place = self._place_on_line(block, group.line, first_col, number, corner)
            _, _, terms = self._differentiate(Float32(0.0), place, self.wants_aux)
            for own, read in zip(sums, others, strict=True):
                tensor, coordinates, _ = terms[read.term]
                factor = Float32(read.factor.constant if group.is_constant else 1.0)
                own.add([(tensor, coordinates, factor)], total, Boolean(True))
        for own in sums:
            own.flush()

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
        place, elements = partial(self._place, *block), self.elements
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

    def _place_on_line(
        self,
        block: tuple[Work, Int32, Int32],
        line: Line,
        first_col: int,
        number: Int32,
        corner: tuple[Int32, Int32],
    ) -> ScorePlace:
        """The place of a score on a line of a warp; any place if the line has none there."""
        work, head_idx, _ = block
        q_idx, first_k = self._first_of(block, first_col)
        q_idx, k_idx = q_idx + number, Int32(0)
        if line is Line.DIAGONAL:
            distance = q_idx - first_k
            k_idx = cutlass.max(corner[1], corner[0] - distance)
            q_idx = k_idx + distance
        q_idx, k_idx = cutlass.min(q_idx, work.seqlen_q - 1), cutlass.min(k_idx, work.seqlen_k - 1)
        q_idx = work.position(cutlass.max(q_idx, 0))
        return ScorePlace(work.batch_idx, head_idx, q_idx, k_idx)

    def _first_of(self, block: tuple[Work, Int32, Int32], first_col: int) -> tuple[Int32, Int32]:
        """The first query and the first key of a warpgroup's scores, from a thread's column on."""
        work, _, m_block = block
        tile_m, tile_n = self.tiles
        q_idx = m_block * tile_m + self.first_query + self.elements.col_offset(first_col)
        return q_idx, work.block * tile_n + self.first_key

    # -- single scores --------------------------------------------------------------------------

    def _place(self, work: Work, head_idx: Int32, m_block: Int32, r: int, c: int) -> ScorePlace:
        """The place of a thread's score."""
        tile_m, tile_n = self.tiles
        thread = thread_in_warpgroup()
        k_idx = work.block * tile_n + self.first_key + self.elements.row_of(thread, r)
        first_col, offset = self.elements.first_col_of(thread), self.elements.col_offset(c)
        if self.listed is None:
            q_idx = m_block * tile_m + self.first_query + first_col + offset
        else:
            head_idx, q_idx = self.listed.at(head_idx, first_col, offset)
        # positions past the ends are hidden, but the callable may index tensors with them
        q_idx, k_idx = cutlass.min(q_idx, work.seqlen_q - 1), cutlass.min(k_idx, work.seqlen_k - 1)
        return ScorePlace(work.batch_idx, head_idx, work.position(q_idx), k_idx)

    def _probability(
        self, score: Float32, statistics: Statistics, bits: tuple | None, r: int, c: int
    ) -> Float32:
        if statistics.reference is not None:
            score = rounded_difference(score, statistics.reference[c])
        exponent = cute.math.fma(score, self.scales.scale_log2, -statistics.lse[c])
        prob = cute.math.exp2(exponent, fastmath=True)
        if bits is not None:
            prob = cutlass.select_(self.elements.is_set(bits, r, c), prob, Float32(0.0))
        return prob

    def _differentiate(
        self, score: Float32, place: ScorePlace, wants_aux: tuple[int, ...]
    ) -> tuple[Float32, Float32, Sequence[AuxTerm]]:
        return differentiate(self.score_mod, score, place, self.aux_tensors, wants_aux)

    def _modified(
        self, score: Float32, place: ScorePlace, wants_aux: tuple[int, ...]
    ) -> tuple[Float32, Float32, Sequence[AuxTerm]]:
        """The modified value of a raw product, which the softmax takes (divided by scale_log2), and
        its derivatives by the scaled product and by elements of wanted aux tensors."""
        slope, terms = None, ()
        if self.scales.cap is not None:
            score = self.scales.bounded(score)
            slope = cute.math.fma(-score, score, Float32(1.0))
        if self.score_mod is not None:
            score = score * self.scales.scale_mod
            if self.score_mod_bwd is None:
                score, by_score, terms = self._differentiate(score, place, wants_aux)
            else:
                # a derivative is linear in the gradient that it is given
                one = Float32(1.0)
                by_score = call_score_mod_bwd(
                    self.score_mod_bwd, one, score, place, self.aux_tensors
                )
                score = call_score_mod(self.score_mod, score, place, self.aux_tensors)
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


def _counted(more: Float32, read: WalkRead | LineRead, counts: Boolean) -> Float32:
    """What a score adds: it may be anything where nothing counts."""
    return more if read.factor.is_finite else cutlass.select_(counts, more, Float32(0.0))
