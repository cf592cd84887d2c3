"""The layers of docs/architecture.md, and the habits that a machine can check. Needs no GPU."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "flash_mask_cute"
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))
MAX_LINES = 700
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
MAX_TEST_LINES = 700
# Folders of tests/cpu that are named unlike the folder of the package whose tests they have.
TEST_FOLDERS = {"bench": "bench", "lab": "lab", "cpu_path": f"{PACKAGE}/cpu"}
MAX_FUNCTION_LINES = 110

# Arithmetic on ints, device values or tensors, which every layer above may use.
INDEX_RULES = (
    *("index_math", "limits", "seqlen_info", "core.packed_heads", "core.fixed_splits"),
    *("core.stream_k", "core.tile_order", "rules.band", "rules.block_info", "rules.intervals"),
)

# Who may import what inside the package; a name stands for the module and for all below it. The
# longest name that fits a module is its row, so a new top-level module needs a new row. A folder
# may import itself. Rows stand from the bottom of the layers to the top, and a row names only rows
# above it (`test_no_arrow_points_up`).
ARROWS: dict[str, tuple[str, ...]] = {
    "index_math": (),
    "limits": (),
    "seqlen_info": ("index_math",),
    "core": ("seqlen_info", "index_math", "limits"),
    "runtime": ("limits",),
    "mods": ("core", "runtime", "limits"),
    # from mods written in torch to CuTe mods, below the functions that take mods
    "lowering": ("mods", "runtime", "core.exp2"),
    "rules": ("mods", "core", "seqlen_info", "index_math", "limits"),
    "kernels": ("core", "seqlen_info", "index_math", "limits"),
    "sm90": ("rules", "mods", "core", *INDEX_RULES),
    "sm100": ("rules", "mods", "core", *INDEX_RULES),
    "mask_prep": ("rules", "mods", "core", "runtime", *INDEX_RULES),
    "masks": ("lowering", "mask_prep", "runtime.checks", "runtime.plain_tensors", *INDEX_RULES),
    "block_sparsity": ("runtime.plain_tensors",),
    # one call: the facts of it, what is refused, what will run, its kernels, what runs each time
    "call.settings": (),
    "call.problem": ("mods.signature", "runtime", *INDEX_RULES),
    "call.arguments": (*("call.settings", "call.problem", "masks.q_start", "masks.column_mask"),
                       *("block_sparsity", "runtime")),
    "cpu": (*("call.arguments", "masks.q_start", "masks.column_mask", "masks.selected_blocks"),
            *("block_sparsity", "mods.on_cpu", *INDEX_RULES)),
    "call.check": (
        *("call.arguments", "call.problem", "masks.q_start", "call.settings", "masks.column_mask"),
        *("masks.selected_blocks", "block_sparsity", "mods", "runtime", *INDEX_RULES),
    ),
    # the only host code that knows an architecture
    "call.tiles": (
        *("call.problem", "call.settings", "sm90", "sm100", "core", "runtime", *INDEX_RULES),
    ),
    "call.masks": (*("call.tiles", "call.arguments", "call.problem", "masks.column_mask"),
                   *("masks.selected_blocks", "block_sparsity", "runtime")),
    "call.facts": (*("call.masks", "call.tiles", "call.check", "call.arguments", "call.problem"),
                   *("call.settings", "masks.q_start", "runtime", *INDEX_RULES)),
    # records; those who decide about them come after
    "call.execution_plan": (
        *("call.facts", "call.masks", "call.tiles", "call.arguments"),
        *("call.problem", "masks.q_start", "mask_prep", "mods", "runtime", *INDEX_RULES),
    ),
    # steps of a plan, beside what they compile and launch; then `plan`, `prepare` and `explain`
    "call": (*("cpu", "masks", "block_sparsity", "mask_prep", "kernels", "core.row_blocks"),
             *("mods", "runtime", *INDEX_RULES)),
    "compute_block_sparsity": (
        *("call", "block_sparsity", "mask_prep", "lowering.pair", "mods", "runtime"),
    ),
    "plotting": (
        *("call", "cpu.tiles", "masks.column_mask", "masks.selected_blocks", "block_sparsity"),
        *("lowering.pair", "mods.aux_tensors", "mods.on_cpu", "mods.signature", "runtime"),
    ),
    "interface": (
        *("call", "lowering.pair", "masks.column_mask", "masks.mask_mods", "masks.q_start"),
        *("runtime", "mods"),
    ),
    "autograd": (*("interface", "call", "lowering", "masks.column_mask", "masks.q_start"),
                 *("masks.selected_blocks", "block_sparsity", "mask_prep"),
                 *("mods.aux_tensors", "mods.signature", "runtime", "cpu.combine")),
    "functional": (
        *("autograd", "call", "masks.column_mask", "masks.q_start", "block_sparsity", "runtime"),
    ),
    "serving": (
        *("functional", "autograd", "interface", "call", "lowering.pair", "masks.column_mask"),
        *("masks.q_start", "runtime"),
    ),
    "statistics": (*("autograd", "call", "masks.column_mask", "masks.q_start"), "runtime"),
    # sequences whose rows lie on several devices
    "parallel": (
        *("functional", "interface", "serving", "call.arguments", "call.check.validate"),
        *("masks.column_mask", "masks.builders", "masks.runs", "lowering.watch", "runtime"),
        *INDEX_RULES,
    ),
    # torch's FlexAttention call
    "flex": (
        *("autograd", "call.arguments", "lowering", "masks.column_mask", "masks.mask_mods"),
        *("masks.selected_blocks", "block_sparsity", "mask_prep.block_lists", "mods", "runtime"),
    ),
    # doors into other libraries; only users import them
    "integrations": (*("parallel", "functional", "interface", "lowering", "mods.signature"),
                     *("masks", "runtime", "limits")),
    # public paths of device code, and of everything
    "block_info": ("rules.block_info",),
    "flash_fwd": ("sm90", "sm100"),
    "flash_bwd": ("sm90", "sm100", "kernels"),
    "utils": (),
    # the package and its doctor
    "time_my_mask": ("flex", "runtime"),
    "__main__": (
        *("functional", "runtime", "integrations.hub", "parallel.command", "time_my_mask", ""),
    ),
    "": (*("flex", "parallel", "lowering", "call.settings"),
         *("functional", "interface", "compute_block_sparsity", "block_sparsity", "plotting"),
         *("serving", "statistics", "masks.builders", "masks.column_mask", "masks.selected_blocks"),
         *("runtime.cache", *INDEX_RULES)),
}  # fmt: skip

# What integrations and parallel take of the package beside public names, helpers of `runtime`,
# index rules and the two host calls. A name here is for them alone, and promises users nothing.
OUTSIDE = "integrations", "parallel"
TAKEN_INSIDE = {
    "call.check.validate.check_dense",
    "interface.widest_head",
    "lowering.lower.lower_mod",
    "lowering.watch.is_capturing",
    "masks.mask_mods.mask_of_band",
    "masks.runs.vectors_of",
    "mods.signature.in_float64",
    "parallel.sharding.current_sharding",
}
HOST_CALLS = {"interface._flash_attn_fwd", "interface._flash_attn_bwd"}

# Device code: the only modules that may need cutlass in order to be imported.
DEVICE = (
    *("core", "kernels", "sm90", "sm100", "flash_bwd", "flash_fwd", "utils"),
    *("mods.calling", "mods.ir_analysis", "mods.derivative", "mods.aux_gradients"),
    *("mods.aux_reads", "mods.table_rows", "mods.errors", "mods.score_chain"),
    *("mods.read_analysis", "mods.walk_sums", "mods.line_sums", "mods.diagonals"),
    *("mods.line_gradients", "mods.score_elements", "mods.host_loop", "mods.host_rounding"),
    *("mods.difference_reads", "mods.difference_sums", "mods.difference_tables_kernel"),
    *("rules.bit_tile", "rules.mask_rules", "rules.forward_mask", "rules.backward_mask"),
    *("rules.token_mask", "rules.gathered_mask"),
    *("rules.mask_warps", "rules.stream_k_walks", "rules.selection_walk"),
    "lowering.device_ops",
    "integrations.transformers.table_mods",
    "integrations.triangle_mods",
)
# A kernel of mask_prep, beside the host half that it is named after.
KERNEL_SUFFIX = "_kernel"
# Modules that may import cutlass, or device code, inside a function.
LAZY = (
    *("block_sparsity", "index_math", "runtime", "mods", "lowering", "mask_prep", "call"),
    "integrations",
)
# Modules that work on ints of either world.
WITHOUT_TORCH = (
    *("limits", "core", "kernels", "sm90", "sm100", "rules", "index_math", "seqlen_info"),
    *(
        *("call.tiles.rows", "call.tiles.tables"),
        "mods.calling",
        "mods.ir_analysis",
        "mods.derivative",
        "mods.aux_gradients",
        *("mods.read_analysis", "mods.walk_sums", "mods.line_sums", "mods.diagonals"),
        *("mods.line_gradients", "mods.score_elements"),
        *("mods.difference_reads", "mods.difference_sums", "mods.difference_tables_kernel"),
    ),
    *("mods.score_chain", "mods.read_classes", "mods.spans", "mods.fixed_point_sums"),
)
THIRD_PARTY = {"torch", "cutlass", "cuda", "tvm_ffi"}
# Type checkers have it with the standard library, so it may stand under TYPE_CHECKING.
FOR_CHECKERS = "typing_extensions"
# Dependencies of an extra, imported when a function of that module needs them.
EXTRAS = {"plotting": "matplotlib"}
# Doors, which are for those who have that library, and need it in order to be imported.
DOORS = {"integrations.transformers": "transformers", "integrations.trl": "transformers"}


class Import(NamedTuple):
    target: str
    """Full dotted name of a module."""
    is_lazy: bool
    """Inside a function or under TYPE_CHECKING: not needed to import the module."""


def covers(names: tuple[str, ...], module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def name_in_package(path: Path) -> str:
    """`runtime.cache` of flash_mask_cute/runtime/cache.py; the package itself is ""."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


