"""What the Hopper backward can have registers, columns and shared memory for."""

from typing import Any

from flash_mask_cute.core.cta import SMEM_CAPACITY
from flash_mask_cute.core.row_blocks import alternating_sums
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

# the widest heads where a warpgroup holds all columns of dK and dV for its keys
MAX_OWN_DIM = 128
# what MMA warpgroups may take; the most only where there is little to schedule and few bits to make
MMA_REGISTERS = (216, 232, 240)
# what a thread needs besides fragments, or nearly so, and what it is better off with
SCALAR_REGISTERS, SPARE_REGISTERS = 32, 8
MAX_REGISTERS = 248
MAX_DIM = 256
# columns of dK and dV together that all fit into a thread's registers, if S and dP are computed in
# halves of a block's queries
MAX_SPLIT_COLS = 320
# rows of a listed query, which are a box: the heads of its group, and perhaps padding
TOKEN_HEADS = (2, 4, 8, 16, 32, 64)


def may_loop_over_scores(cols: int) -> bool:
    """Whether MMA warps may have a loop over gradients of scores at run time. Where dQ is summed in
    turn, S and dP would be copied for it while their products are in flight. cols: of queries."""
    return not alternating_sums(cols, 1)


def why_infeasible(traits: Any) -> str | None:
    """The reason why a kernel with these `BwdTraits` cannot run, or None."""
    if traits.tile_m not in (64, 128):
        return f"tile_m must be 64 or 128, got {traits.tile_m}"
    if max(traits.head_dim, traits.head_dim_v) > MAX_DIM:
        dims = f"{traits.head_dim}, {traits.head_dim_v}"
        return f"head_dim and head_dim_v go up to {MAX_DIM}, got {dims}"
    if traits.lists_per_warpgroup and (
        traits.shares_keys or traits.splits_keys or traits.by_query_lists
    ):
        return (
            f"lists_per_warpgroup=True is for head dimensions up to {MAX_OWN_DIM}, and block lists"
        )
    if traits.shares_keys and traits.num_row_groups > 1:
        return f"tile_m must be 64 where heads are wider than {MAX_OWN_DIM}, got {traits.tile_m}"
    if traits.by_query_lists:
        why_not = _why_not_by_query_lists(traits)
        if why_not is not None:
            return why_not
    for name in ("stages_q", "stages_do", "stages_kv"):
        if getattr(traits, name) not in (1, 2):
            return f"{name} must be 1 or 2, got {getattr(traits, name)}"
    if traits.cta_pair and traits.head_dim <= MAX_OWN_DIM:
        return f"cta_pair=True is for head_dim above {MAX_OWN_DIM}, got {traits.head_dim}"
    if traits.cta_pair and traits.stages_kv > 1:
        # of the peer's keys there is one stage
        return f"stages_kv must be 1 with cta_pair=True, got {traits.stages_kv}"
    if not traits.releases_do_after_dq and traits.stages_q == 1:
        # the load warp would wait for a Q that is released after parts of dQ that wait for it
        return f"stages_q must be 2 where head_dim is above {MAX_OWN_DIM}, got 1"
    if traits.value_cols % 16 != 0:
        return f"value_cols must be a multiple of 16, got {traits.value_cols}"
    if traits.splits_keys and max(traits.head_dim, traits.head_dim_v) <= MAX_OWN_DIM:
        dims = f"{traits.head_dim}/{traits.head_dim_v}"
        return f"splits_keys=True is for heads wider than {MAX_OWN_DIM}, got {dims}"
    if traits.splits_keys and (traits.num_row_groups > 1 or traits.cta_pair):
        given = f"tile_m {traits.tile_m}, cta_pair={traits.cta_pair}"
        return f"splits_keys=True needs tile_m 64 and cta_pair=False, got {given}"
    if traits.splits_keys and traits.tile_d + traits.tile_dv > MAX_SPLIT_COLS:
        return (
            f"splits_keys=True is for at most {MAX_SPLIT_COLS} columns of keys and values, got "
            f"{traits.tile_d} and {traits.tile_dv}"
        )
    if traits.value_cols > 0 and (traits.shares_keys or traits.splits_keys):
        return f"value_cols must be 0 where head_dim is above {MAX_OWN_DIM}"
    if traits.smem_bytes > SMEM_CAPACITY:
        return f"{traits.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
    if traits.fragment_registers + SCALAR_REGISTERS + SPARE_REGISTERS > MAX_REGISTERS:
        return f"{traits.fragment_registers} registers of fragments are too many for a thread"
    if traits.value_cols > 0 and traits.needed_registers > MMA_REGISTERS[-1]:
        return f"value_cols {traits.value_cols} are more than a thread has registers for"
    return None


def _why_not_by_query_lists(traits: Any) -> str | None:
    """The reason why a kernel with these `BwdTraits` cannot take listed queries, or None."""
    if traits.packed_heads not in TOKEN_HEADS:
        return f"listed queries have {TOKEN_HEADS} rows, got {traits.packed_heads}"
    if traits.group_size > traits.packed_heads:
        return f"listed queries have {traits.packed_heads} rows, got group_size={traits.group_size}"
    if traits.tile_m != ROWS_PER_WARPGROUP or traits.splits_keys or traits.cta_pair:
        given = f"tile_m={traits.tile_m}, splits_keys={traits.splits_keys}"
        return f"listed queries need 64 rows and no cta_pair, got {given}"
    return None
