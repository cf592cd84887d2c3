"""Which tests `make test` runs: the share that a seed draws; whether the simulator has to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import drawn_share
import pytest
import simulator_needed
from drawn_share import ON_SIMULATOR, Deal, is_daily, is_in_share, left_out
from simulator_needed import READ, changed_files, verdict

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """
import pytest
from drawn_share import Draws

DRAWN = Draws.of("SAMPLE", 3, 8)

@pytest.mark.shares(3)
@pytest.mark.parametrize("i", range(7))
def test_slow(i):
    print(f"slow {i}")

@pytest.mark.shares(3)
@pytest.mark.parametrize("i", range(2))
def test_other(i):
    print(f"other {i}")

@pytest.fixture
def simulator():
    pass

@pytest.mark.parametrize("i", range(SHARES * 4))
def test_kernel(simulator, i):
    print(f"kernel {i}")

@pytest.mark.daily(2)
@pytest.mark.parametrize("i", range(7))
def test_daily(simulator, i):
    print(f"daily {i}")

def test_quick():
    print("quick")
    assert False
""".replace("SHARES", str(ON_SIMULATOR.shares))


def run(folder: Path, seed: str, *arguments: str) -> tuple[list[str], str]:
    """What ran of SAMPLE, and all that pytest said."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_sample.py").write_text(SAMPLE)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), drawn_share.SEED: seed}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-s", *(arguments or ("test_sample.py",))]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = (line.removeprefix("test_sample.py ").lstrip(".") for line in done.stdout.splitlines())
    kinds = ("slow", "other", "kernel", "daily", "quick")
    ran = [x for x in lines if x.split(" ")[0] in kinds]
    return ran, done.stdout + done.stderr


def test_a_seed_draws_a_share_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, said = run(tmp_path, "5")
    assert f"FLASH_MASK_SIM_SEED=5 draws one share of {ON_SIMULATOR.shares}" in said
    kinds = ("slow", "kernel", "daily", "quick")
    counts = {kind: sum(x.startswith(kind) for x in ran) for kind in kinds}
    assert counts["slow"] in (2, 3), ran
    assert [counts[kind] for kind in kinds[1:]] == [4, 2, 1], ran
    again = "FLASH_MASK_SAMPLE_SEED=8 FLASH_MASK_SAMPLE_DRAWS=3 FLASH_MASK_SIM_SEED=all"
    assert f"{again} python -m pytest 'test_sample.py::test_quick'" in said
    named, _ = run(tmp_path, "5", "test_sample.py::test_slow")
    assert len(named) == 7, "who names a test gets it"
    monkeypatch.setenv(drawn_share.SEED, "all")
    assert drawn_share.seed() is None, "which leaves nothing out"
    monkeypatch.setenv(drawn_share.SEED, "today")
    with pytest.raises(pytest.UsageError, match="=today is neither a number nor 'all'"):
        drawn_share.seed()


@pytest.mark.parametrize("deal", [Deal(1), Deal(3), Deal(20, together=4)])
@pytest.mark.parametrize("first", [0, 20783])
def test_consecutive_seeds_run_every_case_once(deal: Deal, first: int) -> None:
    seeds = range(first, first + deal.shares)
    for function in ("test_a.py::test_b", "test_a.py::test_c"):
        drawn = [[is_in_share(function, i, deal, seed) for i in range(60)] for seed in seeds]
        assert all(sum(case) == 1 for case in zip(*drawn, strict=True))
        sizes = [sum(share) for share in drawn]
        assert max(sizes) - min(sizes) <= deal.together


