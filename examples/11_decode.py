"""Generate with a cache in pages: prompts of different lengths, then a token at a time.

    python examples/11_decode.py
    python examples/11_decode.py --same-bits
    python examples/11_decode.py --fp8

A small model of Llama's shape with random weights: RMS norms, grouped heads, rotary positions, a
gated MLP. One call of `flash_attn_with_kvcache` rotates, writes the new keys into the pages of each
sequence and attends, for the prompts as for a step. On a GPU a step is captured once as a CUDA
graph and replayed while the sequences grow: pages and lengths are read on the device. The tokens
are held against the same model with dense attention in float64 over everything that was generated,
and the time of a step is printed beside that of torch's SDPA over a contiguous cache. With
--same-bits sums are cut at fixed keys (`seqlen_k_per_split`): rows that are decoded, in pages and
among others, have the bits of a forward over a whole sequence. With --fp8 the cache is in
float8_e4m3fn, with a scale for each token and head, which the call writes; the dense model rounds
its keys and values alike. Runs on a Hopper GPU where there is one, else on the CPU. Ends with an
error if the result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from dense_check import pick_device, within
from torch import Tensor
from torch.nn import functional as F

from flash_mask_cute import flash_attn_func, flash_attn_with_kvcache

PAGE_SIZE, VOCABULARY = 16, 257
FP8, LARGEST_CODE = torch.float8_e4m3fn, 448.0
SEQLEN_K_PER_SPLIT = 2048
PROMPTS = (37, 5, 20)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    heads_kv: int
    head_dim: int
    steps: int


class Model:
    """Weights in float32; attention in the dtype of its inputs."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        kv, out = shape.heads_kv * shape.head_dim, shape.heads * shape.head_dim

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(columns, rows, device=device) * rows**-0.5

        self.embedding = torch.randn(VOCABULARY, shape.width, device=device)
        self.blocks = [
            (
                *(weight(shape.width, out + 2 * kv), weight(out, shape.width)),
                *(weight(shape.width, 8 * shape.width), weight(4 * shape.width, shape.width)),
            )
            for _ in range(shape.layers)
        ]
        angle = torch.arange(512, device=device)[:, None] * 100.0 ** -torch.linspace(
            0, 1, shape.head_dim // 2, device=device
        )
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Logits (..., vocabulary). attend(layer, q, k, v): heads of each token, not rotated."""
        x, s = self.embedding[tokens], self.shape
        for layer, (qkv, out, gate_up, down) in enumerate(self.blocks):
            heads = F.linear(norm(x), qkv).unflatten(-1, (-1, s.head_dim)).to(self.dtype)
            q, k, v = heads.split((s.heads, s.heads_kv, s.heads_kv), dim=-2)
            x = x + F.linear(attend(layer, q, k, v).flatten(-2).float(), out)
            gate, up = F.linear(norm(x), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(norm(x), self.embedding) * s.width**-0.5


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., heads, head_dim), halves as pairs; cos, sin (..., head_dim / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def as_in_fp8(x: Tensor) -> Tensor:
    """Rows (..., head_dim) as a cache in fp8 has them, with a scale for each."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST_CODE, 1.0)
    return ((x.float() / scales).to(FP8).float() * scales).to(x.dtype)


