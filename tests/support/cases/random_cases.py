"""Random problems for the fuzz tests, each joining a few features, drawn from a generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cases import BF16, FP16, FP32, FP64, Case
from mask_cases import COLUMNS, MASK_MODS, SCORE_MODS

FUZZ_BATCH = 3
FUZZ_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 257, 383, 500, 641)


def _fuzz_lengths(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, *FUZZ_LENGTHS)) for _ in range(FUZZ_BATCH))


FUZZ_FEATURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "causal": lambda rng: {"causal": True},
    "window": lambda rng: {"window_left": rng.choice((0, 31, 200)), "window_right": 5},
    "window_left": lambda rng: {"window_left": rng.choice((0, -20, 17, 127, 129, 400))},
    "window_right": lambda rng: {"window_right": rng.choice((0, -20, 17, 127, 129, 400))},
    "softcap": lambda rng: {"softcap": rng.choice((1.5, 15.0, 50.0))},
    "scale": lambda rng: {"softmax_scale": rng.choice((0.01, 0.3, -0.1, 0.0))},
    "sink": lambda rng: {"sink": rng.choice((BF16, FP16, FP32, FP64))},
    "gqa": lambda rng: {"heads_q": 4, "heads_kv": rng.choice((1, 2)), "pack_gqa": False},
    "packed_gqa": lambda rng: {"heads_q": 4, "heads_kv": rng.choice((1, 2)), "pack_gqa": True},
    "varlen_q": lambda rng: {"lengths_q": _fuzz_lengths(rng)},
    "varlen_k": lambda rng: {"lengths_k": _fuzz_lengths(rng)},
    "seqused_q": lambda rng: {"seqused_q": ()},
    "seqused_k": lambda rng: {"seqused_k": ()},
    "transposed": lambda rng: {"strided": "transposed"},
    "fused_qkv": lambda rng: {"strided": "fused_qkv"},
    "unreadable": lambda rng: {"strided": "unreadable"},
}


def _fuzz_column(rng: random.Random) -> dict[str, Any]:
    column = rng.choice(sorted(COLUMNS))
    fields = {"column": column, "column_heads": rng.choice(("1", "kv", "q"))}
    return fields | {"causal": True} if COLUMNS[column].num_vectors == 1 else fields


MASK_FEATURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "column": _fuzz_column,
    # without a newer one, so that kept tables still have what is drawn
    "mask_mod": lambda rng: {"mask_mod": rng.choice(sorted(MASK_MODS.keys() - {"seeing_all"}))},
    "score_mod": lambda rng: {"score_mod": rng.choice(sorted(SCORE_MODS))},
    "blocks": lambda rng: {"blocks": rng.choice(((128, 128), (64, 128), (256, 64), (48, 80)))},
}


def random_mask_case(rng: random.Random) -> Case:
    """A small problem that joins one to four kinds of masks and up to three other features."""
    masks = rng.sample(sorted(MASK_FEATURES), rng.randint(1, len(MASK_FEATURES)))
    others = rng.sample(sorted(FUZZ_FEATURES), rng.randint(0, 3))
    return _draw_case(rng, [*others, *masks], FUZZ_FEATURES | MASK_FEATURES)


def random_case(rng: random.Random) -> Case:
    """A small problem that joins two features drawn at random."""
    return _draw_case(rng, rng.sample(sorted(FUZZ_FEATURES), 2), FUZZ_FEATURES)


def small_case(rng: random.Random, dims: tuple[tuple[int, int], ...], most: int) -> Case:
    """Several features; sequences of at most so many tokens, two in a batch; d out of `dims`."""
    case = rng.choice((random_case, random_mask_case))(rng)
    head_dim, head_dim_v = rng.choice(dims)
    if case.strided == "fused_qkv":
        head_dim_v = head_dim
    name = f"{case.id.rpartition('-d')[0]}-d{head_dim}-dv{head_dim_v}"
    fields: dict[str, Any] = {"id": name, "head_dim": head_dim, "head_dim_v": head_dim_v}
    fields["batch"] = 2
    for side in ("q", "k"):
        fields[f"seqlen_{side}"] = min(getattr(case, f"seqlen_{side}"), most)
        for name in (f"lengths_{side}", f"seqused_{side}"):
            if lengths := getattr(case, name):
                fields[name] = tuple(min(length, most) for length in lengths[:2])
    return replace(case, dtype=rng.choice((BF16, FP16)), **fields)


def _draw_case(
    rng: random.Random,
    features: list[str],
    table: dict[str, Callable[[random.Random], dict[str, Any]]],
) -> Case:
    """With features of a table; bf16 goes with d = 128 and fp16 with d = 64, to share kernels."""
    head_dim, dtype = rng.choice(((128, BF16), (64, FP16)))
    fields: dict[str, Any] = {"batch": FUZZ_BATCH, "head_dim": head_dim, "dtype": dtype}
    fields.update(seqlen_q=rng.choice(FUZZ_LENGTHS), seqlen_k=rng.choice(FUZZ_LENGTHS))
    for feature in features:
        fields.update(table[feature](rng))
    if fields.get("strided") == "fused_qkv":
        fields["seqlen_k"] = fields["seqlen_q"]
        if lengths := fields.get("lengths_q") or fields.get("lengths_k"):
            fields["lengths_q"] = fields["lengths_k"] = lengths
    for side in ("q", "k"):
        if f"seqused_{side}" in fields:
            slots = fields.get(f"lengths_{side}") or (fields[f"seqlen_{side}"],) * FUZZ_BATCH
            fields[f"seqused_{side}"] = tuple(rng.randint(0, slot) for slot in slots)
    return Case(f"{'+'.join(features)}-d{head_dim}-{rng.randrange(16**4):04x}", **fields)
