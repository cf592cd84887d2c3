"""A public builder or function that no test calls is noticed: a new one comes with a test."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "flash_mask_cute"
# modules without `__all__` whose names without an underscore are public, if they are defined there
# or imported under the same name
OPEN = ("masks.builders",)
# Kernels are compiled by a table of operands. No user calls the other.
APART = {f"{PACKAGE}.flash_fwd", f"{PACKAGE}.flash_bwd", f"{PACKAGE}.runtime.callable_key"}
TESTS = [
    path
    for path in (ROOT / "tests").rglob("*.py")
    if not {"gpu", "engines"} & {*path.relative_to(ROOT / "tests").parts}
]


def public_names() -> dict[str, set[str]]:
    """The functions that users call, by the module that has them."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        is_open = module.removeprefix(f"{PACKAGE}.") in OPEN
        if module in APART or not (is_open or "__all__" in assigned(path)):
            continue
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue  # a door to a library that is not installed
        names = defined(path) if is_open else {*loaded.__all__}
        functions = {name for name in names if inspect.isfunction(getattr(loaded, name))}
        if functions:
            found[module] = functions
    return found


def defined(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name == alias.asname}
    return {name for name in found if not name.startswith("_")}


def assigned(path: Path) -> set[str]:
    targets = [
        target
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def called(source: str) -> Iterator[str]:
    """Full dotted names of what a file calls, or hands to a call, of the package."""
    tree = ast.parse(source)
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                origins[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    ours = {name for name, origin in origins.items() if origin.startswith(PACKAGE)}
    pending: list[tuple[ast.AST, bool]] = [(tree, False)] if ours else []
    while pending:
        node, is_in_call = pending.pop()
        is_in_call |= isinstance(node, ast.Call)
        pending += [(child, is_in_call) for child in ast.iter_child_nodes(node)]
        if is_in_call and isinstance(node, ast.Name | ast.Attribute):
            base = node
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in ours:
                yield origins[base.id] + ast.unparse(node).removeprefix(base.id)


def uncalled(public: dict[str, set[str]], sources: Iterable[str]) -> set[str]:
    """Names of modules that no source calls, by that module or by one above it that has them."""
    known = {name for source in sources for name in called(source)}
    missing = set()
    for module, names in public.items():
        parts = module.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        # the package has builders by a shorter name
        homes = {*above, f"{PACKAGE}.{parts[-1]}"}
        missing |= {f"{module}.{x}" for x in names if not {f"{home}.{x}" for home in homes} & known}
    return missing


def test_every_public_function_is_called() -> None:
    public = public_names()
    assert {f"{PACKAGE}.masks.builders", f"{PACKAGE}.functional", PACKAGE} <= public.keys()
    missing = uncalled(public, (path.read_text() for path in TESTS))
    assert not missing, f"no test calls {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    ("source", "is_called"),
    [
        ("from flash_mask_cute import builders\nbuilders.spiral(4)", True),
        ("from flash_mask_cute.masks.builders import spiral as s\ns(4)", True),
        ("import flash_mask_cute as f\ncheck(f.builders.spiral)", True),
        ("from flash_mask_cute import builders\nmake = builders.spiral", False),
        ("from flash_mask_cute import builders\nbuilders.causal(4)", False),
        ("import torch\ntorch.spiral(4)", False),
        ("from elsewhere import spiral\nspiral(4)", False),
        ("'builders.spiral(4)'", False),
    ],
)
def test_a_new_builder_without_a_test_is_noticed(source: str, is_called: bool) -> None:
    missing = uncalled({f"{PACKAGE}.masks.builders": {"spiral"}}, [source])
    assert missing == (set() if is_called else {f"{PACKAGE}.masks.builders.spiral"})
