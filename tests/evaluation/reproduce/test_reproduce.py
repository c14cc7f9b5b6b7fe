"""Every `reproduce` end to end: random checkpoints of the real classes, 24 images."""

import ast
import base64
import json
import re
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageStat

from elude_steer.atlas.build import unit_clusters
from elude_steer.atlas.build.unit_clusters import cluster_unit
from elude_steer.evaluation.measures.llm_judges import make_grid
from elude_steer.evaluation.reproduce.experiment import NAMES
from elude_steer.evaluation.reproduce.run import forecast, reproduce
from elude_steer.evaluation.tables import judging
from elude_steer.utils import optional
from tests.evaluation.reproduce.conftest import SMALL
from tests.helpers.judge_server import Server, answer
from tests.models.test_vision_backbones import SIGLIP2_NAMES, SIGLIP2_PREPROCESSOR, save, siglip2_config

slow = pytest.mark.slow
ROWS = ("raw units", "ELUDe (unique)", "topk SAE")


def without_hours(page):
    return re.sub(r'<section id="hours">.*</section>', "", page, flags=re.DOTALL)


def interrupt_after(where):
    """A log that is interrupted after some lines, or at a line that ends so, as by Ctrl-C."""
    lines = []

    def log(line):
        lines.append(line)
        if line.endswith(where) if isinstance(where, str) else len(lines) > where:
            raise KeyboardInterrupt

    return log


