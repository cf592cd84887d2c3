"""Block lists from CuTe mask_mods on the CPU, against asking torch functions about every score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from oracle import attend_rows
from post_mods import (
    create_causal_mask_with_offset,
    create_prefix_lm_mask,
    document_mask_mod_of_heads,
)
from torch import Tensor

import flash_mask_cute.utils as utils
from flash_mask_cute import flash_attn_func
from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockSparseTensorsTorch,
    check_block_lists,
    dense_states,
    retile_lists,
)
from flash_mask_cute.compute_block_sparsity import (
    compute_block_sparsity,
    compute_blocksparse_tensors,
    create_block_mask,
)
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.runtime.cache import compile_count


@pytest.fixture(autouse=True)
def no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", "off")


# -- mods, and the same in torch ----------------------------------------------------------------


@cute.jit
def annotated_window_mod(
    batch_idx: cute.TensorSSA,
    head_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: Optional[list],  # noqa: UP045
) -> cute.TensorSSA:
    width = utils.scalar_to_ssa(30, cutlass.Int32) * (head_idx + 1)
    return (kv_idx <= q_idx + width) & (q_idx <= kv_idx + width)


def plain_batch_mod(b, h, q, k, aux):
    return k < (b + 1) * 70


def document_ids(batch: int, heads: int, seqlen: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand((batch, heads, seqlen), generator=generator) < 0.01
    return starts.cumsum(-1).int()


MASKS: dict[str, tuple[Any, Callable[..., Tensor], bool]] = {
    "causal": (create_causal_mask_with_offset(-37), lambda b, h, q, k, ids: k <= q - 37, False),
    "prefix": (
        create_prefix_lm_mask(150, 3),
        lambda b, h, q, k, _: (k < 150) | (k <= q + 3),
        False,
    ),
    "window": (annotated_window_mod, lambda b, h, q, k, _: (q - k).abs() <= 30 * (h + 1), False),
    "batch": (plain_batch_mod, lambda b, h, q, k, _: k < (b + 1) * 70, False),
    "documents": (
        document_mask_mod_of_heads,
        lambda b, h, q, k, ids: ids[b, h, q] == ids[b, h, k],
        True,
    ),
    "all": (lambda b, h, q, k, _: k >= 0, lambda b, h, q, k, _: k >= 0, False),
    "none": (lambda b, h, q, k, _: k < 0, lambda b, h, q, k, _: k < 0, False),
}


def expected_states(visible: Tensor, block_q: int, block_k: int) -> Tensor:
    """The definition, for bool visible (batch, heads, seqlen_q, seqlen_k)."""
    batch, heads, seqlen_q, seqlen_k = visible.shape
    shape = (batch, heads, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
    states = torch.empty(shape, dtype=torch.uint8)
    for m in range(shape[2]):
        for n in range(shape[3]):
            rows, keys = (
                slice(m * block_q, (m + 1) * block_q),
                slice(n * block_k, (n + 1) * block_k),
            )
            block = visible[:, :, rows, keys].flatten(2)
            states[:, :, m, n] = torch.where(
                block.all(-1), FULL, torch.where(block.any(-1), PARTIAL, EMPTY)
            )
    return states


def ask(mask: Callable[..., Tensor], shape: tuple[int, ...], ids: Tensor | None = None) -> Tensor:
    grid = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return mask(*grid, ids)


def assert_canonical(lists: BlockSparseTensorsTorch) -> None:
    for cnt, idx in ((lists[0], lists[1]), (lists[2], lists[3])):
        assert cnt is not None and idx is not None
        assert cnt.dtype == idx.dtype == torch.int32
        for count, row in zip(cnt.flatten().tolist(), idx.flatten(0, 2).tolist(), strict=True):
            assert row[:count] == sorted(set(row[:count]))
            assert not any(row[count:])


@pytest.mark.shares(8)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [(128, 128), (64, 80), (192, 16), (1000, 1)], ids=str)
def test_against_asking_everything(name: str, block: tuple[int, int]) -> None:
    mod, mask, has_aux = MASKS[name]
    shape = 2, 3, 300, 257
    ids = document_ids(2, 3, 300) if has_aux else None
    aux = None if ids is None else [ids]
    lists = create_block_mask(mod, *shape, device="cpu", BLOCK_SIZE=block, aux_tensors=aux)
    assert lists.block_size == block
    assert_canonical(lists)
    assert torch.equal(dense_states(lists), expected_states(ask(mask, shape, ids), *block))
    checked = check_block_lists(lists, *shape, torch.device("cpu"))
    assert checked == lists


# -- the post's examples ------------------------------------------------------------------------


def assert_lists_are(
    lists: Sequence[Tensor | None], partial: list[list[int]], full: list[list[int]], num_keys: int
) -> None:
    """Of one batch entry and head: the key blocks of each query block, of num_keys in all."""
    assert len(lists) == 4
    for cnt, idx, rows in ((lists[0], lists[1], partial), (lists[2], lists[3], full)):
        assert cnt is not None and idx is not None
        assert cnt.tolist() == [[[len(row) for row in rows]]]
        assert idx.tolist() == [[[row + [0] * (num_keys - len(row)) for row in rows]]]


def test_causal_768_by_896_of_the_post() -> None:
    """FlexAttention post, "Example: Causal Masking Block Sparsity"."""
    cute_lists, torch_lists = compute_blocksparse_tensors(
        128, 128, 1, 1, 768, 896, create_causal_mask_with_offset(128), None, "cpu"
    )
    partial = [[1], [2], [3], [4], [5], [6]]
    full = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert_lists_are(torch_lists, partial, full, num_keys=7)
    for made, tensor in zip(cute_lists, torch_lists, strict=True):
        assert made.data_ptr == tensor.data_ptr()


def test_documents_of_the_post() -> None:
    doc_ids = torch.zeros((1, 1, 640), dtype=torch.int32)
    doc_ids[0, 0, :230] = 0
    doc_ids[0, 0, 230:410] = 1
    doc_ids[0, 0, 410:] = 2
    _, torch_lists = compute_block_sparsity(
        128, 128, 1, 1, 640, 640, document_mask_mod_of_heads, [doc_ids], device="cpu"
    )
    partial = [[1], [0, 1, 2, 3], [1, 3], [1, 2, 3, 4], [3]]
    full = [[0], [], [2], [], [4]]
    assert_lists_are(torch_lists, partial, full, num_keys=5)


def test_getting_started_of_the_post() -> None:
    @cute.jit
    def my_mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
        return kv_idx <= q_idx

    B, H, seqlen_q, seqlen_kv = 2, 4, 512, 512
    block_mask = create_block_mask(
        my_mask_mod, B, H, seqlen_q, seqlen_kv, device="cpu", BLOCK_SIZE=(128, 128)
    )
    visible = ask(lambda b, h, q, k, _: k <= q, (B, H, seqlen_q, seqlen_kv))
    assert torch.equal(dense_states(block_mask), expected_states(visible, 128, 128))


def test_batch_and_heads_of_none_and_one_number_for_a_block() -> None:
    lists = create_block_mask(plain_batch_mod, None, None, 100, 200, device="cpu", BLOCK_SIZE=64)
    assert lists.block_size == (64, 64)
    assert lists.mask_block_idx.shape == (1, 1, 2, 4)
    assert create_block_mask(plain_batch_mod, None, 2, 300, 100, "cpu").block_size == (128, 128)


# -- the pair, passed on ------------------------------------------------------------------------


def window_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return abs(q_idx - kv_idx) <= 30


@pytest.mark.parametrize("tile", [(128, 128), (112, 80), (50, 30)], ids=str)
@pytest.mark.parametrize("has_full", [True, False], ids=["full", "no-full"])
def test_attention_takes_the_pair(tile: tuple[int, int], has_full: bool) -> None:
    """And knows the size of its blocks: 300 tokens are 3 blocks of 112 and of 128."""
    q, k, v = (torch.randn(1, 300, 2, 16, dtype=torch.float64) for _ in range(3))
    pair = compute_block_sparsity(
        *tile, 1, 2, 300, 300, window_mod, None, "cpu", compute_full_blocks=has_full
    )
    assert isinstance(pair, tuple) and len(pair) == 2
    row = torch.arange(300)
    expected = attend_rows(q, k, v, (row[:, None] - row).abs() <= 30).out
    out, _ = _flash_attn_fwd(q, k, v, mask_mod=window_mod, block_sparse_tensors_torch=pair)
    torch.testing.assert_close(out, expected)

    def attend(q: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, mask_mod=window_mod, block_sparse_tensors=pair)

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(attend(leaf), expected)
    attend(leaf).sum().backward()
    given = BlockSparseTensorsTorch(*pair[1], block_size=tile)
    again = q.clone().requires_grad_()
    out = flash_attn_func(again, k, v, mask_mod=window_mod, block_sparse_tensors=given)
    out.sum().backward()
    assert leaf.grad is not None and again.grad is not None and torch.equal(leaf.grad, again.grad)
    if tile == (112, 80) and has_full:
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), expected)


def test_parts_of_the_pair_are_refused() -> None:
    """They do not tell the size of the blocks."""
    pair = compute_block_sparsity(128, 128, 1, 1, 300, 300, window_mod, None, "cpu")
    q = torch.randn(1, 300, 1, 16)
    for wrong, kind in (
        (pair[0], "BlockSparseTensors"),
        (pair[1], r"a tuple of \['Tensor', 'Tensor', 'Tensor', 'Tensor'\]"),
        ((pair[0], pair[1]), r"a tuple of \['BlockSparseTensors', 'tuple'\]"),
        (pair[:1], r"a tuple of \['BlockSparseTensors'\]"),
        ([], r"a list of \[\]"),
    ):
        with pytest.raises(TypeError, match=f"the pair that compute_block_sparsity.* got {kind}"):
            _flash_attn_fwd(q, q, q, mask_mod=window_mod, block_sparse_tensors_torch=wrong)
        with pytest.raises(TypeError, match="block_sparse_tensors"):
            flash_attn_func(q, q, q, mask_mod=window_mod, block_sparse_tensors=wrong)


# -- options ------------------------------------------------------------------------------------


def test_without_full_blocks_all_are_partial() -> None:
    mod, mask, _ = MASKS["prefix"]
    cute_lists, torch_lists = compute_blocksparse_tensors(
        64, 64, 1, 2, 300, 257, mod, None, "cpu", compute_full_blocks=False
    )
    assert cute_lists[2:] == torch_lists[2:] == (None, None)
    visible = expected_states(ask(mask, (1, 2, 300, 257)), 64, 64) != EMPTY
    assert torch.equal(dense_states(BlockSparseTensorsTorch(*torch_lists)), visible.to(torch.uint8))


def sampled_states(mod: Any, seqlen_q: int, seqlen_k: int, block: int) -> Tensor:
    _, lists = compute_blocksparse_tensors(
        block, block, 1, 1, seqlen_q, seqlen_k, mod, None, "cpu", use_fast_sampling=True
    )
    return dense_states(BlockSparseTensorsTorch(*lists))


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", ["causal", "prefix", "all", "none"])
@pytest.mark.parametrize("block", [1, 17, 64, 128])
def test_sampling_is_exact_for_monotone_masks(name: str, block: int) -> None:
    mod, mask, _ = MASKS[name]
    shape = (300, 257) if block > 1 else (75, 64)
    expected = expected_states(ask(mask, (1, 1, *shape)), block, block)
    assert torch.equal(sampled_states(mod, *shape, block), expected)


@pytest.mark.shares(3)
def test_sampling_sees_five_points_only() -> None:
    """A stripe that misses the corners and the centre does not exist for it."""

    def stripe(b, h, q, k, aux):
        return (k > 3) & (k < 20)

    def gap(b, h, q, k, aux):
        return (k <= 3) | (k >= 20)

    assert sampled_states(stripe, 64, 64, 64).tolist() == [[[[EMPTY]]]]
    assert sampled_states(gap, 64, 64, 64).tolist() == [[[[FULL]]]]
    points = {(0, 0), (0, 60), (62, 0), (62, 60), (31, 30)}
    for point in sorted(points | {(1, 1), (32, 30), (62, 59), (63, 61)}):

        def dot(b, h, q, k, aux, point=point):
            return (q == point[0]) & (k == point[1])

        state = PARTIAL if point in points else EMPTY
        assert sampled_states(dot, 63, 61, 64).tolist() == [[[[state]]]], point


def test_no_blocks() -> None:
    for shape in ((0, 2, 100, 100), (1, 2, 0, 100), (1, 2, 100, 0)):
        lists = create_block_mask(plain_batch_mod, *shape, device="cpu")
        assert lists.mask_block_idx.numel() == 0
        assert not lists.mask_block_cnt.any() and not lists.full_block_cnt.any()
        compute_blocksparse_tensors(128, 128, *shape, plain_batch_mod, None, "cpu")


# -- aux tensors --------------------------------------------------------------------------------


def table_mod(rank: int, dtype: type[cutlass.Numeric]) -> Any:
    @cute.jit
    def mod(b, h, q, k, aux):
        index = (b[0], h[0], q[0], k[0])[4 - rank :]
        return utils.scalar_to_ssa(aux[1][index], dtype) > utils.scalar_to_ssa(0, dtype)

    return mod


@pytest.mark.shares(8)
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        (torch.int32, 1),
        (torch.int64, 2),
        (torch.float32, 3),
        (torch.bfloat16, 4),
        (torch.float16, 2),
        (torch.bool, 2),
        (torch.uint8, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["torch", "strided", "cute", "cute-dynamic", "cute-ffi"])
def test_aux_tensors(dtype: torch.dtype, rank: int, kind: str) -> None:
    extents = (2, 3, 90, 70)[4 - rank :]
    table = (torch.rand(extents, generator=torch.Generator().manual_seed(1)) < 0.99).to(dtype)
    if kind == "strided":
        table = torch.stack([torch.zeros_like(table), table], dim=-1)[..., 1]
        table = table.mT.contiguous().mT if rank > 1 else table
    aux: Any = [torch.zeros(3), table]
    if kind.startswith("cute"):
        aux = [from_dlpack(x, enable_tvm_ffi=kind == "cute-ffi") for x in aux]
    if kind == "cute-dynamic":
        aux = [x.mark_layout_dynamic() for x in aux]
    mod = table_mod(rank, cutlass.Float32 if dtype.is_floating_point else cutlass.Int32)
    lists = create_block_mask(mod, 2, 3, 90, 70, "cpu", (16, 16), aux)
    visible = (table > 0).expand(2, 3, 90, 70)
    assert torch.equal(dense_states(lists), expected_states(visible, 16, 16))


class NotATensor:
    pass


@pytest.mark.parametrize(
    ("aux", "error", "message"),
    [
        (torch.zeros(3), TypeError, "aux_tensors must be a list of tensors, got Tensor"),
        ([NotATensor()], TypeError, r"aux_tensors\[0\] must be a tensor, got NotATensor"),
        ([torch.zeros(1), 3], TypeError, r"aux_tensors\[1\] must be a tensor, got int"),
        ([torch.zeros(3, device="meta")], ValueError, r"aux_tensors\[0\] must be on cpu, got meta"),
        (
            [torch.zeros(3, dtype=torch.complex64)],
            ValueError,
            r"aux_tensors\[0\] is torch.complex64",
        ),
        ([torch.zeros(())], ValueError, r"aux_tensors\[0\] has no dimension"),
    ],
)
def test_aux_tensors_that_are_refused(aux: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create_block_mask(plain_batch_mod, 1, 1, 10, 10, "cpu", aux_tensors=aux)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seqlen_q": -1}, ValueError, "seqlen_q must not be negative, got -1"),
        ({"B": -2}, ValueError, "B must not be negative, got -2"),
        ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE must be positive, got 0"),
        ({"BLOCK_SIZE": (1, 2, 3)}, ValueError, "BLOCK_SIZE must be .queries, keys., got"),
        ({"mask_mod": 3}, TypeError, "mask_mod must be callable or None, got 3"),
        ({"device": "gpu"}, ValueError, "device must be cpu or cuda, got 'gpu'"),
        ({"device": "meta"}, ValueError, "device must be cpu or cuda, got 'meta'"),
        ({"device": 3.5}, TypeError, "device must be cpu or cuda, got 3.5"),
    ],
)
def test_arguments_that_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"mask_mod": plain_batch_mod, "B": 1, "H": 1, "seqlen_q": 9, "seqlen_k": 9}
    with pytest.raises(error, match=message):
        create_block_mask(**({"device": "cpu"} | arguments | changes))


@pytest.mark.parametrize("mod", [plain_batch_mod, lambda b, h, q, k: q >= k])
def test_without_a_gpu_the_device_that_works_is_named(
    mod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda, and torch sees no GPU; device='cpu'"):
        create_block_mask(mod, None, None, 256, 256)


def test_refusals_name_the_arguments_of_either_function() -> None:
    with pytest.raises(ValueError, match="num_heads must not be negative, got -1"):
        compute_blocksparse_tensors(16, 16, 1, -1, 9, 9, plain_batch_mod, None, "cpu")


def test_a_tensor_in_a_closure_is_refused() -> None:
    ids = torch.zeros(3)
    with pytest.raises(TypeError, match="closure variable 'ids'.*aux_tensors"):
        create_block_mask(lambda b, h, q, k, aux: ids[q] == ids[k], 1, 1, 3, 3, "cpu")


def test_gpu_instructions_are_refused() -> None:
    """They would end the process."""

    def mod(b, h, q, k, aux):
        return utils.scalar_to_ssa(cute.arch.lane_idx(), cutlass.Int32) <= k

    with pytest.raises(NotImplementedError, match="^mask_mod mod .*uses nvvm.*only for GPUs"):
        create_block_mask(mod, 1, 1, 3, 3, "cpu")


# -- compiling ----------------------------------------------------------------------------------


def test_what_compiles_again() -> None:
    def make(offset: int, *shape: int, **more: Any) -> None:
        create_block_mask(create_causal_mask_with_offset(offset), *shape, device="cpu", **more)

    make(1001, 1, 1, 100, 100)
    before = compile_count()
    make(1001, 2, 3, 300, 50, BLOCK_SIZE=(64, 32))
    assert compile_count() == before, "an equal closure value, other extents"
    make(1002, 1, 1, 100, 100)
    assert compile_count() == before + 1, "another closure value"


def test_lists_of_inference_mode_are_found_again() -> None:
    with torch.inference_mode():
        lists = create_block_mask(plain_batch_mod, None, None, 500, 500, "cpu", 96)
        first = retile_lists(lists, 128, 128, 500, 500)
        assert retile_lists(lists, 128, 128, 500, 500) is first


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda.*device='cpu'"):
        create_block_mask(lambda b, h, q, k, aux: k <= q, 1, 1, 300, 300)
