"""Attention over a sequence that several devices share, with any column mask.

`plan` divides the rows among ranks, and `context_parallel_attention` is attention of sharded q, k
and v. docs/context_parallel.md shows their use.

Example:
    >>> from flash_mask_cute import builders, parallel
    >>> mask = builders.causal_document([700, 324])
    >>> plan = parallel.plan(mask, 2, seqlen=1024)
    >>> plan.rows, plan.load(mask).keys
    ((((0, 128), (256, 640)), ((128, 256), (640, 1024))), (128, 512))
"""

from flash_mask_cute.parallel.attention import Method, context_parallel_attention
from flash_mask_cute.parallel.planning import Load, Plan, plan
from flash_mask_cute.parallel.sharding import sharded

__all__ = ["Load", "Method", "Plan", "context_parallel_attention", "plan", "sharded"]
