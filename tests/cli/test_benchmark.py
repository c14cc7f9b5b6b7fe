import json

import pytest

from elude_steer.toyland.scenes import write_scenes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scenes of toyland with COCO's files."""
    return write_scenes(tmp_path_factory.mktemp("coco") / "scenes", 120, 5, coco=True)


def test_chair_prints_a_table_and_writes_json_and_a_page(run, folder, tmp_path):
    coco = ("--coco", folder / "instances.json", folder)
    out = tmp_path / "out"
    code, printed, err = run("benchmark", "chair", *coco, "--minus", "dog", "--limit", 6, "--out", out)
    assert code == 0, err
    lines = printed.splitlines()
    assert lines[0].split()[:3] == ["images", "CHAIR_s", "CHAIR_i"]
    assert sum(line.startswith("dog, shown") for line in lines) == 4
    assert "measuring on 6 images of instances" in err and "chair.html" in err
    content = json.loads((out / "chair.json").read_text())
    assert (content["minus"], content["images"], content["captions"]) == (["dog"], 6, True)
    page = (out / "chair.html").read_text()
    assert page.startswith("<!doctype html>") and "random direction" in page and "data:image" in page


def test_pope_says_that_toyland_answers_no_questions(run, folder):
    coco = ("--coco", folder / "instances.json", folder)
    words = ("--minus", "dog", "--limit", 2, "--per-image", 1, "--no-controls", "--json")
    code, printed, err = run("benchmark", "pope", *coco, *words)
    assert code == 0, err
    content = json.loads(printed)
    assert {row["row"] for row in content["rows"]} == {"unsteered", "edit"}
    assert content["rows"][0]["values"]["yes"]["value"] == 1
    assert content["notes"][0] in err and "this model may not answer questions" in err


@pytest.mark.parametrize("name", ["absent", "side-effects"])
def test_images_without_the_class(run, folder, tmp_path, name):
    coco = ("--coco", folder / "instances.json", folder)
    words = ("--mode", "scale", "--nu", "all", "--kappa", 4, "--limit", 3, "--seed", 1)
    code, printed, err = run("benchmark", name, *coco, *words, "--out", tmp_path / "out")
    assert code == 0, err
    assert [line.split("absent")[1].split()[0] for line in printed.splitlines()[1:]] == ["unsteered", "edit", "random"]
    content = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert (content["settings"]["nu"], content["settings"]["kappa"]) == ("all", 4)
