"""How time is taken: a function for each mode of the protocol in docs/benchmarking.md.

Nothing here is called before the results passed their gate, and after every peer was called once.
Peers take turns inside each round and the order rotates by one from round to round, so that
drifting clocks and temperature fall on all alike. The figure is the median of the rounds.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bench import ROOT
from bench.cases import CASES, make_tensors
from bench.peers import PEERS, Call

T = TypeVar("T")
CHUNK = 100
SPIN_CYCLES = 2_000_000
# A spin kernel lasts at least this many times what the host takes, at the clock that it may reach.
SPIN_FACTOR, CYCLES_A_SECOND = 3.0, 2e9
SHORT_CALLS = 10
STEP_ROUNDS, STEPS = 15, 20
COLD_LIMIT_S = 60
LONG_ROUNDS = 3
# Bytes of K and V that the calls of a graph take turns over, so that nothing is found in L2.
FOOTPRINT = 1e9
GRAPH_BURST_US = 15e3
STREAM_BYTES = 2**31
Samples = dict[str, list[float]]


def rotations(names: Sequence[T], rounds: int) -> Iterator[tuple[T, ...]]:
    """The order of the peers in each round: one step further round by round."""
    for number in range(rounds):
        shift = number % len(names)
        yield (*names[shift:], *names[:shift])


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def _events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def burst(call: Call, count: int, untimed: int) -> float:
    """Milliseconds a call, over `count` calls that follow untimed ones without a gap."""
    begin, end = _events()
    for _ in range(untimed):
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def calls_in(seconds: float, milliseconds: float, least: int = 3) -> int:
    return max(least, round(seconds * 1e3 / milliseconds))


def _in_turns(
    calls: Mapping[str, Call], rounds: int, take: Callable[[str, Call], float]
) -> Samples:
    """A sample of each call a round, in turns."""
    samples: Samples = {name: [] for name in calls}
    for order in rotations(list(calls), rounds):
        for name in order:
            samples[name].append(take(name, calls[name]))
    return samples


def time_loop(calls: Mapping[str, Call], rounds: int, burst_s: float, least: int = 3) -> Samples:
    """Sustained milliseconds a call, one sample a round, of `least` calls or more; at most three
    rounds where a call lasts longer than a burst. An eighth as many untimed calls come first: they
    bring the clocks to this peer's level, and the host gets ahead of the device."""
    if not rounds:
        return {name: [] for name in calls}
    few = min(2, least)
    first = {name: burst(call, least, few) for name, call in calls.items()}
    counts = {name: calls_in(burst_s, ms, least) for name, ms in first.items()}
    if max(first.values()) > burst_s * 1e3:
        rounds = min(rounds, LONG_ROUNDS)

    def take(name: str, call: Call) -> float:
        return burst(call, counts[name], max(few, counts[name] // 8))

    return _in_turns(calls, rounds, take)


def _spin_cycles(call: Call, count: int) -> int:
    """Of a spin kernel that holds the device while the host enqueues `count` calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    return max(SPIN_CYCLES, round(SPIN_FACTOR * seconds * CYCLES_A_SECOND))


def time_short(
    calls: Mapping[str, Call], rounds: int, count: int = SHORT_CALLS, idle_s: float = 0.05
) -> Samples:
    """Milliseconds of `count` calls after an idle gap, at full clock, without the host's time."""
    if not rounds:
        return {name: [] for name in calls}
    spin: Any = torch.cuda._sleep
    cycles = {name: SPIN_CYCLES if count == 1 else _spin_cycles(call, count)
              for name, call in calls.items()}  # fmt: skip

    def take(name: str, call: Call) -> float:
        torch.cuda.synchronize()
        time.sleep(idle_s)
        spin(cycles[name])
        return burst(call, count, untimed=0)

    return _in_turns(calls, rounds, take)


def time_sweep(calls: Mapping[str, Call], rounds: int) -> Samples:
    """Milliseconds of one call of two that follow an untimed one, one sample a round."""
    return _in_turns(calls, rounds, lambda _, call: burst(call, 2, untimed=1))


def time_wall(call: Call, rounds: int = 30) -> list[float]:
    """Microseconds of a call on an idle device until it is idle again, after three untimed ones."""
    samples = [_wall_us(call, 1) for _ in range(3 + rounds)]
    return samples[3:]


def _wall_us(call: Call, count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / count / 1e3


def captured(call: Call) -> Call:
    """Replays of a CUDA graph of `call`, which has run before."""
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        call()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        # what a replay writes has to stay as long as the graph
        held = call()

    def replay() -> Any:
        graph.replay()
        return held

    return replay


def copies_of(size: float) -> int:
    """How many tensors of `size` bytes the calls of a graph need."""
    return max(1, math.ceil(FOOTPRINT / size))


def time_graph(calls: Sequence[Call], device: str = "cuda") -> float:
    """Microseconds a call, captured together and replayed. On a CPU they run once."""
    if device == "cpu":
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls) * 1e6
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    todo = list(calls) * max(1, math.ceil(8 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in todo:
            call()

    def replays(count: int) -> float:
        return burst(graph.replay, count, untimed=0) * 1e3 / len(todo)

    count = max(1, min(200, int(GRAPH_BURST_US / (replays(1) * len(todo)))))
    replays(count)
    return statistics.median(replays(count) for _ in range(5))


def read_ceiling() -> float:
    """Bytes a microsecond of a stream that only reads."""
    from bench.read_stream import read_words

    words = torch.zeros(STREAM_BYTES // 4, device="cuda", dtype=torch.int32)

    def read(programs: int, block: int = 4096) -> None:
        steps = words.numel() // (programs * block)
        out = torch.empty(programs, device="cuda", dtype=torch.int32)
        read_words[(programs,)](words, out, steps, block, num_warps=8)

    programs = 132 * 8, 132 * 16, 132 * 32
    return words.nbytes / min(time_graph([functools.partial(read, x)]) for x in programs)


def time_steps(calls: Mapping[str, Call], rounds: int, count: int) -> Samples:
    """Wall microseconds of a call, of `count` one after the other, one sample a round."""
    samples = _in_turns(calls, 1 + rounds, lambda _, call: _wall_us(call, count))
    # the first round finds the clocks of whatever ran before
    return {name: values[1:] for name, values in samples.items()}


def count_launches(call: Call) -> int:
    """Kernels, copies and fills that a warm call puts on the device, as torch's profiler sees."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = seen.events() or ()
    return sum(event.device_type == DeviceType.CUDA for event in events)


def time_host(calls: Mapping[str, Call], total: int = 2000) -> Samples:
    """Host microseconds of a warm call by chunks, between which the device is drained."""

    def take(_: str, call: Call) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _number in range(CHUNK):
            call()
        return (time.perf_counter_ns() - begin) / CHUNK / 1e3

    for call in calls.values():
        for _ in range(CHUNK):
            call()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _in_turns(calls, total // CHUNK, take)
    finally:
        torch.cuda.synchronize()
        if was_enabled:
            gc.enable()


def parse_smi(line: str) -> str:
    """`1665, 688.10` of nvidia-smi as a note; "" for a field that it could not read."""
    fields = [field.strip() for field in line.strip().split(",")]
    try:
        clock, power = (float(field) for field in fields)
    except ValueError:
        return ""
    return f"SM {clock:.0f} MHz, {power:.0f} W"


def _read_sensors(device: int) -> str:
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", str(device), *query]
    try:
        return parse_smi(subprocess.run(command, capture_output=True, text=True).stdout)
    except OSError:
        return ""


def load_note(call: Call, milliseconds: float, seconds: float = 1.0) -> str:
    """Clock and power while `call` runs for `seconds`, which the driver averages over one."""
    if not seconds:
        return ""
    torch.cuda.synchronize()
    for _ in range(calls_in(seconds, milliseconds)):
        call()
    time.sleep(0.8 * seconds)
    note = _read_sensors(torch.cuda.current_device())
    torch.cuda.synchronize()
    return note


def cold_child(peer_name: str, case_name: str, torch_s: float) -> None:
    """Body of a fresh process of `time_cold`: prints its seconds as JSON."""
    begin = time.perf_counter()
    peer, case = PEERS[peer_name], CASES[case_name]
    importlib.import_module(peer.needs)
    import_s = time.perf_counter() - begin
    call = peer.prepare(case, make_tensors(case, "cuda", seed=0))
    torch.cuda.synchronize()
    ready = time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds = {"torch": torch_s, "import": import_s, "first_call": time.perf_counter() - ready}
    sys.stdout.write(json.dumps(seconds) + "\n")


def _run_cold(peer: str, case: str, cache_dir: str) -> dict[str, float]:
    env = os.environ | {
        "FLASH_MASK_CUTE_CACHE_DIR": f"{cache_dir}/ours",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{cache_dir}/fa4",
        "CUTE_DSL_CACHE_DIR": f"{cache_dir}/dsl",
    }
    torch_first = "import time; t = time.perf_counter(); import torch; t = time.perf_counter() - t"
    body = f"from bench.timing import cold_child; cold_child({peer!r}, {case!r}, t)"
    command = [sys.executable, "-c", f"{torch_first}; {body}"]
    child = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COLD_LIMIT_S
    )
    if child.returncode:
        raise RuntimeError(f"{peer}: first call failed in a fresh process: {child.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return seconds


def time_cold(peer: str, case: str) -> dict[str, float]:
    """Seconds: torch, import (of the peer, after torch), first_call, first_call_cached."""
    with tempfile.TemporaryDirectory() as discarded, tempfile.TemporaryDirectory() as cache:
        _run_cold(peer, case, discarded)
        seconds = _run_cold(peer, case, cache)
        seconds["first_call_cached"] = _run_cold(peer, case, cache)["first_call"]
    return seconds
