"""The arguments of a call of attention, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from flash_mask_cute.block_sparsity import mod_of_block_mask
from flash_mask_cute.call.problem import Mods
from flash_mask_cute.call.settings import BwdConfig, FwdConfig
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import NO_START, QStart, split_q_start
from flash_mask_cute.runtime.checks import number_of
from flash_mask_cute.runtime.named_tuples import made, replaced


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class CallLengths(NamedTuple):
    """Where the sequences of a call begin, and how many of their rows are in use. q_starts: the
    argument q_start, if that is a tensor (`QStart`)."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    q_starts: Tensor | None = None

    def of_sequences(self) -> tuple[Tensor | None, ...]:
        """Those by which sequences may have other lengths than q, k and v: all but q_starts."""
        return self[:-1]


class OptionalTensors(NamedTuple):
    """Tensors of a forward that few calls have. Such a call has no gradients.

    A field here is all that carries such a tensor from a public function to the kernels, the CPU
    path and torch's operators.

    kv_batch_idx, leftpad_k: beside page_table, the row of it that a sequence uses, and the rows
    before its first key. causal_per_seq: the argument causal, if that is a tensor; `Options.causal`
    is then False. k_descale, v_descale: factors of keys and values in fp8.
    """

    kv_batch_idx: Tensor | None = None
    leftpad_k: Tensor | None = None
    causal_per_seq: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class Gradients(NamedTuple):
    """Of a backward: dout and dlse are inputs, the others outputs."""

    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    daux: Sequence[Tensor | None] | None = None


# shared, so that an `is` finds a call without any of them
NO_LENGTHS, NO_OPTIONAL, NO_GRADIENTS = CallLengths(), OptionalTensors(), Gradients()


def lengths_of(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_q: Tensor | None,
    seqused_k: Tensor | None, page_table: Tensor | None, q_starts: Tensor | None,
) -> CallLengths:  # fmt: skip
    """The lengths of a call; one object if all are None."""
    if cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is q_starts is None:
        return NO_LENGTHS
    given = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, q_starts
    return made(CallLengths, given)


def optional_of(given: Iterable[Tensor | None]) -> OptionalTensors:
    """The optional tensors of a call, in the order of the fields; one object if all are None."""
    found = OptionalTensors._make(given)
    return NO_OPTIONAL if all(x is None for x in found) else found


class Tensors(NamedTuple):
    """The tensors of a call of either direction, without those of its masks.

    out, lse, lse_low: outputs of a forward, and inputs of a backward. max_scores: an output of a
    forward. lse_low and max_scores are written only if given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    learnable_sink: Tensor | None = None
    lengths: CallLengths = NO_LENGTHS
    optional: OptionalTensors = NO_OPTIONAL
    out: Tensor | None = None
    lse: Tensor | None = None
    lse_low: Tensor | None = None
    max_scores: Tensor | None = None
    gradients: Gradients = NO_GRADIENTS

    @property
    def have_shared_keys(self) -> bool:
        """Whether k and v are one batch entry for several packed sequences, if they are valid."""
        x, of = self, self.lengths
        if of.cu_seqlens_q is None or of.cu_seqlens_k is not None or of.page_table is not None:
            return False
        if not (isinstance(x.k, Tensor) and isinstance(of.cu_seqlens_q, Tensor)):
            return False
        return x.k.dim() == 4 and x.k.shape[0] == 1 and of.cu_seqlens_q.shape[0] != 2

    @staticmethod
    def from_names(given: Mapping[str, Any]) -> Tensors:
        """Made from those among the arguments of a host call, and q_starts."""
        own, lengths, optional, gradients = (
            {name: given[name] for name in kind._fields if name in given}
            for kind in (Tensors, CallLengths, OptionalTensors, Gradients)
        )
        return Tensors(
            **own,
            lengths=CallLengths(**lengths),
            optional=OptionalTensors(**optional),
            gradients=Gradients(**gradients),
        )

    def by_name(self) -> dict[str, Any]:
        """All tensors, as arguments of the host calls are named."""
        found = self._asdict()
        for name in _BUNDLES:
            found |= found.pop(name)._asdict()
        return found

    def flat(self) -> tuple[Any, ...]:
        """All tensors in a row, as autograd sees them."""
        q, k, v, sink, lengths, optional, *others, gradients = self
        return q, k, v, sink, *lengths, *optional, *others, *gradients


# the fields of `Tensors` that hold several
_BUNDLES = "lengths", "optional", "gradients"


class Masks(NamedTuple):
    """Masks of a call, except causal and window, and mods, named as in the host calls."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    block_sparse_tensors_torch: Any = None
    startend_row_indices: Tensor | ColumnMask | None = None

    @property
    def mods(self) -> Mods:
        return Mods(self.score_mod, self.mask_mod)

    def with_own_mod(self) -> Masks:
        """The same, with the mask_mod that the block lists keep if there is no other."""
        if self.block_sparse_tensors_torch is None or self.mask_mod is not None:
            return self
        return replaced(self, mask_mod=mod_of_block_mask(self.block_sparse_tensors_torch))


