"""Mods written in torch, lowered to CuTe mods, and the cache of the results.

`lower_mod` walks what the mod reaches, looks up the program for this structure, and collects the
tensors that the mod holds now. Only a new structure is traced.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_mask_cute.lowering.captures import CapturedTensor, Captures, Reached, find_captures
from flash_mask_cute.lowering.interval_rows import Rows, rows_of
from flash_mask_cute.lowering.intervals import Form, find_form
from flash_mask_cute.lowering.paths import Path, UnreachableError
from flash_mask_cute.lowering.simplify import (
    BandForm,
    Bound,
    Joined,
    band_of,
    find_bounds,
    name_of_node,
    nodes_behind,
)
from flash_mask_cute.lowering.text import Text, UnknownOperator, note_captured, write
from flash_mask_cute.lowering.trace import Trace, name_of, trace
from flash_mask_cute.lowering.values import DSL_NAMES, NotLowerable
from flash_mask_cute.mods.aux_tensors import MAX_AUX_RANK, is_read_on
from flash_mask_cute.runtime.process_state import trace_lock
from flash_mask_cute.runtime.recent import Recent

KINDS = ("mask_mod", "score_mod")
# Integers below it are floating-point numbers, too.
_MOST_VARYING = 1 << 53
# Values of a number that scales positions with programs, and so kernels, of their own.
_MOST_SCALES = 8
_SCALING = ("div", "floor_divide", "fmod", "mul", "remainder")


@dataclass(frozen=True)
class LoweredMod:
    """A lowered torch mod, as attention takes it.

    mod: a CuTe mask_mod or score_mod, the same object for every mod with the same text. source: its
    text. kind: "mask_mod" or "score_mod". origins: for each of aux_tensors, the path by which the
    torch mod reaches it. band: the mask_mod as two numbers, if these express it. columns: as column
    intervals, if these may express it. is_identity: a score_mod returns the score. is_lasting: it
    serves later calls as long as nothing that the torch mod reaches changes; each of aux_tensors is
    then a captured tensor itself, or none that a captured one changes. makes_tensors: some of them
    are new ones, of numbers. checks: all indices are clamped to the tensors, even to small ones.
    rewritten: see `Program.rewritten`. reached: by the walk of the torch mod.
    """

    mod: Callable[..., Any]
    aux_tensors: tuple[Tensor, ...]
    source: str
    kind: str
    origins: tuple[Path, ...]
    band: BandForm | None
    columns: IntervalForm | None
    is_identity: bool
    is_lasting: bool
    makes_tensors: bool
    checks: bool
    rewritten: Callable[[int, bool], tuple[Callable[..., Any], str]] = field(repr=False)
    reached: Reached = field(repr=False)

    def written(self, first_aux: int = 0, checks: bool = False) -> LoweredMod:
        """The same mod, reading its tensors after `first_aux` others, and with all indices clamped
        if `checks`."""
        checks |= self.checks
        mod, source = self.rewritten(first_aux, checks)
        if mod is self.mod:
            return self
        return replace(self, mod=mod, source=source, checks=checks)

    @property
    def form(self) -> str:
        """The form that `flex_attention` gives to a mask_mod, in words."""
        if self.band is not None:
            return f"a window, keys q - {self.band.left} to q + {self.band.right}".replace(
                "q - None", "0"
            ).replace("q + None", "the last")
        if self.columns is None:
            return "a mask_mod"
        documents = "documents, by " if self.columns.form.has_documents else ""
        return f"{documents}column intervals"


@dataclass(frozen=True)
class IntervalForm:
    """A mask as column intervals, at a call. captured, numbers: what the intervals follow from.
    paths: of captured. known: values of nodes that depend on no index."""

    form: Form
    captured: tuple[Tensor, ...]
    paths: tuple[Path, ...]
    numbers: tuple[int | float, ...]
    known: Callable[[Node], Any]

    def rows(self, seqlens: tuple[int, int], batch: int, device: torch.device) -> Rows | None:
        """As `interval_rows.rows_of`."""
        with torch.no_grad():
            return rows_of(self.form, self.known, seqlens, batch, device)


def lower_mod(
    mod: Callable[..., Any], kind: str, device: torch.device | str | None = None
) -> LoweredMod:
    """Lower a mod written in torch to CuTe.

    mod: mask_mod(b, h, q_idx, kv_idx) -> bool, or score_mod(score, b, h, q_idx, kv_idx) -> score,
    on 0-d tensors. kind: "mask_mod" or "score_mod". device: where attention runs; the default is
    that of the first captured tensor, or the CPU.

    A mod whose structure was lowered before is not traced again; tensors that replace its captured
    ones are read instead. Raises NotImplementedError: a kernel cannot do what the mod does; names
    mod, line and operator; TypeError: the mod does not return a bool (mask_mod) or a number
    (score_mod); ValueError: kind is neither.

    Example:
        >>> from flash_mask_cute.flex import lower_mod
        >>> lower_mod(lambda b, h, q, k: (q >= k) & (q < k + 9), "mask_mod").form
        'a window, keys q - 8 to q + 0'
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be mask_mod or score_mod, got {kind!r}")
    captures = find_captures(mod)
    devices = (x.tensor.device for x in captures.tensors if x.tensor.dim())
    target = torch.device(next(devices, "cpu") if device is None else device)
    program, captures = _program(_Asked(mod, kind, captures, target))
    return program.at_call(mod, captures, target)


