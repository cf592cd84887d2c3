"""What the backwards that walk over batch entries have in shared memory, and how statistics get
there."""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from flash_mask_cute.core import tma
from flash_mask_cute.sm90 import wgmma


@dataclass(frozen=True)
class HeadColumns:
    """The head dimensions of a kernel: head_dim of Q and K, head_dim_v of dO and V."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int

    @property
    def cols(self) -> tuple[int, int]:
        """Columns of Q and K, and of dO and V, in shared memory."""
        return wgmma.tile_columns(self.head_dim), wgmma.tile_columns(self.head_dim_v)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of 16 columns, without those that are zeros."""
        return -(-self.head_dim // 16), -(-self.head_dim_v // 16)


def load_words(
    source: cute.Tensor,
    target: cute.Tensor,
    pieces: Sequence[tuple[int, int, int]],
    barrier: cute.Pointer,
) -> None:
    """Copy pieces of the statistics of a row block. A piece: its first word in source (words,) and
    in target (words,), and how many."""
    for start, at, count in pieces:
        layout = cute.make_layout(count)
        src = cute.make_tensor((source.iterator + start).align(16), layout)
        dst = cute.make_tensor((target.iterator + at).align(16), layout)
        tma.copy_bulk(src, dst, barrier)
