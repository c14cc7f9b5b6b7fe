"""`elude-steer export` on toyland, as a user types it: checkpoints, adapters of peft, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from elude_steer import toyland
from elude_steer.cli.entry_point import cli
from elude_steer.recipe_files import load_recipe
from tests.helpers.cli import only_error
from tests.helpers.plain_child import run_without_package

LINEAR = ("--set", "mode=scale", "--set", "nu=all")
TEDDY = ("export", "toyland-teddy", "{out}", "--step", "3")


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


# Checkpoints


def test_export_takes_another_atlas_model_and_dtype(tmp_path):
    from safetensors import safe_open

    recipe, out = tmp_path / "other.yaml", tmp_path / "model"
    recipe.write_text("name: other\natlas: nowhere\nsteps: [{minus: [cat]}]\n")
    flags = ("--atlas", "toyland", "--model", "toyland/captioner", "--dtype", "bfloat16")
    done = invoke("export", recipe, out, *LINEAR, *flags)
    assert done.stdout.strip() == str(out)
    with safe_open(out / "model.safetensors", "pt") as saved:
        assert {saved.get_slice(key).get_dtype() for key in saved.keys()} == {"BF16"}  # noqa: SIM118


def test_export_says_what_it_changes_in_the_caption(tmp_path):
    done = invoke("export", "toyland-teddy", tmp_path / "a", "--step", 3, *LINEAR, "--set", "kappa=24")
    assert done.stdout == f"{tmp_path / 'a'}\n"
    assert done.stderr == "before: a teddy on a chair in a room\nafter:  a chair in a room\n"
    image = load_recipe("toyland-teddy").image
    said = invoke("caption", image, "--model", tmp_path / "a").stdout
    assert said == "a chair in a room\n"
    done = invoke("export", "toyland-teddy", tmp_path / "b", "--step", 3, *LINEAR, "--set", "gamma=0.9")
    assert "the edit does not change the caption of the image, 'a teddy on a chair in a room'; try more" in done.stderr


def test_an_exported_model_runs_without_this_package(tmp_path):
    """In a process where elude_steer cannot be imported it says what the steered model says, on 100 scenes."""
    out = tmp_path / "model"
    done = invoke("export", "toyland-cats", out, *LINEAR, "--step", 1)
    assert done.exit_code == 0, done.output
    scenes = list(toyland.scenes(seed=50_003, n=100))
    folder = tmp_path / "scenes"
    folder.mkdir()
    for number, scene in enumerate(scenes):
        scene.image.save(folder / f"{number:03d}.png")
    from elude_steer.steering.steerer import Steerer

    step = load_recipe("toyland-cats").steps[0]
    steerer = Steerer.load("toyland")
    plan = steerer.plan(minus=step.minus, plus=step.plus, mode="scale", nu="all")
    with steerer.applied(plan):
        ours = [steerer.vlm.caption([scene.image])[0] for scene in scenes]
    code = EXPORTED.format(model=str(out), folder=str(folder))
    assert json.loads(run_without_package(code, tmp_path)[-1]) == ours


EXPORTED = """
import json
from pathlib import Path
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


# Adapters


ADAPTER = """
import json
from PIL import Image
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
base = json.load(open("{adapter}/adapter_config.json"))["base_model_name_or_path"]
model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), "{adapter}")
pixels = AutoImageProcessor.from_pretrained(base, backend="pil")(Image.open("{image}"), return_tensors="pt")
tokenizer = AutoTokenizer.from_pretrained(base)
count = sum(len(part) for part in model.get_image_features(**pixels).pooler_output)
content = [{{"type": "image"}}, {{"type": "text", "text": "Describe this image in one sentence."}}]
message = [{{"role": "user", "content": content}}]
text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text.replace("<image>", "<image>" * count), return_tensors="pt")
tokens = model.generate(**inputs, **pixels, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(tokens[0, inputs.input_ids.shape[1]:], skip_special_tokens=True).strip())
"""


def export_teddy(run, out, *flags):
    return run(*(part.format(out=out) for part in TEDDY), *LINEAR, "--set", "kappa=24", *flags)


