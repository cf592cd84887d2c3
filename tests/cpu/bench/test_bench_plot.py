"""Figures and the tables of pages: the committed ones are those of the committed rows."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import bench
from bench import cases, gallery, measure, peers, plot, prep, report
from bench.cases import CASES, BenchCase, make_tensors
from bench.figure import smaller_svg
from bench.masks import MASKS
from bench.peers import DOCUMENT_MASKS
from bench.rows import RESULTS, read_rows
from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, DOCUMENT_STRIDE
from flash_mask_cute.plotting import EMPTY, FULL, PARTIAL, classify_tiles

ROWS = read_rows(RESULTS)


@pytest.mark.parametrize("page", plot.PAGES)
def test_pages_say_what_the_rows_say(page: str) -> None:
    text = (bench.ROOT / page).read_text()
    assert plot.fill(page, text, ROWS) == text
    assert plot.fill(page, text, []) != text
    with pytest.raises(ValueError, match="no markers for"):
        plot.fill(page, text.replace("<!-- end of", "<!-- gone"), ROWS)


def test_tables_say_what_the_rows_say() -> None:
    assert report.TABLES_PAGE.read_text() == report.tables_page(ROWS)
    assert all(row["gpu"] in report.TABLES_PAGE.read_text() for row in ROWS)


def drawn(path: Path) -> str:
    """An svg with its images by their points: matplotlib does not choose how they are packed."""
    image = pytest.importorskip("matplotlib.image")

    def points(found: re.Match[str]) -> str:
        pixels = image.imread(BytesIO(base64.b64decode(found[1])))
        return f"{pixels.shape} {hashlib.sha256(pixels.tobytes()).hexdigest()}"

    text = re.sub(r'data:image/png;base64,([^"]+)', points, path.read_text())
    return re.sub(r'id="image\w+"', "", text)


def test_figures_are_those_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    committed = {path.name: drawn(path) for path in plot.FOLDER.iterdir()}
    made_by = re.search(r"Matplotlib v([\d.]+)", committed["memory.svg"])
    here = importlib.metadata.version("matplotlib")
    if made_by is None or made_by[1] != here:
        pytest.skip(f"drawn by another version of matplotlib than {here}: {made_by}")
    plot.draw_all(ROWS, tmp_path)
    assert {path.name: drawn(path) for path in tmp_path.iterdir()} == committed


def test_figures_are_well_formed() -> None:
    for path in (*plot.FOLDER.iterdir(), plot.FOLDER.parent / "training_losses.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    glyph = '<path id="a" d="M 0.12345 1 \nL 2 3 \nz\n" transform="scale(0.015625)"/>\n <g id="b">'
    small = '<path d="M 0.12 1L 2 3z" transform="scale(0.015625)"/>\n<g>'
    assert smaller_svg(glyph) == small


def test_picture_of_masks() -> None:
    masks = gallery.named_masks()
    assert masks.keys() == {*MASKS, "sink_window"}
    classes = {
        name: {
            *classify_tiles(mask.dense(gallery.TOKENS)[0, 0], *2 * [gallery.TILE]).unique().tolist()
        }
        for name, mask in masks.items()
    }
    assert classes.pop("full") == {FULL}
    assert all(found == {EMPTY, PARTIAL, FULL} for found in classes.values()), classes
    picture = (plot.FOLDER / "masks.svg").read_text()
    assert len(picture) < 300_000 and picture.count("data:image/png") == len(masks)
    pages = [(bench.ROOT / "docs" / name).read_text() for name in ("masks.md", "mask_gallery.md")]
    for name in masks:
        assert f">{name}<" in picture and all(f"`{name}" in page for page in pages)


def test_figures_do_not_depend_on_what_was_drawn_before(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for folder in ("first", "second"):
        plot.draw_all(ROWS, tmp_path / folder)
        pyplot.rcParams["font.size"] = 20
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("first", "second")
    ]
    assert files[0] == files[1] and len(files[0]) >= 3
    assert pyplot.get_fignums() == []
    # peers beside each other, and what was not measured says so
    assert b"FlexAttention" in files[0]["memory.svg"]
    # all of them, of the runs that had them all
    runs = {row["run"] for row in ROWS if row["peer"] == "flex" and row["variant"] == "loop"}
    compared = [row for row in ROWS if row["run"] in runs]
    plot.draw_speed(compared, 128, str(tmp_path / "all.svg"))
    assert "FlexAttention" in (tmp_path / "all.svg").read_text()
    plot.draw_speed([], 64, str(tmp_path / "none.svg"))
    assert (tmp_path / "none.svg").read_text().count(">not measured<") == 4


def test_sizes_of_masks_are_those_that_were_measured() -> None:
    names = {(bench.name_of(r), r["peer"]): r["bytes"] for r in ROWS if r["kind"] == "prep"}
    # cuDNN's masks have tables of their own
    measured = {key: found for key, found in names.items() if key[0].startswith("meta-")}
    assert len(measured) == 10
    tables = {"causal_document": 1, "document": 1, "share_question": 2, "random_eviction": 1}
    for (name, peer), found in measured.items():
        case = CASES[name]
        if peer == "flex":
            of_tables = 4 * case.n * tables.get(case.mask, 0)
            assert found == prep.block_mask_bytes(case.n) + of_tables
        else:
            vectors = case.mask_of(case.n).hidden.shape[1]
            expected = prep.interval_bytes(case.n, vectors)
            if case.mask in DOCUMENT_MASKS:
                # intervals, also counted inside documents; where these begin, in slots and in the
                # batch; bounds of both, with one block more for each sequence
                slots, blocks = case.n // DOCUMENT_STRIDE, case.n // BOUNDS_TILE
                expected = 4 * (2 * vectors * case.n + slots + slots + 1)
                expected += 4 * 2 * vectors * (blocks + blocks + slots)
            assert found == expected
    assert prep.dense_mask_bytes(300) == torch.ones(300, 300, dtype=torch.bool).numel()


class Allocator:
    """Stands for the GPU's: holds what the torch functions that count bytes are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        for name, result in {
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", 0),
            "memory_allocated": lambda: 1000,
            "max_memory_allocated": lambda: self.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, result)


