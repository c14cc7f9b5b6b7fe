import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.manifest_rules import READ
from elude_steer.errors import AtlasError, StorageError
from elude_steer.method.layers import SplitLinear
from elude_steer.utils.files import unfinished_path
from tests.helpers.atlases import make_atlas
from tests.helpers.hub import serve_hub
from tests.helpers.liars import make_full_atlas


@pytest.fixture
def layer():
    torch.manual_seed(3)
    return nn.Linear(21, 6)


@pytest.fixture
def atlas(layer):
    return make_atlas(layer=layer)


def test_an_atlas_survives_saving_and_loading(atlas, tmp_path):
    loaded = Atlas.load(atlas.save(tmp_path / "a"))
    assert torch.equal(loaded.members(), atlas.members())
    for name in ("units", "rho", "sizes"):
        assert torch.equal(getattr(loaded, name), getattr(atlas, name))
    for name in References.__dataclass_fields__:
        assert torch.equal(getattr(loaded.references, name), getattr(atlas.references, name))
        assert torch.equal(getattr(loaded.unit_references, name), getattr(atlas.unit_references, name))
    assert loaded.image_ids == atlas.image_ids
    assert loaded.about["layer"] == "fc2"
    assert repr(loaded) == "Atlas('small': 13 sub-units of 6 units, layer 'fc2')"
    loaded.save(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_weights_of_sub_units_equal_those_of_the_split_layer(atlas, layer):
    assert [list(atlas.sub_units_of(unit)) for unit in (0, 1, 5)] == [[0], [1, 2, 3], [12]]
    with pytest.raises(AtlasError, match="has units 0 to 5, not 6"):
        atlas.sub_units_of(6)
    split = SplitLinear(layer, atlas.members(), atlas.units)
    numbers = [7, 2, 2, 12]
    weight, bias = atlas.parameters(numbers, layer.weight.detach(), layer.bias.detach())
    assert torch.equal(weight, split.weight[numbers])
    assert torch.equal(bias, split.bias[numbers])
    assert weight.shape == (4, 21)


def test_a_sub_unit_without_dimensions_is_dead(atlas):
    packed = atlas.packed.clone()
    packed[2] = 0
    assert (
        Atlas(packed, *[getattr(atlas, f) for f in list(Atlas.__dataclass_fields__)[1:]]).dead.tolist().index(True) == 2
    )
    assert not atlas.dead.any()


def test_an_atlas_of_other_weights_is_refused(atlas, layer):
    atlas.check(layer)
    atlas.check(layer.to(torch.bfloat16))  # the same model in half precision is the same model
    torch.manual_seed(4)
    with pytest.raises(
        AtlasError, match=r"built for other weights of this layer \(hash [0-9a-f]{8}…, loaded [0-9a-f]{8}…"
    ):
        atlas.check(nn.Linear(21, 6))


def test_a_flipped_byte_in_any_file_but_the_card_is_found(tmp_path):
    folder = make_full_atlas(tmp_path / "a")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    assert {path.relative_to(folder).as_posix() for path in files} > {"manifest.json", *READ}
    assert sum(path.suffix == ".jpg" for path in files) == 2
    for number, path in enumerate(files):
        data, name = path.read_bytes(), path.relative_to(folder).as_posix()
        drawn = random.Random(number).sample(range(len(data)), 8)
        for at in {0, *drawn, len(data) - 1}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises(AtlasError, match=f"is damaged: '{name}' has changed since it was written"):
                Atlas.load(folder)
        path.write_bytes(data)
    Atlas.load(folder)


def test_missing_files_and_atlases_are_explained(atlas, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    folder = atlas.save(tmp_path / "home" / "atlases" / "small")
    assert len(Atlas.load("small")) == 13
    (folder / "images.json").unlink()
    with pytest.raises(AtlasError, match=r"has no file 'images\.json'"):
        Atlas.load("small")
    with pytest.raises(AtlasError, match=r"no atlas 'smal': .* Did you mean 'small'\? `elude-steer atlases list`"):
        Atlas.load("smal")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AtlasError, match=r"is not an atlas: it has no manifest\.json"):
        Atlas.load(tmp_path / "empty")


def test_another_format_is_refused(atlas, tmp_path):
    from elude_steer.atlas import manifest

    folder = atlas.save(tmp_path / "a")
    content = json.loads((folder / "manifest.json").read_text())
    content["format"] = 2
    content["checksum"] = manifest._checksum(content)
    (folder / "manifest.json").write_text(manifest._text(content))
    with pytest.raises(AtlasError, match="has format 2, this version reads 1"):
        Atlas.load(folder)


def test_a_failed_save_leaves_nothing_or_the_old_atlas(atlas, tmp_path, monkeypatch):
    from elude_steer.atlas import atlas as module

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_manifest", full)
        with pytest.raises(StorageError, match="no room left while writing"):
            atlas.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    atlas.save(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_manifest", full)
        with pytest.raises(StorageError):
            make_atlas(seed=5).save(tmp_path / "a")
    assert torch.equal(Atlas.load(tmp_path / "a").packed, atlas.packed)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_written_is_explained(atlas, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        atlas.save(tmp_path / "file" / "a")


PUSH_AND_PULL = """
import sys, shutil, torch
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import AtlasError
saved = Atlas.load(sys.argv[1])
print(saved.push_to_hub("me/small", token="hf_test"))
bits = saved.packed.clone()
shutil.rmtree(sys.argv[1])
print(torch.equal(Atlas.from_pretrained("me/small").packed, bits))
pinned = Atlas.load("me/small", revision="a" * 40)
print(pinned.commit, pinned.downloaded)
try:
    Atlas.load("me/small", revision="b" * 40)
except AtlasError as error:
    print(error)
try:
    Atlas.load("me/other")
except AtlasError as error:
    print(error)
"""


def test_an_atlas_is_pushed_to_the_hub_and_loaded_from_it(atlas, tmp_path):
    folder = atlas.save(tmp_path / "a")
    with serve_hub(tmp_path / "hub") as endpoint:
        # The library reads its endpoint when it is imported, so this takes a process of its own.
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", PUSH_AND_PULL, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    address, same, pinned, refused, missing, *_ = [*done.stdout.splitlines(), done.stderr, *[""] * 4]
    assert "me/small/commit/" in address
    assert same == "True"
    assert pinned == f"{'a' * 40} True"
    assert f"{'b' * 40}' is not an atlas" in refused  # the server has only the other commit
    assert "'me/other' is neither installed nor on the Hub" in missing
    with pytest.raises(AtlasError, match="save the atlas before pushing it"):
        atlas.push_to_hub("me/small")


def test_files_of_the_user_are_never_replaced(atlas, tmp_path, monkeypatch):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years")
    with pytest.raises(
        StorageError, match=r"holds other files \('thesis\.tex'\), which would be lost; give a new folder"
    ):
        atlas.save(folder)
    assert (folder / "thesis.tex").read_text() == "years"
    saved = atlas.save(tmp_path / "a")
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"holds other files \('notes\.txt'\)"):
        atlas.save(saved)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="is a file; give a new folder"):
        atlas.save(tmp_path / "file")
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(StorageError, match="is a link"):
        atlas.save(tmp_path / "link")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "..", "/"):
        with pytest.raises(StorageError, match=r"give a new folder|holds other files"):
            atlas.save(name)
    assert (saved / "notes.txt").exists()


