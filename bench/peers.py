"""The implementations that are compared.

A peer is called the way its own users would call it; what it cannot do, it says in `supports`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import DETERMINISTIC
from bench.cases import NATIVE, TRAINING, BenchCase, CaseTensors, Saved
from bench.cudnn_cases import NO_ROW_INTERVALS
from bench.flops import TILE, block_lists
from bench.masks import Mask
from bench.mods import (
    cute_mask_mod,
    cute_score_mod,
    mask_tables,
    score_tables,
    torch_mask_mod,
    torch_score_mod,
)
from bench.row_intervals import case_endpoints

Call = Callable[[], Any]
# masks of tokens that only see each other
DOCUMENT_MASKS = ("causal_document", "document", "share_question", "prefix_lm_document", "hstu")
DENSE_TOKENS = {"attention": 8192, "backward": 8192, "memory": 32768}


class Peer:
    """One implementation. needs: the module that a call needs."""

    name: str
    needs: str

    def supports(self, case: BenchCase) -> str | None:
        """Why the case cannot be measured, or None where it can."""
        raise NotImplementedError

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        """A callable without arguments that enqueues one pass: the forward, or where the case
        returns gradients, (dq, dk, dv) of `tensors.saved`, and dsink where it has sinks, the
        backward, of a kind in TRAINING with a forward before it."""
        raise NotImplementedError

    def unpack(self, raw: Any) -> tuple[Tensor, Tensor | None]:
        """Of what the call returned: out (.., heads, d_v) as q is laid out, and lse (batch, heads,
        n) or (heads, tokens), or None."""
        return raw[0], raw[1]


def list_tensors(
    mask: Mask, tile_m: int, tile_n: int, device: torch.device, *, by_key: bool = False
) -> list[Tensor]:
    """Partial count and index, full count and index, for all batches and heads: (1, 1, ...)."""
    lists = block_lists(mask, tile_m, tile_n, by_key=by_key)
    return [torch.from_numpy(array)[None, None].to(device) for array in lists]


def column_tensor(mask: Mask, device: torch.device) -> Tensor:
    """startend_row_indices (1, 1, n, vectors), int32."""
    return torch.from_numpy(mask.hidden.astype(np.int32))[None, None].to(device)


@lru_cache(maxsize=4)
def column_mask(mask: Mask, device: torch.device) -> Any:
    """The package's object of the intervals: one for both directions of a mask, as in training."""
    module = importlib.import_module("flash_mask_cute.masks.column_mask")
    documents = mask.name in DOCUMENT_MASKS
    return module.ColumnMask(column_tensor(mask, device), mask.causal, documents)


