"""A classifier on the backbone that an atlas splits."""

import pytest

from elude_steer import toyland
from elude_steer.atlas.build.pipeline import build
from elude_steer.errors import SpecError
from elude_steer.evaluation.evaluate import evaluate
from elude_steer.specs import AtlasSpec, ClustersSpec, LabelsSpec, ModelSpec, TokensSpec
from tests.helpers.tiny import save_classifier

PLACES = ("beach", "kitchen", "park")


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """A small DINOv2 with a head, an atlas of its backbone, and images in folders of their classes."""
    folder = save_classifier(tmp_path_factory.mktemp("classified"), ("beach", "kitchen, cook's room", "park"))
    for number, scene in enumerate(toyland.scenes(5, 30)):
        path = folder / "images" / PLACES[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene.image.save(path)
    spec = AtlasSpec(
        "small",
        ModelSpec(id=str(folder / "backbone"), layer="1.mlp.fc2", kind="vision"),
        tokens=TokensSpec(per_image=8),
        clusters=ClustersSpec(top_k=120, min_cluster_size=8),
        labels=LabelsSpec(scorer=None),
    )
    build(spec, images=folder / "images", out=folder / "atlas", work=folder / "work", quiet=True)
    return folder


def row(found):
    (row,) = [row for row in found.rows if row.name.startswith("accuracy")]
    return row


def test_the_explicit_layer_does_not_change_the_accuracy(classified, run):
    found = evaluate(
        str(classified / "atlas"),
        images=classified / "images",
        measures=["faithfulness"],
        head=str(classified / "head"),
    )
    assert row(found).value == row(found).units
    assert 0 < row(found).value < 1
    code, out, err = run(
        "evaluate", classified / "atlas", "--images", classified / "images", "--measures", "faithfulness",
        "--head", classified / "head",
    )  # fmt: skip
    assert code == 0, err
    assert "accuracy of" in out


def test_folders_are_the_classes(classified, tmp_path):
    """Folders with other names stand for the classes in their order; another number of folders is refused."""
    by_name = evaluate(
        str(classified / "atlas"),
        images=classified / "images",
        measures=["faithfulness"],
        head=str(classified / "head"),
    )
    for name in PLACES:
        (tmp_path / f"n0{name}").symlink_to(classified / "images" / name)
    by_order = evaluate(
        str(classified / "atlas"), images=tmp_path, measures=["faithfulness"], head=str(classified / "head")
    )
    assert row(by_order) == row(by_name)
    (tmp_path / "n0park").unlink()
    with pytest.raises(SpecError, match=r"has no class 'n0beach'; put images into folders named after its 3"):
        evaluate(str(classified / "atlas"), images=tmp_path, measures=["faithfulness"], head=str(classified / "head"))
