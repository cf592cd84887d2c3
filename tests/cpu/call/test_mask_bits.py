"""When there are mask bits for all heads, and what the launch passes on then."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import Case
from launch_recorder import Recorder
from planned import call_of, forward_call, planned

from flash_mask_cute import explain
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.backward import KernelBackward
from flash_mask_cute.call.build_backward import BwdKernels
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import KernelForward
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.prepare import prepare_bwd, prepare_fwd
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.limits import LONGEST
from flash_mask_cute.mask_prep import mask_bits
from flash_mask_cute.mask_prep.documents import DOCUMENT_STRIDE
from flash_mask_cute.mask_prep.mask_bits import BitTiles, MaskBitsProblem, SequenceBitsPlan
from flash_mask_cute.mods import traits
from flash_mask_cute.mods.traits import find_reliance
from flash_mask_cute.runtime.cache import DIRECTORY_VARIABLE, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

TARGET = Target.default()
INT32 = "int32"


def causal(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k <= q


def by_batch(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][b[0], q[0]] == aux[0][b[0], k[0]]


def by_parity_of_head(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return ((q + h) % 2 == 0) & (b >= 0)


def by_many_powers_of_head(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    for _ in range(60):
        h = h * h
    return q + h > k


def idly_by_head(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    _ = h + 1
    return k <= q


def by_key(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k > 3


def unaware(*arguments: Any) -> Any:
    return arguments[3] <= arguments[2]


def passes_all_on(*arguments: Any) -> Any:
    return by_parity_of_head(*arguments)


@cute.jit
def branches(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k[0] <= q[0] if q[0] > 3 else k[0] > q[0]


@cute.jit
def by_head_in_a_branch(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    answer = k[0] <= q[0]
    if q[0] > 3:
        answer = k[0] <= h[0]
    return answer


@cute.jit
def by_head_in_a_loop(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    reach = q[0]
    for _ in range(h[0]):
        reach += 1
    return k[0] <= reach


def problem_of(mask_mod: Any, aux: tuple[tuple[str, int], ...]) -> AttentionProblem:
    return AttentionProblem("bfloat16", 128, 128, mask_mod=callable_key(mask_mod), aux=aux)


@pytest.mark.parametrize(
    ("mask_mod", "rank", "batch", "head"),
    [
        (causal, 0, False, False),
        (unaware, 0, False, False),
        (branches, 0, False, False),
        (by_batch, 2, True, False),
        (lambda b, h, q, k, aux: q < aux[0][h[0], k[0]], 2, False, True),
        (by_parity_of_head, 0, True, True),
        (passes_all_on, 0, True, True),
        (by_head_in_a_branch, 0, False, True),
        (by_head_in_a_loop, 0, False, True),
        (by_many_powers_of_head, 0, False, True),
        (idly_by_head, 0, False, True),
        (by_key, 0, False, False),
    ],
)
def test_what_a_callable_relies_on(mask_mod: Any, rank: int, batch: bool, head: bool) -> None:
    """Seen in its operations; what is used for nothing counts as used."""
    aux, query = ((INT32, rank),) if rank else (), mask_mod is not by_key
    assert find_reliance(mask_mod, problem_of(mask_mod, aux)) == (batch, head, query)


def test_a_callable_that_cannot_be_traced_relies_on_all() -> None:
    assert find_reliance(by_batch, problem_of(by_batch, ())) == (True, True, True)


def test_a_callable_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each kind of aux tensors."""
    traced: list[Any] = []
    trace = traits._traced

    def count(*args: Any) -> Any:
        traced.append(args)
        return trace(*args)

    monkeypatch.setattr(traits, "_found", {})
    monkeypatch.setattr(traits, "_traced", count)
    for dtype in (INT32, INT32, "int64"):
        found = find_reliance(by_batch, problem_of(by_batch, ((dtype, 2),)))
        assert found == (True, False, True)
    assert len(traced) == 2


def choose(case: Case, limits: Limits | None = None, **more: Any) -> tuple[ExecutionPlan, Any]:
    """The plan of a forward, and how it stores mask bits."""
    found = planned(case, TARGET, limits, **more)
    assert (found.mask_bits is None) == (found.without_bits is None)
    return found, found.mask_bits


def test_bits_of_one_entry_or_of_all() -> None:
    """One entry serves all, unless the callable tells them apart."""
    for mask_mod, entries in (("checks", 1), ("documents", 3)):
        _, bits_plan = choose(Case("bits", 3, 300, 200, 4, 4, mask_mod=mask_mod))
        assert bits_plan is not None and bits_plan.shape == (entries, 3, 2, 128, 4)
    assert choose(Case("by-head", 1, 200, 200, 4, 4, mask_mod="eviction"))[1] is None


