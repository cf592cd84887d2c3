"""Tile shapes by head dimension, as data. The first row that both head dimensions fit is used."""

from __future__ import annotations

from typing import NamedTuple


class FwdRow(NamedTuple):
    """Tiles for head_dim <= max_dim and head_dim_v <= max_dim_v, and why these."""

    max_dim: int
    max_dim_v: int
    tile_m: int
    tile_n: int
    num_stages: int
    stages_q: int
    share_qo: bool
    reason: str


SM90_FWD = (
    FwdRow(64, 64, 192, 128, 2, 2, False, "three warpgroups share every key block's arrival"),
    FwdRow(96, 96, 128, 128, 2, 2, False, "two warpgroups take turns; the next query waits ready"),
    FwdRow(128, 128, 128, 128, 2, 2, False, "the largest square tile with a second query stage"),
    FwdRow(192, 128, 128, 112, 2, 1, False, "the largest key block beside a separate output"),
    FwdRow(192, 192, 128, 96, 2, 1, True, "the output takes the query's place in shared memory"),
    FwdRow(256, 256, 128, 80, 2, 1, True, "the largest key block with two stages of K and V"),
)