def found_program(
    mod: Callable[..., Any], kind: str, device: torch.device
) -> tuple[Program, Captures]:
    """The program of a mod, and the captures that give its tensors."""
    return _program(_Asked(mod, kind, find_captures(mod), device))


def mod_source(
    mod: Callable[..., Any],
    kind: str | None = None,
    *,
    device: torch.device | str | None = None,
) -> str:
    """The CuTe source text of a lowered torch mod. Calls on this device then need not trace it.

    kind: "mask_mod" or "score_mod"; by default it follows from the number of arguments, 4 or 5.
    device: where attention runs, such as "cuda"; by default that of the first captured tensor, or
    the CPU.

    Raises:
        NotImplementedError, TypeError, ValueError: as `lower_mod`.

    Example:
        >>> from flash_mask_cute import mod_source
        >>> print(mod_source(lambda b, h, q, k: q >= k, device="cpu"))  # doctest: +SKIP
    """
    if kind is None:
        from flash_mask_cute.lowering.convention import kind_of_torch_mod

        kind = kind_of_torch_mod(mod)
    return lower_mod(mod, kind, device).source


# -- what is kept -------------------------------------------------------------------------------

_NUMBER, _COMPUTED = Path.named("a number"), Path.named("a tensor computed inside")
_CONSTANT = Path.named("a constant")


@dataclass(frozen=True)
class Program:
    """The lowered program of a structure.

    name: of the first mod, for messages. text: after no other aux tensors, without checks. found:
    the captured tensors of a mod that no walk can follow; such a program is made anew at each call.
    varying: the captured numbers that are not constants of it. bounds, form: of a mask that may be
    a band, or column intervals. knows_shapes: it is for these shapes of captured tensors.
    constants: tensors that the mod makes, by device. mods: by the arguments of `rewritten`.
    """

    name: str
    kind: str
    text: Text
    module: GraphModule
    found: tuple[CapturedTensor, ...] | None = None
    varying: tuple[int, ...] = ()
    bounds: Bound | Joined | None = None
    form: Form | None = None
    knows_shapes: bool = False
    constants: dict[Any, Tensor] = field(default_factory=dict)
    mods: dict[tuple[int, bool], tuple[Callable[..., Any], str]] = field(default_factory=dict)

    def at_call(
        self, mod: Callable[..., Any], captures: Captures, device: torch.device
    ) -> LoweredMod:
        """The lowered mod for a mod of this structure and its captures."""
        captured = captures.tensors if self.found is None else self.found
        numbers = tuple(captures.numbers[i].number for i in self.varying)
        computed = _Computed(self.module, captured, numbers)
        made: list[Tensor] = []
        origins: list[Path] = []
        is_lasting = self.found is None
        for source in self.text.sources:
            if source.captured is not None:
                tensor, path = captured[source.captured]
            elif source.number is not None:
                assert source.computed is not None
                number = computed.of(source.computed)
                with torch.inference_mode(False):
                    # another call may save it for its backward
                    tensor = torch.full((1,), number, dtype=source.number, device=device)
                path = _NUMBER
            elif source.computed is not None:
                tensor, path = computed.of(source.computed), _COMPUTED
            else:
                assert source.constant is not None
                tensor, path = self._constant_on(source.constant, device), _CONSTANT
            if source.detached:
                tensor = tensor.detach()
            made.append(_as_aux(tensor, device, mod, path))
            origins.append(path)
            if source.captured is not None:
                is_lasting &= made[-1] is captured[source.captured].tensor
            else:
                is_lasting &= source.computed is None or source.number is not None
        band = None if self.bounds is None else band_of(self.bounds, computed.of)
        columns = None
        if self.form is not None:
            tensors, paths = tuple(x.tensor for x in captured), tuple(x.path for x in captured)
            columns = IntervalForm(self.form, tensors, paths, numbers, computed.of)
        makes_tensors = any(source.number is not None for source in self.text.sources)
        claims = self.text.claims
        checks = any(made[i].shape[dimension] < extent for i, dimension, extent in claims)
        cute_mod, text = self.rewritten(captured, 0, checks)
        return LoweredMod(
            cute_mod,
            tuple(made),
            text,
            self.kind,
            tuple(origins),
            band=band,
            columns=columns,
            is_identity=_returns_its_first(self.module),
            is_lasting=is_lasting,
            makes_tensors=makes_tensors,
            checks=checks,
            rewritten=functools.partial(self.rewritten, captured),
            reached=captures.reached,
        )

    def rewritten(
        self, captured: tuple[CapturedTensor, ...], first_aux: int, checks: bool
    ) -> tuple[Callable[..., Any], str]:
        """The function and its text, of `write` with these arguments."""
        key = first_aux if self.text.sources else 0, checks and bool(self.text.claims)
        found = self.mods.get(key)
        if found is None:
            with trace_lock():
                given = self.name, self.kind == "score_mod", self.module, captured
                text = write(*given, *key) if any(key) else self.text
                found = self.mods[key] = _mod_of(text.source, self.kind), text.source
        return found

    def _constant_on(self, tensor: Tensor, device: torch.device) -> Tensor:
        key = id(tensor), device
        if key not in self.constants:
            with torch.inference_mode(False):
                self.constants[key] = tensor.to(device)
        return self.constants[key]


