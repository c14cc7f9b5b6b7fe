import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
import torch
from torch import nn

from elude_steer.errors import LayerError
from elude_steer.method.layers import is_linear
from elude_steer.models import hooks
from elude_steer.models.hooks import (
    block_of,
    find_layer,
    find_stream_scale,
    record,
    replace_forward,
    swap_module,
    watch_inputs,
)
from elude_steer.steering.intervention import divide_by_scale
from tests.conftest import model_state


class Block(nn.Module):
    """Two linear layers around an activation, and an identity at the end; tests replace parts by modules that fail."""

    def __init__(self, width=4):
        super().__init__()
        self.fc1 = nn.Linear(width, 6)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(6, width)
        self.last = nn.Identity()

    def forward(self, x):
        return x + self.last(self.fc2(self.act(self.fc1(x))))


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.fixture
def model(no_hooks_left):
    torch.manual_seed(0)
    return no_hooks_left(Block().eval())


@pytest.fixture
def x():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


def test_record_keeps_the_input_and_stops_at_the_layer(model, x):
    reached = []
    handle = model.last.register_forward_hook(lambda *_: reached.append("after the layer"))
    with record(model.fc2) as recorded:
        model(x)
        reached.append("after the call")
    handle.remove()
    assert torch.equal(recorded.input, model.act(model.fc1(x)))
    assert reached == []


def test_record_without_stop_lets_the_model_finish(model, x):
    expected = model(x)
    with record(model.fc2, stop=False) as recorded:
        assert torch.equal(model(x), expected)
        model(2 * x)
    assert len(recorded.inputs) == 2
    assert torch.equal(recorded.inputs[1], model.act(model.fc1(2 * x)))


def test_record_works_with_keyword_arguments(model, x):
    with record(model.fc1) as recorded:
        model.fc1(input=x)
    assert torch.equal(recorded.input, x)


def test_recorded_inputs_are_detached(model, x):
    with record(model.fc2) as recorded:
        model(x)
    assert not recorded.input.requires_grad


@pytest.mark.parametrize("calls", [0, 2])
def test_input_raises_unless_the_layer_ran_exactly_once(model, x, calls):
    with record(model.fc2, stop=False) as recorded:
        for _ in range(calls):
            model(x)
    with pytest.raises(
        LayerError, match=rf"the layer ran {calls} times in this forward pass; it must run exactly once"
    ):
        _ = recorded.input


def test_a_model_that_catches_exceptions_does_not_catch_the_stop(x, no_hooks_left):
    class Careful(Block):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:  # noqa: BLE001
                return x

    model = no_hooks_left(Careful())
    with record(model.fc2) as recorded:
        model(x)
        pytest.fail("the forward pass went on")
    assert len(recorded.inputs) == 1


