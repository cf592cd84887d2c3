"""Programs that need a process of their own: the software GPU takes the place of CUDA in it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


# The software GPU has to be there before the first `import cutlass`.
ACTIVATED = """
import runpy, sys, software_gpu
software_gpu.activate(sys.argv[1])
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def run_program(
    name: str, *args: str, arch: str = "sm_100a", is_active: bool = False
) -> list[tuple]:
    """Runs `name` of this folder with arguments, or on the software GPU if `is_active`.

    Returns the tuples that it prints, one a line.
    """
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    program = ["-c", ACTIVATED, arch] if is_active else []
    child = subprocess.run(
        [sys.executable, *program, str(HERE / name), *args],
        capture_output=True,
        text=True,
        env=dict(os.environ, CUTE_DSL_ARCH=arch, PYTHONPATH=path),
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-4000:]
    return [ast.literal_eval(x) for x in child.stdout.splitlines() if x.startswith("(")]