def _scaled_by(number: Node) -> list[Node]:
    """Integers that are divided or multiplied by a number, or by one that is made of it."""
    found = []
    for user in number.users:
        made = user.meta.get("val")
        if not isinstance(made, Tensor):
            found += [] if made is None else _scaled_by(user)
        elif name_of_node(user) in _SCALING and not made.dtype.is_floating_point:
            found.append(user)
    return found


def _returns_its_first(module: GraphModule) -> bool:
    (returned,) = module.graph.find_nodes(op="output")
    return returned.args[0] is module.graph.find_nodes(op="placeholder")[0]


class _Computed:
    """Values of nodes that depend only on captured tensors and numbers, computed once a call."""

    def __init__(
        self,
        module: GraphModule,
        captured: tuple[CapturedTensor, ...],
        numbers: tuple[int | float, ...],
    ) -> None:
        self._module = module
        self._captured = captured
        self._known: dict[Node, Any] = {}
        if numbers:
            given = module.graph.find_nodes(op="placeholder")
            self._known.update(zip(given[-len(numbers) :], numbers, strict=True))

    def of(self, node: Node) -> Any:
        if node not in self._known:
            if node.op == "get_attr":
                place = node.meta["captured"]
                if place is None:
                    self._known[node] = getattr(self._module, str(node.target))
                else:
                    self._known[node] = self._captured[place].tensor
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.of)
                self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]


def _as_aux(tensor: Tensor, device: torch.device, mod: Callable[..., Any], path: Path) -> Tensor:
    """A captured tensor in the form that kernels read, without a copy."""
    where = f"{path}, which {name_of(mod)} reads,"
    if not is_read_on(tensor.dtype, device):
        hint = "; pass x.float()" if tensor.dtype == torch.float64 else ""
        raise TypeError(f"{where} has dtype {tensor.dtype}, which no kernel reads{hint}")
    if tensor.dim() > MAX_AUX_RANK:
        raise NotImplementedError(
            f"{where} has {tensor.dim()} dimensions, and kernels read up to {MAX_AUX_RANK}: "
            "flatten some of them before the call"
        )
    if tensor.numel() == 0:
        raise IndexError(f"{where} is empty, shape {tuple(tensor.shape)}")
    if tensor.device.type != device.type:
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            return tensor.to(device).view(1)
        raise ValueError(f"{where} is on {tensor.device}, and query is on {device}")
    return tensor if tensor.dim() else tensor.view(1)


