"""What nobody may see reaches no result of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import Case
from devices import Device
from unseen_memory import VALUES, with_empty
from unseen_memory_on_devices import (  # noqa: F401
    check,
    test_in_a_fixed_order,
    test_padding_behind_documents,
    test_rows_of_queries_that_see_nothing,
    test_rows_that_are_not_in_use,
)

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
test_rows_that_are_not_in_use, test_rows_of_queries_that_see_nothing = map(
    pytest.mark.shares(2), (test_rows_that_are_not_in_use, test_rows_of_queries_that_see_nothing)
)


def test_long_walks(device: Device) -> None:
    """Many blocks of each kind in flight, of which every seventh query is hostile."""
    case = Case("long", 1, 3000, 3000, 8, 2, mask_mod="blinding")
    inputs = device.inputs(case)
    check(device, inputs, with_empty(inputs, VALUES["nan"]))
    inputs = device.inputs(replace(case, mask_mod=None, causal=True, seqlen_k=1500))
    check(device, inputs, with_empty(inputs, VALUES["inf"]))
