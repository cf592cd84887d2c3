"""The numbers of a mask that column intervals may express: for each key, the queries that see it.

torch computes the conditions of `intervals.find_form` for all queries or all keys at once. Nothing
here waits for the device: whether each key has one range of queries is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node

from flash_mask_cute.lowering.intervals import (
    BATCH,
    KEY,
    QUERY,
    All,
    AnyOf,
    BoundSide,
    Equal,
    Form,
    Keys,
    NotIntervalsError,
    Order,
    Queries,
    Sum,
    Terms,
    parts_of,
)
from flash_mask_cute.lowering.simplify import EXACT, Whole, name_of_node

_INT32 = 1 << 31
# Beyond any index; sums of such numbers do not overflow int64.
_FAR = 1 << 40


class Read(NamedTuple):
    """A read by indices. captured: the number of the tensor, None for a computed one. entries: of
    the dimension that is read at the batch entry alone, else 1. is_inside: 0-d bool."""

    captured: int | None
    entries: int
    is_inside: Tensor


class Rows(NamedTuple):
    """The queries that see each key, from `low` to `high` - 1: int64 (batch | 1, seqlen_k).

    is_right: 0-d bool, whether each key has one such range; if not, the rows mean nothing.
    are_documents: 0-d bool, whether each query has the numbers of the key at its place.
    """

    low: Tensor
    high: Tensor
    is_right: Tensor
    are_documents: Tensor
    reads: tuple[Read, ...]


def rows_of(
    form: Form, known: Callable[[Node], Any], seqlens: tuple[int, int], batch: int, device: Any
) -> Rows | None:
    """The intervals of a form at a call. known: values of nodes that depend on no index.
    seqlens: queries and keys.

    None: a comparison rounds indices, or there is nothing to see. On the CPU the rows are not right
    if an index is out of range; kernels clamp it.
    """
    if 0 in (*seqlens, batch):
        return None
    numbers = _Numbers(form, known, seqlens, batch, device)
    try:
        found = numbers.of(form.root, None)
        are_documents = numbers.are_documents(form.root)
    except NotIntervalsError:
        return None
    holds = [found.is_right.all(), *numbers.holds]
    if torch.device(device).type != "cuda":
        holds += [read.is_inside for read in numbers.reads]
    low, high = (x.clamp(0, seqlens[0]) for x in (found.low, found.high))
    is_right = torch.stack(holds).all()
    return Rows(low, high, is_right, are_documents, tuple(numbers.reads))


class _Span(NamedTuple):
    """For each key the queries from `low` to `high` - 1, int64; is_right: whether that is all."""

    low: Tensor
    high: Tensor
    is_right: Tensor

    @property
    def is_empty(self) -> Tensor:
        return self.high <= self.low

    def and_also(self, other: _Span) -> _Span:
        # what one of them hides is hidden, whatever the other says
        hides = (x.is_right & x.is_empty for x in (self, other))
        is_right = self.is_right & other.is_right
        for hidden in hides:
            is_right = is_right | hidden
        low, high = torch.maximum(self.low, other.low), torch.minimum(self.high, other.high)
        return _Span(low, high, is_right)


class _Group(NamedTuple):
    """Queries that are equal to keys in all numbers seen so far.

    of_rows: a number for each query, -1 for one that is in no group. of_keys: for each key the
    number of its queries. span: these queries.
    """

    of_rows: Tensor
    of_keys: Tensor
    span: _Span


class _Numbers:
    def __init__(
        self,
        form: Form,
        known: Callable[[Node], Any],
        seqlens: tuple[int, int],
        batch: int,
        device: Any,
    ) -> None:
        self._known, (self._rows, self._keys) = known, seqlens
        places = form.module.graph.find_nodes(op="placeholder")[:4]
        ints = {"dtype": torch.int32, "device": device}
        self._batch_place = places[BATCH]
        self._q = torch.arange(self._rows, **ints)[None]
        self._k = torch.arange(self._keys, **ints)[None]
        self._values: dict[Node, Any] = {
            places[BATCH]: torch.arange(batch, **ints)[:, None],
            places[QUERY]: self._q,
            places[KEY]: self._k,
        }
        self._reaches = dict.fromkeys(self._values, True)
        self._true = torch.ones((), dtype=torch.bool, device=device)
        # what must hold for the rows to be right
        self.holds: list[Tensor] = []
        self.reads: list[Read] = []

    # -- conditions ------------------------------------------------------------------------------

    def of(self, part: Any, group: _Group | None) -> _Span:
        """The queries of `group` that a condition lets see each key; other bits are free."""
        if isinstance(part, Keys):
            seen = self._bool(part)
            none, full = (torch.full_like(self._k, x).long() for x in (0, self._rows))
            return self._span(none, torch.where(seen, full, none))
        if isinstance(part, Equal | Queries):
            return self._joined(group, (part,)).span
        if isinstance(part, BoundSide):
            return self._side(part)
        if isinstance(part, Order):
            return self._order(part, group)
        if isinstance(part, AnyOf):
            return self._either([self.of(x, group) for x in part.parts])
        assert isinstance(part, All)
        joins = tuple(x for x in part.parts if isinstance(x, Equal | Queries))
        found = self._everything()
        if joins:
            group = self._joined(group, joins)
            found = group.span
        for each in part.parts:
            if each not in joins:
                found = found.and_also(self.of(each, group))
        return found

    def are_documents(self, root: Any) -> Tensor:
        """Whether each query has in all numbers those of the key at its place."""
        equal = [x for x in parts_of(root) if isinstance(x, Equal)]
        if not equal or self._rows != self._keys:
            return ~self._true
        pairs = [(self._value(x.of_query), self._value(x.of_key)) for x in equal]
        # a token whose number is NaN sees nothing
        same = [((x == y) | ((x != x) & (y != y))).all() for x, y in pairs]
        return torch.stack(same).all()

    def _span(self, low: Tensor, high: Tensor) -> _Span:
        return _Span(low, high, torch.ones_like(low, dtype=torch.bool))

    def _everything(self) -> _Span:
        low = torch.zeros_like(self._k).long()
        return self._span(low, low + self._rows)

    def _side(self, part: BoundSide) -> _Span:
        everything = self._everything()
        edge = everything.low + self._sum(part.terms)
        self._check(part.sums)
        if part.is_low:
            return self._span(edge, everything.high.expand_as(edge))
        return self._span(everything.low.expand_as(edge), edge + 1)

    def _either(self, spans: list[_Span]) -> _Span:
        """The queries of any span: one range if none begins after the end of earlier ones."""
        lows, highs, rights = (
            torch.stack(torch.broadcast_tensors(*x)) for x in zip(*spans, strict=True)
        )
        is_empty = highs <= lows
        lows = torch.where(is_empty, self._rows, lows.clamp(0, self._rows))
        highs = torch.where(is_empty, 0, highs.clamp(0, self._rows))
        is_full = (rights & (lows == 0) & (highs == self._rows)).any(0)
        lows, order = lows.sort(0)
        highs = highs.gather(0, order).cummax(0).values
        is_gap = (lows[1:] > highs[:-1]) & (lows[1:] < self._rows)
        is_right = is_full | (rights.all(0) & ~is_gap.any(0))
        return _Span(lows[0], highs[-1], is_right)

    def _joined(self, group: _Group | None, parts: Sequence[Equal | Queries]) -> _Group:
        """The queries of a group for which more conditions hold."""
        of_rows, of_keys = (torch.zeros_like(x).long() for x in (self._q, self._k))
        is_row, is_key = (torch.ones_like(x, dtype=torch.bool) for x in (of_rows, of_keys))
        if group is not None:
            of_rows, of_keys, is_row = group.of_rows, group.of_keys, group.of_rows >= 0
        numbers = 1 if group is None else 2
        for part in parts:
            if isinstance(part, Queries):
                is_row = is_row & self._bool(part)
                continue
            ranks, key_ranks, has_rows = _ranks(
                self._value(part.of_query).expand(-1, self._rows),
                self._value(part.of_key).expand(-1, self._keys),
            )
            is_key = is_key & has_rows
            if numbers > 1:
                ranks = of_rows * (self._rows + 1) + ranks
                key_ranks = of_keys * (self._rows + 1) + key_ranks
                ranks, key_ranks, has_rows = _ranks(ranks, key_ranks)
                is_key = is_key & has_rows
            of_rows, of_keys, numbers = ranks, key_ranks, 2
        of_rows, of_keys = torch.where(is_row, of_rows, -1), torch.where(is_key, of_keys, -2)
        return _Group(of_rows, of_keys, self._rows_of_group(of_rows, of_keys))

    def _rows_of_group(self, of_rows: Tensor, of_keys: Tensor) -> _Span:
        of_rows, of_keys = _of_one_batch(of_rows, of_keys)
        ordered, place = of_rows.sort(dim=1, stable=True)
        begin, end = (torch.searchsorted(ordered, of_keys, right=x) for x in (False, True))
        count = end - begin
        last = self._rows - 1
        low = place.gather(1, begin.clamp(max=last))
        high = place.gather(1, (end - 1).clamp(0, last)) + 1
        is_none = count == 0
        low, high = low.masked_fill(is_none, 0), high.masked_fill(is_none, 0)
        return _Span(low, high, high - low == count)

    def _order(self, part: Order, group: _Group | None) -> _Span:
        """The queries of a key whose number, which does not fall among them, passes a bound. It is
        searched in all queries at once, with their run in front: neighbours in one group."""
        self._check(part.sums)
        span = self._everything() if group is None else group.span
        of_rows = torch.zeros_like(self._q).long() if group is None else group.of_rows
        number = torch.zeros_like(self._q).long() + self._sum(part.of_query, is_table=True)
        bound = torch.zeros_like(self._k).long() + self._sum(part.terms, is_table=True)
        number, bound, of_rows, low, high, is_right = _of_one_batch(number, bound, of_rows, *span)
        is_same = of_rows[:, 1:] == of_rows[:, :-1]
        pad = torch.nn.functional.pad
        run = pad((~is_same).long().cumsum(1), (1, 0))
        falls = pad((is_same & (number[:, 1:] < number[:, :-1])).long().cumsum(1), (1, 0))
        ordered = number.sort(1).values
        ranks = torch.searchsorted(ordered, number)
        rank = torch.searchsorted(ordered, bound, right=not part.is_low)
        first = low.clamp(0, self._rows - 1)
        place = torch.searchsorted(
            run * (self._rows + 1) + ranks, run.gather(1, first) * (self._rows + 1) + rank
        )
        last = (high - 1).clamp(0, self._rows - 1)
        rises = falls.gather(1, last) == falls.gather(1, first)
        is_right = is_right & (rises | (high <= low))
        if part.is_low:
            return _Span(torch.maximum(low, place), high, is_right)
        return _Span(low, torch.minimum(high, place), is_right)

    # -- values ----------------------------------------------------------------------------------

    def _bool(self, part: Keys | Queries) -> Tensor:
        found = self._value(part.node)
        if not isinstance(found, Tensor):
            found = torch.full((1, 1), bool(found), device=self._k.device)
        return found.bool() ^ part.is_negated

    def _check(self, sums: Sequence[Sum]) -> None:
        for each in sums:
            reach = sum(abs(self._sum((term,))).max() for term in each.of_query)
            others = self._sum(each.others) if each.others else 0
            largest = others.abs().max() if isinstance(others, Tensor) else abs(others)
            self.holds.append(reach + largest < _INT32)

    def _sum(self, terms: Terms, is_table: bool = False) -> Any:
        return sum(factor * self._long(value, is_table) for factor, value in terms)

    def _long(self, value: Any, is_table: bool) -> Any:
        """An integer as int64 or a number, clamped so that sums do not overflow. is_table: it is
        compared with others than indices, and must not be clamped."""
        if isinstance(value, Whole):
            if max(self._rows, self._keys) >= EXACT:
                raise NotIntervalsError
            found = self._value(value.value)
            if not isinstance(found, Tensor):
                found = torch.full((), found, dtype=torch.float64, device=self._k.device)
            return value.of_tensor(found, _FAR)
        found = self._value(value)
        if isinstance(found, Tensor):
            found = found.long()
            if is_table:
                self.holds.append(((found > -_FAR) & (found < _FAR)).all())
            return found.clamp(-_FAR, _FAR)
        if abs(found) >= _INT32:
            # torch makes an int32 of it, which wraps
            raise NotIntervalsError
        return found

    def _value(self, node: Any) -> Any:
        """The value of a node: (batch | 1, seqlen_q | seqlen_k | 1), or a number."""
        if not isinstance(node, Node):
            return node
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        if not self._reaches_an_index(node):
            value = self._known(node)
            is_number = isinstance(value, Tensor) and value.dim() == 0
            # of one rank, so that torch promotes as it does for two numbers
            return value.to(self._k.device).view(1, 1) if is_number else value
        args, kwargs = cast("Any", torch.fx.node.map_arg((node.args, node.kwargs), self._value))
        if name_of_node(node) == "index":
            args = (args[0], self._inside(node, *args))
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result.to(node.meta["val"].dtype)

    def _reaches_an_index(self, node: Node) -> bool:
        if node not in self._reaches:
            self._reaches[node] = any(map(self._reaches_an_index, node.all_input_nodes))
        return self._reaches[node]

    def _inside(self, node: Node, table: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor]:
        """Indices as a kernel uses them: wrapped and clamped to the table."""
        of, entries, found, is_inside = cast("tuple[Any, Any]", node.args), 1, [], self._true
        for extent, index, by in zip(table.shape, indices, of[1], strict=False):
            if index is None:
                raise NotIntervalsError
            if by is self._batch_place:
                entries = extent
            index = index.long()
            wrapped = torch.where(index < 0, index + extent, index)
            found.append(wrapped.clamp(0, extent - 1))
            is_inside = is_inside & (found[-1] == wrapped).all()
        captured = of[0].meta.get("captured") if isinstance(of[0], Node) else None
        self.reads.append(Read(captured, entries, is_inside))
        return found


def _of_one_batch(*tensors: Tensor) -> list[Tensor]:
    """(batch | 1, n) as (batch, n), contiguous, as searches need them."""
    batch = max(x.shape[0] for x in tensors)
    return [x.expand(batch, -1).contiguous() for x in tensors]


def _ranks(of_rows: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to seqlen_q, of queries and of keys, that are equal where what is given is
    equal; and whether any query has the number of a key. NaN is equal to nothing."""
    dtype = torch.promote_types(of_rows.dtype, of_keys.dtype)
    of_rows, of_keys = (x.to(dtype) for x in (of_rows, of_keys))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    of_rows, of_keys = _of_one_batch(of_rows.to(wide), of_keys.to(wide))
    ordered = of_rows.sort(1).values
    begin, end = (torch.searchsorted(ordered, of_keys, right=x) for x in (False, True))
    return torch.searchsorted(ordered, of_rows), begin, (end > begin) & (of_keys == of_keys)
