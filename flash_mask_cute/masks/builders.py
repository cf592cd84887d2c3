"""Masks by name: the twelve of the FlashMask paper (Wang et al. 2024, figure 1), trees, images and
block diffusion, and conversions.

Every function returns a `ColumnMask`, made on the device without a sync (except `from_dense` and
`from_mask_mod`). The mask is for self-attention over `seqlen` tokens, and records that
(`ColumnMask.seqlen_q`). A mask of `from_dense` is for the queries of the dense mask, one of
`from_mask_mod` for the seqlen_q given to it, one of `key_padding` for any number of queries.
`draft_tree` is for decoding and returns a `DraftTree`. Each docstring says which query q sees which
key k, which form stores that, and shows the rows of a small mask. The form needs the fewest
vectors for exact decisions: their minimum and maximum over a block of keys say if it is empty.
docs/mask_gallery.md shows the masks.

Document lengths are lists of ints, or [[...], ...] for a batch with different documents. They may
also be an integer tensor (documents,) or (batch, documents); the mask is then on its device,
`seqlen` is required, and the numbers cannot be checked. torch.compile traces tensors, and no lists.
Lengths may be 0, and there may be none. Unless a docstring says otherwise, tokens past the last
document see nothing and no query sees them. `seqlen` defaults to the sum of the lists.

All of them raise TypeError or ValueError for unusable arguments, naming them.

Example:
    >>> from flash_mask_cute import builders
    >>> builders.share_question([[2, 2, 2], [1, 2]]).dense(9)[0, 0].sum(-1).tolist()
    [1, 2, 3, 4, 3, 4, 1, 2, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_mask_cute.masks.builder_arguments import (
    Device,
    check_bool,
    check_int,
    device_of,
    is_list,
    refuse_in_graph,
    sizes_of,
    token_rows,
)
from flash_mask_cute.masks.column_mask import ANY, ColumnMask
from flash_mask_cute.masks.draft_tree import DraftTree as DraftTree
from flash_mask_cute.masks.draft_tree import draft_tree as draft_tree
from flash_mask_cute.masks.mask_mods import from_mask_mod as from_mask_mod
from flash_mask_cute.masks.runs import MAX_INT32, dense_runs, fit_vectors
from flash_mask_cute.masks.tree_order import check_depth_first, checked_trees, last_descendants

Lengths: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Tensor
PartLengths: TypeAlias = Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] | Tensor


def full(seqlen: int, *, device: Device = None) -> ColumnMask:
    """Every query sees every key. Not causal, 2 vectors.

    Example:
        >>> builders.full(2).dense(2)[0, 0].int().tolist()
        [[1, 1], [1, 1]]
    """
    check_int("seqlen", seqlen)
    indices = torch.zeros((1, 1, seqlen, 2), dtype=torch.int32, device=device)
    indices[..., 0] = seqlen
    return _self_attention(indices, causal=False)


def causal(seqlen: int, *, device: Device = None) -> ColumnMask:
    """k <= q. Causal, 1 vector.

    Example:
        >>> builders.causal(3).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    check_int("seqlen", seqlen)
    indices = torch.full((1, 1, seqlen, 1), seqlen, dtype=torch.int32, device=device)
    return _self_attention(indices, causal=True)


