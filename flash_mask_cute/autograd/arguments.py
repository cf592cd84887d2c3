"""The arguments of a public call, on their way to the host calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.call.arguments import QStart
from flash_mask_cute.interface import (
    BwdConfig,
    FwdConfig,
)
from flash_mask_cute.masks.column_mask import ColumnMask


class Configs(NamedTuple):
    """The configurations of both directions."""

    forward: FwdConfig | None
    backward: BwdConfig | None

    @staticmethod
    def create(config: Any) -> Configs:
        """The configurations that the argument `config` stands for.

        Raises:
            TypeError, ValueError: as `FwdConfig.from_value` and `BwdConfig.from_value`, or
                it is a tuple of another length than 2.
        """
        if not isinstance(config, tuple):
            return Configs(FwdConfig.from_value(config), BwdConfig.from_value(config))
        if len(config) != 2:
            raise ValueError(f"config must be a pair (forward, backward), got {config!r}")
        return Configs(FwdConfig.from_value(config[0]), BwdConfig.from_value(config[1]))


NO_CONFIGS = Configs(None, None)


class Call(NamedTuple):
    """The arguments of a call except q, k, v and the sink, with the names of the host path."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window_size_left: int | None
    window_size_right: int | None
    softcap: float
    score_mod: Mod | None
    mask_mod: Mod | None
    aux_tensors: Sequence[Tensor] | None
    block_sparse_tensors_torch: Any
    startend_row_indices: Tensor | ColumnMask | None
    score_mod_bwd: Mod | None
    deterministic: bool
    pack_gqa: bool | None
    config: Any
    q_start: QStart = None
    page_table: Tensor | None = None
    num_splits: int = 0

    @property
    def configs(self) -> Configs:
        return NO_CONFIGS if self.config is None else Configs.create(self.config)

    @property
    def has_tensors(self) -> bool:
        return not (
            self.cu_seqlens_q is self.cu_seqlens_k is self.seqused_q is self.seqused_k is None
            and self.aux_tensors is self.block_sparse_tensors_torch is None
            and self.startend_row_indices is None
            and not isinstance(self.q_start, Tensor)
        )


def splits_recorded(num_splits: int) -> int:
    """`num_splits` of a call of which autograd records a graph: where it is left to the library,
    that takes one pass, of whose bits the backward is the derivative.

    No property of `Call`: Dynamo of torch 2.9 does not evaluate those of a NamedTuple.
    """
    return num_splits or 1


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
NO_LENGTHS: dict[str, Any] = dict.fromkeys(LENGTHS)
