"""User callables on the CPU against what torch computes from the same definition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from mask_cases import MASK_MODS, SCORE_MODS, Extents, MaskRecipe, ScoreRecipe
from torch import Tensor

from flash_mask_cute.mods import on_cpu
from flash_mask_cute.mods.on_cpu import (
    eval_mask_mod,
    eval_score_mod,
    eval_score_mod_bwd,
    eval_score_mod_derivative,
)

EXTENTS = Extents(batch=2, heads_q=3, seqlen_q=70, seqlen_k=90)
GENERATOR = torch.Generator().manual_seed(0)
Q_IDX = torch.tensor([69, 0, 3, 3, 17, 40], dtype=torch.int32)
K_IDX = torch.arange(1, 90, 2, dtype=torch.int32)


def aux_of(recipe: MaskRecipe | ScoreRecipe) -> list[Tensor] | None:
    return None if recipe.aux is None else [recipe.aux(EXTENTS, GENERATOR)]


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each compilation."""
    kinds: list[str] = []
    compile_mod = on_cpu._compile

    def counting(kind: str, *args: Any) -> Callable[..., None]:
        kinds.append(kind)
        return compile_mod(kind, *args)

    monkeypatch.setattr(on_cpu, "_compile", counting)
    monkeypatch.setattr(on_cpu, "_compiled", {})
    return kinds


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    recipe = MASK_MODS[name]
    aux = aux_of(recipe)
    for b, h in ((0, 0), (1, 2)):
        visible = eval_mask_mod(recipe.cute, aux, b, h, Q_IDX, K_IDX)
        expected = recipe.dense(b, h, Q_IDX[:, None], K_IDX[None], aux)
        assert visible.dtype == torch.bool
        assert torch.equal(visible, expected)
        assert visible.any() and not visible.all()


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    recipe = SCORE_MODS[name]
    aux = aux_of(recipe)
    scores = torch.randn((len(K_IDX), len(Q_IDX)), generator=GENERATOR).T
    before = scores.clone()
    for b, h in ((0, 0), (1, 2)):
        modified = eval_score_mod(recipe.cute, scores, aux, b, h, Q_IDX, K_IDX)
        expected = recipe.dense(scores.double(), b, h, Q_IDX[:, None], K_IDX[None], aux)
        torch.testing.assert_close(modified.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores, before)


def _reads_rank_1(score, b, h, q, k, aux):
    return aux[0][k[0]].to(cutlass.Float32)


READERS = (
    _reads_rank_1,
    lambda score, b, h, q, k, aux: aux[0][h[0], k[0]].to(cutlass.Float32),
    lambda score, b, h, q, k, aux: aux[0][h[0], q[0], k[0]].to(cutlass.Float32),
    lambda score, b, h, q, k, aux: aux[0][b[0], h[0], q[0], k[0]].to(cutlass.Float32),
)
DTYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "rank"),
    [*((dtype, 4) for dtype in DTYPES), (DTYPES[0], 1), (DTYPES[1], 2), (DTYPES[3], 3)],
    ids=str,
)
def test_aux_tensors_of_any_strides(dtype: torch.dtype, rank: int, compiles: list[str]) -> None:
    b, h = 1, 2
    shape = (2, 3, 70, 90)[4 - rank :] if rank > 2 else (3, 90)[2 - rank :]
    dense = torch.randint(-999, 999, shape, generator=GENERATOR).to(dtype)
    wide = torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2].copy_(dense)
    transposed = dense.mT.contiguous().mT if rank > 1 else dense
    expected = dense[(b, h)[4 - rank :]] if rank > 2 else dense[h if rank == 2 else slice(None)]
    expected = (expected[Q_IDX] if rank > 2 else expected.expand(len(Q_IDX), -1))[:, K_IDX]
    broadcast = dense[:1].expand(shape) if rank == 4 else dense
    scores = torch.zeros((len(Q_IDX), len(K_IDX)))
    for aux in (dense, wide, transposed):
        read = eval_score_mod(READERS[rank - 1], scores, [aux], b, h, Q_IDX, K_IDX)
        assert torch.equal(read, expected.float())
    if rank == 4:
        read = eval_score_mod(READERS[3], scores, [broadcast], b, h, Q_IDX, K_IDX)
        assert torch.equal(read, dense[0, h][Q_IDX][:, K_IDX].float())
    assert compiles == ["score_mod"]


