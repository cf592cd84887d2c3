"""The fake driver: compiled objects are called on CPU tensors, and their launches recorded."""

import pytest
from own_process import run_program

from software_gpu.kernel_images import param_sizes_from_ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_recorded_launch(arch):
    run_program("recorded_launch.py", arch, arch=arch)


def test_param_sizes():
    sizes = param_sizes_from_ptx(
        ".visible .entry foo(\n .param .align 64 .b8 foo_param_0[128],\n .param .u32 foo_param_1,\n"
        " .param .u64 .ptr .global .align 16 foo_param_2\n)\n.reqntid 384\n{ }\n.entry bar\n()\n{}"
    )
    assert sizes == {"foo": [128, 4, 8], "bar": []}, sizes
