import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from elude_steer.errors import LayerError
from elude_steer.method.layers import is_linear
from elude_steer.models.hooks import find_layer, record, replace_forward, rewrite, swap_module, watch_inputs
from tests.conftest import state_of


class Block(nn.Module):
    """Two linear layers with a step between them and one after, which a test may let fail."""

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


def test_record_keeps_what_the_layer_is_given_and_stops_there(model, x):
    reached = []
    handle = model.last.register_forward_hook(lambda *_: reached.append("after the layer"))
    with record(model.fc2) as seen:
        model(x)
        reached.append("after the call")
    handle.remove()
    assert torch.equal(seen.input, model.act(model.fc1(x)))
    assert reached == []


def test_record_without_stop_lets_the_model_finish(model, x):
    expected = model(x)
    with record(model.fc2, stop=False) as seen:
        assert torch.equal(model(x), expected)
        model(2 * x)
    assert len(seen.inputs) == 2
    assert torch.equal(seen.inputs[1], model.act(model.fc1(2 * x)))


def test_record_works_where_the_layer_is_called_by_keyword(model, x):
    with record(model.fc1) as seen:
        model.fc1(input=x)
    assert torch.equal(seen.input, x)


def test_what_is_recorded_carries_no_graph(model, x):
    with record(model.fc2) as seen:
        model(x)
    assert not seen.input.requires_grad


@pytest.mark.parametrize("calls", [0, 2])
def test_one_input_is_asked_for_and_there_is_none_or_several(model, x, calls):
    with record(model.fc2, stop=False) as seen:
        for _ in range(calls):
            model(x)
    with pytest.raises(LayerError, match=rf"the layer ran {calls} times in this forward pass, where once was expected"):
        _ = seen.input


def test_the_stop_is_not_caught_by_a_model_that_catches_exceptions(x, no_hooks_left):
    class Careful(Block):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:  # noqa: BLE001
                return x

    model = no_hooks_left(Careful())
    with record(model.fc2) as seen:
        model(x)
        pytest.fail("the forward pass went on")
    assert len(seen.inputs) == 1


def test_rewrite_gives_the_changed_output_only_inside(model, x):
    original = model(x)
    inside = model.act(model.fc1(x))

    def change(given, output):
        assert torch.equal(given, inside)
        return output * 2

    with rewrite(model.fc2, change):
        first = model(x)
    off = model(x)
    with rewrite(model.fc2, change):
        again = model(x)
    assert torch.allclose(first, x + 2 * (original - x), atol=1e-6)
    assert not torch.allclose(first, original)
    assert torch.equal(off, original)
    assert torch.equal(again, first)


def test_rewrite_with_none_leaves_the_output(model, x):
    original = model(x)
    with rewrite(model.fc2, lambda given, output: None):
        assert torch.equal(model(x), original)


def test_two_rewrites_follow_each_other(model, x):
    original = model(x)
    with rewrite(model.fc2, lambda _, output: output + 1), rewrite(model.fc2, lambda _, output: output * 3):
        assert torch.allclose(model(x), x + 3 * (original - x + 1), atol=1e-5)
    assert torch.equal(model(x), original)


def test_rewrite_works_where_the_layer_is_called_by_keyword(model, x):
    with rewrite(model.fc1, lambda given, output: output + given.sum()):
        assert torch.equal(model.fc1(input=x), model.fc1(x))


def test_swap_module_puts_the_old_one_back_in_its_place(no_hooks_left, x):
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


OURS = {
    "record": lambda model: record(model.fc2, stop=False),
    "record and stop": lambda model: record(model.fc2),
    "rewrite": lambda model: rewrite(model.fc2, lambda _, output: output + 1),
    "swap_module": lambda model: swap_module(model, "fc2", nn.Linear(6, 4)),
    "watch_inputs": lambda model: watch_inputs(model.fc2, lambda given: None),
    "replaced": lambda model: replace_forward(model.fc2, lambda original, x: original(x) + 1),
}
ours = pytest.mark.parametrize("opened", OURS)


@ours
def test_nothing_of_ours_is_left_after_success(model, x, opened):
    before, expected = state_of(model), model(x)
    with OURS[opened](model):
        assert state_of(model) != before
        model(x)
    assert state_of(model) == before
    assert torch.equal(model(x), expected)


