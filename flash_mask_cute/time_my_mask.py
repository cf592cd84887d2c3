"""`python -m flash_mask_cute bench FILE`: the user's mods beside torch's flex_attention.

FILE is Python that defines `mask_mod(b, h, q_idx, kv_idx)`, `score_mod(score, b, h, q_idx, kv_idx)`
or both, written in torch. Tensors that it makes are on the device that is used. Results of both
packages are compared with float64 before anything is timed. Without a GPU that has kernels, ours
are compared on the CPU, and nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from flash_mask_cute.flex import flex_attention, keep_block_mask
from flash_mask_cute.runtime.target import ARCHS

PROGRAM = "python -m flash_mask_cute bench"
CHECKED_SEQLEN = 512
ROUNDS, CALLS = 7, 10
Step = Callable[[], Any]


class Mods(NamedTuple):
    """What a file defines, in torch's form."""

    mask_mod: Callable[..., Tensor] | None
    score_mod: Callable[..., Tensor] | None


class Problem(NamedTuple):
    """q, k, v and dout (batch, heads or heads_kv, seqlen, head_dim), and the mods."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mods: Mods

    @staticmethod
    def draw(given: argparse.Namespace, seqlen: int, device: torch.device, mods: Mods) -> Problem:
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            shape = given.batch, heads, seqlen, given.head_dim
            x = torch.randn(shape, generator=generator, device=device)
            return x.to(torch.bfloat16).requires_grad_()

        heads, heads_kv = given.heads, given.heads_kv
        return Problem(normal(heads), normal(heads_kv), normal(heads_kv), normal(heads), mods)

    def block_mask(self) -> Any:
        """torch's, for all heads and batch entries; None without a mask_mod."""
        if self.mods.mask_mod is None:
            return None
        batch, heads, seqlen, _ = self.q.shape
        # a mod may read its head and its batch entry
        extents = batch, heads, seqlen, seqlen
        make = theirs.create_block_mask
        if self.q.is_cuda:
            make = torch.compile(make, dynamic=False)  # without a dense mask
        return make(self.mods.mask_mod, *extents, device=self.q.device.type)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout, retain_graph=True)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()  # torch compiles for a minute before the next line


