"""The order of a backward's work tiles, by numbers that the plan and the launch have alike."""

from collections.abc import Callable
from typing import Any

# as many work tiles for each CTA leave little to be gained by their order
MANY = 16
# in the order of their length, so many rounds of work tiles are handed out together: after them,
# there are short ones for the CTAs that are done early
ROUNDS = 2


def alternating_heads(blocks: Any, heads: Any, ctas: Any, select: Callable[..., Any]) -> Any:
    """Heads whose work tiles are handed out together, block by block, if the first blocks of each
    have the longest walks.

    One head after the other, the longest walk of the last head would begin when most CTAs are about
    to end. Many heads at a time would not fit the L2 cache, so these are few, and one where work
    tiles are many.

    blocks: of a head; heads: of all sequences; at least one of each. ctas: that run at a time.
    select: (condition, value, other value), for numbers of the host or of a launch.
    """
    is_few = blocks * heads <= MANY * ctas
    groups = heads * blocks // (ROUNDS * ctas)
    groups = select(groups > 0, groups, 1)
    return select(is_few, (heads + groups - 1) // groups, 1)
