"""The commands that steer, on toyland, as a user types them."""

import json
import re
from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from elude_steer import toyland
from elude_steer.cli.entry_point import cli
from elude_steer.errors import EludeSteerError, SpecError
from elude_steer.evaluation.edits import Kind
from elude_steer.steering.plan import Plan
from tests.helpers.cli import only_error


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The file of a scene with two things, and the scene."""
    scene = next(s for s in toyland.scenes(seed=50_002, n=40) if len(s.things) == 2 and s.image.size == (96, 96))
    path = tmp_path_factory.mktemp("image") / "scene.png"
    scene.image.save(path)
    return path, scene


def invoke(*arguments, **options):
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, **options)


def test_steer_prints_the_caption_alone(image):
    path, scene = image
    done = invoke("steer", path, "--minus", scene.objects[0])
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    assert scene.objects[0] not in done.stdout.split()
    assert done.stderr.startswith("baseline: ")


def test_steer_prints_json_draws_heatmaps_and_prints_the_plan(image, tmp_path):
    path, scene = image
    word = scene.objects[0]
    done = invoke("steer", "-", "--minus", word, "--heatmap", tmp_path / "h.png", "--json", input=path.read_bytes())
    answer = json.loads(done.stdout)
    assert word in answer["gone"]
    assert answer["plan"]["concepts"][0]["word"] == word
    with Image.open(tmp_path / "h.png") as drawn:
        assert drawn.width > 400
    planned = invoke("steer", path, "--minus", word, "--plan")
    assert planned.stdout.startswith(f"-{word}: ")


def test_run_prints_a_table_and_writes_a_report(tmp_path):
    page = tmp_path / "report.html"
    done = invoke("run", "toyland-dog", "toyland-train", "--report", page)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "toyland-dog"
    assert "baseline" in done.stdout
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == 2
    assert "http" not in text.replace("http-equiv", "")


def test_a_sweep_of_one_image_writes_a_recipe_that_runs(image, tmp_path):
    path, scene = image
    recipe = tmp_path / "best.yaml"
    done = invoke(
        "sweep", path, "--minus", scene.objects[0], "--grid", "gamma=-5,-50", "--grid", "nu=6,all", "--write", recipe
    )
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 5
    again = invoke("run", recipe)
    assert again.stdout.splitlines()[2].endswith(done.stdout.splitlines()[1].split("  ")[-1].strip())


def test_a_sweep_of_scenes_resumes_and_draws_a_plot(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    arguments = ("sweep", "--count", 6, "--grid", "gamma=-5,-50", "--plot", tmp_path / "p.png", "--json")
    rows = json.loads(invoke(*arguments).stdout)
    assert len(rows) == 2
    assert all(0 <= row["success"] <= 1 for row in rows)
    assert json.loads(invoke(*arguments).stdout) == rows
    assert (tmp_path / "p.png").exists()


def test_a_sweep_reads_booleans_and_words_in_its_grid(image):
    path, scene = image
    arguments = (
        "sweep",
        path,
        "--minus",
        scene.objects[0],
        "--json",
        "--model",
        "toyland/captioner",
        "--dtype",
        "bfloat16",
    )
    rows = json.loads(
        invoke(*arguments, "--grid", "force=true,False", "--grid", "nu=all", "--grid", "mode=place").stdout
    )
    assert sorted(row["force"] for row in rows) == [False, True]
    assert [(row["nu"], row["mode"]) for row in rows] == [("all", "place")] * 2


def test_the_default_grid_is_that_of_the_mode_of_the_atlas(image):
    path, scene = image
    other = next(w for w in toyland.OBJECTS if w not in scene.objects)
    removed = invoke("sweep", path, "--minus", scene.objects[0], "--limit", 2).stdout.splitlines()
    assert removed[0].split()[:2] == ["strength", "fit"]
    assert len(removed) == 3
    replaced = invoke("sweep", path, "--minus", scene.objects[0], "--plus", other).stdout
    assert replaced.split()[:2] == ["strength", "fit"]
    assert len(replaced.splitlines()) == 11


def test_a_sweep_of_scenes_knows_all_kinds_of_edits(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    for kind in get_args(Kind):
        rows = json.loads(invoke("sweep", "--kind", kind, "--count", 4, "--grid", "strength=1", "--json").stdout)
        assert [row["strength"] for row in rows] == [1], kind


def test_commas_and_repeated_options_name_the_same_concepts(image):
    once = invoke("steer", image[0], "--minus", "dog, sunglasses", "--plan").stdout
    assert once == invoke("steer", image[0], "--minus", "dog", "--minus", "sunglasses", "--plan").stdout


def test_caption_works_with_any_model(run, tiny_llava, image_folder, tmp_path):
    image = next(image_folder.glob("*.png"))
    code, out, _ = run("caption", image, "--model", tiny_llava, "--max-new-tokens", "4")
    assert code == 0
    assert 1 <= len(out.split()) <= 4
    (tmp_path / "text.png").write_text("no image")
    for source, text in (
        (tmp_path / "text.png", "cannot be read as an image: no image in a format that is read here"),
        (tmp_path / "none.png", "cannot be read: No such file or directory; check the path"),
    ):
        code, _, err = run("caption", source, "--model", tiny_llava)
        assert code == 1
        assert text in only_error(err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("steer", "none.png", "--minus", "dog"), "'none.png' cannot be read"),
        (("steer", "{image}", "--minus", " "), "a concept is a word"),
        (
            ("steer", "{image}", "--minus", "dog", "--kappa", "0"),
            "kappa: must be a whole number of at least 1, not 0",
        ),
        (
            ("steer", "{image}", "--minus", "dog", "--nu", "-1"),
            "nu: must be a whole number of at least 1 or all, not -1",
        ),
        (("steer", "{image}", "--minus", "dog", "--gamma", "nan"), "gamma: must be a finite number, not nan"),
        (("steer", "{image}", "--minus", "dog", "--plus", "dog"), "is in minus and in plus"),
        (("steer", "{image}", "--plus", "dog", "--mode", "place", "--where", "1,2,3"), "--where is '1,2,3'"),
        (("steer", "{image}", "--minus", "dog", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("run", "toyland-dgo"), "Did you mean 'toyland-dog'?"),
        (("run", "llava-dog"), "recipe 'llava-dog' has no image"),
        (("run", "llava-dog", "--image", "{image}"), "there is no atlas"),
        (("export", "toyland-dog", "{folder}/x", "--set", "mode=place"), "only an edit of every patch can be weights"),
        (("export", "toyland-dog", "{folder}/x", "--step", "9"), "has 2 edits, not 9"),
        (("sweep", "{image}"), "name the concept to remove"),
        (("sweep", "{image}", "--plus", "dog"), "name the concept to remove"),
        (("sweep", "--write", "x.yaml"), "there is no IMAGE: `elude-steer sweep IMAGE --minus WORD --write OUT.yaml`"),
        (("sweep", "--minus", "dog"), "--minus is for one image, and there is no IMAGE: `elude-steer sweep IMAGE"),
        (("sweep", "--plus", "dog", "--minus", "cat"), "^--minus and --plus are for one image"),
        (("sweep", "{image}", "--minus", "dog", "--plot", "p.png"), "^--plot is for many images, and '.*' is one"),
        (("sweep", "{image}", "--minus", "dog", "--defaults"), "^--defaults is for many images"),
        (("sweep", "{image}", "--minus", "dog", "--kind", "remove"), "^--kind is for many images"),
        (("sweep", "{image}", "--scenes", "toyland:1", "--coco", "a", "b"), "^--scenes and --coco are for many"),
        (
            ("sweep", "{image}", "--count", "60"),
            "^--count is for .* leave out the image: `elude-steer sweep --coun",
        ),
        (("sweep", "{image}", "--minus", "dog", "--plus", "dog"), "is in minus and in plus"),
        (("sweep", "--grid", "gamma"), "--grid is 'gamma'; give a setting and its values: gamma=-15,-50"),
        (("sweep", "--grid", "nu=6", "--grid", "nu=all"), "--grid nu is given twice; put all its values in one"),
        (("sweep", "--grid", "kappa=true"), "kappa: must be a whole number of at least 1, not True"),
        (("sweep", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("export", "toyland-cats", "{folder}/x", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("sweep", "--grid", "gama=1"), "there is no setting 'gama'. Did you mean 'gamma'"),
        (("sweep", "--count", "2", "--grid", "gamma=-5", "--defaults"), "is shipped with the package and is read-only"),
        (("concepts", "toyland", "--like", " "), "a concept is a word"),
    ],
)
def test_each_mistake_is_one_line(arguments, message, image, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    typed = [a.format(image=image[0], folder=tmp_path) for a in arguments]
    with pytest.raises(EludeSteerError) as caught:
        invoke(*typed)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


# The region of --where


def masked(path, mask):
    Image.fromarray(mask).save(path)
    return path


@pytest.mark.parametrize("given", ["file", "box"])
def test_where_means_the_same_as_in_python(steerer, image, tmp_path, given):
    path, scene = image
    mask = np.zeros((96, 96), bool)
    mask[50:90, 8:60] = True
    file = masked(tmp_path / "a mask.png", mask)
    option, where = {"file": (file, mask), "box": ("8,50,60,90", (8, 50, 60, 90))}[given]
    done = invoke("steer", path, "--minus", scene.objects[0], "--plus", "boat", "--where", option, "--json")
    answer = json.loads(done.stdout)
    result = steerer.steer(path, minus=[scene.objects[0]], plus=["boat"], where=where)
    assert answer["caption"] == result.caption
    assert Plan.from_dict(answer["plan"]) == result.plan
    assert (answer["plan"]["where"]["mask"] is None) is (given == "box")


@pytest.mark.parametrize("where", ["nonsense", "none.png", "1,2,3", "1,2,3,x", "", "{folder}"])
def test_a_region_that_is_neither_box_nor_file_is_refused(image, tmp_path, where):
    where = where.format(folder=tmp_path)
    message = rf"^--where is '{re.escape(where)}'; give a box in pixels \(left,top,right,bottom, .*\), or the file of a"
    with pytest.raises(SpecError, match=message) as caught:
        invoke("steer", image[0], "--plus", "dog", "--where", where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("no image"), r"mask\.png' cannot be read as an image"),
        (lambda path: masked(path, np.zeros((4, 4), bool)), "the mask marks nothing"),
    ],
)
def test_a_file_that_is_no_mask_is_refused(image, tmp_path, write, message):
    path = tmp_path / "mask.png"
    write(path)
    with pytest.raises(EludeSteerError, match=message) as caught:
        invoke("steer", image[0], "--minus", "dog", "--plus", "cat", "--where", path, "--plan")
    assert "\n" not in str(caught.value)
