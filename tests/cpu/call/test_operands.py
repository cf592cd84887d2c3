"""What is written by hand for speed, held to the tables of operands and arguments by name."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from flash_mask_cute.autograd import torch_ops
from flash_mask_cute.call import lookup
from flash_mask_cute.call.arguments import (
    BackwardOptions,
    CallLengths,
    Direction,
    Gradients,
    Masks,
    OptionalTensors,
    Options,
    Tensors,
    keywords_of,
)
from flash_mask_cute.call.backward import KernelBackward
from flash_mask_cute.call.forward import KernelForward
from flash_mask_cute.call.kernel_operands import BACKWARD, FORWARD, STREAM, KernelOperand
from flash_mask_cute.call.operands import OF_OPERATORS
from flash_mask_cute.flash_bwd import FlashAttentionBackwardSm90, FlashAttentionBackwardSm100
from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90, FlashAttentionForwardSm100
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

# names of a launch that the tables call otherwise
OF_LAUNCH = {"q_starts": "q_start", "of_kernel": "out"}


def syntax(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def last_name(node: ast.AST) -> str:
    """`scale` of `self._scale`, `counter` of `tile_counter(q, index)`."""
    if isinstance(node, ast.Starred):
        # several, or none
        return last_name(getattr(node.value, "orelse", node.value))
    if isinstance(node, ast.IfExp):
        return last_name(node.body)
    if isinstance(node, ast.Call):
        return last_name(node.func).removeprefix("tile_")
    return node.attr.lstrip("_") if isinstance(node, ast.Attribute) else ast.unparse(node)


@pytest.mark.parametrize(
    ("kernel", "table"),
    [
        (FlashAttentionForwardSm90, FORWARD),
        (FlashAttentionForwardSm100, FORWARD),
        (FlashAttentionBackwardSm90, BACKWARD),
        (FlashAttentionBackwardSm100, BACKWARD),
    ],
)
def test_kernels_take_the_operands_of_the_table(
    kernel: Any, table: tuple[KernelOperand, ...]
) -> None:
    taken = [name for name in inspect.signature(kernel.__call__).parameters if name != "self"]
    assert taken == [row.parameter for row in table]


@pytest.mark.parametrize(
    ("prepared", "function", "table"),
    [(KernelForward, "_function", FORWARD), (KernelBackward, "main", BACKWARD)],
)
def test_launches_pass_the_operands_of_the_table(
    prepared: Any, function: str, table: tuple[KernelOperand, ...]
) -> None:
    (launch,) = (
        node
        for node in ast.walk(syntax(prepared.__call__))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function)
    )
    assert not launch.keywords
    passed = [OF_LAUNCH.get(name, name) for name in map(last_name, launch.args)]
    if passed[-1] == "optional_of":
        # all of them, in the order of their bundle
        passed[-1:] = OptionalTensors._fields
    assert passed == [row.argument for row in table if row.argument != STREAM]


def unpacked(function: Callable[..., Any]) -> list[list[str]]:
    """The names of the tuples that a function unpacks, of those inside others too."""
    return [
        [ast.unparse(x) for x in node.elts]
        for node in ast.walk(syntax(function))
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)
    ]


@pytest.mark.parametrize(
    "function", [lookup.find_fwd, lookup.find_bwd, KernelForward.__call__, KernelBackward.__call__]
)
def test_tensors_are_unpacked_in_their_order(function: Callable[..., Any]) -> None:
    seen = 0
    for bundle in (Tensors, CallLengths, OptionalTensors, Gradients):
        fields = ["sink" if name == "learnable_sink" else name for name in bundle._fields]
        for names in unpacked(function):
            is_bundle = len(names) == len(fields) and not set(names).isdisjoint(fields)
            if is_bundle and names[0] in ("_", fields[0]):
                kept = [a.startswith(("_", "(")) for a in names]
                assert names == [a if k else b for a, b, k in zip(names, fields, kept, strict=True)]
                seen += 1
    assert seen >= 1


def test_a_wrong_order_is_noticed() -> None:
    def launch(self: Any, q: Any, k: Any) -> None:
        self._function(k, q)

    (call,) = (node for node in ast.walk(syntax(launch)) if isinstance(node, ast.Call))
    assert [last_name(x) for x in call.args] == ["k", "q"]


@pytest.mark.parametrize(
    ("direction", "call"),
    [(Direction.FORWARD, _flash_attn_fwd), (Direction.BACKWARD, _flash_attn_bwd)],
)
def test_host_calls_take_what_the_bundles_hold(
    direction: Direction, call: Callable[..., Any]
) -> None:
    assert set(inspect.signature(call).parameters) == set(keywords_of(direction))


def test_operators_take_every_argument_of_a_call() -> None:
    """As it is, in another form, or by position before them."""
    bundles = {
        "lengths": CallLengths,
        "optional": OptionalTensors,
        "options": Options,
        "backward": BackwardOptions,
    }
    for row in OF_OPERATORS:
        assert row.name in bundles[row.bundle]._fields
    by_position = {"q", "k", "v", "learnable_sink", *torch_ops._RESULTS}
    made = {"max_scores", "dq", "dk", "dv", "dsink", "daux"}
    # the last two: block lists are four tensors, and a trace always returns LSE
    others = {"block_sparse_tensors_torch", "return_lse"}
    none: Any = None
    names = {*Tensors(none, none, none).by_name(), *Masks._fields}
    names |= {*Options._fields, *BackwardOptions._fields}
    assert names == {*torch_ops._ARGUMENTS, *by_position, *made, *others} & names
