"""Masks as a caller holds them: `ColumnMask`, its builders, and what is made of one."""
