"""The approximate parts of the fast backend are close, the others exact."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from elude_steer.errors import ModelError
from elude_steer.method import fast_hdbscan
from elude_steer.method.clustering import cluster, distances
from elude_steer.method.contributions import ContributionRows, contributions, summarize_clusters
from elude_steer.method.fast_hdbscan import ClusterTree, Sketch, directions, fast_clusters, kth_smallest, spanning_tree
from tests.helpers.planted import plant


def vectors(concepts=4, level="medium", seed=0):
    planted = plant(concepts, level, seed)
    return contributions(planted.q, planted.weight), planted.truth


def test_as_many_directions_as_dimensions_give_exact_distances():
    x = vectors()[0][:300, :100].contiguous()
    sketch = Sketch.from_rows(x, directions(x, 100))
    squared = sketch.squared_distances(sketch).clamp_min(0)
    assert torch.allclose(
        squared.sqrt().fill_diagonal_(0), distances(x).float(), atol=2e-3 * float(squared.max()) ** 0.5
    )


def test_directions_hold_nearly_as_much_as_the_best_ones():
    x = vectors()[0]
    basis = directions(x, 16)
    assert torch.allclose(basis.T @ basis, torch.eye(16), atol=1e-5)
    best = torch.linalg.svdvals(x)[:16].square().sum()
    assert (x @ basis).square().sum() > 0.98 * best


def test_noise_keeps_its_distance():
    """A projection alone brings noise closer; exact lengths keep it away."""
    x, truth = vectors(level="clear")
    noise = x[torch.from_numpy(truth < 0)]
    true = distances(noise)
    basis = directions(x, 8)
    sketch = Sketch.from_rows(noise, basis)
    off = ~torch.eye(len(noise), dtype=torch.bool)
    ratio = sketch.squared_distances(sketch)[off].sqrt().mean() / true[off].mean()
    assert ratio == pytest.approx(1, abs=0.15)
    assert distances(noise @ basis)[off].mean() / true[off].mean() < 0.8


@pytest.mark.parametrize("n", [2, 3, 50, 300])
def test_the_spanning_tree_is_minimal(n):
    from hdbscan._hdbscan_linkage import mst_linkage_core

    squared = distances(torch.randn(n, 8, generator=torch.Generator().manual_seed(n))).square().float()
    core = kth_smallest(squared, min(4, n - 1))
    edges = spanning_tree(squared.numpy(), core.numpy())
    reach = torch.maximum(torch.maximum(squared, core), core[:, None]).double().numpy()
    assert np.allclose(np.sort(edges[:, 2]), np.sort(mst_linkage_core(reach)[:, 2]))
    a, b = edges[:, 0].astype(int), edges[:, 1].astype(int)
    assert np.allclose(reach[a, b], edges[:, 2])  # every edge has the length of its pair
    group = np.arange(n)
    for one, other in zip(a, b, strict=True):  # the edges join all points without a cycle
        assert group[one] != group[other]
        group[group == group[other]] = group[one]
    assert len(set(group)) == 1


@pytest.mark.parametrize("level", ["clear", "medium", "hard"])
@pytest.mark.parametrize("selection", ["leaf", "eom"])
def test_fast_finds_the_clusters_of_exact(level, selection, monkeypatch):
    monkeypatch.setattr(fast_hdbscan, "EXACT_DIMENSIONS", 64)
    x, _ = vectors(level=level, seed=1)
    exact, fast = (
        cluster(x, backend=name, selection=selection, min_cluster_size=30).labels for name in ("exact", "fast")
    )
    assert adjusted_rand_score(exact, fast) > 0.95


@pytest.mark.parametrize("selection", ["leaf", "eom"])
def test_predicting_a_point_of_the_sample_gives_its_label(selection):
    """The nearest neighbour of a copy is the point itself, so both have one label if the copy is dense enough."""
    x, _ = vectors()
    sketch = Sketch.from_rows(x, directions(x))
    squared = sketch.squared_distances(sketch).fill_diagonal_(0)
    core = kth_smallest(squared, 30)
    tree = ClusterTree.from_distances(squared.numpy(), core.numpy(), selection, 30)
    assert (tree.births > 0).all()
    assert (tree.deaths >= tree.births).all()
    labels, probabilities = tree.predict(squared, core, 30)
    assert (labels == tree.labels).mean() > 0.99
    same = (labels == tree.labels) & (labels >= 0)
    assert np.allclose(probabilities[same], tree.probabilities[same], atol=0.05)


@pytest.mark.parametrize("level", ["clear", "medium"])
@pytest.mark.parametrize("selection", ["leaf"])
def test_a_sample_gives_nearly_the_clusters_of_all_points(level, selection, monkeypatch):
    x, _ = vectors(concepts=3, level=level, seed=2)
    exact = cluster(x, backend="exact", selection=selection, min_cluster_size=30)
    monkeypatch.setattr(fast_hdbscan, "SAMPLE", len(x) // 2)
    fast = cluster(x, backend="fast", selection=selection, min_cluster_size=30)
    assert fast.count == exact.count
    assert adjusted_rand_score(exact.labels, fast.labels) > 0.9
    assert ((fast.probabilities > 0) == (fast.labels >= 0)).all()
    assert fast.probabilities.max() <= 1
    both = (exact.labels >= 0) & (fast.labels >= 0)
    assert np.corrcoef(exact.probabilities[both], fast.probabilities[both])[0, 1] > 0.8


def test_the_order_of_points_outside_the_sample_changes_nothing(monkeypatch):
    x, _ = vectors(concepts=3)
    monkeypatch.setattr(fast_hdbscan, "SAMPLE", len(x) // 2)
    labels, probabilities = fast_clusters(x, "leaf", 30, 30)
    chosen = np.arange(fast_hdbscan.SAMPLE) * len(x) // fast_hdbscan.SAMPLE
    others = np.setdiff1d(np.arange(len(x)), chosen)
    order = np.arange(len(x))
    order[others] = np.random.default_rng(0).permutation(others)
    again, again_probabilities = fast_clusters(x[torch.from_numpy(order)], "leaf", 30, 30)
    assert np.array_equal(again, labels[order])
    assert np.allclose(again_probabilities, probabilities[order])


def test_repeated_runs_give_the_same_bits():
    x, _ = vectors()
    one, other = (fast_clusters(x.clone(), "leaf", 30, 30) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("block", [1, 37, 1024])
def test_contributions_read_in_pieces_give_the_same_bits(block, monkeypatch):
    monkeypatch.setattr(fast_hdbscan, "EXACT_DIMENSIONS", 64)
    planted = plant(3, "medium", 4)
    whole, pieces = contributions(planted.q, planted.weight), ContributionRows(planted.q, planted.weight, block)
    monkeypatch.setattr(fast_hdbscan, "SAMPLE", len(whole) // 2)
    assert torch.equal(pieces[torch.arange(len(whole))], whole)
    one, other = (cluster(x, backend="fast", min_cluster_size=30) for x in (whole, pieces))
    assert one.count == 3
    assert np.array_equal(one.labels, other.labels)
    assert np.array_equal(one.probabilities, other.probabilities)
    summaries = [summarize_clusters(planted.q, x, one) for x in (whole, pieces)]
    assert all(torch.equal(summaries[0][name], summaries[1][name]) for name in summaries[0])


def test_a_number_that_is_not_finite_is_refused_wherever_it_is(monkeypatch):
    x, _ = vectors()
    monkeypatch.setattr(fast_hdbscan, "SAMPLE", len(x) // 2)
    for row in (0, len(x) // 3, len(x) - 1):
        broken = x.clone()
        broken[row, 5] = torch.nan
        with pytest.raises(ModelError, match="not finite"):
            cluster(broken, backend="fast", min_cluster_size=30)
