"""The kernels of each architecture. The only host module that distinguishes architectures."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tiles.decode_costs import HOPPER_COSTS, DecodeCosts
from flash_mask_cute.call.tiles.rows import BwdRow, FwdRow
from flash_mask_cute.call.tiles.tables import (
    SM90_BWD,
    SM90_FWD,
    SM90_STATISTICS,
    SM90_TANGENT,
    SM100_BWD,
    SM100_FWD,
    SM103_FWD,
)
from flash_mask_cute.limits import MAX_HEAD_DIM, MAX_WIDE_HEAD_DIM
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.target import Target

# keys of a tile of two CTAs that exchange probabilities
WIDE_TILE_N = 128

DqOrder: TypeAlias = Literal["accumulators", "lanes"]


@dataclass(frozen=True)
class AttentionKernel:
    """The attention kernel of one direction. load_class, load_traits: load its class, and that of
    its traits (`FwdTraits`, `BwdTraits`). They import device code."""

    class_name: str
    cache_name: str
    load_class: Callable[[], Any]
    load_traits: Callable[[], Any]

    @tells_what_to_install()
    def traits(self, tiles: Any, **more: Any) -> Any:
        """The traits for tiles (`FwdTiles`, `BwdTiles`), by their fields of the same names, and of
        other fields. They are the same for both dtypes of 16 bits."""
        from cutlass import BFloat16  # here: a package import must not wait for the compiler's

        kind = self.load_traits()
        names = {x.name for x in fields(kind)}
        same = {name: value for name, value in asdict(tiles).items() if name in names}
        return kind(BFloat16, **same, **more)

    def options(self, tiles: Any) -> dict[str, Any]:
        """The fields of tiles that the kernel's class takes."""
        names = {x.name for x in fields(self.load_class())}
        return {name: value for name, value in asdict(tiles).items() if name in names}


@dataclass(frozen=True)
class ForwardKernel(AttentionKernel):
    """rows: of the tile table. packed_rows: query rows that are stored together, a warpgroup's or a
    warp's; packed heads must divide them. causal_each: sequences may differ in being causal.
    has_polynomial: a polynomial may compute a share of exponentials. orders_sums: sums may be of
    fixed splits (`core/fixed_splits.py`). decodes_whole: tiles of decoding are also for one pass
    over keys in rows. caches_bias: rows of tables may stay in shared memory. decode_costs: None if
    not measured. gathers_keys: keys of small selected blocks may lie side by side. load_wide: loads
    the class for wide values with tiles of WIDE_TILE_N keys."""

    rows: tuple[FwdRow, ...]
    packed_rows: int
    causal_each: bool
    has_polynomial: bool = False
    orders_sums: bool = False
    decodes_whole: bool = False
    has_lists_per_warpgroup: bool = False
    caches_bias: bool = False
    most_head_dim: int = MAX_HEAD_DIM
    decode_costs: DecodeCosts | None = None
    gathers_keys: bool = False
    load_wide: Callable[[], Any] | None = None

    def of(self, head_dim_v: int, tile_n: int) -> ForwardKernel:
        """The same, with the class for values of this width and its traits."""
        load = self.load_wide
        if load is None or head_dim_v <= MAX_HEAD_DIM or tile_n < WIDE_TILE_N:
            return self
        name, load_traits = "WideForwardSm90", lambda: load().traits_type
        return replace(self, class_name=name, load_class=load, load_traits=load_traits)


class EntryKernels(NamedTuple):
    """The classes, or classes of traits, of kernels that walk over batch entries. shared: sums
    gradients of aux tensors alone. short, entries: make all gradients of short sequences, with all
    keys of an entry in a tile and with some of them."""

    shared: Any
    short: Any
    entries: Any


def _absent() -> Any:
    raise NotImplementedError("the architecture does not have these kernels")


@dataclass(frozen=True)
class BackwardKernel(AttentionKernel):
    """rows: of the tile table. dq_order: order of the sums of dQ in memory (`BwdPostprocess`).
    splits_groups: several CTAs may share the query heads of a group. splits_keys: warpgroups may
    have keys of their own in heads wider than 128. orders_aux: gradients of aux tensors may be
    summed in a fixed order. pairs_take_turns: pairs of CTAs may sum dQ in a fixed order, or store
    where they come first. gathers_queries: it takes selections as query lists. limits: loads the
    module with the limits of its threads and shared memory. load_wide: loads the class for heads
    above MAX_HEAD_DIM."""

    rows: tuple[BwdRow, ...]
    dq_order: DqOrder
    splits_groups: bool
    splits_keys: bool
    orders_aux: bool
    pairs_take_turns: bool
    gathers_queries: bool = False
    has_lists_per_warpgroup: bool = False
    has_limits: bool = False
    has_entry_kernels: bool = False
    limits: Callable[[], Any] = _absent
    entry_kernels: Callable[[], EntryKernels] = _absent
    entry_traits: Callable[[], EntryKernels] = _absent
    load_wide: Callable[[], Any] | None = None

    def of(self, head_dim: int) -> BackwardKernel:
        """The same, with the class for heads of this width and its traits."""
        load = self.load_wide
        if load is None or head_dim <= MAX_HEAD_DIM:
            return self
        return replace(self, load_class=load, load_traits=lambda: load().traits_class)


