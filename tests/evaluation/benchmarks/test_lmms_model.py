import importlib
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elude_steer.errors import EludeSteerError, SpecError
from elude_steer.trust import UntrustedCodeError
from tests.helpers.checks import run_in_own_environment
from tests.helpers.strangers import Stranger


def test_the_entry_point_of_lmms_eval_needs_no_lmms_eval_to_be_found():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lmms_eval.models"].items()
    assert name == "elude_steer"
    assert callable(EntryPoint(name, value, "lmms_eval.models").load())


@pytest.mark.slow
def test_a_task_of_lmms_eval_in_its_own_environment():
    run_in_own_environment("lmms_check.py", "lmms")


@pytest.fixture
def lmms_model(monkeypatch):
    """The module, with a stand-in for lmms-eval's base class, which is not installed here."""
    name = "elude_steer.evaluation.benchmarks.lmms_model"
    base = ModuleType("lmms_eval.api.model")
    base.lmms = type("lmms", (), {})
    for module in ("lmms_eval", "lmms_eval.api"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "lmms_eval.api.model", base)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_an_atlas_whose_matcher_needs_code_loads_if_the_caller_says_so(lmms_model, tmp_path):
    stranger = Stranger(tmp_path)
    atlas = stranger.atlas(matcher="toyland/matcher")  # whose manifest says that it needs code
    for no in ({}, *({"trust_remote_code": value} for value in (False, "false", "no", "0", "", None, "maybe", 1))):
        with pytest.raises(UntrustedCodeError, match=r"matcher 'toyland/matcher' needs code of its own"):
            lmms_model.SteeredModel(atlas, minus="dog", **no)
    for yes in (True, "true", "True", "yes"):
        assert lmms_model.SteeredModel(atlas, minus="dog", trust_remote_code=yes).plan is not None


def test_code_of_a_matcher_runs_only_then(lmms_model, tmp_path):
    stranger = Stranger(tmp_path)
    atlas = stranger.atlas(matcher=stranger.matcher())
    with pytest.raises(UntrustedCodeError):
        lmms_model.SteeredModel(atlas, minus="dog")
    assert not stranger.code_ran
    with pytest.raises(EludeSteerError, match="the code ran"):
        lmms_model.SteeredModel(atlas, minus="dog", trust_remote_code="true")
    assert stranger.code_ran


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"do_sample": True, "temperature": 0.7},
            r"task 'pope' asks for do_sample=True, and edited answers are greedy",
        ),
        ({"temperature": 0.7}, r"asks for temperature=0.7, .*; add --gen_kwargs do_sample=False"),
        ({"num_beams": 4, "do_sample": False}, r"asks for num_beams=4"),
        ({"do_sample": False, "temperature": 0.7, "num_beams": 1, "top_p": None}, None),
        ({"temperature": 0, "num_beams": None}, None),
        ({"do_sample": "False"}, None),  # as some versions read it from the command line
        ({}, None),
    ],
)
def test_a_task_that_asks_for_other_decoding_is_refused(lmms_model, options, message):
    model = object.__new__(lmms_model.SteeredModel)
    good = SimpleNamespace(args=("What is it?", {}, None, 0, "pope", "test"))
    request = SimpleNamespace(args=("What is it?", options, None, 0, "pope", "test"))
    if message is None:
        assert lmms_model.check_greedy(options, "pope") is None
        return
    with pytest.raises(SpecError, match=message):  # before anything is answered
        model.generate_until([good, request])
