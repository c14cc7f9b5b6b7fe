"""Changed copies of good files for each loader. More by hand: `python demos/benchmarks/fuzz.py --loader NAME`."""

import pytest

from tests.helpers.fuzz import LOADERS, fuzz

# A few hundred in all; atlases have more in `tests/atlas/test_validate.py`.
CASES = {"recipe": 60, "spec": 40, "image": 150, "coco": 80, "judge": 80, "request": 150, "atlas": 10}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_refuses_in_its_own_words_or_accepts(name, tmp_path):
    outcome = fuzz(name, CASES[name], tmp_path)
    for seed, text in outcome.tracebacks:
        pytest.fail(f"seed {seed}: {text}")
    assert outcome.hangs == []
    assert outcome.refused + outcome.accepted == CASES[name]
    assert outcome.refused > CASES[name] / 10
