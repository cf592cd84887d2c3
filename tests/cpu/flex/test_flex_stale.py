"""Contents rewritten between calls, in every way that there is: each call sees what is there now.

FLASH_MASK_STALE_DRAWS says how many histories are drawn (160), FLASH_MASK_STALE_SEED of which seed
(0). A failure begins with seed and number: `run_history(seed, number)` makes that history again.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drawn_share import Draws
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch_values import dense_attention

from flash_mask_cute import BlockSparseTensorsTorch, ColumnMask, flash_attn_func, keep_block_mask
from flash_mask_cute.autograd.attend import PlannedMasks
from flash_mask_cute.call.arguments import NO_MASKS, Masks, Tensors
from flash_mask_cute.flex import block_mask, flex_attention
from flash_mask_cute.lowering import watch

DRAWN = Draws.of("STALE", 160, 0)

CHUNKS = 4
BATCH, HEADS, D, N, BLOCK = 2, 2, 8, 48, 16
BLOCKS = N // BLOCK
Mod = Callable[..., Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


# -- ways to rewrite a tensor ---------------------------------------------------------------------


def by_data(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new.clone()


def by_numpy(tensor: Tensor, new: Tensor) -> None:
    tensor.numpy()[...] = new.numpy()


def by_collective(tensor: Tensor, new: Tensor) -> None:
    torch.distributed.scatter(tensor, [new.clone()], src=0)


def in_no_grad(tensor: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(new)


def in_inference_mode(tensor: Tensor, new: Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(new)


def one_by_one(tensor: Tensor, new: Tensor) -> None:
    for place in (tensor != new).nonzero().tolist():
        tensor[tuple(place)] = new[tuple(place)]


# What torch counts, if the tensor was not made in inference mode.
COUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda tensor, new: tensor.copy_(new),
    "index": lambda tensor, new: tensor.__setitem__(..., new),
    "elements": one_by_one,
    "view": lambda tensor, new: tensor.view(-1).copy_(new.view(-1)),
    "detached": lambda tensor, new: tensor.detach().copy_(new),
    "out": lambda tensor, new: torch.add(new, 0, out=tensor) if tensor.dtype != torch.bool
    else torch.logical_or(new, new, out=tensor),
    "no_grad": in_no_grad,
    "inference": in_inference_mode,
}  # fmt: skip
UNCOUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "data =": by_data,
    "through data": lambda tensor, new: tensor.data.copy_(new),
    "numpy": by_numpy,
    "collective": by_collective,
}
WAYS = COUNTED | UNCOUNTED


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_what_torch_counts(way: str) -> None:
    """Which ways are `COUNTED` is a fact about torch, which docs/masks.md tells."""
    ids = torch.zeros(6, dtype=torch.int32)
    before, new = ids._version, torch.arange(6, dtype=torch.int32)
    WAYS[way](ids, new)
    assert torch.equal(ids, new)
    assert (ids._version != before) is (way in COUNTED)


# -- what holds contents --------------------------------------------------------------------------


class Subject(NamedTuple):
    """A call whose result depends on the contents of tensors.

    contents: the tensors. new: draws other contents of all. call: of q, k, v, as (batch, heads,
    length, dim). dense: the score_mod and the mask_mod, on whole tensors. after: to be done after a
    change that torch does not count.
    """

    contents: tuple[Tensor, ...]
    new: Callable[[], tuple[Tensor, ...]]
    call: Callable[..., Tensor]
    dense: tuple[Mod | None, Mod | None]
    after: Callable[[], Any] | None = None


class Draws:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def ids(self) -> Tensor:
        """Documents in runs mostly, as packed batches have them."""
        if self.rng.random() < 0.3:
            return self.ints(0, 3, BATCH, N)
        return self.ints(0, 2, BATCH, N).mul_(self.ints(0, 2, BATCH, N)).cumsum(1)


def of_mask_mod(tensor: Tensor, new: Callable[[], Tensor], mod: Mod, draws: Draws) -> Subject:
    """In a block mask that lists all blocks as partial, and maybe is kept."""
    count = torch.full((1, 1, BLOCKS), BLOCKS, dtype=torch.int32)
    index = torch.arange(BLOCKS, dtype=torch.int32).repeat(1, 1, BLOCKS, 1)
    mask = BlockMask.from_kv_blocks(count, index, None, None, BLOCK, mod, (N, N))
    return Subject((tensor,), lambda: (new(),), in_flex(mask), (None, mod), maybe_kept(mask, draws))


def in_flex(mask: BlockMask | None, score_mod: Mod | None = None) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, score_mod, mask)
        return out

    return call


def maybe_kept(mask: BlockMask, draws: Draws) -> Callable[[], Any] | None:
    if draws.rng.random() < 0.7:
        return None
    return functools.partial(keep_block_mask, keep_block_mask(mask))


def documents(draws: Draws) -> Subject:
    ids = draws.ids()
    return of_mask_mod(ids, draws.ids, lambda b, h, q, k: ids[b, q] == ids[b, k], draws)


def causal_documents(draws: Draws) -> Subject:
    ids = draws.ids()
    return of_mask_mod(
        ids, draws.ids, lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]), draws
    )


def a_number(draws: Draws) -> Subject:
    def new() -> Tensor:
        return torch.tensor(draws.rng.randrange(N + 1))

    n = new()
    return of_mask_mod(n, new, lambda b, h, q, k: k < n, draws)


def prefixes(draws: Draws) -> Subject:
    def new() -> Tensor:
        return draws.ints(0, N, BATCH, dtype=torch.int32)

    lengths = new()
    return of_mask_mod(lengths, new, lambda b, h, q, k: (k < lengths[b]) | (q >= k), draws)


def valid_keys(draws: Draws) -> Subject:
    def new() -> Tensor:
        return draws.ints(0, 2, BATCH, N).bool()

    valid = new()
    return of_mask_mod(valid, new, lambda b, h, q, k: valid[b, k], draws)


def in_a_table(draws: Draws) -> Subject:
    """Of no form: the mask_mod runs in any case."""

    def new() -> Tensor:
        return draws.ints(0, 2, N, N, dtype=torch.bool)

    table = new()
    return of_mask_mod(table, new, lambda b, h, q, k: table[q, k], draws)


def a_bias(draws: Draws) -> Subject:
    def new() -> tuple[Tensor, Tensor]:
        both = torch.randn(N + 1, generator=draws.generator)
        return both[1:].clone(), both[0].clone()

    bias, gain = new()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gain + bias[k]

    return Subject((bias, gain), new, in_flex(None, mod), (mod, None))


def draw_lists(draws: Draws, is_ascending: bool) -> tuple[Tensor, ...]:
    """Counts and indices of partial blocks, and of full ones, of which no block is in both."""
    order = torch.rand(BLOCKS, BLOCKS, generator=draws.generator).argsort(1)
    states = draws.ints(0, 3, BLOCKS, BLOCKS)
    lists = []
    for state in (1, 2):
        # those of this state first, in any order or ascending, and any others behind the count
        rank = torch.arange(BLOCKS).expand_as(order) if is_ascending else order
        index = (rank + BLOCKS * (states != state)).argsort(1)
        lists += [(states == state).sum(1)[None, None].int(), index[None, None].int()]
    return tuple(lists)


def listed(lists: tuple[Tensor, ...], mod: Mod | None) -> Mod:
    """What lists and a mask_mod show."""

    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = torch.zeros(2, BLOCKS, BLOCKS, dtype=torch.bool)
        for which in range(2):
            count, index = lists[2 * which], lists[2 * which + 1]
            for row in range(BLOCKS):
                found[which, row, index[0, 0, row, : int(count[0, 0, row])].long()] = True
        partial, full = found[:, q // BLOCK, k // BLOCK]
        return full | (partial if mod is None else partial & mod(b, h, q, k))

    return dense


def block_lists(draws: Draws) -> Subject:
    """What a block mask lists."""
    lists = draw_lists(draws, False)
    length = draws.rng.randrange(N)
    rules: list[Mod] = [
        lambda b, h, q, k: q >= k, lambda b, h, q, k: k < length,
        lambda b, h, q, k: (q - k) % 3 == 0,
    ]  # fmt: skip
    mod = draws.rng.choice(rules)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK, mod, (N, N))
    after = maybe_kept(mask, draws)
    new = functools.partial(draw_lists, draws, False)
    return Subject(lists, new, in_flex(mask), (None, listed(lists, mod)), after)


def lists_per_warpgroup(draws: Draws) -> Subject:
    """Block lists of `flash_attn_func`."""
    lists = draw_lists(draws, True)
    given = BlockSparseTensorsTorch(*lists, (BLOCK, BLOCK))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flash_attn_func(q, k, v, block_sparse_tensors=given)
        return out.transpose(1, 2)

    new = functools.partial(draw_lists, draws, True)
    return Subject(lists, new, call, (None, listed(lists, None)))


def column_mask(draws: Draws) -> Subject:
    """Its rule: outside of inference mode, `refresh()` after what torch does not count."""
    causal = draws.rng.random() < 0.5

    def new() -> Tensor:
        return draws.ints(0, N + 1, BATCH, 1, N, 2, dtype=torch.int32)

    rows = new()
    mask = ColumnMask(rows, causal)

    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        start, end = rows[:, :, None, :, 0], rows[:, :, None, :, 1]
        if causal:
            return (k <= q) & ((q < start) | (q >= end))
        return (q < start) & (q >= end)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flash_attn_func(q, k, v, startend_row_indices=mask)
        return out.transpose(1, 2)

    return Subject((rows,), lambda: (new(),), call, (None, dense), mask.refresh)


def torch_mod_elsewhere(draws: Draws) -> Subject:
    """A torch mod in `flash_attn_func`."""
    ids = draws.ids()

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[b, q] == ids[b, k]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flash_attn_func(q, k, v, mask_mod=mod)
        return out.transpose(1, 2)

    return Subject((ids,), lambda: (draws.ids(),), call, (None, mod))


SUBJECTS: dict[str, Callable[[Draws], Subject]] = {
    x.__name__: x
    for x in (
        documents, causal_documents, a_number, prefixes, valid_keys, in_a_table, a_bias,
        block_lists, lists_per_warpgroup, column_mask, torch_mod_elsewhere,
    )
}  # fmt: skip
MODES = ("eager", "eager", "eager", "inference", "inference", "compiled")


# -- histories ------------------------------------------------------------------------------------


def run_history(seed: int, number: int) -> str:
    """A drawn call after each of some rewrites: "" if all were right, else what went wrong."""
    rng = random.Random(f"{seed} {number}")
    name, mode = rng.choice(list(SUBJECTS)), rng.choice(MODES)
    if mode == "compiled" and rng.random() < 0.6:
        # which compiles for seconds
        mode = "eager"
    draws = Draws(rng)
    told = f"{seed} {number}: {name}, {mode}"
    around = torch.inference_mode if mode == "inference" else contextlib.nullcontext
    with around():
        subject = SUBJECTS[name](draws)
        q, k, v = (torch.randn(BATCH, HEADS, N, D, generator=draws.generator) for _ in range(3))
        call: Any = subject.call
        if mode == "compiled":
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            if wrong := _wrong(call, subject.dense, (q, k, v)):
                return f"{told}: {wrong}"
            told += _rewrite(subject, draws, mode)
    return ""


def _rewrite(subject: Subject, draws: Draws, mode: str) -> str:
    if draws.rng.random() < 0.2:
        return ", again"
    told, needs_more = "", False
    for tensor, new in zip(subject.contents, subject.new(), strict=True):
        way = draws.rng.choice(list(WAYS))
        WAYS[way](tensor, new)
        needs_more |= way in UNCOUNTED or tensor.is_inference()
        told += f", {way}"
    after = subject.after
    # of a ColumnMask of inference mode nothing is kept
    is_columns = isinstance(getattr(after, "__self__", None), ColumnMask)
    if after is not None and needs_more and not (is_columns and mode == "inference"):
        after()
    return told


def _wrong(call: Callable[..., Tensor], dense: tuple[Mod | None, Mod | None], x: Inputs) -> str:
    wanted, _ = dense_attention(*(y.double() for y in x), *dense)
    try:
        out = call(*x)
    except Exception as error:
        return repr(error)[:500]
    off = (out.double() - wanted).abs().max().item()
    return "" if off < 1e-5 else f"off by {off:.3g}"


@pytest.mark.shares(8)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_histories(chunk: int) -> None:
    found = [run_history(DRAWN.seed, number) for number in range(chunk, DRAWN.most, CHUNKS)]
    wrong = [text for text in found if text]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:8])


# -- what is kept, and read by whom ---------------------------------------------------------------


class NoHostReads(TorchDispatchMode):
    """Operators whose result the host waits for are refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


