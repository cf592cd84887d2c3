"""A selection of key blocks for each query, on the software GPU, in both directions."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ACTIVE_ARCH
from drawn_selections import (
    Drawn,
    assert_close,
    dense_attention,
    dense_selection,
    draw,
    draw_selection,
)
from planned import backward_call, forward_call
from quiet_runs import quiet_run
from simulated_backward import run_on_simulator as run_backward
from simulated_forward import run_on_simulator as run_forward
from torch import Tensor

from flash_mask_cute import SelectedBlocks
from flash_mask_cute.call import mask_arguments
from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.mask_prep.selected_bits import (
    QueryTiles,
    compile_selected_bits,
    empty_bits,
    selected_bits,
)

# both architectures
ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# packed and dense, causal and not, sinks, soft caps, windows, both kinds of numbers
DRAWN = tuple(range(6))
BF16 = torch.bfloat16


def in_bf16(drawn: Drawn) -> Drawn:
    return drawn._replace(q=drawn.q.to(BF16), k=drawn.k.to(BF16), v=drawn.v.to(BF16))


def in_fp64(drawn: Drawn) -> Drawn:
    return drawn._replace(q=drawn.q.double(), k=drawn.k.double(), v=drawn.v.double())


def host_keywords(drawn: Drawn) -> dict[str, Any]:
    found = dict(drawn.keywords)
    left, _ = found.pop("window_size", (None, None))
    return found | {"window_size_left": left, "block_sparse_tensors_torch": drawn.selected}


def check_forward(drawn: Drawn, delay: int | None, **more: Any) -> tuple[Tensor, Tensor]:
    drawn = in_bf16(drawn)
    call = forward_call(drawn.q, drawn.k, drawn.v, **host_keywords(drawn), **more)
    with quiet_run(sys_simulator(), delay):
        out, lse = run_forward(call)
    assert lse is not None
    wanted, wanted_lse = dense_attention(in_fp64(drawn))
    assert_close(out, wanted, dense_attention(drawn)[0], "out")
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=2e-3)
    return out, lse


def sys_simulator() -> ModuleType:
    import software_gpu

    return software_gpu


def check_backward(drawn: Drawn, delay: int | None, **more: Any) -> list[Tensor]:
    drawn = in_bf16(drawn)
    reference = in_fp64(drawn)
    leaves = [x.requires_grad_() for x in reference[:3]]
    out, lse = dense_attention(reference)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    wanted = torch.autograd.grad(out, leaves, dout.double())
    in_dtype = [x.detach().requires_grad_() for x in drawn[:3]]
    eager = torch.autograd.grad(
        dense_attention(drawn._replace(q=in_dtype[0], k=in_dtype[1], v=in_dtype[2]))[0],
        in_dtype,
        dout,
    )
    operands = drawn.q, drawn.k, drawn.v, out.detach().to(BF16), dout, lse.detach().float()
    call = backward_call(*operands, **host_keywords(drawn), **more)
    with quiet_run(sys_simulator(), delay):
        got = run_backward(call)
    for name, *of_name in zip(("dq", "dk", "dv"), got, wanted, eager, strict=True):
        assert_close(*of_name, name)
    return list(got)


def drawn_seeds() -> tuple[int, ...]:
    if SEED == "0":
        return DRAWN
    rng = random.Random(f"selected {SEED}")
    return tuple(rng.randrange(1 << 30) for _ in DRAWN)


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_draws(simulator: ModuleType, number: int) -> None:
    drawn = draw(drawn_seeds()[number], 64, (16, 64, 128), 330)
    check_forward(drawn, number)
    check_backward(drawn, number)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_blocks", [1, 32, 100, 1100])
@pytest.mark.parametrize("tiles", [QueryTiles(8, 4), QueryTiles(64, 1), QueryTiles(192, 128)])
def test_bits(simulator: ModuleType, tiles: QueryTiles, num_blocks: int, dtype: str) -> None:
    """Of rows and of tiles, also where a query lies in two tiles; of packed sequences, too."""
    g = torch.Generator().manual_seed(num_blocks)
    k = 7 if num_blocks <= 100 else 40
    selection = torch.randint(-2, num_blocks + 40, (1, 3, 75, k), generator=g)
    selection[0, 0, 0] = -1
    selection[0, 0, 1] = torch.iinfo(getattr(torch, dtype)).max
    selection[0, 1, 4:8] = selection[0, 1, 4]
    selection = selection.to(getattr(torch, dtype)).transpose(2, 3).contiguous().transpose(2, 3)
    for lengths in (None, [0, 21, 0, 1, 53]):
        starts = None if lengths is None else torch.tensor(lengths).cumsum(0).int()
        made = empty_bits(selection, num_blocks, tiles, starts)
        for x in made:
            x.fill_(7777)
        with quiet_run(simulator, 1, launches=1):
            function = compile_selected_bits(dtype, starts is not None, ACTIVE_ARCH).function
            function(selection, *made, *tiles, starts)
        by_torch = selected_bits(selection, num_blocks, tiles, starts)
        found = bits_of(made.rows)
        assert torch.equal(found, dense_selection(selection, 1, found.shape[-1]))
        assert torch.equal(made.rows, by_torch.rows)
        used = []
        for b, (start, end) in enumerate(pairwise(lengths_of(starts))):
            first = 0 if starts is None else start * tiles.pack // tiles.tile_m + b
            for tile in range(tiles.number(end - start, None)):
                begin = start + tile * tiles.tile_m // tiles.pack
                stop = min(start + -(-(tile + 1) * tiles.tile_m // tiles.pack), end)
                of_rows = found[:, :, begin:stop]
                assert torch.equal(bits_of(made.of_any)[:, :, first + tile], of_rows.any(2))
                assert torch.equal(bits_of(made.of_every)[:, :, first + tile], of_rows.all(2))
                used.append(first + tile)
        assert len(set(used)) == len(used) and max(used) < made.of_any.shape[2]
        for x, y in zip(made[1:], by_torch[1:], strict=True):
            assert torch.equal(x[:, :, used], y[:, :, used])


def lengths_of(starts: Tensor | None) -> list[int]:
    return [0, 75] if starts is None else starts.tolist()


def bits_of(words: Tensor) -> Tensor:
    return ((words[..., None] >> torch.arange(32)) & 1).flatten(-2).bool()


# -- beside other arguments -----------------------------------------------------------------------


class Composed(NamedTuple):
    """A dense call beside a selection: operands, visible pairs, and what is added to scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Tensor
    block: int
    visible: Tensor
    keywords: dict[str, Any]
    bias: Tensor | float = 0.0

    @staticmethod
    def draw(
        shape: tuple[int, int, int], heads: tuple[int, int, int], block: int = 64, k: int = 2,
        seed: int = 0, **keywords: Any,
    ) -> Composed:  # fmt: skip
        """shape: batch, queries, keys. heads: of q, of k, of the selection."""
        gen = torch.Generator().manual_seed(seed)
        batch, n_q, n_k = shape
        heads_q, heads_kv, heads_selection = heads

        def operand(n: int, heads: int) -> Tensor:
            return torch.randn(batch, n, heads, 64, generator=gen).to(BF16)

        q, key, v = operand(n_q, heads_q), operand(n_k, heads_kv), operand(n_k, heads_kv)
        selection = draw_selection(
            gen, (batch, heads_selection, n_q, k), -(-n_k // block), torch.int32
        )
        visible = dense_selection(selection, block, n_k).repeat_interleave(
            heads_q // heads_selection, 1
        )
        return Composed(q, key, v, selection, block, visible, keywords)

    def seen(self, also: Tensor, bias: Tensor | float = 0.0, **keywords: Any) -> Composed:
        """The same with one more mask, and with what is to be added to scores."""
        more = self.keywords | keywords
        return self._replace(visible=self.visible & also, bias=bias, keywords=more)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the rule, in the dtype of the operands."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.bias
        probs = scores.masked_fill(~self.visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (probs.to(v.dtype) @ v).transpose(1, 2)

    @property
    def arguments(self) -> dict[str, Any]:
        chosen = SelectedBlocks(self.selection, self.block)
        return self.keywords | {"block_sparse_tensors_torch": chosen}

    def check(self, delay: int | None = 1, only_forward: bool = False, **of_forward: Any) -> None:
        given = self.q, self.k, self.v
        leaves = [x.double().requires_grad_() for x in given]
        wanted = self.attend(*leaves)
        in_dtype = [x.clone().requires_grad_() for x in given]
        eager = self.attend(*in_dtype)
        with quiet_run(sys_simulator(), delay):
            out, lse = run_forward(forward_call(*given, **self.arguments, **of_forward))
        assert lse is not None
        assert_close(out, wanted, eager, "out")
        if only_forward:
            return
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
        wanted = torch.autograd.grad(wanted, leaves, dout.double())
        of_eager = torch.autograd.grad(eager, in_dtype, dout)
        with quiet_run(sys_simulator(), delay):
            got = run_backward(backward_call(*given, out, dout, lse, **self.arguments))
        for name, *of_name in zip(("dq", "dk", "dv"), got, wanted, of_eager, strict=True):
            assert_close(*of_name, name)


def positions(n_q: int, n_k: int, first: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n_q)[:, None] + first, torch.arange(n_k)


def test_causal_with_a_window_and_a_first_position(simulator: ModuleType) -> None:
    """The rows of the selection stay with the queries."""
    i, j = positions(150, 300, 40)
    drawn = Composed.draw((2, 150, 300), (4, 2, 2))
    more: dict[str, Any] = {"causal": True, "window_size_left": 90, "q_start": 40}
    drawn.seen((j <= i) & (j >= i - 90), **more).check()
    starts = torch.tensor([40, -7], dtype=torch.int32)
    first = i - 40 + starts[:, None, None, None]
    Composed.draw((2, 150, 300), (4, 2, 1)).seen(j <= first, causal=True, q_start=starts).check()


def test_intervals(simulator: ModuleType) -> None:
    i, j = positions(200, 200, 0)
    end = (j + 70).clamp(max=200)
    hides = end.int().view(1, 1, 200, 1)
    drawn = Composed.draw((1, 200, 200), (4, 2, 2))
    drawn.seen((j <= i) & (i < end), causal=True, startend_row_indices=hides).check()


@pytest.mark.parametrize("block", [4, 16, 128])
def test_a_mask_mod_and_a_score_mod(simulator: ModuleType, block: int) -> None:
    """Beside a selection the mask_mod is not evaluated before attention."""
    i, j = positions(140, 280, 0)
    mods = resolve_mods(
        lambda s, b, h, i, j: s - 0.02 * (i - j).abs(), lambda b, h, i, j: (i + 2 * j) % 7 != h,
        None, "cpu",
    )  # fmt: skip
    heads = torch.arange(4)[:, None, None]
    drawn = Composed.draw((1, 140, 280), (4, 4, 4), block, q_start=0)
    bias = -0.02 * (i - j).abs().double()
    drawn.seen((i + 2 * j) % 7 != heads, bias, **mods._asdict()).check()


@pytest.mark.parametrize("group", [2, 12, 32])
@pytest.mark.parametrize("by_head", [False, True])
def test_a_mask_mod_of_packed_heads(simulator: ModuleType, group: int, by_head: bool) -> None:
    """One that does not use the head is evaluated once for the heads of a query."""
    i, j = positions(20, 300, 0)
    heads, mask_mod = torch.zeros(1, 1, 1), lambda b, h, i, j: (i + 2 * j) % 5 != 0
    if by_head:
        heads, mask_mod = torch.arange(group)[:, None, None], _by_head
    mods = resolve_mods(None, mask_mod, None, "cpu")
    drawn = Composed.draw((1, 20, 300), (group, 1, 1), 64, 3, q_start=0)
    drawn.seen((i + 2 * j) % 5 != heads, **mods._asdict()).check(only_forward=True)


def _by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + 2 * j) % 5 != h


def test_lengths_in_use(simulator: ModuleType) -> None:
    """Blocks behind the own end are chosen, and hold NaN."""
    used_q, used_k = torch.tensor([130, 0, 77]).int(), torch.tensor([201, 300, 64]).int()
    drawn = Composed.draw((3, 130, 300), (2, 2, 2), 64, 3)
    for b, (n_q, n_k) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        drawn.k[b, n_k:] = drawn.v[b, n_k:] = drawn.q[b, n_q:] = torch.nan
    call = forward_call(
        drawn.q, drawn.k, drawn.v, seqused_q=used_q, seqused_k=used_k, **drawn.arguments
    )
    with quiet_run(sys_simulator(), 1):
        out, _ = run_forward(call)
    for b, (n_q, n_k) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        own = drawn._replace(visible=drawn.visible[b : b + 1, :, :n_q, :n_k])
        rows = drawn.q[b : b + 1, :n_q], *(x[b : b + 1, :n_k] for x in (drawn.k, drawn.v))
        wanted = own.attend(*(x.double() for x in rows))
        if n_q:
            assert_close(out[b : b + 1, :n_q], wanted, own.attend(*rows), f"sequence {b}")
        assert not out[b, n_q:].any()


def test_tiles_that_nobody_chose_are_not_read(simulator: ModuleType) -> None:
    drawn = Composed.draw((1, 200, 640), (4, 2, 2), 128, 2)
    chosen = drawn.selection.where(drawn.selection != 3, 0)
    left = drawn._replace(selection=chosen, visible=drawn.visible.clone())
    left.k[:, 384:512] = left.v[:, 384:512] = torch.nan
    with quiet_run(sys_simulator(), 1):
        out, _ = run_forward(forward_call(left.q, left.k, left.v, **left.arguments))
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("block", "seqlen_k", "queries"),
    [(16, 21000, 20), (64, 70000, 20), (4096, 40000, 20), (64, 70000, 1)],
)
def test_long_walks_leap(simulator: ModuleType, block: int, seqlen_k: int, queries: int) -> None:
    """Over more blocks than a warp holds bits of; what nobody chose holds NaN, in tiles of 128."""
    shape, k = (1, queries, seqlen_k), 2 if queries > 1 else 7
    drawn = Composed.draw(shape, (2, 1, 1), block, k, seed=block, causal=True)
    selection = drawn.selection.where(drawn.selection != 0, 1)
    selection[:, :, 3:7] = -1
    used = torch.zeros(seqlen_k + 128, dtype=torch.bool)
    for number in selection.unique().tolist():
        if 0 <= number * block < seqlen_k:
            first, end = number * block // 128 * 128, -(-(number + 1) * block // 128) * 128
            used[first:end] = True
    for x in (drawn.k, drawn.v):
        x[:, ~used[:seqlen_k]] = torch.nan
    visible = dense_selection(selection, block, seqlen_k).repeat_interleave(2, 1)
    i, j = positions(queries, seqlen_k, seqlen_k - queries)
    given = drawn._replace(selection=selection, visible=visible & (j <= i))
    clean = [drawn.q, *(x.nan_to_num(0.0) for x in (drawn.k, drawn.v))]
    wanted, eager = given.attend(*(x.double() for x in clean)), given.attend(*clean)
    for num_splits in (0, 1, 3):
        call = forward_call(*given[:3], **given.arguments, num_splits=num_splits)
        with quiet_run(sys_simulator(), 1):
            out, _ = run_forward(call, sms=7)
        assert_close(out, wanted, eager, f"{num_splits} splits")


