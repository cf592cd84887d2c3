"""What a code object says by itself: its encoding, and the names that it loads. Kept per object."""

from __future__ import annotations

import dis
import hashlib
import operator
import struct
import types
import weakref
from typing import Any, NamedTuple


class CodeFacts(NamedTuple):
    """What a code object contributes by itself, nested code objects included."""

    digest: bytes
    global_names: tuple[str, ...]
    imports: tuple[tuple[int, str], ...]  # (level, dotted name) of import statements in the body
    mentioned: tuple[str, ...]  # attribute names, and string constants that could be one
    escaping: frozenset[str]  # variables whose value is not only stored or asked for an attribute


_FACTS: weakref.WeakKeyDictionary[types.CodeType, CodeFacts] = weakref.WeakKeyDictionary()
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELL_LOADS = frozenset({"LOAD_DEREF", "LOAD_CLOSURE"})
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_signature_of = operator.attrgetter(
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_names"),
    *("co_varnames", "co_cellvars", "co_freevars"),
)
# By which code reaches what it does not name: builtins, and attributes of modules that hold the
# state of the process.
OPAQUE_BUILTINS = frozenset({"globals", "vars", "eval", "exec", "__import__"})
PROCESS_STATE = {"sys": frozenset({"modules", "argv"}), "os": frozenset({"environ", "getenv"})}


def code_facts(code: types.CodeType) -> CodeFacts:
    facts = _FACTS.get(code)
    if facts is None:
        facts = _FACTS[code] = _analyse(code)
    return facts


def _analyse(code: types.CodeType) -> CodeFacts:
    global_names: set[str] = set()
    imports: set[tuple[int, str]] = set()
    escaping: set[str] = set()
    mentioned = set(code.co_names)
    parts: list[bytes] = [
        frame(b"code", code.co_code),
        frame(b"exceptions", getattr(code, "co_exceptiontable", b"")),
        frame(b"signature", repr(_signature_of(code)).encode()),
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            nested = code_facts(constant)
            global_names.update(nested.global_names)
            imports.update(nested.imports)
            mentioned.update(nested.mentioned)
            escaping.update(nested.escaping)
            parts.append(frame(b"nested", nested.digest))
        else:
            if isinstance(constant, str) and constant.isidentifier():
                mentioned.add(constant)
            parts.append(_constant(constant))

    level, loaded = 0, ""
    for instruction in dis.get_instructions(code):
        if loaded and not _stays(instruction, code.co_names):
            escaping.add(loaded)
        is_global = instruction.opname in _GLOBAL_LOADS
        loaded = instruction.argval if is_global or instruction.opname in _CELL_LOADS else ""
        if is_global:
            global_names.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imports.add((level, instruction.argval))
        # The compiler pushes the level, then the list of names, then imports.
        elif isinstance(instruction.argval, int) and "LOAD" in instruction.opname:
            level = instruction.argval
    return CodeFacts(
        hashlib.sha256(b"".join(parts)).digest(),
        tuple(sorted(global_names)),
        tuple(sorted(imports)),
        tuple(sorted(name for name in mentioned if not name.startswith("__"))),
        frozenset(escaping),
    )


def _stays(following: dis.Instruction, names: tuple[str, ...]) -> bool:
    """Whether a value that was just loaded is stored or asked for an attribute of a known name."""
    if following.opname == "LOAD_CONST" and isinstance(following.argval, str):
        return "getattr" in names or "hasattr" in names
    return following.opname.startswith((*_ATTRIBUTE_LOADS, "STORE_"))


def frame(tag: bytes, payload: bytes) -> bytes:
    """Tag and length before the payload make every concatenation of frames unambiguous."""
    return b"%b %d:%b" % (tag, len(payload), payload)


def _constant(value: object) -> bytes:
    """Encode what the Python compiler can put in ``co_consts``, code objects apart."""
    atom = encode_atom(value)
    if atom is not None:
        return atom
    if isinstance(value, tuple):
        return frame(b"tuple", b"".join(_constant(item) for item in value))
    if isinstance(value, frozenset):
        return frame(b"frozenset", b"".join(sorted(_constant(item) for item in value)))
    if isinstance(value, slice):
        return frame(b"slice", _constant((value.start, value.stop, value.step)))
    raise TypeError(f"unexpected constant of type {type(value).__name__} in a code object")


_REPR_ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, range, type(Ellipsis), type(NotImplemented)}
)


def encode_atom(value: Any) -> bytes | None:
    """Encode a scalar whose type is exactly a builtin one, else return None."""
    kind = type(value)
    if kind is str:
        return frame(b"str", value.encode("utf-8", "surrogatepass"))
    if kind in _REPR_ATOMS:
        return frame(kind.__name__.encode(), repr(value).encode())
    if kind is float:
        return frame(b"float", struct.pack(">d", value))
    if kind is complex:
        return frame(b"complex", struct.pack(">dd", value.real, value.imag))
    if kind is bytes:
        return frame(b"bytes", value)
    return None
