"""A software GPU: runs the PTX of CuTe DSL kernels on the CPU. README.md says how."""

import time

from . import device_memory, driver, ptx
from .machine import Machine
from .state import Deadlock, SimError

__all__ = [
    "OPTIONS",
    "RESULTS",
    "Compiled",
    "Deadlock",
    "Machine",
    "Result",
    "SimError",
    "activate",
    "module",
    "run",
    "simulate",
]


class Result(dict):
    """Statistics of a run: launches (list), instructions, ops, seconds, rate, warnings, notes."""

    def __repr__(self):
        w = "".join(
            f"\n  warning x{n}: {m} (line {line}: {t})"
            for (m, line, t), n in self["warnings"].items()
        )
        k = "".join(
            f"\n  {s['kernel'][:60]} grid {s['grid']} block {s['block']}: "
            f"{s['instructions']} warp instructions, {s['seconds']:.2f} s"
            for s in self["launches"]
        )
        total = f"{self['instructions']} warp instructions in {self['seconds']:.2f} s"
        return f"{total} ({self['rate'] / 1e3:.0f} k/s){k}{w}"


_modules = {}


def module(ptx_text):
    """The parsed module of a PTX text; each text is parsed once."""
    if ptx_text not in _modules:
        _modules[ptx_text] = ptx.parse(ptx_text)
    return _modules[ptx_text]


def simulate(launches, ptx_text, **options):
    """Run recorded launches. ptx_text: one PTX text, or a list of texts searched by kernel name."""
    texts = [ptx_text] if isinstance(ptx_text, str) else list(ptx_text)
    mods = [module(t) for t in texts]
    out = Result(launches=[], instructions=0, seconds=0.0, warnings={}, notes={}, ops={})
    machines = {}
    t0 = time.time()
    for L in launches:
        mod = next((m for m in mods if L.name in m.kernels), None)
        if mod is None:
            raise SimError(f"no PTX given for kernel {L.name}")
        mac = machines.get(id(mod))
        if mac is None:
            mac = machines[id(mod)] = Machine(
                mod, [(a, n) for a, n, _ in device_memory.allocations()], **options
            )
        out["launches"].append(mac.launch(L))
    out["seconds"] = time.time() - t0
    for s in out["launches"]:
        out["instructions"] += s["instructions"]
        for k, v in s["ops"].items():
            out["ops"][k] = out["ops"].get(k, 0) + v
    for m in machines.values():
        for k, v in m.warnings.items():
            out["warnings"][k] = out["warnings"].get(k, 0) + v
        for k, v in m.notes.items():
            out["notes"][k] = out["notes"].get(k, 0) + v
    out["rate"] = out["instructions"] / max(out["seconds"], 1e-9)
    return out


def _wrap(a):
    import torch

    if isinstance(a, torch.Tensor):
        return device_memory.as_cuda(a)
    if isinstance(a, (tuple, list)):
        return type(a)(map(_wrap, a)) if type(a) in (tuple, list) else type(a)(*map(_wrap, a))
    return a


def run(compiled, ptx_text, *args, **options):
    """Calls a compiled CuTe DSL object under the fake driver and executes its launches.

    compiled: what cute.compile returned. ptx_text: PTX to run instead of its own, or None.
    args: its arguments; torch CPU tensors among them are taken for CUDA tensors, and results appear
    in them. options: those of Machine (delay=seed, resident=n, slow={...}).
    Returns the statistics, a Result. Raises SimError, or Deadlock, which is one.
    """
    driver.take_launches()
    compiled(*map(_wrap, args))
    return simulate(driver.take_launches(), ptx_text or compiled.__ptx__, **options)


class Compiled:
    """A compiled object whose call runs on the software GPU.

    .last holds the statistics of the last call.
    """

    def __init__(self, inner):
        self.inner, self.last = inner, None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *args):
        self.last = run(self.inner, None, *args, **OPTIONS)
        RESULTS.append(self.last)
        return None


OPTIONS = {}  # options of every call of a Compiled object
RESULTS = []  # their statistics


def activate(arch="sm_90a", sms=132, **options):
    """To call before the first `import cutlass`. Returns cutlass.cute.

    From then on cute.compile(..., options="--enable-tvm-ffi") returns objects that run on the
    software GPU when they are called with torch tensors on the CPU. Functions without kernels run
    on the CPU, as always. Options: as of run().
    """
    driver.install(arch, sms)
    import cutlass  # noqa: F401
    import cutlass.cute as cute

    driver.capture_ptx()
    OPTIONS.clear()
    OPTIONS.update(options)
    if not isinstance(cute.compile, _Compile):
        cute.compile = _Compile(cute.compile)
    return cute


class _Compile:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, opts):
        return _Compile(self.inner[opts])

    def __call__(self, *a, **kw):
        compiled = self.inner(*a, **kw)
        return Compiled(compiled) if driver.has_kernels(compiled) else compiled
