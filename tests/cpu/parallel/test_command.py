"""`python -m flash_mask_cute plan`: what it prints is the plan's."""

from __future__ import annotations

import re

import pytest

from flash_mask_cute import builders
from flash_mask_cute.__main__ import main
from flash_mask_cute.parallel import plan


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_it_tells_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [1500, 96, 2500]
    told = lines(capsys, "--seqlen", "4096", "--docs", "1500,96,2500", "--world", "4")
    mask = builders.causal_document(lengths, 4096)
    found = plan(mask, 4, seqlen=4096)
    load = found.load(mask)
    assert told[0].split(maxsplit=1)[1] == "4, 1024 rows each"
    assert f"{load.imbalance:.3f} " in told[1]
    assert f" {max(load.keys)} at most, {sum(load.keys) // 4} on average: " in told[2]
    assert f" {max(load.keys) * 4096 / 2**20:.1f} MiB at most in a forward" in told[3]
    for rank, line in enumerate(told[4:]):
        assert f"{load.tiles[rank]:.0f} tiles" in line
        assert line.endswith("  " + ", ".join(f"{a}-{b}" for a, b in found.rows[rank]))
        drawn = re.findall(r"\|([.#]{64})\|", line)[0]
        rows = found.index(rank).tolist()
        assert [i for i, x in enumerate(drawn) if x == "#"] == sorted({x // 64 for x in rows})


def test_other_masks(capsys: pytest.CaptureFixture[str]) -> None:
    window = lines(capsys, "--seqlen", "2048", "--world", "2", "--window", "100")
    assert " 100 at most" in window[2]
    assert window[4].endswith("  0-1024")
    full = lines(capsys, "--seqlen", "2048", "--world", "2", "--full", "--bytes-per-key", "1048576")
    assert "100.0 %" in full[2] and " 1024.0 MiB at most" in full[3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seqlen", "1000"], "pad the sequence to 1024 tokens"),
        (["--seqlen", "1024", "--docs", "2000"], "lengths adds up to 2000, more than seqlen=1024"),
        (["--seqlen", "1024", "--full", "--window", "3"], "--full rules it out"),
        (["--seqlen", "1024", "--docs", "5,x"], "'5,x' is no list of lengths: 40000,25072"),
        (["--seqlen", "1024", "--bytes-per-key", "0"], "--bytes-per-key=0 is less than 1"),
        ([], "--seqlen"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as exit_of:
        main(["plan", *arguments])
    assert exit_of.value.code == 2 and text in capsys.readouterr().err


def test_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans"]) == 2
    assert "plan OPTIONS]; got plans" in capsys.readouterr().err
