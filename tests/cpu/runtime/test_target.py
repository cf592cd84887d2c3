"""Which devices there are kernels for, and for which of them a call is compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_mask_cute import interface
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.runtime.target import Target, _of_index


def device(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> torch.device:
    """A CUDA device, as far as its properties are asked for."""
    properties = SimpleNamespace(name="a GPU", major=major, minor=minor, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    _of_index.cache_clear()
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "arch", "name"),
    [
        ((9, 0), "sm_90a", "Hopper"),
        ((10, 0), "sm_100a", "Blackwell"),
        ((10, 3), "sm_103a", "Blackwell"),
    ],
)
def test_devices_with_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str, name: str
) -> None:
    target = Target.from_device(device(monkeypatch, *capability))
    assert target == Target(arch, num_sms=7)
    assert arch_spec(target).name == name
    assert arch_spec(Target.named(arch)).name == name
    _of_index.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (12, 0)])
def test_other_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    found = "compute capability {}.{}".format(*capability)
    with pytest.raises(NotImplementedError, match=found):
        Target.from_device(device(monkeypatch, *capability))
    _of_index.cache_clear()


def test_an_unknown_target_is_named() -> None:
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one of sm_90a, sm_100a, sm_103a, got 'sm_80'"):
        interface.explain(q, q, q, target="sm_80")


@pytest.mark.shares(6)
def test_explain_for_a_device_that_is_not_there() -> None:
    q = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)
    explanation = interface.explain(q, q, q, causal=True, target="sm_100a")
    assert explanation.kernel == "FlashAttentionForwardSm100"
    assert explanation.arch == "sm_100a"
    assert (explanation.tiles.tile_m, explanation.tiles.tile_n) == (256, 128)
    # two query tiles a head: rows 0..255 see key tiles 0 and 1, cut both, the others also tile 2
    assert explanation.work_tiles == 4
    assert explanation.partial_key_tiles == 2 * (2 + 1)
    assert explanation.full_key_tiles == 2 * 2
    assert explanation.empty_key_tiles == 2 * 1
    assert explanation.spill_bytes == 0
    # without a mask a pair of CTAs takes both tiles of a head, which see three key tiles
    explanation = interface.explain(q, q, q, target="sm_100a")
    assert explanation.tiles.cta_pair and "walk over the keys together" in str(explanation)
    assert (explanation.work_tiles, explanation.grid) == (2, 4)
    assert (explanation.full_key_tiles, explanation.partial_key_tiles) == (2 * 2, 2 * 1)
    # any head dimension runs, by rounding
    narrow = interface.explain(q[..., :72], q[..., :72], q[..., :72], target="sm_100a")
    assert narrow.kernel == "FlashAttentionForwardSm100" and narrow.spill_bytes == 0


@pytest.mark.parametrize(("arch", "error"), [("sm_80", ValueError), (90, TypeError)])
def test_an_unknown_target_names_those_that_exist(arch: object, error: type[Exception]) -> None:
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(error, match="target must be one of sm_90a, sm_100a, sm_103a, got"):
        interface.explain(q, q, q, target=arch)