@ours
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("place", ["act", "last"])
def test_nothing_of_ours_is_left_after_the_model_fails(x, opened, error, place):
    if opened == "record and stop" and place == "last":
        place = "act"  # it never comes so far
    torch.manual_seed(0)
    model = Block()
    setattr(model, place, Fails(error))
    before = state_of(model)
    with pytest.raises(type(error)) as raised, OURS[opened](model):
        model(x)
    assert raised.value is error
    assert state_of(model) == before


def test_nothing_of_ours_is_left_after_the_change_itself_fails(model, x):
    def change(given, output):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), rewrite(model.fc2, change):
        model(x)


@ours
def test_hooks_of_others_stay_and_still_fire(model, x, opened):
    fired = []
    handles = [
        model.fc2.register_forward_pre_hook(lambda *_: fired.append("before")),
        model.fc2.register_forward_hook(lambda *_: fired.append("after")),
        model.act.register_forward_hook(lambda *_: fired.append("elsewhere")),
    ]
    before = state_of(model)
    with OURS[opened](model):
        handles.append(model.last.register_forward_hook(lambda *_: fired.append("registered inside")))
        model(x)
    fired.clear()
    model(x)
    assert fired == ["elsewhere", "before", "after", "registered inside"]
    assert state_of(model)[1][: len(before[1])] == before[1]
    for handle in handles:
        handle.remove()


def test_a_hook_of_others_on_the_layer_fires_while_we_record(model, x):
    fired = []
    handle = model.fc2.register_forward_pre_hook(lambda _, args: fired.append(args[0]))
    with record(model.fc2) as seen:
        model(x)
    handle.remove()
    assert len(fired) == 1
    assert torch.equal(fired[0], seen.input)


def in_another_thread(function):
    """What `function` gives when a thread of its own runs it; what it raises is raised here."""
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


def test_another_threads_forward_pass_is_neither_stopped_nor_recorded(model, x):
    expected = model(x)
    with record(model.fc2) as seen:
        assert torch.equal(in_another_thread(lambda: model(x)), expected)
        assert seen.inputs == []
        model(2 * x)
        pytest.fail("the forward pass of this thread went on")
    assert torch.equal(seen.input, model.act(model.fc1(2 * x)))


def test_another_threads_output_is_not_rewritten(model, x):
    expected = model(x)
    with rewrite(model.fc2, lambda _, output: output + 1):
        assert torch.equal(in_another_thread(lambda: model(x)), expected)
        assert not torch.equal(model(x), expected)


def test_two_threads_record_the_same_layer_at_once(model, x):
    both_open = threading.Barrier(2, timeout=60)

    def run(factor):
        with record(model.fc2) as seen:
            both_open.wait()
            model(factor * x)
        return seen.input

    results = {}
    threads = [threading.Thread(target=lambda f=f: results.update({f: run(f)})) for f in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for factor in (1, 3):
        assert torch.equal(results[factor], model.act(model.fc1(factor * x)))


# Seeing calls and standing for methods


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


def test_watched_sees_the_keywords_of_every_call_and_changes_nothing(talker, x):
    seen = []
    expected = talker(x, scale=2.0)
    with watch_inputs(talker, seen.append):
        assert torch.equal(talker(x, scale=2.0), expected)
        assert torch.equal(talker(x=x, scale=2.0), expected)
    talker(x, scale=5.0)
    assert [sorted(given) for given in seen] == [["scale"], ["scale", "x"]]
    assert seen[1]["x"] is x


def test_watched_sees_only_its_own_thread(talker, x):
    seen = []
    with watch_inputs(talker, seen.append):
        in_another_thread(lambda: talker(x=x))
        assert seen == []
        talker(x=x)
    assert len(seen) == 1


def test_what_watches_may_fail(talker, x):
    def see(given):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch_inputs(talker, see):
        talker(x=x)


def test_replaced_stands_for_forward_and_reaches_the_original(model, x):
    original = model(x)
    inside = model.act(model.fc1(x))

    def compute(given, tokens):
        assert torch.equal(tokens, inside)
        return given(tokens) * 2

    with replace_forward(model.fc2, compute):
        first = model(x)
    off = model(x)
    with replace_forward(model.fc2, compute):
        again = model(x)
    assert torch.allclose(first, x + 2 * (original - x), atol=1e-6)
    assert not torch.allclose(first, original)
    assert torch.equal(off, original)
    assert torch.equal(again, first)


def test_replaced_decides_whether_a_module_computes_at_all(x):
    model = Block()
    model.act = Fails(RuntimeError("computed"))
    with replace_forward(model.act, lambda original, tokens: tokens):
        assert torch.equal(model(x), x + model.fc2(model.fc1(x)))
    with pytest.raises(RuntimeError, match="computed"):
        model(x)


def test_replaced_passes_on_keywords_and_other_methods(talker, x):
    with replace_forward(talker, lambda original, *args, **kwargs: (args, kwargs)):
        assert talker(x, scale=3.0) == ((x,), {"scale": 3.0})
        assert talker.generate(2) == ["a", "a"]
    with replace_forward(talker, lambda original, count, **kwargs: original(count + 1, **kwargs), "generate"):
        assert talker.generate(2, word="b") == ["b", "b", "b"]
        assert torch.equal(talker(x), talker.inner(x))
    assert talker.generate(2) == ["a", "a"]


def test_of_several_replacements_the_innermost_counts_alone(model, x):
    original = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 1):
        with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 10):
            assert torch.equal(model.fc2(torch.ones(6)), original + 10)
        assert torch.equal(model.fc2(torch.ones(6)), original + 1)
    assert torch.equal(model.fc2(torch.ones(6)), original)


