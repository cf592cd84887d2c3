"""Libraries that a module of `integrations` is for: which release is there, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_mask_cute.runtime import packages

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("release", "is_taken"),
    [
        ("5.17.0", True),
        ("5.17", True),
        ("5.100.1", True),
        ("6.0.0.dev0", True),
        ("5.16.9", False),
        ("4.57.1", False),
        ("5.9.0", False),
        (None, False),
    ],
)
def test_the_oldest_release(
    release: str | None, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "release_of_extra", lambda package: release)
    if is_taken:
        packages.require_extra("transformers")
        return
    said = rf"needs transformers 5\.17 or later.*found {release or 'none'}: pip install"
    with pytest.raises(ImportError, match=said):
        packages.require_extra("transformers")


def test_pyproject_has_an_extra_for_each() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, releases in packages.EXTRAS.items():
        assert f'{package} = ["{package}>={releases.first}"]' in text
