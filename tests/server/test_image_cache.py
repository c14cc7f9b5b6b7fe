import numpy as np
import torch
from PIL import Image
from torch import nn

from elude_steer.models.prefix_cache import Prefix
from elude_steer.server.image_cache import ImageCache, TowerState, image_key, join_states, split_prefix
from elude_steer.steering.intervention import ImageMemo


def make_state(size=1000):
    return TowerState(torch.zeros(1, size, 1), {}, (8, 8), 1, None, ())


def test_the_key_is_the_content_and_whether_the_image_is_alone():
    red, blue = Image.new("RGB", (8, 4), "red"), Image.new("RGB", (8, 4), "blue")
    assert image_key(red, alone=True) == image_key(red.copy(), alone=True)
    others = [image_key(red, alone=False), image_key(blue, alone=True), image_key(red.resize((4, 8)), alone=True)]
    assert len({image_key(red, alone=True), *others}) == 4


def test_it_holds_no_more_than_it_may_and_drops_what_was_not_used():
    cache = ImageCache(3 * 4000)
    for number in range(3):
        cache.add((bytes([number]), True), make_state())
    assert cache.get((b"\0", True)) is not None
    cache.add((b"\3", True), make_state())
    assert cache.get((b"\1", True)) is None and cache.get((b"\0", True)) is not None
    assert cache.nbytes == 3 * 4000
    cache.add((b"\3", True), make_state())
    cache.add((b"\4", True), make_state(4000))  # larger than all of it
    assert cache.nbytes == 3 * 4000 and cache.get((b"\4", True)) is None


def test_states_are_copies_and_join_to_what_was_split():
    module = nn.Identity()
    batch = torch.arange(24.0).reshape(3, 4, 2)
    parts = list(batch.split([1, 2]))
    outputs = {module: [(part, None) for part in parts]}
    prefix = Prefix({}, tuple(parts), outputs, ((8, 8), (4, 4)), (1, 2), (None, None))
    states = split_prefix(prefix, lambda q: [f"{len(q)} tiles"])
    assert [state.notes for state in states] == [("1 tiles",), ("2 tiles",)]
    assert states[1].nbytes == 2 * parts[1].nbytes
    for state, part in zip(states, parts, strict=True):
        assert torch.equal(state.q, part) and state.q.untyped_storage().nbytes() == part.nbytes
        assert state.outputs[module][0].untyped_storage().nbytes() == part.nbytes
    joined = join_states(states[::-1], {})
    assert joined.counts == (2, 1) and joined.sizes == ((4, 4), (8, 8))
    assert torch.equal(joined.outputs[module][0][0], parts[1])


def test_what_is_remembered_of_an_image_holds_for_every_edit_and_stays_small():
    state = make_state()
    claims = 0, np.ones(4, bool), np.zeros(4)
    found = ImageMemo(
        activations={(3, 4): torch.zeros(9)}, regions={(object(), object()): torch.zeros(1)}, claims=claims
    )
    state.remember(found)
    assert state.recall().claims is claims and not state.recall().activations and not state.recall().regions
    for row in range(200):
        found = state.recall()
        found.readings[row], found.presences[row] = torch.zeros(4), 0.5
        state.remember(found)
    assert list(state.memo.readings) == list(state.memo.presences) == list(range(32))
    found = state.recall()
    found.readings.clear()
    assert len(state.memo.readings) == 32, "a memo is for one batch"


def test_what_is_remembered_counts():
    cache, states = ImageCache(9000), [make_state(), make_state()]
    for number, state in enumerate(states):
        cache.add((bytes([number]), True), state)
    claims = 0, np.zeros(10), np.zeros(20)
    states[1].remember(ImageMemo(readings={1: torch.zeros(100)}, presences={1: 0.5}, claims=claims))
    assert states[1].nbytes == 4000 + 240 + 400
    cache.measure((b"\1", True))
    assert cache.nbytes == 8640
    states[1].remember(ImageMemo(readings={2: torch.zeros(100)}, presences={2: 0.5}, claims=claims))
    cache.measure((b"\1", True))
    assert cache.nbytes == 5040 and cache.get((b"\0", True)) is None
    cache.measure((b"\0", True))
    assert cache.nbytes == 5040
