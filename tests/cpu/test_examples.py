"""Every example runs without a GPU and notices a wrong result."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import ROOT, load_example

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# Those whose kernels run on the software GPU, which needs a process of its own; and by what name a
# module of them calls what runs the kernels.
ON_SOFTWARE_GPU = {"07_native_api": "DocumentAttention.__call__", "10_native_backward": "backward"}
ON_CPU = [path for path in EXAMPLES if path.stem not in ON_SOFTWARE_GPU]
# Runs an example twice; the second time results are wrong, if slightly.
TWICE = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
module.main()
owner, _, name = sys.argv[2].rpartition(".")
owner = getattr(module, owner) if owner else module
attend = getattr(owner, name)
def slightly_wrong(*args):
    first, *others = attend(*args)
    return first * 1.1, *others
setattr(owner, name, slightly_wrong)
print("now wrong")
module.main()
"""


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, on a machine that has no GPU as far as it can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return load_example(path, monkeypatch)


@pytest.mark.shares(2)
@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.stem)
def test_runs_without_a_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(path, monkeypatch).main()
    assert "largest error" in capsys.readouterr().out


def test_decoding_with_the_bits_of_a_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (x for x in EXAMPLES if x.stem == "11_decode")
    module = load(path, monkeypatch)
    module.main("--same-bits")
    assert "largest error" in capsys.readouterr().out
    monkeypatch.setattr(module.PagedCache, "rows_unlike_a_forward", lambda _: 2)
    with pytest.raises(SystemExit, match="2 of 3 rows have other bits"):
        module.main("--same-bits")


def test_decoding_over_a_cache_in_fp8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (x for x in EXAMPLES if x.stem == "11_decode")
    module = load(path, monkeypatch)
    module.main("--fp8", "--same-bits")
    assert "largest error" in capsys.readouterr().out
    # a dense model that does not round is told apart
    monkeypatch.setattr(module, "as_in_fp8", lambda x: x)
    with pytest.raises(SystemExit, match="11_decode: wrong result .largest error of a logit"):
        module.main("--fp8")


@pytest.mark.shares(2)
@pytest.mark.parametrize(
    ("part", "gate"), [("teacher_of", "dense twin"), ("flash_attn_with_kvcache", "decoding")]
)
def test_what_an_indexer_did_not_learn_costs_loss(
    part: str, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexers whose teacher gives all blocks equal shares, and a cache that answers with noise."""
    (path,) = (x for x in EXAMPLES if x.stem == "21_train_an_indexer")
    module = load(path, monkeypatch)

    def teacher_of(given: Any) -> torch.Tensor:
        blocks = module.shares(*map(torch.zeros_like, given[3:])) > 0
        return module.HEADS // module.KV_HEADS * blocks / blocks.sum(-1, keepdim=True)

    def noise(q: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        return torch.randn_like(q)

    monkeypatch.setattr(module, part, teacher_of if part == "teacher_of" else noise)
    with pytest.raises(SystemExit, match=f"{path.stem}: wrong result .loss .*{gate}"):
        module.main("--steps", "4")


def in_a_process(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, on a machine that has no GPU as far as it can see."""
    path = os.pathsep.join(map(str, (ROOT / "examples", ROOT)))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path} | variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.shares(6)
@pytest.mark.parametrize("name", ["13_context_parallel", "17_titan_context_parallel"])
def test_examples_of_several_devices_start_two_processes(name: str) -> None:
    child = in_a_process(ROOT / "examples" / f"{name}.py")
    assert child.returncode == 0, child.stderr
    for rank in range(2):
        assert f"rank {rank}, " in child.stdout
    assert "rank 2, " not in child.stdout


@pytest.mark.shares(6)
@pytest.mark.parametrize("name", ON_SOFTWARE_GPU)
def test_runs_on_the_software_gpu_and_notices_a_wrong_result(name: str) -> None:
    child = in_a_process("-c", TWICE, name, ON_SOFTWARE_GPU[name])
    right, _, wrong = child.stdout.partition("now wrong")
    assert right.startswith("device: software GPU"), child.stderr
    # of each result of two problems
    assert right.count("largest error") == {"07_native_api": 2, "10_native_backward": 6}[name]
    assert "largest error" in wrong and f"{name}: wrong result" in child.stderr
    assert child.returncode == 1


