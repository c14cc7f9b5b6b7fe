"""Pictures that an atlas is measured on are read in their turn, and the tower sees each once."""

import pytest
import torch

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import EludeSteerWarning, ImageError
from elude_steer.evaluation.evaluate import evaluate
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.monosemanticity import gather_peaks
from elude_steer.evaluation.one_pass import _for_tokens, items_of, read_items, source_of, tower_of, view
from elude_steer.method.layers import split_layer
from elude_steer.models.images import Item, image_set
from elude_steer.models.vlm import Vlm


class Drawn:
    """A list of scenes that counts how often each is asked for."""

    def __init__(self, count):
        self.scenes = [scene.image for scene in toyland.scenes(5, count)]
        self.read = [0] * count

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        self.read[index] += 1
        return self.scenes[index]


@pytest.fixture(scope="module")
def atlas():
    return Atlas.load("toyland")


@pytest.fixture(scope="module")
def tower(atlas):
    return tower_of(atlas)


def items(count):
    return items_of(image_set("toyland:5", limit=count), count)


def test_one_look_gives_what_each_measure_finds_alone(atlas, tower):
    given = items(11)
    found = view(atlas, tower, given)
    assert [item.id for item in found.items] == [item.id for item in given]
    pictures = [item.read()[0] for item in given]
    inputs = [q.flatten(0, 1) for picture in pictures for q in tower.encode([picture])]
    explicit, r2 = split_layer(tower.layer, atlas.members(), atlas.units), R2()
    for q in inputs:
        with torch.inference_mode():
            r2.add(tower.layer(q), explicit(q))
    assert found.r2.value == pytest.approx(r2.value, abs=1e-6)
    alone = gather_peaks(inputs, atlas.sub_units(range(len(atlas)), tower.layer).activations, tower.layer)
    torch.testing.assert_close(found.peaks["sub-units"].scores(), alone.scores(), atol=1e-4, rtol=0, equal_nan=True)
    units = gather_peaks(inputs, tower.layer, tower.layer)
    torch.testing.assert_close(found.peaks["units"].scores(), units.scores(), atol=1e-4, rtol=0, equal_nan=True)


def test_the_tower_sees_every_picture_once(atlas, monkeypatch):
    seen = []
    encode = Vlm.encode
    monkeypatch.setattr(Vlm, "encode", lambda self, images: (seen.append(len(images)), encode(self, images))[1])
    evaluate("toyland", images="toyland:5", limit=19, measures=["faithfulness", "monosemanticity"])
    assert seen == [8, 8, 3]


def test_pictures_are_read_only_where_they_are_needed():
    for measures, reads in ((["dictionary"], 0), (["monosemanticity"], 1), (["efficiency"], None)):
        drawn = Drawn(20)
        source = image_set(drawn)
        begun = list(drawn.read)  # the set's fingerprint reads each once
        found = evaluate("toyland", images=drawn, measures=measures, warm_up=0, runs=1)
        more = [now - 2 * before for now, before in zip(drawn.read, begun, strict=True)]
        assert more == ([1] * 8 + [0] * 12 if reads is None else [reads] * 20)
        assert found.image_count == source.length == 20


def test_what_cannot_be_read_is_named(tmp_path):
    for number, scene in enumerate(toyland.scenes(3, 3)):
        scene.image.save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    given = items_of(image_set(tmp_path), 10)
    with pytest.warns(EludeSteerWarning, match=r"1 pictures cannot be read and were left out: 1\.png \(no image"):
        read = [item.id for batch in read_items(given, 2) for item, _ in batch]
    assert read == ["0.png", "2.png"]
    for name in ("0.png", "2.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImageError, match=r"none of the 3 pictures can be read: 0\.png"):
        list(read_items(given, 2))


def test_many_that_cannot_be_read_are_counted():
    def damaged():
        raise OSError("damaged")

    given = [*(Item(number, f"{number}", damaged) for number in range(7)), *items(1)]
    with pytest.warns(EludeSteerWarning, match=r"7 pictures .*; 4 \(damaged\); and 2 more$"):
        assert [len(batch) for batch in read_items(given, 3)] == [1]


def test_a_source_without_pictures_is_refused(atlas):
    with pytest.raises(ImageError, match="the stream of images gives no pictures to measure on"):
        items_of(source_of(atlas, iter(()), 5), 5)


@pytest.mark.parametrize("limit", [2, 3, 7, 11, 15, 19])
def test_pictures_are_spread_evenly(limit):
    numbers = [item.index for item in items_of(image_set(Drawn(20)), limit)]
    assert len(numbers) == limit
    assert numbers[0] == 0
    gaps = {b - a for a, b in zip(numbers, [*numbers[1:], 20], strict=True)}
    assert max(gaps) - min(gaps) <= 1


def test_the_layer_that_stands_for_a_convolution_gives_what_it_gives():
    conv = torch.nn.Conv2d(5, 3, 1, stride=2)
    x = torch.randn(1, 5, 4, 4)
    with torch.no_grad():
        tokens = x[:, :, ::2, ::2].flatten(2)[0].T
        torch.testing.assert_close(_for_tokens(conv)(tokens), conv(x).flatten(2)[0].T)
        half = _for_tokens(conv.half())
    assert half.weight.dtype == torch.float16