KNOWN_INSIDE = {name_in_package(path) for path in MODULES}
KNOWN = {f"{PACKAGE}.{name}".rstrip(".") for name in KNOWN_INSIDE}


def imports_of(source: str, known: Set[str] = KNOWN) -> Iterator[Import]:
    """known: dotted names of modules, where a name that is imported from a module may be one."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, is_lazy = pending.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports in the package are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(inner if inner in known else str(node.module), is_lazy)
        delays = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        pending += [(child, is_lazy or delays) for child in ast.iter_child_nodes(node)]


def is_device_code(module: str) -> bool:
    if covers(INDEX_RULES, module):
        return False
    return covers(DEVICE, module) or (
        covers(("mask_prep",), module) and module.endswith(KERNEL_SUFFIX)
    )


def row_of(module: str) -> str | None:
    """The name in the table that a module, named from the package on, falls under."""
    fitting = (name for name in ARROWS if name == module or (name and covers((name,), module)))
    return max(fitting, key=len, default=None)


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module, named from the package on."""
    found = []
    row = row_of(module)
    if row is None:
        return [f"{module} has no row in the table"]
    for target, is_lazy in imports_of(source):
        top, _, inner = target.partition(".")
        if top == PACKAGE:
            if not covers((row, *ARROWS[row]) if row else ARROWS[row], inner):
                found.append(f"{module} may not import {target}")
            needs_compiler = is_device_code(inner)
        else:
            needs_compiler = top in ("cutlass", "cuda")
            is_extra = is_lazy and top in (EXTRAS.get(module), FOR_CHECKERS)
            is_extra |= any(covers((door,), module) and top == DOORS[door] for door in DOORS)
            if top not in THIRD_PARTY and top not in sys.stdlib_module_names and not is_extra:
                found.append(f"{module} imports {target}, which is no dependency")
            is_int_only = covers(WITHOUT_TORCH, module) or is_device_code(module)
            if top == "torch" and is_int_only:
                found.append(f"{module} may not import torch")
        if needs_compiler and not is_device_code(module):
            if not is_lazy:
                found.append(f"{module} imports {target} when it is imported")
            elif not covers(LAZY, module):
                found.append(f"{module} may not import {target}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_in_package(path) or PACKAGE)
def test_imports_follow_the_layers(path: Path) -> None:
    assert not faults(name_in_package(path), path.read_text())


def names_from(source: str) -> Iterator[str]:
    """Names that a module imports from this package, dotted, from the package on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == PACKAGE:
            module = str(node.module).removeprefix(PACKAGE).lstrip(".")
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)


def public_names() -> set[str]:
    """Where the public names of the package, and of `parallel`, are."""
    pages = (ROOT / PACKAGE / "__init__.py", ROOT / PACKAGE / "parallel" / "__init__.py")
    return {name for page in pages for name in names_from(page.read_text())}


def taken_inside(folder: str, source: str) -> set[str]:
    """Names from inside that a module of `OUTSIDE` imports."""
    free = folder, "runtime", *INDEX_RULES, "masks.builders"
    names = (name for name in names_from(source) if not covers(free, name))
    return {name for name in names if name not in public_names() | HOST_CALLS}


def test_what_lies_outside_takes_few_names_from_inside() -> None:
    assert len(TAKEN_INSIDE) <= 8
    found: set[str] = set()
    for path in MODULES:
        name = name_in_package(path)
        if covers(OUTSIDE, name):
            found |= taken_inside(name.partition(".")[0], path.read_text())
    assert found == TAKEN_INSIDE
    taken = "def f():\n    from flash_mask_cute.call.arguments import Options"
    assert taken_inside("parallel", taken) == {"call.arguments.Options"}
    assert not taken_inside(
        "integrations", "from flash_mask_cute.functional import flash_attn_func"
    )


def test_the_core_does_not_need_what_lies_outside() -> None:
    for path in MODULES:
        if not covers((*OUTSIDE, "__main__"), name := name_in_package(path)) and name:
            inside = (x.target for x in imports_of(path.read_text()))
            assert not any(covers(tuple(f"{PACKAGE}.{x}" for x in OUTSIDE), x) for x in inside)


def test_no_arrow_points_up() -> None:
    """A row names only rows above it in the table, or modules and folders inside these."""
    names = list(ARROWS)
    for i, (name, targets) in enumerate(ARROWS.items()):
        for target in targets:
            row = row_of(target) if target else ""
            assert row is not None, f"{name} names {target}, which has no row"
            ok = name == "__main__" or names.index(row) < i or row == name.split(".")[0]
            assert ok, f"{name} names {target}, which stands below it"


def device_paths(source: str) -> set[str]:
    """Objects of an architecture's folder that a module names as "module:name"."""
    constants = (x.value for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Constant))
    paths = {x for x in constants if isinstance(x, str)}
    return {x for x in paths if covers(("sm90", "sm100"), x.partition(":")[0])}


