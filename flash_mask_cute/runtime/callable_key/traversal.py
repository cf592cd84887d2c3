"""The walk over everything that a callable reaches, written as bytes to be hashed."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from flash_mask_cute.runtime.callable_key.code_facts import (
    OPAQUE_BUILTINS,
    PROCESS_STATE,
    CodeFacts,
    code_facts,
    encode_atom,
    frame,
)
from flash_mask_cute.runtime.callable_key.releases import release_of, resolves

OVERRIDE_ATTRIBUTE = "__flash_mask_key__"
Step = tuple[str, Any]
"""From an object to what it holds: ("cell", number), ("default", number), ("keyword default", name)
or ("global", name) of a function; ("attribute", name) or ("item", key) of any object."""
Steps = tuple[Step, ...]


def key_given_for(obj: object) -> str | None:
    if isinstance(obj, types.MethodType):
        return None  # the attribute of the function says nothing about the bound object
    key = getattr(obj, OVERRIDE_ATTRIBUTE, None)
    if key is None:
        return None
    if not isinstance(key, str) or not key:
        raise TypeError(f"{OVERRIDE_ATTRIBUTE} must be a non-empty string, got {key!r}")
    return key


_CLASS_BOOKKEEPING = frozenset(
    {
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__classcell__",
        "__classdictcell__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slotnames__",  # copy and pickle leave it
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
# Library bases whose instances keep all their state in `__dict__` and `__slots__`.
_PLAIN_BASES: tuple[Any, ...] = (object, abc.ABC, typing.Generic, typing.Protocol)
# How a NamedTuple reads a field; the class has no public name.
_TUPLE_GETTER = type(typing.cast(Any, namedtuple("_Single", ["item"])).item)


class Traversal:
    """One depth-first traversal of everything a callable reaches, written as tagged frames.

    Objects with identity are numbered in order of first visit and referred to by number later.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._seen: dict[int, tuple[int, object]] = {}  # holds the object, so ids stay unique
        self._mentioned: tuple[str, ...] = ()
        self._trail: list[tuple[str, object, Steps]] = []

    def digest(self) -> str:
        return hashlib.sha256(b"".join(self._parts)).hexdigest()

    def root(self, fn: object) -> None:
        self._trail.append(("", getattr(fn, "__qualname__", None) or type(fn).__qualname__, ()))
        self._value(fn)

    # Writing.

    def _emit(self, tag: bytes, *payload: str) -> None:
        self._parts.append(frame(tag, b"".join([frame(b"", p.encode()) for p in payload])))

    def _open(self, tag: bytes) -> None:
        self._parts.append(frame(tag, b"("))

    def _close(self) -> None:
        self._parts.append(b")")

    def _group(self, tag: bytes, *parts: object) -> None:
        """Write a group of parts that messages do not name."""
        self._open(tag)
        for part in parts:
            self._behind(self._value, part)
        self._close()

    def _named(self, label: str, name: object, value: object, *steps: Step) -> None:
        """Write one named part. label: for messages. steps: from the object that holds it."""
        self._trail.append((label, name, steps))
        self._emit(b"name", label, str(name))
        self._value(value)
        self._trail.pop()

    def _behind(self, visit: Callable[[Any], None], value: object, *steps: Step) -> None:
        """Visit a part that messages do not name."""
        self._trail.append(("", "", steps))
        visit(value)
        self._trail.pop()

    def _first_visit(self, obj: object) -> bool:
        """Number `obj`; on a repeated visit write the reference and return False."""
        known = self._seen.get(id(obj))
        if known is not None:
            self._emit(b"ref", str(known[0]))
            return False
        self._seen[id(obj)] = (len(self._seen), obj)
        return True

    def _refuse(self, obj: object) -> TypeError:
        kind = type(obj)
        return TypeError(
            f"{self._where()} is a {kind.__module__}.{kind.__qualname__}, which has no identity "
            f"that could be part of a compile key. Pass tensors through aux_tensors; for anything "
            f"else set fn.{OVERRIDE_ATTRIBUTE} = '...' to a string that identifies the callable."
        )

    def _refuse_reach(self, what: str) -> TypeError:
        return TypeError(
            f"{self._where()} {what}, by which it may reach what no compile key can follow. Use "
            f"names instead, or set fn.{OVERRIDE_ATTRIBUTE} = '...' to a string that identifies "
            f"the callable."
        )

    def _where(self) -> str:
        named = (f"{x} {name!r}".strip() for x, name, _ in reversed(self._trail) if x or name)
        return " of ".join(named)

    # Values.

    def _value(self, obj: object) -> None:
        atom = encode_atom(obj)
        if atom is not None:
            self._parts.append(atom)
            return
        visit = _VISITORS.get(type(obj))
        if visit is not None:
            visit(self, obj)
        elif isinstance(obj, type):
            self._class(obj)
        elif isinstance(obj, enum.Enum):
            self._enum_member(obj)
        else:
            self._other(obj)

    def _tuple(self, obj: Sequence[Any], tag: bytes = b"tuple") -> None:
        # Not numbered: whether equal tuples are one object depends on how constants were merged.
        self._open(tag)
        for position, value in enumerate(obj):
            self._named("item", position, value, ("item", position))
        self._close()

    def _list(self, obj: list[Any]) -> None:
        if self._first_visit(obj):
            self._tuple(obj, b"list")

    def _mapping(self, obj: dict[Any, Any] | types.MappingProxyType[Any, Any]) -> None:
        if self._first_visit(obj):
            self._open(b"dict")
            for key, value in obj.items():  # insertion order: a loop in the callable sees it too
                self._behind(self._value, key)
                name = key if isinstance(key, str) else type(key).__name__
                self._named("item", name, value, ("item", key))
            self._close()

    def _set(self, obj: set[Any] | frozenset[Any]) -> None:
        if not self._first_visit(obj):
            return
        encoded = []
        for member in obj:  # in an order that changes between processes: start each one alike
            branch = Traversal()
            branch._seen = dict(self._seen)
            branch._mentioned = self._mentioned
            branch._trail = [*self._trail, ("member", type(member).__name__, ())]
            branch._value(member)
            encoded.append(branch.digest())
        self._emit(b"set", *sorted(encoded))

    def _namespace(self, obj: types.SimpleNamespace) -> None:
        if self._first_visit(obj):
            self._open(b"namespace")
            for name, value in sorted(vars(obj).items()):
                self._named("attribute", name, value, ("attribute", name))
            self._close()

    # Functions.

    def _function(self, fn: types.FunctionType) -> None:
        override = key_given_for(fn)
        if override is not None:
            self._emit(b"key", override)
            return
        attributes = fn.__dict__
        if "_decorator_kind" in attributes and "__wrapped__" in attributes:
            self._jit_function(fn)
            return
        module_name = fn.__globals__.get("__name__")
        release = release_of(module_name)
        if release is not None and resolves(fn, module_name, fn.__qualname__):
            self._emit(b"function", str(module_name), fn.__qualname__, release)
            return
        if self._first_visit(fn):
            # The DSL replaces the code of a decorated function when it first traces it.
            code = attributes.get("_original_code", fn.__code__)
            facts = code_facts(code)
            self._open(b"function")
            self._parts.append(frame(b"code", facts.digest))
            outer, self._mentioned = self._mentioned, facts.mentioned
            if release is None:
                self._state(fn, code)
                self._globals(fn, facts)
                self._attributes(attributes)
            else:
                # A factory of a library made it: the version pins the code and its globals, but
                # not what was bound when it was made.
                self._emit(b"from", str(module_name), release)
                if fn.__closure__ or "<locals>" in fn.__qualname__:
                    self._state(fn, code)
            self._mentioned = outer
            self._close()
        if release is None and attributes:
            self._attributes(attributes)

    def _state(self, fn: types.FunctionType, code: types.CodeType) -> None:
        escaping = code_facts(code).escaping
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        for number, (name, cell) in enumerate(cells):
            try:
                contents = cell.cell_contents
            except ValueError:
                self._emit(b"empty cell", name)
            else:
                self._check_module(name, contents, escaping)
                self._named("closure variable", name, contents, ("cell", number))
        defaults = fn.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        names = positional[len(positional) - len(defaults) :]
        for number, (name, value) in enumerate(zip(names, defaults, strict=True)):
            self._named("default of argument", name, value, ("default", number))
        for name, value in sorted((fn.__kwdefaults__ or {}).items()):
            self._named("default of argument", name, value, ("keyword default", name))

    def _globals(self, fn: types.FunctionType, facts: CodeFacts) -> None:
        namespace = fn.__globals__
        for name in facts.global_names:
            if name in namespace:
                self._check_module(name, namespace[name], facts.escaping)
                self._named("global", name, namespace[name], ("global", name))
            elif name in OPAQUE_BUILTINS:  # the code names the others already
                raise self._refuse_reach(f"uses {name}")
        for level, name in facts.imports:
            self._import(namespace, level, name)

    def _check_module(self, name: str, value: object, escaping: frozenset[str]) -> None:
        """Refuse an own module that goes where the names of its attributes are not seen."""
        if (
            isinstance(value, types.ModuleType)
            and name in escaping
            and not release_of(value.__name__)
        ):
            raise self._refuse_reach(f"hands on the module {name!r}")

    def _import(self, namespace: dict[str, Any], level: int, name: str) -> None:
        package = namespace.get("__package__") or namespace.get("__name__", "")
        try:
            full = importlib.util.resolve_name("." * level + name, package)
            modules = [
                importlib.import_module(part) for part in {full.partition(".")[0]: 0, full: 0}
            ]
        except ImportError:
            self._emit(b"missing module", name)
            return
        for module in modules:
            self._named("import", module.__name__, module)

    def _jit_function(self, fn: types.FunctionType) -> None:
        inner = fn.__dict__["__wrapped__"]
        self._open(b"jit")
        for part in (fn.__dict__["_decorator_kind"], getattr(inner, "_preprocess_enabled", True)):
            self._behind(self._value, part)
        self._behind(self._value, inner)
        if isinstance(inner, types.FunctionType) and release_of(inner.__module__) is None:
            self._annotations(inner)
        self._close()

    def _annotations(self, fn: types.FunctionType) -> None:
        lazy = getattr(fn, "__annotate__", None)  # Python 3.14: a function that evaluates them
        if isinstance(lazy, types.FunctionType):
            self._named("annotations", "", lazy)
            return
        for name, annotation in sorted(fn.__annotations__.items()):
            self._named("annotation of", name, annotation)
            self._names_in(annotation, fn.__globals__)

    def _names_in(self, annotation: object, namespace: dict[str, Any]) -> None:
        """Write the values of the names in an annotation that is kept as text."""
        if not isinstance(annotation, str):
            return
        try:
            facts = code_facts(compile(annotation, "<annotation>", "eval"))
        except SyntaxError:
            return
        for name in facts.global_names:
            if name in namespace:
                self._named("annotation", name, namespace[name])

    def _method(self, method: types.MethodType) -> None:
        self._open(b"method")
        self._behind(self._value, method.__func__, ("attribute", "__func__"))
        self._named("object", "self", method.__self__, ("attribute", "__self__"))
        self._close()

    def _partial(self, fn: functools.partial[Any]) -> None:
        self._open(b"partial")
        self._behind(self._value, fn.func, ("attribute", "func"))
        self._behind(self._tuple, fn.args, ("attribute", "args"))
        for name, value in fn.keywords.items():
            self._named("argument", name, value, ("attribute", "keywords"), ("item", name))
        self._close()

    def _builtin(self, fn: types.BuiltinFunctionType) -> None:
        owner = fn.__self__
        self._emit(b"builtin", fn.__module__ or "", fn.__qualname__)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._named("owner of", fn.__name__, owner)

    def _descriptor(self, descriptor: Any) -> None:
        owner = descriptor.__objclass__
        self._emit(b"descriptor", owner.__module__, owner.__qualname__, descriptor.__name__)

    # Modules, classes, instances.

    def _module(self, module: types.ModuleType) -> None:
        release = release_of(module.__name__)
        if release is not None:
            for state in PROCESS_STATE.get(module.__name__, frozenset()).intersection(
                self._mentioned
            ):
                raise self._refuse_reach(f"uses {module.__name__}.{state}")
            self._emit(b"module", module.__name__, release)
            return
        if self._first_visit(module):
            self._emit(b"own module", module.__name__)
        self._attributes(vars(module))

    def _attributes(self, attributes: dict[str, Any]) -> None:
        """Write the attributes, of a module or a function, that the current function mentions."""
        for name in self._mentioned:
            if name in attributes:
                self._named("attribute", name, attributes[name], ("attribute", name))

    def _class(self, cls: type) -> None:
        override = vars(cls).get(OVERRIDE_ATTRIBUTE)
        if isinstance(override, str):
            self._emit(b"key", override)
            return
        release = release_of(cls.__module__)
        if release is not None and "<locals>" not in cls.__qualname__:
            self._emit(b"class", cls.__module__, cls.__qualname__, release)
            return
        if not self._first_visit(cls):
            return
        self._open(b"class")
        for part in (cls.__qualname__, cls.__bases__, type(cls)):
            self._behind(self._value, part)
        if dataclasses.is_dataclass(cls):
            self._dataclass_fields(cls)
        if issubclass(cls, enum.Enum):
            for name, member in cls.__members__.items():
                self._named("member", name, member.value)
        for name, value in sorted(vars(cls).items()):
            if name in _CLASS_BOOKKEEPING or _is_generated(name, value):
                continue
            # An enum class is full of generated tables; its members are written already.
            if issubclass(cls, enum.Enum) and not isinstance(value, types.FunctionType | property):
                continue
            # no step: an attribute of an instance may hide it later
            self._named("class attribute", name, value)
        self._close()

    def _dataclass_fields(self, cls: Any) -> None:
        self._emit(b"options", repr(cls.__dataclass_params__))
        module = sys.modules.get(cls.__module__)
        for field in dataclasses.fields(cls):
            self._named("type of field", field.name, field.type)
            self._names_in(field.type, vars(module) if module else {})
            self._named("default of field", field.name, field.default)
            self._named("default of field", field.name, field.default_factory)

    def _enum_member(self, member: enum.Enum) -> None:
        self._class(type(member))
        self._emit(b"enum member", str(member.name))
        self._behind(self._value, member.value)

    def _other(self, obj: object) -> None:
        override = key_given_for(obj)
        text = _text_of_library_value(obj)
        kind = type(obj)
        if override is not None:
            self._emit(b"key", override)
        elif text is not None:
            self._emit(b"library value", kind.__module__, kind.__qualname__, text)
        elif typing.get_origin(obj) is not None:
            self._group(b"generic", typing.get_origin(obj), typing.get_args(obj))
        elif isinstance(obj, tuple) and hasattr(kind, "_fields"):
            self._open(b"namedtuple")
            self._class(kind)
            self._tuple(tuple(obj))
            self._close()
        elif all(_keeps_state_in_attributes(base) for base in kind.__mro__):
            self._instance(obj)
        else:
            raise self._refuse(obj)

    def _instance(self, obj: object) -> None:
        if not self._first_visit(obj):
            return
        cls = type(obj)
        self._open(b"instance")
        self._class(cls)
        for name, value in sorted(_instance_state(obj).items()):
            # A cached value follows from the rest, and is there only after the first use.
            if not isinstance(getattr(cls, name, None), functools.cached_property):
                # that of a slot has the class before it
                step = "attribute", name.rpartition(".")[2]
                self._named("attribute", name, value, step)
        self._close()