@pytest.mark.parametrize("more", [{}, {"num_splits": 3}, {"config": {"skip_blocks": False}}])
def test_packed_heads(simulator: ModuleType, more: dict[str, Any]) -> None:
    """Groups of 16 and of 3 share tiles with few queries."""
    for heads in ((16, 1, 1), (6, 2, 2), (6, 2, 1)):
        i, j = positions(20, 400, 380)
        drawn = Composed.draw((1, 20, 400), heads, 64, 3, causal=True)
        drawn.seen(j <= i).check(only_forward=True, **more)


@pytest.mark.parametrize(("page_size", "queries"), [(5, 4), (16, 1), (128, 1), (128, 4)])
def test_pages(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, page_size: int, queries: int
) -> None:
    """Decoding over pages, in splits; unused rows hold NaN; of one query entries are read."""
    block = 128 if page_size == 128 else 64
    if queries == 1:
        monkeypatch.setattr(mask_arguments, "selected_bits", None)
    drawn = Composed.draw((2, queries, 520), (8, 2, 2), block, 4, seed=page_size)
    used = torch.tensor([515, 130], dtype=torch.int32)
    gen = torch.Generator().manual_seed(1)
    pages = -(-520 // page_size)
    table = torch.randperm(2 * pages, generator=gen).view(2, pages)
    pools = []
    for x in (drawn.k, drawn.v):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - 520)).clone()
        for b, n in enumerate(used.tolist()):
            padded[b, n:] = torch.nan
        pool = torch.empty(2 * pages, page_size, 2, 64, dtype=BF16)
        pool[table] = padded.unflatten(1, (pages, page_size))
        pools.append(pool)
    i, j = positions(queries, 520, 0)
    ends = used.view(2, 1, 1, 1)
    seen = drawn.seen(j <= i + ends - queries)
    more: dict[str, Any] = {"page_table": table.int(), "seqused_k": used, "causal": True}
    for num_splits in (0, 1, 3):
        call = forward_call(drawn.q, *pools, **drawn.arguments, **more, num_splits=num_splits)
        with quiet_run(sys_simulator(), 1):
            # with 40, a share is one block
            out, _ = run_forward(call, sms=5 if page_size == 5 else 40)
        operands = drawn.q, drawn.k, drawn.v
        wanted = seen.attend(*(x.double() for x in operands))
        assert_close(out, wanted, seen.attend(*operands), f"{num_splits} splits")