def run_interrupted(name, make_options, monkeypatch, lines):
    """Interrupt a run three times: among the units that it clusters, then at later lines; then let it end."""
    units = []

    def interrupt(*arguments):
        units.append(len(units))
        if len(units) == 7:
            raise KeyboardInterrupt
        return cluster_unit(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(unit_clusters, "cluster_unit", interrupt)
        reproduce(name, make_options())
    for where in lines:
        with pytest.raises(KeyboardInterrupt):
            reproduce(name, make_options(log=interrupt_after(where)))
    return reproduce(name, make_options())


def test_interrupting_five_times_and_going_on_gives_the_same_page(world, tmp_path, monkeypatch):
    once = reproduce("interpretability", world.options(tmp_path / "once", rows=ROWS))
    make = partial(world.options, tmp_path / "again", rows=ROWS)
    lines = (2, 2, "topk SAE, run 2", "collages")
    again = run_interrupted("interpretability", make, monkeypatch, lines)
    pages = [result.save(tmp_path / f"out-{number}").read_text() for number, result in enumerate((once, again))]
    assert without_hours(pages[0]) == without_hours(pages[1]) and "ELUDe (unique)" in pages[0]
    assert len(without_hours(pages[0])) < len(pages[0])
    third = reproduce("interpretability", world.options(tmp_path / "again", rows=ROWS))
    assert third.page() == pages[1]  # with its hours, which are of the run that made them

    numbers = {row.method: row.numbers for row in once.rows}
    assert list(numbers) == ["raw units", "topk SAE", "ELUDe (unique)"]  # the paper's order
    elude = numbers["ELUDe (unique)"]
    assert elude["R2"].value == pytest.approx(100) and elude["R2"].paper == 100
    assert elude["MS-Score"].difference == pytest.approx(elude["MS-Score"].value - 64.85)
    assert elude["accuracy"].value == pytest.approx(numbers["raw units"]["accuracy"].value)
    assert numbers["raw units"]["expansion"].value == 1 < elude["expansion"].value
    assert elude["expansion"].paper == 8
    text = (tmp_path / "out-0" / "interpretability.txt").read_text()
    assert "64.85 ± 0.52" in text and "backbone only" in text
    found = json.loads((tmp_path / "out-0" / "interpretability.json").read_text())
    pieces = [*(f"{row}, seed 42" for row in ROWS), *(f"{row}, properties" for row in ROWS[1:]), "collages"]
    assert set(found["hours"]["pieces"]) == {f"dinov2-base-layer12: {piece}" for piece in pieces}
    assert str(world.dino.parent) not in json.dumps(found), "private paths stay private"
    assert "another checkpoint for dinov2-base-layer12" in pages[0] and "LLM rank needs judges" in pages[0]


def test_two_budgets_share_a_folder_and_not_their_hours(world, tmp_path):
    rows, work = ("raw units", "ELUDe (unique)"), tmp_path / "work"
    first = reproduce("interpretability", world.options(work, rows=rows))
    fewer = world.options(work, rows=rows[:1], changes=("tokens.per_image=4", *SMALL[1:]))
    expected, second = forecast("interpretability", fewer), reproduce("interpretability", fewer)
    piece = "dinov2-base-layer12: raw units, seed 42"
    assert set(second.hours["pieces"]) == {piece} == set(expected.pieces), "neither the rows of the other run"
    hours = [result.hours["pieces"][piece] for result in (first, second)]
    assert hours[0] != hours[1] and hours[1]["measured"] > 0, "nor its hours"
    again = reproduce("interpretability", world.options(work, rows=rows))
    assert again.hours == first.hours


def test_the_page_shows_properties_and_collages(world, tmp_path):
    result = reproduce("interpretability", world.options(tmp_path / "work", rows=ROWS))
    rows = {row.method: row for row in result.properties["dinov2-base-layer12"]}
    assert list(rows) == ["topk SAE", "ELUDe (unique)"]
    elude, other = rows["ELUDe (unique)"], rows["topk SAE"]
    assert elude.stable and elude.training_free and elude.explicit and elude.lossless and elude.unsupervised
    assert not (other.stable or other.training_free or other.lossless)
    page = result.save(tmp_path / "out").read_text()
    assert all(f"<td>{answer}<small>paper yes</small></td>" in page for answer in elude.answers())
    units = result.collages["dinov2-base-layer12"]
    assert units and all(1 < unit["parts"] <= 12 for unit in units)
    assert len({unit["parts"] for unit in units}) == len(units), "units with different numbers of parts"
    assert page.count("<img") == len(units) and all(unit["image"] in page for unit in units)
    assert f"unit {units[0]['unit']} and its {units[0]['parts']} parts, ELUDe (unique)" in page
    found = json.loads((tmp_path / "out" / "interpretability.json").read_text())
    assert found["properties"]["dinov2-base-layer12"][1]["lossless"] is True and "collages" not in found
    assert found["properties"]["dinov2-base-layer12"][0]["paper"]["lossless"] is False, "topk SAE"
    text = (tmp_path / "out" / "interpretability.txt").read_text()
    assert "yes (0 parameters), paper yes" in text and "judge the methods as they are published" in page


def test_units_alone_have_neither_properties_nor_collages(world, tmp_path):
    result = reproduce("interpretability", world.options(tmp_path / "work", rows=("raw units",)))
    assert not result.properties and not result.collages
    page = result.page()
    assert "Properties, measured" not in page and "<img" not in page
    assert "token seed 42." in page and "Accuracy of dinov2-base-layer12: a linear probe" in page
    learnt, measured = "24 images to learn from instead of 1,281,167", "12 images to measure on instead of 50,000"
    left_out = "9 of 10 rows left out; 1 of 2 backbones left out."
    assert all(part in page for part in (learnt, measured, "token seed 42 instead of 42, 123, 999", left_out))


def test_the_papers_edits_from_images_to_the_page(world, tmp_path, monkeypatch):
    once = reproduce("steering", world.steering(tmp_path / "once"))
    make = partial(world.steering, tmp_path / "again")
    again = run_interrupted("steering", make, monkeypatch, lines=(2, 4))
    pages = [result.save(tmp_path / f"out-{number}").read_text() for number, result in enumerate((once, again))]
    assert without_hours(pages[0]) == without_hours(pages[1])
    assert [row["row"] for row in once.rows][:3] == ["dog-1", "dog-2", "train-1"] and len(once.rows) == 14
    for row in once.rows:
        assert row["maps"] or row["notes"][0].startswith("Not made: atlas"), "words that the small atlas does not know"
        assert row["paper"]["caption"] in pages[0].replace("&#x27;", "'")
        assert set(row["verdict"]["gone"].values()) <= {"went", "stayed", "was not named"}
    assert pages[0].count('class="edit"') == 14 and "(50, -2, 100, 50)" in pages[0]
    assert sum(bool(row["maps"]) for row in once.rows) >= 10
    text = (tmp_path / "out-0" / "steering.txt").read_text()
    assert len(text.splitlines()) == 1 + 5 + 14
    assert once.hours["pieces"].keys() >= {"atlas", "captions of train"}
    stored = [json.loads(path.read_text()) for path in (tmp_path / "once" / "edits").iterdir()]
    assert len(stored) == 14 and not any("verdict" in row for row in stored), "rows are judged by the rule of today"
    part = reproduce("steering", world.steering(tmp_path / "once", rows=("train-2",)))
    assert part.hours["pieces"].keys() == {"atlas", "captions of train"}
    whole = once.hours["pieces"]
    assert part.hours["pieces"]["atlas"] == whole["atlas"]
    assert part.hours["pieces"]["captions of train"]["measured"] < whole["captions of train"]["measured"]


@pytest.mark.parametrize("name", ["generalization", "ablations", "stability", "efficiency"])
@slow
def test_every_other_table(world, tmp_path, name):
    options = world.options(tmp_path / "work", name)
    result = reproduce(name, options)
    page = result.save(tmp_path / "out").read_text()
    assert len(result.rows) == len(result.table.methods(result.rows[0].backbone)) - (
        name == "ablations" and not optional.is_installed("umap")
    )
    column = {"stability": "effective rank", "efficiency": "ms per batch"}.get(name, "MS-Score")
    for row in result.rows:
        number = row.numbers[column]
        assert number.value is not None and number.paper is not None, row
        assert f"{number.paper:,.2f}" in page or f"{number.paper:,.0f}" in page
    assert result.hours["measured"] > 0


@slow
def test_the_papers_protocol_with_a_small_budget(world, tmp_path):
    rows = ("raw units", "ELUDe (unique)", "transcoder")
    options = world.options(tmp_path / "work", rows=rows, protocol="paper", passes=2)
    result = reproduce("efficiency", options)
    numbers = {row.method: row.numbers for row in result.rows}
    bare, elude = numbers["raw units"], numbers["ELUDe (unique)"]
    assert bare["slower, %"].value == bare["slower, %"].paper == 0
    ratio = 100 * (elude["ms per batch"].value / bare["ms per batch"].value - 1)
    assert elude["slower, %"].value == pytest.approx(ratio)
    assert elude["slower, %"].paper == pytest.approx(14.94, abs=0.01)  # 437.73 of 380.83 ms
    assert elude["more memory, %"].paper == pytest.approx(15.24, abs=0.01)
    assert numbers["transcoder"]["slower, %"].paper == pytest.approx(89.22, abs=0.01)
    assert "2 timed passes of 256 images after 1 (compiled, mean)" in result.page()


def brightness(image):
    return ImageStat.Stat(image.convert("L")).mean[0]


def test_judges_that_prefer_bright_images_rank_methods_by_brightness(world, tmp_path, monkeypatch):
    pytest.importorskip("openai", reason="judges need openai")
    places = {"raw units": 0, "topk SAE": 1, "ELUDe (unique)": 2}  # the darkest images, some between, the brightest

    def find_images(bench, method, seed):
        order = sorted(bench.held_out.items, key=lambda item: brightness(make_grid([item.read()[0]] * 9)))
        numbers = [item.index for item in order[places[method.name] :][:9]]
        return torch.tensor([numbers] * 3)

    def prefer_bright(model, first, second, count):
        grids = [Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) for url in (first, second)]
        return answer("A" if brightness(grids[0]) > brightness(grids[1]) else "B")

    monkeypatch.setattr(judging, "strongest_images", find_images)
    with Server(prefer_bright) as server:
        judges = tuple(f"{name}@{server.url}" for name in ("one", "two", "three"))
        options = world.options(tmp_path / "work", rows=ROWS, judges=judges, pairs=2)
        expected = forecast("judge", options)
        result = reproduce("judge", options)
        assert expected.questions == 3 * 2 * 2 and sum(server.asked.values()) <= 3 * expected.questions
    rates = {row.method: row.numbers["win rate"] for row in result.rows}
    assert {name: rate.value for name, rate in rates.items()} == dict(zip(places, (0, 50, 100), strict=True))
    assert all(rate.interval[0] <= rate.value <= rate.interval[1] for rate in rates.values())
    assert rates["ELUDe (unique)"].paper == 67.0 and rates["ELUDe (unique)"].paper_interval is not None


