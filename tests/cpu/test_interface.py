from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, FP32, FP64, Case, int32
from eager import assert_close_to_oracle
from inputs import make_inputs
from launch_recorder import Recorder
from mask_cases import MASK_MODS
from planned import arguments_of, forward_call, planned
from torch import Tensor

import flash_mask_cute
from flash_mask_cute import interface
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call import prepare
from flash_mask_cute.call.arguments import (
    AttentionCall,
    BackwardOptions,
    Direction,
    Masks,
    OptionalTensors,
    Options,
    Tensors,
    keywords_of,
)
from flash_mask_cute.call.explain import Explanation
from flash_mask_cute.call.forward import EmptyForward
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.interface import FwdConfig, _flash_attn_bwd, _flash_attn_fwd, explain
from flash_mask_cute.runtime.recent import Recent

NEG_INF = float("-inf")


def qkv(
    batch: int = 1, seqlen: int = 40, heads: int = 4, dim: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, heads, dim, generator=generator) for _ in range(3))
    return q.to(dtype), k.to(dtype), v.to(dtype)


# -- the public call on the CPU -----------------------------------------------------------------


CALLS = {Direction.FORWARD: (_flash_attn_fwd, 3), Direction.BACKWARD: (_flash_attn_bwd, 6)}


@pytest.mark.parametrize("direction", CALLS)
def test_settings_have_the_defaults_of_the_call(direction: Direction) -> None:
    call, num_operands = CALLS[direction]
    parameters = list(inspect.signature(call).parameters.values())
    operands, settings = parameters[:num_operands], parameters[num_operands:]
    none: Any = None
    defaults = Tensors(none, none, none).by_name()
    defaults |= Masks._field_defaults | Options._field_defaults
    defaults |= BackwardOptions._field_defaults
    defaults["q_start"] = defaults["q_start"].argument(None)
    names = set(keywords_of(direction)) - {x.name for x in operands}
    assert {x.name: x.default for x in settings} == {name: defaults[name] for name in names}


