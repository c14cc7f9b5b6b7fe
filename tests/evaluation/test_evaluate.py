"""The commands that measure, on toyland."""

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import AtlasError, EludeSteerWarning, SpecError
from elude_steer.evaluation.ablate import questions
from elude_steer.evaluation.evaluate import MEASURES, evaluate
from elude_steer.evaluation.one_pass import items_of, source_of
from elude_steer.recipe_files import load_spec, recipes_dir
from elude_steer.utils.yaml_schema import override
from tests.helpers.markup import Reader


@pytest.fixture(scope="module")
def found():
    return evaluate("toyland", images="toyland:77001", limit=24, again="toyland", warm_up=1, runs=3)


def value(found, name):
    (row,) = [row for row in found.rows if row.name.startswith(name)]
    return row


def test_the_split_is_faithful_and_comes_out_again(found):
    assert value(found, "R2").value == pytest.approx(1, abs=1e-9)
    assert value(found, "same caption").value == 1
    assert value(found, "stability").value == pytest.approx(1, abs=1e-12)


def test_sub_units_are_more_of_one_mind_than_units(found):
    ms = value(found, "MS-Score")
    assert ms.value > ms.units
    assert torch.nanmean(found.scores).item() * 100 == pytest.approx(ms.value)
    assert len(found.scores) == len(found.atlas)
    assert len(found.unit_scores) == found.atlas.d_out


def test_every_measure_has_its_rows(found):
    assert {row.measure for row in found.rows} == set(MEASURES)
    assert 1 < value(found, "effective rank").value <= found.atlas.d_in
    assert 0 < value(found, "collinearity").value <= 1
    assert value(found, "explicit layer, ms").value > 0


def test_a_page_says_it_all_and_fetches_nothing(found, tmp_path):
    page = found.save(tmp_path)
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert (told["images"], told["pictures"]) == ("toyland:77001", 24)
    assert len(told["rows"]) == len(found.rows)
    text = page.read_text()
    assert "MS-Score" in Reader(text).text
    assert text.count("<img") >= 4
    assert not re.search(r'(?:src|href)="(?!data:)', text)


def test_only_what_is_asked_for_is_measured():
    found = evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary"])
    assert {row.measure for row in found.rows} == {"dictionary"}
    assert found.scores is None
    with pytest.raises(SpecError, match=r"there is no measure 'monosemantic'.*'monosemanticity'"):
        evaluate("toyland", measures=["monosemantic"])
    with pytest.raises(SpecError, match="there is no measure ''"):
        evaluate("toyland", measures=[])
    with pytest.raises(SpecError, match="'toyland' is for the measure 'dictionary', which is not asked for"):
        evaluate("toyland", measures=["efficiency"], again="toyland")
    twice = evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary", "dictionary"])
    assert len(twice.rows) == len(found.rows)


