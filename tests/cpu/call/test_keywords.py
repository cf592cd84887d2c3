"""Keywords that a call does not have are answered by what to write instead."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import attend_rows

import flash_mask_cute
import flash_mask_cute.serving  # whose functions have names of arguments, too
from flash_mask_cute import (
    builders,
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flashmask_attention,
)
from flash_mask_cute.call.check import keywords
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

ROOT = Path(flash_mask_cute.__file__).parent
Call = Callable[..., Any]
ATTENTION: tuple[Call, ...] = (
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
    _flash_attn_fwd,
    explain,
)
Q = torch.zeros(1, 5, 2, 16)


def causal(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return q_idx >= kv_idx


def call(function: Call, **more: Any) -> Any:
    if function is create_block_mask:
        return function(causal, 1, 1, 5, 5, **{"device": "cpu"} | more)
    if function is _flash_attn_bwd:
        return function(Q, Q, Q, Q, Q, torch.zeros(1, 2, 5), **more)
    return function(Q, Q, Q, **more)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        # scaled_dot_product_attention
        ("attn_mask", Q > 0,
         r"attn_mask \(got a torch.bool .*\): a bool mask becomes startend_row_ind"),
        ("dropout_p", 0.1, r"dropout_p \(got 0.1 \(float\)\): dropout is not supported, leave"),
        ("is_causal", True, r"is_causal \(got True \(bool\)\): say causal, which aligns the last"),
        ("scale", 0.5, r"scale \(got 0.5 \(float\)\): say softmax_scale"),
        ("enable_gqa", True, r"enable_gqa \(got True \(bool\)\): leave it out"),
        # flash-attn
        ("alibi_slopes", Q,
         r"alibi_slopes \(got a torch.float.*\): say score_mod=alibi, aux_tensors="),
        ("return_attn_probs", True, r"return_attn_probs .*return_lse=True"),
        ("block_table", Q, r"block_table .*page_table"),
        ("cache_seqlens", Q, r"cache_seqlens .*(seqused_k|flash_attn_with_kvcache)"),
        ("q_descale", Q, r"q_descale .*fp8"),
        ("k_cache", Q, r"k_cache .*call flash_attn_with_kvcache"),
        # FlexAttention
        ("block_mask", Q, r"block_mask .*block_sparse_tensors=block_mask.*mask_mod"),
        ("kernel_options", {}, r"kernel_options \(got a dict\): .*config"),
        # Paddle, xformers, Hugging Face
        ("fixed_seed_offset", Q, r"fixed_seed_offset \(got a torch.*\): dropout is not supported"),
        ("rng_name", "seed", r"rng_name \(got 'seed' \(str\)\): dropout is not supported"),
        ("p", 0.5, r"p \(got 0.5 \(float\)\): dropout is not supported"),
        ("attn_bias", Q, r"attn_bias .*score_mod"),
        ("s_aux", Q, r"s_aux .*learnable_sink"),
        ("sliding_window", 128, r"sliding_window \(got 128 \(int\)\): .*window"),
        ("cu_seq_lens_q", Q, r"cu_seq_lens_q .*cu_seqlens_q"),
        # our own, misspelt
        ("causual", True, r"causual \(got True \(bool\)\): did you mean causal\?"),
        ("softmax_scal", 1.0, r"softmax_scal .*did you mean softmax_scale\?"),
        ("nonsense", 3, r"nonsense \(got 3 \(int\)\): it takes q, k, v, "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", ATTENTION, ids=lambda function: function.__name__)
def test_foreign_keywords(function: Call, name: str, value: Any, said: str) -> None:
    message = rf"(?s)^{function.__name__}\(\) has no argument {said}"
    if name in keywords._parameters[function.__name__]:
        # of one library only
        message = f"^{name} must (be|have)"
    with pytest.raises(TypeError, match=message):
        call(function, **{name: value})


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        (flash_attn_func, "window_size_left", r"say window_size=\(left, right\)$"),
        (_flash_attn_fwd, "window_size", "say window_size_left and window_size_right$"),
        (_flash_attn_bwd, "window_size", "say window_size_left and window_size_right$"),
        (_flash_attn_fwd, "block_sparse_tensors", "say block_sparse_tensors_torch$"),
        (flash_attn_func, "block_sparse_tensors_torch", "say block_sparse_tensors$"),
        (flashmask_attention, "return_aux", "say return_lse$"),
        (flash_attn_func, "return_softmax_lse", "say return_lse$"),
        (flash_attn_func, "cu_seqlens_q", r"argument of explain, flash_attn_varlen_func, .*_flash"),
        (
            _flash_attn_fwd,
            "deterministic",
            "deterministic is an argument of explain, flash_attn_func",
        ),
        (_flash_attn_fwd, "dlse", "dlse is an argument of _flash_attn_bwd$"),
        (flashmask_attention, "score_mod", "score_mod is an argument of explain, flash_attn_func"),
        (flash_attn_func, "rng_state", "dropout is not supported, leave it out$"),
        (_flash_attn_bwd, "fixed_seed_offset", "dropout is not supported, leave it out$"),
        (_flash_attn_bwd, "determinstic", r"did you mean deterministic\?$"),
        (create_block_mask, "Q_LEN", "say seqlen_q$"),
        (create_block_mask, "_compile", "leave it out, "),
        (create_block_mask, "block_size", "say BLOCK_SIZE$"),
        (create_block_mask, "aux_tensor", r"did you mean aux_tensors\?$"),
    ],
)
def test_keywords_of_other_calls(function: Call, name: str, said: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument {name} \(got 0 \(int\)\): .*{said}"):
        call(function, **{name: 0})


def test_several_at_once() -> None:
    with pytest.raises(TypeError, match="dropout_p .*: dropout .*; nor is_causal .*: say causal"):
        flash_attn_func(Q, Q, Q, dropout_p=0.1, is_causal=True, attn_mask=None)


# What code for each library passes although it asks for nothing, and a value that does not.
NEUTRAL: dict[str, dict[str, tuple[Any, Any]]] = {
    "flash-attn 2": {
        "dropout_p": (0.0, 0.1), "alibi_slopes": (None, Q), "return_attn_probs": (False, True),
        "block_table": (None, Q), "zero_tensors": (False, True), "leftpad_k": (None, Q),
    },
    "flash-attn 3": {
        "qv": (None, Q), "q_descale": (None, Q), "k_descale": (None, Q), "v_descale": (None, Q),
        "attention_chunk": (0, 64), "sm_margin": (0, 8), "scheduler_metadata": (None, Q),
    },
    "flash-attn 4": {
        "full_block_cnt": (None, Q), "full_block_idx": (None, Q), "mask_block_cnt": (None, Q),
        "mask_block_idx": (None, Q), "block_size": (None, (128, 128)), "min_seqlen_k": (None, 9),
    },
    "Paddle": {
        "dropout": (0, 0.5), "fixed_seed_offset": (None, Q), "rng_name": ("", "seed"),
        "name": (None, "layer"), "block_mask": (None, Q), "return_seed_offset": (False, True),
        "attn_mask_startend_row_indices": (None, Q), "return_softmax": (False, True),
    },
    "SDPA": {
        "attn_mask": (None, Q), "dropout_p": (0, 1), "is_causal": (False, True),
        "scale": (None, 0.5), "enable_gqa": (False, True),
    },
    "xformers": {"attn_bias": (None, Q), "p": (0.0, 0.1), "scale": (None, 2.0), "op": (None, Q)},
    "Transformers": {
        "attention_mask": (None, Q), "scaling": (None, 0.5), "sliding_window": (None, 3),
        "output_attentions": (False, True), "position_ids": (None, Q), "s_aux": (None, Q),
        "cu_seq_lens_q": (None, Q), "head_mask": (None, Q),
    },
}  # fmt: skip


@pytest.mark.parametrize("library", NEUTRAL)
@pytest.mark.parametrize("function", ATTENTION, ids=lambda function: function.__name__)
def test_values_that_ask_for_nothing(function: Call, library: str) -> None:
    q = torch.randn(1, 5, 2, 16, generator=torch.Generator().manual_seed(0)).double()
    taken = keywords._parameters[function.__name__]
    foreign = {name: x for name, x in NEUTRAL[library].items() if name not in taken}
    target = {"target": "sm_90a"} if function is explain else {}
    given = [q.bfloat16() if function is explain else q] * 3
    plain = function(*given, **target)
    found = function(*given, **target, **{name: neutral for name, (neutral, _) in foreign.items()})
    if function is explain:
        assert str(found) == str(plain)
    else:
        pairs = (x if isinstance(x, tuple) else (x,) for x in (found, plain))
        assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
    for name, (_, other) in foreign.items():
        with pytest.raises(TypeError, match=rf"no argument {name} \(got"):
            function(*given, **target, **{name: other})


def test_values_that_look_as_if_they_asked_for_nothing() -> None:
    """Another type than the library's, None where it decides something, and names of nobody."""
    for name, value in {
        "dropout_p": False, "dropout": torch.tensor(0.0), "is_causal": None, "sm_margin": False,
        "return_attn_probs": 0, "causual": None, "nonsense": False,
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"no argument {name}"):
            flash_attn_func(Q, Q, Q, **{name: value})


