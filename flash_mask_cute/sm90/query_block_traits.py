"""Static facts of what comes with a query block of the Hopper backward beside its rows."""

from flash_mask_cute.core.cta import WALK_STAGES
from flash_mask_cute.core.query_loads import QUERY_WORDS
from flash_mask_cute.core.row_blocks import stats_words
from flash_mask_cute.core.walk_ring import CHUNK


class QueryBlockTraits:
    """The part of `BwdTraits` that concerns statistics of queries, and listed queries."""

    tile_m: int
    packed_heads: int
    has_reference: bool
    has_marks: bool

    @property
    def num_stats(self) -> int:
        """Statistics of a query: LSE, delta, and the reference of its scores, if they have one."""
        return 2 + self.has_reference

    @property
    def stats_words(self) -> int:
        """Statistics of a query block, and marks of its rows."""
        return stats_words(self.tile_m, self.num_stats, self.has_marks, self.packed_heads)

    @property
    def bytes_stats(self) -> int:
        return self.stats_words * 4

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
