"""The layers of docs/architecture.md, and the habits that a machine can check. Needs no GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "flash_mask_cute"
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))
MAX_LINES = 900

BAND = "masks.band"
INDEX_RULES = ("block_info", "seqlen_info", BAND)

# Who may import what inside the package; a name stands for the module and for all below it. The
# longest name that fits a module is its row, so a new top-level module needs a new row.
ARROWS: dict[str, tuple[str, ...]] = {
    "masks.band": (),
    "seqlen_info": (BAND,),
    "block_info": ("seqlen_info", BAND),
    "masks": ("masks", *INDEX_RULES),
    "masks.intervals": (BAND,),
    "masks.rules": ("masks", "core", *INDEX_RULES),
    "masks.roles": ("masks", "core", *INDEX_RULES),
    "masks.query_walks": ("masks", "core", "block_info"),
    "masks.key_walks": ("masks", "core"),
    "masks.stored_bits": ("masks", "core"),
    "masks.column_mask": ("masks", "host.compile_bounds", "plain_tensors"),
    "masks.key_bounds": (),
    "masks.documents": ("masks.intervals", "masks.key_bounds", "host.compile_documents"),
    "core": ("core", "seqlen_info", BAND),
    "sm90": ("sm90", "core", "masks", *INDEX_RULES),
    "sm100": ("sm100", "core", "masks", *INDEX_RULES),
    "kernels": ("kernels", "core"),
    "kernels.document_bits": ("kernels", "core", "masks"),
    "kernels.sequence_bits": ("core", "masks"),
    "kernels.document_split": ("kernels", "core", "masks.intervals"),
    "cpu_path": (
        "host.host_mods",
        "block_sparsity",
        "masks.column_mask",
        "masks.intervals",
        *INDEX_RULES,
    ),
    "cpu_backward": ("cpu_path", "host.host_mods", "block_sparsity", "masks.column_mask"),
    "host": ("host", "plain_tensors", *INDEX_RULES),
    "host.config": (
        "host",
        "sm90.flash_fwd_plan",
        "sm90.flash_bwd_plan",
        "sm100.flash_fwd_plan",
    ),
    "host.compile": ("host", "sm90", "sm100", "masks.intervals"),
    "host.compile_bwd": ("host", "sm90", "kernels", "core.row_blocks", "masks.intervals"),
    "host.bit_store": ("host", "masks.documents", "masks.key_bounds"),
    "host.compile_store": ("host", "sm90", "kernels", "masks.documents", "masks.stored_bits"),
    "host.launch": ("host", "plain_tensors", "cpu_path"),
    "host.bwd_launch": ("host", "plain_tensors", "cpu_backward"),
    "host.packed_launch": ("host", "masks.column_mask", "masks.documents"),
    "host.mask_args": ("host", "block_sparsity", "masks.column_mask"),
    "host.validate": ("host", "block_sparsity", "masks.column_mask", "plain_tensors"),
    "host.mask_extents": ("masks.column_mask",),
    "host.explanation": ("host", *INDEX_RULES),
    "host.tile_classes": (
        "block_sparsity",
        "masks.column_mask",
        "masks.intervals",
        *INDEX_RULES,
    ),
    "host.compile_scan": ("host", "kernels"),
    "host.host_mods": (
        "host",
        "core.aux_reads",
        "core.derivative",
        "core.mod_errors",
        "core.mods",
    ),
    "host.aux_tensors": ("host", "core.mod_errors"),
    "host.score_traits": ("host", "core.mods"),
    "host.compile_bounds": ("host", "kernels"),
    "host.compile_documents": ("host", "kernels", "masks.documents"),
    "plotting": (
        "masks.column_mask",
        "block_sparsity",
        "host.host_mods",
        "host.tile_classes",
        "host.validate",
    ),
    "plain_tensors": (),
    "block_sparsity": ("plain_tensors",),
    "compute_block_sparsity": ("block_sparsity", "host", "plain_tensors"),
    "interface": ("host", "masks.column_mask"),
    "mod_names": ("host.callable_key",),
    "functional": (
        "interface",
        "host.keywords",
        "host.mask_extents",
        "host.packed_launch",
        "host.validate",
        "block_sparsity",
        "masks.column_mask",
        "masks.documents",
        "masks.key_bounds",
        "mod_names",
        "plain_tensors",
    ),
    "flash_fwd": ("sm90", "sm100"),
    "flash_bwd": ("sm90", "kernels"),
    "utils": (),
    "": (
        "interface",
        "functional",
        "host",
        "block_sparsity",
        "compute_block_sparsity",
        "masks.builders",
        "masks.column_mask",
        "plotting",
        *INDEX_RULES,
    ),
}

# Device code: the only modules that may need cutlass in order to be imported.
DEVICE = (
    "core",
    "kernels",
    "sm90",
    "sm100",
    "masks.bit_tile",
    "masks.key_walks",
    "masks.query_walks",
    "masks.roles",
    "masks.rules",
    "masks.stored_bits",
    "flash_bwd",
    "flash_fwd",
    "utils",
)
# Modules that may import cutlass, or device code, inside a function.
LAZY = (
    "block_sparsity",
    "host.compile_store",
    "host.compile_scan",
    "host.compile_bounds",
    "host.compile_documents",
    "host.compile",
    "host.compile_bwd",
    "host.stand_ins",
    "host.config",
    "host.cache",
    "host.callable_key",
    "host.host_mods",
    "host.aux_tensors",
    "host.score_traits",
    BAND,
)
# Modules that work on ints of either world.
WITHOUT_TORCH = (
    "core",
    "kernels",
    "sm90",
    "sm100",
    "masks",
    "block_info",
    "seqlen_info",
    "host.tables",
)
# Objects of the host in a folder of such modules.
WITH_TORCH = ("masks.column_mask", "masks.documents", "masks.key_bounds", "masks.builders")
THIRD_PARTY = {"torch", "cutlass", "cuda", "tvm_ffi"}
# Dependencies of an extra, imported when a function of that module needs them.
EXTRAS = {"plotting": "matplotlib"}


class Import(NamedTuple):
    target: str
    """Full dotted name of a module."""
    is_lazy: bool
    """Inside a function or under TYPE_CHECKING: not needed to import the module."""


def covers(names: tuple[str, ...], module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def name_in_package(path: Path) -> str:
    """`host.cache` of flash_mask_cute/host/cache.py; the package itself is ""."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


