"""The lines of docs/integrations_more.md, with the packages that they are for, on the CPU."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_files import needs_engine
from process_group import run_in_processes
from stand_ins import StandIns
from torch import Tensor

needs_engine("transformers")

from transformers.utils import is_torchvision_available  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "integrations_more.md").read_text()
# transformers remembers that it is not there
is_torchvision_available()


def blocks(library: str) -> list[str]:
    """The modules that a section says to copy, and its lines."""
    (section,) = re.findall(rf"^## {re.escape(library)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M)
    modules = re.findall(r"\]\((\.\./contrib/adapters/\w+\.py)\)", section)
    lines = re.findall(r"^```python\n(.*?)^```$", section, flags=re.S | re.M)
    return [*((DOCS / module).read_text() for module in modules), *lines]


def run_lines(library: str, tmp_path: Path) -> Any:
    """The names that the Python of a section binds. It is a file, which some packages read."""
    name = f"lines_of_{re.sub(r'[^a-z]', '_', library.lower())}"
    path = tmp_path / f"{name}.py"
    path.write_text("\n\n".join(blocks(library)))
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return SimpleNamespace(**vars(module))


def version_told(library: str) -> str:
    (told,) = re.findall(rf"^\| \[{re.escape(library)}\]\(\S+\) \| (?:core )?(\S+) \|", PAGE, re.M)
    return str(told)


@pytest.mark.parametrize(
    ("library", "package"),
    [
        *(("TRL", "trl"), ("axolotl", "axolotl"), ("torchtitan", "torchtitan")),
        *(("Megatron-LM", "megatron-core"), ("diffusers", "diffusers")),
    ],
)
def test_the_version_that_the_page_tells(library: str, package: str) -> None:
    try:
        assert version_told(library) == version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not here: `make test-engines` fetches it")


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink: Any = None) -> Tensor:
    """Of (rows, heads, d) in float64; visible (rows, keys)."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        extra = sink.double()[:, None, None].expand(-1, len(q), 1)
        scores, v = torch.cat((scores, extra), -1), torch.cat((v, v.new_zeros(v[:1].shape)))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def causal(rows: int, keys: int | None = None, window: int = 1000) -> Tensor:
    distance = torch.arange(rows)[:, None] - torch.arange(keys or rows)
    return (distance >= 0) & (distance <= window)


def test_torchtitan(tmp_path: Path) -> None:
    needs_package("torchtitan")
    from torchtitan.models.common.attention import VarlenMetadata

    lines = run_lines("torchtitan", tmp_path)
    q = torch.randn(2, 20, 4, 16, requires_grad=True)
    k, v = torch.randn(2, 2, 20, 2, 16)
    starts = torch.tensor([0, 7, 20, 40], dtype=torch.int32)
    masks = VarlenMetadata(starts, starts, 20, 20)
    for window in (-1, 3):
        module = lines.MaskCuteAttention.Config(window_size=(window, 0)).build()
        assert isinstance(module, lines.MaskCuteAttention)
        out = module(q, k, v, attention_masks=masks, enable_gqa=True)
        of_rows = [x.flatten(0, 1) for x in (q, k, v)]
        for first, end in ((0, 7), (7, 20), (20, 40)):
            exact = attention(
                *(x[first:end] for x in of_rows), causal(end - first, window=window % 1001)
            )
            assert torch.allclose(out.flatten(0, 1)[first:end].double(), exact, atol=1e-5)
        both = module(q, k, v, attention_masks=masks, out_transform=lambda *x: x)
        assert [tuple(x.shape) for x in both] == [(2, 20, 4, 16), (2, 20, 4)]
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert gradient.abs().max() > 0


