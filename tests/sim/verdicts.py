"""What the software GPU says about a kernel, run by run."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any
from unittest.mock import patch

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch import Tensor

# None: asynchronous work completes at once. A seed: at random later points, with warps shuffled.
SEEDS = (None, 1, 2, 3, 4, 5, 6, 7, 8)
SILENCE = "silence"
WRONG_RESULT = "wrong result"


def verdicts(
    simulator: ModuleType,
    launch: Any,
    inputs: tuple[Tensor, ...],
    expected: Tensor,
    slow: Collection[int] = (),
) -> set[str]:
    """What was reported about launch(*inputs, out, stream), over all SEEDS.

    inputs, expected: fp32 vectors. slow: warps that run only when no other can. Of each run:
    SILENCE if `out` is as expected and nothing was said, else WRONG_RESULT, the texts of warnings,
    or the name of the error and what it says first.
    """
    out = expected.new_empty(expected.shape)
    vectors = [
        make_fake_compact_tensor(cutlass.Float32, (x.numel(),), assumed_align=16)
        for x in (*inputs, out)
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(launch, *vectors, stream, options="--enable-tvm-ffi")
    reported = set()
    for seed in SEEDS:
        out.fill_(float("nan"))
        try:
            with patch.dict(simulator.OPTIONS, delay=seed, slow=slow):
                compiled(*inputs, out)
        except simulator.SimError as error:
            reported.add(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        found = {text for text, _, _ in compiled.last["warnings"]}
        if not out.equal(expected):
            found.add(WRONG_RESULT)
        reported |= found or {SILENCE}
    return reported
