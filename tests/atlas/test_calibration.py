"""The detectors and directions of words: their scale, their files, and what they read in scenes."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from elude_steer import toyland
from elude_steer.atlas import atlas as atlas_module
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.calibration import FILE, Calibration, finish_calibration
from elude_steer.errors import AtlasError
from elude_steer.method.concept_fit import Presence
from tests.helpers.atlases import make_atlas

IMAGES, WORDS, UNITS = 40, 3, 13


def make_presence():
    """Of three words: each is in another quarter of the images, and the second half lacks all."""
    shows, lacks = torch.zeros(IMAGES, WORDS, dtype=torch.bool), torch.zeros(IMAGES, WORDS, dtype=torch.bool)
    for word in range(WORDS):
        shows[5 * word : 5 * word + 5, word] = True
    lacks[IMAGES // 2 :] = True
    return Presence(shows, lacks, shows.float())


def make_calibration(fit=0.4, d_out=6, seed=0):
    """A calibration of three words with random weights, and the readings that it was made from."""
    g = torch.Generator().manual_seed(seed)
    presence = make_presence()
    strongest = 5 * presence.degree + torch.rand(IMAGES, WORDS, generator=g)
    mean = strongest / 10 - 0.2
    weights, bias = torch.randn(WORDS, UNITS, generator=g), torch.randn(WORDS, generator=g)
    words, directions = torch.tensor([4, 0, 9]), torch.randn(WORDS, d_out, generator=g)
    made = finish_calibration(words, weights, bias, directions, (strongest, mean), presence, fit)
    return made, weights, bias, strongest, mean


# Its scale


@pytest.mark.parametrize("fit", [0.4, 0.0])
def test_a_detector_reads_one_where_its_word_is_strongest_in_images_with_it(fit):
    made, weights, bias, strongest, mean = make_calibration(fit)
    presence = make_presence()
    pooled = strongest if fit else mean
    for row in range(WORDS):
        peak = float(strongest[presence.shows[:, row], row].median())
        found, offset = made.detector(row)
        torch.testing.assert_close(found, weights[row] / peak, rtol=2e-3, atol=1e-4)  # stored in half precision
        assert offset == pytest.approx(float(bias[row]) / peak)
        low, high = made.levels[row].tolist()
        assert low == pytest.approx(float(pooled[presence.lacks[:, row], row].median()) / peak, abs=1e-6)
        assert high == pytest.approx(float(pooled[presence.shows[:, row], row].median()) / peak, abs=1e-6)
    assert (made.levels[:, 1] == 1).all() == bool(fit)
    assert float(made.fit) == pytest.approx(fit)


def test_presence_is_zero_at_the_level_of_images_without_the_word_and_one_with_it():
    made = make_calibration()[0]
    low, high = made.levels[1].tolist()
    for reading, presence in ((low, 0), (high, 1), ((low + high) / 2, 0.5), (2 * low - high, -1)):
        assert made.presence(1, torch.full((2, 30), reading)) == pytest.approx(presence, abs=1e-5)


def test_presence_looks_at_the_strongest_patches_unless_the_whole_image_is_the_region():
    """An object covers few patches; a place covers all of them."""
    readings = torch.zeros(1, 60)
    readings[0, :3] = 1.0
    parts, whole = make_calibration(0.4)[0], make_calibration(0.0)[0]
    assert parts.presence(0, readings) == pytest.approx(1, abs=1e-5)
    low, high = whole.levels[0].tolist()
    assert whole.presence(0, readings) == pytest.approx((3 / 60 - low) / (high - low), abs=1e-5)


def test_older_calibrations_are_read_as_they_were_made():
    """Their levels are means over a twentieth of the patches, and at least three."""
    made = make_calibration()[0]
    old, readings = replace(made, peaks=None), torch.zeros(1, 100)
    readings[0, :3] = 1.0
    low = float(made.levels[0, 0])
    assert made.presence(0, readings) == pytest.approx(1, abs=1e-5)
    assert old.presence(0, readings) == pytest.approx((3 / 5 - low) / (1 - low), abs=1e-5)
    assert old.presence(0, readings[:, :20]) == pytest.approx(1, abs=1e-5)


def test_words_are_found_by_their_number_in_the_vocabulary():
    made = make_calibration()[0]
    assert [made.row(word) for word in (4, 0, 9, 5)] == [0, 1, 2, None]
    assert len(made) == 3
    assert torch.equal(made.direction(1), made.directions[1].float())


def test_a_word_that_no_sub_unit_tells_breaks_nothing():
    presence, nothing = make_presence(), torch.zeros(IMAGES, WORDS)
    empty = torch.zeros(WORDS, UNITS)
    made = finish_calibration(torch.arange(3), empty, empty[:, 0], torch.zeros(WORDS, 6), (nothing,) * 2, presence, 0.4)
    assert all(torch.isfinite(tensor.float()).all() for tensor in vars(made).values())
    assert made.presence(0, torch.zeros(20)) == 0


# In an atlas


def test_it_survives_saving_and_loading_and_atlases_without_it_load(tmp_path):
    plain = make_atlas(layer=nn.Linear(21, 6))
    old = Atlas.load(plain.save(tmp_path / "old"))
    assert old.calibration is None
    assert not (tmp_path / "old" / FILE).exists()
    made = make_calibration()[0]
    new = Atlas.load(replace(plain, calibration=made).save(tmp_path / "new"))
    assert FILE in new.about["files"]
    assert set(vars(new.calibration)) == set(Calibration.__dataclass_fields__)
    for name, tensor in vars(new.calibration).items():
        assert torch.equal(tensor, getattr(made, name)), name
        assert tensor.dtype == getattr(made, name).dtype, name
    older = Atlas.load(replace(plain, calibration=replace(made, peaks=None)).save(tmp_path / "older"))
    assert older.calibration.peaks is None
    assert torch.equal(older.calibration.levels, made.levels)


def test_a_file_that_was_changed_is_noticed(tmp_path):
    folder = replace(make_atlas(), calibration=make_calibration()[0]).save(tmp_path / "a")
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    with pytest.raises(AtlasError, match=f"'{FILE}' has changed since it was written"):
        Atlas.load(folder)


def test_the_streams_of_an_older_version_are_ignored(tmp_path):
    """Such an atlas has one file more, and settings that no longer exist."""
    from elude_steer.utils.files import write_tensors

    steering = {"mode": "place", "beta": 20.0, "level": "stream", "reach": 2.0, "fill": 80, "smooth": True, "kappa": 12}
    plain = make_atlas()
    folder = replace(plain, about={**plain.about, "spec": {**plain.about["spec"], "steering": steering}}).save(
        tmp_path / "old"
    )
    write_tensors(folder / "streams.safetensors", {"streams": torch.zeros(len(plain), plain.d_out).half()})
    loaded = Atlas.load(folder)
    assert loaded.calibration is None
    assert len(loaded) == len(plain)


def test_an_atlas_without_it_says_what_to_do():
    atlas = make_atlas()
    with pytest.raises(AtlasError, match=r"is not calibrated, and mode place needs that; .* atlases calibrate small "):
        atlas.require_calibration()
    with pytest.raises(AtlasError, match="is not calibrated"):
        atlas.detector(0, nn.Linear(21, 6))


def test_a_detector_weighs_the_activations_of_all_sub_units():
    torch.manual_seed(0)
    layer, made = nn.Linear(21, 6), make_calibration()[0]
    atlas = replace(make_atlas(layer=layer), calibration=made)
    q = torch.randn(2, 5, 21)
    with torch.no_grad():
        for row in range(len(made)):
            weights, bias = made.detector(row)
            expected = atlas.sub_units(range(len(atlas)), layer).activations(q) @ weights + bias
            torch.testing.assert_close(atlas.detector(row, layer)(q), expected, rtol=1e-4, atol=1e-4)


def read_slowly(atlas, q, layer):
    """What `read_all_words` gives, by the activations of all sub-units."""
    return atlas.require_calibration().read_all(atlas.sub_units(range(len(atlas)), layer).activations(q))


@pytest.fixture
def calibrated():
    torch.manual_seed(0)
    layer = nn.Linear(21, 6)
    return replace(make_atlas(layer=layer), calibration=make_calibration()[0]), layer.requires_grad_(False)


@pytest.mark.parametrize("rows", [1024, 4])
def test_all_words_are_read_as_the_activations_say(calibrated, rows, monkeypatch):
    monkeypatch.setattr(atlas_module, "_ROWS", rows)
    (atlas, layer), q = calibrated, torch.randn(2, 5, 21)
    torch.testing.assert_close(atlas.read_all_words(q, layer), read_slowly(atlas, q, layer), rtol=1e-4, atol=1e-4)
    assert torch.equal(atlas.read_all_words(q, layer), atlas.read_all_words(q, layer))


def test_sub_units_are_computed_once_for_all_readings(calibrated, monkeypatch):
    (atlas, layer), q, calls, parameters = calibrated, torch.randn(5, 21), [], Atlas.parameters
    monkeypatch.setattr(Atlas, "parameters", lambda *args: calls.append(args) or parameters(*args))
    for _ in range(3):
        atlas.read_all_words(q, layer)
    assert len(calls) == 1
    with torch.no_grad():
        layer.weight.data.mul_(2)  # leaves the version of the weight as it is
    torch.testing.assert_close(atlas.read_all_words(q, layer), read_slowly(atlas, q, layer), rtol=1e-4, atol=1e-4)
    layer.bias = nn.Parameter(torch.ones(6))
    torch.testing.assert_close(atlas.read_all_words(q, layer), read_slowly(atlas, q, layer), rtol=1e-4, atol=1e-4)
    half, before = copy.deepcopy(layer).bfloat16(), len(calls)
    half_read = atlas.read_all_words(q.bfloat16(), half)
    assert half_read.dtype == torch.float32
    torch.testing.assert_close(half_read, read_slowly(atlas, q.bfloat16(), half), rtol=1e-4, atol=1e-4)
    assert len(calls) == before + 2
    layer.bias = None
    torch.testing.assert_close(atlas.read_all_words(q, layer), read_slowly(atlas, q, layer), rtol=1e-4, atol=1e-4)


def test_copies_and_pickles_leave_the_readings_behind(calibrated):
    (atlas, layer), q = calibrated, torch.randn(5, 21)
    atlas.sub_units_of(0)  # it keeps something small
    size, before = len(pickle.dumps(atlas)), atlas.read_all_words(q, layer)
    assert len(pickle.dumps(atlas)) == size
    for other in (copy.copy(atlas), copy.deepcopy(atlas), pickle.loads(pickle.dumps(atlas)), replace(atlas)):
        assert other not in atlas_module._WORD_READINGS
        assert torch.equal(other.read_all_words(q, layer), before)
    count = len(atlas_module._WORD_READINGS)
    del other
    gc.collect()
    assert len(atlas_module._WORD_READINGS) < count


def test_readings_are_the_same_whoever_asks_first(calibrated):
    """Neither inference mode nor half precision around the first call stays in what is kept."""
    (atlas, layer), q = calibrated, torch.randn(5, 21)
    expected = atlas.read_all_words(q, layer)
    other = replace(atlas)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        other.read_all_words(q, layer)
    assert torch.equal(other.read_all_words(q, layer), expected)
    asked = q.clone().requires_grad_()
    other.read_all_words(asked, layer).sum().backward()
    assert asked.grad.any()
    third = replace(atlas)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(one, expected) for one in pool.map(lambda _: third.read_all_words(q, layer), range(32)))


# In toyland


def test_presence_tells_scenes_with_an_object_from_those_without(steerer):
    calibration, vocabulary = steerer.atlas.calibration, steerer.atlas.labels.vocabulary
    assert {*toyland.OBJECTS, *toyland.PLACES} <= {vocabulary[word] for word in calibration.words.tolist()}
    shown, lacking = [], []
    for scene in toyland.scenes(seed=50_002, n=25):
        q = steerer.vlm.encode([scene.image])[0]
        for word in toyland.OBJECTS:
            row = calibration.row(vocabulary.index(word))
            readings = steerer.atlas.detector(row, steerer.vlm.layer)(q)
            (shown if word in scene.objects else lacking).append(calibration.presence(row, readings))
    assert np.median(shown) == pytest.approx(1, abs=0.2)
    assert np.median(lacking) == pytest.approx(0, abs=0.1)
    seen = steerer.defaults["seen"]
    assert np.mean(np.array(shown) >= seen) > 0.9
    assert np.mean(np.array(lacking) < seen) > 0.9
