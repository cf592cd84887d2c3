"""What to write in place of an operator that has no CuTe text."""

from __future__ import annotations

_BEFORE = (
    "compute it before the call, of captured tensors, and read the result by b, h, q_idx, kv_idx"
)
_ONE_NUMBER = (
    "nothing replaces it for a score; for what takes few values, such as a distance, compute a "
    "table before the call and read table[distance]"
)
_BY_SUM = "write the sum, (x[q_idx] * y[kv_idx]).sum(), of up to 256 elements"
_BY_INDEX = "index by brackets, x[index]"

_ADVICE = {
    **dict.fromkeys(("acosh", "arccosh"), "write torch.log(x + torch.sqrt(x * x - 1))"),
    **dict.fromkeys(("atanh", "arctanh"), "write 0.5 * torch.log((1 + x) / (1 - x))"),
    **dict.fromkeys(("erfc", "special_erfc"), "write 1 - torch.erf(x)"),
    **dict.fromkeys(
        ("erfinv", "erf_inv", "special_erfinv"),
        "read a table: table = torch.linspace(-1, 1, 4097)[1:-1].erfinv() before the call, and in "
        "the mod table[((x + 1) * 2048).round().int().clamp(1, 4095) - 1]",
    ),
    "nextafter": "nothing replaces it: a score is rounded by more than such a step",
    **dict.fromkeys(("lgamma", "digamma", "polygamma", "igamma", "igammac", "i0"), _ONE_NUMBER),
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm", "einsum"), _BY_SUM),
    **dict.fromkeys(("gather", "index_select", "take", "take_along_dim", "embedding"), _BY_INDEX),
    **dict.fromkeys(("sort", "topk", "argsort", "unique", "kthvalue", "median", "mode"), _BEFORE),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), _BEFORE),
    **dict.fromkeys(
        ("argmax", "argmin"), f"{_BEFORE}; of two numbers write torch.where(x > y, 0, 1)"
    ),
    **dict.fromkeys(
        ("scatter", "index_put", "index_fill", "masked_scatter", "select_scatter", "slice_scatter"),
        "write torch.where(index == place, value, x)",
    ),
    **dict.fromkeys(
        ("nonzero", "masked_select"), "a mod gives one number for each score: write torch.where"
    ),
    "gcd": _ONE_NUMBER,
}
ANYTHING = f"nothing replaces it for a score; if it is not of scores, {_BEFORE}"


def instead_of(name: str) -> str:
    """Advice about an ATen operator, by its name without namespace and overload."""
    return _ADVICE.get(name.removeprefix("_"), ANYTHING)
