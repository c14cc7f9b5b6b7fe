"""The page of a table: numbers beside the paper's, and what they are."""

import json
import re

import pytest

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.reproduce.paper import read_properties, read_table
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.tables import Number, ResultRow
from elude_steer.evaluation.tables.properties import PROPERTIES, _judge

BACKBONE = "dinov2-base-layer12"


def make_result(name, numbers, seeds=(42,), **more):
    images = {"name": "train", "count": 24}
    about = {"models": {}, "images": images, "held out": images, "seeds": list(seeds), "differs": []}
    rows = [ResultRow(BACKBONE, "raw units", seeds, numbers)]
    hours = {"pieces": {}}
    return TableResult(read_table(name), rows, about, hours, **more)


def test_win_rates_have_our_interval_beside_the_papers(tmp_path):
    number = Number(52.0, interval=(38.04, 66.0), paper=38.74, paper_interval=(36.8, 40.6))
    result = make_result("judge", {"win rate": number})
    page = result.save(tmp_path).read_text()
    assert "52 [38.0, 66.0]<small>paper 38.74 [36.8, 40.6], +13.26</small>" in page and "±" not in page
    assert "brackets hold 95 % intervals" in page
    found = json.loads((tmp_path / "judge.json").read_text())["rows"][0]["numbers"]["win rate"]
    assert (found["interval"], found["paper interval"]) == ([38.04, 66.0], [36.8, 40.6])
    assert "38.74 [36.8, 40.6]" in (tmp_path / "judge.txt").read_text()


@pytest.mark.parametrize(
    ("name", "measure", "seeds", "expected"),
    [
        ("interpretability", "MS-Score", (42, 123), "± is the deviation over token seeds."),
        ("stability", "stability", (42,), "± is the deviation over runs on the same tokens"),
        ("efficiency", "ms per batch", (42,), "± is the deviation of single passes"),
    ],
)
def test_the_page_says_of_what_a_deviation_is(name, measure, seeds, expected):
    page = make_result(name, {measure: Number(50.0, 1.25)}, seeds).page()
    assert "50 ± 1.25" in page and expected in page
    assert f"token seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}." in page


def test_a_number_that_is_no_paper_s_has_no_difference():
    number = Number(60.0, paper=80.0, is_comparable=False)
    page = make_result("interpretability", {"accuracy": number}).page()
    assert "60<small>paper 80</small>" in page and number.to_dict()["difference"] is None


def test_properties_stand_beside_the_papers():
    evidence = {"similarity of runs": 0.8, "trained parameters": 0.0, "error of taking one part away": 0.0}
    evidence |= {"error of the output": 0.0, "labels read": 0.0}
    rows = [_judge(METHODS[name], evidence) for name in ("k-means on contributions", "random split")]
    result = make_result("interpretability", {}, properties={BACKBONE: rows})
    page = result.page()
    cells = re.findall(r"<td>k-means on contributions</td>(.*?)</tr>", page)[0]
    assert re.findall(r"<small>paper (\w+)</small>", cells) == ["yes", "yes", "no", "yes", "yes"]
    assert cells.startswith("<td>no (0.800)<small>") and "explicit is what taking a part away" in page
    assert "<td>random split</td><td>no (0.800)</td>" in page, "the paper does not have it"
    stored = result.to_dict()["properties"][BACKBONE]
    assert stored[0]["paper"] == read_properties()["k-means on contributions"] and stored[1]["paper"] is None
    assert list(stored[0]["paper"]) == list(PROPERTIES)
    assert result.properties_text()[1][4] == "yes (0e+00), paper no"
