"""Calls at both sides of the numbers that decide a plan.

A line names calls: alternatives by `|`, of extents `batch x queries x keys x heads / KV heads x
head_dim / head_dim_v`, then of each option. `-` is no option; names are those of `plan_grid`. What
is indented continues a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

FORWARD = """
# pairs of CTAs, and a half tile for few rows
1x128x300x2/2x256 | 1x129x300x2/2x256 | 1x256x300x2/2x128 | 1x257x300x2/2x128
1x1000x300x2/2x128 - | causal | packed-k | softcap | ctas-2 | ctas-1 | tanh
1x256x300x2/2x128 | 1x1000x300x2/2x256 ctas-2 | ctas-1
1x1000x300x2/2x128 | 1x1000x300x2/2x64 causal ctas-2
1x1023x300x2/2x192/128 | 1x1024x300x2/2x192/128 | 1x1024x300x2/2x64 - | causal | packed-q
4x16x5000x8/1x128 | 4x17x5000x8/1x128 | 4x16x5000x8/1x64 | 4x17x5000x8/1x192/128 - | pages |
  causal
# heads that share a tile
1x1x500x8/2x128 | 1x127x500x8/2x128 | 1x128x500x8/2x128 | 1x5x500x8/2x128 - | packed | unpacked
1x1x500x8/8x128 | 1x1x500x7/1x128 | 1x1x500x128/1x128 | 1x1x500x64/1x128 | 1x1x500x65/1x128
1x1x500x6/2x128 | 1x1x500x12/1x128 | 1x5000x500x24/2x128 | 1x5000x500x7/1x64 - | packed
1x1x500x8/2x128 four-columns | mask-mod-by-head | pair | lists
# blocks that each query selects
1x4096x4096x2/2x128 | 1x4096x4096x6/2x128 | 1x4096x4096x32/2x128 selected-16 | selected-64 |
  selected-128 | selected-4096
1x300x500x6/2x64 | 1x300x500x6/2x192 selected-16 | selected-32 | selected-64 - | unpacked | causal
# functions of scores
1x1000x8192x4/4x128 | 1x1000x8191x4/4x128 | 1x1000x4096x4/4x128 causal softcap | tanh | minus - |
  left | mask-mod
1x1000x8192x4/4x128 causal softcap packed-k
# block lists
1x1000x500x4/4x64 | 1x1000x500x4/4x96 | 1x1000x500x4/4x128 lists-128x128 | lists-256x128 |
  lists-768x896
1x1000x500x4/4x64 | 1x1000x500x4/4x96 | 1x1000x500x4/4x128 lists-64x64 | lists-64x256 |
  lists-320x128 - | mask-mod | minus | start-5
1x100x500x4/4x128 | 1x300x400x4/4x160 lists-64x64 | lists-64x48
1x1000x500x4/4x64 lists-64x48 | lists-96x128 | lists-192x128
# decoding, in one pass and in splits
64x1x4096x64/8x64 | 64x1x4096x64/8x96 | 64x1x4096x64/8x128 | 64x1x4096x64/8x192/128 |
  64x1x4096x64/8x192 | 64x1x4096x64/8x256 - | one-pass | recorded | no-skips
1x1x131072x64/8x64 | 1x1x131072x64/8x128 | 1x1x131072x64/8x256 - | one-pass | used-k
64x8x4096x64/8x128 | 64x9x4096x64/8x128 | 264x1x4096x24/2x256 - | causal | recorded
64x1x4096x64/8x128 | 64x2x4096x64/8x128 causal - | start-5 | recorded | tiles | stages
1x1x511x8/2x128 | 1x1x512x8/2x128 | 1x1x1024x8/2x128 | 1x512x4095x1/1x128 | 1x512x4096x1/1x128 |
  1x512x8192x8/8x128 - | one-pass | splits-2 | splits-3 | mask-mod | no-skips
1x4096x4096x8/8x128 | 1x512x8192x2/2x128 | 1x1x8192x8/8x128 | 8x1x4096x32/8x128 - | mask-mod |
  used-k | minus
