"""What the inner interpreter computes: tables from which interpreter.py generates its C code."""

# tables: name -> (dest type, [source types], expression in a,b,c, elements per lane)
OPS = {}
INTS = {
    "u16": "uint16_t",
    "s16": "int16_t",
    "u32": "uint32_t",
    "s32": "int32_t",
    "u64": "uint64_t",
    "s64": "int64_t",
}
W = {"16": "32", "32": "64"}


def op(name, td, ts, expr, n=1):
    OPS[name] = (td, ts, expr, n)


for b in ("16", "32", "64"):
    u, s = INTS["u" + b], INTS["s" + b]
    for nm, e in (
        ("add", "a+b"),
        ("sub", "a-b"),
        ("mul.lo", "a*b"),
        ("and", "a&b"),
        ("or", "a|b"),
        ("xor", "a^b"),
    ):
        op(f"{nm}.{b}", u, [u, u], f"({u})({e})")
    op(f"mad.lo.{b}", u, [u, u, u], f"({u})(a*b+c)")
    op(f"mov.{b}", u, [u], "a")
    op(f"not.{b}", u, [u], "~a")
    op(f"cnot.{b}", u, [u], "a==0")
    op(f"neg.{b}", u, [u], f"({u})(0-a)")
    op(f"abs.{b}", u, [s], f"a<0?({u})(0-({u})a):({u})a")
    op(f"shl.{b}", u, [u, "uint32_t"], f"b>={b}?0:({u})(a<<b)")
    op(f"shr.u{b}", u, [u, "uint32_t"], f"b>={b}?0:(a>>b)")
    op(f"shr.s{b}", s, [s, "uint32_t"], f"a>>(b>={b}?{b}-1:b)")
    for t in ("u", "s"):
        T = INTS[t + b]
        op(f"min.{t}{b}", T, [T, T], "a<b?a:b")
        op(f"max.{t}{b}", T, [T, T], "a>b?a:b")
        op(
            f"div.{t}{b}",
            T,
            [T, T],
            f"b==0?({T})-1:(b==({T})-1&&({T})-1<0)?({T})(0-({u})a):({T})(a/b)",
        )
        op(f"rem.{t}{b}", T, [T, T], f"b==0?a:(b==({T})-1&&({T})-1<0)?0:({T})(a%b)")
        if b != "64":
            op(
                f"mul.wide.{t}{b}",
                INTS[t + W[b]],
                [T, T],
                f"({INTS[t + W[b]]})a*({INTS[t + W[b]]})b",
            )
            op(
                f"mad.wide.{t}{b}",
                INTS[t + W[b]],
                [T, T, INTS[t + W[b]]],
                f"({INTS[t + W[b]]})a*({INTS[t + W[b]]})b+c",
            )
            op(
                f"mul.hi.{t}{b}",
                T,
                [T, T],
                f"({T})(((({INTS[t + W[b]]})a)*({INTS[t + W[b]]})b)>>{b})",
            )
            op(
                f"mad.hi.{t}{b}",
                T,
                [T, T, T],
                f"({T})((((({INTS[t + W[b]]})a)*({INTS[t + W[b]]})b)>>{b})+c)",
            )
        else:
            X = "__int128" if t == "s" else "unsigned __int128"
            op(f"mul.hi.{t}64", T, [T, T], f"({T})((({X})a*({X})b)>>64)")
            op(f"mad.hi.{t}64", T, [T, T, T], f"({T})(((({X})a*({X})b)>>64)+c)")
        if b != "16":
            op(f"sad.{t}{b}", T, [T, T, T], "c+(a<b?b-a:a-b)")
    if b != "16":
        op(f"popc.{b}", "uint32_t", [u], "__builtin_popcountll(a)")
        op(f"clz.{b}", "uint32_t", [u], f"a?__builtin_clzll(a)-(64-{b}):{b}")
        op(f"brev.{b}", u, [u], f"brev{b}(a)")
        op(f"bfind.u{b}", "uint32_t", [u], "a?63-__builtin_clzll(a):0xffffffffu")
        op(f"bfe.u{b}", u, [u, "uint32_t", "uint32_t"], f"bfe_u(a,b,c,{b})")
        op(f"bfe.s{b}", s, [s, "uint32_t", "uint32_t"], f"bfe_s(a,b,c,{b})")
