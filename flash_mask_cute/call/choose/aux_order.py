"""Gradients of aux tensors whose sums have a fixed order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.mods.exact_words import MOST_ENTRIES
from flash_mask_cute.mods.traits import find_reads
from flash_mask_cute.runtime.target import Target


def sums_in_order(
    call: AttentionCall, score_mod: Callable, problem: AttentionProblem, wants_aux: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The aux tensors among these whose sums are of integers, so that their order does not matter,
    and those that are summed for each batch entry by itself."""
    reads = find_reads(score_mod, problem, wants_aux)
    entry_aux: tuple[int, ...] = ()
    of_many = reads.of_many
    if call.options.q_start.is_given:
        # queries before position 0 are all at 0, and read the same elements
        of_many = reads.of_any
    elif not problem.varlen_q and call.tensors.q.shape[0] <= MOST_ENTRIES:
        entry_aux = tuple(i for i in of_many if reads.tensors[i].is_once_an_entry)
    return tuple(i for i in of_many if i not in entry_aux), entry_aux


def why_unordered(target: Target) -> str | None:
    """Why gradients of aux tensors have no fixed order of sums, in words; None if they have one."""
    if arch_spec(target).backward.orders_aux:
        return None
    return f"gradients of aux tensors are summed in no fixed order on {arch_spec(target).name}"


def why_unordered_on(device: torch.device) -> str | None:
    """`why_unordered` on a device, before a call is planned."""
    return why_unordered(Target.from_device(device) if device.type == "cuda" else Target.default())
