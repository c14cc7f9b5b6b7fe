"""Masks over patches: the strongest, the neighbours, and regions as large as the thing."""

import hypothesis
import torch
from hypothesis import given
from hypothesis import strategies as st

from elude_steer.steering.regions import concept_region, smooth_over_neighbours, strongest_mask
from elude_steer.steering.settings import merge_settings


@hypothesis.settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 40))
def test_the_strongest_are_as_many_and_as_strong(seed, tiles, patches, m, nu):
    values = torch.randn(tiles, patches, m, generator=torch.Generator().manual_seed(seed))
    for per in ("tile", "image"):
        mask = strongest_mask(values, nu, per)
        groups = [(values[t], mask[t]) for t in range(tiles)]
        if per == "image":
            groups = [(values.flatten(0, 1), mask.flatten(0, 1))]
        for value, chosen in groups:
            for i in range(m):
                inside, outside = value[chosen[:, i], i], value[~chosen[:, i], i]
                assert len(inside) == min(nu, len(value))
                assert not len(outside) or inside.min() >= outside.max()
        assert (strongest_mask(values, nu + 1, per) | mask).equal(strongest_mask(values, nu + 1, per))
    everything = strongest_mask(values, "all", "tile")
    assert everything.all()
    assert everything.equal(strongest_mask(values, tiles * patches, "image"))


def test_equal_activations_still_count_one_by_one():
    for per, count in (("tile", 6), ("image", 3)):
        assert int(strongest_mask(torch.zeros(2, 5, 1), 3, per).sum()) == count


def test_with_one_tile_both_scopes_are_one():
    values = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(strongest_mask(values, 4, "tile"), strongest_mask(values, 4, "image"))


def test_smoothing_takes_the_neighbours_in():
    """Two neighbours that fire fairly well beat one that fires alone, and only with smoothing."""
    share = torch.zeros(1, 12)
    share[0, 0], share[0, 6], share[0, 7] = 1.0, 0.9, 0.9  # 3 rows of 4
    slow = torch.zeros(3, 4)
    for y in range(3):
        for x in range(4):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < 3 and 0 <= x + dx < 4:
                        weight = 0.5 if dy and dx else 1.0
                        slow[y, x] += weight * share.reshape(3, 4)[y + dy, x + dx] / 7
    torch.testing.assert_close(smooth_over_neighbours(share, 3, 4).reshape(3, 4), slow)
    assert int(share.argmax()) == 0
    assert int(smooth_over_neighbours(share, 3, 4).argmax()) in (6, 7)


def test_a_region_is_as_large_as_the_thing():
    share = torch.zeros(2, 12)
    share[0, :5] = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1])  # a thing on three patches; the second tile hardly shows it
    share[1, :2] = torch.tensor([0.4, 0.2])

    def region(**how):
        return concept_region(share, merge_settings({"mode": "place", **how}), (3, 4)).nonzero().tolist()

    assert region(nu=8, fit=0.45) == [[0, 0], [0, 1], [0, 2]]
    assert region(nu=2, fit=0.45) == [[0, 0], [0, 1]]  # nu is the most a tile may have
    assert region(nu="all", fit=0.35) == [[0, 0], [0, 1], [0, 2], [1, 0]]  # of the picture's peak, not of each tile's
    assert region(nu="all", fit=1.0) == [[0, 0]]
    assert len(region(nu=8, fit=0)) == 16
    assert len(region(nu=3, per="image", fit=0)) == 3


def test_a_word_that_fires_nowhere_has_nothing_to_fit():
    share = -torch.arange(1.0, 13).reshape(1, 12)
    mask = concept_region(share, merge_settings({"mode": "place", "nu": 4, "fit": 0.35}), (3, 4))
    assert mask.nonzero()[:, 1].tolist() == [0, 1, 2, 3]
