"""The public backward: empty problems, refusals, what reaches the kernels, and their code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bwd_calls import NAN, bwd_keywords, square_scores, square_scores_bwd
from cases import BF16, FP32, Case, int32
from inputs import make_inputs
from mask_cases import MASK_MODS, SCORE_MODS
from on_cuda import OnCuda
from planned import backward_call, planned
from torch import Tensor

from flash_mask_cute import interface
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, retile_lists
from flash_mask_cute.call import facts as facts_module
from flash_mask_cute.call import prepare
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.backward import EmptyBackward, KernelBackward
from flash_mask_cute.call.build_backward import BwdKernels
from flash_mask_cute.call.check.validate import check_inputs
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.call.tiles.config import select_bwd_config
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime import plain_tensors
from flash_mask_cute.runtime.target import Target


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (3, 0, 5), (3, 5, 0), (3, 0, 0)]
)
def test_problems_of_size_zero(batch: int, seqlen_q: int, seqlen_k: int, packed: bool) -> None:
    """What the GPU path does where there are no keys or no queries, against the CPU path."""
    q, k = torch.randn(batch, seqlen_q, 4, 16), torch.randn(batch, seqlen_k, 2, 16)
    keywords: dict[str, Any] = {"learnable_sink": torch.randn(4)}
    if batch and seqlen_q:
        keywords["seqused_q"] = int32(2, 0, 5)
    if packed:
        # a row more than the sequences have
        q, k = torch.cat([q.flatten(0, 1), torch.randn(1, 4, 16)]), k.flatten(0, 1)
        keywords["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32) * seqlen_q
        keywords["cu_seqlens_k"] = torch.arange(batch + 1, dtype=torch.int32) * seqlen_k
    out, lse = _flash_attn_fwd(q, k, k, **keywords)
    assert lse is not None
    operands = q, k, k, out, torch.randn_like(out), lse
    keywords["dlse"] = torch.randn_like(lse)
    expected_dsink = torch.full((4,), NAN)
    expected = _flash_attn_bwd(*operands, **keywords, dsink=expected_dsink)
    dsink = torch.full((4,), NAN)
    call = backward_call(*operands, **keywords, dsink=dsink)
    found_plan = planned(call)
    assert found_plan.shapes.is_empty or (packed and batch and seqlen_k)
    found = EmptyBackward(found_plan)(call.tensors)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and (x == 0).all() and (y == 0).all()
    torch.testing.assert_close(dsink, expected_dsink)
    assert (expected_dsink != 0).any() == bool(batch and seqlen_q)


# -- refusals -----------------------------------------------------------------------------------


def arguments() -> dict[str, Any]:
    """Of a good call: q (2, 24, 6, 64), k (2, 40, 2, 64), v (2, 40, 2, 32)."""
    return {
        "q": torch.zeros(2, 24, 6, 64, dtype=BF16),
        "k": torch.zeros(2, 40, 2, 64, dtype=BF16),
        "v": torch.zeros(2, 40, 2, 32, dtype=BF16),
        "out": torch.zeros(2, 24, 6, 32, dtype=BF16),
        "dout": torch.zeros(2, 24, 6, 32, dtype=BF16),
        "lse": torch.zeros(2, 6, 24),
    }


SINK = torch.zeros(6, dtype=BF16)

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "forward's": ({"softcap": -1.0}, ValueError, ("softcap", "-1.0")),
    "out_type": ({"out": None}, TypeError, ("out must be a torch.Tensor", "None")),
    "out_shape": ({"out": torch.zeros(2, 24, 6, 64, dtype=BF16)}, ValueError,
                  ("out must have", "(2, 24, 6, 32)", "(2, 24, 6, 64)")),
    "dout_type": ({"dout": 3}, TypeError, ("dout must be a torch.Tensor", "3")),
    "dout_dtype": ({"dout": torch.zeros(2, 24, 6, 32)}, TypeError,
                   ("dout must have the dtype of q", "float32")),
    "dout_shape": ({"dout": torch.zeros(2, 24, 6, 16, dtype=BF16)}, ValueError,
                   ("dout must have", "(2, 24, 6, 32)", "(2, 24, 6, 16)")),
    "dout_device": ({"dout": torch.zeros(2, 24, 6, 32, dtype=BF16, device="meta")}, ValueError,
                    ("dout must be on", "meta")),
    "lse_none": ({"lse": None}, TypeError, ("lse must be a torch.Tensor", "None")),
    "lse_dtype": ({"lse": torch.zeros(2, 6, 24, dtype=BF16)}, TypeError, ("lse", "bfloat16")),
    "lse_shape": ({"lse": torch.zeros(2, 24, 6)}, ValueError, ("lse", "(2, 6, 24)", "(2, 24, 6)")),
    "dlse_dtype": ({"dlse": torch.zeros(2, 6, 24).double()}, TypeError, ("dlse", "float64")),
    "dlse_shape": ({"dlse": torch.zeros(6, 24)}, ValueError, ("dlse", "(2, 6, 24)", "(6, 24)")),
    "deterministic": ({"deterministic": 1}, TypeError, ("deterministic", "1 (int)")),
    "score_mod_bwd_alone": ({"score_mod_bwd": square_scores_bwd}, ValueError,
                            ("score_mod_bwd", "score_mod", "function")),
    "score_mod_bwd_arguments": (
        {"score_mod": square_scores, "score_mod_bwd": lambda grad, score: grad},
        TypeError,
        ("score_mod_bwd must take the arguments (grad, score, b_idx,", "<lambda>(grad, score)"),
    ),
    "score_mod_bwd_type": ({"score_mod": square_scores, "score_mod_bwd": 3}, TypeError,
                           ("score_mod_bwd must be callable", "3")),
    "dsink_alone": ({"dsink": SINK}, ValueError, ("dsink", "learnable_sink", "(6,)")),
    "dsink_dtype": ({"learnable_sink": SINK, "dsink": SINK.float()}, TypeError,
                    ("dsink must have the dtype", "bfloat16", "float32")),
    "dsink_shape": (
        {"learnable_sink": SINK, "dsink": SINK[:2]},
        ValueError,
        ("dsink must have the shape", "(6,)", "(2,)"),
    ),
    "dq_shape": ({"dq": torch.zeros(2, 24, 2, 64, dtype=BF16)}, ValueError,
                 ("dq must have the shape of q", "(2, 24, 6, 64)", "(2, 24, 2, 64)")),
    "dk_dtype": ({"dk": torch.zeros(2, 40, 2, 64)}, TypeError,
                 ("dk must have the dtype of q", "float32")),
    "dv_expanded": ({"dv": torch.zeros(1, 40, 2, 32, dtype=BF16).expand(2, -1, -1, -1)}, ValueError,
                    ("dv must not overlap itself", "(0,")),
    "config_type": ({"config": 64}, TypeError, ("config", "BwdConfig", "int")),
    "config_key": ({"config": {"tile_n": 64}}, ValueError, ("config", "tile_n")),
    "config_value": ({"config": {"tile_m": 96}}, ValueError, ("tile_m", "96")),
    "lists": ({"block_sparse_tensors_torch": 3}, TypeError, ("block_sparse_tensors_torch",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_argument_and_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("something was prepared")

    monkeypatch.setattr(prepare, "CpuBackward", fail)
    change, error, said = REFUSALS[name]
    with pytest.raises(error) as caught:
        _flash_attn_bwd(**(arguments() | change))
    for words in said:
        assert words in str(caught.value)


def test_a_good_call_is_not_refused() -> None:
    _flash_attn_bwd(**arguments(), deterministic=True)


def on_cuda(**change: Any) -> dict[str, Any]:
    return {
        name: x.as_subclass(OnCuda) if isinstance(x, Tensor) else x
        for name, x in (arguments() | change).items()
    }


def call_with(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **more: Any) -> AttentionCall:
    return backward_call(q, k, v, out, dout, lse, **more)


def test_a_gpu_takes_what_the_cpu_does() -> None:
    check_inputs(call_with(**on_cuda()))
    wide = {name: torch.zeros(2, 24, 2, 136, dtype=BF16) for name in ("q", "k", "v")}
    like = {name: torch.zeros(2, 24, 2, 136, dtype=BF16) for name in ("out", "dout")}
    lse = torch.zeros(2, 2, 24)
    check_inputs(call_with(**on_cuda(**wide, **like, lse=lse)))
    _flash_attn_bwd(**wide, **like, lse=lse)


class OnBlackwell(OnCuda):
    is_cuda = True  # type: ignore[assignment]


plain_tensors.PLAIN_TYPES += (OnBlackwell,)


def test_tiles_that_blackwell_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface.Target, "from_device", lambda device: Target.named("sm_100a"))
    wide = {
        name: x if name == "lse" else x.new_zeros((*x.shape[:-1], 160))
        for name, x in arguments().items()
    }
    given = {name: x.as_subclass(OnBlackwell) for name, x in wide.items()}
    with pytest.raises(ValueError, match="tile_m must be 64 on Blackwell for 160/160, got 128"):
        _flash_attn_bwd(**given, config={"tile_m": 128})


# -- what reaches the kernels -------------------------------------------------------------------


class Recorder:
    """Stands for the compiled kernels; `prepared` holds the plan of each miss."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.prepared: list[ExecutionPlan] = []

    def prepare(self, call: AttentionCall) -> KernelBackward:
        found = planned(call, Target.default())
        found = found.without_bits or found
        # a CTA for all heads of a group; `test_group_splits.py` has the others
        choice = found.bwd_choice
        choice = replace(choice, tiles=replace(choice.tiles, splits_group=False), group_splits=1)
        found = replace(found, choice=choice)
        self.prepared.append(found)
        kernels = BwdKernels._make(map(self._kernel, BwdKernels._fields))
        assert found.gradients is not None
        if not any(found.gradients.padding):
            kernels = kernels._replace(zero_padding=None)
        kernels = kernels._replace(add_parts=None)
        return KernelBackward(found, kernels)

    def _kernel(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, args))

    def last(self) -> tuple[tuple[Any, ...], ...]:
        """The arguments of the last call's kernels, but of those that follow on dQ's."""
        begin = max(i for i, (name, _) in enumerate(self.calls) if name == "preprocess")
        names, args = zip(*self.calls[begin:], strict=True)
        assert names[:3] == BwdKernels._fields[:3]
        return args[:3]


