import json
from pathlib import Path

from elude_steer.evaluation.compare.methods import SMALL, Size
from elude_steer.evaluation.compare.table import write_results

RESULTS = Path(__file__).parents[3] / "demos" / "results"


def test_the_page_of_results_is_what_its_numbers_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("demos/results")
    out.mkdir(parents=True)
    rows = json.loads((RESULTS / "toyland.json").read_text(encoding="utf-8"))
    page = write_results(Size(), rows, out).read_text(encoding="utf-8")
    assert page == (RESULTS / "toyland.md").read_text(encoding="utf-8")
    assert "Written by `elude-steer compare --work work --out demos/results`." in page


def test_the_page_names_the_command_of_a_small_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    rows = [row for row in json.loads((RESULTS / "toyland.json").read_text(encoding="utf-8")) if "latents" in row]
    page = write_results(SMALL, rows, Path("out")).read_text(encoding="utf-8")
    assert "Written by `elude-steer compare --work work --out out --small`." in page
