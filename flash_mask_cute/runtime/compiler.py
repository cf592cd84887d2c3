"""Compilation of kernel objects. This module does not know the kernel or its problem."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.process_state import collector_paused
from flash_mask_cute.runtime.target import Target

CACHE = CompileCache()
_Facts = TypeVar("_Facts", bound=NamedTuple)
_more_options: ContextVar[str] = ContextVar("_more_options", default="")


@tells_what_to_install()
def preload() -> None:
    """Import the compiler now, so that the first call does not wait for it."""
    import cutlass.cute.runtime  # noqa: F401
    import tvm_ffi  # noqa: F401


def options_of(target: Target) -> str:
    """The compiler options for kernels of this target."""
    return options_for(target.arch)


def options_for(arch: str) -> str:
    """`options_of` for a target of this architecture, such as "sm_90a"."""
    return f"--enable-tvm-ffi --gpu-arch {arch}"


@contextlib.contextmanager
def compiler_keeps(options: str) -> Iterator[None]:
    """Add compiler options that keep output files, for compilations of this thread in the context.
    They are not part of a kernel's identity, so they must not change its code."""
    token = _more_options.set(options)
    try:
        yield
    finally:
        _more_options.reset(token)


def by_facts(
    name: str,
    facts: _Facts,
    build: Callable[[_Facts, Target], Compiled],
    target: Target,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The kernel `name` that these facts and the target determine, from the cache or built now."""
    return cache.get(
        name,
        facts._asdict,
        lambda: build(facts, target),
        arch=target.arch,
        options=options_of(target),
        token=facts,
    )


def cached_kernel(name: str) -> Callable[[Callable[..., Compiled]], Callable[..., Compiled]]:
    """Decorator of a function that builds the kernel `name` from facts and, as its last argument,
    an architecture. It then takes the kernel from the cache, or builds it."""

    def decorate(build: Callable[..., Compiled]) -> Callable[..., Compiled]:
        *names, _ = inspect.signature(build).parameters

        @functools.wraps(build)
        def find(*arguments: Any, cache: CompileCache = CACHE) -> Compiled:
            *facts, arch = arguments
            return cache.get(
                name,
                lambda: dict(zip(names, facts, strict=True)),
                lambda: build(*arguments),
                arch=arch,
                options=options_for(arch),
                token=tuple(facts),
            )

        return find

    return decorate


def compile_object(kernel: Any, arguments: list[Any], options: str, **meta: Any) -> Compiled:
    """Compile a kernel object now, for stand-ins of its arguments. The function is to be exported.

    `meta` contains, besides the given entries: registers, spill_bytes (stores and loads; either is
    None if ptxas reported nothing), and warnings, the remarks of ptxas about lost performance.
    """
    import cutlass.cute as cute

    said = io.StringIO()
    with compiler_streams(said), collector_paused():
        function = cute.compile(
            kernel,
            *arguments,
            options=f"{options} {_more_options.get()}".strip(),
            trace_finalize_hooks=_let_ptxas_report,
            no_jit_engine=True,
        )
    return Compiled(function, {**meta, **_read(said.getvalue())})


def _let_ptxas_report(dsl: Any, _module: Any, _name: str) -> None:
    """Request ptxas' remarks after the kernel is traced. With an option set from the start, tracing
    looks up the source line of each operation, which takes as long as tracing."""
    dsl.compile_options._apply_opt_string("remarks{ptx}")


class _OwnStreams:
    """The module `sys` with streams of its own, which may be replaced without effect on others."""

    def __init__(self, stderr: Any) -> None:
        self.stdout = sys.stdout
        self.stderr = sys.stderr if stderr is None else stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@contextlib.contextmanager
def compiler_streams(stderr: io.StringIO | None = None) -> Iterator[None]:
    """Give the compiler a `sys` of its own in the context, under `compile_lock()`.

    The compiler replaces sys.stdout and sys.stderr by buffers while it runs its passes, where lines
    of other threads and of forked children would go. stderr: gets what it writes to sys.stderr.
    """
    from cutlass.base_dsl import compiler, dsl

    own = _OwnStreams(stderr)
    for module in (compiler, dsl):
        vars(module)["sys"] = own
    try:
        yield
    finally:
        for module in (compiler, dsl):
            vars(module)["sys"] = sys


def _read(remarks: str) -> dict[str, Any]:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", remarks)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    warnings = re.findall(r"C75\d\d\)[^\n]*|[^\n]*\bserialized\b[^\n]*", remarks)
    return {
        "registers": max(registers, default=None),
        "spill_bytes": sum(int(n) for pair in spills for n in pair) if spills else None,
        "warnings": warnings,
    }
