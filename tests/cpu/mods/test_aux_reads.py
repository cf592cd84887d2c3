"""How callables read aux tensors on the CPU: every dtype, and no element outside a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import aux_dtypes
import cutlass
import cutlass.cute as cute
import pytest
import torch
from aux_dtypes import CASES, make_all_dtypes, make_aux_tensors, plain_inputs, visible_of
from cases import Case
from eager import assert_close_to_oracle
from inputs import make_output_gradients
from torch import Tensor
from trained_mods import assert_aux_gradients_close

from flash_mask_cute import create_block_mask, flash_attn_func, plotting
from flash_mask_cute.compute_block_sparsity import compute_block_sparsity
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.mods import on_cpu
from flash_mask_cute.mods.on_cpu import (
    add_aux_gradients,
    eval_mask_mod,
    eval_score_mod,
    eval_score_mod_bwd,
    eval_score_mod_derivative,
)

ROWS, COLS = 6, 6
INDICES = torch.arange(ROWS, dtype=torch.int32), torch.arange(COLS, dtype=torch.int32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32, torch.int64)


def ask(mod: Callable[..., Any], *aux: Tensor) -> Tensor:
    return eval_mask_mod(mod, list(aux), 0, 0, *INDICES)


# -- dtypes ---------------------------------------------------------------------------------------


@cute.jit
def by_condition(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k[0] <= q[0] if aux[0][k[0]] else k[0] == 0


@cute.jit
def by_words(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][k[0]] and not aux[0][q[0]]


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda b, h, q, k, aux: aux[0][k[0]], lambda x, q, k: x[k] & (q == q)),
        (lambda b, h, q, k, aux: ~aux[0][k[0]] & (k <= q), lambda x, q, k: ~x[k] & (k <= q)),
        (lambda b, h, q, k, aux: (k <= q) | aux[0][q[0]], lambda x, q, k: (k <= q) | x[q]),
        (lambda b, h, q, k, aux: aux[0][q[0]] ^ aux[0][k[0]], lambda x, q, k: x[q] ^ x[k]),
        (lambda b, h, q, k, aux: aux[0][q[0]] == aux[0][k[0]], lambda x, q, k: x[q] == x[k]),
        (by_condition, lambda x, q, k: torch.where(x[k], k <= q, k == 0)),
        (by_words, lambda x, q, k: x[k] & ~x[q]),
        (lambda b, h, q, k, aux: cute.where((k >= 0) & aux[0][k[0]], k <= q, k > q),
         lambda x, q, k: torch.where(x[k], k <= q, k > q)),
        (lambda b, h, q, k, aux: cutlass.select_(aux[0][k[0]], k[0] <= q[0], k[0] > q[0]),
         lambda x, q, k: torch.where(x[k], k <= q, k > q)),
    ],
    ids=["itself", "not-and", "or", "xor", "equal", "condition", "words", "where", "select"],
)  # fmt: skip
def test_bool(mod: Callable[..., Any], expected: Callable[..., Tensor]) -> None:
    x = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1]], dtype=torch.bool)
    q, k = (i.long() for i in INDICES)
    for aux in (x[:, 0].contiguous(), x[:, 1]):
        assert torch.equal(ask(mod, aux), expected(aux, q[:, None], k[None]))


@pytest.mark.shares(3)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: torch.dtype) -> None:
    """As numbers, beside indices, and as indices of another tensor, at the ends of their range."""
    info = torch.iinfo(dtype)
    values = torch.tensor([info.min, info.max, 0, 1, 5, info.max // 2 + 1], dtype=dtype)
    wide = values.to(torch.int64)
    q, k = (i.long() for i in INDICES)

    def as_number(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return aux[0][k[0]].to(cutlass.Float32)

    found = eval_score_mod(as_number, torch.zeros(ROWS, COLS), [values], 0, 0, *INDICES)
    assert torch.equal(found, wide.float().expand(ROWS, COLS))
    seen = ask(lambda b, h, q, k, aux: aux[0][k[0]] > q, values)
    assert torch.equal(seen, wide[k] > q[:, None])
    numbers = torch.tensor([4, 0, 5, 1, 3, 2], dtype=dtype)
    other = torch.rand((ROWS, COLS)) < 0.5
    seen = ask(lambda b, h, q, k, aux: aux[1][aux[0][k[0]], q[0]], numbers, other)
    assert torch.equal(seen, other[numbers.long()][:, :ROWS].T)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS], ids=str)
def test_slices_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (ROWS, COLS)).to(dtype)
    mod = (
        (lambda b, h, q, k, aux: ~aux[0][q[0], None][k[0]])
        if dtype == torch.bool
        else (lambda b, h, q, k, aux: aux[0][q[0], None][k[0]] == 0)
    )
    assert torch.equal(ask(mod, x), x == 0)


def test_aux_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function gets is the tensor itself."""
    aux = make_aux_tensors(8, 1, torch.Generator().manual_seed(0))
    indices = torch.arange(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    eval_mask_mod(aux_dtypes.mask_mod, aux, 0, 0, *indices)
    compiled = dict(on_cpu._compiled)
    passed: list[Any] = []
    for key, made in compiled.items():

        def spy(*arguments: Any, made: Any = made) -> None:
            passed.append(arguments[2])
            made.function(*arguments)

        monkeypatch.setitem(on_cpu._compiled, key, made._replace(function=spy))
    seen = eval_mask_mod(aux_dtypes.mask_mod, aux, 0, 0, *indices)
    assert torch.equal(seen, visible_of(aux, 8, 8))
    assert all(x is y for x, y in zip(passed[0], aux, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_attention_with_all_dtypes(case: Case) -> None:
    """Both callables, forward and backward."""
    given = make_all_dtypes(case)
    inputs = given.inputs
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords, return_lse=True)
    assert_close_to_oracle(out, lse, inputs)
    dout, _ = make_output_gradients(inputs)
    aux = list(given.aux_tensors)
    aux[aux_dtypes.TABLE] = aux[aux_dtypes.TABLE].clone().requires_grad_()
    keywords = {x: y for x, y in inputs.mask_keywords.items() if x != "aux_tensors"}
    out = flash_attn_func(
        inputs.q, inputs.k, inputs.v, causal=case.causal, aux_tensors=aux, **keywords
    )
    out.backward(dout)
    assert_aux_gradients_close([aux[aux_dtypes.TABLE].grad], given, dout)


def test_block_lists_of_all_dtypes() -> None:
    aux = plain_inputs(CASES[0]).keywords["aux_tensors"]
    sizes: Any = {"device": "cpu", "BLOCK_SIZE": aux_dtypes.BLOCK_SIZE, "aux_tensors": aux}
    lists = create_block_mask(aux_dtypes.mask_mod, 1, 1, 200, 300, **sizes)
    aux_dtypes.assert_block_lists(lists, aux)


# -- indices --------------------------------------------------------------------------------------


def place(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][q[0], k[0]] == 1


def by_row(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][q[0], None][k[0]] == 1


def of_head(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][b[0], h[0]] == 1


def before(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][q[0] - 1, 0] == 1


def constant(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][0, 7] == 1


@cute.jit
def in_a_branch(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    visible = k[0] == 0
    if q[0] >= 5:
        visible = aux[0][q[0], k[0]] == 1
    return visible


@cute.jit
def in_a_loop(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    total = cutlass.Int32(0)
    for i in range(k[0] + 1):
        total += aux[0][0, i]
    return total == 1


@cute.jit
def chosen(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    table = aux[0]
    if q[0] > 3:
        table = aux[1]
    return table[q[0], 0] == 1


NEGATIVE = "; no index is negative in CuTe"
OUTSIDE = {
    "key": (place, (6, 4), "aux_tensors[0] at index 4 of dimension 1, whose extent is 4", 0, 4),
    "query": (place, (3, 6), "aux_tensors[0] at index 3 of dimension 0, whose extent is 3", 3, 0),
    "slice": (by_row, (6, 5), "aux_tensors[0] at index 5 of dimension 1, whose extent is 5", 0, 5),
    "head": (of_head, (1, 2), "aux_tensors[0] at index 2 of dimension 1, whose extent is 2", 0, 0),
    "negative": (
        before, (6, 1), f"aux_tensors[0] at index -1 of dimension 0, whose extent is 6{NEGATIVE}",
        0, 0,
    ),
    "constant": (
        constant, (1, 7), "aux_tensors[0] at index 7 of dimension 1, whose extent is 7", 0, 0
    ),
    "all dimensions": (
        lambda b, h, q, k, aux: aux[0][q[0] * 6 + k[0]] == 1, (5, 7),
        "aux_tensors[0] at index 35 of all dimensions, whose extent is 35", 5, 5
    ),
    "branch": (
        in_a_branch, (6, 2), "aux_tensors[0] at index 2 of dimension 1, whose extent is 2", 5, 2
    ),
    "loop": (
        in_a_loop, (1, 5), "aux_tensors[0] at index 5 of dimension 1, whose extent is 5", 0, 5
    ),
    "chosen": (
        chosen, (3, 1), "one of its aux_tensors at index 3 of dimension 0, whose extent is 3", 3, 0
    ),
    "empty": (place, (0, 6), "aux_tensors[0] at index 0 of dimension 0, whose extent is 0", 0, 0),
    "empty row": (
        place, (6, 0), "aux_tensors[0] at index 0 of dimension 1, whose extent is 0", 0, 0
    ),
}  # fmt: skip


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_outside_is_an_error(name: str) -> None:
    mod, shape, text, q_idx, kv_idx = OUTSIDE[name]
    head = 2 if mod is of_head else 0
    aux = [torch.ones(shape, dtype=torch.int32), torch.ones((6, 6), dtype=torch.int32)]
    with pytest.raises(IndexError) as found:
        eval_mask_mod(mod, aux, 0, head, *INDICES)
    message = str(found.value)
    assert message.startswith(f"mask_mod {mod.__name__} ({__file__}:"), message
    where = f"(b_idx 0, h_idx {head}, q_idx {q_idx}, kv_idx {kv_idx})"
    assert message.endswith(f"reads {text} {where}"), message


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, 250), (torch.int8, -3), (torch.int16, -(2**15)), (torch.uint32, 2**32 - 1),
        (torch.int64, 2**32 + 1), (torch.int64, -(2**40)),
    ],
    ids=str,
)  # fmt: skip
def test_indices_of_any_width(dtype: torch.dtype, value: int) -> None:
    """An int64 that has 1 in its lower half, and a uint32 that is -1 as an int32, are outside."""
    aux = [torch.ones((1, 6), dtype=torch.int8), torch.full((6,), value, dtype=dtype)]
    text = rf"aux_tensors\[0\] at index {value} of dimension 1, whose extent is 6"
    with pytest.raises(IndexError, match=text):
        eval_mask_mod(lambda b, h, q, k, aux: aux[0][0, aux[1][k[0]]] == 1, aux, 0, 0, *INDICES)


def test_nothing_outside_is_read() -> None:
    """Addresses that are no memory; the process would end."""

    def far(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return aux[0][(q[0] + 1) * 1000000000] == 1

    with pytest.raises(IndexError, match="at index 1000000000 of dimension 0, whose extent is 4"):
        ask(far, torch.ones(4, dtype=torch.float32))


def test_indices_inside_at_the_ends() -> None:
    """A branch that keeps the callable inside, where its places are not."""
    x = torch.ones((ROWS, COLS), dtype=torch.int32)
    for mod in (place, by_row, in_a_branch):
        assert ask(mod, x).any()

    @cute.jit
    def kept_inside(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        visible = q[0] == 5
        if k[0] < cute.size(aux[0], mode=[1]) and q[0] < cute.size(aux[0], mode=[0]):
            visible = aux[0][q[0], k[0]] == 1
        return visible

    expected = torch.zeros((ROWS, COLS), dtype=torch.bool)
    expected[:3, :4] = expected[5] = True
    assert torch.equal(ask(kept_inside, x[:3, :4]), expected)
    assert torch.equal(ask(kept_inside, x[:0])[5], expected[5])


def test_checked_code_is_made_where_it_is_needed() -> None:
    """Reads by places have code without checks; other reads, and places that are outside, not."""
    checked = {}
    for mod, shape in ((place, (6, 6)), (place, (6, 5)), (before, (6, 1))):
        on_cpu._compiled.clear()
        with contextlib.suppress(IndexError):
            ask(mod, torch.ones(shape, dtype=torch.int32))
        checked[mod, shape] = [made.reads for made in on_cpu._compiled.values()]
    places = [(0, 0, 2), (0, 1, 3)]
    assert list(checked.values()) == [[places], [places, None], [None]]


@pytest.mark.parametrize(
    ("use", "how"),
    [
        (lambda x, q, k: cute.make_tensor(x.iterator + q[0], cute.make_layout(1))[0], "a pointer"),
        (lambda x, q, k: cute.local_tile(x, (1, 1), (q[0], k[0]))[0, 0], "cute.local_tile"),
        (lambda x, q, k: cute.slice_(x, (q[0], None))[k[0]], "cute.slice"),
    ],
    ids=["pointer", "tile", "slice"],
)
def test_uses_that_cannot_be_checked(use: Callable[..., Any], how: str) -> None:
    def used(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return use(aux[0], q, k) == 1

    text = rf"^mask_mod used \(.*\) uses aux_tensors\[0\] by {how}, which cannot be checked on the"
    with pytest.raises(NotImplementedError, match=text):
        ask(used, torch.ones((6, 6), dtype=torch.int32))


# -- everything that runs callables on the CPU ----------------------------------------------------


def bias(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][q[0], k[0]]


def bias_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad + 0.0 * aux[0][q[0], k[0]]


KEY_4 = r"aux_tensors\[0\] at index 4 of dimension 1, whose extent is 4"


@pytest.mark.shares(3)
def test_every_evaluation_checks() -> None:
    narrow = [torch.zeros((6, 4))]
    scores = torch.zeros((ROWS, COLS))
    given = narrow, 0, 0, *INDICES
    with pytest.raises(IndexError, match=rf"^score_mod bias \(.*{KEY_4}"):
        eval_score_mod(bias, scores, *given)
    with pytest.raises(IndexError, match=rf"^score_mod bias \(.*{KEY_4}"):
        eval_score_mod_derivative(bias, scores, *given)
    with pytest.raises(IndexError, match=rf"^score_mod_bwd bias_bwd \(.*{KEY_4}"):
        eval_score_mod_bwd(bias_bwd, scores, scores, *given)
    sums = {0: torch.zeros((6, 4), dtype=torch.float64)}
    with pytest.raises(IndexError, match=rf"^score_mod bias \(.*{KEY_4}"):
        add_aux_gradients(bias, sums, (scores, scores), *given)
    with pytest.raises(IndexError, match=rf"^mask_mod place \(.*{KEY_4}"):
        create_block_mask(place, 1, 1, 6, 6, device="cpu", aux_tensors=narrow)
    with pytest.raises(IndexError, match=rf"^mask_mod place \(.*{KEY_4}"):
        compute_block_sparsity(2, 3, 1, 1, 6, 6, place, narrow, device="cpu")
    with pytest.raises(IndexError, match=rf"^mask_mod place \(.*{KEY_4}"):
        plotting._evaluate(place, 6, 6, narrow)


def test_gradients_of_checked_reads() -> None:
    """The distance is no place: reads are checked, and have gradients."""

    def by_distance(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score * aux[0][cutlass.max(q[0] - k[0], 0)]

    table = torch.rand(6)
    scores, grads = torch.rand((2, ROWS, COLS))
    sums = {0: torch.zeros(6, dtype=torch.float64)}
    add_aux_gradients(by_distance, sums, (grads, scores), [table], 0, 0, *INDICES)
    distance = (INDICES[0][:, None] - INDICES[1]).clamp(min=0).long().flatten()
    expected = torch.zeros(6, dtype=torch.float64)
    expected.index_add_(0, distance, (scores * grads).double().flatten())
    torch.testing.assert_close(sums[0], expected)
    with pytest.raises(IndexError, match="at index 5 of dimension 0, whose extent is 5"):
        eval_score_mod_derivative(by_distance, scores, [table[:5]], 0, 0, *INDICES)


def test_positions_that_a_visited_tile_evaluates() -> None:
    """Hidden positions of visited tiles, but not left out tiles or what is past the ends."""
    q = torch.randn((1, 300, 1, 64))
    table = torch.zeros((300, 300))
    call: dict[str, Any] = {"score_mod": bias, "causal": True}
    tiles = {"config": {"tile_m": 128, "tile_n": 128}}
    out, lse = _flash_attn_fwd(q, q, q, aux_tensors=[table], **call, **tiles, return_lse=True)
    # the last row sees the last key; rows of its tile that do not ask as well, from 256 on
    with pytest.raises(IndexError, match=r"index 299 of .* 299 \(.*q_idx 256, kv_idx 299\)"):
        _flash_attn_fwd(q, q, q, aux_tensors=[table[:, :299]], **call, **tiles)
    with pytest.raises(IndexError, match="^score_mod bias .*index 299 of .*extent is 299"):
        _flash_attn_bwd(q, q, q, out, out, lse, aux_tensors=[table[:, :299]], **call)
    # nobody asks past the ends
    _flash_attn_fwd(q[:, :100], q, q, aux_tensors=[table[:100]], score_mod=bias, **tiles)

    def by_distance(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score + aux[0][q[0] - k[0] + 127]

    # tiles that causal masking leaves out would ask for what is before the first distance
    distances = [torch.zeros(427)]
    _flash_attn_fwd(q, q, q, aux_tensors=distances, score_mod=by_distance, causal=True, **tiles)
    with pytest.raises(IndexError, match="at index -1 of dimension 0, whose extent is 427; no"):
        _flash_attn_fwd(q, q, q, aux_tensors=distances, score_mod=by_distance, **tiles)
