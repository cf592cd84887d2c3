"""What is wrong in a user callable is said with the callable's name, the line, and what to write.

The same callables are given to the CPU path and compiled for both architectures.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch

from flash_mask_cute import create_block_mask
from flash_mask_cute.interface import _flash_attn_fwd, explain
from flash_mask_cute.mods.on_cpu import (
    eval_mask_mod,
    eval_score_mod,
    eval_score_mod_bwd,
    eval_score_mod_derivative,
)

AUX = [torch.ones(200, dtype=torch.int32), torch.ones((200, 200), dtype=torch.int32)]
INDICES = torch.arange(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
TRUTH_VALUE = "asks for the truth value of a vector: write & for and, | for or, ~ for not"


def line_of(mod: Callable[..., Any], marked: str = "# here") -> str:
    """Where a callable's text has a mark, or else where it begins, as `file:line`."""
    plain = inspect.unwrap(mod)
    lines, first = inspect.getsourcelines(plain)
    at = next((i for i, line in enumerate(lines) if marked in line), None)
    if at is None:
        return f"{inspect.getsourcefile(plain)}:{plain.__code__.co_firstlineno}"
    return f"{inspect.getsourcefile(plain)}:{first + at}"


# -- mistakes, and what is said of them ----------------------------------------------------------