@pytest.mark.parametrize("direction", CALLS)
def test_every_keyword_reaches_its_place(
    monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """Positional bundles: a distinct value for each keyword must come out under its name."""
    is_forward = direction is Direction.FORWARD
    call, num_operands = CALLS[direction]
    given: dict[str, Any] = {name: object() for name in keywords_of(direction)}
    for name in list(inspect.signature(call).parameters)[:num_operands]:
        given[name] = torch.zeros((1, 4, 40) if name == "lse" else (1, 40, 4, 64), dtype=BF16)
    given["q_start"] = torch.zeros(1, dtype=torch.int32)
    given["config"] = FwdConfig(tile_n=64) if is_forward else BwdConfig(tile_m=64)
    if is_forward:
        given["seqlen_k_per_split"] = 4096
    found: dict[str, object] = {}

    def prepare(call: AttentionCall) -> Any:
        found.update(arguments_of(call))
        return lambda *args: (None, None)

    monkeypatch.setattr(interface, "prepare_fwd" if is_forward else "prepare_bwd", prepare)
    monkeypatch.setattr(interface, "_keep", lambda *args: None)
    call(**given)
    assert found.keys() == given.keys()
    assert all(found[name] is x for name, x in given.items())


def test_without_lse() -> None:
    tensors = qkv()
    out, lse = _flash_attn_fwd(*tensors, return_lse=False)
    assert lse is None
    assert torch.equal(out, _flash_attn_fwd(*tensors)[0])
    buffer = torch.full((1, 4, 40), float("nan"))
    _, lse = _flash_attn_fwd(*tensors, return_lse=False, lse=buffer)
    assert lse is buffer
    assert not buffer.isnan().any()


def test_no_graph_is_recorded() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(dtype=FP32))
    out, lse = _flash_attn_fwd(q, k, v)
    assert not out.requires_grad
    assert lse is not None and not lse.requires_grad


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_rows_in_no_use(packed: bool) -> None:
    used = torch.tensor([3, 0], dtype=torch.int32)
    sink = torch.zeros(2)
    if packed:
        q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
        edges = torch.tensor([0, 5, 10], dtype=torch.int32)  # two rows at the end belong to none
        more = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
        unused = torch.tensor([False] * 3 + [True] * 9)
    else:
        q, k, v = (torch.randn(2, 5, 2, 16) for _ in range(3))
        more, unused = {}, torch.arange(5) >= used[:, None]
    out, lse = _flash_attn_fwd(q, k, v, seqused_q=used, learnable_sink=sink, **more)
    assert lse is not None
    assert (out[unused] == 0).all()
    assert (lse.mT[unused] == NEG_INF).all()
    assert lse.mT[~unused].isfinite().all()


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
def test_problems_of_size_zero(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q = torch.randn(batch, seqlen_q, 4, 16)
    k = v = torch.randn(batch, seqlen_k, 2, 16)
    out, lse = _flash_attn_fwd(q, k, v, causal=True)
    assert lse is not None
    assert out.shape == q.shape and lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all() and (lse == NEG_INF).all()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"softmax_scale": torch.inf}, ValueError, "softmax_scale"),
        ({"score_mod": 3}, TypeError, "score_mod"),
        ({"aux_tensors": [torch.zeros(1)]}, ValueError, "aux_tensors"),
        ({"startend_row_indices": torch.zeros(1)}, TypeError, "startend_row_indices"),
        ({"block_sparse_tensors_torch": 3}, TypeError, "block_sparse_tensors_torch"),
        (
            {"block_sparse_tensors_torch": BlockSparseTensorsTorch(int32(), int32())},
            ValueError,
            "mask_block_cnt",
        ),
        ({"window_size_left": [3]}, TypeError, "window_size_left"),
        ({"config": {"tile_n": 40}}, ValueError, "tile_n"),
        ({"config": {"tile": 40}}, ValueError, "config"),
        ({"config": 128}, TypeError, "config"),
        ({"max_seqlen_q": torch.tensor(3)}, TypeError, "max_seqlen_q"),
    ],
)
def test_errors_come_before_anything_runs(
    change: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("something was prepared")

    monkeypatch.setattr(prepare, "CpuForward", fail)
    q, k, v = qkv(heads=6)
    with pytest.raises(error, match=said):
        _flash_attn_fwd(q, k[:, :, :2], v[:, :, :2], **change)
    with pytest.raises(TypeError, match="q must be"):
        _flash_attn_fwd(q.numpy() if q.dtype == FP32 else "q", k, v)  # type: ignore[arg-type]


def test_contents_on_the_cpu_are_checked_in_every_call() -> None:
    q = torch.randn(10, 2, 16)
    edges = torch.tensor([0, 4, 10], dtype=torch.int32)
    _flash_attn_fwd(q, q, q, cu_seqlens_q=edges, cu_seqlens_k=edges)
    edges[1] = 11
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        _flash_attn_fwd(q, q, q, cu_seqlens_q=edges, cu_seqlens_k=edges)


def test_config_reaches_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_mask_cute.block_info import BlockInfo

    seen = set()
    walk = BlockInfo.get_n_block_min_max

    def watch(self: BlockInfo, *args: Any) -> Any:
        seen.add((self.tile_m, self.tile_n, self.qhead_per_kvhead_packgqa))
        return walk(self, *args)

    monkeypatch.setattr(BlockInfo, "get_n_block_min_max", watch)
    q, k, v = qkv(seqlen=300)
    inputs_k = k[:, :, :1], v[:, :, :1]
    _flash_attn_fwd(q, *inputs_k, config=FwdConfig(tile_n=48), pack_gqa=True)
    _flash_attn_fwd(q, *inputs_k, config={"tile_m": 128, "tile_n": 64}, pack_gqa=False)
    assert {(n, pack) for _, n, pack in seen} == {(48, 4), (64, 1)}
    assert (128, 64, 1) in seen


@pytest.mark.parametrize("config", [None, FwdConfig(tile_m=128, tile_n=32)])
def test_any_config_gives_the_same_result(config: FwdConfig | None) -> None:
    inputs = make_inputs(
        Case("tiles", 2, 129, 255, 4, 2, 64, dtype=FP64, causal=True, window_left=70)
    )
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords, config=config)
    assert lse is not None
    assert_close_to_oracle(out, lse, inputs)


