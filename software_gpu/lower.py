"""PTX instructions as interpreter records (interpreter.INS).

Anything that the interpreter does not know becomes a trap record, which machine.py handles.
"""

import numpy as np

from . import interpreter
from .lower_arithmetic import Arithmetic
from .operands import Pair, Reg, Sink, Sym, Vec
from .ptx_types import ATOM, CVT_T, NOP, SIZE, SPACE, Unsupported


class Program(Arithmetic):
    """A kernel lowered for the interpreter."""

    def __init__(self, kernel, handlers):
        """handlers(program, instr) -> handler(warp, mask) for trap instructions, or None when
        unknown.
        """
        interpreter.lib()
        self.kernel = kernel
        self.code = interpreter.CODE
        self.off = {}  # register name -> byte offset
        self.size = {}  # register name -> bytes
        self.pidx = {}  # predicate name -> index
        self.rows = 0
        self.const = {}  # (bits, size) -> offset
        self.inits = []  # (offset, size, kind, data) rows filled at CTA / warp start
        self.syms = {}
        self.specials = {}
        self.vecs = []
        self.npred = 2  # predicate 0 = false, 1 = true
        self.local_off, self.local_size = {}, 0
        self.smem_static = {}
        off = 1024  # the driver reserves the first KiB
        for v in kernel.vars.values():
            if v.space == "shared" and not (v.extern or v.size == 0):
                off = (off + v.align - 1) // v.align * v.align
                self.smem_static[v.name] = off
                off += v.size
            elif v.space == "local" or (v.space == "param" and v not in kernel.params):
                self.local_size = (self.local_size + v.align - 1) // v.align * v.align
                self.local_off[v.name] = self.local_size
                self.local_size += max(v.size, 1)
        self.static_end = off
        self.dyn_base = off
        for v in kernel.vars.values():
            if v.space == "shared" and (v.extern or v.size == 0):
                self.dyn_base = max(self.dyn_base, (off + v.align - 1) // v.align * v.align)
        for v in kernel.vars.values():
            if v.space == "shared" and (v.extern or v.size == 0):
                self.smem_static[v.name] = self.dyn_base
        self.param_off, o = {}, 0
        for p in kernel.params:
            o = (o + p.align - 1) // p.align * p.align
            self.param_off[p.name] = o
            o += p.size
        self.param_size = o
        n = len(kernel.instrs)
        self.ins = np.zeros(n + 1, interpreter.INS)
        self.handlers = [None] * (n + 1)
        self.ins["pred"] = -1
        for i, ins in enumerate(kernel.instrs):
            self.cur = self.ins[i]
            try:
                if ins.pred is not None:
                    self.cur["pred"] = self.pred(ins.pred)
                    self.cur["pneg"] = ins.pred.neg
                base = ins.mods[0]
                fn = getattr(self, "i_" + base, None)
                if (
                    base == "fence"
                    and "proxy" in ins.mods
                    and any(m.startswith("async") for m in ins.mods)
                ):
                    self.set("proxyfence")
                    continue
                elif base in NOP:
                    self.set("nop")
                    continue
                if fn is None or fn(ins) is False:
                    h = handlers(self, ins)
                    if h is None:
                        raise Unsupported("instruction is not supported")
                    self.set("trap")
                    self.handlers[i] = h
            except (Unsupported, KeyError, AttributeError, TypeError, IndexError) as e:
                msg = f"{type(e).__name__}: {e}" if not isinstance(e, Unsupported) else str(e)
                raise Unsupported(f"PTX line {ins.line}: {ins.text[:200]}: {msg}") from (
                    None if isinstance(e, Unsupported) else e
                )
        self.cur = self.ins[n]
        self.set("exit")
        self.vec_arr = np.array(self.vecs or [0], np.int32)
        self.rows_bytes = self.rows * 128

    # memory
    def space(self, ins, mem):
        for m in ins.mods[1:]:
            if m in SPACE:
                s = SPACE[m]
                if s == 5 and isinstance(mem.base, Sym) and mem.base.name in self.local_off:
                    return 3
                return s
        return 4

    def ldst(self, ins):
        m, a = ins.mods, ins.args
        if m[1] in ("async", "bulk"):
            return False
        st = m[0] == "st"
        ty = m[-1]
        es = SIZE[ty]
        mem, val = (a[0], a[1]) if st else (a[1], a[0])
        items = list(val) if isinstance(val, Vec) else [val]
        r, rb, off = self.addr(mem)
        if es == 16:  # b128: two 64-bit halves
            offs = [
                o + h
                for o in [self.src(x, 16) if st else self.dst(x, 16) for x in items]
                for h in (0, 256)
            ]
            return self.set(
                m[0],
                a=r,
                b=rb,
                imm=off,
                c=8,
                e=8,
                nvec=len(offs),
                vec=self.vec(offs),
                d=0,
                flags=self.space(ins, mem) << 8,
            )
        reg = next((x for x in items if isinstance(x, Reg)), None)
        rs = SIZE[reg.type] if reg is not None else es
        offs = [
            self.src(x, rs) if st else (-1 if isinstance(x, Sink) else self.dst(x, rs))
            for x in items
        ]
        self.set(
            m[0],
            a=r,
            b=rb,
            imm=off,
            c=es,
            e=rs,
            nvec=len(items),
            vec=self.vec(offs),
            d=int(not st and ty[0] == "s"),
            flags=self.space(ins, mem) << 8,
        )

    i_ld = i_st = ldst

    def i_ldu(self, ins):
        return self.ldst(ins)

    def atom(self, ins):
        m, a = ins.mods, ins.args
        if "async" in m:
            return False
        red = m[0] == "red"
        ty = m[-1]
        opn = next(x for x in m[1:] if x in ATOM)
        t0 = {"f16x2": "f16", "bf16x2": "bf16"}.get(ty, ty)
        pk = 2 if ty.endswith("x2") else 1
        es = SIZE[t0]
        mem = a[0] if red else a[1]
        val = a[1] if red else a[2]
        srcs = list(val) if isinstance(val, Vec) else [val]
        dsts = [] if red else (list(a[0]) if isinstance(a[0], Vec) else [a[0]])
        cmpv = a[3] if opn == "cas" else None
        rs = es * pk
        if es == 2 and pk == 1:
            rs = 2
        if rs == 16:
            return False
        v = [self.src(x, rs, ty) for x in srcs]
        v += [-1 if isinstance(x, Sink) else self.dst(x, rs) for x in dsts] or [-1] * len(srcs)
        v += [self.src(cmpv, rs) if cmpv is not None else -1]
        r, rb, off = self.addr(mem)
        self.set(
            "atom",
            a=r,
            b=rb,
            imm=off,
            c=es,
            nvec=len(srcs),
            vec=self.vec(v),
            e=ATOM[opn] | CVT_T[t0] << 8 | rs << 16 | pk << 24,
            flags=self.space(ins, mem) << 8,
        )

    i_atom = i_red = atom

    def matrix(self, ins):
        m = ins.mods
        if "m8n8" not in m or m[-1] != "b16":
            return False
        st = m[0] == "stmatrix"
        mem, val = (ins.args[0], ins.args[1]) if st else (ins.args[1], ins.args[0])
        items = list(val) if isinstance(val, Vec) else [val]
        r, rb, off = self.addr(mem)
        self.set(
            m[0],
            a=r,
            b=rb,
            imm=off,
            nvec=len(items),
            vec=self.vec([self.src(x, 4) if st else self.dst(x, 4) for x in items]),
            e=int("trans" in m),
            flags=(self.space(ins, mem) << 8) | 1,
        )

    i_ldmatrix = i_stmatrix = matrix

    # control and warp operations
    def i_bra(self, ins):
        self.set("bra", target=ins.target)

    def i_ret(self, ins):
        self.set("exit")

    i_exit = i_ret

    def i_shfl(self, ins):
        m, a = ins.mods, ins.args
        if m[1] != "sync":
            return False
        d, p = (a[0].a, a[0].b) if isinstance(a[0], Pair) else (a[0], None)
        self.set(
            "shfl",
            d=self.dst(d, 4),
            a=self.src(a[1], 4),
            b=self.src(a[2], 4),
            e=self.src(a[3], 4),
            c=self.src(a[4], 4),
            imm={"idx": 0, "up": 1, "down": 2, "bfly": 3}[m[2]],
            target=-1 if p is None else self.pred(p),
        )

    def i_vote(self, ins):
        m, a = ins.mods, ins.args
        mode = {"ballot": 0, "all": 1, "any": 2, "uni": 3}[m[2]]
        self.set(
            "vote",
            d=self.dst(a[0], 4) if mode == 0 else self.pred(a[0]),
            a=self.pred(a[1]),
            e=int(getattr(a[1], "neg", False)),
            c=self.src(a[2], 4),
            imm=mode,
        )

    def i_elect(self, ins):
        d, p = ins.args[0].a, ins.args[0].b
        self.set(
            "elect",
            d=-1 if isinstance(d, Sink) else self.dst(d, 4),
            e=self.pred(p),
            c=self.src(ins.args[1], 4),
        )

    def i_redux(self, ins):
        m, a = ins.mods, ins.args
        o, ty = m[2], m[-1]
        if ty == "f32":
            k = {("min", 0): 8, ("max", 0): 9, ("min", 1): 10, ("max", 1): 11}[
                o, int("NaN" in m)
            ] | (0x10000 if "abs" in m else 0)
        else:
            k = {
                "add": 0,
                "min": 6 if ty == "s32" else 1,
                "max": 7 if ty == "s32" else 2,
                "and": 3,
                "or": 4,
                "xor": 5,
            }[o]
        self.set("redux", d=self.dst(a[0], 4), a=self.src(a[1], 4, ty), c=self.src(a[2], 4), imm=k)

    def i_match(self, ins):
        a = ins.args
        s = SIZE[ins.mods[-1]]
        d, p = (a[0].a, a[0].b) if isinstance(a[0], Pair) else (a[0], None)
        self.set(
            f"match.{ins.mods[1]}",
            d=self.dst(d, 4),
            a=self.src(a[1], s),
            b=s,
            c=self.src(a[2], 4),
            e=-1 if p is None else self.pred(p),
        )

    def barrier(self, ins):
        if ins.mods[:3] == ["bar", "warp", "sync"]:
            return self.set("warpsync", c=self.src(ins.args[0], 4))
        self.cur["flags"] = 1
        return False

    i_bar = i_barrier = barrier

    def aligned(self, ins):
        if "aligned" in ins.mods:
            self.cur["flags"] = 1
        if ins.mods[0] == "wgmma" and ins.mods[1] == "fence":
            return self.set("nop")
        return False

    i_wgmma = i_tcgen05 = i_mma = aligned

    def i_mbarrier(self, ins):
        return False