@cute.jit
def by_and(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    near = k > q - 5
    return (k <= q) and near  # here


@cute.jit
def by_or(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (k <= q) or (k < 3)  # here


@cute.jit
def by_chain(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return 0 <= k <= 5  # here


@cute.jit
def by_not(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return not (q < k)  # here


@cute.jit
def by_if(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    visible = k <= q
    if q > 2:  # here
        visible = k > q
    return visible


@cute.jit
def by_if_expression(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (k <= q) if q > 2 else (k > q)  # here


@cute.jit
def by_while(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    visible = k <= q
    while visible:  # here
        visible = k > q
    return visible


def plain_and(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    near = k > q - 5
    return (k <= q) and near  # here


def plain_or(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (k <= q) or (k < 3)  # here


def plain_if(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    if q > 2:  # here
        return k <= q
    return k > q


def shifts(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (q >> 1) == (k >> 1)


@cute.jit
def no_such_tensor(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    visible = k[0] <= q[0]
    if q[0] > 1:
        visible = aux[3][k[0]] == 1  # here
    return visible


JOINED = "; or compute with numbers, q_idx[0], under @cute.jit"
MISTAKES: dict[Callable[..., Any], tuple[type[Exception], str]] = {
    by_and: (TypeError, "joins vectors by `and`: write (a) & (b), also for a < b < c" + JOINED),
    by_or: (TypeError, "joins vectors by `or`: write (a) | (b)" + JOINED),
    by_chain: (TypeError, "joins vectors by `and`: write (a) & (b), also for a < b < c" + JOINED),
    by_not: (TypeError, "negates a vector by `not`: write ~a, or the opposite comparison" + JOINED),
    by_if: (TypeError,
            "chooses by a vector, in an `if`: write cute.where(condition, x, y)" + JOINED),
    by_if_expression: (
        TypeError,
        "chooses by a vector, in `x if condition else y`: write cute.where(condition, x, y)",
    ),
    by_while: (TypeError, "loops while a vector is true: loop on a number, q_idx[0]"),
    **dict.fromkeys(
        (
            *(plain_and, plain_or, plain_if),
            lambda b, h, q, k, aux: not (q < k),
            lambda b, h, q, k, aux: 0 <= k <= 5,
            lambda b, h, q, k, aux: (k <= q) if q > 2 else (k > q),
        ),
        (TypeError, TRUTH_VALUE),
    ),
    shifts: (TypeError, "does something with a vector that the compiler has no code for; if it"),
    lambda b, h, q, k, aux: cute.where(q[0] > 2, k <= q, k > q): (
        TypeError,
        "has a number for the condition of cute.where: write cutlass.select_(condition, x, y)",
    ),
    no_such_tensor: (ValueError, "reads aux_tensors[3], and the call passes 2 tensors"),
    lambda b, h, q, k, aux: aux[2][k[0]] == 1: (
        ValueError, "reads aux_tensors[2], and the call passes 2 tensors",
    ),
    lambda b, h, q, k, aux: aux[h[0]][k[0]] == 1: (TypeError, "picks from aux_tensors by "),
    lambda b, h, q, k, aux: aux[0][k] == 1: (
        ValueError,
        "indexes aux_tensors[0] by a vector: write numbers, aux_tensors[0][kv_idx[0]]",
    ),
    lambda b, h, q, k, aux: aux[0][q[0], k[0]] == 1: (
        ValueError,
        "indexes aux_tensors[0] by 2: it takes as many numbers as the tensor has dimensions, 1, as "
        "in aux_tensors[0][kv_idx[0]]",
    ),
    lambda b, h, q, k, aux: aux[1][(k[0],)] == 1: (
        ValueError,
        "indexes aux_tensors[1] by 1: it takes as many numbers as the tensor has dimensions, 2, as "
        "in aux_tensors[1][q_idx[0], kv_idx[0]]",
    ),
}  # fmt: skip


def said(kind: str, mod: Callable[..., Any], text: str) -> str:
    return "^" + re.escape(f"{kind} {mod.__name__} ({line_of(mod)}) {text}")


@pytest.mark.parametrize("mod", MISTAKES, ids=lambda mod: mod.__name__)
def test_mistakes(mod: Callable[..., Any]) -> None:
    error, text = MISTAKES[mod]
    with pytest.raises(error, match=said("mask_mod", mod, text)):
        eval_mask_mod(mod, AUX, 0, 0, *INDICES)


def as_score_mod(mod: Callable[..., Any]) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return cute.where(mod(b, h, q, k, aux), score, 0.0)

    return score_mod


@pytest.mark.shares(3)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("mod", [by_and, plain_or, no_such_tensor], ids=lambda mod: mod.__name__)
def test_mistakes_in_kernels(mod: Callable[..., Any], target: str) -> None:
    """Also of what a callable calls: its name is that of the callable, the line is where it is."""
    error, text = MISTAKES[mod]
    q = torch.zeros((1, 128, 1, 64), dtype=torch.bfloat16)
    with pytest.raises(error, match=said("mask_mod", mod, text)):
        explain(q, q, q, mask_mod=mod, aux_tensors=AUX, target=target)
    expected = "^" + re.escape(f"score_mod score_mod ({line_of(mod)}) {text}")
    with pytest.raises(error, match=expected):
        explain(q, q, q, score_mod=as_score_mod(mod), aux_tensors=AUX, target=target)


def test_mistakes_in_other_calls_on_the_cpu() -> None:
    text = MISTAKES[by_and][1]
    with pytest.raises(TypeError, match=said("mask_mod", by_and, text)):
        create_block_mask(by_and, 1, 1, 64, 64, device="cpu")
    q = torch.zeros((1, 8, 1, 64))
    with pytest.raises(TypeError, match=said("mask_mod", by_and, text)):
        _flash_attn_fwd(q, q, q, mask_mod=by_and)
    scores = torch.zeros(4, 4)
    score_mod = as_score_mod(by_and)
    expected = "^" + re.escape(f"score_mod score_mod ({line_of(by_and)}) {text}")
    for evaluate in (eval_score_mod, eval_score_mod_derivative):
        with pytest.raises(TypeError, match=expected):
            evaluate(score_mod, scores, AUX, 0, 0, *INDICES)

    def gradient(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return grad * aux[5][k[0]]  # here

    with pytest.raises(ValueError, match=said("score_mod_bwd", gradient, "reads aux_tensors[5]")):
        eval_score_mod_bwd(gradient, scores, scores, AUX, 0, 0, *INDICES)


def test_what_is_right() -> None:
    """Beside each mistake, what its text says to write; `~` negates vectors and numbers."""
    q, k = INDICES[0][:, None], INDICES[1][None]

    @cute.jit
    def numbers(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return not (q[0] < k[0]) and (0 <= k[0] <= 2 or q[0] == 3)

    for mod, expected in (
        (lambda b, h, q, k, aux: (k <= q) & (k > q - 2), (k <= q) & (k > q - 2)),
        (lambda b, h, q, k, aux: ~(q < k), q >= k),
        (lambda b, h, q, k, aux: ~(q < k) & ~(k == 1), (q >= k) & (k != 1)),
        (lambda b, h, q, k, aux: ~(q[0] < k[0]), q >= k),
        (lambda b, h, q, k, aux: ~(q - 4) == k, 3 - q == k),
        (lambda b, h, q, k, aux: cute.where(q > 2, k <= q, k > q), (q > 2) == (k <= q)),
        (numbers, (q >= k) & ((k <= 2) | (q == 3))),
    ):
        assert torch.equal(eval_mask_mod(mod, None, 0, 0, *INDICES), expected)


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mod", "found"),
    [
        (lambda b, h, q, k, aux: 1, "1"),
        (lambda b, h, q, k, aux: 0.0, "0.0"),
        (lambda b, h, q, k, aux: q - k, "a number, Int32"),
        (lambda b, h, q, k, aux: (q - k)[0], "a number, Int32"),
        (lambda b, h, q, k, aux: (q - k)[0].ir_value(), "a number, Int32"),
        (lambda b, h, q, k, aux: q.to(cutlass.Float32), "a number, Float32"),
        (lambda b, h, q, k, aux: (q > k) * (k > 1).to(cutlass.Int32), "a number, Int32"),
        (lambda b, h, q, k, aux: aux[0][k[0]], "a number, Int32"),
    ],
    ids=["int", "float", "vector", "scalar", "value", "float vector", "product", "element"],
)
def test_a_number_is_no_condition(mod: Callable[..., Any], found: str) -> None:
    text = re.escape(
        f"mask_mod <lambda> ({line_of(mod)}) returned {found}: it must return whether the score "
        "counts, a condition; of a number write (number != 0), and True or False for a constant"
    )
    with pytest.raises(TypeError, match="^" + text):
        eval_mask_mod(mod, AUX, 0, 0, *INDICES)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_number_is_no_answer_in_a_kernel(target: str) -> None:
    def nearby(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q - k

    q = torch.zeros((1, 128, 1, 64), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=said("mask_mod", nearby, "returned a number, Int32")):
        explain(q, q, q, mask_mod=nearby, target=target)


def test_constant_results() -> None:
    for answer in (True, False):
        seen = eval_mask_mod(lambda b, h, q, k, aux, x=answer: x, None, 0, 0, *INDICES)
        assert (seen == answer).all()


# -- functions that only GPUs have ---------------------------------------------------------------


def _asinh(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    twice = 2.0 * score
    return cute.math.asinh(twice)  # here


def _acosh(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.acosh(score[0] + 2.0, fastmath=True)  # here


@cute.jit
def _atanh(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.atanh(score)  # here


def _cbrt(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + cute.math.cbrt(score)  # here


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", ["asinh", "acosh", "atanh", "cbrt"])
def test_functions_without_code_for_a_cpu(name: str) -> None:
    mod = globals()[f"_{name}"]
    text = said("score_mod", mod, f"uses math.{name}, which exists only for GPUs: use CUDA tensors")
    for evaluate in (eval_score_mod, eval_score_mod_derivative):
        with pytest.raises(NotImplementedError, match=text):
            evaluate(mod, torch.zeros(4, 4), None, 0, 0, *INDICES)
    q = torch.zeros((1, 128, 1, 64), dtype=torch.bfloat16)
    explain(q, q, q, score_mod=mod, target="sm_90a")


def test_the_others_have_it() -> None:
    """All at once: each adds its value to the score."""
    names = [
        "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor",
        "log", "log10", "log1p", "log2", "rcp", "round", "roundeven", "rsqrt", "sin", "sinh",
        "sqrt", "tan", "tanh", "trunc",
    ]  # fmt: skip

    def applied(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return sum((getattr(cute.math, name)(score) for name in names), 0.0 * score)

    x = torch.full((4, 4), 0.7)
    of_torch = {"rcp": "reciprocal", "roundeven": "round"}
    expected = sum(getattr(torch, of_torch.get(name, name))(x.double()) for name in names)
    found = eval_score_mod(applied, x, None, 0, 0, *INDICES)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


# -- functions that know no values of a kernel ----------------------------------------------------


@cute.jit
def by_math_of_a_number(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score * math.exp(score[0])  # here


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (
            lambda score, b, h, q, k, aux: score * math.exp(score),
            "another library's function (must be real number",
        ),
        (by_math_of_a_number, "makes a Python number of a value of the kernel"),
        (
            lambda score, b, h, q, k, aux: score * float(q[0]),
            "makes a Python number of a value of the kernel",
        ),
        (
            lambda score, b, h, q, k, aux: score * [1.0, 2.0][h[0]],
            "makes a Python number of a value of the kernel",
        ),
        (lambda score, b, h, q, k, aux: torch.exp(score), "another library's function (exp()"),
        (lambda score, b, h, q, k, aux: np.exp(score), "another library's function (loop of ufunc"),
    ],
)
def test_functions_of_other_libraries(mod: Callable[..., Any], says: str) -> None:
    expected = f"score_mod {mod.__name__} ({line_of(mod)}) "
    with pytest.raises(TypeError) as caught:
        eval_score_mod(mod, torch.zeros(4, 4), None, 0, 0, *INDICES)
    assert str(caught.value).startswith(expected) and says in str(caught.value)
    assert "cute.math.exp(x)" in str(caught.value)


@pytest.mark.parametrize("values", [[1.0, 2.0], (1.0, 2.0)])
def test_a_list_indexed_by_a_vector(values: Any) -> None:
    def by_head(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score * values[h]  # here

    says = "indexes a Python list or tuple by a vector: pass a tensor in aux_tensors instead"
    with pytest.raises(TypeError, match=says) as caught:
        eval_score_mod(by_head, torch.zeros(4, 4), None, 0, 0, *INDICES)
    assert f"by_head ({line_of(by_head)})" in str(caught.value)


def test_a_nested_aux_tensor_of_block_lists() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(TypeError, match=r"aux_tensors\[0\] must be one tensor, got a nested one"):
        create_block_mask(lambda b, h, q, k, aux: q >= k, 1, 1, 16, 16, "cpu", aux_tensors=[nested])
