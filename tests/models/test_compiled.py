"""Edits in compiled models. The backend `eager` runs no compiler of kernels: the graphs are the same."""

import pytest
import torch
from torch import nn

from elude_steer.models.execution.compiled import is_compiled
from elude_steer.models.hooks import record, record_output, replace_forward, watch_inputs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


@pytest.fixture
def model(no_hooks_left):
    torch.compiler.reset()
    torch.manual_seed(0)
    yield no_hooks_left(nn.Sequential(Block(), Block(), nn.Linear(8, 4)).eval())
    torch.compiler.reset()


@pytest.fixture
def x():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def edit(original, x):
    return original(x) * 2 + 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fullgraph", [True, False])
@torch.inference_mode()
def test_an_edit_acts_in_a_compiled_model_and_leaves_its_code(model, x, when, fullgraph):
    layer, plain = model[0].fc2, model(x)
    with replace_forward(layer, edit):
        expected = model(x)
    assert not torch.equal(expected, plain)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    if when == "after":
        assert torch.equal(compiled(x), plain)
    for _ in range(2):
        with replace_forward(layer, edit):
            assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), plain)


@torch.inference_mode()
def test_many_edits_need_no_more_than_two_compilations(model, x):
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    compiled(x)
    for factor in range(12):  # more than torch's limit of recompilations
        with replace_forward(model[0].fc2, lambda original, x, factor=factor: original(x) * factor):
            found = compiled(x)
        with replace_forward(model[0].fc2, lambda original, x, factor=factor: original(x) * factor):
            assert torch.equal(found, model(x))
    compiled(x)
    assert len(graphs) == 2


@torch.inference_mode()
def test_inputs_and_outputs_of_a_compiled_model_are_recorded(model, x):
    with record(model[1].fc2) as expected:
        model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x)
    with record(model[1].fc2) as recorded:
        compiled(x)
    assert torch.equal(recorded.input, expected.input)
    with record(model[1].fc2, stop=False) as recorded:
        assert torch.equal(compiled(x), model(x))
    assert len(recorded.inputs) == 2
    with record_output(model[0].fc2) as outputs:
        compiled(x)
    assert outputs[0].shape == (3, 5, 8)


@torch.inference_mode()
def test_a_module_that_is_no_linear_layer_breaks_the_graph(model, x):
    compiled, calls = torch.compile(model, backend="eager"), []
    compiled(x)
    with replace_forward(model[1], lambda original, x: calls.append(1) or original(x) + 1):
        assert torch.equal(compiled(x), model(x))
    assert len(calls) == 2


@torch.inference_mode()
def test_a_module_compiled_in_place_stays_compiled(model, x):
    plain = model(x)
    model[0].compile(backend="eager", fullgraph=True)
    code = model[0]._compiled_call_impl
    with replace_forward(model[0], edit), watch_inputs(model[0], lambda kwargs: None):
        assert not torch.equal(model(x), plain)
    assert model[0]._compiled_call_impl is code
    assert torch.equal(model(x), plain)
    assert is_compiled(model, "0.fc2")
    assert not is_compiled(model, "1.fc2")
    model.forward = torch.compile(model.forward, backend="eager")
    assert is_compiled(model, "1.fc2")
    del model.forward
    assert not is_compiled(model, "1.fc2")