1x1x1024x8/2x128 | 1x512x8192x8/8x128 minus lse-low | splits-3 | splits-7
1x1x4096x12/1x256 | 63x1x4096x12/1x256 | 64x1x4096x12/1x256 | 130x1x4096x12/1x256 used-k
1x2x600x8/8x64 | 1x2x1200x8/8x64 | 1x2x2400x8/8x64 | 1x2x4800x8/8x64 | 2x2x9600x8/8x64 |
  3x2x9600x8/8x64 | 4x2x9600x8/8x64 - | causal
# sums that are cut at fixed keys
1x1x20000x8/2x128 | 256x1x20000x64/8x128 | 1x7x20000x8/2x128 | 1x500x20000x8/2x128 |
  1x600x600x8/2x128 cut-4096 - | causal | used-q | max-scores | wide-out
1x20000x20000x32/8x128 | 1x8192x8192x8/2x128 | 1x16384x16384x8/2x64 cut-4096 causal - | left |
  softcap
8x1x131072x32/8x128 | 16x1x131072x32/8x128 | 2x1x1048576x8/8x128 | 1x1x513x8/2x128 |
  1x1x512x8/2x128 cut-512
# rows of a bias in shared memory
48x320x320x4/4x32 | 15x320x320x4/4x32 | 16x320x320x4/4x32 | 48x120x120x4/4x32 | 384x64x64x4/4x32 |
  48x320x320x4/4x96 | 48x320x320x4/4x64 pair
48x320x320x4/4x32 pair-fp32 | pair-uint8 | pair-bool | pair-int64 | pair-keys - | softcap | causal
  | left | used-k | start-5 | stages
16x320x320x12/12x32 | 15x320x320x12/12x32 | 44x320x320x4/4x32 | 43x320x320x4/4x32 pair
384x64x64x4/4x64 | 384x65x64x4/4x64 pair
# bits of a mask_mod
1x200x200x3/3x128 | 1x200x200x4/4x128 | 1x100x200x8/2x128 | 1x384x384x4/4x64 | 3x300x200x4/4x128
  mask-mod | ids | mask-mod-by-head - | used-k | packed-k | packed | lists | minus | lists-384x384
2x700x700x4/2x128 | 1x512x512x4/4x128 | 1x700x800x4/4x128 ids - | minus | columns
1x40000x40000x4/4x128 | 2x40000x40000x4/4x128 | 1x16384x16384x8/8x64 mask-mod | ids
# fp8 caches
2x255x320x4/2x64 | 2x256x320x4/2x64 | 2x128x320x8/2x64 | 2x127x320x8/2x64 fp8 | fp8-scales - |
  left | causal | leftpad
# head dimensions
2x300x700x4/2x8 | 2x300x700x4/2x64/256 | 2x300x700x4/2x256/64 | 2x300x700x4/2x200/256 |
  2x300x700x4/2x320 | 2x300x700x4/2x512 - | causal | pages | pair
"""
BACKWARD = """
# query lists
1x300x300x16/2x64 | 1x300x300x32/2x128 | 1x300x300x64/2x40/104 | 1x300x300x64/1x128 |
  1x300x300x65/1x64 | 1x300x300x24/2x128 | 1x300x300x16/2x80 | 1x300x300x16/2x64/96 |
  1x300x300x16/2x192/128 selected-128 | selected-64 | selected-32 | selected-512 | selected-4096 -
  | causal | in-order
1x300x300x16/2x64 selected-128 sink | left | start-5 | softcap | minus | columns | mask-mod |
  mask-mod-by-head
1x300x300x16/2x64 selected-by-head | selected-shared - | columns | four-columns
# short sequences
132x49x49x4/4x32 | 131x49x49x4/4x32 | 256x49x192x4/4x32 | 256x49x193x4/4x32 | 256x9x190x4/4x32 |
  256x49x49x4/4x128 | 256x49x49x4/4x136 | 256x192x192x4/4x128 | 256x192x64x4/4x128 |
  256x192x64x4/4x64 | 256x49x49x4/2x32
256x49x49x4/4x32 - | causal | left | sink | in-order - | used-k | packed-q | start-5 | lists-16x16
  | softcap | mask-mod | columns | no-skips | window-table | pair | slopes
