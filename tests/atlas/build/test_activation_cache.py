"""One pass of the tower serves a whole build, and changes no bit of it."""

import pytest
import torch

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.build import activation_cache, pipeline
from elude_steer.errors import StorageError
from elude_steer.models import vision
from tests.helpers.tiny import save_images

SPEC = """
name: looked
model: {{id: "{model}", layer: layers.1.mlp.fc2}}
images: {{source: "{pictures}"}}
tokens: {{per_image: 6}}
clusters: {{top_k: 120, min_cluster_size: 8}}
labels: {{scorer: "{scorer}", vocabulary: toyland, top_k: 12}}
"""
PICTURES = 40


@pytest.fixture(scope="module")
def folder(tiny_llava, tmp_path_factory):
    folder = tmp_path_factory.mktemp("looked")
    labeller.save(labeller.new_model(3), folder / "scorer")
    save_images(folder / "pictures", PICTURES)
    text = SPEC.format(model=tiny_llava, pictures=folder / "pictures", scorer=folder / "scorer")
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def counted(monkeypatch):
    """How many pictures the tower was shown."""
    seen = []
    for name in ("encode", "streams"):
        whole = getattr(vision.Tower, name)

        def count(self, images, whole=whole):
            seen.extend(images)
            return whole(self, images)

        monkeypatch.setattr(vision.Tower, name, count)
    return seen


def built(folder, out, *settings, **given):
    es.build(folder / "spec.yaml", out=out / "atlas", work=out / "work", quiet=True, settings=settings, **given)
    return {path.name: path.read_bytes() for path in sorted((out / "atlas").iterdir()) if path.suffix == ".safetensors"}


def test_one_pass_is_enough_and_gives_the_same_bits(folder, tmp_path, counted, monkeypatch):
    once = built(folder, tmp_path / "once", threads=1)
    assert len(counted) == PICTURES
    assert not list((tmp_path / "once" / "work").glob("activations-*")), "what was kept to save time is taken away"
    counted.clear()
    assert built(folder, tmp_path / "thrice", "tokens.reuse=false", threads=1) == once
    assert len(counted) == 3 * PICTURES  # tokens, streams, names
    monkeypatch.setattr(activation_cache, "_DISK_SHARE", 0.0)  # a disk without room
    assert built(folder, tmp_path / "full", threads=1) == once


def test_what_was_kept_is_used_after_an_interruption(folder, tmp_path, counted, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "pool_activations", stop)
        with pytest.raises(KeyboardInterrupt):
            built(folder, tmp_path)
    assert len(list((tmp_path / "work").glob("activations-*/*.safetensors"))) == PICTURES
    seen = len(counted)
    built(folder, tmp_path)
    assert len(counted) == seen


def test_only_some_units_are_split(folder, tmp_path):
    where = {"work": tmp_path / "work", "quiet": True}
    few = es.build(folder / "spec.yaml", out=tmp_path / "few", settings=["clusters.units=5"], **where)
    counts = torch.bincount(few.units)
    assert (counts[5:] == 1).all()
    whole = es.build(folder / "spec.yaml", out=tmp_path / "all", **where)
    assert torch.equal(torch.bincount(whole.units)[:5], counts[:5])
    assert len(whole) > len(few) > few.d_out


def test_a_disk_that_fills_up_meanwhile_only_costs_time(folder, tmp_path, monkeypatch):
    once = built(folder, tmp_path / "once", threads=1)

    def full(path, tensors):
        raise StorageError(f"no room for '{path}'")

    monkeypatch.setattr(activation_cache, "write_tensors", full)
    assert built(folder, tmp_path / "full", threads=1) == once