def test_one_compilation_for_all_sizes_and_one_for_each_meaning(compiles: list[str]) -> None:
    def nearer_than(distance: int) -> Callable[..., Any]:
        return lambda b, h, q, k, aux: q - k < distance

    for distance in (5, 9, 5):
        for rows, cols in ((3, 7), (1, 1), (0, 4), (64, 0), (65, 130)):
            q_idx = torch.arange(rows, dtype=torch.int32)
            k_idx = torch.arange(2 * cols, dtype=torch.int32)[::2]
            visible = eval_mask_mod(nearer_than(distance), None, 0, 0, q_idx, k_idx)
            assert torch.equal(visible, q_idx[:, None] - k_idx < distance)
    assert len(compiles) == 2


def test_aux_tensors_of_another_dtype_compile_anew(compiles: list[str]) -> None:
    scores = torch.zeros((len(Q_IDX), len(K_IDX)))
    for dtype in (torch.float32, torch.float16, torch.float32):
        aux = [torch.full((90,), 3, dtype=dtype)]
        assert (eval_score_mod(_reads_rank_1, scores, aux, 0, 0, Q_IDX, K_IDX) == 3).all()
    assert len(compiles) == 2


THRESHOLD = 4


def _below_threshold(b, h, q, k, aux):
    return q < THRESHOLD


def test_a_changed_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for threshold in (4, 50):
        monkeypatch.setattr(sys.modules[__name__], "THRESHOLD", threshold)
        visible = eval_mask_mod(_below_threshold, None, 0, 0, Q_IDX, K_IDX)
        assert torch.equal(visible, (Q_IDX[:, None] < threshold).expand(-1, len(K_IDX)))


def _approximate(score, b, h, q, k, aux):
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};",
        write_only_types=[cutlass.Float32],
        read_only_args=[score[0]],
    )


@pytest.mark.parametrize(
    ("mod", "instruction"),
    [
        (_approximate, "nvvm.inline_ptx"),
        (lambda score, b, h, q, k, aux: cute.arch.rcp_approx(score[0]), "nvvm.rcp"),
        (lambda score, b, h, q, k, aux: cute.math.erf(score), "math.erf"),
    ],
)
def test_gpu_instructions_are_refused_by_name(mod: Callable[..., Any], instruction: str) -> None:
    scores = torch.zeros((len(Q_IDX), len(K_IDX)))
    with pytest.raises(NotImplementedError, match=instruction):
        eval_score_mod(mod, scores, None, 0, 0, Q_IDX, K_IDX)


