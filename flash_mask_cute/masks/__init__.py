"""Masks as a caller holds them: `ColumnMask`, its builders, what is made of one, and q_start."""
