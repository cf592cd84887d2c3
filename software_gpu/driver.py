"""Fake CUDA driver and CuTe DSL runtime: compiled objects can be called where there is no GPU.

    from software_gpu import device_memory, driver
    driver.install(arch="sm_90a")          # before the first `import cutlass`
    ... compile, call the compiled object with device_memory.as_cuda(torch_cpu_tensor) arguments ...
    launches = driver.take_launches()      # [Launch(name, grid, block, cluster, ...)]

`install` builds two small shared libraries with gcc: a `libcuda.so.1` and a
`libcute_dsl_runtime.so`. The first is loaded into the process under its SONAME, so every later
dlopen("libcuda.so.1") gets it. The second is named in CUTE_DSL_LIBS: the real one carries a private
copy of the CUDA runtime that needs undocumented driver tables.

Nothing is executed: a launch is recorded, or given to the function set by `set_launch_handler`.
Host code of CuTe DSL writes its tensor maps itself, without the driver. cuTensorMapEncodeTiled here
writes the same form, which tma.decode reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .device_memory import allocated, freed, recent_tensors
from .kernel_images import param_sizes_from_ptx, parse_cubin

C_SOURCES = Path(__file__).parent / "c"


_state: dict = {}


def _build() -> tuple[str, str]:
    """Compile the two libraries into a per-user cache folder; returns their paths."""
    sources = {name: (C_SOURCES / name).read_text() for name in ("driver.c", "runtime.c")}
    key = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:16]
    base = os.environ.get("SOFTGPU_CACHE") or os.path.join(
        tempfile.gettempdir(), f"softgpu-{os.getuid()}"
    )
    out = os.path.join(base, key)
    libs = os.path.join(out, "libcuda.so.1"), os.path.join(out, "libcute_dsl_runtime.so")
    if all(map(os.path.exists, libs)):
        return libs
    os.makedirs(base, mode=0o700, exist_ok=True)
    tmp = tempfile.mkdtemp(dir=base)
    try:
        gcc = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden"]
        for name, text in sources.items():
            with open(os.path.join(tmp, name), "w") as f:
                f.write(text)
        subprocess.run(
            [*gcc, "-Wl,-soname,libcuda.so.1", "driver.c", "-o", "libcuda.so.1", "-ldl"],
            cwd=tmp,
            check=True,
        )
        subprocess.run(
            [
                *gcc,
                "-Wl,-soname,libcute_dsl_runtime.so",
                "runtime.c",
                "-o",
                "libcute_dsl_runtime.so",
                "-L.",
                "-l:libcuda.so.1",
            ],
            cwd=tmp,
            check=True,
        )
        with contextlib.suppress(OSError):  # another process was first
            os.rename(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return libs


@dataclasses.dataclass
class Launch:
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: list[bytes]
    stream: int
    pdl: bool = False
    cooperative: bool = False
    param_addrs: tuple[
        int, ...
    ] = ()  # host addresses the parameters were copied from (valid only during the call)
    cubin: bytes = dataclasses.field(default=b"", repr=False)
    keep: tuple = dataclasses.field(default=(), repr=False)  # tensors that must outlive the launch

    @property
    def ptx(self) -> str | None:
        """The PTX this kernel was assembled from, when capture_ptx() was on (names may repeat,
        images do not).
        """
        return _ptx_by_image.get(self.cubin)


_kernels: dict[int, tuple[int, str]] = {}  # handle -> (library, name)
_libs: dict[int, dict] = {}
_launches: list[Launch] = []
_ptx_sizes: dict[str, list[int]] = {}
_handler = None
_error: list[BaseException] = []


def register_ptx(ptx_text: str) -> dict[str, list[int]]:
    """Note the parameter sizes of a PTX text's kernels (needed only where a cubin does not carry
    them).
    """
    d = param_sizes_from_ptx(ptx_text)
    _ptx_sizes.update(d)
    return d


def _guard(default):
    def deco(fn):
        def run(*a):
            try:
                return fn(*a)
            except BaseException as e:  # never let an exception cross the C frames
                _error.append(e)
                if not isinstance(e, SystemExit):
                    import traceback

                    traceback.print_exc()
                return default

        return run

    return deco


@_guard(0)
def _on_load(addr):
    h = 0x10000 + len(_libs)
    _libs[h] = parse_cubin(addr)
    return h


@_guard(0)
def _on_kernel(lib, name):
    ks = _libs[lib]["kernels"]
    name = name.decode()
    if name == "":
        return len(ks)
    if name[0] == "#":
        name = list(ks)[int(name[1:])]
    if name not in ks:
        return 0
    for h, v in _kernels.items():
        if v == (lib, name):
            return h
    h = 0x20000 + len(_kernels)
    _kernels[h] = (lib, name)
    return h


@_guard(719)
def _on_launch(kernel, info, stream, params):
    lib, name = _kernels[kernel]
    i = [info[k] for k in range(16)]
    sizes = [s for _, s in _libs[lib]["kernels"][name]]
    if (
        not sizes
    ):  # kernel names are truncated and may repeat: the image that is being launched decides
        sizes = _ptx_sizes.get(name, [])
    ptrs = (ctypes.c_void_p * max(1, len(sizes))).from_address(params) if sizes else []
    addrs = tuple(ptrs[k] or 0 for k in range(len(sizes)))
    raw = [ctypes.string_at(a, n) for a, n in zip(addrs, sizes, strict=True)]
    rec = Launch(
        name,
        tuple(i[0:3]),
        tuple(i[3:6]),
        tuple(i[6:9]),
        i[10],
        raw,
        stream,
        bool(i[9] & 1),
        bool(i[9] & 2),
        addrs,
        _libs[lib]["image"],
        tuple(recent_tensors),
    )
    if _handler is not None:
        _handler(rec)
    else:
        _launches.append(rec)
    return 0


@_guard(0)
def _on_alloc(addr, nbytes, on):
    if on:
        allocated(addr, nbytes)
    else:
        freed(addr)
    return 0


def take_launches() -> list[Launch]:
    """The launches recorded since the last call.

    Raises the first error met inside the fake driver, if any.
    """
    check()
    out = _launches[:]
    _launches.clear()
    recent_tensors.clear()
    return out


def check() -> None:
    if _error:
        e = _error[0]
        _error.clear()
        raise e


def set_launch_handler(fn) -> None:
    """fn(Launch) runs each launch at once, inside the call that made it; None goes back to
    recording.
    """
    global _handler
    _handler = fn


def install(arch: str = "sm_90a", sms: int = 132, env: bool = True, trace: int = 0):
    """Load the fake driver and point CuTe DSL (not yet imported) at the fake runtime.

    Returns the ctypes library.
    """
    if _state:
        if _state["arch"] != arch:
            raise RuntimeError(
                f"already installed for {_state['arch']}; one architecture per process"
            )
        return _state["lib"]
    if "cutlass" in sys.modules:
        raise RuntimeError("install() must run before the first `import cutlass`")
    m = re.match(r"sm_(\d+)(\d)[af]?$", arch)
    cc = int(m[1]), int(m[2])
    drv, rt = _build()
    lib = ctypes.CDLL(drv, mode=ctypes.RTLD_GLOBAL)
    rtlib = ctypes.CDLL(rt, mode=ctypes.RTLD_GLOBAL)
    V, I64, U64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
    cbs = (
        ctypes.CFUNCTYPE(I64, V)(_on_load),
        ctypes.CFUNCTYPE(I64, I64, ctypes.c_char_p)(_on_kernel),
        ctypes.CFUNCTYPE(I32, I64, ctypes.POINTER(ctypes.c_uint32), U64, V)(_on_launch),
        ctypes.CFUNCTYPE(I64, I64, U64, I32)(_on_alloc),
    )
    lib.sim_hooks(*cbs)
    lib.sim_trace(trace)
    # CU_DEVICE_ATTRIBUTE_* numbers; anything else reads 0
    for k, v in {
        1: 1024,
        2: 1024,
        3: 1024,
        4: 64,
        5: 2**31 - 1,
        6: 65535,
        7: 65535,
        8: 49152,
        10: 32,
        12: 65536,
        13: 1755000,
        16: sms,
        36: 2619000,
        37: 5120,
        38: 50 << 20,
        39: 2048,
        41: 1,
        75: cc[0],
        76: cc[1],
        81: 233472,
        82: 65536,
        83: 1,
        95: 1,
        97: 232448,
        106: 32,
        111: 1024,
        115: 1,
        120: 1,
        127: 1,
    }.items():
        lib.sim_set_attr(k, v)
    if env:
        os.environ["CUTE_DSL_LIBS"] = rt
        os.environ["CUTE_DSL_ARCH"] = arch
        os.environ.setdefault("FLASH_ATTENTION_ARCH", arch)
        os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", str(sms))
    _state.update(arch=arch, lib=lib, rt=rtlib, cbs=cbs)
    _patch_bindings()
    return lib


def _patch_bindings() -> None:
    """Answers the few calls that CuTe DSL makes through cuda.bindings.runtime.

    That module carries a CUDA runtime of its own, which cannot start on the fake driver. Objects
    that are compiled without TVM-FFI use it.
    """
    try:
        import cuda.bindings.runtime as rt
    except ImportError:
        return
    ok = rt.cudaError_t.cudaSuccess
    for name, value in {
        "cudaGetDeviceCount": (ok, 1),
        "cudaGetDevice": (ok, 0),
        "cudaDriverGetVersion": (ok, 13000),
        "cudaRuntimeGetVersion": (ok, 13000),
        "cudaLibraryUnload": (ok,),
        "cudaDeviceSynchronize": (ok,),
        "cudaStreamSynchronize": (ok,),
        "cudaSetDevice": (ok,),
        "cudaGetLastError": (ok,),
    }.items():
        if hasattr(rt, name):
            setattr(rt, name, lambda *a, _v=value, **k: _v)


# kernel name -> PTX text, filled after capture_ptx(); names are truncated and may repeat: see
# Launch.ptx
ptx_texts: dict[str, str] = {}
_ptx_by_image: dict[bytes, str] = {}


class _Capture:
    def __init__(self, inner, dump_dir):
        self.inner, self.dump_dir = inner, dump_dir

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, opts):
        return _Capture(self.inner[opts], self.dump_dir)

    def __call__(self, *a, **kw):
        kw["options"] = (
            kw.get("options") or ""
        ) + f" --keep-ptx --keep-cubin --dump-dir={self.dump_dir}"
        c = self.inner(*a, **kw)
        if not has_kernels(c):
            return c
        for name in register_ptx(c.__ptx__):
            ptx_texts[name] = c.__ptx__
        if c.__cubin__:
            _ptx_by_image[bytes(c.__cubin__)] = c.__ptx__
        return c


def has_kernels(compiled) -> bool:
    """Whether a compiled object launches kernels; a function for the host does not."""
    return bool(compiled.kernel_info)


def capture_ptx() -> dict[str, str]:
    """Make every later cute.compile keep its PTX and register it; returns the dictionary that will
    be filled.
    """
    import cutlass.cute as cute

    if "dump" not in _state:
        _state["dump"] = tempfile.TemporaryDirectory(prefix="softgpu-ptx-")  # removed at exit
        cute.compile = _Capture(cute.compile, _state["dump"].name)
    return ptx_texts
