"""What a type checker says of a user's code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The type that a checker should tell of each line's expression, or what it should say is wrong.
SAMPLE = """\
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import flash_mask_cute
from flash_mask_cute import (
    BwdConfig,
    ColumnMask,
    FwdConfig,
    builders,
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
    flex_attention,
)


def user(q: Tensor, asks: bool, mask: ColumnMask) -> None:
    reveal_type(flash_mask_cute.__version__)  # str
    reveal_type(flash_attn_func(q, q, q))  # Tensor
    reveal_type(flash_attn_func(q, q, q, causal=True, return_lse=False))  # Tensor
    reveal_type(flash_attn_func(q, q, q, return_lse=True))  # tuple[Tensor, Tensor]
    reveal_type(flash_attn_func(q, q, q, return_lse=asks))  # Tensor | tuple[Tensor, Tensor]
    reveal_type(flash_attn_func(q, q, q, startend_row_indices=mask).sum())  # Tensor
    reveal_type(flash_attn_varlen_func(q, q, q, q, q))  # Tensor
    reveal_type(flash_attn_varlen_func(q, q, q, return_lse=True))  # tuple[Tensor, Tensor]
    reveal_type(flash_attn_varlen_func(q, q, q, return_lse=asks))  # Tensor | tuple[Tensor, Tensor]
    reveal_type(flashmask_attention(q, q, q, mask))  # Tensor
    reveal_type(flashmask_attention(q, q, q, return_softmax_lse=True))  # tuple[Tensor, Tensor]
    reveal_type(flashmask_attention(q, q, q, mask, causal=True, return_lse=True))  # tuple[Tensor, Tensor]
    reveal_type(flashmask_attention(q, q, q, return_softmax_lse=asks))  # Tensor | tuple[Tensor, Tensor]
    reveal_type(flashmask_attention(query=q, key=q, value=q, startend_row_indices=mask))  # Tensor
    reveal_type(flashmask_attention(query=q, key=q, value=q, block_mask=q, return_lse=True))  # tuple[Tensor, Tensor]
    flashmask_attention(query=q, key=q)  # error: call-overload
    reveal_type(flex_attention(q, q, q, lambda s, b, h, i, j: s * 2))  # Tensor
    reveal_type(flex_attention(q, q, q, return_lse=True))  # tuple[Tensor, Tensor]
    reveal_type(flex_attention(q, q, q, return_lse=asks))  # Tensor | tuple[Tensor, Tensor]
    reveal_type(flex_attention(q, q, q, return_aux=AuxRequest(lse=True))[1].lse)  # Tensor | None
    reveal_type(builders.causal(5))  # ColumnMask
    flash_attn_func(q, q, q, softmax_scale="half")  # error: call-overload
    flash_attn_func(q, q, q, "half")  # error: call-overload
    flash_attn_func(q, q, q, 0.5, True, (4, 0), q, return_lse=True)
    flash_attn_varlen_func(q, q, q, q, q, 7, 7, causal="yes")  # error: call-overload
    flash_attn_varlen_func(q, q, q, q, q, 7, 7, causal=True)
    flash_attn_func(q, q, q, is_causal=True)  # error: call-overload
    flash_attn_func(q, q)  # error: call-overload
    flashmask_attention(q, q, q, mask, dropout="half")  # error: call-overload
    flash_attn_func(q, q, q, config=(FwdConfig(tile_m=64), BwdConfig(tile_m=64)))
    FwdConfig(tile_k=64)  # error: call-arg
