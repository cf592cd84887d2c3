"""Handlers of instructions that the interpreter leaves to Python.

make(machine, program, instr) -> handler(warp, mask), or None when the instruction is unknown. A
handler returns None when it is done, BLOCK(reason) to wait, or False if it is done but nothing
changed.
"""

import ctypes
import re
import struct

import numpy as np

from . import interpreter, tcgen05, wgmma
from .barriers import barrier, mbarrier
from .context import Ctx, lanes_of
from .copies import cp, st_async
from .operands import Group, Mem, Pair, Reg, Special, Sym, Vec
from .state import BLOCK


def make(m, p, ins):
    name = ins.mods[0]
    if name == "mbarrier":
        return mbarrier(m, p, ins)
    if name in ("bar", "barrier"):
        return barrier(m, p, ins)
    if name == "cp":
        return cp(m, p, ins)
    if name == "wgmma":
        return wg(m, p, ins)
    if name == "mma":
        return wgmma.make_mma(m, p, ins)
    if name == "griddepcontrol":
        return grid_dependency(m, ins)
    if name == "trap":

        def trap(W, mask):
            m.fail(W, ins, "the kernel executed trap")

        return trap
    if name in ("st", "red") and "async" in ins.mods:
        return st_async(m, p, ins)
    if name in ("tcgen05", "clusterlaunchcontrol", "tensormap", "multimem") or name.startswith(
        "tcgen05"
    ):
        return tensor_core(m, p, ins)
    if name == "call":
        return call(m, p, ins)
    if name == "mov" and ins.mods[-1] == "b128":
        return mov128(m, p, ins)
    return None


def grid_dependency(m, ins):
    """The wait ends when nothing else can go on: who does not wait comes too early."""

    def wait(W, mask):
        m.has_waited = True
        return BLOCK("the launch before") if W.cta.is_early else None

    return wait if "wait" in ins.mods else lambda W, mask: None


def wg(m, p, ins):
    what = ins.mods[1]
    if what == "mma_async":
        return wgmma.make_wgmma(m, p, ins)
    if what == "commit_group":

        def commit(W, mask):
            W.wg_groups.append(W.wg)
            W.wg = []

        return commit
    if what == "wait_group":
        n = ins.args[0].value

        def wait(W, mask):
            g = W.wg_groups
            while len(g) > n:
                for fn in g.pop(0):
                    fn()

        return wait
    return None


def tensor_core(m, p, ins):

    def touch(x):  # give every operand its place before the register file is laid out
        if isinstance(x, Mem):
            p.addr(x)
            for y in x.coords or ():
                touch(y)
        elif isinstance(x, Pair):
            touch(x.a), touch(x.b)
        elif isinstance(x, Vec):
            for y in x:
                touch(y)
        elif isinstance(x, Reg) and x.type == "pred":
            p.pred(x)
        elif isinstance(x, (Special, Sym)):
            p.src(x, 4)
        elif isinstance(x, Reg):
            p.regoff(x)

    for x in ins.args:
        touch(x)

    def run(W, mask):
        return tcgen05.execute(ins, Ctx(m, p, ins, W, mask))

    return run


def call(m, p, ins):
    names = [x.name for x in ins.args if isinstance(x, Sym)]
    fn = names[0] if names else "?"
    if fn == "__assertfail":

        def fail(W, mask):
            m.fail(W, ins, "device assertion failed")

        return fail
    if fn == "vprintf":
        groups = [x for x in ins.args if isinstance(x, Group)]
        fo, ao = (p.local_off[x.name] for x in groups[1].items)

        def vprintf(W, mask):
            for lane in lanes_of(mask):
                loc = W.local[lane * p.local_size : (lane + 1) * p.local_size]
                fa, aa = (int(loc[o : o + 8].view(np.uint64)[0]) for o in (fo, ao))
                fmt = ctypes.string_at(fa).decode(errors="replace")
                args = b""
                if aa & interpreter.LOCAL_BASE:
                    args = loc[aa & 0xFFFFFFFF :].tobytes()
                m.out(f"[{W.cta.ctaid} thread {W.index * 32 + lane}] {cformat(fmt, args)}", end="")

        return vprintf
    return None


def cformat(fmt, args):
    pos = 0

    def sub(k):
        nonlocal pos
        conv = k[0][-1]
        if conv == "%":
            return "%"
        big = "l" in k[0] or conv in "fFeEgGps"
        size = 8 if big else 4
        pos = (pos + size - 1) // size * size
        raw = args[pos : pos + size]
        pos += size
        spec = re.sub(r"[hlLqjzt]", "", k[0])
        if conv in "fFeEgG":
            return spec % struct.unpack("<d", raw)[0]
        if conv == "s":
            return ctypes.string_at(struct.unpack("<Q", raw)[0]).decode(errors="replace")
        v = int.from_bytes(raw, "little", signed=conv in "di")
        return hex(v) if conv == "p" else spec.replace("u", "d") % v

    return re.sub(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|L|q|j|z|t)?[diouxXcfFeEgGps%]", sub, fmt)


def mov128(m, p, ins):
    d, s = ins.args

    def parts(x, dst):
        if isinstance(x, Vec):
            return [(p.dst if dst else p.src)(y, 8) >> 3 for y in x]
        o = p.regoff(x) >> 3
        return [o, o + 32]

    di, si = parts(d, True), parts(s, False)

    def run(W, mask):
        for a, b in zip(di, si, strict=True):
            for lane in lanes_of(mask):
                W.v64[a + lane] = W.v64[b + lane]

    return run
