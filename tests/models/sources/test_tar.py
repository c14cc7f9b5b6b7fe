import io
import os
import tarfile

import pytest

from elude_steer.errors import ImageError, SpecError, StorageError
from elude_steer.models.images import image_set
from elude_steer.models.sources import patterns, tar


@pytest.fixture(autouse=True)
def temporary_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


def pack(folder, target, count):
    """Pack a folder's images into so many shards, with a label beside each image as WebDataset has it."""
    paths = sorted(path for path in folder.rglob("*.png"))
    size = -(-len(paths) // count)
    target.mkdir()
    for number in range(count):
        with tarfile.open(target / f"{number:03d}.tar", "w") as shard:
            for path in paths[number * size : (number + 1) * size]:
                shard.add(path, f"./{path.relative_to(folder).as_posix()}")
                add(shard, path.with_suffix(".cls").name, b"7")
    return f"{target}/{{000..{count - 1:03d}}}.tar"


def add(shard, name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    shard.addfile(info, io.BytesIO(data))


def save(path, *members):
    with tarfile.open(path, "w") as shard:
        for name, data in members:
            add(shard, name, data)
    return str(path)


def test_images_are_those_of_the_folder(image_folder, tmp_path):
    pattern = pack(image_folder, tmp_path / "shards", 3)
    folder, shards = image_set(image_folder), image_set(pattern)
    wildcard = image_set(f"{tmp_path}/shards/*.tar")
    assert shards.length == folder.length == 40 and shards.fingerprint == wildcard.fingerprint
    for one, other in zip(folder.items(), shards.items(), strict=True):
        assert (one.index, one.id) == (other.index, other.id)
        (image, digest), (same, same_digest) = one.read(), other.read()
        assert digest == same_digest and image.tobytes() == same.tobytes()
    assert [item.id for item in shards.select(range(30, 5, -10))] == [
        item.id for item in list(folder.items())[30:5:-10]
    ]
    assert image_set(pattern, limit=7).length == 7
    assert image_set(pattern, limit=7).fingerprint != shards.fingerprint


def test_images_in_order_are_fetched_together(image_folder, tmp_path, monkeypatch):
    shards = image_set(pack(image_folder, tmp_path / "shards", 2))
    fetched, fetch = [], tar.TarShards._fetch
    monkeypatch.setattr(tar.TarShards, "_fetch", lambda self, *a: fetched.append(a[0].name) or fetch(self, *a))
    for item in shards.items():
        item.read()
    assert len(fetched) <= 4
    fetched.clear()
    for item in shards.select(range(0, 40, 9)):
        item.read()
    assert len(fetched) == 5


def test_shards_with_equal_names_are_told_apart(tmp_path, image_folder):
    png = next(image_folder.rglob("*.png")).read_bytes()
    for name in "ab":
        save(tmp_path / f"{name}.tar", ("0.png", png))
    assert [item.id for item in image_set(f"{tmp_path}/*.tar").items()] == ["a/0.png", "b/0.png"]
    save(tmp_path / "c.tar", ("0.png", png), ("0.png", png))
    with pytest.raises(ImageError, match="holds several images of one name"):
        image_set(f"{tmp_path}/c.tar")


@pytest.mark.parametrize("name", ["../../etc/x.png", "/etc/x.png", "a" * 600 + ".png", "a\\..\\b.png"])
def test_names_that_lead_out_or_are_too_long_are_refused(name, tmp_path):
    with pytest.raises(ImageError, match=r"is not a sound tar file \(the name .* is too long, or leads out"):
        image_set(save(tmp_path / "x.tar", (name, b"1")))


def test_names_are_printed_escaped(tmp_path):
    images = image_set(save(tmp_path / "x.tar", ("a\x1b[31m\n.png", b"1")))
    assert [item.id for item in images.items()] == ["a\\x1b[31m\\n.png"]


def test_links_devices_and_hidden_files_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as shard:
        add(shard, "link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(shard, "hard.png", type=tarfile.LNKTYPE, linkname="/etc/passwd")
        add(shard, "pipe.png", type=tarfile.FIFOTYPE)
        add(shard, "._a.png", b"1")
        add(shard, "a.txt", b"1")
    with pytest.raises(ImageError, match="hold no images"):
        image_set(f"{tmp_path}/x.tar")


def test_nothing_is_unpacked(image_folder, tmp_path):
    pattern = pack(image_folder, tmp_path / "shards", 2)
    for item in image_set(pattern).items():
        item.read()
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".tar", ".json"}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax", "longname"])
def test_a_header_of_gigabytes_is_not_read(kind, tmp_path):
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 5_000_000_000
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
        file.truncate(5_000_010_000)  # of holes
    with pytest.raises(ImageError, match=r"not a sound tar file .*too long"):
        image_set(str(path))


def test_a_member_that_leads_back_or_out_ends(tmp_path):
    """A size below zero once made tarfile read one header for ever."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    for size in (-512, 10**9):
        header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path = tmp_path / f"{size}.tar"
        path.write_bytes(bytes(header) + b"\0" * 4096)
        with pytest.raises(ImageError, match="not a sound tar file"):
            image_set(str(path))


def test_cut_compressed_missing_and_empty_shards_are_one_line(tmp_path, image_folder):
    png = next(image_folder.rglob("*.png")).read_bytes()
    path = tmp_path / "x.tar"
    whole = save(path, ("0.png", png * 20), ("1.png", png))
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ImageError, match="not a sound tar file"):
        image_set(whole)
    (tmp_path / "y.tar").write_text("no tar at all, but some text " * 40)
    with pytest.raises(ImageError, match="not a sound tar file"):
        image_set(f"{tmp_path}/y.tar")
    with pytest.raises(ImageError, match=r"is compressed, and .* give plain \.tar files"):
        image_set("photos.tar.gz")
    with pytest.raises(ImageError, match=r"there is no '.*/\d+\.tar'"):
        image_set(f"{tmp_path}/{{00..03}}.tar")
    with pytest.raises(ImageError, match="no file fits"):
        image_set(f"{tmp_path}/none*.tar")
    with pytest.raises(
        ImageError, match=r"behind a URL, images are read from tar shards: give 's3://b/photos/\*\.tar'"
    ):
        image_set("s3://b/photos/")


def test_a_large_member_is_left_out_and_a_changed_shard_is_noticed(tmp_path, image_folder, monkeypatch):
    png = next(image_folder.rglob("*.png")).read_bytes()
    path = tmp_path / "x.tar"
    images = image_set(save(path, ("0.png", png), ("1.png", png)))
    with monkeypatch.context() as patch:
        patch.setattr(tar, "MAX_MEMBER", 3)
        with pytest.raises(ImageError, match="are more than 3"):
            next(images.items()).read()
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(StorageError, match="has changed since its images were listed"):
        list(images.items())[1].read()


def test_patterns():
    assert patterns.expand("a/{08..11}.tar") == ["a/08.tar", "a/09.tar", "a/10.tar", "a/11.tar"]
    assert patterns.expand("{0..1}-{0..1}.tar") == ["0-0.tar", "0-1.tar", "1-0.tar", "1-1.tar"]
    for bad, why in {"{3..1}.tar": "is empty", "{0..99999999}.tar": "more than", "{a,b}.tar": "braces"}.items():
        with pytest.raises(ImageError, match=why):
            patterns.expand(bad)
    with pytest.raises(ImageError, match="stands for more than"):
        patterns.expand("{0..9999}{0..9999}.tar")
    with pytest.raises((StorageError, SpecError), match="is not a URL that is read here"):
        image_set("ftp://a/{0..1}.tar")


@pytest.mark.parametrize("bad", ["{0..1}" * 2000, "{0.." + "9" * 5000 + "}", "{" + "0" * 4000 + "..99999}"])
def test_patterns_that_ask_for_much_are_refused_in_one_short_line(bad):
    with pytest.raises(ImageError, match="8 ranges, or a number of more than 18 digits; write fewer") as refused:
        patterns.expand(f"{bad}.tar")
    assert len(str(refused.value)) < 200


def test_a_pipe_is_no_shard(tmp_path):
    """It would be waited for without end."""
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(ImageError, match=r"a.tar' is not a file whose size is known"):
        patterns.list_shards(str(tmp_path / "a.tar"))
