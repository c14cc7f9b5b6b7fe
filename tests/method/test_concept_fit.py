"""Detectors and directions: planted words in planted images are found again."""

from dataclasses import fields

import pytest
import torch

from elude_steer.method.concept_fit import (
    Presence,
    StreamSums,
    find_region,
    fit_detectors,
    measure_presence,
    strongest_mean,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Presence


def planted_similarities(counts, images=1000, seed=0):
    """A bulk of width 1 for each word, and images that lie ten above it: the first of a random order."""
    g = generator(seed)
    values = torch.randn(images, len(counts), generator=g)
    truth = torch.zeros(images, len(counts), dtype=torch.bool)
    for word, count in enumerate(counts):
        truth[torch.randperm(images, generator=g)[:count], word] = True
    return values + 10 * truth, truth


def test_presence_finds_the_images_that_show_a_word():
    values, truth = planted_similarities([30, 60, 99])
    presence = measure_presence(values)
    # Of a normal bulk, about one image in a thousand lies three deviations above the mode.
    assert (presence.shows >= truth).all()
    assert (presence.shows.sum(0) <= truth.sum(0) + 10).all()
    assert not (presence.lacks & truth).any()
    assert presence.lacks.sum(0).tolist() == [500] * 3
    assert not (presence.shows & presence.lacks).any()
    assert presence.degree.dtype == torch.float32
    assert presence.degree.min() == 0 and presence.degree.max() == 1
    assert (presence.degree[truth] > 0.7).all()
    assert (presence.degree[presence.lacks] < 0.2).all()
    for word in range(3):  # linear between the medians of those without and with it
        low, high = values[presence.lacks[:, word], word].median(), values[presence.shows[:, word], word].median()
        expected = ((values[:, word] - low) / (high - low)).clamp(0, 1)
        torch.testing.assert_close(presence.degree[:, word], expected)


def test_a_word_of_no_images_and_one_of_many_count_within_limits():
    """At least 20 images, because a median of fewer says little, and at most a tenth of all."""
    values, _ = planted_similarities([0, 3, 400])
    counts = measure_presence(values).shows.sum(0).tolist()
    assert counts == [20, 20, 100]
    large, _ = planted_similarities([0], images=4000)
    assert measure_presence(large).shows.sum(0).tolist() == [40]  # a hundredth


def test_presence_takes_few_images_equal_ones_and_any_unit():
    for values in (torch.randn(3, 2, generator=generator()), torch.zeros(30, 2), torch.ones(2, 1)):
        presence = measure_presence(values)
        assert presence.degree.isfinite().all()
        assert presence.shows.any(0).all() and presence.lacks.any(0).all()
        assert not (presence.shows & presence.lacks).any()
    values, _ = planted_similarities([40, 80], seed=3)
    one, other = measure_presence(values), measure_presence(0.01 * values.double() + 0.3)
    assert torch.equal(one.shows, other.shows)
    torch.testing.assert_close(one.degree, other.degree, rtol=1e-4, atol=1e-4)


# Detectors


def planted_reading(images, sub_units, noise=0.0, seed=1):
    """Images in which the presence of two words is a linear reading of the sub-units."""
    g = generator(seed)
    means = torch.randn(images, sub_units, generator=g, dtype=torch.float64) * (1 + torch.arange(sub_units) % 5) + 2
    truth = torch.randn(2, sub_units, generator=g, dtype=torch.float64) / (1 + torch.arange(sub_units) % 5)
    reading = means @ truth.T + noise * torch.randn(images, 2, generator=g, dtype=torch.float64)
    low, high = reading.amin(0), reading.amax(0)
    rank = reading.argsort(0, descending=True).argsort(0)
    presence = Presence(rank < images // 10, rank >= images - images // 2, ((reading - low) / (high - low)).float())
    return means, truth / (high - low)[:, None], presence


def test_detectors_recover_a_planted_linear_reading():
    means, truth, presence = planted_reading(images=2000, sub_units=12)
    weights, bias = fit_detectors(means, presence)
    assert weights.shape == (2, 12)
    shrunk = 1 / 1.1  # the ridge is a tenth of the variance
    torch.testing.assert_close(weights, shrunk * truth, rtol=0.1, atol=0.05 * float(truth.abs().max()))
    readings = means @ weights.T + bias
    for word in range(2):
        pair = torch.stack([readings[:, word], presence.degree[:, word].double()])
        assert torch.corrcoef(pair)[0, 1] > 0.999
        assert readings[presence.lacks[:, word], word].median().abs() < 1e-9  # 0 without the word


@pytest.mark.parametrize("sub_units", [30, 39, 40, 41, 90])
def test_both_ways_to_solve_give_the_same_detectors(sub_units):
    """With more sub-units than images the smaller system is solved; written out, both are one ridge regression."""
    images = 40
    means, _, presence = planted_reading(images, sub_units, noise=0.5)
    weights, bias = fit_detectors(means, presence)
    deviation = means.std(0)
    x = (means - means.mean(0)) / deviation
    y = presence.degree.double() - presence.degree.double().mean(0)
    expected = torch.linalg.solve(x.T @ x + 0.1 * images * torch.eye(sub_units), x.T @ y) / deviation[:, None]
    torch.testing.assert_close(weights, expected.T, rtol=1e-6, atol=1e-9)
    assert bias.shape == (2,)


@pytest.mark.parametrize("images", [20, 200])
def test_sub_units_that_never_change_get_no_weight(images):
    means, _, presence = planted_reading(images, 50)
    means[:, 7], means[:, 9] = 3.25, 0.0
    weights, bias = fit_detectors(means, presence)
    assert not weights[:, [7, 9]].any()
    assert weights.isfinite().all() and bias.isfinite().all()
    assert weights[:, :7].all()


# Directions

WORDS, WIDTH, PATCHES = 3, 40, 25


def planted_streams(images=400, together=0.9, seed=2):
    """Images of patches with planted words: the first two mostly go along on the same patches, the third is alone.

    Returns the vectors that the words add to the stream, and for each image its readings, stream and presences.
    """
    g = generator(seed)
    vectors = 4 * torch.linalg.qr(torch.randn(WIDTH, WORDS, generator=g)).Q.T  # at right angles
    found = []
    for _ in range(images):
        first, third = (torch.rand(2, generator=g) < 0.4).tolist()
        second = first if torch.rand((), generator=g) < together else torch.rand((), generator=g) < 0.4
        present = torch.tensor([first, bool(second), third])
        shared = torch.arange(PATCHES) < 8
        where = torch.stack([shared, shared, torch.arange(PATCHES) >= 17], 1)
        readings = where.float() - 0.1
        there = where & present
        stream = there.float() @ vectors + 0.3 * torch.randn(PATCHES, WIDTH, generator=g)
        found.append((readings, stream, present.float()))
    return vectors, found


def add_up(images, fit=0.4):
    sums = StreamSums.empty(WORDS, WIDTH)
    for readings, stream, degree in images:
        sums.add(readings, stream, degree, fit)
    return sums


def test_sums_of_two_halves_are_the_sums_of_the_whole():
    _, images = planted_streams(60)
    whole, one, other = add_up(images), add_up(images[:25]), add_up(images[25:])
    for field in fields(StreamSums):
        total = getattr(one, field.name) + getattr(other, field.name)
        torch.testing.assert_close(total, getattr(whole, field.name), msg=field.name)
        assert getattr(whole, field.name).dtype == torch.float64
    assert int(whole.patches) == 60 * PATCHES
    split = StreamSums(*(getattr(one, f.name) + getattr(other, f.name) for f in fields(StreamSums)))
    torch.testing.assert_close(split.directions(), whole.directions())


def test_directions_are_a_ridge_regression_of_the_stream_on_the_words():
    """Written out: centred presences on the patches of each region, and a ridge of their mean variance."""
    _, images = planted_streams(50)
    x = torch.cat([degree * (readings >= 0.4 * readings.amax(0)) for readings, _, degree in images]).double()
    y = torch.cat([stream for _, stream, _ in images]).double()
    x, y = x - x.mean(0), y - y.mean(0)
    variance = x.T @ x / len(x)
    expected = torch.linalg.solve(variance + variance.diagonal().mean() * torch.eye(WORDS), x.T @ y / len(x))
    got = torch.nn.functional.normalize(add_up(images).directions())
    torch.testing.assert_close(got, torch.nn.functional.normalize(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("together", [0.5, 0.9])
def test_directions_are_those_of_planted_words_although_another_goes_along(together):
    """The ridge limits how far words that nearly always go along are told apart, but it is never worse than means."""
    vectors, images = planted_streams(together=together)
    sums = add_up(images)

    def cosines(directions):
        return torch.nn.functional.normalize(directions.float()) @ torch.nn.functional.normalize(vectors).T

    found = cosines(sums.directions())
    apart = cosines(sums.shown / sums.shown_patches[:, None] - sums.lacked / sums.lacked_images[:, None])
    for own, other in ((0, 1), (1, 0)):
        assert apart[own, other] > 0.3  # the plain difference of means holds the other word
        assert found[own, other] < apart[own, other]
        assert found[own, own] > apart[own, own]
        # By the ridge, presences that correlate by 0.66 and 0.93 over patches give cosines of 0.92 and 0.77.
        assert found[own, own] == pytest.approx(0.92 if together == 0.5 else 0.77, abs=0.03)
    assert found[2, 2] > 0.98


def test_a_direction_is_as_long_as_the_inner_patches_lie_apart():
    vectors, images = planted_streams(together=0.0, seed=4)
    sums = add_up(images)
    directions = sums.directions()
    lengths = directions.norm(dim=1)
    unit = directions / lengths[:, None]
    apart = sums.shown / sums.shown_patches[:, None] - sums.lacked / sums.lacked_images[:, None]
    torch.testing.assert_close(lengths, 1.5 * (apart * unit).sum(1))
    assert lengths[2] == pytest.approx(1.5 * float(vectors[2].norm()), rel=0.1)  # it is alone on its patches
    assert (directions[2] @ vectors[2].double()) / lengths[2] / vectors[2].norm() > 0.98


def test_a_word_that_no_image_surely_shows_has_no_direction():
    _, images = planted_streams(80)
    unsure = [(readings, stream, degree * torch.tensor([1.0, 1.0, 0.7])) for readings, stream, degree in images]
    directions = add_up(unsure).directions()
    assert directions[:2].any(1).all()
    assert not directions[2].any()
    assert not StreamSums.empty(WORDS, WIDTH).directions().any()


# Regions


def test_a_region_is_where_a_detector_reads_a_share_of_its_peak():
    readings = torch.tensor([[1.0, -1.0, 0.2], [0.5, -2.0, 0.0], [0.39, -0.5, 0.1], [-3.0, 0.0, 0.09]])
    assert find_region(readings, 0.4).T.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]
    assert find_region(readings, 1.0).T.int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert find_region(readings[:, 0], 0.4).tolist() == [True, True, False, False]


@pytest.mark.parametrize("readings", [torch.randn(5, 2, generator=generator()), -torch.ones(4), torch.zeros(3)])
def test_a_fit_of_zero_takes_every_patch(readings):
    region = find_region(readings, 0)
    assert region.dtype == torch.bool and region.shape == readings.shape
    assert region.all()


def test_the_strongest_mean_is_over_three_patches_however_many_there_are():
    values = torch.arange(100.0)[torch.randperm(100, generator=generator())]
    assert float(strongest_mean(values)) == 98  # the mean of 97 to 99
    assert float(strongest_mean(values[values < 20])) == 18
    assert float(strongest_mean(torch.tensor([1.0, 4.0]))) == 2.5
    assert strongest_mean(torch.stack([values, -values], 1)).tolist() == [98, -1]
    assert float(strongest_mean(values, 50)) == 74.5
    assert float(strongest_mean(values, 1)) == 99
