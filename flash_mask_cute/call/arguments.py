"""The arguments of a host call, by name, in bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from flash_mask_cute.call.config import BwdConfig, FwdConfig
from flash_mask_cute.call.problem import Mods
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.checks import number_of


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Tensors(NamedTuple):
    """The tensors of a call of either direction, without those of its masks; None: not there.

    out, lse, lse_low: outputs of a forward, new tensors if None, and inputs of a backward.
    dq, dk, dv, dsink, daux: outputs of a backward; dq, dk and dv are new tensors if None.
    max_scores: an output of a forward, written only if given.
    q_starts: the argument q_start, if that is a tensor (`split_q_start`). kv_batch_idx, leftpad_k:
    beside page_table, the row of it that a sequence has, and the rows before its first key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None = None
    lse: Tensor | None = None
    lse_low: Tensor | None = None
    learnable_sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None
    daux: Sequence[Tensor | None] | None = None
    max_scores: Tensor | None = None
    page_table: Tensor | None = None
    q_starts: Tensor | None = None
    kv_batch_idx: Tensor | None = None
    leftpad_k: Tensor | None = None


class Masks(NamedTuple):
    """Masks beyond causal and window, and arguments that change scores."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    block_sparse_tensors_torch: Any = None
    startend_row_indices: Tensor | ColumnMask | None = None

    @property
    def mods(self) -> Mods:
        return Mods(self.score_mod, self.mask_mod)


NO_MASKS = Masks()


class Options(NamedTuple):
    """The other arguments of a call of either direction.

    q_start: a number, `END`, or `EACH` beside `Tensors.q_starts`; None: not given. config: a
    `FwdConfig` or a `BwdConfig`, by the direction, or None.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int | None = None
    window_size_right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_start: int | str | None = None
    num_splits: int = 0
    pack_gqa: bool | None = None
    return_lse: bool = True
    score_mod_bwd: Callable[..., Any] | None = None
    deterministic: bool = False
    config: Any = None


# the value of `Options.q_start` that stands for positions in a tensor
EACH = "each"
QStart: TypeAlias = int | str | Tensor | None


def split_q_start(q_start: Any) -> tuple[Tensor | None, Any]:
    """Split the argument q_start into `Tensors.q_starts` and `Options.q_start`."""
    return (q_start, EACH) if isinstance(q_start, Tensor) else (None, q_start)


# what only one direction has
_OF_FORWARD = (
    *("num_splits", "pack_gqa", "return_lse", "max_scores"),
    *("page_table", "kv_batch_idx", "leftpad_k"),
)
_OF_BACKWARD = ("dout", "dlse", "dq", "dk", "dv", "dsink", "daux", "score_mod_bwd", "deterministic")


def keywords_of(direction: Direction) -> tuple[str, ...]:
    """The names of a host call's arguments, q, k and v first."""
    others = _OF_BACKWARD if direction is Direction.FORWARD else _OF_FORWARD
    names = Tensors._fields + Masks._fields + Options._fields
    return tuple(name for name in names if name not in (*others, "q_starts"))


# What runs a call, found by its key: of the tensors and masks of any call with that key it makes
# (out, lse), or (dq, dk, dv).
PreparedFwd: TypeAlias = Callable[[Tensors, Masks | None], tuple[Tensor, Tensor | None]]
PreparedBwd: TypeAlias = Callable[[Tensors, Masks | None], tuple[Tensor, Tensor, Tensor]]


class AttentionCall(NamedTuple):
    """A call of either direction. Made when a call is prepared, not when a prepared call is
    found."""

    direction: Direction
    tensors: Tensors
    masks: Masks = NO_MASKS
    options: Options = Options()

    @staticmethod
    def create(direction: Direction, *operands: Tensor, **keywords: Any) -> AttentionCall:
        """Made from the arguments of `_flash_attn_fwd` or `_flash_attn_bwd`.

        Raises:
            TypeError: the call has no such keyword, or config is no configuration.
        """
        positions: tuple[str, ...] = ("q", "k", "v")
        if direction is Direction.BACKWARD:
            positions += ("out", "dout", "lse")
        given: Mapping[str, Any] = dict(zip(positions, operands, strict=True)) | keywords
        unknown = sorted(given.keys() - set(keywords_of(direction)))
        if unknown:
            raise TypeError(f"unexpected keyword arguments {unknown}")

        def fields(kind: Any) -> dict[str, Any]:
            return {name: given[name] for name in kind._fields if name in given}

        given = dict(given)
        given["q_starts"], given["q_start"] = split_q_start(given.get("q_start"))
        options = Options(**fields(Options))
        config_kind: Any = FwdConfig if direction is Direction.FORWARD else BwdConfig
        scale = number_of("softmax_scale", options.softmax_scale)
        options = options._replace(
            softmax_scale=scale, config=config_kind.from_value(options.config)
        )
        return AttentionCall(direction, Tensors(**fields(Tensors)), Masks(**fields(Masks)), options)

    @staticmethod
    def made(
        direction: Direction, tensors: Tensors, masks: Masks | None, options: tuple[Any, ...]
    ) -> AttentionCall:
        """Made from the arguments of a look-up of prepared calls; options: fields of `Options`."""
        return AttentionCall(direction, tensors, masks or NO_MASKS, Options._make(options))

    def arguments(self) -> dict[str, Any]:
        """All arguments of the host call but config, by name."""
        given = self.tensors._asdict() | self.masks._asdict() | self.options._asdict()
        if self.tensors.q_starts is not None:
            given["q_start"] = self.tensors.q_starts
        return {name: given[name] for name in keywords_of(self.direction) if name != "config"}

    @property
    def has_lengths(self) -> bool:
        """Whether sequences differ in length, or may."""
        x, options = self.tensors, self.options
        lengths = x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_q, x.seqused_k, x.page_table
        return any(y is not None for y in (*lengths, options.max_seqlen_q, options.max_seqlen_k))


def window_sides(window_size: Any) -> tuple[int | None, int | None]:
    """Left and right sides, as the host calls take them, of a pair in which -1 may stand for None.

    Raises:
        ValueError: it is no pair.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError):
        wrong = f"window_size must be (left, right), got {window_size!r}"
        if isinstance(window_size, bool):
            wrong += (
                "; arguments by position are those of flash-attn-4, which has no dropout_p before "
                "softmax_scale and causal: pass them by keyword"
            )
        raise ValueError(wrong) from None
    return None if left == -1 else left, None if right == -1 else right
