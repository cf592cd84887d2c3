"""Registers of a tcgen05.ld that are read before its wait, found in the text of a kernel."""

from functools import partial

from .operand_access import items
from .paths import follow


def _names(x) -> set[str]:
    """Registers of an operand."""
    if hasattr(x, "name"):
        return {x.name} if hasattr(x, "type") else set()
    parts = (
        [x.base, *(x.coords or ())]
        if hasattr(x, "coords")
        else [x.a, x.b]
        if hasattr(x, "b")
        else items(x) or ()
    )
    return set().union(*map(_names, parts))


def _pass(computed: dict, stored: dict, i, held: dict) -> dict:
    """{register: line of the tcgen05.ld that fills it} after an instruction, given that before."""
    m, args = i.mods, i.args
    if m[0] == "tcgen05" and m[1].startswith("wait") and ("wait::ld" in m or "ld" in m):
        return {}
    if m[:2] == ["tcgen05", "ld"]:
        return held | dict.fromkeys(_names(args[0]), i.line)
    if not held or not args:
        return held
    writes = m[0] not in ("st", "red", "tcgen05", "cp", "call") and not hasattr(args[0], "coords")
    read = [held[r] for x in args[writes:] for r in _names(x) if r in held]
    dst = _names(args[0]) if writes else set()
    if (
        read and m[0] == "mov"
    ):  # hands it on: the compiler packs registers before the wait, at no cost
        return held | dict.fromkeys(dst, read[0])
    if read:
        found = stored if m[0] == "st" or m[:2] == ["tcgen05", "st"] else computed
        found.setdefault(read[0], (i, read[0]))
    return held if i.pred is not None else {r: line for r, line in held.items() if r not in dst}


def unwaited_loads(instrs) -> tuple[list, list]:
    """What may read the registers of a tcgen05.ld before a tcgen05.wait::ld: two lists of
    (instruction, line of the load), one of each load. The second has the loads whose values are
    only stored on, which proven kernels do.
    """
    computed, stored = {}, {}
    if any(i.mods[:2] == ["tcgen05", "ld"] for i in instrs):
        follow(instrs, partial(_pass, computed, stored))
    return (
        [computed[line] for line in sorted(computed)],
        [stored[line] for line in sorted(stored) if line not in computed],
    )
