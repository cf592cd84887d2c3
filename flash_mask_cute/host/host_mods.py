"""User callables on CPU tensors: the CuTe DSL compiles them for the host, no GPU needed.

A `mask_mod`, a `score_mod`, its derivatives or a `score_mod_bwd` runs over a rectangle of queries
and keys of one head, called exactly as a kernel calls it (`core/mods.py`, `core/derivative.py`),
so that what was tried here is what a kernel compiles. One compiled function serves all sizes and
strides; it is kept in memory under the structure of the callable and the dtypes and ranks of its
aux tensors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.host.aux_tensors import check_aux_tensor
from flash_mask_cute.host.cache import compile_lock
from flash_mask_cute.host.callable_key import callable_key
from flash_mask_cute.host.packages import tells_what_to_install
from flash_mask_cute.host.problem import CUTLASS_NAMES, dtype_name

HOST_OPTIONS = "--enable-tvm-ffi"
_compiled: dict[tuple[Any, ...], Callable[..., None]] = {}


def eval_mask_mod(
    mask_mod: Callable[..., Any],
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
) -> Tensor:
    """Which scores a callable lets count: bool (rows, cols).

    q_idx (rows,) and k_idx (cols,): int32, positions inside the sequence, in any order; head_idx is
    the query head. aux_tensors: on the CPU, of 1 to 4 dimensions, any strides, int32, int64,
    float32, bfloat16 or float16. The callable must stay inside them: nothing checks its indices.

    Raises:
        TypeError, ValueError: an aux tensor of another dtype, rank or device; or the callable
            reaches something that `callable_key` does not know.
        NotImplementedError: the callable uses an instruction that only a GPU has.
    """
    visible = torch.empty((q_idx.shape[0], k_idx.shape[0]), dtype=torch.uint8, device="cpu")
    _run("mask_mod", mask_mod, (visible,), aux_tensors, batch_idx, head_idx, q_idx, k_idx)
    return visible.view(torch.bool)


def eval_score_mod(
    score_mod: Callable[..., Any],
    scores: Tensor,
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
) -> Tensor:
    """The modified scores, a new float32 tensor (rows, cols).

    scores: float32 (rows, cols), scaled and soft-capped. The other arguments and the errors are
    those of `eval_mask_mod`.
    """
    modified = scores.to(torch.float32, copy=True)
    _run("score_mod", score_mod, (modified,), aux_tensors, batch_idx, head_idx, q_idx, k_idx)
    return modified


def eval_score_mod_derivative(
    score_mod: Callable[..., Any],
    scores: Tensor,
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
) -> tuple[Tensor, Tensor]:
    """The modified scores and their derivatives by the scores, new float32 tensors (rows, cols).

    The arguments and the errors are those of `eval_score_mod`.

    Raises:
        NotImplementedError: also where the callable has no derivative, see `differentiate`.
    """
    modified = scores.to(torch.float32, copy=True)
    derivative = torch.empty_like(modified)
    values = modified, derivative
    _run("derivative", score_mod, values, aux_tensors, batch_idx, head_idx, q_idx, k_idx)
    return modified, derivative


def add_aux_gradients(
    score_mod: Callable[..., Any],
    aux_sums: Mapping[int, Tensor],
    grads: Tensor,
    scores: Tensor,
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
) -> None:
    """Add the gradients of aux tensors to aux_sums, float64 tensors by number of the aux tensor.

    grads: those of the modified scores, float32 (rows, cols); where they are 0, nothing is added.
    The other arguments and the errors are those of `eval_score_mod`.

    Raises:
        NotImplementedError: also where the callable has no derivative, see `differentiate`.
    """
    values = scores.to(torch.float32), grads.to(torch.float32)
    place = aux_tensors, batch_idx, head_idx, q_idx, k_idx
    _run("aux_gradients", score_mod, values, *place, sums=aux_sums)


def eval_score_mod_bwd(
    score_mod_bwd: Callable[..., Any],
    grads: Tensor,
    scores: Tensor,
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
) -> Tensor:
    """Gradients of the scores, a new float32 tensor (rows, cols), from those of the modified ones.

    grads, scores: float32 (rows, cols), the scores as score_mod sees them. The other arguments and
    the errors are those of `eval_mask_mod`.
    """
    result = grads.to(torch.float32, copy=True)
    values = result, scores.to(torch.float32)
    _run("score_mod_bwd", score_mod_bwd, values, aux_tensors, batch_idx, head_idx, q_idx, k_idx)
    return result


def _run(
    kind: str,
    mod: Callable[..., Any],
    values: tuple[Tensor, ...],
    aux_tensors: Sequence[Tensor] | None,
    batch_idx: int,
    head_idx: int,
    q_idx: Tensor,
    k_idx: Tensor,
    sums: Mapping[int, Tensor] | None = None,
) -> None:
    aux = None if aux_tensors is None else tuple(aux_tensors)
    for i, tensor in enumerate(aux or ()):
        check_aux_tensor(f"aux_tensors[{i}]", tensor, q_idx.device)
    layout = None if aux is None else tuple((dtype_name(x.dtype), x.dim()) for x in aux)
    wants_aux = tuple(sums or ())
    key = kind, callable_key(mod), layout, wants_aux
    function = _compiled.get(key)
    if function is None:
        with compile_lock():
            function = _compiled.get(key)
            if function is None:
                function = _compiled[key] = _compile(kind, mod, layout, wants_aux)
    targets = tuple((sums or {}).values()) or None
    function(values, batch_idx, head_idx, q_idx, k_idx, aux, targets)


@tells_what_to_install()
def _compile(
    kind: str,
    mod: Callable[..., Any],
    layout: tuple[tuple[str, int], ...] | None,
    wants_aux: tuple[int, ...],
) -> Callable[..., None]:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    def tensor(dtype: Any, rank: int) -> Any:
        return make_fake_tensor(
            dtype,
            tuple(cute.sym_int() for _ in range(rank)),
            tuple(cute.sym_int64() for _ in range(rank)),
            memspace=cutlass.AddressSpace.generic,
            assumed_align=dtype.width // 8,
        )

    aux = targets = None
    if layout is not None:
        aux = tuple(tensor(getattr(cutlass, CUTLASS_NAMES[name]), rank) for name, rank in layout)
        targets = tuple(tensor(cutlass.Float64, layout[i][1]) for i in wants_aux) or None
    return compile_for_host(
        kind if kind in ("mask_mod", "score_mod_bwd") else "score_mod",
        _loop(),
        functools.partial(_KINDS[kind].ask, wants_aux) if wants_aux else _KINDS[kind].ask,
        mod,
        tuple(tensor(getattr(cutlass, name), 2) for name in _KINDS[kind].values),
        cutlass.Int32(0),
        cutlass.Int32(0),
        tensor(cutlass.Int32, 1),
        tensor(cutlass.Int32, 1),
        aux,
        targets,
    )


def compile_for_host(kind: str, function: Any, *arguments: Any) -> Any:
    """Compile a jit function that calls a callable of the user for the CPU. Hold `compile_lock`.

    kind: "mask_mod", "score_mod" or "score_mod_bwd".

    Raises:
        NotImplementedError: the callable uses an instruction that only a GPU has.
    """
    import cutlass.cute as cute

    refused: list[str] = []

    def refuse_gpu_instructions(_dsl: Any, module: Any, _name: str) -> None:
        # Past this point the compiler would not raise but abort the process.
        refused.extend(_gpu_instructions(module.operation))
        if refused:
            raise NotImplementedError

    try:
        return cute.compile(
            function,
            *arguments,
            options=HOST_OPTIONS,
            trace_finalize_hooks=refuse_gpu_instructions,
        )
    except Exception as error:
        if refused:
            raise NotImplementedError(
                f"the {kind} uses {', '.join(sorted(set(refused)))}, which exists only for GPUs: "
                "use CUDA tensors, or write it with other functions of cutlass.cute.math "
                "(not cute.arch, not approx=True)"
            ) from error
        raise


def _gpu_instructions(operation: Any) -> Iterator[str]:
    """Names of operations inside `operation` that have no code on a CPU."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                name = child.operation.name
                if name.startswith(("nvvm.", "nvgpu.", "cute_nvgpu.")) or name in (
                    "llvm.inline_asm",
                    "llvm.call_intrinsic",
                    "math.erf",
                    "math.erfc",
                ):
                    yield name
                yield from _gpu_instructions(child.operation)


