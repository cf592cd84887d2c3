"""python -m lab.model: what a block of the Blackwell kernels costs, by counting.

Compiles them for sm_100a, takes the loop of each role out of the machine code, and counts
instructions and bytes of shared memory for a block of 128 queries (256 in the forward) by 128 keys.
At the published rates of a B200 these give the share of time in which the tensor cores are busy, at
best. Events (`lab.events`) add what waits for what. flash-attn-4 stands beside them, by
the same model and recorded counts (`lab.recorded_peer`). All is predicted, never measured.

It needs `nvdisasm` or `cuobjdump`, where `bench.codegen` finds them. `--out` keeps the rows;
`--kept` prints the tables of those that are kept, without a compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench import ROOT, Json, commit_here
from bench.codegen_variants import VARIANTS, AttentionVariant, compile_variant
from bench.rows import row_line
from flash_mask_cute.call.problem import TuningClass
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import select_bwd_config
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.machine_code import disassembly
from flash_mask_cute.runtime.target import Target
from lab import recorded_peer
from lab.events import (
    DS_PHASE,
    EXCHANGE,
    RATES,
    Backward,
    FoldedPair,
    Forward,
    Rates,
    WidePair,
    products,
)
from lab.machine_code import Code

KEPT = ROOT / "lab" / "results" / "blackwell_model.jsonl"
NAMES = tuple(
    f"sm100-bwd-d{d}-{mask}"
    for d in ("64", "96", "128-alone", "128")
    for mask in ("full", "causal")
)
FORWARD_NAMES = tuple(
    f"sm100-d{d}-{mask}"
    for d in ("64", "96", "128", "192v128", "256")
    for mask in ("full", "causal")
)
SHOWN = (
    *("MUFU", "FFMA2", "FADD2", "FMUL2", "F2FP", "LDTM", "STTM", "LDS", "STS", "SYNCS", "BAR"),
    *("UTCHMMA", "UTCBAR", "UBLKRED", "UTMALDG"),
)
# Of an SM of a B200, in a clock: bf16 operations of the tensor cores, exponentials, operations of
# the fp32 pipe, bytes of shared memory (the paper of FlashAttention-4, arXiv 2603.05451).
TENSOR, EXPONENTIALS, FP32, SHARED = 8192, 16, 128, 128
# rows and columns of a block, lanes, bytes of a vector, and columns of a step of a product
BLOCK, THREADS_OF_WARP, VECTOR, STEP = 128, 32, 16, 16
# of UTCHMMA, those whose operand A is in shared memory and not in tensor memory
FROM_SHARED = "UTCHMMA with A in shared memory"
# commits of a block: S, dQ, Q that was read, dP, dO that was read; of a pair, Q that was read by
# rows and by columns
COMMITS_OF_BLOCK = {1: 5, 2: 6}
# stores of the first part of P: 32 words, and 16
STORES_OF_PART = 2
# instructions between the exponentials of a body, at most, and exponentials of what is no body
NEIGHBOURS, FEW = 60, 50
# bytes in 1000 clocks that L2 adds for each of 148 SMs, at 2.1 KB a clock as on an H200
L2_ADDS = 2_100_000 // 148
NO_DISASSEMBLER = "no nvdisasm and no cuobjdump that knows sm_100a"


class Parts(NamedTuple):
    """Roles in the order of their code, each from its request for registers on."""

    compute: int = 0
    reduce: int = 1
    helpers: int = 2


PARTS = Parts()


class Warps(NamedTuple):
    """How many warps take part in a block."""

    compute: int = 8
    reduce: int = 4


WARPS = Warps()


def part_of(firsts: Sequence[int], place: int) -> int:
    """Which part of the code that begins at one of `firsts` a place is in; -1 before them."""
    return bisect_right(firsts, place) - 1


# -- what a block costs ---------------------------------------------------------------------------


def _count(
    code: Code,
    places: Sequence[int],
    wanted: tuple[str, int] | None = None,
    rounds: Sequence[int] = (),
) -> Counter[str]:
    """Opcodes of the loop through these places; wanted: how often one of them runs, rolled loops
    included, each of which is gone through twice, or as `rounds` says in their order."""
    # not from within a loop of the way
    way = code.loop_through([places[-1], *places[:-1]])
    counts = code.count(way)
    if wanted is not None and counts[wanted[0]] < wanted[1]:
        rolled = [x for x in code.inner_loops(way) if code.count(x)[wanted[0]]]
        for i, inner in enumerate(sorted(rolled)):
            again = (rounds[i] if rounds else 2) - 1
            for _ in range(again):
                counts += code.count(inner)
                way += inner
    if wanted is not None and counts[wanted[0]] != wanted[1]:
        raise ValueError(f"{wanted[0]} {counts[wanted[0]]} in the loop, {wanted[1]} expected")
    counts["instructions"] = sum(counts.values())
    counts[FROM_SHARED] = sum(
        code.instructions[i].opcode == "UTCHMMA" and code.instructions[i].operands[0] == "g"
        for i in way
    )
    return counts


def count_roles(text: str, tile_d: int, tile_dv: int, ctas: int = 1) -> dict[str, dict[str, int]]:
    """Instructions of a warp for a block, by role, out of a disassembly.

    ctas: those of a pair, of which one issues the products of both.

    The parts of the code follow each other as the kernel's branches do. A way that never waits is
    taken, within a walk: from a query block to the next.

    Raises ValueError where the code is not what the kernel's plan says.
    """
    code = Code.create(text)
    firsts = code.where(lambda x: x.opcode == "USETMAXREG")

    def with_query_chunk(part: int, *opcodes: str) -> list[int]:
        found = code.where(lambda x: x.opcode in opcodes)
        return [i for i in found if part_of(firsts, i) == part]

    exponentials = [
        i for i in with_query_chunk(PARTS.compute, "MUFU") if code.instructions[i].kind == ".EX2"
    ]
    per_block = BLOCK // 2
    if len(exponentials) != 2 * per_block:
        raise ValueError(f"{len(exponentials)} exponentials stand in the code, expected 128")
    bodies = [
        _count(code, (exponentials[n], exponentials[n + per_block - 1])) for n in (0, per_block)
    ]
    whole, cut = sorted(bodies, key=lambda counts: counts["instructions"])
    commits = with_query_chunk(PARTS.helpers, "UTCBAR")[: COMMITS_OF_BLOCK[ctas]]
    products = [i for i in with_query_chunk(PARTS.helpers, "UTCHMMA") if i < commits[-1]]
    steps = (tile_d + tile_dv + (2 + ctas) * BLOCK) // STEP
    copies = with_query_chunk(PARTS.helpers, "UTMALDG")
    sums = with_query_chunk(PARTS.helpers, "UBLKRED")
    reduced = with_query_chunk(PARTS.reduce, "LDTM", "FENCE")
    roles = {
        "compute, partial block": cut,
        "compute, full block": whole,
        # a pair's product of dQ, the second one that is rolled, has the keys of both CTAs
        "mma": _count(
            code, sorted((*products, *commits)), ("UTCHMMA", steps), (2, 4, 2) if ctas > 1 else ()
        ),
        "reduce": _count(code, reduced, ("LDTM", tile_d // 32)),
        "send": _count(code, sums),
        # the second half brings keys and values; a pair brings them between the others, on ways of
        # their own
        "load": _count(code, copies[: len(copies) // 2 if ctas == 1 else 1]),
    }
    kept = ("instructions", *SHOWN, FROM_SHARED)
    return {
        role: {op: counts[op] for op in kept if counts[op] or op == "BAR"}
        for role, counts in roles.items()
    }


def shared_bytes(
    roles: dict[str, dict[str, int]], tile_d: int, tile_dv: int, ctas: int = 1
) -> dict[str, int]:
    """Bytes that a whole block moves in and out of shared memory of a CTA.

    operands: those of the five products that are not in TMEM. statistics: LSE and delta, which all
    lanes of a warp read at once, so an instruction moves one line.
    """
    rows = 2 * BLOCK  # bytes of a column of 128 rows in 16 bits
    # of a pair, dQ has half as many rows, and each CTA has half of operand B, of dQ over the keys
    # of both
    steps_of_dq = BLOCK * ctas // STEP
    full_rows = roles["mma"][FROM_SHARED] - steps_of_dq
    operands_a = full_rows * rows * STEP + steps_of_dq * rows // ctas * STEP
    operands_b = rows * (2 * tile_d + 2 * tile_dv) // ctas + rows * tile_d
    line = VECTOR * THREADS_OF_WARP
    compute = roles["compute, full block"]
    staged = rows * 2 * tile_d // ctas
    # a pair reads half of dS to send it, and writes as much that arrives
    sent = (ctas - 1) * rows * BLOCK
    return {
        "operands": operands_a + operands_b,
        "dS": compute["STS"] * WARPS.compute * line + sent,
        "dQ staged and read": 2 * staged,
        "Q and dO loaded": rows * (tile_d + tile_dv),
        "statistics": compute["LDS"] * WARPS.compute * SHARED,
    }


def cycles(
    roles: dict[str, dict[str, int]], moved: dict[str, int], tile_d: int, tile_dv: int
) -> dict[str, int]:
    """Cycles of an SM that a whole block takes of each resource."""
    flops = 2 * BLOCK * BLOCK * (3 * tile_d + 2 * tile_dv)
    threads = WARPS.compute * THREADS_OF_WARP
    compute = roles["compute, full block"]
    fp32 = 2 * sum(compute[op] for op in ("FFMA2", "FADD2", "FMUL2"))
    return {
        "tensor cores": flops // TENSOR,
        "shared memory": sum(moved.values()) // SHARED,
        "exponentials": compute["MUFU"] * threads // EXPONENTIALS,
        "fp32": fp32 * threads // FP32,
    }


def count_softmax(text: str, polynomial: int) -> dict[str, dict[str, int]]:
    """Instructions of a softmax warp of the forward for a key block, on a way that never waits and
    takes no newer maximum. polynomial: exponentials of 128 that are computed by it.

    Raises ValueError where the code is not as expected.
    """
    code = Code.create(text)
    exponentials = code.where(lambda x: (x.opcode, x.kind) == ("MUFU", ".EX2"))
    whole_count = BLOCK - polynomial
    ends = [i for i, (a, b) in enumerate(pairwise(exponentials)) if b - a > NEIGHBOURS]
    places = zip([0, *(i + 1 for i in ends)], [*ends, len(exponentials) - 1], strict=True)
    runs = [(exponentials[a], exponentials[b], b - a + 1) for a, b in places]
    bodies = [n for n, run in enumerate(runs) if run[2] > FEW]
    if len(bodies) != 2:
        raise ValueError(f"{len(bodies)} loops of exponentials stand in the code, expected 2")
    stores = code.where(lambda x: x.opcode == "STTM")
    # P leaves behind the last exponential of a body, and not where the maximum is searched again;
    # or its first part behind those of that part, and the rest behind the others
    ways = []
    for n in bodies:
        begin, end, count = runs[n]
        way = [begin, end, next(i for i in stores if i > end)]
        if count < whole_count:
            last = runs[n + 1][1]
            behind = [i for i in stores if i > last]
            # first the stores of a part that could not leave early
            way += [last, behind[STORES_OF_PART]]
        ways.append(way)
    whole, cut = sorted((_count(code, way) for way in ways), key=lambda x: x["instructions"])
    kept = ("instructions", *SHOWN, "FMNMX", "FMNMX3", "LOP3", "R2P")
    return {
        role: {op: counts[op] for op in kept if counts[op]}
        for role, counts in (("softmax, full block", whole), ("softmax, partial block", cut))
    }


def _disassembled(name: str) -> tuple[AttentionVariant, Any, dict[str, Any], str]:
    """The variant, its compiler's facts, its tiles, and its machine code.

    Raises ValueError where no program tells its machine code.
    """
    variant = VARIANTS[name]
    assert isinstance(variant, AttentionVariant)
    with tempfile.TemporaryDirectory() as folder, compile_lock():
        with compiler_keeps(f"--keep-cubin --dump-dir={folder}"):
            compiled, tiles = compile_variant(name)
        function: Any = compiled.function
        text = disassembly(function.__cubin__, Path(folder))
    if not text:
        raise ValueError(NO_DISASSEMBLER)
    kept = {key: compiled.meta[key] for key in ("registers", "spill_bytes")}
    return variant, kept, tiles, text


def row_of(name: str) -> Json:
    """Compile a variant now; its row, less the commit.

    plan: what the events depend on, as `Backward` has it.
    Raises ValueError where no program tells its machine code.
    """
    variant, kept, tiles, text = _disassembled(name)
    dims = variant.problem.head_dim, variant.problem.head_dim_v
    ctas = 1 + tiles["cta_pair"]
    roles = count_roles(text, *dims, ctas)
    moved = shared_bytes(roles, *dims, ctas)
    taken = cycles(roles, moved, *dims)
    share = round(taken["tensor cores"] / max(taken.values()), 4)
    return {
        "name": name, **kept, "plan": _plan(*dims, tiles), "roles": roles, "shared_bytes": moved,
        "cycles": taken, "predicted_tensor_share": share,
    }  # fmt: skip


def _plan(d: int, d_v: int, tiles: dict[str, Any]) -> Json:
    from cutlass import BFloat16

    from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

    traits = BwdTraits(BFloat16, d, d_v, stages_do=tiles["stages_do"], cta_pair=tiles["cta_pair"])
    return {
        "order": "dV' S dK' dQ' dP" if traits.values_lag else "S dK' dQ' dV dP",
        "over": "dP" if traits.dq_shares else "",
        "part_bytes": [traits.size_dq(width) * 4 for width in traits.parts_dq],
        "held": traits.held_parts,
        "claims": not tiles["clears_dq"],
        "stages_do": tiles["stages_do"],
        "exchange": EXCHANGE if traits.cta_pair else 0,
    }


def forward_row_of(name: str) -> Json:
    """As `row_of`, of a forward."""
    variant, kept, tiles, text = _disassembled(name)
    dims = variant.problem.head_dim, variant.problem.head_dim_v
    plan = {key: tiles[key] for key in ("num_stages", "cta_pair")}
    plan["early"] = _still_to_come(dims[1], tiles["polynomial"])
    roles = count_softmax(text, tiles["polynomial"])
    return {"name": name, **kept, "dims": dims, "plan": plan, "roles": roles}


# -- wide heads, by arithmetic alone --------------------------------------------------------------

# blocks of 64 queries; a launch for dV of its own above 448 columns
WIDE = ((192, 128), (192, 192), (256, 256))


class Launch(NamedTuple):
    """shared: bytes that a block of tile_m queries moves, which takes `tensor` cycles of products.
    added: bytes of its dQ. column: cycles of a product, for each column of its result or its sum.
    """

    model: Backward | WidePair | FoldedPair
    shared: int
    tensor: int
    added: int
    column: int


def wide_launches(d: int, d_v: int, cta_pair: bool = False) -> list[Launch]:
    """What a block costs in each launch, from the plan of the kernel.

    Products with 64 rows, those of dQ, run at half of the rate, and read dS once for each half of
    the columns.
    """
    from cutlass import BFloat16

    from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

    kernel = arch_spec(Target.named("sm_100a")).backward
    asked = BwdConfig(cta_pair=cta_pair)
    tiles = select_bwd_config(d, d_v, TuningClass.FULL, asked, kernel=kernel).tiles
    stages = tiles.stages_q, tiles.stages_do
    traits = BwdTraits(BFloat16, d, d_v, tiles.tile_m, *stages, cta_pair=cta_pair)
    return [_launch(x) for x in traits.launches()]


def _launch(x: Any) -> Launch:
    """A CTA's part of a block. Of a pair, it reads half of each operand B, and dS of half of the
    queries is read to be sent, and written where it arrives. At 256, P and dS are operands A, and
    half of dS is written twice."""
    d, d_v, of_dv, of_dk = x.tile_d, x.tile_dv, x.makes_dv, x.makes_dk
    order = "S dK' dQ' dV dP"
    if x.is_serial:
        order = " ".join(["S", *["dP"] * of_dk, *["dV"] * of_dv, *["dK", "dQ"] * of_dk])
    column, ctas = 2 * x.tile_m * x.tile_n // TENSOR, x.group.size
    taken = {"S": d, "dP": d_v, "dV": d_v, "dK": d, "dQ": (2 if x.halves_blocks else 1) * d}
    # operands: K, V, and K of dQ; Q, dO, and both of the sums
    keys = 2 * x.tile_n * (d + of_dk * (d_v + d))
    queries = 2 * x.tile_m * (d + of_dk * (d_v + d) + of_dv * d_v) // ctas
    grads = of_dk * 2 * x.tile_m * x.tile_n * (ctas + len(x.widths_dq))
    if x.is_folded:
        # both written and read; half of dS written again, read to be sent, and written there
        grads = x.tile_m * x.tile_n * (2 * 4 + 3 + 2)
    sums = of_dk * 2 * x.size_dq(d) * 4
    # of a pair, half of the queries and half of the columns of all
    loads, statistics = (x.bytes_q + x.bytes_do) * ctas, 2 * x.tile_n * x.tile_m
    cycles = {name: column * width for name, width in taken.items()}
    parts = tuple(x.size_dq(width) * 4 for width in x.parts_dq * of_dk)
    exponentials = x.tile_m * x.tile_n // EXPONENTIALS
    model: Backward | WidePair | FoldedPair
    if x.is_folded:
        model = FoldedPair(cycles, exponentials, parts, x.held_parts, EXCHANGE)
    elif x.is_wide_pair:
        model = WidePair(cycles, exponentials, parts, x.parts_over_scores, EXCHANGE)
    else:
        over = "dP" if x.dq_shares and of_dk else "S'" if x.dq_over_scores else ""
        model = Backward(
            products(order, cycles), exponentials, over, parts, x.held_parts, False, x.stages_do,
            x.stages_q, DS_PHASE * x.tile_m // BLOCK,
        )  # fmt: skip
    tensor = sum(cycles[name.rstrip("'")] for name in order.split())
    shared = keys + queries + grads + sums + loads + statistics
    return Launch(model, shared, tensor, sum(parts), column)


def wide_line(d: int, d_v: int, cta_pair: bool = False) -> tuple[str, str, str, str]:
    """A line of the table of predictions: the share of the time that five products would take at
    the full rate."""
    launches = wide_launches(d, d_v, cta_pair)
    column = launches[0].column
    name = f"d{d}" if d == d_v else f"d{d}/{d_v}"
    needed = column * (3 * d + 2 * d_v)
    least = [max(x.shared // SHARED, x.tensor) for x in launches]

    def taken(rates: Rates) -> float:
        each = zip(least, launches, strict=True)
        return sum(max(at_least, x.model.period(rates)) for at_least, x in each)

    shares = " / ".join(f"{100 * needed / taken(rates):.0f}" for rates in RATES)
    # of 128 queries, as in the other lines
    adds = sum(x.added for x in launches) * 1000 // L2_ADDS * 4 // column
    name += ", two launches" * (len(launches) > 1) + ", a pair" * cta_pair
    return name, f"{needed / sum(least):.0%}", shares, str(adds)


# -- predictions ----------------------------------------------------------------------------------


def backward_model(row: Json) -> Backward:
    plan, taken = row["plan"], row["cycles"]
    each = dict.fromkeys(("S", "dP", "dV", "dK", "dQ"), taken["tensor cores"] // 5)
    return Backward(
        products(plan["order"], each), taken["exponentials"], plan["over"],
        tuple(plan["part_bytes"]), plan["held"], plan["claims"], plan["stages_do"],
        exchange=plan["exchange"],
    )  # fmt: skip


def _still_to_come(d_v: int, polynomial: int) -> float:
    """Share of the exponentials of a block behind the first part of P: of two halves. Those by
    polynomial, which are others, are in the first part."""
    from flash_mask_cute.sm100.flash_fwd_traits import FIRST_PART

    return round((BLOCK - FIRST_PART) / (BLOCK - polynomial), 4) if d_v <= BLOCK else 0.0


def forward_model(row: Json) -> Forward:
    (d, d_v), plan = row["dims"], row["plan"]
    halves = 2 if d_v <= BLOCK else 1
    exponentials = row["roles"]["softmax, full block"]["MUFU"] * BLOCK // EXPONENTIALS
    return Forward(4 * d, 4 * d_v, exponentials, halves, plan["num_stages"], plan["early"])


def _shares(tensor: int, least: int, model: Backward | Forward, rates: Sequence[Rates]) -> str:
    """Shares of tensor time in percent, over the rates, of which a range is left."""
    shares = [100 * tensor / max(least, model.period(x)) for x in rates]
    return " / ".join(f"{x:.0f}" for x in shares)


# a product's signal is not known better
SIGNALS = tuple(RATES[1]._replace(product_signal=x) for x in (100, 150, 250))


def predictions(rows: Sequence[Json], forward_rows: Sequence[Json]) -> str:
    """Both kernels by one model: the backward, then the forward."""
    lines = []
    for row in rows[1::2]:
        taken = row["cycles"]
        tensor, least = taken["tensor cores"], max(taken.values())
        shares = _shares(tensor, least, backward_model(row), RATES)
        adds = sum(row["plan"]["part_bytes"]) * 1000 // L2_ADDS
        lines.append((_label(row["name"]), f"{tensor / least:.0%}", shares, str(adds)))
    lines += [wide_line(*dims) for dims in WIDE]
    lines += [wide_line(*dims, cta_pair=True) for dims in (WIDE[0], WIDE[-1])]
    for peer in recorded_peer.BACKWARD:
        (d, d_v), least = peer.dims, peer.shared_cycles
        tensor = 4 * (3 * d + 2 * d_v)
        shares = "" if peer.model is None else _shares(tensor, least, peer.model, RATES)
        adds = "" if peer.model is None else str(sum(peer.model.part_bytes) * 1000 // L2_ADDS)
        lines.append((f"flash-attn-4, {peer.label}", f"{tensor / least:.0%}", shares, adds))
    backward = _table(
        ("backward", "by bytes alone, %", "16 KB read in 350 / 600 / 1000 cycles, %",
         "adds at an H200's L2 rate, cycles"),
        lines,
    )  # fmt: skip
    lines = []
    for row in forward_rows:
        model = forward_model(row)
        tensor = model.halves * (model.scores + model.values)
        least = max(tensor, model.halves * model.exponentials)
        shares = _shares(tensor, least, model, SIGNALS)
        label = row["name"].removeprefix("sm100-").replace("v", "/").replace("-", " ")
        label += ", a pair" if row["plan"]["cta_pair"] else ""
        counts = row["roles"]["softmax, full block"], row["roles"]["softmax, partial block"]
        told = " / ".join(str(x["instructions"]) for x in counts)
        lines.append((label, f"{tensor / least:.0%}", shares, told))
    for other in recorded_peer.FORWARD:
        model = recorded_peer.forward_model(other, other.exponentials * BLOCK // EXPONENTIALS)
        tensor = model.halves * (model.scores + model.values)
        least = max(tensor, model.halves * model.exponentials)
        shares = _shares(tensor, least, model, SIGNALS)
        lines.append((f"flash-attn-4, {other.label}", f"{tensor / least:.0%}", shares, ""))
    forward = _table(
        ("forward", "by exponentials alone, %", "a product's signal of 100 / 150 / 250 cycles, %",
         "softmax instructions, full / partial block"),
        lines,
        PEER_SHARE,
    )  # fmt: skip
    return f"{backward}\n\n{forward}"


def read_rows(path: Path = KEPT) -> list[Json]:
    """Those of the backward."""
    return [row for row in _kept(path) if "cycles" in row]


def read_forward_rows(path: Path = KEPT) -> list[Json]:
    return [row for row in _kept(path) if "cycles" not in row]


def _kept(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# beside each printed table
PREDICTED = "Predicted, never measured."
PEER_SHARE = f"""\
{PREDICTED} For flash-attn-4 at 128 the model gives 90 to 96 % where its paper
(arXiv 2603.05451) measures 71 %. The other shares may be as far off."""


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], beside: str = PREDICTED) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join([beside, "", *("| " + " | ".join(cells) + " |" for cells in rows)])


def _label(name: str) -> str:
    label = name.removeprefix("sm100-bwd-").replace("-", " ").replace(" alone", "")
    return label if "-alone" in name or "d128" not in label else f"{label}, a pair"


def tables(rows: Sequence[Json]) -> str:
    """Instructions by role, and the prediction, as the page has them."""
    lines = []
    sources = [(_label(row["name"]), row["roles"]) for row in rows]
    sources.append(("flash-attn-4, d64 causal", recorded_peer.BACKWARD_64_CAUSAL))
    for label, roles in sources:
        for role, counts in roles.items():
            if " full" in label and role != "compute, full block":
                # as with a causal mask
                continue
            told = ", ".join(f"{op} {counts[op]}" for op in SHOWN if op in counts)
            lines.append((label, role, str(counts["instructions"]), told))
    counted = _table(("kernel", "a warp of", "instructions", "of these"), lines)
    kinds, resources = list(rows[0]["shared_bytes"]), list(rows[0]["cycles"])
    of_bytes = _table(
        ("kernel", *(f"{kind}, KB" for kind in kinds), "all, KB"),
        (
            (
                _label(row["name"]),
                *(f"{row['shared_bytes'][kind] / 1024:g}" for kind in kinds),
                f"{sum(row['shared_bytes'].values()) / 1024:g}",
            )
            for row in rows[1::2]
        ),
    )
    predicted = _table(
        ("kernel", *resources, "tensor cores busy at best"),
        (
            (
                _label(row["name"]),
                *(str(row["cycles"][resource]) for resource in resources),
                f"{row['predicted_tensor_share']:.1%}",
            )
            for row in rows[1::2]
        ),
    )
    return "\n\n".join((counted, of_bytes, predicted))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 where no program can tell machine code."""
    parser = argparse.ArgumentParser(prog="python -m lab.model", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows here, over what was there")
    parser.add_argument("--kept", action="store_true", help="print the kept rows, compile nothing")
    options = parser.parse_args(arguments)
    if options.kept:
        rows, forward_rows = read_rows(), read_forward_rows()
        print(f"{tables(rows)}\n\n{predictions(rows, forward_rows)}")
        return 0
    commit = commit_here()
    try:
        rows = [row_of(name) | {"commit": commit} for name in NAMES]
        forward_rows = [forward_row_of(name) | {"commit": commit} for name in FORWARD_NAMES]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{tables(rows)}\n\n{predictions(rows, forward_rows)}")
    if options.out:
        options.out.write_text("".join(map(row_line, [*rows, *forward_rows])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
