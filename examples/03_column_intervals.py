"""Column intervals: a mask of any length in a few bytes a key (FlashMask).

    python examples/03_column_intervals.py

Preference data, packed: each document is a question and several answers to it, which must not see
each other. A builder makes the mask, the same numbers are then written out by hand, and a window is
put on top. Checked against attention written out in float64. Runs on a Hopper GPU where there is
one, else on the CPU. Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import check, pick_device
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func

# tokens of [question, answer, answer, ...] of each document
DOCUMENTS_GPU = [[700, 300, 205], [100, 60, 61, 62, 1], [900, 511, 1000, 196]]
DOCUMENTS_CPU = [[70, 30, 25], [60, 31, 33, 1], [90, 60]]


def visible_by_definition(documents: list[list[int]]) -> Tensor:
    """bool (seqlen, seqlen): k <= q in one document, k in its question or in q's own answer."""
    document_of, part_of = [], []
    for number, parts in enumerate(documents):
        for part, length in enumerate(parts):
            document_of += [number] * length
            part_of += [part] * length
    document, part_of_token = torch.tensor(document_of), torch.tensor(part_of)
    shares_part = (part_of_token == 0) | (part_of_token == part_of_token[:, None])
    row = torch.arange(len(document))
    return (row <= row[:, None]) & (document == document[:, None]) & shares_part


def hidden_from_row(documents: list[list[int]]) -> Tensor:
    """What `builders.share_question` makes, int32 (1, 1, seqlen, 1): the row from which on a key is
    hidden. For a key of a question that is where the document ends, for one of an answer where the
    answer does. Causality hides the rows before a key."""
    starts_hiding: list[int] = []
    at = 0
    for question, *answers in documents:
        starts_hiding += [at + question + sum(answers)] * question
        at += question
        for answer in answers:
            at += answer
            starts_hiding += [at] * answer
    return torch.tensor(starts_hiding, dtype=torch.int32).view(1, 1, -1, 1)


def main() -> None:
    device = pick_device()
    on_gpu = device.type == "cuda"
    documents = DOCUMENTS_GPU if on_gpu else DOCUMENTS_CPU
    heads_q, heads_kv, d, window = (16, 4, 128, 400) if on_gpu else (4, 2, 64, 50)
    seqlen = sum(map(sum, documents))
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, seqlen, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    visible = visible_by_definition(documents).to(device)

    mask = builders.share_question(documents, device=device)
    num_bytes = mask.startend_row_indices.numel() * mask.startend_row_indices.element_size()
    print(f"{seqlen} tokens in {len(documents)} documents, {visible.float().mean():.0%} visible")
    print(f"the mask takes {num_bytes} bytes, as a dense bool tensor {visible.numel()}")

    # one object for all layers: what is known about its blocks of keys is computed once
    out = flash_attn_func(q, k, v, startend_row_indices=mask)
    check("03_column_intervals", "built by name", out, q, k, v, visible)

    indices = hidden_from_row(documents).to(device)
    out = flash_attn_func(q, k, v, startend_row_indices=ColumnMask(indices, causal=True))
    check("03_column_intervals", "written by hand", out, q, k, v, visible)

    out = flash_attn_func(q, k, v, startend_row_indices=mask, window_size=(window, None))
    row = torch.arange(seqlen, device=device)
    in_window = row >= row[:, None] - window
    check("03_column_intervals", f"and a window of {window}", out, q, k, v, visible & in_window)


if __name__ == "__main__":
    main()
