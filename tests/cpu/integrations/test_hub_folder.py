"""`python -m flash_mask_cute hub DIR`: a folder that re-exports our functions as a hub kernel."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import flash_mask_cute
from flash_mask_cute import __main__ as command
from flash_mask_cute.integrations.hub import write_hub_kernel

FUNCTIONS = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"


@pytest.mark.parametrize("exists", [False, True])
def test_the_folder(exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "kernel"
    if exists:
        folder.mkdir(parents=True)
    assert command.main(["hub", str(folder)]) == 0
    assert f"LOCAL_KERNELS=local/flash-mask-cute={folder}" in capsys.readouterr().out
    names = set()
    for backend in ("cpu", "cuda"):
        build = folder / "build" / f"torch-{backend}"
        described = json.loads((build / "metadata.json").read_text())
        assert described["backend"] == {"type": backend}
        names.add(described["id"])
        spec = spec_from_file_location(described["id"], build / "__init__.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in FUNCTIONS:
            assert getattr(module, name) is getattr(flash_mask_cute, name)
    assert len(names) == 2


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError, match=f"DIR must be .*{tmp_path}, which has files"):
        write_hub_kernel(tmp_path)
    with pytest.raises(NotADirectoryError, match="DIR must be .* got the file .*mine"):
        write_hub_kernel(tmp_path / "mine")
    with pytest.raises(NotADirectoryError):
        write_hub_kernel(tmp_path / "mine" / "below")
    for directory in (tmp_path, tmp_path / "mine"):
        assert command.main(["hub", str(directory)]) == 1
        assert "DIR must be a new or an empty folder" in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("arguments", [["hub"], ["hub", "a", "b"], ["doctor"]])
def test_other_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert f"{command.USAGE}; got {' '.join(arguments)}" in capsys.readouterr().err


def test_it_is_found_by_the_package_kernels(tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")
    folder = write_hub_kernel(tmp_path / "kernel")
    found = kernels.get_local_kernel(folder, backend="cpu")
    for name in FUNCTIONS:
        assert getattr(found, name) is getattr(flash_mask_cute, name)
    assert sys.modules["_flash_mask_cute_cpu"] is found
