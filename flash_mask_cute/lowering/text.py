"""Generation of the text of a CuTe mod from a traced graph.

The contents of a node are known; or they follow from captured tensors alone, and the host computes
them before the call; or they depend on the score or its place, and become lines of text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_mask_cute.lowering import ops
from flash_mask_cute.lowering.advice import instead_of
from flash_mask_cute.lowering.captures import CapturedTensor
from flash_mask_cute.lowering.paths import Path
from flash_mask_cute.lowering.prefix import find_prefixes
from flash_mask_cute.lowering.searches import SEARCHES
from flash_mask_cute.lowering.simplify import name_of_node
from flash_mask_cute.lowering.trace import INDEX_NAMES, line_of
from flash_mask_cute.lowering.values import (
    DSL_NAMES,
    Array,
    Element,
    NotLowerable,
    Number,
    Read,
    Table,
)

# Short names of the score and its place in the text, in the order of a mod's arguments.
_SHORT = {"s": "score", "b": "b_idx", "h": "h_idx", "q": "q_idx", "k": "kv_idx"}
_WORD = re.compile(r"[A-Za-z_]\w*")
_LIFTS = ("lift_fresh_copy", "lift_fresh", "alias", "clone", "detach")
# Of a tensor they take the dtype and the device; the number is at this place of the arguments.
_FILLED: dict[str, int | bool] = {
    "new_ones": True, "ones_like": True, "new_zeros": False, "zeros_like": False, "new_full": 2,
    "full_like": 1, "full": 1, "scalar_tensor": 0,
}  # fmt: skip


class UnknownOperator(NotLowerable):
    """There is no rule for an operator (target); torch may be able to decompose it."""

    def __init__(self, text: str, target: Any) -> None:
        super().__init__(text)
        self.target = target


class Source(NamedTuple):
    """The source of an aux tensor at each call: one of the first three fields.

    captured: its number among the captured tensors. constant: a tensor that the mod makes.
    computed: a node that the host computes. number: the dtype that stores a computed number.
    """

    captured: int | None = None
    constant: Tensor | None = None
    computed: Node | None = None
    detached: bool = False
    number: torch.dtype | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.captured, id(self.constant), self.computed, self.detached, self.number


class Text(NamedTuple):
    """source: text of a function `mask_mod` or `score_mod`, and perhaps of a `prefix_mod`: where it
    holds of a key, all queries see this key and those before it. sources: of its aux tensors.

    claims: (number of a source, dimension, extent) that the tensors must have at least.
    knows_shapes: the text holds extents of captured tensors.
    """

    source: str
    sources: tuple[Source, ...]
    claims: frozenset[tuple[int, int, int]]
    knows_shapes: bool


class _Line(NamedTuple):
    name: str
    expression: str
    read: Read | None


def note_captured(
    module: GraphModule, captured: tuple[CapturedTensor, ...]
) -> tuple[CapturedTensor, ...]:
    """Note in each tensor of a trace which captured one it is, None if the mod makes it. Returns
    the given tensors, then those found only by the trace."""
    found = list(captured)
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        place = next((i for i, x in enumerate(found) if x.tensor is tensor), None)
        is_made_inside = place is None and all(name_of_node(x) in _LIFTS[:2] for x in node.users)
        if place is None and not is_made_inside:
            place = len(found)
            found.append(CapturedTensor(tensor, Path.named("a tensor")))
        node.meta["captured"] = place
    return tuple(found)


def write(
    name: str,
    is_score: bool,
    module: GraphModule,
    captured: tuple[CapturedTensor, ...],
    first_aux: int = 0,
    checks: bool = False,
) -> Text:
    """Write the text of a traced mod.

    name: of the mod, for messages. captured: of `note_captured`, at this or a later call.
    first_aux: aux tensors of others before those of the mod. checks: all indices are clamped, so
    that the text claims no extents. Raises NotImplementedError: the mod has no text; names mod,
    line and operator; UnknownOperator: torch's decompositions may help; TypeError: the mod returns
    something that no mod may return."""
    given = name, is_score, module, captured, first_aux, checks
    text, read = _Writer(*given, None).text()
    # sources that no needed line reads take no numbers
    return text if len(read) == len(text.sources) else _Writer(*given, read).text()[0]


@dataclass
class _Writer:
    """read: sources that the lines read, in the order found; None if not known yet."""

    mod_name: str
    is_score: bool
    module: GraphModule
    captured: tuple[CapturedTensor, ...]
    first_aux: int
    checks: bool
    read: Sequence[int] | None

    def __post_init__(self) -> None:
        self._arguments = list(_SHORT)[0 if self.is_score else 1 :]
        self._known: dict[Node, Tensor] = {}
        self._hosted: set[Node] = set()
        self._values: dict[Node, Any] = {}
        self._lines: list[_Line] = []
        self._names = {"aux", "inf", "nan", "cute", "ops", *_SHORT, *_SHORT.values()}
        self._sources: list[Source] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._knows_shapes = False

    # nodes

    def _node(self, node: Node) -> None:
        if node.op == "placeholder" and not self._arguments:
            self._number(node)
        elif node.op == "placeholder":
            name = self._arguments.pop(0)
            dtype = torch.float32 if name == "s" else torch.int32
            is_index = name != "s"
            element = Element(name, low=0 if is_index else None, never_negative=is_index)
            self._values[node] = Array(dtype, (), (element,))
        elif node.op == "get_attr":
            self._held(node)
        else:
            self._operator(node)

    def _held(self, node: Node) -> None:
        """A tensor that is not an argument of the mod."""
        if node.meta["captured"] is None:
            self._known[node] = getattr(self.module, str(node.target)).detach().cpu()
        else:
            self._hosted.add(node)

    def _number(self, node: Node) -> None:
        """A Python number that is known only at a call, or follows from such numbers."""
        self._hosted.add(node)
        self._values[node] = Number(
            isinstance(node.meta["val"], torch.SymFloat),
            lambda dtype: self._aux_of(Source(computed=node, number=dtype)),
        )

    def _operator(self, node: Node) -> None:
        name = name_of_node(node)
        out: Any = node.meta.get("val")
        if isinstance(out, torch.SymInt | torch.SymFloat) and name != "_local_scalar_dense":
            self._number(node)
            return
        self._refuse_what_has_no_text(node, name, out)
        inputs = node.all_input_nodes
        if all(x in self._known for x in inputs):
            self._known[node] = self._run(node)
        elif all(x in self._known or x in self._hosted for x in inputs) and _is_for_host(node):
            self._hosted.add(node)
        elif name in _FILLED:
            place = _FILLED[name]
            number: Any = place if isinstance(place, bool) else node.args[place]
            if isinstance(number, Node):
                self._values[node] = self._filled(node, self._value(number), out)
                return
            self._known[node] = torch.full(tuple(out.shape), number, dtype=out.dtype, device="cpu")
        else:
            self._values[node] = self._lowered(node, name, out)

    def _refuse_what_has_no_text(self, node: Node, name: str, out: Any) -> None:
        if name == "_local_scalar_dense":
            what = "takes a number out of a tensor, which has none yet: compute with tensors"
            raise self._refusal(node, what)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise self._refusal(node, "draws random numbers: draw them before, in a tensor")
        if name.endswith("_") and not name.endswith("__"):
            raise self._refusal(node, "writes into a tensor: compute a new value instead")
        if not isinstance(out, Tensor):
            text = str(self._refusal(node, f"gives several results: {instead_of(name)}"))
            raise UnknownOperator(text, node.target)

    def _refuse_what_no_kernel_has(self, node: Node, out: Tensor) -> None:
        if out.dtype not in DSL_NAMES:
            is_complex = out.dtype.is_complex
            hint = "write its real and its imaginary part" if is_complex else "convert it before"
            raise self._refusal(node, f"gives {out.dtype}, which no kernel has: {hint}")

    def _filled(self, node: Node, number: Number, out: Tensor) -> Array:
        self._refuse_what_no_kernel_has(node, out)
        call = self._call_of(node, out, (), {})
        element = ops.cast(ops.as_array(number, out.dtype, call), out.dtype).elements[0]
        return Array(out.dtype, (), (element,)).broadcast(tuple(out.shape))

    def _call_of(self, node: Node, out: Tensor, args: Any, kwargs: Any) -> ops.OpCall:
        return ops.OpCall(
            node.target, node.name, tuple(args), dict(kwargs), out.dtype, tuple(out.shape),
            self._name_element(node.name),
        )  # fmt: skip

    def _run(self, node: Node) -> Any:
        """The result of an operator on known values, on the CPU."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        target: Any = node.target
        return target(*args, **kwargs)

    def _lowered(self, node: Node, name: str, out: Tensor) -> Any:
        rule = ops.RULES.get(name) or SEARCHES.get(name)
        if rule is None:
            text = str(self._refusal(node, f"has no CuTe text: {instead_of(name)}"))
            raise UnknownOperator(text, node.target)
        operands: Any = torch.fx.node.map_aggregate(
            (node.args, node.kwargs), lambda x: self._value(x) if isinstance(x, Node) else x
        )
        self._refuse_what_no_kernel_has(node, out)
        args, kwargs = operands
        reads_whole = name not in ("index", "select", *_LIFTS)
        tables = [x for x in (*args, *kwargs.values()) if isinstance(x, Table)]
        call = self._call_of(node, out, args, kwargs)
        try:
            value = rule(call)
            if isinstance(value, Table) and not value.left:
                value = ops.as_array(value, out.dtype, call)
        except NotLowerable as error:
            raise self._refusal(node, str(error)) from error
        if any(x.left and x.known is None for x in tables):
            self._knows_shapes |= reads_whole or isinstance(value, Array) and value.shape != ()
        return value

    def _value(self, node: Node) -> Any:
        if node in self._known:
            tensor = self._known[node]
            if tensor.dim() == 0:
                return Array.of_tensor(tensor)
            aux = self._aux_of(Source(constant=tensor))
            return Table.create(aux, tensor, tensor, self.checks)
        if node not in self._values:
            self._values[node] = self._table(node, False)
        return self._values[node]

    def _table(self, node: Node, detached: bool) -> Table:
        """The table of a node that the host has or computes."""
        name = name_of_node(node)
        path: Any = "a tensor"
        if node.op == "get_attr":
            tensor, path = self.captured[node.meta["captured"]]
            source = Source(captured=node.meta["captured"], detached=detached)
        elif name in _LIFTS and name != "lift_fresh_copy":
            return self._table(node.args[0], detached or name == "detach")  # type: ignore[arg-type]
        else:
            tensor = node.meta["val"]
            source = Source(computed=node, detached=detached)
            self._knows_shapes = True
        if tensor.dtype not in DSL_NAMES:
            raise TypeError(
                f"{path}, which {self.mod_name} reads, has dtype {tensor.dtype}, which no kernel "
                "reads"
            )
        return Table.create(self._aux_of(source), tensor, None, self.checks)

    def _aux_of(self, source: Source) -> int:
        """The number of the aux tensor that a source becomes; if no line needs it, any number."""
        number = self._numbers.setdefault(source.identity, len(self._sources))
        if number == len(self._sources):
            self._sources.append(source)
        if self.read is not None:
            number = self.read.index(number) if number in self.read else len(self.read)
        return self.first_aux + number

    # lines

    def _name_element(self, name: str) -> Callable[[Element], Element]:
        def add(element: Element) -> Element:
            if element.is_simple or element.constant is not None:
                return element
            free, number = name, 0
            while free in self._names:
                number += 1
                free = f"{name}_{number}"
            self._names.add(free)
            self._lines.append(_Line(free, element.text, element.read))
            return element._replace(text=free, is_simple=True, read=None)

        return add

    def _result(self, returned: Any) -> str:
        """The return value of the mod, as an expression."""
        wanted = torch.float32 if self.is_score else torch.bool
        name = self.mod_name
        if isinstance(returned, Node):
            value = self._value(returned)
        elif isinstance(returned, bool | int | float):
            value = Array.of_tensor(torch.tensor(returned, device="cpu"))
        else:
            raise TypeError(f"{name} returned {returned!r}: it must return one tensor")
        call = ops.OpCall(None, "result", (), {}, wanted, (), self._name_element("result"))
        array = ops.as_array(value, wanted, call)
        if len(array.elements) != 1:
            raise TypeError(
                f"{name} returned a tensor of shape {array.shape}: it must return one value for "
                "each score"
            )
        is_bool = array.dtype == torch.bool
        if self.is_score and is_bool:
            raise TypeError(
                f"{name} returned a bool: a score_mod must return a score; to hide scores, write "
                "torch.where(condition, score, float('-inf')), or a mask_mod"
            )
        if not self.is_score and not is_bool:
            raise TypeError(
                f"{name} returned {array.dtype}: a mask_mod must return a bool, as (x != 0) is"
            )
        element = ops.cast(array, wanted).elements[0]
        return ops.typed(element, wanted) if self.is_score else element.text

    def text(self) -> tuple[Text, Sequence[int]]:
        """The lines that the result needs, and the numbers of the sources that they read."""
        returned = ""
        for node in self.module.graph.nodes:
            if node.op == "output":
                returned = self._result(node.args[0])
            else:
                self._node(node)
        lines = _with_factors_joined(self._lines)
        kind = "score_mod" if self.is_score else "mask_mod"
        source, reads = self._function(kind, lines, returned)
        prefix = "" if self.is_score else self._prefix()
        if prefix:
            text, read = self._function("prefix_mod", lines, prefix)
            # of a constant mask, sources are not read
            source += "\n" + text if set(read) <= set(reads) else ""
        sources = self._sources if self.read is None else [self._sources[i] for i in self.read]
        first = self.first_aux
        claims = frozenset((x.aux - first, *claim) for x in reads for claim in x.claims)
        whole = Text(source, tuple(sources), claims, self._knows_shapes)
        return whole, sorted({x.aux - first for x in reads})

    def _prefix(self) -> str:
        """The condition of a `prefix_mod`, or nothing."""
        found = []
        for node in find_prefixes(self.module):
            value = self._values.get(node)
            if isinstance(value, Array) and value.elements[0].constant is None:
                found.append(value.elements[0].text)
        return " | ".join(found)

    def _function(self, name: str, lines: Sequence[_Line], returned: str) -> tuple[str, list[Read]]:
        """The text of a function that returns an expression, and what it reads."""
        needed = set(_WORD.findall(returned))
        kept, reads = [], []
        for line in reversed(lines):
            if line.name in needed:
                needed.update(_WORD.findall(line.expression))
                kept.append(f"{line.name} = {line.expression}")
                if line.read is not None:
                    reads.append(line.read)
        unpacked = [f"{x} = {long}[0]" for x, long in _SHORT.items() if x in needed]
        if self.is_score and unpacked == ["s = score[0]"] and _takes_rows((*kept, returned)):
            # a kernel may hand over several scores of a row at once
            unpacked = ["s = score"]
        score = "score, " if self.is_score else ""
        head = f"def {name}({score}{', '.join(INDEX_NAMES)}, aux):"
        body = [head, *unpacked, *reversed(kept), f"return {returned}"]
        return "\n    ".join(body) + "\n", reads

    def _refusal(self, node: Node, what: str) -> NotLowerable:
        return NotLowerable(f"{self.mod_name}: aten.{name_of_node(node)}{line_of(node)} {what}")