def run_python(program: str) -> str:
    root = Path(flash_mask_cute.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_what_the_package_exports() -> None:
    from flash_mask_cute import compute_block_sparsity
    from flash_mask_cute.masks import builders, column_mask

    assert flash_mask_cute.ColumnMask is column_mask.ColumnMask
    assert flash_mask_cute.BlockSparseTensorsTorch is BlockSparseTensorsTorch
    assert flash_mask_cute.create_block_mask is compute_block_sparsity.create_block_mask
    assert flash_mask_cute.builders is builders
    assert callable(flash_mask_cute.plot)
    assert all(getattr(flash_mask_cute, name) is not None for name in flash_mask_cute.__all__)


def test_the_cpu_path_compiles_nothing() -> None:
    program = (
        "import torch, flash_mask_cute; from flash_mask_cute.interface import _flash_attn_fwd\n"
        "q = torch.randn(1, 9, 2, 16); _flash_attn_fwd(q, q, q, causal=True)\n"
        "print(flash_mask_cute.compile_count())"
    )
    assert run_python(program).strip() == "0"


# -- launches, with a function that only takes notes --------------------------------------------


def test_arguments_arrive_in_the_kernels_order(recorder: Recorder) -> None:
    q, k, v = qkv(batch=2)
    used_q, used_k = (torch.tensor([n, 40], dtype=torch.int32) for n in (5, 6))
    sink = torch.zeros(4)
    out, lse = _flash_attn_fwd(
        q, k, v, softmax_scale=0.5, window_size_left=7, window_size_right=3, softcap=20,
        learnable_sink=sink, seqused_q=used_q, seqused_k=used_k,
    )  # fmt: skip
    (args,) = recorder.calls
    expected = (
        q, k, v, out, lse, 0.5, None, None, used_q, used_k, None, 7, 3, sink, None, None, 20.0,
    )  # fmt: skip
    rest = 10 + len(OptionalTensors._fields)
    assert len(args) == len(expected) + rest
    assert all(got is wanted or got == wanted for got, wanted in zip(args, expected, strict=False))
    counter, *others = args[-rest:]
    assert others == [None] * (rest - 1)
    assert counter.dtype == torch.int32 and counter.tolist() == [0, 0]


def test_causal_and_open_windows_pass_no_side(recorder: Recorder) -> None:
    q, k, v = qkv()
    _flash_attn_fwd(q, k, v, causal=True, window_size_right=5, window_size_left=1 << 30)
    assert recorder.calls[0][11:13] == (None, None)
    assert recorder.prepared[0].problem.is_causal
    assert not recorder.prepared[0].problem.is_local


def test_where_sequences_lie_in_pages_is_in_the_key(recorder: Recorder) -> None:
    """A prepared call without these arguments does not serve one with them."""
    (q, *_), where = qkv(batch=2), int32(0, 1)
    pool = torch.zeros(3, 40, 4, 64, dtype=BF16)
    pages = {"page_table": torch.zeros(2, 1, dtype=torch.int32), "seqused_k": int32(5, 6)}
    for more in ({}, {"kv_batch_idx": where}, {"leftpad_k": where}):
        _flash_attn_fwd(q, pool, pool, **pages, **more)
        given = recorder.given()
        assert all(given[name] is more.get(name) for name in ("kv_batch_idx", "leftpad_k"))
    assert len(recorder.prepared) == 3
    _flash_attn_fwd(q, q, q)
    for name in ("kv_batch_idx", "leftpad_k"):
        with pytest.raises(ValueError, match=f"{name} needs page_table"):
            _flash_attn_fwd(q, q, q, **{name: where})


@pytest.mark.parametrize("name", ["leftpad_k", "kv_batch_idx", None])
def test_packed_keys_beside_pages_are_refused_by_name(name: str | None) -> None:
    """Keys of three dimensions are no pool of pages, wherever sequences lie."""
    q, packed = torch.zeros(1, 2, 2, 8), torch.zeros(3, 2, 8)
    where = {"page_table": int32(0, 1)[None], "seqused_k": int32(2), "cu_seqlens_k": int32(0, 3)}
    if name is not None:
        where[name] = int32(0)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None beside page_table"):
        _flash_attn_fwd(q, packed, packed, **where)


def test_a_second_call_prepares_nothing(recorder: Recorder) -> None:
    first, second = qkv(), qkv()
    _flash_attn_fwd(*first, causal=True)
    out, lse = _flash_attn_fwd(*second, causal=True)
    assert len(recorder.prepared) == 1
    assert recorder.calls[1][0] is second[0]
    assert recorder.calls[1][3] is out is not recorder.calls[0][3]
    assert out.shape == second[0].shape and out.dtype == BF16
    assert lse is not None and lse.shape == (1, 4, 40) and lse.dtype == FP32


WARM: dict[str, Any] = {"seqused_k": int32(40), "window_size_left": 9}


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": 0.3},
        {"causal": True},
        {"window_size_left": 8},
        {"window_size_right": 8},
        {"softcap": 3.0},
        {"learnable_sink": torch.zeros(4)},
        {"learnable_sink": torch.zeros(4, dtype=BF16)},
        {"seqused_q": int32(40)},
        {"seqused_k": None},
        {"max_seqlen_q": 40},
        {"pack_gqa": False},
        {"return_lse": False},
        {"lse": torch.zeros(1, 4, 40)},
        {"out": torch.zeros(1, 40, 4, 64, dtype=BF16)},
        {"config": {"tile_n": 64}},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_differs_is_prepared_anew(change: dict[str, Any], recorder: Recorder) -> None:
    tensors = qkv()
    _flash_attn_fwd(*tensors, **WARM)
    for _ in range(2):
        _flash_attn_fwd(*tensors, **(WARM | change))
    assert len(recorder.prepared) == 2


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_operands_layout_counts(which: int, recorder: Recorder) -> None:
    tensors = list(qkv(batch=2))
    _flash_attn_fwd(*tensors)
    tensors[which] = tensors[which].transpose(1, 2).contiguous().transpose(1, 2)
    _flash_attn_fwd(*tensors)
    assert len(recorder.prepared) == 2


def test_bad_calls_after_a_good_one_still_fail(recorder: Recorder) -> None:
    q, k, v = qkv()
    _flash_attn_fwd(q, k, v)
    with pytest.raises(TypeError, match="k must have the dtype"):
        _flash_attn_fwd(q, k.half(), v)
    with pytest.raises(ValueError, match="head_dim"):
        _flash_attn_fwd(q, k[..., :32], v)
    with pytest.raises(TypeError, match="mask_mod"):
        _flash_attn_fwd(q, k, v, mask_mod=3)  # type: ignore[arg-type]
    assert len(recorder.calls) == 1


def test_a_misaligned_output_never_hits(recorder: Recorder) -> None:
    q, k, v = qkv()
    _flash_attn_fwd(q, k, v, out=torch.zeros_like(q))
    shifted = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    assert shifted.stride() == q.stride()
    # here on the CPU validation lets it pass; on a GPU it refuses it
    for _ in range(2):
        _flash_attn_fwd(q, k, v, out=shifted)
    assert len(recorder.prepared) == 3


def test_launches_do_not_pile_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Recent[Any, Any] = Recent(4)
    monkeypatch.setattr(interface, "_prepared_fwd", kept)
    tensors = qkv()
    for scale in range(1, 10):
        _flash_attn_fwd(*tensors, softmax_scale=scale)
        assert 1 <= len(kept.keys() | kept._older.keys()) <= 4


def test_extents_of_one_get_strides_that_tma_takes(recorder: Recorder) -> None:
    q, k, v = (x.as_strided(x.shape, (3, *x.stride()[1:])) for x in qkv())
    out, _ = _flash_attn_fwd(q, k, v)
    for x, original in zip(recorder.calls[0][:4], (q, k, v, out), strict=True):
        assert all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:-1])
        assert x.data_ptr() == original.data_ptr() and x.shape == original.shape
    buffer = torch.zeros_like(out)
    given = buffer.as_strided(buffer.shape, (0, *buffer.stride()[1:]))
    out, _ = _flash_attn_fwd(q, k, v, out=given)
    assert out is given
    assert recorder.calls[1][3].stride()[0] % 8 == 0 < recorder.calls[1][3].stride()[0]


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_empty_launch(packed: bool, sink: bool) -> None:
    """What the GPU path does where there are no keys, against the CPU path."""
    keywords: dict[str, Any] = {"seqused_q": int32(2, 0, 4)}
    if sink:
        keywords["learnable_sink"] = torch.randn(4)
    q, k = torch.randn(3, 4, 4, 16), torch.randn(3, 0, 2, 16)
    if packed:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        keywords |= {"cu_seqlens_q": int32(0, 3, 7, 11), "cu_seqlens_k": int32(0, 0, 0, 0)}
    call = forward_call(q, k, k, **keywords)
    found = planned(call)
    assert found.shapes.is_empty
    out, lse = EmptyForward(found)(call.tensors)
    expected_out, expected_lse = _flash_attn_fwd(q, k, k, **keywords)
    assert lse is not None and expected_lse is not None
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)