def test_mathematics_of_the_cpu() -> None:
    def functions(score, b, h, q, k, aux):
        return (
            cute.math.tanh(score, fastmath=True)
            + cute.math.exp2(score, fastmath=True)
            + cute.math.log(score * score + 1.0)
            + cute.where(q >= k, score, cute.full_like(score, 0.0)) / 3.0
        )

    x = torch.randn((len(Q_IDX), len(K_IDX)), generator=GENERATOR)
    modified = eval_score_mod(functions, x, None, 0, 0, Q_IDX, K_IDX)
    expected = x.tanh() + x.exp2() + (x * x + 1).log() + (Q_IDX[:, None] >= K_IDX) * x / 3
    torch.testing.assert_close(modified, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("aux", "error", "text"),
    [
        (torch.zeros(3, dtype=torch.complex64), TypeError, r"aux_tensors\[1\].*complex64"),
        (torch.zeros(3, dtype=torch.uint16), TypeError, r"aux_tensors\[1\].*torch\.uint16"),
        (torch.zeros(()), ValueError, r"aux_tensors\[1\] must have 1 to 4 dimensions"),
        (torch.zeros((1,) * 5), ValueError, r"aux_tensors\[1\] must have 1 to 4 dimensions"),
        (torch.zeros(3, device="meta"), ValueError, r"aux_tensors\[1\] must be on .*meta"),
    ],
)
def test_aux_tensors_that_are_refused(aux: Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        eval_mask_mod(_below_threshold, [torch.zeros(3), aux], 0, 0, Q_IDX, K_IDX)


def test_aux_tensors_that_are_missing() -> None:
    @cute.jit
    def documents(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return aux[0][q[0]] == aux[0][k[0]]

    def scaled(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return grad * aux[0][h[0]]

    indices = torch.arange(4), torch.arange(4)
    with pytest.raises(
        ValueError, match=r"^mask_mod documents \(.* reads aux_tensors, and the call"
    ):
        eval_mask_mod(documents, None, 0, 0, *indices)
    grads = scores = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"^score_mod_bwd scaled \(.*\) reads aux_tensors"):
        eval_score_mod_bwd(scaled, grads, scores, None, 0, 0, *indices)


@pytest.mark.parametrize(
    ("mod", "kind"),
    [
        (lambda b, h, q, k, aux: [True], "builtins.list"),
        (lambda b, h, q, k, aux: torch.ones(1), "torch.Tensor"),
        (lambda b, h, q, k, aux: 1j, "builtins.complex"),
    ],
    ids=["list", "tensor", "complex"],
)
def test_what_a_mod_must_not_return(mod: Callable[..., Any], kind: str) -> None:
    with pytest.raises(TypeError, match=f"one value that the compiler knows, got .* a {kind}"):
        eval_mask_mod(mod, None, 0, 0, torch.arange(2), torch.arange(2))


def test_a_mod_must_return_one_value() -> None:
    grads = scores = torch.zeros(2, 2)
    place = None, 0, 0, torch.arange(2), torch.arange(2)
    with pytest.raises(TypeError, match=r"^mask_mod <lambda> \(.* returned None: .* whether"):
        eval_mask_mod(lambda b, h, q, k, aux: None, *place)
    with pytest.raises(TypeError, match=r"^score_mod <lambda> \(.* returned None: .* the modified"):
        eval_score_mod(lambda s, b, h, q, k, aux: None, scores, *place)
    with pytest.raises(
        TypeError, match="^score_mod_bwd .* returned None: .* the gradient by the score"
    ):
        eval_score_mod_bwd(lambda g, s, b, h, q, k, aux: None, grads, scores, *place)

    def two(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return cute.full((2,), True, cutlass.Boolean)

    with pytest.raises(TypeError, match="one value, got a vector of shape"):
        eval_mask_mod(two, None, 0, 0, torch.arange(2), torch.arange(2))


@cute.jit
def _branches(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return s[0] > 0.0 if q[0] >= k[0] else q[0] > 1


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k, aux: s > 0,
        lambda s, b, h, q, k, aux: (s > 0)[0],
        lambda s, b, h, q, k, aux: (s > 0)[0].ir_value(),
        lambda s, b, h, q, k, aux: q >= k,
        lambda s, b, h, q, k, aux: True,
        _branches,
    ],
    ids=["vector", "scalar", "value", "indices", "constant", "branch"],
)
def test_a_condition_is_no_score(mod: Callable[..., Any]) -> None:
    """As a number it would be 0 or 1."""
    place = None, 0, 0, torch.arange(2), torch.arange(2)
    scores = torch.ones(2, 2)
    for evaluate in (eval_score_mod, eval_score_mod_derivative):
        with pytest.raises(TypeError, match="^score_mod .* a Boolean.*mask_mod.*cute.where"):
            evaluate(mod, scores, *place)
    with pytest.raises(TypeError, match="^score_mod_bwd .* returned a Boolean: .*cute.where"):
        eval_score_mod_bwd(lambda grad, *others: mod(*others), scores, scores, *place)


def test_other_numbers_are_scores() -> None:
    q, k = torch.arange(2).int(), torch.arange(3).int()
    scores = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    after = q[:, None] >= k
    for mod, expected in (
        (lambda s, b, h, q, k, aux: 1, torch.ones(2, 3)),
        (lambda s, b, h, q, k, aux: 0.5, torch.full((2, 3), 0.5)),
        (lambda s, b, h, q, k, aux: q - k, (q[:, None] - k).float()),
        (lambda s, b, h, q, k, aux: (q - k)[0], (q[:, None] - k).float()),
        (lambda s, b, h, q, k, aux: s[0].ir_value(), scores),
        (lambda s, b, h, q, k, aux: s * (q >= k), scores * after),
        (lambda s, b, h, q, k, aux: (q >= k).to(cutlass.Float32), after.float()),
        (lambda s, b, h, q, k, aux: cute.where(s > 0, s, 0.0), scores.relu()),
    ):
        assert torch.equal(eval_score_mod(mod, scores, None, 0, 0, q, k), expected)


def test_scalars_may_be_taken_inside_a_branch() -> None:
    """The compiler would make invalid code of it, a crash, if they were computed there first."""

    @cute.jit
    def below(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q[0] > 2 * k[0] if k[0] > 1 else q[0] < 3

    q, k = torch.arange(8, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    expected = torch.where(k > 1, q[:, None] > 2 * k, q[:, None] < 3)
    assert torch.equal(eval_mask_mod(below, None, 0, 0, q, k), expected)