# of floating point: constants of integers have no point and no exponent
_NUMBER = r"-?\d+(?:\.\d+|(?:\.\d+)?e-\d+)"
_FACTOR = re.compile(rf"(\w+|Float32\(\w+\)) \* ({_NUMBER})$")
_CALLS = re.compile(r"[A-Za-z_][\w.]*\(")


def _with_factors_joined(lines: Sequence[_Line]) -> list[_Line]:
    """Merge factors of products of floating point, without changing any bits.

    Two factors become one if one of them is a power of two. A negated product becomes a product by
    the negated number. Products of integers stay: a float factor would make floats of them.
    """
    known: dict[str, tuple[str, float]] = {}
    joined = []
    for line in lines:
        name, expression, _ = line
        found = _FACTOR.match(expression)
        before = known.get(expression[1:]) if expression.startswith("-") else None
        if before is not None:
            expression = f"{before[0]} * {-before[1]!r}"
            known[name] = before[0], -before[1]
        elif found is not None:
            value, number = found[1], float(found[2])
            inner = known.get(value)
            is_exact = inner is not None and any(map(_is_power_of_two, (inner[1], number)))
            if inner is not None and is_exact and 1e-30 < abs(inner[1] * number) < 1e30:
                value, number = inner[0], inner[1] * number
                expression = f"{value} * {number!r}"
            known[name] = value, number
        joined.append(line._replace(expression=expression))
    return joined


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5 and 1e-6 < abs(value) < 1e6


def _takes_rows(expressions: Sequence[str]) -> bool:
    """Whether expressions of the score are also valid for vectors of scores."""
    calls = (x for text in expressions for x in _CALLS.findall(text))
    plain = all(x.startswith("cute.math.") for x in calls)
    return plain and not any(re.search(r"[<>!&|~%]|==|//", x) for x in expressions)


def _is_for_host(node: Node) -> bool:
    """Whether the host computes a node of captured tensors: not if it has single elements."""
    if name_of_node(node) in _LIFTS:
        return True
    operands = [x.meta["val"] for x in (node, *node.all_input_nodes)]
    is_number = all(not isinstance(x, Tensor) or x.dim() == 0 for x in operands)
    return not is_number and name_of_node(node) not in ("index", "select")
