"""bench.selected: what a case chooses, and what is counted of it. Times need a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import selected
from bench.selected import Case, choose, count

CASE = Case("small", 512, (8, 2), block=32, k=5, r=0.9)


def test_a_choice_has_the_first_block_and_its_own() -> None:
    choice = choose(CASE, CASE.n, "cpu")
    assert choice.shape == (1, 2, 512, 5)
    for head in range(2):
        for token in range(512):
            numbers = [x for x in choice[0, head, token].tolist() if x >= 0]
            own = token // 32
            assert {0, own} <= set(numbers) and max(numbers) == own
            assert len(numbers) == len(set(numbers)) == min(5, own + 1)


def test_counts_are_those_of_a_dense_mask() -> None:
    choice = choose(CASE, CASE.n, "cpu")
    seen = torch.zeros(2, 512, 512, dtype=torch.bool)
    for head, token in ((h, t) for h in range(2) for t in range(512)):
        for number in choice[0, head, token].tolist():
            if number >= 0:
                seen[head, token, number * 32 : min(number * 32 + 32, token + 1)] = True
    found = count(CASE, choice)
    assert found.visible == pytest.approx(seen.sum().item() / 2)
    tiles = seen.view(2, 16, 32, 16, 32).any(4).any(2)  # 128 rows of 4 heads each
    assert found.union == pytest.approx(tiles.sum(-1).float().mean().item())
    assert 0.5 < found.shared < 1


@pytest.mark.parametrize("name", ["msa-32k", "moba", "decode-4"])
def test_a_dry_run_compares(monkeypatch, capsys, name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.selected", "--dry", "--cases", name])
    assert selected.main() == 0
    rows = [x for x in capsys.readouterr().out.splitlines() if "peer=ours " in x]
    assert rows and all("error=0.0" in x for x in rows)
