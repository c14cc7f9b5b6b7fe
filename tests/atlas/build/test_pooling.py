from dataclasses import replace

import pytest
import torch

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas import calibration
from elude_steer.atlas.build.pipeline import calibrate
from elude_steer.atlas.familiarity import FILE
from elude_steer.errors import AtlasError, SpecError
from elude_steer.method.concept_fit import StreamSums
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
    assert few.familiarity is few.calibration is None
    assert not {FILE, calibration.FILE} & set(few.about["files"])


def test_no_file_depends_on_processes_and_threads(atlas, spec, tmp_path):
    threads = es.build(spec, out=tmp_path / "threads", work=tmp_path / "w1", threads=3, quiet=True)
    assert files_of(threads) == files_of(atlas)
    processes = es.build(spec, out=tmp_path / "processes", work=tmp_path / "w2", processes=2, threads=2, quiet=True)
    assert files_of(processes) == files_of(atlas)


def test_an_older_atlas_gets_the_files_that_a_build_would_have_written(atlas, spec, tmp_path):
    thumbnails = {path.name: path.read_bytes() for path in (atlas.folder / "thumbnails").iterdir()}
    old = replace(atlas, familiarity=None, calibration=None).save(tmp_path / "old", thumbnails)
    assert not (old / FILE).exists() and not (old / calibration.FILE).exists()
    images = spec.parent / "images"
    new = calibrate(old, tmp_path / "new", images=images, work=tmp_path / "work", quiet=True)
    assert files_of(new) == files_of(atlas)
    in_place = calibrate(old, old, images=images, work=tmp_path / "work", quiet=True)
    assert files_of(in_place) == files_of(atlas)


def test_an_atlas_whose_images_are_unknown_asks_for_them(atlas, tmp_path):
    spec = {**atlas.about["spec"], "images": {**atlas.about["spec"]["images"], "source": None}}
    old = replace(atlas, familiarity=None, about={**atlas.about, "spec": spec}).save(tmp_path / "old")
    with pytest.raises(SpecError, match="leaves the probing images open; pass --images FOLDER"):
        calibrate(old, tmp_path / "new", quiet=True)


# Calibration


def test_a_build_calibrates_its_words(atlas):
    assert calibration.FILE in atlas.about["files"]
    assert atlas.calibration.weights.shape == (len(atlas.calibration), len(atlas))
    assert atlas.calibration.directions.shape == (len(atlas.calibration), atlas.d_out)
    assert torch.isfinite(atlas.calibration.directions).all()


def test_calibration_does_not_depend_on_interruptions(atlas, spec, tmp_path, monkeypatch):
    add, images = StreamSums.add, []

    def stop_at_image_90(self, *given):
        images.append(given)
        if len(images) == 90:
            raise KeyboardInterrupt
        add(self, *given)

    build = {"out": tmp_path / "atlas", "work": tmp_path / "work", "threads": 1, "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(StreamSums, "add", stop_at_image_90)
        with pytest.raises(KeyboardInterrupt):
            es.build(spec, **build)
    assert not (tmp_path / "atlas").exists()
    done = list((tmp_path / "work").glob("calibration-*/group-*.safetensors"))
    assert 0 < len(done) < 16
    assert files_of(es.build(spec, **build)) == files_of(atlas)


def test_a_part_of_the_images_is_enough(atlas, spec, tmp_path):
    """With more images than `calibration.images`, the others are left out."""
    work = {"images": spec.parent / "images", "work": tmp_path / "work", "quiet": True}
    part = calibrate(atlas.folder, tmp_path / "part", settings=["calibration.images=100"], **work)
    assert part.about["spec"]["calibration"]["images"] == 100
    assert 0 < len(part.calibration) <= len(atlas.calibration)
    assert files_of(part)[calibration.FILE] != files_of(atlas)[calibration.FILE]
    for name in ("labels.safetensors", "memberships.safetensors", "references.safetensors"):
        assert files_of(part)[name] == files_of(atlas)[name]


def test_a_spec_may_ask_for_no_calibration(spec, tmp_path):
    settings = ["calibration.images=0"]
    plain = es.build(spec, out=tmp_path / "plain", work=tmp_path / "w", threads=1, quiet=True, settings=settings)
    assert plain.calibration is None
    assert plain.familiarity is not None
    assert not list((tmp_path / "w").glob("calibration-*"))


def test_what_an_atlas_cannot_be_calibrated_with_is_refused(atlas, spec, tmp_path):
    images, work = spec.parent / "images", {"work": tmp_path / "work", "quiet": True}
    few = save_images(tmp_path / "few", 99)
    with pytest.raises(SpecError, match="too few images to calibrate with; give at least 100"):
        calibrate(atlas.folder, tmp_path / "new", images=few, **work)
    with pytest.raises(SpecError, match=r"calibration needs the dual encoder .*: --set labels.scorer=ID"):
        settings = ["labels.scorer=null", "references.thumbnails=null"]
        calibrate(atlas.folder, tmp_path / "new", images=images, settings=settings, **work)
    (tmp_path / "words.txt").write_text("dog\ncat\n")
    settings = [f"labels.vocabulary={tmp_path / 'words.txt'}"]
    with pytest.raises(SpecError, match="the vocabulary is not that of the labels of atlas 'familiar'"):
        calibrate(atlas.folder, tmp_path / "new", images=images, settings=settings, **work)
    bare = replace(atlas, labels=None).save(tmp_path / "bare")
    with pytest.raises(AtlasError, match="sub-units of atlas 'familiar' have no labels"):
        calibrate(bare, tmp_path / "new", images=images, **work)
    assert not (tmp_path / "new").exists()
