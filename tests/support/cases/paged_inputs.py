"""Keys and values of a case, moved into the pages of a pool; what is not in use holds NaN."""

from __future__ import annotations

from dataclasses import replace

import torch
from inputs import Inputs
from torch import Tensor

NAN = float("nan")


def paged(inputs: Inputs, page_size: int, layout: str = "NHD", seed: int = 0) -> Inputs:
    """The call with pools (pages, page_size, heads, d) for k and v, which are dense.

    layout: "NHD", "HND" (heads before rows in memory) or "packed" (k and v side by side). Pages are
    permuted; the rows behind a sequence's end are NaN, as are pages that no sequence has, and the
    table's entries behind an end are no pages.
    """
    generator = torch.Generator().manual_seed(seed)
    k, v = inputs.k, inputs.v
    batch, seqlen = k.shape[:2]
    max_pages = -(-seqlen // page_size)
    num_pages = batch * max_pages + 3
    order = torch.randperm(num_pages, generator=generator)[: batch * max_pages]
    table = order.view(batch, max_pages).int()
    pools = [_pool(x, num_pages, page_size, layout) for x in (k, v)]
    if layout == "packed":
        together = torch.cat(pools, -1).contiguous()
        pools = list(together.split([k.shape[-1], v.shape[-1]], -1))
    used = inputs.keywords["seqused_k"]
    used = torch.full((batch,), seqlen, dtype=torch.int32) if used is None else used.cpu()
    for sequence in range(batch):
        for page in range(max_pages):
            first = page * page_size
            count = min(int(used[sequence]) - first, page_size)
            if count <= 0:
                table[sequence, page] = (-5, 1 << 30)[page % 2]
                continue
            for pool, x in zip(pools, (k, v), strict=True):
                pool[table[sequence, page], :count] = x[sequence, first : first + count].cpu()
    to = inputs.q.device
    more = {"page_table": table.to(to), "seqused_k": used.to(to)}
    if layout != "NHD":
        # `to` would make them contiguous
        assert to.type == "cpu" or all(x.dim() == 4 for x in pools)
    moved = [x.to(to) if layout == "NHD" else _moved(x, to) for x in pools]
    # the oracle reads what lies in rows
    oracle = replace(inputs, plain_keywords=inputs.plain_keywords | {"seqused_k": used.to(to)})
    result = replace(inputs, k=moved[0], v=moved[1], plain_keywords=inputs.plain_keywords | more)
    result.__dict__["reference"] = oracle.reference
    result.__dict__["eager"] = oracle.eager
    return result


def _pool(x: Tensor, num_pages: int, page_size: int, layout: str) -> Tensor:
    heads, dim = x.shape[2:]
    if layout == "HND":
        return x.new_full((num_pages, heads, page_size, dim), NAN).cpu().transpose(1, 2)
    return x.new_full((num_pages, page_size, heads, dim), NAN).cpu()


def _moved(x: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return new.copy_(x)
