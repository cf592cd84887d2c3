"""Score modifiers whose aux tensors are trained, and the gradients of these in float64.

As in `oracle`, nothing here uses the package, and the CuTe texts import the compiler when they are
traced. The trained tensors come last among the aux tensors of a call, after that of a mask_mod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from cases import BF16, FP16, FP32, Case
from dense_masks import DenseMasks
from eager import TANH_APPROX
from inputs import Inputs, make_inputs
from mask_cases import Extents
from oracle import Head, each_sequence, rule_of
from torch import Tensor

REACH = 16
# the side of a grid, and of a window
GRID = 20
WINDOW = 12
# of probabilities, for roundings that do not depend on each other
SCALES = (1.0, 1.19, 1.41, 1.68)


class TrainedRecipe(NamedTuple):
    """cute is a score_mod; dense(score (rows, cols), b, h, q, k, *trained) the same in torch.

    trained: shapes and dtypes of the trained tensors.
    """

    cute: Callable[..., Any]
    dense: Callable[..., Tensor]
    trained: Callable[[Extents], Sequence[tuple[tuple[int, ...], torch.dtype]]]


def _t5(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    import cutlass

    bucket = cutlass.min(cutlass.max(k[0] - q[0], -REACH), REACH) + REACH
    return score + aux[-1][bucket, h[0]]


def _slopes(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return score - aux[-1][h[0]] * abs(q - k).to(Float32)


def _key_bias(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[-1][b[0], h[0], k[0]]


def _squared(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Reads one element twice, and one that may be the same."""
    own = aux[-1][h[0]]
    return score + own * aux[-1][h[0]] * aux[-1][(h[0] + k[0]) % 2]


