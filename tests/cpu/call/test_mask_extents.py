"""Whether a mask has a row for each query of a call, and which one: `q_start`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import int32
from launch_recorder import Recorder
from oracle import attend_rows
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from flash_mask_cute import (
    BlockSparseTensorsTorch,
    ColumnMask,
    builders,
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
)
from flash_mask_cute.compute_block_sparsity import compute_block_sparsity
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

MADE = "startend_row_indices was made for "
LISTED = "block_sparse_tensors was made for "
ANSWER = "q_start=0 says that its first query is row 0 of the mask"


def qkv(seqlen_q: int, seqlen_k: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (
        torch.randn((batch, seqlen, 2, 16), generator=generator, dtype=torch.float64)
        for seqlen in (seqlen_q, seqlen_k, seqlen_k)
    )
    return q, k, v


def packed(lengths_q: list[int], lengths_k: list[int]) -> dict[str, Any]:
    q, k, v = (x[0] for x in qkv(sum(lengths_q), sum(lengths_k)))
    starts = (int32(0, *lengths).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    names = "cu_seqlens_q", "cu_seqlens_k"
    return {"q": q, "k": k, "v": v} | dict(zip(names, starts, strict=True))


def dense(seqlen_q: int, seqlen_k: int, batch: int = 1) -> dict[str, Any]:
    return dict(zip("qkv", qkv(seqlen_q, seqlen_k, batch), strict=True))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """In float64, of visible (seqlen_q, seqlen_k); rows that see nothing are 0."""
    return attend_rows(q, k, v, visible).out


def rows(num_keys: int, num_vectors: int = 2) -> Tensor:
    """Intervals that hide nothing from the first num_keys queries."""
    indices = torch.zeros((1, 1, num_keys, num_vectors), dtype=torch.int32)
    indices[..., 0] = num_keys
    return indices


def near(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return q - k < 70


# -- refusals -----------------------------------------------------------------------------------

LISTS = create_block_mask(near, None, None, 200, 300, device="cpu", BLOCK_SIZE=(64, 64))

REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], Any, str]] = {
    # no word about rows
    "decode, a tensor": (lambda: dense(1, 64), lambda: rows(64), r"keys \(1 queries x 64 keys\)"),
    "a chunk, a tensor": (lambda: dense(9, 64), lambda: rows(64), r"keys \(9 queries x 64 keys\)"),
    "a hand-made mask": (
        lambda: dense(9, 64), lambda: ColumnMask(rows(64), False), r"keys \(9 queries x 64 keys\)",
    ),
    "packed decode": (
        lambda: packed([1, 1], [30, 34]), lambda: rows(64),
        r"keys \(2 queries in 2 sequences x 64 keys in 2 sequences\)",
    ),
    "decode from slots": (
        lambda: dense(1, 64) | {"seqused_k": int32(30)}, lambda: rows(64), r"\(1 queries x 64",
    ),
    # masks that know their rows
    "decode": (lambda: dense(1, 64), lambda: builders.causal_document([30, 34]),
        MADE + r"64 queries x 64 keys, and this call has fewer queries \(1 queries x 64 keys\): "
        + ANSWER,
    ),
    "more queries": (
        lambda: dense(80, 64), lambda: builders.sliding_window(64, 9),
        MADE + r"64 queries x 64 keys, and does not cover this call \(80 queries x 64 keys\)",
    ),
    "a chunk with as many keys": (
        lambda: dense(64, 64),
        lambda: builders.from_dense(torch.ones(128, 64, dtype=torch.bool), seqlen_q=128),
        MADE + "128 queries x 64 keys, and this call has fewer queries",
    ),
    "a dense mask of other queries": (
        lambda: dense(20, 64),
        lambda: builders.from_dense(torch.ones(3, 16, 64, dtype=torch.bool)[:1]),
        MADE + "16 queries x 64 keys, and does not cover this call",
    ),
    "one sequence for packed ones": (
        lambda: packed([30, 34], [30, 34]), lambda: builders.document([30, 34]),
        MADE + "64 queries x 64 keys, one sequence, and cu_seqlens_k packs 2 of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_intervals(name: str) -> None:
    make, make_mask, text = REFUSED[name]
    arguments = make()
    mask = make_mask()
    with pytest.raises(ValueError, match=text):
        _flash_attn_fwd(**arguments, startend_row_indices=mask)
    with pytest.raises(ValueError, match=text):
        explain(**arguments, startend_row_indices=mask)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "text"),
    [
        (199, 300, r"200 queries x 300 keys, and this call has fewer queries \(199 queries x 300"),
        (201, 300, r"200 queries x 300 keys, and does not cover this call \(201 queries x 300 "),
        (200, 301, r"200 queries x 300 keys, and does not cover this call \(200 queries x 301 "),
        (256, 320, r"200 queries x 300 keys, and does not cover this call"),
    ],
)
def test_refusals_of_lists(seqlen_q: int, seqlen_k: int, text: str) -> None:
    """The number of blocks would be right, or nearly."""
    for keywords in (
        {"block_sparse_tensors_torch": LISTS},
        {
            "block_sparse_tensors_torch": torch_block_mask(
                lambda b, h, q, k: q - k < 70, None, None, 200, 300, "cpu", BLOCK_SIZE=64
            ),
            "mask_mod": near,
        },
    ):
        with pytest.raises(ValueError, match=LISTED + text):
            _flash_attn_fwd(*qkv(seqlen_q, seqlen_k), **keywords)
    with pytest.raises(ValueError, match=LISTED + text):
        flash_attn_func(*qkv(seqlen_q, seqlen_k), block_sparse_tensors=LISTS, mask_mod=near)


def test_lists_of_packed_sequences_cover_the_longest() -> None:
    lists = create_block_mask(near, None, None, 100, 100, device="cpu")
    arguments = packed([100, 40], [100, 40])
    lengths = {"max_seqlen_q": 100, "max_seqlen_k": 100, "mask_mod": near}
    out, _ = _flash_attn_fwd(**arguments, **lengths, block_sparse_tensors_torch=lists)
    expected, _ = _flash_attn_fwd(**arguments, mask_mod=near)
    assert torch.allclose(out, expected)
    text = LISTED + "100 queries x 100 keys, and does not cover this call .*up to 101 queries and"
    with pytest.raises(ValueError, match=text):
        lengths |= {"max_seqlen_q": 101}
        _flash_attn_fwd(**arguments, **lengths, block_sparse_tensors_torch=lists)


def test_the_pair_of_computed_lists_knows_its_extents() -> None:
    pair = compute_block_sparsity(64, 64, 1, 1, 100, 100, near, None, "cpu")
    with pytest.raises(ValueError, match=LISTED + "100 queries x 100 keys"):
        _flash_attn_fwd(*qkv(101, 100), block_sparse_tensors_torch=pair, mask_mod=near)


@pytest.mark.parametrize(
    ("seqlens", "error", "text"),
    [(3, ValueError, "seqlens must be .queries, keys., got 3"), ((1, 2.0), TypeError, "two ints")],
)
def test_wrong_lengths_of_lists(seqlens: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lists = LISTS._replace(seqlens=seqlens)
        _flash_attn_fwd(*qkv(200, 300), block_sparse_tensors_torch=lists, mask_mod=near)


@pytest.mark.parametrize(
    ("q_start", "error", "text"),
    [
        (1 << 29, ValueError, "q_start must be above .* as an int, got 536870912"),
        (int32(-(1 << 29)), ValueError, "q_start must be above .* in each element, got -536870912"),
        (int32(0, 1), ValueError, r"q_start must have shape \(batch,\) = \(1,\), got \(2,\)"),
        (int32(0).long(), TypeError, "q_start must have dtype int32, got torch.int64"),
        (int32(0).to("meta"), ValueError, "q_start must be on the device of q"),
        ("start", ValueError, "q_start must be an int, .* got 'start'"),
        ("each", ValueError, "q_start must be an int, .* got 'each'"),
        (False, TypeError, r"q_start must be an int, .* got False \(bool\)"),
        (0.0, TypeError, r"q_start must be an int, .* got 0\.0 \(float\)"),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_refusals_of_q_start(q_start: Any, error: type[Exception], text: str) -> None:
    q, k, v = qkv(5, 9)
    out, lse = _flash_attn_fwd(q, k, v)
    calls: list[Callable[[], Any]] = [
        lambda: _flash_attn_fwd(q, k, v, q_start=q_start),
        lambda: _flash_attn_bwd(q, k, v, out, out, lse, q_start=q_start),
        lambda: flash_attn_func(q, k, v, q_start=q_start),
        lambda: flash_attn_varlen_func(q, k, v, q_start=q_start),
        lambda: flashmask_attention(q, k, v, q_start=q_start),
        lambda: explain(q, k, v, q_start=q_start),
        lambda: torch.compile(flash_attn_func, backend="eager")(q, k, v, q_start=q_start),
    ]
    for call in calls:
        with pytest.raises(error, match=text):
            call()


# -- what is accepted ---------------------------------------------------------------------------


def hidden_by(indices: Tensor, seqlen_q: int) -> Tensor:
    """Bool (seqlen_q, seqlen_k), of the non-causal form with two vectors."""
    row = torch.arange(seqlen_q)[:, None]
    start, prefix = indices[0, 0].T
    return (row >= start) | (row < prefix)


@pytest.mark.parametrize("seqlen_q", [1, 9, 64, 80])
def test_rows_from_0(seqlen_q: int) -> None:
    """q_start=0: the first query is row 0, through every call, forward and backward."""
    q, k, v = (x.requires_grad_() for x in qkv(seqlen_q, 64))
    indices = torch.randint(0, 70, (1, 1, 64, 2), generator=torch.Generator().manual_seed(1)).int()
    expected = attend(q, k, v, ~hidden_by(indices, seqlen_q))
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    out, lse = _flash_attn_fwd(q, k, v, startend_row_indices=indices, q_start=0)
    assert torch.allclose(out, expected)
    found = _flash_attn_bwd(q, k, v, out, dout, lse, startend_row_indices=indices, q_start=0)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, gradients, strict=True))
    for call in (flash_attn_func, flash_attn_varlen_func, flashmask_attention):
        out = call(q, k, v, startend_row_indices=indices, q_start=0)
        assert torch.allclose(out, expected)
        found = torch.autograd.grad(out, (q, k, v), dout)
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, gradients, strict=True))
    assert explain(q, k, v, startend_row_indices=indices, q_start=0).work_tiles


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 64), (64, 9), (1, 40), (40, 1)])
def test_a_mask_of_these_queries(seqlen_q: int, seqlen_k: int) -> None:
    """A mask that knows its rows leaves no doubt about them."""
    generator = torch.Generator().manual_seed(seqlen_q)
    visible = torch.rand(1, seqlen_k, generator=generator) * seqlen_q
    visible = torch.arange(seqlen_q)[:, None] >= visible
    q, k, v = qkv(seqlen_q, seqlen_k)
    mask = builders.from_dense(visible, seqlen_q=seqlen_q)
    expected = attend(q, k, v, visible)
    assert torch.allclose(flash_attn_func(q, k, v, startend_row_indices=mask), expected)
    told = ColumnMask(mask.startend_row_indices, mask.causal, seqlen_q=seqlen_q)
    assert torch.allclose(flash_attn_func(q, k, v, startend_row_indices=told), expected)


def test_a_part_of_a_mask_from_row_0() -> None:
    visible = torch.ones(64, 64, dtype=torch.bool).tril(9).triu(-5)
    mask = builders.from_dense(visible)
    q, k, v = qkv(20, 64)
    out = flash_attn_func(q, k, v, startend_row_indices=mask, q_start=0)
    assert torch.allclose(out, attend(q, k, v, visible[:20]))


def test_tensors_with_as_many_queries_or_more() -> None:
    for seqlen_q in (64, 65, 300):
        _flash_attn_fwd(*qkv(seqlen_q, 64), startend_row_indices=rows(64))
    _flash_attn_fwd(**packed([30, 34], [34, 30]), startend_row_indices=rows(64))
    _flash_attn_fwd(*qkv(0, 64), startend_row_indices=rows(64))


def test_a_mask_of_one_packed_sequence() -> None:
    mask = builders.sliding_window(64, 9)
    out, _ = _flash_attn_fwd(**packed([64], [64]), startend_row_indices=mask)
    expected, _ = _flash_attn_fwd(**dense(64, 64), startend_row_indices=mask)
    assert torch.allclose(out, expected[0])
    joined = torch.cat([builders.sliding_window(n, 9).startend_row_indices for n in (30, 34)], 2)
    _flash_attn_fwd(**packed([30, 34], [30, 34]), startend_row_indices=ColumnMask(joined, True))


LENGTHS = ([40, 0, 60], [64, 9, 100]), ([7, 1], [7, 90]), ([64, 20], [30, 70])
# how the rows of a joined mask are told, and where the first query of a sequence then stands
TOLD = {"seqlen_q": 0, "q_start=0": 0, "q_start tensor": 5, "both": 3}


def call_of_joined(told: str, causal: bool, lengths: tuple[list[int], list[int]]) -> Any:
    """Arguments of a call with intervals of packed keys, and who sees whom in each sequence."""
    lengths_q, lengths_k = lengths
    generator = torch.Generator().manual_seed(sum(lengths_q))
    start, rows = TOLD[told], None if "start" in told else sum(lengths_q)
    if told == "both":
        rows = sum(lengths_q) + 3 * len(lengths_q)
    indices, visible = [], []
    for queries, keys in zip(lengths_q, lengths_k, strict=True):
        columns = torch.randint(0, queries + 9, (1, 1, keys, 2), generator=generator).int()
        place = torch.arange(queries)[:, None]
        shift = keys - queries if told == "seqlen_q" else start
        row, (first, second) = place + start, columns[0, 0].T
        hidden = (row >= first) & (row < second)
        if causal:
            hidden |= torch.arange(keys) > place + shift
        else:
            hidden = (row >= first) | (row < second)
        indices.append(columns)
        visible.append(~hidden)
    mask = ColumnMask(torch.cat(indices, dim=2), causal, seqlen_q=rows)
    q_start: Any = 0 if told == "q_start=0" else None
    if start:
        q_start = torch.full((len(lengths_q),), start, dtype=torch.int32)
    given = packed(*lengths) | {"startend_row_indices": mask, "q_start": q_start}
    return given, visible


@pytest.mark.shares(4)
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_keys_with_rows_of_their_own(
    told: str, causal: bool, lengths: tuple[list[int], list[int]]
) -> None:
    """Each sequence has its own rows, fewer than keys or more; forward and backward."""
    given, visible = call_of_joined(told, causal, lengths)
    q, k, v = (given.pop(name).requires_grad_() for name in "qkv")
    parts = [
        attend(q_one[None], k_one[None], v_one[None], seen)[0]
        for q_one, k_one, v_one, seen in zip(
            q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), visible, strict=True
        )
    ]
    expected = torch.cat(parts)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    for call in (flash_attn_varlen_func, compiled):
        out = call(q, k, v, **given)
        assert torch.allclose(out, expected, atol=1e-6)
        found = torch.autograd.grad(out, (q, k, v), dout)
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, gradients, strict=True))


def test_the_way_that_a_refusal_of_packed_keys_tells() -> None:
    """What the messages say works, and the mask of one sequence is refused on every way."""
    given = packed([40, 60], [64, 100])
    indices = torch.cat([rows(64), rows(100)], dim=2)
    with pytest.raises(ValueError, match=r"ColumnMask\(\.\.\., seqlen_q=100\) that the mask was"):
        _flash_attn_fwd(**given, startend_row_indices=indices)
    mask = ColumnMask(indices, False, seqlen_q=100)
    _flash_attn_fwd(**given, startend_row_indices=mask)
    for wrong, text in ((99, "does not cover this call"), (101, "has fewer queries")):
        told = ColumnMask(indices, False, seqlen_q=wrong)
        with pytest.raises(ValueError, match=MADE + f"{wrong} queries x 164 keys, and .*{text}"):
            _flash_attn_fwd(**given, startend_row_indices=told)
    one = builders.from_dense(torch.ones(100, 164, dtype=torch.bool), seqlen_q=100)
    compiled = torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)
    for call in (flash_attn_varlen_func, compiled, _flash_attn_fwd):
        with pytest.raises(Exception, match="one sequence, and cu_seqlens_k packs (2|several)"):
            call(**given, startend_row_indices=one)


@pytest.mark.parametrize("make", ["ours", "torch"])
def test_lists_of_these_lengths(make: str) -> None:
    q, k, v = qkv(200, 300)
    lists: Any = LISTS
    if make == "torch":
        lists = torch_block_mask(
            lambda b, h, q, k: q - k < 70, None, None, 200, 300, "cpu", BLOCK_SIZE=64
        )
    visible = torch.arange(200)[:, None] - torch.arange(300) < 70
    out = flash_attn_func(q, k, v, block_sparse_tensors=lists, mask_mod=near)
    assert torch.allclose(out, attend(q, k, v, visible))
    # rows of a larger mask
    out = flash_attn_func(q[:, :199], k, v, block_sparse_tensors=lists, mask_mod=near, q_start=0)
    assert torch.allclose(out, attend(q[:, :199], k, v, visible[:199]))


def test_a_block_mask_rounded_up_to_its_blocks() -> None:
    """What `from_kv_blocks` says of lengths unless it is told."""
    counts, indices = int32(3, 3, 3)[None, None], int32(0, 1, 2).repeat(1, 1, 3, 1)
    rounded = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)
    assert rounded.seq_lengths == (384, 384)
    q, k, v = qkv(300, 300)
    out = flash_attn_func(q, k, v, block_sparse_tensors=rounded, mask_mod=near)
    assert torch.allclose(out, flash_attn_func(q, k, v, mask_mod=near))


def test_one_block_for_all() -> None:
    """The BlockMask that torch makes where there is no mask."""
    counts, indices = int32(1)[None, None], int32(0)[None, None, None]
    lists = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
    q, k, v = qkv(20, 30)
    out = flash_attn_func(q, k, v, block_sparse_tensors=lists, mask_mod=near)
    assert torch.allclose(out, flash_attn_func(q, k, v, mask_mod=near))


@pytest.mark.parametrize("is_told", [False, True])
def test_operators_check_as_eager_calls_do(is_told: bool) -> None:
    """torch.compile hands the extents of masks on."""
    compiled = torch.compile(flash_attn_func, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in qkv(20, 64))
    part, whole = builders.causal_document([30, 34]), builders.key_padding(torch.ones(1, 64).int())
    for keywords in (
        {"startend_row_indices": part},
        {"startend_row_indices": part.startend_row_indices, "causal": True},
        {"block_sparse_tensors": create_block_mask(near, 1, 1, 64, 64, "cpu"), "mask_mod": near},
    ):
        if is_told:
            keywords = keywords | {"q_start": 0}
            out = compiled(q, k, v, **keywords)
            assert torch.allclose(out, flash_attn_func(q, k, v, **keywords))
            out.sum().backward()
        else:
            with pytest.raises(ValueError, match="q_start=0 says"):
                compiled(q, k, v, **keywords)
    assert torch.allclose(compiled(q, k, v, startend_row_indices=whole), flash_attn_func(q, k, v))


def test_the_key_of_a_launch_knows_extents(recorder: Recorder) -> None:
    """A launch of one mask is not found for another that the call's queries do not fit."""
    q, k, v = (x.bfloat16() for x in qkv(40, 64))
    indices = rows(64)
    for seqlen_q in (40, 64, 40, "any", None):
        mask = ColumnMask(indices, False, seqlen_q=seqlen_q)
        if seqlen_q in (64, None):
            with pytest.raises(ValueError, match=ANSWER):
                _flash_attn_fwd(q, k, v, startend_row_indices=mask)
        else:
            _flash_attn_fwd(q, k, v, startend_row_indices=mask)
        _flash_attn_fwd(q, k, v, startend_row_indices=mask, q_start=0)
    # masks of 40 queries and of any, and q_start=0 of each of the four
    assert len(recorder.prepared) == 6
    lists = create_block_mask(near, None, None, 40, 64, device="cpu")
    for seqlens in ((40, 64), (41, 64)):
        call = {"block_sparse_tensors_torch": lists._replace(seqlens=seqlens), "mask_mod": near}
        if seqlens == (40, 64):
            _flash_attn_fwd(q, k, v, **call)
        else:
            with pytest.raises(ValueError, match=ANSWER):
                _flash_attn_fwd(q, k, v, **call)


def test_lists_by_hand_know_blocks_only() -> None:
    lists = BlockSparseTensorsTorch(*LISTS[:4], block_size=(64, 64))
    assert lists.seqlens is None and LISTS.seqlens == (200, 300)
    _flash_attn_fwd(*qkv(199, 299), block_sparse_tensors_torch=lists, mask_mod=near)