def test_the_same_replacement_twice(model):
    def compute(given, tokens):
        return given(tokens) + 1

    original = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, compute):
        with replace_forward(model.fc2, compute):
            pass
        assert torch.equal(model.fc2(torch.ones(6)), original + 1)
    assert torch.equal(model.fc2(torch.ones(6)), original)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_replacement_that_fails_is_undone(model, x, error):
    expected = model(x)

    def compute(given, tokens):
        raise error

    with pytest.raises(type(error)), replace_forward(model.fc2, compute):
        model(x)
    assert torch.equal(model(x), expected)


def test_a_method_that_is_not_there(model):
    with pytest.raises(AttributeError, match="speak"), replace_forward(model.fc2, print, "speak"):
        pytest.fail("it opened")


def test_what_others_put_in_the_place_of_forward_stays_below_and_comes_back(model, x):
    bare = model.fc2(torch.ones(6))
    own = model.fc2.forward

    def theirs(tokens):
        return own(tokens) + 100

    model.fc2.forward = theirs
    for _ in range(2):
        with replace_forward(model.fc2, lambda given, tokens: given(tokens) * 2):
            assert torch.equal(model.fc2(torch.ones(6)), (bare + 100) * 2)
        assert vars(model.fc2)["forward"] is theirs
    del model.fc2.forward


def test_what_others_put_there_meanwhile_is_left_alone(model):
    bare = model.fc2(torch.ones(6))
    with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 1):
        ours = model.fc2.forward

        def theirs(tokens):
            return ours(tokens) * 2

        model.fc2.forward = theirs
        assert torch.equal(model.fc2(torch.ones(6)), (bare + 1) * 2)
    assert vars(model.fc2)["forward"] is theirs
    assert torch.equal(model.fc2(torch.ones(6)), bare * 2)
    del model.fc2.forward


def test_another_thread_computes_as_before(model, x):
    expected = model(x)
    with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 1):
        assert torch.equal(in_another_thread(lambda: model(x)), expected)
        assert not torch.equal(model(x), expected)


def test_many_threads_replace_the_same_forward_at_once(model):
    """They open and close in all orders, and each sees its own and nobody else's."""
    bare = model.fc2(torch.ones(6))
    together = threading.Barrier(8, timeout=60)

    def run(number):
        together.wait()
        right = True
        for i in range(50):
            by = float(100 * number + i)
            with replace_forward(model.fc2, lambda given, tokens, by=by: given(tokens) + by):
                right &= torch.equal(model.fc2(torch.ones(6)), bare + by)
            right &= torch.equal(model.fc2(torch.ones(6)), bare)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))
    assert "forward" not in vars(model.fc2)


def test_the_last_thread_to_leave_puts_the_method_back(model):
    opened, leave = threading.Event(), threading.Event()

    def other():
        with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 1):
            opened.set()
            leave.wait(timeout=60)

    bare = model.fc2(torch.ones(6))
    thread = threading.Thread(target=other)
    with replace_forward(model.fc2, lambda given, tokens: given(tokens) + 2):
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


def test_a_layer_is_found_by_the_end_of_its_name(tower):
    name, layer = find_layer(tower, "layers.11.mlp.fc2")
    assert name == "vision.layers.11.mlp.fc2"
    assert layer is tower.vision.layers[11]["mlp"].fc2
    assert find_layer(tower, name) == (name, layer)
    assert find_layer(tower, "point")[0] == "vision.point"