op("mapa.32", "uint32_t", ["uint32_t", "uint32_t"], "(a&0xffffffu)|(b<<24)")
op("mapa.64", "uint64_t", ["uint64_t", "uint32_t"], "(a&~0xff000000ull)|((uint64_t)b<<24)")
op("getctarank.32", "uint32_t", ["uint32_t"], "(a>>24)&0xff")
op("getctarank.64", "uint32_t", ["uint64_t"], "(uint32_t)(a>>24)&0xff")
op("mad24", "uint32_t", ["uint32_t"] * 3, "a*b+c")
op("lop3", "uint32_t", ["uint32_t"] * 3, "lop3(a,b,c,imm)")
op("prmt", "uint32_t", ["uint32_t"] * 3, "prmt(a,b,c,imm)")
op("shf.l", "uint32_t", ["uint32_t"] * 3, "shf_l(a,b,c,imm)")
op("shf.r", "uint32_t", ["uint32_t"] * 3, "shf_r(a,b,c,imm)")
for ta in "us":
    for tb in "us":
        ca, cb = (
            ("(int32_t)(int8_t)" if ta == "s" else "(int32_t)(uint8_t)"),
            ("(int32_t)(int8_t)" if tb == "s" else "(int32_t)(uint8_t)"),
        )
        c2 = "(int32_t)(int16_t)" if ta == "s" else "(int32_t)(uint16_t)"
        op(
            f"dp4a.{ta}32.{tb}32",
            "uint32_t",
            ["uint32_t"] * 3,
            "c+(uint32_t)("
            + "+".join(f"{ca}(a>>{8 * i})*{cb}(b>>{8 * i})" for i in range(4))
            + ")",
        )
        for h, o in (("lo", 0), ("hi", 16)):
            op(
                f"dp2a.{h}.{ta}32.{tb}32",
                "uint32_t",
                ["uint32_t"] * 3,
                f"c+(uint32_t)({c2}a*{cb}(b>>{o})+{c2}(a>>16)*{cb}(b>>{o + 8}))",
            )
op("min.relu.s32", "int32_t", ["int32_t"] * 2, "(a<b?a:b)>0?(a<b?a:b):0")
op("max.relu.s32", "int32_t", ["int32_t"] * 2, "(a>b?a:b)>0?(a>b?a:b):0")

# f32. Variants: "" / ftz / sat; directed rounding through helper functions (imm: 0 rn, 1 rz, 2 rm,
# 3 rp)
F = "float"
for fz in ("", ".ftz"):
    z = "FZ" if fz else ""
    for sat in ("", ".sat"):
        s = "SATF" if sat else ""
        for n, sfx in ((1, "f32"), (2, "f32x2")):
            if n == 2 and sat:
                continue
            for nm, e in (
                ("add", f"{z}(a)+{z}(b)"),
                ("sub", f"{z}(a)-{z}(b)"),
                ("mul", f"{z}(a)*{z}(b)"),
            ):
                op(f"{nm}.{sfx}{fz}{sat}", F, [F, F], f"{s}({z}({e}))", n)
            op(f"fma.{sfx}{fz}{sat}", F, [F, F, F], f"{s}({z}(fmaf({z}(a),{z}(b),{z}(c))))", n)
            op(f"addr.{sfx}{fz}{sat}", F, [F, F], f"{s}({z}(add_dir({z}(a),{z}(b),imm)))", n)
            op(f"subr.{sfx}{fz}{sat}", F, [F, F], f"{s}({z}(add_dir({z}(a),-{z}(b),imm)))", n)
            op(f"mulr.{sfx}{fz}{sat}", F, [F, F], f"{s}({z}(fma_dir({z}(a),{z}(b),-0.0f,imm)))", n)
            op(
                f"fmar.{sfx}{fz}{sat}",
                F,
                [F, F, F],
                f"{s}({z}(fma_dir({z}(a),{z}(b),{z}(c),imm)))",
                n,
            )
    op(f"div.f32{fz}", F, [F, F], f"{z}({z}(a)/{z}(b))")
    op(f"min.f32{fz}", F, [F, F], f"minf({z}(a),{z}(b))")
    op(f"max.f32{fz}", F, [F, F], f"maxf({z}(a),{z}(b))")
    op(f"min3.f32{fz}", F, [F, F, F], f"minf(minf({z}(a),{z}(b)),{z}(c))")
    op(f"max3.f32{fz}", F, [F, F, F], f"maxf(maxf({z}(a),{z}(b)),{z}(c))")
    op(f"min.NaN.f32{fz}", F, [F, F], f"minnf({z}(a),{z}(b))")
    op(f"max.NaN.f32{fz}", F, [F, F], f"maxnf({z}(a),{z}(b))")
    op(f"min3.NaN.f32{fz}", F, [F, F, F], f"minnf(minnf({z}(a),{z}(b)),{z}(c))")
    op(f"max3.NaN.f32{fz}", F, [F, F, F], f"maxnf(maxnf({z}(a),{z}(b)),{z}(c))")
    for nm, e in (
        ("ex2", "exp2f({0})"),
        ("lg2", "log2f({0})"),
        ("rcp", "1.0f/{0}"),
        ("sqrt", "sqrtf({0})"),
        ("rsqrt", "(float)(1.0/sqrt((double){0}))"),
        ("sin", "sinf({0})"),
        ("cos", "cosf({0})"),
        ("tanh", "tanhf({0})"),
    ):
        op(f"{nm}.f32{fz}", F, [F], f"{z}({e.format(z + '(a)')})")
    op(f"abs.f32{fz}", F, [F], f"{z}(fabsf(a))")
    op(f"neg.f32{fz}", F, [F], f"{z}(-(a))")