@dataclass
class _Structure:
    """Knowledge about the mods of one structure.

    name: kind, key of the captures, whether they follow forward, type of the device. first: the
    numbers that the first mod captured. calls_modules: the mod must be walked again with
    follows_forward. varying: numbers that have changed since, and are aux tensors now; fixed:
    numbers that cannot be. scales: values of numbers that divide or multiply positions, as the side
    of a grid does. They stay constants: otherwise nothing is known of differences of positions
    (docs/mods.md#classes-of-reads).
    """

    name: tuple[Any, ...]
    first: tuple[int | float, ...]
    follows_forward: bool
    varying: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()
    scales: dict[int, set[int | float]] = field(default_factory=dict)
    knows_shapes: bool = False
    calls_modules: bool = False

    def key(self, captures: Captures) -> Any:
        """The key of the program for these captures, as far as its dependencies are known."""
        varying = self.varying_of(captures)
        numbers = tuple(
            None if i in varying else repr(x.number) for i, x in enumerate(captures.numbers)
        )
        shapes = None
        if self.knows_shapes:
            shapes = tuple((x.tensor.shape, x.tensor.stride()) for x in captures.tensors)
        return self.name, varying, numbers, shapes

    def varying_of(self, captures: Captures) -> tuple[int, ...]:
        """Those of `varying` that have usual values now: the arithmetic of unknown numbers knows no
        NaN and no infinity."""
        return tuple(
            i
            for i in self.varying
            if abs(captures.numbers[i].number) < _MOST_VARYING
            and captures.numbers[i].number not in self.scales.get(i, ())
        )

    def note_scales(self, captures: Captures, program: Program) -> bool:
        """Note the values of `scales`, unless there are many; whether there are new ones."""
        placeholders = program.module.graph.find_nodes(op="placeholder")
        query_and_key = set(placeholders[3:5])
        given = placeholders[len(placeholders) - len(program.varying) :]
        is_new = False
        for node, i in zip(given, program.varying, strict=True):
            known = self.scales.setdefault(i, set())
            if len(known) < _MOST_SCALES and query_and_key <= nodes_behind(_scaled_by(node)):
                known.add(captures.numbers[i].number)
                is_new = True
        return is_new

    def note_changes(self, captures: Captures) -> None:
        """Numbers that differ from their first value vary from now on."""
        self.fixed |= {i for i, x in enumerate(captures.numbers) if x.is_shared}
        changed = {
            i
            for i, (old, new) in enumerate(zip(self.first, captures.numbers, strict=True))
            if repr(old) != repr(new.number)
        }
        self.varying = tuple(sorted((changed | set(self.varying)) - self.fixed))


# What is forgotten is traced again when it is needed. A program has its graph, of about 0.2 MB.
_structures: dict[Any, _Structure] = Recent(4096)
_programs: dict[Any, Program] = Recent(512)
_mods: dict[str, Callable[..., Any]] = Recent(1024)
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
traces = 0
"""How many mods were traced in this process."""


class _Asked(NamedTuple):
    """A mod to be lowered. device: of attention."""

    mod: Callable[..., Any]
    kind: str
    captures: Captures
    device: torch.device


def _program(asked: _Asked) -> tuple[Program, Captures]:
    """The program of a mod, and the captures that give its tensors."""
    with trace_lock():
        if asked.captures.key is None:
            return _untracked(asked), asked.captures
        structure = _structure(asked)
        if structure.calls_modules:
            asked = asked._replace(captures=find_captures(asked.mod, follows_forward=True))
            if asked.captures.key is None:
                return _untracked(asked), asked.captures
            structure = _structure(asked)
        program = _programs.get(structure.key(asked.captures))
        if program is not None:
            return program, asked.captures
        return _new_program(structure, asked)


def _structure(asked: _Asked) -> _Structure:
    captures = asked.captures
    name = asked.kind, captures.key, captures.follows_forward, asked.device.type
    structure = _structures.get(name)
    if structure is None:
        numbers = tuple(x.number for x in captures.numbers)
        structure = _structures[name] = _Structure(name, numbers, captures.follows_forward)
    return structure


