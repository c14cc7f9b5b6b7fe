"""The tower runs once for each image in a build, and the cache changes no bit of the atlas."""

import errno

import pytest
import torch
from torch import nn

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.build import activation_cache, pipeline
from elude_steer.errors import ImageError, StorageError
from elude_steer.models import vision
from elude_steer.models.images import Item, image_set
from elude_steer.models.sources import tar
from elude_steer.utils.remote import filesystems
from tests.helpers.tiny import save_images
from tests.models.sources.test_tar import pack

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


@pytest.fixture
def shards(folder, tmp_path, monkeypatch):
    """The images as tar shards of a store that fails as often as `failures` says; its reads are not paused."""
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(filesystems, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(tar, "_WINDOW", 0)  # each image is fetched by itself
    open_filesystem, state = tar.open_filesystem, {"images": pack(folder / "images", tmp_path / "shards", 2)}
    state |= {"failures": 0, "read": 0}

    class Failing:
        def __init__(self, filesystem):
            self.filesystem = filesystem

        def __getattr__(self, name):
            return getattr(self.filesystem, name)

        def cat_file(self, *args, **options):
            state["read"] += 1
            if state["read"] > IMAGES // 2 and state["failures"]:
                state["failures"] -= 1
                raise TimeoutError("Connect timeout\non endpoint URL")
            return self.filesystem.cat_file(*args, **options)

    def open_failing(url):
        filesystem, path = open_filesystem(url)
        return Failing(filesystem), path

    monkeypatch.setattr(tar, "open_filesystem", open_failing)
    return state


def test_a_store_that_fails_for_a_moment_changes_no_byte(folder, tmp_path, shards):
    once = build_files(folder, tmp_path / "once", threads=1)
    shards["failures"] = 2
    assert build_files(folder, tmp_path / "again", images=shards["images"], threads=1) == once
    assert not shards["failures"]


def test_a_store_that_fails_for_good_ends_the_build_and_the_next_one_goes_on(folder, tmp_path, shards, encoded_images):
    once = build_files(folder, tmp_path / "once", threads=1)
    encoded_images.clear()
    shards["failures"] = 10**9
    with pytest.raises(StorageError, match=r"cannot be read or written .*Connect timeout on endpoint.* same command"):
        build_files(folder, tmp_path / "again", images=shards["images"], threads=1)
    assert not (tmp_path / "again" / "atlas").exists()
    shards["failures"] = 0
    assert build_files(folder, tmp_path / "again", images=shards["images"], threads=1) == once
    assert len(encoded_images) < 2 * IMAGES


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ImageError("the file is damaged"), None),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
        (OSError("image file is truncated"), None),
        (SyntaxError("broken PNG file"), None),
        (StorageError("the store is gone"), "^the store is gone$"),
        (OSError(errno.ETIMEDOUT, "timed\nout"), r"^image 'a\.png' cannot be read now \(.*timed out\); finished work"),
        (ConnectionResetError(), "^image 'a.png' cannot be read now"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (MemoryError("none left"), "none left"),
    ],
)
def test_only_damaged_and_missing_images_are_left_out(error, raised):
    skipped = {}

    def fail():
        raise error

    if raised is None:
        assert activation_cache.read_item(Item(0, "a.png", fail), skipped) is None and list(skipped) == ["a.png"]
        return
    with pytest.raises((StorageError, MemoryError), match=raised):
        activation_cache.read_item(Item(0, "a.png", fail), skipped)
    assert not skipped