def test_within_leaves_out_the_other_half(tower):
    assert find_layer(tower, "layers.1.mlp.fc2", within="text")[0] == "text.layers.1.mlp.fc2"


def test_a_suffix_counts_in_whole_parts(tower):
    assert find_layer(tower, "layers.1.mlp.fc2", within="vision")[0] == "vision.layers.1.mlp.fc2"  # not 11
    with pytest.raises(LayerError, match=r"layer 'ayers\.1\.mlp\.fc2' is not in Module\. Did you mean"):
        find_layer(tower, "ayers.1.mlp.fc2", within="vision")


def test_the_papers_count_is_explained(tower):
    text = (
        r"^layer 'layers\.12\.mlp\.fc2' is not in Module: its vision tower has layers 0 to 11\. "
        r'The paper\'s "layer 12" is index 11\.$'
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.12.mlp.fc2", within="vision")


def test_an_index_far_past_the_end(tower):
    with pytest.raises(LayerError, match=r"^layer 'layers\.40\.mlp\.fc2' is not in Module: it has layers 0 to 11\.$"):
        find_layer(tower, "layers.40.mlp.fc2")


def test_the_papers_layer_26_on_a_tower_like_llavas():
    model = nn.Module()
    model.vision_tower = nn.Module()
    model.vision_tower.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block()}) for _ in range(26))
    text = r'its vision tower has layers 0 to 25\. The paper\'s "layer 26" is index 25\.$'
    with pytest.raises(LayerError, match=text):
        find_layer(model, "layers.26.mlp.fc2", within="vision_tower")


def test_an_ambiguous_name_lists_what_it_could_be(tower):
    text = (
        r"^layer 'layers\.1\.mlp\.fc2' names 2 layers of Module: 'vision\.layers\.1\.mlp\.fc2', "
        r"'text\.layers\.1\.mlp\.fc2'\. Give more of the name\.$"
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.1.mlp.fc2")
    with pytest.raises(LayerError, match=r"names 15 layers of Module: .* and 9 more\. Give more"):
        find_layer(tower, "fc2")


def test_a_misspelt_name_gets_the_closest(tower):
    text = r"layer 'layers\.3\.mpl\.fc2' is not in Module\. Did you mean 'layers\.3\.mlp\.fc2'\? The last that can be"
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.3.mpl.fc2")


def test_a_name_like_none_gets_what_there_is(tower):
    with pytest.raises(LayerError, match=r"'nonsense' is not in Module\. The last that can be split: 'text\.layers\.2"):
        find_layer(tower, "nonsense")
    with pytest.raises(LayerError, match=r"'nonsense' is not in GELU\. The last that can be split: none\."):
        find_layer(nn.GELU(), "nonsense")


def test_a_module_that_is_not_linear_gets_the_linear_ones_inside(tower):
    text = (
        r"^layer 'vision\.layers\.11\.mlp' is a Block, and only nn\.Linear and 1x1 nn\.Conv2d can be split; "
        r"inside it: 'vision\.layers\.11\.mlp\.fc1', 'vision\.layers\.11\.mlp\.fc2'\.$"
    )
    with pytest.raises(LayerError, match=text):
        find_layer(tower, "layers.11.mlp")
    with pytest.raises(LayerError, match=r"'text\.layers\.2\.mlp\.act' is a GELU, .* for example 'text\.layers\.2"):
        find_layer(tower, "text.layers.2.mlp.act")


def test_what_is_inside_layer_1_is_not_inside_layer_10(tower):
    with pytest.raises(LayerError, match="inside it") as raised:
        find_layer(tower, "vision.layers.1")
    assert "layers.10" not in str(raised.value)


@pytest.mark.parametrize("name", ["stem", "grouped"])
def test_other_convolutions_are_refused(tower, name):
    with pytest.raises(
        LayerError, match=rf"layer 'vision\.{name}' is a Conv2d, and only nn\.Linear and 1x1 nn\.Conv2d"
    ):
        find_layer(tower, name)


def test_what_the_method_applies_to():
    assert is_linear(nn.Linear(2, 2))
    assert is_linear(nn.Conv2d(2, 2, 1, stride=2))
    others = [nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, (1, 2)), nn.Conv2d(2, 2, 1, groups=2), nn.Conv1d(2, 2, 1), nn.GELU()]
    assert not any(map(is_linear, others))