# -- explain ------------------------------------------------------------------------------------


def brute_force_tiles(
    seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, causal: bool, left: int | None
) -> int:
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible &= key <= row
    if left is not None:
        visible &= key >= row - left
    blocks = (block.any() for rows in visible.split(tile_m) for block in rows.split(tile_n, dim=1))
    return sum(map(int, blocks))


def visited(found: Explanation) -> int:
    assert found.full_key_tiles is not None and found.partial_key_tiles is not None
    return found.full_key_tiles + found.partial_key_tiles


EXPLAINED = (
    Case("columns", 2, 500, 500, causal=True, column="documents1"),
    Case("columns-by-head", 1, 500, 500, 4, 2, 64, column="documents2", column_heads="q"),
    Case("columns-packed", 1, 300, 500, 4, 2, column="documents2", pack_gqa=True),
    Case("columns-varlen", lengths_q=(300, 0, 200), lengths_k=(300, 9, 200), column="documents2"),
    Case("nested", 1, 500, 500, blocks=(128, 128)),
    Case("retiled", 2, 500, 400, blocks=(96, 80)),
    Case("window", 1, 500, 500, window_left=100, column="documents2"),
)


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_counts_tiles_under_masks(case: Case) -> None:
    """Tiles that are skipped hide everything, full ones show everything."""
    inputs = make_inputs(case)
    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    found = explain(q, k, v, **inputs.keywords)
    tiles, pack, dense = found.tiles, found.packed_heads, inputs.dense
    assert dense is not None
    counts = {"skipped": 0, "full": 0, "cut": 0}
    for i in range(case.batch):
        length_q = case.lengths_q[i] if case.lengths_q else case.seqlen_q
        length_k = case.lengths_k[i] if case.lengths_k else case.seqlen_k
        for head in range(0, case.heads_q, pack):
            seen = dense.visible(i, head, length_q, length_k)
            ahead = torch.arange(length_k) - torch.arange(length_q)[:, None] + length_q - length_k
            if case.causal:
                seen &= ahead <= 0
            if case.window_left is not None:
                seen &= ahead >= -case.window_left
            seen = seen.repeat_interleave(pack, 0)
            for rows in seen.split(tiles.tile_m):
                for tile in rows.split(tiles.tile_n, dim=1):
                    is_whole = tile.shape[1] == tiles.tile_n
                    kind = "full" if is_whole and tile.all() else "cut" if tile.any() else "skipped"
                    counts[kind] += rows.numel() > 0
    assert sum(counts.values()) == visited(found) + found.empty_key_tiles
    # exact in these cases, but for lists without a mask_mod: there a full tile may be asked about
    assert (found.empty_key_tiles, visited(found)) == (
        counts["skipped"],
        counts["full"] + counts["cut"],
    )
    assert found.full_key_tiles == counts["full"] or case.blocks is not None
    assert counts["skipped"] > 0 or case.id == "retiled"
    assert "causal and window" not in str(found)
    everything = explain(q, k, v, **inputs.keywords, config={"skip_blocks": False})
    assert everything.partial_key_tiles == sum(counts.values())