def test_swap_module_puts_the_old_module_back(no_hooks_left, x):
    inner = no_hooks_left(nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    old, new = inner[1][0], nn.Identity()
    order = [name for name, _ in inner.named_modules()]
    expected = inner(x)
    with swap_module(inner, "1.0", new) as given:
        assert given is new
        assert inner[1][0] is new
        assert torch.equal(inner(x), inner[0](x).relu())
    assert inner[1][0] is old
    assert [name for name, _ in inner.named_modules()] == order
    assert torch.equal(inner(x), expected)


def test_swap_module_of_a_direct_child(model, x):
    with swap_module(model, "fc2", nn.Linear(6, 4)):
        pass
    assert isinstance(model.fc2, nn.Linear)


MANAGERS = {
    "record": lambda model: record(model.fc2, stop=False),
    "record and stop": lambda model: record(model.fc2),
    "swap_module": lambda model: swap_module(model, "fc2", nn.Linear(6, 4)),
    "watch_inputs": lambda model: watch_inputs(model.fc2, lambda kwargs: None),
    "replace_forward": lambda model: replace_forward(model.fc2, lambda original, x: original(x) + 1),
}
each_manager = pytest.mark.parametrize("name", MANAGERS)


@each_manager
def test_hooks_are_removed_after_success(model, x, name):
    before, expected = model_state(model), model(x)
    with MANAGERS[name](model):
        assert model_state(model) != before
        model(x)
    assert model_state(model) == before
    assert torch.equal(model(x), expected)


@each_manager
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("place", ["act", "last"])
def test_hooks_are_removed_after_the_model_fails(x, name, error, place):
    if name == "record and stop" and place == "last":
        place = "act"  # the forward pass stops before
    torch.manual_seed(0)
    model = Block()
    setattr(model, place, Fails(error))
    before = model_state(model)
    with pytest.raises(type(error)) as raised, MANAGERS[name](model):
        model(x)
    assert raised.value is error
    assert model_state(model) == before


@each_manager
def test_hooks_of_others_stay_and_still_run(model, x, name):
    fired = []
    handles = [
        model.fc2.register_forward_pre_hook(lambda *_: fired.append("before")),
        model.fc2.register_forward_hook(lambda *_: fired.append("after")),
        model.act.register_forward_hook(lambda *_: fired.append("elsewhere")),
    ]
    before = model_state(model)
    with MANAGERS[name](model):
        handles.append(model.last.register_forward_hook(lambda *_: fired.append("registered inside")))
        model(x)
    fired.clear()
    model(x)
    assert fired == ["elsewhere", "before", "after", "registered inside"]
    assert model_state(model)[1][: len(before[1])] == before[1]
    for handle in handles:
        handle.remove()


def test_hooks_of_others_run_during_record(model, x):
    fired = []
    handle = model.fc2.register_forward_pre_hook(lambda _, args: fired.append(args[0]))
    with record(model.fc2) as recorded:
        model(x)
    handle.remove()
    assert len(fired) == 1
    assert torch.equal(fired[0], recorded.input)


def in_another_thread(function):
    """Run `function` in a new thread and return its result; an exception is raised again here."""
    got = []

    def run():
        try:
            got.append((function(), None))
        except BaseException as error:  # noqa: BLE001
            got.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    value, error = got[0]
    if error is not None:
        raise error
    return value


def test_record_ignores_other_threads(model, x):
    expected = model(x)
    with record(model.fc2) as recorded:
        assert torch.equal(in_another_thread(lambda: model(x)), expected)
        assert recorded.inputs == []
        model(2 * x)
        pytest.fail("the forward pass of this thread went on")
    assert torch.equal(recorded.input, model.act(model.fc1(2 * x)))


def test_two_threads_record_the_same_layer_at_the_same_time(model, x):
    both_open = threading.Barrier(2, timeout=60)

    def run(factor):
        with record(model.fc2) as recorded:
            both_open.wait()
            model(factor * x)
        return recorded.input

    results = {}
    threads = [threading.Thread(target=lambda f=f: results.update({f: run(f)})) for f in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for factor in (1, 3):
        assert torch.equal(results[factor], model.act(model.fc1(factor * x)))


# Watching inputs and replacing methods


class Talker(nn.Module):
    """A module with keyword arguments and a method besides forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x=None, *, scale=1.0):
        return self.inner(x) * scale

    def generate(self, count, *, word="a"):
        return [word] * count


@pytest.fixture
def talker(no_hooks_left):
    torch.manual_seed(0)
    return no_hooks_left(Talker().eval())


def test_watch_inputs_reports_keyword_arguments_and_changes_nothing(talker, x):
    calls = []
    expected = talker(x, scale=2.0)
    with watch_inputs(talker, calls.append):
        assert torch.equal(talker(x, scale=2.0), expected)
        assert torch.equal(talker(x=x, scale=2.0), expected)
    talker(x, scale=5.0)
    assert [sorted(kwargs) for kwargs in calls] == [["scale"], ["scale", "x"]]
    assert calls[1]["x"] is x


def test_watch_inputs_ignores_other_threads(talker, x):
    calls = []
    with watch_inputs(talker, calls.append):
        in_another_thread(lambda: talker(x=x))
        assert calls == []
        talker(x=x)
    assert len(calls) == 1


def test_watch_inputs_is_undone_when_the_callback_raises(talker, x):
    def fail(kwargs):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch_inputs(talker, fail):
        talker(x=x)


def test_replace_forward_changes_the_output_only_inside(model, x):
    original = model(x)
    inside = model.act(model.fc1(x))

    def compute(original, tokens):
        assert torch.equal(tokens, inside)
        return original(tokens) * 2

    with replace_forward(model.fc2, compute):
        first = model(x)
    off = model(x)
    with replace_forward(model.fc2, compute):
        again = model(x)
    assert torch.allclose(first, x + 2 * (original - x), atol=1e-6)
    assert not torch.allclose(first, original)
    assert torch.equal(off, original)
    assert torch.equal(again, first)


def test_replace_forward_can_skip_the_computation(x):
    model = Block()
    model.act = Fails(RuntimeError("computed"))
    with replace_forward(model.act, lambda original, tokens: tokens):
        assert torch.equal(model(x), x + model.fc2(model.fc1(x)))
    with pytest.raises(RuntimeError, match="computed"):
        model(x)


def test_replace_forward_passes_keywords_and_replaces_other_methods(talker, x):
    with replace_forward(talker, lambda original, *args, **kwargs: (args, kwargs)):
        assert talker(x, scale=3.0) == ((x,), {"scale": 3.0})
        assert talker.generate(2) == ["a", "a"]
    with replace_forward(talker, lambda original, count, **kwargs: original(count + 1, **kwargs), "generate"):
        assert talker.generate(2, word="b") == ["b", "b", "b"]
        assert torch.equal(talker(x), talker.inner(x))
    assert talker.generate(2) == ["a", "a"]


def test_only_the_innermost_replacement_is_active(model, x):
    original = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 1):
        with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 10):
            assert torch.equal(model.fc2(torch.ones(6)), original + 10)
        assert torch.equal(model.fc2(torch.ones(6)), original + 1)
    assert torch.equal(model.fc2(torch.ones(6)), original)


def test_the_same_replacement_can_be_nested(model):
    def compute(original, tokens):
        return original(tokens) + 1

    original = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, compute):
        with replace_forward(model.fc2, compute):
            pass
        assert torch.equal(model.fc2(torch.ones(6)), original + 1)
    assert torch.equal(model.fc2(torch.ones(6)), original)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_replacement_that_raises_is_undone(model, x, error):
    expected = model(x)

    def compute(original, tokens):
        raise error

    with pytest.raises(type(error)), replace_forward(model.fc2, compute):
        model(x)
    assert torch.equal(model(x), expected)


def test_a_missing_method_cannot_be_replaced(model):
    with pytest.raises(AttributeError, match="speak"), replace_forward(model.fc2, print, "speak"):
        pytest.fail("it opened")


def test_a_forward_replaced_by_others_before_is_wrapped_and_restored(model, x):
    bare = model.fc2(torch.ones(6))
    own = model.fc2.forward

    def theirs(tokens):
        return own(tokens) + 100

    model.fc2.forward = theirs
    for _ in range(2):
        with replace_forward(model.fc2, lambda original, tokens: original(tokens) * 2):
            assert torch.equal(model.fc2(torch.ones(6)), (bare + 100) * 2)
        assert vars(model.fc2)["forward"] is theirs
    del model.fc2.forward


def test_a_forward_replaced_by_others_meanwhile_is_left_alone(model):
    bare = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 1):
        ours = model.fc2.forward

        def theirs(tokens):
            return ours(tokens) * 2

        model.fc2.forward = theirs
        assert torch.equal(model.fc2(torch.ones(6)), (bare + 1) * 2)
    assert vars(model.fc2)["forward"] is theirs
    assert torch.equal(model.fc2(torch.ones(6)), bare * 2)
    del model.fc2.forward


def test_replace_forward_ignores_other_threads(model, x):
    expected = model(x)
    with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 1):
        assert torch.equal(in_another_thread(lambda: model(x)), expected)
        assert not torch.equal(model(x), expected)


def test_many_threads_replace_the_same_forward_at_the_same_time(model):
    """Threads enter and leave in any order, and each sees only its own replacement."""
    bare = model.fc2(torch.ones(6))
    together = threading.Barrier(8, timeout=60)

    def run(number):
        together.wait()
        right = True
        for i in range(50):
            by = float(100 * number + i)
            with replace_forward(model.fc2, lambda original, tokens, by=by: original(tokens) + by):
                right &= torch.equal(model.fc2(torch.ones(6)), bare + by)
            right &= torch.equal(model.fc2(torch.ones(6)), bare)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))
    assert "forward" not in vars(model.fc2)


def test_the_last_thread_to_leave_restores_the_method(model):
    opened, leave = threading.Event(), threading.Event()

    def other():
        with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 1):
            opened.set()
            leave.wait(timeout=60)

    bare = model.fc2(torch.ones(6))
    thread = threading.Thread(target=other)
    with replace_forward(model.fc2, lambda original, tokens: original(tokens) + 2):
        thread.start()
        opened.wait(timeout=60)
    assert "forward" in vars(model.fc2)  # the other is still inside
    assert torch.equal(model.fc2(torch.ones(6)), bare)
    leave.set()
    thread.join(timeout=60)
    assert "forward" not in vars(model.fc2)


# Finding the layer


@pytest.fixture
def tower():
    """Layers 0 to 11 below `vision.layers`, a text half with the same names, and convolutions."""
    model = nn.Module()
    model.vision = nn.Module()
    model.vision.stem = nn.Conv2d(3, 4, 3)
    model.vision.point = nn.Conv2d(4, 4, 1)
    model.vision.grouped = nn.Conv2d(4, 4, 1, groups=2)
    model.vision.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block()}) for _ in range(12))
    model.text = nn.Module()
    model.text.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block()}) for _ in range(3))
    return model


def test_find_layer_matches_the_end_of_the_name(tower):
    name, layer = find_layer(tower, "layers.11.mlp.fc2")
    assert name == "vision.layers.11.mlp.fc2"
    assert layer is tower.vision.layers[11]["mlp"].fc2
    assert find_layer(tower, name) == (name, layer)
    assert find_layer(tower, "point")[0] == "vision.point"


def test_within_limits_the_search(tower):
    assert find_layer(tower, "layers.1.mlp.fc2", within="text")[0] == "text.layers.1.mlp.fc2"


def test_a_suffix_matches_complete_parts_only(tower):
    assert find_layer(tower, "layers.1.mlp.fc2", within="vision")[0] == "vision.layers.1.mlp.fc2"  # not 11
    with pytest.raises(LayerError, match=r"layer 'ayers\.1\.mlp\.fc2' is not in Module\. Did you mean"):
        find_layer(tower, "ayers.1.mlp.fc2", within="vision")


def test_the_error_explains_how_the_paper_counts_layers(tower):
    text = (
        r"^layer 'layers\.12\.mlp\.fc2' is not in Module: its vision tower has layers 0 to 11\. "
        r'The paper\'s "layer 12" is index 11\.$'
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.12.mlp.fc2", within="vision")


def test_the_error_names_the_range_of_layers(tower):
    with pytest.raises(LayerError, match=r"^layer 'layers\.40\.mlp\.fc2' is not in Module: it has layers 0 to 11\.$"):
        find_layer(tower, "layers.40.mlp.fc2")


def test_layer_26_of_the_paper_is_index_25():
    model = nn.Module()
    model.vision_tower = nn.Module()
    model.vision_tower.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block()}) for _ in range(26))
    text = r'its vision tower has layers 0 to 25\. The paper\'s "layer 26" is index 25\.$'
    with pytest.raises(LayerError, match=text):
        find_layer(model, "layers.26.mlp.fc2", within="vision_tower")


def test_an_ambiguous_name_lists_the_matches(tower):
    text = (
        r"^layer 'layers\.1\.mlp\.fc2' matches 2 layers of Module: 'vision\.layers\.1\.mlp\.fc2', "
        r"'text\.layers\.1\.mlp\.fc2'\. Give more of the name\.$"
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.1.mlp.fc2")
    with pytest.raises(LayerError, match=r"matches 15 layers of Module: .* and 9 more\. Give more"):
        find_layer(tower, "fc2")


def test_a_misspelt_name_gets_a_suggestion(tower):
    text = r"layer 'layers\.3\.mpl\.fc2' is not in Module\. Did you mean 'layers\.3\.mlp\.fc2'\? The last layers"
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.3.mpl.fc2")


def test_an_unknown_name_gets_a_list_of_layers(tower):
    with pytest.raises(
        LayerError, match=r"'nonsense' is not in Module\. The last layers that can be split: 'text\.layers\.2"
    ):
        find_layer(tower, "nonsense")
    with pytest.raises(LayerError, match=r"'nonsense' is not in GELU\. The last layers that can be split: none\."):
        find_layer(nn.GELU(), "nonsense")


def test_a_module_that_is_not_linear_gets_a_list_of_its_linear_layers(tower):
    text = (
        r"^layer 'vision\.layers\.11\.mlp' is a Block, and only nn\.Linear and 1x1 nn\.Conv2d can be split; "
        r"inside it: 'vision\.layers\.11\.mlp\.fc1', 'vision\.layers\.11\.mlp\.fc2'\.$"
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.11.mlp")
    with pytest.raises(LayerError, match=r"'text\.layers\.2\.mlp\.act' is a GELU, .* for example 'text\.layers\.2"):
        find_layer(tower, "text.layers.2.mlp.act")


def test_layer_10_is_not_listed_inside_layer_1(tower):
    with pytest.raises(LayerError, match="inside it") as raised:
        find_layer(tower, "vision.layers.1")
    assert "layers.10" not in str(raised.value)


@pytest.mark.parametrize("name", ["stem", "grouped"])
def test_other_convolutions_are_rejected(tower, name):
    with pytest.raises(
        LayerError, match=rf"layer 'vision\.{name}' is a Conv2d, and only nn\.Linear and 1x1 nn\.Conv2d"
    ):
        find_layer(tower, name)


def test_is_linear():
    assert is_linear(nn.Linear(2, 2))
    assert is_linear(nn.Conv2d(2, 2, 1, stride=2))
    others = [nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, (1, 2)), nn.Conv2d(2, 2, 1, groups=2), nn.Conv1d(2, 2, 1), nn.GELU()]
    assert not any(map(is_linear, others))


# What stands between a layer and the stream

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}


def dinov2():
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**SIZES, image_size=28, patch_size=7))


def internvl():
    from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

    sizes = {**SIZES, "image_size": [28, 28], "patch_size": [7, 7]}
    return InternVLVisionModel(InternVLVisionConfig(**sizes))


def clip():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=28, patch_size=7))


def siglip():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**SIZES, image_size=28, patch_size=7))


def with_random_scales(model):
    """Set each parameter of a LayerScale to numbers from -0.7 to 0.7, none of them near 0."""
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name:
                signs = torch.randint(0, 2, parameter.shape, generator=g) * 2 - 1
                parameter.copy_(signs * (0.1 + 0.6 * torch.rand(parameter.shape, generator=g)))
    return model.eval()


def last_linear(block, part):
    """The last linear layer of the attention or of the MLP, whose output is scaled."""
    return [name for name, module in block.named_modules() if name.startswith(part) and isinstance(module, nn.Linear)][
        -1
    ]


@pytest.mark.parametrize(("make", "norm"), [(dinov2, "norm2"), (internvl, "layernorm_after")])
@pytest.mark.parametrize("part", ["mlp", "attention"])
def test_a_change_divided_by_the_scale_changes_the_stream_as_wanted(make, norm, part, no_hooks_left):
    """Behind the MLP the stream is the block's output, behind attention what the norm before the MLP reads."""
    torch.manual_seed(0)
    model = no_hooks_left(with_random_scales(make()))
    block = next(module for name, module in model.named_modules() if name.endswith(".1"))
    name, layer = find_layer(model, f"1.{last_linear(block, part)}")
    scale = find_stream_scale(model, name, 16)
    assert block_of(model, name) is block
    assert scale.shape == (16,) and not scale.requires_grad
    pixels, vector = torch.randn(2, 3, 28, 28), torch.randn(16)
    change, seen = divide_by_scale(vector, scale), []

    def keep(_module, args, output):
        seen.append((output[0] if isinstance(output, tuple) else output) if part == "mlp" else args[0])

    handle = (block if part == "mlp" else block.get_submodule(norm)).register_forward_hook(keep)
    with torch.inference_mode():
        model(pixels)
        with replace_forward(layer, lambda original, x: original(x) + change):
            model(pixels)
    handle.remove()
    difference = seen[1] - seen[0]
    assert difference.shape == (2, 17, 16)
    torch.testing.assert_close(difference, vector.expand_as(difference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [clip, siglip])
@pytest.mark.parametrize("suffix", ["mlp.fc2", "self_attn.out_proj"])
def test_a_tower_without_layer_scale_has_no_scale(make, suffix):
    model = make()
    name, _ = find_layer(model, f"layers.1.{suffix}")
    assert find_stream_scale(model, name, 16) is None
    assert find_stream_scale(Block(), "fc2", 4) is None


# A change of a model holds where it was opened: in one thread, one asyncio task, one generator, one module.


def add_one(model):
    return replace_forward(model.fc2, lambda original, tokens: original(tokens) + 1)


def test_tasks_of_one_thread_do_not_see_each_others_changes(model, x):
    expected = model(x)

    async def change(by, opened, others):
        with replace_forward(model.fc2, lambda original, tokens: original(tokens) + by):
            opened.set()
            await others.wait()
            return model(x)

    async def run():
        one, other = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(change(1, one, other)), asyncio.create_task(change(10, other, one))]
        await one.wait()
        await other.wait()
        return model(x), *(await asyncio.gather(*tasks))

    plain, first, second = asyncio.run(run())
    assert torch.equal(plain, expected)
    assert torch.allclose(first, expected + 1) and torch.allclose(second, expected + 10)


def test_a_task_that_is_started_inside_sees_the_change_until_it_ends(model, x):
    expected = model(x)

    async def compute(gate):
        before = model(x)
        await gate.wait()
        return before, model(x)

    async def run():
        gate = asyncio.Event()
        with add_one(model):
            task = asyncio.create_task(compute(gate))
            await asyncio.sleep(0)
        gate.set()
        return await task

    inside, after = asyncio.run(run())
    assert torch.allclose(inside, expected + 1) and torch.equal(after, expected)


@pytest.mark.parametrize("kind", ["record", "watch_inputs"])
def test_tasks_do_not_record_each_others_calls(talker, x, kind):
    calls = []

    async def watch(opened, leave):
        manager = watch_inputs(talker, calls.append) if kind == "watch_inputs" else record(talker, stop=False)
        with manager as recorded:
            opened.set()
            await leave.wait()
        return len(calls) if kind == "watch_inputs" else len(recorded.inputs)

    async def run():
        opened, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(watch(opened, leave))
        await opened.wait()
        talker(x=x)
        leave.set()
        return await task

    assert asyncio.run(run()) == 0


def test_a_suspended_generator_changes_nothing_for_its_consumer(model, x):
    expected = model(x)

    def steered():
        with add_one(model):
            yield model(x)
            yield model(x)

    outputs = steered()
    assert torch.allclose(next(outputs), expected + 1)
    assert torch.equal(model(x), expected)
    assert torch.allclose(next(outputs), expected + 1)
    outputs.close()
    assert torch.equal(model(x), expected)


def test_a_suspended_asynchronous_generator_changes_nothing_for_its_consumer(model, x):
    expected = model(x)

    async def steered():
        with add_one(model):
            yield model(x)

    async def run():
        outputs = steered()
        inside, outside = await anext(outputs), model(x)
        await outputs.aclose()
        return inside, outside

    inside, outside = asyncio.run(run())
    assert torch.allclose(inside, expected + 1) and torch.equal(outside, expected)


def test_an_abandoned_generator_removes_its_change_at_once(model, x):
    def steered():
        with add_one(model):
            yield

    outputs = steered()
    next(outputs)
    del outputs  # the fixture finds what is left


def test_context_managers_around_a_change_keep_it(model, x):
    expected = model(x)

    @contextmanager
    def outer():
        with add_one(model):
            yield

    @asynccontextmanager
    async def asynchronous():
        with add_one(model):
            yield

    async def run():
        async with asynchronous():
            return model(x)

    with outer():
        assert torch.allclose(model(x), expected + 1)
    with ExitStack() as stack:
        stack.enter_context(outer())
        assert torch.allclose(model(x), expected + 1)
    assert torch.allclose(asyncio.run(run()), expected + 1)
    assert torch.equal(model(x), expected)


def test_a_deep_copy_keeps_no_change(model, x):
    expected = model(x)
    with add_one(model), record(model.fc1, stop=False) as recorded, watch_inputs(model, recorded.inputs.append):
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), expected)
        assert recorded.inputs == []
        assert torch.allclose(model(x), expected + 1)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        copied.fc2.bias += 1
    assert torch.allclose(copied(x), expected + 1) and torch.equal(model(x), expected)


def test_recording_inside_a_change_records_and_keeps_the_change(model, x):
    layer = model.fc2
    with replace_forward(layer, lambda original, x: original(x) + 1):
        expected = model(x)
        with record(layer, stop=False) as recorded, watch_inputs(layer, lambda kwargs: None):
            assert torch.equal(model(x), expected)
        with hooks.record_output(layer) as outputs:
            model(x)
    assert torch.equal(outputs[0], layer(recorded.input) + 1)
