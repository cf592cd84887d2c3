"""torch's name for `flex_attention`, made ours."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.nn.attention import flex_attention as torch_module

from flash_mask_cute.flex.attention import flex_attention

_NAME = "flex_attention"


class patch_flex_attention:
    """Make `torch.nn.attention.flex_attention.flex_attention` this package's function.

    Called as a function, it stays so; `with patch_flex_attention():` puts torch's back at the end.
    Code that imported torch's function by name before keeps it.

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
