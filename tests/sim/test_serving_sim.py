"""A step over a cache on the software GPU: new rows into pages, then attention over them."""

from __future__ import annotations

import os
import random
from types import ModuleType

import torch
from cache_calls import draw_call
from conftest import ACTIVE_ARCH
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator
from test_append_sim import append_of

from flash_mask_cute.call.append import append
from flash_mask_cute.runtime.target import Target

ARCH = ACTIVE_ARCH
SEED = int(os.environ.get("FLASH_MASK_SIM_SEED", "0").replace("all", "1"))
SAME = "causal", "mask_mod", "learnable_sink", "page_table", "cu_seqlens_q"
OF_TABLE = {"kv_batch_idx": "cache_batch_idx", "leftpad_k": "cache_leftpad"}


def test_random_calls(simulator: ModuleType) -> None:
    rng, found = random.Random(SEED), 0
    while found < (2 if SEED == 0 else 8):
        call = draw_call(rng, torch.bfloat16, 64, 300, (5, 16, 128))
        x = call.keywords
        if "k" not in x or "page_table" not in x:
            continue
        found += 1
        given = append_of(call)
        with quiet_run(simulator, found):
            q, total = append(given, Target(ARCH, num_sms=2))
        left, right = (None if side < 0 else side for side in x["window_size"])
        keywords = {name: x[name] for name in SAME if name in x}
        keywords |= {name: x[theirs] for name, theirs in OF_TABLE.items() if theirs in x}
        made = forward_call(
            q, given.k_cache, given.v_cache, **keywords, seqused_k=total,
            window_size_left=left, window_size_right=right, q_start="end", num_splits=0,
        )  # fmt: skip
        with quiet_run(simulator, found):
            out, lse = run_on_simulator(made)
        assert lse is not None
        call.assert_close(out, lse)