def knows_an_architecture(module: str, source: str) -> bool:
    folders = f"{PACKAGE}.sm90", f"{PACKAGE}.sm100"
    imports = any(covers(folders, found.target) for found in imports_of(source))
    return imports or bool(device_paths(source))


def test_objects_of_an_architecture_exist_by_their_paths() -> None:
    paths = device_paths((ROOT / PACKAGE / "call" / "tiles" / "arch.py").read_text())
    assert len(paths) >= 12
    for path in paths:
        module, _, name = path.partition(":")
        source = (ROOT / PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        body = ast.parse(source).body
        targets = (x.targets for x in body if isinstance(x, ast.Assign))
        names = {x.id for each in targets for x in each if isinstance(x, ast.Name)}
        names |= {x.name for x in body if isinstance(x, ast.ClassDef)}
        assert not name or name.partition(".")[0] in names, path


def test_of_the_host_one_module_knows_an_architecture() -> None:
    """A new one adds a folder of device code, and its `ArchSpec`."""
    host = {name_in_package(path): path.read_text() for path in MODULES}
    found = {
        name
        for name, source in host.items()
        if not is_device_code(name) and knows_an_architecture(name, source)
    }
    assert found == {"call.tiles.arch"}
    lazy = "def f():\n    from flash_mask_cute.sm90 import wgmma"
    assert knows_an_architecture("call.tables", lazy)
    assert knows_an_architecture("call.tables", "load('sm90.wgmma:COLUMNS')")
    assert not knows_an_architecture("call.tables", "load('sm_90a')")


def shown_options(source: str) -> list[str]:
    """Dataclasses with kernels whose repr has their options: the compiler names kernels by it."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "repr=False" not in decorator
        if "@cute.kernel" in ast.unparse(node)
    ]


def test_the_name_of_a_kernel_has_no_options() -> None:
    assert not {name_in_package(x): y for x in MODULES if (y := shown_options(x.read_text()))}
    kernel = "class A:\n    @cute.kernel\n    def kernel(self): ..."
    assert shown_options(f"@dataclass(eq=False)\n{kernel}") == ["A"]
    assert not shown_options(f"@dataclass(eq=False, repr=False)\n{kernel}")
    assert not shown_options(kernel)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.softmax", "from flash_mask_cute.rules.mask_rules import MaskRules"),
        ("core.softmax", "from flash_mask_cute.rules import mask_rules"),
        ("core.softmax", "import torch"),
        ("rules.mask_rules", "import flash_mask_cute.sm90.wgmma"),
        ("rules.band", "import cutlass"),
        ("rules.intervals", "import torch"),
        ("rules.intervals", "def f():\n    import cutlass"),
        ("rules.block_info", "from flash_mask_cute.core.cursor import Cursor"),
        ("sm90.flash_fwd", "from flash_mask_cute.call.tiles.config import FwdConfig"),
        ("sm90.flash_fwd", "from flash_mask_cute.sm100 import umma"),
        ("runtime.cache", "def f():\n    from flash_mask_cute.sm90 import flash_fwd"),
        ("runtime.fake_tensors", "from flash_mask_cute.call.problem import AttentionProblem"),
        ("mods.on_cpu", "from flash_mask_cute.mods.calling import call_mask_mod"),
        ("mods.traits", "from flash_mask_cute.call.problem import AttentionProblem"),
        ("mask_prep.mask_bits", "from flash_mask_cute.call.plan import plan"),
        ("mask_prep.mask_bits", "def f():\n    from flash_mask_cute.sm90.wgmma import COLUMNS"),
        ("mask_prep.documents", "from flash_mask_cute.mask_prep import documents_kernel"),
        ("mask_prep.documents_kernel", "import torch"),
        ("masks.builders", "from flash_mask_cute.call.check import validate"),
        ("masks.column_mask", "def f():\n    import cutlass"),
        ("call.tiles.config", "from flash_mask_cute.sm90.flash_fwd_traits import FwdTraits"),
        ("call.forward", "def f():\n    from flash_mask_cute.core import softmax"),
        ("call.tiles.tables", "import torch"),
        ("cpu.forward", "def f():\n    import cutlass.cute as cute"),
        ("cpu.forward", "from flash_mask_cute.call.tiles.config import FwdConfig"),
        ("interface", "def f():\n    from flash_mask_cute.sm90 import wgmma"),
        ("interface", "import flash_attn"),
        ("", "from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90"),
        ("kernels.bwd_preprocess", "import torch"),
        ("plotting", "import matplotlib"),
        ("functional", "from typing_extensions import Unpack"),
        ("call.forward", "def f():\n    import matplotlib"),
        ("block_sparsity", "from cutlass.cute.runtime import from_dlpack"),
        ("functional", "from flash_mask_cute.integrations import transformers"),
        ("functional", "def f():\n    import transformers"),
        ("integrations.transformers.masks", "import vllm"),
        ("integrations", "import transformers"),
        ("newcomer", "import math"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, source: str) -> None:
    assert faults(module, source)


def circle(sources: Mapping[str, str]) -> set[str]:
    """The modules in a circle of imports, or leading into one; lazy imports count."""
    imported = {
        module: {x.target for x in imports_of(source, sources.keys())} & sources.keys() - {module}
        for module, source in sources.items()
    }
    while leaves := [name for name, targets in imported.items() if not targets]:
        for leaf in leaves:
            del imported[leaf]
        for targets in imported.values():
            targets.difference_update(leaves)
    return set(imported)


@pytest.mark.parametrize("folder", [PACKAGE, "bench", "lab"])
def test_no_import_circle(folder: str) -> None:
    sources = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(part for part in parts if part != "__init__")] = path.read_text()
    found = circle(sources)
    assert not found, f"a circle is among {sorted(found)}"


def test_bench_and_lab_stand_beside_the_package() -> None:
    """lab uses bench, bench does not use lab, and the package uses neither."""
    allowed = {PACKAGE: {PACKAGE}, "bench": {PACKAGE, "bench"}, "lab": {PACKAGE, "bench", "lab"}}
    for folder, names in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            tops = {x.target.partition(".")[0] for x in imports_of(path.read_text())}
            assert not (tops & allowed.keys()) - names, path


def test_a_circle_is_noticed() -> None:
    """Also one that only type checkers close; a module below it is not named."""
    upper = "from bench import lower, rows"
    lower = "if TYPE_CHECKING:\n    from bench.upper import Case"
    sources = {"bench": "", "bench.upper": upper, "bench.lower": lower, "bench.rows": ""}
    assert circle(sources) == {"bench.upper", "bench.lower"}
    assert not circle(sources | {"bench.lower": ""})


def calls(path: Path) -> Iterator[str]:
    """Dotted names that a file calls or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_in_package(path) or PACKAGE)
