"""The arguments of a call that torch operators take as they are.

A new optional tensor of a call is a field of `Tensors` or `Lengths`, a row here, and a row of the
operands of the kernels that read it (`call/build/kernel_operands.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_mask_cute.call.arguments import AttentionCall


class OperatorArgument(NamedTuple):
    """An argument of a call that an operator takes as it is, by the same name.

    schema: its type in the operator. bundle: what of the call holds it, `lengths` being those of
    its tensors.
    """

    name: str
    schema: str
    bundle: str


# In the order of the operators. What is not here they take in another form, or by position
# (`autograd/torch_ops.py`).
OF_OPERATORS = (
    OperatorArgument("cu_seqlens_q", "Tensor?", "lengths"),
    OperatorArgument("cu_seqlens_k", "Tensor?", "lengths"),
    OperatorArgument("seqused_q", "Tensor?", "lengths"),
    OperatorArgument("seqused_k", "Tensor?", "lengths"),
    OperatorArgument("page_table", "Tensor?", "lengths"),
    OperatorArgument("q_starts", "Tensor?", "lengths"),
    OperatorArgument("kv_batch_idx", "Tensor?", "lengths"),
    OperatorArgument("leftpad_k", "Tensor?", "lengths"),
    OperatorArgument("causals", "Tensor?", "tensors"),
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
        "tensors": call.tensors,
        "lengths": call.tensors.lengths,
        "options": call.options,
        "backward": call.backward,
    }
    return {row.name: getattr(bundles[row.bundle], row.name) for row in OF_OPERATORS}


def of_bundle(bundle: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of an operator, by name, those that a bundle of the call holds."""
    return {row.name: given[row.name] for row in OF_OPERATORS if row.bundle == bundle}
