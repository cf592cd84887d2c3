"""What may hold before an instruction, on some path through the text of a kernel."""


def follow(instrs, step) -> None:
    """Calls step(instruction, facts), which returns the facts after it, on all paths.

    facts: a dict, empty at the beginning. Where paths meet, the facts of all hold; of one key the
    first value counts. An instruction is visited again when there are new keys.
    """
    leaders = {i.target for i in instrs} | {
        pc + 1 for pc, i in enumerate(instrs) if i.target is not None
    }
    states, work = {0: {}}, [0]
    while work:
        pc = work.pop()
        facts = dict(states[pc])
        while pc < len(instrs):
            i = instrs[pc]
            facts = step(i, facts)
            ends = i.pred is None and (i.target is not None or i.mods[0] in ("ret", "exit", "trap"))
            if i.target is not None or pc + 1 in leaders:
                for n in ([] if i.target is None else [i.target]) + ([] if ends else [pc + 1]):
                    old = states.get(n)
                    if old is None or not facts.keys() <= old.keys():
                        states[n] = facts | (old or {})
                        work.append(n)
                break
            if ends:
                break
            pc += 1