@pytest.mark.shares(2)
def test_says_what_is_missing_in_place_of_a_gpu(tmp_path: Path) -> None:
    """Examples without the checkout, and a machine without a C compiler."""
    alone = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", alone)
    child = in_a_process(alone / "07_native_api.py")
    assert child.returncode == 1 and f"there is no {tmp_path / 'software_gpu'}" in child.stderr
    child = in_a_process(ROOT / "examples" / "10_native_backward.py", PATH=str(tmp_path))
    assert child.returncode == 1 and "there is no gcc on the PATH" in child.stderr


@pytest.mark.shares(4)
@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.stem)
def test_ends_with_an_error_if_the_result_is_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(path, monkeypatch)
    calls: tuple[str, ...] = (
        *("flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func"),
        *("flex_attention", "context_parallel_attention"),
    )
    if hasattr(module, "attention_statistics"):
        calls = ("attention_statistics",)
    name = next(x for x in calls if hasattr(module, x))
    attend = getattr(module, name)

    def slightly_wrong(*args: Any, **keywords: Any) -> Any:
        result = attend(*args, **keywords)
        if hasattr(result, "key_sums"):
            return type(result)(*(None if x is None else x * 1.1 for x in result))
        return (result[0] * 1.1, result[1]) if isinstance(result, tuple) else result * 1.1

    monkeypatch.setattr(module, name, slightly_wrong)
    with pytest.raises(SystemExit, match=path.stem):
        module.main()


def test_the_demo_runs_every_example_and_sums_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "examples/demo.py" in makefile
    # what the demo installs: the software GPU needs numpy, and nothing here needs a linter
    (installed,) = re.findall(
        r"^\$\(VENV\)/\.runtime:.*\n(?:\t.*\n)*?\t.* -e (.*)$", makefile, re.M
    )
    assert installed == '".[cu13]" numpy'
    demo = load_example(ROOT / "examples" / "demo.py", monkeypatch)
    run: list[Path] = []
    monkeypatch.setattr(demo, "run", lambda path: run.append(path) or path.stem != "05_score_mod")
    assert demo.main() == 1 and run == EXAMPLES
    assert f"{len(EXAMPLES) - 1} of {len(EXAMPLES)} examples are right" in capsys.readouterr().out
    assert demo.main("no such example") == 1


def test_a_line_of_the_demo_has_the_error_and_its_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    demo = load_example(ROOT / "examples" / "demo.py", monkeypatch)
    example, wrong, silent = (tmp_path / f"{x}.py" for x in ("99_right", "98_wrong", "97_silent"))
    start = f"import sys; sys.path.append({str(ROOT / 'examples')!r})\nimport dense_check\n"
    close = "dense_check.within('99', 'largest error of y', 2e-3, 4e-3, ' (of bfloat16)')\n"
    example.write_text(f"{start}dense_check.within('99', 'dq: largest error', 1e-3, 1e-1)\n{close}")
    wrong.write_text(f"{start}dense_check.within('98', 'largest error of y', float('nan'), 1e-3)")
    silent.write_text("")
    assert demo.run(example) and not demo.run(wrong) and not demo.run(silent)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("ok     99_right")
    assert "error 2.0e-03, bound 4.0e-03, of 2 results, " in first
    assert second.startswith("FAILED 98_wrong")


def test_lanes_have_the_versions_of_torch_that_the_docs_name() -> None:
    lanes = re.findall(r"^TORCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(
        r"^\| torch \| (\S+) \| (\S+) \|$", (ROOT / "docs/support.md").read_text(), re.M
    )
    assert [tuple(x.split()) for x in lanes] == named
    floor = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert all(oldest.startswith(floor[0]) for oldest, _ in named)
