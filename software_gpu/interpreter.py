"""The inner interpreter: C source, generated from the instruction tables and the files in `c`.

It is compiled once, with the C compiler of the system, and cached by a hash of its content in the
temporary directory. Everything that is not plain arithmetic or a plain memory access returns to
Python ("trap"), see machine.py.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from .instruction_tables import OPS, SETP, SPECIAL

C_SOURCES = Path(__file__).parent / "c"


def _ident(n):
    return "OP_" + n.replace(".", "_").replace("::", "_")


def source():
    names = list(OPS) + list(SETP) + SPECIAL
    prelude, run, matrices = (
        (C_SOURCES / f"{part}.c").read_text() for part in ("prelude", "interpreter", "matrices")
    )
    out = [prelude, "enum {" + ",".join(_ident(n) for n in names) + "};"]
    cases = []
    for n, (td, ts, e, lanes) in OPS.items():
        operands = list(zip(ts, "abc", strict=False))
        decl = "".join(f" const {t}*{c.upper()}_=(const {t}*)(R+I->{c});" for t, c in operands)
        body = "".join(f"{t} {c}={c.upper()}_[i]; " for t, c in operands) + f"d[i]={e};"
        cases.append(
            f"    case {_ident(n)}: {{ {td}*d=({td}*)(R+I->d);{decl} LOOP{lanes}({body}) }} break;"
        )
    for n, (t, e, f) in SETP.items():
        T = "float" if t in ("f16", "bf16") else t
        body = f"{T} a={f.format('A_[i]')}; {T} b={f.format('B_[i]')}; r|=(uint32_t)({e})<<i;"
        cases.append(
            f"    case {_ident(n)}: {{ const {t}*A_=(const {t}*)(R+I->a);"
            f" const {t}*B_=(const {t}*)(R+I->b); uint32_t r=0;"
            f" for(int i=0;i<32;i++){{ {body} }} STORE_COMPARISON() }} break;"
        )
    return "\n".join(out) + "\n" + run.replace("/* CASES */", "\n".join(cases)) + matrices, names


INS = np.dtype(
    [
        ("op", "<u2"),
        ("pneg", "u1"),
        ("nvec", "u1"),
        ("pred", "<i4"),
        ("d", "<i4"),
        ("a", "<i4"),
        ("b", "<i4"),
        ("c", "<i4"),
        ("e", "<i4"),
        ("vec", "<i4"),
        ("imm", "<i8"),
        ("target", "<i4"),
        ("flags", "<i4"),
    ]
)
P_ = ctypes.c_void_p


class CWarp(ctypes.Structure):
    _fields_ = [
        ("R", P_),
        ("P", P_),
        ("local", P_),
        ("smem", P_),
        ("shadow", P_),
        ("local_size", ctypes.c_int64),
        ("smem_size", ctypes.c_int64),
        ("nrank", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("tag", ctypes.c_int32),
        ("widx", ctypes.c_int32),
        ("pc", ctypes.c_int32 * 32),
        ("alive", ctypes.c_uint32),
        ("blocked", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("trap_pc", ctypes.c_int32),
        ("fault_lane", ctypes.c_int32),
        ("fault_addr", ctypes.c_uint64),
        ("icount", ctypes.c_uint64),
        ("stores", ctypes.c_uint64),
        ("uninit", ctypes.c_uint64),
        ("uninit_pc", ctypes.c_int32),
        ("fault_kind", ctypes.c_int32),
        ("resume", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("dlo", ctypes.c_int64),
        ("dhi", ctypes.c_int64),
        ("arrived", P_),
    ]


class CProg(ctypes.Structure):
    _fields_ = [
        ("ins", P_),
        ("vecs", P_),
        ("ranges", P_),
        ("count", P_),
        ("n", ctypes.c_int64),
        ("nranges", ctypes.c_int64),
    ]


EXIT, TRAP, BUDGET, BLOCKED, FAULT = range(5)
SHARED_BASE, LOCAL_BASE = 1 << 60, 1 << 61
_lib = None
CODE = {}


def lib():
    global _lib
    if _lib is None:
        src, names = source()
        CODE.update({n: i for i, n in enumerate(names)})
        cc = (
            os.environ.get("CC")
            or shutil.which("gcc")
            or shutil.which("cc")
            or shutil.which("clang")
        )
        if not cc:
            raise RuntimeError("software GPU: no C compiler found (gcc, cc or clang); set CC")
        flags = [
            "-O2",
            "-ftree-vectorize",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-march=native",
            "-fPIC",
            "-shared",
            "-w",
        ]
        h = hashlib.sha256((src + cc + " ".join(flags)).encode()).hexdigest()[:16]
        d = os.path.join(tempfile.gettempdir(), f"softgpu-{os.getuid()}")
        os.makedirs(d, mode=0o700, exist_ok=True)
        so = os.path.join(d, f"core-{h}.so")
        if not os.path.exists(so):
            c = os.path.join(d, f"core-{h}.{os.getpid()}.c")
            with open(c, "w") as f:
                f.write(src)
            tmp = so + f".{os.getpid()}"
            r = subprocess.run([cc, *flags, "-o", tmp, c, "-lm"], capture_output=True, text=True)
            if r.returncode:
                raise RuntimeError("software GPU: the C compiler failed:\n" + r.stderr[:3000])
            os.replace(tmp, so)
            os.unlink(c)
        L = ctypes.CDLL(so)
        L.run.argtypes = [P_, P_, ctypes.c_int64]
        L.run.restype = ctypes.c_int
        i32 = ctypes.c_int
        L.wgmma.argtypes = [
            P_,
            P_,
            i32,
            i32,
            i32,
            i32,
            P_,
            ctypes.c_uint64,
            ctypes.c_uint64,
            i32,
            i32,
            i32,
            i32,
            i32,
            P_,
            P_,
            ctypes.c_int64,
            i32,
        ]
        L.wgmma.restype = i32
        L.check_runs.argtypes = [P_, P_, i32, ctypes.c_int64, ctypes.c_int64]
        L.check_runs.restype = i32
        L.mma16816.argtypes = [P_, P_, P_, P_, P_, i32, i32, i32]
        _lib = L
    return _lib
