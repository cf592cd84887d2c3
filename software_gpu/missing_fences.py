"""tcgen05.fence that is missing beside a barrier, found in the text of a kernel.

A thread that hands tensor memory to others fences between its tcgen05 work and the arrival
(before_thread_sync). One that gets it fences between the wait and its tcgen05 work
(after_thread_sync). The text does not say what a barrier is for: any arrival counts that comes
first behind such work, and any wait that comes last before it. Work is loads and stores, and for
waits also products with operand A in tensor memory. The other operands are in shared memory, and
no tcgen05.fence orders that.
"""

from functools import partial

from .paths import follow

BEFORE, AFTER = "fence::before_thread_sync", "fence::after_thread_sync"
WORK, WAIT = "work", "wait"


def _is_work(i) -> bool:
    return i.mods[:2] in (["tcgen05", "ld"], ["tcgen05", "st"])


def _multiplies_tensor_memory(i) -> bool:
    return i.mods[:2] == ["tcgen05", "mma"] and hasattr(i.args[1], "coords")


def _arrives(i) -> bool:
    m = i.mods
    if m[0] == "mbarrier":
        return m[1].startswith("arrive")
    if m[:2] == ["barrier", "cluster"]:
        return "arrive" in m
    return _is_named_barrier(i)


def _waits(i) -> bool:
    m = i.mods
    if m[0] == "mbarrier":
        return m[1] in ("try_wait", "test_wait")
    if m[:2] == ["barrier", "cluster"]:
        return "wait" in m
    return _is_named_barrier(i) and "arrive" not in m


def _is_named_barrier(i) -> bool:
    return i.mods[0] in ("bar", "barrier") and "warp" not in i.mods and "cluster" not in i.mods


def _pass(found: dict, i, facts: dict) -> dict:
    """{WORK: the first work, WAIT: the last wait that no fence follows yet}."""
    if BEFORE in i.mods:
        return {key: x for key, x in facts.items() if key != WORK}
    if AFTER in i.mods:
        return {key: x for key, x in facts.items() if key != WAIT}
    if WAIT in facts and (_is_work(i) or _multiplies_tensor_memory(i)):
        found.setdefault(
            (i.line, WAIT),
            (i, f"follows the wait of line {facts[WAIT].line} without a tcgen05.{AFTER} between"),
        )
    if WORK in facts and _arrives(i):
        work = facts[WORK]
        found.setdefault(
            (i.line, WORK),
            (i, f"follows the {work.mods[0]}.{work.mods[1]} of line {work.line} without a "
            f"tcgen05.{BEFORE} between"),
        )  # fmt: skip
    if _is_work(i):
        facts = {WORK: i} | facts
    if _waits(i):
        facts = facts | {WAIT: i}
    return facts


def missing_fences(instrs) -> list:
    """Where a tcgen05.fence is missing on some path: [(instruction, what it follows)]."""
    found: dict = {}
    if any(i.mods[0] == "tcgen05" for i in instrs):
        follow(instrs, partial(_pass, found))
    return [found[key] for key in sorted(found)]
