from dataclasses import replace

import pytest

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.build.pipeline import measure_again
from elude_steer.atlas.familiarity import FILE
from elude_steer.errors import SpecError
from tests.helpers.tiny import save_images

SPEC = """
name: familiar
model: {{id: "{model}", layer: layers.1.mlp.fc2}}
images: {{source: "{images}"}}
tokens: {{per_image: 2}}
clusters: {{top_k: 60, backend: exact, min_cluster_size: 8}}
references: {{keep: 3, thumbnails: 16}}
labels: {{scorer: "{scorer}", vocabulary: toyland, top_k: 12}}
matcher: {{id: toyland/matcher}}
"""


@pytest.fixture(scope="module")
def spec(tiny_llava, tmp_path_factory):
    folder = tmp_path_factory.mktemp("familiar")
    labeller.save(labeller.new_model(3), folder / "scorer")
    images = save_images(folder / "images", 200)
    path = folder / "familiar.yaml"
    path.write_text(SPEC.format(model=tiny_llava, images=images, scorer=folder / "scorer"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def atlas(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    return es.build(spec, out=folder / "atlas", work=folder / "work", threads=1, quiet=True)


def files_of(atlas):
    return {
        path.relative_to(atlas.folder).as_posix(): path.read_bytes()
        for path in atlas.folder.rglob("*")
        if path.is_file()
    }


def test_a_build_measures_what_its_images_have_in_common(atlas, spec, tmp_path):
    assert atlas.familiarity.mean.shape == (atlas.d_in,)
    assert FILE in atlas.about["files"]
    few = es.build(spec, out=tmp_path / "few", work=tmp_path / "w", quiet=True, settings=["images.limit=60"])
    assert few.familiarity is None
    assert FILE not in few.about["files"]


def test_familiarity_does_not_depend_on_processes_and_threads(atlas, spec, tmp_path):
    threads = es.build(spec, out=tmp_path / "threads", work=tmp_path / "w1", threads=3, quiet=True)
    assert files_of(threads) == files_of(atlas)
    processes = es.build(spec, out=tmp_path / "processes", work=tmp_path / "w2", processes=2, quiet=True)
    assert files_of(processes) == files_of(atlas)


def test_an_older_atlas_gets_the_file_that_a_build_would_have_written(atlas, spec, tmp_path):
    thumbnails = {path.name: path.read_bytes() for path in (atlas.folder / "thumbnails").iterdir()}
    old = replace(atlas, familiarity=None).save(tmp_path / "old", thumbnails)
    assert not (old / FILE).exists()
    images = spec.parent / "images"
    new = measure_again(old, tmp_path / "new", images=images, work=tmp_path / "work", quiet=True)
    assert files_of(new) == files_of(atlas)
    in_place = measure_again(old, old, images=images, work=tmp_path / "work", quiet=True)
    assert files_of(in_place) == files_of(atlas)


def test_an_atlas_whose_images_are_unknown_asks_for_them(atlas, tmp_path):
    spec = {**atlas.about["spec"], "images": {**atlas.about["spec"]["images"], "source": None}}
    old = replace(atlas, familiarity=None, about={**atlas.about, "spec": spec}).save(tmp_path / "old")
    with pytest.raises(SpecError, match=r"leaves the probing images open; pass images="):
        measure_again(old, tmp_path / "new", quiet=True)
