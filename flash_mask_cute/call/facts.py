"""`CallFacts`: what is known of a call before anything is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch

from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.check.validate import check_inputs
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.problem import FoldedWindow, FwdShapes, fold_window
from flash_mask_cute.call.settings import given_fields
from flash_mask_cute.call.tiles.arch import ArchSpec, arch_spec
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.stream_k import DECODE_ROWS
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.masks.q_start import QStart
from flash_mask_cute.runtime.target import Target

# what kernels take; the CPU path takes more
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Backend(Enum):
    """What runs a call. EMPTY: there are no queries or no keys, so nothing is launched."""

    CPU = "cpu"
    EMPTY = "empty"
    KERNEL = "kernel"


def target_of(q: torch.Tensor) -> Target:
    """The target of a call's kernels or, on the CPU, of its tiles."""
    return Target.from_device(q.device) if q.is_cuda else Target.default()


@dataclass(frozen=True)
class CallFacts:
    """A checked call in the form of the library. Nothing changes it later. The problem and the plan
    hold what steps of the plan decided.

    target: of the kernels, or of the tiles on the CPU. masks: those beyond causal and window.
    window: causal masking and window sides that have an effect. causal_each: a kernel asks which
    sequences are causal. start: the argument q_start, NONE if it has no effect. second_walk:
    "statistics" or "tangent", whose kernel is planned in place of the forward.
    """

    call: AttentionCall
    target: Target
    backend: Backend
    shapes: FwdShapes
    masks: ResolvedMasks
    window: FoldedWindow
    causal_each: bool
    start: QStart
    second_walk: str | None = None

    @staticmethod
    def of(call: AttentionCall, target: Target | None) -> CallFacts:
        """Check a call, and read its facts. target: as for `plan`, whose errors it raises."""
        shapes, options, q = check_inputs(call), call.options, call.tensors.q
        masks = ResolvedMasks.of(call, shapes)
        sides = options.window_size_left, options.window_size_right
        window = fold_window(options.causal or masks.is_causal, *sides)
        causal_each, window = _with_causal_sequences(call.tensors.optional.causal_per_seq, window)
        backend = Backend.EMPTY if shapes.is_empty else Backend.KERNEL
        if not q.is_cuda and (target is None or q.dtype not in KERNEL_DTYPES):
            backend = Backend.CPU
        start = _first_position(call, shapes, masks, window)
        target = target or target_of(q)
        return CallFacts(call, target, backend, shapes, masks, window, causal_each, start)

    @property
    def is_forward(self) -> bool:
        return self.call.direction is Direction.FORWARD

    @property
    def spec(self) -> ArchSpec:
        spec = arch_spec(self.target)
        forward = None if self.second_walk is None else getattr(spec, self.second_walk)
        return spec if forward is None else replace(spec, forward=forward)

    @property
    def needs_lse(self) -> bool:
        x = self.call.tensors
        return self.call.options.return_lse or not (x.lse is x.lse_low is None)

    @property
    def has_config(self) -> bool:
        """Whether the caller set a field of the configuration."""
        return bool(given_fields(self.call.config))

    @property
    def has_tiles(self) -> bool:
        """Whether the caller set a field that tiles depend on."""
        return bool(given_fields(self.call.config).keys() - {"skip_blocks"})

    @property
    def is_ordered(self) -> bool:
        """Whether the caller fixed the order of the sums of a forward."""
        return self.call.options.seqlen_k_per_split is not None

    @cached_property
    def may_pack(self) -> bool:
        """Whether query heads of a group can share a tile."""
        shapes, masks = self.shapes, self.masks
        can_pack = shapes.heads_q // shapes.heads_kv <= self.spec.forward.packed_rows
        is_plain = can_pack and masks.unpackable(shapes) is None
        return is_plain and self.call.options.pack_gqa is not False

    @property
    def decode_rows(self) -> int:
        """Query rows of a sequence that share keys in a forward."""
        heads = self.shapes.heads_q // self.shapes.heads_kv
        return self.shapes.seqlen_q * (padded_group(heads) if self.may_pack else 1)

    @property
    def decodes_whole(self) -> bool:
        """Whether one pass over keys in rows takes a tile of decoding. A forward that autograd
        records keeps the tiles of training."""
        is_recorded, kernel = self.call.options.is_recorded, self.spec.forward
        if is_recorded or self.has_tiles or not kernel.decodes_whole:
            return False
        return self.decode_rows <= DECODE_ROWS


def _with_causal_sequences(
    causal_per_seq: torch.Tensor | None, window: FoldedWindow
) -> tuple[bool, FoldedWindow]:
    """Whether a kernel asks which sequences are causal, and the window without that right side."""
    right = window.right
    if causal_per_seq is None or window.is_causal or (right is not None and right <= 0):
        return False, window
    return True, window._replace(right=OPEN_WINDOW if right is None else right)


def _first_position(
    call: AttentionCall, shapes: FwdShapes, masks: ResolvedMasks, window: FoldedWindow
) -> QStart:
    """The argument q_start, NONE if it has no effect."""
    start = call.options.q_start
    if not masks.rows_fit(shapes.seqlen_q):
        return start
    plain = (masks.score_mod, masks.mask_mod, masks.column_mask, masks.block_lists)
    return start.fold(
        is_banded=window.is_causal or window.sides != (None, None),
        counts_rows=any(y is not None for y in plain),
        is_square=shapes.seqlen_q == shapes.seqlen_k and not call.has_lengths,
    )