@pytest.fixture
def recorder(bwd_recorder: Recorder) -> Recorder:
    return bwd_recorder


def call(**change: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _flash_attn_bwd(**(arguments() | change))


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in pairs)


def test_arguments_arrive_in_the_kernels_order(recorder: Recorder) -> None:
    given = arguments()
    used_q, used_k, dlse = int32(5, 24), int32(6, 40), torch.zeros(2, 6, 24)
    dq, dk, dv = _flash_attn_bwd(
        **given, softmax_scale=0.5, window_size_left=7, window_size_right=3, softcap=20,
        learnable_sink=SINK, seqused_q=used_q, seqused_k=used_k, dlse=dlse,
        dsink=torch.empty_like(SINK),
    )  # fmt: skip
    before, main, after = recorder.last()
    q, k, v, out, dout, lse = given.values()
    tile_m = recorder.prepared[0].choice.tiles.tile_m
    stats, dq_accum, semaphores, parts = *main[4:7], before[8]
    assert stats.shape == (6, 2, 2 * tile_m + 4) and dq_accum.shape == (6, 2, tile_m * 64)
    assert parts.shape == semaphores.shape == (6, 2)
    assert {x.dtype for x in (stats, dq_accum, parts)} == {FP32} and semaphores.dtype == torch.int32

    of_rows = (out, dout, lse, dlse, stats, None, semaphores, SINK, parts, None, used_q, q, None)
    assert same(before, of_rows)
    counter = main[18]
    assert counter.dtype == torch.int32 and counter.tolist() == [0, 0]
    assert same(
        main,
        (
            q, k, v, dout, stats, dq_accum, semaphores, dk, dv, 0.5, None, None, used_q,
            used_k, 7, 3, None, 20.0, counter, None, None, None, None, None,
        ),
    )  # fmt: skip
    assert same(after, (dq_accum, semaphores, dq, 0.5, None, used_q))


