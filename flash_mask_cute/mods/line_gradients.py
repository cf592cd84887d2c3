"""Gradients of aux tensors, along the lines of a block's scores that a warp has: from sums of lines
to their elements.

Lines with cuts are summed within each grid rectangle, from gradients of scores that are kept
(`Lines.along_diagonals`). Others are summed score by score. To find the element of a line, the
modifier is differentiated once, at any of its scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods import line_sums
from flash_mask_cute.mods.aux_gradients import AuxSums, offset_in
from flash_mask_cute.mods.calling import ScorePlace
from flash_mask_cute.mods.derivative import AuxTerm, differentiate
from flash_mask_cute.mods.diagonals import Ahead, UniformDiagonals, add_runs, factor_of, total_of
from flash_mask_cute.mods.difference_sums import DifferenceSums
from flash_mask_cute.mods.line_sums import Line, LineGroup, LineRead, Lines, next_cut
from flash_mask_cute.mods.read_classes import SummedBy
from flash_mask_cute.mods.score_elements import Places


@dataclass(frozen=True)
class AuxElements:
    """The elements of wanted aux tensors that a score reads. score_mod: which reads them. targets:
    the sums of each wanted tensor (`AuxSums`), in the order of wants_aux."""

    score_mod: cutlass.Constexpr[Callable[..., Any] | None]
    wants_aux: cutlass.Constexpr[tuple[int, ...]]
    aux_tensors: Any
    aux_grads: tuple[cute.Tensor, ...] | None

    def terms(self, place: ScorePlace) -> Sequence[AuxTerm]:
        """Those at a place, if they do not depend on the score."""
        found = differentiate(self.score_mod, Float32(0.0), place, self.aux_tensors, self.wants_aux)
        return found[2]

    def targets(self) -> dict[int, cute.Tensor]:
        """The sums of each wanted tensor, by its number."""
        return dict(zip(self.wants_aux, self.aux_grads, strict=True))


@dataclass(frozen=True)
class LineGradients:
    """groups: of reads that are summed along lines. uniform: of groups with uniform diagonals;
    ahead: what is known of a block. reduces_diagonals: these warps sum within grid rectangles in
    this block (`SummedBy.TURNS`). by_difference: which takes sums of rectangles."""

    groups: cutlass.Constexpr[tuple[LineGroup, ...]]
    lines: cutlass.Constexpr[Lines]
    places: Places
    aux: AuxElements
    by_difference: DifferenceSums | None = None
    uniform: tuple[UniformDiagonals, ...] = ()
    ahead: tuple[Ahead, ...] = ()
    reduces_diagonals: Boolean | bool = True

    def look_ahead(self, work: Work, head_idx: Int32, m_block: Int32) -> "LineGradients":
        """The same for a block, knowing whether its diagonals have the same elements. It
        may be called while products are in flight."""
        block = work, head_idx, m_block
        ahead = (x.ahead(self._offsets_of_diagonals(block, x.group)) for x in self.uniform)
        return replace(self, ahead=tuple(ahead)) if self.uniform else self

    def zeros(self, cols: int) -> list[list[Float32]]:
        """A thread's parts of the lines, for each group without cuts, of so many columns."""
        groups = (group for group in self.groups if not group.cuts)
        return [[Float32(0.0)] * self.lines.num_parts(group.line, cols) for group in groups]

    def add_score(
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
            parts[i] = parts[i] + counted(more, read, counts)

    def send(
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

    def _offsets_of_diagonals(
        self, block: tuple[Work, Int32, Int32], group: LineGroup
    ) -> list[list[Int64]]:
        """Where the sums of the elements of this lane's diagonals are, of each read of a group."""
        found: list[list[Int64]] = [[] for _ in group.reads]
        targets, corner = self.aux.targets(), (Int32(0), Int32(0))
        for number in self.lines.diagonals(
            self.places.tiles[0] // self.places.elements.lanes_per_row
        ):
            place = self._place_on_line(block, group.line, 0, number, corner)
            terms = self.aux.terms(place)
            for offsets, read in zip(found, group.reads, strict=True):
                _, coordinates, _ = terms[read.term]
                offsets.append(offset_in(targets[read.number], coordinates))
        return found

    @cute.jit
    def _send_diagonals(
        self, block: tuple, i: cutlass.Constexpr[int], parts: tuple[Float32, ...]
    ) -> None:
        """`send` of the whole block, of the group with number i in `uniform`."""
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
        """`send` of a group with cuts. Warps take turns."""
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
        q_idx, k_idx = self.places.first(block, first_col)
        k_idx = k_idx + self.lines.first_row()
        # the threads of a row have all columns of each eight
        cols = cute.size(grads, mode=[1]) - self.lines.more_cols
        end_q = q_idx + cols * self.places.elements.lanes_per_row
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
        q_idx, first_k = self.places.first(block, first_col)
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
        q_idx, k_idx = self.places.first(block, first_col)
        queries = (q_idx + x for x in self.lines.moved_cols(cute.size(grads, mode=[1])))
        has_query = [(q >= first_q) & (q < end_q) for q in queries]
        has_key: list[Boolean | None] = [None] * self.places.elements.num_rows
        if end_k is not None:
            rows = (
                self.places.elements.row_of(thread_in_warpgroup(), r) for r in range(len(has_key))
            )
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
        targets = self.aux.targets()
        others = group.reads
        if group.cuts and self.by_difference is not None:
            summed = self.by_difference.reads
            others = tuple(x for x in others if all(x.number != y.number for y in summed))
        sums = [AuxSums({read.number: targets[read.number]}) for read in others]
        for total, number in totals:
            if not others:
                break
            place = self._place_on_line(block, group.line, first_col, number, corner)
            terms = self.aux.terms(place)
            for own, read in zip(sums, others, strict=True):
                tensor, coordinates, _ = terms[read.term]
                factor = Float32(read.factor.constant if group.is_constant else 1.0)
                own.add([(tensor, coordinates, factor)], total, Boolean(True))
        for own in sums:
            own.flush()

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
        q_idx, first_k = self.places.first(block, first_col)
        q_idx, k_idx = q_idx + number, Int32(0)
        if line is Line.DIAGONAL:
            distance = q_idx - first_k
            k_idx = cutlass.max(corner[1], corner[0] - distance)
            q_idx = k_idx + distance
        q_idx, k_idx = cutlass.min(q_idx, work.seqlen_q - 1), cutlass.min(k_idx, work.seqlen_k - 1)
        q_idx = work.position(cutlass.max(q_idx, 0))
        return ScorePlace(work.batch_idx, head_idx, q_idx, k_idx)


def counted(more: Float32, read: LineRead, counts: Boolean) -> Float32:
    """What a score adds: it may be anything where nothing counts."""
    return more if read.factor.is_finite else cutlass.select_(counts, more, Float32(0.0))
