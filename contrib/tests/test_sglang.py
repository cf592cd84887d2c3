"""SGLang's registry, batches and pools with our backend, on the CPU.

The files of SGLang are those of its wheel. Forward batches are made of what its backends read.
"""

from __future__ import annotations

import math
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib
import torch
from engine_files import needs_engine
from stand_ins import StandIns
from torch import Tensor

needs_engine("sglang")

from transformers.utils import is_torchvision_available  # noqa: E402

# transformers remembers that it is not there, and sglang gets a stand-in
is_torchvision_available()
StandIns(("compressed_tensors", "gguf", "torchvision")).install()

from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import IdSpaceKind  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP  # noqa: E402
from sglang.version import __version__ as version  # noqa: E402

from flash_mask_cute_engines import sglang as door  # noqa: E402
from flash_mask_cute_engines.sglang import backend as ours  # noqa: E402

HEADS, KV_HEADS, DIM, REQUESTS, CONTEXT = 4, 2, 16, 6, 128
INT = torch.int32
# tokens that a target model verifies for each request
DRAFTS = 4


def test_the_version_that_was_read() -> None:
    assert version.startswith("0.5.23")


def test_the_registry_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", {})
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", ["triton"])
    for _ in range(2):
        door.register()
    assert choices.ATTENTION_BACKEND_CHOICES == ["triton", "mask_cute"]
    assert {"mask_cute": door.create_backend} == attention_registry.ATTENTION_BACKENDS
    made = attention_registry.ATTENTION_BACKENDS["mask_cute"](Runner())
    assert isinstance(made, ours.MaskCuteBackend)


def test_the_entry_point_is_that_of_sglang() -> None:
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    entries = tomllib.loads(text)["project"]["entry-points"]
    assert entries[GENERAL_PLUGINS_GROUP] == {"mask_cute": f"{door.__name__}:register"}