def test_ordered_gradients_have_equal_bits(simulator: ModuleType) -> None:
    drawn = draw(3, 64, (64,), 330)
    first = check_backward(drawn, None, deterministic=True)
    for delay in (1, 2):
        for x, y in zip(check_backward(drawn, delay, deterministic=True), first, strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))


def test_gradients_of_an_aux_tensor(simulator: ModuleType) -> None:
    """Of a number for each key that a score_mod adds."""
    drawn = Composed.draw((1, 140, 280), (4, 2, 2), causal=True)
    i, j = positions(140, 280, 140)
    table = torch.randn(280, generator=torch.Generator().manual_seed(2))
    mods = resolve_mods(lambda score, b, h, i, j: score + table[j], None, None, "cpu")
    leaf = table.double().requires_grad_()
    seen = drawn.seen(j <= i, leaf, **mods._asdict())
    wanted = seen.attend(*(x.double() for x in seen[:3]))
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    (of_table,) = torch.autograd.grad(wanted, leaf, dout.double())
    with quiet_run(sys_simulator(), 1):
        out, lse = run_forward(forward_call(*seen[:3], **seen.arguments))
        daux = [torch.empty_like(table)]
        run_backward(backward_call(*seen[:3], out, dout, lse, **seen.arguments, daux=daux))
    error = (daux[0].double() - of_table).abs().amax()
    assert error < 2e-2 * of_table.abs().amax(), error


def test_a_backward_of_wide_heads(simulator: ModuleType) -> None:
    check_backward(draw(2, 128, (16, 64), 330), 1)


@pytest.mark.parametrize(("block", "seed"), [(4, 5), (8, 14)])
def test_a_backward_of_small_blocks(simulator: ModuleType, block: int, seed: int) -> None:
    check_backward(draw(seed, 64, (block,), 200), 1)