def test_habits_of_the_package(path: Path) -> None:
    """Files of a readable size and telling names; no printing; one reader of the environment."""
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert path.stem not in ("helpers", "helper", "common", "misc")
    assert path.stem != "utils" or path.parent.name == PACKAGE, "utils.py is a fixed public path"
    used = set(calls(path))
    assert "print" not in used
    assert not {"os.environ", "os.getenv"} & used or name_in_package(path) == "runtime.cache"


def test_files_of_tests_are_short_and_found_by_their_names() -> None:
    """pytest puts their folders on the path, so that a name tells one file, and no other module."""
    files = [*TESTS, *(ROOT / "tests").rglob("*.c")]
    long = [path for path in files if len(path.read_text().splitlines()) > MAX_TEST_LINES]
    assert not long, f"more than {MAX_TEST_LINES} lines: {long}"
    names = [path.stem for path in TESTS]
    assert sorted(set(names)) == sorted(names), "two files have the same name"
    assert not sys.stdlib_module_names & set(names)


def test_tests_plan_calls_in_one_place() -> None:
    """A change of the planner's arguments, or of the bundles of a call, edits one file of tests."""
    uses = re.compile(
        r"choose\.plan import .*\bplan$|AttentionCall\.from_arguments\(", re.MULTILINE
    )
    files = {path.name for path in TESTS if uses.search(path.read_text())}
    assert files == {"planned.py"}


