"""Pages of sizes that TMA cannot load, with head dimensions that tiles have or not."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
from cases import Case
from conftest import ACTIVE_ARCH
from inputs import make_inputs
from paged_inputs import paged
from simulated_forward import run_sim

ARCH = ACTIVE_ARCH


class SizeCase(NamedTuple):
    """config: of the call; one stage of keys leaves no copy in flight while another is begun. sms:
    with one, a CTA has all work tiles, some of which have one block. window: where it cuts blocks,
    warps that copy rows make bits between their copies."""

    head_dim: int
    head_dim_v: int
    page_size: int
    config: dict[str, Any] | None = None
    sms: int = 3
    window: int | None = None

    @property
    def id(self) -> str:
        name = f"d{self.head_dim}-{self.head_dim_v}-page{self.page_size}-{self.config}"
        return name if self.window is None else f"{name}-window{self.window}"


# of decoding, in several work tiles of a CTA
ROWS_OF_PAGES = SizeCase(64, 64, 1, sms=1, window=150)
SIZE_CASES = (
    ROWS_OF_PAGES,
    SizeCase(128, 128, 1, sms=1, window=260),
    SizeCase(256, 256, 3, sms=1, window=100),
    SizeCase(8, 8, 3),
    SizeCase(72, 40, 5),
    SizeCase(112, 112, 20),
    SizeCase(64, 64, 1, {"num_stages": 1}),
    SizeCase(192, 128, 7),
    SizeCase(248, 256, 2),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("size", SIZE_CASES)
def test_against_oracle(simulator: ModuleType, size: SizeCase) -> None:
    case = Case(
        "sizes", 2, 3, 420, 4, 2, head_dim=size.head_dim, head_dim_v=size.head_dim_v, causal=True,
        seqused_k=(413, 65), window_left=size.window,
    )  # fmt: skip
    inputs = paged(make_inputs(case), size.page_size)
    run_sim(simulator, inputs, (1,), sms=size.sms, num_splits=1, config=size.config)