@pytest.mark.parametrize(("cases", "most"), [(7, 2), (4, 1), (3, 3), (2, 3)])
def test_daily_cases_come_in_turn(cases: int, most: int) -> None:
    drawn = [[i for i in range(cases) if is_daily(i, cases, most, seed)] for seed in range(20)]
    assert all(len(each) == min(cases, most) for each in drawn)
    assert {i for each in drawn[: -(-cases // most)] for i in each} == {*range(cases)}


def test_each_module_on_the_simulator_has_a_case() -> None:
    """In one of three shares, drawn from all of its cases."""

    class Item(NamedTuple):
        nodeid: str
        fixturenames: tuple[str, ...] = ("simulator",)

        def get_closest_marker(self, name: str) -> None:
            return None

    items: Any = [Item(f"sim/test_{name}.py::test[{i}]") for name in "abcde" for i in range(9)]
    runs = [{*items} - {*left_out(items, seed)} for seed in range(30)]
    for name in "abcde":
        drawn = [{x.nodeid for x in run if f"test_{name}" in x.nodeid} for run in runs]
        assert all(map(set.union, drawn, drawn[1:], drawn[2:])), name
        assert len(set.union(*drawn)) > 3


def test_functions_of_one_case_are_not_all_of_one_share() -> None:
    functions = [f"test_a.py::test_{i}" for i in range(200)]
    sizes = [sum(is_in_share(f, 0, Deal(8), seed) for f in functions) for seed in range(8)]
    assert sum(sizes) == 200 and min(sizes) >= 10


# -- whether the simulator has to run -----------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """On a branch that was left from main, where nothing has changed."""
    git(tmp_path, "init", "-b", "main")
    for name in (
        "docs/page.md",
        "bench/run.py",
        "flash_mask_cute/call/plan.py",
        "tests/support/cases/cases.py",
    ):
        write(tmp_path, name, f"text of {name}")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "checkout", "-b", "topic")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def is_needed(folder: Path) -> bool:
    return verdict(changed_files(folder))[0]


@pytest.mark.parametrize("is_committed", [False, True])
def test_documents_and_the_benchmark_do_without(repository: Path, is_committed: bool) -> None:
    def change(name: str) -> None:
        write(repository, name, "changed")
        if is_committed:
            git(repository, "add", "-A")
            git(repository, "commit", "-m", name)

    assert is_needed(repository), "nothing differs"
    for name in ("docs/page.md", "docs/new.md", "bench/run.py", "tests/cpu/bench/test_run.py"):
        change(name)
        assert not is_needed(repository), name
    change("tests/support/cases/cases.py")
    assert is_needed(repository)


@pytest.mark.parametrize(
    "name", ["flash_mask_cute/new.py", "pyproject.toml", "examples/07_native_api.py", "docs.py"]
)
def test_one_file_elsewhere_is_enough(repository: Path, name: str) -> None:
    write(repository, "docs/page.md", "changed")
    write(repository, name, "new")
    assert is_needed(repository)


@pytest.mark.parametrize("name", READ)
def test_what_the_tests_share_with_the_benchmark_is_enough(repository: Path, name: str) -> None:
    assert (ROOT / name).is_file()
    write(repository, name, "changed")
    assert is_needed(repository)


def test_what_the_simulator_reads_of_the_benchmark_is_known() -> None:
    """By the imports of the tests and their helpers, those on the CPU and for kernels left out."""
    read = set()
    for path in (ROOT / "tests").rglob("*.py"):
        apart = {"cpu", "gpu"} & {*path.relative_to(ROOT / "tests").parts}
        if not apart and path.stem not in ("dsl_masks", "compiled_code"):
            text = path.read_text()
            read |= {*re.findall(r"^from bench\.(\w+) import", text, re.M)}
            assert "import bench" not in text
            for names in re.findall(r"^from bench import (.+)$", text, re.M):
                read |= {each.split()[0] for each in names.split(",")}
    assert {f"bench/{name}.py" for name in read} <= {*READ}


def test_a_file_that_moved_to_the_benchmark_left_the_package(repository: Path) -> None:
    git(repository, "mv", "flash_mask_cute/call/plan.py", "bench/plan.py")
    assert is_needed(repository)


def test_what_main_got_since_is_no_change(repository: Path) -> None:
    git(repository, "checkout", "main")
    write(repository, "flash_mask_cute/call/plan.py", "newer")
    git(repository, "commit", "-a", "-m", "second")
    git(repository, "checkout", "topic")
    write(repository, "docs/page.md", "changed")
    assert not is_needed(repository)


def test_a_clone_compares_with_where_it_came_from(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "main")
    git(tmp_path, "clone", str(repository), "clone")
    clone = tmp_path / "clone"
    assert is_needed(clone), "a fresh clone"
    write(clone, "docs/page.md", "changed")
    git(clone, "commit", "-a", "-m", "page")
    assert not is_needed(clone), "its own main is ahead of origin/main"


def test_nothing_to_compare_with(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    git(repository, "branch", "-D", "main")
    write(repository, "docs/page.md", "changed")
    assert is_needed(repository)
    assert is_needed(tmp_path_factory.mktemp("unpacked")), "no repository"


def test_it_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulator_needed, "changed_files", lambda root: ("main", {"docs/a.md"}))
    assert simulator_needed.main() == simulator_needed.NOT_NEEDED
    assert capsys.readouterr().out.startswith("simulator: not run, nothing but docs/")
    changed = ("main", {"docs/a.md", "flash_mask_cute/limits.py"})
    monkeypatch.setattr(simulator_needed, "changed_files", lambda root: changed)
    assert simulator_needed.main() == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "simulator: runs, 1 files differ from main, the first is flash_mask_cute"
    )


def test_make_tells_them_apart() -> None:
    """3 is written in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    assert f"0) $(MAKE) test-sim;; {simulator_needed.NOT_NEEDED}) ;;" in makefile


@pytest.mark.parametrize(("python", "status"), [("true", 0), ("false", 2)])
def test_make_says_what_runs_and_how_long_it_took(python: str, status: int) -> None:
    """And fails where a part does."""
    command = ["make", "test-cpu", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    first, last = (line for line in done.stdout.splitlines() if line.startswith("== "))
    assert (done.returncode, last.startswith(f"{first}: ")) == (status, True)
    assert re.search(r": \d+ s$", last)


@pytest.mark.parametrize(("target", "seed"), [("test", "5"), ("test-all", "all")])
def test_what_make_exports(target: str, seed: str) -> None:
    database = subprocess.run(
        ["make", "-npq", target, "PYTHON=true"],
        cwd=ROOT,
        env=os.environ | {drawn_share.SEED: "5"},
        capture_output=True,
        text=True,
    ).stdout
    assert f"{target}: {drawn_share.SEED} := {seed}" in database