KNOWN = {f"{PACKAGE}.{name_in_package(path)}".rstrip(".") for path in MODULES}


def imports_of(source: str) -> Iterator[Import]:
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, is_lazy = pending.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports in the package are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(inner if inner in KNOWN else str(node.module), is_lazy)
        delays = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        pending += [(child, is_lazy or delays) for child in ast.iter_child_nodes(node)]


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module, named from the package on."""
    found = []
    row = max(
        (name for name in ARROWS if name == module or (name and covers((name,), module))),
        key=len,
        default=None,
    )
    if row is None:
        return [f"{module} has no row in the table"]
    for target, is_lazy in imports_of(source):
        top, _, inner = target.partition(".")
        if top == PACKAGE:
            if not covers(ARROWS[row], inner):
                found.append(f"{module} may not import {target}")
            needs_compiler = covers(DEVICE, inner)
        else:
            needs_compiler = top in ("cutlass", "cuda")
            is_extra = is_lazy and EXTRAS.get(module) == top
            if top not in THIRD_PARTY and top not in sys.stdlib_module_names and not is_extra:
                found.append(f"{module} imports {target}, which is no dependency")
            is_int_only = covers(WITHOUT_TORCH, module) and not covers(WITH_TORCH, module)
            if top == "torch" and is_int_only:
                found.append(f"{module} may not import torch")
        if needs_compiler and not covers(DEVICE, module):
            if not is_lazy:
                found.append(f"{module} imports {target} when it is imported")
            elif not covers(LAZY, module):
                found.append(f"{module} may not import {target}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_in_package(path) or PACKAGE)
def test_imports_follow_the_layers(path: Path) -> None:
    assert not faults(name_in_package(path), path.read_text())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.softmax", "from flash_mask_cute.masks.rules import MaskRules"),
        ("core.softmax", "from flash_mask_cute.masks import rules"),
        ("core.softmax", "import torch"),
        ("masks.rules", "import flash_mask_cute.sm90.wgmma"),
        ("masks.band", "import cutlass"),
        ("block_info", "from flash_mask_cute.core.cursor import Cursor"),
        ("sm90.flash_fwd", "from flash_mask_cute.host.config import FwdConfig"),
        ("host.cache", "def f():\n    from flash_mask_cute.sm90 import flash_fwd"),
        ("host.config", "from flash_mask_cute.sm90.flash_fwd_plan import FwdPlan"),
        ("host.config", "def f():\n    from flash_mask_cute.sm90.flash_fwd import a"),
        ("host.compile_bwd", "from flash_mask_cute.core.row_blocks import num_row_blocks"),
        ("host.bwd_launch", "def f():\n    from flash_mask_cute.core import row_blocks"),
        ("host.validate", "def f():\n    import cutlass"),
        ("cpu_path", "def f():\n    import cutlass.cute as cute"),
        ("cpu_path", "from flash_mask_cute.host.config import FwdConfig"),
        ("host.host_mods", "from flash_mask_cute.core.mods import call_mask_mod"),
        ("masks.intervals", "def f():\n    import cutlass"),
        ("interface", "def f():\n    from flash_mask_cute.sm90 import wgmma"),
        ("interface", "import flash_attn"),
        ("", "from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90"),
        ("kernels.block_scan", "import torch"),
        ("masks.intervals", "import torch"),
        ("masks.column_mask", "from flash_mask_cute.kernels import key_block_bounds"),
        ("masks.builders", "from flash_mask_cute.host import compile_bounds"),
        ("plotting", "import matplotlib"),
        ("host.launch", "def f():\n    import matplotlib"),
        ("block_sparsity", "from cutlass.cute.runtime import from_dlpack"),
        ("newcomer", "import math"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, source: str) -> None:
    assert faults(module, source)


def test_package_import_does_not_load_the_compiler() -> None:
    program = (
        "import sys, flash_mask_cute, flash_mask_cute.interface, flash_mask_cute.cpu_path;"
        "sys.exit(', '.join({'cutlass', 'tvm_ffi'} & sys.modules.keys()) or 0)"
    )
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, f"loaded by importing the package: {child.stderr}"


def calls(path: Path) -> Iterator[str]:
    """Dotted names that a file calls or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_in_package(path) or PACKAGE)
