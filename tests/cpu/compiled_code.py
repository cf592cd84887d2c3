"""What the code of every kernel must be like."""

from __future__ import annotations

from typing import Any


def check_code(
    facts: str, meta: dict[str, Any], counts: dict[str, int], most_spilled: int = 0
) -> None:
    """Nothing spilled, nothing that ptxas warns of, and shared memory that there is."""
    assert meta["spill_bytes"] <= most_spilled, facts
    assert not meta["warnings"], facts
    assert meta["smem_bytes"] <= 232448, facts
    if counts and not most_spilled:
        assert "LDL" not in counts and "STL" not in counts, facts
