"""Compile a kernel object. What kernel it is, and of which problem, is not known here."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.target import Target

CACHE = CompileCache()
_more_options: ContextVar[str] = ContextVar("_more_options", default="")


@tells_what_to_install()
def preload() -> None:
    """Import the compiler now, so that a first call does not wait for it."""
    import cutlass.cute.runtime  # noqa: F401
    import tvm_ffi  # noqa: F401


def options_of(target: Target) -> str:
    """What the compiler is told for kernels of this target."""
    return options_for(target.arch)


def options_for(arch: str) -> str:
    """`options_of` a target of this architecture, such as "sm_90a"."""
    return f"--enable-tvm-ffi --gpu-arch {arch}"


@contextlib.contextmanager
def compiler_keeps(options: str) -> Iterator[None]:
    """Give the compiler these options, too, in what this thread compiles meanwhile: what to keep of
    its output. They are no part of a kernel's identity, so they must not change its code."""
    token = _more_options.set(options)
    try:
        yield
    finally:
        _more_options.reset(token)


def compile_object(kernel: Any, arguments: list[Any], options: str, **meta: Any) -> Compiled:
    """Compile a kernel object now, for stand-ins of its arguments.

    The function is there to be exported: it can be called when a `CompileCache` has loaded it.
    `meta`, beside what is given: registers, spill_bytes (stores and loads; either is None when
    ptxas told nothing), and warnings, what ptxas said about lost performance.
    """
    import cutlass.cute as cute

    said = io.StringIO()
    with contextlib.redirect_stderr(said), _collector_paused():
        function = cute.compile(
            kernel,
            *arguments,
            options=f"{options} {_more_options.get()}".strip(),
            trace_finalize_hooks=_let_ptxas_report,
            no_jit_engine=True,
        )
    return Compiled(function, {**meta, **_read(said.getvalue())})


def _let_ptxas_report(dsl: Any, _module: Any, _name: str) -> None:
    """Ask for ptxas' remarks once the kernel is traced. An option that asks for them from the start
    makes tracing look up the source line of each operation, which takes as long as tracing."""
    dsl.compile_options._apply_opt_string("remarks{ptx}")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: what tracing allocates makes it scan all that the process
    holds, and most of that is torch."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read(remarks: str) -> dict[str, Any]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", remarks)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    warnings = re.findall(r"C75\d\d\)[^\n]*|[^\n]*\bserialized\b[^\n]*", remarks)
    return {
        "registers": max(registers, default=None),
        "spill_bytes": sum(int(n) for pair in spills for n in pair) if spills else None,
        "warnings": warnings,
    }