def test_megatron(tmp_path: Path) -> None:
    needs_package("megatron.core")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    lines = run_lines("Megatron-LM", tmp_path)
    submodules = lines.spec.submodules.self_attention.submodules
    assert submodules.core_attention is lines.MaskCuteAttention

    def made(**more: Any) -> Any:
        given = {
            "num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
            "kv_channels": 16, "attention_dropout": 0.0, "use_cpu_initialization": True,
        }  # fmt: skip
        config = TransformerConfig(**given | more)
        return submodules.core_attention(
            config=config, layer_number=1, attn_mask_type=AttnMaskType.causal,
            attention_type="self", cp_comm_type=None, softmax_scale=None, pg_collection=None,
        )  # fmt: skip

    q, k, v = torch.randn(20, 3, 4, 16), torch.randn(20, 3, 2, 16), torch.randn(20, 3, 2, 16)
    for more, window in (
        ({}, 1000),
        ({"window_size": (5, 0)}, 5),
        ({"softmax_type": "learnable"}, 1000),
    ):
        module = made(**more)
        sink = module.softmax_offset
        if sink is not None:
            torch.nn.init.normal_(sink)
        out = module(q, k, v, None, attn_mask_type=None, attention_bias=None)
        assert out.shape == (20, 3, 64)
        for b in range(3):
            exact = attention(q[:, b], k[:, b], v[:, b], causal(20, window=window), sink)
            assert torch.allclose(out[:, b].double(), exact.flatten(1), atol=1e-5)
    full = made()(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    exact = attention(q[:, 0], k[:, 0], v[:, 0], torch.ones(20, 20, dtype=torch.bool))
    assert torch.allclose(full[:, 0].double(), exact.flatten(1), atol=1e-5)
    starts = torch.tensor([0, 6, 20], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=14, max_seqlen_kv=14)
    out = made()(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=packed)
    exact = attention(q[6:, 0], k[6:, 0], v[6:, 0], causal(14))
    assert torch.allclose(out[6:].double(), exact.flatten(1), atol=1e-5)
    with pytest.raises(NotImplementedError, match="attention_dropout must be 0, got 0.1"):
        made(attention_dropout=0.1)
    with pytest.raises(NotImplementedError, match="attn_mask_type AttnMaskType.arbitrary"):
        made()(q, k, v, None, attn_mask_type=AttnMaskType.arbitrary)


def sinks_of_a_rank(rank: int, path: str) -> dict[str, Any]:
    """What a rank of two says of its sinks, and the norm of all gradients as Megatron counts."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    scope: dict[str, Any] = {"__name__": "adapter"}
    exec(compile(Path(path).read_text(), path, "exec"), scope)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        attention_dropout=0.0, use_cpu_initialization=True, softmax_type="learnable",
        tensor_model_parallel_size=2,
    )  # fmt: skip
    module = scope["MaskCuteAttention"](config, 1, AttnMaskType.causal, "self")
    sinks = module.softmax_offset
    with torch.no_grad():
        sinks.copy_(torch.tensor([1.0, 2.0]) + 2 * rank)
    (sinks.square().sum() / 2).backward()
    square = sinks.grad.square().sum() * param_is_not_tensor_parallel_duplicate(sinks)
    dist.all_reduce(square)
    (tensor,) = module.sharded_state_dict("layer.").values()
    return {
        "key": tensor.key, "shape": tensor.global_shape, "offset": tensor.global_offset,
        "replica": tensor.replica_id, "data": tensor.data.tolist(), "norm": float(square.sqrt()),
    }  # fmt: skip


def test_sinks_of_megatron_are_divided_over_tensor_parallel_ranks() -> None:
    needs_package("megatron.core")
    path = DOCS.parent / "contrib/adapters/megatron_attention.py"
    found = run_in_processes(2, sinks_of_a_rank, str(path))
    for rank, told in enumerate(found):
        assert told["key"] == "layer.softmax_offset" and told["shape"] == (4,)
        assert told["offset"] == (2 * rank,) and told["data"] == [1 + 2 * rank, 2 + 2 * rank]
        # the first copy of each part is what is written
        assert told["replica"] == (0, 0, 0)
        assert told["norm"] == pytest.approx(30**0.5)


def test_diffusers(tmp_path: Path) -> None:
    needs_package("diffusers")
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    run_lines("diffusers", tmp_path)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    full = torch.ones(12, 12, dtype=torch.bool)
    with attention_backend("flex"):
        out = dispatch_attention_fn(q, k, v)
        assert torch.allclose(out[0].double(), attention(q[0], k[0], v[0], full), atol=1e-5)
        out = dispatch_attention_fn(q, k, v, is_causal=True)
        assert torch.allclose(out[1].double(), attention(q[1], k[1], v[1], causal(12)), atol=1e-5)
        mask = torch.arange(12) < torch.tensor([[5], [12]])
        out = dispatch_attention_fn(q, k, v, attn_mask=mask)
        for b in range(2):
            exact = attention(q[b], k[b], v[b], mask[b].expand(12, 12))
            assert torch.allclose(out[b].double(), exact, atol=1e-5)
        with pytest.raises(NotImplementedError, match="attn_mask must be"):
            dispatch_attention_fn(q, k, v, attn_mask=mask[:, None, None])


def small_model(name: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32)


def test_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package("axolotl")
    StandIns(("addict", "peft")).install()
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.schemas.enums import ATTN_IMPLS_SUPPORTING_PACKING, CANONICAL_ATTN_IMPLS

    for names in (ATTN_IMPLS_SUPPORTING_PACKING, CANONICAL_ATTN_IMPLS):
        assert "flex_attention" in names and "mask_cute" not in names
    (tmp_path / "mask_cute_plugin.py").write_text("\n".join(blocks("axolotl")))
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = PluginManager.get_instance()
    manager.register("mask_cute_plugin.MaskCutePlugin")
    (plugin,) = (x for name, x in manager.plugins.items() if "mask_cute" in name)
    plugin.register({})
    expected, model = small_model("eager").eval(), small_model("eager").eval()
    manager.post_model_build({}, model)
    assert model.config._attn_implementation == "mask_cute"
    ids = torch.randint(3, 97, (1, 20))
    packed = torch.cat((torch.arange(8), torch.arange(12)))[None]
    with torch.no_grad():
        found = model(ids, position_ids=packed, use_cache=False).logits
        alone = [expected(x).logits for x in ids.split((8, 12), 1)]
    assert torch.allclose(found, torch.cat(alone, 1), atol=1e-5)


def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed samples train with the losses of eager attention that has them alone."""
    needs_package("trl")
    needs_package("datasets")
    import trl
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_cpu = partial(SFTConfig, use_cpu=True, bf16=False)
    monkeypatch.setattr(trl, "SFTConfig", on_cpu)
    lines = run_lines("TRL", tmp_path)
    assert lines.settings.model_init_kwargs == {"attn_implementation": "mask_cute"}
    ids = [torch.randint(3, 97, (n,)).tolist() for n in (9, 4, 12, 7, 16, 5)]
    losses = []
    for name in ("eager", "mask_cute"):
        folder = tmp_path / name
        small_model("eager").save_pretrained(folder)
        settings = on_cpu(
            output_dir=str(tmp_path / "out"), packing=name == "mask_cute", max_length=64,
            model_init_kwargs={"attn_implementation": name, "dtype": "float32"}, max_steps=2,
            per_device_train_batch_size=6 if name == "eager" else 1, report_to=[],
            logging_steps=1, gradient_checkpointing=True,
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": ids})
        trainer = SFTTrainer(
            str(folder), settings, train_dataset=data, processing_class=tokenizer()
        )
        assert trainer.model.config._attn_implementation == name
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def needs_package(name: str) -> None:
    """Skip a test whose package is not there."""
    needs_engine(name)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(97)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")