@dataclass(frozen=True)
class CutePeer(Peer):
    """A package with `interface._flash_attn_fwd` and `_flash_attn_bwd`: flash_mask_cute and
    flash-attn-4 alike.

    form: how the mask is told; None: as the case says, which is ours, and its backward takes the
        keywords of the forward. That of flash-attn-4 gets a window by its two sides, and lists of
        the query blocks of each key block, in blocks of 128 x 128: whole tiles at d=64 and d=128.
    lists_keyword, list_rows_64: its keyword for block lists, and the query rows of their blocks at
        d=64. A block of flash-attn-4 is best a tile of its kernel, which has 192 rows there.
    deterministic: the backward sums in a fixed order.
    """

    name: str
    needs: str
    form: str | None
    lists_keyword: str
    list_rows_64: int = TILE
    deterministic: bool = False

    @property
    def package(self) -> str:
        return self.needs.removesuffix(".interface")

    def supports(self, case: BenchCase) -> str | None:
        top = self.package.partition(".")[0]
        if not importlib.util.find_spec(top):
            return f"{top} is not installed"
        if self.form == "native" and case.mask not in NATIVE:
            return f"no flag means {case.mask}"
        if self.form == "mask_mod" and case.form == "native":
            return f"{case.mask} needs no mask_mod"
        if self.deterministic and not case.deterministic:
            return "no order of sums is compared"
        if self.form and case.deterministic:
            return "ours is compared with itself"
        if self.form and case.returns_gradients:
            if case.score_mod:
                return "no derivative of the score_mod is written for it"
            if self.form == "mask_mod" and not case.form.startswith("mask_mod"):
                return "a backward by mask_mod is measured where ours is told so, too"
        return None

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        interface = importlib.import_module(self.needs)
        options = self._options(case, tensors)
        if self.deterministic:
            options["deterministic"] = True
        # packages of before b17c50e, for `bench.compare`, pack documents there only
        has_documents = getattr(options.get("startend_row_indices"), "documents", False)
        if has_documents or case.kind in TRAINING:
            attention = importlib.import_module(self.package).flash_attn_func
            if not case.returns_gradients:
                return partial(attention, *tensors[:3], return_lse=True, **options)
            return autograd_call(case, tensors, partial(attention, **options), heads_first=False)
        if not case.is_backward:
            return partial(interface._flash_attn_fwd, *tensors[:3], return_lse=True, **options)
        assert tensors.saved is not None
        out, lse, dout = tensors.saved
        backward = partial(interface._flash_attn_bwd, *tensors[:3], out, dout, lse, **options)
        if tensors.sink is None or self.form:
            return backward
        # ours writes it where it is told to, flash-attn-4 returns it
        dsink = torch.full_like(tensors.sink, torch.nan)
        return lambda: (*backward(dsink=dsink), dsink)

    def _options(self, case: BenchCase, tensors: CaseTensors) -> dict[str, Any]:
        """What tells the mask and the mods."""
        q, cu_seqlens = tensors.q, tensors.cu_seqlens
        form = self.form or case.form
        options: dict[str, Any] = {}
        if form == "native":
            options["causal"] = case.causal
            if case.window is not None:
                options["window_size_left"] = case.window
                if self.form and case.is_backward:
                    options |= {"causal": False, "window_size_right": 0}
        elif form == "columns":
            mask = case.mask_of(case.n)
            options |= {"startend_row_indices": column_mask(mask, q.device), "causal": mask.causal}
        else:
            options |= self._mask_mod(case, q.device, has_lists=form != "mask_mod_alone")
        if case.score_mod:
            tables = score_tables(case, q.device)
            options["score_mod"] = cute_score_mod(case, tuple(tables))
            if tables:
                options["aux_tensors"] = list(tables.values())
        if case.softcap:
            options["softcap"] = case.softcap
        if tensors.sink is not None:
            options["learnable_sink"] = tensors.sink
        if cu_seqlens is not None:
            options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            options |= {"max_seqlen_q": case.n, "max_seqlen_k": case.n}
        return options

    def _mask_mod(self, case: BenchCase, device: torch.device, has_lists: bool) -> dict[str, Any]:
        mask = case.mask_of(case.n)
        options: dict[str, Any] = {"mask_mod": cute_mask_mod(mask)}
        if has_lists:
            by_key = bool(self.form) and case.is_backward
            tile = (self.list_rows_64 if case.d == 64 and not by_key else TILE, TILE)
            sparsity = importlib.import_module(f"{self.package}.block_sparsity")
            told = list_tensors(mask, *tile, device=device, by_key=by_key)
            lists = sparsity.BlockSparseTensorsTorch(*told, block_size=tile)
            options[self.lists_keyword] = lists
        if mask.tables:
            options["aux_tensors"] = list(mask_tables(mask, device).values())
        return options


def autograd_call(
    case: BenchCase,
    tensors: CaseTensors,
    attention: Callable[..., Any],
    *,
    heads_first: bool = True,
) -> Call:
    """A backward; its forward runs in each call of a kind in TRAINING, else once."""

    def turned(of_q: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.transpose(1, 2) for x in of_q] if heads_first else of_q

    def forward() -> Tensor:
        found = attention(*leaves)
        # flash-attn-4 returns lse as well
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    leaves = [x.requires_grad_() for x in turned([x.detach() for x in tensors[:3]])]
    assert tensors.saved is not None
    (dout,) = turned([tensors.saved.dout])
    if case.kind in TRAINING:
        return lambda: turned(torch.autograd.grad(forward(), leaves, dout))
    out = forward()
    return lambda: turned(torch.autograd.grad(out, leaves, dout, retain_graph=True))


