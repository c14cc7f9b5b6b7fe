"""Evaluating an atlas of toyland: measures, images, the report and the command."""

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import AtlasError, EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.evaluate import (
    MEASURES,
    _as_linear,
    choose_items,
    evaluate,
    load_atlas_tower,
    open_images,
    read_batches,
    run_tower,
)
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.monosemanticity import gather_peaks
from elude_steer.method.layers import split_layer
from elude_steer.models.images import Item, image_set
from elude_steer.models.vlm import Vlm
from tests.helpers.markup import Reader


class CountedScenes:
    """A list of scenes that counts how often each is read."""

    def __init__(self, count):
        self.scenes = [scene.image for scene in toyland.scenes(5, count)]
        self.reads = [0] * count

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.scenes[index]


@pytest.fixture(scope="module")
def atlas():
    return Atlas.load("toyland")


@pytest.fixture(scope="module")
def tower(atlas):
    return load_atlas_tower(atlas)


def items(count):
    return choose_items(image_set("toyland:5", limit=count), count)


@pytest.fixture(scope="module")
def evaluation():
    return evaluate("toyland", images="toyland:77001", limit=24, again="toyland", warm_up=1, runs=3)


def find_row(evaluation, name):
    (row,) = [row for row in evaluation.rows if row.name.startswith(name)]
    return row


def test_the_split_is_faithful_and_stable(evaluation):
    assert find_row(evaluation, "R2").value == pytest.approx(1, abs=1e-9)
    assert find_row(evaluation, "same caption").value == 1
    assert find_row(evaluation, "stability").value == pytest.approx(1, abs=1e-12)


def test_sub_units_are_more_monosemantic_than_units(evaluation):
    ms = find_row(evaluation, "MS-Score")
    assert ms.value > ms.units
    assert torch.nanmean(evaluation.scores).item() * 100 == pytest.approx(ms.value)
    assert len(evaluation.scores) == len(evaluation.atlas)
    assert len(evaluation.unit_scores) == evaluation.atlas.d_out


def test_every_measure_has_its_rows(evaluation):
    assert {row.measure for row in evaluation.rows} == set(MEASURES)
    assert 1 < find_row(evaluation, "effective rank").value <= evaluation.atlas.d_in
    assert 0 < find_row(evaluation, "collinearity").value <= 1
    assert find_row(evaluation, "explicit layer, ms").value > 0


def test_the_report_shows_everything_and_loads_nothing(evaluation, tmp_path):
    page = evaluation.save(tmp_path)
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert (stored["images"], stored["pictures"]) == ("toyland:77001", 24)
    assert len(stored["rows"]) == len(evaluation.rows)
    text = page.read_text()
    assert "MS-Score" in Reader(text).text
    assert text.count("<img") >= 4
    assert not re.search(r'(?:src|href)="(?!data:)', text)


def test_only_the_chosen_measures_are_computed():
    found = evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary"])
    assert {row.measure for row in found.rows} == {"dictionary"}
    assert found.scores is None
    with pytest.raises(SpecError, match=r"there is no measure 'monosemantic'.*'monosemanticity'"):
        evaluate("toyland", measures=["monosemantic"])
    with pytest.raises(SpecError, match="there is no measure ''"):
        evaluate("toyland", measures=[])
    with pytest.raises(SpecError, match="'toyland' is for the measure 'dictionary', which is not asked for"):
        evaluate("toyland", measures=["efficiency"], again="toyland")
    twice = evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary", "dictionary"])
    assert len(twice.rows) == len(found.rows)


