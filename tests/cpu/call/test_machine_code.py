"""Machine code as a graph; kernels do not give away memory that they still read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiled_code import NEEDS_DISASSEMBLER

from bench.codegen_variants import VARIANTS, compile_variant
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.machine_code import disassembly
from flash_mask_cute.sm100 import umma
from lab.machine_code import Code, Instruction, early_arrivals, is_remote

# Hopper's kernels whose two CTAs arrive on each other's mbarriers
CLUSTERS = re.compile(r"(bwd-|decode-)?d(320|384|512)-|decode-d512$|bwd-d192-")
BLACKWELL = tuple(name for name in VARIANTS if re.match(r"sm10[03]-(bwd|d\d)", name))

IN_CLUSTERS = tuple(name for name in VARIANTS if CLUSTERS.match(name))

# Two bodies in a loop, of which one has an inner loop, and a wait with a slow way.
TEXT = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6+0x8], R3 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_2:
        /*0020*/                   BRA.U UP1, `(.L_x_4) ;
        /*0030*/                   MUFU.EX2 R1, R2 ;
        /*0040*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*0050*/                   MUFU.RCP R1, R2 ;
.L_x_6:
        /*0060*/                   UTCHMMA gdesc[UR74], gdesc[UR4], tmem[UR5] ;
        /*0070*/               @P1 BRA `(.L_x_6) ;
.L_x_5:
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_9:
        /*00a0*/                   NOP ;
        /*00b0*/                   BRA `(.L_x_2) ;
"""


def test_ways_through_code() -> None:
    code = Code.create(TEXT)
    assert [x.opcode for x in code.instructions][:3] == ["SYNCS", "BRA", "BRA"]
    (first,) = code.where(lambda x: (x.opcode, x.kind) == ("MUFU", ".EX2"))
    (product,) = code.where(lambda x: x.opcode == "UTCHMMA")
    (end,) = code.where(lambda x: x.opcode == "EXIT")
    # the wait succeeds, and the other body is left out
    assert code.count(code.loop_through([first])) == {"SYNCS": 1, "BRA": 4, "MUFU": 1}
    # a place to itself goes around its inner loop, unless the way has to leave that
    assert code.loop_through([product]) == [product + 1, product]
    way = code.loop_through([0, product])
    assert code.count(way) == {"SYNCS": 1, "BRA": 4, "MUFU": 1, "UTCHMMA": 1}
    assert list(code.inner_loops(way)) == [[product, product + 1]]
    with pytest.raises(ValueError, match=f"no way from instruction {end}"):
        code.way(end, first)


def test_addresses_stand_for_labels() -> None:
    """As cuobjdump prints them."""
    code = Code.create(
        "        /*0000*/                   MUFU.EX2 R1, R2 ;\n"
        "        /*0010*/              @!P0 BRA 0x0 ;\n"
        "        /*0020*/                   EXIT ;\n"
    )
    assert code.following == ((1,), (0, 2), ())


NO_WAIT, WAIT_1, SETS_1 = 0x000FE20000000000, 0x002FE20000000000, 0x000E6200082C0000
# Two loads, of which the second has the scoreboard of both; who uses their results waits for it.
LOADED = (
    ("LDTM.x32 R4, tmem[UR4]", NO_WAIT),
    ("LDTM.x32 R36, tmem[UR4+0x20]", SETS_1),
    ("@P1 BRA 0x40", NO_WAIT),
    ("NOP", WAIT_1),
    ("FADD R4, R4, R5", WAIT_1),
    ("STTM.x16 tmem[UR4], R4", NO_WAIT),
    ("FENCE.VIEW.ASYNC.T", NO_WAIT),
    ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7], RZ", NO_WAIT),
    ("EXIT", NO_WAIT),
)


def as_printed(code: Sequence[tuple[str, int]]) -> str:
    """As nvdisasm -hex does: two words of an instruction, one beside it and one below."""
    return "".join(
        f"        /*{16 * i:04x}*/  {text} ;  /* 0x{0x7918:016x} */\n  /* 0x{upper:016x} */\n"
        for i, (text, upper) in enumerate(code)
    )


def told(code: Sequence[tuple[str, int]]) -> list[str]:
    return [str(x) for x in early_arrivals(Code.create(as_printed(code)))]


def test_control_bits() -> None:
    instructions = Code.create(as_printed(LOADED)).instructions
    assert [x.write_barrier for x in instructions[:3]] == [None, 1, None]
    assert [set(x.waits) for x in instructions[2:5]] == [set(), {1}, {1}]


