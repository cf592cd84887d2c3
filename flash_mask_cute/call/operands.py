"""The arguments of a call that torch operators take as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_mask_cute.call.arguments import AttentionCall, CallLengths, OptionalTensors


class OperatorArgument(NamedTuple):
    """An argument of a call that an operator takes by the same name. schema: its type in the
    operator. bundle: the part of the call that holds it."""

    name: str
    schema: str
    bundle: str


# In the order of the operators. What is not here they take in another form, or by position
# (`autograd/torch_ops.py`).
OF_OPERATORS = (
    *(OperatorArgument(name, "Tensor?", "lengths") for name in CallLengths._fields),
    *(OperatorArgument(name, "Tensor?", "optional") for name in OptionalTensors._fields),
    OperatorArgument("max_seqlen_q", "SymInt?", "options"),
    OperatorArgument("max_seqlen_k", "SymInt?", "options"),
    OperatorArgument("softmax_scale", "float?", "options"),
    OperatorArgument("causal", "bool", "options"),
    OperatorArgument("window_size_left", "SymInt?", "options"),
    OperatorArgument("window_size_right", "SymInt?", "options"),
    OperatorArgument("softcap", "float", "options"),
    OperatorArgument("num_splits", "int", "options"),
    OperatorArgument("seqlen_k_per_split", "int?", "options"),
    OperatorArgument("pack_gqa", "bool?", "options"),
    OperatorArgument("is_recorded", "bool", "options"),
    OperatorArgument("deterministic", "bool", "backward"),
)


def plain_arguments(call: AttentionCall) -> dict[str, Any]:
    """By name, what operators take of a call as it is."""
    bundles: dict[str, Any] = {
        "lengths": call.tensors.lengths,
        "optional": call.tensors.optional,
        "options": call.options,
        "backward": call.backward,
    }
    return {row.name: getattr(bundles[row.bundle], row.name) for row in OF_OPERATORS}


def of_bundle(bundle: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of an operator, by name, those that a bundle of the call holds."""
    return {row.name: given[row.name] for row in OF_OPERATORS if row.bundle == bundle}