def _new_program(structure: _Structure, asked: _Asked) -> tuple[Program, Captures]:
    captures = asked.captures
    structure.note_changes(captures)
    found = _programs.get(structure.key(captures))
    if found is not None:
        return found, captures
    try:
        varying = structure.varying_of(captures)
        program, traced = _lowered(asked, varying)
    except (NotLowerable, UnreachableError):
        if not varying:
            raise
        # the mod needs to know them: one program for each value
        structure.fixed |= set(structure.varying)
        structure.varying = ()
        program, traced = _lowered(asked, ())
    structure.knows_shapes |= program.knows_shapes
    if traced.calls_modules and not structure.follows_forward:
        structure.calls_modules = True
        return _program(asked)
    if program.found is not None:
        return _untracked(asked, program), captures
    if asked.kind == "score_mod" and structure.note_scales(captures, program):
        return _new_program(structure, asked)
    _programs[structure.key(captures)] = program
    return program, captures


def _untracked(asked: _Asked, program: Program | None = None) -> Program:
    """Trace a mod at each call, because nothing shows whether it changed."""
    place = getattr(asked.mod, "__code__", type(asked.mod))
    if place not in _warned:
        _warned.add(place)
        reason = asked.captures.reason or "it reaches tensors by ways that are not followed"
        warnings.warn(
            f"{name_of(asked.mod)} is traced anew at each call, which takes some 20 ms: {reason}",
            stacklevel=5,
        )
    return program or _lowered(asked, ())[0]


def _lowered(asked: _Asked, varying: tuple[int, ...]) -> tuple[Program, Trace]:
    global traces
    traces += 1
    mod, captures, is_score = asked.mod, asked.captures, asked.kind == "score_mod"
    for tensor, path in captures.tensors:
        if tensor.is_nested:
            raise NotLowerable(
                f"{path}, which {name_of(mod)} reads, is a NestedTensor, and kernels "
                "read tensors of one shape: capture torch.nested.to_padded_tensor(x, 0), or its "
                "values and its offsets, x.values() and x.offsets()"
            )
    numbers = [captures.numbers[i] for i in varying]

    def bind(values: Sequence[Any]) -> Callable[..., Any]:
        copied = mod
        for number, value in zip(numbers, values, strict=True):
            copied = number.path.copy(copied, value)
        return copied

    bind([0] * len(numbers))
    decompositions: dict[Any, Any] = {}
    text = None
    while text is None:
        known = [x.number for x in numbers]
        found = trace(mod, bind, known, is_score, asked.device, decompositions)
        try:
            held = note_captured(found.module, captures.tensors)
            text = write(name_of(mod), is_score, found.module, held)
        except UnknownOperator as error:
            from torch._decomp import decomposition_table

            if error.target in decompositions or error.target not in decomposition_table:
                raise
            decompositions[error.target] = decomposition_table[error.target]
    _forget_captured(found.module)
    is_followed = captures.key is not None and len(held) == len(captures.tensors)
    program = Program(
        name_of(mod),
        asked.kind,
        text,
        found.module,
        found=None if is_followed else held,
        varying=varying,
        bounds=None if is_score else find_bounds(found.module),
        form=None if is_score else find_form(found.module),
        knows_shapes=found.knows_shapes or text.knows_shapes,
    )
    return program, found


def _forget_captured(module: GraphModule) -> None:
    """Drop captured tensors from a kept program, so that it does not keep them alive."""
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if node.meta["captured"] is not None and hasattr(module, name):
            delattr(module, name)


def _mod_of(text: str, kind: str) -> Callable[..., Any]:
    """The function of a text; equal texts share one."""
    mod = _mods.get(text)
    if mod is None:
        mod = _mods[text] = _compiled(text, kind)
    return mod


def _compiled(text: str, kind: str) -> Callable[..., Any]:
    """Compile the text in a way that lets the DSL and tracebacks read it back."""
    import cutlass
    import cutlass.cute as cute

    from flash_mask_cute.lowering import device_ops

    digest = hashlib.sha256(text.encode()).hexdigest()
    file = f"<flash_mask_cute {kind} {digest[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {name: getattr(cutlass, name) for name in DSL_NAMES.values()}
    scope |= {"cute": cute, "ops": device_ops, "inf": math.inf, "nan": math.nan}
    exec(compile(text, file, "exec"), scope)
    mod: Any = scope[kind]
    mod.__flash_mask_prefix__ = scope.get("prefix_mod")
    weakref.finalize(mod, _forget_text, text, file).atexit = False
    mod.__flash_mask_key__ = f"torch {kind} {digest}"
    return mod


def _forget_text(text: str, file: str) -> None:
    """Called when a function of this text is gone, unless another one was made meanwhile."""
    if _mods.get(text) is None:
        linecache.cache.pop(file, None)
