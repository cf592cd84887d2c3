"""TMA of the attention kernels: atoms with coordinate tensors, and their tiles.

Query heads that share keys may share a tile's rows, so rows are (head, position) pairs. Packed
sequences, and sequences with unused rows, are views in which TMA clips a tile at the end of its
sequence.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental import primitives

from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.limits import LEAST_BOX

# bound of a ragged row coordinate: no sequence is longer (see `ragged_rows`)
RAGGED_BOUND = 1 << 26


class Operands(NamedTuple):
    """TMA atoms with their coordinate tensors.

    q, o, v: ((head, row), head_dim, ...); k: (row, head_dim, head, ...). The last mode is the
    batch. If sequences are packed, q and k have no batch mode, and o and v have the mode of
    `ragged_rows`. v has both modes if the batch is dense and lengths vary. For pages, the batch
    mode of k and v counts pages; both are None if rows are copied one by one. v and o are None if
    the kernel has none.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom | None
    k: cute.Tensor | None
    v_atom: cute.CopyAtom | None
    v: cute.Tensor | None
    o_atom: cute.CopyAtom | None
    o: cute.Tensor | None

    @property
    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        atoms = self.q_atom, self.k_atom, self.v_atom, self.o_atom
        return tuple(atom for atom in atoms if atom is not None)

    @staticmethod
    def of_forward(traits, mQ, mK, mV, mO, lengths: Lengths, load=None) -> "Operands":
        """The operands of a forward by the layouts of its traits, (rows, columns, stages), with V's
        transposed. load: the operation, if not that of a single CTA."""
        packed_q, packed_k = lengths.cu_seqlens_q is not None, lengths.cu_seqlens_k is not None
        ends_early = lengths.seqused_k is not None or traits.page_box is not None
        load = cpasync.CopyBulkTensorTileG2SOp() if load is None else load
        load_k = load
        if traits.multicasts_keys:
            load_k = cpasync.CopyBulkTensorTileG2SMulticastOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        operands: list = []
        layout_k, layout_v = traits.layouts_loaded()
        layout_k, layout_v = one_stage(layout_k), cute.select(layout_v, mode=[1, 0])
        by_rows = traits.page_box is not None and traits.page_box % LEAST_BOX != 0
        if traits.page_box is not None and not by_rows:
            layout_k, layout_v = (rows_of_stage(x, traits.page_box) for x in (layout_k, layout_v))
        elif traits.multicasts_keys:
            layout_k = rows_of_stage(layout_k, traits.box_k[0])
        layout_q = traits.layout_q()
        if traits.spread_rows is not None:
            layout_q = rows_of_stage(one_stage(layout_q), traits.spread_rows)
        of_v, of_o = (packed_k, ends_early), (packed_q,)
        for op, tensor, rows, given, layout, tile in (
            (load, mQ, head_rows, (packed_q,), layout_q, (traits.row_tile, traits.tile_d)),
            (None if by_rows else load_k, mK, key_rows, (packed_k,), layout_k, traits.box_k),
            (None if by_rows else load, mV, sequence_rows, of_v, layout_v, traits.box_v),
            (store, mO, sequence_rows, of_o, traits.layout_o(), traits.box_o),
        ):
            if op is None or tensor is None:
                operands += [None, None]
            else:
                view = rows(tensor, *given)
                operands += cpasync.make_tiled_tma_atom(op, view, one_stage(layout), tile)
        return Operands(*operands)


def head_rows(tensor: cute.Tensor, is_packed: bool) -> cute.Tensor:
    """View (batch, row, head, d), or (row, head, d) if sequences are packed, by (head, row) pairs.
    Returns ((head, row), d, batch), or ((head, row), d)."""
    modes = [1, 0, 2] if is_packed else [2, 1, 3, 0]
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))
    return cute.group_modes(view, 0, 2)