def sliding_window(seqlen: int, window: int, *, device: Device = None) -> ColumnMask:
    """q - window <= k <= q: the query's own key and `window` before it. Causal, 1 vector.

    Example:
        >>> builders.sliding_window(4, 1).dense(4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    check_int("seqlen", seqlen)
    check_int("window", window)
    return _self_attention(_window_end(seqlen, window, device)[None, None, :, None], causal=True)


def sink_window(seqlen: int, sinks: int, window: int, *, device: Device = None) -> ColumnMask:
    """k <= q, and (k < sinks or q - window <= k): a causal window that keeps the first keys.

    Attention sinks (Xiao et al. 2023). Causal, 1 vector.

    Example:
        >>> builders.sink_window(4, 1, 1).dense(4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """
    check_int("seqlen", seqlen)
    check_int("sinks", sinks)
    check_int("window", window)
    end = _window_end(seqlen, window, device)
    end[:sinks] = seqlen
    return _self_attention(end[None, None, :, None], causal=True)


def global_sliding_window(
    seqlen: int, global_tokens: int, window: int, *, device: Device = None
) -> ColumnMask:
    """abs(q - k) <= window, or q < global_tokens, or k < global_tokens.

    Global tokens see all tokens, and all tokens see them. Not causal, 4 vectors: the range of
    earlier queries that do not see a key starts after the global tokens, which two vectors cannot
    express.

    Example:
        >>> builders.global_sliding_window(4, 1, 1).dense(4)[0, 0].int().tolist()
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    check_int("seqlen", seqlen)
    check_int("global_tokens", global_tokens)
    check_int("window", window)
    first = min(global_tokens, seqlen)
    indices = torch.full((1, 1, seqlen, 4), seqlen, dtype=torch.int32, device=device)
    indices[:, :, first:, 0] = _window_end(seqlen, window, device)[first:]
    indices[..., 2] = first
    # 0: nothing is hidden before the window
    before = _positions(seqlen, device) - min(window, seqlen)
    indices[..., 3] = torch.where(before > first, before, 0)
    return _self_attention(indices, causal=False)


def prefix_lm_causal(seqlen: int, prefix: int, *, device: Device = None) -> ColumnMask:
    """k <= q or k < prefix: all queries see the prefix. Not causal, 2 vectors.

    Example:
        >>> builders.prefix_lm_causal(3, 2).dense(3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    check_int("seqlen", seqlen)
    check_int("prefix", prefix)
    indices = torch.full((1, 1, seqlen, 2), seqlen, dtype=torch.int32, device=device)
    indices[..., 1] = _positions(seqlen, device)
    indices[:, :, :prefix, 1] = 0
    return _self_attention(indices, causal=False)


def causal_document(
    lengths: Lengths, seqlen: int | None = None, *, device: Device = None
) -> ColumnMask:
    """k <= q, both in the same document. Causal, 1 vector.

    Example:
        >>> builders.causal_document([2, 1]).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=1)
    return _causal_segments(_ends(sizes, seqlen), seqlen, device)


def document(lengths: Lengths, seqlen: int | None = None, *, device: Device = None) -> ColumnMask:
    """Query and key in the same document. Not causal, 2 vectors.

    Example:
        >>> builders.document([2, 1]).dense(3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=1)
    return _full_segments(_ends(sizes, seqlen), seqlen, device)


def prefix_lm_document(
    lengths: Lengths, prefixes: Lengths, seqlen: int | None = None, *, device: Device = None
) -> ColumnMask:
    """Same document, and k <= q or k in the prefix of its document. Not causal, 2 vectors.

    prefixes: tokens of each prefix, one number for each document; a prefix longer than its document
    covers the whole document.

    Example:
        >>> builders.prefix_lm_document([3, 1], [2, 0]).dense(4)[0, 0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    """
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=1)
    prefix_sizes, _, _ = sizes_of("prefixes", prefixes, seqlen, device, depth=1, adds_up=False)
    if prefix_sizes.shape != sizes.shape or prefix_sizes.device != sizes.device:
        raise ValueError(
            f"prefixes has shape {tuple(prefix_sizes.shape)} on {prefix_sizes.device}, lengths "
            f"{tuple(sizes.shape)} on {sizes.device}; lists are on the cpu"
        )
    ends = _ends(sizes, seqlen)
    starts = F.pad(ends, (1, 0))[:, :-1]
    # not the smaller of two ends: a prefix may be as long as an int32 can hold
    prefix_ends = starts + torch.minimum(prefix_sizes, ends - starts)
    # each document is two segments; -1 stands for a key's own position
    row_ends = torch.stack((ends, ends), dim=-1).flatten(1)
    row_starts = torch.stack((starts, torch.full_like(starts, -1)), dim=-1).flatten(1)
    table = _table(row_ends, row_starts, seqlen)
    segment_ends = torch.stack((prefix_ends, ends), dim=-1).flatten(1)
    indices = _look_up(segment_ends, table, seqlen, device)
    own = indices[..., 1]
    own.copy_(torch.where(own < 0, _positions(seqlen, device), own))
    return _self_attention(indices, causal=False, documents=True)


def share_question(
    lengths: PartLengths, seqlen: int | None = None, *, device: Device = None
) -> ColumnMask:
    """k <= q in the same document, and k is in the question or in the same answer as q.

    Answers to one question do not see each other (reward models, DPO). lengths: for each document
    [question, answer, answer, ...]; a tensor is (documents, parts) or (batch, documents, parts),
    padded at the end with zeros. Causal, 1 vector.

    Example:
        >>> builders.share_question([[1, 1, 1]]).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=2)
    ends = _ends(sizes.flatten(1), seqlen)
    row_ends = ends.view(sizes.shape).clone()
    row_ends[..., 0] = row_ends[..., -1]
    indices = _look_up(ends[:, :-1], row_ends.flatten(1)[..., None], seqlen, device)
    return _self_attention(indices, causal=True, documents=True)


