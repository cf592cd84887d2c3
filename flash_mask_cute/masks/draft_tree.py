"""Trees of draft tokens, which a target model verifies in one decoding step.

Draft tokens follow the tokens of the cache. A draft token sees these, its ancestors and
itself. A word of bits for each draft token holds the second part, and a mask_mod written in torch
reads it, so that trees differ between sequences and change between replays of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.masks.builder_arguments import Device, check_int, is_list, refuse_in_graph
from flash_mask_cute.runtime.checks import brief

MAX_DRAFTS = 64  # bits of a word

MaskMod: TypeAlias = Callable[[Any, Any, Any, Any], Any]


class DraftTree(NamedTuple):
    """Draft tokens of each sequence of a batch.

    bits: int64 (batch, drafts). Bit j of word i: draft token i sees draft token j.
    depths: int32 (batch, drafts), the number of ancestors: the position of a draft token is that of
        the first one plus its depth, as rotary embeddings need it.

    Both may be changed in place, as for later trees of a captured CUDA graph.
    """

    bits: Tensor
    depths: Tensor

    def mask_mod(self, first: Tensor) -> MaskMod:
        """The mask of a call with the draft tokens as its last queries.

        first: int32 (batch,), on the device of bits: the position of each sequence's first draft
        token, so the number of tokens before it. It is `cache_seqlens` if the drafts are
        k and v of `flash_attn_with_kvcache`, and `cache_seqlens - drafts` if the cache already
        contains them. Contents are read by each call, and by each replay.

        Raises:
            TypeError, ValueError: first is no such tensor.
        """
        if not isinstance(first, Tensor):
            raise TypeError(f"first is a {type(first).__name__}, not a tensor")
        if first.dtype != torch.int32:
            raise TypeError(f"first has dtype {first.dtype}, not torch.int32")
        if first.shape != self.bits.shape[:1] or first.device != self.bits.device:
            raise ValueError(
                f"first is {brief(first)}, not ({len(self.bits)},) on {self.bits.device}: one "
                "number for each sequence of the trees"
            )
        bits, last = self.bits, self.bits.shape[1] - 1

        if last < 0:
            return lambda b, h, q_idx, kv_idx: kv_idx < first[b]

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            start = first[b]
            word = bits[b, (q_idx - start).clamp(0, last)]
            draft = (kv_idx - start).clamp(0, last)
            return (kv_idx < start) | (((word >> draft) & 1) == 1)

        return mask_mod


def draft_tree(
    parents: Sequence[int] | Sequence[Sequence[int]] | Tensor, *, device: Device = None
) -> DraftTree:
    """The trees of draft tokens of a decoding step: speculative decoding, EAGLE, MTP.

    parents: for each draft token the number of its parent, which stands before it, or -1 for a
    child of the last token in the cache; a list, a list for each sequence, or an integer tensor
    (drafts,) or (batch, drafts). There are up to 64 draft tokens, equally many in each sequence. A
    CUDA tensor is not read on the host, so its numbers are not checked.

    Raises:
        TypeError, ValueError: parents is of another kind, or names a parent that does not stand
            before its child.

    Example:
        >>> import torch
        >>> from flash_mask_cute import builders, flash_attn_with_kvcache
        >>> tree = builders.draft_tree([[-1, 0, 0, 1]])  # 1 and 2 are alternatives
        >>> tree.bits.tolist(), tree.depths.tolist()
        ([[1, 3, 5, 11]], [[0, 1, 1, 2]])
        >>> cache, lengths = torch.randn(2, 1, 64, 2, 16), torch.tensor([30], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 16)
        >>> out = flash_attn_with_kvcache(
        ...     q, *cache, k, v, cache_seqlens=lengths, mask_mod=tree.mask_mod(lengths))
    """
    numbers = _parent_numbers(parents, device)
    drafts = numbers.shape[1]
    place = torch.arange(drafts, device=numbers.device)
    # one more place stands for no parent, and is its own
    above = torch.cat((numbers, numbers.new_full((len(numbers), 1), -1)), 1)
    above = torch.where(above < 0, drafts, above)
    bits = torch.ones_like(place) << place
    seen = torch.cat((bits, bits.new_zeros(1))).repeat(len(numbers), 1)
    counts = (above < drafts).long()
    # each step takes what the ancestor at the distance reached so far has seen
    for _ in range((drafts - 1).bit_length()):
        seen = seen | seen.gather(1, above)
        counts = counts + counts.gather(1, above)
        above = above.gather(1, above)
    return DraftTree(seen[:, :drafts].contiguous(), counts[:, :drafts].int())


def _parent_numbers(parents: Any, device: Device) -> Tensor:
    """int64 (batch, drafts)."""
    if isinstance(parents, Tensor):
        if parents.is_floating_point() or parents.is_complex() or parents.dtype == torch.bool:
            raise TypeError(f"parents has dtype {parents.dtype}; it holds integers")
        if device is not None and torch.empty(0, device=device).device != parents.device:
            raise ValueError(f"parents is on {parents.device}, device={device}")
        numbers = parents.long()
    elif is_list(parents):
        refuse_in_graph("of a list, parents: pass a tensor, or")
        rows = parents if len(parents) > 0 and is_list(parents[0]) else [parents]
        for row in rows:
            for parent in row if is_list(row) else [row]:
                check_int("a number in parents", parent, at_least=-1)
        if not all(is_list(row) and len(row) == len(rows[0]) for row in rows):
            raise ValueError(f"parents={parents!r} has sequences with other numbers of drafts")
        numbers = torch.tensor(rows, dtype=torch.int64, device="cpu")
    else:
        raise TypeError(f"parents={parents!r} is no list of ints and no integer tensor")
    numbers = numbers[None] if numbers.dim() == 1 else numbers
    if numbers.dim() != 2 or numbers.shape[1] > MAX_DRAFTS:
        raise ValueError(
            f"parents has shape {tuple(numbers.shape)}, not (drafts,) or (batch, drafts) with up "
            f"to {MAX_DRAFTS} drafts"
        )
    # a trace has no contents
    if numbers.device.type == "cpu" and not torch.compiler.is_compiling():
        own = torch.arange(numbers.shape[1], device="cpu")
        is_wrong = (numbers >= own) | (numbers < -1)
        if bool(is_wrong.any()):
            batch_idx, draft = is_wrong.nonzero()[0].tolist()
            raise ValueError(
                f"parents[{batch_idx}, {draft}]={int(numbers[batch_idx, draft])} is neither -1 nor "
                f"a draft token before {draft}"
            )
    return numbers if isinstance(parents, Tensor) else numbers.to(device or numbers.device)