class PagedCache:
    """Keys and values of all layers, in pages that lie anywhere."""

    def __init__(
        self,
        model: Model,
        batch: int,
        capacity: int,
        keys_per_split: int | None = None,
        in_fp8: bool = False,
    ) -> None:
        self.keys_per_split = keys_per_split
        pages, s = -(-capacity // PAGE_SIZE), model.shape
        self.model = model
        shape = (s.layers, batch * pages, PAGE_SIZE, s.heads_kv, s.head_dim)
        dtype = FP8 if in_fp8 else model.dtype
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=model.device) for _ in "kv")
        self.scales: dict[str, Tensor] = {}
        if in_fp8:
            for name in ("k_descale", "v_descale"):
                self.scales[name] = torch.ones(shape[:-1], device=model.device)
        table = torch.randperm(batch * pages, device=model.device)
        self.page_table = table.view(batch, pages).int()
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=model.device)

    def attend(
        self,
        starts: Tensor | None,
        longest: int | None,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Of new tokens, packed as `starts` tells, or one of each sequence."""
        out = flash_attn_with_kvcache(
            q, self.k[layer], self.v[layer], k, v,
            rotary_cos=self.model.cos, rotary_sin=self.model.sin, rotary_interleaved=False,
            cache_seqlens=self.seqlens, page_table=self.page_table, causal=True,
            cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=longest,
            seqlen_k_per_split=self.keys_per_split, **self.scales_of(layer),
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def scales_of(self, layer: int) -> dict[str, Any]:
        return {name: scales[layer] for name, scales in self.scales.items()}

    def numbers(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pools of a layer in the dtype of the model."""
        k, v = self.k[layer], self.v[layer]
        if self.scales:
            scales = self.scales_of(layer).values()
            k, v = (x.float() * s[..., None] for x, s in zip((k, v), scales, strict=True))
        return k.to(self.model.dtype), v.to(self.model.dtype)

    def rows_unlike_a_forward(self) -> int:
        """How many of the last rows of all sequences, decoded together over the first layer's keys,
        have other bits than in a forward over a whole sequence."""
        unlike, lengths, pools = 0, self.seqlens.tolist(), self.numbers(0)
        whole = [torch.randn(1, n, self.model.shape.heads, self.k.shape[-1]) for n in lengths]
        whole = [x.to(pools[0]) for x in whole]
        options: Any = {"causal": True, "seqlen_k_per_split": self.keys_per_split}
        decoded = flash_attn_with_kvcache(
            torch.stack([q[0, -1:] for q in whole]), self.k[0], self.v[0],
            cache_seqlens=self.seqlens, page_table=self.page_table, **options,
            **self.scales_of(0),
        )  # fmt: skip
        assert isinstance(decoded, Tensor)
        for row, q, pages, n in zip(decoded, whole, self.page_table.long(), lengths, strict=True):
            k, v = (pool[pages].flatten(0, 1)[None, :n] for pool in pools)
            unlike += not torch.equal(flash_attn_func(q, k, v, **options)[0, -1], row[0])
        return unlike


def generate(
    model: Model, prompts: list[Tensor], keys_per_split: int | None, in_fp8: bool
) -> tuple[Tensor, Tensor, float]:
    """The new tokens (batch, steps), the most likely ones of logits (batch, steps, vocabulary); and
    seconds of a step."""
    batch, steps = len(prompts), model.shape.steps
    lengths = torch.tensor([len(x) for x in prompts], dtype=torch.int32, device=model.device)
    cache = PagedCache(model, batch, max(PROMPTS) + steps, keys_per_split, in_fp8)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    packed = torch.cat(prompts)
    of_prompts = model(packed, lambda *x: cache.attend(starts, max(PROMPTS), *x))
    logits = of_prompts[starts[1:].long() - 1][:, None]
    token = logits.argmax(-1)
    cache.seqlens += lengths
    found = [logits.clone()]

    def step() -> None:
        logits.copy_(model(token, lambda *x: cache.attend(None, None, *x)))
        token.copy_(logits.argmax(-1))
        cache.seqlens.add_(1)

    seconds = run_steps(step, lambda: found.append(logits.clone()), steps - 1, model.device)
    all_logits = torch.cat(found, dim=1)
    if keys_per_split is not None and (unlike := cache.rows_unlike_a_forward()):
        raise SystemExit(f"11_decode: {unlike} of {batch} rows have other bits than in a forward")
    return all_logits.argmax(-1), all_logits, seconds


def generate_with_sdpa(model: Model, prompts: list[Tensor], tokens: Tensor) -> float:
    """Seconds of a step of torch's SDPA over a contiguous cache, padded to the longest."""
    s, steps = model.shape, model.shape.steps
    batch, capacity = len(prompts), max(PROMPTS) + steps
    shape = (s.layers, batch, s.heads_kv, capacity, s.head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in "kv")
    lengths = torch.tensor([len(x) for x in prompts], device=model.device)
    rows, token = torch.arange(batch, device=model.device), tokens[:, :1].clone()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = (table[lengths][:, None] for table in (model.cos, model.sin))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k_cache[layer, rows, :, lengths], v_cache[layer, rows, :, lengths] = k[:, 0], v[:, 0]
        mask = torch.arange(capacity, device=model.device) <= lengths[:, None, None, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k_cache[layer], v_cache[layer], attn_mask=mask, enable_gqa=True
        )
        return out.transpose(1, 2)

    def step() -> None:
        token.copy_(model(token, attend).argmax(-1))
        lengths.add_(1)

    return run_steps(step, lambda: None, steps - 1, model.device)


def run_steps(
    step: Callable[[], None], after: Callable[[], None], count: int, device: torch.device
) -> float:
    """Run a step so often, on a GPU the last ones as a graph; seconds of one of these."""
    if device.type != "cuda":
        for _ in range(count):
            step()
            after()
        return 0.0
    for _ in range(2):
        step()
        after()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count - 2):
        graph.replay()
        after()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e-3 / (count - 2)


def dense_logits(model: Model, tokens: Tensor, in_fp8: bool) -> Tensor:
    """Of a whole sequence, with attention in float64 and no cache. in_fp8: over the numbers of a
    cache in fp8."""
    at = torch.arange(len(tokens), device=model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rotate(x, model.cos[at], model.sin[at]) for x in (q, k))
        if in_fp8:
            k, v = as_in_fp8(k), as_in_fp8(v)
        group = model.shape.heads // model.shape.heads_kv
        q, k, v = q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return model(tokens, attend)


@torch.no_grad()
def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--same-bits", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    given = parser.parse_args(arguments)
    keys_per_split = SEQLEN_K_PER_SPLIT if given.same_bits else None
    device = pick_device()
    on_gpu = device.type == "cuda"
    shape = Shape(4, 1024, 16, 4, 64, 100) if on_gpu else Shape(2, 64, 4, 2, 16, 20)
    torch.manual_seed(0)
    in_16_bits = on_gpu or given.fp8
    model = Model(shape, torch.bfloat16 if in_16_bits else torch.float32, device)
    prompts = [torch.randint(VOCABULARY, (n,), device=device) for n in PROMPTS]
    tokens, logits, seconds = generate(model, prompts, keys_per_split, given.fp8)

    worst, as_dense = 0.0, 0
    # a number that rounds to another code than in the dense model moves logits further
    tolerance = 4e-2 if given.fp8 else 2e-2 if in_16_bits else 1e-4
    for prompt, new, found in zip(prompts, tokens, logits, strict=True):
        exact = dense_logits(model, torch.cat([prompt, new]), given.fp8)[len(prompt) - 1 : -1]
        worst = max(worst, (found - exact).abs().max().item())
        as_dense += int((exact.argmax(-1) == new).sum())
    print(f"{as_dense} of {tokens.numel()} tokens as of dense attention")
    within("11_decode", "largest error of a logit", worst, tolerance)
    if on_gpu:
        of_sdpa = generate_with_sdpa(model, prompts, tokens)
        ours, theirs = (len(prompts) / x for x in (seconds, of_sdpa))
        print(f"{ours:.0f} tokens/s; with scaled_dot_product_attention {theirs:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
