"""Block lists: which blocks of the score matrix attention has to visit, and which without a mask.

For every (batch, head, query block) there are two lists of key blocks. In a full block everything
is visible. In a partial block, a block of the other list, `mask_mod` decides; without a mask_mod
everything is visible. A block in no list is hidden. The format is that of FlexAttention in
flash-attn-4:

    mask_block_cnt, full_block_cnt  int32 (B', H', num_q_blocks)
    mask_block_idx, full_block_idx  int32 (B', H', num_q_blocks, num_k_blocks)

B' is the batch or 1, H' is the number of query heads or 1. The first cnt entries of an index row
are strictly increasing, and no block is in both lists. Entries past the count are 0 in lists made
here, and are never read.

Blocks may have any size (`block_size`), but kernels walk tiles of their own size. `retile_lists`
converts block lists to tile lists with a few tensor operations on the lists' device, without
waiting for it. Importing this module imports torch, not the compiler.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.runtime.plain_tensors import check_plain

if TYPE_CHECKING:
    import cutlass.cute as cute


class TileState(IntEnum):
    """The visibility of a tile of scores, or of a block of block lists.

    EMPTY: nothing is visible, and kernels skip it. PARTIAL: a mask decides. FULL: everything is
    visible, and no mask is applied.
    """

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


EMPTY, PARTIAL, FULL = TileState
DEFAULT_BLOCK = 128
WORD = 32
TorchLists: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_INFERRED_STEP = 16
# of the blocks of such a torch BlockMask
_BLOCK_OF_ALL = 1 << 30


class BlockSparseTensors(NamedTuple):
    """Block lists as `cute.Tensor`, for kernels."""

    mask_block_cnt: cute.Tensor
    mask_block_idx: cute.Tensor
    full_block_cnt: cute.Tensor | None = None
    full_block_idx: cute.Tensor | None = None


class BlockSparseTensorsTorch(NamedTuple):
    """Block lists as torch tensors; see the module for shapes.

    block_size: (queries, keys) of a block; None: derived from the number of blocks. Without the
    full_* tensors all blocks are partial. seqlens: the (queries, keys) that the lists were made
    for; `create_block_mask` sets it, and a call with other lengths is refused. None: not known.

    mask_mod: the mask that the lists were made of, as `create_block_mask` sets it. Calls without a
    mask_mod of their own evaluate it in partial blocks. Pickling and deep copies drop it.

    Example:
        >>> import torch
        >>> from flash_mask_cute import BlockSparseTensorsTorch, flash_attn_func
        >>> count = torch.tensor([1, 2], dtype=torch.int32).view(1, 1, 2)  # causal, 64 x 64
        >>> index = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32).view(1, 1, 2, 2)
        >>> lists = BlockSparseTensorsTorch(count, index, block_size=(64, 64))
        >>> q, k, v = torch.randn(3, 1, 128, 2, 8)
        >>> flash_attn_func(q, k, v, block_sparse_tensors=lists).shape
        torch.Size([1, 128, 2, 8])
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None
    seqlens: tuple[int, int] | None = None
    mask_mod: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # functions that are made inside of others cannot be pickled, and lists always could
        return BlockSparseTensorsTorch, tuple(self[:-1])


class ComputedLists(tuple[BlockSparseTensors, TorchLists]):
    """The pair that `compute_block_sparsity` returns, as in flash-attn-4: lists for kernels, and as
    torch tensors. torch_lists: the latter with the block size, which the pair lacks."""

    torch_lists: BlockSparseTensorsTorch

    @staticmethod
    def create(lists: BlockSparseTensorsTorch) -> ComputedLists:
        for_kernels = to_cute_block_sparse_tensors(lists)
        assert for_kernels is not None
        pair = ComputedLists((for_kernels, lists[:4]))
        pair.torch_lists = lists
        return pair


class LogicalBits(NamedTuple):
    """States of logical blocks as bits: bit kb % 32 of word kb // 32 describes key block kb.

    visible (partial or full), full: int32 (B', H', num_q_blocks, ceil(num_k_blocks / 32)); bits
    after the last block are 0. block_q, block_k: tokens of a block.
    """

    visible: Tensor
    full: Tensor
    block_q: int
    block_k: int