@dataclass(frozen=True)
class FlexPeer(Peer):
    """torch's compiled FlexAttention with our block lists. backend: what torch compiles to."""

    name: str
    backend: str | None = None
    needs: str = "torch.nn.attention.flex_attention"

    def supports(self, case: BenchCase) -> str | None:
        # another backend takes the same block mask, in the same memory
        of_masks = ("prep", "memory") if self.backend is None else ()
        kinds = ("attention", "backward", *of_masks)
        plain = not (case.varlen or case.softcap or case.n_k or case.sink)
        measured = case.kind in kinds and plain
        left_out = "varlen, softcap, n_k, sinks, host time, sweeps and the memory of a backward"
        return None if measured else f"not measured for {left_out}"

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

        # Beyond a limit of recompilations torch would run uncompiled.
        torch._dynamo.reset()
        device = tensors.q.device
        options: dict[str, Any] = {"enable_gqa": case.heads != case.heads_kv}
        if self.backend is not None:
            options["kernel_options"] = {"BACKEND": self.backend}
        if case.score_mod:
            options["score_mod"] = torch_score_mod(case, score_tables(case, device))
        if case.mask != "full":
            mask = case.mask_of(case.n)
            mod = torch_mask_mod(mask, mask_tables(mask, device))
            partial_count, partial_index, *full = list_tensors(mask, TILE, TILE, device)
            options["block_mask"] = BlockMask.from_kv_blocks(
                partial_count, partial_index, full[0], full[1], TILE, mod, (case.n, case.n)
            )
        attention: Any = torch.compile(flex_attention, dynamic=False)
        operands = [t.transpose(1, 2) for t in tensors[:3]]
        if case.kind == "backward":
            # The buffers of the forward are read again by the next call.
            functorch: Any = importlib.import_module("torch._functorch.config")
            functorch.donated_buffer = False
            return autograd_call(case, tensors, partial(attention, **options))
        return partial(attention, *operands, return_aux=AuxRequest(lse=True), **options)

    def unpack(self, raw: Any) -> tuple[Tensor, Tensor | None]:
        # FLASH returns its LSE times ln 2 (torch 2.11), which is not judged
        return raw[0].transpose(1, 2), None if self.backend == "FLASH" else raw[1].lse


@dataclass(frozen=True)
class SdpaPeer(Peer):
    """torch scaled_dot_product_attention; `backend` names an SDPBackend, None lets torch choose.

    kinds: of the cases that it is measured in. dense: the mask is a boolean tensor, else the flag
    is_causal.
    """

    name: str
    backend: str | None
    kinds: tuple[str, ...]
    dense: bool = False
    needs: str = "torch.nn.attention"

    def supports(self, case: BenchCase) -> str | None:
        call = "scaled_dot_product_attention"
        if case.kind not in self.kinds:
            return f"{self.name} is measured for kind {' and '.join(self.kinds)} only"
        if case.varlen:
            return f"{call} takes no cu_seqlens"
        if case.softcap or case.score_mod:
            return f"{call} takes no softcap and no score_mod"
        if case.sink:
            return f"{call} takes no sink"
        if case.n_k and (self.dense or case.causal):
            return f"{call} aligns causality with the first key, a mask of {case.n_k} keys the last"
        if not self.dense and case.mask not in ("full", "causal"):
            return f"{call} takes no {case.mask} mask"
        if self.dense and (case.n > DENSE_TOKENS[case.kind] or case.mask == "full"):
            most = DENSE_TOKENS[case.kind]
            return f"a dense mask is measured up to {most} tokens, where there is a mask"
        return None

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options: dict[str, Any] = {"is_causal": case.causal}
        if self.dense:
            rows = np.arange(case.n)
            seen = case.mask_of(case.n).sees(rows[:, None], rows[None, :])
            options = {"attn_mask": torch.from_numpy(seen).to(tensors.q.device)}
        backends = None if self.backend is None else [getattr(SDPBackend, self.backend)]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backends) if backends else nullcontext():
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, enable_gqa=case.heads != case.heads_kv, **options
                )

        if case.returns_gradients:
            return autograd_call(case, tensors, attention)
        return partial(attention, *(t.transpose(1, 2) for t in tensors[:3]))

    def unpack(self, raw: Any) -> tuple[Tensor, Tensor | None]:
        return raw.transpose(1, 2), None


def endpoint_tensor(case: BenchCase, device: torch.device) -> Tensor:
    """What `cudnn.flex_attention` is told of a mask: (1, endpoints, tokens), int32."""
    return torch.from_numpy(case_endpoints(case))[None].to(device)


def cudnn_plan_call(case: BenchCase, tensors: CaseTensors, *, build_backward: bool) -> Call:
    """Makes the plan of the mask, from endpoints that are there before."""
    module = importlib.import_module("cudnn.flex_attention")
    told = endpoint_tensor(case, tensors.q.device)
    options: dict[str, Any] = {"build_backward": build_backward}
    if tensors.cu_seqlens is not None:
        options |= {"cu_seqlens_q": tensors.cu_seqlens, "cu_seqlens_k": tensors.cu_seqlens}
        options |= {"max_seqlen_q": case.n, "max_seqlen_k": case.n}
    return partial(module.create_mask_plan, told, *tensors[:3], **options)