def choose_bwd(case: Case, limits: Limits | None = None) -> tuple[Any, Any, AttentionCall]:
    """The plan of the backward of a call, how it stores mask bits, and the call."""
    call = call_of(case, Direction.BACKWARD)
    found = planned(call, TARGET, limits)
    return found, found.mask_bits, call


def test_explain_says_what_the_cpu_path_walks_instead() -> None:
    q = torch.zeros(1, 384, 4, 64, dtype=torch.bfloat16)
    told = explain(q, q, q, mask_mod=causal)
    assert told.tiles.tile_m == 192
    assert told.note == "the CPU path evaluates mask_mod itself, over tiles of 128 x 128"
    assert explain(q, q, q, mask_mod=by_parity_of_head).note == ""


def one_list(block: int) -> BlockSparseTensorsTorch:
    """Partial blocks of 384 x 384 scores, all of them."""
    num = 384 // block
    counts = torch.full((1, 1, num), num, dtype=torch.int32)
    indices = torch.arange(num, dtype=torch.int32).expand(1, 1, num, num).contiguous()
    return BlockSparseTensorsTorch(counts, indices, block_size=(block, block))


def test_what_the_backward_passes_on() -> None:
    """Mask bits, and nothing else of the callable and the lists."""
    case = Case("documents", 1, 200, 200, 4, 4, mask_mod="documents", blocks=(48, 80))
    found, bits_plan, call = choose_bwd(case)
    assert bits_plan is not None
    assert (found.problem.has_bits, found.problem.mask_mod) == (False, None)
    mask_bits: list[tuple[Any, ...]] = []
    main: list[tuple[Any, ...]] = []
    store = partial(bits_plan.query_chunks, lambda *args: mask_bits.append(args))
    kernels = BwdKernels(lambda *args: None, lambda *args: main.append(args), lambda *args: None)
    KernelBackward(found, kernels, store)(call.tensors, call.masks)
    (((tiles, states), *_, logical, aux, window, query_chunk),) = mask_bits
    assert window is None
    assert (tiles.shape[:3], states.shape) == ((1, 4, 2), (1, 4, 2))
    assert (query_chunk, logical[2:], len(aux)) == ((0, 4), (48, 80), 1)
    ((*_, aux_tensors, _, _, _, logical_of_main, _, mask_bits_of_main, _),) = main
    assert mask_bits_of_main[0] is tiles and mask_bits_of_main[1] is states
    assert (aux_tensors, logical_of_main) == (None, None)


