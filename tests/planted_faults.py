"""Twenty faults, planted one at a time, and which tests notice: `python tests/planted_faults.py`.

    python tests/planted_faults.py --list                     # the faults, and where they are
    python tests/planted_faults.py --seeds 1,2,3              # against shares of `make test`
    python tests/planted_faults.py early-release --whole      # against all tests of its kernel
    python tests/planted_faults.py --tests tests/cpu/masks    # against these tests instead

A fault is a change of a few words in one file of the package: eight kinds that were found missing
before, six in other kernels, six on the host. It is made in a copy of the tracked files, so the
checkout stays as it is. A fault whose pattern is not found exactly once in the package is an error:
the code has changed, and the fault has to be written anew.

The faults were chosen, and written down here, before the share of `make test` was made to catch
them. So they measure the share. A fault that it missed got a daily case afterwards: docs/testing.md
names these.

The last lines are a table of faults by seeds. The exit status is 1 where a fault went unnoticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flash_mask_cute"
ARCHS = ("sm_90a", "sm_100a")
SIM, CPU = "tests/sim", "tests/cpu"
LIMIT_S = 3600.0
COPIED = (
    *(PACKAGE, "tests", "software_gpu", "bench", "lab", "contrib", "examples", "docs", "archive"),
    *("pyproject.toml", "Makefile", "README.md", "MANIFEST.in", "constraints.txt", "mkdocs.yml"),
    "CITATION.cff",
)


class Fault(NamedTuple):
    """file: where it was, with the folder that tells it from others of the name. pattern, planted:
    as of `re.sub`. archs: of the software GPU that can show it; none: tests on the CPU show it.
    whole: the tests of that kernel, of all that `make test-all` runs."""

    name: str
    kind: str
    file: str
    pattern: str
    planted: str
    archs: tuple[str, ...] = ()
    whole: tuple[str, ...] = (CPU,)


HOPPER, BLACKWELL = ARCHS[:1], ARCHS[1:]
KNOWN, KERNEL, HOST = "known", "kernel", "host"
FAULTS = (
    # -- of kinds that were found missing before ------------------------------------------------
    Fault(
        "missing-wait", KNOWN, "sm90/flash_fwd_mainloop.py",
        r"( +)self\.channels\.v\.wait_unless\(state\.v_ready, [^\n]+\n",
        r"\1pass\n", HOPPER,
        (f"{SIM}/test_flash_fwd_sim.py", f"{SIM}/test_flash_fwd_sm90_sim.py",
         f"{SIM}/test_slow_roles_sim.py"),
    ),
    Fault(
        "wrong-phase", KNOWN, "core/cursor.py",
        r"(Uint32\(self\.count\) // self\.stages\)) & 1",
        r"\1 // 2 & 1", ARCHS,
        (f"{SIM}/test_flash_fwd_sim.py", f"{SIM}/test_flash_bwd_sim.py"),
    ),
    Fault(
        "early-release", KNOWN, "sm90/flash_fwd_mainloop.py",
        r"( +)warpgroup\.wait_group\(0\)\n +(self\.release_values\(state\))\n"
        r"(?= +if const_expr\(not traits\.keeps_scores\))",
        r"\1\2\n\1warpgroup.wait_group(0)\n", HOPPER,
        (f"{SIM}/test_flash_fwd_sim.py", f"{SIM}/test_flash_fwd_sm90_sim.py",
         f"{SIM}/test_slow_roles_sim.py"),
    ),
    Fault(
        "missing-proxy-fence", KNOWN, "sm100/flash_bwd_reduce.py",
        r'( +)cute\.arch\.fence_proxy\("async\.shared", space="cta"\)\n'
        r"(?= +self\.channels\.\w+\.publish\(fill\))",
        r"", BLACKWELL,
        (f"{SIM}/test_flash_bwd_sim.py", f"{SIM}/test_flash_bwd_sm100_sim.py"),
    ),
    Fault(
        "swapped-stage", KNOWN, "sm100/flash_fwd_products.py",
        r"(self\.products\.k\[None, None, None, channels\.k\.index\(state\.blocks)\)(?=\],\n"
        r" +False,\n)",
        r"\1 + 1)", BLACKWELL,
        (f"{SIM}/test_flash_fwd_sim.py", f"{SIM}/test_flash_fwd_sm100_sim.py"),
    ),
    Fault(
        "missing-wait-for-O", KNOWN, "sm100/flash_fwd_products.py",
        r"channels\.o\.acquire\(half_tile\)",
        r"umma.fence_after_wait()", BLACKWELL,
        (f"{SIM}/test_flash_fwd_sim.py", f"{SIM}/test_flash_fwd_sm100_sim.py",
         f"{SIM}/test_slow_roles_sm100_sim.py"),
    ),
    Fault(
        "TMEM-released-early", KNOWN, "sm100/flash_bwd_reduce.py",
        r"( +)(chunks = \[\[[^\n]+\n)((?: +[^\n]+\n)*?) +(self\.\w+\(channel, number\)\n)",
        r"\1\4\1\2\3", BLACKWELL,
        (f"{SIM}/test_flash_bwd_sim.py", f"{SIM}/test_flash_bwd_sm100_sim.py",
         f"{SIM}/test_slow_roles_sm100_sim.py"),
    ),
    Fault(
        "list-bits-off-by-one", KNOWN, "rules/forward_mask.py",
        r"word \| bit_range\(first, first \+ ratio\)",
        r"word | bit_range(first, first + ratio - (ratio > 1))", ARCHS,
        (f"{SIM}/test_block_lists_sim.py", f"{SIM}/test_flash_fwd_sim.py",
         f"{SIM}/test_lists_per_warpgroup_sim.py"),
    ),
    # -- in other kernels -----------------------------------------------------------------------
    Fault(
        "decode-last-block", KERNEL, "core/stream_k.py",
        r"\(self\.end - 1\) // size",
        r"self.end // size", ARCHS,
        (f"{CPU}/core/test_stream_k.py", f"{SIM}/test_split_sim.py", f"{SIM}/test_pages_sim.py"),
    ),
    Fault(
        "combine-unscaled-total", KERNEL, "kernels/combine.py",
        r"( +)total \*= scale\n",
        r"", HOPPER, (f"{SIM}/test_combine_sim.py", f"{SIM}/test_slow_roles_sim.py"),
    ),
    Fault(
        "append-last-page", KERNEL, "kernels/append_kv.py",
        r"exists & \(page <= last\)",
        r"exists & (page < last)", HOPPER,
        (f"{SIM}/test_append_sim.py", f"{SIM}/test_slow_roles_sim.py"),
    ),
    Fault(
        "short-dS-overwritten", KERNEL, "sm90/flash_bwd_short.py",
        r"(acc_dK, accs_dQ = [^\n]+\n +\w+\.release\(i\)\n(?: +#[^\n]*\n)*) +self\.\w+\(\)\n",
        r"\1", HOPPER,
        (f"{SIM}/test_short_sequences_sim.py", f"{SIM}/test_slow_roles_sim.py"),
    ),
    Fault(
        "token-list-place", KERNEL, "mask_prep/query_lists_kernel.py",
        r"popc\(bits & low_bits\(bit\)\)",
        r"popc(bits & low_bits(bit + 1))", HOPPER, (f"{SIM}/test_query_lists_sim.py",),
    ),
    Fault(
        "mask-bits-last-warp", KERNEL, "mask_prep/mask_bits_kernel.py",
        r"(range_constexpr\(num_warps)\)(?=:\n +state = state \| )",
        r"\1 - 1)", ARCHS, (f"{SIM}/test_mask_bits_sim.py",),
    ),
    # -- on the host ----------------------------------------------------------------------------
    Fault(
        "window-off-by-one", HOST, "masks/builders.py",
        r"first = min\(window, seqlen\) \+ 1",
        r"first = min(window, seqlen)", (), (f"{CPU}/masks",),
    ),
    Fault(
        "last-tile-left-out", HOST, "rules/block_info.py",
        r"\(_ceil_div\(hi, tile\) - first\)",
        r"(hi // tile - first)", (), (f"{CPU}/test_block_info.py", f"{CPU}/rules"),
    ),
    Fault(
        "key-without-defaults", HOST, "runtime/callable_key/traversal.py",
        r"sorted\(\(fn\.__kwdefaults__ or \{\}\)\.items\(\)\)",
        r"()", (), (f"{CPU}/runtime/test_callable_key.py",),
    ),
    Fault(
        "dlse-dropped", HOST, "autograd/passes.py",
        r"(torch\.zeros_like\(out\) if dout is None else dout), dlse\)",
        r"\1, None)", (), (f"{CPU}/test_functional.py", f"{CPU}/autograd"),
    ),
    Fault(
        "opposite-comparison", HOST, "lowering/simplify.py",
        r"return -sign, -1 - strict",
        r"return -sign, -strict", (),
        (f"{CPU}/flex/test_flex_simplify.py", f"{CPU}/flex/test_flex_intervals.py"),
    ),
    Fault(
        "batches-may-differ", HOST, "lengths.py",
        r"queries\.batch != keys\.batch and not has_shared_keys",
        r"queries.batch < keys.batch and not has_shared_keys", (),
        (f"{CPU}/call/test_validate_refusals.py", f"{CPU}/test_functional.py"),
    ),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}


class NotFoundError(Exception):
    """The pattern of a fault is not exactly once in the package."""


def place_of(fault: Fault, root: Path) -> Path:
    """The file, wherever it has moved to. Raises NotFoundError."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    counts = {path: len(re.findall(fault.pattern, path.read_text())) for path in files}
    told = [path for path in files if f"/{path.relative_to(root)}".endswith(f"/{fault.file}")]
    found = [path for path in told if counts[path]] or [path for path in files if counts[path]]
    if len(found) != 1 or counts[found[0]] != 1:
        places = ", ".join(f"{path.relative_to(root)} {counts[path]} times" for path in found)
        raise NotFoundError(
            f"{fault.name}: {fault.pattern!r} must be once in {PACKAGE} ({fault.file}), "
            f"it is in {places or 'no file'}"
        )
    return found[0]


