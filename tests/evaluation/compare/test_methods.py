"""The registry of methods."""

import json
from pathlib import Path

import pytest

import elude_steer
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines import SAE_KINDS
from elude_steer.evaluation.compare.methods import ELUDE, METHODS, Size, check_seeds, find_methods

RESULTS = Path(elude_steer.__file__).parents[1] / "demos" / "results" / "toyland.json"


def test_every_kind_of_dictionary_is_registered():
    assert [method.variant for method in METHODS.values() if method.kind == "sae"] == list(SAE_KINDS)
    assert len(METHODS) == 2 + 1 + 3 + len(SAE_KINDS) + 2
    supervised = [method.name for method in METHODS.values() if method.supervised]
    assert supervised == ["difference of means (supervised)", "DPCiCNN (supervised)"]
    assert (ELUDE.name, ELUDE.number) == ("ELUDe (gap)", 0)
    assert [method.number for method in METHODS.values()] == list(range(len(METHODS)))


def test_names_are_those_of_the_published_results():
    names = dict.fromkeys(row["method"] for row in json.loads(RESULTS.read_text(encoding="utf-8")))
    assert list(names) == list(METHODS)[: len(names)]  # new methods stand at the end


def test_unknown_methods_are_refused():
    assert [method.name for method in find_methods(["raw units", "topk SAE"])] == ["raw units", "topk SAE"]
    with pytest.raises(SpecError, match="there is no method 'magic'; there are ELUDe"):
        find_methods(["magic"])


def test_unknown_seeds_are_refused():
    assert check_seeds(Size(), None) == check_seeds(Size(), ()) == [42, 123, 999]
    assert check_seeds(Size(), (999,)) == [999]
    with pytest.raises(SpecError, match="there is no seed 7 in the comparison; there are 42, 123, 999"):
        check_seeds(Size(), (42, 7))


def test_sizes_keep_the_keys_of_existing_work_folders():
    keys = ["seeds", "pictures", "scenes", "many", "tuning", "epochs", "trials", "grid", "runs"]
    assert list(Size().to_dict()) == keys
    assert Size().seeds == (42, 123, 999)