# sums of a table over the batch
3x70x140x4/4x32 | 1x70x140x4/4x32 | 2x70x140x4/2x32 | 3x70x140x4/4x128 | 3x70x140x4/4x192 pair - |
  in-order | causal | left | softcap | used-k | columns | ids
64x49x49x4/4x32 | 15x49x49x4/4x32 | 16x49x49x4/4x32 window-table | distances | key-bias | slopes -
  | in-order
16x300x300x4/4x32 | 16x300x300x4/4x64 | 16x300x300x4/4x128 | 15x300x300x4/4x32 distances | axes |
  window-table
2x2048x2048x4/4x64 | 2x4096x4096x16/16x64 | 1x4096x4096x16/16x64 pair - | no-daux | softcap
2x2048x4096x2/2x64 | 2x2048x4095x2/2x64 | 2x2048x4104x2/2x64 pair
# groups of heads that CTAs share
1x4096x4096x8/1x128 | 1x8192x8192x8/1x128 | 1x16384x16384x8/1x128 | 1x8192x8192x28/4x128 |
  1x4096x4096x32/8x128 | 2x8192x8192x32/8x128 | 64x4096x4096x8/1x128 | 1x8192x8192x8/1x136 |
  1x8192x8192x8/1x192 | 1x8192x8192x8/1x256 | 1x131072x131072x8/1x128 - | causal | left
# wide heads, pairs of CTAs, and sums that are cleared
1x4095x4095x4/4x80 | 1x4096x4096x4/4x80 | 1x4097x4097x4/4x128 | 1x8192x8192x4/4x128 |
  1x32767x32767x4/4x128 | 1x32768x32768x4/4x128 | 1x32768x32768x4/4x192/128 |
  1x4096x4096x4/4x192/128 - | causal | in-order
1x512x512x4/4x128 | 1x511x511x4/4x128 | 1x512x512x4/4x104 | 1x512x512x4/4x96 |
  1x512x512x4/4x136/128 | 1x512x512x4/4x192/72 | 1x512x512x4/4x192 | 1x511x511x4/4x256 |
  1x512x512x4/4x256/192 - | causal | mask-mod | columns | softcap | minus | in-order | lists
1x1024x1024x4/4x128 | 1x1024x1024x4/4x256 left-511 | left-512 - | in-order | causal
1x1024x1024x4/4x128 | 1x1024x1024x4/4x64 | 1x1024x1024x4/4x192/128 ctas-2 | ctas-1 - | softcap |
  minus | left
1x300x300x4/4x64 | 1x300x300x4/4x128 left-0 | left-1 - | causal
# block lists
1x300x400x4/4x80 | 1x300x400x4/4x128 lists-64x64 | lists-128x192 | lists-64x128 | lists-96x64 |
  lists-128x64 | lists-32x64 - | in-order | softcap | minus | mask-mod
"""
# Both directions; heads that have no row of a table of their own are made to fit.
HEAD_DIMS = tuple(f"1x1000x500x4/4x{d}" for d in range(8, 257, 8))
HEAD_DIM_PAIRS = tuple(
    f"1x1000x500x4/4x{d}/{dv}" for d in range(40, 257, 24) for dv in range(40, 257, 24)
)


def _alternatives(line: str) -> Iterator[list[str]]:
    """All words of a line; words joined by `|` are alternatives."""
    groups: list[list[str]] = []
    is_next_other = False
    for word in line.split():
        if word == "|":
            is_next_other = True
        elif is_next_other:
            groups[-1].append(word)
            is_next_other = False
        else:
            groups.append([word])
    for chosen in product(*groups):
        yield [word for word in chosen if word != "-"]


def edges(text: str) -> Iterator[list[str]]:
    """Extents and names of options, of each call of FORWARD or BACKWARD."""
    for line in text.replace("\n  ", " ").splitlines():
        if line and not line.startswith("#"):
            yield from _alternatives(line)
    for extents in HEAD_DIMS:
        yield [extents]
        yield [extents, "causal"]
    for extents in HEAD_DIM_PAIRS:
        yield [extents]