def causal_blockwise(
    lengths: Lengths, seqlen: int | None = None, *, device: Device = None
) -> ColumnMask:
    """k <= q, both in the same block or q in the last one.

    In-context learning (Bertsch et al. 2024): demonstrations see their own block; the test example
    at the end sees everything. Tokens past the last length belong to the test example. Causal, 2
    vectors.

    Example:
        >>> builders.causal_blockwise([1, 1, 1]).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [0, 1, 0], [1, 1, 1]]
    """
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=1)
    before_last = _ends(sizes, seqlen)[:, :-1]
    test_start = F.pad(before_last, (1, 0))[:, -1:]
    # the blocks from which nothing is hidden start at seqlen
    row_starts = before_last.masked_fill(before_last == test_start, seqlen)
    row_starts = F.pad(row_starts, (0, 1), value=seqlen)
    table = torch.stack((row_starts, test_start.expand_as(row_starts)), dim=-1)
    return _self_attention(_look_up(before_last, table, seqlen, device), causal=True)


def qk_sparse(
    seqlen: int, dropped: Sequence[tuple[int, int]], *, device: Device = None
) -> ColumnMask:
    """k <= q, but not both in the same dropped range.

    dropped: (start, length) of each range, ascending, not overlapping. Tokens of a range still see
    the keys before it, and later queries see them. Causal, 2 vectors.

    Example:
        >>> builders.qk_sparse(4, [(1, 2)]).dense(4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    """
    check_int("seqlen", seqlen)
    if not is_list(dropped):
        raise TypeError(f"dropped={dropped!r} is not a list of (start, length)")
    refuse_in_graph("of a list, dropped:")
    end = 0
    for i, span in enumerate(dropped):
        if not is_list(span) or len(span) != 2:
            raise ValueError(f"dropped[{i}]={span!r} is not (start, length)")
        start, length = span
        check_int(f"dropped[{i}][0]", start)
        check_int(f"dropped[{i}][1]", length)
        if start < end or start + length > seqlen:
            raise ValueError(
                f"dropped[{i}]=({start}, {length}) starts before {end}, where the range before it "
                f"ends, or reaches past seqlen={seqlen}"
            )
        end = start + length
    # causality hides the queries before a range from its keys anyway, and all of these from later
    # keys: they get the same values, so that blocks stay uniform
    rows = [(seqlen, 0), *((0, start + length) for start, length in dropped)]
    starts = torch.tensor([[start for start, _ in dropped]], dtype=torch.int32, device="cpu")
    table = torch.tensor([rows], dtype=torch.int32, device="cpu")
    return _self_attention(_look_up(starts, table, seqlen, device_of(device)), causal=True)


