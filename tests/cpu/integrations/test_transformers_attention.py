"""The attention half of the door to transformers, against dense attention in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import masking_utils

from flash_mask_cute.integrations.transformers import attention
from flash_mask_cute.integrations.transformers.attention import layer_attention
from flash_mask_cute.integrations.transformers.masks import make_mask

BATCH, HEADS, HEADS_KV, SEQ, DIM = 2, 4, 2, 21, 16
PLACE = torch.arange(SEQ)
CAUSAL = PLACE[:, None] >= PLACE
CU = torch.tensor([0, 8, 9, SEQ], dtype=torch.int32)
OF_DOCUMENT = torch.bucketize(PLACE, CU, right=True)
IN_DOCUMENT = OF_DOCUMENT[:, None] == OF_DOCUMENT
SCALE = 0.4  # not 1 / sqrt(DIM)


class Layer(torch.nn.Module):
    """A layer's module as attention sees it."""

    def __init__(self, is_causal: bool | None = True, dtype: Any = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal
        if dtype is not None:
            self.out = torch.nn.Linear(2, 2, dtype=dtype)
        self.eval()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(batch: int = BATCH, rows: int = SEQ, keys: int = SEQ) -> list[Tensor]:
    shapes = (batch, HEADS, rows, DIM), (batch, HEADS_KV, keys, DIM), (batch, HEADS_KV, keys, DIM)
    return [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def dense(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, bias: Tensor | None = None,
    softcap: float = 0.0, sink: Tensor | None = None, scale: float = SCALE,
) -> Tensor:  # fmt: skip
    """(batch, queries, heads, dim). A row that sees nothing is 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num()
    return (weights @ v).transpose(1, 2)


def attend(*tensors: Any, module: torch.nn.Module | None = None, **options: Any) -> Tensor:
    out, weights = layer_attention(module or Layer(), *tensors, scaling=SCALE, **options)
    assert weights is None and out.is_contiguous()
    return out


def check(found: Tensor, wanted: Tensor, *leaves: Tensor) -> None:
    """The results, and the gradients of leaves."""
    dout = drawn(*wanted.shape, seed=9)
    pairs = [(found, wanted)]
    if leaves:
        ours, theirs = (torch.autograd.grad(x, leaves, dout) for x in (found, wanted))
        pairs += list(zip(ours, theirs, strict=True))
    for result, reference in pairs:
        # the backward starts from an LSE in float32
        torch.testing.assert_close(result, reference, rtol=0, atol=3e-5)


# -- masks that are tensors -----------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_false_hides(heads: int, batch: int) -> None:
    q, k, v = inputs()
    visible = drawn(batch, heads, SEQ, SEQ, seed=3) > 0
    visible[:, :, 5] = False
    out = attend(q, k, v, visible)
    assert not out[:, 5].any()
    check(out, dense(q, k, v, visible), q, k, v)


def test_a_mask_of_keys_and_more_keys_than_there_are() -> None:
    q, k, v = inputs()
    visible = drawn(BATCH, 1, 1, SEQ + 7, seed=4) > 0
    check(attend(q, k, v, visible), dense(q, k, v, visible[..., :SEQ]), q, k, v)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_numbers_are_added_and_learned(heads: int, batch: int) -> None:
    q, k, v = inputs()
    added = drawn(batch, heads, SEQ, SEQ, seed=5).requires_grad_()
    check(attend(q, k, v, added), dense(q, k, v, bias=added), q, k, v, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_least_number_hides_unless_all_is_hidden(dtype: torch.dtype) -> None:
    """A row of nothing but the least number is the mean of all values, as in eager attention."""
    q, k, v = (x.detach().float() for x in inputs())
    least = torch.finfo(dtype).min
    added = torch.where(CAUSAL, 0.0, least).to(dtype)[None, None].clone()
    added[..., 3, :] = least
    out = attend(q, k, v, added)
    # float16 keeps scores next to its least number, 65504
    bias = added.float() if dtype == torch.float16 else torch.where(added == 0, 0.0, -torch.inf)
    wanted = dense(q, k, v, bias=bias)
    if dtype != torch.float16:
        mean = v.repeat_interleave(2, 1).mean(2)
        wanted[:, 3] = mean
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-4)


def test_a_tensor_says_all() -> None:
    """is_causal and sliding_window, which layers give besides, hide nothing more."""
    q, k, v = inputs()
    visible = drawn(BATCH, 1, SEQ, SEQ, seed=3) > 0
    found = attend(q, k, v, visible, is_causal=True, sliding_window=3)
    check(found, dense(q, k, v, visible))


@pytest.mark.parametrize(
    ("mask", "error", "said"),
    [
        (torch.ones(BATCH, SEQ, dtype=torch.bool), ValueError, r"attention_mask .* \(2, 21\)"),
        (torch.ones(SEQ, SEQ), ValueError, r"attention_mask .* \(21, 21\)"),
        (torch.ones(3, 1, SEQ, SEQ), ValueError, r"broadcast .*\(2, 4, 21, 21\).*\(3, 1, 21, 21\)"),
        (torch.ones(1, 2, SEQ, SEQ), ValueError, r"broadcast .*\(1, 2, 21, 21\)"),
        (torch.ones(1, 1, SEQ + 1, SEQ), ValueError, r"broadcast .*\(1, 1, 22, 21\)"),
        (torch.ones(1, 1, SEQ, SEQ - 1), ValueError, r"broadcast .*\(1, 1, 21, 20\)"),
        (torch.ones(1, 1, SEQ, SEQ).long(), TypeError, "attention_mask .* bool, got torch.int64"),
    ],
)
def test_a_tensor_that_does_not_fit(mask: Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attend(*inputs(), mask)


# -- no mask --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_layer", "given", "causal"),
    [(True, None, True), (False, None, False), (None, None, True), (True, False, False),
     (False, True, True)],
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 4])
def test_without_a_mask(
    of_layer: bool | None, given: bool | None, causal: bool, window: int | None
) -> None:
    q, k, v = inputs()
    distance = PLACE[:, None] - PLACE
    visible = torch.ones(SEQ, SEQ, dtype=torch.bool)
    if window is not None:
        visible = distance.abs() < window
    if causal:
        visible = visible & CAUSAL
    options = {"is_causal": given, "sliding_window": window}
    check(attend(q, k, v, None, module=Layer(of_layer), **options), dense(q, k, v, visible))


def test_one_query_sees_the_last_keys() -> None:
    q, k, v = inputs(rows=1)
    check(attend(q, k, v, None), dense(q, k, v))
    near = PLACE > SEQ - 1 - 4
    check(attend(q, k, v, None, sliding_window=4), dense(q, k, v, near))


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": False, "sliding_window": 3}]
)
def test_rows_at_an_unknown_place_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention_mask is None, 5 queries and 21 keys"):
        attend(*inputs(rows=5), None, **options)


def test_cross_attention_sees_all() -> None:
    q, k, v = inputs(rows=5)
    check(attend(q, k, v, None, is_causal=False), dense(q, k, v), q, k, v)


# -- what scores get ------------------------------------------------------------------------------


def masks() -> dict[str, tuple[Any, Tensor | None]]:
    """By name: what attention gets, and what is visible."""

    def both_ends(b: Any, h: Any, q: Any, k: Any) -> Any:
        # two ranges of queries see a key: no intervals
        return (k - q + 3) % 5 < 2

    made = {
        "none": (None, CAUSAL),
        "bools": (CAUSAL[None, None], CAUSAL),
        "window": (make_mask(1, SEQ, SEQ), CAUSAL),
        "columns": (
            make_mask(1, SEQ, SEQ, attention_mask=PLACE[None] > 2), CAUSAL & (PLACE > 2)
        ),
        "mask_mod": (
            make_mask(1, SEQ, SEQ, mask_function=both_ends),
            (PLACE - PLACE[:, None] + 3) % 5 < 2,
        ),
    }  # fmt: skip
    forms = {name: x.form for name, (x, _) in made.items() if name in ("columns", "mask_mod")}
    assert forms == {"columns": "column intervals", "mask_mod": "a mask_mod"}
    return made


@pytest.mark.shares(2)
@pytest.mark.parametrize("kind", ["none", "bools", "window", "columns", "mask_mod"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_bias_softcap_and_sinks(kind: str, packed: bool) -> None:
    """Of T5, Gemma-2 and gpt-oss, all in one call; with documents, too."""
    mask, visible = masks()[kind]
    q, k, v = inputs(batch=1)
    bias = drawn(1, HEADS, SEQ, SEQ + 3, seed=6).requires_grad_()
    sink = drawn(HEADS, seed=7).requires_grad_()
    options = {"softcap": 2.0, "s_aux": sink, "position_bias": bias}
    if packed:
        visible = visible & IN_DOCUMENT
        options |= {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 12}
    found = attend(q, k, v, mask, **options)
    wanted = dense(q, k, v, visible, bias[..., :SEQ], 2.0, sink)
    check(found, wanted, q, k, v, bias, sink)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_bias_of_each_batch_entry_or_of_all(batch: int, heads: int) -> None:
    q, k, v = inputs()
    bias = drawn(batch, heads, SEQ, SEQ, seed=6).requires_grad_()
    visible = drawn(BATCH, HEADS, SEQ, SEQ, seed=3) > -1
    check(attend(q, k, v, visible, position_bias=bias), dense(q, k, v, visible, bias), bias)
    check(attend(q, k, v, None, position_bias=bias), dense(q, k, v, CAUSAL, bias), bias)
    mask = make_mask(BATCH, SEQ, SEQ, attention_mask=visible[:, 0, 0])
    hidden = CAUSAL & visible[:, :1, :1]
    check(attend(q, k, v, mask, position_bias=bias), dense(q, k, v, hidden, bias), bias)
    added = drawn(1, 1, SEQ, SEQ, seed=5).requires_grad_()
    found = attend(q, k, v, added, position_bias=bias)
    check(found, dense(q, k, v, bias=added + bias), bias, added)


@pytest.mark.parametrize("kind", ["none", "bools", "window", "columns", "mask_mod"])
@pytest.mark.parametrize("lengths", [CU, CU.long()], ids=["int32", "int64"])
def test_documents_join_a_mask(kind: str, lengths: Tensor) -> None:
    mask, visible = masks()[kind]
    q, k, v = inputs(batch=1)
    assert visible is not None
    options = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "s_aux": drawn(HEADS, seed=7)}
    found = attend(q, k, v, mask, **options)
    check(found, dense(q, k, v, visible & IN_DOCUMENT, sink=options["s_aux"]), q, k, v)


def test_documents_join_what_is_added() -> None:
    q, k, v = inputs(batch=1)
    added = drawn(1, 1, SEQ, SEQ, seed=5).requires_grad_()
    found = attend(q, k, v, added, cu_seq_lens_q=CU, cu_seq_lens_k=CU)
    check(found, dense(q, k, v, IN_DOCUMENT, added), q, k, v, added)


def test_a_mask_finds_documents_once_for_all_layers() -> None:
    mask = make_mask(1, SEQ, SEQ, attention_mask=PLACE[None] > 2)
    first = mask.packed(CU)
    assert mask.packed(CU) is first and mask.packed(CU.clone()) is not first
    assert first.form == "documents, by column intervals"


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (SEQ, {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU}, r"batch of 2: pass all tokens as one"),
        (SEQ, {"cu_seq_lens_q": CU}, "cu_seq_lens_k is None"),
        (SEQ, {"cu_seq_lens_k": CU}, "cu_seq_lens_q is None"),
    ],
)
def test_lengths_that_do_not_fit(rows: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attend(*inputs(rows=rows), None, **options)


@pytest.mark.parametrize(
    ("extents", "said"),
    [
        ((1, SEQ, SEQ), "batch 1, 21 queries and 21 keys"),
        ((2, SEQ - 1, SEQ), "20 queries and 21 keys"),
        ((2, SEQ, SEQ + 1), "21 queries and 22 keys"),
    ],
)
def test_a_mask_for_other_extents(extents: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"attention_mask was made for .*{said}"):
        attend(*inputs(), make_mask(*extents))


# -- blocks that an indexer chose ------------------------------------------------------------------


class Indexed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.indexer = torch.nn.Module()
        self.indexer.block_size = 16  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["none", "columns", "bools"])
def test_blocks_that_an_indexer_chose(kind: str) -> None:
    """Beside no mask, one of this package, and a tensor."""
    q, k, v = inputs(keys=48, rows=48)
    generator = torch.Generator().manual_seed(1)
    choice = torch.randint(-1, 3, (BATCH, HEADS_KV, 48, 2), generator=generator)
    chosen = (choice[..., None] == torch.arange(48) // 16).any(-2)
    chosen = chosen.repeat_interleave(HEADS // HEADS_KV, 1)
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    mask = None
    if kind == "columns":
        shown = (torch.arange(48) > 2).expand(BATCH, -1)
        mask, causal = make_mask(BATCH, 48, 48, attention_mask=shown), causal & shown[0]
    elif kind == "bools":
        mask = causal = causal & (torch.arange(48) % 5 != 0)
        mask = mask.expand(BATCH, 1, 48, 48)
    out = attend(q, k, v, mask, module=Indexed(), block_indices=choice)
    check(out, dense(q, k, v, chosen & causal), q, k, v)


def test_blocks_of_packed_documents_are_refused() -> None:
    starts = torch.tensor([0, 3, SEQ], dtype=torch.int32)
    choice = torch.zeros(1, HEADS_KV, SEQ, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="block_indices beside cu_seq_lens_q"):
        attend(
            *inputs(1), None, module=Indexed(), block_indices=choice, cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
        )  # fmt: skip


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output_attentions": True}, "output_attentions=True: .*set_attn_implementation"),
        ({"indices": torch.zeros(1)}, "Layer gives indices, the keys that an indexer selected"),
        (
            {"block_indices": torch.zeros(1, HEADS_KV, SEQ, 1).long()},
            "Layer gives block_indices and has no indexer.block_size",
        ),
        ({"sinks": torch.zeros(1)}, "Layer gives sinks, a sink for each query"),
        ({"head_mask": torch.ones(1)}, "Layer gives head_mask"),
    ],
)
def test_what_would_be_wrong_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        attend(*inputs(), None, **options)


def test_arguments_of_other_attention_are_passed_over() -> None:
    q, k, v = inputs()
    rest = {"indices": None, "output_attentions": False, "use_cache": True, "position_ids": PLACE}
    check(attend(q, k, v, None, **rest), dense(q, k, v, CAUSAL))


def test_dropout_is_refused_in_training_alone() -> None:
    q, k, v = inputs()
    check(attend(q, k, v, None, dropout=0.1), dense(q, k, v, CAUSAL))
    with pytest.raises(NotImplementedError, match=r"dropout=0\.1 in training: .*attention_dropout"):
        attend(q, k, v, None, dropout=0.1, module=Layer().train())
    check(attend(q, k, v, None, dropout=0.0, module=Layer().train()), dense(q, k, v, CAUSAL))


def test_wide_heads_are_trained() -> None:
    q, k, v = (drawn(1, heads, SEQ, 512, seed=heads).requires_grad_() for heads in (4, 2, 2))
    check(attend(q, k, v, None), dense(q, k, v, CAUSAL), q, k, v)


@pytest.mark.parametrize(
    ("widest", "width", "said"),
    [(512, 512, None), (512, 520, "520"), (256, 264, "264"), (256, 256, None)],
)
def test_layers_that_are_too_wide_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, widest: int, width: int, said: str | None
) -> None:
    """widest: of the kernels, with gradients or without."""
    monkeypatch.setattr(attention, "widest", lambda device: widest)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, 2, SEQ, width, device="cuda") for _ in range(3))
        k.requires_grad_()
        found = attention.wide_layer(Layer(), q, v)
        assert found == (None if said is None else f"Layer has head dimension {said}")
        if said is not None:
            with pytest.raises(NotImplementedError, match=f"{said}, .*wide_layers='sdpa'"):
                attend(q, k, v, None)


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_norms_in_float32(weights: torch.dtype) -> None:
    """Queries and keys are float32 then, and values and the result have the model's dtype."""
    q, k, v = (x.detach() for x in inputs())
    low = [x.to(weights) for x in (q, k, v)]
    found = attend(q.float(), k.float(), low[2], None, module=Layer(dtype=weights))
    assert found.dtype == weights
    exact = dense(*(x.double() for x in low), CAUSAL)
    bound = 2e-2 if weights == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound)


def test_dtypes_without_a_linear_layer() -> None:
    q, k, v = (x.detach() for x in inputs())
    assert attend(q.float(), k.float(), v.float(), None).dtype == torch.float32
    assert attend(q.float(), k.float(), v.bfloat16(), None).dtype == torch.bfloat16


def test_float32_stays_and_float64_stays() -> None:
    q, k, v = (x.detach() for x in inputs())
    assert attend(q, k, v, None, module=Layer(dtype=torch.float32)).dtype == torch.float64
    out = attend(q.float(), k.float(), v.float(), None, module=Layer(dtype=torch.float32))
    assert out.dtype == torch.float32


def test_autocast() -> None:
    q, k, v = (x.detach().float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k.bfloat16(), v, None, module=Layer(dtype=torch.float32))
    assert found.dtype == torch.bfloat16
    exact = dense(q.double(), k.double(), v.double(), CAUSAL)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=4e-2)