_VISITORS: dict[type, Callable[[Traversal, Any], None]] = {
    tuple: Traversal._tuple,
    list: Traversal._list,
    dict: Traversal._mapping,
    types.MappingProxyType: Traversal._mapping,
    set: Traversal._set,
    frozenset: Traversal._set,
    slice: lambda walk, x: walk._group(b"slice", (x.start, x.stop, x.step)),
    types.SimpleNamespace: Traversal._namespace,
    types.FunctionType: Traversal._function,
    types.MethodType: Traversal._method,
    types.BuiltinFunctionType: Traversal._builtin,
    types.MethodWrapperType: Traversal._builtin,
    types.ModuleType: Traversal._module,
    functools.partial: Traversal._partial,
    functools._lru_cache_wrapper: lambda walk, x: walk._group(b"lru_cache", x.__wrapped__),
    functools.cached_property: lambda walk, x: walk._group(b"cached_property", x.func),
    property: lambda walk, x: walk._group(b"property", (x.fget, x.fset, x.fdel)),
    staticmethod: lambda walk, x: walk._group(b"staticmethod", x.__func__),
    classmethod: lambda walk, x: walk._group(b"classmethod", x.__func__),
    types.MethodDescriptorType: Traversal._descriptor,
    types.WrapperDescriptorType: Traversal._descriptor,
    types.ClassMethodDescriptorType: Traversal._descriptor,
    types.GetSetDescriptorType: Traversal._descriptor,
    types.MemberDescriptorType: Traversal._descriptor,
    # what pickle would make it of again
    _TUPLE_GETTER: lambda walk, x: walk._group(b"tuple getter", x.__reduce__()[1]),
}


