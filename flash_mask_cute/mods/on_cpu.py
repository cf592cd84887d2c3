"""User callables on CPU tensors: the CuTe DSL compiles them for the host, without a GPU.

A callable runs over a rectangle of queries and keys of one head (`host_loop`), called exactly as a
kernel calls it. One compiled function serves all sizes and strides. Those used last are kept in
memory, by the structure of the callable and the dtypes and ranks of its aux tensors.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.mods.aux_tensors import check_aux_tensor, check_record, new_record
from flash_mask_cute.mods.signature import score_dtype
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import compiler_streams
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.recent import Recent

if TYPE_CHECKING:
    from typing_extensions import Unpack

Place: TypeAlias = tuple[Sequence[Tensor] | None, int, int, Tensor, Tensor]
"""aux_tensors, batch_idx, head_idx, q_idx and k_idx of `eval_mask_mod`."""

HOST_OPTIONS = "--enable-tvm-ffi"
_WITH_LINES = " --generate-line-info"
# Operations without code on a CPU, beside those of GPU dialects.
_GPU_ONLY = {
    "llvm.inline_asm",
    "llvm.call_intrinsic",
    "math.acosh",
    "math.asinh",
    "math.atanh",
    "math.cbrt",
    "math.erf",
    "math.erfc",
}
_compiled: dict[tuple[Any, ...], "HostFunction"] = Recent(128)  # of 2 MB each


def eval_mask_mod(mask_mod: Callable[..., Any], *place: "Unpack[Place]") -> Tensor:
    """Evaluate a mask_mod at a place: which scores count, bool (rows, cols).

    q_idx (rows,) and k_idx (cols,): int32, positions inside the sequence, in any order. head_idx:
    the query head. aux_tensors: on the CPU, of 1 to 4 dimensions, any strides, with a dtype among
    AUX_DTYPES. Raises IndexError: for some of these queries and keys the callable reads outside an
    aux tensor; no memory outside was read; TypeError, ValueError: an aux tensor has another dtype,
    rank or device; or the callable reaches something that `callable_key` does not know;
    NotImplementedError: the callable uses a GPU-only instruction."""
    *_, q_idx, k_idx = place
    visible = torch.empty((q_idx.shape[0], k_idx.shape[0]), dtype=torch.uint8, device="cpu")
    _run("mask_mod", mask_mod, (visible,), place)
    return visible.view(torch.bool)


def eval_score_mod(
    score_mod: Callable[..., Any], scores: Tensor, *place: "Unpack[Place]"
) -> Tensor:
    """Evaluate a score_mod: the modified scores, a new tensor (rows, cols) of its `score_dtype`.

    scores: (rows, cols), scaled and soft-capped. The place and the errors are those of
    `eval_mask_mod`.
    """
    modified = scores.to(score_dtype(score_mod), copy=True)
    _run("score_mod", score_mod, (modified,), place)
    return modified


def eval_score_mod_derivative(
    score_mod: Callable[..., Any], scores: Tensor, *place: "Unpack[Place]"
) -> tuple[Tensor, Tensor]:
    """The modified scores and their derivatives, new tensors (rows, cols) of its `score_dtype`.

    The arguments and the errors are those of `eval_score_mod`. Raises NotImplementedError: also if
    the callable has no derivative, see `differentiate`."""
    modified = scores.to(score_dtype(score_mod), copy=True)
    derivative = torch.empty_like(modified)
    _run("derivative", score_mod, (modified, derivative), place)
    return modified, derivative


def add_aux_gradients(
    score_mod: Callable[..., Any],
    aux_sums: Mapping[int, Tensor],
    grads_and_scores: tuple[Tensor, Tensor],
    *place: "Unpack[Place]",
) -> None:
    """Add the gradients of aux tensors to aux_sums, float64 tensors by index of the aux tensor.

    grads_and_scores: gradients of the modified scores (rows, cols), and the scores; where gradients
    are 0, nothing is added. The place and the errors are those of `eval_score_mod`. Raises
    NotImplementedError: also if the callable has no derivative, see `differentiate`."""
    grads, scores = grads_and_scores
    dtype = score_dtype(score_mod)
    values = scores.to(dtype), grads.to(dtype)
    _run("aux_gradients", score_mod, values, place, aux_sums)


def eval_score_mod_bwd(
    score_mod_bwd: Callable[..., Any],
    grads: Tensor,
    scores: Tensor,
    *place: "Unpack[Place]",
) -> Tensor:
    """Gradients of the scores, a new float32 tensor (rows, cols), from those of the modified ones.

    grads, scores: float32 (rows, cols); the scores are those that score_mod gets. The place and the
    errors are those of `eval_mask_mod`.
    """
    result = grads.to(torch.float32, copy=True)
    values = result, scores.to(torch.float32)
    _run("score_mod_bwd", score_mod_bwd, values, place)
    return result


def _run(
    kind: str,
    mod: Callable[..., Any],
    values: tuple[Tensor, ...],
    place: Place,
    sums: Mapping[int, Tensor] | None = None,
) -> None:
    aux_tensors, batch_idx, head_idx, q_idx, k_idx = place
    aux = tuple(aux_tensors) if aux_tensors else None
    for i, tensor in enumerate(aux or ()):
        check_aux_tensor(f"aux_tensors[{i}]", tensor, q_idx.device)
    layout = None if aux is None else tuple((dtype_name(x.dtype), x.dim()) for x in aux)
    wants_aux = tuple(sums or ())
    dtypes = tuple(dtype_name(x.dtype) for x in values)
    key = kind, dtypes, callable_key(mod), layout, wants_aux
    compiled = _find(key, mod, checked=False)
    targets = tuple((sums or {}).values()) or None
    given = values, (batch_idx, head_idx, q_idx, k_idx), aux
    if compiled.reads is not None:
        ends = batch_idx + 1, head_idx + 1, _end_of(q_idx), _end_of(k_idx)
        if all_inside(compiled.reads, aux or (), ends):
            compiled.function(*given, None, targets)
            return
        compiled = _find(key, mod, checked=True)
    record = new_record()
    compiled.function(*given, record, targets)
    check_record(record, _kind_of_mod(kind), mod)


def _kind_of_mod(kind: str) -> str:
    """The kind of callable from which something of this kind is computed."""
    return kind if kind in ("mask_mod", "score_mod_bwd") else "score_mod"


def _end_of(positions: Tensor) -> int:
    """One past the largest position."""
    return int(positions.max()) + 1 if positions.numel() else 0


def _find(key: tuple[Any, ...], mod: Callable[..., Any], checked: bool) -> "HostFunction":
    kind, dtypes, _, layout, wants_aux = key
    whole = (*key, checked)
    found = _compiled.get(whole)
    if found is None:
        with compile_lock():
            found = _compiled.get(whole)
            if found is None:
                found = _compiled[whole] = _compile(kind, dtypes, mod, layout, wants_aux, checked)
    return found


@tells_what_to_install()
def _compile(
    kind: str,
    dtypes: tuple[str, ...],
    mod: Callable[..., Any],
    layout: tuple[tuple[str, int], ...] | None,
    wants_aux: tuple[int, ...],
    checked: bool,
) -> "HostFunction":
    from flash_mask_cute.mods.host_loop import EVALUATE, evaluate_each

    tensor = functools.partial(fake_tensors.strided, on_host=True)
    aux = targets = None
    if layout is not None:
        aux = tuple(tensor(rank, name) for name, rank in layout)
        targets = tuple(tensor(layout[i][1], "float64") for i in wants_aux) or None
    evaluate = EVALUATE[kind]
    arguments = (
        functools.partial(evaluate, wants_aux) if wants_aux else evaluate,
        mod,
        tuple(tensor(2, name) for name in dtypes),
        (*fake_tensors.int32_pair(), tensor(1), tensor(1)),
        aux,
    )
    record = tensor(1, "int64")
    named_mod = _kind_of_mod(kind), mod
    return compile_reading(named_mod, evaluate_each, arguments, record, (targets,), checked)


class HostFunction(NamedTuple):
    """reads: (index of the aux tensor, dimension, place) of each read, if `all_inside` suffices to
    check them; the function then takes None as its record. None: it takes a record."""

    function: Callable[..., Any]
    reads: list[tuple[int, int, int]] | None


def compile_reading(
    named_mod: tuple[str, Callable[..., Any]],
    function: Any,
    arguments: tuple[Any, ...],
    record: Any,
    others: tuple[Any, ...] = (),
    checked: bool = False,
) -> HostFunction:
    """Compile function(*arguments, record, *others), as `compile_for_host`. checked: the function
    checks all reads, and needs no `all_inside`."""
    from flash_mask_cute.mods.aux_reads import NotPlainError, notes_reads

    if not checked:
        with notes_reads() as reads:
            try:
                made = compile_for_host(named_mod, function, *arguments, None, *others)
                return HostFunction(made, sorted((x.number, x.dimension, x.place) for x in reads))
            except NotPlainError:
                pass
    return HostFunction(compile_for_host(named_mod, function, *arguments, record, *others), None)


def all_inside(
    reads: Sequence[Sequence[int]], aux_tensors: Sequence[Tensor], ends: tuple[int, int, int, int]
) -> bool:
    """Whether reads by places are inside aux tensors. Each place lies below its end: the number of
    batch entries, heads, queries or keys."""
    return all(ends[place] <= aux_tensors[i].shape[dim] for i, dim, place in reads)


def compile_for_host(
    named_mod: tuple[str, Callable[..., Any]],
    function: Any,
    *arguments: Any,
    options: str = HOST_OPTIONS,
) -> Any:
    """Compile a jit function that calls a user callable for the CPU. The caller holds
    `compile_lock`. named_mod: the kind of callable, and the callable. Raises NotImplementedError:
    it uses a GPU-only instruction."""
    import cutlass.cute as cute

    from flash_mask_cute.mods.errors import describe
    from flash_mask_cute.mods.host_rounding import compute_bf16_in_fp32

    refused: list[tuple[str, str]] = []

    def for_any_cpu(_dsl: Any, module: Any, _name: str) -> None:
        # Past this point the compiler would not raise but abort the process.
        refused.extend(_gpu_instructions(module.operation))
        if refused:
            raise NotImplementedError
        compute_bf16_in_fp32(module.operation)

    try:
        with compiler_streams():
            return cute.compile(
                function,
                *arguments,
                options=options,
                trace_finalize_hooks=for_any_cpu,
            )
    except Exception as error:
        if not refused:
            raise
        if _WITH_LINES not in options:
            # the same once more, to learn in which line
            return compile_for_host(named_mod, function, *arguments, options=options + _WITH_LINES)
        names = ", ".join(sorted({name for name, _ in refused}))
        raise NotImplementedError(
            f"{describe(*named_mod, line=refused[0][1])} uses {names}, which exists only for GPUs: "
            "use CUDA tensors, or write it with other functions of cutlass.cute.math (not "
            "cute.arch, not approx=True)"
        ) from error


def _line_of(operation: Any) -> str:
    """`file:line` of an operation traced with line information, or nothing."""
    found = re.search(r'"([^"]+)":(\d+):\d+\)', str(operation.location))
    return "" if found is None else f"{found[1]}:{found[2]}"


def _gpu_instructions(operation: Any) -> Iterator[tuple[str, str]]:
    """Names and lines of the operations inside `operation` that have no CPU code."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                name = child.operation.name
                if name.startswith(("nvvm.", "nvgpu.", "cute_nvgpu.")) or name in _GPU_ONLY:
                    yield name, _line_of(child.operation)
                yield from _gpu_instructions(child.operation)
