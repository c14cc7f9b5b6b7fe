"""The method on units with known concepts; `python -m tests.helpers.planted` prints the levels not asserted here."""

import numpy as np
import pytest
import torch

from elude_steer.method.clustering import Clusters
from elude_steer.method.splitting import UnitSplit
from tests.helpers import planted
from tests.helpers.planted import LEVELS, RULES, Found, find, measure, plant, trial

SEEDS = range(5)
CONCEPTS = range(2, 9)


@pytest.fixture(scope="module")
def clear():
    """All clear units of the table, measured: {(concepts, rule): rows}."""
    rows = [row for k in CONCEPTS for seed in SEEDS for row in trial(k, "clear", seed)]
    return {
        (k, rule): [row for row in rows if (row["concepts"], row["rule"]) == (k, rule)]
        for k in CONCEPTS
        for rule in RULES
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("concepts", CONCEPTS)
def test_clear_concepts_are_found_and_each_sub_unit_is_strongest_on_its_own(clear, concepts, rule):
    for row in clear[concepts, rule]:
        assert row["found"] == concepts, row
        assert row["ari"] >= 0.95, row
        assert row["own"] == 1, row


@pytest.mark.parametrize("rule", RULES)
def test_a_dimension_of_one_concept_only_belongs_to_its_sub_unit_alone(clear, rule):
    shares = [row["exclusive"] for k in CONCEPTS for row in clear[k, rule]]
    assert len(shares) == len(CONCEPTS) * len(SEEDS)
    assert min(shares) >= 0.9


def test_instances_left_out_are_mostly_noise(clear):
    rows = [row for k in CONCEPTS for row in clear[k, "unique"]]
    assert np.mean([row["covered"] for row in rows]) >= 0.95
    assert np.nanmean([row["noise_precision"] for row in rows]) >= 0.9


@pytest.mark.parametrize("level", LEVELS)
def test_a_unit_with_one_concept_is_not_split(level):
    for seed in SEEDS:
        for found in find(plant(1, level, seed)).values():
            assert found.clusters.count < 2
            assert found.split.members.shape == (1, planted.D_IN)
            assert found.split.members.all()


def test_a_split_that_ignores_the_clusters_does_much_worse():
    rows = [row for k in CONCEPTS for row in trial(k, "clear", 0, rules=("random",))]
    assert np.mean([row["own"] for row in rows]) < 0.6
    assert np.mean([row["exclusive"] for row in rows]) < 0.6


# The generator


def test_units_depend_on_the_seed():
    one, same, other = plant(3, "hard", 1), plant(3, "hard", 1), plant(3, "hard", 2)
    assert torch.equal(one.q, same.q)
    assert torch.equal(one.weight, same.weight)
    assert one.bias == same.bias
    assert not torch.equal(one.q, other.q)


@pytest.mark.parametrize("concepts", [1, 2, 8])
def test_a_planted_unit_has_the_described_statistics(concepts):
    unit = plant(concepts, "clear", 0)
    sizes = np.bincount(unit.truth[unit.truth >= 0])
    overlap = unit.supports.astype(int) @ unit.supports.T

    assert len(sizes) == concepts
    assert sizes[-1] == 300
    assert concepts == 1 or sizes[-1] == 5 * sizes[0]
    assert np.mean(unit.truth < 0) == pytest.approx(0.2, abs=1e-3)
    assert (unit.q >= 0).all()
    assert (unit.weight < 0).any()
    assert (overlap.diagonal() == 48).all()
    assert (overlap.diagonal(1) == 16).all()
    assert (np.triu(overlap, 2) == 0).all()
    assert ((unit.q @ unit.weight).diff() <= 1e-3).all(), "strongest first"


def test_noise_has_the_marginals_and_not_the_structure():
    unit = plant(4, "clear", 0)
    q, noise = unit.q.numpy(), unit.truth < 0
    assert all(np.isin(q[noise, j], q[~noise, j]).all() for j in range(planted.D_IN))
    inside = [np.corrcoef(q[rows][:, unit.supports[3]].T)[np.triu_indices(48, 1)].mean() for rows in (noise, ~noise)]
    assert abs(inside[0]) < 0.05 < 0.2 < inside[1]


@pytest.mark.parametrize(("level", "ratio"), LEVELS.items())
def test_the_level_is_the_ratio_of_background_to_signal(level, ratio):
    unit = plant(2, level, 0)
    q = unit.q[torch.from_numpy(unit.truth == 1)].double().numpy()
    background = (q[:, ~unit.supports.any(0)] ** 2).mean(0).sum() / (~unit.supports.any(0)).mean()
    of_both = (q**2).sum(1).mean()
    # Where both are, the energy of the sum has a cross term of 2 E[signal] E[background] for each of 48 dimensions.
    cross = 2 * 48 * 1.0 * np.sqrt(2 * background / 512) * 0.399
    assert background / (of_both - background - cross) == pytest.approx(ratio, rel=0.1)


# The measures


def as_found(labels, members, activations):
    count = labels.max() + 1
    return Found(Clusters(labels, (labels >= 0).astype(float), count), UnitSplit(members, 0.5), activations)


def test_the_truth_scores_perfectly():
    unit = plant(3, "medium", 0)
    members = torch.from_numpy(unit.supports | ~unit.supports.any(0))
    got = measure(unit, as_found(unit.truth, members, torch.eye(3)))
    assert got == dict.fromkeys(planted.MEASURES, 1.0)


def test_each_measure_sees_its_fault():
    unit = plant(2, "medium", 0)
    labels = np.where(unit.truth < 0, 0, unit.truth)  # noise goes to the first cluster
    everything = torch.ones(2, planted.D_IN, dtype=torch.bool)
    got = measure(unit, as_found(labels, everything, torch.tensor([[1.0, 2.0], [0.0, 3.0]])))
    assert (got["ari"], got["covered"], got["noise_recall"]) == (1, 1, 0)
    assert np.isnan(got["noise_precision"])
    assert (got["own"], got["exclusive"]) == (0.5, 0)


def test_the_table_shows_means_and_minima():
    rows = [dict.fromkeys(planted.MEASURES, value) | {"level": "clear"} for value in (1.0, 0.5)]
    head, _, line = planted.table(rows, ("level",)).split("\n")
    assert head.startswith("| level | units | ari |")
    assert line.startswith("| clear | 2 | 0.750 (0.500) |")
