"""flash-attn-4 4.0.0b36 on Blackwell, as it was counted: recorded, not made by a command here.

Its kernels were compiled without a GPU and disassembled; the loops were counted by hand. To do that
again, in an environment of its own with flash-attn-4==4.0.0b36:

    FLASH_ATTENTION_ARCH=sm_100 CUTE_DSL_ARCH=sm_100a CUTE_DSL_KEEP_PTX=1 CUTE_DSL_KEEP_CUBIN=1 \\
        CUTE_DSL_DUMP_DIR=DIR python CALLS.py
    nvdisasm -c -hex DIR/*.cubin

CALLS.py makes tensors under torch's FakeTensorMode with device "cuda", puts a stub in the place of
`cutlass.utils.HardwareInfo`, of torch's device capability and properties and of triton (which quack
imports), and calls the public functions. A kernel takes 15 s. What it does (orders, columns, parts)
was read in its source.
"""

from __future__ import annotations

from typing import NamedTuple

from lab.events import Backward, Forward, products

# head dimension 64, causal, one CTA; it masks every block
BACKWARD_64_CAUSAL: dict[str, dict[str, int]] = {
    "compute, partial block": {
        "instructions": 483, "MUFU": 64, "FFMA2": 32, "FADD2": 32, "FMUL2": 32, "F2FP": 64,
        "LDTM": 4, "STTM": 4, "LDS": 32, "STS": 8, "SYNCS": 11, "BAR": 0,
    },
    "mma": {"instructions": 227, "UTCHMMA": 32, "UTCBAR": 7},
    "reduce": {"instructions": 59, "LDTM": 2, "STS": 16, "UBLKRED": 2, "BAR": 4},
}  # fmt: skip
# cycles of a search for the maximum of 128 scores, before the first exponential
SEARCH = 64
# a quarter of P is still to come when its products begin
EARLY = 0.25


class BackwardRow(NamedTuple):
    """shared_cycles: of a block of 128 x 128, by the bytes of its plan. model: None where what
    waits for what was not written down."""

    label: str
    dims: tuple[int, int]
    shared_cycles: int
    model: Backward | None


class ForwardRow(NamedTuple):
    """exponentials: of a thread and 128 keys, without those by polynomial."""

    label: str
    dims: tuple[int, int]
    exponentials: int
    is_pair: bool
    stages: int = 2


def _backward(order: str, d: int, over: str, parts: tuple[int, ...]) -> Backward:
    cycles = dict.fromkeys(("S", "dP", "dV", "dK", "dQ"), d * 4)
    return Backward(products(order, cycles), 1024, over, parts, len(parts), claims=False)


BACKWARD = (
    BackwardRow("64", (64, 64), 2432, _backward("S dV' dK' dQ' dP", 64, "", (32768,))),
    BackwardRow("96", (96, 96), 3264, _backward("S dK' dQ' dP dV", 96, "dP", (16384,) * 3)),
    BackwardRow("128, a pair", (128, 128), 3328,
                _backward("S dK' dP dQ' dV", 128, "S", (16384,) * 2)),
    BackwardRow("192/128, a pair", (192, 128), 4096, None),
)  # fmt: skip
FORWARD = (
    ForwardRow("64", (64, 64), 113, False),
    ForwardRow("96", (96, 96), 113, False),
    ForwardRow("128 full, a pair", (128, 128), 105, True),
    ForwardRow("128 causal", (128, 128), 113, False),
    ForwardRow("192/128 causal", (192, 128), 121, False),
)


def forward_model(row: ForwardRow, exponentials: int) -> Forward:
    """exponentials: cycles of a half."""
    d, d_v = row.dims
    more = {"stages": row.stages, "early": EARLY, "search": SEARCH}
    return Forward(4 * d, 4 * d_v, exponentials, **more)  # type: ignore[arg-type]