def test_folders_of_cpu_tests_are_those_of_the_package() -> None:
    folders = [path.name for path in (ROOT / "tests" / "cpu").iterdir() if any(path.glob("*.py"))]
    assert "call" in folders
    homes = [ROOT / TEST_FOLDERS.get(name, f"{PACKAGE}/{name}") for name in folders]
    assert all(home.is_dir() for home in homes), homes


def long_functions(source: str) -> list[str]:
    """The functions of more than MAX_FUNCTION_LINES, from `def` on, and how long they are."""
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    return [f"{name}: {lines}" for name, lines in functions if lines > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_in_package(path) or PACKAGE)
def test_functions_can_be_read_at_once(path: Path) -> None:
    assert not long_functions(path.read_text())


def test_a_long_function_is_noticed() -> None:
    """Also one of a class, and behind a short one of the same name."""
    method = "    def f(self):\n" + "        pass\n" * (MAX_FUNCTION_LINES - 1)
    assert not long_functions("class C:\n" + method)
    longer = "class C:\n" + method + "        pass\n"
    assert long_functions(longer) == [f"f: {MAX_FUNCTION_LINES + 1}"]
    assert long_functions(longer + "def f():\n    pass\n")


DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
TABLES = ROOT / "bench" / "results" / "TABLES.md"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")), TABLES)


