"""Torch's own tests of attention, on this package's kernels: `python tests/torch_suite.py FILES`.

    python tests/torch_suite.py PYTORCH/test/test_transformers.py -n 8
    python tests/torch_suite.py PYTORCH/test/test_varlen_attention.py --draw 0 -k varlen_vs_sdpa
    python tests/torch_suite.py FILES --as-is --only failed.txt

FILES are of a checkout of pytorch at the release that is installed; other arguments are pytest's,
and these:

--draw N: N cases of each test function that has more, the same in each run (40); 0: all.
--only FILE: the cases that this file names, one a line.
--failed FILE: write there which cases failed.
--as-is: do not activate this package, so that a test which fails with torch's kernels, too, shows.

Before the tests `register()` and torch's `activate_flash_attention_impl` put this package in the
place of torch's flash attention. Only tests on a CUDA device run. At the end is said how many of
them called flash attention, which kernel computed the calls, with the reasons of those that were
left to torch, and which of the tests failed.

It is a plugin of pytest, too, which workers of pytest-xdist load by its name.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAME = "mask_cute"
KERNELS = "kernels_of_attention"
Calls = list[tuple[str, str, str | None]]
"""Operator, kernel and reason, as in `flash_mask_cute.integrations.torch.Ran`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch's tests of attention")
    group.addoption("--draw", type=int, default=40, help="cases of each test function; 0: all")
    group.addoption("--only", help="a file that names the cases to run")
    group.addoption("--failed", help="write here which cases failed")
    group.addoption("--as-is", action="store_true", help="with torch's own kernels")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.as_is or config.option.collectonly or _only_deals_out(config):
        return
    from torch.nn.attention import activate_flash_attention_impl

    from flash_mask_cute.integrations.torch import register

    register(NAME)
    activate_flash_attention_impl(NAME)


def _only_deals_out(config: pytest.Config) -> bool:
    """Whether this process runs no test, because workers of pytest-xdist do."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def drawn(names: Iterable[tuple[str, str]], count: int) -> set[str]:
    """Of (function, case): up to count cases of each function, by names alone; 0: all."""
    by_function: dict[str, list[str]] = {}
    for function, case in names:
        by_function.setdefault(function, []).append(case)
    found: set[str] = set()
    for cases in by_function.values():
        cases.sort(key=lambda case: zlib.crc32(case.encode()))
        found.update(cases[: count or None])
    return found


def _function_of(item: pytest.Item) -> str:
    """The test function from which torch makes a method for each device and case."""
    method = getattr(item, "function", None)
    written = getattr(method, "__wrapped__", method)
    return f"{item.nodeid.rsplit('::', 1)[0]}::{getattr(written, '__name__', item.name)}"


@pytest.hookimpl(trylast=True)  # of what -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cuda = [item for item in items if "CUDA::" in item.nodeid]
    if config.option.only:
        named = set(Path(config.option.only).read_text().split())
        kept = {item.nodeid for item in on_cuda if item.nodeid in named}
    else:
        kept = drawn(((_function_of(x), x.nodeid) for x in on_cuda), config.option.draw)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in on_cuda if item.nodeid in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    from flash_mask_cute.integrations.torch import kernels_run

    with kernels_run() as ran:
        try:
            return (yield)
        finally:
            item.user_properties.append((KERNELS, [tuple(call) for call in ran]))


def summary(results: Iterable[tuple[str, str, Calls]]) -> list[str]:
    """Lines about (case, outcome, calls), of which outcome is "passed", "failed" or "skipped"."""
    outcomes: Counter[str] = Counter()
    of_flash: Counter[str] = Counter()
    where: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed: list[str] = []
    for case, outcome, calls in results:
        outcomes[outcome] += 1
        kernels = {kernel for _, kernel, _ in calls}
        if kernels:
            of_flash[outcome] += 1
            where[" and ".join(sorted(kernels))] += 1
            reasons.update({f"{name}: {why}" for name, _, why in calls if why is not None})
        if outcome == "failed":
            on = " and ".join(sorted(kernels)) or "no flash attention"
            failed.append(f"FAILED {case.rsplit('::', 1)[-1]} ({on})")
    return [
        f"all: {_counted(outcomes)}",
        f"which called flash attention: {_counted(of_flash)}",
        f"whose calls ran on: {_counted(where)}",
        *(f"left to torch in {count} tests, {why}" for why, count in reasons.most_common()),
        *failed,
    ]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results: list[tuple[str, str, Calls]] = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            calls = dict(report.user_properties).get(KERNELS, [])
            results.append((report.nodeid, outcome, [tuple(call) for call in calls]))
    terminalreporter.section("flash attention")
    for line in summary(results):
        terminalreporter.write_line(line)
    if config.option.failed:
        cases = [case for case, outcome, _ in results if outcome == "failed"]
        Path(config.option.failed).write_text("".join(f"{case}\n" for case in cases))


def main(arguments: list[str]) -> int:
    files = [Path(x) for x in arguments if x.endswith(".py")]
    if not files or not all(file.is_file() for file in files):
        print(__doc__)
        print(f"no such files: {', '.join(map(str, files)) or 'none are given'}")
        return 2
    root = files[0].resolve().parent
    # files of pytorch's folder have nothing to do with this project's settings
    own = ["-p", "torch_suite", "-p", "no:cacheprovider", f"--rootdir={root}", "-c", os.devnull]
    return int(pytest.main([*own, "-q", "--tb=line", "-W", "ignore", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
