import numpy as np
import pytest
import torch

from elude_steer.method.clustering import Clusters
from elude_steer.method.contributions import (
    cluster_means,
    contributions,
    no_clusters,
    representatives,
    summarize_clusters,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_contributions_by_hand():
    q = torch.tensor([[3.0, 7.0, -4.0], [0.0, 1.0, -2.0]])
    weight = torch.tensor([1.0, 0.0, -1.0])
    # first: (3, 0, 4), of length 5; second: (0, 0, 2), of length 2
    expected = torch.tensor([[0.6, 0.0, 0.8], [0.0, 0.0, 1.0]])
    assert torch.allclose(contributions(q, weight), expected, atol=1e-7)


def test_every_instance_has_length_one_and_keeps_its_signs():
    q, weight = randn(50, 8), randn(8, seed=1)
    c = contributions(q, weight)
    assert torch.allclose(c.norm(dim=1), torch.ones(50), atol=1e-6)
    assert torch.equal(c.sign(), (q * weight).sign())


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e3])
def test_the_scale_of_an_instance_does_not_matter(scale):
    q, weight = randn(20, 8), randn(8, seed=1)
    assert torch.allclose(contributions(q * scale, weight), contributions(q, weight), atol=1e-6)


def test_an_instance_without_contribution_stays_zero():
    q = torch.tensor([[0.0, 0.0], [0.0, 5.0], [2.0, 0.0]])
    c = contributions(q, torch.tensor([1.0, 0.0]))
    assert torch.equal(c, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))


def test_no_instances_give_no_contributions():
    assert contributions(torch.empty(0, 4), torch.ones(4)).shape == (0, 4)


def test_inputs_are_left_unchanged():
    q, weight, labels, p = randn(6, 3), randn(3, seed=1), torch.tensor([0, 1, -1, 0, 1, 1]), torch.rand(6)
    before = [tensor.clone() for tensor in (q, weight, labels, p)]
    representatives(contributions(q, weight), labels, p, 2)
    cluster_means(q, labels, 2)
    assert all(torch.equal(now, then) for now, then in zip((q, weight, labels, p), before, strict=True))


def test_representatives_by_hand():
    c = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 0, 1, -1])
    probabilities = torch.tensor([1.0, 0.75, 0.5, 1.0])
    # cluster 0: 1 * (1, 0) + 0.75 * (0, 1) = (1, 0.75), of length 1.25; cluster 1: (0, 0.5); the last one is noise
    expected = torch.tensor([[0.8, 0.6], [0.0, 1.0]])
    assert torch.allclose(representatives(c, labels, probabilities, 2), expected, atol=1e-7)


def test_representatives_equal_a_plain_loop():
    c, labels = contributions(randn(60, 5), randn(5, seed=1)), torch.arange(60) % 4 - 1
    p = torch.rand(60, generator=torch.Generator().manual_seed(2))
    for cluster, got in enumerate(representatives(c, labels, p, 3)):
        r = sum(p[i].double() * c[i].double() for i in range(60) if labels[i] == cluster)
        assert torch.allclose(got.double(), r / (r.norm() + 1e-12), atol=1e-6)


def test_a_cluster_that_cancels_out_has_a_zero_representative():
    c = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert torch.equal(representatives(c, torch.tensor([0, 0]), torch.ones(2), 1), torch.zeros(1, 2))


def test_a_member_of_probability_zero_does_not_count():
    c = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    r = representatives(c, torch.tensor([0, 0]), torch.tensor([1.0, 0.0]), 1)
    assert torch.allclose(r, torch.tensor([[1.0, 0.0]]))


def test_cluster_means_by_hand():
    q = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 0.0], [99.0, 99.0]])
    # cluster 0: ((1 + 3) / 2, (2 + 6) / 2); cluster 1: its only member; the last one is noise
    means = cluster_means(q, torch.tensor([0, 0, 1, -1]), 2)
    assert torch.equal(means, torch.tensor([[2.0, 4.0], [10.0, 0.0]]))


def test_renumbering_the_clusters_permutes_the_rows():
    q, labels = randn(40, 6), torch.arange(40) % 4 - 1
    p, renamed = torch.rand(40, generator=torch.Generator().manual_seed(3)), torch.tensor([2, 0, 1, -1])
    assert torch.equal(cluster_means(q, renamed[labels], 3)[renamed[:3]], cluster_means(q, labels, 3))
    assert torch.equal(
        representatives(q, renamed[labels], p, 3)[renamed[:3]],
        representatives(q, labels, p, 3),
    )


def test_noise_changes_nothing():
    q, labels, p = randn(40, 6), torch.arange(40) % 2, torch.ones(40)
    noisy = torch.cat([q, randn(9, 6, seed=5)])
    marked = torch.cat([labels, torch.full((9,), -1)])
    assert torch.equal(cluster_means(noisy, marked, 2), cluster_means(q, labels, 2))
    assert torch.equal(representatives(noisy, marked, torch.ones(49), 2), representatives(q, labels, p, 2))


def test_the_summary_of_clusters_has_representatives_means_and_sizes():
    q, labels = randn(20, 6), torch.arange(20) % 4 - 1
    c, probabilities = contributions(q, randn(6, seed=1)), np.linspace(0.1, 1, 20)
    summary = summarize_clusters(q, c, Clusters(labels.numpy(), probabilities, 3))
    expected = representatives(c, labels, torch.from_numpy(probabilities).float(), 3)
    assert torch.equal(summary["representatives"], expected)
    assert torch.equal(summary["means"], cluster_means(q, labels, 3))
    assert summary["sizes"].tolist() == [5, 5, 5]


def test_no_clusters_has_the_shapes_of_a_summary():
    nothing = Clusters(np.full(4, -1), np.zeros(4), 0)
    summary, expected = no_clusters(6), summarize_clusters(randn(4, 6), randn(4, 6), nothing)
    for name, tensor in summary.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
