"""Calls of the public functions that go different ways through the checks: small, right, on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from cases import int32
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mask_cute import (
    SelectedBlocks,
    builders,
    create_block_mask,
    explain,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flashmask_attention,
    flex_attention,
)

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
BATCH, ROWS, HEADS, DIM = 2, 8, 2, 16
Make = Callable[[], dict[str, Any]]
Ways = dict[str, Make]


class AnyMode(TorchDispatchMode):
    """A dispatch mode, in which calls become operators; it changes nothing."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _causal_cute(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return q >= k


def _doubled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * 2


# -- over a cache --------------------------------------------------------------------------------


def _cache_ways() -> Iterator[tuple[str, Make]]:
    formats = {"fp32": (torch.float32,) * 2, "bf16": (BF16,) * 2, "fp8": (BF16, FP8)}
    for name, (dtype, stored) in formats.items():
        for way, make in _ways_over(dtype, stored).items():
            yield f"{name}, {way}", make


def _ways_over(dtype: torch.dtype, stored: torch.dtype) -> Ways:
    def queries(rows: int = 2) -> Tensor:
        return normal(BATCH, rows, HEADS, DIM, dtype=dtype)

    def cache(entries: int = BATCH, rows: int = ROWS) -> dict[str, Any]:
        shape = entries, rows, 1, DIM
        return {name: normal(*shape).to(stored) for name in ("k_cache", "v_cache")}

    def pages() -> dict[str, Any]:
        return cache(6, 4) | {"page_table": int32(0, 1, 2, 3).view(2, 2)}

    def new(rows: int = 2) -> dict[str, Any]:
        return {name: normal(BATCH, rows, 1, DIM, dtype=dtype) for name in "kv"}

    index = {"cache_batch_idx": int32(3, 0)}
    padding = {"cache_leftpad": int32(1, 0)}
    used = {"cache_seqlens": int32(5, 3)}
    return {
        "contiguous": lambda: cache() | {"q": queries()},
        "one length": lambda: cache() | {"q": queries(), "cache_seqlens": 5},
        "lengths": lambda: cache() | used | {"q": queries()},
        "batch_idx": lambda: cache(4) | index | {"q": queries()},
        "leftpad": lambda: cache() | padding | used | {"q": queries()},
        "batch_idx and leftpad": lambda: cache(4) | index | padding | {"q": queries()},
        "pages": lambda: pages() | used | {"q": queries()},
        "pages, batch_idx": lambda: (
            pages() | used | {"cache_batch_idx": int32(1, 0), "q": queries()}
        ),
        "pages, leftpad": lambda: pages() | used | padding | {"q": queries()},
        "packed queries": lambda: (
            cache() | {"q": normal(4, HEADS, DIM, dtype=dtype), "cu_seqlens_q": int32(0, 1, 4)}
        ),
        "new rows": lambda: cache() | used | new() | {"q": queries()},
        "new rows, batch_idx, leftpad": lambda: (
            cache(4) | used | index | padding | new() | {"q": queries()}
        ),
        "new rows, rotary": lambda: (
            cache()
            | used
            | new()
            | {"q": queries(), "rotary_cos": normal(ROWS, 4), "rotary_sin": normal(ROWS, 4)}
        ),
        "new rows in pages": lambda: pages() | used | new() | {"q": queries()},
        "no new rows": lambda: cache() | used | new(0) | {"q": queries()},
        "no queries": lambda: cache() | {"q": queries(0)},
        "no rows": lambda: cache(rows=0) | {"q": queries()},
        "no batch": lambda: cache(0) | {"q": queries()[:0]},
        "batch_idx, mask_mod": lambda: cache(4) | index | {"q": queries(), "mask_mod": _causal},
        "score_mod": lambda: cache() | {"q": queries(), "score_mod": _doubled},
    }


# -- of q, k and v -------------------------------------------------------------------------------


def _operands(
    grad: bool, rows: int = ROWS, keys: int | None = None, batch: int = BATCH
) -> dict[str, Any]:
    keys = rows if keys is None else keys
    shapes = {
        "q": (batch, rows, HEADS, DIM),
        "k": (batch, keys, 1, DIM),
        "v": (batch, keys, 1, DIM),
    }
    return {name: normal(*shape).requires_grad_(grad) for name, shape in shapes.items()}


def _dense_ways() -> Iterator[tuple[str, Make]]:
    more: dict[str, Callable[[bool], dict[str, Any]]] = {
        "plain": _operands,
        "no keys": lambda grad: _operands(grad, keys=0),
        "no queries": lambda grad: _operands(grad, 0, ROWS),
        "no batch": lambda grad: _operands(grad, batch=0),
        "documents": lambda grad: (
            _operands(grad, 600) | {"startend_row_indices": builders.causal_document([280, 320])}
        ),
        "columns": lambda grad: (
            _operands(grad) | {"startend_row_indices": builders.causal_document([3, 5])}
        ),
        "score_mod": lambda grad: _operands(grad) | {"score_mod": _doubled},
        "mask_mod": lambda grad: _operands(grad) | {"mask_mod": _causal},
        "CuTe mask_mod": lambda grad: _operands(grad) | {"mask_mod": _causal_cute},
        "a selection of blocks": lambda grad: (
            _operands(grad, 128)
            | {"block_sparse_tensors": SelectedBlocks(int32(0).expand(BATCH, 1, 128, 1), 64)}
        ),
        "segments": lambda grad: _operands(grad, 600) | {"seqlen_k_per_split": 512},
        "splits": lambda grad: _operands(grad) | {"num_splits": 2},
    }
    for (name, make), grad in product(more.items(), (False, True)):
        yield f"{name}{', gradients' * grad}", lambda make=make, grad=grad: make(grad)


