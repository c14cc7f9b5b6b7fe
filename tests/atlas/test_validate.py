"""Atlases that lie. More cases by hand: `python -m tests.helpers.liars 20000 --seed 1`."""

import json
import os
import random
import shlex
import struct
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from torch import nn

from elude_steer.atlas import manifest, manifest_rules, reference_images, validate
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.reference_images import ReferenceImages, check_source, find_image_source, record_build
from elude_steer.errors import AtlasError, SpecError
from elude_steer.recipe_files import require_image
from elude_steer.specs import Recipe
from elude_steer.steering.plan import _note_far
from tests.helpers import liars
from tests.helpers.atlases import make_atlas
from tests.helpers.liars import Files, make_full_atlas, try_case, use, write_safetensors

CASES = int(os.environ.get("ELUDE_STEER_FUZZ", "100"))  # more by hand
LAYER = nn.Linear(21, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_full_atlas(tmp_path_factory.mktemp("full") / "base")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture
def files(base):
    return Files(base)


def refuse(files, folder, match):
    files.write(folder)
    with pytest.raises(AtlasError, match=match) as caught:
        Atlas.load(folder)
    assert "\n" not in str(caught.value)


def test_an_atlas_with_every_file_is_sound(base, tmp_path):
    use(base)
    Files(base).write(tmp_path / "copy")  # so the cases below differ in nothing but their change
    use(tmp_path / "copy")


def test_every_change_is_refused_or_leaves_a_sound_atlas(base, tmp_path):
    """Every tensor and every place of the JSON files, a part of the cases in each run; the rest by hand."""
    cases = list(liars.systematic(base))
    assert len(cases) > 1000
    outcomes = []
    for change, seed in random.Random(0).sample(cases, min(2 * CASES, len(cases))):
        outcome, done = try_case(base, tmp_path / "case", change, seed)
        assert outcome in ("refused", "sound"), f"{done} (seed {seed}): {outcome}"
        outcomes.append(outcome)
    assert outcomes.count("refused") > len(outcomes) / 2


def test_random_changes_are_refused_or_leave_a_sound_atlas(base, tmp_path):
    for case in range(CASES):
        outcome, done = try_case(base, tmp_path / "case", liars.change_several, f"0-{case}")
        assert outcome in ("refused", "sound"), f"{done} (seed 0-{case}): {outcome}"


# What is refused, and how it is said


@pytest.mark.parametrize(
    ("file", "name", "change", "message"),
    [
        ("memberships", "units", lambda a: a[::-1], r"'units' must name the units 0 to 5 in ascending order"),
        ("memberships", "units", lambda a: a.clip(0, 4), "each at least once"),
        ("memberships", "units", lambda a: a - 1, "ascending order"),
        ("memberships", "members", lambda a: a * 0, "dimensions of unit 0 belong to none of its sub-units"),
        ("memberships", "members", lambda a: a | 1, "'members' has bits behind the 21 input dimensions"),
        ("memberships", "sizes", lambda a: a - 1, "'sizes' has negative numbers"),
        ("memberships", "rho", lambda a: a * np.nan, "'rho' has values that are not finite"),
        ("memberships", "rho", lambda a: a[:5], r"'rho' has shape \[5\], .* it must be \[6\]"),
        ("references", "units.images", lambda a: a + 9, r"'units.images' has 1\d, and its numbers are from 0 to 4"),
        ("references", "sub_units.tokens", lambda a: a - 1, "'sub_units.tokens' has -1"),
        ("references", "sub_units.values", lambda a: a[:, :2], "does not fit the others"),
        ("labels", "words", lambda a: a + 4, "'words' must be numbers below 4, the size of the vocabulary"),
        ("labels", "words", lambda a: a[:, ::-1], "'labels' must be the first word of each sub-unit"),
        ("labels", "scores", lambda a: a * np.float32(np.inf), "'scores' has values that are not finite"),
        ("labels", "groups", lambda a: a[::-1], "'groups' must be the number of the first sub-unit"),
        ("familiarity", "deviation", lambda a: a * 0, "'deviation' must be above 0"),
        ("familiarity", "limit", lambda a: a - 9, "'limit' must be at least 0"),
        ("calibration", "words", lambda a: a * 0, "a word is there twice"),
        ("calibration", "words", lambda a: a + 1, "'words' has 4, and its numbers are from 0 to 3"),
        ("calibration", "weights", lambda a: a * 9, "'weights' must be shares of the largest"),
        ("calibration", "weights", lambda a: a[:, 1:], r"'weights' has shape \[3, 12\], .* must be \[3, 13\]"),
        ("calibration", "directions", lambda a: a * np.float16(np.inf), "'directions' has values that are not finite"),
        ("calibration", "levels", lambda a: a[:, :1], r"'levels' has shape \[3, 1\]"),
        ("calibration", "fit", lambda a: a + 1, "'fit' must be a share, from 0 to 1"),
        ("calibration", "peaks", lambda a: a * 0, "'peaks' must be at least 1"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the changes
def test_tensors_that_cannot_be_are_named(files, tmp_path, file, name, change, message):
    dtype, array = files.tensors[f"{file}.safetensors"][name]
    files.tensors[f"{file}.safetensors"][name] = dtype, change(array)
    refuse(files, tmp_path / "a", f"is not sound: '{file}.(safetensors|json)': .*{message}.*; get another copy from")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.update(future=1),
            "is of a later format: 'manifest.json' has 'future', which this version does not",
        ),
        (lambda m: m["spec"]["tokens"].update(future=1), "later format: .* has 'spec.tokens.future'"),
        (lambda m: m["model"].update(future=1), "later format: .* has 'model.future'"),
        (lambda m: m.pop("format"), "it has no 'format'"),
        (lambda m: m.pop("spec"), "it has no 'spec'"),
        (lambda m: m["spec"].pop("model"), "it has no 'spec.model'"),
        (lambda m: m["spec"]["tokens"].update(batch_size=-1), "'spec.tokens.batch_size' must be a whole number"),
        (lambda m: m.update(d_in="21"), "'d_in' must be a whole number of at least 1, not 21"),
        (lambda m: m.update(sub_units=14), r"has shape \[13\], .* must be \[14\]"),
        (lambda m: m.update(name="\x1b[2Jx"), "is no text of one line"),
        (lambda m: m["files"].update({"../up.json": "0" * 64}), "'../up.json' is no file of an atlas"),
        (lambda m: m["files"].update({"/etc/passwd": "0" * 64}), "'/etc/passwd' is no file of an atlas"),
        (lambda m: m["files"].update({"code.py": "0" * 64}), "'code.py' is no file of an atlas"),
        (lambda m: m["files"].pop("labels.json"), "lists one of 'labels.json' and 'labels.safetensors' without"),
        (lambda m: m["files"].pop("calibration.safetensors"), "a file that 'manifest.json' does not list"),
        (lambda m: m["files"].pop("images.json"), "it lists no 'images.json'"),
    ],
)
def test_manifests_that_cannot_be_are_named(files, tmp_path, change, message):
    change(files.manifest)
    refuse(files, tmp_path / "a", message)


def test_words_images_and_thumbnails_must_exist(files, tmp_path):
    files.json["labels.json"]["vocabulary"][1] = "dog"
    refuse(files, tmp_path / "a", "'vocabulary' must have at least one word, and each word once")
    files.json["labels.json"]["vocabulary"][1] = "\ud800"
    refuse(files, tmp_path / "a", "'vocabulary' must be a list of words")
    files.json["labels.json"]["vocabulary"][1] = "cat"
    files.json["images.json"] = [*"abcd"]
    refuse(files, tmp_path / "a", r"images' has 4, and its numbers are from 0 to 3")
    files.json["images.json"] = [*"abcde"]
    files.raw["thumbnails/000005.jpg"] = liars.JPEG
    files.manifest["files"]["thumbnails/000005.jpg"] = ""
    refuse(files, tmp_path / "a", "there is no image for 'thumbnails/000005.jpg'")


def test_a_small_file_cannot_ask_for_gigabytes(files, base, tmp_path):
    """Neither by its header nor by the sizes of the manifest."""
    many = 2**31 - 8
    files.manifest |= {"d_in": many}

    def announce(header):
        header["members"]["shape"] = [13, many // 8]

    tensors = files.tensors.pop("memberships.safetensors")
    files.raw["memberships.safetensors"] = write_safetensors(tensors, announce)
    tracemalloc.start()
    refuse(files, tmp_path / "a", r"its tensors need 3,489,66\d,\d+ bytes, and it has")
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    for length in (2**20, 2**63):
        other = Files(base)
        del other.tensors["references.safetensors"]
        other.raw["references.safetensors"] = struct.pack("<Q", length) + bytes(99)
        refuse(other, tmp_path / "b", "'references.safetensors': its header is no header of safetensors")


def test_json_is_bounded_in_depth_and_size(files, base, tmp_path, monkeypatch):
    del files.json["images.json"]
    files.raw["images.json"] = liars.DEEP.encode()
    refuse(files, tmp_path / "a", "'images.json': nested too deeply")
    other = Files(base)
    other.manifest_text = '{"a": ' + liars.DEEP + "}"
    refuse(other, tmp_path / "b", "'manifest.json': nested too deeply")
    monkeypatch.setattr("elude_steer.atlas.manifest_rules.MAX_JSON", 99)
    with pytest.raises(AtlasError, match=r"'images\.json|'labels\.json': \d+ bytes are more than 99"):
        Atlas.load(base)
    monkeypatch.setattr("elude_steer.atlas.manifest.MAX_JSON", 99)
    with pytest.raises(AtlasError, match=r"'manifest\.json': [\d,]+ bytes are more than 99"):
        Atlas.load(base)


@pytest.mark.parametrize("piece", ["[],", "{},", '{"":0},', "0,"])
@pytest.mark.parametrize("name", ["images.json", "labels.json", "manifest.json"])
def test_json_of_many_values_is_refused_before_it_takes_memory(name, piece, files, tmp_path, monkeypatch):
    """A list takes 20 times the three bytes that name it; the real bound is as far from the largest sound atlas."""
    monkeypatch.setattr(manifest_rules, "_MAX_VALUES", 50_000)
    text = '{"a": [' + piece * 200_000 + "0]}"
    if name == "manifest.json":
        files.manifest_text = text
    else:
        del files.json[name]
        files.raw[name] = text.encode()
    files.write(tmp_path / "a")
    tracemalloc.start()
    with pytest.raises(AtlasError, match=rf"'{name}': [\d,]+ brackets and commas are more than 50,000"):
        Atlas.load(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_the_bound_leaves_room_for_the_largest_atlas():
    """Of 1.3 million images, with a comma in each name, and of 300,000 sub-units."""
    assert manifest_rules._MAX_VALUES > 2 * 1_300_000 > 4 * 300_000
    assert manifest_rules._MAX_VALUES / 2 * 240 < 500e6, "dictionaries of one key, the largest values for their bytes"


def test_a_manifest_that_is_nested_takes_no_more_memory_than_it_has(files, tmp_path):
    """Written with indents, which the manifest's text has, this one takes 100 times as much."""
    files.manifest_text = '{"a": ' + "[" * 900 + "0," * 20_000 + "0" + "]" * 900 + "}"
    files.write(tmp_path / "a")
    tracemalloc.start()
    with pytest.raises(AtlasError, match=r"'manifest\.json' has changed since it was written"):
        Atlas.load(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize("d_in", range(1, 18))
def test_members_cover_every_dimension_and_no_other(d_in):
    def problems(members):
        tensors = {"units": torch.zeros(1, dtype=torch.int32), "members": torch.from_numpy(members[None])}
        tensors |= {"sizes": torch.ones(1, dtype=torch.int32), "rho": torch.ones(1)}
        return list(validate._membership_problems(tensors, {"d_out": 1, "d_in": d_in}))

    full = np.packbits(np.ones(d_in, np.uint8))
    assert problems(full) == []
    for dimension in range(len(full) * 8):
        bits = np.unpackbits(full)
        bits[dimension] ^= 1
        expected = "belong to none" if dimension < d_in else f"has bits behind the {d_in} input dimensions"
        assert expected in problems(np.packbits(bits))[0]


def test_members_take_no_byte_for_each_dimension():
    d_in = 2**24 - 3
    tensors = {"units": torch.zeros(1, dtype=torch.int32), "sizes": torch.ones(1, dtype=torch.int32)}
    tensors |= {"members": torch.full((1, 2**21), 255, dtype=torch.uint8), "rho": torch.ones(1)}
    tensors["members"][0, -1] = 0b11111000
    tracemalloc.start()
    assert list(validate._membership_problems(tensors, {"d_out": 1, "d_in": d_in})) == []
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


# Files and images outside the atlas


def test_links_out_of_an_atlas_are_refused(base, tmp_path):
    files, private = Files(base), tmp_path / "private.jpg"
    files.write(tmp_path / "a")
    for name in ("thumbnails/000000.jpg", "memberships.safetensors"):
        inside = tmp_path / "a" / name
        data = inside.read_bytes()
        private.write_bytes(data)  # even with the right content
        inside.unlink()
        inside.symlink_to(private)
        with pytest.raises(AtlasError, match=f"'{name}': a link that leads out of the atlas"):
            Atlas.load(tmp_path / "a")
        inside.unlink()
        inside.write_bytes(data)
    Atlas.load(tmp_path / "a")


def test_the_hubs_cache_has_links_of_its_own(base, tmp_path):
    commit = "b" * 40
    snapshot, blobs = tmp_path / "models--me--x" / "snapshots" / commit, tmp_path / "models--me--x" / "blobs"
    Files(base).write(snapshot)
    blobs.mkdir()
    (snapshot / "images.json").rename(blobs / "1")
    (snapshot / "images.json").symlink_to("../../blobs/1")
    loaded = Atlas.load(snapshot)
    assert loaded.commit == commit
    assert loaded.downloaded  # whoever names its folder has not written it
    assert Atlas.load(base).commit is None


def make_pictured_atlas(folder, source):
    plain = make_atlas(layer=LAYER)
    spec = {**plain.about["spec"], "images": {**plain.about["spec"]["images"], "source": source}}
    ids = tuple(f"{letter}.png" for letter in "abcde")
    return Atlas.load(replace(plain, about={**plain.about, "spec": spec}, image_ids=ids).save(folder))


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for letter in "abcde":
        Image.new("RGB", (8, 8), (200, 0, 0)).save(folder / f"{letter}.png")
    return folder


def test_images_that_a_strangers_atlas_names_are_not_opened(pictures, tmp_path):
    atlas = make_pictured_atlas(tmp_path / "a", str(pictures))
    assert find_image_source(atlas) is None
    images = ReferenceImages(atlas, None)
    assert images._read_image(0) is None
    with pytest.raises(SpecError, match=f"was not built on this machine, .* say so: --images {pictures}"):
        check_source(atlas)
    # The user says so.
    assert replace(images, source=str(pictures))._read_image(0).getpixel((0, 0)) == (200, 0, 0)
    # It was built here.
    record_build(atlas)
    assert check_source(atlas) == str(pictures)
    assert ReferenceImages(atlas, None)._read_image(0) is not None
    # The note is of these images and no others.
    other = make_pictured_atlas(tmp_path / "b", str(tmp_path))
    assert other.fingerprint == atlas.fingerprint
    assert find_image_source(other) is None


def test_drawn_scenes_need_no_note_and_endless_ones_end(tmp_path, monkeypatch):
    atlas = make_pictured_atlas(tmp_path / "a", "toyland:1")
    spec = {**atlas.about["spec"], "images": {**atlas.about["spec"]["images"], "limit": 10**17}}
    atlas = replace(atlas, about={**atlas.about, "spec": spec}, image_ids=("toyland:1:3",) * 5)
    monkeypatch.setattr(reference_images, "_MAX_IMAGES", 9)
    assert ReferenceImages(atlas, None)._read_image(0).mode == "RGB"


def test_thumbnails_are_shown_only_if_the_manifest_lists_them(base, tmp_path):
    files, red = Files(base), tmp_path / "red.jpg"
    Image.new("RGB", (8, 8), (255, 0, 0)).save(red)
    files.raw["thumbnails/000000.jpg"] = red.read_bytes()
    files.raw["thumbnails/000001.jpg"] = red.read_bytes()  # not listed
    files.raw["thumbnails/000003.jpg"] = b"no image"
    files.write(tmp_path / "a")
    atlas = Atlas.load(tmp_path / "a")
    images = ReferenceImages(atlas, SimpleNamespace())
    assert [images._read_image(number) is not None for number in (0, 1, 3)] == [True, False, False]
    assert set(atlas.thumbnails()) == {"000000.jpg", "000003.jpg"}
    (tmp_path / "a" / "thumbnails" / "000000.jpg").write_bytes(b"\xff\xd8\xff other")  # after loading
    assert atlas.thumbnail(0) is None


def test_a_revision_is_for_the_hub(base):
    with pytest.raises(AtlasError, match="revision is for atlases of the Hub"):
        Atlas.load(base, revision="main")


def test_no_other_commit_is_loaded_than_the_one_that_was_asked_for(base, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--me--x" / "snapshots" / ("b" * 40)
    Files(base).write(snapshot)
    monkeypatch.setattr(manifest, "_download", lambda *_: snapshot)
    assert manifest.download_atlas("me/x", "b" * 40) == manifest.download_atlas("me/x", "main") == snapshot
    with pytest.raises(AtlasError, match=f"'me/x' came as commit {'b' * 40}, not as {'c' * 40}; delete"):
        manifest.download_atlas("me/x", "c" * 40)


def test_files_beside_an_atlas_are_never_read(base, tmp_path):
    Files(base).write(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"\x80")
    assert len(Atlas.load(tmp_path / "a")) == 13


def test_the_hashes_of_these_cases_are_those_that_the_package_writes(base, tmp_path):
    Files(base).write(tmp_path / "a")
    written = json.loads((tmp_path / "a" / "manifest.json").read_text())
    content = {key: value for key, value in written.items() if key not in ("format", "files", "checksum")}
    assert manifest.write_manifest(tmp_path / "a", content) == written


def test_of_the_hub_only_files_of_an_atlas_are_downloaded(base, monkeypatch):
    own = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
    others = ["model.safetensors", "evil.py", "sub/manifest.json", "thumbnails/x.bin", ".gitattributes"]
    kept = set()

    def download(_id, *, allow_patterns, **_):
        kept.update(filter_repo_objects([*own, *others], allow_patterns=allow_patterns))
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert manifest.download_atlas("me/atlas", None) == base
    assert kept == own and any(name.startswith("thumbnails/") for name in own)


def test_a_command_to_copy_holds_no_other(pictures, tmp_path, monkeypatch):
    """The text of a stranger in it is one word for the shell."""
    text = "x; touch $(pwd)/y 'z"
    atlas = SimpleNamespace(name=text)
    monkeypatch.setattr(reference_images, "find_image_source", lambda _: None)
    monkeypatch.setattr(reference_images, "_image_spec", lambda _: {"source": text})
    with pytest.raises(SpecError) as caught:
        check_source(atlas)
    with pytest.raises(SpecError) as other:
        require_image(Recipe(name=text, atlas="toyland", steps=()))
    note = _note_far(atlas, text, "dog", 0.1)[0]
    commands = [str(caught.value).split("say so: ")[1][:-1], *(t.split("`")[1] for t in (str(other.value), note))]
    assert [shlex.split(command) for command in commands] == [
        ["--images", text],
        ["elude-steer", "run", text, "--image", "FILE"],
        ["elude-steer", "concepts", text, "--like", text],
    ]
