"""What a parsed PTX kernel consists of: operands, instructions, variables, kernels."""


class Reg:
    __slots__ = ("name", "type", "neg")

    def __init__(self, name, type, neg=False):
        self.name, self.type, self.neg = name, type, neg

    def __repr__(self):
        return ("!" if self.neg else "") + self.name


class Special(Reg):
    """%tid.x and friends: read-only."""

    __slots__ = ()


class Imm:
    """Immediate. value: python int (bit pattern for 0f/0d), or python float with is_float for
    decimal floats.
    """

    __slots__ = ("value", "is_float", "bits")

    def __init__(self, value, is_float=False, bits=0):
        self.value, self.is_float, self.bits = value, is_float, bits

    def __repr__(self):
        return repr(self.value)


class Vec:
    __slots__ = ("items",)

    def __init__(self, items):
        self.items = items

    def __repr__(self):
        return "{" + ", ".join(map(repr, self.items)) + "}"

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Mem:
    __slots__ = ("base", "offset", "coords", "extra")

    def __init__(self, base, offset=0, coords=None, extra=None):
        self.base, self.offset, self.coords, self.extra = base, offset, coords, extra

    def __repr__(self):
        return (
            f"[{self.base!r}+{self.offset}"
            + (f", {self.coords!r}" if self.coords is not None else "")
            + "]"
        )


class Sym:
    __slots__ = ("name", "offset")

    def __init__(self, name, offset=0):
        self.name, self.offset = name, offset

    def __repr__(self):
        return f"{self.name}+{self.offset}" if self.offset else self.name


class Sink:
    """The `_` operand."""

    def __repr__(self):
        return "_"


class Pair:
    """a|b destination pair."""

    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __repr__(self):
        return f"{self.a!r}|{self.b!r}"


class Group:
    """( ... ) operand group of call."""

    __slots__ = ("items",)

    def __init__(self, items):
        self.items = items

    def __repr__(self):
        return "(" + ", ".join(map(repr, self.items)) + ")"


class Instr:
    __slots__ = ("op", "mods", "args", "pred", "line", "text", "target", "pc")

    def __init__(self, op, args, pred, line, text):
        self.op, self.args, self.pred, self.line, self.text = op, args, pred, line, text
        self.mods = op.split(".")
        self.target = None
        self.pc = -1

    def __repr__(self):
        return f"line {self.line}: {self.text}"


class Var:
    """A .param / .shared / .local / .global / .const variable."""

    __slots__ = ("name", "space", "align", "size", "init", "extern")

    def __init__(self, name, space, align, size, init=None, extern=False):
        self.name, self.space, self.align, self.size, self.init, self.extern = (
            name,
            space,
            align,
            size,
            init,
            extern,
        )


class Kernel:
    def __init__(self, name):
        self.name = name
        self.params = []  # Var list in order
        self.instrs = []
        self.regs = {}  # name -> type
        self.vars = {}  # name -> Var (shared, local; function scope and module scope)
        self.reqntid = None
        self.reqnctapercluster = None
        self.directives = {}


class Module:
    def __init__(self):
        self.kernels, self.globals, self.target, self.version = {}, {}, None, None
        self.funcs = {}
