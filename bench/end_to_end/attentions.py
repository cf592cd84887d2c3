"""Who computes attention, and how each is told which tokens see each other.

All but `fa4`, `sdpa_loop` and `ours_lengths` get a mask of transformers: causal, and a function of
indices. It is made once for all layers, before the model is called. These get sequences only. So
where answers share a question, each gets a copy of it, as trainers do. This holds for all
implementations in models with windows: a window counts rows, and the second answer is further from
the question in rows than in positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.end_to_end.documents import Batch
from bench.end_to_end.shapes import Shape


class Implementation(NamedTuple):
    """attention: `attn_implementation` of transformers. sees_sequences: it takes cu_seq_lens, and
    no mask. register: makes the name known. why_not: what a shape lacks on a type of device."""

    attention: str
    sees_sequences: bool = False
    register: Callable[[], object] = lambda: None
    why_not: Callable[[Shape, str], str | None] = lambda shape, device: None

    def shares_questions(self, shape: Shape) -> bool:
        return not self.sees_sequences and not shape.windowed

    def arguments(self, config: Any, batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
        """What a decoder of transformers is called with beside its tokens."""
        common = {"position_ids": batch.positions, "use_cache": False}
        if not self.sees_sequences:
            return common | {"attention_mask": make_masks(config, batch, dtype)}
        ends = torch.tensor([0, *batch.lengths], device=batch.tokens.device).cumsum(0).int()
        longest = max(batch.lengths)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        return common | lengths | {"max_length_q": longest, "max_length_k": longest}


def make_masks(config: Any, batch: Batch, dtype: torch.dtype) -> Any:
    """The mask of a decoder by transformers; by kinds of layers if the model has several."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    ends = batch.ends
    embeds = torch.empty((*batch.tokens.shape, 0), dtype=dtype, device=ends.device)

    def ends_later(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx < ends[kv_idx]

    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    kinds = set(getattr(config, "layer_types", None) or ())
    made = {
        kind: make(config, embeds, None, None, and_mask_function=ends_later)
        for kind, make in makers.items()
        if kind in kinds or (not kinds and kind == "full_attention")
    }
    return made if kinds else made["full_attention"]


def bytes_of(mask: Any) -> int:
    """Of a mask: a tensor, an object of torch's or of this package, or several by name."""
    memory: dict[int, int] = {}
    seen, pending = set(), [mask]
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            memory[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            pending += x.values()
        elif isinstance(x, list | tuple):
            pending += x
        elif type(x).__module__.partition(".")[0] in ("torch", "flash_mask_cute"):
            slots = getattr(type(x), "__slots__", ())
            pending += [*getattr(x, "__dict__", {}).values(), *(getattr(x, y, None) for y in slots)]
    return sum(memory.values())


# -- sdpa, a document at a time -----------------------------------------------------------------


def sdpa_loop(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention of each sequence alone, for transformers."""
    assert cu_seq_lens_q is not None and attention_mask is None and others.get("s_aux") is None
    outs = []
    bounds = _bounds(cu_seq_lens_q)
    for start, end in zip(bounds, bounds[1:], strict=False):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        mask = None
        if sliding_window is not None and end - start > sliding_window:
            row = torch.arange(end - start, device=q.device)
            distance = row[:, None] - row
            mask = (distance >= 0) & (distance < sliding_window)
        if mask is not None:
            # torch's kernels with a mask do not share heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        )  # fmt: skip
    return torch.cat(outs, 2).transpose(1, 2), None


_read: list[tuple[Tensor, list[int]]] = []


def _bounds(cu_seqlens: Tensor) -> list[int]:
    """The contents of cu_seqlens, read once for all layers of a batch."""
    if not _read or _read[0][0] is not cu_seqlens:
        _read[:] = [(cu_seqlens, cu_seqlens.tolist())]
    return _read[0][1]


def _register_loop() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("sdpa_loop", sdpa_loop)
    AttentionMaskInterface.register("sdpa_loop", lambda *args, **others: None)


def _register_ours() -> None:
    from flash_mask_cute.integrations.transformers import register

    register("mask_cute")


def _why_no_sdpa(shape: Shape, device: str) -> str | None:
    has_sinks = shape.config == "GptOssConfig"
    return "gpt-oss has sinks, which torch's SDPA does not compute" if has_sinks else None


def _why_no_fa4(shape: Shape, device: str) -> str | None:
    if device != "cuda":
        return "flash-attn-4 needs a GPU"
    from transformers.utils import is_flash_attn_4_available

    # without the package transformers would load a kernel of its hub
    return None if is_flash_attn_4_available() else "flash-attn-4 is not installed"


def _why_no_flex(shape: Shape, device: str) -> str | None:
    return None if device == "cuda" else "FlexAttention has no backward on the CPU"


IMPLEMENTATIONS = {
    "ours": Implementation("mask_cute", register=_register_ours),
    "ours_lengths": Implementation("mask_cute", sees_sequences=True, register=_register_ours),
    "fa4": Implementation("flash_attention_4", sees_sequences=True, why_not=_why_no_fa4),
    "sdpa": Implementation("sdpa", why_not=_why_no_sdpa),
    "sdpa_loop": Implementation(
        "sdpa_loop", sees_sequences=True, register=_register_loop, why_not=_why_no_sdpa
    ),
    "flex": Implementation("flex_attention", why_not=_why_no_flex),
    "eager": Implementation("eager"),
}