def outside_code(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Targets of the relative links of a page: the file and the anchor, "" if there is none."""
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code(page.read_text())):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor


def anchors(page: Path) -> set[str]:
    """Those of the headings of a page, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", outside_code(page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target), f"{page.name}: no #{anchor} in {target}"


def test_anchors_are_those_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `mask_mod`, twice\n\n```\n# no heading\n```\n\n## Second-order\n")
    assert anchors(page) == {"a-mask_mod-twice", "second-order"}


def test_the_index_leads_to_every_folder_and_page() -> None:
    """A module is found by its folder, which the index names, or by its own name."""
    named = {target for target, _ in links(INDEX)}
    missing = [
        path.relative_to(ROOT)
        for path in MODULES
        if path.name != "__init__.py"
        and not {path, *path.parents[: len(path.relative_to(ROOT / PACKAGE).parts) - 1]} & named
    ]
    assert not missing, f"docs/README.md does not lead to {missing}"
    assert not set(PAGES) - named - {INDEX}


def project_texts() -> Iterator[Path]:
    for folder in (PACKAGE, "tests", "bench", "lab", "docs", "examples", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            hidden = any(part[0] in "._" for part in path.relative_to(ROOT / folder).parts[:-1])
            if path.is_file() and not hidden and path.suffix not in (".pyc", ".png", ".xz"):
                yield path
    for name in (
        "README.md",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "MANIFEST.in",
        ".gitignore",
    ):
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
