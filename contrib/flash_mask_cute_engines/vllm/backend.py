"""A backend for vLLM's V1 engine that has never met a running engine: prefill and decode in pages.

vLLM writes keys and values into its pages by a kernel of its own. So a layer is one call of
`flash_attn_varlen_func`, whose result goes into the buffer that vLLM hands over.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import fill_mm_prefix_query_ranges

from flash_mask_cute.functional import flash_attn_varlen_func
from flash_mask_cute_engines.vllm.masks import mm_prefix_mod, reference_window_mod

_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_PAGE_SIZES = (16, 32, 64, 128, 256)
_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class MaskCuteBackend(AttentionBackend):
    """What the kernels have, as vLLM asks for it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(_CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        """The name of the registry's entry, by which vLLM looks a layer's backend up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MaskCuteImpl]:
        return MaskCuteImpl

    @staticmethod
    def get_builder_cls() -> type[MaskCuteMetadataBuilder]:
        return MaskCuteMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a page: vLLM takes the largest that divides its own block."""
        return list(_PAGE_SIZES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major in (9, 10)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclass
class MaskCuteMetadata(AttentionMetadata):
    """What the layers of a step share.

    query_start_loc int32 (requests + 1,), seq_lens int32 (requests,), block_table int32 (requests,
    pages), slot_mapping (tokens,). causal: a bool, or int32 (requests,). longest_query: at least as
    many tokens as a request has. mm_prefix_query_range_tensor int32 (tokens, 2): the first and the
    last position of the image of a token, -1 outside of images; mm_prefix_reach: how far from a
    token its image reaches at most. rswa_prefix_lens int32 (requests,): the first tokens, which
    stay visible; rswa_window: how many of the last ones are, with the token itself.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    longest_query: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    mm_prefix_query_range_tensor: Tensor | None = None
    mm_prefix_reach: int = 0
    rswa_prefix_lens: Tensor | None = None
    rswa_window: int = 0


class MaskCuteMetadataBuilder(AttentionMetadataBuilder[MaskCuteMetadata]):
    """Makes the metadata of a step out of vLLM's own.

    Kernels read lengths, pages and `causal` on the device, and launches depend on shapes alone. So
    a captured graph is right for any later batch of its size.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self._ranges: _StagedRanges | None = None
        if model.is_mm_prefix_lm:
            self._ranges = _StagedRanges(scheduler.max_num_batched_tokens, device)
        self._prefix_lens: Tensor | None = None
        self._window = model.rswa_window
        if self._window is not None:
            # read by captured graphs, so it stays where it is
            self._prefix_lens = torch.zeros(
                scheduler.max_num_seqs, dtype=torch.int32, device=device
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MaskCuteMetadata:
        """Raises TypeError if `causal` is a tensor that is not int32: a copy of it would not be
        what a captured graph reads."""
        common = common_attn_metadata
        causal = common.causal
        if isinstance(causal, Tensor) and causal.dtype != torch.int32:
            raise TypeError(f"causal must be a bool or int32 (requests,), got {causal.dtype}")
        made = MaskCuteMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            longest_query=_rounded_up(common.max_query_len),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
        )
        if self._ranges is not None and common.mm_req_doc_ranges is not None:
            found = self._ranges.of_tokens(common)
            made.mm_prefix_query_range_tensor, made.mm_prefix_reach = found
        if self._prefix_lens is not None and common.rswa_prefix_lens is not None:
            count = common.num_reqs
            made.rswa_prefix_lens, made.rswa_window = self._prefix_lens[:count], self._window
            made.rswa_prefix_lens.copy_(common.rswa_prefix_lens[:count], non_blocking=True)
        return made

    def update_block_table(
        self, metadata: MaskCuteMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> MaskCuteMetadata:
        """The metadata of another group of layers, which differ in their pages."""
        made = copy.copy(metadata)
        made.block_table, made.slot_mapping = blk_table, slot_mapping
        return made

    def update_draft_decode_metadata(self, metadata: MaskCuteMetadata) -> None:
        """Nothing to do: what changes between draft steps is in tensors that the kernel reads."""


class _StagedRanges:
    """Memory for the images of a step's tokens, on the host and on the device."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._host = torch.empty((max_tokens, 2), dtype=torch.int32, device="cpu", pin_memory=pin)
        self._device = torch.empty((max_tokens, 2), dtype=torch.int32, device=device)

    def of_tokens(self, common: CommonAttentionMetadata) -> tuple[Tensor | None, int]:
        """The image of each token, and how far it reaches; None if no token is in an image."""
        ranges = common.mm_req_doc_ranges
        count = fill_mm_prefix_query_ranges(
            self._host.numpy(),
            ranges,
            common.query_start_loc_cpu,
            common.seq_lens_cpu_upper_bound,
        )
        if not ranges or count == 0:
            return None, 0
        self._device[:count].copy_(self._host[:count], non_blocking=True)
        reach = max(end - start for images in ranges.values() for start, end in images)
        # as few numbers as possible, because each is another launch to prepare
        return self._device[:count], _rounded_up(reach)


class MaskCuteImpl(AttentionImpl[MaskCuteMetadata]):
    """Attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Raises NotImplementedError for slopes of ALiBi, and for a cache of another dtype than the
        model's."""
        if alibi_slopes is not None:
            raise NotImplementedError(
                "alibi_slopes are not supported by the backend CUSTOM of flash_mask_cute, got "
                f"{len(alibi_slopes)} slopes"
            )
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise NotImplementedError(
                f"kv_cache_dtype must be one of {', '.join(_CACHE_DTYPES)} with the backend CUSTOM "
                f"of flash_mask_cute, got {kv_cache_dtype}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.sinks = sinks
        # tokens to the left that a token sees beside itself
        self._left = None if sliding_window is None else sliding_window - 1
        self._softcap = logits_soft_cap or 0.0

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MaskCuteMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output (tokens, heads, head_size); kv_cache (pages, kv heads, page size, 2 *
        head_size) with any strides, keys and values in turn. Without metadata, where vLLM measures
        memory, output becomes 0.

        Raises:
            NotImplementedError: output is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "the backend CUSTOM of flash_mask_cute does not quantize outputs: output_scale and "
                "output_block_scale must be None"
            )
        if attn_metadata is None:
            return output.fill_(0)
        x, count = attn_metadata, attn_metadata.num_actual_tokens
        shared: dict[str, Any] = {
            "cu_seqlens_q": x.query_start_loc,
            "max_seqlen_q": x.longest_query,
            "softmax_scale": self.scale,
            "softcap": self._softcap,
            "learnable_sink": self.sinks,
            "out": output[:count],
        }
        if self.attn_type in _WITHOUT_CACHE:
            flash_attn_varlen_func(
                query[:count], key[:count], value[:count],
                cu_seqlens_k=x.query_start_loc, max_seqlen_k=x.longest_query,
                window_size=(self._left, self._left), **shared,
            )  # fmt: skip
            return output
        k_cache, v_cache = _keys_and_values(kv_cache, self.head_size)
        flash_attn_varlen_func(
            query[:count], k_cache, v_cache, seqused_k=x.seq_lens, page_table=x.block_table,
            **self._masks(layer, x), **shared,
        )  # fmt: skip
        return output

    def _masks(self, layer: Any, x: MaskCuteMetadata) -> dict[str, Any]:
        """The arguments of a call that hide keys."""
        causal, left = x.causal, self._left
        if x.mm_prefix_query_range_tensor is not None and causal is not False:
            if causal is not True:
                raise NotImplementedError(
                    "mm_prefix_query_range_tensor is not supported beside causal as a tensor"
                )
            clamps = getattr(layer, "mm_prefix_clamp_sliding_window", False) and left is not None
            window = None if left is None else left + 1
            reach = x.mm_prefix_reach
            if left is not None and not clamps:
                left = max(left, reach)
            return {
                "mask_mod": mm_prefix_mod(window, clamps),
                "aux_tensors": [x.mm_prefix_query_range_tensor, x.query_start_loc, x.seq_lens],
                "q_start": "end",
                # what the mask hides anyhow, and need not be looked at
                "window_size": (left, reach),
            }
        if x.rswa_prefix_lens is not None:
            if causal is not True:
                raise NotImplementedError(
                    "a reference sliding window is of causal models: rswa_prefix_lens are given, "
                    f"and causal is {causal}"
                )
            return {
                "mask_mod": reference_window_mod(x.rswa_window),
                "aux_tensors": [x.rswa_prefix_lens],
                "q_start": "end",
                "causal": True,
            }
        if causal is True or left is None:
            return {"causal": causal, "window_size": (left, None)}
        # sequences that are not causal see as far to the right
        return {"causal": causal, "window_size": (left, left)}

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write new keys and values into their places, by vLLM's kernel."""
        if self.attn_type in _WITHOUT_CACHE:
            return
        caches = _keys_and_values(kv_cache, self.head_size)
        scales = layer._k_scale, layer._v_scale
        ops.reshape_and_cache_flash(key, value, *caches, slot_mapping, self.kv_cache_dtype, *scales)


def _keys_and_values(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Pools (pages, page size, kv heads, head_size) of a cache in which they take turns."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


def _rounded_up(number: int) -> int:
    """The next power of two: launches are prepared for each number that they get."""
    return 1 << max(number - 1, 0).bit_length()
