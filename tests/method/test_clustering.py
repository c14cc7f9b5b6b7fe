import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import hdbscan
import numpy as np
import pytest
import torch
from hdbscan import hdbscan_
from sklearn.metrics import adjusted_rand_score

from elude_steer.errors import MissingPackageError, ModelError, SpecError
from elude_steer.method import clustering
from elude_steer.method.clustering import cluster, distances

WIDE, NARROW = (61, 100, 64, 300, 128), (59, 8, 30, 3, 50)


def blobs(seed, n, dimensions, *, groups=4, spread=3.0, background=0.2, normalised=False):
    """Gaussian groups of unequal density, and background points that belong to no group."""
    rng = np.random.default_rng(seed)
    centres = spread * rng.normal(size=(groups, dimensions))
    x = centres[rng.integers(groups, size=n)] + rng.normal(size=(n, dimensions)) * rng.uniform(0.6, 1, (n, 1))
    outside = rng.random(n) < background
    x[outside] = np.hypot(spread, 1) * rng.normal(size=(outside.sum(), dimensions))
    x = torch.from_numpy(x)
    return torch.nn.functional.normalize(x) if normalised else x


def case(number, dimensions):
    """One of twenty inputs with random settings, of 300 to 3,000 points."""
    rng = np.random.default_rng(number)
    n = round(np.geomspace(300, 3000, 20)[number])
    structure = {"groups": 1, "spread": 0.0} if number % 5 == 4 else {"groups": 2 + number % 4}
    x = blobs(number, n, dimensions[number % 5], normalised=rng.random() < 0.5, **structure)
    settings = {
        "selection": ("leaf", "eom")[rng.integers(2)],
        "min_cluster_size": (5, 15, 40)[rng.integers(3)],
        "min_samples": (None, 1, 3, 60)[rng.integers(4)],
    }
    return x.float() if rng.random() < 0.5 else x, settings


def assert_same(one, other):
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=0, atol=1e-9)
    assert one.count == other.count


# The library's labels


@pytest.mark.parametrize("number", range(0, 20, 2))
def test_exact_equals_the_library_above_60_dimensions(number):
    x, settings = case(number, WIDE)
    assert_same(cluster(x, backend="exact", **settings), cluster(x, backend="hdbscan", **settings))


@pytest.mark.parametrize("number", range(1, 20, 2))
def test_exact_equals_the_library_below_60_dimensions_given_the_same_algorithm(number, monkeypatch):
    # Below 60 dimensions the library builds the spanning tree by Borůvka's algorithm. Its order of equal edges (and, by
    # default, an approximation) gives other labels than Prim's, which the library uses above 60 and `exact` always.
    def prims(x, samples, alpha, metric, p, leaf_size, approximate, tree, jobs, **rest):
        return hdbscan_._hdbscan_prims_kdtree(x, samples, alpha, metric, p, leaf_size, tree, **rest)

    monkeypatch.setattr(hdbscan_, "_hdbscan_boruvka_kdtree", prims)
    x, settings = case(number, NARROW)
    assert_same(cluster(x, backend="exact", **settings), cluster(x, backend="hdbscan", **settings))


def test_most_of_the_twenty_inputs_have_clusters():
    found = [
        cluster(x, **settings).count for x, settings in (case(i, WIDE if i % 2 == 0 else NARROW) for i in range(20))
    ]
    assert sum(count > 1 for count in found) >= 15
    assert 0 in found


@pytest.mark.parametrize("dimensions", [3, 30, 60])
@pytest.mark.parametrize("selection", ["leaf", "eom"])
def test_exact_finds_the_groups_of_the_unchanged_library_below_60_dimensions(dimensions, selection):
    x = blobs(1, 600, dimensions, spread=8.0, background=0.0)
    one, other = (cluster(x, backend=name, selection=selection, min_cluster_size=40) for name in ("exact", "hdbscan"))
    both = (one.labels >= 0) & (other.labels >= 0)
    assert one.count == other.count == 4
    assert both.mean() > 0.9
    assert adjusted_rand_score(one.labels[both], other.labels[both]) == 1