op("copysign.f32", F, [F, F], "copysignf(b,a)")
op("fma.f32.bf16", F, ["bf16", "bf16", F], "fmaf(b2f(a),b2f(b),c)")
op("add.f32.bf16", F, ["bf16", F], "b2f(a)+b")
op("sub.f32.bf16", F, ["bf16", F], "b2f(a)-b")
op("mul.f32.bf16", F, ["bf16", "bf16"], "b2f(a)*b2f(b)")
op("fma.f32.f16", F, ["f16", "f16", F], "fmaf(h2f(a),h2f(b),c)")
op("add.f32.f16", F, ["f16", F], "h2f(a)+b")
op("sub.f32.f16", F, ["f16", F], "h2f(a)-b")
D = "double"
for nm, e in (
    ("add", "a+b"),
    ("sub", "a-b"),
    ("mul", "a*b"),
    ("div", "a/b"),
    ("min", "fmin(a,b)"),
    ("max", "fmax(a,b)"),
):
    op(f"{nm}.f64", D, [D, D], e)
op("fma.f64", D, [D, D, D], "fma(a,b,c)")
for nm, e in (
    ("abs", "fabs(a)"),
    ("neg", "-a"),
    ("sqrt", "sqrt(a)"),
    ("rcp", "1.0/a"),
    ("rsqrt", "1.0/sqrt(a)"),
):
    op(f"{nm}.f64", D, [D], e)
for t, ld, st in (("f16", "h2f", "f2h"), ("bf16", "b2f", "f2b")):
    for n, sfx in ((1, t), (2, t + "x2")):
        for nm, e in (
            ("add", "{0}(a)+{0}(b)"),
            ("sub", "{0}(a)-{0}(b)"),
            ("mul", "{0}(a)*{0}(b)"),
            ("min", "minf({0}(a),{0}(b))"),
            ("max", "maxf({0}(a),{0}(b))"),
            ("min.NaN", "minnf({0}(a),{0}(b))"),
            ("max.NaN", "maxnf({0}(a),{0}(b))"),
        ):
            op(f"{nm}.{sfx}", t, [t, t], f"{st}({e.format(ld)})", n)
        op(
            f"fma.{sfx}",
            t,
            [t, t, t],
            f"d2{st[2]}(fma((double){ld}(a),(double){ld}(b),(double){ld}(c)))",
            n,
        )
        op(
            f"fma.relu.{sfx}",
            t,
            [t, t, t],
            f"{st}(maxf(0,{ld}(d2{st[2]}(fma((double){ld}(a),(double){ld}(b),(double){ld}(c))))))",
            n,
        )
        op(f"neg.{sfx}", t, [t], "a^0x8000", n)
        op(f"abs.{sfx}", t, [t], "a&0x7fff", n)
        op(f"ex2.{sfx}", t, [t], f"{st}(exp2f({ld}(a)))", n)
        op(f"tanh.{sfx}", t, [t], f"{st}(tanhf({ld}(a)))", n)