class Asked(NamedTuple):
    """What attention is asked with."""

    masks: Masks
    aux_tensors: list[Tensor] | None
    lists: BlockSparseTensorsTorch | None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Grows by what each call asks of attention, which is not computed."""
    seen: list[Asked] = []

    def record(known: PlannedMasks, tensors: Tensors, *given: Any) -> Any:
        aux_tensors, *_, lists = given
        seen.append(Asked(known._masks or NO_MASKS, aux_tensors, lists))
        return tensors.q.clone(), None, None

    monkeypatch.setattr(PlannedMasks, "results", record)
    return seen


def full_lists() -> tuple[Tensor, Tensor]:
    count = torch.full((1, 1, BLOCKS), BLOCKS, dtype=torch.int32)
    return count, torch.arange(BLOCKS, dtype=torch.int32).repeat(1, 1, BLOCKS, 1)


@pytest.mark.parametrize("captures", [False, True])
def test_the_device_reads_contents(
    captures: bool, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the capture of a CUDA graph, lists are made by operators; the host reads no contents."""
    ids = torch.arange(N) // 7
    given = full_lists()
    mask = BlockMask.from_kv_blocks(
        *given, None, None, BLOCK, lambda b, h, q, k: ids[q] == ids[k], (N, N)
    )
    x = torch.zeros(1, HEADS, N, D)
    with NoHostReads():
        flex_attention(x, x, x, None, mask)
    if captures:
        monkeypatch.setattr(watch, "is_capturing", lambda: True)
        monkeypatch.setattr(block_mask, "is_capturing", lambda: True)
    with NoHostReads():
        flex_attention(x, x, x, None, mask)
    before, now = asked
    for each in asked:
        assert each.masks.mask_mod is not None and each.masks.startend_row_indices is None
        assert each.masks.block_sparse_tensors_torch is None
        assert each.aux_tensors is not None and each.aux_tensors[0] is ids
    assert before.lists is not None and now.lists is not None
    places = [x.data_ptr() for x in (*before.lists[:2], *now.lists[:2], *given)]
    assert len(set(places)) == len(places)
    assert mask not in block_mask._kept


def test_what_is_kept_is_found_once(asked: list[Asked]) -> None:
    ids = torch.arange(N) // 7
    mask = BlockMask.from_kv_blocks(
        *full_lists(), None, None, BLOCK, lambda b, h, q, k: ids[q] == ids[k], (N, N)
    )
    assert keep_block_mask(mask) is mask
    x = torch.zeros(1, HEADS, N, D)
    for _ in range(2):
        flex_attention(x, x, x, None, mask)
    columns = [each.masks.startend_row_indices for each in asked]
    assert columns[0] is columns[1] is not None and asked[1].lists is None
    ids.data[20:] = 9
    flex_attention(x, x, x, None, mask)
    assert asked[-1].masks.startend_row_indices is columns[0], "torch does not count it"
    keep_block_mask(mask)
    flex_attention(x, x, x, None, mask)
    found = asked[-1].masks.startend_row_indices
    assert torch.equal(found.dense(N)[0, 0], ids[:, None] == ids)


def test_what_is_no_block_mask_is_not_kept() -> None:
    with pytest.raises(TypeError, match="block_mask must be a BlockMask of torch.*got tuple"):
        keep_block_mask(())  # type: ignore[arg-type]