def test_explain_names_the_masks() -> None:
    def far(score: Any, *indices: Any) -> Any:
        return score

    q, k, v = (torch.randn(1, 200, 4, 64) for _ in range(3))
    lists = BlockSparseTensorsTorch(torch.ones(1, 1, 4).int(), torch.zeros(1, 1, 4, 3).int())
    found = explain(
        q, k, v, score_mod=far, mask_mod=MASK_MODS["checks"].cute, aux_tensors=[torch.zeros(3)],
        startend_row_indices=torch.zeros(1, 4, 200, 2, dtype=torch.int32),
        block_sparse_tensors_torch=lists._replace(block_size=(64, 80)),
    )  # fmt: skip
    for part in ("2 vectors (not causal)", "heads 4", "64 x 80, retiled", "far", "1 aux tensors"):
        assert part in str(found), str(found)
    found = explain(q, k, v, block_sparse_tensors_torch=lists._replace(
        mask_block_cnt=lists.mask_block_cnt[:, :, :2],
        mask_block_idx=lists.mask_block_idx[:, :, :2, :2],
    ))  # fmt: skip
    assert "block lists of 128 x 128, made of whole tiles" in str(found)


@pytest.mark.parametrize(("causal", "left"), [(False, None), (True, None), (True, 100)], ids=str)
def test_explain_counts_tiles(causal: bool, left: int | None) -> None:
    q = torch.randn(3, 1000, 4, 32, dtype=FP32)
    k = torch.randn(3, 1300, 2, 32, dtype=FP32)
    found = explain(q, k, k, causal=causal, window_size_left=left, config={"tile_m": 128})
    blocks_q, blocks_k = -(-1000 // 128), -(-1300 // found.tiles.tile_n)
    visible = 12 * brute_force_tiles(1000, 1300, 128, found.tiles.tile_n, causal, left)
    assert visited(found) == visible
    assert found.empty_key_tiles == 12 * blocks_q * blocks_k - visible
    assert found.work_tiles == blocks_q * 4 * 3
    assert (found.where, found.grid, found.packed_heads) == ("cpu", 96, 1)
    assert found.registers is None and "float32" in found.note


def test_explain_varlen_and_packing() -> None:
    q, k = torch.randn(50, 8, 32), torch.randn(600, 2, 32)
    found = explain(
        q, k, k, cu_seqlens_q=int32(0, 20, 50), cu_seqlens_k=int32(0, 200, 600), pack_gqa=True,
        config={"tile_m": 128, "tile_n": 128}, seqused_k=int32(129, 0),
    )  # fmt: skip
    assert found.packed_heads == 4
    assert found.work_tiles == 2 * 2  # 80 and 120 packed rows are a tile each, for 2 KV heads
    assert (visited(found), found.empty_key_tiles) == (4, 0)
    assert found.grid == 132


def test_explain_reports_the_compiled_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", str(tmp_path))
    found = explain(*qkv(), causal=True, config={"tile_n": 64})
    assert found.kernel == "FlashAttentionForwardSm90"
    assert found.registers is not None and 0 < found.registers <= 255
    assert found.spill_bytes == 0
    assert 0 < found.smem_bytes <= 232448
    text = str(found)
    for part in (
        "x 64 keys",
        "registers",
        "config= sets tile_n=64",
        "sm_90a",
        str(found.smem_bytes),
    ):
        assert part in text, text


def test_explain_takes_the_calls_keywords_only() -> None:
    with pytest.raises(TypeError, match="windows"):
        explain(*qkv(), windows=3)
    with pytest.raises(ValueError, match="window_size_left"):
        explain(*qkv(), window_size_left=-1)
    assert flash_mask_cute.explain is explain
    with pytest.raises(AttributeError, match="nothing"):
        _ = flash_mask_cute.nothing


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_an_lse_in_an_inputs_memory_is_refused(name: str) -> None:
    given = {x: torch.randn(1, 8, 2, 16) for x in "qkv"} | {"out": torch.empty(1, 8, 2, 16)}
    lse = given[name].flatten()[8:24].view(1, 2, 8)
    with pytest.raises(ValueError, match=f"lse must not share memory with {name}"):
        _flash_attn_fwd(**given, lse=lse)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_output_in_an_inputs_memory_is_refused(name: str) -> None:
    given = {x: torch.randn(1, 8, 2, 16) for x in "qkv"}
    _flash_attn_fwd(given["q"], given["k"], given["v"], out=torch.empty_like(given["q"]))
    with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
        _flash_attn_fwd(given["q"], given["k"], given["v"], out=given[name])


def test_transforms_of_torch_are_refused() -> None:
    """Their gradients would be zeros without a word."""
    q, k, v = (torch.randn(1, 8, 1, 16) for _ in range(3))
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda q: _flash_attn_fwd(q, k, v)[0].sum())(q)
