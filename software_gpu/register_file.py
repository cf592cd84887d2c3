"""Where the operands of a kernel are: registers, constants, symbols and predicates.

The register file of a warp is rows of 128 bytes (32 lanes x 4 bytes; a 64-bit register takes two).
"""

import struct

from .operands import Imm, Reg, Sink, Special, Sym
from .ptx_types import SIZE, Unsupported


class RegisterFile:
    """Gives every operand of a kernel its place, and fills the record of an instruction."""

    def set(self, name, **kw):
        self.cur["op"] = self.code[name]
        for k, v in kw.items():
            self.cur[k] = v

    def alloc(self, size):
        o = self.rows * 128
        self.rows += max(1, size // 4)
        return o

    def regoff(self, r):
        o = self.off.get(r.name)
        if o is None:
            size = SIZE[r.type]
            o = self.off[r.name] = self.alloc(size)
            self.size[r.name] = size
        return o

    def constant(self, bits, size):
        bits &= (1 << (8 * size)) - 1
        k = (bits, size)
        if k not in self.const:
            self.const[k] = o = self.alloc(size)
            self.inits.append((o, size, "const", bits))
        return self.const[k]

    def opsize(self, x, default):
        if isinstance(x, Special):
            return 8 if x.type == "u64" else 4
        if isinstance(x, Reg):
            return SIZE[x.type]
        return default

    def imm_bits(self, x, size, ty=None):
        if x.is_float:
            if size == 8:
                return struct.unpack("<Q", struct.pack("<d", x.value))[0]
            return struct.unpack("<I", struct.pack("<f", x.value))[0]
        if x.bits == 32 and ty == "f64":
            return struct.unpack(
                "<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", x.value))[0])
            )[0]
        if x.bits == 64 and size == 4:
            return struct.unpack(
                "<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", x.value))[0])
            )[0]
        return x.value  # of an integer literal for a float: the bit pattern

    def src(self, x, size, ty=None, exact=True):
        """byte offset of a source operand of `size` bytes"""
        if isinstance(x, Imm):
            return self.constant(self.imm_bits(x, size, ty), size)
        if isinstance(x, Special):
            k = (x.name, size)
            if k not in self.specials:
                self.specials[k] = o = self.alloc(size)
                self.inits.append((o, size, "special", x.name))
            return self.specials[k]
        if isinstance(x, Reg):
            if x.neg:
                raise Unsupported(f"negated operand {x}")
            if exact and SIZE[x.type] != size:
                raise Unsupported(
                    f"register {x.name} is .{x.type}, the instruction wants {size} bytes"
                )
            return self.regoff(x)
        if isinstance(x, Sym):
            k = (x.name, x.offset, size)
            if k not in self.syms:
                self.symkind(x.name)
                self.syms[k] = o = self.alloc(size)
                self.inits.append((o, size, "sym", (x.name, x.offset)))
            return self.syms[k]
        raise Unsupported(f"operand {x!r}")

    def symkind(self, name):
        if name in self.smem_static:
            return "shared"
        if name in self.param_off:
            return "param"
        if name in self.local_off:
            return "local"
        if name in self.kernel.vars:
            return "global"
        raise Unsupported(f"unknown symbol {name}")

    def dst(self, x, size, exact=True):
        if isinstance(x, Sink):
            return self.sink(size)
        if not isinstance(x, Reg) or isinstance(x, Special):
            raise Unsupported(f"destination {x!r}")
        if exact and SIZE[x.type] != size:
            raise Unsupported(f"register {x.name} is .{x.type}, the instruction wants {size} bytes")
        return self.regoff(x)

    def sink(self, size):
        k = ("sink", size)
        if k not in self.specials:
            self.specials[k] = self.alloc(size)
        return self.specials[k]

    def pred(self, x):
        if isinstance(x, Sink):
            return -1
        if isinstance(x, Imm):
            return 1 if x.value else 0
        if x.type != "pred":
            raise Unsupported(f"{x.name} is not a predicate")
        i = self.pidx.get(x.name)
        if i is None:
            i = self.pidx[x.name] = self.npred
            self.npred += 1
        return i

    def vec(self, offs):
        i = len(self.vecs)
        self.vecs.extend(offs)
        return i

    def addr(self, m):
        """(register offset, register bytes, immediate) of a Mem operand"""
        b = m.base
        if isinstance(b, Sym):
            kind = self.symkind(b.name)
            size = 4 if kind == "shared" else 8
            return self.src(Sym(b.name, 0), size), size, m.offset
        if isinstance(b, Imm):
            return self.constant(b.value, 8), 8, m.offset
        size = SIZE[b.type]
        return self.src(b, size), size, m.offset
