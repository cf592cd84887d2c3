"""`builders.from_mask_mod` against torch's dense mask, of mask_mods as models write them."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from oracle import attend_rows
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mask_cute import ColumnMask, builders, flash_attn_func

Mod = Callable[..., Tensor]
BATCH, SEQLEN = 2, 61


def joined(*mods: Mod) -> Mod:
    def all_of(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shown = q.new_ones((), dtype=torch.bool)
        return functools.reduce(operator.and_, (mod(b, h, q, k) for mod in mods), shown)

    return all_of


def either(*mods: Mod) -> Mod:
    def any_of(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shown = q.new_zeros((), dtype=torch.bool)
        return functools.reduce(operator.or_, (mod(b, h, q, k) for mod in mods), shown)

    return any_of


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def after_window(size: int) -> Mod:
    return lambda b, h, q, k: k > q - size


def near(size: int) -> Mod:
    return lambda b, h, q, k: abs(q - k) <= size


def every_query(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


def of_both_halves(left: int, right: int) -> Mod:
    def halves(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        before = (distance >= 0) & (distance < left)
        return before | ((distance < 0) & (-distance < right))

    return halves


def chunks(size: int, start: Tensor) -> Mod:
    return lambda b, h, q, k: (k - start[b]) // size == (q - start[b]) // size


def chunks_back(size: int, most: int) -> Mod:
    def looks_back(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        chunk_q, chunk_k = (torch.div(x, size, rounding_mode="trunc") for x in (q, k))
        return (chunk_q - chunk_k >= 0) & (chunk_q - chunk_k <= most)

    return looks_back


def group(ids: Tensor) -> Mod:
    def same_group(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_query, of_key = ids[b, q], ids[b, k]
        return (of_query == of_key) & (of_query >= 0)

    return same_group


def equal(ids: Tensor) -> Mod:
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def valid(is_real: Tensor) -> Mod:
    return lambda b, h, q, k: is_real[b, k]


def at(mod: Mod, positions: Tensor) -> Mod:
    return lambda b, h, q, k: mod(b, h, positions[b, q], positions[b, k])


def shifted(mod: Mod, queries: Any, keys: Any) -> Mod:
    return lambda b, h, q, k: mod(b, h, q + queries, k + keys)


class Tokens(NamedTuple):
    """Of a batch of rows: ids and positions of documents, groups of image tokens (-1 for text),
    which keys are real, and padding on the left."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    is_real: Tensor
    start: Tensor


def draw(seed: int, length: int = SEQLEN) -> Tokens:
    rng = random.Random(seed)

    def parts() -> list[int]:
        cuts = sorted(rng.sample(range(1, length), rng.randint(0, 6)))
        return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]

    ids, positions, groups = [], [], []
    for _ in range(BATCH):
        lengths = parts()
        ids.append([i for i, n in enumerate(lengths) for _ in range(n)])
        positions.append([i for n in lengths for i in range(n)])
        images = [(i if rng.random() < 0.5 else -1, n) for i, n in enumerate(parts())]
        groups.append([i for i, n in images for _ in range(n)])
    start = [rng.randint(0, 20) for _ in range(BATCH)]
    return Tokens(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(groups),
        torch.arange(length) >= torch.tensor(start)[:, None],
        torch.tensor(start),
    )


def dense(mod: Mod, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN) -> Tensor:
    return create_mask(mod, BATCH, 1, seqlen_q, seqlen_k, "cpu").expand(BATCH, 1, -1, -1)


def check(mod: Mod, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN) -> ColumnMask:
    mask = builders.from_mask_mod(mod, seqlen_q, seqlen_k, batch=BATCH)
    assert mask is not None
    assert torch.equal(
        mask.dense(seqlen_q).expand(BATCH, -1, -1, -1), dense(mod, seqlen_q, seqlen_k)
    )
    return mask


class Family(NamedTuple):
    """documents: None: as the drawn tokens have it."""

    make: Callable[[Tokens, int], Mod]
    documents: bool | None = False