@pytest.mark.parametrize("name", ["manifest.json", "labels.json"])
def test_line_ends_that_git_changed_are_named(tmp_path, name):
    saved = make_full_atlas(tmp_path / "mine")
    assert "`* -text` into `.gitattributes`" in (saved / "README.md").read_text()
    (saved / name).write_bytes((saved / name).read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(AtlasError, match=rf"'{name}' has other line ends \(CRLF\).* `\* -text` into the file .gitattr"):
        Atlas.load(saved)


def test_a_save_killed_between_its_two_renames_is_undone(atlas, tmp_path):
    saved = atlas.save(tmp_path / "mine")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ending = unfinished_path(saved).name.partition(f"tmp-{os.getpid()}")[2]
    saved.rename(tmp_path / f"mine.old-{dead.pid}{ending}")
    (tmp_path / f"mine.tmp-{dead.pid}{ending}").mkdir()
    assert len(Atlas.load(tmp_path / "mine")) == 13
    atlas.save(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("numbers", [[-1], [13], [0, 99]])
def test_missing_sub_units_are_refused(atlas, layer, numbers):
    with pytest.raises(AtlasError, match="has sub-units 0 to 12, not"):
        atlas.parameters(numbers, layer.weight.detach(), layer.bias.detach())


def test_parameters_of_no_sub_units_and_of_a_convolution(atlas, layer):
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert [tuple(t.shape) for t in atlas.parameters([], weight, bias)] == [(0, 21), (0,)]
    assert torch.equal(atlas.parameters([3], weight[:, :, None, None], bias)[0], atlas.parameters([3], weight, bias)[0])
