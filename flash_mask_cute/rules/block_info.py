"""Which tiles of the score matrix hold a visible element: the tile projections of a `Band`.

A score tile (m_block, n_block) has `tile_m` rows and `tile_n` keys. With packed GQA
(`qhead_per_kvhead_packgqa` = g) the g query heads of one KV head are interleaved as rows. Row r of
the tiles of m_block is then query position (m_block * tile_m + r) // g, and there are seqlen_q * g
rows. Rows past the last query and keys past `seqlen_k` do not count as visible.

All methods are undecorated arithmetic without a branch on a dynamic value. They run on Python ints
and, traced, on `cutlass.Int32`, in any mixture. Build a `BlockInfo` inside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flash_mask_cute.index_math import IntLike, imax, imin
from flash_mask_cute.rules.band import Band
from flash_mask_cute.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK


def _ceil_div(a: IntLike, b: IntLike) -> IntLike:
    return (a + (b - 1)) // b


def _is_positive(count: IntLike) -> IntLike:
    """1 where count > 0, else 0."""
    return imin(imax(count, 0), 1)


def _union(
    range_of: Callable[[IntLike], tuple[IntLike, IntLike]], first: IntLike, end: IntLike
) -> tuple[IntLike, IntLike]:
    """[lo, hi), the union of the ranges of first, ..., end - 1; hi <= lo if there is no index.

    Both ends of a band's range advance by one per index. So neighbouring ranges touch, and their
    union is one interval with the right ends even if some of the ranges are empty.
    """
    lo, _ = range_of(first)
    _, hi = range_of(end - 1)
    return lo, hi * _is_positive(end - first)


def _tiles_touched(lo: IntLike, hi: IntLike, tile: int) -> tuple[IntLike, IntLike]:
    """Half-open range of tiles that hold an element of [lo, hi); (t, t) if there is none."""
    first = lo // tile
    return first, first + _is_positive(hi - lo) * (_ceil_div(hi, tile) - first)


@dataclass(frozen=True)
class BlockInfo:
    """Tile ranges of causal, window and full attention, also for GQA packing and split-KV.

    Causal and window apply together: the right edge is the nearer of the two. Window sides are
    ints or Int32, None for an open side. `is_causal`, `is_local`, `is_split_kv`, the tile sizes
    and the packing are static. `is_local` with both sides open is full attention.

    Every returned range is half-open and canonical: max >= min, so max - min is a count, and an
    empty range starts anywhere.

    Raises ValueError if a window side is given without `is_local` (it would be ignored), if both
    edges are ints and the left edge lies right of the right edge, or if a static size is not
    positive.
    """

    tile_m: int
    tile_n: int
    is_causal: bool = False
    is_local: bool = False
    is_split_kv: bool = False
    window_size_left: IntLike | None = None
    window_size_right: IntLike | None = None
    qhead_per_kvhead_packgqa: int = 1

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "qhead_per_kvhead_packgqa"):
            size = getattr(self, name)
            if isinstance(size, int) and size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        left, right = self.window_size_left, self.window_size_right
        if not self.is_local and not (left is None and right is None):
            raise ValueError(
                f"a window needs is_local=True, got window_size_left={left}, "
                f"window_size_right={right} with is_local=False"
            )
        right = self._right_edge()
        if isinstance(left, int) and isinstance(right, int) and left + right < 0:
            raise ValueError(
                f"the window is empty: window_size_left={left}, "
                f"window_size_right={self.window_size_right}, is_causal={self.is_causal}"
            )

    def band(self, seqlen_info: SeqlenInfoQK) -> Band:
        """The rule for single elements; the methods below project it to tiles."""
        right = seqlen_info.window_right
        return Band(
            seqlen_q=seqlen_info.seqlen_q,
            seqlen_k=seqlen_info.seqlen_k,
            window_left=self.window_size_left,
            window_right=self._right_edge() if right is None else right,
            shift=seqlen_info.q_start,
        )

    def get_n_block_min_max(
        self,
        seqlen_info: SeqlenInfoQK,
        m_block: IntLike,
        split_idx: IntLike = 0,
        num_splits: IntLike = 1,
    ) -> tuple[IntLike, IntLike]:
        """Key blocks [n_block_min, n_block_max) in which a row of `m_block` sees a key.

        The range is tight: each block in it has a visible element, each block outside has none. An
        `m_block` past the last query gets an empty range. With `is_split_kv` the range is that of
        split `split_idx` out of `num_splits` >= 1, which have ceil(count / num_splits) blocks each;
        the last splits may be shorter or empty.
        """
        first, end = self.query_range(seqlen_info, m_block)
        lo, hi = _union(self.band(seqlen_info).k_range, first, end)
        n_block_min, n_block_max = _tiles_touched(lo, hi, self.tile_n)
        if self.is_split_kv:
            per_split = _ceil_div(n_block_max - n_block_min, num_splits)
            n_block_min = imin(n_block_min + split_idx * per_split, n_block_max)
            n_block_max = imin(n_block_min + per_split, n_block_max)
        return n_block_min, n_block_max

    def get_m_block_min_max(
        self, seqlen_info: SeqlenInfoQK, n_block: IntLike
    ) -> tuple[IntLike, IntLike]:
        """Query blocks [m_block_min, m_block_max) in which a row sees a key of `n_block`.

        The transpose of `get_n_block_min_max` without splits. Under packed GQA these are blocks of
        packed rows. An `n_block` past the last key gets an empty range.
        """
        first = n_block * self.tile_n
        end = imin(first + self.tile_n, seqlen_info.seqlen_k)
        lo, hi = _union(self.band(seqlen_info).q_range, first, end)
        heads = self.qhead_per_kvhead_packgqa
        return _tiles_touched(lo * heads, hi * heads, self.tile_m)

    def get_n_block_k_new_min_max(
        self,
        seqlen_info: SeqlenInfoQKNewK,
        m_block: IntLike,
        split_idx: IntLike = 0,
        num_splits: IntLike = 1,
    ) -> tuple[IntLike, IntLike]:
        """Blocks [min, max) of `tile_n` new keys that `m_block` (this split of it) reads.

        Block 0 starts at the first new key, at any place in a key tile. A block is in the range if
        one of its keys lies in a key tile of `get_n_block_min_max`, visible or not: tiles are
        loaded whole, and even a hidden key must hold finite values.
        """
        n_block_min, n_block_max = self.get_n_block_min_max(
            seqlen_info, m_block, split_idx, num_splits
        )
        lo = imax(n_block_min * self.tile_n - seqlen_info.seqlen_k_og, 0)
        hi = imin(n_block_max * self.tile_n - seqlen_info.seqlen_k_og, seqlen_info.seqlen_k_new)
        return _tiles_touched(lo, hi, self.tile_n)

    def get_n_block_min_causal_local_mask(
        self,
        seqlen_info: SeqlenInfoQK,
        m_block: IntLike,
        n_block_min: IntLike,
    ) -> IntLike:
        """First key block, at least `n_block_min`, that needs right-edge masking.

        Blocks in [n_block_min, result) lie entirely left of the right edge of every valid row;
        `result` and the blocks after it do not. The end of the keys counts as a right edge, so a
        block that straddles `seqlen_k` needs masking even if the right side is open. The result is
        at most the n_block_max of a whole, non-empty range; clamp it to the n_block_max of a split.
        """
        first, _ = self.query_range(seqlen_info, m_block)
        _, hi = self.band(seqlen_info).k_range(first)
        return imax(hi // self.tile_n, n_block_min)

    def get_n_block_min_before_local_mask(
        self,
        seqlen_info: SeqlenInfoQK,
        m_block: IntLike,
        n_block_min: IntLike,
    ) -> IntLike:
        """First key block, at least `n_block_min`, that needs no left-edge masking.

        Blocks in [n_block_min, result) hold a key left of the left edge of some valid row; `result`
        and the blocks after it hold none. Clamp it as that of `get_n_block_min_causal_local_mask`,
        which it may exceed: both edges cross the blocks between the two.
        """
        _, end = self.query_range(seqlen_info, m_block)
        lo, _ = self.band(seqlen_info).k_range(end - 1)
        return imax(_ceil_div(lo, self.tile_n), n_block_min)

    def _right_edge(self) -> IntLike | None:
        if not self.is_causal:
            return self.window_size_right
        return 0 if self.window_size_right is None else imin(self.window_size_right, 0)

    def query_range(self, seqlen_info: SeqlenInfoQK, m_block: IntLike) -> tuple[IntLike, IntLike]:
        """Query positions [first, end) of the valid rows of `m_block`."""
        heads = self.qhead_per_kvhead_packgqa
        first = m_block * self.tile_m // heads
        end = _ceil_div((m_block + 1) * self.tile_m, heads)
        return first, imin(end, seqlen_info.seqlen_q)