FAMILIES = {
    "causal": Family(lambda x, w: causal),
    "sliding": Family(lambda x, w: joined(after_window(w), causal)),
    "two-sided sliding": Family(lambda x, w: joined(near(w), every_query)),
    "everything": Family(lambda x, w: every_query),
    "two halves": Family(lambda x, w: of_both_halves(w, w // 2 + 1)),
    "padded": Family(lambda x, w: joined(causal, valid(x.is_real))),
    "chunked": Family(lambda x, w: joined(chunks(w, x.start), causal, valid(x.is_real)), True),
    "chunks before": Family(lambda x, w: chunks_back(w, 2)),
    "packed": Family(lambda x, w: joined(at(causal, x.positions), equal(x.ids)), True),
    "packed, by ids": Family(lambda x, w: joined(causal, equal(x.ids)), True),
    "packed, sliding": Family(
        lambda x, w: joined(at(joined(after_window(w), causal), x.positions), equal(x.ids)), True
    ),
    "packed, near": Family(lambda x, w: joined(equal(x.ids), at(near(w), x.positions)), True),
    "packed, chunked": Family(
        lambda x, w: joined(
            at(joined(chunks(w, torch.zeros_like(x.start)), causal), x.positions), equal(x.ids)
        ),
        True,
    ),
    "images": Family(lambda x, w: either(causal, group(x.groups))),
    "images, sliding": Family(
        lambda x, w: either(joined(after_window(w), causal), group(x.groups))
    ),
    "images in a window": Family(
        lambda x, w: joined(either(causal, group(x.groups)), after_window(w))
    ),
    "images, padded": Family(
        lambda x, w: joined(either(causal, group(x.groups)), valid(x.is_real))
    ),
    "images, packed": Family(
        lambda x, w: joined(either(at(causal, x.positions), group(x.groups)), equal(x.ids)), True
    ),
    "both windows": Family(lambda x, w: either(joined(after_window(w), causal), near(w))),
    "of batch entries": Family(lambda x, w: lambda b, h, q, k: (k <= q + 5 * b) & (k >= w * b)),
    "or all": Family(lambda x, w: either(causal, lambda *_: torch.tensor(True))),
    "sinks": Family(
        lambda x, w: either(
            joined(after_window(w), causal), joined(causal, lambda b, h, q, k: k - 0 < 5)
        )
    ),
    "documents that rise": Family(lambda x, w: lambda b, h, q, k: x.ids[b, q] >= x.ids[b, k]),
    "documents near": Family(
        lambda x, w: lambda b, h, q, k: (
            (x.ids[b, q] >= x.ids[b, k]) & (x.ids[b, q] - x.ids[b, k] < 2)
        )
    ),
    "of queries": Family(lambda x, w: joined(causal, lambda b, h, q, k: x.is_real[b, q])),
    "not": Family(
        lambda x, w: lambda b, h, q, k: ~((k > q) | (x.ids[b, q] != x.ids[b, k])), True
    ),
}  # fmt: skip


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_of_models(name: str) -> None:
    family = FAMILIES[name]
    for seed in range(6):
        mod = shifted(family.make(draw(seed), 3 + seed), 0, 0)
        mask = check(mod)
        assert mask.documents is family.documents and mask.seqlen_q == SEQLEN
        assert mask.num_vectors == 2 - mask.causal
        shows_later = bool(dense(mod)[0, 0].triu(1).any() or dense(mod)[1, 0].triu(1).any())
        assert mask.causal is not shows_later or not mask.causal


CACHED = (
    "causal", "sliding", "two-sided sliding", "padded", "chunked", "images", "images, sliding",
    "images in a window", "images, padded", "sinks", "chunks before",
)  # fmt: skip


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["number", "tensor"])
def test_queries_behind_a_cache(name: str, kind: Any) -> None:
    """The queries are the last ones, or there are empty keys behind them; keys may be shifted."""
    for seed in range(3):
        mod = FAMILIES[name].make(draw(seed), 3 + seed)
        for first, seqlen_q, start, seqlen_k in ((40, 21, 0, 61), (30, 1, 0, 61), (30, 9, 20, 41)):
            mask = check(shifted(mod, kind(first), kind(start)), seqlen_q, seqlen_k)
            assert not mask.documents
    causal_mask = check(shifted(causal, kind(40), 0), 21, 61)
    assert causal_mask.causal and causal_mask.num_vectors == 1


NEAR_MISSES: dict[str, Callable[[Tokens], Mod]] = {
    "positions that fall": lambda x: joined(
        equal(x.ids), at(causal, x.positions.flip(1))
    ),
    "positions in no order": lambda x: joined(
        equal(torch.zeros_like(x.ids)), at(causal, (x.positions * 7) % 5)
    ),
    "ids that return": lambda x: equal(torch.arange(SEQLEN).expand(BATCH, -1) // 20 % 2),
    "groups that return": lambda x: either(
        causal, group((torch.arange(SEQLEN) // 10 % 2 - 1).expand(BATCH, -1))
    ),
    "positions without ids": lambda x: at(near(3), torch.arange(SEQLEN).expand(BATCH, -1) % 20),
    "holes in queries": lambda x: lambda b, h, q, k: (q % 3 != 1) & (k <= q),
    "two windows": lambda x: either(near(3), lambda b, h, q, k: abs(q - k - 20) <= 3),
    "global tokens": lambda x: either(near(3), lambda b, h, q, k: (q < 4) | (k < 4)),
    "a tile": lambda x: lambda b, h, q, k: (
        ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1)
    ),
    "of heads": lambda x: lambda b, h, q, k: (q >= k) & (k >= h),
    "unequal": lambda x: lambda b, h, q, k: x.ids[b, q] != x.ids[b, k],
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_interval_is_none(name: str) -> None:
    tokens = draw(1)._replace(ids=torch.arange(SEQLEN).expand(BATCH, -1) // 25)
    assert builders.from_mask_mod(NEAR_MISSES[name](tokens), SEQLEN, SEQLEN, batch=BATCH) is None


def random_mod(rng: random.Random, x: Tokens, depth: int) -> Mod:
    if depth == 0 or rng.random() < 0.2:
        size = rng.randint(0, 12)
        atom = rng.choice(
            (
                causal, after_window(size), near(size), every_query, equal(x.ids), group(x.groups),
                valid(x.is_real), chunks(size + 1, x.start), chunks_back(size + 1, 1),
                lambda b, h, q, k: x.is_real[b, q],
                lambda b, h, q, k: k >= b * size,
                lambda b, h, q, k: q < x.start[b] + k,
                lambda b, h, q, k: x.positions[b, k] > x.positions[b, q] - size,
                lambda b, h, q, k: x.ids[b, q] < x.ids[b, k] + 1,
                lambda b, h, q, k: x.groups[b, q] - q >= x.groups[b, k] - k,
                lambda b, h, q, k: x.ids[b, q] == x.groups[b, k],
            )
        )  # fmt: skip
        return at(atom, x.positions) if rng.random() < 0.2 else atom
    parts = [random_mod(rng, x, depth - 1) for _ in range(rng.randint(1, 3))]
    made = rng.choice((joined, joined, either))(*parts)
    return made if rng.random() < 0.8 else lambda b, h, q, k: ~made(b, h, q, k)


@pytest.mark.shares(4)
@pytest.mark.parametrize("part", range(4))
def test_random_masks(part: int) -> None:
    """None, or right; and None only if a key has several ranges or the finder does not see it."""
    found = 0
    for seed in range(part, 160, 4):
        rng = random.Random(seed)
        mod = random_mod(rng, draw(seed), rng.randint(1, 3))
        seqlen_q, seqlen_k = rng.choice(((SEQLEN, SEQLEN), (SEQLEN, 40), (30, SEQLEN), (1, 50)))
        mask = builders.from_mask_mod(mod, seqlen_q, seqlen_k, batch=BATCH)
        if mask is not None:
            found += 1
            shown = mask.dense(seqlen_q).expand(BATCH, -1, -1, -1)
            assert torch.equal(shown, dense(mod, seqlen_q, seqlen_k)), f"seed {seed}"
    assert found >= 8


def test_dtypes_of_tables() -> None:
    ids, positions = draw(3)[:2]
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        check(joined(at(causal, positions.to(dtype)), equal(ids.to(dtype))))
    for dtype in (torch.float16, torch.float32, torch.float64):
        check(joined(causal, equal(ids.to(dtype))))
    unknown = ids.double()
    unknown[ids == 1] = torch.nan
    assert check(joined(causal, equal(unknown))).documents
    check(lambda b, h, q, k: ~(q >= torch.full((), torch.nan)) & (k <= q))
    # a sum that leaves int32 wraps, one of large numbers does not
    large = positions.int() + (2**31 - 70)
    assert builders.from_mask_mod(
        joined(lambda b, h, q, k: large[b, q] + 60 >= large[b, k], equal(ids)), SEQLEN, SEQLEN,
        batch=BATCH,
    ) is None  # fmt: skip
    check(joined(at(causal, positions + 2**33), equal(ids + 2**40)))
    assert builders.from_mask_mod(
        joined(at(causal, positions + 2**41), equal(ids)), SEQLEN, SEQLEN, batch=BATCH
    ) is None  # fmt: skip


class Watched(TorchDispatchMode):
    """Notes what waits for a device, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadname == "item" or any(
            word in str(func)
            for word in ("_local_scalar", "nonzero", "unique", "equal.", "masked_select")
        ):
            self.waits.append(str(func))
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.numel())
        return made


def packed_images(n: int) -> Mod:
    ids = (torch.arange(n) // 300).expand(BATCH, -1)
    positions = torch.arange(n).expand(BATCH, -1) % 300
    placed = at(joined(after_window(40), causal), positions)
    return joined(either(placed, group(ids)), equal(ids))


@pytest.mark.parametrize(
    ("make", "waits"), [(packed_images, 1), (lambda n: joined(near(n // 3), every_query), 0)]
)
def test_it_waits_once_and_makes_no_dense_mask(
    make: Callable[[int], Mod], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.from_mask_mod(make(700), 700, 700, batch=BATCH)  # traces
    n, read = 5000, []
    mod, tolist = make(n), Tensor.tolist
    builders.from_mask_mod(mod, n, n, batch=BATCH)
    monkeypatch.setattr(Tensor, "tolist", lambda x: read.append(x.shape) or tolist(x))
    with Watched() as watched:
        mask = builders.from_mask_mod(mod, n, n, batch=BATCH)
    assert mask is not None and len(read) == waits
    assert watched.waits == [] and watched.largest <= 4 * BATCH * n


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: equal(x.ids[:, :50]), "reads outside .*'ids'.*shape .2, 50.*seqlen_q=61"),
        (lambda x: valid(x.is_real[:, :60]), "reads outside .*'is_real'.*seqlen_k=61"),
        (lambda x: valid(x.is_real[:1]), "reads outside .*'is_real'.*batch=2"),
        (lambda x: shifted(equal(x.ids), 0, 1), "reads outside .*'ids'"),
        (lambda x: shifted(valid(x.is_real), 0, torch.tensor(1)), "reads outside .*'is_real'"),
    ],
)
def test_a_table_that_does_not_fit_is_named(make: Callable[[Tokens], Mod], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        builders.from_mask_mod(joined(causal, make(draw(0))), SEQLEN, SEQLEN, batch=BATCH)


def test_refusals() -> None:
    ids = draw(0).ids
    with pytest.raises(ValueError, match="'ids'.*pass batch=2; got batch=1"):
        builders.from_mask_mod(equal(ids), SEQLEN, SEQLEN)
    with pytest.raises(TypeError, match="seqlen_q=1.5"):
        builders.from_mask_mod(causal, 1.5, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch=0"):
        builders.from_mask_mod(causal, 4, 4, batch=0)
    with pytest.raises(TypeError, match="CuTe mask_mod"):
        builders.from_mask_mod(lambda b, h, q, k, aux: q >= k, 4, 4)
    with pytest.raises(TypeError, match="mask_mod must be callable"):
        builders.from_mask_mod(None, 4, 4)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="decides by a value"):
        builders.from_mask_mod(lambda b, h, q, k: causal(b, h, q, k) and True, 4, 4)


def test_compiled_regions_are_refused() -> None:
    compiled = torch.compile(
        lambda q: flash_attn_func(
            q, q, q, startend_row_indices=builders.from_mask_mod(causal, 16, 16)
        ),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match="make the mask outside of the compiled region"):
        compiled(torch.randn(1, 16, 1, 8))


def test_attention_by_it() -> None:
    x = draw(5)
    mod = joined(either(causal, group(x.groups)), valid(x.is_real))
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(BATCH, SEQLEN, 2, 8, generator=g, dtype=torch.double) for _ in range(3))
    mask = builders.from_mask_mod(mod, SEQLEN, SEQLEN, batch=BATCH)
    found = flash_attn_func(q, k, v, startend_row_indices=mask)
    expected = attend_rows(q, k, v, dense(mod)).out
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_documents_that_only_their_numbers_show() -> None:
    """A row from which on each key is hidden, as trainers write it, says nothing of documents."""
    lengths = torch.tensor([9, 1, 20, 15])
    bounds = lengths.cumsum(0)
    ends = bounds.repeat_interleave(lengths)
    starts = (bounds - lengths).repeat_interleave(lengths)
    size = len(ends)

    def hidden_later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    def of_mod(mod: Mod) -> bool | None:
        return check(mod, size, size).documents

    assert of_mod(hidden_later) and of_mod(lambda b, h, q, k: (q < ends[k]) & (q >= starts[k]))
    assert of_mod(joined(hidden_later, lambda b, h, q, k: q - k < 4))
    # a question that two answers share, in one document and before another
    shared = torch.where(torch.arange(size) < 10, 30, ends)
    assert of_mod(lambda b, h, q, k: (k <= q) & (q < shared[k]))
    shared = torch.where(torch.arange(size) < 10, size, ends)
    assert not of_mod(lambda b, h, q, k: (k <= q) & (q < shared[k]))
    # padding before or behind the only document
    for first, end in ((5, size), (0, size - 5), (5, size - 5)):
        valid = torch.zeros(size, dtype=torch.bool)
        valid[first:end] = True
        last = torch.where(valid, end, 0)
        assert not of_mod(lambda b, h, q, k, last=last: (k <= q) & (q < last[k]))
