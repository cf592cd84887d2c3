"""Runs of kernels in which each role is the slowest of its CTA once.

A wait that is left out because its role "is always fast enough" shows then, and hardly otherwise.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import drawn_share
import eager
import mask_cases
import pytest
import simulated_backward
import torch
from cases import Case
from conftest import SMS
from inputs import make_inputs
from simulated_backward import run_sim as run_backward
from simulated_forward import run_sim as run_forward
from trained_mods import make_trained

import flash_mask_cute

PACKAGE = Path(flash_mask_cute.__file__).parent
WARPS_PER_WARPGROUP = 4
# kernels whose CTAs have roles, by what their names begin with, and who tells them
ROLES = {
    "sm90.": "flash_mask_cute.sm90.warpgroups",
    "sm100.flash_fwd.": "flash_mask_cute.sm100.flash_fwd_traits",
    "sm100.flash_bwd.": "flash_mask_cute.sm100.flash_bwd_traits",
}


# Kernels of classes that inherit them, which the compiler names by the module of the class.
OF_BASE = dict.fromkeys(
    ("sm90.flash_tangent.kernel", "sm90.flash_fwd_wide.kernel"), "sm90.flash_fwd.kernel"
)


class Slowed(NamedTuple):
    """A call: fields of its `Case`, its `config` if that is not the table's, further keywords.
    shares: a share of `make test` has one of so many of its sets of slow warps."""

    fields: dict[str, Any]
    config: dict[str, Any] | None = None
    more: dict[str, Any] = {}
    shares: int = 1


# Asynchronous work completes at random points, and warps are interrupted: a slow one also between a
# wait and what comes after it. A run without a seed finds less.
SEED = 1
# the masks of most: see `add_islands`
ISLANDS = {"heads_q": 1, "heads_kv": 1, "causal": True, "column": "islands"}


@cache
def kernels_of_package() -> frozenset[str]:
    """The names `module.function` of all kernels there are."""
    return frozenset(
        f"{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}.{node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(x) == "cute.kernel" for x in node.decorator_list)
    )


def launched(simulator: ModuleType) -> dict[str, int]:
    """What ran since `RESULTS` was cleared: names of kernels, and how many warps a CTA has."""
    found = {}
    for result in simulator.RESULTS:
        for launch in result["launches"]:
            symbol = launch["kernel"]
            names = *kernels_of_package(), *OF_BASE
            # the name of a module may begin with that of another
            fitting = [x for x in names if symbol.startswith(_symbol_of(x))]
            assert fitting, symbol
            name = max(fitting, key=len)
            found[OF_BASE.get(name, name)] = -(-launch["block"][0] // 32)
    return found


def _symbol_of(kernel: str) -> str:
    """What the name of a compiled kernel begins with."""
    module, function = kernel.rsplit(".", 1)
    return f"kernel_cutlass_{function}_{PACKAGE.name}{module.replace('.', '')}"


def slow_sets(kernel: str, num_warps: int) -> set[frozenset[int]]:
    """Sets of warps to be slow together, so that each role of the kernel is slow by itself.

    The warps of a role are those from the first one, as its `Role` says, to the first one of the
    next role, and each warpgroup of them is a set. On Hopper the warps of one work together: there
    the first, which sends what they have, and the last are sets, too. Where no role has a name,
    each warp is one. So every warp of a CTA is in some set, also that of a role which somebody
    adds.
    """
    told = [module for start, module in ROLES.items() if kernel.startswith(start)]
    if not told:
        return {frozenset({warp}) for warp in range(num_warps)}
    firsts = sorted(importlib.import_module(told[0]).Role)
    assert firsts[0] == 0 and firsts[-1] < num_warps
    sets = set()
    for first, end in zip(firsts, [*firsts[1:], num_warps], strict=True):
        for begin in range(first, end, WARPS_PER_WARPGROUP):
            warps = range(begin, min(begin + WARPS_PER_WARPGROUP, end))
            sets.add(frozenset(warps))
            if kernel.startswith("sm90.") and len(warps) == WARPS_PER_WARPGROUP:
                sets |= {frozenset({warps[0]}), frozenset({warps[-1]})}
    return sets


def with_each_role_slow(
    simulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Iterable[str],
    run: Callable[[], object],
    turn: int | None = None,
    is_short: bool = False,
    shares: int = 1,
) -> int:
    """`run`, which launches kernels and holds their results to what is right, as it is, and with
    each role of each of `kernels` slow. Returns how many sets of warps were slow. turn: only two
    sets of warps are, of which each has its turn. is_short: one of these two takes the place of the
    run as it is. shares: as of `Slowed`."""
    number = turn or 0
    first = frozenset({number % WARPS_PER_WARPGROUP}) if is_short else frozenset[int]()
    monkeypatch.setitem(simulator.OPTIONS, "slow", first)
    run()
    num_warps = launched(simulator)
    sets = set().union(*(slow_sets(x, num_warps[x]) for x in kernels))
    ordered = sorted(sets, key=sorted)
    if (seed := drawn_share.seed()) is not None:
        ordered = ordered[seed % shares :: shares]
    if is_short:
        ordered = [ordered[number % len(ordered)]]
    elif turn is not None:
        ordered = [ordered[(2 * turn + i) % len(ordered)] for i in range(min(2, len(ordered)))]
    for warps in ordered:
        monkeypatch.setitem(simulator.OPTIONS, "slow", warps)
        try:
            run()
        except (AssertionError, simulator.SimError) as error:
            raise AssertionError(f"where warps {sorted(warps)} are slow: {error}") from error
    return len(ordered)


def check_forward(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, kernel: str, name: str, slowed: Slowed
) -> None:
    """A forward, by the kernel, with each of its roles slow."""
    add_islands(monkeypatch)
    inputs = make_inputs(Case(name, **slowed.fields))
    run = partial(run_forward, simulator, inputs, (SEED,), config=slowed.config)
    with_each_role_slow(simulator, monkeypatch, [kernel], run)


def check_backward(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, kernel: str, name: str, slowed: Slowed
) -> None:
    """The same of a backward. daux: with gradients of what its score_mod reads."""
    add_islands(monkeypatch)
    cache_oracles(monkeypatch)
    fields, config, more, shares = slowed
    if "daux" in more:
        given = make_trained(Case(name, **fields | {"score_mod": None}), fields["score_mod"])
        inputs = given.inputs
        wanted = (i in given.wants_aux for i in range(len(given.aux_tensors)))
        daux = zip(given.aux_tensors, wanted, strict=True)
        more = {"daux": [torch.empty_like(x) if is_wanted else None for x, is_wanted in daux]}
    else:
        inputs = make_inputs(Case(name, **fields))
    if more.get("deterministic"):
        # CTAs, or pairs of them, wait for each other
        monkeypatch.setitem(simulator.OPTIONS, "resident", SMS)
        sms = SMS * (2 if (config or {}).get("cta_pair") else 1)
        monkeypatch.setattr(simulated_backward, "SMS", sms)
    run = partial(run_backward, simulator, inputs, (SEED,), config=config, **more)
    with_each_role_slow(simulator, monkeypatch, [kernel], run, shares=shares)


def cache_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute expected gradients once: all runs are of one call."""

    def cached_once(function: Callable[..., Any]) -> Callable[..., Any]:
        results: list[Any] = []

        def call(*arguments: Any) -> Any:
            if not results:
                results.append(function(*arguments))
            return results[0]

        return call

    for oracle in ("reference_gradients", "eager_gradients"):
        once = cached_once(getattr(eager, oracle))
        monkeypatch.setattr(eager, oracle, once)


def _islands(cycle: int, whole: int, cut: int) -> Callable[..., list[list[int]]]:
    """Of each `cycle` keys all see `whole`, some rows the next `cut`, nobody the others."""

    def columns(rng: random.Random, seqlen_q: int, seqlen_k: int, n: int) -> list[list[int]]:
        ends = []
        for key in range(seqlen_k):
            at = key % cycle
            some = rng.randint(0, seqlen_q) if at < whole + cut else 0
            ends.append(seqlen_q if at < whole else some)
        return [[end] if n == 1 else [end, 0] for end in ends]

    return columns


def add_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes for columns: several blocks between hidden ones, and far walks of few blocks."""
    islands = mask_cases.ColumnRecipe(_islands(512, 288, 40), 1, is_shared=True)
    monkeypatch.setitem(mask_cases.COLUMNS, "islands", islands)
    far = mask_cases.ColumnRecipe(_islands(1024, 64, 20), 1, is_shared=True)
    monkeypatch.setitem(mask_cases.COLUMNS, "far_islands", far)
