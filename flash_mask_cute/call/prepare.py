"""What runs a call: decided and compiled once, found again by its key."""

from __future__ import annotations

from torch import Tensor

from flash_mask_cute.call.arguments import (
    BwdExtras,
    BwdOperands,
    BwdSettings,
    Extras,
    FwdOperands,
    Masks,
    Settings,
)
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.packed import (
    by_documents,
    packed_operands,
    rows_follow,
    rows_of,
    with_gradients,
)
from flash_mask_cute.call.plan import compile_bwd_call, compile_call
from flash_mask_cute.call.prepared import CpuLaunch, EmptyLaunch, KernelLaunch, Launch
from flash_mask_cute.call.prepared_bwd import (
    BwdCpuLaunch,
    BwdEmptyLaunch,
    BwdKernelLaunch,
    BwdLaunch,
)
from flash_mask_cute.call.prepared_packed import PackedBwdLaunch, PackedLaunch
from flash_mask_cute.call.resolve import (
    ResolvedBwd,
    ResolvedFwd,
    call_by_documents,
    packs_documents,
    resolve_bwd,
    resolve_fwd,
)
from flash_mask_cute.call.validate import refuse_transforms
from flash_mask_cute.mask_prep.mask_bits import DocumentStoring
from flash_mask_cute.runtime.target import Target


def prepare_fwd(
    operands: FwdOperands,
    extras: Extras,
    masks: Masks,
    settings: Settings,
    target: Target | None = None,
) -> Launch:
    """What runs a call. target: whose kernels it is to run, instead of those for q's device."""
    refuse_transforms()
    resolved, resolved_masks = resolve_fwd(operands, extras, masks, settings, target)
    if packs_documents(operands, [extras.out], extras, masks, settings):
        needs_lse = resolved.problem.needs_lse
        packed = call_by_documents(operands, extras, masks, settings, needs_lse)
        return PackedLaunch(prepare_fwd(*packed, target), needs_lse, by_mask=True)
    if target is None and not operands.q.is_cuda:
        return CpuLaunch(resolved, resolved_masks)
    target = target or Target.of(operands.q.device)
    if resolved.shapes.is_empty:
        return EmptyLaunch(resolved)
    return kernel_launch(resolved, resolved_masks, target, operands, extras.out)


def kernel_launch(
    resolved: ResolvedFwd,
    resolved_masks: ResolvedMasks,
    target: Target,
    operands: FwdOperands,
    out: Tensor | None,
) -> Launch:
    """The launch of a call that has queries and keys, its kernels compiled or from the cache."""
    can_pack = rows_follow(*operands, out)
    resolved, compiled, storing = compile_call(resolved, resolved_masks, target, can_pack)
    if not isinstance(storing, DocumentStoring):
        return KernelLaunch(resolved, compiled.function, *operands, out, storing)
    rows = FwdOperands._make(map(rows_of, operands))
    launch = KernelLaunch(resolved, compiled.function, *rows, rows_of(out), storing)
    return PackedLaunch(launch, resolved.problem.needs_lse, by_mask=False)


def prepare_bwd(
    operands: BwdOperands,
    extras: BwdExtras,
    masks: Masks,
    settings: BwdSettings,
    target: Target | None = None,
) -> BwdLaunch:
    """As `prepare_fwd`."""
    refuse_transforms()
    resolved, resolved_masks = resolve_bwd(operands, extras, masks, settings, target)
    q = operands.q
    if packs_documents(operands, [operands.out, *extras[6:9]], extras, masks, settings):
        batch, seqlen = q.shape[:2]
        settings = settings._replace(max_seqlen_q=seqlen, max_seqlen_k=seqlen)
        extras, masks = by_documents(with_gradients(operands, extras), masks, batch)
        launch = prepare_bwd(*packed_operands(operands, extras), masks, settings, target)
        return PackedBwdLaunch(launch, by_mask=True)
    if target is None and not q.is_cuda:
        return BwdCpuLaunch(resolved, resolved_masks)
    target = target or Target.of(q.device)
    if resolved.shapes.is_empty:
        return BwdEmptyLaunch(resolved)
    return bwd_kernel_launch(resolved, resolved_masks, target, operands, extras)


def bwd_kernel_launch(
    resolved: ResolvedBwd,
    resolved_masks: ResolvedMasks,
    target: Target,
    operands: BwdOperands,
    extras: BwdExtras,
) -> BwdLaunch:
    """As `kernel_launch`."""
    can_pack = rows_follow(*operands[:4], extras.dq, extras.dk, extras.dv)
    resolved, kernels, storing = compile_bwd_call(resolved, resolved_masks, target, can_pack)
    if not isinstance(storing, DocumentStoring):
        return BwdKernelLaunch(resolved, kernels, operands, extras, storing)
    packed = packed_operands(operands, with_gradients(operands, extras))
    return PackedBwdLaunch(BwdKernelLaunch(resolved, kernels, *packed, storing), by_mask=False)