def test_too_few_pictures_have_no_score_and_a_report_all_the_same(run, tmp_path):
    with pytest.warns(EludeSteerWarning, match="of 2 pictures there is no MS-Score"):
        found = evaluate("toyland", images="toyland:5", limit=2, measures=["faithfulness", "monosemanticity"])
    assert value(found, "MS-Score").value is None
    assert value(found, "never fire").value < 1  # they fire
    found.save(tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    (tmp_path / "file").write_text("")
    code, _, err = run("evaluate", "toyland", "--images", "toyland:5", "--limit", "3", "--out", tmp_path / "file")
    assert (code, "measuring" in err) == (1, False)
    assert "is a file, not a folder" in err


def test_another_run_is_one_of_the_same_layer(tmp_path):
    atlas = Atlas.load("toyland")
    other = replace(atlas, about={**atlas.about, "weights": "0" * 32}).save(tmp_path / "other")
    with pytest.raises(AtlasError, match="other weights"):
        evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary"], again=str(other))


def test_measured_on_pictures_that_cannot_all_be_read(tmp_path):
    for number, scene in enumerate(toyland.scenes(3, 3)):
        scene.image.save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.warns(EludeSteerWarning, match=r"left out: bad\.png"):
        assert evaluate("toyland", images=str(tmp_path), measures=["monosemanticity"]).image_count == 3


def test_the_command_prints_a_table(run, tmp_path):
    few = ["--images", "toyland:5", "--limit", "6", "--out", tmp_path / "found"]
    code, out, err = run("evaluate", "toyland", "--measures", "monosemanticity", *few)
    assert code == 0
    assert "MS-Score, %" in out
    assert "measuring monosemanticity" in err
    assert (tmp_path / "found" / "report.html").is_file()
    code, out, _ = run("evaluate", "toyland", "--measures", "dictionary", "--limit", "2", "--json")
    assert code == 0
    assert json.loads(out)["atlas"] == "toyland"
    code, _, err = run("evaluate", "toyland", "--measures", "speed")
    assert code == 1
    assert "there is no measure 'speed'" in err


def test_pictures_are_spread_over_all_folders(tmp_path):
    for number in range(12):
        path = tmp_path / f"class{number // 4}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    atlas = Atlas.load("toyland")
    for limit, folders in ((3, 3), (2, 2), (40, 3)):
        names = [item.id for item in items_of(source_of(atlas, tmp_path, limit), limit)]
        assert len(names) == min(limit, 12)
        assert len({name.split("/")[0] for name in names}) == folders
    drawn = [item.id for item in items_of(source_of(atlas, "toyland:5", 3), 3)]
    assert drawn == [f"toyland:5:{number}" for number in range(3)]


def test_what_is_asked_of_a_spec_if_nobody_says():
    asked = questions(load_spec("toyland"))
    assert asked["clusters.min_cluster_size"] == ["15", "60"]
    assert asked["clusters.top_k"] == ["2000", "8000"]
    assert asked["tokens.per_image"] == ["24", "96"]
    assert asked["model.layer"] == ["layers.4.mlp.fc2"]
    for path in sorted((recipes_dir() / "atlases").glob("*.yaml")):
        spec = load_spec(path)
        for setting, values in questions(spec).items():
            assert all(override(spec, [f"{setting}={value}"]) for value in values)


def test_settings_are_tried_one_at_a_time(run, tmp_path):
    small = ["--set", "images.limit=40", "--set", "clusters.top_k=300", "--set", "clusters.min_cluster_size=12",
             "--set", "labels.scorer=null", "--set", "references.streams=0"]  # fmt: skip
    command = ["ablate", "toyland", *small, "--work", tmp_path, "--images", "toyland:77001", "--limit", "8",
               "--vary", "split.winner_rule=gap,random", "--json"]  # fmt: skip
    code, out, err = run(*command)
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["setting"], row["value"]) for row in rows] == [("as it is", ""), ("split.winner_rule", "random")]
    assert all(row["R2, explicit layer"] == pytest.approx(1, abs=1e-9) for row in rows)
    code, again, _ = run(*command, "--out", tmp_path / "out")
    assert json.loads(again) == rows  # goes on where it was, and has nothing left to do
    page = (tmp_path / "out" / "ablations.md").read_text()
    assert "`elude-steer ablate toyland --vary split.winner_rule=gap,random --set images.limit=40" in page
    assert [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")][2:] == [
        ["| split.winner_rule", "random"]
    ]
    assert json.loads((tmp_path / "out" / "ablations.json").read_text()) == rows
    for wrong, line in (("model.layer=layers.9.mlp.fc2", "layers.9.mlp.fc2"), ("=", "--vary = has no values")):
        code, _, err = run("ablate", "toyland", "--work", tmp_path / "new", "--vary", wrong)
        assert (code, line in err) == (1, True)
        assert not (tmp_path / "new").exists()  # told before anything is built
    code, _, err = run("ablate", "toyland", "--work", tmp_path / "new", "--images", tmp_path / "nowhere")
    assert (code, (tmp_path / "new").exists()) == (1, False)
    row = sorted(tmp_path.glob("row-*.json"))[0]
    row.write_text("{")
    code, _, err = run(*command)
    assert (code, f"'{row}' is damaged; delete it" in err) == (1, True)
    code, _, err = run("ablate", "toyland", "--work", tmp_path, "--vary", "split.winer_rule=gap")
    assert code == 1
    assert "winer_rule" in err
