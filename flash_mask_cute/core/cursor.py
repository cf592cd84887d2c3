"""A position in a pipeline, kept as one counter.

The pipelines of the kernels number their fills from 0; stage and phase follow from the number. One
number serves all pipelines that are filled in step, which saves registers.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32


class Cursor(NamedTuple):
    """Fill number `count` of a pipeline. phase: the parity for waits on its stage's mbarriers."""

    count: Int32
    stages: int
    is_producer: bool = False

    @property
    def index(self) -> Int32:
        return cutlass.Int32(cutlass.Uint32(self.count) % self.stages)

    @property
    def phase(self) -> Int32:
        phase = cutlass.Int32(cutlass.Uint32(self.count) // self.stages) & 1
        # a producer's first round finds every stage empty
        return phase ^ 1 if self.is_producer else phase