def test_packed_sequences() -> None:
    """Tiles for all sequences, each with a row of blocks that it may share with none."""
    lengths = {"lengths_q": (300, 0, 77), "lengths_k": (200, 9, 140), "heads_q": 4, "heads_kv": 4}
    case = Case("varlen", mask_mod="documents", **lengths)
    call, bits_plan = choose(case)
    assert isinstance(bits_plan, SequenceBitsPlan) and call.problem.reads_mask_bits
    # of the pairs, the queries, the keys and the sequences
    most = -(-377 * call.shapes.seqlen_k // 128**2) + 3 + 3 + 3
    assert bits_plan.shape == (1, 1, most, 128, 4) and bits_plan.batch == 3
    calls: list[tuple[Any, ...]] = []
    given = call_of(case)
    main = Recorder()
    store = partial(bits_plan.query_chunks, lambda *args: calls.append(args))
    KernelForward(call, main, store)(given.tensors, given.masks)
    (((tiles, states, places), starts_q, starts_k, logical, aux, _, query_chunk),) = calls
    assert tiles.shape[:3] == states.shape and places.shape == (3 + LONGEST + 1, 2)
    assert starts_q is given.tensors.lengths.cu_seqlens_q
    assert starts_k is given.tensors.lengths.cu_seqlens_k
    assert logical is None and len(aux) == 1
    assert main.given()["mask_bits"][2] is places
    assert main.given()["query_chunk"] == query_chunk == (0, most)
    assert main.calls[0][6] is starts_q and main.calls[0][7] is starts_k

    rows, keys = call.shapes.total_q, call.shapes.seqlen_k
    for most, fits in ((4 * rows * keys, True), (rows * keys - 1, False)):
        assert (choose(case, Limits(most))[1] is not None) == fits
        assert (choose_bwd(case, Limits(most))[1] is not None) == fits
    # sequences so short that most of each tile is empty
    lengths = {"lengths_q": (9,) * 40, "lengths_k": (9,) * 40, "heads_q": 4, "heads_kv": 4}
    short = Case("short", mask_mod="documents", **lengths)
    for most, fits in ((360 * 360, False), (360 * 360 * 10, True)):
        assert (choose(short, Limits(most))[1] is not None) == fits
    wide = replace(case, head_dim=256, head_dim_v=256)
    assert choose_bwd(wide)[0].choice.tiles.cta_pair and choose_bwd(wide)[1] is None


def test_there_must_be_room() -> None:
    """For all entries, where they differ."""
    same = Case("same", 3, 300, 200, 4, 4, mask_mod="checks")
    told = Case("told", 3, 300, 200, 4, 4, mask_mod="documents")
    pairs, both = 300 * 200, (True, True)
    for most, fits in ((3 * pairs, both), (pairs, (True, False)), (pairs - 1, (False, False))):
        limits = Limits(most, min_tiles=10**9)
        assert tuple(choose(case, limits)[1] is not None for case in (same, told)) == fits


def test_queries_in_parts() -> None:
    """Of all heads, as many rows at a time as there is room for, if these keep the SMs busy."""
    case = Case("long", 1, 1500, 1000, 4, 4, mask_mod="checks")
    for least, fits in ((16 / TARGET.num_sms, True), (17 / TARGET.num_sms, False)):
        _, bits_plan = choose(case, Limits(600 * 1000, min_tiles=least))
        assert (bits_plan is not None) == fits
        if bits_plan is not None:
            # 12 blocks of 128, of which four fit
            assert (bits_plan.shape[1], bits_plan.blocks) == (4, 12)
            assert bits_plan.num_query_chunks == 3
            assert bits_plan.num_bytes == 4 * 8 * (2048 + 4)
    assert choose_bwd(case, Limits(600 * 1000, min_tiles=0))[1] is None
    assert choose(case, Limits(127 * 1000, min_tiles=0))[1] is None, "no block fits"


def test_launches_of_parts() -> None:
    """Each gets the bits of its rows, the last one those that are left."""
    case = Case("long", 1, 1100, 300, 4, 4, mask_mod="checks")
    call, bits_plan = choose(case)
    assert bits_plan is not None and bits_plan.blocks == 9
    mask_bits: list[tuple[Any, ...]] = []
    shape = (1, 4, *bits_plan.shape[2:])
    store = partial(
        replace(bits_plan, shape=shape).query_chunks, lambda *args: mask_bits.append(args)
    )
    main = Recorder()
    of_call = call_of(case)
    KernelForward(call, main, store)(of_call.tensors, of_call.masks)
    for i in range(2):
        assert [args[0][i].shape[1] for args in mask_bits] == [4, 4, 1]
    given = [main.given(i) for i in range(3)]
    assert all(x["mask_bits"][1] is args[0][1] for x, args in zip(given, mask_bits, strict=True))
    assert [args[-1] for args in mask_bits] == [(0, 4), (4, 4), (8, 1)]
    assert [x["query_chunk"] for x in given] == [(0, 4), (4, 4), (8, 1)]
    assert main.calls[0][3] is main.calls[2][3], "one output"


def test_a_part_has_the_memory_of_the_one_before() -> None:
    case = Case("long", 1, 1100, 300, 4, 4, mask_mod="checks")
    call, bits_plan = choose(case)
    assert bits_plan is not None
    earlier: list[Any] = []

    def store(mask_bits: tuple[torch.Tensor, torch.Tensor], *_: Any) -> None:
        assert all(tiles() is None for tiles in earlier)
        earlier.append(weakref.ref(mask_bits[0]))

    parts = partial(replace(bits_plan, shape=(1, 4, *bits_plan.shape[2:])).query_chunks, store)
    of_call = call_of(case)
    KernelForward(call, lambda *args: None, parts)(of_call.tensors, of_call.masks)
    assert len(earlier) == 3


def test_the_attention_kernel_knows_no_callable() -> None:
    case = Case("documents", 1, 200, 200, 4, 4, mask_mod="documents", blocks=(48, 80))
    call, _ = choose(case)
    problem = call.problem
    assert problem.reads_mask_bits and not (problem.has_lists or problem.has_bits)
    assert (problem.mask_mod, problem.aux) == (None, ())
    biased = Case("biased", 1, 200, 200, 4, 4, mask_mod="documents", score_mod="head_bias")
    call, _ = choose(biased)
    assert call.problem.aux, "the score_mod may read them"


def test_what_the_launch_passes_on() -> None:
    """The storing kernel gets what the callable reads and the lists, the other one mask bits."""
    case = Case("documents", 1, 200, 200, 4, 4, mask_mod="documents", blocks=(48, 80))
    call, bits_plan = choose(case)
    assert bits_plan is not None
    mask_bits: list[tuple[Any, ...]] = []
    attention = Recorder()
    store = partial(bits_plan.query_chunks, lambda *args: mask_bits.append(args))
    of_call = call_of(case)
    KernelForward(call, attention, store)(of_call.tensors, of_call.masks)
    ((tiles, states), seqlen_q, seqlen_k, logical, aux, *_), *others = mask_bits
    assert not others
    assert (tiles.shape, states.shape) == ((1, 2, 2, 128, 4), (1, 2, 2))
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (tiles, states))
    assert (seqlen_q, seqlen_k, logical[2:]) == (200, 200, (48, 80))
    assert len(aux) == len(of_call.masks.aux_tensors or ())
    given = attention.given()
    assert given["mask_bits"][0] is tiles and given["mask_bits"][1] is states
    assert all(given[name] is None for name in ("aux", "bits", "lists"))


