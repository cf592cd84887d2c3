"""What a handler of a complex instruction sees and does, in the warp that executes it."""

import numpy as np

from . import interpreter
from .operands import Imm, Mem, Reg, Sink
from .ptx_types import SIZE
from .state import SMEM_MAX, SimError

_masks = {}


def MASKS(bits):
    m = _masks.get(bits)
    if m is None:
        m = _masks[bits] = np.unpackbits(
            np.array([bits], np.uint32).view(np.uint8), bitorder="little"
        ).astype(bool)
        m.flags.writeable = False
    return m


def lanes_of(bits):
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Ctx:
    """What the handler of a complex instruction sees.

    A handler is called once for an instruction of a warp, after its predicate is known, and never
    with an empty mask. It gets the instruction and this context.

    The instruction (operands.Instr):
      .op    full dotted opcode text, e.g. "tcgen05.ld.sync.aligned.32x32b.x32.b32"
      .mods  op.split(".") with "::" kept together: ["tcgen05", "mma", "cta_group::1", "kind::f16"]
      .args  operands as parsed, of operands.py; an Imm holds an int, or the bits of 0f.. and 0d..
      .line  line of the PTX text, from 1; .text is the source text

    The context:
      .cta   Cta of the warp: .rank (%cluster_ctarank), .ctaid (x, y, z), .cluster (.ctas by rank),
             .smem (np.uint8[262144], index = shared address & 0xFFFFFF),
             .tmem (np.uint32[128, 512]: [TMEM lane, column], address = lane << 16 | column),
             .umma (dict, state of tcgen05.py)
      .warp  .index in the CTA; it reaches TMEM lanes 32 * (index % 4) .. + 31
      .mask  np.bool_[32]: lanes that execute
      .vals(operand, dtype)  its values, (32,), a copy; of a Mem operand the addresses, as uint64
      .scalar(operand)       its value in the first active lane, unsigned
      .pred(operand)         np.bool_ (32,); .true(operand): in the first active lane
      .set(operand, values)  writes the lanes in the mask; dtype as wide as the register
      .peer(addr)            (cta, offset) of a shared::cluster address, rank << 24 | offset; so
                             addr & 0xFEFFFFFF reaches the even CTA of a pair
      .cta_at(rank)          the Cta with that rank in the cluster
      .mark_written(cta, off, nbytes)  shared bytes are defined from now on
      .check_read(cta, off, nbytes)    warns of shared bytes that were never written, or written
                                       without a proxy fence; .check_runs: many at once
      .try_cancel(), .vals128(operand) for cluster launch control
      .mbar_arrive(cta, off, count=1), .mbar_complete_tx(cta, off, nbytes)
      .defer(kind, fn)       runs fn now, or later in a run with delays. What one warp defers under
                             one kind ("tma", "mma", "clc") runs in order.
      .error(msg)            raises SimError with kernel, CTA, warp and line; .warn(msg) is counted

    A handler that cannot proceed returns BLOCK(reason), and the instruction is executed again later
    (tcgen05.alloc with no free columns, say). Any other return value means that it is done.
    """

    __slots__ = ("m", "prog", "instr", "warp", "cta", "bits", "mask")

    def __init__(self, m, prog, instr, warp, bits):
        self.m, self.prog, self.instr, self.warp, self.cta, self.bits = (
            m,
            prog,
            instr,
            warp,
            warp.cta,
            bits,
        )
        self.mask = MASKS(bits)

    def _off(self, x, size):
        return self.prog.src(x, size, exact=False)

    def vals(self, x, dtype=np.uint32):
        dt = np.dtype(dtype)
        w = self.warp
        if isinstance(x, Imm):
            v = self.prog.imm_bits(x, dt.itemsize) & ((1 << 8 * dt.itemsize) - 1)
            return np.full(32, v, f"u{dt.itemsize}").view(dt)
        if isinstance(x, Mem):
            o, s, imm = self.prog.addr(x)
            a = (
                w.v32[o >> 2 : (o >> 2) + 32].astype(np.uint64)
                if s == 4
                else w.v64[o >> 3 : (o >> 3) + 32].copy()
            )
            return a + np.uint64(imm & 0xFFFFFFFFFFFFFFFF)
        size = SIZE[x.type] if isinstance(x, Reg) else dt.itemsize
        if size == 4 and type(x) is Reg and dt.itemsize == 4:
            o = self.prog.off[x.name] >> 2
            return w.v32[o : o + 32].view(dt).copy()
        o = self.prog.src(x, size)
        v = w.R[o : o + 32 * size].view(f"u{size}")
        if size == dt.itemsize:
            return v.view(dt).copy()
        return v.astype(dt)

    def lane(self):
        return (self.bits & -self.bits).bit_length() - 1

    def scalar(self, x):
        if isinstance(x, Imm):
            return int(x.value)
        return int(self.vals(x, np.uint64)[self.lane()])

    def pred(self, x):
        if isinstance(x, Imm):
            return np.full(32, bool(x.value))
        p = int(self.warp.P[self.prog.pred(x)])
        return MASKS(~p & 0xFFFFFFFF if x.neg else p)

    def true(self, x):
        return bool(self.pred(x)[self.lane()])

    def set(self, x, values):
        if isinstance(x, Sink):
            return
        w = self.warp
        if x.type == "pred":
            b = int(np.packbits(np.asarray(values, bool), bitorder="little").view(np.uint32)[0])
            return w.set_pred(self.prog.pred(x), self.bits, b)
        size = SIZE[x.type]
        o = self.prog.off.get(x.name)
        if o is None:
            o = self.prog.dst(x, size)
        if (
            size == 4
            and self.bits == 0xFFFFFFFF
            and type(values) is np.ndarray
            and values.dtype.itemsize == 4
            and values.shape == (32,)
        ):
            w.v32[o >> 2 : (o >> 2) + 32] = values.view(np.uint32)
            return
        v = w.R[o : o + 32 * size].view(f"u{size}")
        values = np.broadcast_to(np.asarray(values), 32)
        if values.dtype.itemsize != size:
            values = values.astype(f"u{size}")
        elif not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        values = values.view(f"u{size}")
        if self.bits == 0xFFFFFFFF:
            v[:] = values
        else:
            v[self.mask] = values[self.mask]

    def peer(self, addr):
        addr = int(addr) & 0xFFFFFFFF
        r = addr >> 24
        if r >= len(self.cta.cluster.ctas):
            self.error(
                f"shared address {addr:#x} names CTA rank {r}, the cluster has "
                f"{len(self.cta.cluster.ctas)}"
            )
        return self.cta.cluster.ctas[r], addr & 0xFFFFFF

    def cta_at(self, rank):
        if rank >= len(self.cta.cluster.ctas):
            self.error(f"CTA rank {rank} is not in the cluster")
        return self.cta.cluster.ctas[rank]

    def mark_written(self, cta, off, n):
        cta.shadow[off : off + n] = 1

    def check_read(self, cta, off, n):
        self.check_runs(cta, np.array([0, n], np.int64), off)

    def check_runs(self, cta, runs, base):
        """runs: int64 array of (offset, bytes) pairs, relative to base; checks them all at once"""
        st = interpreter.lib().check_runs(
            cta.shadow.ctypes.data, runs.ctypes.data, runs.size // 2, base, SMEM_MAX - 1
        )
        if st & 1:
            self.warn("read of never-written shared memory")
        if st & 2:
            self.warn(
                "async-proxy read of shared memory that was written without a fence.proxy.async"
            )

    def try_cancel(self):
        """cluster launch control: take a cluster that has not started; its first CTA id or None"""
        if not self.m.todo:
            return None
        cx, cy, cz = self.m.L.cluster or (1, 1, 1)
        _, (x, y, z) = self.m.todo.popleft()
        return x * cx, y * cy, z * cz

    def vals128(self, x):
        """(low, high) np.uint64[32] of a b128 register"""
        o = self.prog.src(x, 16) >> 3
        v = self.warp.v64
        return v[o : o + 32].copy(), v[o + 32 : o + 64].copy()

    def mbar(self, cta, off):
        b = cta.mbars.get(off)
        if b is None:
            self.error(
                f"no mbarrier is initialised at shared offset {off:#x} of CTA rank {cta.rank}"
            )
        return b

    def mbar_arrive(self, cta, off, count=1):
        b = self.mbar(cta, off)
        b.pending -= count
        if b.pending < 0:
            self.error(f"too many arrivals on the mbarrier at {off:#x} of CTA rank {cta.rank}: {b}")
        self.flip(b)

    def flip(self, b):
        self.m.epoch += 1
        if b.pending == 0 and b.tx == 0:
            b.phase += 1
            b.pending = b.expected

    def mbar_expect_tx(self, cta, off, n):
        b = self.mbar(cta, off)
        b.tx += n

    def mbar_complete_tx(self, cta, off, n):
        b = self.mbar(cta, off)
        b.tx -= n
        self.flip(b)

    def defer(self, kind, fn):
        self.m.defer((self.warp, kind), fn)

    def where(self):
        return (
            f"kernel {self.prog.kernel.name[:60]}, CTA {self.cta.ctaid} rank {self.cta.rank}, "
            f"warp {self.warp.index}, {self.instr!r}"
        )

    def error(self, msg):
        raise SimError(f"{msg}\n  at {self.where()}")

    def warn(self, msg):
        self.m.warn(msg, self.instr)
