"""The bundles of a call, and their other forms."""

from __future__ import annotations

from typing import Any

import pytest
from planned import arguments_of

from flash_mask_cute import interface
from flash_mask_cute.call import given_outputs
from flash_mask_cute.call.arguments import (
    NO_BACKWARD_OPTIONS,
    NO_GRADIENTS,
    NO_LENGTHS,
    NO_OPTIONAL,
    AttentionCall,
    CallLengths,
    Direction,
    Gradients,
    OptionalTensors,
    Options,
    Tensors,
    keywords_of,
    lengths_of,
    optional_of,
)
from flash_mask_cute.call.check.inputs import inputs_of
from flash_mask_cute.call.settings import FwdConfig


def test_tensors_come_back_from_their_other_forms() -> None:
    """A distinct value in every place."""
    kinds: Any = Tensors, CallLengths, OptionalTensors, Gradients
    names = (name for kind in kinds for name in kind._fields)
    given: dict[str, Any] = {
        name: object() for name in names if name not in ("lengths", "optional", "gradients")
    }
    tensors = Tensors.from_names(given)
    assert tensors.by_name() == given
    assert sorted(map(id, tensors.flat())) == sorted(map(id, given.values()))


def test_a_call_without_lengths_has_always_the_same() -> None:
    """By which its key needs no look at them."""
    assert lengths_of(None, None, None, None, None, None) is NO_LENGTHS
    for i, name in enumerate(CallLengths._fields):
        given: list[Any] = [None] * len(CallLengths._fields)
        given[i] = object()
        assert lengths_of(*given)._asdict() == dict.fromkeys(CallLengths._fields) | {name: given[i]}
    assert optional_of([None] * len(OptionalTensors._fields)) is NO_OPTIONAL


def test_a_forward_reads_or_writes_each_tensor() -> None:
    """Where its outputs are looked for in its inputs, none of these is left out."""
    none: Any = None
    call = AttentionCall(Tensors(none, none, none))
    outputs = given_outputs._OUTPUTS[Direction.FORWARD]
    names = {*call.tensors.by_name()} - {*Gradients._fields}
    assert {*inputs_of(call), *outputs} == names


def test_each_keyword_of_a_forward_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles are made by the order of their fields."""
    names = {*keywords_of(Direction.FORWARD)} - {"q", "k", "v"}
    given: dict[str, Any] = {name: object() for name in names}
    given |= {"softmax_scale": 0.5, "causal": True, "q_start": 3, "config": FwdConfig(tile_n=64)}
    monkeypatch.setattr(interface, "forward", lambda call: call)
    call: Any = interface._flash_attn_fwd("q", "k", "v", **given)  # type: ignore[arg-type]
    assert arguments_of(call) == given | {"q": "q", "k": "k", "v": "v"}
    assert len(call.tensors) == len(Tensors._fields) and len(call.options) == len(Options._fields)
    assert call.tensors.gradients is NO_GRADIENTS and not call.options.is_recorded
    assert (call.backward, call.direction) == (NO_BACKWARD_OPTIONS, Direction.FORWARD)
