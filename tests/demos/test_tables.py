"""The pages of tables are what their scripts write from the JSON files beside them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from demos.photoland import tables as photoland
from demos.toyland import tables as toyland

RESULTS = Path(__file__).parents[2] / "demos" / "results"


def call(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tables", *map(str, arguments)])
    script.main()


@pytest.mark.parametrize("script", [photoland, toyland], ids=["photoland", "toyland"])
def test_the_shipped_page_is_that_of_its_numbers(script, tmp_path, monkeypatch):
    shutil.copy(RESULTS / f"{script.NAME}.json", tmp_path)
    call(script, monkeypatch, "--page-only", "--out", tmp_path)
    page = (tmp_path / f"{script.NAME}.md").read_text(encoding="utf-8")
    assert page == (RESULTS / f"{script.NAME}.md").read_text(encoding="utf-8")
    assert "--work WORK --out demos/results`" in page


@pytest.mark.parametrize("script", [photoland, toyland], ids=["photoland", "toyland"])
def test_what_is_missing_is_named(script, tmp_path, monkeypatch, capsys):
    for arguments, text in ((["--page-only"], "--page-only needs --out"), (["--out", tmp_path], "--work")):
        with pytest.raises(SystemExit):
            call(script, monkeypatch, *arguments)
        assert text in capsys.readouterr().err


def test_the_paper_stands_beside_photoland_and_memory_does_not():
    page = (RESULTS / "photoland_tables.md").read_text(encoding="utf-8")
    assert "| raw units | 61.03 ± 0.00 | 48.33 | 100.00 ± 0.00 | 100.00 | 27.29 ± 0.00 | 81.16 |" in page
    assert "| ELUDe (unique) | 66.51 ± 0.51 | 73.31 ± 0.06 |" in page
    assert "say nothing about the paper" in page and "peak MB" not in page


def test_hours_of_a_layer_are_its_own():
    hours = json.loads((RESULTS / "toyland_tables.json").read_text(encoding="utf-8"))["hours"]
    assert set(hours) == {str(layer) for layer in toyland.LAYERS}
    for layer, (_, backbone) in toyland.LAYERS.items():
        found = hours[str(layer)]
        assert found["pieces"] and all(name.startswith(f"{backbone}: ") for name in found["pieces"])
        total = sum(piece["measured"] for piece in found["pieces"].values())
        assert found["measured"] == pytest.approx(total) and found["clock"] > 0


def test_a_further_run_keeps_what_is_written_by_hand(tmp_path, monkeypatch):
    """What the run writes is taken from the shipped file; prose and a stand-in's judgements are no part of a run."""
    shipped = json.loads((RESULTS / "toyland_tables.json").read_text(encoding="utf-8"))
    (tmp_path / "toyland_tables.json").write_text(json.dumps(shipped))
    made = {name: value for name, value in shipped.items() if name not in ("hours", "other layers", toyland.JUDGED)}
    monkeypatch.setattr(
        toyland, "write_tables", lambda *_, **__: (tmp_path / "toyland_tables.json").write_text(json.dumps(made))
    )
    monkeypatch.setattr(toyland, "run_stability", lambda *_: [])
    given = toyland.argparse.Namespace(
        out=tmp_path, work=tmp_path, build=8, measure=4, per_image=4, top_k=20, smallest=4
    )
    results = {
        layer: (
            toyland.read_rows(toyland.TableRow, shipped["other layers"].get(str(layer), [])),
            toyland.TableResult(None, [], {}, shipped["hours"][str(layer)], properties={backbone: []}),
        )
        for layer, (_, backbone) in toyland.LAYERS.items()
    }
    page = toyland.write_page(results, given)
    assert page.read_text(encoding="utf-8") == (RESULTS / "toyland_tables.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "toyland_tables.json").read_text())[toyland.JUDGED] == shipped[toyland.JUDGED]