def _varlen_ways() -> Iterator[tuple[str, Make]]:
    def packed(grad: bool, total_q: int, total_k: int, common: bool = False) -> dict[str, Any]:
        rows_k = (1, total_k) if common else (total_k,)
        shapes = {"q": (total_q, HEADS), "k": (*rows_k, 1), "v": (*rows_k, 1)}
        found: dict[str, Any] = {
            name: normal(*shape, DIM).requires_grad_(grad) for name, shape in shapes.items()
        }
        found["cu_seqlens_q"] = int32(0, total_q // 3, total_q)
        if not common:
            found["cu_seqlens_k"] = int32(0, total_k // 2, total_k)
        return found

    more: dict[str, Callable[[bool], dict[str, Any]]] = {
        "packed": lambda grad: packed(grad, 8, 8),
        "packed, no queries": lambda grad: packed(grad, 0, 8),
        "packed, no keys": lambda grad: packed(grad, 8, 0),
        "common keys": lambda grad: packed(grad, 8, 8, common=True),
        "rows in use": lambda grad: (
            _operands(grad) | {"seqused_q": int32(3, 8), "seqused_k": int32(5, 2)}
        ),
        "dense": _operands,
    }
    for (name, make), grad in product(more.items(), (False, True)):
        yield f"{name}{', gradients' * grad}", lambda make=make, grad=grad: make(grad)
    pages = {"page_table": int32(0, 1, 2, 3).view(2, 2), "seqused_k": int32(5, 3)}
    for stored in (BF16, FP8):
        q = normal(BATCH, 2, HEADS, DIM, dtype=BF16)
        pool, rows = (normal(*shape, 1, DIM).to(stored) for shape in ((6, 4), (2, 8)))
        yield f"pages of {stored}", lambda q=q, pool=pool: {"q": q, "k": pool, "v": pool} | pages
        yield (
            f"used {stored}",
            lambda q=q, rows=rows: {"q": q, "k": rows, "v": rows, "seqused_k": int32(5, 3)},
        )
    yield "causal of sequences", lambda: _operands(False) | {"causal": int32(1, 0)}


def _flashmask_ways() -> Iterator[tuple[str, Make]]:
    columns = builders.causal_document([3, 5]).startend_row_indices
    for grad in (False, True):
        said = ", gradients" * grad
        yield f"plain{said}", lambda grad=grad: _operands(grad)
        yield f"no keys{said}", lambda grad=grad: _operands(grad, keys=0)
        yield f"window{said}", lambda grad=grad: _operands(grad) | {"window_size": 3}
        yield (
            f"columns{said}",
            lambda grad=grad: _operands(grad) | {"startend_row_indices": columns, "causal": True},
        )


def _flex_ways() -> Iterator[tuple[str, Make]]:
    def operands(grad: bool, keys: int = ROWS) -> dict[str, Any]:
        rows = {"query": ROWS, "key": keys, "value": keys}
        return {name: normal(BATCH, HEADS, n, DIM).requires_grad_(grad) for name, n in rows.items()}

    mask = torch_block_mask(_causal, None, None, ROWS, ROWS, device="cpu")
    for grad in (False, True):
        said = ", gradients" * grad
        yield f"plain{said}", lambda grad=grad: operands(grad)
        yield f"no keys{said}", lambda grad=grad: operands(grad, 0)
        yield f"score_mod{said}", lambda grad=grad: operands(grad) | {"score_mod": _doubled}
        yield f"block_mask{said}", lambda grad=grad: operands(grad) | {"block_mask": mask}
        yield f"lse{said}", lambda grad=grad: operands(grad) | {"return_lse": True}


def _parts(*shape: int) -> dict[str, Any]:
    return {"out_partial": normal(*shape, DIM), "lse_partial": normal(*shape)}


def _block_mask_arguments(rows: int) -> dict[str, Any]:
    sizes = {"B": None, "H": None, "seqlen_q": rows, "seqlen_k": 64}
    return {"mask_mod": _causal_cute, "device": "cpu"} | sizes


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**keywords: Any) -> Any:
        with AnyMode():
            return function(**keywords)

    return call


_DENSE, _VARLEN, _CACHED = map(dict, (_dense_ways(), _varlen_ways(), _cache_ways()))
WAYS: dict[Callable[..., Any], Ways] = {
    flash_attn_func: _DENSE,
    flash_attn_varlen_func: _VARLEN,
    flash_attn_with_kvcache: _CACHED,
    flashmask_attention: dict(_flashmask_ways()),
    flex_attention: dict(_flex_ways()),
    flash_attn_combine: {
        "batched": lambda: _parts(2, BATCH, ROWS, HEADS),
        "packed": lambda: _parts(2, ROWS, HEADS),
        "one part": lambda: _parts(1, BATCH, ROWS, HEADS),
        "no rows": lambda: _parts(2, BATCH, 0, HEADS),
        "out": lambda: _parts(2, BATCH, ROWS, HEADS) | {"out": normal(BATCH, ROWS, HEADS, DIM)},
    },
    create_block_mask: {
        "rows": lambda: _block_mask_arguments(64),
        "no rows": lambda: _block_mask_arguments(0),
    },
    explain: {"plain": lambda: _operands(False)},
}
# the same calls as operators
BY_OPERATOR = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)


def caller_of(function: Callable[..., Any], by_operator: bool) -> Callable[..., Any]:
    return _in_mode(function) if by_operator else function
