import json
from pathlib import Path

import pytest

from elude_steer.errors import ImageError, SpecError
from elude_steer.evaluation.reproduce.edits import count_verdicts, find_images, judge_caption, list_edits
from elude_steer.specs import StepSpec

PHOTOS = [f"photo-{name}" for name in ("astronaut", "camera", "cat", "coffee", "flower", "rocket", "temple")]


def test_the_papers_edits_have_its_names_and_settings():
    edits = {edit.row: edit for edit in list_edits()}
    assert len(edits) == 14
    assert (edits["train-2"].words, edits["train-2"].settings) == ("-train +bus", "(50, -2, 100, 50)")
    assert edits["frisbee-1"].settings == "(15, -0.5, 200, all)"
    assert edits["cats-3"].words == "-cat -blanket"
    assert edits["dog-1"].paper.caption.startswith("A motorcycle with a man")


def test_fourteen_edits_of_shipped_photographs_are_of_the_papers_kinds():
    edits = list_edits(PHOTOS)
    assert len(edits) == 14 and {edit.recipe.atlas for edit in edits} == {"photoland"}
    kinds = [(len(edit.step.minus), len(edit.step.plus)) for edit in edits]
    assert kinds.count((1, 0)) >= 2 and kinds.count((2, 0)) >= 2 and kinds.count((1, 1)) >= 7
    assert set(find_images(edits, None)) == {edit.row for edit in edits}


def test_some_rows():
    assert [edit.row for edit in list_edits(rows=("train", "dog-2"))] == ["dog-2", "train-1", "train-2", "train-3"]
    with pytest.raises(SpecError, match="there is no row 'train-9'; there are dog-1, dog-2, train-1"):
        list_edits(rows=("train-9",))


def test_missing_images_are_named_with_what_they_show(tmp_path):
    edits = list_edits()
    with pytest.raises(ImageError, match=r"cats.jpg: two cats on a pink blanket .*; give a folder with them: --scenes"):
        find_images(edits, None)
    (tmp_path / "train.jpg").write_bytes(b"1")
    (tmp_path / "train-2.PNG").write_bytes(b"2")
    with pytest.raises(ImageError, match=r"dog.jpg: a black dog .* they are not in"):
        find_images(edits, tmp_path)
    found = find_images(list_edits(rows=("train",)), tmp_path)
    assert {row: path.name for row, path in found.items()} == {
        "train-1": "train.jpg",
        "train-2": "train-2.PNG",
        "train-3": "train.jpg",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tran": "a.jpg"}, "names 'tran', which is no row or scene. Did you mean 'train'"),
        ({"train": 3}, "gives 3 for 'train'; write the path of an image"),
        (["train.jpg"], "is not a JSON object of rows and images"),
        ({"train": "nowhere.jpg"}, "there is no image '.*nowhere.jpg'; check the path"),
    ],
)
def test_a_wrong_mapping_is_refused(tmp_path, content, message):
    path = tmp_path / "scenes.json"
    path.write_text(json.dumps(content))
    with pytest.raises((SpecError, ImageError), match=message):
        find_images(list_edits(rows=("train",)), path)


def test_a_mapping_is_relative_to_its_file(tmp_path):
    (tmp_path / "one.jpg").write_bytes(b"1")
    (tmp_path / "scenes.json").write_text(json.dumps({"train": "one.jpg"}))
    found = find_images(list_edits(rows=("train-1",)), tmp_path / "scenes.json")
    assert found == {"train-1": tmp_path / "one.jpg"}


def test_verdicts():
    step = StepSpec(minus=("dog", "ball"), plus=("cat",))
    verdict = judge_caption(step, "a dog in a park", "a Cat, and a dog-like thing")
    assert verdict == {"gone": {"dog": "went", "ball": "was not named"}, "came": True, "kept": [0, 1]}
    stayed = judge_caption(step, "a dog and a cat", "a dog and a cat")
    assert stayed == {"gone": {"dog": "stayed", "ball": "was not named"}, "came": False, "kept": [1, 1]}
    assert judge_caption(StepSpec(minus=("dog",)), "a dog", "a chair")["came"] is None
    counted = count_verdicts([{"verdict": verdict}, {"verdict": stayed}])
    assert counted == {"named before": 2, "went": 1, "stayed": 1, "asked to come": 2, "came": 1} | {
        "other words": 2,
        "kept": 1,
    }


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        "no JSON",
        '{"' + "x" * 10_000 + '": 1}',
        '{"train": [' + "1," * 9999 + "1]}",
    ],
)
def test_a_file_of_paths_that_cannot_be_read_is_refused_in_one_short_line(text, tmp_path):
    file = tmp_path / "scenes.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"neither a folder of images nor|is no row or scene|write the path") as refused:
        find_images(list_edits(), file)
    assert len(str(refused.value)) < 400 and "delete it" not in str(refused.value), "it is the user's own file"


PAPER_VERDICTS = {
    "dog-1": ({"dog": "went"}, None),
    "dog-2": ({"dog": "went"}, False),  # "rider" is not the word that was asked for
    "train-1": ({"train": "went"}, None),
    "train-2": ({"train": "went"}, True),
    "train-3": ({"graffiti": "went"}, True),
    "teddy-1": ({"chair": "went"}, True),
    "teddy-2": ({"teddy": "went"}, False),  # "dog-shaped"
    "teddy-3": ({"teddy": "went"}, None),
    "frisbee-1": ({"frisbee": "went"}, True),
    "frisbee-2": ({"frisbee": "went", "ball": "was not named"}, True),
    "frisbee-3": ({"indoor": "was not named"}, True),
    "cats-1": ({"cat": "went"}, True),
    "cats-2": ({"cat": "stayed"}, False),  # "red panda"
    "cats-3": ({"cat": "went", "blanket": "went"}, None),
}


def test_the_papers_captions_are_judged_as_one_reads_them():
    found = {}
    for edit in list_edits():
        verdict = judge_caption(edit.step, edit.paper.baseline, edit.paper.caption)
        found[edit.row] = (verdict["gone"], verdict["came"])
    assert found == PAPER_VERDICTS


@pytest.mark.parametrize(
    ("minus", "baseline", "caption", "state"),
    [
        ("cat", "Two cats sleep.", "a sofa", "went"),
        ("cats", "A cat sleeps.", "a sofa", "went"),
        ("cat", "A cat sleeps.", "Two Cats sleep", "stayed"),
        ("person", "people on a street", "a street", "went"),
        ("traffic light", "traffic lights", "a street", "went"),
        ("cat", "a cattle-grid and a cat-like dog", "a street", "was not named"),
    ],
)
def test_singular_and_plural_name_the_same(minus, baseline, caption, state):
    assert judge_caption(StepSpec(minus=(minus,)), baseline, caption)["gone"] == {minus: state}
    came = judge_caption(StepSpec(plus=(minus,)), caption, baseline)["came"]
    assert came is (state == "went"), "what goes in one direction comes in the other"


def test_the_shipped_result_is_judged_by_the_rule_of_today():
    path = Path(__file__).parents[3] / "demos" / "results" / "reproduce-photographs.json"
    rows = {row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    edits = list_edits(PHOTOS)
    assert rows.keys() == {edit.row for edit in edits}
    for edit in edits:
        row = rows[edit.row]
        assert judge_caption(edit.step, row["baseline"], row["caption"]) == row["verdict"], edit.row