def test_values_that_ask_for_nothing_when_compiled_or_for_a_cache() -> None:
    compiled = torch.compile(flash_attn_func, backend="eager", fullgraph=True)
    q = torch.randn(1, 5, 2, 16)
    expected = flash_attn_func(q, q, q, causal=True)
    neutral = {"dropout_p": 0.0, "alibi_slopes": None, "return_attn_probs": False}
    assert torch.equal(compiled(q, q, q, causal=True, **neutral), expected)
    cached = flash_attn_with_kvcache(q, q, q, causal=True, block_table=None, alibi_slopes=None)
    assert torch.allclose(cached, expected, atol=1e-6)
    plain = create_block_mask(causal, 1, 1, 5, 5, device="cpu")
    lists = create_block_mask(causal, 1, 1, 5, 5, device="cpu", _compile=False)
    assert torch.equal(lists.mask_block_cnt, plain.mask_block_cnt)


def test_what_is_raised_inside_is_not_touched() -> None:
    """A TypeError of a callable of the user, though it reads like one of binding."""

    def mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
        raise TypeError("got an unexpected keyword argument 'dropout_p'")

    with pytest.raises(TypeError) as raised:
        flash_attn_func(Q, Q, Q, mask_mod=mask_mod)
    assert "has no argument" not in str(raised.value)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        flash_attn_func(Q, Q)  # type: ignore[call-arg]


