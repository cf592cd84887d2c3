"""Registers of the threads of the Blackwell backward, by role."""

from typing import NamedTuple

from flash_mask_cute.core.cta import registers_left

NUM_WARPGROUPS = 5
# warpgroups that share the queries of a block
HALVES = 2
MASK_REGISTERS = 48
# columns of dQ that a reduce thread holds, at most
MOST_HELD = 64


class Registers(NamedTuple):
    """Registers of a thread that computes, and of one that reduces."""

    compute: int
    reduce: int

    @property
    def of_helpers(self) -> int:
        """Registers of a thread that loads, multiplies, schedules or sends."""
        taken = HALVES * self.compute + self.reduce + MASK_REGISTERS
        return registers_left(NUM_WARPGROUPS, taken)


REGISTERS = Registers(152, 96)
# for a soft cap, and for lists beside intervals or in a fixed order: with fewer they spill
MORE_FOR_SCORES = Registers(176, 48)
# for products that take operands of two CTAs, whose descriptors need more registers
PAIR_REGISTERS = Registers(144, 96)
# for half as many queries of a block
WIDE_REGISTERS = Registers(128, 112)
