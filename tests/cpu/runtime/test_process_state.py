"""What a compilation or a trace of one thread means to other threads and to forked children."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.base_dsl.compiler import Compiler
from torch.nn.modules import module as nn_module

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.runtime import process_state
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compile_object
from flash_mask_cute.runtime.process_state import pipe

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


def _in_child(question: Callable[[], bool]) -> bool:
    """The answer of a forked child, which is killed after a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 advises against forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 2
        try:
            status = 0 if question() else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), f"the child ended with {status}"
    return status == 0


# -- tracing ------------------------------------------------------------------------------------


def _lowers_another() -> bool:
    return "7" in lower_mod(lambda b, h, q, k: q + 7 >= k, "mask_mod").source


def _trace_in_thread(seconds: float) -> threading.Thread:
    """Start a thread that traces a mod for that long, and return when it does."""
    reached = threading.Event()

    def slow(b: Any, h: Any, q: Any, k: Any) -> Any:
        reached.set()
        time.sleep(seconds)
        return q >= k

    thread = threading.Thread(target=lower_mod, args=(slow, "mask_mod"))
    thread.start()
    assert reached.wait(60)
    return thread


@pytest.mark.filterwarnings("ignore:.*is traced anew at each call")
def test_a_child_forked_while_a_thread_traces_can_trace() -> None:
    hooks = len(nn_module._global_forward_pre_hooks)
    thread = _trace_in_thread(0.5)

    def question() -> bool:
        # torch is as it was before the trace, too
        return (
            _lowers_another()
            and len(nn_module._global_forward_pre_hooks) == hooks
            and not torch.fx._symbolic_trace.is_fx_tracing()
        )

    try:
        assert _in_child(question)
    finally:
        thread.join()
    assert _lowers_another()


@pytest.mark.filterwarnings("ignore:.*is traced anew at each call")
def test_a_fork_does_not_wait_for_ever_for_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_FORK_WAITS_S", 0.05)
    thread = _trace_in_thread(1.0)
    try:
        assert _in_child(_lowers_another)
        assert thread.is_alive()
    finally:
        thread.join()


def test_a_mod_may_fork() -> None:
    def forking(b: Any, h: Any, q: Any, k: Any) -> Any:
        assert _in_child(lambda: process_state.trace_lock().acquire(timeout=5))
        return q >= k

    assert lower_mod(forking, "mask_mod").band is not None
    assert _lowers_another()


# -- compiling ----------------------------------------------------------------------------------


def _compile_adder() -> None:
    @cute.jit
    def add(x: cute.Tensor, n: cutlass.Int32) -> None:
        for i in range(n):
            x[i] = x[i] + 1

    x = cute.runtime.make_fake_compact_tensor(
        cutlass.Int32, (cute.sym_int(),), memspace=cutlass.AddressSpace.generic
    )
    with compile_lock():
        compile_object(add, [x, cutlass.Int32(0)], OPTIONS)


@pytest.fixture
def slow_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The compiler's passes take a second longer. The event tells that they run."""
    really_compile = Compiler.compile
    running = threading.Event()

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        running.set()
        time.sleep(1)
        return really_compile(self, *arguments, **options)

    monkeypatch.setattr(Compiler, "compile", slow)
    yield running


def test_a_child_forked_while_a_thread_compiles(slow_passes: threading.Event) -> None:
    streams = sys.stdout, sys.stderr
    assert gc.isenabled()
    thread = threading.Thread(target=_compile_adder)
    thread.start()
    assert slow_passes.wait(60)

    def question() -> bool:
        has_streams = sys.stdout is streams[0] and sys.stderr is streams[1]
        slow_passes.clear()
        _compile_adder()
        return has_streams and gc.isenabled() and slow_passes.is_set()

    try:
        assert not gc.isenabled()
        assert _in_child(question)
    finally:
        thread.join()
    assert gc.isenabled()


class _Lines:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_other_threads_arrive_at_once(
    slow_passes: threading.Event, monkeypatch: pytest.MonkeyPatch, stream: str, fails: bool
) -> None:
    lines = _Lines()
    monkeypatch.setattr(sys, stream, lines)
    ended = threading.Event()
    late: list[int] = []

    def write() -> None:
        number = 0
        while not ended.wait(0.005):
            number += 1
            print(f"line {number}", file=getattr(sys, stream))
            if f"line {number}\n" not in lines.text:
                late.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        if fails:

            def fail(*_: Any, **__: Any) -> None:
                time.sleep(0.3)
                raise ZeroDivisionError

            monkeypatch.setattr(Compiler, "compile", fail)
            with pytest.raises(ZeroDivisionError):
                _compile_adder()
        else:
            _compile_adder()
    finally:
        ended.set()
        thread.join()
    assert late == [] and lines.text.count("\n") > 20
    assert getattr(sys, stream) is lines


def test_lines_of_other_threads_arrive_while_a_mod_is_compiled_for_the_host(
    slow_passes: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU path compiles without `compile_object`."""
    from flash_mask_cute.mods.on_cpu import eval_mask_mod

    lines = _Lines()
    monkeypatch.setattr(sys, "stderr", lines)
    place = torch.arange(3, dtype=torch.int32)

    def mask_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q * 3 >= k - 1

    def evaluate() -> None:
        eval_mask_mod(mask_mod, None, 0, 0, place, place)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert slow_passes.wait(60)
    print("now", file=sys.stderr)
    assert lines.text == "now\n"
    thread.join()


def test_a_pipe_is_not_held_open_by_a_child() -> None:
    with pipe() as (reading, writing):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            signal.alarm(60)
            signal.pause()
        try:
            os.write(writing, b"x")
            process_state.close_end(writing)
            received: list[bytes] = []

            def read() -> None:
                received.extend((os.read(reading, 8), os.read(reading, 8)))

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(30)
            assert received == [b"x", b""]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
