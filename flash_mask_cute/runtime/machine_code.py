"""The code of a kernel as text: PTX, and machine code where a disassembler is found."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.process_state import compile_lock, say_build

SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+ )?([A-Z0-9_]+)", re.MULTILINE)


def disassemblers() -> Iterator[list[str]]:
    """Commands that print the machine code of the cubin named after them."""
    spec = importlib.util.find_spec("triton")
    places: list[str | None] = [None]
    if spec and spec.origin:
        places.append(str(Path(spec.origin).parent / "backends/nvidia/bin"))
    for packages in sys.path:
        # of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm
        places += map(str, sorted(Path(packages).glob("nvidia/cu*/bin")))
    for place in places:
        for name, options in (("cuobjdump", ("-sass",)), ("nvdisasm", ("-c", "-hex"))):
            if program := shutil.which(name, path=place):
                yield [program, *options]


def disassembly(cubin: bytes, folder: Path) -> str:
    """A cubin's machine code as text, empty where no program can tell. `folder` is written to."""
    (path := folder / "kernel.bin").write_bytes(cubin)
    for command in disassemblers():
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        if done.returncode == 0 and SASS.search(done.stdout):
            return done.stdout
    return ""


@contextmanager
def kept_code() -> Iterator[Callable[[Compiled], dict[str, str]]]:
    """Keep the code of a kernel that is built in the context. Gives a function that reads it there,
    as ptx and sass."""
    with tempfile.TemporaryDirectory() as folder, compile_lock():

        def read(compiled: Compiled) -> dict[str, str]:
            function: Any = compiled.function
            text = disassembly(function.__cubin__, Path(folder))
            return {"ptx": function.__ptx__, "sass": text}

        say_build()
        with compiler_keeps(f"--keep-cubin --keep-ptx --dump-dir={folder}"):
            yield read
