"""A position in a pipeline, kept as one counter.

The pipelines of the kernels number their fills from 0; stage and phase follow from the number. One
number serves all pipelines that are filled in step (a key block and its value block, a query tile
and its ring entry). This saves registers, and no pipeline can be advanced without the others.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32


class Cursor(NamedTuple):
    """The fill number `count` of a pipeline of `stages` stages, for a producer or a consumer.
    `index` is the stage of the fill, `phase` the parity for waits on its mbarriers."""

    count: Int32
    stages: int
    is_producer: bool = False

    @property
    def index(self) -> Int32:
        if self.stages & (self.stages - 1) == 0:
            return self.count & (self.stages - 1)
        return cutlass.Int32(cutlass.Uint32(self.count) % self.stages)

    @property
    def phase(self) -> Int32:
        if self.stages & (self.stages - 1) == 0:
            phase = (self.count >> (self.stages.bit_length() - 1)) & 1
        else:
            phase = cutlass.Int32(cutlass.Uint32(self.count) // self.stages) & 1
        # a producer's first round finds every stage empty
        return phase ^ 1 if self.is_producer else phase
