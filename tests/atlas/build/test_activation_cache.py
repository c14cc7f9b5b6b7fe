"""The tower runs once for each image in a build, and the cache changes no bit of the atlas."""

import pytest
import torch
from torch import nn

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.build import activation_cache, pipeline
from elude_steer.errors import StorageError
from elude_steer.models import vision
from elude_steer.models.images import image_set
from tests.helpers.tiny import save_images

SPEC = """
name: cached
model: {{id: "{model}", layer: layers.1.mlp.fc2}}
images: {{source: "{images}"}}
tokens: {{per_image: 6}}
clusters: {{top_k: 120, min_cluster_size: 8}}
labels: {{scorer: "{scorer}", vocabulary: toyland, top_k: 12}}
"""
IMAGES = 110  # enough for a calibration


@pytest.fixture(scope="module")
def folder(tiny_llava, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cached")
    labeller.save(labeller.new_model(3), folder / "scorer")
    save_images(folder / "images", IMAGES)
    text = SPEC.format(model=tiny_llava, images=folder / "images", scorer=folder / "scorer")
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def encoded_images(monkeypatch):
    """The images that the tower has encoded."""
    seen = []
    for name in ("encode", "streams"):
        whole = getattr(vision.Tower, name)

        def count(self, images, whole=whole):
            seen.extend(images)
            return whole(self, images)

        monkeypatch.setattr(vision.Tower, name, count)
    return seen


def build_files(folder, out, *settings, **given):
    es.build(folder / "spec.yaml", out=out / "atlas", work=out / "work", quiet=True, settings=settings, **given)
    return {path.name: path.read_bytes() for path in sorted((out / "atlas").iterdir()) if path.suffix == ".safetensors"}


def test_one_pass_of_the_tower_gives_the_same_bytes_as_three(folder, tmp_path, encoded_images, monkeypatch):
    once = build_files(folder, tmp_path / "once", threads=1)
    assert len(encoded_images) == IMAGES
    assert not list((tmp_path / "once" / "work").glob("activations-*")), "the cache is deleted"
    encoded_images.clear()
    assert build_files(folder, tmp_path / "thrice", "tokens.reuse=false", threads=1) == once
    assert len(encoded_images) == 3 * IMAGES  # tokens, labels, calibration
    monkeypatch.setattr(activation_cache, "_DISK_SHARE", 0.0)  # no space on the disk
    assert build_files(folder, tmp_path / "full", threads=1) == once


def test_the_cache_is_used_after_an_interruption(folder, tmp_path, encoded_images, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "pool_activations", stop)
        with pytest.raises(KeyboardInterrupt):
            build_files(folder, tmp_path)
    assert len(list((tmp_path / "work").glob("activations-*/*.safetensors"))) == IMAGES
    seen = len(encoded_images)
    build_files(folder, tmp_path)
    assert len(encoded_images) == seen


def test_only_the_first_units_are_split(folder, tmp_path):
    where = {"work": tmp_path / "work", "quiet": True}
    few = es.build(folder / "spec.yaml", out=tmp_path / "few", settings=["clusters.units=5"], **where)
    counts = torch.bincount(few.units)
    assert (counts[5:] == 1).all()
    whole = es.build(folder / "spec.yaml", out=tmp_path / "all", **where)
    assert torch.equal(torch.bincount(whole.units)[:5], counts[:5])
    assert len(whole) > len(few) > few.d_out


def test_a_full_disk_does_not_change_the_result(folder, tmp_path, monkeypatch):
    once = build_files(folder, tmp_path / "once", threads=1)

    def full(path, tensors):
        raise StorageError(f"no room for '{path}'")

    monkeypatch.setattr(activation_cache, "write_tensors", full)
    assert build_files(folder, tmp_path / "full", threads=1) == once


def test_another_precision_is_the_same_from_the_tower_and_from_disk(tmp_path):
    layer = nn.Linear(6, 4)
    tower = vision.Tower(layer, "", layer, prepare=torch.stack)
    items = list(image_set(list(torch.randn(3, 5, 6))).items())
    cache = activation_cache.ActivationCache(tower, tmp_path, dtype=torch.float16)
    new, stored = ({item.index: pair for item, pair in cache.activations(items)} for _ in range(2))
    assert len(list(tmp_path.iterdir())) == 3
    for index, (inputs, stream) in new.items():
        assert inputs.dtype == stream.dtype == torch.float16
        assert torch.equal(inputs, stored[index].inputs)
        assert torch.equal(stream, stored[index].stream)
    assert all(torch.equal(inputs, new[item.index].inputs) for item, inputs in cache.layer_inputs(items))