def test_the_same_input_gives_the_same_clusters():
    x, settings = case(16, WIDE)
    one, other = cluster(x, **settings), cluster(x.clone(), **settings)
    assert np.array_equal(one.labels, other.labels)
    assert np.array_equal(one.probabilities, other.probabilities)


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025, 2100])
def test_distances_are_euclidean_whatever_the_blocks(n):
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    got = distances(x)
    assert got.dtype == torch.float64
    assert (got.diagonal() == 0).all()
    torch.testing.assert_close(got, got.T)
    torch.testing.assert_close(got, torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist"))


# Degenerate inputs

ON_CPU = pytest.mark.parametrize("backend", ["exact", "fast", "hdbscan"])


def assert_all_noise(found, n):
    assert (found.labels.dtype, found.probabilities.dtype) == (np.int64, np.float64)
    assert found.count == 0
    assert (found.labels == -1).all()
    assert (found.probabilities == 0).all()
    assert len(found.labels) == len(found.probabilities) == n


@ON_CPU
@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_points_are_noise(backend, n):
    assert_all_noise(cluster(torch.randn(n, 70), backend=backend, min_cluster_size=2), n)


@ON_CPU
@pytest.mark.parametrize("selection", ["leaf", "eom"])
def test_zero_vectors_are_noise(backend, selection):
    assert_all_noise(cluster(torch.zeros(50, 70), backend=backend, selection=selection, min_cluster_size=5), 50)


@ON_CPU
def test_identical_vectors_are_noise(backend):
    x = torch.ones(50, 64)  # a sum of squares without rounding
    assert_all_noise(cluster(x, backend=backend, min_cluster_size=5), 50)


@ON_CPU
@pytest.mark.parametrize("dimensions", [2, 100])
def test_points_without_structure_are_noise(backend, dimensions):
    x = torch.randn(300, dimensions, generator=torch.Generator().manual_seed(0))
    assert_all_noise(cluster(x, backend=backend, min_cluster_size=60), 300)


@ON_CPU
@pytest.mark.parametrize("size", [100, 101, 5000])
def test_no_cluster_if_there_are_too_few_points_for_one(backend, size):
    assert_all_noise(cluster(blobs(0, 100, 70), backend=backend, min_cluster_size=size), 100)


@ON_CPU
@pytest.mark.parametrize("samples", [99, 100, 101, 5000])
def test_no_cluster_if_min_samples_reaches_the_number_of_points(backend, samples):
    # The farthest point determines every density, so no group is denser than the rest.
    assert_all_noise(cluster(blobs(0, 100, 70), backend=backend, min_cluster_size=5, min_samples=samples), 100)


@ON_CPU
@pytest.mark.parametrize("dimensions", [4, 64])
def test_each_group_of_duplicates_is_one_cluster(backend, dimensions):
    x = torch.tensor([[3.0], [1.0], [2.0]]).repeat(1, dimensions).repeat_interleave(torch.tensor([20, 40, 30]), 0)
    found = cluster(x, backend=backend, min_cluster_size=10)
    assert found.labels.tolist() == [0] * 20 + [1] * 40 + [2] * 30
    assert (found.probabilities == 1).all()


def test_equal_rows_are_at_distance_zero():
    rows = torch.randn(10, 1, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert all(distances(row.repeat(300, 1)).max() == 0 for row in rows)


def test_many_equal_rows_give_the_clusters_of_the_library():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 100, generator=generator).repeat_interleave(torch.tensor([150, 100]), 0)
        assert_same(
            cluster(x, backend="exact", min_cluster_size=10), cluster(x, backend="hdbscan", min_cluster_size=10)
        )


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_every_dtype_is_accepted_and_left_unchanged(backend, dtype):
    x = (10 * blobs(3, 200, 64, groups=2, spread=6.0, background=0.0)).to(dtype)
    before = x.clone()
    assert cluster(x, backend=backend, min_cluster_size=20).count == 2
    assert torch.equal(x, before)


# Numbering


@ON_CPU
def test_labels_are_numbered_by_first_occurrence(backend):
    x = blobs(5, 600, 64, groups=5)
    for order in (torch.arange(600), torch.arange(600).flip(0), torch.randperm(600)):
        found = cluster(x[order], backend=backend, min_cluster_size=20)
        labels = found.labels[found.labels >= 0]
        assert found.count == 5
        assert list(dict.fromkeys(labels.tolist())) == list(range(5))
        assert ((found.probabilities > 0) == (found.labels >= 0)).all()
        assert found.probabilities.max() <= 1


def test_renumbering_keeps_the_groups():
    found = clustering._renumber(np.array([-1, 7, 2, 7, -1, 4, 2], np.int32), np.full(7, 0.5, np.float32))
    assert found.labels.tolist() == [-1, 0, 1, 0, -1, 2, 1]
    assert found.probabilities.tolist() == [0, 0.5, 0.5, 0.5, 0, 0.5, 0.5]
    assert found.count == 3


# Backends


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(
        SpecError, match=r"^clusters.backend is 'faiss'; it is one of 'auto', 'exact', 'fast', 'hdbscan', 'cuml'.$"
    ):
        cluster(torch.zeros(3, 2), backend="faiss")


def test_a_missing_cuml_gives_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuml", None)
    line = (
        r"^clusters.backend 'cuml' needs the package 'cuml', which is not installed; "
        r"`pip install 'elude-steer\[gpu\]'`, or set clusters.backend: auto.$"
    )
    with pytest.raises(MissingPackageError, match=line):
        cluster(blobs(0, 50, 4), backend="cuml", min_cluster_size=5)


def test_a_missing_umap_gives_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    line = (
        r"^clusters.umap_components needs the package 'umap', which is not installed; "
        r"`pip install 'elude-steer\[umap\]'`, or leave umap_components out.$"
    )
    with pytest.raises(MissingPackageError, match=line):
        cluster(blobs(0, 50, 4), min_cluster_size=5, umap_components=2)


def install_stand_in(monkeypatch, name, **contents):
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_umap_reduces_before_clustering(monkeypatch):
    arguments = {}

    class UMAP:
        def __init__(self, *, n_neighbors=15, n_components=2, random_state=None, n_jobs=-1):
            arguments.update(
                n_neighbors=n_neighbors, n_components=n_components, random_state=random_state, n_jobs=n_jobs
            )

        def fit_transform(self, x):
            assert isinstance(x, np.ndarray)
            assert x.dtype == np.float32
            return x[:, : arguments["n_components"]]

    install_stand_in(monkeypatch, "umap", UMAP=UMAP)
    x = blobs(2, 300, 100)
    reduced = cluster(x, min_cluster_size=15, umap_components=64, umap_neighbors=7, seed=3)
    assert arguments == {"n_neighbors": 7, "n_components": 64, "random_state": 3, "n_jobs": 1}
    assert_same(reduced, cluster(x[:, :64].float(), min_cluster_size=15))


class Cuml:
    """Stand-in for cuML's HDBSCAN with its documented signature and limits; hdbscan computes the result."""

    def __init__(
        self,
        *,
        min_cluster_size=5,
        min_samples=None,
        cluster_selection_epsilon=0.0,
        max_cluster_size=0,
        metric="euclidean",
        alpha=1.0,
        p=None,
        cluster_selection_method="eom",
        allow_single_cluster=False,
        gen_min_span_tree=False,
        handle=None,
        verbose=False,
        connectivity="knn",
        output_type=None,
        prediction_data=False,
        build_algo="brute_force",
        build_kwds=None,
    ):
        self.arguments = {name: value for name, value in locals().items() if name != "self"}

    def fit(self, x, y=None):
        if self.arguments["metric"] not in ("euclidean", "l2"):
            raise ValueError(f"metric {self.arguments['metric']} is not supported")
        samples = (
            self.arguments["min_cluster_size"]
            if self.arguments["min_samples"] is None
            else self.arguments["min_samples"]
        )
        if not 1 <= samples <= 1023:
            raise ValueError(f"HDBSCAN requires `1 <= min_samples <= 1023`, got {samples}")
        self.received = x
        x = np.asarray(x)
        if x.dtype != np.float32:
            raise TypeError(f"expected float32, got {x.dtype}")
        model = hdbscan.HDBSCAN(
            min_cluster_size=self.arguments["min_cluster_size"],
            min_samples=samples,
            cluster_selection_method=self.arguments["cluster_selection_method"],
            allow_single_cluster=self.arguments["allow_single_cluster"],
            core_dist_n_jobs=1,
        ).fit(x.astype(np.float64))
        if self.arguments["output_type"] != "numpy":
            return self  # cupy arrays, which numpy cannot read
        self.labels_, self.probabilities_ = model.labels_.astype(np.int32), model.probabilities_.astype(np.float32)
        self.fitted.append(self)
        return self


@pytest.fixture
def cuml(monkeypatch):
    monkeypatch.setattr(Cuml, "fitted", [], raising=False)
    install_stand_in(monkeypatch, "cuml", cluster=SimpleNamespace(hdbscan=SimpleNamespace(HDBSCAN=Cuml)))
    return Cuml.fitted


@pytest.mark.parametrize("selection", ["leaf", "eom"])
@pytest.mark.parametrize("samples", [None, 1, 1023])
def test_cuml_is_called_as_documented(cuml, selection, samples):
    x = blobs(7, 400, 64)
    found = cluster(x, backend="cuml", selection=selection, min_cluster_size=20, min_samples=samples)
    (model,) = cuml
    defaults = {name: value for name, value in Cuml().arguments.items() if model.arguments[name] == value}
    assert {name: value for name, value in model.arguments.items() if name not in defaults} == {
        "min_cluster_size": 20,
        "min_samples": samples or 20,
        "output_type": "numpy",
        **({"cluster_selection_method": "leaf"} if selection == "leaf" else {}),
    }
    expected = cluster(x.float(), backend="hdbscan", selection=selection, min_cluster_size=20, min_samples=samples)
    assert np.array_equal(found.labels, expected.labels)
    assert (found.labels.dtype, found.probabilities.dtype) == (np.int64, np.float64)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-6)


