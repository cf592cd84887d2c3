"""Static facts of listed queries in the Hopper backward (`flash_bwd_tokens`), and limits."""

from typing import Any

from flash_mask_cute.core.cta import WALK_STAGES
from flash_mask_cute.core.query_loads import QUERY_WORDS
from flash_mask_cute.core.walk_ring import CHUNK
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

# rows of a query, which are a box: the heads of its group, and perhaps padding
TOKEN_HEADS = (2, 4, 8, 16, 32, 64)
MAX_TOKEN_DIM = 128


class ListedQueryTraits:
    """The part of `BwdTraits` that concerns listed queries."""

    tile_m: int
    packed_heads: int
    has_reference: bool

    @property
    def stats_words(self) -> int:
        raise NotImplementedError

    @property
    def bytes_stats(self) -> int:
        raise NotImplementedError

    @property
    def by_query_lists(self) -> bool:
        """Whether blocks consist of listed queries."""
        return self.packed_heads > 1

    @property
    def tokens_per_block(self) -> int:
        """Queries of a block, if they are listed."""
        return self.tile_m // self.packed_heads

    @property
    def words_of_query(self) -> int:
        """Statistics and marks of a listed query."""
        return self.stats_words // self.tokens_per_block

    @property
    def tells_queries(self) -> bool:
        """Whether the words of a block hold its listed queries, which modified scores need."""
        return self.by_query_lists and self.has_reference

    @property
    def query_words(self) -> int:
        """Words that go with a query block: `QUERY_WORDS`, and its listed queries, if told."""
        return QUERY_WORDS + (self.tokens_per_block if self.tells_queries else 0)

    @property
    def bytes_of_listed(self) -> int:
        """Bytes of the statistics and words of a block of listed queries."""
        return self.bytes_stats + self.query_words * 4 if self.by_query_lists else 0

    @property
    def bytes_tokens(self) -> int:
        """Bytes of the queries of a walk's blocks, if they are listed."""
        return self.tokens_per_block * CHUNK * WALK_STAGES * 4 if self.by_query_lists else 0


def why_not_by_query_lists(traits: Any) -> str | None:
    """The reason why a kernel with these `BwdTraits` cannot take listed queries, or None."""
    if traits.packed_heads not in TOKEN_HEADS:
        return f"listed queries have {TOKEN_HEADS} rows, got {traits.packed_heads}"
    if traits.group_size > traits.packed_heads:
        return f"listed queries have {traits.packed_heads} rows, got group_size={traits.group_size}"
    columns, dims = traits.columns, (traits.head_dim, traits.head_dim_v)
    num_parts = max(map(len, (columns.dk, columns.dv, columns.parts_dq)))
    is_wide = max(dims) > MAX_TOKEN_DIM or num_parts > 1
    if traits.tile_m != ROWS_PER_WARPGROUP or is_wide or columns.alternating:
        given = f"head dimensions {dims[0]}/{dims[1]}, tile_m={traits.tile_m}"
        return f"listed queries need 64 rows, of whose dQ each warpgroup sums half, got {given}"
    return None
