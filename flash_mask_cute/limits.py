"""Limits of kernels and of the memory that they can read."""

# elements of 16 bits between TMA rows: 16 bytes
STRIDE_STEP = 8
# bits of an address that are 0 where data start on 16 bytes
ADDRESS_MASK = 15
# A window side as wide as this is open: no sequence is longer, and kernels add window sides to
# positions in 32 bits.
OPEN_WINDOW = 1 << 30
# of kernels; the CPU path has none. The forward on Hopper has the wider one.
MAX_HEAD_DIM, MAX_WIDE_HEAD_DIM = 256, 512
# columns of V that a CTA on Hopper sums; two CTAs share a work tile of wider values
MOST_VALUE_COLUMNS = 256
# the largest number of float8_e4m3fn
LARGEST_CODE = 448.0
# keys of a page
MAX_PAGE_SIZE = 256
# parts that a caller may ask for; their results are then combined
MOST_SPLITS = 256
# keys of a fixed split at least (`core/fixed_splits.py`): a few key tiles
LEAST_FIXED_SPLIT = 512
# the least keys of a page, side by side, that TMA brings in a box of their own: shared memory is
# swizzled in groups of so many
LEAST_BOX = 8
# Positions of queries are nearer to 0, on both sides, so that they and window sides add up in 32
# bits.
MAX_POSITION = 1 << 29
# In the place of a position: where the last query is at the last key. No position is as small.
AT_END = -MAX_POSITION
# keys of a bit tile, whatever the tile has
MAX_COLUMNS = 128
# blocks of queries that a launch with mask bits may compute before all others: one for each lane
LONGEST = 32
# rows of a packed sequence: those of TMA's view of one (`core/tma.py`, ragged_rows)
MAX_PACKED_SEQLEN = 1 << 26
# how far from the sink, in units of it or of 1, the LSE of a row that sees nothing may be
SINK_RTOL = 2.0**-16
# rows of a packed tensor: cu_seqlens are int32
MAX_PACKED_ROWS = 1 << 31
# of the bits of a selection of blocks, so that 32 bits number their words
MOST_BIT_BYTES = 1 << 31
# of a grid in its second and in its third dimension
MOST_CTAS = 65535


def ctas_of_tile(head_dim_v: int) -> int:
    """CTAs on Hopper that compute a work tile of queries together (`core/value_halves.py`)."""
    return 1 if head_dim_v <= MOST_VALUE_COLUMNS else 2
