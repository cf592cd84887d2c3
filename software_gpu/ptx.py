"""Parser of the PTX dialect that NVVM and the CuTe DSL emit.

parse(text) -> Module with .kernels {name: Kernel}, .target and .globals (variables of the module:
.global, .const, .shared). Scopes ({ .reg .pred p; LAB: ... } from inline asm) are flattened:
registers and labels declared in a scope get a unique name, so a Kernel is a flat list of Instr with
resolved branch targets.
"""

import re

from .operands import (
    Group,
    Imm,
    Instr,
    Kernel,
    Mem,
    Module,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Var,
    Vec,
)
from .ptx_types import SIZE


class PtxError(Exception):
    pass


_TOK = re.compile(
    r"""
   (?P<ws>\s+|//[^\n]*|/\*.*?\*/)
 | (?P<str>"(?:\\.|[^"\\])*")
 | (?P<num>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
 | (?P<op>[a-z][a-zA-Z0-9_]*(?:(?:\.|::)[a-zA-Z0-9_]+)+)
 | (?P<id>[%$a-zA-Z_][a-zA-Z0-9_$]*)
 | (?P<dir>\.[a-zA-Z_][a-zA-Z0-9_.]*(?:::[a-zA-Z0-9_]+)*)
 | (?P<p>.)
""",
    re.X | re.S,
)

_SPECIAL2 = {
    "%tid",
    "%ntid",
    "%ctaid",
    "%nctaid",
    "%cluster_ctaid",
    "%cluster_nctaid",
    "%clusterid",
    "%nclusterid",
}
_SPECIAL1 = {
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%is_explicit_cluster",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%clock",
    "%clock_hi",
    "%clock64",
    "%globaltimer",
    "%globaltimer_lo",
    "%globaltimer_hi",
    "%total_smem_size",
    "%dynamic_smem_size",
    "%aggr_smem_size",
    "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap",
}
_SIZES = SIZE | {"pred": 1}


class _Toks:
    def __init__(self, text):
        self.kind, self.val, self.pos = [], [], []
        line = 1
        self.text = text
        for m in _TOK.finditer(text):
            k = m.lastgroup
            if k == "ws":
                line += m[0].count("\n")
                continue
            self.kind.append(k)
            self.val.append(m[0])
            self.pos.append((line, m.start(), m.end()))
            line += m[0].count("\n")
        self.i = 0
        self.n = len(self.val)

    def peek(self, k=0):
        j = self.i + k
        return self.val[j] if j < self.n else None

    def next(self):
        v = self.val[self.i]
        self.i += 1
        return v

    def expect(self, v):
        if self.peek() != v:
            raise PtxError(f"PTX line {self.line()}: expected {v!r}, found {self.peek()!r}")
        self.i += 1

    def line(self):
        return self.pos[min(self.i, self.n - 1)][0]


class _Scope:
    def __init__(self, parent, sid):
        self.parent, self.sid = parent, sid
        self.regs, self.labels, self.vars = {}, {}, {}
        self.ranges = {}  # %r -> (count, type)

    def find(self, table, name):
        s = self
        while s:
            t = getattr(s, table)
            if name in t:
                return t[name]
            s = s.parent
        return None

    def find_reg(self, name):
        s = self
        while s:
            r = s.regs.get(name)
            if r:
                return r
            if s.ranges:
                m = re.fullmatch(r"(.*?)(\d+)", name)
                if m:
                    # the longest prefix may itself end in digits
                    for cut in range(len(m[1]), len(name)):
                        rg = s.ranges.get(name[:cut])
                        if rg and name[cut:].isdigit() and int(name[cut:]) < rg[0]:
                            r = s.regs[name] = (name if s.sid == 0 else f"{name}@{s.sid}", rg[1])
                            return r
            s = s.parent
        return None


