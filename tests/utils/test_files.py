import errno
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors import SafetensorError

from elude_steer.errors import StorageError
from elude_steer.utils import files
from elude_steer.utils.files import (
    check_file,
    check_folder,
    hold,
    home,
    new_folder,
    read_bytes,
    read_json,
    remove_leftovers,
    restore,
    unfinished_path,
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
    mine = unfinished_path(tmp_path / "c").name
    for name in (mine.replace("c.", "a.").replace(f"tmp-{os.getpid()}", f"tmp-{dead.pid}"), mine, "d"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine, "d"]


# Other containers: their processes have other numbers, so that a number that does not run here says nothing.

FOREIGN = "-999999-1-00000000"


def test_what_another_container_writes_is_left_alone(tmp_path, monkeypatch):
    file, folder = tmp_path / f"a.tmp{FOREIGN}", tmp_path / f"b.tmp{FOREIGN}"
    file.write_text("")
    folder.mkdir()
    monkeypatch.setattr(files.time, "time", lambda now=time.time: now() + 3600)  # changes of a file's state are new
    with hold(file), hold(folder):
        remove_leftovers(tmp_path)
        assert file.exists() and folder.exists()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_has_just_been_begun_elsewhere_is_left_alone(tmp_path):
    (tmp_path / f"a.tmp{FOREIGN}").write_text("")
    (tmp_path / "b.tmp-999999").write_text("")  # of an earlier version, which holds no lock
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_moved_aside_elsewhere_comes_back_unless_it_is_being_replaced(tmp_path):
    aside = tmp_path / f"atlas.old{FOREIGN}"
    aside.mkdir()
    with hold(aside):
        restore(tmp_path / "atlas")
        assert aside.exists()
    restore(tmp_path / "atlas")
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]


def test_a_writer_in_another_container_keeps_its_file(tmp_path):
    """A process that pretends to be in another container cleans up while this one writes."""
    code = (
        "import sys, os; from pathlib import Path; from elude_steer.utils import files;"
        "files._place = lambda: 'ffffffff'; files._is_running = lambda pid: False;"
        "files.time.time = lambda now=files.time.time: now() + 3600;"
        "files.remove_leftovers(Path(sys.argv[1]))"
    )

    def clean(*_):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        return 0

    write_file(tmp_path / "a", lambda file: (file.write(b"whole"), clean()))
    assert (tmp_path / "a").read_bytes() == b"whole"
    with new_folder(tmp_path / "atlas") as folder:
        (folder / "x").write_text("whole")
        clean()
    assert (tmp_path / "atlas" / "x").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "atlas"]


# Places that cannot be written are noticed before the work


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path):
    for place in ("/proc", "/sys"):
        with pytest.raises(StorageError, match=rf"'{place}' is not writable \("):
            check_folder(f"{place}/atlas")
        with pytest.raises(StorageError, match=rf"'{place}' is not writable \("):
            check_file(f"{place}/report.html", (".html",))
    assert list(tmp_path.iterdir()) == []


def test_a_mounted_disk_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(files.Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(
        StorageError, match=r"'.*disk' is a mounted disk, which cannot be replaced; give a new folder in"
    ):
        check_folder(tmp_path / "disk", replaced=True)
    assert check_folder(tmp_path / "disk") == tmp_path / "disk"
    assert check_folder(tmp_path / "disk" / "atlas", replaced=True)


@pytest.mark.parametrize("check", [check_folder, lambda path: check_file(path, (".html",))])
def test_a_path_with_a_nul_is_refused(check):
    with pytest.raises(StorageError, match=r"'a\\x00b.html' is not the path of a"):
        check("a\0b.html")


def test_a_full_disk_that_safetensors_reports_is_told_in_one_line(tmp_path):
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    message = r"no room left while writing '.*checkpoint'"
    with pytest.raises(StorageError, match=message), new_folder(tmp_path / "checkpoint"):
        raise SafetensorError(text)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe or a device, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a pipe or a device, not a file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(bytes(1_000_001)), "it has more than 1 MB"),
    ],
)
def test_what_never_ends_or_is_too_large_is_not_read(make, message, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(OSError, match=message):
        read_bytes(tmp_path / "x", 1_000_000)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "3", '{"a": 1}', "\xff"])
def test_json_of_this_package_that_is_damaged_is_named(text, tmp_path):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(StorageError, match=r"x\.json' is damaged; delete it and run the same command again"):
        read_json(tmp_path / "x.json", dict, ("a", "b"))


def test_json_of_this_package_has_its_kind_and_keys(tmp_path):
    for content, kind, keys in (({"a": 1}, dict, ("a",)), (0.5, (int, float), ()), (3, int, ()), ([], None, ())):
        (tmp_path / "x.json").write_text(json.dumps(content))
        assert read_json(tmp_path / "x.json", kind, keys) == content


def test_files_are_read_whole(tmp_path):
    (tmp_path / "x").write_bytes(b"x" * 1_000_000)
    assert len(read_bytes(tmp_path / "x", 1_000_000)) == 1_000_000
    assert read_bytes("/proc/self/status", 1_000_000).startswith(b"Name:")  # the system says that it has 0 bytes


def test_a_pipe_with_the_name_of_a_leftover_blocks_nothing(tmp_path):
    for kind in ("tmp", "old"):
        os.mkfifo(tmp_path / f"atlas.{kind}-999999-1-00000000")
    restore(tmp_path / "atlas")
    remove_leftovers(tmp_path, "atlas")
    assert not (tmp_path / "atlas").exists()


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


def test_a_mapped_array_takes_its_room_before_it_is_written(tmp_path, monkeypatch):
    """Where a full disk meets the memory of a mapped file, the system ends the process with a bus error."""
    with files.new_array(tmp_path / "a.npy", (3, 4)) as array:
        array[:] = 7
        assert [path.name for path in tmp_path.iterdir()] != ["a.npy"]
    assert (np.load(tmp_path / "a.npy") == np.full((3, 4), 7, np.float32)).all()

    def refuse(number):
        def fallocate(_descriptor, start, length):
            assert (start, length > 48) == (0, True)
            raise OSError(number, os.strerror(number))

        return fallocate

    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"no room left while writing '.*b\.npy'"):
        files.new_array(tmp_path / "b.npy", (3, 4)).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    with files.new_array(tmp_path / "b.npy", (3, 4)):
        pass
    assert (tmp_path / "b.npy").exists()
