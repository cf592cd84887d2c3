"""Replacement of torch's `flex_attention` by this package's."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.nn.attention import flex_attention as torch_module

from flash_mask_cute.flex.attention import flex_attention

_NAME = "flex_attention"


class patch_flex_attention:
    """Replace `torch.nn.attention.flex_attention.flex_attention` by this package's function.

    Called as a function, the replacement is permanent; `with patch_flex_attention():` restores
    torch's function at the end. Code that already imported torch's function by name keeps it.

    Example:
        >>> with patch_flex_attention():
        ...     model(tokens)
    """

    def __init__(self) -> None:
        self._before: Any = torch_module.flex_attention
        setattr(torch_module, _NAME, flex_attention)

    def __enter__(self) -> patch_flex_attention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        setattr(torch_module, _NAME, self._before)
