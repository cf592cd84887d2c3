"""The kernels of the backward compiled and called without the host path, as an example does it."""

from __future__ import annotations

from types import ModuleType

import pytest
from cases import Case
from eager import assert_gradients_close
from example_modules import ROOT, load_example
from inputs import make_inputs, make_output_gradients
from quiet_runs import quiet_run

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def test_example(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example(ROOT / "examples" / "10_native_backward.py", monkeypatch)
    kernels = example.compile_kernels(128)
    for case in (
        Case("gqa2", 1, 200, 200, 4, 2, causal=True),
        Case("more", 2, 65, 65, causal=True),
    ):
        inputs = make_inputs(case)
        out, lse = inputs.reference[0].to(inputs.q.dtype), inputs.reference[1].float().contiguous()
        dout, _ = make_output_gradients(inputs)
        with quiet_run(simulator, launches=3):
            found = example.backward(kernels, inputs.q, inputs.k, inputs.v, out, lse, dout)
        gradients = dict(zip(("dq", "dk", "dv"), found, strict=True))
        assert_gradients_close(gradients, inputs, dout, None)