def group_rows(tensor: cute.Tensor, group: int) -> cute.Tensor:
    """View (batch, row, head, d), or (row, head, d) if sequences are packed, by groups of `group`
    neighbouring heads, so that what is after the last head of a group is of no other group.

    Returns ((head of a group, row, group), d, batch), or ((head of a group, row, group), d).
    """
    (*batch, rows, heads, d), (*of_batch, of_row, of_head, of_d) = tensor.shape, tensor.stride
    shape = ((group, rows, heads // group), d, *batch)
    stride = ((of_head, of_row, of_head * group), of_d, *of_batch)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def sequence_rows(tensor: cute.Tensor, is_packed: bool, has_used: bool = False) -> cute.Tensor:
    """A view of `head_rows` for `of_sequence` and `readable_rows`. has_used: a dense sequence may
    have unused rows at its end."""
    view = head_rows(tensor, is_packed)
    return ragged_rows(view) if is_packed or has_used else view


def key_rows(tensor: cute.Tensor, is_packed: bool) -> cute.Tensor:
    """View (batch, row, head, d), or (row, head, d) if sequences are packed, as (row, d, head,
    batch), or (row, d, head): rows after a packed sequence's end belong to the next one."""
    modes = [0, 2, 1] if is_packed else [1, 3, 2, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def of_sequence(
    tensor: cute.Tensor, is_packed: bool, batch_idx: Int32, offset: Int32, length: Int32
) -> cute.Tensor:
    """The ((head, row), d) tensor of a sequence of `sequence_rows`."""
    if is_packed:
        return at_ragged_sequence(tensor, offset, length)
    return tensor[None, None, batch_idx]


def ragged_rows(tensor: cute.Tensor) -> cute.Tensor:
    """View ((heads, rows), d) as ((heads, RAGGED_BOUND), d, rows), or ((heads, rows), d, batch) as
    ((heads, rows), d, rows, batch).

    The sum of both row coordinates addresses a row. The first coordinate ends where the sequence
    ends, so TMA clips a tile there (the ragged tensors of Triton, in the form with a shifted base
    pointer that quack uses for stores).
    """
    (heads, rows), dim, *batch = tensor.shape
    (stride_h, stride_row), stride_d, *stride_batch = tensor.stride
    bound = rows if batch else RAGGED_BOUND
    shifted = cute.domain_offset(((0, -bound), 0, *(0 for _ in batch)), tensor)
    layout = cute.make_layout(
        ((heads, bound), dim, (1 << 31) - 1, *batch),
        stride=((stride_h, stride_row), stride_d, stride_row, *stride_batch),
    )
    return cute.make_tensor(shifted.iterator, layout)


def at_ragged_sequence(
    tensor: cute.Tensor, offset: Int32, length: Int32, bound: int | Int32 = RAGGED_BOUND
) -> cute.Tensor:
    """The rows of one sequence of a `ragged_rows` view ((heads, bound), d, rows)."""
    return cute.domain_offset(((0, bound - length), 0), tensor[None, None, offset + length])


class RowSide(NamedTuple):
    """The sequences of the queries or of the keys. has_used: they may have unused rows at their
    ends. rows: in a batch entry, or in all if they are packed."""

    is_packed: bool
    has_used: bool
    rows: Int32

    @staticmethod
    def of_queries(lengths: Lengths) -> "RowSide":
        packed, used = lengths.cu_seqlens_q is not None, lengths.seqused_q is not None
        return RowSide(packed, used, lengths.seqlen_q)

    @staticmethod
    def of_keys(lengths: Lengths) -> "RowSide":
        packed, used = lengths.cu_seqlens_k is not None, lengths.seqused_k is not None
        return RowSide(packed, used, lengths.seqlen_k)


def readable_rows(
    tensor: cute.Tensor, side: RowSide, batch_idx: Int32, offset: Int32, length: Int32, row: Int32
) -> tuple[cute.Tensor, Int32]:
    """The rows of one sequence of `sequence_rows`, and the first row of a tile to read.

    Zeros follow the last row in use. If TMA clips at `length`, a tile that begins past the end is
    moved to the last row, and a tile of an empty sequence to a row of another sequence: TMA faults
    on a tile that lies outside as a whole.
    """
    if side.is_packed:
        length = cutlass.max(length, 1)
        tensor = at_ragged_sequence(tensor, cutlass.min(offset, side.rows - 1), length)
    elif side.has_used:
        length = cutlass.max(cutlass.min(length, side.rows), 1)
        tensor = tensor[None, None, None, batch_idx]
        tensor = at_ragged_sequence(tensor, Int32(0), length, side.rows)
    else:
        return tensor[None, None, batch_idx], row
    return tensor, cutlass.min(row, length - 1)


def rows_of_stage(layout, rows: int, columns: int | None = None):
    """The layout of the first rows of one of a stage, and of its first columns."""
    if columns is None:
        columns = cute.size(layout, mode=[1])
    return cute.composition(layout, (cute.make_layout(rows), cute.make_layout(columns)))


def one_stage(layout):
    return cute.select(layout, mode=[0, 1])


def tile_of(atom: cute.CopyAtom, tensor: cute.Tensor, first, tile, smem: cute.Tensor, column=0):
    """TMA partitions (global, shared) of the tile from row (head, row) `first` and `column`."""
    gmem = cute.local_tile(cute.domain_offset((first, column), tensor), tile, (0, 0))
    return blocks_of(atom, gmem, smem)


def blocks_of(atom: cute.CopyAtom, blocks: cute.Tensor, smem: cute.Tensor):
    """TMA partitions of `blocks` (tile, tile, n_blocks) and of shared memory with stages."""
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(blocks, 0, 2)
    )
    return g, s


@cute.jit
def copy_bulk(gmem: cute.Tensor, smem: cute.Tensor, barrier: cute.Pointer):
    """Copy contiguous fp32 values of a static number, a multiple of 4, completing on `barrier`."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gmem, smem, mbar_ptr=barrier)


@cute.jit
def store_bulk(smem: cute.Pointer, gmem: cute.Pointer, count: cutlass.Constexpr):
    """Copy `count` contiguous fp32 values from shared to global memory, as one bulk group."""
    with cute.arch.elect_one():
        primitives.cp_async_bulk_global_shared_cta(gmem, smem, count * 4)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_bulk(smem: cute.Pointer, gmem: cute.Pointer, count: cutlass.Constexpr):
    """Add `count` contiguous fp32 values in shared to those in global memory, as one bulk group."""
    with cute.arch.elect_one():
        primitives.cp_reduce_async_bulk_global_shared_cta(
            gmem,
            smem,
            count * 4,
            op=primitives.CpReduceOp.ADD,
            type=primitives.CpReduceType.F32,
        )
    cute.arch.cp_async_bulk_commit_group()