def random_eviction(
    seqlen: int,
    cache_size: int,
    *,
    batch: int = 1,
    heads: int = 1,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> ColumnMask:
    """k <= q, and k not evicted yet from a cache of cache_size keys.

    Once the cache is full, each query stores its own key in place of a uniformly drawn key, and no
    later query sees the replaced key. So q sees min(q + 1, cache_size) keys. Keys are drawn anew
    for each batch entry and head. Causal, 1 vector.

    Example:
        >>> builders.random_eviction(4, 2).dense(4)[0, 0].sum(-1).tolist()
        [1, 2, 2, 2]
    """
    check_int("seqlen", seqlen)
    check_int("cache_size", cache_size, at_least=1)
    check_int("batch", batch, at_least=1)
    check_int("heads", heads, at_least=1)
    shape = (batch, heads, seqlen)
    num_places = min(cache_size, max(seqlen, 1))  # the others are never reached
    place = torch.randint(num_places, shape, generator=generator, dtype=torch.int32, device=device)
    place[..., :cache_size] = _positions(min(cache_size, seqlen), device)
    # a key stays until the next query that gets its place
    place, order = place.sort(dim=-1, stable=True)
    successor = torch.full(shape, seqlen, dtype=torch.int32, device=device)
    is_same = place[..., 1:] == place[..., :-1]
    successor[..., :-1] = torch.where(is_same, order[..., 1:].int(), successor[..., :-1])
    evicted_by = torch.empty_like(successor).scatter_(-1, order, successor)
    return _self_attention(evicted_by[..., None], causal=True)


def prefix_tree(
    parents: Sequence[int] | Sequence[Sequence[int]],
    lengths: Lengths,
    seqlen: int | None = None,
    *,
    device: Device = None,
) -> ColumnMask:
    """k <= q, and k is in the node of q or in one of its ancestors.

    Sequences that share prefixes (roll-outs of one prompt, turns of one conversation) as a forest
    in which each shared part stands once. parents: the parent of each node, -1 for a root; lists,
    nested for a batch. lengths: the tokens of each node. Nodes are in depth-first order, so each
    subtree is a run of tokens, and its end hides a key from all later rows. Causal, 1 vector.

    Raises:
        ValueError: also if nodes are in another order; the message names the first such node.

    Example:
        >>> builders.prefix_tree([-1, 0, 0], [1, 1, 1]).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    refuse_in_graph("of a list, parents:")
    sizes, seqlen, device = sizes_of("lengths", lengths, seqlen, device, depth=1)
    trees = checked_trees(parents, lengths, sizes)
    batch, width = sizes.shape
    last = torch.zeros((batch, width), dtype=torch.int64, device="cpu")
    for i, tree in enumerate(trees):
        # lists of a batch have empty nodes before the others
        first = width - len(tree)
        of_nodes = torch.tensor(last_descendants(tree), dtype=torch.int64, device="cpu")
        last[i, first:] = of_nodes + first
    ends = _ends(sizes, seqlen)
    row_ends = ends.gather(1, _move(last, sizes.device))[..., None]
    indices = _look_up(ends[:, :-1], row_ends, seqlen, device)
    has_documents = any(tree.count(-1) > 1 for tree in trees)
    return _self_attention(indices, causal=True, documents=has_documents)


def from_tin_tout(tout: Tensor) -> ColumnMask:
    """k <= q < tout[k]: the mask of `prefix_tree` from an Euler tour of its tokens.

    tout: an integer tensor (seqlen,) or (batch, seqlen), the position after the last token of each
    token's subtree. A token's own position is its tin, so tokens are in depth-first order. Causal,
    1 vector.

    Raises:
        ValueError: also if tout of a CPU tensor is no such order; the message names the token.
            A CUDA tensor is not read.

    Example:
        >>> builders.from_tin_tout(torch.tensor([3, 2, 3])).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    ends = token_rows("tout", tout)
    if ends.device.type == "cpu" and not torch.compiler.is_compiling():
        for i, row in enumerate(ends.tolist()):
            check_depth_first(row, f"tout[{i}, " if tout.dim() == 2 else "tout[")
    return _self_attention(ends[:, None, :, None].int(), causal=True)


def image_blocks(ids: Tensor, window: int | None = None) -> ColumnMask:
    """k <= q, or both in the same image. With a window, q - window <= k <= q, or the same image.

    An image is a run of equal ids >= 0; an id that returns later (0, -1, 0) is another image.
    Negative ids are text. ids: an integer tensor (seqlen,) or (batch, seqlen). Not causal, 2
    vectors.

    Example:
        >>> builders.image_blocks(torch.tensor([-1, 0, 0])).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 1], [1, 1, 1]]
    """
    of_tokens = token_rows("ids", ids)
    if window is not None:
        check_int("window", window)
    seqlen, later = of_tokens.shape[1], of_tokens[:, 1:]
    first, end = _runs_of_tokens((later != of_tokens[:, :-1]) | (later < 0), seqlen)
    if window is None:
        hidden_from = torch.full_like(end, seqlen)
    else:
        hidden_from = torch.maximum(end, _window_end(seqlen, window, of_tokens.device))
    indices = torch.stack((hidden_from, first), dim=-1)[:, None].int()
    return _self_attention(indices, causal=False)


def block_diffusion(seqlen: int, block: int, *, device: Device = None) -> ColumnMask:
    """Training of block diffusion: seqlen noisy tokens before the same seqlen clean ones.

    Both copies have blocks of `block` tokens, the last one perhaps fewer. A noisy query sees its
    own noisy block, and the clean blocks before it. A clean query sees the clean blocks up to its
    own. So the mask is for 2 * seqlen tokens. Not causal, 4 vectors.

    Example:
        >>> builders.block_diffusion(2, 1).dense(4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    check_int("seqlen", seqlen)
    check_int("block", block, at_least=1)
    block = min(block, max(seqlen, 1))
    start = _positions(seqlen, device) // block * block
    end = (start + block).clamp_(max=seqlen)
    zero = torch.zeros_like(start)
    noisy = torch.stack((zero, start, end, zero + 2 * seqlen), dim=-1)
    # from a clean key, noisy rows are hidden up to its block, and clean ones before it. The last
    # block has all of them in one range as well, for tiles with rows of both copies
    clean_start = start + seqlen
    first_end = torch.where(end == seqlen, clean_start, end)
    # no clean row is before the first block: that range touches no tile
    is_first = start == 0
    second_start = (zero + seqlen).masked_fill(is_first, 2 * seqlen)
    second_end = clean_start.masked_fill(is_first, 0)
    clean = torch.stack((zero, first_end, second_start, second_end), dim=-1)
    return _self_attention(torch.cat((noisy, clean))[None, None], causal=False)


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor,
    seqlen: int | None = None,
    *,
    causal: bool = True,
    device: Device = None,
) -> ColumnMask:
    """Documents that start and end at cu_seqlens[i] and cu_seqlens[i + 1], the first at 0.

    A list, or an int tensor (documents + 1,) or (batch, documents + 1). The form is that of
    `causal_document` or `document`.

    Example:
        >>> builders.from_cu_seqlens([0, 2, 3]).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    bounds, seqlen, device = sizes_of(
        "cu_seqlens", cu_seqlens, seqlen, device, depth=1, adds_up=False
    )
    if bounds.shape[1] == 1:
        bounds = F.pad(bounds, (0, 1))  # a document without tokens, for none
    if not isinstance(cu_seqlens, Tensor) and (
        bool(bounds[:, 0].any()) or bool((bounds.diff() < 0).any()) or int(bounds.max()) > seqlen
    ):
        raise ValueError(f"cu_seqlens={cu_seqlens} does not ascend from 0 to at most {seqlen}")
    segments = _causal_segments if check_bool("causal", causal) else _full_segments
    return segments(bounds[:, 1:], seqlen, device)


def from_document_ids(document_ids: Tensor, *, causal: bool = True) -> ColumnMask:
    """A document is a run of equal ids: an id that returns later (0, 1, 0) is another document.

    document_ids: an integer tensor (seqlen,) or (batch, seqlen). For `ids[q] == ids[k]`, where the
    first and the last 0 see each other, pass a `mask_mod` with the ids in aux_tensors. The form is
    that of `causal_document` or `document`.

    Example:
        >>> builders.from_document_ids(torch.tensor([0, 0, 1])).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    ids = token_rows("document_ids", document_ids)
    return _from_starts(ids[:, 1:] != ids[:, :-1], ids.shape[1], check_bool("causal", causal))


def from_position_ids(position_ids: Tensor, *, causal: bool = True) -> ColumnMask:
    """A document starts wherever a position does not follow the one before it.

    position_ids: an integer tensor (seqlen,) or (batch, seqlen). The form is that of
    `causal_document` or `document`.

    Example:
        >>> builders.from_position_ids(torch.tensor([0, 1, 0])).dense(3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    # in the dtype that is given, the position after the largest one might be the smallest one
    positions = token_rows("position_ids", position_ids).long()
    starts_anew = positions[:, 1:] != positions[:, :-1] + 1
    return _from_starts(starts_anew, positions.shape[1], check_bool("causal", causal))


def key_padding(mask: Tensor, *, causal: bool = False) -> ColumnMask:
    """Every query sees all real keys, for any number of queries.

    This is the padding mask of a tokenizer (left, right, or holes anywhere).

    mask: (batch, seqlen_k) or (batch, 1, 1, seqlen_k), bool or integers; True or any nonzero number
    marks a real key. causal: hide later keys as well. Not causal, 2 vectors; or causal, 1. Each key
    is hidden from all queries or from none, so the mask works with any seqlen_q: self-attention,
    cross-attention, a decode step.

    A query that sees nothing, such as a padded one under causal and left padding, has output 0.

    Example:
        >>> builders.key_padding(torch.tensor([[1, 1, 0]])).dense(2)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0]]
    """
    check_bool("causal", causal)
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, not a tensor")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"mask has dtype {mask.dtype}; it holds bools or integers, True or 1 for a real key"
        )
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        is_real = mask[:, 0, 0].bool()
    elif mask.dim() == 2:
        is_real = mask.bool()
    else:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, not (batch, seqlen_k) or (batch, 1, 1, "
            "seqlen_k); from_dense takes masks (..., seqlen_q, seqlen_k)"
        )
    # a padded key hides the rows from 0 on, a real one those from a row on that no call has
    start = is_real.int() * MAX_INT32
    vectors = (start,) if causal else (start, torch.zeros_like(start))
    indices = torch.stack(vectors, dim=-1)[:, None]
    return ColumnMask(_counted(indices), causal, documents=False, seqlen_q=ANY)


def from_dense(mask: Tensor, *, seqlen_q: int | None = None) -> ColumnMask:
    """Convert a bool mask, true where a query sees a key, to column intervals.

    mask: (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k).
    The first form that can hold the mask is used: causal (bottom-right aligned) with 1, 2 or 4
    vectors if no query sees a later key, else not causal with 2 or 4. The call waits for the
    device.

    A padding mask, (batch, seqlen_k) or (batch, 1, 1, seqlen_k), has no query rows: use
    `key_padding`. A mask that could be a padding mask is refused: a mask of two different
    dimensions, or a single row with several keys. A square mask is (seqlen_q, seqlen_k). seqlen_q
    declares that the rows of the mask are that many queries.

    Raises:
        TypeError: seqlen_q is no int.
        ValueError: mask is of another kind, could be a padding mask, or has other rows than
            seqlen_q; or no form can hold it. The message then names the first column that hides
            more than two ranges of queries.

    Example:
        >>> builders.from_dense(torch.ones(3, 3).tril().bool()).causal
        True
    """
    refuse_in_graph("of a dense mask:")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        got = f"{tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, Tensor) else type(mask)
        raise ValueError(
            f"mask is {got}, not a bool tensor ([batch, [heads,]] seqlen_q, seqlen_k); key_padding "
            "takes a padding mask (batch, seqlen_k)"
        )
    _check_rows(mask, seqlen_q)
    while mask.dim() < 4:
        mask = mask.unsqueeze(1 if mask.dim() == 3 else 0)
    seqlen_q, seqlen_k = mask.shape[2:]
    row = torch.arange(seqlen_q, device=mask.device)[:, None]
    key = torch.arange(seqlen_k, device=mask.device)
    diagonal = (key - (seqlen_k - seqlen_q)).clamp_(0, seqlen_q)
    is_causal = not bool((mask & (row < diagonal)).any())
    hidden = ~mask
    if is_causal:
        hidden &= row >= diagonal
    runs = dense_runs(hidden)
    num_runs = runs.num_runs
    if bool((num_runs > 2).any()):
        batch_idx, head_idx, column = (num_runs > 2).nonzero()[0].tolist()
        raise ValueError(
            f"column {column} of the mask (batch {batch_idx}, head {head_idx}) hides "
            f"{int(num_runs[batch_idx, head_idx, column])} ranges of queries; column intervals "
            "hold two"
        )
    indices = fit_vectors(runs, diagonal, seqlen_q, is_causal)
    return ColumnMask(_counted(indices), is_causal, seqlen_q=seqlen_q, one_sequence=True)


def _check_rows(mask: Tensor, seqlen_q: int | None) -> None:
    """Refuse a dense mask if its rows may not be queries, or are not seqlen_q many."""
    rows, keys = mask.shape[-2:]
    if seqlen_q is not None:
        check_int("seqlen_q", seqlen_q)
        if seqlen_q != rows:
            raise ValueError(f"seqlen_q={seqlen_q} of a mask with {rows} rows: {tuple(mask.shape)}")
    elif rows != keys and (mask.dim() == 2 or rows == 1):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which might be a padding mask of {keys} keys: "
            f"key_padding(mask) takes one; if its rows are queries, say seqlen_q={rows}"
        )


