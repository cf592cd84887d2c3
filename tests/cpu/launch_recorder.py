"""What the public call does up to the kernel, without a GPU."""

from __future__ import annotations

from typing import Any

from planned import planned

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import KernelForward
from flash_mask_cute.runtime.target import Target


class Recorder:
    """Stands for the compiled kernel; `prepared` holds the plan of each miss."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.prepared: list[ExecutionPlan] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)

    def prepare(self, call: AttentionCall) -> KernelForward:
        found = planned(call, Target.default())
        found = found.without_bits or found
        self.prepared.append(found)
        return KernelForward(found, self)

    def given(self, call: int = -1) -> dict[str, Any]:
        """The mask arguments of a kernel call by name."""
        args = self.calls[call]
        names = (
            *("columns", "block_size", "bits", "mask_bits", "query_chunk", "lse_low", "max_scores"),
            *("q_start", "partials", "kv_batch_idx", "leftpad_k", "causal_per_seq", "k_descale"),
            "v_descale",
        )
        named = dict.fromkeys(names) | dict(zip(names, args[18:], strict=False))
        return {"lists": args[14], "aux": args[15], **named}