"""  # noqa: E501


def told(output: str) -> dict[int, str]:
    """By line: the type without the modules of its names, or "error: " and its code."""
    found = {}
    for line in output.splitlines():
        match = re.match(r"[^:]*sample\.py:(\d+): (note|error): (.*)", line)
        if match is None:
            continue
        number, kind, text = int(match[1]), match[2], match[3]
        if kind == "error":
            found[number] = "error: " + text.rpartition("[")[2].rstrip("]")
        elif text.startswith("Revealed type is "):
            found[number] = re.sub(r"[\w.]+\.(?=\w)", "", text.split('"')[1])
    return found


@pytest.mark.shares(3)
def test_mypy_of_a_user(tmp_path: Path) -> None:
    """Strict. Of an installed package mypy tells no errors either, which `silent` stands for."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nmypy_path = {ROOT}\n[mypy-flash_mask_cute.*]\n"
        "follow_imports = silent\n"
    )
    command = [sys.executable, "-m", "mypy", "sample.py"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(SAMPLE.splitlines(), 1)
        if "  # " in line
    }
    assert len(expected) == 28
    assert told(child.stdout) == expected, child.stdout + child.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "flash_mask_cute" / "py.typed").is_file()


Declared: TypeAlias = tuple[str | None, str | None]


def declared(node: ast.FunctionDef, others: Mapping[str, Mapping[str, str]]) -> dict[str, Declared]:
    """Annotation and default of each argument; fields of typed dictionaries have no defaults."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults = [*padding, *arguments.defaults, *arguments.kw_defaults]
    found = {}
    for argument, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True):
        annotation = None if argument.annotation is None else ast.unparse(argument.annotation)
        found[argument.arg] = (annotation, None if default is None else ast.unparse(default))
    unpacked = arguments.kwarg and arguments.kwarg.annotation
    if isinstance(unpacked, ast.Subscript) and ast.unparse(unpacked.value) == "Unpack":
        found |= {name: (kind, None) for name, kind in others[ast.unparse(unpacked.slice)].items()}
    return found


def fields(node: ast.ClassDef, others: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Name and annotation, those of its bases among `others` too."""
    rows = [row for row in node.body if isinstance(row, ast.AnnAssign)]
    found = {ast.unparse(row.target): ast.unparse(row.annotation) for row in rows}
    for base in node.bases:
        found |= others.get(ast.unparse(base), {})
    return found


# Arguments with two names, of which a declaration has one.
EITHER_NAME = {"flashmask_attention": {"q": "query", "k": "key", "v": "value"}}


@pytest.mark.parametrize("path", ["functional.py", "flex/attention.py"])
def test_declarations_have_the_arguments_of_the_function(path: str) -> None:
    """A checker compares types only: declarations may lack an argument, or have another default."""
    tree = ast.parse((ROOT / "flash_mask_cute" / path).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {node.name for node in functions if "overload" in map(ast.unparse, node.decorator_list)}
    assert names
    classes: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = fields(node, classes)
    what_is_asked = {"return_lse", "return_softmax_lse", "return_aux", "return_max_logit"}
    for name in names:
        *variants, definition = [node for node in functions if node.name == name]
        assert len(variants) >= 3
        expected = declared(definition, classes)
        for variant in variants:
            found, own = declared(variant, classes), declared(variant, dict.fromkeys(classes, {}))
            either = EITHER_NAME.get(name, {})
            is_other = not either.keys() <= found.keys()
            names_of = {*either.values()} if is_other else {*either}
            for argument in names_of:
                kind = found[argument]
                assert kind == ("Required[Tensor]" if is_other else "Tensor", None)
                assert expected[argument] == ("Tensor | None", "None")
            left_out = {*either, *either.values()} - names_of
            assert found.keys() == expected.keys() - left_out
            # by position in the same order, as far as declared
            positional = [x.arg for x in definition.args.args]
            if variant.args.vararg is not None or is_other:
                positional = positional[: len(variant.args.args)]
            assert list(own)[: len(positional)] == positional
            for argument in expected.keys() - what_is_asked - names_of - left_out:
                alike = expected[argument] if argument in own else (expected[argument][0], None)
                assert found[argument] == alike, (name, argument)
            for argument in expected.keys() & what_is_asked:
                default = found[argument][1]
                assert default in (None, expected[argument][1]), (name, argument)