def _self_attention(indices: Tensor, causal: bool, documents: bool = False) -> ColumnMask:
    rows = indices.shape[2]
    return ColumnMask(_counted(indices), causal, documents, seqlen_q=rows, one_sequence=True)


def _counted(indices: Tensor) -> Tensor:
    """The same with a version that torch counts; tensors of inference mode have none."""
    # a graph keeps nothing, and Dynamo does not know the question
    if torch.compiler.is_compiling() or not indices.is_inference():
        return indices
    with torch.inference_mode(False):
        return indices.clone()


# -- segments of the sequence -------------------------------------------------------------------


def _positions(seqlen: int, device: Device) -> Tensor:
    return torch.arange(seqlen, dtype=torch.int32, device=device)


def _window_end(seqlen: int, window: int, device: Device) -> Tensor:
    """The first query that no longer sees a key because of the window, (seqlen,)."""
    first = min(window, seqlen) + 1
    end = torch.arange(first, seqlen + first, dtype=torch.int32, device=device)
    return end.clamp_(max=seqlen)


def _ends(sizes: Tensor, seqlen: int) -> Tensor:
    """Ends of the segments (batch, segments)."""
    return sizes.cumsum(1, dtype=torch.int32).clamp_(max=seqlen)


def _look_up(segment_ends: Tensor, table: Tensor, seqlen: int, device: torch.device) -> Tensor:
    """Vectors of the keys by segment: from table (batch, segments + 1, n) to (batch, 1, seqlen, n).

    Segments end at segment_ends (batch, segments); the last table row is for tokens past them.
    """
    segment_ends, table = _move(segment_ends.contiguous(), device), _move(table, device)
    positions = _positions(seqlen, device)
    batch, _, num_vectors = table.shape
    if batch == 1:
        segment = torch.searchsorted(segment_ends[0], positions, right=True, out_int32=True)
        return table[0].index_select(0, segment)[None, None]
    segment = torch.searchsorted(segment_ends, positions.repeat(batch, 1), right=True)
    return table.gather(1, segment[..., None].expand(-1, -1, num_vectors))[:, None]


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _causal_segments(ends: Tensor, seqlen: int, device: torch.device) -> ColumnMask:
    """Tokens past the last segment belong to it: they are hidden from its end on."""
    indices = _look_up(ends[:, :-1], ends[..., None], seqlen, device)
    return _self_attention(indices, causal=True, documents=True)


