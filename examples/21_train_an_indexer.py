"""Two layers that attend to the key blocks which an indexer chooses: trained, then decoded.

    python examples/21_train_an_indexer.py
    python examples/21_train_an_indexer.py --steps 200

The task is recall. The first half of a sequence binds codes to values, and the second half asks for
values by their codes. Each layer has an indexer, which predicts the share of each key block in the
attention of a query. A training step of a layer has three parts, as in DeepSeek-V3.2 (2025):

1. `attention_statistics` adds up the probabilities of dense attention over each block. This is the
   teacher, and has no gradient.
2. The indexer learns these shares.
3. The layer attends to the query's own block, and to the blocks with the largest shares
   (`SelectedBlocks`). A warm-up attends to all blocks.

After the warm-up a twin goes on with dense attention over the same batches. At the end the model
answers sequences that it has not seen: with dense attention, on its choice, with other blocks drawn
at random, and token by token over a cache in fp8 pages.

The teacher, attention on a choice, its gradients and a decoded token are checked against float64.
Runs on a Hopper GPU where there is one, else on the CPU. Ends with an error if a result is wrong,
or if the choice costs more loss than LARGEST_COST.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from dense_check import attend, compare, pick_device, within
from torch import Tensor, nn

from flash_mask_cute import (
    SelectedBlocks,
    attention_statistics,
    flash_attn_func,
    flash_attn_with_kvcache,
)

EXAMPLE = "21_train_an_indexer"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INDEX_DIM = 2, 64, 4, 2, 64, 32
SEQLEN, CODE, VALUES = 512, 32, 4
BLOCK, CHOSEN, PAGE = 64, 3, 64
WARM_UP, DECODED, HELD_OUT = 24, 16, 1 << 31
# nats of a loss, which is ln(VALUES) = 1.4 before the training
LARGEST_COST = 0.3


class Heads(NamedTuple):
    """q, k, v (batch, seqlen, heads, head_dim); those of an indexer (batch, seqlen, KV_HEADS,
    INDEX_DIM)."""

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor


# of a layer's number and its heads; its heads' outputs, like q
Attention: TypeAlias = Callable[[int, Heads], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.index = nn.Linear(WIDTH, 2 * KV_HEADS * INDEX_DIM)
        self.merge = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        # equal weights of queries and keys: equal codes attract from the start, so few steps do
        with torch.no_grad():
            q, k, _ = self.heads.weight.unflatten(0, (-1, HEAD_DIM)).split(
                (HEADS, KV_HEADS, KV_HEADS)
            )
            q.copy_(k.mul_(1.5).repeat_interleave(HEADS // KV_HEADS, 0))

    def split(self, x: Tensor) -> Heads:
        x = F.layer_norm(x, x.shape[-1:])
        parts = self.heads(x).bfloat16().unflatten(-1, (-1, HEAD_DIM))
        # an indexer learns from its teacher alone
        of_index = self.index(x.detach()).unflatten(-1, (-1, INDEX_DIM))
        return Heads(*parts.split((HEADS, KV_HEADS, KV_HEADS), 2), *of_index.chunk(2, 2))

    def close(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.merge(out.flatten(2).float())
        found: Tensor = x + self.mlp(F.layer_norm(x, x.shape[-1:]))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CODE + VALUES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, VALUES)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """Logits (batch, seqlen, VALUES) of tokens (batch, seqlen, CODE + VALUES)."""
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = layer.close(x, attention(number, layer.split(x)))
        found: Tensor = self.out(x)
        return found


def draw(seed: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and the answers (batch, SEQLEN / 2) to those of the second half."""
    rng, half = torch.Generator().manual_seed(seed), SEQLEN // 2
    codes = torch.randn(batch, half, CODE, generator=rng).sign()
    values = torch.randint(VALUES, (batch, half), generator=rng)
    told = torch.cat((codes, 3.0 * F.one_hot(values, VALUES)), -1)
    asked = torch.randint(half, (batch, half), generator=rng)
    asks = F.pad(codes.gather(1, asked[..., None].expand(-1, -1, CODE)), (0, VALUES))
    return torch.cat((told, asks), 1).to(device), values.gather(1, asked).to(device)