def test_packed_sequences(recorder: Recorder) -> None:
    """New gradients are zeroed where they have rows that belong to no sequence."""
    edges_q, edges_k = int32(0, 9, 40), int32(0, 5, 70)
    shapes = {"q": (48, 6, 64), "k": (80, 2, 64), "v": (80, 2, 32), "out": (48, 6, 32)}
    tensors = {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}
    tensors |= {"dout": tensors["out"].clone(), "lse": torch.zeros(6, 48)}

    def run(**more: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _flash_attn_bwd(**tensors, cu_seqlens_q=edges_q, **more)

    dq, dk, dv = run(cu_seqlens_k=edges_k)
    before, main, after = recorder.last()
    tile_m = recorder.prepared[0].choice.tiles.tile_m
    assert main[4].shape == (6, 48 // tile_m + 2, 2 * tile_m)
    assert before[9] is main[10] is after[4] is edges_q and main[11] is edges_k
    assert before[7:9] == (None, None)
    assert recorder.calls[-1][0] == "zero_padding"
    assert same(recorder.calls[-1][1], (dq, dk, dv, edges_q, edges_k))

    # what is the caller's stays as it is
    dq, _, dv = run(cu_seqlens_k=edges_k, dk=torch.zeros_like(tensors["k"]))
    assert same(recorder.calls[-1][1], (dq, None, dv, edges_q, edges_k))
    run(cu_seqlens_k=edges_k, dk=dk, dv=dv)
    assert same(recorder.calls[-1][1][1:], (None, None, edges_q, None))
    run(cu_seqlens_k=edges_k, dq=dq, dk=dk, dv=dv)
    assert recorder.calls[-1][0] == "postprocess"

    # slots of one length have no tail
    for name in ("k", "v"):
        tensors[name] = tensors[name].view(2, 40, 2, -1)
    dq, _, _ = run()
    assert same(recorder.calls[-1][1], (dq, None, None, edges_q, None))


def test_the_sink_goes_nowhere_without_dsink(recorder: Recorder) -> None:
    call(learnable_sink=SINK)
    assert recorder.last()[0][7:9] == (None, None)


def test_dsink_is_the_sum_over_row_blocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(name: str) -> Callable[..., None]:
        def kernel(*args: Any) -> None:
            if name == "preprocess":
                args[8].copy_(torch.arange(args[8].numel()).view(args[8].shape))

        return kernel

    monkeypatch.setattr(recorder, "_kernel", fill)
    dsink = torch.full_like(SINK, NAN)
    call(learnable_sink=SINK, dsink=dsink)
    assert dsink.tolist() == [1.0, 5.0, 9.0, 13.0, 17.0, 21.0]


def test_daux_is_the_rounded_sum(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are zeros of the aux tensor's shape, for those that are wanted."""
    seen: list[Any] = []

    def fill(name: str) -> Callable[..., None]:
        def kernel(*args: Any) -> None:
            if name == "main":
                seen.append(args[21])
                for x in args[21] or ():
                    assert x.dtype == FP32 and (x == 0).all()
                    x.copy_(torch.arange(x.numel()).view(x.shape) + 1 / 3)

        return kernel

    monkeypatch.setattr(recorder, "_kernel", fill)
    aux = [torch.zeros(2, 3, dtype=BF16), torch.zeros(4), torch.zeros(9, dtype=torch.int32)]
    daux = [torch.full_like(aux[0], NAN), torch.full_like(aux[1], NAN), None]
    given = {"score_mod": SCORE_MODS["scale"].cute, "aux_tensors": aux}
    call(**given, daux=daux)
    call(**given, daux=[None, daux[1], None])
    call(**given)
    assert [x and [y.shape for y in x] for x in seen] == [[(2, 3), (4,)], [(4,)], None]
    assert [x.problem.wants_aux for x in recorder.prepared] == [(0, 1), (1,), ()]
    expected = torch.arange(6).view(2, 3) + 1 / 3
    assert daux[0] is not None and torch.equal(daux[0], expected.to(BF16))
    with pytest.raises(ValueError, match=r"daux\[1\] must have the shape of aux_tensors\[1\]"):
        call(**given | {"aux_tensors": [aux[0], torch.zeros(8), aux[2]]}, daux=daux)


def test_daux_is_0_without_a_score_mod(recorder: Recorder) -> None:
    (limit,) = daux = [torch.full((1,), NAN)]
    mod = MASK_MODS["checks"].cute
    call(mask_mod=mod, aux_tensors=[torch.zeros(1)], daux=daux, deterministic=True)
    assert limit.tolist() == [0.0] and recorder.last()[1][21] is None
    assert recorder.prepared[0].problem.wants_aux == ()


def test_a_warm_call_is_one_look_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(dict[Any, Any]):
        look_ups = 0

        def __getitem__(self, key: Any) -> Any:
            self.look_ups += 1
            return super().__getitem__(key)

    launches = Counting()
    monkeypatch.setattr(interface, "_prepared_bwd", launches)
    call(causal=True)
    monkeypatch.setattr(facts_module, "check_inputs", None)
    monkeypatch.setattr(interface, "prepare_bwd", None)
    fresh = arguments()
    dq, dk, dv = _flash_attn_bwd(**fresh, causal=True)
    assert launches.look_ups == 2 and len(launches) == 1
    before, main, after = recorder.last()
    expected = (*(fresh[name] for name in ("q", "k", "v", "dout")), dk, dv, dq)
    found = (*main[:4], *main[7:9], after[2])
    assert all(x is y for x, y in zip(found, expected, strict=True))
    assert before[0] is fresh["out"]
    assert [x.shape for x in (dq, dk, dv)] == [fresh[name].shape for name in "qkv"]


WARM: dict[str, Any] = {
    "seqused_k": int32(40, 40),
    "window_size_left": 9,
    "score_mod": square_scores,
}


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": 0.3},
        {"causal": True},
        {"window_size_left": 8},
        {"window_size_right": 8},
        {"softcap": 3.0},
        {"learnable_sink": SINK},
        {"learnable_sink": SINK, "dsink": SINK.clone()},
        {"seqused_q": int32(24, 24)},
        {"seqused_k": None},
        {"max_seqlen_q": 40},
        {"dlse": torch.zeros(2, 6, 24)},
        {"lse": torch.zeros(2, 24, 6).mT},
        {"dout": torch.zeros(2, 24, 6, 40, dtype=BF16)[..., :32]},
        {"dk": torch.zeros(2, 40, 2, 64, dtype=BF16)},
        {"score_mod": None},
        {"score_mod_bwd": square_scores_bwd},
        {"mask_mod": MASK_MODS["checks"].cute},
        {"startend_row_indices": torch.zeros(1, 1, 40, 2, dtype=torch.int32), "q_start": 0},
        {"deterministic": True},
        {"config": {"tile_m": 64}},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_differs_is_prepared_anew(change: dict[str, Any], recorder: Recorder) -> None:
    call(**WARM)
    for _ in range(2):
        call(**WARM | change)
    assert len(recorder.prepared) == 2


def test_masks_arrive_in_the_kernels_form(recorder: Recorder) -> None:
    """Lists as bits, of any block size and even where tiles nest; made once, bounds too."""
    cnt, idx = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lists = BlockSparseTensorsTorch(cnt, idx, block_size=(128, 128))
    columns = ColumnMask(torch.zeros(1, 1, 40, 1, dtype=torch.int32), causal=True)
    aux = [torch.zeros(2, 40, dtype=torch.int32)]
    more = {
        "block_sparse_tensors_torch": lists,
        "startend_row_indices": columns,
        "q_start": 0,
        "mask_mod": MASK_MODS["documents"].cute,
        "aux_tensors": aux,
    }
    kept = []
    for _ in range(2):
        call(**more)
        aux_tensors, _, _, (indices, bounds), bits, *rest = recorder.last()[1][16:]
        assert rest == [None, None, 0]
        assert aux_tensors[0] is aux[0] and indices is columns.startend_row_indices
        assert bounds.shape == (1, 1, 2, 1)
        kept.append((bounds, *bits))
    _, visible, full, block_q, block_k = kept[0]
    assert (visible.tolist(), full.tolist(), block_q, block_k) == ([[[[1]]]], [[[[0]]]], 128, 128)
    assert all(x is y for x, y in zip(*kept, strict=True))
    # a forward whose tiles do not nest needs the same bits
    shared = retile_lists(lists, 192, 80, 24, 40).bits
    assert shared is not None and shared.visible is visible and shared.full is full
    (resolved,) = recorder.prepared
    assert resolved.problem.is_causal and resolved.problem.intervals == (1, True)
    assert (resolved.problem.has_bits, resolved.problem.has_lists) == (True, False)


def test_output_gradients_that_kernels_cannot_read_are_copied(recorder: Recorder) -> None:
    good = torch.randn(2, 24, 6, 32).to(BF16)
    flat = torch.randn(good.numel() + 1).to(BF16)
    bad = {
        "expanded": good[:, :1].expand_as(good),
        "transposed": good.transpose(1, 3).contiguous().transpose(1, 3),
        "odd stride": torch.randn(2, 24, 6, 36).to(BF16)[..., :32],
        "odd address": flat[1:].view(good.shape),
    }
    for name, dout in bad.items():
        for _ in range(2):
            call(dout=dout)
            before, main, _ = recorder.last()
            assert before[1] is main[3] is not dout, name
            assert main[3].is_contiguous() and main[3].data_ptr() % 16 == 0, name
            assert torch.equal(main[3], dout), name
    padded = torch.randn(2, 24, 6, 40).to(BF16)[..., :32]
    by_heads = good.transpose(1, 2).contiguous().transpose(1, 2)
    for dout in (good, padded, by_heads):
        call(dout=dout)
        assert recorder.last()[1][3] is dout


def test_extents_of_one_get_strides_that_tma_takes(recorder: Recorder) -> None:
    given = {
        name: x[:1].as_strided((1, *x.shape[1:]), (3, *x.stride()[1:]))
        for name, x in arguments().items()
        if name != "lse"
    }
    _flash_attn_bwd(**given, lse=torch.zeros(1, 6, 24))
    before, main, after = recorder.last()
    for x in (*before[:2], *main[:4], *main[7:9], after[2]):
        assert x.shape[0] == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1])


def late(like: Tensor) -> Tensor:
    return torch.randn(like.numel() + 1).to(BF16)[1:].view(like.shape)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_operands_that_kernels_cannot_read_are_copied(name: str, recorder: Recorder) -> None:
    """In each call, of a launch that is found again; those of other calls are not."""
    good = arguments()[name]
    bad = (late(good), torch.randn(*good.shape, 2).to(BF16)[..., 0], good[:, :1].expand_as(good))
    places = {
        "q": [(1, 0)],
        "k": [(1, 1)],
        "v": [(1, 2)],
        "out": [(0, 0)],
        "dout": [(0, 1), (1, 3)],
    }
    call()
    for x in bad:
        for _ in range(2):
            call(**{name: x})
            for kernel, position in places[name]:
                copy = recorder.last()[kernel][position]
                assert copy is not x and torch.equal(copy, x)
                assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
    assert len(recorder.prepared) == 4
    call(**{name: good})
    assert recorder.last()[places[name][0][0]][places[name][0][1]] is good


def test_misaligned_gradients_never_hit(recorder: Recorder) -> None:
    call(dq=torch.zeros(2, 24, 6, 64, dtype=BF16))
    for _ in range(2):
        call(dq=late(torch.zeros(2, 24, 6, 64)))
    assert len(recorder.prepared) == 3


@pytest.mark.parametrize(("scale", "positive"), [(-0.3, 0.3), (0.0, 1.0)])
def test_scales_that_are_not_positive(recorder: Recorder, scale: float, positive: float) -> None:
    """The main kernel gets q with the sign, so dk is right; dq takes the sign in the end."""
    q = torch.randn(2, 24, 6, 64).to(BF16)
    call(q=q, softmax_scale=scale)
    _, main, after = recorder.last()
    assert torch.equal(main[0], q * (-1.0 if scale else 0.0))
    assert main[9] == positive and after[3] == scale


def test_a_sink_of_float64(recorder: Recorder) -> None:
    sink = torch.randn(6, dtype=torch.float64)
    call(learnable_sink=sink, dsink=torch.empty_like(sink))
    before = recorder.last()[0]
    assert before[7].dtype == FP32 and torch.equal(before[7], sink.float())
    gradients = recorder.prepared[0].gradients
    assert gradients is not None and gradients.sink_dtype == "float32"


# -- configuration and code ---------------------------------------------------------------------


CLEARS_DQ = BwdConfig(clears_dq=True)


def test_values_stay_in_registers_as_far_as_these_go() -> None:
    def value_cols(dim: int, kind: str, **given: Any) -> int:
        return select_bwd_config(dim, dim, kind, BwdConfig(**given)).tiles.value_cols

    assert [value_cols(128, kind) for kind in ("causal", "other", "edges")] == [64, 64, 32]
    assert value_cols(128, "mask_mod") == 32
    assert [value_cols(64, kind) for kind in ("full", "other", "mask_mod")] == [48, 16, 64]
    assert value_cols(256, "full") == 0 and value_cols(128, "other", value_cols=0) == 0
    # where the table's do not fit beside what is given, none
    assert value_cols(80, "full", tile_m=128, stages_kv=1) == 0
    for dim, cols, why in (
        (128, 80, "more than a thread has registers for"),
        (128, 40, "a multiple of 16, got 40"),
        (192, 16, "0 where head_dim is above 128"),
    ):
        with pytest.raises(ValueError, match=why):
            value_cols(dim, "full", value_cols=cols)
    with pytest.raises(ValueError, match=r"config.value_cols must be at least 0, got -16"):
        call(config={"value_cols": -16})


def test_dq_is_cleared_for_many_keys_and_sums_without_an_order() -> None:
    def clears_dq(kind: str = "causal", seqlen_k: int = 32768, dim: int = 128, **more: Any) -> bool:
        return select_bwd_config(dim, dim, kind, seqlen_k=seqlen_k, **more).tiles.clears_dq

    assert clears_dq() and clears_dq(dim=72) and clears_dq("other", override=CLEARS_DQ)
    assert not any(clears_dq(kind) for kind in ("full", "other", "score_mod"))
    assert not (clears_dq(seqlen_k=32767) or clears_dq(dim=64) or clears_dq(deterministic=True))
    with pytest.raises(ValueError, match="clears_dq=True is not for deterministic=True"):
        call(config=CLEARS_DQ, deterministic=True)


def test_what_a_call_says_of_its_scores_decides_on_pairs() -> None:
    def takes_pairs(**more: Any) -> bool:
        inputs = make_inputs(Case("wide", 1, 20, 30, 1, 1, head_dim=256, causal=True, **more))
        found = planned(inputs, direction=Direction.BACKWARD, **bwd_keywords(inputs))
        return found.bwd_choice.tiles.cta_pair

    assert takes_pairs() and takes_pairs(column="stepped1") and takes_pairs(sink=BF16)
    assert not takes_pairs(softcap=15.0) and not takes_pairs(score_mod="scale")


def test_sums_are_cleared_or_stored_by_who_comes_first(recorder: Recorder) -> None:
    for config in (None, CLEARS_DQ):
        call(config=config)
        before, main, after = recorder.last()
        sums, semaphores = main[5:7]
        if config is None:
            assert before[5] is None and before[6] is semaphores is after[1]
            assert semaphores.shape == sums.shape[:2] and semaphores.dtype == torch.int32
        else:
            assert before[5] is sums is after[0]
            assert before[6] is semaphores is after[1] is None


def test_an_override_that_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"tile_m.: 128.*head_dim=128.*exceed"):
        select_bwd_config(128, 128, "other", BwdConfig(tile_m=128))
    for dim in (64, 256):
        with pytest.raises(ValueError, match=r"stages_q must be 1 or 2, got 3"):
            select_bwd_config(dim, dim, "other", BwdConfig(stages_q=3))
    with pytest.raises(ValueError, match=r"stages_q must be 2 where head_dim is above 128"):
        select_bwd_config(136, 64, "other", BwdConfig(stages_q=1))
