"""Registers of a tcgen05.ld that are read before its wait, found in the text of a kernel."""

from .operand_access import items


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


def _pass(i, held: dict, found: dict) -> dict:
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
        found.setdefault(read[0], (i, read[0]))
    return held if i.pred is not None else {r: line for r, line in held.items() if r not in dst}


def unwaited_loads(instrs) -> list:
    """What may read the registers of a tcgen05.ld before a tcgen05.wait::ld: [(instruction, line of
    the load)], one of each load.
    """
    if not any(i.mods[:2] == ["tcgen05", "ld"] for i in instrs):
        return []
    leaders = {i.target for i in instrs} | {
        pc + 1 for pc, i in enumerate(instrs) if i.target is not None
    }
    states, work, found = {0: {}}, [0], {}
    while work:
        pc = work.pop()
        held = dict(states[pc])
        while pc < len(instrs):
            i = instrs[pc]
            held = _pass(i, held, found)
            ends = i.pred is None and (i.target is not None or i.mods[0] in ("ret", "exit", "trap"))
            if i.target is not None or pc + 1 in leaders:
                for n in ([] if i.target is None else [i.target]) + ([] if ends else [pc + 1]):
                    old = states.get(n)
                    if old is None or not held.keys() <= old.keys():
                        states[n] = held | (old or {})
                        work.append(n)
                break
            if ends:
                break
            pc += 1
    return [found[k] for k in sorted(found)]
