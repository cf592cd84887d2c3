"""`python -m flash_mask_cute`: what it tells of a machine, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import flash_mask_cute
from flash_mask_cute import __main__ as doctor
from flash_mask_cute.runtime import packages

ROOT = Path(__file__).resolve().parents[2]


class Answer(NamedTuple):
    code: int
    lines: dict[str, str]
    """What is told, by its name; the last line of a name counts."""
    last: str


def read(code: int, output: str) -> Answer:
    lines = (line.partition(": ") for line in output.splitlines())
    told = {name.strip(): text.strip() for name, _, text in lines}
    return Answer(code, told, output.splitlines()[-1])


def ask(cache: Path | str, before: str = "") -> Answer:
    """In a process of its own, without a GPU; `before` is run first."""
    program = (
        f"import runpy, sys; {before}\nrunpy.run_module('flash_mask_cute', run_name='__main__')"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"FLASH_MASK_CUTE_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert not child.stderr, child.stderr
    return read(child.returncode, child.stdout)


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    folder.mkdir()
    (folder / "kernel-0.o").write_bytes(bytes(3 << 20))
    (folder / "kernel-0.json").write_bytes(bytes(1 << 20))
    answer = ask(tmp_path)
    assert answer.code == 0
    told = answer.lines
    assert told["flash_mask_cute"] == flash_mask_cute.__version__
    assert told["Python"].startswith(sys.version.split()[0])
    assert told["torch"].startswith(torch.__version__.partition("+")[0])
    assert told["nvidia-cutlass-dsl"].startswith("4.")
    assert told["torch's CUDA"].startswith(torch.version.cuda or "none")
    assert told["compile cache"] == f"{folder}: 1 kernels, 4.0 MiB"
    release = packages.release_of_extra("transformers") or "not installed"
    takes = "integrations.transformers takes 5.17 or later, tested up to 5.24"
    assert told["transformers"] == f"{release} ({takes})"
    for name in ("out", "dq", "dk", "dv"):
        assert told[name].startswith("ok, error ")
    assert told["self-test"] == "passed"
    assert told["GPU"].startswith("torch sees none; kernels exist for 9.0 (H100, H200, GH200), and")
    assert answer.last == "what works here:    calls on CPU tensors"


@pytest.mark.shares(3)
def test_a_machine_without_numpy() -> None:
    """torch warns of it when it is imported; the doctor needs none. `ask` wants an empty stderr."""
    assert ask("off", "sys.modules['numpy'] = None").code == 0


@pytest.mark.parametrize(
    ("module", "package"), [("cutlass", "nvidia-cutlass-dsl"), ("torch", "torch")]
)
def test_a_missing_package(module: str, package: str) -> None:
    answer = ask("off", f"sys.modules[{module!r}] = None")
    assert answer.code == 1
    assert answer.lines[package] == f"missing: pip install {package}"
    assert "out" not in answer.lines
    assert answer.last == f"what works here:    nothing before {package} is installed"
    if module != "torch":
        assert answer.lines["compile cache"] == "not on disk (FLASH_MASK_CUTE_CACHE_DIR)"
        assert answer.lines["self-test"] == f"not run: {package} is missing"


def main(capsys: pytest.CaptureFixture[str]) -> Answer:
    code = doctor.main()
    return read(code, capsys.readouterr().out)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)
    exact = flash_mask_cute.flash_attn_func
    # the factor of the result becomes one of the gradients, too
    wrong = lambda *inputs, causal: exact(*inputs, causal=causal) * 1.001  # noqa: E731
    monkeypatch.setattr("flash_mask_cute.functional.flash_attn_func", wrong)
    answer = main(capsys)
    assert answer.code == 1
    assert all(answer.lines[name].startswith("WRONG") for name in ("out", "dq", "dk", "dv"))
    assert answer.lines["self-test"] == "FAILED"
    assert answer.last.startswith("what works here:    results are wrong here")


def test_nan_is_wrong() -> None:
    assert not doctor.Check("out", float("nan"), 1.0).is_right
    assert doctor.Check("out", 0.5, 1.0).is_right


def test_a_call_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)

    def broken(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        raise RuntimeError("the compiler is gone")

    monkeypatch.setattr("flash_mask_cute.functional.flash_attn_func", broken)
    answer = main(capsys)
    assert answer.code == 1
    assert answer.lines["self-test"] == "FAILED: RuntimeError: the compiler is gone"


def show_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    monkeypatch.setattr(
        "flash_mask_cute.runtime.target.Target.from_device",
        lambda device: doctor_target(capabilities[device.index]),
    )


def test_a_gpu_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_gpus(monkeypatch, (8, 0), (8, 9))
    answer = main(capsys)
    assert answer.code == 1 and answer.lines["self-test"] == "passed"
    assert answer.last == (
        "what works here:    calls on CUDA tensors raise NotImplementedError; CPU tensors work"
    )


def test_which_gpu_is_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first that has kernels; the others are named with their compute capability."""
    show_gpus(monkeypatch, (8, 0), (9, 0), (10, 0))
    asked = []
    monkeypatch.setattr(doctor, "self_test", lambda device: asked.append(device) or ())
    answer = main(capsys)
    assert asked == [torch.device("cuda", 1)]
    assert answer.code == 0
    assert answer.lines["cuda:0"] == (
        f"GPU 0, compute capability 8.0: no kernels, which exist for {doctor._WITH_KERNELS}"
    )
    assert answer.lines["cuda:1"] == "GPU 1, compute capability 9.0: kernels for sm_90a"
    assert answer.lines["cuda:2"] == "GPU 2, compute capability 10.0: kernels for sm_100a"
    assert "GPU" not in answer.lines
    assert answer.last == (
        "what works here:    calls on tensors of cuda:1, cuda:2, and on CPU tensors"
    )


def doctor_target(capability: tuple[int, int]) -> object:
    from flash_mask_cute.runtime.target import ARCHS, Target

    return Target(*ARCHS[capability])


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release", "580.95"),
        ("another form", "another form"),
    ],
)
def test_the_driver(
    text: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    assert doctor._driver() == "no NVIDIA driver is loaded"
    (tmp_path / "version").write_text(f"{text}\nGCC version: 12.3.0\n")
    assert doctor._driver() == release


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 0
    assert capsys.readouterr().out == doctor.__doc__
