"""Block lists from a `mask_mod`, on the device, or on the CPU where there is none.

The callable, in CuTe or in torch, is evaluated once for every score inside the sequences, except in
blocks already known to be partial. On CUDA that takes two kernels and no sync. On the CPU the same
scan is compiled for the host; after a second it prints its progress on the terminal.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_mask_cute.block_sparsity import (
    BlockSparseTensorsTorch,
    ComputedLists,
    as_block_size,
)
from flash_mask_cute.call.check.keywords import public_call, refuse_keywords
from flash_mask_cute.lowering.pair import named_by_mods, resolve_mods
from flash_mask_cute.mask_prep.block_scan import HOST, ScanProblem, compile_scan
from flash_mask_cute.mods.aux_tensors import OutsideError, check_record, new_record
from flash_mask_cute.mods.on_cpu import all_inside
from flash_mask_cute.mods.signature import check_mod
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES
from flash_mask_cute.runtime.plain_tensors import check_plain
from flash_mask_cute.runtime.progress import tells_progress
from flash_mask_cute.runtime.target import Target

_TORCH_DTYPES = {cute_name: getattr(torch, name) for name, cute_name in CUTLASS_NAMES.items()}


def compute_blocksparse_tensors(
    tile_m: int,
    tile_n: int,
    batch_size: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mask_mod: Callable[..., Any],
    aux_tensors: Sequence[Any] | None,
    device: str | torch.device = "cuda",
    compute_full_blocks: bool = True,
    use_fast_sampling: bool = False,
) -> ComputedLists:
    """Compute lists for blocks of tile_m queries and tile_n keys.

    The lists are returned twice, in shared memory: as `cute.Tensor` (dynamic layouts), and as the
    torch tensors (mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx), all int32.
    Counts are (batch_size, num_heads, ceil(seqlen_q / tile_m)). Indices have one more dimension, of
    ceil(seqlen_k / tile_n). Attention accepts this pair as block_sparse_tensors, and reads the
    block size from it.

    aux_tensors: torch or cute tensors on `device`, as the mod expects them.
    compute_full_blocks: False leaves the last two tensors None, and every block with anything
        visible is partial.
    use_fast_sampling: look only at the four corners and the centre of a block, cut at the ends of
        the sequences. A block with visible scores elsewhere is wrongly absent if all five are
        hidden. A block with hidden scores elsewhere is wrongly full if all five are visible.
        Sampling is right for prefixes and for masks of the form k <= q + c, at any size. It is
        generally wrong for windows, documents, holes and dilations smaller than a block, and for
        random masks.

    Raises:
        TypeError: mask_mod is not callable, or reaches a value without an identity (pass tensors in
            aux_tensors); an aux tensor is no tensor, or of a subclass.
        ValueError: an extent is negative, a tile is empty, a device does not exist, or an aux
            tensor is on another device or has a dtype that mods do not read.
        NotImplementedError: there are no kernels for this GPU; or, on the CPU, the mod uses a
            GPU-only instruction.
        IndexError: on the CPU, the mod reads outside an aux tensor.
    """
    extents = (batch_size, num_heads), (seqlen_q, seqlen_k)
    block_size = as_block_size((tile_m, tile_n), "(tile_m, tile_n)")
    lists = _scan(
        mask_mod,
        _Scanned(*extents, block_size),
        aux_tensors,
        _as_device(device),
        has_full=compute_full_blocks,
        samples=use_fast_sampling,
    )
    return ComputedLists.create(lists)


compute_block_sparsity = compute_blocksparse_tensors


@public_call
def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: str | torch.device = "cuda",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    aux_tensors: Sequence[Any] | None = None,
    **unknown: NoReturn,
) -> BlockSparseTensorsTorch:
    """Like torch's function of this name, for a mask_mod written in torch or in CuTe.

    B, H: batch and query heads; None where the mask is the same for all of them (the mod then sees
    index 0). BLOCK_SIZE: (queries, keys), or one number for both; any size works with any kernel.
    The lists keep mask_mod, with which `flex_attention` takes them as its block_mask.

    Raises:
        TypeError, ValueError, NotImplementedError, IndexError: as `compute_blocksparse_tensors`.

    Example:
        >>> from flash_mask_cute import create_block_mask
        >>> lists = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
        >>> lists.mask_block_cnt.tolist(), lists.full_block_cnt.tolist()  # blocks of 128 x 128
        ([[[1, 1]]], [[[0, 1]]])
    """
    if unknown:
        refuse_keywords("create_block_mask", unknown)
    extents = (1 if B is None else B, 1 if H is None else H), (seqlen_q, seqlen_k)
    scanned = _Scanned(*extents, as_block_size(BLOCK_SIZE, "BLOCK_SIZE"), names=("B", "H"))
    lists = _scan(mask_mod, scanned, aux_tensors, _as_device(device))
    return lists._replace(mask_mod=mask_mod)


def _as_device(value: str | torch.device) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"device must be cpu or cuda, got {value!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {value!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, and torch sees no GPU; device='cpu' works anywhere")
    return device


class _Scanned(NamedTuple):
    """The scores that a scan looks at, and their blocks. names: the caller's, for batch_heads."""

    batch_heads: tuple[int, int]
    seqlens: tuple[int, int]
    block_size: tuple[int, int]
    names: tuple[str, str] = ("batch_size", "num_heads")


