import os
import resource
import subprocess
import sys

import pytest

from elude_steer.errors import StorageError
from elude_steer.utils.files import (
    check_file,
    check_folder,
    home,
    new_folder,
    remove_leftovers,
    write_file,
    write_image,
)


def test_a_file_appears_only_when_complete(tmp_path):
    def fail_half_way(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a", fail_half_way)
    assert list(tmp_path.iterdir()) == []
    write_file(tmp_path / "deep" / "a", lambda file: file.write(b"whole"))
    assert (tmp_path / "deep" / "a").read_bytes() == b"whole"


def test_a_failed_rewrite_keeps_the_old_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError):
        write_file(tmp_path / "a", lambda file: 1 / 0)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_failed_folder_keeps_the_old_one(tmp_path):
    target = tmp_path / "atlas"
    with new_folder(target) as folder:
        (folder / "x").write_text("old")
    with pytest.raises(ZeroDivisionError), new_folder(target) as folder:
        (folder / "x").write_text("new")
        _ = 1 / 0
    assert (target / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]
    with new_folder(target) as folder:
        (folder / "x").write_text("new")
    assert (target / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]


def test_only_leftovers_of_dead_processes_are_deleted(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"a.tmp-{dead.pid}", f"b.tmp-{dead.pid}-123", f"c.tmp-{os.getpid()}", "d"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"c.tmp-{os.getpid()}", "d"]


def test_a_full_disk_is_reported_in_one_line(tmp_path):
    # A limit on file sizes makes a write fail half way, as a full disk does.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            StorageError, match=r"no room left while writing '.*big' \(\d+ MB free\); free some and run"
        ):
            write_file(tmp_path / "big", lambda file: file.write(b"x" * 100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("ELUDE_STEER_HOME")
    assert home().is_absolute()


# Outputs: the folder they go into must be there


def test_an_output_needs_a_folder_that_is_there(tmp_path):
    assert check_file(tmp_path / "x.png", (".png",)) == tmp_path / "x.png"
    assert check_folder(tmp_path / "new") == tmp_path / "new"
    assert check_folder(tmp_path, new=True) == tmp_path
    for call in (
        lambda: check_file(tmp_path / "no" / "x.png", (".png",)),
        lambda: check_folder(tmp_path / "no" / "new"),
    ):
        with pytest.raises(StorageError, match=r"there is no folder '.*/no' for '.*'; make it first, or give another"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: check_file(folder / "x.xyz", (".png", ".jpg")), r"does not end in \.png or \.jpg"),
        (lambda folder: check_file(folder / "is.png", (".png",)), "is a folder; give the name of a file"),
        (lambda folder: check_file(folder / f"{'x' * 300}.png", (".png",)), "is too long for the name of a file"),
        (lambda folder: check_folder(folder / "file"), "is a file, not a folder"),
        (lambda folder: check_folder(folder, new=True), "already exists and is not an empty folder"),
        (lambda folder: check_folder(folder / "file" / "x"), "there is no folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, call, message):
    (tmp_path / "is.png").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=message):
        call(tmp_path)


def test_an_image_has_the_format_of_its_ending(tmp_path):
    from PIL import Image

    for name, kind in (("a.png", "PNG"), ("a.JPG", "JPEG")):
        write_image(tmp_path / name, Image.new("RGBA", (4, 4)))
        with Image.open(tmp_path / name) as image:
            assert image.format == kind