@pytest.mark.parametrize(
    ("name", "returned", "judged"),
    [
        ("memory-8k-causal_document", 96 * 2 * (128 * 2 + 4), "O"),
        ("memory-bwd-8k-causal_document", 3 * 96 * 2 * 128 * 2, "dQ"),
    ],
)
def test_memory_is_what_a_call_needs_beyond_inputs_and_outputs(
    monkeypatch: pytest.MonkeyPatch, name: str, returned: int, judged: str
) -> None:
    small = replace(
        CASES[name],
        n=96,
        tokens=96,
        heads=2,
        heads_kv=2,
        draw=cases.Draw(((40,), (56,))),
    )
    memory = Allocator(monkeypatch)

    def on_cpu(case: BenchCase, device: str, seed: int) -> cases.CaseTensors:
        return make_tensors(case, "cpu", seed)

    prepare = peers.CutePeer.prepare

    def noted(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        # the forward of a backward is no part of it
        peak = 1000 + 777 + returned if case.kind == small.kind else 10**9
        if case.is_backward:
            memory.peak = 10**9
        call = prepare(peer, case, tensors)

        def run() -> object:
            memory.peak = max(memory.peak, peak)
            return call()

        return run

    monkeypatch.setattr(peers.CutePeer, "prepare", noted)
    monkeypatch.setattr(measure, "make_tensors", on_cpu)
    options = measure.Options((), ("cudnn", "ours"), 1, 0, 0.1, 0.0, 9.0, 9.0, 3, "", "", "")
    (row,) = measure.measure(small, options, measure.Inputs())
    assert (row["kind"], row["peer"], row["variant"], row["bytes"]) == (
        small.kind,
        "ours",
        "peak",
        777,
    )
    assert not {"fwd", "us"} & row.keys() and f"of the allowed error: {judged} " in row["note"]
    drawn = {} if small.is_backward else {"ours": {96: 777, 4: 5}}
    assert plot.remembered([row, row | {"n": 4, "bytes": 5}]) == drawn


def test_who_takes_part_in_memory() -> None:
    names = [name for name in CASES if CASES[name].kind == "memory"]
    assert [CASES[name].n for name in names] == list(cases.REMEMBERED)
    dense = [peers.PEERS["sdpa_dense"].supports(CASES[name]) for name in names]
    assert [reason is None for reason in dense] == [True, True, False, False, False]
    assert {len((CASES[name].draw or cases.Draw(())).documents) for name in names} == {15}
    *backward, causal = (case for case in CASES.values() if case.kind == "memory_backward")
    assert [case.n for case in backward] == list(cases.REMEMBERED_BACKWARD)
    for case in backward:
        twin = CASES[case.name.replace("-bwd", "")]
        assert case == replace(twin, name=case.name, kind="memory_backward")
    assert (causal.name, causal.n, causal.batch) == ("memory-bwd-128k-causal", 131072, 1)


def test_command_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert plot.main(["--out", str(tmp_path)]) == 1
    assert "matplotlib (extra `plot`)" in capsys.readouterr().out and not list(tmp_path.iterdir())