class Pool:
    """Of a layer's keys and values, slot by slot, as the pools of SGLang keep them."""

    def __init__(self, slots: int, page_size: int, generator: torch.Generator) -> None:
        self.keys, self.values = torch.full((2, slots, KV_HEADS, DIM), torch.nan)
        self.page_size = page_size

    def set_kv_buffer(
        self, layer: Any, where: Any, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        slots = where.loc
        self.keys[slots], self.values[slots] = (x.view(-1, KV_HEADS, DIM) for x in (k, v))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class WindowPool(Pool, SWAKVPool):
    """With another pool for layers with windows, whose slots are those of the first one, moved."""

    MOVED = 16

    def __init__(self, slots: int, page_size: int, generator: torch.Generator) -> None:
        Pool.__init__(self, slots + self.MOVED, page_size, generator)
        self.swa_layer_nums = 1  # type: ignore[misc]

    def translate_loc_from_full_to_swa(self, places: Tensor) -> Tensor:
        return places + self.MOVED

    def set_kv_buffer(self, layer: Any, where: Any, *more: Any) -> None:
        is_window = layer.sliding_window_size > -1
        loc = where.swa_loc if is_window else where.loc
        super().set_kv_buffer(layer, SimpleNamespace(loc=loc), *more)


class Translator:
    is_translating = False

    def write_ids(self, batch: Any, kind: Any) -> Tensor:
        assert kind is IdSpaceKind.SLIDING_WINDOW
        return batch.out_cache_loc + WindowPool.MOVED


class Runner:
    """What a backend reads of SGLang's ModelRunner."""

    def __init__(self, page_size: int = 8, pool: type[Pool] = Pool, **more: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(REQUESTS * CONTEXT // page_size, generator=generator) + 1
        slots = pages.view(REQUESTS, -1, 1) * page_size + torch.arange(page_size)
        self.req_to_token_pool = SimpleNamespace(req_to_token=slots.flatten(1).to(INT))
        self.token_to_kv_pool = pool(int(slots.max()) + 1, page_size, generator)
        self.page_size, self.device = page_size, "cpu"
        self.kv_index_translator = Translator()
        self.kv_cache_dtype = torch.bfloat16
        self.use_mla_backend = self.prefill_aware_swa = False
        self.model_config = SimpleNamespace(
            context_len=CONTEXT, is_encoder_decoder=False, is_local_attention_model=False
        )
        vars(self).update(more)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    spec = SimpleNamespace(speculative_eagle_topk=1, speculative_num_draft_tokens=DRAFTS)
    parallel = SimpleNamespace(attn_cp_size=1)
    monkeypatch.setattr(ours, "get_spec", lambda: spec)
    monkeypatch.setattr(ours, "get_parallel", lambda: parallel)
    return SimpleNamespace(spec=spec, parallel=parallel)


def layer(**more: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **more)


class Batch:
    """A forward batch, and the keys and values of its requests. total: tokens of each request with
    the new ones; what SGLang's seq_lens counts depends on the mode."""

    def __init__(
        self, runner: Runner, mode: ForwardMode, new: list[int], total: list[int], seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.new, self.total, self.runner = new, total, runner

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q = [normal(n, HEADS, DIM) for n in new]
        self.k, self.v = ([normal(n, KV_HEADS, DIM) for n in total] for _ in "kv")
        rows = torch.randperm(REQUESTS, generator=generator)[: len(new)]
        self.slots = [
            runner.req_to_token_pool.req_to_token[row, :n].long()
            for row, n in zip(rows, total, strict=True)
        ]
        behind = DRAFTS if mode.is_target_verify() else 0
        lengths = torch.tensor([n - behind for n in total])
        self.given = SimpleNamespace(
            forward_mode=mode, batch_size=len(new), seq_lens=lengths, seq_lens_cpu=lengths,
            req_pool_indices=rows, spec_info=None, extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new, out_cache_loc_is_physical=True,
            out_cache_loc=torch.cat(
                [x[len(x) - n :] for x, n in zip(self.slots, new, strict=True)]
            ),
            positions=torch.zeros(sum(new)),
        )  # fmt: skip

    def fill(self, moved: int = 0) -> None:
        """The pool has all tokens but the new ones."""
        pool = self.runner.token_to_kv_pool
        for slots, k, v, new in zip(self.slots, self.k, self.v, self.new, strict=True):
            before = slots[: len(slots) - new] + moved
            pool.keys[before], pool.values[before] = k[: len(before)], v[: len(before)]

    def run(self, backend: Any, of: RadixAttention, **more: Any) -> list[Tensor]:
        fresh = [
            torch.cat([x[len(x) - n :] for x, n in zip(of_all, self.new, strict=True)]).flatten(1)
            for of_all in (self.k, self.v)
        ]
        with torch.inference_mode():
            out = backend.forward(torch.cat(self.q).flatten(1), *fresh, of, self.given, **more)
        assert out.shape == (sum(self.new), HEADS * DIM)
        return list(out.view(-1, HEADS, DIM).split(self.new))

    def expected(self, sees: Any = None, sinks: Tensor | None = None) -> list[Tensor]:
        results = []
        for q, k, v, n in zip(self.q, self.k, self.v, self.total, strict=True):
            k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(DIM)
            at = torch.arange(n - len(q), n)[:, None], torch.arange(n)
            visible = at[1] <= at[0] if sees is None else sees(*at)
            scores = scores.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
                scores, v = torch.cat((scores, extra), -1), torch.cat((v, v.new_zeros(v[:1].shape)))
            results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return results


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() < 1e-5


FORWARDS = [
    (ForwardMode.EXTEND, [5, 40, 1], [5, 70, 33]),
    (ForwardMode.MIXED, [30, 1, 1], [30, 64, 1]),
    (ForwardMode.DECODE, [1, 1, 1], [17, 128, 1]),
    (ForwardMode.TARGET_VERIFY, [DRAFTS] * 3, [DRAFTS, 40, 101]),
    (ForwardMode.DRAFT_EXTEND_V2, [2, 4, 3], [9, 4, 77]),
]
of_each_forward = pytest.mark.parametrize(("mode", "new", "total"), FORWARDS)


@of_each_forward
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_forwards(mode: ForwardMode, new: list[int], total: list[int], page_size: int) -> None:
    runner = Runner(page_size)
    backend, batch = ours.MaskCuteBackend(runner), Batch(runner, mode, new, total)
    batch.fill()
    backend.init_forward_metadata(batch.given)
    assert_equal(batch.run(backend, layer()), batch.expected())


def test_window_sinks_and_soft_cap() -> None:
    runner, sinks = Runner(), torch.randn(HEADS)
    backend, batch = ours.MaskCuteBackend(runner), Batch(runner, *FORWARDS[0])
    batch.fill()
    backend.init_forward_metadata(batch.given)
    found = batch.run(backend, layer(sliding_window_size=6), sinks=sinks)
    # SGLang's number does not count the token itself
    assert_equal(found, batch.expected(lambda q, k: (k <= q) & (q - k <= 6), sinks))
    capped = batch.run(backend, layer(logit_cap=1e-6), save_kv_cache=False)
    means = [
        torch.stack([v[: n - len(q) + i + 1].mean(0) for i in range(len(q))])
        for q, v, n in zip(batch.q, batch.v, batch.total, strict=True)
    ]
    for x, y in zip(capped, means, strict=True):
        assert torch.allclose(x, y.repeat_interleave(2, 1), atol=1e-5)


@pytest.mark.parametrize("window", [-1, 5])
def test_layers_that_are_not_causal(window: int) -> None:
    for kind in (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL):
        runner = Runner()
        backend = ours.MaskCuteBackend(runner)
        batch = Batch(runner, ForwardMode.EXTEND, [9, 30], [9, 30])
        backend.init_forward_metadata(batch.given)
        found = batch.run(backend, layer(attn_type=kind, sliding_window_size=window))
        near = 1000 if window < 0 else window
        assert_equal(found, batch.expected(lambda q, k, near=near: (q - k).abs() <= near))


def test_the_result_goes_where_it_is_wanted() -> None:
    runner = Runner()
    backend, batch = ours.MaskCuteBackend(runner), Batch(runner, *FORWARDS[0])
    batch.fill()
    backend.init_forward_metadata(batch.given)
    room = torch.zeros(sum(batch.new), HEADS * DIM)
    batch.given._attn_output = room
    assert batch.run(backend, layer())[0].data_ptr() == room.data_ptr()
    assert_equal(list(room.view(-1, HEADS, DIM).split(batch.new)), batch.expected())


@of_each_forward
def test_layers_with_windows_in_another_pool(
    mode: ForwardMode, new: list[int], total: list[int]
) -> None:
    runner = Runner(pool=WindowPool)
    backend, batch = ours.MaskCuteBackend(runner), Batch(runner, mode, new, total)
    batch.fill(WindowPool.MOVED)
    backend.init_forward_metadata(batch.given)
    found = batch.run(backend, layer(sliding_window_size=6))
    assert_equal(found, batch.expected(lambda q, k: (k <= q) & (q - k <= 6)))


@of_each_forward
@pytest.mark.parametrize("pool", [Pool, WindowPool])
def test_a_graph_reads_what_replays_write(
    mode: ForwardMode, new: list[int], total: list[int], pool: type[Pool]
) -> None:
    """The metadata of the capture, with the contents that later replays fill in, gives the result
    of the last batch; other graphs are replayed in between."""
    runner = Runner(pool=pool)
    backend = ours.MaskCuteBackend(runner)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state must be called"):
        backend.init_forward_metadata_out_graph(Batch(runner, mode, new, total).given)
    backend.init_cuda_graph_state(REQUESTS, 400)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    first = Batch(runner, mode, new, [max(fill, n) for n in new], seed=1)
    backend.init_forward_metadata_out_graph(first.given, in_capture=True)
    backend.init_forward_metadata_in_graph(first.given)
    captured = backend.forward_metadata
    for other in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        each = 1 if other is ForwardMode.DECODE else DRAFTS
        between = Batch(runner, other, [each] * 2, [20, 30], seed=2)
        backend.init_forward_metadata_out_graph(between.given)
    window = 6 if pool is WindowPool else -1
    batch = Batch(runner, mode, new, total)
    batch.fill(WindowPool.MOVED if pool is WindowPool else 0)
    backend.init_forward_metadata_out_graph(batch.given)
    backend.forward_metadata = captured
    assert captured is not None and captured.longest_query >= max(new)
    found = batch.run(backend, layer(sliding_window_size=window))
    near = 1000 if window < 0 else window
    assert_equal(found, batch.expected(lambda q, k: (k <= q) & (q - k <= near)))
    large = Batch(runner, mode, new, total)
    large.given.batch_size, backend._graphs.page_table = 3, torch.zeros(2, 3, dtype=INT)
    with pytest.raises(RuntimeError, match="2 requests at most, got 3"):
        backend.init_forward_metadata_out_graph(large.given)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_mla_backend": True}, "MLA"),
    ({"prefill_aware_swa": True}, "prefill-aware windows"),
    ({"kv_cache_dtype": torch.float8_e4m3fn}, "a cache of torch.float8_e4m3fn"),
    ({"page_size": 512}, "--page-size 512"),
]


@pytest.mark.parametrize(("more", "name"), REFUSED)
def test_what_a_runner_needs_and_is_not_there(more: dict[str, Any], name: str) -> None:
    runner = Runner()
    vars(runner).update(more)
    with pytest.raises(NotImplementedError, match=f"mask_cute does not support {name}"):
        ours.MaskCuteBackend(runner)


@pytest.mark.parametrize("name", ["is_encoder_decoder", "is_local_attention_model"])
def test_what_a_model_needs_and_is_not_there(name: str) -> None:
    runner = Runner()
    setattr(runner.model_config, name, True)
    with pytest.raises(NotImplementedError, match="mask_cute does not support .*attention"):
        ours.MaskCuteBackend(runner)


def test_settings_that_are_not_there(settings: SimpleNamespace) -> None:
    settings.spec.speculative_eagle_topk = 4
    with pytest.raises(
        NotImplementedError, match="tree of draft tokens .*--speculative-eagle-topk 4"
    ):
        ours.MaskCuteBackend(Runner())
    settings.spec.speculative_eagle_topk, settings.parallel.attn_cp_size = None, 2
    with pytest.raises(NotImplementedError, match="context parallelism of 2 ranks"):
        ours.MaskCuteBackend(Runner())
    settings.parallel.attn_cp_size = 1
    runner = Runner()
    runner.kv_index_translator.is_translating = True
    with pytest.raises(NotImplementedError, match="--enable-unified-memory"):
        ours.MaskCuteBackend(runner)


def test_arguments_that_are_not_there() -> None:
    runner = Runner()
    backend, batch = ours.MaskCuteBackend(runner), Batch(runner, *FORWARDS[2])
    batch.fill()
    backend.init_forward_metadata(batch.given)
    for name in ("q_rope", "score_mod", "rel_bias", "return_lse"):
        with pytest.raises(NotImplementedError, match=f"mask_cute of SGLang does not take {name}"):
            batch.run(backend, layer(), **{name: True})
    batch.run(backend, layer(), q_rope=None, return_lse=False)
    batch.given.spec_info = object()
    with pytest.raises(NotImplementedError, match="--speculative-draft-attention-backend"):
        backend.init_forward_metadata(batch.given)


def test_an_idle_rank() -> None:
    backend = ours.MaskCuteBackend(Runner())
    given = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    out = backend.forward(torch.zeros(0, HEADS * DIM), None, None, layer(), given)
    assert out.shape == (0, HEADS * DIM)
