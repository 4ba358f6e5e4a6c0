"""The figure, really drawn: what it says is read back from the SVG."""

from __future__ import annotations

from pathlib import Path

import pytest

from metatrainer.errors import MetatrainerError
from metatrainer.ledger import Ledger
from metatrainer.report.figure import draw
from metatrainer.report.summary import Summary, summarise


def summary_of(folder: Path) -> Summary:
    with Ledger(folder / "ledger.sqlite", readonly=True) as ledger:
        return summarise(ledger)


def test_a_bare_path_gives_a_png_and_an_svg_with_every_part(make_run, tmp_path: Path) -> None:
    summary = summary_of(make_run(steps=8, planned=8))
    png, svg = draw(summary, tmp_path / "out" / "figure")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    text = svg.read_text()
    for part in ("nano-synthetic", "Mean reward", "Validation", "Quality", "Speed", "Held out"):
        assert part in text
    assert summary.reward.last is not None and f">{summary.reward.last:.2f}<" in text
    held = summary.heldout["triage"]
    assert held.before and held.after
    assert f"before {held.before.mean:.2f}" in text and f"after {held.after.mean:.2f}" in text


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_unfinished_run_is_drawn(make_run, tmp_path: Path, steps: int) -> None:
    (svg,) = draw(summary_of(make_run(steps=steps, planned=9)), tmp_path / "f.svg")
    text = svg.read_text()
    assert ("no step is done yet" in text) == (steps == 0)
    assert "before" in text and "after" not in text


def test_a_run_without_heldout_families_leaves_their_panel_out(make_run, tmp_path: Path) -> None:
    (svg,) = draw(summary_of(make_run(steps=2, planned=2, heldout=0)), tmp_path / "f.svg")
    assert "Held out" not in svg.read_text()


def test_the_same_run_gives_the_same_svg(make_run, tmp_path: Path) -> None:
    summary = summary_of(make_run(steps=2, planned=2))
    one, two = draw(summary, tmp_path / "a.svg")[0], draw(summary, tmp_path / "b.svg")[0]
    assert one.read_bytes() == two.read_bytes()


def test_an_unknown_kind_of_file_is_refused(make_run, tmp_path: Path) -> None:
    summary = summary_of(make_run(steps=1, planned=1))
    with pytest.raises(MetatrainerError, match=r"\.png, \.svg, \.pdf"):
        draw(summary, tmp_path / "figure.docx")
