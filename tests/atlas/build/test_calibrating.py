"""The stage that finds detectors and directions, and what it measures them on: the stream behind the layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import elude_steer as es
from elude_steer import toyland
from elude_steer.atlas.build import calibrating
from elude_steer.atlas.build.pipeline import calibrate
from elude_steer.atlas.calibration import FILE
from elude_steer.models import vision
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import load_spec
from tests.helpers.atlases import make_atlas

# The stream


class Block(nn.Module):
    """A residual block; `maps` puts channels first, `narrow` returns fewer channels."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fc1, self.fc2 = kind, nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        out = x + self.fc2(self.fc1(x).relu())
        if self.kind == "tuple":
            return out, None
        return out.movedim(-1, 1) if self.kind == "maps" else (out[..., :2] if self.kind == "narrow" else out)


def tower_of(kind, shape):
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(kind)])

    def forward(x):
        model.blocks[0](x)
        pytest.fail("the model ran beyond the block")

    model.forward = forward
    pixels = torch.randn(2, *shape)
    return model.blocks[0], pixels, vision.Tower(model, "blocks.0.fc2", model.blocks[0].fc2, lambda _images: pixels)


@pytest.mark.parametrize(
    ("kind", "shape"), [("plain", (5, 4)), ("tuple", (5, 4)), ("maps", (2, 3, 4)), ("narrow", (5, 4))]
)
def test_the_stream_is_what_the_block_of_the_layer_returns(kind, shape):
    block, pixels, tower = tower_of(kind, shape)
    pairs = tower.streams([0, 1])
    assert len(pairs) == 2
    for (q, stream), x in zip(pairs, pixels, strict=True):
        given = block.fc1(x).relu().flatten(0, -2)
        added = block.fc2(given)
        torch.testing.assert_close(q[0], given)
        # If the block returns another shape, the stream is the layer's own output.
        torch.testing.assert_close(stream[0], added if kind == "narrow" else x.flatten(0, -2) + added)
    assert not block._forward_hooks


# The words


def label_first_by(words):
    """An atlas whose sub-units have these words as labels."""
    from elude_steer.atlas.labels import Labels

    atlas = make_atlas()
    first = np.resize(np.array(words, np.int32), len(atlas))[:, None]
    vocabulary = tuple(f"word {number}" for number in range(20))
    labels = Labels(vocabulary, first, np.ones(first.shape, np.float32), np.arange(len(atlas), dtype=np.int32), {})
    return replace(atlas, labels=labels)


def test_words_that_label_sub_units_come_first_in_a_large_vocabulary(monkeypatch):
    atlas = label_first_by([7, 7, 3, 12, 7, 3])
    assert calibrating.choose_words(atlas, 20) == list(range(20))
    monkeypatch.setattr(calibrating, "MAX_WORDS", 2)
    assert calibrating.choose_words(atlas, 20) == [3, 7]  # the most frequent, in the order of the vocabulary
    monkeypatch.setattr(calibrating, "MAX_WORDS", 5)
    assert calibrating.choose_words(atlas, 20) == [0, 1, 3, 7, 12]


def test_a_sub_unit_without_a_label_gives_no_word(monkeypatch):
    monkeypatch.setattr(calibrating, "MAX_WORDS", 2)
    assert calibrating.choose_words(label_first_by([-1, -1, 5]), 20) == [0, 5]


# A build of toyland

SMALL = ["images.limit=120", "labels.top_k=20", "clusters.top_k=200", "clusters.min_cluster_size=20"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return es.build(load_spec("toyland"), settings=SMALL, out=folder / "a", work=folder / "w", threads=1, quiet=True)


def test_a_build_of_scenes_calibrates_the_words_of_its_vocabulary(small):
    found = small.calibration
    assert FILE in small.about["files"]
    assert len(found) == len(small.labels.vocabulary)
    assert found.weights.shape == (len(found), len(small))
    assert found.directions.shape == (len(found), small.d_out)
    assert float(found.fit) == pytest.approx(small.about["spec"]["calibration"]["fit"])
    # So few scenes hardly ever show a word, but a detector still tells those that do.
    assert (found.levels[:, 1] == 1).all()
    assert (found.levels[:, 0] < 1).all()
    assert found.levels[:, 0].median() < 0.6


def test_its_directions_are_those_that_the_shipped_atlas_has_from_more_scenes(small):
    shipped = es.Atlas.load("toyland").calibration
    assert torch.equal(small.calibration.words, shipped.words)
    agree = torch.cosine_similarity(small.calibration.directions.float(), shipped.directions.float())
    assert agree.median() > 0.5


def test_directions_point_to_where_the_stream_lies_on_an_object():
    """Measured in a simple way: the stream on an object's patches, minus that of scenes without it."""
    atlas, vlm = es.Atlas.load("toyland"), Vlm.load("toyland/captioner")
    calibration, vocabulary = atlas.calibration, atlas.labels.vocabulary
    scenes = list(toyland.scenes(seed=31, n=150))
    pairs = [pair for start in range(0, 150, 30) for pair in vlm.streams([s.image for s in scenes[start : start + 30]])]
    agree = []
    for word in toyland.OBJECTS:
        row = calibration.row(vocabulary.index(word))
        detector, there, elsewhere = atlas.detector(row, vlm.layer), [], []
        for scene, (q, stream) in zip(scenes, pairs, strict=True):
            readings = detector(q).flatten()
            if word in scene.objects:
                there.append(stream.flatten(0, 1)[readings >= 0.6 * readings.max()].mean(0))
            else:
                elsewhere.append(stream.flatten(0, 1).mean(0))
        if len(there) >= 4:
            mean = torch.stack(there).mean(0) - torch.stack(elsewhere).mean(0)
            agree.append(float(torch.cosine_similarity(mean, calibration.direction(row), dim=0)))
    assert len(agree) > 20
    assert np.mean(agree) > 0.6


def test_an_older_atlas_gets_the_calibration_that_a_build_would_have_written(small, tmp_path):
    spec = {**small.about["spec"], "references": {**small.about["spec"]["references"], "streams": 10_000}}
    spec["steering"] = {**spec["steering"], "beta": 20.0, "smooth": True}
    old = replace(small, calibration=None, about={**small.about, "spec": spec}).save(tmp_path / "old")
    assert es.Atlas.load(old).calibration is None
    new = calibrate(old, tmp_path / "new", work=tmp_path / "work", quiet=True)
    assert (new.folder / FILE).read_bytes() == (small.folder / FILE).read_bytes()
    assert new.about["spec"] == small.about["spec"]  # without the keys of the older version
    assert new.fingerprint == small.fingerprint


def test_what_was_measured_for_other_texts_is_not_used_again(small, tmp_path):
    work = tmp_path / "work"
    plain = calibrate(small.folder, tmp_path / "plain", work=work, quiet=True)
    template = ["labels.template=a drawing of a {}"]
    other = calibrate(small.folder, tmp_path / "other", settings=template, work=work, quiet=True)
    assert not torch.equal(plain.calibration.directions, other.calibration.directions)
