"""Memory that kernels may touch, and CPU tensors that say they are on CUDA device 0.

An extent is registered for as long as the tensor that owns it lives. An access outside of all
extents is an error of the kernel.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

_allocs: dict[tuple[int, int], list] = {}  # (address, bytes) -> [uint8 view, owners]
# tensors wrapped since the last driver.take_launches(); a Launch keeps them
recent_tensors: list = []


def _register(addr: int, nbytes: int, owner) -> None:
    """An extent kernels may touch, for as long as its owner (a tensor object) lives; owner None:
    until freed.
    """
    if not nbytes:
        return
    e = _allocs.get((addr, nbytes))
    if e is None:
        e = _allocs[(addr, nbytes)] = [
            np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr)),
            0,
        ]
    e[1] += 1
    if owner is not None:
        recent_tensors.append(owner)
        weakref.finalize(owner, _unregister, addr, nbytes, e).atexit = False


def _unregister(addr, nbytes, entry):
    entry[1] -= 1
    if entry[1] <= 0 and _allocs.get((addr, nbytes)) is entry:
        del _allocs[(addr, nbytes)]


def allocations() -> list[tuple[int, int, np.ndarray]]:
    """(address, bytes, uint8 view) of all memory a kernel may touch, by address."""
    return [(a, n, e[0]) for (a, n), e in sorted(_allocs.items(), key=lambda kv: kv[0])]


def allocated(addr: int, nbytes: int) -> None:
    """A kernel may touch these bytes until they are freed."""
    _register(addr, nbytes, None)


def freed(addr: int) -> None:
    for k in [k for k in _allocs if k[0] == addr]:
        del _allocs[k]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManaged(ctypes.Structure):
    _fields_ = [("t", _DLTensor), ("ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_live: dict[int, tuple] = {}


def _delete(p):
    _live.pop(p, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DLCODES = {
    "bool": (6, 8),
    "uint8": (1, 8),
    "uint32": (1, 32),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}


class CudaView:
    """A CPU torch tensor that says it lives on CUDA device 0 (DLPack).

    Other attributes come from the tensor.
    """

    def __init__(self, tensor):
        self.tensor = tensor
        self.is_cuda = True

    def __getattr__(self, name):
        if name.startswith("__"):  # above all not torch's own DLPack shortcuts
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        t = self.tensor
        code, bits = _DLCODES[str(t.dtype).removeprefix("torch.")]
        nd = t.dim()
        shape, strides = (
            (ctypes.c_int64 * max(nd, 1))(*t.shape),
            (ctypes.c_int64 * max(nd, 1))(*t.stride()),
        )
        m = _DLManaged()
        m.t = _DLTensor(
            t.data_ptr(),
            2,
            0,
            nd,
            code,
            bits,
            1,
            ctypes.addressof(shape),
            ctypes.addressof(strides),
            0,
        )
        m.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
        p = ctypes.addressof(m)
        _live[p] = (m, shape, strides, t)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(p, b"dltensor", None)


def as_cuda(tensor) -> CudaView:
    """Wrap a CPU tensor as CUDA device 0 memory and register its extent for bounds checks."""
    n = (
        tensor.element_size()
        * (1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True)))
        if tensor.numel()
        else 0
    )
    _register(tensor.data_ptr(), n, tensor)
    return CudaView(tensor)
