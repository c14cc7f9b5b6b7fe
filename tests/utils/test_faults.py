"""A full disk, and a kill, at every call of the file system while an atlas is saved over another, or an edit exported.

Builds are killed in `tests/atlas/build/test_pipeline.py`, and at random moments by `demos/benchmarks/kills.py`.
"""

import json
import re
import shutil
import signal
from dataclasses import replace

import pytest
from safetensors import safe_open

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import EludeSteerError
from elude_steer.steering.export import export_adapter
from tests.helpers.atlases import make_atlas
from tests.helpers.faults import fault_at, full_disk, in_child, kill

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


@pytest.mark.parametrize("fault", ["disk", "kill"])
def test_an_export_is_there_whole_or_not_at_all(fault, steerer, tmp_path):
    plan = steerer.plan(minus=["dog"], mode="scale", nu="all", kappa=3)
    calls = count_calls(lambda: export_adapter(steerer, plan, tmp_path / "count"))
    whole = {path.name: path.read_bytes() for path in (tmp_path / "count").iterdir()}
    assert calls > 8 and len(whole) == 3
    place = tmp_path / "here"
    place.mkdir()
    outcomes = set()
    for number in range(1, calls + 1):
        out = place / f"adapter-{number}"

        def export_until(number=number, out=out):
            with fault_at(number, full_disk if fault == "disk" else kill):
                export_adapter(steerer, plan, out)

        if fault == "kill":
            assert in_child(export_until) == -signal.SIGKILL
        else:
            try:
                export_until()
                assert out.exists()  # the call only cleaned up, or took a lock
            except EludeSteerError as error:
                assert re.search("no room left|is not writable", str(error))
            assert all(path.name.startswith("adapter-") and ".tmp-" not in path.name for path in place.iterdir())
        if out.exists():
            assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
            with safe_open(out / "adapter_model.safetensors", "pt") as file:
                assert list(file.keys())
            assert json.loads((out / "adapter_config.json").read_text())["peft_type"] == "LORA"
        outcomes.add(out.exists())
    assert False in outcomes
