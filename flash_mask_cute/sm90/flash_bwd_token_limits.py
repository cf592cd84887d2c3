"""What the Hopper backward cannot do with listed queries (`flash_bwd_tokens`)."""

from typing import Any

from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

# query heads of a group, whose rows are a box
TOKEN_HEADS = (4, 8, 16, 32, 64)
MAX_TOKEN_DIM = 128


def why_not_by_tokens(traits: Any) -> str | None:
    """The reason why a kernel with these `BwdTraits` cannot take listed queries, or None."""
    if traits.packed_heads not in TOKEN_HEADS:
        return f"listed queries have {TOKEN_HEADS} heads of a group, got {traits.packed_heads}"
    columns, dims = traits.columns, (traits.head_dim, traits.head_dim_v)
    num_parts = max(map(len, (columns.dk, columns.dv, columns.parts_dq)))
    is_wide = max(dims) > MAX_TOKEN_DIM or num_parts > 1
    if traits.tile_m != ROWS_PER_WARPGROUP or is_wide or columns.in_turn:
        given = f"head dimensions {dims[0]}/{dims[1]}, tile_m={traits.tile_m}"
        return f"listed queries need 64 rows, of whose dQ each warpgroup sums half, got {given}"
    if traits.has_marks or traits.has_reference:
        return "listed queries have no marks, and no scores of any magnitude"
    return None
