"""Pages of every size, for every head dimension of the forward."""

from __future__ import annotations

import pytest
import torch
from planned import forward_call, planned

from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.limits import MAX_PAGE_SIZE
from flash_mask_cute.runtime.target import Target

DIMS = [(d, d) for d in range(8, 257, 8)] + [(192, 128), (72, 40), (64, 256), (256, 8)]
BATCH, KEYS = 2, 768


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("seqlen_q", [1, 300])
@pytest.mark.parametrize("has_leftpad", [False, True])
def test_every_size_has_a_kernel(arch: str, seqlen_q: int, has_leftpad: bool) -> None:
    """The plan of the kernel itself says so, which is asked when it is compiled."""
    from cutlass import BFloat16

    target = Target.named(arch)
    load_traits = arch_spec(target).forward.load_traits
    for head_dim, head_dim_v in DIMS:
        q = torch.empty(BATCH, seqlen_q, 2, head_dim, dtype=torch.bfloat16)
        for page_size in (1, 2, 7, 8, 20, 24, 96, 100, 128, MAX_PAGE_SIZE):
            pages = -(-KEYS // page_size)
            k, v = (
                torch.empty(1, page_size, 1, d, dtype=torch.bfloat16)
                for d in (head_dim, head_dim_v)
            )
            where = {
                "page_table": torch.zeros(BATCH, pages, dtype=torch.int32),
                "seqused_k": torch.full((BATCH,), KEYS - 3, dtype=torch.int32),
            }
            if has_leftpad:
                where["leftpad_k"] = torch.full((BATCH,), 3, dtype=torch.int32)
            chosen = planned(forward_call(q, k, v, **where), target)
            tiles = chosen.fwd_choice.tiles
            why = load_traits()(
                BFloat16, head_dim, head_dim_v, tiles.tile_m, tiles.tile_n,
                packed_heads=chosen.problem.packed_heads, stages_kv=tiles.num_stages,
                stages_q=tiles.stages_q, share_qo=tiles.share_qo, cta_pair=tiles.cta_pair,
                page_box=chosen.problem.page_box,
            ).infeasible()  # fmt: skip
            assert why is None, f"{head_dim}/{head_dim_v}, pages of {page_size}: {why}"
            assert not tiles.cta_pair
            assert (chosen.problem.page_box == 1) or not has_leftpad