@dataclass(frozen=True)
class CudnnFlexPeer(Peer):
    """`cudnn.flex_attention`, which reads a plan made once of row intervals; its own autograd."""

    name: str
    needs: str = "cudnn.flex_attention"

    def supports(self, case: BenchCase) -> str | None:
        # the folder tells, without the import of a package that loads libraries
        package, module = self.needs.split(".")
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations or ()) if spec else ()
        if not any(Path(folder, module).is_dir() for folder in folders):
            return f"{self.needs} is not installed"
        if case.kind not in ("attention", "backward", "prep"):
            return f"{self.name} is measured for kind attention, backward and prep only"
        if case.softcap or case.score_mod or case.sink:
            return f"{self.name} takes no softcap, no score_mod and no sink"
        if case.n_k:
            return f"{self.name} is not measured with other keys than queries"
        if case.mask in NO_ROW_INTERVALS:
            return f"{case.mask} leaves a query hundreds of ranges of keys"
        if case.deterministic:
            return "no order of sums is compared"
        small = max(case.d, case.d_v) <= 128 and case.d % 8 == case.d_v % 8 == 0
        if not small and (case.d, case.d_v) not in ((192, 128), (256, 256)):
            return f"{self.name} takes no head dimensions {case.d}/{case.d_v}"
        return None

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        module = importlib.import_module(self.needs)
        plan = cudnn_plan_call(case, tensors, build_backward=case.is_backward)()
        attention = partial(module.flex_attn_func, mask_plan=plan)
        if case.is_backward:
            return autograd_call(case, tensors, attention, heads_first=False)
        return partial(attention, *tensors[:3], return_lse=True)


@dataclass(frozen=True)
class Fa3Peer(Peer):
    """FlashAttention-3 as tokenspeed-fa3 has it: no wheel for torch on PyPI has its backward."""

    name: str
    needs: str = "flash_attn_interface"

    def supports(self, case: BenchCase) -> str | None:
        if not importlib.util.find_spec(self.needs):
            return "tokenspeed-fa3 is not installed"
        if case.kind != "attention":
            return "its wheel has the forward alone"
        if case.mask not in NATIVE:
            return f"no flag means {case.mask}"
        if case.softcap or case.score_mod or case.sink:
            return "its wheel is built without softcap, and is not measured with sinks"
        if case.d != case.d_v or case.d not in (64, 128, 192, 256):
            return f"its wheel takes no head dimensions {case.d}/{case.d_v}"
        return None

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        module = importlib.import_module(self.needs)
        options: dict[str, Any] = {"causal": case.causal, "return_attn_probs": True}
        if case.window is not None:
            options |= {"causal": False, "window_size": (case.window, 0)}
        if (ends := tensors.cu_seqlens) is None:
            return partial(module.flash_attn_func, *tensors[:3], **options)
        told = (ends, ends, case.n, case.n)
        return partial(module.flash_attn_varlen_func, *tensors[:3], *told, **options)


OURS = CutePeer("ours", "flash_mask_cute.interface", None, "block_sparse_tensors_torch")
_ALL: tuple[Peer, ...] = (
    OURS,
    replace(OURS, name=DETERMINISTIC, deterministic=True),
    CutePeer("fa4", "flash_attn.cute.interface", "native", "block_sparse_tensors"),
    CutePeer("fa4_mask_mod", "flash_attn.cute.interface", "mask_mod", "block_sparse_tensors", 192),
    SdpaPeer("cudnn", "CUDNN_ATTENTION", ("attention", "backward")),
    SdpaPeer("sdpa", None, ("host", "host_train")),
    SdpaPeer("sdpa_dense", None, ("attention", "backward", "memory"), dense=True),
    FlexPeer("flex"),
    FlexPeer("flex_flash", "FLASH"),
    CudnnFlexPeer("cudnn_flex"),
    Fa3Peer("fa3"),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
# flex compiles for seconds in every case; dense masks are slow.
DEFAULT_PEERS = ("ours", DETERMINISTIC, "fa4", "fa4_mask_mod", "cudnn", "sdpa")


def save_forward(case: BenchCase, tensors: CaseTensors, seed: int) -> CaseTensors:
    """`tensors` with what gradients need: out and lse of our forward, and a random dout."""
    forward = replace(case, kind="attention", deterministic=False)
    out, lse = OURS.unpack(OURS.prepare(forward, tensors)())
    assert lse is not None
    generator = torch.Generator(device=out.device).manual_seed(seed + 1)
    dout = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)
    return tensors._replace(saved=Saved(out, lse, dout))
