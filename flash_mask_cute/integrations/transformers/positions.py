"""A warning for packed documents that a mask does not separate.

With `use_cache=True`, the default, transformers reads no documents from position_ids.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.integrations.transformers.masks import AttentionMask
from flash_mask_cute.lowering.watch import is_capturing
from flash_mask_cute.runtime.warn_once import warn_once

_TEXT = (
    "position_ids begin anew inside a row, and the mask of this forward does not separate the "
    "documents: transformers finds them only without a cache and without attention_mask. Call the "
    "model with use_cache=False, or pass cu_seq_lens_q and cu_seq_lens_k, as "
    "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does (said once)"
)
_pending: deque[tuple[Tensor, Any]] = deque()
"""Answers on their way from a GPU: pinned bool (1,), and the event after the copy. Several threads
may take from it."""
_said: list[bool] = []


def watch_positions(mask: AttentionMask, position_ids: Tensor | None) -> None:
    """Warn once if position_ids (batch or 1, queries) begin anew below a mask that is a window.

    It looks at each mask once, and not inside torch.compile. It does not wait for a GPU: a later
    layer or call reads the answer and warns.
    """
    if _said or torch.compiler.is_compiling():
        return
    _read_answers()
    if position_ids is None or position_ids.dim() != 2 or mask.has_known_positions:
        return
    num_rows, num_keys = mask.shape[2:]
    if not 1 < num_rows == num_keys == position_ids.shape[1] or is_capturing():
        return
    mask.has_known_positions = True
    # padding repeats a number, and a document begins with a smaller one
    begins = (position_ids[:, 1:] < position_ids[:, :-1]).any().view(1)
    if not begins.is_cuda:
        _warn_if(begins)
        return
    answer = torch.empty(1, dtype=torch.bool, device="cpu", pin_memory=True)
    answer.copy_(begins, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(begins.device))
    _pending.append((answer, event))


def _read_answers() -> None:
    while _pending:
        try:
            answer, event = _pending.popleft()
        except IndexError:  # another thread took the last one
            return
        if not event.query():
            _pending.appendleft((answer, event))
            return
        _warn_if(answer)


def _warn_if(begins: Tensor) -> None:
    if bool(begins) and not _said:
        _said.append(True)
        _pending.clear()
        warn_once("transformers: packed positions", _TEXT)