def test_arrivals_while_tensor_memory_is_in_use() -> None:
    assert told(LOADED) == []
    # only one of two ways waits
    assert told((*LOADED[:4], ("FADD R4, R4, R5", NO_WAIT), *LOADED[5:])) == [
        "SYNCS.ARRIVE at 0070 while the LDTM at 0000 is open",
        "SYNCS.ARRIVE at 0070 while the LDTM at 0010 is open",
    ]
    unfenced = (*LOADED[:6], ("NOP", NO_WAIT), *LOADED[7:])
    assert told(unfenced) == ["SYNCS.ARRIVE at 0070 while the STTM at 0050 is open"]
    with pytest.raises(ValueError, match="no control bits"):
        early_arrivals(Code.create(re.sub(r"/\* 0x\w+ \*/", "", as_printed(LOADED))))


def code_and_ptx(name: str, folder: Path) -> tuple[Code, str]:
    """Machine code and PTX of a variant, compiled now."""
    with compile_lock(), compiler_keeps(f"--keep-cubin --keep-ptx --dump-dir={folder}"):
        compiled, _ = compile_variant(name)
    function: Any = compiled.function
    return Code.create(disassembly(function.__cubin__, folder)), function.__ptx__


# Two loads from shared memory, the first without a scoreboard, and an arrival at the other CTA.
READ = (
    ("LDS.128 R4, [R2]", NO_WAIT),
    ("LDS.128 R8, [R2+0x10]", SETS_1),
    ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7], RZ", NO_WAIT),
    ("FADD R4, R4, R8", WAIT_1),
    ("SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R3+URZ], RZ", NO_WAIT),
    ("EXIT", NO_WAIT),
)


def test_arrivals_at_another_cta_while_shared_memory_is_read() -> None:
    assert told(READ) == []
    early = (*READ[:3], READ[4], READ[3], READ[5])
    assert told(early) == [
        "SYNCS.ARRIVE at 0030 while the LDS at 0000 is open",
        "SYNCS.ARRIVE at 0030 while the LDS at 0010 is open",
    ]


@NEEDS_DISASSEMBLER
@pytest.mark.shares(24)
@pytest.mark.parametrize("name", IN_CLUSTERS)
def test_no_arrival_at_another_cta_while_shared_memory_is_read(name: str, tmp_path: Path) -> None:
    """The software GPU loads in order, so it cannot show such an arrival."""
    code, _ = code_and_ptx(name, tmp_path)
    assert code.where(is_remote)
    assert early_arrivals(code) == []


def without(code: Code, damaged: Callable[[Instruction], Instruction]) -> Code:
    return replace(code, instructions=tuple(map(damaged, code.instructions)))


def waits_for_no_load(x: Instruction, boards: set[int | None]) -> Instruction:
    return x._replace(waits=x.waits - boards) if x.opcode != "LDS" else x


@pytest.mark.shares(3)
@NEEDS_DISASSEMBLER
@pytest.mark.parametrize(
    "name", ["sm100-bwd-d64-full", "sm100-bwd-d96-full", "sm100-bwd-d128-full"]
)
def test_dq_is_released_when_it_is_in_registers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warps that load dQ wait for their loads before they arrive."""
    monkeypatch.setattr(umma, "wait_loads", lambda: None)
    code, _ = code_and_ptx(name, tmp_path)
    assert {x.opcode for x in early_arrivals(code)} == {"LDTM"}


@NEEDS_DISASSEMBLER
@pytest.mark.shares(48)
@pytest.mark.parametrize("name", BLACKWELL)
def test_no_arrival_while_tensor_memory_is_in_use(name: str, tmp_path: Path) -> None:
    """Nor is an mbarrier of the other CTA arrived on for the threads of one CTA only."""
    code, ptx = code_and_ptx(name, tmp_path)
    assert early_arrivals(code) == []
    # the same code without one kind of wait shows that the kind is there and is seen
    boards = {x.write_barrier for x in code.instructions if x.opcode == "LDTM"}
    unread = early_arrivals(without(code, lambda x: waits_for_no_load(x, boards)))
    assert {x.opcode for x in unread} - {"LDS"} == {"LDTM"}
    fence = "FENCE", ".VIEW.ASYNC.T"
    unfenced = without(
        code, lambda x: x._replace(opcode="NOP") if (x.opcode, x.kind) == fence else x
    )
    # folded pairs write P to shared memory alone
    stores = {x.opcode for x in code.instructions} & {"STTM"}
    assert {x.opcode for x in early_arrivals(unfenced)} == stores
    assert stores or "d256v256-pair" in name
    remote = [
        line for line in ptx.splitlines()
        if "mbarrier.arrive" in line and "shared::cluster" in line
    ]  # fmt: skip
    assert all(".cluster.shared::cluster" in line for line in remote), remote
    is_pair = "tcgen05.alloc.cta_group::2" in ptx
    assert bool(remote) == is_pair
