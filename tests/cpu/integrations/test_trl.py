"""Tree attention with TRL's arguments, against gathered paths in float64 and TRL's own rows."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from drawn_builders import draw_tree
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

from flash_mask_cute.integrations import trl

MODULE = torch.nn.Module()


def row_of(parents: list[int], lengths: list[int]) -> dict[str, Any]:
    """TRL's arguments for segments in depth-first order."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    paths: list[list[int]] = []
    for segment, parent in enumerate(parents):
        own = list(range(starts[segment], starts[segment + 1]))
        paths.append((paths[parent] if parent >= 0 else []) + own)
    ends = torch.tensor([0, *(len(path) for path in paths)]).cumsum(0)
    return {
        "tree_kv_index": torch.tensor([token for path in paths for token in path]),
        "tree_cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "tree_cu_seqlens_k": ends.int(),
        "tree_max_seqlen_q": max(lengths),
        "tree_max_seqlen_k": max(map(len, paths)),
    }


def by_paths(
    q: Tensor, k: Tensor, v: Tensor, row: dict[str, Any], window: int | None, sink: Tensor | None
) -> Tensor:
    """(tokens, heads, d) each: segment by segment, over the keys of its path. sink: (heads,)."""
    starts, ends = row["tree_cu_seqlens_q"].tolist(), row["tree_cu_seqlens_k"].tolist()
    parts = []
    for i in range(len(starts) - 1):
        path = row["tree_kv_index"][ends[i] : ends[i + 1]]
        of_rows = q[starts[i] : starts[i + 1]]
        keys, values = (x[path].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        place = len(path) - len(of_rows) + torch.arange(len(of_rows))[:, None]
        distance = place - torch.arange(len(path))
        visible = (distance >= 0) & (distance < (window or len(path) + 1))
        scores = torch.einsum("qhd,khd->hqk", of_rows, keys) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink[:, None, None].expand(-1, len(of_rows), 1)), -1)
        weights = scores.softmax(-1)[..., : len(path)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)


def check(row: dict[str, Any], window: int | None = None, has_sink: bool = False) -> None:
    tokens = int(row["tree_cu_seqlens_q"][-1])
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, heads, 16, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    given = [q, k, v]
    sink = torch.randn(4, dtype=torch.float64, generator=generator) if has_sink else None
    if sink is not None:
        given.append(sink.requires_grad_())
    expected = by_paths(q, k, v, row, window, sink)
    heads_first = (x[None].transpose(1, 2) for x in (q, k, v))
    out, weights = trl.tree_attention(
        MODULE, *heads_first, None, **row, sliding_window=window, s_aux=sink
    )
    assert weights is None
    assert torch.allclose(out[0], expected, atol=1e-12)
    dout = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = (torch.autograd.grad(x, given, dout) for x in (out[0], expected))
    for found, right in zip(*gradients, strict=True):
        assert torch.allclose(found, right, atol=2e-6)


@pytest.mark.parametrize(("window", "has_sink"), [(None, False), (5, False), (5, True)])
def test_random_rows(window: int | None, has_sink: bool) -> None:
    rng = random.Random(7)
    for _ in range(12):
        segments = rng.randint(1, 9)
        check(
            row_of(draw_tree(rng, segments), [rng.randint(1, 9) for _ in range(segments)]),
            window,
            has_sink,
        )


def test_layers_share_a_tree() -> None:
    row = row_of([-1, 0, 0], [5, 3, 4])
    given = row["tree_kv_index"], row["tree_cu_seqlens_q"], row["tree_cu_seqlens_k"]
    tree = trl._tree_of(*given, 12)
    assert trl._tree_of(*given, 12) is tree
    assert trl._tree_of(*(x.clone() for x in given), 12) is not tree
    assert tree.mask.startend_row_indices.flatten().tolist() == [12] * 5 + [8] * 3 + [12] * 4
    assert tree.depths.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]


def test_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainer registers its function by name, after the user has registered ours."""
    names: dict[str, Any] = {}
    packing = ModuleType(trl._PACKING)
    vars(packing).update(TREE_ATTENTION="tree_fa3", tree_attention=None)
    packing.register_tree_attention = lambda: names.update(tree_fa3=packing.tree_attention)  # type: ignore[attr-defined]
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, trl._PACKING, packing)
    for _ in range(2):
        assert trl.register_tree_attention() == "tree_fa3"
        assert names["tree_fa3"] is trl.tree_attention
    packing.register_tree_attention()
    assert names["tree_fa3"] is trl.tree_attention
    del packing.tree_attention
    with pytest.raises(ImportError, match="has no tree_attention: another release of trl"):
        trl.register_tree_attention()
    monkeypatch.setitem(sys.modules, trl._PACKING, None)
    with pytest.raises(ImportError, match="pip install -U trl"):
        trl.register_tree_attention()


def test_refusals() -> None:
    x = torch.zeros(2, 1, 12, 8)
    row = row_of([-1, 0, 0], [5, 3, 4])
    with pytest.raises(ValueError, match="query has 2 rows"):
        trl.tree_attention(MODULE, x, x, x, None, **row)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        trl.tree_attention(MODULE, x[:1], x[:1], x[:1], x, **row)
    with pytest.raises(NotImplementedError, match="dropout=0.5 in training"):
        trl.tree_attention(MODULE.train(), x[:1], x[:1], x[:1], None, **row, dropout=0.5)
    with pytest.raises(NotImplementedError, match="Module gives position_bias, which tree attent"):
        trl.tree_attention(MODULE, x[:1], x[:1], x[:1], None, **row, position_bias=x)


def their_packing() -> Any:
    """The module of TRL, by its file: its package needs what is not needed here."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    path = Path(found.origin).parent / "experimental" / "async_grpo" / "packing.py"
    spec = importlib.util.spec_from_file_location("packing_of_trl", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_that_trl_packs() -> None:
    packing = their_packing()
    rng = random.Random(1)
    row = packing.TreeRow()
    for group in range(2):
        prompt = [rng.randint(3, 9) for _ in range(11)]
        for _ in range(4):
            tokens = prompt[: rng.randint(6, 11)] + [rng.randint(3, 5) for _ in range(9)]
            ids = torch.tensor(tokens)
            row.add(
                {
                    "input_ids": ids,
                    "completion_mask": torch.ones_like(ids),
                    "old_log_probs": torch.zeros(len(ids)),
                    "advantage": 1.0,
                    "group_id": group,
                }
            )
    packed = SimpleNamespace(**row.pack())
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    given = {name: getattr(packed, name) for name in names}
    longest_q, longest_k = packed.tree_max_seqlens.tolist()
    given |= {"tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}
    tree = trl._tree_of(*(given[name] for name in names), len(packed.input_ids))
    assert torch.equal(tree.depths.long(), packed.position_ids)
    for window in (None, 6):
        check(given, window)