def test_cuml_gets_an_array_it_can_read(cuml):
    # cuML reads objects with one of these two attributes, and a CPU tensor has neither:
    # https://github.com/rapidsai/cuml/issues/6276
    cluster(blobs(7, 100, 64), backend="cuml", min_cluster_size=20)
    (model,) = cuml
    assert hasattr(model.received, "__array_interface__") or hasattr(model.received, "__cuda_array_interface__")


@pytest.mark.parametrize(("size", "samples", "reported"), [(1500, None, 1500), (10, 1024, 1024)])
def test_min_samples_above_the_limit_of_cuml_is_refused(cuml, size, samples, reported):
    line = rf"^cuml takes min_samples up to 1023, not {reported}; set clusters.min_samples: 1023.$"
    with pytest.raises(SpecError, match=line):
        cluster(torch.zeros(2000, 2), backend="cuml", min_cluster_size=size, min_samples=samples)
    assert cuml == []


def test_too_few_points_never_reach_cuml(cuml):
    assert_all_noise(cluster(blobs(0, 19, 64), backend="cuml", min_cluster_size=20), 19)
    assert cuml == []


@pytest.mark.parametrize(("size", "samples"), [(1, None), (0, None), (10, 0), (10, -3)])
def test_sizes_out_of_range_are_refused(size, samples):
    with pytest.raises(SpecError, match="min_cluster_size must be at least 2 and min_samples at least 1"):
        cluster(torch.zeros(20, 3), min_cluster_size=size, min_samples=samples)


def test_vectors_that_are_not_finite_are_refused():
    with pytest.raises(ModelError, match="contributions are not finite"):
        cluster(torch.full((20, 3), torch.nan), min_cluster_size=5)