def test_explain_tells_of_it() -> None:
    q, k, v = (torch.randn(1, 300, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    found = explain(q, k, v, mask_mod=causal)
    assert "mask_mod is evaluated once for all heads, into 18456 bytes (" in str(found)
    found = explain(q, k, v, mask_mod=causal, block_sparse_tensors_torch=one_list(128))
    assert "block lists of 128 x 128, taken as bits;" in str(found)
    found = explain(q, k, v, mask_mod=by_parity_of_head)
    assert "evaluated once" not in str(found)


@pytest.mark.parametrize("shape", [(1, 0), (0, 300)], ids=["no-keys", "no-batch"])
def test_explain_of_nothing(shape: tuple[int, int]) -> None:
    q, k = (torch.zeros(shape[0], n, 4, 64, dtype=torch.bfloat16) for n in (300, shape[1]))
    ids = torch.zeros(max(shape[0], 1), 300, dtype=torch.int32)
    for mod, aux in ((causal, None), (by_batch, [ids])):
        assert "nothing is launched" in explain(q, k, k, mask_mod=mod, aux_tensors=aux).note


@pytest.fixture
def stores_compiled(monkeypatch: pytest.MonkeyPatch) -> list[MaskBitsProblem]:
    """The problems of the kernels that make mask bits and are compiled, not found on disk."""
    compiled: list[MaskBitsProblem] = []
    build = mask_bits._build

    def record(mask_mod: Any, problem: MaskBitsProblem, target: Target, columns: Any) -> Compiled:
        # bits in the order in which the attention kernels of the target read them
        assert columns is arch_spec(target).load_columns()
        compiled.append(problem)
        return build(mask_mod, problem, target, columns)

    monkeypatch.setenv(DIRECTORY_VARIABLE, "off")
    monkeypatch.setattr(mask_bits, "_build", record)
    return compiled


def sees(distance: int) -> Any:
    """A callable that no other test compiles."""
    return lambda b, h, q, k, aux: k <= q + distance


@pytest.mark.usefixtures("attention_is_not_compiled")
def test_only_the_kernel_that_runs_is_compiled(stores_compiled: list[MaskBitsProblem]) -> None:
    """At d=64, where attention that asks has other tiles than attention that reads."""
    q = torch.zeros(1, 384, 4, 64, dtype=torch.bfloat16)
    prepare_fwd(forward_call(q, q, q, mask_mod=sees(1001)), TARGET)
    (problem,) = stores_compiled
    assert problem.tiles == BitTiles.for_forward(192, 128)


@pytest.mark.usefixtures("attention_is_not_compiled")
def test_no_kernel_is_compiled_to_ask_about_heads(stores_compiled: list[MaskBitsProblem]) -> None:
    q = torch.zeros(1, 384, 4, 64, dtype=torch.bfloat16)
    asks_about_heads = lambda b, h, q, k, aux: k <= q + h * 1002  # noqa: E731
    prepare_fwd(forward_call(q, q, q, mask_mod=asks_about_heads), TARGET)
    assert not stores_compiled


@pytest.mark.usefixtures("documents_packed", "attention_is_not_compiled")
def test_by_documents_only_that_kernel_is_compiled(stores_compiled: list[MaskBitsProblem]) -> None:
    q = torch.zeros(1, 2 * DOCUMENT_STRIDE, 4, 64, dtype=torch.bfloat16)
    prepare_fwd(forward_call(q, q, q, mask_mod=sees(1003)), TARGET)
    assert [problem.form for problem in stores_compiled] == ["documents"]


@pytest.mark.usefixtures("attention_is_not_compiled")
def test_a_backward_compiles_one_kernel_that_stores(stores_compiled: list[MaskBitsProblem]) -> None:
    case = Case("once", 1, 384, 384, 4, 4, head_dim=64, mask_mod="checks")
    mask_bits.CACHE._memory.clear()
    _, _, call = choose_bwd(case)
    prepare_bwd(call, TARGET)
    assert [problem.tiles for problem in stores_compiled] == [BitTiles.for_backward(128, 128)]