@dataclass(frozen=True)
class ArchSpec:
    """The kernels of an architecture.

    name: of its family, for messages. load_columns: loads the `Columns` of its score tiles, the
    order of bits in memory. reads_mask_bits: its kernels read the bits of a mask_mod that was
    evaluated before attention. statistics, tangent: the kernels of statistics of P and of forward
    mode.
    """

    name: str
    forward: ForwardKernel
    backward: BackwardKernel
    load_columns: Callable[[], Any]
    reads_mask_bits: bool
    statistics: ForwardKernel | None = None
    tangent: ForwardKernel | None = None

    def of(self, problem: AttentionProblem) -> ArchSpec:
        """The same; for a problem of statistics or tangents their kernel is the forward."""
        forward = self.statistics if problem.statistics else None
        if problem.is_tangent:
            forward = self.tangent
        return self if forward is None else replace(self, forward=forward)


@functools.cache
def _device_code(path: str) -> Callable[[], Any]:
    """Loads "module:name" of this package, or a module, when it is called."""
    return functools.partial(pkgutil.resolve_name, f"flash_mask_cute.{path}")


@functools.cache
def _entry_kernels(shared: str, short: str, entries: str) -> Callable[[], EntryKernels]:
    """Loads the three when it is called, by paths as in `_device_code`."""
    return lambda: EntryKernels(*(_device_code(x)() for x in (shared, short, entries)))


SM90_BACKWARD = BackwardKernel(
    "FlashAttentionBackwardSm90",
    "flash_bwd_sm90",
    _device_code("sm90.flash_bwd:FlashAttentionBackwardSm90"),
    _device_code("sm90.flash_bwd_traits:BwdTraits"),
    SM90_BWD,
    "accumulators",
    splits_groups=True,
    splits_keys=True,
    orders_aux=True,
    pairs_take_turns=False,
    gathers_queries=True,
    has_lists_per_warpgroup=True,
    has_limits=True,
    has_entry_kernels=True,
    limits=_device_code("sm90.flash_bwd_limits"),
    entry_kernels=_entry_kernels(
        "sm90.flash_bwd_shared:SharedGradientsSm90",
        "sm90.flash_bwd_short:ShortBackwardSm90",
        "sm90.flash_bwd_entries:EntryBackwardSm90",
    ),
    load_wide=_device_code("sm90.flash_bwd_wide:WideBackwardSm90"),
    entry_traits=_entry_kernels(
        "sm90.flash_bwd_shared:SharedTraits",
        "sm90.flash_bwd_short_traits:ShortTraits",
        "sm90.flash_bwd_entries_traits:EntryTraits",
    ),
)
SM90 = ArchSpec(
    "Hopper",
    ForwardKernel(
        "FlashAttentionForwardSm90",
        "flash_fwd_sm90",
        _device_code("sm90.flash_fwd:FlashAttentionForwardSm90"),
        _device_code("sm90.flash_fwd_traits:FwdTraits"),
        SM90_FWD,
        packed_rows=64,
        causal_each=True,
        orders_sums=True,
        decodes_whole=True,
        has_lists_per_warpgroup=True,
        caches_bias=True,
        most_head_dim=MAX_WIDE_HEAD_DIM,
        decode_costs=HOPPER_COSTS,
        gathers_keys=True,
        load_wide=_device_code("sm90.flash_fwd_wide:WideForwardSm90"),
    ),
    SM90_BACKWARD,
    _device_code("sm90.wgmma:COLUMNS"),
    reads_mask_bits=True,
    statistics=ForwardKernel(
        "AttentionStatisticsSm90",
        "statistics_sm90",
        _device_code("sm90.flash_statistics:AttentionStatisticsSm90"),
        _device_code("sm90.flash_statistics:AttentionStatisticsSm90.traits_type"),
        SM90_STATISTICS,
        packed_rows=64,
        causal_each=False,
        decodes_whole=True,
    ),
    tangent=ForwardKernel(
        "AttentionTangentSm90",
        "flash_tangent_sm90",
        _device_code("sm90.flash_tangent:AttentionTangentSm90"),
        _device_code("sm90.flash_tangent:AttentionTangentSm90.traits_type"),
        SM90_TANGENT,
        packed_rows=64,
        causal_each=False,
        most_head_dim=128,
    ),
)


def _blackwell(fast_exp: bool) -> ArchSpec:
    """fast_exp: the device computes exponentials at twice the rate of 10.0."""
    return ArchSpec(
        "Blackwell",
        ForwardKernel(
            "FlashAttentionForwardSm100",
            "flash_fwd_sm100",
            _device_code("sm100.flash_fwd:FlashAttentionForwardSm100"),
            _device_code("sm100.flash_fwd_traits:FwdTraits"),
            SM103_FWD if fast_exp else SM100_FWD,
            packed_rows=32,
            causal_each=False,
            has_polynomial=True,
        ),
        BackwardKernel(
            "FlashAttentionBackwardSm100",
            "flash_bwd_sm100",
            _device_code("sm100.flash_bwd:FlashAttentionBackwardSm100"),
            _device_code("sm100.flash_bwd_traits:BwdTraits"),
            SM100_BWD,
            "lanes",
            splits_groups=False,
            splits_keys=False,
            orders_aux=False,
            pairs_take_turns=True,
        ),
        _device_code("sm100.umma:COLUMNS"),
        reads_mask_bits=False,
    )


SM100, SM103 = _blackwell(fast_exp=False), _blackwell(fast_exp=True)
_SPECS = {"sm_90a": SM90, "sm_100a": SM100, "sm_103a": SM103}


def arch_spec(target: Target) -> ArchSpec:
    """The kernels of a target."""
    return _SPECS[target.arch]