def test_too_few_images_give_a_report_without_a_score(run, tmp_path):
    with pytest.warns(EludeSteerWarning, match="2 images give no MS-Score"):
        found = evaluate("toyland", images="toyland:5", limit=2, measures=["faithfulness", "monosemanticity"])
    assert find_row(found, "MS-Score").value is None
    assert find_row(found, "never fire").value < 1  # some fire
    found.save(tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    (tmp_path / "file").write_text("")
    code, _, err = run("evaluate", "toyland", "--images", "toyland:5", "--limit", "3", "--out", tmp_path / "file")
    assert (code, "measuring" in err) == (1, False)
    assert "is a file, not a folder" in err


def test_another_run_must_be_of_the_same_layer(tmp_path):
    atlas = Atlas.load("toyland")
    other = replace(atlas, about={**atlas.about, "weights": "0" * 32}).save(tmp_path / "other")
    with pytest.raises(AtlasError, match="other weights"):
        evaluate("toyland", images="toyland:5", limit=2, measures=["dictionary"], again=str(other))


def test_unreadable_images_are_left_out(tmp_path):
    for number, scene in enumerate(toyland.scenes(3, 3)):
        scene.image.save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.warns(EludeSteerWarning, match=r"left out: bad\.png"):
        assert evaluate("toyland", images=str(tmp_path), measures=["monosemanticity"]).image_count == 3


def test_the_command_prints_a_table(run, tmp_path):
    few = ["--images", "toyland:5", "--limit", "6", "--out", tmp_path / "found"]
    code, out, err = run("evaluate", "toyland", "--measures", "monosemanticity", *few)
    assert code == 0
    assert "MS-Score, %" in out
    assert "measuring monosemanticity" in err
    assert (tmp_path / "found" / "report.html").is_file()
    code, out, _ = run("evaluate", "toyland", "--measures", "dictionary", "--limit", "2", "--json")
    assert code == 0
    assert json.loads(out)["atlas"] == "toyland"
    code, _, err = run("evaluate", "toyland", "--measures", "speed")
    assert code == 1
    assert "there is no measure 'speed'" in err


def test_images_are_spread_over_all_folders(tmp_path):
    for number in range(12):
        path = tmp_path / f"class{number // 4}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    atlas = Atlas.load("toyland")
    for limit, folders in ((3, 3), (2, 2), (40, 3)):
        names = [item.id for item in choose_items(open_images(atlas, tmp_path, limit), limit)]
        assert len(names) == min(limit, 12)
        assert len({name.split("/")[0] for name in names}) == folders
    drawn = [item.id for item in choose_items(open_images(atlas, "toyland:5", 3), 3)]
    assert drawn == [f"toyland:5:{number}" for number in range(3)]


def test_one_pass_gives_what_each_measure_finds_alone(atlas, tower):
    given = items(11)
    readable, one_pass_r2, peaks = run_tower(atlas, tower, given)
    assert [item.id for item in readable] == [item.id for item in given]
    images = [item.read()[0] for item in given]
    inputs = [q.flatten(0, 1) for image in images for q in tower.encode([image])]
    explicit, r2 = split_layer(tower.layer, atlas.members(), atlas.units), R2()
    for q in inputs:
        with torch.inference_mode():
            r2.add(tower.layer(q), explicit(q))
    assert one_pass_r2.value == pytest.approx(r2.value, abs=1e-6)
    alone = gather_peaks(inputs, atlas.sub_units(range(len(atlas)), tower.layer).activations, tower.layer)
    torch.testing.assert_close(peaks["sub-units"].scores(), alone.scores(), atol=1e-4, rtol=0, equal_nan=True)
    units = gather_peaks(inputs, tower.layer, tower.layer)
    torch.testing.assert_close(peaks["units"].scores(), units.scores(), atol=1e-4, rtol=0, equal_nan=True)


def test_the_tower_sees_every_image_once(atlas, monkeypatch):
    batches = []
    encode = Vlm.encode
    monkeypatch.setattr(Vlm, "encode", lambda self, images: (batches.append(len(images)), encode(self, images))[1])
    evaluate("toyland", images="toyland:5", limit=19, measures=["faithfulness", "monosemanticity"])
    assert batches == [8, 8, 3]


def test_images_are_read_only_where_they_are_needed():
    for measures, reads in ((["dictionary"], 0), (["monosemanticity"], 1), (["efficiency"], None)):
        drawn = CountedScenes(20)
        found = evaluate("toyland", images=drawn, measures=measures, warm_up=0, runs=1)
        assert list(drawn.reads) == ([1] * 8 + [0] * 12 if reads is None else [reads] * 20)
        assert found.image_count == 20


def test_unreadable_images_are_named(tmp_path):
    for number, scene in enumerate(toyland.scenes(3, 3)):
        scene.image.save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    given = choose_items(image_set(tmp_path), 10)
    with pytest.warns(EludeSteerWarning, match=r"1 images cannot be read and were left out: 1\.png \(no image"):
        read = [item.id for batch in read_batches(given, 2) for item, _ in batch]
    assert read == ["0.png", "2.png"]
    for name in ("0.png", "2.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImageError, match=r"none of the 3 images can be read: 0\.png"):
        list(read_batches(given, 2))


def test_further_unreadable_images_are_counted():
    def damaged():
        raise OSError("damaged")

    given = [*(Item(number, f"{number}", damaged) for number in range(7)), *items(1)]
    with pytest.warns(EludeSteerWarning, match=r"7 images .*; 4 \(damaged\); and 2 more$"):
        assert [len(batch) for batch in read_batches(given, 3)] == [1]


def test_a_source_without_images_is_refused(atlas):
    with pytest.raises(ImageError, match="the stream of images has no images to measure on"):
        choose_items(open_images(atlas, iter(()), 5), 5)


@pytest.mark.parametrize("limit", [2, 3, 7, 11, 15, 19])
def test_images_are_spread_evenly(limit):
    numbers = [item.index for item in choose_items(image_set(CountedScenes(20)), limit)]
    assert len(numbers) == limit
    assert numbers[0] == 0
    gaps = {b - a for a, b in zip(numbers, [*numbers[1:], 20], strict=True)}
    assert max(gaps) - min(gaps) <= 1


def test_a_convolution_equals_its_linear_layer():
    conv = torch.nn.Conv2d(5, 3, 1, stride=2)
    x = torch.randn(1, 5, 4, 4)
    with torch.no_grad():
        tokens = x[:, :, ::2, ::2].flatten(2)[0].T
        torch.testing.assert_close(_as_linear(conv)(tokens), conv(x).flatten(2)[0].T)
        half = _as_linear(conv.half())
    assert half.weight.dtype == torch.float16
