"""What kernels cannot take as it is, and what they get instead; without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import BF16, FP32, FP64, Case
from eager import assert_close_to_oracle
from inputs import make_inputs
from launch_recorder import Recorder
from torch import Tensor

from flash_mask_cute import explain, flash_attn_func, interface
from flash_mask_cute.call import forward as host_launch
from flash_mask_cute.call.copies import (
    LEAST_SCALE,
    Copy,
    input_conversion,
    sink_conversion,
    split_scale,
)
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

SHAPE = (2, 24, 6, 64)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16)


def late(elements: int = 1) -> Tensor:
    tensor = normal(torch.Size(SHAPE).numel() + elements)[elements:].view(SHAPE)
    assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 2 * elements % 16
    return tensor


UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "every second": (lambda: normal(*SHAPE, 2)[..., 0], "its last stride is 2"),
    "one number": (lambda: normal(1, 1, 1, 1).expand(SHAPE), "its last stride is 0"),
    "transposed": (lambda: normal(64, 2, 24, 6).movedim(0, -1), "its last stride is 288"),
    "odd rows": (lambda: normal(2, 24, 6, 68)[..., :64], "it has a stride of 68 elements"),
    "expanded": (lambda: normal(2, 24, 1, 64).expand(SHAPE), "it has a stride of 0 elements"),
    "one late": (late, "it starts 2 bytes past a multiple of 16"),
    "four late": (lambda: late(4), "it starts 8 bytes past a multiple of 16"),
}
READABLE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: normal(*SHAPE),
    "eight late": lambda: late(8),
    "by head": lambda: normal(2, 6, 24, 64).transpose(1, 2),
    "slice": lambda: normal(2, 24, 3, 6, 64)[:, :, 1],
    "overlapping": lambda: normal(9000).as_strided(SHAPE, (4096, 128, 32, 1)),
}
by_form = pytest.mark.parametrize("form", UNREADABLE)


@by_form
def test_why_a_tensor_is_copied(form: str) -> None:
    make, why = UNREADABLE[form]
    tensor = make()
    to = input_conversion(tensor)
    assert isinstance(to, Copy) and to.why == why
    copy = to(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous() and input_conversion(copy) is None


@pytest.mark.parametrize("form", READABLE)
def test_what_is_not_copied(form: str) -> None:
    assert input_conversion(READABLE[form]()) is None


def test_scales_become_positive() -> None:
    assert split_scale(0.3) == (1.0, 0.3) and split_scale(-0.3) == (-1.0, 0.3)
    assert split_scale(0.0) == split_scale(-0.0) == split_scale(-1e-39) == (0.0, 1.0)
    assert split_scale(LEAST_SCALE) == (1.0, LEAST_SCALE)
    tensor = normal(*SHAPE).transpose(1, 2)
    to = input_conversion(tensor, -1.0)
    assert isinstance(to, Copy) and to.why == "times -1 for a negative softmax_scale"
    assert torch.equal(to(tensor), -tensor) and to(tensor).is_contiguous()
    both = input_conversion(late(), 0.0)
    assert isinstance(both, Copy)
    assert both.why == "it starts 2 bytes past a multiple of 16, times 0 for a softmax_scale of 0"
    # as a scale of 0 would
    assert both(torch.tensor([torch.inf, 1.0, -1.0]))[0].isnan()


def test_sinks() -> None:
    for sink in (torch.zeros(6), torch.zeros(6, dtype=BF16)):
        assert sink_conversion(sink) is None
    to = sink_conversion(torch.zeros(12, dtype=FP64)[::2])
    assert isinstance(to, Copy) and to.why == "from float64 to float32, its stride is 2"
    sink = torch.arange(6, dtype=FP64)
    assert torch.equal(to(sink), sink.float()) and to(sink).dtype == FP32
    strided = torch.randn(12, dtype=FP64).to(BF16)[::2]
    to = sink_conversion(strided)
    assert to is not None and to(strided).is_contiguous() and torch.equal(to(strided), strided)


# -- launches, with functions that only take notes ----------------------------------------------


@by_form
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_forward_copies_in_each_call(recorder: Recorder, form: str, which: int) -> None:
    tensors = [normal(*SHAPE) for _ in range(3)]
    _flash_attn_fwd(*tensors)
    tensors[which] = UNREADABLE[form][0]()
    for _ in range(3):
        out, _ = _flash_attn_fwd(*tensors)
        given = recorder.calls[-1]
        assert given[3] is out and out.is_contiguous()
        for i in range(3):
            assert (given[i] is tensors[i]) == (i != which)
        copy = given[which]
        assert torch.equal(copy, tensors[which])
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
    # found again; an aligned tensor with the same metadata has another launch
    assert len(recorder.prepared) == 2
    if "late" in form:
        tensors[which] = tensors[which].clone()
        _flash_attn_fwd(*tensors)
        assert recorder.calls[-1][which] is tensors[which]
        assert len(recorder.prepared) == 2


def test_each_start_has_a_launch_of_its_own(recorder: Recorder) -> None:
    given: list[list[Tensor]] = [
        [late() if bits >> i & 1 else normal(*SHAPE) for i in range(3)] for bits in range(8)
    ]
    for tensors in given * 2:
        _flash_attn_fwd(*tensors)
        for x, seen in zip(tensors, recorder.calls[-1][:3], strict=True):
            assert (seen is x) == (x.data_ptr() % 16 == 0)
    assert len(recorder.prepared) == 8


@pytest.mark.parametrize(("scale", "positive"), [(-0.3, 0.3), (0.0, 1.0), (0, 1.0), (-1e-40, 1.0)])
def test_a_forward_with_another_scale(recorder: Recorder, scale: float, positive: float) -> None:
    q, k, v = (normal(*SHAPE) for _ in range(3))
    for _ in range(2):
        _flash_attn_fwd(q, k, v, softmax_scale=scale)
        seen = recorder.calls[-1]
        assert torch.equal(seen[0], q * (-1.0 if scale == -0.3 else 0.0))
        assert seen[1] is k and seen[2] is v and seen[5] == positive
    assert len(recorder.prepared) == 1


def test_a_scale_in_a_tensor_is_read_in_each_call(recorder: Recorder) -> None:
    tensors = [normal(*SHAPE) for _ in range(3)]
    scale = torch.tensor(0.5)
    for value in (0.5, 0.25, 0.5):
        _flash_attn_fwd(*tensors, softmax_scale=scale.fill_(value))
        assert recorder.calls[-1][5] == value
    assert len(recorder.prepared) == 2


def test_a_sink_of_float64(recorder: Recorder) -> None:
    q, k, v = (normal(*SHAPE) for _ in range(3))
    sink = torch.randn(6, dtype=FP64)
    _flash_attn_fwd(q, k, v, learnable_sink=sink)
    assert recorder.calls[0][0] is q
    assert recorder.calls[0][13].dtype == FP32 and torch.equal(recorder.calls[0][13], sink.float())
    assert recorder.prepared[0].problem.sink_dtype == "float32"


def test_a_call_for_another_gpu_copies_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign that is taken twice would be none."""
    q, k, v = (normal(*SHAPE) for _ in range(3))
    _flash_attn_fwd(q, k, v, softmax_scale=-1.0)
    (launch,) = interface._prepared_fwd.values()
    devices = [0, 1]
    monkeypatch.setattr(launch, "_index", 1)
    monkeypatch.setattr(host_launch, "current_device", lambda: devices.pop(0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(host_launch, "tile_counter", lambda q, index: None)
    _flash_attn_fwd(q, k, v, softmax_scale=-1.0)
    assert not devices and torch.equal(recorder.calls[-1][0], -q)


def test_autograd_keeps_what_the_caller_has(recorder: Recorder) -> None:
    q, k, v = (UNREADABLE[form][0]() for form in ("every second", "expanded", "one late"))
    saved: list[int] = []
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()) or x,  # type: ignore[func-returns-value]
        lambda x: x,
    ):
        flash_attn_func(*leaves, softmax_scale=-0.1)
    assert saved[:3] == [x.data_ptr() for x in (q, k, v)]
    _flash_attn_fwd(*leaves, softmax_scale=-0.1)
    for given in recorder.calls:
        assert not any(x.requires_grad for x in given[:3])