def _given(targets: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return targets or ()


@functools.cache
def _loop() -> Any:
    """The function to compile; made on demand, because the DSL must be there to decorate it."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32

    @cute.jit
    def ask_each(
        ask: cutlass.Constexpr,
        mod: cutlass.Constexpr,
        values: Any,
        batch_idx: Int32,
        head_idx: Int32,
        q_idx: Any,
        k_idx: Any,
        aux_tensors: Any,
        targets: Any,
    ) -> None:
        for i in range(cute.size(q_idx)):
            for j in range(cute.size(k_idx)):
                place = (batch_idx, head_idx, q_idx[i], k_idx[j], aux_tensors)
                answers = ask(mod, tuple(value[i, j] for value in values), place, *_given(targets))
                for value, answer in zip(values, answers, strict=False):
                    value[i, j] = answer

    return ask_each


# What a kind makes of the values of a score and of its place: what replaces the first values.
# place: batch_idx, head_idx, q_idx, k_idx, aux_tensors. Where aux tensors have gradients, the
# tensors to add them to follow.


def _ask_mask_mod(mod: Any, values: tuple[Any, ...], place: tuple[Any, ...]) -> tuple[Any, ...]:
    from cutlass import Uint8

    from flash_mask_cute.core.mods import call_mask_mod

    return (Uint8(call_mask_mod(mod, *place)),)


def _ask_score_mod(mod: Any, values: tuple[Any, ...], place: tuple[Any, ...]) -> tuple[Any, ...]:
    from flash_mask_cute.core.mods import call_score_mod

    return (call_score_mod(mod, *values, *place),)


def _ask_derivative(mod: Any, values: tuple[Any, ...], place: tuple[Any, ...]) -> tuple[Any, ...]:
    from flash_mask_cute.core.derivative import differentiate

    score, _ = values
    modified, slope, _ = differentiate(mod, score, *place)
    return modified, slope


def _add_aux_gradients(
    wants_aux: tuple[int, ...],
    mod: Any,
    values: tuple[Any, ...],
    place: tuple[Any, ...],
    *targets: Any,
) -> tuple[Any, ...]:
    import cutlass

    from flash_mask_cute.core.derivative import differentiate

    score, grad = values
    _, _, terms = differentiate(*(mod, score, *place, wants_aux))
    for i, coordinates, by_element in terms:
        target = targets[wants_aux.index(i)]
        more = cutlass.select_(grad == 0.0, cutlass.Float32(0.0), grad * by_element)
        target[coordinates] = target[coordinates] + cutlass.Float64(more)
    return ()


def _ask_score_mod_bwd(
    mod: Any, values: tuple[Any, ...], place: tuple[Any, ...]
) -> tuple[Any, ...]:
    from flash_mask_cute.core.derivative import call_score_mod_bwd

    return (call_score_mod_bwd(mod, *values, *place),)


class _Kind(NamedTuple):
    """What is asked of a callable, and the dtypes of the tensors (rows, cols) that this takes."""

    ask: Callable[..., tuple[Any, ...]]
    values: tuple[str, ...]


_KINDS = {
    "mask_mod": _Kind(_ask_mask_mod, ("Uint8",)),
    "score_mod": _Kind(_ask_score_mod, ("Float32",)),
    "derivative": _Kind(_ask_derivative, ("Float32", "Float32")),
    "aux_gradients": _Kind(_add_aux_gradients, ("Float32", "Float32")),
    "score_mod_bwd": _Kind(_ask_score_mod_bwd, ("Float32", "Float32")),
}
