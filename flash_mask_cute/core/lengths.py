"""Starts and lengths of the sequences of a launch, as kernels receive them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.tile_scheduler import WorkTile
from flash_mask_cute.core.walk_ring import CHUNK_FIELDS, Block
from flash_mask_cute.core.work_ring import WORK_FIELDS, Work
from flash_mask_cute.limits import AT_END
from flash_mask_cute.seqlen_info import SeqlenInfoQK


class Lengths(NamedTuple):
    """Starts and lengths of sequences; any of the tensors may be absent.

    q_start: the position of each sequence's first query, (batch,) int32 or one number for all. The
    number AT_END stands for the number of keys minus that of queries. None: not given.

    num_sequences: their number, if all have the keys of one batch entry in common. None: each has
    its own keys. Keys in common are dense, and in a backward the queries are packed.
    """

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    seqlen_q: Int32
    seqlen_k: Int32
    q_start: cute.Tensor | Int32 | None = None
    num_sequences: Int32 | None = None

    @property
    def keys_may_be_absent(self) -> bool:
        """Whether a single sequence may have no key, although there are some."""
        return self.cu_seqlens_k is not None or self.seqused_k is not None

    @staticmethod
    def create(
        mQ: cute.Tensor,
        mK: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        q_start: cute.Tensor | Int32 | None = None,
        shared_kv: bool = False,
    ) -> "Lengths":
        """Made from tensors (batch, row, ...), or (row, ...) if sequences are packed. shared_kv:
        all sequences have the keys of mK's only batch entry."""
        seqlen_q, seqlen_k = (
            t.shape[1] if cu_seqlens is None else t.shape[0]
            for t, cu_seqlens in ((mQ, cu_seqlens_q), (mK, cu_seqlens_k))
        )
        tensors = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        num_sequences = None
        if shared_kv:
            packed = cu_seqlens_q is not None
            num_sequences = cu_seqlens_q.shape[0] - 1 if packed else mQ.shape[0]
        return Lengths(*tensors, seqlen_q, seqlen_k, q_start, num_sequences)

    @property
    def work_fields(self) -> tuple[str, ...]:
        return WORK_FIELDS if self.q_start is None else (*WORK_FIELDS, "q_start")

    @property
    def chunk_fields(self) -> tuple[str, ...]:
        return CHUNK_FIELDS if self.num_sequences is None else (*CHUNK_FIELDS, "sequence")

    def kv_entry(self, batch_idx: Int32) -> Int32:
        """The batch entry of a sequence's dense keys."""
        return batch_idx if self.num_sequences is None else Int32(0)

    def of_block(self, work: Work, block: Block) -> Work:
        """The work tile of a query block, with the queries of its sequence."""
        return work if block.sequence is None else self.of_sequence(work, block.sequence)

    def of_sequence(self, work: Work, sequence: Int32) -> Work:
        """The work tile of keys in common, with the queries of one sequence."""
        used = SeqlenInfoQK.create(
            sequence,
            self.seqlen_q,
            work.seqlen_k,
            self.cu_seqlens_q,
            mSeqUsedQ=self.seqused_q,
        )
        return work._replace(
            batch_idx=sequence,
            offset_q=Int32(used.offset_q),
            seqlen_q=Int32(used.seqlen_q),
            q_start=self.first_position(sequence, used),
        )

    def first_position(self, batch_idx: Int32, used: SeqlenInfoQK) -> Int32 | None:
        """The position of a sequence's first query; used: its lengths."""
        if self.q_start is None:
            return None
        if not isinstance(self.q_start, cutlass.Numeric):
            return self.q_start[batch_idx]
        return cutlass.select_(self.q_start == AT_END, used.seqlen_k - used.seqlen_q, self.q_start)


@cute.jit
def describe(tile: WorkTile, lengths: Lengths, blocks_are_keys: cutlass.Constexpr) -> Work:
    """The ring entry of a work tile of queries, or of keys. Of keys in common, it has the queries
    in use of all sequences as if they were one."""
    batch_idx = cutlass.select_(tile.is_valid, tile.batch_idx, Int32(0))
    of_all = lengths.seqlen_q, lengths.seqlen_k, lengths.cu_seqlens_q, lengths.cu_seqlens_k
    slot = SeqlenInfoQK.create(batch_idx, *of_all)
    used = SeqlenInfoQK.create(batch_idx, *of_all, lengths.seqused_q, lengths.seqused_k)
    work = Work(
        block=tile.block,
        head_idx=tile.head_idx,
        batch_idx=batch_idx,
        offset_q=Int32(used.offset_q),
        slot=Int32(slot.seqlen_k if const_expr(blocks_are_keys) else slot.seqlen_q),
        seqlen_q=Int32(used.seqlen_q),
        offset_k=Int32(used.offset_k),
        seqlen_k=Int32(used.seqlen_k),
        q_start=lengths.first_position(batch_idx, used),
    )
    if const_expr(blocks_are_keys and lengths.num_sequences is not None):
        work = work._replace(seqlen_q=_queries_in_use(lengths))
    return work


@cute.jit
def _queries_in_use(lengths: Lengths) -> Int32:
    """Of all packed sequences together."""
    total = lengths.cu_seqlens_q[lengths.num_sequences]
    if const_expr(lengths.seqused_q is not None):
        total = Int32(0)
        for sequence in cutlass.range(lengths.num_sequences, unroll=1):
            total += lengths.seqused_q[sequence]
    return total


class LseTensors(NamedTuple):
    """The tensors for LSE, its rounding error, and the largest score of a row. The last two, or all
    three, may be absent. Each is (batch, head, row), or (head, row) if sequences are packed."""

    lse: cute.Tensor | None
    low: cute.Tensor | None
    largest: cute.Tensor | None = None

    @cute.jit
    def store(
        self,
        lengths: Lengths,
        work: Work,
        head_idx: Int32,
        q_idx: Int32,
        lse: Float32,
        low: Float32 | None,
    ) -> None:
        place = row_place(lengths, work, head_idx, q_idx)
        self.lse[place] = lse
        if const_expr(self.low is not None):
            self.low[place] = low

    @cute.jit
    def store_largest(
        self, lengths: Lengths, work: Work, head_idx: Int32, q_idx: Int32, largest: Float32
    ) -> None:
        """Write the largest score of a row, -inf if the row is not in use."""
        if const_expr(lengths.seqused_q is not None):
            largest = cutlass.select_(q_idx < work.seqlen_q, largest, -Float32.inf)
        if q_idx < work.slot:
            self.largest[row_place(lengths, work, head_idx, q_idx)] = largest


def row_place(lengths: Lengths, work: Work, head_idx: Int32, q_idx: Int32) -> tuple:
    """The place of a row in a tensor like LSE."""
    if lengths.cu_seqlens_q is None:
        return work.batch_idx, head_idx, q_idx
    return head_idx, work.offset_q + q_idx