def _is_generated(name: str, value: object) -> bool:
    """Whether the dataclass decorator wrote this method; never known in Python 3.10."""
    if not name.startswith("__") or not isinstance(value, types.FunctionType):
        return False
    return (
        getattr(value.__code__, "co_qualname", "").startswith("__create_fn__.<locals>.__")
        and value.__code__.co_filename == "<string>"
    ) or (name == "__repr__" and value.__globals__.get("__name__") in ("dataclasses", "reprlib"))


def _keeps_state_in_attributes(base: type) -> bool:
    return (
        base in _PLAIN_BASES
        or dataclasses.is_dataclass(base)
        or release_of(base.__module__) is None
    )


def _instance_state(obj: object) -> dict[str, Any]:
    """Return the attributes that `obj` itself holds, in `__dict__` or in slots."""
    state = dict(getattr(obj, "__dict__", {}))
    for base in type(obj).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    state[f"{base.__qualname__}.{name}"] = member.__get__(obj)
                except AttributeError:
                    continue
    return state


def _text_of_library_value(obj: object) -> str | None:
    """Describe immutable values of the libraries we know, recognised without importing them."""
    kind = type(obj)
    library = kind.__module__.partition(".")[0]
    if library == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(obj)
    if library == "torch" and kind.__name__ == "Size":
        return repr(tuple(typing.cast(tuple[int, ...], obj)))
    if library == "numpy":
        bases = {base.__name__ for base in kind.__mro__}
        if "generic" in bases and "void" not in bases and "object_" not in bases:
            return repr(typing.cast(Any, obj).item())
        if "dtype" in bases:
            return repr(obj)
    if library == "cutlass":
        value = getattr(obj, "value", None)
        if type(value) in (bool, int, float):
            return repr(value)
    if library in ("typing", "dataclasses"):  # special forms, type variables and sentinels
        return repr(obj) if library == "typing" else kind.__qualname__
    return None
