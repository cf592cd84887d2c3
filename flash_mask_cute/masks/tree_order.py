"""The order of the nodes of a tree, in which each subtree is a run of them: checked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_mask_cute.masks.builder_arguments import check_int, is_list


def checked_trees(parents: Any, lengths: Any, sizes: Tensor) -> list[list[int]]:
    """The parents of each batch entry, as many as it has lengths.

    Raises:
        TypeError, ValueError: they are no lists of ints, or not as many.
    """
    if not is_list(parents):
        raise TypeError(
            f"parents is a {type(parents).__name__}, not a list of ints; from_tin_tout takes a "
            "forest as a tensor"
        )
    is_nested = len(parents) > 0 and is_list(parents[0])
    trees = [list(tree) if is_list(tree) else tree for tree in parents] if is_nested else [parents]
    if isinstance(lengths, Tensor):
        counts = [sizes.shape[1]] * len(sizes)
    else:
        is_batch = len(lengths) > 0 and is_list(lengths[0])
        counts = [len(row) for row in (lengths if is_batch else [lengths])]
    if len(trees) != len(counts):
        raise ValueError(f"parents has {len(trees)} forests, lengths {len(counts)}")
    for i, (tree, count) in enumerate(zip(trees, counts, strict=True)):
        where = f"parents[{i}]" if is_nested else "parents"
        if not is_list(tree):
            raise TypeError(f"{where}={tree!r} is not a list of ints")
        if len(tree) != count:
            raise ValueError(f"{where} has {len(tree)} nodes, lengths {count}")
        for node, parent in enumerate(tree):
            check_int(f"{where}[{node}]", parent, at_least=-1)
        _check_parents(where, tree)
    return [[int(parent) for parent in tree] for tree in trees]


def _check_parents(name: str, parents: Sequence[int]) -> None:
    """Refuse parents of nodes that are not in depth-first order."""
    path = [-1]  # from no node to the node before
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if not path:
            raise ValueError(
                f"{name}[{node}]={parent} is neither node {node - 1} nor an ancestor of it: nodes "
                "must be in depth-first order"
            )
        path.append(node)


def last_descendants(parents: Sequence[int]) -> list[int]:
    """The last node of each node's subtree."""
    last = list(range(len(parents)))
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            last[parents[node]] = max(last[parents[node]], last[node])
    return last


def check_depth_first(ends: Sequence[int], prefix: str) -> None:
    """Refuse ends of subtrees that are not nested. prefix: how messages name an element."""
    inside: list[int] = []  # the tokens with open subtrees
    for token, end in enumerate(ends):
        if not token < end <= len(ends):
            raise ValueError(
                f"{prefix}{token}]={end} is not a position after token {token} and up to "
                f"{len(ends)}"
            )
        while inside and ends[inside[-1]] <= token:
            inside.pop()
        if inside and end > ends[inside[-1]]:
            outer = inside[-1]
            raise ValueError(
                f"{prefix}{token}]={end} is past {prefix}{outer}]={ends[outer]}, where the subtree "
                f"of token {outer} ends, in which token {token} is: tokens must be in depth-first "
                "order"
            )
        inside.append(token)
