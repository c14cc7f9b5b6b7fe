"""An atlas's card has metadata that the Hub's library reads, and can be changed without another file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.card import describe_measurement
from elude_steer.errors import AtlasError, StorageError
from elude_steer.evaluation.evaluate import evaluate
from elude_steer.evaluation.report import Evaluation, Row
from elude_steer.utils.files import resolve_id
from tests.helpers.atlases import make_atlas

ROWS = (
    Row("faithfulness", "R2, explicit layer", 0.99999912),
    Row("monosemanticity", "MS-Score, %", 31.25, 12.5),
    Row("dictionary", "collinearity (1 = duplicates)", None),
    Row("efficiency", "explicit layer, peak MB", 512.0, 500.0),
)


def atlas_of(model, kind="vlm", source=None, license=None, **about):
    atlas = make_atlas(layer=nn.Linear(21, 6))
    spec = {**atlas.about["spec"], "license": license}
    spec["images"] = {**spec["images"], "source": source}
    return replace(
        atlas, about={**atlas.about, "model": {"id": model, "revision": None, "kind": kind}, "spec": spec, **about}
    )


def metadata(card):
    """The metadata as the Hub's library reads it; it refuses what the Hub would refuse."""
    return ModelCard(card).data


@pytest.mark.parametrize(
    ("model", "kind", "base", "task"),
    [
        ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "vlm", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "captions"),
        ("facebook/dinov2-base", "vision", "facebook/dinov2-base", "features"),
        ("convnextv2_base.fcmae_ft_in22k_in1k", "timm", "timm/convnextv2_base.fcmae_ft_in22k_in1k", "features"),
        ("hf-hub:timm/resnet50.a1_in1k", "timm", "timm/resnet50.a1_in1k", "features"),
        ("toyland/captioner", "vlm", None, "captions"),
        ("/models/my llava", "vlm", None, "captions"),
        ("tests/atlas", "vlm", None, "captions"),  # a folder that is there
        ("model: of torch", "any", None, "features"),
    ],
)
def test_the_base_model_is_named_if_it_is_on_the_hub(model, kind, base, task):
    data = metadata(atlas_of(model, kind).card())
    assert data.library_name == "elude_steer"
    assert data.base_model == base
    assert data.get("base_model_relation") == ("adapter" if base else None)
    tasks = {"captions": "image-text-to-text", "features": "image-feature-extraction"}
    assert data.pipeline_tag == tasks[task]
    assert ("steering" in data.tags) == (task == "captions")
    assert data.license is None and data.datasets is None and data.eval_results is None


def test_licence_and_dataset_come_from_the_spec():
    data = metadata(atlas_of("facebook/dinov2-base", "vision", "hf:ILSVRC/imagenet-1k", "cc-by-nc-4.0").card())
    assert (data.license, data.datasets) == ("cc-by-nc-4.0", ["ILSVRC/imagenet-1k"])
    assert metadata(atlas_of("facebook/dinov2-base", "vision", "/home/me/photos").card()).datasets is None


def test_results_are_a_model_index(tmp_path):
    atlas = Atlas.load(atlas_of("facebook/dinov2-base", "vision").save(tmp_path / "a"))
    evaluation = Evaluation(atlas, None, "hf:ILSVRC/imagenet-1k", 500, ROWS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    atlas.update_card(evaluation=evaluation.for_card())
    after = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"README.md", "manifest.json"}

    loaded = Atlas.load(tmp_path / "a")
    card = (tmp_path / "a" / "README.md").read_text()
    assert loaded.card() == card
    results = metadata(card).eval_results
    assert [(one.metric_name, one.metric_value) for one in results] == [
        ("R2, explicit layer", 0.999999),
        ("MS-Score, %", 31.25),
    ]
    assert {(one.task_type, one.dataset_type, one.dataset_name) for one in results} == {
        ("image-feature-extraction", "ILSVRC/imagenet-1k", "500 images of hf:ILSVRC/imagenet-1k")
    }
    assert "| MS-Score, % | 31.25 | 12.5 |" in card
    assert "peak MB" not in card
    loaded.update_card(license="mit")  # keeps what was measured
    assert metadata(Atlas.load(tmp_path / "a").card()).license == "mit"
    assert len(metadata((tmp_path / "a" / "README.md").read_text()).eval_results) == 2
    again = Atlas.load(loaded.folder).save(tmp_path / "b")  # and so does a copy
    assert (again / "README.md").read_text() == (tmp_path / "a" / "README.md").read_text()


def test_a_card_has_no_path_of_the_machine():
    found = describe_measurement("/home/me/photos", 3, "1", [{"measure": "m", "name": "n", "value": float("nan")}])
    assert found == {"images": "photos", "image_count": 3, "elude_steer": "1", "rows": []}
    assert metadata(atlas_of("a/b", evaluation=found).card()).eval_results is None


def test_a_card_that_was_edited_on_the_hub_does_not_stop_loading(tmp_path):
    folder = atlas_of("a/b").save(tmp_path / "a")
    (folder / "README.md").write_text("# mine\n")
    assert len(Atlas.load(folder)) == 13
    (folder / "README.md").unlink()
    assert len(Atlas.load(folder)) == 13


def test_only_a_saved_atlas_of_ones_own_gets_another_card(tmp_path):
    with pytest.raises(AtlasError, match="save the atlas before changing its card"):
        atlas_of("a/b").update_card(license="mit")
    downloaded = replace(Atlas.load(atlas_of("a/b").save(tmp_path / "a")), downloaded=True)
    with pytest.raises(AtlasError, match="save the atlas before changing its card"):
        downloaded.update_card(license="mit")
    with pytest.raises(StorageError, match="is read-only; copy its folder, and use the copy"):
        Atlas.load("toyland").update_card(license="mit")


def test_the_shipped_card_is_what_the_atlas_writes():
    folder = Path(resolve_id("toyland/atlas"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card == Atlas.load("toyland").card()
    data = metadata(card)
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "elude_steer", "image-text-to-text")
    assert data.base_model is None
    assert {one.metric_type for one in data.eval_results} >= {"r2_explicit_layer", "ms_score"}


def test_evaluate_writes_its_results_into_the_card(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    source = Atlas.load("toyland")
    source.save(tmp_path / "atlases" / "mine")
    options = ("--measures", "dictionary", "--images", "toyland:77001", "--limit", "4", "--card")
    code, _, err = run("evaluate", "mine", *options)
    assert code == 0 and "README.md" in err
    expected = evaluate("mine", images="toyland:77001", limit=4, measures=["dictionary"])
    results = metadata((tmp_path / "atlases" / "mine" / "README.md").read_text()).eval_results
    assert [one.metric_value for one in results] == pytest.approx([row.value for row in expected.rows], rel=1e-5)
    manifest = json.loads((tmp_path / "atlases" / "mine" / "manifest.json").read_text())
    assert manifest["evaluation"]["images"] == "toyland:77001"
    code, _, err = run("evaluate", "toyland", *options)
    assert code == 1
    assert "atlas 'toyland' is shipped with the package and is read-only; copy its folder" in err
