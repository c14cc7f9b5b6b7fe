"""A full disk, and a kill, at every call of the file system while an atlas is saved over another, or an edit exported.

Of the hundreds of calls of a build, a few are tried here in each run, others each day, and all of them with `-m slow`.
Builds are also killed in `tests/atlas/build/test_pipeline.py`, and at random moments by `demos/benchmarks/kills.py`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from safetensors import safe_open

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import EludeSteerError
from elude_steer.steering.export import export, export_adapter
from tests.helpers.atlases import make_atlas
from tests.helpers.faults import fault_at, full_disk, in_child, kill, no_room_after

THUMBNAILS = {"000000.jpg": b"\xff\xd8\xff\xe0" + bytes(60)}


def named(name):
    plain = make_atlas()
    return replace(plain, about={**plain.about, "name": name})


def count_calls(work):
    with fault_at(0, kill) as calls:
        work()
    return len(calls)


@pytest.fixture
def saved(tmp_path):
    """An old atlas, and how many calls it takes to save a new one over it."""
    target = tmp_path / "here" / "atlas"
    target.parent.mkdir()
    named("old").save(target, THUMBNAILS)
    calls = count_calls(lambda: named("new").save(target, THUMBNAILS))
    assert calls > 20  # the test finds some
    return target, calls


def test_a_full_disk_at_any_call_of_a_save_leaves_the_old_atlas_or_the_new_one(saved):
    target, calls = saved
    old, new, outcomes = named("old"), named("new"), []
    for number in range(1, calls + 1):
        old.save(target, THUMBNAILS)
        failed = False
        with fault_at(number, full_disk):
            try:
                new.save(target, THUMBNAILS)
            except EludeSteerError as error:
                failed = True
                assert "\n" not in str(error)
        outcomes.append(Atlas.load(target).name)
        left = [path for path in target.parent.iterdir() if path != target]
        # A disk that does not delete either keeps the old atlas, under a name that is never loaded.
        assert not left or (not failed and [path.name.startswith("atlas.old-") for path in left] == [True]), number
        for path in left:
            shutil.rmtree(path)
    assert set(outcomes) == {"old", "new"}


def test_a_kill_at_any_call_of_a_save_leaves_the_old_atlas_or_the_new_one(saved):
    target, calls = saved
    old, new, outcomes = named("old"), named("new"), []
    for number in range(1, calls + 1):
        old.save(target, THUMBNAILS)
        assert [path.name for path in target.parent.iterdir()] == ["atlas"], "leftovers are removed"

        def save_until(number=number):
            with fault_at(number, kill):
                new.save(target, THUMBNAILS)

        ended = in_child(save_until)
        assert ended in (0, -signal.SIGKILL)
        outcomes.append((ended, Atlas.load(target).name))  # loading puts back what had been moved aside
    assert {(-signal.SIGKILL, "old"), (-signal.SIGKILL, "new")} <= set(outcomes)
    assert all(name == "new" for ended, name in outcomes if ended == 0)


FORMS = {"adapter": export_adapter, "checkpoint": export}


@pytest.fixture(params=FORMS)
def write(request, steerer):
    """Exports an edit, in one of the two forms."""
    plan = steerer.plan(minus=["dog"], mode="scale", nu="all", kappa=3)
    return lambda out: FORMS[request.param](steerer, plan, out)


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("fault", ["disk", "kill"])
def test_an_export_is_there_whole_or_not_at_all(fault, write, tmp_path):
    calls = count_calls(lambda: write(tmp_path / "count"))
    whole = read(tmp_path / "count")
    assert calls > 8 and len(whole) in (3, 9)
    place = tmp_path / "here"
    place.mkdir()
    outcomes = set()
    for number in range(1, calls + 1):
        out = place / f"export-{number}"

        def export_until(number=number, out=out):
            with fault_at(number, full_disk if fault == "disk" else kill):
                write(out)

        if fault == "kill":
            assert in_child(export_until) == -signal.SIGKILL
        else:
            try:
                export_until()
                assert out.exists()  # the call only cleaned up, or took a lock
            except EludeSteerError as error:
                assert re.search("no room left|is not writable", str(error))
                assert "\n" not in str(error)
            assert all(path.name.startswith("export-") and ".tmp-" not in path.name for path in place.iterdir())
        if out.exists():
            assert read(out) == whole
            with safe_open(next(out.glob("*.safetensors")), "pt") as file:
                assert list(file.keys())
            assert all(json.loads(path.read_text()) for path in out.glob("*.json"))
        outcomes.add(out.exists())
    assert False in outcomes


def test_a_disk_that_fills_while_an_export_is_written_leaves_nothing(write, tmp_path):
    """The system's own limit also meets weights that are written by Rust."""
    write(tmp_path / "whole")
    sizes = sorted(len(data) for data in read(tmp_path / "whole").values())
    for limit in (0, 10, *sizes[:-1], sizes[-1] // 2, sizes[-1] - 1):
        with no_room_after(limit), pytest.raises(EludeSteerError, match=r"no room left|is not writable") as refused:
            write(tmp_path / "new")
        assert "\n" not in str(refused.value)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"], limit
    with no_room_after(sizes[-1]):
        assert read(write(tmp_path / "new")) == read(tmp_path / "whole")


def try_builds(folder, *options):
    """Let builds meet faults in a process of their own, because threads of this one would not survive a fork."""
    command = [sys.executable, "-m", "tests.helpers.build_faults", str(folder), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["calls"] > 200
    return found["outcomes"]


def test_builds_that_meet_a_full_disk_or_a_kill_go_on_to_the_same_bytes(tmp_path):
    today = int(time.time() / 86400)
    first = 1 + today * 37 % 80
    print(f"to repeat: --every 80 --first {first}")  # pytest shows it if the test fails
    outcomes = try_builds(tmp_path, "--every", 80, "--first", first)
    assert sum(count for found, count in outcomes.items() if found.startswith("kill: killed")) >= 4
    assert outcomes["disk: refused"] >= 3 and outcomes["size: refused"] >= 3


@pytest.mark.slow
def test_builds_that_meet_a_fault_at_any_call_go_on_to_the_same_bytes(tmp_path):
    outcomes = try_builds(tmp_path)
    assert outcomes["kill: killed"] > 200 and outcomes["kill: killed, atlas there"] > 0
    assert outcomes["disk: refused"] > 200