def load_mods(path: Path) -> Mods:
    """The mods of a file.

    Raises:
        ValueError: it is no Python file, or defines neither mod. Others are those of its own code.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"FILE must be a Python file that exists, got {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where tracing looks for the source of a mod
    spec.loader.exec_module(module)
    mods = Mods(getattr(module, "mask_mod", None), getattr(module, "score_mod", None))
    if mods == (None, None):
        raise ValueError(f"FILE must define mask_mod or score_mod, and {path} defines neither")
    return mods


def exact(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """O, dq, dk, dv with every score written out in dtype; a query that sees nothing gets 0."""
    q, k, v, dout = (x.detach().to(dtype).requires_grad_() for x in problem[:4])
    batch, heads, seqlen, head_dim = q.shape
    group = heads // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * head_dim**-0.5
    places = [torch.arange(n, device=q.device) for n in (batch, heads, seqlen, seqlen)]
    if problem.mods.score_mod is not None:
        scores = _over_all(problem.mods.score_mod, True)(scores, *places).to(dtype)
    if problem.mods.mask_mod is not None:
        visible = _over_all(problem.mods.mask_mod, False)(*places).expand_as(scores)
        scores = scores.masked_fill(~visible, -torch.inf)
    seen = scores.detach().amax(-1, keepdim=True).isfinite()
    weights = scores.masked_fill(~seen, 0.0).softmax(-1) * seen
    out = weights.to(dtype) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _over_all(mod: Callable[..., Tensor], has_score: bool) -> Callable[..., Tensor]:
    """A mod of numbers as one of whole axes: batch, heads, queries, keys."""
    score = (0,) if has_score else ()
    for axis in reversed(range(4)):
        places = tuple(0 if i == axis else None for i in range(4))
        mod = torch.vmap(mod, in_dims=(*score, *places))
    return mod


def check(problem: Problem, calls: dict[str, Callable[..., Tensor]]) -> bool:
    """Print the largest error of each result of each call; whether all of ours are near float64.
    A call of torch that raises is said, and taken out of calls.

    A result may be twice as far from float64 as the same formula in bfloat16, and one rounding step
    of the largest number more.
    """
    references, rounded = exact(problem, torch.float64), exact(problem, torch.bfloat16)
    block_mask, all_right = problem.block_mask(), True
    for name, call in list(calls.items()):
        try:
            out = call(problem, block_mask)
            results = [out.detach(), *problem.gradients(out)]
        except Exception as error:
            if call is ours:
                raise
            _say(f"{name:24}raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            del calls[name]
            continue
        told = []
        for what, x, reference, near in zip(
            ("out", "dq", "dk", "dv"), results, references, rounded, strict=True
        ):
            distance, bound = ((y.double() - reference).abs().max().item() for y in (x, near))
            bound = 2 * bound + 2**-8 * reference.abs().max().item()
            is_right = distance <= bound
            all_right = all_right and (is_right or call is not ours)
            told.append(f"{what} {distance:.1e}{'' if is_right else ' WRONG'} (bound {bound:.1e})")
        _say(f"{name:24}largest error of {', '.join(told)}")
    return all_right


def ours(problem: Problem, block_mask: Any) -> Tensor:
    out: Tensor = flex_attention(*problem[:3], problem.mods.score_mod, block_mask, enable_gqa=True)
    return out


def milliseconds(step: Step) -> float:
    """Median of the rounds, of a call on the current GPU."""
    for _ in range(CALLS):
        step()
    times = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(CALLS):
            step()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / CALLS)
    return statistics.median(times)


def time_calls(problem: Problem, calls: dict[str, Callable[..., Tensor]]) -> None:
    """Print a row of milliseconds for each call, and how many times as fast the first one is."""
    block_mask = problem.block_mask()
    if block_mask is not None:
        keep_block_mask(block_mask)
    times: dict[str, tuple[float, float]] = {}
    for name, call in calls.items():
        with torch.no_grad():
            forward = milliseconds(lambda call=call: call(problem, block_mask))  # type: ignore[misc]
        out = call(problem, block_mask)
        backward = milliseconds(lambda out=out: problem.gradients(out))  # type: ignore[misc]
        times[name] = forward, backward
    _say(f"{'milliseconds':24}{'forward':>10}{'backward':>10}")
    for name, (forward, backward) in times.items():
        _say(f"{name:24}{forward:10.3f}{backward:10.3f}")
    if len(times) > 1:
        first, last = times.values()
        factors = (y / x for x, y in zip(first, last, strict=True))
        _say(f"{'times as fast':24}{''.join(f'{x:10.2f}' for x in factors)}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    for name, default in (("batch", 1), ("heads", 16), ("heads-kv", 0), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seqlen", type=int, default=8192)
    given = parser.parse_args(arguments)
    given.heads_kv = given.heads_kv or given.heads
    for name, size in vars(given).items():
        if name != "file" and size < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {size}")
    if given.heads % given.heads_kv:
        parser.error(f"--heads {given.heads} must be a multiple of --heads-kv {given.heads_kv}")
    return given


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 if a result of ours is wrong, or the file cannot be used."""
    given = parse(arguments)
    has_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() in ARCHS
    device = torch.device("cuda" if has_kernels else "cpu")
    try:
        with device:  # of the tensors that the mods read
            mods = load_mods(given.file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    calls: dict[str, Callable[..., Tensor]] = {"flash_mask_cute": ours}
    if has_kernels:
        compiled: Any = torch.compile(theirs.flex_attention, dynamic=False)
        calls["torch flex_attention"] = lambda x, block_mask: compiled(
            *x[:3], x.mods.score_mod, block_mask, enable_gqa=True
        )
        _say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    small = Problem.draw(given, min(given.seqlen, CHECKED_SEQLEN), device, mods)
    if not check(small, calls):
        _say("a result is wrong: nothing is timed")
        return 1
    if not has_kernels:
        _say("nothing is timed: torch sees no GPU with kernels")
        return 0
    problem = Problem.draw(given, given.seqlen, device, mods)
    batch, heads, seqlen, head_dim = problem.q.shape
    _say(f"batch {batch}, {seqlen} tokens, {heads} heads of {head_dim}, bfloat16")
    time_calls(problem, calls)
    return 0