class RetiledLists(NamedTuple):
    """Lists for a kernel. bits is None: they are the caller's, whose blocks consist of whole tiles.
    Otherwise they are in tiles of the kernel; a partial tile may hold parts of several logical
    blocks, and `bits` give the state of each."""

    lists: BlockSparseTensorsTorch
    bits: LogicalBits | None


def to_cute_block_sparse_tensors(lists: Any) -> BlockSparseTensors | None:
    """The same lists for a compiled kernel, sharing memory; None for None.

    lists: anything that `from_block_mask` accepts. The tensors have dynamic layouts, so a kernel
    compiled with them takes lists of other extents.
    """
    if lists is None:
        return None
    from cutlass.cute.runtime import from_dlpack

    def to_cute(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if tensor.stride(-1) != 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        wrapped: Any = from_dlpack(tensor.detach(), assumed_align=4, enable_tvm_ffi=True)
        return wrapped.mark_layout_dynamic(leading_dim=tensor.dim() - 1)

    return BlockSparseTensors(*(to_cute(x) for x in from_block_mask(lists)[:4]))


def from_block_mask(lists: Any) -> BlockSparseTensorsTorch:
    """Convert block lists to a `BlockSparseTensorsTorch`.

    It takes a `BlockSparseTensorsTorch` (returned as it is), the pair that `compute_block_sparsity`
    returned, or a torch `BlockMask`. Only the lists, the block size and the lengths of a
    `BlockMask` are taken (`mod_of_block_mask` gives its mask_mod).

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(lists, BlockSparseTensorsTorch):
        return lists
    if isinstance(lists, ComputedLists):
        return lists.torch_lists
    try:
        block_q, block_k = lists.BLOCK_SIZE
        # torch makes one block of any length where there is no mask
        is_for_all = block_q >= _BLOCK_OF_ALL <= block_k
        return BlockSparseTensorsTorch(
            lists.kv_num_blocks,
            lists.kv_indices,
            lists.full_kv_num_blocks,
            lists.full_kv_indices,
            (int(block_q), int(block_k)),
            None if is_for_all else lists.seq_lengths,
        )
    except AttributeError:
        raise TypeError(
            "block_sparse_tensors or block_sparse_tensors_torch must be a BlockSparseTensorsTorch, "
            "the pair that compute_block_sparsity returned, a torch BlockMask or a SelectedBlocks, "
            f"got {_kind(lists)}"
        ) from None


def mod_of_block_mask(lists: Any) -> Callable[..., Any] | None:
    """The mask_mod that a torch `BlockMask` or our `create_block_mask` keeps; None for other lists,
    beside which calls take one.

    Raises ValueError: the block mask is a slice of another, which has none.
    """
    mask_mod: Callable[..., Any] | None = getattr(lists, "mask_mod", None)
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError(
            "block_sparse_tensors is a slice of another BlockMask, and slices have no mask_mod: "
            "give the mask_mod of the other, shifted by what was cut off, as mask_mod"
        )
    return mask_mod


def _kind(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"a {name} of {[type(x).__name__ for x in value]}"
    return name


# -- checks -------------------------------------------------------------------------------------


def check_block_lists(
    lists: BlockSparseTensorsTorch,
    batch: int,
    heads_q: int,
    seqlen_q: int | None,
    seqlen_k: int,
    device: torch.device,
) -> BlockSparseTensorsTorch:
    """The lists with `block_size` filled in, after checks against a problem.

    A missing block size is taken as 128 x 128 if that gives the numbers of blocks. Otherwise each
    side takes the only multiple of 16 that gives its number. CUDA tensors are not read; on the CPU
    the entries are checked. seqlen_q None: the lists may have more rows than the call has queries,
    and the call then gives its q_start.

    Raises:
        TypeError: an argument is no tensor, or is of a tensor subclass.
        ValueError: a dtype, shape, device, size or (on the CPU) entry is wrong, or the block size
            is ambiguous.
    """
    shape = _check_shapes(lists, batch, heads_q, device)
    counts = shape[2:]
    if seqlen_q is None:
        seqlen_q = _rows_of_lists(lists, counts[0])
    seqlens = seqlen_q, seqlen_k
    if lists.block_size is None:
        block_size = _infer_block_size(counts, seqlens)
    else:
        block_size = as_block_size(lists.block_size, "block_size")
        expected = tuple(
            ceil_div(seqlen, block) for seqlen, block in zip(seqlens, block_size, strict=True)
        )
        if counts != expected:
            raise ValueError(
                f"mask_block_idx must have {expected[0]} x {expected[1]} blocks for block_size "
                f"{block_size}, seqlen_q {seqlen_q} and seqlen_k {seqlen_k}, got shape {shape}"
            )
    if device.type == "cpu":
        _check_entries(lists)
    return lists._replace(block_size=block_size)


def _rows_of_lists(lists: BlockSparseTensorsTorch, num_blocks: int) -> int:
    """Number of rows that lists cover; their last block may be cut."""
    if lists.seqlens is not None:
        return int(lists.seqlens[0])
    if lists.block_size is None:
        raise ValueError(
            f"block_size must be given beside q_start: mask_block_idx has {num_blocks} blocks of "
            "queries, and the call may have fewer"
        )
    return num_blocks * as_block_size(lists.block_size, "block_size")[0]


def _check_shapes(
    lists: BlockSparseTensorsTorch, batch: int, heads_q: int, device: torch.device
) -> tuple[int, int, int, int]:
    """Check shapes, and return the shape of the index tensors."""
    if (lists.full_block_cnt is None) != (lists.full_block_idx is None):
        given, missing = "full_block_cnt", "full_block_idx"
        if lists.full_block_cnt is None:
            given, missing = missing, given
        raise ValueError(f"{given} is given and {missing} is not; full blocks need both or none")
    tensors: dict[str, Any] = {
        name: x for name, x in named_tensors(lists) if x is not None or name.startswith("mask")
    }
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        check_plain(name, tensor)
        rank = 3 if name.endswith("cnt") else 4
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got shape {_shape(tensor)}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, as q is, got {tensor.device}")
    shape = _shape(lists.mask_block_idx)
    for name, tensor in tensors.items():
        expected = shape[: tensor.dim()]
        if _shape(tensor) != expected:
            raise ValueError(
                f"{name} must have shape {expected} beside mask_block_idx of shape {shape}, got "
                f"{_shape(tensor)}"
            )
    for axis, (what, extent) in enumerate((("batch", batch), ("query heads", heads_q))):
        if shape[axis] not in (1, extent):
            allowed = "1" if extent == 1 else f"1 or {extent}"
            raise ValueError(
                f"mask_block_idx must have {allowed} as dimension {axis} ({what}), got shape "
                f"{shape}"
            )
    return shape


def _check_entries(lists: BlockSparseTensorsTorch) -> None:
    num_blocks = lists.mask_block_idx.shape[-1]
    column = torch.arange(num_blocks, device="cpu")
    for name, tensor in named_tensors(lists):
        if tensor is None or tensor.numel() == 0:
            continue
        if name.endswith("cnt"):
            count, bound = tensor, num_blocks
        else:
            used = column < count[..., None]
            falling = (tensor.diff(dim=-1) <= 0) & used[..., 1:]
            if falling.any():
                row = tuple(falling.nonzero()[0, :3].tolist())
                raise ValueError(
                    f"{name} must be strictly increasing up to the count, got "
                    f"{tensor[row][used[row]].tolist()} at (batch, head, q_block) = {row}"
                )
            tensor, bound = torch.where(used, tensor, 0), num_blocks - 1
        low, high = (int(x) for x in tensor.aminmax())
        if low < 0 or high > bound:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} must lie in [0, {bound}], got {wrong}")
    partial, full = _is_listed(*lists[:2]), _is_listed(*lists[2:4])
    if partial is not None and full is not None and (partial & full).any():
        where = tuple((partial & full).nonzero()[0].tolist())
        raise ValueError(
            "mask_block_idx and full_block_idx must be disjoint, got the block (batch, head, "
            f"q_block, k_block) = {where} in both"
        )


def _infer_block_size(counts: Sequence[int], seqlens: Sequence[int]) -> tuple[int, int]:
    sides = list(zip(("seqlen_q", "seqlen_k"), counts, seqlens, strict=True))
    if all(ceil_div(seqlen, DEFAULT_BLOCK) == count for _, count, seqlen in sides):
        return DEFAULT_BLOCK, DEFAULT_BLOCK
    found = []
    for name, count, seqlen in sides:
        fitting = _fitting_blocks(count, seqlen)
        if len(fitting) != 1:
            reason = "no multiple of 16 fits" if not fitting else f"any of {_ends(fitting)} fits"
            raise ValueError(
                f"block_size must be given: mask_block_idx has {count} blocks for {name} {seqlen}, "
                f"and {reason}"
            )
        found.append(fitting[0])
    return found[0], found[1]


def _fitting_blocks(count: int, seqlen: int) -> range:
    """The multiples of 16 that cut a sequence into `count` blocks; if that is 1, one for all."""
    if count == 1 and seqlen > 0:
        block = ceil_div(seqlen, DEFAULT_BLOCK) * DEFAULT_BLOCK
        return range(block, block + 1)
    if count < 1 or seqlen < count:
        return range(0)
    # ceil(seqlen / block) == count, for integers
    smallest = ceil_div(seqlen, count)
    end = ceil_div(seqlen, count - 1)
    return range(ceil_div(smallest, _INFERRED_STEP) * _INFERRED_STEP, end, _INFERRED_STEP)


def _ends(values: range) -> str:
    return ", ".join(map(str, values)) if len(values) < 4 else f"{values[0]} to {values[-1]}"


def as_block_size(value: Any, name: str) -> tuple[int, int]:
    """Block size as a pair: one number stands for both sides."""
    sides = (value, value) if isinstance(value, int) else value
    try:
        block_q, block_k = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be (queries, keys), got {value!r}") from None
    if block_q < 1 or block_k < 1:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return block_q, block_k


def named_tensors(lists: BlockSparseTensorsTorch) -> list[tuple[str, Tensor | None]]:
    """The tensors of lists by the names of their fields."""
    return list(zip(lists._fields[:4], lists[:4], strict=True))


def _shape(tensor: Tensor) -> Any:
    return tuple(tensor.shape)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- lists and states ---------------------------------------------------------------------------


def dense_states(lists: BlockSparseTensorsTorch) -> Tensor:
    """uint8 (B', H', num_q_blocks, num_k_blocks): EMPTY, PARTIAL or FULL, without a sync."""
    partial, full = _is_listed(*lists[:2]), _is_listed(*lists[2:4])
    assert partial is not None
    states = partial.to(torch.uint8)
    return states if full is None else states.masked_fill_(full, FULL)


def _is_listed(cnt: Tensor | None, idx: Tensor | None) -> Tensor | None:
    """Boolean (B', H', num_q_blocks, num_k_blocks): true for the blocks in a list."""
    if cnt is None or idx is None:
        return None
    used = torch.arange(idx.shape[-1], device=idx.device) < cnt[..., None]
    target = torch.where(used, idx, 0).long()
    times = torch.zeros(idx.shape, dtype=torch.int32, device=idx.device)
    return times.scatter_add_(-1, target, used.int()) > 0


def lists_of_kept(
    block_mask: Any, batch: int, heads: tuple[int, int], seqlens: tuple[int | None, int]
) -> BlockSparseTensorsTorch:
    """Lists of PaddlePaddle's `block_mask`: 1 for each block of 128 x 128 that is kept, else 0.

    block_mask: int32 or bool (batch | 1, heads, query blocks, key blocks), with 1, heads_kv or
    heads_q heads. heads: of queries, and of keys and values. seqlens: queries and keys; None: any
    number of queries. Made on the device without waiting for it; on the CPU the values are checked.

    Raises:
        TypeError: block_mask is no int32 or bool tensor.
        ValueError: its shape is another one, or on the CPU, one of its values.
    """
    if not isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask must be an int32 tensor, got {type(block_mask).__name__}")
    if block_mask.dtype not in (torch.int32, torch.bool):
        raise TypeError(f"block_mask must be int32, 0 or 1, got {block_mask.dtype}")
    shape = _shape(block_mask)
    heads_q, heads_kv = heads
    blocks = [None if n is None else ceil_div(n, DEFAULT_BLOCK) for n in seqlens]
    if (
        len(shape) != 4
        or shape[0] not in (1, batch)
        or shape[1] not in (1, heads_kv, heads_q)
        or any(n not in (None, found) for n, found in zip(blocks, shape[2:], strict=True))
    ):
        rows = "query blocks" if blocks[0] is None else blocks[0]
        raise ValueError(
            f"block_mask must have shape ({batch} or 1; 1, {heads_kv} or {heads_q} heads; {rows}; "
            f"{blocks[1]}), a number for each block of 128 x 128, got {shape}"
        )
    if block_mask.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = block_mask[(block_mask != 0) & (block_mask != 1)]
        if wrong.numel():
            raise ValueError(f"block_mask must have values 0 and 1, got {int(wrong[0])}")
    is_kept = block_mask != 0
    if shape[1] not in (1, heads_q):
        is_kept = is_kept.repeat_interleave(heads_q // max(heads_kv, 1), dim=1)
    return BlockSparseTensorsTorch(*_compact(is_kept), block_size=(DEFAULT_BLOCK, DEFAULT_BLOCK))


def _to_lists(
    states: Tensor, has_full: bool, block_size: tuple[int, int]
) -> BlockSparseTensorsTorch:
    """The inverse of `dense_states`."""
    lists = BlockSparseTensorsTorch(*_compact(states == PARTIAL), block_size=block_size)
    if has_full:
        full_cnt, full_idx = _compact(states == FULL)
        lists = lists._replace(full_block_cnt=full_cnt, full_block_idx=full_idx)
    return lists


def _compact(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """(cnt, idx) of the marked blocks, ascending, with zeros after them."""
    column = torch.arange(is_listed.shape[-1], device=is_listed.device)
    marked_so_far = is_listed.cumsum(-1)
    cnt = is_listed.sum(-1)
    target = torch.where(is_listed, marked_so_far - 1, cnt[..., None] + column - marked_so_far)
    values = torch.where(is_listed, column, 0).int()
    idx = torch.zeros(is_listed.shape, dtype=torch.int32, device=is_listed.device)
    return cnt.int(), idx.scatter_(-1, target, values)


# -- other block sizes --------------------------------------------------------------------------


def retile_lists(
    lists: BlockSparseTensorsTorch, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int
) -> RetiledLists:
    """Convert lists to units that a kernel with tiles of tile_m x tile_n can walk.

    lists: of `check_block_lists`. If a block consists of whole tiles on both sides, the lists are
    returned unchanged and the kernel maps blocks to tiles itself. Otherwise a tile is absent if all
    logical blocks that it touches inside the sequences are absent, full if all are full, and
    partial otherwise.

    The result is kept as long as the tensors live. After an in-place change it is computed anew.
    Nothing is kept for tensors created in inference mode, because their changes cannot be seen. The
    capture of a CUDA graph retiles the lists, and every replay does so again. torch does not notice
    writes by a replayed graph, through `.data`, or by a collective. Later calls on other streams do
    not wait for the first call, which computes the result. Raises ValueError: no block_size.
    """
    if lists.block_size is None:
        raise ValueError("lists must have a block_size, got None")
    block_q, block_k = lists.block_size
    if block_q % tile_m == 0 and block_k % tile_n == 0:
        return RetiledLists(lists, None)
    return _retiled.get(lists, (tile_m, tile_n, seqlen_q, seqlen_k))


def block_bits(
    lists: BlockSparseTensorsTorch, make: Callable[..., LogicalBits] | None = None
) -> LogicalBits:
    """The states of the blocks as bits, for a kernel that does not walk lists.

    They are kept as the results of `retile_lists` are, and shared with them. make: makes them of
    lists that were not seen before; None: a few tensor operations do.
    """
    return _bits.get(lists, (), make)


def know_block_bits(lists: BlockSparseTensorsTorch, bits: LogicalBits) -> None:
    """Let `block_bits` return bits that were made together with the tensors of lists."""
    _bits.put(lists, (), bits)


_Made = TypeVar("_Made")


class _Entry(NamedTuple):
    """A result, and its inputs and their versions. is_captured: it is for one CUDA graph alone."""

    references: list[weakref.ref[Tensor]]
    versions: list[int]
    is_captured: bool
    result: Any


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Kept(Generic[_Made]):
    """Cache of what was made from lists and sizes, by identity and version of the tensors."""

    def __init__(self, make: Callable[..., _Made]) -> None:
        self._make = make
        self._entries: dict[Any, _Entry] = {}

    def get(
        self,
        lists: BlockSparseTensorsTorch,
        sizes: tuple[int, ...],
        make: Callable[..., _Made] | None = None,
    ) -> _Made:
        make = make or self._make
        tensors = [tensor for _, tensor in named_tensors(lists) if tensor is not None]
        if any(tensor.is_inference() for tensor in tensors):
            return make(lists, *sizes)
        key = tuple(map(id, tensors)), lists.block_size, sizes
        is_captured = _is_capturing(tensors[0])
        entry = self._entries.get(key)
        if entry is not None:
            references, made_from, was_captured, result = entry
            # an id alone may belong to a newer tensor
            alive = all(ref() is x for ref, x in zip(references, tensors, strict=True))
            versions = [tensor._version for tensor in tensors]
            if alive and made_from == versions and was_captured is is_captured:
                made: _Made = result
                return made
        with torch.inference_mode(False), torch.no_grad():
            result = make(lists, *sizes)
        if not is_captured:
            # memory of a graph being captured holds nothing yet, and a replay may find other lists
            self.put(lists, sizes, result)
        return result

    def put(self, lists: BlockSparseTensorsTorch, sizes: tuple[int, ...], result: _Made) -> None:
        """Keep a result for these tensors, as they are now."""
        tensors = [tensor for _, tensor in named_tensors(lists) if tensor is not None]
        key = tuple(map(id, tensors)), lists.block_size, sizes
        references = [
            weakref.ref(tensor, lambda _: self._entries.pop(key, None)) for tensor in tensors
        ]
        versions = [tensor._version for tensor in tensors]
        self._entries[key] = _Entry(references, versions, _is_capturing(tensors[0]), result)


def _retile(
    lists: BlockSparseTensorsTorch, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int
) -> RetiledLists:
    assert lists.block_size is not None
    block_q, block_k = lists.block_size
    states = dense_states(lists)
    is_visible, is_full = states != EMPTY, states == FULL
    touched_q = _touched(tile_m, block_q, seqlen_q, states.device)
    touched_k = _touched(tile_n, block_k, seqlen_k, states.device)
    # the blocks that a tile touches are a rectangle: fold one side, then the other
    for touched, dim in ((touched_q, 2), (touched_k, 3)):
        shape = (*is_visible.shape[:dim], *touched.shape, *is_visible.shape[dim + 1 :])
        flat = touched.flatten()
        is_visible = is_visible.index_select(dim, flat).view(shape).any(dim + 1)
        is_full = is_full.index_select(dim, flat).view(shape).all(dim + 1)
    tiles = is_visible.to(torch.uint8).masked_fill_(is_full, FULL)
    has_full = lists.full_block_cnt is not None
    return RetiledLists(_to_lists(tiles, has_full, (tile_m, tile_n)), block_bits(lists))


_retiled = _Kept(_retile)


def _make_bits(lists: BlockSparseTensorsTorch) -> LogicalBits:
    assert lists.block_size is not None
    states = dense_states(lists)
    return LogicalBits(_pack(states != EMPTY), _pack(states == FULL), *lists.block_size)


_bits = _Kept(_make_bits)


def _touched(tile: int, block: int, seqlen: int, device: torch.device) -> Tensor:
    """int64 (tiles, n): the blocks that each tile touches inside the sequence, with repeats."""
    first_token = torch.arange(ceil_div(seqlen, tile), device=device) * tile
    first = first_token // block
    last = ((first_token + tile).clamp(max=seqlen) - 1) // block
    most = ceil_div(tile - 1, block) + 1
    offset = torch.arange(most, device=device)
    return torch.minimum(first[:, None] + offset, last[:, None])


def _pack(bits: Tensor) -> Tensor:
    """Pack the last dimension into int32 words of 32 bits."""
    padded = torch.nn.functional.pad(bits.int(), (0, -bits.shape[-1] % WORD))
    shift = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    words = padded.unflatten(-1, (padded.shape[-1] // WORD, WORD))
    # bits of different places: the sum is their union
    return (words << shift).sum(-1, dtype=torch.int32)