def loss_of(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross entropy of the last answers, as many as there are logits."""
    count = min(logits.shape[1], answers.shape[1])
    return F.cross_entropy(logits[:, -count:].flatten(0, 1), answers[:, -count:].flatten())


# -- attention -------------------------------------------------------------------------------------


def dense(number: int, given: Heads) -> Tensor:
    out: Tensor = flash_attn_func(given.q, given.k, given.v, causal=True)
    return out


def shares(index_q: Tensor, index_k: Tensor) -> Tensor:
    """Of each key block in an indexer's own attention, (batch, KV_HEADS, queries, blocks). Queries
    are the last ones."""
    scores = torch.einsum("bqhd,bkhd->bhqk", index_q, index_k) * INDEX_DIM**-0.5
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    weights = scores.masked_fill(later.triu(keys - queries + 1), -torch.inf).softmax(-1)
    return F.pad(weights, (0, -keys % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)


def choose(share: Tensor, keys: int) -> Tensor:
    """The query's own block, and those with the largest shares; int64 (batch, KV_HEADS, queries,
    CHOSEN). Queries are the last ones of `keys` tokens."""
    queries, blocks = share.shape[-2:]
    own = torch.arange(keys - queries, keys, device=share.device)[:, None] // BLOCK
    is_own = torch.arange(blocks, device=share.device) == own
    largest, best = share.detach().masked_fill(is_own, torch.inf).topk(min(CHOSEN, blocks))
    # early queries have fewer blocks before their own
    return torch.where(largest > 0, best, -1)


@torch.no_grad()
def teacher_of(given: Heads) -> Tensor:
    """P of dense attention, summed over key blocks and the heads of a group: (batch, KV_HEADS,
    queries, blocks)."""
    _, lse = flash_attn_func(given.q, given.k, given.v, causal=True, return_lse=True)
    found = attention_statistics(
        given.q, given.k, lse, "block_sums", block_size=(1, BLOCK), causal=True
    )
    assert found.block_sums is not None
    return found.block_sums


def attend_to(given: Heads, chosen: Tensor) -> Tensor:
    selection = SelectedBlocks(chosen, BLOCK)
    out: Tensor = flash_attn_func(
        given.q, given.k, given.v, causal=True, block_sparse_tensors=selection
    )
    return out


def on_choice(number: int, given: Heads) -> Tensor:
    return attend_to(given, choose(shares(given.index_q, given.index_k), SEQLEN))


def at_random(number: int, given: Heads) -> Tensor:
    share = shares(given.index_q, given.index_k)
    return attend_to(given, choose(torch.rand_like(share) * (share > 0), SEQLEN))


class Taught:
    """Attention beside which indexers learn.

    lesson: their divergence from their teachers, in nats of a query, added up over layers."""

    def __init__(self, attention: Attention) -> None:
        self.attention, self.lesson = attention, torch.zeros(())

    def __call__(self, number: int, given: Heads) -> Tensor:
        share = shares(given.index_q, given.index_k)
        target = teacher_of(given) / (HEADS // KV_HEADS)
        divergence = F.kl_div(share.clamp(min=1e-9).log(), target, reduction="sum")
        self.lesson = self.lesson.to(share) + divergence / share[..., 0].numel()
        return self.attention(number, given)


class PagedCache:
    """Keys and values of all layers in fp8 pages, a scale for each token and head, and the keys of
    the indexers."""

    def __init__(self, batch: int, device: torch.device) -> None:
        pages = batch * SEQLEN // PAGE
        shape = LAYERS, pages, PAGE, KV_HEADS
        self.k, self.v = torch.zeros(
            2, *shape, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device
        ).unbind()
        self.k_scales, self.v_scales = torch.ones(2, *shape, device=device).unbind()
        self.index_k = torch.zeros(LAYERS, batch, SEQLEN, KV_HEADS, INDEX_DIM, device=device)
        self.page_table = torch.randperm(pages, device=device).int().view(batch, -1)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.seqlen = 0

    def __call__(self, number: int, given: Heads) -> Tensor:
        """Attention of new tokens, which are written into the cache."""
        end = self.seqlen + given.q.shape[1]
        self.index_k[number, :, self.seqlen : end] = given.index_k
        share = shares(given.index_q, self.index_k[number, :, :end])
        chosen = choose(share, end)
        out: Any = flash_attn_with_kvcache(
            given.q, self.k[number], self.v[number], given.k, given.v,
            cache_seqlens=self.seqlens, page_table=self.page_table, causal=True,
            k_descale=self.k_scales[number], v_descale=self.v_scales[number],
            block_sparse_tensors=SelectedBlocks(chosen, BLOCK),
        )  # fmt: skip
        self.seen = given.q, chosen, out
        return out

    def grow(self, tokens: int) -> None:
        self.seqlens += tokens
        self.seqlen += tokens

    def numbers(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (batch, seqlen, heads, head_dim), in bfloat16."""
        pools = (self.k, self.k_scales), (self.v, self.v_scales)
        k, v = ((x[number].float() * s[number][..., None]).bfloat16() for x, s in pools)
        return k[self.page_table].flatten(1, 2), v[self.page_table].flatten(1, 2)


class Decoded(NamedTuple):
    """Logits of the last DECODED tokens, and the cache after them."""

    logits: Tensor
    cache: PagedCache

    @staticmethod
    def of(model: Model, tokens: Tensor) -> Decoded:
        """One token at a time, after a prefill of those in front of them."""
        cache, logits = PagedCache(len(tokens), tokens.device), list[Tensor]()
        for part in tokens.split((SEQLEN - DECODED, *[1] * DECODED), 1):
            logits.append(model(part, cache)[:, -1:])
            cache.grow(part.shape[1])
        return Decoded(torch.cat(logits[1:], 1), cache)