def test_explain_lists_copies() -> None:
    q, k, v = (UNREADABLE[form][0]() for form in ("one late", "expanded", "every second"))
    found = explain(q, k, v, softmax_scale=-0.1, learnable_sink=torch.zeros(6, dtype=FP64))
    assert found.copies == (
        "q (it starts 2 bytes past a multiple of 16, times -1 for a negative softmax_scale); "
        "k (it has a stride of 0 elements); v (its last stride is 2); "
        "learnable_sink (from float64 to float32)"
    )
    assert f"\ncopies             {found.copies}" in str(found)
    plain = explain(normal(*SHAPE), k, normal(*SHAPE))
    assert plain.copies == "k (it has a stride of 0 elements)"
    plain = explain(*(normal(*SHAPE) for _ in range(3)))
    assert plain.copies == "" and "copies             none" in str(plain)
    # which no kernel takes
    assert explain(q.float(), k.float(), v.float(), softmax_scale=torch.tensor(0)).copies == ""


# -- results on the CPU -------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*UNREADABLE, *READABLE])
def test_strides_change_no_bit(form: str) -> None:
    make = UNREADABLE[form][0] if form in UNREADABLE else READABLE[form]
    tensors = [normal(*SHAPE) for _ in range(3)]
    for which in range(3):
        given = list(tensors)
        given[which] = make()
        plain = [x.clone(memory_format=torch.contiguous_format) for x in given]
        dout = normal(*SHAPE)
        results = []
        for q, k, v in (given, plain):
            out, lse = _flash_attn_fwd(q, k, v, causal=True)
            assert lse is not None
            if q is plain[0]:
                assert torch.equal(out, results[0][0])
            # outputs with strides of their own, as the operands
            strided = torch.empty_like(torch.stack((out, out), -1)).select(-1, 0).copy_(out)
            results.append((out, lse, *_flash_attn_bwd(q, k, v, strided, dout, lse, causal=True)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_outputs_that_kernels_cannot_write_are_refused() -> None:
    q = normal(*SHAPE)
    with pytest.raises(ValueError, match="^out must be contiguous in its last dimension, got"):
        _flash_attn_fwd(q, q, q, out=normal(*SHAPE, 2)[..., 0])
    out, lse = _flash_attn_fwd(q, q, q)
    assert lse is not None
    for name in ("dq", "dk", "dv"):
        wrong: dict[str, Any] = {name: normal(64, 2, 24, 6).movedim(0, -1)}
        with pytest.raises(ValueError, match=f"^{name} must be contiguous in its last dimension"):
            _flash_attn_bwd(q, q.clone(), q.clone(), out, q.clone(), lse, **wrong)


def test_a_window_in_which_nobody_sees_anything() -> None:
    for case in (
        Case("empty", 2, 70, 90, dtype=FP64, head_dim=16, window_left=-5, window_right=4),
        Case("empty-causal", 2, 90, 70, dtype=FP64, head_dim=16, causal=True, window_left=-2),
    ):
        inputs = make_inputs(case)
        out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
        assert lse is not None
        assert (out == 0).all() and lse.isneginf().all()
        assert_close_to_oracle(out, lse, inputs)