def test_signatures_tell_what_a_call_takes() -> None:
    for function in (*ATTENTION[:4], _flash_attn_bwd, create_block_mask):
        parameters = inspect.signature(function).parameters
        assert "unknown" not in parameters
        # and calls them by the names by which they refuse
        assert keywords._parameters[function.__name__] == tuple(parameters)
    called = [
        ast.literal_eval(node.args[0])
        for path in ROOT.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse_keywords"
    ]
    importlib.import_module("flash_mask_cute.statistics")  # registers its names when it loads
    assert sorted(called) == sorted(keywords._parameters)


def test_names_that_are_recommended_exist() -> None:
    taken = {name for names in keywords._parameters.values() for name in names}
    assert {name for ours in keywords._SAME for name in ours} <= taken
    for advice in keywords._ADVICE.values():
        for name in re.findall(r"builders\.(\w+)", advice):
            assert callable(getattr(builders, name))


def test_the_alibi_that_is_recommended(tmp_path: Path) -> None:
    """Its text is run as it is told."""
    path = tmp_path / "told.py"
    path.write_text(f"import cutlass.cute as cute\n\n\n{keywords.ALIBI}")
    told = runpy.run_path(str(path))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 16, generator=generator).double() for _ in range(3))
    slopes = torch.tensor([0.5, 0.25])
    out = flash_attn_func(q, k, v, score_mod=told["alibi"], aux_tensors=[slopes])
    position = torch.arange(9)
    bias = -slopes[:, None, None] * (position[:, None] - position).abs()
    assert torch.allclose(out, attend_rows(q, k, v, bias=bias).out, atol=1e-6)


def test_explain_takes_both_spellings() -> None:
    q = torch.zeros(1, 300, 2, 64)
    lists = create_block_mask(causal, 1, 1, 300, 300, device="cpu")
    more = {"target": "sm_90a"}
    assert str(explain(q, q, q, window_size=(20, -1), block_sparse_tensors=lists, **more)) == str(
        explain(q, q, q, window_size_left=20, block_sparse_tensors_torch=lists, **more)
    )
    for name, value in (("window_size_left", 3), ("window_size_right", None)):
        said = rf"^window_size and {name} are both given.*got a tuple and {value}"
        with pytest.raises(ValueError, match=said):
            explain(q, q, q, window_size=(3, 0), **{name: value})
    with pytest.raises(ValueError, match="^block_sparse_tensors and block_sparse_tensors_torch"):
        explain(q, q, q, block_sparse_tensors=lists, block_sparse_tensors_torch=lists)
    with pytest.raises(ValueError, match="^window_size must be .left, right., got 3"):
        explain(q, q, q, window_size=3)
