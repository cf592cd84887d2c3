"""What the public call does up to the kernel, without a GPU."""

from __future__ import annotations

from typing import Any

from flash_mask_cute.call import resolve
from flash_mask_cute.call.arguments import Extras, FwdOperands, Masks, Settings
from flash_mask_cute.call.prepared import KernelLaunch
from flash_mask_cute.call.resolve import ResolvedFwd


class Recorder:
    """Stands for the compiled kernel. `prepared` holds what each miss resolved to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.prepared: list[ResolvedFwd] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)

    def prepare(
        self, operands: FwdOperands, extras: Extras, masks: Masks, settings: Settings
    ) -> KernelLaunch:
        resolved, _ = resolve.resolve_fwd(operands, extras, masks, settings)
        self.prepared.append(resolved)
        return KernelLaunch(resolved, self, *operands, extras.out)

    def given(self, call: int = -1) -> dict[str, Any]:
        """The mask arguments of a kernel call by name."""
        args = self.calls[call]
        names = ("columns", "block_size", "bits", "stored", "part", "lse_low")
        return {"lists": args[14], "aux": args[15], **dict(zip(names, args[18:], strict=True))}