class _Parser:
    def __init__(self, text):
        self.t = _Toks(text.replace("\x00", ""))
        self.mod = Module()
        self.sid = 0

    def parse(self):
        t = self.t
        while t.i < t.n:
            v = t.peek()
            if v == ".version":
                t.next()
                self.mod.version = t.next()
            elif v == ".target":
                t.next()
                self.mod.target = t.next()
                while t.peek() == ",":
                    t.next()
                    t.next()
            elif v == ".address_size":
                t.next()
                t.next()
            elif v in (".visible", ".extern", ".weak", ".func", ".entry", ".common") or v in (
                ".global",
                ".const",
                ".shared",
            ):
                self.toplevel()
            elif v == ".file":
                t.next()
                line = t.line()
                while t.i < t.n and t.line() == line:
                    t.next()
            elif v == ".section":
                while t.peek() != "{":
                    t.next()
                d = 0
                while True:
                    x = t.next()
                    d += (x == "{") - (x == "}")
                    if d == 0:
                        break
            elif v == ";":
                t.next()
            else:
                raise PtxError(f"PTX line {t.line()}: unexpected {v!r} at module level")
        return self.mod

    def toplevel(self):
        t = self.t
        extern = False
        while t.peek() in (".visible", ".extern", ".weak", ".common"):
            extern |= t.next() == ".extern"
        if t.peek() == ".entry":
            t.next()
            self.entry()
        elif t.peek() == ".func":
            self.func(extern)
        else:
            v = self.var(extern)
            self.mod.globals[v.name] = v

    def func(self, extern):
        t = self.t
        # device functions: prototypes (vprintf, __assertfail) are skipped; bodies are not supported
        # unless called
        names, d = [], 0
        while True:
            x = t.next()
            if x == "(":
                d += 1
            elif x == ")":
                d -= 1
            elif d == 0 and x not in (".func", ".noreturn") and not x.startswith("."):
                if x == ";":
                    break
                if x == "{":
                    d = 1
                    while d:
                        x = t.next()
                        d += (x == "{") - (x == "}")
                    break
                names.append(x)
        if names:
            self.mod.funcs[names[0]] = "extern" if extern else "body"

    def int(self):
        v = self.t.next()
        return int(v.rstrip("U"), 0)

    def var(self, extern=False):
        t = self.t
        line = t.line()
        space = t.next()[1:]
        align = 1
        ty = None
        while True:
            v = t.peek()
            if v == ".align":
                t.next()
                align = self.int()
            elif v.startswith(".") and v[1:] in _SIZES:
                ty = t.next()[1:]
            elif v.startswith(".ptr") or v in (".global", ".const", ".attribute"):
                t.next()
                if v == ".attribute":
                    self.skip_parens()
            elif v in (".shared", ".local"):
                t.next()
            else:
                break
        name = t.next()
        n = 1
        while t.peek() == "[":
            t.next()
            if t.peek() == "]":
                n = 0
            else:
                n *= self.int()
            t.expect("]")
        if ty is None:
            raise PtxError(f"PTX line {line}: variable {name} without a type")
        init = None
        if t.peek() == "=":
            t.next()
            if t.peek() == "{":
                t.next()
                vals = []
                while t.peek() != "}":
                    x = t.next()
                    if x != ",":
                        vals.append(x)
                t.next()
            else:
                vals = [t.next()]
            b = bytearray()
            for x in vals:
                if x[:2].lower() in ("0f", "0d"):
                    b += int(x[2:], 16).to_bytes(_SIZES[ty], "little")
                elif re.match(r"-?\d", x):
                    b += (int(x.rstrip("U"), 0) % (1 << (8 * _SIZES[ty]))).to_bytes(
                        _SIZES[ty], "little"
                    )
                else:
                    raise PtxError(f"PTX line {line}: initialiser {x!r} of {name} is not supported")
            init = bytes(b)
        if t.peek() == ";":
            t.next()
        return Var(name, space, max(align, _SIZES[ty]), n * _SIZES[ty], init, extern)

    def skip_parens(self):
        t = self.t
        d = 0
        while True:
            x = t.next()
            d += (x == "(") - (x == ")")
            if d == 0:
                return

    def entry(self):
        t = self.t
        k = Kernel(t.next())
        top = _Scope(None, 0)
        if t.peek() == "(":
            t.next()
            while t.peek() != ")":
                if t.peek() == ",":
                    t.next()
                    continue
                t.expect(".param")
                align, ty = 1, None
                while t.peek().startswith("."):
                    v = t.next()
                    if v == ".align":
                        align = self.int()
                    elif v[1:] in _SIZES:
                        ty = v[1:]
                    # .ptr .global etc. ignored
                name = t.next()
                n = 1
                if t.peek() == "[":
                    t.next()
                    n = self.int()
                    t.expect("]")
                k.params.append(Var(name, "param", max(align, _SIZES[ty]), n * _SIZES[ty]))
            t.next()
        while t.peek() != "{":
            v = t.next()
            if v == ";":
                return
            if v in (
                ".reqntid",
                ".maxntid",
                ".reqnctapercluster",
                ".maxclusterrank",
                ".minnctapersm",
                ".maxnreg",
            ):
                xs = [self.int()]
                while t.peek() == ",":
                    t.next()
                    xs.append(self.int())
                k.directives[v[1:]] = xs
            else:
                k.directives[v[1:]] = True
        k.reqntid = k.directives.get("reqntid")
        t.next()
        self.k = k
        self.fix = []
        for v in self.mod.globals.values():
            k.vars[v.name] = v
        for p in k.params:
            k.vars[p.name] = p
        self.block(top)
        for ins, name, scope in self.fix:
            pc = scope.find("labels", name)
            if pc is None:
                raise PtxError(f"PTX line {ins.line}: unknown label {name}")
            ins.target = pc
        for i, ins in enumerate(k.instrs):
            ins.pc = i
        self.mod.kernels[k.name] = k

    def block(self, scope):
        t, k = self.t, self.k
        while True:
            v = t.peek()
            if v is None:
                raise PtxError("unexpected end of PTX inside a kernel")
            if v == "}":
                t.next()
                return
            if v == "{":
                t.next()
                self.sid += 1
                self.block(_Scope(scope, self.sid))
                continue
            if v == ";":
                t.next()
                continue
            kind = t.kind[t.i]
            if kind == "dir":
                if v == ".reg":
                    t.next()
                    ty = t.next()[1:]
                    if t.peek() in (".v2", ".v4"):
                        raise PtxError(f"PTX line {t.line()}: vector registers are not supported")
                    while True:
                        name = t.next()
                        if t.peek() == "<":
                            t.next()
                            n = self.int()
                            t.expect(">")
                            scope.ranges[name] = (n, ty)
                        else:
                            while t.kind[t.i] == "dir":  # names with dots
                                name += t.next()
                            scope.regs[name] = (
                                name if scope.sid == 0 else f"{name}@{scope.sid}",
                                ty,
                            )
                        if t.peek() == ",":
                            t.next()
                            continue
                        break
                    t.expect(";")
                elif v in (".shared", ".local", ".param", ".const", ".global"):
                    var = self.var()
                    uniq = (
                        var.name
                        if scope.sid == 0 and var.name not in k.vars
                        else f"{var.name}@{self.sid}.{t.i}"
                    )
                    scope.vars[var.name] = uniq
                    var.name = uniq
                    k.vars[uniq] = var
                elif v == ".loc":
                    line = t.line()
                    while t.line() == line and t.peek() not in ("}",):
                        t.next()
                elif v == ".branchtargets":
                    t.next()
                    while t.peek() != ";":
                        t.next()
                elif v == ".pragma" or v == ".callprototype":
                    while t.next() != ";":
                        pass
                else:
                    raise PtxError(f"PTX line {t.line()}: directive {v} is not supported")
                continue
            # label?
            if kind in ("id", "op") and t.peek(1) == ":" and t.peek(2) != ":":
                scope.labels[t.next()] = len(k.instrs)
                t.next()
                continue
            self.instr(scope)

    def instr(self, scope):
        t, k = self.t, self.k
        line, start, _ = t.pos[t.i]
        pred = None
        if t.peek() == "@":
            t.next()
            neg = False
            if t.peek() == "!":
                t.next()
                neg = True
            name = t.next()
            r = scope.find_reg(name)
            if r is None:
                raise PtxError(f"PTX line {line}: unknown predicate {name}")
            pred = Reg(r[0], r[1], neg)
        op = t.next()
        while t.kind[t.i] == "dir" and t.pos[t.i][1] == t.pos[t.i - 1][2]:
            op += t.next()
        args = []
        labelname = None
        if op.split(".")[0] in ("bra", "brx"):
            labelname = t.next()
            if op.startswith("brx"):
                raise PtxError(f"PTX line {line}: brx is not supported")
        elif t.peek() != ";":
            args.append(self.operand(scope, line))
            while t.peek() == ",":
                t.next()
                args.append(self.operand(scope, line))
        if t.peek() != ";":
            raise PtxError(
                f"PTX line {line}: expected ';' near {t.peek()!r}: {t.text[start : start + 160]}"
            )
        end = t.pos[t.i][2]
        t.next()
        text = " ".join(t.text[start:end].split())
        ins = Instr(op, args, pred, line, text)
        if labelname is not None:
            self.fix.append((ins, labelname, scope))
        k.instrs.append(ins)

    def operand(self, scope, line):
        t = self.t
        v = t.peek()
        if v == "{":
            t.next()
            items = []
            while t.peek() != "}":
                if t.peek() == ",":
                    t.next()
                    continue
                items.append(self.operand(scope, line))
            t.next()
            return Vec(items)
        if v == "(":
            t.next()
            items = []
            while t.peek() != ")":
                if t.peek() == ",":
                    t.next()
                    continue
                items.append(self.operand(scope, line))
            t.next()
            return Group(items)
        if v == "[":
            t.next()
            base = self.operand(scope, line)
            off = 0
            if isinstance(base, Sym):
                off, base = base.offset, Sym(base.name)
            while t.peek() in ("+", "-"):
                s = 1 if t.next() == "+" else -1
                if t.peek() == "-":
                    t.next()
                    s = -s
                off += s * int(t.next().rstrip("U"), 0)
            coords = extra = None
            if t.peek() == ",":
                t.next()
                coords = self.operand(scope, line)
                coords = list(coords) if isinstance(coords, Vec) else [coords]
                if t.peek() == ",":
                    t.next()
                    extra = self.operand(scope, line)
            t.expect("]")
            return Mem(base, off, coords, extra)
        if v == "!":
            t.next()
            r = self.operand(scope, line)
            r.neg = True
            return r
        if v in ("-", "+"):
            t.next()
            im = self.operand(scope, line)
            if v == "-":
                if im.bits:
                    im.value ^= 1 << (im.bits - 1)
                else:
                    im.value = -im.value
            return im
        kind = t.kind[t.i]
        t.next()
        if kind == "num":
            if v[:2] in ("0f", "0F"):
                return Imm(int(v[2:], 16), False, 32)
            if v[:2] in ("0d", "0D") and len(v) == 18:
                return Imm(int(v[2:], 16), False, 64)
            if re.fullmatch(r"\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+", v):
                return Imm(float(v), True)
            v = v.rstrip("U")
            return Imm(int(v, 8) if re.fullmatch(r"0[0-7]+", v) else int(v, 0))
        if v == "_":
            s = Sink()
            if t.peek() == "|":
                t.next()
                return Pair(s, self.operand(scope, line))
            return s
        if v in _SPECIAL2 and t.kind[t.i] == "dir":
            return Special(v + t.next(), "u32")
        if v in _SPECIAL1:
            return Special(v, "u64" if v in ("%clock64", "%globaltimer", "%gridid") else "u32")
        if v == "WARP_SZ":
            return Imm(32)
        r = scope.find_reg(v)
        if r is not None:
            reg = Reg(*r)
            if t.peek() == "|":
                t.next()
                return Pair(reg, self.operand(scope, line))
            return reg
        uniq = scope.find("vars", v) or v
        off = 0
        if t.peek() in ("+", "-") and t.kind[t.i + 1] == "num":
            s = 1 if t.next() == "+" else -1
            off = s * int(t.next(), 0)
        return Sym(uniq, off)


def parse(text):
    return _Parser(text).parse()
