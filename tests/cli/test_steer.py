"""The commands that steer, on toyland, as a user types them."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from elude_steer import toyland
from elude_steer.cli.group import cli
from elude_steer.errors import EludeSteerError, SpecError
from elude_steer.steering.plan import Plan


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A scene with two things, and the name of the first."""
    scene = next(s for s in toyland.scenes(seed=50_002, n=40) if len(s.things) == 2 and s.image.size == (96, 96))
    path = tmp_path_factory.mktemp("picture") / "scene.png"
    scene.image.save(path)
    return path, scene


def ask(*arguments, **options):
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, **options)


def test_steer_prints_the_caption_alone(picture):
    path, scene = picture
    done = ask("steer", path, "--minus", scene.objects[0])
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    assert scene.objects[0] not in done.stdout.split()
    assert done.stderr.startswith("baseline: ")


def test_steer_says_everything_as_json_and_draws(picture, tmp_path):
    path, scene = picture
    word = scene.objects[0]
    done = ask("steer", "-", "--minus", word, "--heatmap", tmp_path / "h.png", "--json", input=path.read_bytes())
    told = json.loads(done.stdout)
    assert word in told["gone"]
    assert told["plan"]["concepts"][0]["word"] == word
    with Image.open(tmp_path / "h.png") as drawn:
        assert drawn.width > 400
    planned = ask("steer", path, "--minus", word, "--plan")
    assert planned.stdout.startswith(f"-{word}: ")


def test_concepts_lists_finds_and_groups():
    listed = json.loads(ask("concepts", "toyland", "--json", "--limit", "100").stdout)
    assert {"label", "sub_units"} == set(listed[0])
    assert "dog" in {row["label"] for row in listed}
    found = json.loads(ask("concepts", "toyland", "--like", "puppy", "--limit", "3", "--json").stdout)
    assert [row["label"] for row in found] == ["dog"] * 3
    by_score = json.loads(
        ask("concepts", "toyland", "--like", "puppy", "--limit", "3", "--by", "score", "--json").stdout
    )
    assert "dog" in {row["via"] for row in by_score}
    assert "sub-units" in ask("concepts", "toyland", "--group").stdout
    assert "more labels" in ask("concepts", "toyland", "--limit", "3").stderr


def test_run_prints_a_table_and_writes_a_page(tmp_path):
    page = tmp_path / "report.html"
    done = ask("run", "toyland-dog", "toyland-train", "--report", page)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "toyland-dog"
    assert "baseline" in done.stdout
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == 2
    assert "http" not in text.replace("http-equiv", "")


def test_sweep_of_one_picture_writes_a_recipe_that_runs(picture, tmp_path):
    path, scene = picture
    recipe = tmp_path / "best.yaml"
    done = ask(
        "sweep", path, "--minus", scene.objects[0], "--grid", "gamma=-5,-50", "--grid", "nu=6,all", "--write", recipe
    )
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 5
    again = ask("run", recipe)
    assert again.stdout.splitlines()[2].endswith(done.stdout.splitlines()[1].split("  ")[-1].strip())


def test_sweep_of_scenes_is_resumed_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    given = ("sweep", "--count", 6, "--grid", "gamma=-5,-50", "--plot", tmp_path / "p.png", "--json")
    rows = json.loads(ask(*given).stdout)
    assert len(rows) == 2
    assert all(0 <= row["success"] <= 1 for row in rows)
    assert json.loads(ask(*given).stdout) == rows
    assert (tmp_path / "p.png").exists()