def _full_segments(ends: Tensor, seqlen: int, device: torch.device) -> ColumnMask:
    table = _table(ends, F.pad(ends, (1, 0))[:, :-1], seqlen)
    return _self_attention(_look_up(ends, table, seqlen, device), causal=False, documents=True)


def _table(ends: Tensor, starts: Tensor, seqlen: int) -> Tensor:
    """Rows for `_look_up`: keys of a segment hide all queries outside [start, end).

    Keys past the last segment hide all queries.
    """
    return torch.stack((F.pad(ends, (0, 1)), F.pad(starts, (0, 1), value=seqlen)), dim=-1)


def _runs_of_tokens(starts_anew: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """The first token and the end of each token's run, (batch, seqlen). starts_anew: whether a run
    starts at token i + 1."""
    positions = _positions(seqlen, starts_anew.device)
    is_first, is_last = (F.pad(starts_anew, at, value=True)[:, :seqlen] for at in ((1, 0), (0, 1)))
    end = torch.where(is_last, positions + 1, seqlen).flip(1).cummin(1).values.flip(1)
    return torch.where(is_first, positions, 0).cummax(1).values, end


def _from_starts(starts_anew: Tensor, seqlen: int, is_causal: bool) -> ColumnMask:
    """starts_anew: as in `_runs_of_tokens`."""
    starts, ends = _runs_of_tokens(starts_anew, seqlen)
    vectors = (ends,) if is_causal else (ends, starts)
    indices = torch.stack(vectors, dim=-1)[:, None].int()
    return _self_attention(indices, causal=is_causal, documents=True)
