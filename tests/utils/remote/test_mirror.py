import json
from pathlib import Path

import pytest

from elude_steer.errors import StorageError
from elude_steer.utils.remote import mirror as module
from elude_steer.utils.remote.filesystems import check_url, is_url, join_url, open_filesystem
from elude_steer.utils.remote.mirror import Mirror, publish


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def machine(tmp_path, store, monkeypatch):
    """Call it with a name to get the folder of another machine, which remembers nothing of the others."""

    def start(name):
        monkeypatch.setattr(module, "_brought", {})
        monkeypatch.setattr(module, "_looked", set())
        (tmp_path / name).mkdir(exist_ok=True)
        return Mirror(tmp_path / name, store)

    return start


def write(mirror, **files):
    for name, text in files.items():
        (mirror.path / name).write_text(text)
    return [mirror.path / name for name in files]


def test_files_are_seen_elsewhere_once_their_marker_is_there(machine, tmp_path):
    here = machine("a")
    files = write(here, data="1", last="2")
    assert not here.has(files[-1])
    here.share(files)
    assert here.has(files[-1])
    there = machine("b")
    assert there.has(there.path / "last") and there.finished() == {"last"}
    there.bring()
    assert [(there.path / name).read_text() for name in ("data", "last")] == ["1", "2"]
    assert not list(there.path.glob("*.tmp-*"))


def test_what_was_half_written_is_not_taken(machine, tmp_path, monkeypatch):
    """The data is there, and the writer was killed before the marker."""
    here = machine("a")
    files = write(here, data="1", last="2")
    monkeypatch.setattr(Mirror, "_marker", staticmethod(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        here.share(files)
    monkeypatch.undo()
    assert (tmp_path / "store" / "data").exists()
    there = machine("b")
    there.bring()
    assert not there.has(there.path / "last") and list(there.path.iterdir()) == []


def test_damaged_files_and_markers_that_lead_out_are_refused(machine, tmp_path):
    here = machine("a")
    here.share(write(here, last="2"))
    (tmp_path / "store" / "last").write_text("3")
    with pytest.raises(StorageError, match=r"'file://.*/store/last' is damaged; delete it and run again"):
        machine("b").bring()
    assert not (tmp_path / "b" / "last").exists()
    for bad in (
        '{"../x": [1, "a"]}',
        '{"/etc/x": [1, "a"]}',
        '{"x": 1}',
        "[1]",
        "{",
        '{"..": [1, "a"]}',
        '{"": [1, "a"]}',
        "[" * 100_000,
    ):
        (tmp_path / "store" / "done" / "last.json").write_text(bad)
        with pytest.raises(StorageError, match=r"done/last' is damaged"):
            machine("c").bring()
    assert not (tmp_path / "x").exists()


def test_forgotten_files_leave_no_marker(machine, tmp_path):
    here = machine("a")
    files = write(here, one="1", two="2")
    here.share(files[:1])
    here.share(files[1:])
    here.forget(files[:1])
    assert machine("b").finished() == {"two"} and not (tmp_path / "store" / "one").exists()


def test_a_machine_that_gave_some_files_fetches_those_of_others(machine, tmp_path):
    """`once` counts looks, not what this process has written itself."""
    machine("b").share(write(machine("b"), theirs="1"))
    here = machine("a")
    here.share(write(here, mine="2"))
    here.bring(once=True)
    assert (here.path / "theirs").read_text() == "1"


def test_without_a_url_only_the_folder_counts(tmp_path):
    alone = Mirror(tmp_path)
    alone.share([tmp_path / "x"])
    alone.bring()
    assert not alone.has(tmp_path / "x") and alone.finished() is None
    (tmp_path / "x").write_text("1")
    assert alone.has(tmp_path / "x")


def test_an_atlas_is_published_with_its_manifest_last(tmp_path, store, monkeypatch):
    folder = tmp_path / "atlas"
    (folder / "thumbnails").mkdir(parents=True)
    for name in ("manifest.json", "z.json", "thumbnails/1.jpg"):
        (folder / name).write_text(name)
    filesystem, _ = open_filesystem(store)
    written, put = [], type(filesystem).put_file
    record = lambda self, source, target, **o: (written.append(Path(target).name), put(self, source, target, **o))  # noqa: E731
    monkeypatch.setattr(type(filesystem), "put_file", record)
    for _ in range(2):
        publish(folder, store, "manifest.json")
    assert written[-1] == "manifest.json" and sorted(set(written)) == ["1.jpg", "manifest.json", "z.json"]
    assert (tmp_path / "store" / "thumbnails" / "1.jpg").read_text() == "thumbnails/1.jpg"


@pytest.mark.parametrize("url", ["ftp://a/b", "zip://x::s3://a/b", "reference://x", "ssh://a/b", "simplecache::s3://b"])
def test_other_protocols_are_refused(url):
    with pytest.raises(StorageError, match="is not a URL that is read here; give one of s3://"):
        open_filesystem(url)


def test_a_store_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be read or written"):
        check_url(f"file://{tmp_path}/file/folder")
    check_url(f"file://{tmp_path}/new")
    assert list((tmp_path / "new").iterdir()) == []
    assert is_url("s3://a") and not is_url(tmp_path) and join_url("s3://a/", "b") == "s3://a/b"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"'s3://a/b' needs the package 's3fs'.*pip install 'elude-steer\[s3\]'"):
        open_filesystem("s3://a/b")


def test_markers_are_plain_json(machine, tmp_path):
    here = machine("a")
    here.share(write(here, last="2"))
    assert list(json.loads((tmp_path / "store" / "done" / "last.json").read_text())) == ["last"]


def test_a_local_file_of_the_right_size_and_other_content_is_fetched(machine):
    here = machine("a")
    here.share(write(here, data="1", last="2"))
    there = machine("b")
    write(there, data="x")
    there.bring()
    assert (there.path / "data").read_text() == "1"


def test_what_was_deleted_from_the_store_is_not_done(machine):
    here = machine("a")
    files = write(here, data="1", last="2")
    here.share(files)
    Mirror(here.path, here.url).forget(files)
    assert not here.has(files[-1])


def test_files_of_an_older_atlas_do_not_stay(tmp_path, store):
    (tmp_path / "store" / "thumbnails").mkdir(parents=True)
    for name in ("old.json", "thumbnails/1.jpg", "other.txt", "kept.json"):
        (tmp_path / "store" / name).write_text(name)
    (tmp_path / "outside").write_text("")
    names = ["old.json", "thumbnails/1.jpg", "gone", "kept.json", "../outside", "/etc/passwd", "a/../../outside", ""]
    (tmp_path / "store" / "manifest.json").write_text(json.dumps({"files": dict.fromkeys(names, "hash")}))
    folder = tmp_path / "atlas"
    folder.mkdir()
    for name in ("kept.json", "manifest.json"):
        (folder / name).write_text("{")
    publish(folder, store, "manifest.json")
    found = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert found == {"other.txt", "kept.json", "manifest.json"} and (tmp_path / "outside").exists()
    publish(folder, store, "manifest.json")  # over a manifest that cannot be read
    assert (tmp_path / "store" / "other.txt").exists()
