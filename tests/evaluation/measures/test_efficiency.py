"""Costs of variants of a model."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from elude_steer.evaluation.measures.efficiency import measure_costs
from elude_steer.method.layers import split_layer


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
    assert found["bare"].megabytes == pytest.approx(0.36)  # one product, freed before the next
    assert found["bare"].larger == found["heavy"].larger == 0
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
    assert created[0] == 5  # three warm-up passes, the first that is timed, and the one whose peak counts
    assert all(passes)  # also the warm-up passes


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_memory_is_that_of_weights_and_of_what_a_pass_allocates(compiled, capfd):
    model = nn.Sequential(nn.Linear(50, 1000, bias=False), nn.Linear(1000, 50, bias=False)).eval()
    tied, x = nn.Linear(50, 1000, bias=False), torch.randn(200, 50)
    tied.weight = model[0].weight
    model.add_module("2", nn.Sequential(nn.ReLU(), tied))  # the same weights count once
    held = torch.ones(10**7)  # what else the process has does not count
    call, compiler = (lambda: model(x)), torch.compile if compiled else None
    cost = measure_costs(call, {"bare": nullcontext}, warm_up=1, runs=1, compiler=compiler, model=model)["bare"]
    weights, wide, narrow = 4 * 2 * 50 * 1000, 4 * 200 * 1000, 4 * 200 * 50
    assert cost.megabytes == pytest.approx((weights + wide + 2 * narrow) / 1e6, rel=0.1)
    assert len(held) == 10**7 and "profiler" not in capfd.readouterr().err


@pytest.mark.parametrize("tokens", [3, 2000])
def test_the_explicit_layer_takes_the_memory_of_its_parts(tokens):
    """As in the paper, whose ELUDe takes 15 % more: the weights of the parts, and no more than another output."""
    base = nn.Linear(64, 32)
    members, units = torch.ones(32 * 8, 64, dtype=torch.bool), torch.arange(32).repeat_interleave(8)
    split, x = split_layer(base, members, units), torch.randn(tokens, 64)
    found = [
        measure_costs(partial(layer, x), {"": nullcontext}, warm_up=0, runs=1, model=layer) for layer in (base, split)
    ]
    bare, more = (one[""].megabytes for one in found)
    parts = 4 * (32 * 8 * 64 + 32 * 8) + 8 * 32 * 8
    assert more - bare == pytest.approx((parts + 4 * tokens * 32) / 1e6, rel=0.02)
