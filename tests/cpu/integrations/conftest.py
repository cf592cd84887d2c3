from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.nn import attention

from flash_mask_cute.integrations import aten_flash, ran


@pytest.fixture
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that are given once in a process are given again."""
    monkeypatch.setattr("flash_mask_cute.runtime.warn_once._given", set())


@pytest.fixture
def activated_on_cpu() -> Iterator[None]:
    """This package computes torch's operators of flash attention for CPU tensors, too."""
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("this version of torch has no registry of flash attention")
    attention.register_flash_attention_impl(
        "mask_cute_on_cpu", register_fn=lambda: aten_flash.Activated("CPU")
    )
    attention.activate_flash_attention_impl("mask_cute_on_cpu")
    yield
    attention.restore_flash_attention_impl()
    assert not ran._records
