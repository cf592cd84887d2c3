"""Random masks of every builder, each with its definition query by query and key by key."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask

Rule = Callable[[int, int], bool]


class Drawn(NamedTuple):
    mask: ColumnMask
    rule: Rule
    """Whether query q sees key k."""
    form: tuple[bool, int]
    """causal, number of vectors"""


def draw_lengths(rng: random.Random, seqlen: int, least: int = 0) -> list[int]:
    """Between 1 and 6 lengths that add up to seqlen or, one time in four, to less."""
    total = seqlen - (rng.randint(0, seqlen // 3) if rng.random() < 0.25 else 0)
    num = max(1, min(rng.randint(1, 6), total // max(least, 1)))
    spare = total - num * least
    cuts = sorted(rng.randint(0, spare) for _ in range(num - 1))
    return [b - a + least for a, b in zip([0, *cuts], [*cuts, spare], strict=True)]


def owners(lengths: list[int], seqlen: int) -> list[int | None]:
    """The document of each token, None past the last one."""
    named: list[int | None] = [i for i, length in enumerate(lengths) for _ in range(length)]
    return named + [None] * (seqlen - len(named))


def draw_tree(rng: random.Random, nodes: int) -> list[int]:
    """The parent of each node of a forest in depth-first order."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(nodes):
        path = path[: rng.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def ancestors(parents: list[int]) -> list[set[int]]:
    """The nodes that each node sees: its ancestors and itself."""
    seen: list[set[int]] = []
    for node, parent in enumerate(parents):
        seen.append({node} | (seen[parent] if parent >= 0 else set()))
    return seen


def draw_full(rng: random.Random, seqlen: int) -> Drawn:
    return Drawn(builders.full(seqlen), lambda q, k: True, (False, 2))


def draw_causal(rng: random.Random, seqlen: int) -> Drawn:
    return Drawn(builders.causal(seqlen), lambda q, k: k <= q, (True, 1))


def draw_sliding_window(rng: random.Random, seqlen: int) -> Drawn:
    window = rng.randint(0, seqlen + 3)
    return Drawn(
        builders.sliding_window(seqlen, window), lambda q, k: 0 <= q - k <= window, (True, 1)
    )


def draw_sink_window(rng: random.Random, seqlen: int) -> Drawn:
    sinks, window = rng.randint(0, seqlen + 1), rng.randint(0, seqlen + 1)
    return Drawn(
        builders.sink_window(seqlen, sinks, window),
        lambda q, k: k <= q and (k < sinks or q - k <= window),
        (True, 1),
    )


def draw_global_sliding_window(rng: random.Random, seqlen: int) -> Drawn:
    tokens, window = rng.randint(0, seqlen + 1), rng.randint(0, seqlen + 1)
    return Drawn(
        builders.global_sliding_window(seqlen, tokens, window),
        lambda q, k: q < tokens or k < tokens or abs(q - k) <= window,
        (False, 4),
    )


def draw_prefix_lm_causal(rng: random.Random, seqlen: int) -> Drawn:
    prefix = rng.randint(0, seqlen + 1)
    return Drawn(
        builders.prefix_lm_causal(seqlen, prefix), lambda q, k: k <= q or k < prefix, (False, 2)
    )


def same(owner: list[int | None], q: int, k: int) -> bool:
    return owner[q] is not None and owner[q] == owner[k]


def of_documents(mask: ColumnMask, owner: list[int | None], is_causal: bool) -> Drawn:
    return Drawn(
        mask,
        lambda q, k: same(owner, q, k) and (k <= q or not is_causal),
        (True, 1) if is_causal else (False, 2),
    )


def draw_causal_document(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    mask = builders.causal_document(lengths, seqlen)
    return of_documents(mask, owners(lengths, seqlen), True)


def draw_document(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    return of_documents(builders.document(lengths, seqlen), owners(lengths, seqlen), False)


def draw_prefix_lm_document(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    prefixes = [rng.randint(0, length + 1) for length in lengths]
    owner = owners(lengths, seqlen)

    def rule(q: int, k: int) -> bool:
        if not same(owner, q, k):
            return False
        in_document = k - owner.index(owner[k])
        return k <= q or in_document < prefixes[owner[k] or 0]

    return Drawn(builders.prefix_lm_document(lengths, prefixes, seqlen), rule, (False, 2))


def draw_share_question(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    parts = [draw_lengths(rng, length) for length in lengths]
    for length, split in zip(lengths, parts, strict=True):
        split[-1] += length - sum(split)
    owner = owners(lengths, seqlen)
    part = [i for split in parts for i, length in enumerate(split) for _ in range(length)]

    def rule(q: int, k: int) -> bool:
        return k <= q and same(owner, q, k) and part[k] in (0, part[q])

    return Drawn(builders.share_question(parts, seqlen), rule, (True, 1))


def draw_causal_blockwise(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    owner = [len(lengths) - 1 if i is None else i for i in owners(lengths, seqlen)]
    return Drawn(
        builders.causal_blockwise(lengths, seqlen),
        lambda q, k: k <= q and owner[q] in (owner[k], len(lengths) - 1),
        (True, 2),
    )


def draw_qk_sparse(rng: random.Random, seqlen: int) -> Drawn:
    edges = sorted(rng.randint(0, seqlen) for _ in range(2 * rng.randint(0, 3)))
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    return Drawn(
        builders.qk_sparse(seqlen, [(a, b - a) for a, b in ranges]),
        lambda q, k: k <= q and not any(a <= q < b and a <= k < b for a, b in ranges),
        (True, 2),
    )


def draw_from_cu_seqlens(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    is_causal = rng.random() < 0.5
    given: Any = cu_seqlens if rng.random() < 0.5 else torch.tensor(cu_seqlens, dtype=torch.int32)
    mask = builders.from_cu_seqlens(given, seqlen, causal=is_causal)
    return of_documents(mask, owners(lengths, seqlen), is_causal)


def whole_documents(rng: random.Random, seqlen: int) -> tuple[list[int], bool]:
    """Lengths of documents that are not empty and fill seqlen, and whether they are causal."""
    lengths = draw_lengths(rng, seqlen, least=1)
    lengths[-1] += seqlen - sum(lengths)
    return lengths, rng.random() < 0.5


def draw_from_document_ids(rng: random.Random, seqlen: int) -> Drawn:
    lengths, is_causal = whole_documents(rng, seqlen)
    owner = owners(lengths, seqlen)
    ids = torch.tensor([7 - 3 * (i or 0) for i in owner], dtype=torch.int64)
    return of_documents(builders.from_document_ids(ids, causal=is_causal), owner, is_causal)


def draw_from_position_ids(rng: random.Random, seqlen: int) -> Drawn:
    lengths, is_causal = whole_documents(rng, seqlen)
    positions = torch.tensor([i for length in lengths for i in range(length)])
    mask = builders.from_position_ids(positions, causal=is_causal)
    return of_documents(mask, owners(lengths, seqlen), is_causal)


def draw_key_padding(rng: random.Random, seqlen: int) -> Drawn:
    """Padding on the left, on the right, or anywhere."""
    kind, edge = rng.randrange(3), rng.randint(0, seqlen)
    left, anywhere = [k >= edge for k in range(seqlen)], [rng.random() < 0.7 for _ in range(seqlen)]
    real = (left, [not x for x in left], anywhere)[kind]
    mask = torch.tensor([real]).to(rng.choice((torch.bool, torch.int64, torch.uint8)))
    is_causal = rng.random() < 0.5
    return Drawn(
        builders.key_padding(mask if rng.random() < 0.5 else mask[:, None, None], causal=is_causal),
        lambda q, k: real[k] and (k <= q or not is_causal),
        (True, 1) if is_causal else (False, 2),
    )


def draw_prefix_tree(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    parents = draw_tree(rng, len(lengths))
    owner, seen = owners(lengths, seqlen), ancestors(parents)
    return Drawn(
        builders.prefix_tree(parents, lengths, seqlen),
        lambda q, k: k <= q and owner[q] is not None and owner[k] in seen[owner[q] or 0],
        (True, 1),
    )


def draw_from_tin_tout(rng: random.Random, seqlen: int) -> Drawn:
    """Each token is a node of its own."""
    seen = ancestors(draw_tree(rng, seqlen))
    tout = torch.tensor([max(q for q in range(seqlen) if k in seen[q]) + 1 for k in range(seqlen)])
    return Drawn(builders.from_tin_tout(tout), lambda q, k: k in seen[q], (True, 1))


def draw_image_blocks(rng: random.Random, seqlen: int) -> Drawn:
    lengths = draw_lengths(rng, seqlen)
    names = rng.choices((-1, -2, 0, 1, 7), k=len(lengths) + 1)
    ids = [names[len(lengths) if i is None else i] for i in owners(lengths, seqlen)]
    run = [0]
    for before, after in zip(ids, ids[1:], strict=False):
        run.append(run[-1] + (before != after))
    window = rng.choice((None, rng.randint(0, seqlen + 2)))
    return Drawn(
        builders.image_blocks(torch.tensor(ids), window),
        lambda q, k: (
            0 <= q - k <= (seqlen if window is None else window)
            or (run[q] == run[k] and ids[q] >= 0)
        ),
        (False, 2),
    )


def draw_block_diffusion(rng: random.Random, seqlen: int) -> Drawn:
    """Of half as many tokens, so the mask has an even number."""
    n = max(1, seqlen // 2)
    block = rng.randint(1, n + 2)

    def rule(q: int, k: int) -> bool:
        of_q, of_k = q % n // block, k % n // block
        if q < n:
            return of_q == of_k if k < n else of_k < of_q
        return k >= n and of_k <= of_q

    return Drawn(builders.block_diffusion(n, block), rule, (False, 4))


DRAW = {
    name.removeprefix("draw_"): function
    for name, function in list(globals().items())
    if name.startswith("draw_") and name not in ("draw_lengths", "draw_tree")
}


def brute_force(rule: Rule, seqlen_q: int, seqlen_k: int) -> Tensor:
    return torch.tensor([[rule(q, k) for k in range(seqlen_k)] for q in range(seqlen_q)])