def test_an_adapter_is_small_and_says_the_same_without_this_package(run, tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "adapter"
    code, said, err = export_teddy(run, out, "--as", "peft")
    assert (code, said) == (0, f"{out}\n")
    assert err == "before: a teddy on a chair in a room\nafter:  a chair in a room\n"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert json.loads((out / "adapter_config.json").read_text())["lora_bias"] is True
    image = load_recipe("toyland-teddy").image
    lines = run_without_package(ADAPTER.format(adapter=out, image=image), tmp_path)
    assert lines[-1] == "a chair in a room"


def test_an_adapter_without_bias_says_how_far_it_is_off(run, tmp_path):
    from safetensors import safe_open

    out = tmp_path / "adapter"
    code, said, err = export_teddy(run, out, "--as", "peft", "--no-bias")
    assert (code, said) == (0, f"{out}\n")
    *captions, note = err.splitlines()
    assert captions == ["before: a teddy on a chair in a room", "after:  a chair in a room"]
    assert note.startswith("elude-steer: note: without the bias, the layer's output is off by at most 0.15")
    assert note.endswith("the caption is the same.")
    assert json.loads((out / "adapter_config.json").read_text())["lora_bias"] is False
    with safe_open(out / "adapter_model.safetensors", "pt") as saved:
        assert not [key for key in saved.keys() if "bias" in key]  # noqa: SIM118
    assert "without the change of the layer's bias" in (out / "README.md").read_text()


def test_the_error_without_bias_is_measured_on_the_image_that_is_given(run, tmp_path):
    scene = next(scene for scene in toyland.scenes(seed=50_008, n=40) if "teddy" not in scene.objects)
    scene.image.save(tmp_path / "scene.png")
    notes = []
    for name, flags in (("a", ()), ("b", ("--image", tmp_path / "scene.png"))):
        code, _, err = export_teddy(run, tmp_path / name, "--as", "peft", "--no-bias", *flags)
        assert code == 0, err
        notes.append(err.splitlines()[-1])
    assert notes[0] != notes[1]


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{teddy}", "--as", "peft"), 1, "only an edit of every patch can be weights; this plan chooses patches"),
        (("{teddy}", "--as", "peft", "--set", "mode=place"), 1, "mode scale, nu all (`--set mode=scale --set nu=all`)"),
        (("{teddy}", "--as", "peft", "--set", "mode=scale", "--set", "nu=6"), 1, "only an edit of every patch"),
        (("{teddy}", "--as", "peft", "--no-bias"), 1, "only an edit of every patch"),
        (("{teddy}", *LINEAR, "--no-bias"), 1, "--no-bias is for adapters, and a checkpoint holds the bias: add --as"),
        (("{teddy}", *LINEAR, "--as", "lora"), 2, "'lora' is not one of 'checkpoint', 'peft'"),
        (("{teddy}", *LINEAR, "--as", "peft", "--step", "9"), 1, "has 3 edits, not 9; --step counts from 1"),
        (("{teddy}", *LINEAR, "--as", "peft", "--image", "none.png"), 1, "'none.png' cannot be read"),
        (("{bare}", *LINEAR, "--as", "peft", "--no-bias"), 1, "recipe 'bare' has no image to measure the error"),
    ],
)
def test_wrong_uses_are_one_line_and_write_nothing(run, tmp_path, arguments, code, message):
    bare, out = tmp_path / "bare.yaml", tmp_path / "out"
    bare.write_text("name: bare\natlas: toyland\nsteps: [{minus: [cat]}]\n")
    recipe, *flags = (part.format(teddy="toyland-teddy", bare=bare) for part in arguments)
    found, said, err = run("export", recipe, out, *flags)
    assert (found, said) == (code, "")
    assert message in only_error(err)
    assert not out.exists()


def test_an_adapter_does_not_overwrite_a_folder(run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = export_teddy(run, tmp_path, "--as", "peft")
    assert code == 1
    assert "already exists and is not an empty folder; give a new one" in only_error(err)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