# fast conversions (register widths equal to the types)
for d in ("16", "32", "64"):
    for s in ("16", "32", "64"):
        for t in "us":
            if d != s:
                op(
                    f"icvt.{t}{s}.{d}",
                    INTS["u" + d],
                    [INTS[t + s]],
                    f"({INTS['u' + d]})({INTS['s' + d] if t == 's' else INTS['u' + d]})a",
                )
op("cvt.bf16x2.f32", "uint32_t", [F, F], "((uint32_t)f2b(a)<<16)|f2b(b)")
op("cvt.f16x2.f32", "uint32_t", [F, F], "((uint32_t)f2h(a)<<16)|f2h(b)")
op("cvt.relu.bf16x2.f32", "uint32_t", [F, F], "((uint32_t)f2b(relu(a))<<16)|f2b(relu(b))")
op("cvt.relu.f16x2.f32", "uint32_t", [F, F], "((uint32_t)f2h(relu(a))<<16)|f2h(relu(b))")
op("cvt.rz.bf16x2.f32", "uint32_t", [F, F], "((uint32_t)f2b_rz(a)<<16)|f2b_rz(b)")
op("cvt.f32.bf16", F, ["bf16"], "b2f(a)")
op("cvt.f32.f16", F, ["f16"], "h2f(a)")
op("cvt.bf16.f32", "bf16", [F], "f2b(a)")
op("cvt.f16.f32", "f16", [F], "f2h(a)")
op("cvt.f32.s32", F, ["int32_t"], "(float)a")
op("cvt.f32.u32", F, ["uint32_t"], "(float)a")
op("cvt.tf32.f32", "uint32_t", [F], "f2tf32(a,imm)")
for nm in ("e4m3", "e5m2"):
    op(f"cvt.{nm}x2.f32", "uint16_t", [F, F], f"(uint16_t)((f2{nm}(a)<<8)|f2{nm}(b))")
    op(
        f"cvt.{nm}x2.f16x2",
        "uint16_t",
        ["uint32_t"],
        f"(uint16_t)((f2{nm}(h2f(a>>16))<<8)|f2{nm}(h2f((uint16_t)a)))",
    )
    op(
        f"cvt.f16x2.{nm}x2",
        "uint32_t",
        ["uint16_t"],
        f"((uint32_t)f2h({nm}2f(a>>8))<<16)|f2h({nm}2f(a&255))",
    )

# comparisons for setp / set
CMPI = {"eq": "a==b", "ne": "a!=b", "lt": "a<b", "le": "a<=b", "gt": "a>b", "ge": "a>=b"}
CMPF = dict(
    CMPI,
    ne="(a<b||a>b)",
    equ="!(a<b||a>b)",
    neu="a!=b",
    ltu="!(a>=b)",
    leu="!(a>b)",
    gtu="!(a<=b)",
    geu="!(a<b)",
    num="(a==a&&b==b)",
    nan="(a!=a||b!=b)",
)
SETP = {}
for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    for cn, e in CMPI.items():
        SETP[f"setp.{cn}.{t}"] = (INTS[t], e, "{}")
for cn, e in CMPF.items():
    SETP[f"setp.{cn}.f32"] = (F, e, "{}")
    SETP[f"setp.{cn}.f32.ftz"] = (F, e, "FZ({})")
    SETP[f"setp.{cn}.f64"] = (D, e, "{}")
    SETP[f"setp.{cn}.f16"] = ("f16", e, "h2f({})")
    SETP[f"setp.{cn}.bf16"] = ("bf16", e, "b2f({})")

SPECIAL = [
    "selp.16",
    "selp.32",
    "selp.64",
    "and.pred",
    "or.pred",
    "xor.pred",
    "not.pred",
    "mov.pred",
    "bra",
    "exit",
    "nop",
    "ld",
    "st",
    "atom",
    "pack",
    "unpack",
    "cvt",
    "shfl",
    "vote",
    "elect",
    "activemask",
    "redux",
    "warpsync",
    "ldmatrix",
    "stmatrix",
    "proxyfence",
    "bfi.32",
    "bfi.64",
    "match.any",
    "match.all",
    "setpx",
    "slct.32",
    "slct.64",
    "trap",
]
