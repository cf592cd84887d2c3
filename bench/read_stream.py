"""A kernel that only reads: the ceiling of what waits for memory. Needs Triton."""

import triton
import triton.language as tl


@triton.jit
def read_words(words, sums, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums `steps` blocks of int32 a program, one after the other."""
    base = tl.program_id(0).to(tl.int64) * steps * BLOCK
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        total += tl.load(words + base + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))
