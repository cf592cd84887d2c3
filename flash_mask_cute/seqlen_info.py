"""Lengths and offsets of one batch entry, for dense, packed (cu_seqlens) and append-KV inputs.

Everything here is arithmetic on ints or `cutlass.Int32`. The set of tensors that are present is
fixed at trace time. Make these objects inside the kernel: if they were kernel arguments, the DSL
would turn their Python bools into run-time values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_mask_cute.index_math import IntLike


def _read(values: Any, index: IntLike) -> IntLike:
    value = values[index]
    # A 0-dim torch tensor or a numpy scalar becomes an int; ints and DSL values stay.
    return value.item() if hasattr(value, "item") else value


def _slot(
    batch_idx: IntLike, seqlen_static: IntLike, cu_seqlens: Any, seqused: Any
) -> tuple[IntLike, IntLike]:
    """(offset, length) of one batch entry; `seqused` shortens the length, never the offset."""
    offset: IntLike = 0
    length = seqlen_static
    if cu_seqlens is not None:
        offset = _read(cu_seqlens, batch_idx)
    if seqused is not None:
        length = _read(seqused, batch_idx)
    elif cu_seqlens is not None:
        length = _read(cu_seqlens, batch_idx + 1) - offset
    return offset, length


@dataclass(frozen=True)
class SeqlenInfoQK:
    """Where the queries and keys of one batch entry start, and how many there are.

    `offset_q` and `offset_k` count tokens from the start of the packed tensor (0 for a dense
    one); `seqlen_q` and `seqlen_k` count valid tokens. `q_start` is the position of the first query
    among the keys; None: the last query sits at the last key. `window_right` is the right side of
    this entry's band, if entries differ in it; None: that of the call. The flag is a Python bool.
    """

    offset_q: IntLike
    offset_k: IntLike
    seqlen_q: IntLike
    seqlen_k: IntLike
    has_cu_seqlens_k: bool = False
    q_start: IntLike | None = None
    window_right: IntLike | None = None

    @staticmethod
    def create(
        batch_idx: IntLike,
        seqlen_q_static: IntLike,
        seqlen_k_static: IntLike,
        mCuSeqlensQ: Any = None,
        mCuSeqlensK: Any = None,
        mSeqUsedQ: Any = None,
        mSeqUsedK: Any = None,
        q_start: IntLike | None = None,
    ) -> SeqlenInfoQK:
        """Read the entry `batch_idx`; each tensor is a list, a torch tensor or a cute tensor.

        mCuSeqlens* (batch + 1,) int32: packed start of each entry. mSeqUsed* (batch,) int32: valid
        tokens of each entry; it overrides the length from mCuSeqlens* or the static length.
        Elements of torch tensors are read as Python ints, which on an accelerator synchronizes.
        """
        offset_q, seqlen_q = _slot(batch_idx, seqlen_q_static, mCuSeqlensQ, mSeqUsedQ)
        offset_k, seqlen_k = _slot(batch_idx, seqlen_k_static, mCuSeqlensK, mSeqUsedK)
        return SeqlenInfoQK(
            offset_q=offset_q,
            offset_k=offset_k,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            has_cu_seqlens_k=mCuSeqlensK is not None,
            q_start=q_start,
        )

    @property
    def shift(self) -> IntLike:
        """The position of the first query among the keys."""
        return self.seqlen_k - self.seqlen_q if self.q_start is None else self.q_start


@dataclass(frozen=True, kw_only=True)
class SeqlenInfoQKNewK(SeqlenInfoQK):
    """Lengths of one batch entry; its key cache grows by new keys in the same call.

    The cache slot holds `leftpad_k` tokens of padding, then `seqlen_k_og` keys; the
    `seqlen_k_new` new keys follow them. Logical key j of the `seqlen_k = seqlen_k_og +
    seqlen_k_new` keys lives at `offset_k + j` in the cache (`offset_k` is past the padding), and
    new key j at `offset_k_new + j` of the packed new keys.
    """

    offset_k_new: IntLike
    leftpad_k: IntLike
    seqlen_k_og: IntLike
    seqlen_k_new: IntLike

    @staticmethod
    def create(  # type: ignore[override]
        batch_idx: IntLike,
        cache: SeqlenInfoQK,
        seqlen_k_new_static: IntLike = 0,
        mCuSeqlensKNew: Any = None,
        mLeftpadK: Any = None,
    ) -> SeqlenInfoQKNewK:
        """Extend `cache`; its `seqlen_k` counts the cached tokens and their left padding.

        mCuSeqlensKNew (batch + 1,) int32: packed start of each entry's new keys; without it every
        entry appends `seqlen_k_new_static`. mLeftpadK (batch,) int32: padding tokens.
        """
        offset_k_new, seqlen_k_new = _slot(batch_idx, seqlen_k_new_static, mCuSeqlensKNew, None)
        leftpad_k = 0 if mLeftpadK is None else _read(mLeftpadK, batch_idx)
        seqlen_k_og = cache.seqlen_k - leftpad_k
        of_cache = vars(cache) | {
            "offset_k": cache.offset_k + leftpad_k,
            "seqlen_k": seqlen_k_og + seqlen_k_new,
        }
        return SeqlenInfoQKNewK(
            **of_cache,
            offset_k_new=offset_k_new,
            leftpad_k=leftpad_k,
            seqlen_k_og=seqlen_k_og,
            seqlen_k_new=seqlen_k_new,
        )