# -- checks ----------------------------------------------------------------------------------------


def visible_of(chosen: Tensor, first: int = 0) -> Tensor:
    """(batch, HEADS, queries, SEQLEN), of queries from `first` on."""
    key = torch.arange(SEQLEN, device=chosen.device)
    query = torch.arange(first, first + chosen.shape[2], device=chosen.device)
    seen = (chosen[..., None] == key // BLOCK).any(-2) & (key <= query[:, None])
    return seen.repeat_interleave(HEADS // KV_HEADS, 1)


def check_training(given: Heads, chosen: Tensor) -> None:
    """The teacher, and attention on a choice with its gradients."""
    q, k, v = (x.detach() for x in given[:3])
    block = torch.arange(SEQLEN, device=q.device) // BLOCK
    causal = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=q.device).tril()

    def sums_of(q: Tensor, k: Tensor) -> Tensor:
        # with the block of a key as its value, the output is the sum over a block
        members = F.one_hot(block).to(q)[None, :, None].expand(*k.shape[:3], -1)
        out = attend(q, k, members, causal)[0]
        return out.unflatten(2, (KV_HEADS, -1)).sum(3).transpose(1, 2)

    exact, eager = sums_of(q.double(), k.double()), sums_of(q, k)
    compare(EXAMPLE, "teacher", teacher_of(given), exact, eager)
    visible, dout = visible_of(chosen), torch.randn_like(q)

    def results(call: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in operands]
        out = call(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_to(given._replace(q=q, k=k, v=v), chosen)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, visible)[0]

    found = (
        results(ours, q.clone(), k.clone(), v.clone()),
        results(written_out, q.double(), k.double(), v.double()),
        results(written_out, q.clone(), k.clone(), v.clone()),
    )
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        compare(EXAMPLE, name, x, y, z)


def check_decoding(cache: PagedCache) -> None:
    """The last token in the last layer, over the numbers that the pages have."""
    q, chosen, out = cache.seen
    k, v = cache.numbers(LAYERS - 1)
    visible = visible_of(chosen, SEQLEN - 1)
    exact, eager = (
        attend(x.to(dtype), k.to(dtype), v.to(dtype), visible)[0]
        for x, dtype in ((q, torch.float64), (q, torch.bfloat16))
    )
    compare(EXAMPLE, "decoded token", out, exact, eager)


def step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    attention: Attention,
    batch: tuple[Tensor, Tensor],
) -> float:
    """The loss of a training step."""
    tokens, answers = batch
    loss = loss_of(model(tokens, attention), answers)
    optimizer.zero_grad()
    (loss + attention.lesson if isinstance(attention, Taught) else loss).backward()
    optimizer.step()
    return loss.item()


def train(steps: int, device: torch.device) -> tuple[Model, Model]:
    """The model, and the twin that learned with dense attention."""
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for number in range(WARM_UP):
        warm = Taught(dense)
        loss = step(model, optimizer, warm, draw(number, 1, device))
        if number % 8 == 7:
            print(f"step {number:3}: loss {loss:.3f}, indexers off by {warm.lesson.item():.3f}")
    twin, of_twin = deepcopy((model, optimizer))
    for number in range(WARM_UP, WARM_UP + steps):
        sparse, batch = Taught(on_choice), draw(number, 1, device)
        loss = step(model, optimizer, sparse, batch)
        of_dense = step(twin, of_twin, dense, batch)
        if number % 8 == 7:
            off = f"indexers off by {sparse.lesson.item():.3f}"
            print(f"step {number:3}: loss {loss:.3f}, {off}; of the dense twin {of_dense:.3f}")
    return model, twin


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="after the warm-up")
    device = pick_device()
    torch.manual_seed(0)
    model, twin = train(parser.parse_args(arguments).steps, device)

    tokens, answers = draw(HELD_OUT, 2, device)
    last: dict[int, Heads] = {}

    def recorded(number: int, given: Heads) -> Tensor:
        last[number] = given
        return on_choice(number, given)

    with torch.no_grad():
        chosen = model(tokens, recorded)
        drawn = model(tokens, at_random)
        of_twin, decoded = twin(tokens, dense), Decoded.of(model, tokens)
    for name, logits in (("dense twin", of_twin), ("choice", chosen), ("random blocks", drawn)):
        print(f"loss of sequences not seen before, {name}: {loss_of(logits, answers):.3f}")
    cost = loss_of(chosen, answers) - loss_of(of_twin, answers)
    within(EXAMPLE, "loss above that of the dense twin", max(cost.item(), 0.0), LARGEST_COST)
    cost = loss_of(decoded.logits, answers) - loss_of(chosen[:, -DECODED:], answers)
    within(EXAMPLE, "loss that decoding over fp8 adds", max(cost.item(), 0.0), LARGEST_COST)
    given = last[LAYERS - 1]
    check_training(given, choose(shares(given.index_q, given.index_k), SEQLEN))
    check_decoding(decoded.cache)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