NO_MASKS = Masks()


def masks_of(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    aux_tensors: Sequence[Tensor] | None,
    lists: Any,
    columns: Tensor | ColumnMask | None,
) -> Masks | None:
    """The masks of a call; None if there are none."""
    # not a chain of `is`: Dynamo of torch 2.9 does not know two functions from inside
    has_mods = score_mod is not None or mask_mod is not None or aux_tensors is not None
    if not has_mods and lists is None and columns is None:
        return None
    return Masks(score_mod, mask_mod, aux_tensors, lists, columns)


class Options(NamedTuple):
    """Arguments of a call that are neither tensors nor masks. num_splits and those after it are of
    the forward. is_recorded: autograd records the call."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int | None = None
    window_size_right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_start: QStart = NO_START
    num_splits: int = 0
    seqlen_k_per_split: int | None = None
    pack_gqa: bool | None = None
    return_lse: bool = True
    config: Any = None
    is_recorded: bool = False

    def recorded(self) -> Options:
        """The options as autograd records them, with LSE. If the library chooses the number of
        splits, it is one pass, so that the backward is the derivative of its bits."""
        number, keys, pack_gqa, _, config, _ = self[_SHARED:]
        number = number or (1 if keys is None else 0)
        return made(Options, (*self[:_SHARED], number, keys, pack_gqa, True, config, True))

    def of_backward(self) -> Options:
        """Those of the backward of this forward: options of the forward alone are defaults."""
        return made(Options, self[:_SHARED] + NO_OPTIONS[_SHARED:])


# the number of options of both directions, which are the first ones
_SHARED = Options._fields.index("num_splits")


class BackwardOptions(NamedTuple):
    """Options of the backward alone."""

    score_mod_bwd: Callable[..., Any] | None = None
    deterministic: bool = False
    config: Any = None


NO_OPTIONS, NO_BACKWARD_OPTIONS = Options(), BackwardOptions()


def backward_options_of(
    score_mod_bwd: Callable[..., Any] | None, deterministic: bool, config: Any
) -> BackwardOptions:
    """The options of a call's backward; one object if all have their defaults."""
    if score_mod_bwd is None and deterministic is False and config is None:
        return NO_BACKWARD_OPTIONS
    return BackwardOptions(score_mod_bwd, deterministic, config)


# what only one direction has
_OF_FORWARD = {"max_scores", "page_table", *OptionalTensors._fields, *Options._fields[_SHARED:]}
_OF_BACKWARD = {*Gradients._fields, *BackwardOptions._fields}
_NAMES = tuple(
    name
    for kind in (Tensors, CallLengths, OptionalTensors, Gradients, Masks, Options, BackwardOptions)
    for name in kind._fields
    if name not in (*_BUNDLES, "q_starts", "causal_per_seq", "config", "is_recorded")
)


def keywords_of(direction: Direction) -> tuple[str, ...]:
    """The names of a host call's arguments, q, k and v first, config last."""
    others = _OF_BACKWARD if direction is Direction.FORWARD else _OF_FORWARD
    return (*(name for name in _NAMES if name not in others), "config")


