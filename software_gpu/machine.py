"""Launches: grids, clusters and CTAs, global memory, parameters, asynchronous work.

Machine(module, ...).launch(launch) runs one kernel launch. Plain instructions run in the C
interpreter (interpreter.py). Handlers (handlers.py) do barriers, TMA, wgmma and tcgen05. A handler
returns None (done) or BLOCK(reason): the lanes then wait, and the same instruction is tried again
later.
"""

import collections
import ctypes
import random
import time

import numpy as np

from . import handlers, interpreter, lower, ptx, tma
from .missing_fences import missing_fences
from .operands import Module
from .scheduling import Scheduler
from .special_registers import special_register
from .state import Cluster, Cta, SimError, Warp
from .unwaited_loads import unwaited_loads

# turns of all warps for which a CTA starts later than the first one of its cluster, at most
MOST_LATE = 6


class Machine(Scheduler):
    """Runs launches.

    delay: None (asynchronous work completes at once), or a seed: TMA, bulk stores, wgmma results
    and tcgen05 work complete late and in random order.
    resident: how many clusters run together; when all of them wait, at most `spare` more are
    admitted.
    With a seed the CTAs of a cluster also start late and apart.
    slow: indices of warps that run, a few instructions at a time, only when nothing else can, or
    pairs of a CTA's rank in its cluster and an index. Who depends on their being fast without
    waiting for them loses.
    """

    def __init__(
        self,
        module,
        allocations=(),
        delay=None,
        resident=1,
        budget=200000,
        sms=132,
        out=print,
        max_instructions=None,
        slow=(),
        spare=16,
    ):
        self.module = module if isinstance(module, Module) else ptx.parse(module)
        self.allocations = list(allocations)
        self.delay = delay is not None
        self.rng = random.Random(delay)
        self.resident, self.budget, self.sms, self.out = resident, budget, sms, out
        self.spare = spare
        self.max_instructions, self.slow = max_instructions, frozenset(slow)
        self.warnings = collections.Counter()  # (message, PTX line, text): likely bugs
        self.notes = collections.Counter()  # habits that proven kernels have too
        self.progs = {}
        self.pending = []  # deferred asynchronous work: (key, fn)
        self.epoch = 0
        self.globals = {}
        self.tmaps = {}
        self.keep = []
        self.traps = collections.Counter()
        self.stats = []
        for v in self.module.globals.values():
            if v.space in ("global", "const"):
                buf = np.zeros(max(v.size, 16) + 256, np.uint8)
                if v.init:
                    buf[(-buf.ctypes.data) % 256 :][: len(v.init)] = np.frombuffer(v.init, np.uint8)
                a = buf.ctypes.data + (-buf.ctypes.data) % 256
                self.globals[v.name] = a
                self.keep.append(buf)
                self.allocations.append((a, v.size))

    def fail(self, W, instr, msg):
        raise SimError(
            f"{msg}\n  at kernel {W.prog.kernel.name[:60]}, CTA {W.cta.ctaid} rank "
            f"{W.cta.rank}, warp {W.index}, {instr!r}"[:1500]
        )

    def mem(self, addr, n, W, instr):
        """uint8 view of registered global memory"""
        addr = int(addr)
        i = int(np.searchsorted(self.ranges[:, 0], np.uint64(addr), "right")) - 1
        if W.cta.is_early and not 0 <= addr - self.param_base < self.prog.param_size:
            self.fail(W, instr, f"global access [{addr:#x}, +{n}) before griddepcontrol.wait")
        if i < 0 or addr + n > int(self.ranges[i, 1]):
            self.fail(W, instr, f"global access [{addr:#x}, +{n}) outside every registered tensor")
        return np.frombuffer((ctypes.c_uint8 * n).from_address(addr), np.uint8)

    def tensor_map(self, addr, W, instr):

        raw = self.mem(addr, 128, W, instr).tobytes()
        t = self.tmaps.get(raw)
        if t is None:
            try:
                t = self.tmaps[raw] = tma.decode(raw)
            except tma.TmaError as e:
                self.fail(W, instr, f"TMA: {e}")
        return t

    def cluster_check(self, C):
        live = [w for w in C.warps if not w.done]
        if all((w.cta.rank, w.index) in C.bar_arrived for w in live):
            C.bar_phase += 1
            C.bar_arrived.clear()
            self.epoch += 1

    def warn(self, msg, instr):
        self.warnings[(msg, instr.line, instr.text[:120])] += 1

    def late(self):
        """delay mode: should this piece of asynchronous work wait? Both orders must occur."""
        return self.delay and self.rng.random() < 0.7

    def defer(self, key, fn):
        if not self.delay or (not any(k == key for k, _ in self.pending) and not self.late()):
            fn()
        else:
            self.pending.append((key, fn))

    def run_pending(self, i=None):
        """run one deferred item: the first of a random key"""
        if i is None:
            i = self.rng.randrange(len(self.pending))
        key = self.pending[i][0]
        for j in range(i + 1):
            if self.pending[j][0] == key:
                _, fn = self.pending.pop(j)
                break
        self.epoch += 1
        fn()

    def run_key(self, key):
        while True:
            for j, (k, fn) in enumerate(self.pending):
                if k == key:
                    self.pending.pop(j)
                    self.epoch += 1
                    fn()
                    break
            else:
                return

    def program(self, name):
        if name not in self.progs:
            if name not in self.module.kernels:
                cand = [k for k in self.module.kernels if k.startswith(name) or name.startswith(k)]
                if len(cand) != 1:
                    raise SimError(
                        f"the PTX has no kernel {name}; it has {list(self.module.kernels)}"
                    )
                name = cand[0]
            if name not in self.progs:
                self.progs[name] = lower.Program(
                    self.module.kernels[name], lambda p, i: handlers.make(self, p, i)
                )
                self.read_text(self.module.kernels[name].instrs)
        return self.progs[name]

    def read_text(self, instrs):
        """Warnings and notes about what a kernel may do, whatever it does in a run."""
        unwaited = "what the tcgen05.ld of line {} brings without a tcgen05.wait::ld between"
        computed, stored = unwaited_loads(instrs)
        for i, line in computed:
            self.warn("reads " + unwaited.format(line), i)
        for _, line in stored:
            self.notes["stores " + unwaited.format(line)] += 1
        for i, what in missing_fences(instrs):
            self.warn(f"{i.mods[0]}.{i.mods[1]} {what}", i)

    # launch
    def launch(self, L):
        t0 = time.time()
        prog = self.prog = self.program(L.name)
        lib = interpreter.lib()
        self.L = L
        gx, gy, gz = L.grid
        cx, cy, cz = L.cluster or (1, 1, 1)
        if max(gy, gz) > 65535:
            raise SimError(f"grid {L.grid}: at most 65535 CTAs in the second and third dimension")
        rq = prog.kernel.reqntid
        if rq:
            rq = (list(rq) + [1, 1, 1])[:3]
            if tuple(rq) != tuple(L.block):
                raise SimError(f"launch block {L.block} but the kernel has .reqntid {rq}")
        self.smem_size = prog.dyn_base + L.smem_bytes
        if self.smem_size > 233472:
            raise SimError(
                f"{self.smem_size} bytes of shared memory per CTA (dynamic {L.smem_bytes}), "
                "the limit is 232448 plus 1024 reserved"
            )
        # parameters
        buf = np.zeros(prog.param_size + 256, np.uint8)
        a0 = (-buf.ctypes.data) % 256
        if len(L.params) != len(prog.kernel.params):
            raise SimError(
                f"launch has {len(L.params)} parameters, the kernel {len(prog.kernel.params)}"
            )
        for p, data in zip(prog.kernel.params, L.params, strict=True):
            data = np.frombuffer(bytes(data), np.uint8)
            if len(data) < p.size:
                raise SimError(f"parameter {p.name}: {len(data)} bytes, the kernel wants {p.size}")
            o = a0 + prog.param_off[p.name]
            buf[o : o + p.size] = data[: p.size]
        self.param_buf, self.param_base = buf, buf.ctypes.data + a0
        # allowed global ranges, merged
        rs = sorted(
            [(a, a + n) for a, n, *_ in self.allocations if n]
            + [(self.param_base, self.param_base + max(prog.param_size, 1))]
        )
        merged = []
        for lo, hi in rs:
            if merged and lo <= merged[-1][1]:
                merged[-1][1] = max(hi, merged[-1][1])
            else:
                merged.append([lo, hi])
        self.ranges = np.array(merged, np.uint64).reshape(-1, 2)
        self.count = np.zeros(len(prog.ins), np.uint64)
        # a CTA that may run before the end of another launch has only its parameters
        self.params = np.array([[self.param_base, self.param_base + prog.param_size]], np.uint64)
        self.cps = []
        for ranges in (self.ranges, self.params):
            cp = interpreter.CProg()
            cp.ins, cp.vecs, cp.ranges, cp.count = (
                prog.ins.ctypes.data,
                prog.vec_arr.ctypes.data,
                ranges.ctypes.data,
                self.count.ctypes.data,
            )
            cp.n, cp.nranges = len(prog.ins), len(ranges)
            self.cps.append(cp)
        self.cpp, self.cpp_early = map(ctypes.addressof, self.cps)
        self.has_waited = False
        self.run = lib.run
        self.executed = 0
        ncl = (gx // cx, gy // cy, gz // cz)
        order = [(x, y, z) for z in range(ncl[2]) for y in range(ncl[1]) for x in range(ncl[0])]
        self.todo = collections.deque(enumerate(order))
        self.cancelled = 0
        self.active = []
        while self.todo or self.active:
            while self.todo and len(self.active) < self.resident:
                self.admit()
            self.schedule()
        if L.pdl and not self.has_waited:
            raise SimError(
                f"kernel {L.name[:60]} may start before the end of the launch before it, and none "
                "of its warps executes griddepcontrol.wait"
            )
        ops = collections.Counter()
        for i, n in enumerate(self.count):
            if n and i < len(prog.kernel.instrs):
                ops[prog.kernel.instrs[i].op] += int(n)
        ops.update(self.traps)
        total = sum(ops.values())
        self.traps.clear()
        dt = time.time() - t0
        st = {
            "kernel": L.name,
            "grid": L.grid,
            "block": L.block,
            "cluster": L.cluster,
            "smem": L.smem_bytes,
            "instructions": total,
            "ops": ops,
            "seconds": dt,
            "rate": total / dt if dt else 0,
            "registers": sum(1 for r in prog.off),
        }
        self.stats.append(st)
        return st

    def admit(self):
        idx, cl = self.todo.popleft()
        prog, L = self.prog, self.L
        cx, cy, cz = L.cluster or (1, 1, 1)
        C = Cluster(idx)
        n = cx * cy * cz
        threads = L.block[0] * L.block[1] * L.block[2]
        for r in range(n):
            ctaid = (cl[0] * cx + r % cx, cl[1] * cy + r // cx % cy, cl[2] * cz + r // (cx * cy))
            C.ctas.append(Cta(self, C, r, ctaid))
        if self.delay and n > 1:
            first = self.rng.randrange(n)
            for cta in C.ctas:
                cta.starts_in = 0 if cta.rank == first else self.rng.randint(1, MOST_LATE)
        smp = (ctypes.c_void_p * n)(*[c.smem.ctypes.data for c in C.ctas])
        shp = (ctypes.c_void_p * n)(*[c.shadow.ctypes.data for c in C.ctas])
        C.keep = smp, shp
        for cta in C.ctas:
            tmpl = None
            for w in range((threads + 31) // 32):
                W = Warp(prog, cta, w, min(32, threads - 32 * w))
                c = W.c
                c.smem, c.shadow = ctypes.addressof(smp), ctypes.addressof(shp)
                c.nrank, c.smem_size = n, self.smem_size
                c.arrived = cta.arrived.ctypes.data
                if tmpl is None:
                    W.R[:] = 0xFF
                    for off, size, kind, data in prog.inits:
                        if kind == "const":
                            W.R[off : off + 32 * size].view(f"u{size}")[:] = data
                        elif kind == "sym":
                            W.R[off : off + 32 * size].view(f"u{size}")[:] = self.symbol(
                                prog, cta, *data
                            ) & ((1 << 8 * size) - 1)
                    tmpl = W.R
                else:
                    W.R[:] = tmpl
                for off, size, kind, data in prog.inits:
                    if kind == "special":
                        W.R[off : off + 32 * size].view(f"u{size}")[:] = special_register(
                            self, data, cta, w, n
                        )
                cta.warps.append(W)
        C.warps = [w for cta in C.ctas for w in cta.warps]
        self.active.append(C)

    def symbol(self, prog, cta, name, off):
        kind = prog.symkind(name)
        if kind == "shared":
            return (cta.rank << 24) + prog.smem_static[name] + off
        if kind == "param":
            return self.param_base + prog.param_off[name] + off
        if kind == "local":
            return prog.local_off[name] + off
        return self.globals[name] + off
