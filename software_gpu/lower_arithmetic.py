"""Arithmetic, moves, comparisons and conversions as interpreter records."""

from . import interpreter
from .operands import Pair, Sink, Vec
from .ptx_types import CVT_T, RND, SIZE, SPACE, Unsupported
from .register_file import RegisterFile


class Arithmetic(RegisterFile):
    """Lowers instructions that only touch registers."""

    # plain ALU
    def alu(self, name, ins, sizes, dsize, ty=None, args=None, imm=0):
        a = args or ins.args
        f = {"d": self.dst(a[0], dsize), "imm": imm}
        for k, x, s in zip("abc", a[1:], sizes, strict=False):
            f[k] = self.src(x, s, ty)
        self.set(name, **f)

    def arith(self, ins):
        """add sub mul mad fma min max neg abs and float unary"""
        m, a = ins.mods, ins.args
        base, ty = m[0], m[-1]
        mods = set(m[1:-1])
        n = len(a) - 1
        if "cc" in mods:
            return False
        if (
            len(m) > 2 and m[-2] == "f32" and ty in ("bf16", "f16")
        ):  # mixed precision: add.f32.bf16 d, a(bf16), c(f32)
            sizes = {"fma": [2, 2, 4], "add": [2, 4], "sub": [2, 4]}[base]
            return self.alu(f"{base}.f32.{ty}", ins, sizes, 4)
        if ty in ("f32", "f32x2", "f64"):
            size = SIZE[ty]
            if base == "mad":
                base = "fma"
            fz = ".ftz" if "ftz" in mods and ty != "f64" else ""
            sat = ".sat" if "sat" in mods else ""
            rnd = next((RND[x] for x in mods if x in RND), 0)
            if base in ("min", "max"):
                if "xorsign" in mods or "abs" in mods:
                    return False
                nan = ".NaN" if "NaN" in mods else ""
                if ty == "f64":
                    return self.alu(f"{base}.f64", ins, [8] * n, 8, ty)
                return self.alu(
                    f"{base}{'3' if n == 3 else ''}{nan}.{ty}{fz}", ins, [size] * n, size, ty
                )
            if rnd and base in ("add", "sub", "mul", "fma") and ty != "f64":
                return self.alu(f"{base}r.{ty}{fz}{sat}", ins, [size] * n, size, ty, imm=rnd)
            if rnd:
                raise Unsupported("directed rounding")
            if ty == "f64":
                return self.alu(f"{base}.f64", ins, [8] * n, 8, ty)
            return self.alu(f"{base}.{ty}{fz}{sat}", ins, [size] * n, size, ty)
        if ty in ("f16", "bf16", "f16x2", "bf16x2"):
            nm = base + (".NaN" if "NaN" in mods else "") + (".relu" if "relu" in mods else "")
            if "sat" in mods or "xorsign" in mods:
                return False
            return self.alu(f"{nm}.{ty}", ins, [SIZE[ty]] * n, SIZE[ty], ty)
        bits = ty[1:]
        size = SIZE[ty]
        if base in ("min", "max", "div", "rem", "sad"):
            relu = ".relu" if "relu" in mods else ""
            return self.alu(
                f"{base}{relu}.{'s' if ty[0] == 's' else 'u'}{bits}", ins, [size] * n, size
            )
        if base in ("mul", "mad"):
            if "wide" in mods:
                d = size * 2
                return self.alu(f"{base}.wide.{ty[0]}{bits}", ins, [size, size, d][:n], d)
            if "hi" in mods:
                return self.alu(f"{base}.hi.{ty[0]}{bits}", ins, [size] * n, size)
            return self.alu(f"{base}.lo.{bits}", ins, [size] * n, size)
        return self.alu(f"{base}.{bits}", ins, [size] * n, size)

    i_add = i_sub = i_mul = i_mad = i_fma = i_min = i_max = i_neg = i_abs = i_rem = i_sad = arith

    def i_div(self, ins):
        m = ins.mods
        if m[-1] == "f32":
            rnd = next((x for x in m if x in RND), "rn")
            if rnd != "rn":
                raise Unsupported("directed rounding")
            return self.alu("div.f32" + (".ftz" if "ftz" in m else ""), ins, [4, 4], 4, "f32")
        return self.arith(ins)

    def unary_f(self, ins):
        ty = ins.mods[-1]
        fz = ".ftz" if "ftz" in ins.mods and ty == "f32" else ""
        nm = "ex2" if ins.mods[0] == "ex2" else ins.mods[0]
        self.alu(f"{nm}.{ty}{fz}", ins, [SIZE[ty]], SIZE[ty], ty)

    i_ex2 = i_lg2 = i_rcp = i_sqrt = i_rsqrt = i_sin = i_cos = i_tanh = unary_f

    def i_copysign(self, ins):
        self.alu("copysign.f32", ins, [4, 4], 4, "f32")

    def logic(self, ins):
        base, ty = ins.mods[0], ins.mods[-1]
        a = ins.args
        if ty == "pred":
            e = 0
            if getattr(a[1], "neg", False):
                e |= 1
            if len(a) > 2 and getattr(a[2], "neg", False):
                e |= 2
            f = {"d": self.pred(a[0]), "a": self.pred(a[1]), "e": e}
            if len(a) > 2:
                f["b"] = self.pred(a[2])
            return self.set(f"{base}.pred", **f)
        size = SIZE[ty]
        self.alu(f"{base}.{size * 8}", ins, [size] * (len(a) - 1), size)

    i_and = i_or = i_xor = i_not = logic

    def i_cnot(self, ins):
        s = SIZE[ins.mods[-1]]
        self.alu(f"cnot.{s * 8}", ins, [s], s)

    def i_shl(self, ins):
        s = SIZE[ins.mods[-1]]
        self.alu(f"shl.{s * 8}", ins, [s, 4], s)

    def i_shr(self, ins):
        ty = ins.mods[-1]
        s = SIZE[ty]
        self.alu(f"shr.{'s' if ty[0] == 's' else 'u'}{s * 8}", ins, [s, 4], s)

    def i_shf(self, ins):
        self.alu("shf." + ins.mods[1], ins, [4, 4, 4], 4, imm=int("clamp" in ins.mods))

    def i_prmt(self, ins):
        mode = {"f4e": 1, "b4e": 2, "rc8": 3, "ecl": 4, "ecr": 5, "rc16": 6}.get(ins.mods[-1], 0)
        self.alu("prmt", ins, [4, 4, 4], 4, imm=mode)

    def i_lop3(self, ins):
        if len(ins.args) != 5:
            return False
        self.alu("lop3", ins, [4, 4, 4], 4, imm=ins.args[4].value & 255)

    def bits1(self, ins):
        ty = ins.mods[-1]
        s = SIZE[ty]
        nm = ins.mods[0]
        if nm == "bfind":
            if ty[0] == "s" or "shiftamt" in ins.mods:
                return False
            return self.alu(f"bfind.u{s * 8}", ins, [s], 4)
        self.alu(f"{nm}.{s * 8}", ins, [s], s if nm == "brev" else 4)

    i_popc = i_clz = i_brev = i_bfind = bits1

    def i_bfe(self, ins):
        ty = ins.mods[-1]
        s = SIZE[ty]
        self.alu(f"bfe.{ty[0]}{s * 8}", ins, [s, 4, 4], s)

    def i_bfi(self, ins):
        s = SIZE[ins.mods[-1]]
        a = ins.args
        self.set(
            f"bfi.{s * 8}",
            d=self.dst(a[0], s),
            a=self.src(a[1], s),
            b=self.src(a[2], s),
            c=self.src(a[3], 4),
            e=self.src(a[4], 4),
        )

    def i_dp4a(self, ins):
        self.alu(ins.op, ins, [4, 4, 4], 4)

    i_dp2a = i_dp4a

    # moves
    def i_mov(self, ins):
        ty = ins.mods[-1]
        d, s = ins.args
        if ty == "pred":
            return self.set(
                "mov.pred", d=self.pred(d), a=self.pred(s), e=int(getattr(s, "neg", False))
            )
        size = SIZE[ty]
        if size == 16:
            return False
        if isinstance(s, Vec):
            es = size // len(s)
            return self.set(
                "pack",
                d=self.dst(d, size),
                e=size,
                c=es,
                nvec=len(s),
                vec=self.vec([self.src(x, es) for x in s]),
            )
        if isinstance(d, Vec):
            es = size // len(d)
            return self.set(
                "unpack",
                a=self.src(s, size),
                e=size,
                c=es,
                nvec=len(d),
                vec=self.vec([-1 if isinstance(x, Sink) else self.dst(x, es) for x in d]),
            )
        self.set(f"mov.{size * 8}", d=self.dst(d, size), a=self.src(s, size, ty))

    def i_selp(self, ins):
        s = SIZE[ins.mods[-1]]
        a = ins.args
        self.set(
            f"selp.{s * 8}",
            d=self.dst(a[0], s),
            a=self.src(a[1], s, ins.mods[-1]),
            b=self.src(a[2], s, ins.mods[-1]),
            c=self.pred(a[3]),
            e=int(getattr(a[3], "neg", False)),
        )

    def i_slct(self, ins):
        s = SIZE[ins.mods[-2]]
        a = ins.args
        self.set(
            f"slct.{s * 8}",
            d=self.dst(a[0], s),
            a=self.src(a[1], s),
            b=self.src(a[2], s),
            c=self.src(a[3], 4),
            imm=int(ins.mods[-1] == "f32"),
        )

    def i_setp(self, ins):
        m, a = ins.mods, ins.args
        ty = m[-1]
        cmp = m[1]
        if ty in ("f16x2", "bf16x2"):
            return False
        if ty[0] == "b" and ty != "bf16":
            ty = "u" + ty[1:]
        if cmp in ("lo", "ls", "hi", "hs"):
            cmp = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[cmp]
            ty = "u" + ty[1:]
        nm = f"setp.{cmp}.{ty}" + (".ftz" if "ftz" in m and ty == "f32" else "")
        d, q = (a[0].a, a[0].b) if isinstance(a[0], Pair) else (a[0], None)
        size = SIZE[ty]
        f = {
            "d": self.pred(d),
            "e": self.pred(q) if q is not None else -1,
            "a": self.src(a[1], size, ty),
            "b": self.src(a[2], size, ty),
        }
        if len(a) > 3:
            f["imm"] = {"and": 1, "or": 2, "xor": 3}[m[2]] | (
                8 if getattr(a[3], "neg", False) else 0
            )
            f["c"] = self.pred(a[3])
        self.set(nm, **f)

    def i_cvt(self, ins):
        m, a = ins.mods, ins.args
        dt, st = m[-2], m[-1]
        mods = set(m[1:-2])
        if "rs" in mods or "scaled" in mods or "pack" in mods:
            return False
        relu = ".relu" if "relu" in mods else ""
        if len(a) == 3:
            if dt in ("bf16x2", "f16x2") and st == "f32":
                rz = ".rz" if "rz" in mods else ""
                return self.alu(f"cvt{relu}{rz}.{dt}.f32", ins, [4, 4], 4, "f32")
            if dt in ("e4m3x2", "e5m2x2") and st == "f32" and not relu:
                return self.alu(f"cvt.{dt}.f32", ins, [4, 4], 2, "f32")
            return False
        if dt in ("e4m3x2", "e5m2x2") or st in ("e4m3x2", "e5m2x2"):
            if relu:
                return False
            return self.alu(f"cvt.{dt}.{st}", ins, [SIZE[st]], SIZE[dt])
        if dt == "tf32":
            return self.alu(
                "cvt.tf32.f32",
                ins,
                [4],
                4,
                "f32",
                imm=0 if "rna" in mods else 1 if "rn" in mods else 2,
            )
        if dt not in CVT_T or st not in CVT_T:
            return False
        ds, ss = self.opsize(a[0], SIZE[dt]), self.opsize(a[1], SIZE[st])
        d, s = self.dst(a[0], ds), self.src(a[1], ss, st)
        isint = dt[0] in "usb" and dt != "bf16", st[0] in "usb" and st != "bf16"
        exact = ds == SIZE[dt] and ss == SIZE[st]
        if all(isint) and exact and "sat" not in mods and min(ds, ss) >= 2:
            if ds == ss:
                return self.set(f"mov.{ds * 8}", d=d, a=s)
            return self.set(f"icvt.{'s' if st[0] == 's' else 'u'}{ss * 8}.{ds * 8}", d=d, a=s)
        k = f"cvt.{dt}.{st}"
        rnd = next((x for x in mods if x in RND), None)
        if k in interpreter.OPS and exact and not (mods - {"rn"}):
            return self.set(k, d=d, a=s)
        fl = (
            (1 if "ftz" in mods else 0)
            | (2 if "sat" in mods else 0)
            | (4 if relu else 0)
            | (8 if rnd and rnd.endswith("i") and not isint[0] else 0)
        )
        if "satfinite" in mods:
            return False
        self.set(
            "cvt",
            d=d,
            a=s,
            e=ds,
            c=ss,
            imm=CVT_T[st] | CVT_T[dt] << 4 | RND.get(rnd, 0) << 8 | fl << 12,
        )

    def i_cvta(self, ins):
        m, a = ins.mods, ins.args
        size = SIZE[m[-1]]
        to = m[1] == "to"
        space = m[2] if to else m[1]
        d, s = self.dst(a[0], size), self.src(a[1], size)
        k = SPACE[space]
        if k in (1, 2, 3) and size == 8:
            if to:
                return self.set("and.64", d=d, a=s, b=self.constant(0xFFFFFFFF, 8))
            return self.set(
                "or.64",
                d=d,
                a=s,
                b=self.constant(interpreter.LOCAL_BASE if k == 3 else interpreter.SHARED_BASE, 8),
            )
        self.set(f"mov.{size * 8}", d=d, a=s)

    def i_mapa(self, ins):
        s = SIZE[ins.mods[-1]]
        a = ins.args
        self.set(f"mapa.{s * 8}", d=self.dst(a[0], s), a=self.src(a[1], s), b=self.src(a[2], 4))

    def i_getctarank(self, ins):
        s = SIZE[ins.mods[-1]]
        self.set(f"getctarank.{s * 8}", d=self.dst(ins.args[0], 4), a=self.src(ins.args[1], s))

    def i_createpolicy(self, ins):
        self.set("mov.64", d=self.dst(ins.args[0], 8), a=self.constant(0, 8))

    def i_activemask(self, ins):
        self.set("activemask", d=self.dst(ins.args[0], 4))
