import json
import os
import subprocess
import sys

import pytest

from elude_steer.errors import StorageError
from elude_steer.evaluation.result_files import compute_in_parts, load_or_make
from elude_steer.utils.files import unfinished_path

DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, "[1]", "3"])
def test_a_result_that_is_no_object_is_named(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(StorageError, match=r"a.json' is damaged; delete it"):
        load_or_make(tmp_path / "a.json", dict)


@pytest.mark.parametrize("text", [DEEP, "[1]", "3", '{"a": 1, "b": 2}'])
def test_a_part_that_is_no_list_or_too_short_is_named(text, tmp_path):
    (tmp_path / "part-000000.json").write_text(text)
    with pytest.raises(StorageError, match=r"part-000000.json' is damaged; delete it"):
        compute_in_parts(tmp_path, [1, 2], lambda part: list(part), "computing")


def test_what_a_killed_process_left_among_the_parts_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = unfinished_path(tmp_path / "part-000000.json").name.replace(f"tmp-{os.getpid()}", f"tmp-{dead.pid}")
    (tmp_path / name).write_text("[1")
    assert compute_in_parts(tmp_path, [1, 2], lambda part: list(part), "computing") == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["part-000000.json"]
    assert json.loads((tmp_path / "part-000000.json").read_text()) == [1, 2]