def test_habits_of_the_package(path: Path) -> None:
    """Files of a readable size and with telling names; no printing; one reader of the environment
    (caching; everything else is an argument)."""
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert path.stem not in ("helpers", "helper", "common", "misc")
    assert path.stem != "utils" or path.parent.name == PACKAGE, "utils.py is a fixed public path"
    used = set(calls(path))
    assert "print" not in used
    assert not {"os.environ", "os.getenv"} & used or name_in_package(path) == "host.cache"


INDEX = ROOT / "docs" / "README.md"


def index_paths() -> list[str]:
    """Everything in backticks that stands in the index table."""
    rows = [line for line in INDEX.read_text().splitlines() if line.startswith("|")]
    return re.findall(r"`([^`]+)`", "\n".join(rows))


def test_concept_index_names_existing_files() -> None:
    named = index_paths()
    assert len(named) > 20
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing, f"docs/README.md names {missing}"


def test_every_module_and_page_is_in_the_index() -> None:
    """A file that nobody can find from the start page might as well not exist."""
    pages = (ROOT / "docs").glob("*.md")
    expected = {
        str(path.relative_to(ROOT))
        for path in (*MODULES, *pages)
        if path.name not in ("__init__.py", "README.md")
    }
    assert not expected - set(index_paths())


def project_texts() -> Iterator[Path]:
    for folder in (PACKAGE, "tests", "bench", "docs", "examples", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            hidden = any(part[0] in "._" for part in path.relative_to(ROOT / folder).parts[:-1])
            if path.is_file() and not hidden and path.suffix not in (".pyc", ".png"):
                yield path
    for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".gitignore"):
        yield ROOT / name


# Written in pieces, so that this file does not match itself.
FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/" + "work/",
            r"(?<!scope=\")\b[Ss]essi" + r"on\b",
            r"\bpypi" + r"\.org",
            "python" + "hosted",
            "index" + "-url",
            r"download\." + r"pytorch\.org",
            "TO" + "DO|FIX" + "ME",
        )
    )
)


def test_texts_stand_on_their_own() -> None:
    """No path of the machine where it was written, no package registry, no note to oneself."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert not found, "\n".join(found)
