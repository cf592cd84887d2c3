"""Small kernels of CuTe DSL on the software GPU against torch, in order and with delays."""

import pytest
from own_process import run_program


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kernel", ["attention", "softmax", "host"])
def test_against_torch(kernel, arch):
    run_program("small_kernels.py", kernel, arch, arch=arch)