def _two_of_key(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Neighbouring keys, reversed; a head's tensor, of infinite derivative at key == query."""
    from cutlass import Float32

    near = 1.0 / abs(q - k).to(Float32)
    last = k[0] // 2
    return score + aux[-2][last] - aux[-2][last + 1] * 0.5 + near * aux[-1][b[0], h[0]]


def _query_gain(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Of a query, and one of a few neighbours."""
    return score * aux[-1][h[0], q[0]] + score * aux[-2][b[0], q[0] // 3]


def _far_gain(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Of a head. Scores of every other 64 queries are far from 0, so these have references."""
    from cutlass import Float32

    return score * aux[-1][h[0]] + Float32(q[0] // 64 % 2) * 2048.0


def _far_query_gain(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return score * aux[-1][h[0], q[0]] + Float32(q[0] // 64 % 2) * 2048.0


def _buckets(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Two reads by distance, times a number and a function of places; another by key."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    distance = abs(q[0] - k[0])
    far = Int32(cute.math.log2(Float32(cutlass.max(distance, 1))) * 2.0)
    slope = 1.0 / Float32(1 + k[0])
    near, other = (aux[-2][cutlass.min(x, n), h[0]] for x, n in ((distance, 12), (far, 20)))
    return score + 0.5 * near + slope * other + aux[-1][k[0]]


def _far(distance: Tensor) -> Tensor:
    size = distance.abs().clamp(min=1).float()
    return (size.log2() * 2).to(torch.int32).clamp(max=20)


def _distances(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Of two tensors, with the same elements far from the diagonal; heads share one of them."""
    import cutlass

    near = aux[-1][cutlass.min(abs(q[0] - k[0]), 12)]
    step = cutlass.max(cutlass.min((k[0] - q[0]) // 8, 3), -3) + 3
    return score + (near - 0.5 * aux[-2][h[0], step])


def _pair_minus_slope(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """The order of indices is another one; the other tensor is summed along a walk."""
    from cutlass import Float32

    pair = Float32(aux[-1][q[0], k[0], h[0]])
    return score - (aux[-2][h[0]] * abs(q - k).to(Float32) - pair)


def _by_axes(side: int) -> TrainedRecipe:
    """Two tables, of the distance in rows of a grid and in columns; one of them is read twice."""

    def cute(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        rows = q[0] // side - k[0] // side
        cols = (q[0] - q[0] // side * side) - (k[0] - k[0] // side * side)
        last = aux[-1][h[0], cols + side - 1] - 0.5 * aux[-1][h[0], abs(cols)]
        return score + aux[-2][h[0], rows + 20] + last

    def dense(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
        of_rows, of_cols = tables
        rows, cols = q // side - k // side, q % side - k % side
        last = of_cols[h][cols + side - 1] - 0.5 * of_cols[h][cols.abs()]
        return score + of_rows[h][rows + 20] + last

    return TrainedRecipe(
        cute, dense, lambda x: [((x.heads_q, 41), FP32), ((x.heads_q, 2 * side - 1), FP32)]
    )


def _grid(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Two tables of clipped distances on a grid, in rows and in columns."""
    import cutlass

    rows = q[0] // GRID - k[0] // GRID
    cols = (q[0] - q[0] // GRID * GRID) - (k[0] - k[0] // GRID * GRID)
    clipped = (cutlass.min(cutlass.max(x, -9), 9) + 9 for x in (rows, cols))
    of_rows, of_cols = (aux[i][h[0], x] for i, x in zip((-2, -1), clipped, strict=True))
    return score + of_rows + of_cols


def _dense_grid(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
    rows, cols = q // GRID - k // GRID, q % GRID - k % GRID
    of_rows, of_cols = (
        table[h][x.clamp(-9, 9) + 9] for table, x in zip(tables, (rows, cols), strict=True)
    )
    return score + of_rows + of_cols


def _grid_and_slopes(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """The other tensor is summed along a walk."""
    from cutlass import Float32

    slope = aux[-1][h[0]] * Float32(abs(q[0] - k[0]))
    return _grid(score, b, h, q, k, aux[:-1]) - slope


def _swin(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """A table of the distances in a window, in rows and in columns."""
    i, j = q[0], k[0]
    rows, cols = i // WINDOW - j // WINDOW, (i - i // WINDOW * WINDOW) - (j - j // WINDOW * WINDOW)
    return score + aux[-1][h[0], (rows + WINDOW - 1) * (2 * WINDOW - 1) + cols + WINDOW - 1]


def _dense_swin(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    rows, cols = q // WINDOW - k // WINDOW, q % WINDOW - k % WINDOW
    return score + table[h][(rows + WINDOW - 1) * (2 * WINDOW - 1) + cols + WINDOW - 1]


TRAINED_MODS = {
    "t5": TrainedRecipe(
        _t5,
        lambda score, b, h, q, k, table: score + table[(k - q).clamp(-REACH, REACH) + REACH, h],
        lambda x: [((2 * REACH + 1, x.heads_q), BF16)],
    ),
    "slopes": TrainedRecipe(
        _slopes,
        lambda score, b, h, q, k, slopes: score - slopes[h] * (q - k).abs(),
        lambda x: [((x.heads_q,), FP32)],
    ),
    "key_bias": TrainedRecipe(_key_bias, lambda score, b, h, q, k, bias: score + bias[b, h][k],
                              lambda x: [((x.batch, x.heads_q, x.seqlen_k), FP32)]),
    "gain_and_bias": TrainedRecipe(
        lambda score, b, h, q, k, aux: score * aux[-1][h[0]] + aux[-2][q[0], k[0]],
        lambda score, b, h, q, k, bias, gain: score * gain[h] + bias[q, k],
        lambda x: [((x.seqlen_q, x.seqlen_k), BF16), ((x.heads_q,), FP16)],
    ),
    "gain": TrainedRecipe(
        lambda score, b, h, q, k, aux: score * aux[-1][h[0] // 2],
        lambda score, b, h, q, k, gain: score * gain[h // 2],
        lambda x: [((x.heads_q // 2 + 1,), FP32)],
    ),
    "two_of_key": TrainedRecipe(
        _two_of_key,
        lambda score, b, h, q, k, of_key, of_head: (
            score
            + of_key[k // 2]
            - of_key[k // 2 + 1] * 0.5
            + of_head[b, h] / (q - k).abs().to(score.dtype).clamp(min=1e-9)
        ),
        lambda x: [((x.seqlen_k // 2 + 2,), BF16), ((x.batch, x.heads_q), FP32)],
    ),
    "query_gain": TrainedRecipe(
        _query_gain,
        lambda score, b, h, q, k, few, gain: score * gain[h][q] + score * few[b][q // 3],
        lambda x: [((x.batch, x.seqlen_q // 3 + 1), FP16), ((x.heads_q, x.seqlen_q), FP32)],
    ),
    "far_gain": TrainedRecipe(
        _far_gain,
        lambda score, b, h, q, k, gain: score * gain[h] + (q // 64 % 2) * 2048.0,
        lambda x: [((x.heads_q,), FP32)],
    ),
    "far_query_gain": TrainedRecipe(
        _far_query_gain,
        lambda score, b, h, q, k, gain: score * gain[h][q] + (q // 64 % 2) * 2048.0,
        lambda x: [((x.heads_q, x.seqlen_q), FP32)],
    ),
    "buckets": TrainedRecipe(
        _buckets,
        lambda score, b, h, q, k, table, keys: (
            score
            + 0.5 * table[(q - k).abs().clamp(max=12), h]
            + table[_far(q - k), h] / (1 + k)
            + keys[k]
        ),
        lambda x: [((21, x.heads_q), FP32), ((x.seqlen_k,), FP32)],
    ),
    "distances": TrainedRecipe(
        _distances,
        lambda score, b, h, q, k, steps, near: (
            score
            + (near[(q - k).abs().clamp(max=12)] - 0.5 * steps[h][((k - q) // 8).clamp(-3, 3) + 3])
        ),
        lambda x: [((x.heads_q, 7), FP32), ((13,), FP16)],
    ),
    "pair": TrainedRecipe(lambda score, b, h, q, k, aux: score + aux[-1][h[0], q[0], k[0]],
                          lambda score, b, h, q, k, bias: score + bias[h][q, k],
                          lambda x: [((x.heads_q, x.seqlen_q, x.seqlen_k), BF16)]),
    "axial": _by_axes(20),
    "windows": _by_axes(12),
    "grid": TrainedRecipe(_grid, _dense_grid,
                          lambda x: [((x.heads_q, 19), FP32), ((x.heads_q, 19), BF16)]),
    "grid_and_slopes": TrainedRecipe(
        _grid_and_slopes,
        lambda score, b, h, q, k, *tables: (
            _dense_grid(score, b, h, q, k, *tables[:-1]) - tables[-1][h] * (q - k).abs()
        ),
        lambda x: [((x.heads_q, 19), FP32), ((x.heads_q, 19), FP32), ((x.heads_q,), FP32)],
    ),
    "swin": TrainedRecipe(_swin, _dense_swin,
                          lambda x: [((x.heads_q, (2 * WINDOW - 1) ** 2), FP32)]),
    "pair_minus_slope": TrainedRecipe(
        _pair_minus_slope,
        lambda score, b, h, q, k, slopes, pair: score - (slopes[h] * (q - k).abs() - pair[q, k, h]),
        lambda x: [((x.heads_q,), FP32), ((x.seqlen_q, x.seqlen_k, x.heads_q), BF16)],
    ),
    "squared": TrainedRecipe(
        _squared,
        lambda score, b, h, q, k, x: score + x[h].square() * x[(h + k) % 2],
        lambda x: [((max(x.heads_q, 2),), FP32)],
    ),
}  # fmt: skip


def _in_grid(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """A table of the distances in rows and columns of a grid."""
    i, j = q[0], k[0]
    rows, cols = i // GRID - j // GRID, (i - i // GRID * GRID) - (j - j // GRID * GRID)
    return score + aux[-1][h[0], (rows + GRID - 1) * (2 * GRID - 1) + cols + GRID - 1]


def _dense_in_grid(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    rows, cols = q // GRID - k // GRID, q % GRID - k % GRID
    return score + table[h][(rows + GRID - 1) * (2 * GRID - 1) + cols + GRID - 1]


IN_GRID = TrainedRecipe(
    _in_grid, _dense_in_grid, lambda x: [((x.heads_q, (2 * GRID - 1) ** 2), FP32)]
)

# Each with the name of a modifier. Of several key blocks and row blocks, some of them hidden, cut
# and whole; sequences without queries, and without keys, first and last.
TRAINED_CASES = (
    (Case("slopes-causal", 1, 200, 200, causal=True), "slopes"),
    (Case("t5-d64-fp16-gqa2", 1, 130, 200, 2, 1, head_dim=64, dtype=FP16), "t5"),
    (
        Case(
            "key-bias-varlen-empty-sequences", heads_q=1, heads_kv=1,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "key_bias",
    ),
    (
        Case(
            "gain-and-bias-softcap-sink-columns", 1, 129, 150, 2, 2, head_dim=64, causal=True,
            softcap=15.0, sink=FP32, column="stepped2",
        ),
        "gain_and_bias",
    ),
    (
        Case(
            "squared-documents-blocks-empty-rows", 2, 140, 129, 1, 1, causal=True,
            mask_mod="documents", blocks=(64, 64),
        ),
        "squared",
    ),
    (
        Case(
            "slopes-d256-varlen", heads_q=1, heads_kv=1, head_dim=256,
            lengths_q=(0, 70), lengths_k=(65, 70), window_left=40,
        ),
        "slopes",
    ),
    (Case("t5-d192-dv64", 1, 65, 129, 1, 1, head_dim=192, head_dim_v=64, causal=True), "t5"),
)  # fmt: skip


# Of reads by head and key alone, whose sums may have an order: heads of a group in one walk and in
# several, gains that need scores, several reads of a tensor, packed sequences, wide heads.
ORDERED_CASES = (
    (Case("gain-gqa2", 2, 130, 200, 4, 2, head_dim=64, causal=True), "gain"),
    (
        Case(
            "key-bias-varlen-gqa2", heads_q=2, heads_kv=1, head_dim=64,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "key_bias",
    ),
    (Case("slopes-gqa4", 1, 70, 140, 4, 1, window_left=40), "slopes"),
    (Case("two-of-key", 2, 150, 150, 2, 2, head_dim=64, window_right=-2), "two_of_key"),
    (Case("key-bias-d192", 1, 65, 129, 2, 1, head_dim=192, head_dim_v=64), "key_bias"),
    (Case("gain-d256", 1, 70, 70, 2, 1, head_dim=256, causal=True), "gain"),
)  # fmt: skip


# Of reads by query, by distance and by places: lines that begin and end in a tile, at its edges and
# at those of sequences; parts of tiles; wide heads, blocks of 128 queries, positions from q_start.
# Scores that fp32 rounds by more than its tests allow.
FAR_CASES = (
    (Case("far-gain", 1, 200, 150, 2, 1), "far_gain"),
    (Case("far-query-gain", 1, 140, 200, 1, 1, causal=True), "far_query_gain"),
)
LINE_CASES = (
    (Case("query-gain-gqa2", 2, 130, 200, 4, 2, head_dim=64, causal=True), "query_gain"),
    (
        Case(
            "query-gain-varlen", heads_q=2, heads_kv=1,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "query_gain",
    ),
    (Case("t5-window", 1, 200, 330, 2, 2, window_left=70, window_right=20), "t5"),
    (Case("t5-varlen-d32", heads_q=2, heads_kv=2, head_dim=32, lengths_q=(150, 0, 33, 1),
          lengths_k=(97, 60, 0, 129)), "t5"),
    (Case("distances-gqa3", 1, 200, 270, 3, 1, causal=True), "distances"),
    (Case("t5-d256", 1, 70, 140, 2, 1, head_dim=256, causal=True), "t5"),
    (Case("buckets", 2, 140, 150, 2, 2, head_dim=64, window_left=100), "buckets"),
    (Case("buckets-softcap", 1, 100, 129, 1, 1, causal=True, softcap=12.0), "buckets"),
    (Case("pair-seqused", 3, 140, 130, 2, 2, head_dim=32, seqused_k=(130, 60, 0)), "pair"),
    (Case("axial", 2, 144, 170, 2, 2, head_dim=64), "axial"),
    (
        Case(
            "axial-varlen", heads_q=1, heads_kv=1,
            lengths_q=(0, 70, 9, 65), lengths_k=(40, 200, 0, 65), causal=True,
        ),
        "axial",
    ),
    (Case("axial-d192", 1, 70, 140, 1, 1, head_dim=192, head_dim_v=64), "axial"),
    (Case("windows", 2, 144, 144, 2, 2, head_dim=64), "windows"),
)  # fmt: skip


# Of biases that all batch entries share, whose gradients a kernel of its own sums: both halves of a
# tile and a part of one, heads of a group, bands that hide tiles and cut them, bits of a mask_mod
# for all heads, queries that see nothing, head dimensions of few stages.
SHARED_CASES = (
    (Case("pair-batch3", 3, 140, 130, 2, 2, head_dim=32), "pair"),
    (Case("pair-batch2-gqa2-causal", 2, 200, 270, 4, 2, head_dim=64, causal=True), "pair"),
    (Case("pair-window", 2, 300, 290, 1, 1, head_dim=40, window_left=60, window_right=20), "pair"),
    (Case("pair-documents", 3, 150, 150, 4, 4, head_dim=32, mask_mod="documents"), "pair"),
    (Case("pair-empty-rows-sink", 2, 150, 65, 2, 1, head_dim=128, causal=True, sink=FP32), "pair"),
    (Case("pair-d96", 2, 70, 140, 1, 1, head_dim=96, head_dim_v=64), "pair_minus_slope"),
    (Case("swin-batch17", 17, 30, 45, 2, 2, head_dim=32), "swin"),
)  # fmt: skip


@dataclass(frozen=True)
class TrainedMasks:
    """`DenseMasks` with a modifier of `TRAINED_MODS`; trained: as the modifier reads them."""

    masks: DenseMasks
    recipe: TrainedRecipe
    trained: tuple[Tensor, ...]

    def visible(self, *arguments: int) -> Tensor:
        return self.masks.visible(*arguments)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        q = torch.arange(scores.shape[0], device=scores.device)[:, None]
        k = torch.arange(scores.shape[1], device=scores.device)
        trained = (x.to(scores.dtype) for x in self.trained)
        return self.recipe.dense(scores, batch_idx, head_idx, q, k, *trained)


class TrainedInputs(NamedTuple):
    """Inputs of a call, whose keywords hold the modifier, and which aux tensors are trained."""

    inputs: Inputs
    wants_aux: tuple[int, ...]

    @property
    def aux_tensors(self) -> list[Tensor]:
        aux_tensors: list[Tensor] = self.inputs.keywords["aux_tensors"]
        return aux_tensors

    @property
    def trained(self) -> list[Tensor]:
        return [self.aux_tensors[i] for i in self.wants_aux]

    def new_daux(self) -> list[Tensor | None]:
        """NaN for each aux tensor that is trained."""
        given = enumerate(self.aux_tensors)
        return [torch.full_like(x, torch.nan) if i in self.wants_aux else None for i, x in given]


def make_trained(
    case: Case, name: str | TrainedRecipe, device: torch.device | str = "cpu"
) -> TrainedInputs:
    """`make_inputs` with a modifier, of `TRAINED_MODS` or another, and trained tensors."""
    inputs = make_inputs(case, device)
    recipe = TRAINED_MODS[name] if isinstance(name, str) else name
    extents = Extents(case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
    generator = torch.Generator().manual_seed(len(case.id))
    trained = tuple(
        (torch.randn(shape, generator=generator) / 4).to(dtype).to(device)
        for shape, dtype in recipe.trained(extents)
    )
    masks = inputs.dense or DenseMasks.create(case, 0).to(device)
    aux_tensors = [*(masks.aux or ()), *trained]
    keywords = inputs.mask_keywords | {"score_mod": recipe.cute, "aux_tensors": aux_tensors}
    dense: Any = TrainedMasks(masks, recipe, trained)
    inputs = replace(inputs, mask_keywords=keywords, dense=dense)
    count = len(aux_tensors)
    return TrainedInputs(inputs, tuple(range(count - len(trained), count)))


def reference_aux_gradients(
    given: TrainedInputs, dout: Tensor, dlse: Tensor | None = None
) -> list[Tensor]:
    """Gradients of sum(out * dout) + sum(lse * dlse) by the trained tensors, float64."""
    return _aux_gradients(given, dout, dlse)


def _aux_gradients(
    given: TrainedInputs, dout: Tensor, dlse: Tensor | None, rounding: _Rounding | None = None
) -> list[Tensor]:
    """From dS = P (dP - delta) in float64; delta is of a rounded out."""
    inputs = given.inputs
    leaves = [x.detach().double().requires_grad_() for x in given.trained]
    dense: Any = replace(cast(Any, inputs.dense), trained=tuple(leaves))
    rule = rule_of(inputs.q, **inputs.plain_keywords)
    sums = [torch.zeros_like(x) for x in leaves]
    dlse_by_row = dout.new_zeros(dout.shape[:-1]) if dlse is None else dlse.transpose(-1, -2)
    tensors, like_q = (inputs.q, inputs.k, inputs.v, dense), (dout, dlse_by_row)
    for x, (dout_i, dlse_i), _ in each_sequence(*tensors, like_q, **inputs.plain_keywords):
        for head_idx in range(x.q.shape[1]):
            head = Head.create(x, rule, head_idx)
            with torch.no_grad():
                out, _, probabilities = head.attend()
                if rounding is not None:
                    out = rounding.output(probabilities, head.v)
                do, dl = dout_i[:, head_idx].double(), dlse_i[:, head_idx].double()
                delta = (do * out).sum(dim=1) - dl
                dscores = probabilities * (do @ head.v.T - delta[:, None])
                if rounding is not None and rounding.rounds_dscores:
                    dscores = dscores.to(rounding.dtype).double()
            found = torch.autograd.grad(head.scores, leaves, dscores, allow_unused=True)
            for sum_, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    sum_ += gradient
    return sums


class _Rounding(NamedTuple):
    """A rounding of probabilities and of out. scale: of the probabilities that are rounded, which
    lies in the maximum of the scores that a kernel had seen; None: only out is rounded, as where a
    test gives a backward the oracle's. rounds_dscores: of dS, too."""

    dtype: torch.dtype
    scale: float | None
    rounds_dscores: bool = False

    def output(self, probabilities: Tensor, v: Tensor) -> Tensor:
        if self.scale is None:
            return (probabilities @ v).to(self.dtype).double()
        rounded = (probabilities * self.scale).to(self.dtype).double() / self.scale
        return (rounded @ v).to(self.dtype).double()


def assert_aux_gradients_close(
    gradients: Sequence[Tensor],
    given: TrainedInputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    rtol: float | None = None,
    rounds_dscores: bool = False,
) -> None:
    """The largest error of a trained tensor is at most twice what rounding probabilities and out
    does, or rtol of the largest value, and a rounding of this to the tensor's dtype.

    rounds_dscores: or what rounding dS does, as eager attention does, where a kernel sums dS in 16
    bits.

    What rounding does to a tensor of two elements is a draw of two numbers, which may be small by
    chance. So it is the largest of several roundings.
    """
    reference = reference_aux_gradients(given, dout, dlse)
    dtype = given.inputs.q.dtype
    roundings = [_Rounding(dtype, x) for x in (None, *SCALES)]
    if rounds_dscores:
        roundings.append(_Rounding(dtype, 1.0, True))
    rounded = [_aux_gradients(given, dout, dlse, x) for x in roundings]
    for i, (gradient, expected, x) in enumerate(
        zip(gradients, reference, given.trained, strict=True)
    ):
        label = f"{given.inputs.case.id}: gradient of trained tensor {i}"
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape), label
        assert expected.abs().max() > 0, f"{label}: a case that tests nothing"
        error = (gradient.double() - expected).abs().max().item()
        largest = expected.abs().max().item()
        allowed = 2 * max((x[i] - expected).abs().max().item() for x in rounded)
        if rtol is not None:
            allowed = rtol * largest
        # a soft cap is tanh.approx on a GPU
        inaccuracy = torch.finfo(x.dtype).eps / 2 + 2 * given.inputs.case.softcap * TANH_APPROX
        allowed += inaccuracy * largest
        assert error <= allowed, (
            f"{label} off by {error:.3g}, allowed {allowed:.3g}, largest {largest:.3g}"
        )
