"""The state of a running kernel: CTAs, clusters, warps, mbarriers; errors, and BLOCK."""

import ctypes

import numpy as np

from . import interpreter

SMEM_MAX = 1 << 18
ARRIVED, NOWHERE = 255, (1 << 63) - 1


class SimError(Exception):
    pass


class Deadlock(SimError):
    pass


class BLOCK:
    """Returned by a handler that cannot proceed. reason: its text is asked for in reports only.
    soft: a try_wait, which may also return false."""

    __slots__ = ("reason", "soft")

    def __init__(self, reason, soft=False):
        self.reason, self.soft = reason, soft


class Mbar:
    __slots__ = ("expected", "pending", "tx", "phase", "line", "label")

    def __init__(self, n, line):
        self.expected = self.pending = n
        self.tx = self.phase = 0
        self.line = line

    def __str__(self):
        return (
            f"phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.expected} "
            f"arrivals and {self.tx} bytes outstanding, initialised at line {self.line}"
        )


class Cta:
    def __init__(self, machine, cluster, rank, ctaid):
        self.machine, self.cluster, self.rank, self.ctaid = machine, cluster, rank, ctaid
        self.smem = np.full(SMEM_MAX, 0xFF, np.uint8)  # never-written shared memory reads as NaN
        self.shadow = np.zeros(
            SMEM_MAX, np.uint8
        )  # 0 never written, 1 written, no proxy fence yet: 2+w by warp w, ARRIVED by its copies
        self.arrived = np.array([NOWHERE, 0])  # shared bytes ARRIVED since the last proxy fence
        self._tmem = None
        self.umma = {}
        self.mbars = {}
        self.bars = {}
        self.warps = []
        self.clc = None
        self.starts_in = 0  # turns of all warps before its own run
        self.is_early = machine.L.pdl  # before the end of the launch that this one depends on

    @property
    def tmem(self):
        if self._tmem is None:
            self._tmem = np.full((128, 512), 0xFFFFFFFF, np.uint32)
        return self._tmem


class Cluster:
    def __init__(self, index):
        self.index = index
        self.ctas = []
        self.bar_phase = 0
        self.bar_arrived = set()


class Copies:
    """The cp.async of a warp. In a run with delays some are late, until somebody waits for them."""

    def __init__(self):
        self.waiting, self.started, self.groups = {}, 0, []
        self.places = []  # of copies without an arrival

    def start(self, m, fn, places):
        """places: (CTA, first byte, number) in shared memory"""
        number, self.started = self.started, self.started + 1
        self.places += places
        if m.late():
            self.waiting[number] = fn
        else:
            fn()

    def finish(self, end):
        """those before number `end`"""
        for number in [x for x in self.waiting if x < end]:
            self.waiting.pop(number)()

    def arrive(self, m, warp, fn):
        """fn when all copies started so far are there"""
        end, places, self.places = self.started, self.places, []

        def go():
            self.finish(end)
            for cta, first, n in places:
                shadow = cta.shadow[first : first + n]
                shadow[shadow == warp.c.tag] = ARRIVED
                cta.arrived[:] = min(cta.arrived[0], first), max(cta.arrived[1], first + n)
            fn()

        m.defer((warp, f"cp.async{id(go)}"), go)

    def commit(self):
        self.groups.append(self.started)

    def wait(self, left):
        """for all but the last `left` groups; None: for everything"""
        if left is None:
            self.finish(self.started)
        elif len(self.groups) > left:
            self.finish(self.groups[len(self.groups) - left - 1])


class Warp:
    def __init__(self, prog, cta, index, lanes):
        self.prog, self.cta, self.index = prog, cta, index
        n = prog.rows * 128
        raw = np.empty(n + 64, np.uint8)
        o = (-raw.ctypes.data) % 64
        self.R = raw[o : o + n]
        self.v32 = self.R.view(np.uint32)
        self.v64 = self.R.view(np.uint64)
        self.P = np.zeros(prog.npred + 1, np.uint32)
        self.P[1] = 0xFFFFFFFF
        self.local = np.full(max(32 * prog.local_size, 1), 0xFF, np.uint8)
        c = self.c = interpreter.CWarp()
        c.R, c.P, c.local = self.R.ctypes.data, self.P.ctypes.data, self.local.ctypes.data
        c.local_size = prog.local_size
        c.rank, c.tag, c.widx = cta.rank, 2 + index, index
        c.alive = (1 << lanes) - 1
        c.dlo, c.dhi = NOWHERE, 0
        self.ptr = ctypes.addressof(c)
        self.state = {}  # pc -> handler state while blocked (named barriers ...)
        self.why = {}  # pc -> reason
        self.bulk, self.bulk_groups = [], []
        self.copies = Copies()
        self.wg, self.wg_groups = [], []
        self.allow_false = False
        self.soft = False
        self.starved = 0
        self.done = False
        self.cl_arrived = 0

    def set_pred(self, i, mask, value):
        if i >= 0:
            p = int(self.P[i])
            self.P[i] = (p & ~mask) | (
                (mask if value is True else 0 if value is False else value) & mask
            )
