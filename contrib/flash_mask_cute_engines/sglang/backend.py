"""A backend for SGLang that has never met a running engine: prefill, decode and CUDA graphs.

SGLang's pools write keys and values. So a layer is one call of `flash_attn_varlen_func`. All
kinds of forwards differ only in how many queries a request has, and in how many keys are in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.kv_shard_hooks import get_kv_shard_pool
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.kv_index_translator import IdSpaceKind
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor

from flash_mask_cute.functional import flash_attn_varlen_func
from flash_mask_cute_engines.sglang.requirements import check_runner

_NOT_CAUSAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


@dataclass
class MaskCuteMetadata:
    """What the layers of a forward share.

    cu_seqlens_q int32 (requests + 1,), seqused_k int32 (requests,), page_table int32 (requests,
    pages). longest_query: at least as many tokens as a request has. Of layers with windows, if
    they have a pool of their own: window_page_table, and window_locations, where they write.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    longest_query: int
    window_page_table: Tensor | None = None
    window_locations: Tensor | None = None


@dataclass(frozen=True)
class Lengths:
    """Queries of each request, starting at cu_seqlens_q, and keys in use. each: how many queries
    all requests have; None: they differ, and longest_query is what the host knows."""

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    longest_query: int
    each: int | None = None


class MaskCuteBackend(AttentionBackend):
    """Prefill, mixed batches, decode, and verification of a chain of draft tokens."""

    def __init__(self, model_runner: Any) -> None:
        """Raises NotImplementedError, naming what this runner needs and is not there."""
        super().__init__()
        runner, spec = model_runner, get_spec()
        pool = runner.token_to_kv_pool
        check_runner(
            runner,
            topk=spec.speculative_eagle_topk or 0,
            context_parallel=get_parallel().attn_cp_size,
            is_sharded=get_kv_shard_pool(pool) is not None,
        )
        self.device = torch.device(runner.device)
        self.page_size: int = runner.page_size
        self.pool, self.translator = pool, runner.kv_index_translator
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.max_pages = -(-runner.model_config.context_len // self.page_size)
        self.draft_tokens: int = spec.speculative_num_draft_tokens or 0
        self.has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self.forward_metadata: MaskCuteMetadata | None = None
        self._graphs: _GraphBuffers | None = None

    # -- before a forward ----------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a forward that is not captured: everything is new."""
        x = forward_batch
        lengths = self._lengths(x, x.batch_size)
        starts = self._page_starts(x, x.batch_size, lengths)
        made = MaskCuteMetadata(
            lengths.cu_seqlens_q,
            lengths.seqused_k,
            self._as_pages(starts),
            _rounded_up(lengths.longest_query),
        )
        if self.has_window_pool:
            made.window_page_table = self._as_pages(self._in_window_pool(starts))
            made.window_locations = self._window_locations(x)
        self.forward_metadata = made

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory for the metadata of captured forwards, of so many requests and tokens at most."""
        self._graphs = _GraphBuffers.create(
            max_bs, max_num_tokens, self.max_pages, self.has_window_pool, self.device
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Of a forward that is captured, or replayed: into the memory that its kernels read.

        Raises:
            RuntimeError: there is no such memory, or it is for fewer requests.
        """
        x, batch = forward_batch, forward_batch.batch_size
        if self._graphs is None:
            raise RuntimeError("init_cuda_graph_state must be called before a graph is captured")
        lengths = self._lengths(x, batch)
        if in_capture and lengths.each is None:
            # it stays in the graph, for any later lengths
            lengths = replace(lengths, longest_query=max(x.positions.numel(), 1))
        starts = self._page_starts(x, batch, lengths)
        made = self._graphs.filled(lengths, self._as_pages(starts))
        if self.has_window_pool:
            locations = self._window_locations(x)
            if in_capture or locations is None:
                # the slot of no token
                locations = torch.zeros(
                    x.out_cache_loc.shape[0], dtype=torch.int64, device=self.device
                )
            pages = self._as_pages(self._in_window_pool(starts))
            self._graphs.fill_windows(made, pages, locations)
        self.forward_metadata = made

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of requests that only fill a captured batch."""
        return 1

    def _lengths(self, x: Any, batch: int) -> Lengths:
        mode, seq_lens = x.forward_mode, x.seq_lens[:batch]
        if mode.is_target_verify():
            # the draft tokens are behind the keys that seq_lens counts
            each, drafts = self.draft_tokens, seq_lens + self.draft_tokens
            return Lengths(self._even(batch, each), drafts.to(torch.int32), each, each)
        if mode.is_decode_or_idle():
            if mode.is_decode() and x.spec_info is not None:
                raise NotImplementedError(
                    "the backend mask_cute of SGLang verifies draft tokens, and does not make "
                    "them: name another one in --speculative-draft-attention-backend"
                )
            return Lengths(self._even(batch, 1), seq_lens.to(torch.int32), 1, 1)
        new = x.extend_seq_lens[:batch]
        longest = self.draft_tokens
        if x.extend_seq_lens_cpu is not None:
            longest = int(max(x.extend_seq_lens_cpu[:batch], default=1))
        starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        return Lengths(starts, seq_lens.to(torch.int32), max(longest, 1))

    def _even(self, batch: int, each: int) -> Tensor:
        """Starts of sequences of the same length."""
        return torch.arange(
            0, batch * each + 1, max(each, 1), dtype=torch.int32, device=self.device
        )

    def _page_starts(self, x: Any, batch: int, lengths: Lengths) -> Tensor:
        """The place of the first token of each page, (requests, pages)."""
        pages = self.max_pages
        if x.seq_lens_cpu is not None and len(x.seq_lens_cpu):
            most = int(x.seq_lens_cpu[:batch].max())
            if x.forward_mode.is_target_verify():
                most += self.draft_tokens
            # few widths, because launches are prepared for each
            pages = min(_rounded_up(-(-most // self.page_size)), self.max_pages)
        first = torch.arange(pages, device=self.device) * self.page_size
        return self.req_to_token[x.req_pool_indices[:batch, None].long(), first[None]]

    def _as_pages(self, starts: Tensor) -> Tensor:
        return (starts // self.page_size).to(torch.int32)

    def _in_window_pool(self, places: Tensor) -> Tensor:
        found: Tensor = self.pool.translate_loc_from_full_to_swa(places)
        return found

    def _window_locations(self, x: Any) -> Tensor | None:
        found: Tensor | None = self.translator.write_ids(x, IdSpaceKind.SLIDING_WINDOW)
        return found

    # -- a layer -------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """(tokens, heads * v_head_dim). q, k, v: of the tokens of the forward, flattened or not.

        Raises:
            NotImplementedError: another argument is given; the message names it.
        """
        for name, value in more.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"the backend mask_cute of SGLang does not take {name}")
        x = self.forward_metadata
        assert x is not None
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=x.window_locations)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        causal = layer.attn_type not in _NOT_CAUSAL
        left = layer.sliding_window_size if has_window else None
        pages = x.page_table
        if has_window and x.window_page_table is not None:
            pages = x.window_page_table
        k_cache, v_cache = self._pools(layer)
        heads, width = layer.tp_q_head_num, layer.v_head_dim
        given = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty((q.shape[0], heads * width)) if given is None else given
        flash_attn_varlen_func(
            q.reshape(-1, heads, layer.head_dim),
            k_cache,
            v_cache,
            cu_seqlens_q=x.cu_seqlens_q,
            max_seqlen_q=x.longest_query,
            seqused_k=x.seqused_k,
            page_table=pages,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(left, None if causal else left),
            softcap=layer.logit_cap or 0.0,
            learnable_sink=sinks,
            out=out.view(-1, heads, width),
        )
        return out.view(-1, heads * width)

    # the number of queries is in the metadata
    forward_decode = forward_extend

    def _pools(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (pages, page_size, heads, head_dim)."""
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        return (
            paged_kv_view(keys, self.page_size, layer.tp_k_head_num, layer.head_dim),
            paged_kv_view(values, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
        )


@dataclass
class _GraphBuffers:
    """Memory that captured kernels read; the metadata of a forward are views of it.

    Starts of queries have memory for each number of requests and each kind of forward, because
    those of a graph must not be those of another.
    """

    seqused_k: Tensor
    page_table: Tensor
    window_page_table: Tensor | None
    window_locations: Tensor | None
    cu_seqlens_q: dict[tuple[int, int | None], Tensor]

    @staticmethod
    def create(
        requests: int, tokens: int, pages: int, has_window_pool: bool, device: torch.device
    ) -> _GraphBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return _GraphBuffers(
            zeros(requests),
            zeros(requests, pages),
            zeros(requests, pages) if has_window_pool else None,
            zeros(tokens, dtype=torch.int64) if has_window_pool else None,
            {},
        )

    def filled(self, lengths: Lengths, pages: Tensor) -> MaskCuteMetadata:
        """The metadata of a forward."""
        batch, width = pages.shape
        room = self.page_table.shape
        if batch > room[0]:
            raise RuntimeError(
                f"init_cuda_graph_state was called for {room[0]} requests at most, got {batch}"
            )
        key = batch, lengths.each
        if key not in self.cu_seqlens_q:
            self.cu_seqlens_q[key] = torch.empty_like(lengths.cu_seqlens_q)
        self.cu_seqlens_q[key].copy_(lengths.cu_seqlens_q)
        self.seqused_k[:batch].copy_(lengths.seqused_k)
        # pages behind the keys in use are not read
        self.page_table[:batch, :width].copy_(pages)
        return MaskCuteMetadata(
            self.cu_seqlens_q[key],
            self.seqused_k[:batch],
            self.page_table[:batch],
            _rounded_up(lengths.longest_query),
        )

    def fill_windows(self, made: MaskCuteMetadata, pages: Tensor, locations: Tensor) -> None:
        """Add to a forward's metadata what layers with windows read."""
        assert self.window_page_table is not None and self.window_locations is not None
        (batch, width), count = pages.shape, locations.shape[0]
        self.window_page_table[:batch, :width].copy_(pages)
        made.window_page_table = self.window_page_table[:batch]
        self.window_locations[:count].copy_(locations)
        # a graph may have more tokens than this batch: they go into the slot of no token
        self.window_locations[count:].zero_()
        made.window_locations = self.window_locations[:count]


def _rounded_up(number: int) -> int:
    """The next power of two: launches are prepared for each number that they get."""
    return 1 << max(number - 1, 0).bit_length()