def _scan(
    mask_mod: Callable[..., Any],
    scanned: _Scanned,
    aux_tensors: Any,
    device: torch.device,
    *,
    has_full: bool = True,
    samples: bool = False,
) -> BlockSparseTensorsTorch:
    batch_heads, seqlens, block_size, names = scanned
    if mask_mod is None:
        raise TypeError("mask_mod must be a callable, got None")
    given = None, mask_mod, aux_tensors, device
    mods = resolve_mods(*given)
    mask_mod, aux_tensors = mods.mask_mod or mask_mod, mods.aux_tensors
    check_mod("mask_mod", mask_mod)
    extents = zip((*names, "seqlen_q", "seqlen_k"), (*batch_heads, *seqlens), strict=True)
    for name, extent in extents:
        if isinstance(extent, bool) or not isinstance(extent, int):
            raise TypeError(f"{name} must be an int, got {extent!r}")
        if extent < 0:
            raise ValueError(f"{name} must not be negative, got {extent}")
    blocks = tuple(-(-seqlen // block) for seqlen, block in zip(seqlens, block_size, strict=True))
    # also within inference mode: only ordinary tensors tell whether they changed
    with torch.inference_mode(False):
        shape = (*batch_heads, *blocks)
        cnt = [torch.empty(shape[:3], dtype=torch.int32, device=device) for _ in range(2)]
        idx = [torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2)]
    lists = BlockSparseTensorsTorch(
        cnt[0],
        idx[0],
        cnt[1] if has_full else None,
        idx[1] if has_full else None,
        block_size,
        seqlens,
    )
    # a mode of torch may make others
    check_plain("mask_block_cnt", cnt[0])
    aux = _as_torch_tensors(aux_tensors, cnt[0].device)
    arch = Target.from_device(device).arch if device.type == "cuda" else HOST
    problem = ScanProblem(arch, ScanProblem.describe_aux(aux), has_full, samples)
    if math.prod(shape) == 0:
        for x in cnt:
            x.zero_()
        return lists
    try:
        run_scan(mask_mod, problem, lists, seqlens, aux)
    except OutsideError as error:
        raise named_by_mods(error, *given) from error
    return lists


def run_scan(
    mask_mod: Callable[..., Any],
    problem: ScanProblem,
    lists: BlockSparseTensorsTorch,
    seqlens: tuple[int, int],
    aux: tuple[Tensor, ...],
) -> None:
    """Fill `lists`, which have a block size and at least one block."""
    assert lists.block_size is not None
    compiled = compile_scan(mask_mod, problem)
    arguments = lists[:4], (*lists.block_size, *seqlens), aux or None
    if problem.arch == HOST:
        # a scan writes the count of a list when it is done
        cnt = lists.mask_block_cnt.fill_(-1)
        what = f"block lists of {getattr(mask_mod, '__name__', type(mask_mod).__name__)}"
        with tells_progress(what, lambda: int((cnt >= 0).count_nonzero()), cnt.numel()):
            _run_on_host(mask_mod, problem, compiled, arguments, cnt.shape[:2])
    else:
        with torch.cuda.device_of(lists.mask_block_cnt):
            compiled.function(*arguments)


def _run_on_host(
    mask_mod: Callable[..., Any],
    problem: ScanProblem,
    compiled: Compiled,
    arguments: tuple[Any, ...],
    batch_heads: Sequence[int],
) -> None:
    _, (_, _, seqlen_q, seqlen_k), aux = arguments
    reads = compiled.meta["reads"]
    if reads is not None:
        if all_inside(reads, aux or (), (*batch_heads, seqlen_q, seqlen_k)):
            compiled.function(*arguments, None)
            return
        compiled = compile_scan(mask_mod, replace(problem, checked=True))
    record = new_record()
    compiled.function(*arguments, record)
    check_record(record, "mask_mod", mask_mod)


# -- aux tensors --------------------------------------------------------------------------------


def _as_torch_tensors(aux_tensors: Any, device: torch.device) -> tuple[Tensor, ...]:
    if aux_tensors is None:
        return ()
    if not isinstance(aux_tensors, list | tuple):
        raise TypeError(f"aux_tensors must be a list of tensors, got {type(aux_tensors).__name__}")
    aux = tuple(_as_torch_tensor(x, f"aux_tensors[{i}]", device) for i, x in enumerate(aux_tensors))
    for i, tensor in enumerate(aux):
        if tensor.device != device:
            raise ValueError(f"aux_tensors[{i}] must be on {device}, got {tensor.device}")
    return aux


def _as_torch_tensor(tensor: Any, name: str, device: torch.device) -> Tensor:
    """A torch tensor as it is, or one over the memory of a cute tensor, which must outlive it."""
    if isinstance(tensor, Tensor):
        check_plain(name, tensor)
        if tensor.is_nested:
            raise TypeError(f"{name} must be one tensor, got a nested one: pad it")
        return tensor.detach().resolve_neg()
    try:
        dtype = _TORCH_DTYPES[tensor.element_type.__name__]
        shape, strides, address = tensor.shape, tensor.stride, tensor.data_ptr
        on_cpu = tensor.memspace.name != "gmem"
    except (AttributeError, KeyError):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}") from None
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    num_bytes = (0 if 0 in shape else extent) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu" if on_cpu else device)
    if on_cpu:
        memory = torch.frombuffer((ctypes.c_byte * num_bytes).from_address(address), dtype=dtype)
    else:
        memory = torch.as_tensor(_DeviceBytes(address, num_bytes), device=device).view(dtype)
    return memory.as_strided(shape, strides)


class _DeviceBytes:
    """Device memory in the form that the CUDA array interface calls an array of bytes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
