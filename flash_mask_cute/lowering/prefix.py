"""Keys that every query of a sequence sees by a mask_mod: those before a number.

`(kv_idx < first[b]) | rest`, as of draft tokens, shows all keys before `first`. A kernel asks this
once for a block of keys, and does not call the mask_mod for its scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_mask_cute.lowering.simplify import OR, SIGNS, name_of_node, nodes_behind


def find_prefixes(module: GraphModule) -> tuple[Node, ...]:
    """The conditions, joined by `|`, that bound kv_idx from above by what depends on no head, query
    and key: where one holds, it holds for all keys before."""
    (returned,) = module.graph.find_nodes(op="output")
    _, h_idx, q_idx, kv_idx = module.graph.find_nodes(op="placeholder")[:4]
    found, pending = [], [returned.args[0]]
    while pending:
        node = pending.pop()
        name = name_of_node(node)
        if name in OR:
            pending.extend(reversed(node.args))
        elif name in SIGNS:
            at_most = SIGNS[name][0] < 0
            bounded, bound = node.args if at_most else reversed(node.args)
            given = [bound] if isinstance(bound, Node) else []
            if (
                bounded is kv_idx
                and _keeps_order(kv_idx, bound)
                and not {h_idx, q_idx, kv_idx} & nodes_behind(given)
            ):
                found.append(node)
    return tuple(found)


def _keeps_order(index: Node, bound: Any) -> bool:
    """Whether indices are compared in a dtype in which a larger one is not smaller."""
    held = bound.meta["val"] if isinstance(bound, Node) else bound
    if not isinstance(held, Tensor):
        return True
    dtype = torch.result_type(index.meta["val"], held)
    return dtype.is_floating_point or dtype in (torch.int32, torch.int64)
