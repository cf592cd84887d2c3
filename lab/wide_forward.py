"""python -m lab.wide_forward: what limits a forward of 512 columns besides its products.

Two measurements on Hopper, before a kernel is written for them. *Loads*: a kernel that only loads
keys and values, in the order and in the parts of a tiling; a part is a TMA box of 64 keys by 64
columns. *Exchange*: two CTAs of a cluster that pass probabilities to each other, 64 bytes a thread
and step, by `st.async`. Both report bytes a clock and SM, by the clocks of the
SMs themselves.

    python -m lab.wide_forward --out rates.jsonl     on a GPU
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import clusters
from flash_mask_cute.core.channel import Channel

HEAD_DIM, BOX = 512, 64
BOX_BYTES = BOX * BOX * 2
COLUMN_BOXES = HEAD_DIM // BOX
WARP, WARPGROUP = 32, 128
# of a thread and step, of the exchange
WORDS = 16
SLOT_BYTES = WARPGROUP * WORDS * 4
NUM_WARPGROUPS = 2


@dataclass(frozen=True)
class Tiling:
    """rows: queries of a work tile. ctas: of a cluster, which share it. keys: of a block. stages:
    boxes in flight."""

    rows: int
    ctas: int
    keys: int
    stages: int

    @property
    def num_keys(self) -> int:
        """Boxes of keys that a CTA loads of a block."""
        return COLUMN_BOXES * (2 if self.ctas == 1 else 1)

    @property
    def num_boxes(self) -> int:
        """Boxes that a CTA loads of a block."""
        return self.num_keys + COLUMN_BOXES * self.keys // (BOX * self.ctas)

    def box(self, number: int, rank: Int32) -> tuple[Any, Any]:
        """The group of 64 keys, and the columns, of a box that a CTA loads of a block."""
        per_group = COLUMN_BOXES
        if number >= self.num_keys:
            number -= self.num_keys
            per_group //= self.ctas
        group, column = divmod(number, per_group)
        if self.ctas == 1:
            return group, column
        if per_group == COLUMN_BOXES:
            # each CTA scores all keys of a block of 64, and half of those of one of 128
            return rank if self.keys > BOX else group, column
        # the values of the own keys first
        return (group + rank) % (self.keys // BOX), rank * per_group + column


TILINGS = {
    "half of V, all keys": Tiling(128, 2, 64, 10),
    "one CTA": Tiling(64, 1, 128, 18),
    "half of the keys, half of V": Tiling(128, 2, 128, 10),
}


class Loads:
    """Loads every key block of every work tile, and computes nothing."""

    def __init__(self, tiling: Tiling, num_sms: int) -> None:
        self.tiling, self.num_groups = tiling, max(num_sms // tiling.ctas, 1)

    @cute.jit
    def __call__(self, mK: cute.Tensor, mV: cute.Tensor, clocks: cute.Tensor, tiles: Int32, stream):
        """mK, mV (keys, 512, heads); clocks int64 (CTAs,); tiles: work tiles of a head."""
        layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16),
            (BOX, BOX, self.tiling.stages),
            (0, 1, 2),
        )
        load, of_box = cpasync.CopyBulkTensorTileG2SOp(), cute.select(layout, mode=[0, 1])
        k = cpasync.make_tiled_tma_atom(load, mK, of_box, (BOX, BOX))
        v = cpasync.make_tiled_tma_atom(load, mV, of_box, (BOX, BOX))
        self.kernel(*k, *v, clocks, tiles, layout).launch(
            grid=(self.num_groups * self.tiling.ctas, 1, 1),
            block=(2 * WARP, 1, 1),
            cluster=(self.tiling.ctas, 1, 1) if self.tiling.ctas > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        k_atom: cute.CopyAtom,
        mK: cute.Tensor,
        v_atom: cute.CopyAtom,
        mV: cute.Tensor,
        clocks: cute.Tensor,
        tiles: Int32,
        layout: cute.ComposedLayout,
    ):
        tiling = self.tiling
        allocator = cutlass.memory.SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * tiling.stages)
        smem = allocator.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        channel = Channel.create(barriers, tiling.stages, 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin = cute.arch.clock64()
        cta, _, _ = cute.arch.block_idx()
        rank = cta % tiling.ctas
        if cute.arch.warp_idx() == 0:
            number = Int32(0)
            for tile in cutlass.range(cta // tiling.ctas, tiles * mK.shape[2], self.num_groups):
                head = tile // tiles
                k_boxes = cute.local_tile(mK[None, None, head], (BOX, BOX), (None, None))
                v_boxes = cute.local_tile(mV[None, None, head], (BOX, BOX), (None, None))
                of_k = self._parts(k_atom, k_boxes, smem)
                of_v = self._parts(v_atom, v_boxes, smem)
                for block in cutlass.range(mK.shape[0] // tiling.keys):
                    for i in cutlass.range_constexpr(tiling.num_boxes):
                        is_k = const_expr(i < tiling.num_keys)
                        group, column = tiling.box(i, rank)
                        src, dst = of_k if const_expr(is_k) else of_v
                        channel.acquire(number)
                        channel.expect(number, BOX_BYTES)
                        cute.copy(
                            k_atom if const_expr(is_k) else v_atom,
                            src[None, block * (tiling.keys // BOX) + group, column],
                            dst[None, channel.index(number)],
                            tma_bar_ptr=channel.barrier(number),
                        )
                        number += 1
        else:
            own = (
                tiles * mK.shape[2] - cta // tiling.ctas + self.num_groups - 1
            ) // self.num_groups
            boxes = own * (mK.shape[0] // tiling.keys) * tiling.num_boxes
            for number in cutlass.range(boxes):
                channel.wait(number)
                channel.release(number)
            if cute.arch.lane_idx() == 0:
                clocks[cta] = cute.arch.clock64() - begin

    @staticmethod
    def _parts(atom: cute.CopyAtom, boxes: cute.Tensor, smem: cute.Tensor) -> tuple:
        """TMA partitions of boxes (64, 64, groups, columns), and of shared memory."""
        of_smem, of_gmem = cute.group_modes(smem, 0, 2), cute.group_modes(boxes, 0, 2)
        s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), of_smem, of_gmem)
        return g, s


class Exchange:
    """Warpgroups of two CTAs pass each other 64 bytes a thread and step.

    slots: of a warpgroup; with two, a step is sent before the one before was read.
    """

    def __init__(self, slots: int, num_sms: int) -> None:
        self.slots, self.num_sms = slots, num_sms

    @cute.jit
    def __call__(self, clocks: cute.Tensor, sums: cute.Tensor, steps: Int32, stream):
        """clocks int64 (CTAs,). sums int32 (CTAs, threads), of what arrived."""
        self.kernel(clocks, sums, steps).launch(
            grid=(self.num_sms // clusters.CTAS * clusters.CTAS, 1, 1),
            block=(NUM_WARPGROUPS * WARPGROUP, 1, 1),
            cluster=(clusters.CTAS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, clocks: cute.Tensor, sums: cute.Tensor, steps: Int32):
        allocator = cutlass.memory.SmemAllocator()
        count = NUM_WARPGROUPS * self.slots
        barriers = allocator.allocate_array(Int64, 2 * count)
        # one CTA to an SM
        num_words = (count * SLOT_BYTES + 131072) // 4
        words = allocator.allocate_array(Int32, num_words, byte_alignment=128)
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        in_group = thread % WARPGROUP
        if thread == 0:
            for i in range(count):
                cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init(barriers + count + i, WARPGROUP // WARP)
        cute.arch.mbarrier_init_fence()
        clusters.sync()
        first = group * self.slots
        channel = Channel(barriers + first, barriers + count + first, self.slots)
        received = words + first * (SLOT_BYTES // 4)
        begin, total = cute.arch.clock64(), Int32(0)
        for step in cutlass.range(steps):
            # the other CTA has read this slot
            channel.acquire(step)
            slot = channel.index(step) * (SLOT_BYTES // 4)
            if in_group == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(channel.barrier(step), SLOT_BYTES)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(WORDS // 4):
                at = slot + (i * WARPGROUP + in_group) * 4
                values = tuple(step + thread + j for j in range(4))
                to = (received + at).align(16)
                cute.arch.store_async_dsmem(to, values, channel.barrier(step), clusters.peer())
            channel.wait(step)
            for i in cutlass.range_constexpr(WORDS // 4):
                at = slot + (i * WARPGROUP + in_group) * 4
                of_peer = cute.make_tensor((received + at).align(16), cute.make_layout(4))
                for j in cutlass.range_constexpr(4):
                    total += of_peer[j]
            cute.arch.sync_warp()
            if in_group % WARP == 0:
                cute.arch.mbarrier_arrive(channel.vacancy(step), clusters.peer())
        cta, _, _ = cute.arch.block_idx()
        sums[cta, thread] = total
        if thread == 0:
            clocks[cta] = cute.arch.clock64() - begin
        clusters.sync()


def compiled(kernel: Any, *arguments: Any) -> Callable[..., Any]:
    """The kernel for arguments of these shapes, which runs on the current stream."""
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtypes = {torch.bfloat16: BFloat16, torch.int64: Int64, torch.int32: Int32}
    fakes = [
        make_fake_tensor(dtypes[x.dtype], tuple(x.shape), x.stride(), assumed_align=16)
        if isinstance(x, torch.Tensor)
        else Int32(x)
        for x in arguments
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    found: Callable[..., Any] = cute.compile(kernel, *fakes, stream, options="--enable-tvm-ffi")
    return found


def loads(name: str, seqlen: int, heads_q: int, heads_kv: int, num_sms: int) -> dict[str, Any]:
    """A full forward of one sequence."""
    tiling = TILINGS[name]
    shape = heads_kv, seqlen, HEAD_DIM
    k, v = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    k, v = (x.permute(1, 2, 0) for x in (k, v))
    clocks = torch.zeros(num_sms, device="cuda", dtype=torch.int64)
    tiles = seqlen // tiling.rows * (heads_q // heads_kv)
    call = compiled(Loads(tiling, num_sms), k, v, clocks, tiles)
    blocks = tiles * heads_kv * (seqlen // tiling.keys)
    num_bytes = blocks * tiling.ctas * tiling.num_boxes * BOX_BYTES
    row = _measured(lambda: call(k, v, clocks, tiles), num_bytes, clocks)
    return row | {"loads": name, "keys": seqlen}


def exchanged(threads: int, steps: int) -> torch.Tensor:
    """The sums of each thread of `Exchange`, int32 (threads,)."""
    of_steps = torch.arange(threads) * steps + steps * (steps - 1) // 2
    return (of_steps * WORDS + 6 * (WORDS // 4) * steps).to(torch.int32)


def exchange(slots: int, num_sms: int, steps: int = 20000) -> dict[str, Any]:
    clocks = torch.zeros(num_sms, device="cuda", dtype=torch.int64)
    threads = NUM_WARPGROUPS * WARPGROUP
    sums = torch.zeros(num_sms, threads, device="cuda", dtype=torch.int32)
    call = compiled(Exchange(slots, num_sms), clocks, sums, steps)
    num_bytes = steps * NUM_WARPGROUPS * SLOT_BYTES * (num_sms // 2 * 2)
    row = _measured(lambda: call(clocks, sums, steps), num_bytes, clocks)
    assert torch.equal(sums, exchanged(threads, steps).to(sums).expand_as(sums)), "others arrived"
    return row | {"exchange": "st.async", "slots": slots}


def _measured(call: Callable[[], Any], num_bytes: int, clocks: torch.Tensor) -> dict[str, Any]:
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    ms, longest = sorted(times[1:])[1], int(clocks.max())
    return {
        "ms": ms,
        "terabytes_a_second": num_bytes / ms / 1e9,
        "bytes_a_clock_and_sm": num_bytes / longest / int((clocks > 0).sum()),
        "gigahertz": longest / ms / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    gpu = torch.cuda.get_device_name()
    measurements: list[Callable[[], dict[str, Any]]] = [
        partial(loads, name, seqlen, 16, 2, num_sms) for name in TILINGS for seqlen in (8192, 16384)
    ]
    measurements += [partial(exchange, slots, num_sms) for slots in (1, 2)]
    for measure in measurements:
        row = measure() | {"gpu": gpu}
        print(row, flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
