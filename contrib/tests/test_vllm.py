"""vLLM's registry, builder and metadata with our backend, on the CPU.

The files of vLLM are those of its wheel. Its compiled kernels are not there: the one that writes
new keys and values into pages is written here, in torch.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_files import needs_engine
from stand_ins import StandIns
from torch import Tensor

needs_engine("vllm")
StandIns(
    ("cbor2", "cpuinfo", "fastapi", "llguidance", "partial_json_parser", "prometheus_client")
    + ("uvloop", "xgrammar")
).install()

import vllm  # noqa: E402
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import registry  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.worker.utils import select_common_block_size  # noqa: E402

from flash_mask_cute_engines import vllm as door  # noqa: E402
from flash_mask_cute_engines.vllm import backend as ours  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 16
INT = torch.int32


def test_the_version_that_was_read() -> None:
    assert vllm.__version__.startswith("0.33")


# -- what vLLM asks before it chooses a backend ------------------------------------------------


@pytest.fixture
def registered() -> Any:
    door.register()
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()


def test_the_registry_finds_it(registered: Any) -> None:
    assert registered.get_class() is ours.MaskCuteBackend
    door.register()  # each process does, and some twice
    assert registered.get_class() is ours.MaskCuteBackend
    # as a layer looks itself up
    assert AttentionBackendEnum[registered.get_class().get_name()] is registered


def test_another_plugin_keeps_its_place() -> None:
    registry.register_backend(AttentionBackendEnum.CUSTOM, "another.package.Backend")
    try:
        with pytest.raises(RuntimeError, match="CUSTOM.*another.package.Backend.*VLLM_PLUGINS"):
            door.register()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_the_entry_point_is_that_of_vllm() -> None:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    entries = entry_points_of_project()
    assert entries[DEFAULT_PLUGINS_GROUP] == {"mask_cute": f"{door.__name__}:register"}


def entry_points_of_project() -> dict[str, dict[str, str]]:
    import pathlib

    import tomllib

    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    found: dict[str, dict[str, str]] = tomllib.loads(text)["project"]["entry-points"]
    return found


ASKED: dict[str, Any] = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
    "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
    "attn_type": AttentionType.DECODER,
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {}, {"has_sink": True}, {"has_sliding_window": True}, {"use_mm_prefix": True},
        {"use_rswa": True}, {"use_non_causal": True}, {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER}, {"head_size": 256}, {"head_size": 72},
        {"block_size": 528}, {"block_size": 256}, {"dtype": torch.float16},
        {"device_capability": DeviceCapability(10, 0)}, {"use_kv_connector": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_has(more: dict[str, Any]) -> None:
    assert ours.MaskCuteBackend.validate_configuration(**ASKED | more) == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"head_size": 512}, "head_size"), ({"head_size": 100}, "head_size"),
        ({"dtype": torch.float32}, "dtype"), ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"use_mla": True}, "MLA"), ({"use_sparse": True}, "sparse"),
        ({"device_capability": DeviceCapability(8, 0)}, "compute capability"),
        ({"use_batch_invariant": True}, "batch invariance"), ({"use_dcp": True}, "DCP"),
        ({"use_pcp": True}, "PCP"), ({"block_size": 24}, "block_size"),
        ({"use_per_head_quant_scales": True}, "quant"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_has_not(more: dict[str, Any], reason: str) -> None:
    (told,) = ours.MaskCuteBackend.validate_configuration(**ASKED | more)
    assert reason in told


@pytest.mark.parametrize(("of_manager", "of_kernel"), [(16, 16), (512, 256), (528, 16), (96, 32)])
def test_page_sizes(of_manager: int, of_kernel: int) -> None:
    assert select_common_block_size(of_manager, [ours.MaskCuteBackend]) == of_kernel


# -- a step ------------------------------------------------------------------------------------


def spec(kind: Any = FullAttentionSpec, **more: Any) -> Any:
    return kind(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32, **more
    )  # fmt: skip


def on_cpu() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def config(**of_model: Any) -> Any:
    made = on_cpu()
    model = SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None)
    vars(model).update(of_model)
    made.model_config = model  # type: ignore[assignment]
    return made


def builder_of(backend: Any = None, **of_model: Any) -> Any:
    made = config(**of_model)
    cls = ours.MaskCuteBackend.get_builder_cls()
    assert cls.get_cudagraph_support(made, spec()) is AttentionCGSupport.ALWAYS
    return cls(spec(), ["layer"], made, torch.device("cpu"))


class Step:
    """A batch: requests with tokens that are new, and all of them, in pages in any order.

    layout: NHD or HND, of the memory of the cache.
    """

    def __init__(
        self, new: list[int], total: list[int], layout: str = "NHD", seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.new, self.total, self.count = new, total, sum(new)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q = [normal(n, HEADS, DIM) for n in new]
        self.k, self.v = ([normal(n, KV_HEADS, DIM) for n in total] for _ in "kv")
        width = -(-max(total) // PAGE) + 1
        pages = torch.randperm(len(new) * width + 3, generator=generator)[: len(new) * width]
        self.table = pages.view(len(new), width).to(INT)
        num_pages = len(pages) + 3
        cache = torch.full((num_pages, PAGE, KV_HEADS, 2 * DIM), torch.nan)
        self.cache = cache.transpose(1, 2)
        if layout == "HND":
            self.cache = self.cache.contiguous()
        starts = [0]
        for n in new:
            starts.append(starts[-1] + n)
        self.starts = torch.tensor(starts, dtype=INT)
        self.slots = torch.tensor(
            [
                int(self.table[b, i // PAGE]) * PAGE + i % PAGE
                for b in range(len(new))
                for i in range(total[b] - new[b], total[b])
            ]
        )

    def common(self, **more: Any) -> CommonAttentionMetadata:
        lengths = torch.tensor(self.total, dtype=INT)
        return CommonAttentionMetadata(
            query_start_loc=self.starts, query_start_loc_cpu=self.starts, seq_lens=lengths,
            num_reqs=len(self.new), num_actual_tokens=self.count, max_query_len=max(self.new),
            max_seq_len=max(self.total), block_table_tensor=self.table, slot_mapping=self.slots,
            seq_lens_cpu_upper_bound=lengths, **more,
        )  # fmt: skip

    def run(self, impl: Any, metadata: Any, layer: Any = None, padding: int = 3) -> list[Tensor]:
        """The result of each request. padding: tokens of a captured graph behind the batch."""
        layer = layer or SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
        for b, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for i in range(self.total[b] - self.new[b]):
                where = self.table[b, i // PAGE], slice(None), i % PAGE
                self.cache[where] = torch.cat((k[i], v[i]), -1)
        fresh = [
            torch.cat([x[b][self.total[b] - n :] for b, n in enumerate(self.new)])
            for x in (self.k, self.v)
        ]
        junk = torch.full((padding, HEADS, DIM), torch.nan)
        query = torch.cat((*self.q, junk))
        key, value = (torch.cat((x, junk[:, :KV_HEADS])) for x in fresh)
        output = torch.full((self.count + padding, HEADS, DIM), 7.0)
        with torch.inference_mode():
            impl.do_kv_cache_update(layer, key, value, self.cache, self.slots)
            found = impl.forward(layer, query, key, value, self.cache, metadata, output)
        assert found is output and (output[self.count :] == 7.0).all()
        return list(output[: self.count].split(self.new))

    def expected(
        self, sees: Any, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> list[Tensor]:
        """sees(b, q, k): of positions in the sequence of request b."""
        results = []
        for b, (q, k, v) in enumerate(zip(self.q, self.k, self.v, strict=True)):
            k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(DIM)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            first = self.total[b] - self.new[b]
            at = torch.arange(first, self.total[b])[:, None], torch.arange(self.total[b])
            scores = scores.masked_fill(~sees(b, *at), -torch.inf)
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, extra), -1)
                v = torch.cat((v, v.new_zeros(1, *v.shape[1:])))
            results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return results


@pytest.fixture(autouse=True)
def write_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's compiled kernel, in torch."""

    def reshape_and_cache_flash(
        key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *_: Any
    ) -> None:
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                k_cache[slot // PAGE, slot % PAGE] = key[row]
                v_cache[slot // PAGE, slot % PAGE] = value[row]

    monkeypatch.setattr(ours.ops, "reshape_and_cache_flash", reshape_and_cache_flash)


def layer_of(**more: Any) -> Any:
    with set_current_vllm_config(on_cpu()):
        return ours.MaskCuteBackend.get_impl_cls()(
            HEADS, DIM, DIM**-0.5, KV_HEADS, None, more.pop("sliding_window", None), "auto",
            more.pop("logits_soft_cap", None), more.pop("attn_type", AttentionType.DECODER), None,
            **more,
        )  # fmt: skip


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() < 1e-5


def causal(b: int, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


MIXED = [1, 5, 40, 1], [33, 5, 70, 1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_and_decode(layout: str) -> None:
    step = Step(*MIXED, layout)
    metadata = builder_of().build(0, step.common())
    assert_equal(step.run(layer_of(), metadata), step.expected(causal))


def test_sinks_window_and_soft_cap() -> None:
    step, sinks = Step(*MIXED), torch.randn(HEADS)
    impl = layer_of(sliding_window=8, logits_soft_cap=3.0, sinks=sinks)
    found = step.run(impl, builder_of().build(0, step.common()))
    assert_equal(found, step.expected(lambda b, q, k: (k <= q) & (q - k < 8), 3.0, sinks))


@pytest.mark.parametrize("window", [None, 6])
def test_sequences_that_are_not_causal(window: int | None) -> None:
    flags = torch.tensor([1, 0, 0, 1], dtype=INT)

    def sees(b: int, q: Tensor, k: Tensor) -> Tensor:
        near = (q - k).abs() < (window or 1000)
        return near & ((k <= q) | (flags[b] == 0))

    step = Step(*MIXED)
    metadata = builder_of().build(0, step.common(causal=flags))
    assert metadata.causal is flags  # what a captured graph reads is what vLLM writes
    assert_equal(step.run(layer_of(sliding_window=window), metadata), step.expected(sees))
    flags.zero_()
    assert_equal(step.run(layer_of(sliding_window=window), metadata), step.expected(sees))
    metadata = builder_of().build(0, step.common(causal=False))
    assert_equal(step.run(layer_of(sliding_window=window), metadata), step.expected(sees))
    with pytest.raises(TypeError, match="causal must be .*int64"):
        builder_of().build(0, step.common(causal=flags.long()))


@pytest.mark.parametrize(("window", "clamps"), [(None, False), (6, False), (6, True)])
def test_images_see_each_other(window: int | None, clamps: bool) -> None:
    """Of two requests; the first image begins before the tokens of this step."""
    step = Step([20, 1, 30], [40, 9, 30])
    images = {0: [(15, 25), (30, 33)], 2: [(3, 12)]}

    def sees(b: int, q: Tensor, k: Tensor) -> Tensor:
        near = q - k < (window or 1000)
        together = torch.zeros_like(q - k, dtype=torch.bool)
        for start, end in images.get(b, []):
            together |= (q >= start) & (q <= end) & (k >= start) & (k <= end)
        return (k <= q) & near | (together & near if clamps else together)

    builder = builder_of(is_mm_prefix_lm=True)
    metadata = builder.build(0, step.common(mm_req_doc_ranges=images))
    assert metadata.mm_prefix_reach == 16
    layer = SimpleNamespace(
        _k_scale=torch.ones(1), _v_scale=torch.ones(1), mm_prefix_clamp_sliding_window=clamps
    )
    impl = layer_of(sliding_window=window)
    assert_equal(step.run(impl, metadata, layer), step.expected(sees))
    metadata.mm_prefix_query_range_tensor = None  # what Gemma-4 does for its global layers
    near = window or 1000
    assert_equal(
        step.run(impl, metadata, layer), step.expected(lambda b, q, k: (k <= q) & (q - k < near))
    )
    plain = builder.build(0, step.common(mm_req_doc_ranges={1: [(0, 4)]}))
    assert plain.mm_prefix_query_range_tensor is None


def test_reference_windows() -> None:
    step, prefixes = Step(*MIXED), torch.tensor([4, 5, 50, 1], dtype=INT)
    builder = builder_of(rswa_window=7)
    metadata = builder.build(0, step.common(rswa_prefix_lens=prefixes))
    held = metadata.rswa_prefix_lens.data_ptr()

    def sees(b: int, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < prefixes[b]) | (q - k < 7))

    assert_equal(step.run(layer_of(), metadata), step.expected(sees))
    again = builder.build(0, step.common(rswa_prefix_lens=prefixes + 1))
    assert again.rswa_prefix_lens.data_ptr() == held  # as captured graphs need


@pytest.mark.parametrize("window", [None, 4])
def test_an_encoder(window: int | None) -> None:
    step = Step([9, 30], [9, 30])
    impl = layer_of(attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
    found = step.run(impl, builder_of().build(0, step.common(causal=False)))
    assert step.cache.isnan().all()
    near = window or 1000
    assert_equal(found, step.expected(lambda b, q, k: (q - k).abs() < near))


def test_cross_attention() -> None:
    """Its keys are those of the encoder, in pages, and it is not causal."""
    step = Step([1, 3], [20, 35])
    impl = layer_of(attn_type=AttentionType.ENCODER_DECODER)
    found = step.run(impl, builder_of().build(0, step.common(causal=False)))
    assert_equal(found, step.expected(lambda b, q, k: torch.ones_like(q - k, dtype=torch.bool)))


def test_a_captured_batch_with_empty_requests() -> None:
    """A graph has as many requests as it was captured with; later ones have no tokens."""
    step = Step([1, 2, 0, 0], [17, 40, 1, 1])
    common = step.common()
    common.seq_lens = torch.tensor([17, 40, 0, 0], dtype=INT)
    assert_equal(
        step.run(layer_of(), builder_of().build_for_cudagraph_capture(common))[:2],
        step.expected(causal)[:2],
    )


def test_metadata_of_another_group_and_of_drafts() -> None:
    step, builder = Step(*MIXED), builder_of()
    metadata = builder.build_for_drafting(step.common(), 1)
    assert builder.supports_update_block_table
    assert builder.supports_draft_decode_metadata_update
    table, slots = step.table.flip(1), step.slots + 1
    other = builder.update_block_table(metadata, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert metadata.block_table is step.table and other.seq_lens is metadata.seq_lens
    before = vars(metadata).copy()
    builder.update_draft_decode_metadata(metadata)
    assert vars(metadata) == before


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="alibi_slopes.*CUSTOM.*2 slopes"):
        ours.MaskCuteImpl(2, 16, 1.0, 2, [0.5, 0.25])
    with pytest.raises(NotImplementedError, match="kv_cache_dtype.*fp8_e4m3"):
        ours.MaskCuteImpl(2, 16, 1.0, 2, kv_cache_dtype="fp8_e4m3")
    step, impl = Step(*MIXED), layer_of()
    metadata = builder_of().build(0, step.common())
    output = torch.ones(4, HEADS, DIM)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=name):
            impl.forward(None, *[None] * 4, metadata, output, **{name: torch.ones(1)})
    # where memory is measured
    assert impl.forward(None, *[None] * 4, None, output) is output and not output.any()
    flags = torch.ones(4, dtype=INT)
    builder = builder_of(is_mm_prefix_lm=True)
    images = builder.build(0, step.common(causal=flags, mm_req_doc_ranges={2: [(30, 60)]}))
    with pytest.raises(NotImplementedError, match="mm_prefix.*causal as a tensor"):
        step.run(impl, images)
    windows = builder_of(rswa_window=3).build(0, step.common(causal=False, rswa_prefix_lens=flags))
    with pytest.raises(NotImplementedError, match="rswa_prefix_lens"):
        step.run(impl, windows)


def test_a_group_with_windows() -> None:
    """vLLM keeps these layers in a group with another spec, for which the same builder serves."""
    made = ours.MaskCuteMetadataBuilder(
        spec(SlidingWindowSpec, sliding_window=8), ["layer"], config(), torch.device("cpu")
    )
    step = Step(*MIXED)
    found = step.run(layer_of(sliding_window=8), made.build(0, step.common()))
    assert_equal(found, step.expected(lambda b, q, k: (k <= q) & (q - k < 8)))
