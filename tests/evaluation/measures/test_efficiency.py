"""Costs of variants of a model."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from elude_steer.evaluation.measures.efficiency import measure_costs


@pytest.mark.parametrize("compiler", [None, lambda call: call], ids=["alternating", "one by one"])
def test_costs_are_relative_to_the_bare_model(compiler):
    work = [1]

    @contextmanager
    def heavy():
        work[0] = 6
        yield
        work[0] = 1

    x = torch.randn(300, 300)

    def call():
        for _ in range(work[0]):
            x @ x

    found = measure_costs(call, {"bare": nullcontext, "heavy": heavy}, warm_up=2, runs=15, compiler=compiler)
    assert list(found) == ["bare", "heavy"]
    assert found["bare"].slower == 0
    assert found["heavy"].slower > 1
    assert found["heavy"].milliseconds > found["bare"].milliseconds
    assert found["bare"].megabytes is None or found["bare"].megabytes > 10
    with pytest.raises(ValueError, match="at least one variant"):
        measure_costs(call, {})


def test_the_bare_model_is_measured_before_the_other_is_created():
    created = []

    @contextmanager
    def other():
        created.append(len(passes))
        yield

    passes = []

    def call():
        passes.append(torch.is_inference_mode_enabled())

    measure_costs(call, {"bare": nullcontext, "other": other}, warm_up=3, runs=2)
    assert created[0] == 4  # three warm-up passes, and the one whose peak counts
    assert all(passes)  # also the warm-up passes
