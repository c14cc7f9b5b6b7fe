import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import elude_steer as es
from elude_steer import toyland
from elude_steer.atlas.build import sizes, unit_clusters
from elude_steer.atlas.build.sizes import (
    check_memory,
    default_cluster_size,
    default_top_k,
    expected_size,
    resolve_clusters,
    resolve_tokens,
    tokens_per_image,
)
from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.method import backends
from elude_steer.method.backends import ClusteringSize, memory_needed
from elude_steer.recipe_files import list_recipes, load_spec
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, SplitSpec, TokensSpec

CPU = torch.device("cpu")
GB = 10**9
PLAIN = AtlasSpec("a", ModelSpec("x", "y"))


@pytest.fixture(autouse=True)
def temporary_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture
def spec(tiny_llava):
    return AtlasSpec(
        "tiny",
        ModelSpec(str(tiny_llava), "layers.1.mlp.fc2"),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=200, min_cluster_size=6, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
    )


class Unreadable:
    """A data set whose images must not be read."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        raise AssertionError("an image was read")


# What auto means


@pytest.mark.parametrize(
    ("images", "tokens", "instances", "top_k", "smallest"),
    [
        (20, 500, 1280, 100, 5),  # each image has only 64 tokens
        (200, 50, 10_000, 500, 12),
        (2000, 5, 10_000, 500, 12),
        (5000, 2, 10_000, 500, 12),
        (1_280_000, 2, 2_560_000, 10_000, 250),
    ],
)
def test_sizes_follow_the_number_of_images(images, tokens, instances, top_k, smallest):
    spec = resolve_clusters(resolve_tokens(PLAIN, images), instances)
    assert (spec.tokens.per_image, spec.clusters.top_k, spec.clusters.min_cluster_size) == (tokens, top_k, smallest)


def test_few_instances_leave_room_for_two_clusters():
    for instances in (8, 20, 64, 200, 1797):
        top_k = default_top_k(instances)
        assert 2 * default_cluster_size(top_k) <= top_k <= instances
    assert (default_top_k(1), default_cluster_size(2)) == (2, 2), "no number is below what a spec may say"


def test_values_that_a_spec_states_are_kept():
    stated = replace(PLAIN, tokens=TokensSpec(2), clusters=ClustersSpec(top_k=400_000, min_cluster_size=1000))
    assert resolve_clusters(resolve_tokens(stated, 20), 40) == stated
    everything = replace(PLAIN, tokens=TokensSpec("all"))
    assert resolve_tokens(everything, 20) == everything
    part = replace(PLAIN, clusters=ClustersSpec(top_k=4000))
    assert resolve_clusters(part, 10**6).clusters == ClustersSpec(top_k=4000, min_cluster_size=100)
    assert resolve_clusters(part, 400).clusters == ClustersSpec(top_k=4000, min_cluster_size=10)


def test_the_largest_size_is_known_before_images_are_read():
    paper = replace(PLAIN, tokens=TokensSpec(2), clusters=ClustersSpec(top_k=400_000, min_cluster_size=1000))
    assert expected_size(paper, 1_280_000, 3072) == ClusteringSize(400_000, 3072, 1000)
    assert expected_size(paper, 5000, 3072) == ClusteringSize(10_000, 3072, 1000)
    assert expected_size(paper, None, 3072) == ClusteringSize(400_000, 3072, 1000), "a stream may be long"
    every = replace(paper, tokens=TokensSpec("all"))
    assert expected_size(every, 5, 3072) == ClusteringSize(400_000, 3072, 1000), "tiles are not counted yet"
    assert expected_size(PLAIN, None, 3072).instances == sizes.MAX_TOP_K


# Memory


def test_the_papers_recipes_fit_a_cpu_with_sixteen_gigabytes(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda: 14 * GB)
    inputs = {"dinov2-small-layer12": 1536, "dinov2-large-layer23": 4096, "convnextv2-base-stage4": 4096}
    shipped = [recipe.name for recipe in list_recipes() if recipe.kind == "atlases"]
    assert set(inputs) < set(shipped)
    for name in shipped:
        check_memory(load_spec(name), 1_280_000, inputs.get(name, 4304), CPU)


def test_what_cannot_fit_is_refused_before_an_image_is_read(spec, monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda: 22 * GB)
    large = {"tokens": TokensSpec(2), "clusters": ClustersSpec(top_k=400_000, backend="exact", min_cluster_size=1000)}
    line = (
        r"^clusters.backend 'exact' needs 1.\d+ TB of memory for 400,000 instances of 40 inputs, and 22 GB are free; "
        r"set clusters.backend: fast, which needs \d+ MB, or clusters.top_k: 5\d000.$"
    )
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 6))
    with pytest.raises(SpecError, match=line):
        es.disentangle(model, layer="2", images=Unreadable(), **large)
    with pytest.raises(SpecError, match=line):
        es.build(replace(spec, **large), images=Unreadable())
    monkeypatch.setattr(sizes, "free_bytes", lambda: 10**8)
    with pytest.raises(SpecError, match=r"'fast' needs .* and 100 MB are free; set clusters.top_k: \d+.$"):
        es.build(replace(spec, **large), images=Unreadable(), settings=["clusters.backend=auto"])


def test_processes_share_the_memory(monkeypatch):
    large = replace(PLAIN, tokens=TokensSpec(2), clusters=ClustersSpec(top_k=400_000, min_cluster_size=1000))
    monkeypatch.setattr(sizes, "free_bytes", lambda: 2 * GB)
    check_memory(large, None, 3072, CPU)
    with pytest.raises(SpecError, match="and 1 GB are free"):
        check_memory(large, None, 3072, CPU, processes=2)


def test_unknown_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda: None)
    check_memory(replace(PLAIN, clusters=ClustersSpec(top_k=400_000, backend="exact")), None, 3072, CPU)


def test_an_interrupted_build_keeps_the_backend_that_auto_chose(spec, image_folder, tmp_path, monkeypatch):
    def build(work):
        return es.build(spec, images=image_folder, out=tmp_path / "a", work=work, quiet=True)

    first = build(tmp_path / "work")
    assert (first.about["backend"], first.about["spec"]["clusters"]["backend"]) == ("exact", "auto")
    for folder in (tmp_path / "work").glob("clusters-*"):
        shutil.rmtree(folder)
    for module in (backends, unit_clusters):
        monkeypatch.setattr(module, "EXACT_INSTANCES", 10)  # now auto would choose fast
    assert build(tmp_path / "work").about["backend"] == "exact"
    assert build(tmp_path / "other").about["backend"] == "fast"
    assert len(list((tmp_path / "work").glob("clusters-*"))) == 1


def test_auto_says_so_when_too_little_memory_makes_it_approximate(spec, image_folder, tmp_path, monkeypatch):
    free = memory_needed("exact", ClusteringSize(200, 40, 3)) - 1
    monkeypatch.setattr(sizes, "free_bytes", lambda: free)
    with pytest.warns(EludeSteerWarning, match=r"auto takes 'fast', which approximates: 'exact' needs \d+ MB"):
        atlas = es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True)
    assert atlas.about["backend"] == "fast"


def test_no_more_units_are_clustered_at_a_time_than_fit(spec, image_folder, tmp_path, monkeypatch):
    running, most, lock = [0], [0], threading.Lock()
    cluster_unit = unit_clusters.cluster_unit

    def counted(*arguments):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        found = cluster_unit(*arguments)
        with lock:
            running[0] -= 1
        return found

    monkeypatch.setattr(unit_clusters, "cluster_unit", counted)
    need = memory_needed("exact", ClusteringSize(200, 40, 3))
    plenty = es.build(spec, images=image_folder, out=tmp_path / "a", work=tmp_path / "a-work", threads=4, quiet=True)
    assert most[0] > 1
    most[0] = 0
    monkeypatch.setattr(sizes, "free_bytes", lambda: need * 3 // 2)
    little = es.build(spec, images=image_folder, out=tmp_path / "b", work=tmp_path / "b-work", threads=4, quiet=True)
    assert most[0] == 1
    assert torch.equal(plenty.packed, little.packed)


# Defaults from end to end


def split_toyland(vlm, images, out, **settings):
    return es.disentangle(
        vlm.model.get_submodule(vlm.within),
        layer="layers.5.mlp.fc2",
        images=images,
        preprocess=lambda image: vlm.prepare([image])["pixel_values"][0, 0],
        out=out,
        quiet=True,
        **settings,
    )


@pytest.fixture(scope="module")
def captioner():
    return es.Vlm.load("toyland/captioner")


@pytest.fixture(scope="module")
def scenes():
    return [scene.image for scene in toyland.scenes(9, 20)]


def test_twenty_images_split_units_by_default(captioner, scenes, tmp_path):
    atlas = split_toyland(captioner, scenes, tmp_path / "a")
    assert (torch.bincount(atlas.units) > 1).float().mean() > 0.9
    assert atlas.about["instances"] == 20 * 64
    used = atlas.about["spec"]
    assert (used["tokens"]["per_image"], used["clusters"]["top_k"], used["clusters"]["min_cluster_size"]) == (
        500,
        100,
        5,
    )
    stated = {"tokens": TokensSpec(500), "clusters": ClustersSpec(top_k=100, min_cluster_size=5)}
    again = split_toyland(captioner, scenes, tmp_path / "b", work=tmp_path / "work", **stated)
    assert torch.equal(again.packed, atlas.packed), "the recorded values give the same atlas"


def test_a_stream_is_counted(captioner, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "STORED", 600)
    atlas = split_toyland(captioner, (scene for scene in scenes), tmp_path / "a")
    used = atlas.about["spec"]
    assert (used["tokens"]["per_image"], atlas.about["instances"]) == (30, 600) == (tokens_per_image(20), 20 * 30)
    assert (used["clusters"]["top_k"], used["clusters"]["min_cluster_size"]) == (100, 5)
    assert (torch.bincount(atlas.units) > 1).any()
    assert (atlas.references.images.unique() >= 10).any(), "also the last images are there"
