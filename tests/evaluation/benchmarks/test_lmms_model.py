import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.helpers.checks import run_in_own_environment


def test_the_entry_point_of_lmms_eval_needs_no_lmms_eval_to_be_found():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lmms_eval.models"].items()
    assert name == "elude_steer"
    assert callable(EntryPoint(name, value, "lmms_eval.models").load())


@pytest.mark.slow
def test_a_task_of_lmms_eval_in_its_own_environment():
    run_in_own_environment("lmms_check.py", "lmms")
