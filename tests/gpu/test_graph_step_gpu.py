"""The training step that docs/pytorch.md shows, captured in a CUDA graph on the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from example_modules import ROOT, load_example


def test_replays_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay is one step from where the last one left the parameters, as eager steps are."""
    page = (ROOT / "docs" / "pytorch.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.S | re.M)
    torch.manual_seed(0)
    path = tmp_path / "graph_step.py"
    path.write_text("\n".join(blocks))
    module = load_example(path, monkeypatch)
    assert module.train is not module.step and module.losses[-1] < module.losses[0]
    replayed, eager = float(module.train()), float(module.step())
    # the parameters that an eager step reads are those that the replay wrote
    assert eager < replayed