# What runs a call, found by its key: of the tensors and masks of any call with that key it makes
# (out, lse), or (dq, dk, dv).
PreparedFwd: TypeAlias = Callable[[Tensors, Masks | None], tuple[Tensor, Tensor | None]]
PreparedBwd: TypeAlias = Callable[[Tensors, Masks | None], tuple[Tensor, Tensor, Tensor]]


class AttentionCall(NamedTuple):
    """A call of attention: its form from the public functions to the plan. Autograd makes the call
    of the backward, in the same form."""

    tensors: Tensors
    masks: Masks | None = None
    options: Options = NO_OPTIONS
    backward: BackwardOptions = NO_BACKWARD_OPTIONS
    direction: Direction = Direction.FORWARD

    @staticmethod
    def from_arguments(direction: Direction, *operands: Tensor, **keywords: Any) -> AttentionCall:
        """Made from the arguments of `_flash_attn_fwd` or `_flash_attn_bwd`. Raises TypeError: the
        call has no such keyword, or config is no configuration."""
        is_forward = direction is Direction.FORWARD
        positions: tuple[str, ...] = ("q", "k", "v")
        if not is_forward:
            positions += ("out", "dout", "lse")
        given: dict[str, Any] = dict(zip(positions, operands, strict=True)) | keywords
        unknown = sorted(given.keys() - set(keywords_of(direction)))
        if unknown:
            raise TypeError(f"unexpected keyword arguments {unknown}")

        def fields(kind: Any) -> dict[str, Any]:
            return {name: given[name] for name in kind._fields if name in given}

        given["q_starts"], given["q_start"] = split_q_start(given.get("q_start"))
        given["causal_per_seq"], given["causal"] = split_causal(given.get("causal", False))
        given["softmax_scale"] = number_of("softmax_scale", given.get("softmax_scale"))
        config_kind: Any = FwdConfig if is_forward else BwdConfig
        config = config_kind.from_value(given.pop("config", None))
        options, backward = Options(**fields(Options)), BackwardOptions(**fields(BackwardOptions))
        if is_forward:
            options = replaced(options, config=config)
        else:
            backward = replaced(backward, config=config)
        masks = masks_of(*Masks(**fields(Masks)))
        return AttentionCall(Tensors.from_names(given), masks, options, backward, direction)

    @property
    def config(self) -> Any:
        """The `FwdConfig` or `BwdConfig` of the call's direction, or None."""
        is_forward = self.direction is Direction.FORWARD
        return self.options.config if is_forward else self.backward.config

    @property
    def has_lengths(self) -> bool:
        """Whether sequences differ in length, or may."""
        options = self.options
        given = *self.tensors.lengths.of_sequences(), options.max_seqlen_q, options.max_seqlen_k
        return any(x is not None for x in given)


def configs_of(config: Any) -> tuple[Any, Any]:
    """The argument `config` of a public function: that of the forward, and that of the backward.
    Raises ValueError: it is a tuple of another length than 2."""
    if not isinstance(config, tuple):
        return config, config
    if len(config) != 2:
        raise ValueError(f"config must be a pair (forward, backward), got {config!r}")
    return config


# causal masking of all sequences, or of those where an int32 tensor (batch,) is not 0
CausalArgument: TypeAlias = bool | Tensor


def split_causal(causal: CausalArgument) -> tuple[Tensor | None, bool]:
    """The argument causal as `OptionalTensors.causal_per_seq` and `Options.causal`."""
    return (causal, False) if isinstance(causal, Tensor) else (None, causal)


BY_POSITION = (
    "arguments by position are those of flash-attn-4, which has no dropout_p before softmax_scale "
    "and causal: pass all that follows v, or the lengths, by keyword"
)


def window_sides(window_size: Any) -> tuple[int | None, int | None]:
    """Left and right sides of a pair in which -1 may stand for None. Raises ValueError: it is no
    pair."""
    sides: Any = window_size
    if type(sides) is not tuple and isinstance(sides, Tensor):
        sides = ()
    try:
        left, right = sides
    except (TypeError, ValueError):
        wrong = f"window_size must be (left, right), got {window_size!r}"
        if isinstance(window_size, bool):
            wrong += f"; {BY_POSITION}"
        raise ValueError(wrong) from None
    return None if left == -1 else left, None if right == -1 else right