def test_siglip2_has_a_table(world, tmp_path):
    """Its tower is a part of a model with texts, and its images have a size of their own."""
    path = tmp_path / "siglip2"
    path.mkdir()
    save(path, siglip2_config(12, 16), SIGLIP2_PREPROCESSOR, SIGLIP2_NAMES)
    rows = ("raw units", "ELUDe (unique)")
    options = world.options(tmp_path / "work", rows=rows, backbones={"siglip2-base-layer12": str(path)})
    result = reproduce("generalization", options)
    raw, elude = (row.numbers for row in result.rows)
    assert elude["MS-Score"].paper == 67.98 and elude["R2"].value == pytest.approx(100)
    assert elude["accuracy"].value == pytest.approx(raw["accuracy"].value) and elude["accuracy"].difference is None
    assert elude["expansion"].value > 1 and result.properties["siglip2-base-layer12"][0].lossless


@slow
def test_all_rows_of_the_main_table(world, tmp_path):
    options = world.options(tmp_path / "work")
    expected = forecast("interpretability", options)
    result = reproduce("interpretability", options)
    assert [row.method for row in result.rows] == list(result.table.methods("dinov2-base-layer12"))
    assert set(expected.pieces) == set(result.hours["pieces"]) and expected.disk > 0 < expected.memory
    assert all(row.numbers["MS-Score"].value is not None for row in result.rows)
    assert not forecast("interpretability", options).pieces, "nothing is left to do"


def test_every_name_is_tested_here():
    """Names that tests of this file give to `reproduce`, also through a parameter."""
    (names,) = [mark.args[1] for mark in test_every_other_table.pytestmark if mark.name == "parametrize"]
    calls = [node for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Call)]
    called = [call.args[0] for call in calls if getattr(call.func, "id", "") == "reproduce" and call.args]
    given = {one.value for one in called if isinstance(one, ast.Constant)}
    assert given | set(names) == set(NAMES)
    assert given >= {"steering", "interpretability", "judge"} and len(calls) > 20, "the test finds some"
