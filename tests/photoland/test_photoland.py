import json
from pathlib import Path

import pytest
import torch

import elude_steer as es
from elude_steer import photoland
from elude_steer.atlas.manifest import list_atlases
from elude_steer.models.images import open_image
from elude_steer.models.loading import load_tokenizer
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import list_recipes, load_recipe
from elude_steer.steering.run_recipe import step_settings

IMAGES = Path(__file__).parents[2] / "demos" / "images"
PHOTOS = sorted(IMAGES.glob("photoland-*.jpg"))


@pytest.fixture(scope="module")
def steerer():
    return es.Steerer.load("photoland")


def test_it_is_an_atlas_of_the_package_and_toyland_stays_the_default():
    names = [name for name, _ in list_atlases()]
    assert {"toyland", "photoland"} <= set(names)
    assert es.Steerer.load().atlas.name == "toyland"


def test_its_model_is_transformers_own_llava_with_a_dinov2_tower(steerer):
    from transformers import Dinov2Model, LlavaForConditionalGeneration

    assert type(steerer.vlm.model) is LlavaForConditionalGeneration
    assert type(steerer.vlm.model.model.vision_tower) is Dinov2Model
    assert steerer.vlm.layer_name.endswith("encoder.layer.10.mlp.fc2")
    assert steerer.atlas.d_out == 384


def test_nothing_stands_between_the_layer_and_the_stream(steerer):
    block = steerer.vlm.model.model.vision_tower.encoder.layer[10]
    assert torch.equal(block.layer_scale2.lambda1, torch.ones(384))


def test_captions_are_those_of_the_bare_model(steerer):
    """Also where the steerer resumes behind the layer: the tower calls its drop_path before and after it."""
    images = [open_image(path) for path in PHOTOS]
    plain = Vlm.load("photoland/captioner").caption(images)
    assert [caption for (caption,) in steerer.captions(images, [[None]] * len(images))] == plain
    assert [caption for (caption,) in steerer.captions(images, [[es.Plan()]] * len(images))] == plain


def test_an_edit_through_the_shortcut_is_the_edit_of_the_whole_model(steerer):
    images = [open_image(path) for path in PHOTOS]
    plan = steerer.plan(minus=["woman"], mode="scale", gamma=-20, kappa=8, nu="all")
    short = [caption for (caption,) in steerer.captions(images, [[plan]] * len(images))]
    with steerer.applied(plan):
        whole = steerer.vlm.caption(images)
    assert short == whole
    assert short != steerer.vlm.caption(images)


@pytest.mark.filterwarnings("ignore:this image is unlike")  # few training photos show the head of a cat
@pytest.mark.parametrize("name", [one.name for one in list_recipes() if one.name.startswith("photoland-")])
def test_its_recipes_do_what_they_say(steerer, name):
    recipe = load_recipe(name)
    image = open_image(recipe.image)
    for step in recipe.steps:
        assert step.expect is not None
        result = steerer.steer(image, minus=list(step.minus), plus=list(step.plus), **step_settings(step))
        assert set(step.expect.gone) <= set(result.gone), result.caption
        assert set(step.expect.new) <= set(result.new), result.caption


def test_a_word_that_the_photo_does_not_show_leaves_the_caption_as_it_is(steerer):
    image = open_image(IMAGES / "photoland-temple.jpg")
    with pytest.warns(es.EludeSteerWarning, match="'dog' is not seen in this image .* nothing was changed"):
        result = steerer.steer(image, minus=["dog"])
    assert result.caption == result.baseline
    assert result.seen["dog"] < steerer.defaults["seen"]


def test_its_words_are_calibrated_on_whole_photos(steerer):
    calibration = steerer.atlas.calibration
    assert len(calibration) == len(steerer.atlas.labels.vocabulary)
    assert float(calibration.fit) == steerer.defaults["fit"] == 0
    assert calibration.directions.shape[1] == 384


def test_it_has_recipes():
    assert sum(one.name.startswith("photoland-") for one in list_recipes()) >= 2


def test_its_files_are_small_and_carry_their_terms_and_no_photo():
    files = [path for path in photoland.DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 70e6
    assert {"TERMS.txt", "LICENSE.txt"} <= {path.name for path in files}
    assert not [path for path in files if path.suffix in (".jpg", ".jpeg", ".png", ".webp")]
    manifest = json.loads((photoland.DATA / "atlas" / "manifest.json").read_text())
    assert manifest["model"]["id"] == "photoland/captioner"
    assert "/" not in json.dumps(manifest["spec"]["images"])  # no folder of the machine that built it


def test_the_terms_are_printed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    for expected in (1, 0):
        monkeypatch.setattr("elude_steer.utils.terms._SHOWN", set())  # as in a new process
        load_tokenizer("photoland/captioner")
        assert capsys.readouterr().err.count("photoland is for research and education") == expected
