"""The models, and what share of their forward operations is attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MODEL_POSITIONS = 131072


@dataclass(frozen=True)
class Shape:
    """A decoder of transformers with random weights.

    config: the name of its class in transformers. window: of its windowed layers, of which
    `windowed` stand before each layer without a window; 0: no layer has a window. experts, active:
    all of a layer, and how many compute a token. targets: the linear layers that LoRA adapts.
    spread: the standard deviation of weights.
    """

    config: str
    hidden: int
    inner: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    vocabulary: int
    window: int = 0
    windowed: int = 0
    experts: int = 1
    active: int = 1
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    spread: float = 0.02

    def windows(self) -> list[int]:
        """The window of each layer, 0 for none."""
        period = self.windowed + 1
        return [self.window if i % period < self.windowed else 0 for i in range(self.layers)]

    def tiny(self) -> Shape:
        """The same kinds of layers, small enough for a CPU; weights are as large as those of the
        model, for their number of inputs, so that attention is no more even."""
        hidden = 64
        return replace(
            self,
            hidden=hidden,
            inner=96,
            layers=2 if self.windowed < 2 else 3,
            heads=4,
            heads_kv=2,
            head_dim=16,
            vocabulary=200,
            window=self.window and 24,
            windowed=min(self.windowed, 2),
            experts=min(self.experts, 4),
            active=min(self.active, 2),
            spread=self.spread * (self.hidden / hidden) ** 0.5,
        )

    def make_config(self, num_positions: int) -> Any:
        import transformers

        kinds = ["sliding_attention" if x else "full_attention" for x in self.windows()]
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads_kv,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            # fewer than the models have change how some of them scale positions
            "max_position_embeddings": max(num_positions, MODEL_POSITIONS),
            "initializer_range": self.spread,
            "use_cache": False,
            "attention_dropout": 0.0,
            "pad_token_id": None,
        }
        if self.windowed:
            sizes |= {"sliding_window": self.window, "layer_types": kinds}
        if self.experts > 1:
            sizes |= {"num_local_experts": self.experts, "num_experts_per_tok": self.active}
        return getattr(transformers, self.config)(**sizes)


_WITH_MLP = (*Shape.targets, "gate_proj", "up_proj", "down_proj")
SHAPES = {
    "llama3-8b": Shape(
        "LlamaConfig", 4096, 14336, 32, 32, 8, 128, 128256, targets=_WITH_MLP
    ),
    # the text model of Gemma-3-4B
    "gemma3": Shape(
        "Gemma3TextConfig", 2560, 10240, 34, 8, 4, 256, 262208, window=1024, windowed=5,
        targets=_WITH_MLP,
    ),
    # gpt-oss-20b; its experts are no linear layers, so LoRA leaves them alone
    "gpt-oss": Shape(
        "GptOssConfig", 2880, 2880, 24, 64, 8, 64, 201088, window=128, windowed=1, experts=32,
        active=4,
    ),
}  # fmt: skip


def visible_pairs(length: int, window: int) -> int:
    """(query, key) pairs of one causal sequence; a query sees `window` keys, 0: all before it."""
    triangle = length * (length + 1) // 2
    if not 0 < window < length:
        return triangle
    hidden = length - window
    return triangle - hidden * (hidden + 1) // 2


def attention_share(shape: Shape, lengths: Sequence[int], num_rows: int) -> float:
    """Attention's part of the forward operations of the layers.

    lengths: of the sequences that attention computes, which share rows where answers share a
    question. num_rows: rows that the linear layers compute. Attention has 4 * head_dim operations a
    visible pair and head; a linear layer has 2 a weight and row. The embedding and the head of the
    vocabulary do not count.
    """
    width = shape.heads * shape.head_dim
    per_row = shape.hidden * (2 * width + 2 * shape.heads_kv * shape.head_dim)
    per_row += 3 * shape.hidden * shape.inner * shape.active
    linear = 2 * per_row * shape.layers * num_rows
    pairs = sum(visible_pairs(length, w) for w in shape.windows() for length in lengths)
    attention = 4 * width * pairs
    return attention / (attention + linear)