def test_sweep_tries_switches_and_words_as_such(picture):
    path, scene = picture
    given = (
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
    rows = json.loads(ask(*given, "--grid", "smooth=true,False", "--grid", "nu=all", "--grid", "mode=place").stdout)
    assert sorted(row["smooth"] for row in rows) == [False, True]
    assert [(row["nu"], row["mode"]) for row in rows] == [("all", "place")] * 2


def test_sweep_without_a_grid_suits_the_edit(picture):
    path, scene = picture
    other = next(w for w in toyland.OBJECTS if w not in scene.objects)
    removed = ask("sweep", path, "--minus", scene.objects[0], "--limit", 2).stdout.splitlines()
    assert removed[0].split()[:3] == ["gamma", "kappa", "nu"]
    assert len(removed) == 3
    replaced = ask("sweep", path, "--minus", scene.objects[0], "--plus", other).stdout
    assert replaced.split()[:3] == ["beta", "kappa", "nu"]


def test_export_takes_another_atlas_copy_and_precision(tmp_path):
    from safetensors import safe_open

    recipe, out = tmp_path / "other.yaml", tmp_path / "model"
    recipe.write_text("name: other\natlas: nowhere\nsteps: [{minus: [cat]}]\n")
    flags = ("--atlas", "toyland", "--model", "toyland/captioner", "--dtype", "bfloat16")
    done = ask("export", recipe, out, "--set", "mode=scale", "--set", "nu=all", *flags)
    assert done.stdout.strip() == str(out)
    with safe_open(out / "model.safetensors", "pt") as saved:
        assert {saved.get_slice(key).get_dtype() for key in saved.keys()} == {"BF16"}  # noqa: SIM118


def test_an_exported_model_needs_nothing_of_ours(tmp_path):
    """In a process where elude_steer cannot be imported it says what the steered model says, on 100 scenes."""
    out = tmp_path / "model"
    done = ask("export", "toyland-cats", out, "--set", "mode=scale", "--set", "nu=all", "--step", 1)
    assert done.exit_code == 0, done.output
    scenes = list(toyland.scenes(seed=50_003, n=100))
    folder = tmp_path / "scenes"
    folder.mkdir()
    for number, scene in enumerate(scenes):
        scene.image.save(folder / f"{number:03d}.png")
    from elude_steer.recipe_files import load_recipe
    from elude_steer.steering.steerer import Steerer

    step = load_recipe("toyland-cats").steps[0]
    steerer = Steerer.load("toyland")
    plan = steerer.plan(minus=step.minus, plus=step.plus, mode="scale", nu="all")
    with steerer.applied(plan):
        ours = [steerer.vlm.caption([scene.image])[0] for scene in scenes]
    code = EXPORTED.format(model=str(out), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ours


EXPORTED = """
import json, sys
from pathlib import Path
sys.modules["elude_steer"] = None  # any import of it fails
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor as Full
class ImageOnly(Full):
    get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
ImageOnly.__name__ = "LlavaOnevisionProcessor"
processor = ImageOnly.from_pretrained("{model}", backend="pil")
model = AutoModelForImageTextToText.from_pretrained("{model}", dtype="float32").eval()
said = []
for path in sorted(Path("{folder}").glob("*.png")):
    text = processor.apply_chat_template([{{"role": "user", "content": [{{"type": "image"}},
        {{"type": "text", "text": "Describe this image in one sentence."}}]}}], add_generation_prompt=True)
    inputs = processor(images=[[Image.open(path).convert("RGB")]], text=[text], return_tensors="pt")
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    said.append(processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip())
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("steer", "none.png", "--minus", "dog"), "'none.png' cannot be read"),
        (("steer", "{picture}", "--minus", " "), "a concept is a word"),
        (
            ("steer", "{picture}", "--minus", "dog", "--kappa", "0"),
            "kappa: must be a whole number of at least 1, not 0",
        ),
        (
            ("steer", "{picture}", "--minus", "dog", "--nu", "-1"),
            "nu: must be a whole number of at least 1 or all, not -1",
        ),
        (("steer", "{picture}", "--minus", "dog", "--gamma", "nan"), "gamma: must be a finite number, not nan"),
        (("steer", "{picture}", "--minus", "dog", "--plus", "dog"), "is in minus and in plus"),
        (("steer", "{picture}", "--plus", "dog", "--mode", "place"), "can only be placed somewhere"),
        (("steer", "{picture}", "--plus", "dog", "--mode", "place", "--where", "1,2,3"), "--where is '1,2,3'"),
        (("steer", "{picture}", "--minus", "dog", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("run", "toyland-dgo"), "Did you mean 'toyland-dog'?"),
        (("run", "llava-dog"), "Atlas|no atlas"),
        (("export", "toyland-dog", "{folder}/x", "--set", "mode=place"), "only an edit of every patch can be weights"),
        (("export", "toyland-dog", "{folder}/x", "--step", "9"), "has 2 edits, not 9"),
        (("sweep", "{picture}"), "say what should go"),
        (("sweep", "{picture}", "--plus", "dog"), "say what should go"),
        (("sweep", "--write", "x.yaml"), "there is no IMAGE: `elude-steer sweep IMAGE --minus WORD --write OUT.yaml`"),
        (("sweep", "--minus", "dog"), "--minus is for one picture, and there is no IMAGE: `elude-steer sweep IMAGE"),
        (("sweep", "--plus", "dog", "--minus", "cat"), "^--minus and --plus are for one picture"),
        (("sweep", "{picture}", "--minus", "dog", "--plot", "p.png"), "^--plot is for many pictures, and '.*' is one"),
        (("sweep", "{picture}", "--minus", "dog", "--defaults"), "^--defaults is for many pictures"),
        (("sweep", "{picture}", "--minus", "dog", "--kind", "remove"), "^--kind is for many pictures"),
        (("sweep", "{picture}", "--scenes", "toyland:1", "--coco", "a", "b"), "^--scenes and --coco are for many"),
        (
            ("sweep", "{picture}", "--count", "60"),
            "^--count is for .* leave out the picture: `elude-steer sweep --coun",
        ),
        (("sweep", "{picture}", "--minus", "dog", "--plus", "dog"), "is in minus and in plus"),
        (("sweep", "--grid", "gamma"), "--grid is 'gamma'; it is a setting and its values: gamma=-15,-50"),
        (("sweep", "--grid", "nu=6", "--grid", "nu=all"), "--grid nu is given twice; put all its values in one"),
        (("sweep", "--grid", "kappa=true"), "kappa: must be a whole number of at least 1, not True"),
        (("sweep", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("export", "toyland-cats", "{folder}/x", "--atlas", "toylnd"), "Did you mean 'toyland'?"),
        (("sweep", "--grid", "gama=1"), "there is no setting 'gama'. Did you mean 'gamma'"),
        (("sweep", "--count", "2", "--grid", "gamma=-5", "--defaults"), "comes with the package and stays as it is"),
        (("concepts", "toyland", "--like", " "), "a concept is a word"),
    ],
)
def test_mistakes_are_one_line(arguments, message, picture, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    given = [a.format(picture=picture[0], folder=tmp_path) for a in arguments]
    with pytest.raises(EludeSteerError) as caught:
        ask(*given)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


# Where


def masked(path, mask):
    Image.fromarray(mask).save(path)
    return path


@pytest.mark.parametrize("given", ["file", "box"])
def test_where_is_what_it_is_in_python(steerer, picture, tmp_path, given):
    path, scene = picture
    mask = np.zeros((96, 96), bool)
    mask[50:90, 8:60] = True
    file = masked(tmp_path / "a mask.png", mask)
    option, where = {"file": (file, mask), "box": ("8,50,60,90", (8, 50, 60, 90))}[given]
    done = ask("steer", path, "--minus", scene.objects[0], "--plus", "boat", "--where", option, "--json")
    told = json.loads(done.stdout)
    result = steerer.steer(path, minus=[scene.objects[0]], plus=["boat"], where=where)
    assert told["caption"] == result.caption
    assert Plan.from_dict(told["plan"]) == result.plan
    assert (told["plan"]["where"]["mask"] is None) is (given == "box")


@pytest.mark.parametrize("where", ["nonsense", "none.png", "1,2,3", "1,2,3,x", "", "{folder}"])
def test_a_where_that_is_neither_box_nor_file_is_one_line(picture, tmp_path, where):
    where = where.format(folder=tmp_path)
    said = rf"^--where is '{re.escape(where)}'; it is a box in pixels \(left,top,right,bottom, .*\), or the file of a"
    with pytest.raises(SpecError, match=said) as caught:
        ask("steer", picture[0], "--plus", "dog", "--where", where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("no picture"), r"mask\.png' cannot be read as an image"),
        (lambda path: masked(path, np.zeros((4, 4), bool)), "the mask marks nothing"),
    ],
)
def test_a_file_that_is_no_mask_is_one_line(picture, tmp_path, write, message):
    path = tmp_path / "mask.png"
    write(path)
    with pytest.raises(EludeSteerError, match=message) as caught:
        ask("steer", picture[0], "--minus", "dog", "--plus", "cat", "--where", path, "--plan")
    assert "\n" not in str(caught.value)