def test_a_quantized_model_says_its_dtype() -> None:
    q, k, v = (x.detach().float() for x in inputs())
    module = Layer(dtype=torch.float32)
    module.config = type("Config", (), {"_is_quantized": True, "dtype": torch.bfloat16})()
    assert attend(q, k, v, None, module=module).dtype == torch.bfloat16


def test_the_transformers_function_that_names_a_row_of_bools() -> None:
    """sdpa's own dense mask, as it is made in a compiled region, says the same as the mask half."""
    q, k, v = inputs()
    padding = drawn(BATCH, SEQ, seed=8) > -1
    table = masking_utils.sdpa_mask(BATCH, SEQ, SEQ, attention_mask=padding)
    found = attend(q, k, v, make_mask(BATCH, SEQ, SEQ, attention_mask=padding))
    check(found, attend(q, k, v, table), q, k, v)
    assert re.match("column intervals", make_mask(BATCH, SEQ, SEQ, attention_mask=padding).form)


def test_the_weights_of_a_layer_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their dtype is that of each call, and a layer that is gone is looked for again."""
    walks = []
    walk = torch.nn.Module.modules
    monkeypatch.setattr(
        torch.nn.Module, "modules", lambda self: walks.append(type(self)) or walk(self)
    )

    class Layer(torch.nn.Module):
        is_causal = True

        def __init__(self, has_weights: bool) -> None:
            super().__init__()
            if has_weights:
                self.q_proj = torch.nn.Linear(8, 8)

    layer, bare = Layer(True), Layer(False)
    qkv = torch.randn(3, 1, 2, 5, 8)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        layer.to(dtype)
        walks.clear()
        for module, expected in ((layer, dtype), (bare, torch.float32)):
            assert layer_attention(module, *qkv, None)[0].dtype == expected
    assert not walks
    layer.q_proj = torch.nn.Linear(8, 8, dtype=torch.float16)
    assert layer_attention(layer, *qkv, None)[0].dtype == torch.float16
    assert walks == [Layer]
