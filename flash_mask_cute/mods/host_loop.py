"""The function of `on_cpu` that the compiler compiles for the host: a callable over a rectangle of
queries and keys."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint8

from flash_mask_cute.mods.aux_reads import CheckedAux
from flash_mask_cute.mods.calling import ScorePlace, call_mask_mod, call_score_mod
from flash_mask_cute.mods.derivative import call_score_mod_bwd, differentiate


@cute.jit
def evaluate_each(
    evaluate: cutlass.Constexpr,
    mod: cutlass.Constexpr,
    values: Any,
    indices: Any,
    aux_tensors: Any,
    record: Any,
    targets: Any,
) -> None:
    """evaluate: one of EVALUATE. values: in and out, (rows, cols) each. indices: batch entry, head,
    q_idx (rows,), k_idx (cols,). record: see `CheckedAux`. targets: of `_add_aux_gradients`."""
    batch_idx, head_idx, q_idx, k_idx = indices
    checked = CheckedAux.create(aux_tensors, record)
    for i in range(cute.size(q_idx)):
        for j in range(cute.size(k_idx)):
            place = ScorePlace(batch_idx, head_idx, q_idx[i], k_idx[j])
            given = tuple(value[i, j] for value in values)
            results = evaluate(mod, given, place, checked, targets=targets)
            for value, result in zip(values, results, strict=False):
                value[i, j] = result


def _add_aux_gradients(
    wants_aux: tuple[int, ...], mod: Any, values: Any, place: Any, aux_tensors: Any, targets: Any
) -> tuple:
    """targets: the float64 sums of each aux tensor in wants_aux."""
    score, grad = values
    _, _, terms = differentiate(mod, score, place, aux_tensors, wants_aux)
    for i, coordinates, by_element in terms:
        target = targets[wants_aux.index(i)]
        more = cutlass.select_(grad == 0.0, type(grad)(0.0), type(grad)(grad * by_element))
        target[coordinates] = target[coordinates] + cutlass.Float64(more)
    return ()


# What replaces the first values of a score, of a mod, these values, their place and aux tensors.
EVALUATE: dict[str, Callable[..., tuple]] = {
    "mask_mod": lambda mod, _, *of, targets: (Uint8(call_mask_mod(mod, *of)),),
    "score_mod": lambda mod, values, *of, targets: (call_score_mod(mod, *values, *of),),
    "derivative": lambda mod, values, *of, targets: differentiate(mod, values[0], *of)[:2],
    "aux_gradients": _add_aux_gradients,
    "score_mod_bwd": lambda mod, values, *of, targets: (call_score_mod_bwd(mod, *values, *of),),
}