def plant(fault: Fault, root: Path) -> Path:
    """Change the file of a checkout; NotFoundError, or ValueError for no change or no Python."""
    path = place_of(fault, root)
    text = path.read_text()
    changed = re.sub(fault.pattern, fault.planted, text)
    compile(changed, str(path), "exec")
    if changed == text:
        raise ValueError(f"{fault.name} changes nothing")
    path.write_text(changed)
    return path


def copy_of_checkout(folder: Path) -> None:
    """What tests need of it, without a repository and without what is hidden."""
    for name in COPIED:
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)


class Outcome(NamedTuple):
    """failed: the first test that failed; "" where none did. said: the end of what pytest said."""

    fault: str
    seed: str
    failed: str
    seconds: float
    said: str


def noticed(fault: Fault, seed: str, given: Sequence[str], workers: int) -> Outcome:
    """Whether a share of the tests, or `all` of them, notices; it ends at the first failure. given:
    tests instead of those of the share."""
    begin = time.monotonic()
    if seed != "all" and not given:
        # those of its kernel first, which are a part of the share and notice sooner
        near = noticed(fault, seed, [x for x in fault.whole if (ROOT / x).exists()], workers)
        if near.failed:
            return near
    tests = given or tests_of(fault, seed == "all")
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        copy_of_checkout(Path(folder))
        plant(fault, Path(folder))
        failed, said = "", ""
        for arch, names in runs_of(fault, tests):
            # the copy first, then where the compiler may be
            paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
            environment = os.environ | {
                "FLASH_MASK_SIM_SEED": seed, "PYTHONPATH": paths, "FLASH_MASK_SIM_ARCH": arch,
                "FLASH_MASK_CUTE_CACHE_DIR": f"{folder}/cache", "PYTHONDONTWRITEBYTECODE": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            command += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
            try:
                done = subprocess.run(
                    [*command, *names], cwd=folder, env=environment, capture_output=True, text=True,
                    timeout=LIMIT_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                failed = f"later than {LIMIT_S:.0f} s"
                break
            said += done.stdout[-2000:]
            found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            # 2 where workers are stopped by a failure of another one
            if done.returncode == 1 or (done.returncode == 2 and found):
                failed = found[0] if found else "a test"
                break
            if done.returncode not in (0, 5):
                raise RuntimeError(f"{fault.name}: pytest failed: {done.stdout}{done.stderr}")
    return Outcome(fault.name, seed, failed, time.monotonic() - begin, said)


def runs_of(fault: Fault, tests: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Architecture of the software GPU and tests, a process each. tests: those of the command."""
    on_cpu = [x for x in tests if not x.startswith(SIM)]
    on_gpu = [x for x in tests if x.startswith(SIM)]
    for arch in fault.archs if on_gpu else ():
        yield arch, on_gpu
    if on_cpu:
        yield ARCHS[0], on_cpu


def tests_of(fault: Fault, is_whole: bool) -> list[str]:
    """All of the kernel; or of the share, tests/sim for a kernel and tests/cpu for the host."""
    if is_whole:
        return [x for x in fault.whole if (ROOT / x).exists()]
    return [SIM] if fault.archs else [CPU]


def table(outcomes: Sequence[Outcome], seeds: Sequence[str]) -> Iterator[str]:
    """A row a fault: by seed the test that noticed."""
    yield f"| fault | kind | {' | '.join(f'seed {seed}' for seed in seeds)} |"
    yield "|---|---|" + "---|" * len(seeds)
    by_place = {(x.fault, x.seed): x for x in outcomes}
    for name in dict.fromkeys(x.fault for x in outcomes):
        cells = []
        for seed in seeds:
            found = by_place.get((name, seed))
            cells.append("not run" if found is None else found.failed or "**not noticed**")
        yield f"| {name} | {BY_NAME[name].kind} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--list", action="store_true", help="say where each fault is, and stop")
    parser.add_argument("--seeds", default="1,2,3", help="of the share of `make test`")
    parser.add_argument("--whole", action="store_true", help="all tests of the kernel instead")
    parser.add_argument("--tests", nargs="*", default=[], help="these files instead")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--workers", type=int, default=2, help="of pytest, for each fault")
    given = parser.parse_args()
    if unknown := set(given.names) - set(BY_NAME):
        parser.error(f"{', '.join(sorted(unknown))} not among {', '.join(BY_NAME)}")
    faults = [BY_NAME[name] for name in given.names] or list(FAULTS)
    for fault in faults:
        place = place_of(fault, ROOT).relative_to(ROOT)
        if given.list:
            print(f"{fault.kind:7} {fault.name:24} {place}")
    if given.list:
        return 0
    seeds = ["all"] if given.whole else given.seeds.split(",")
    todo = [(fault, seed) for fault in faults for seed in seeds]
    outcomes: list[Outcome] = []

    def one(job: tuple[Fault, str]) -> Outcome:
        fault, seed = job
        outcome = noticed(fault, seed, given.tests, given.workers)
        what = outcome.failed or "NOT NOTICED"
        print(f"{fault.name} seed {seed}: {what} ({outcome.seconds:.0f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes += pool.map(one, todo)
    print("\n".join(table(outcomes, seeds)))
    return int(any(not x.failed for x in outcomes))


if __name__ == "__main__":
    sys.exit(main())
