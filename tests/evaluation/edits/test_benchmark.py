import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elude_steer.errors import ModelError, SpecError
from elude_steer.evaluation.edits.benchmark import (
    Case,
    Outcome,
    Reading,
    Task,
    World,
    caption_baselines,
    make_tasks,
    run_edits,
    score_caption,
    summarize,
    toyland_world,
)
from elude_steer.evaluation.edits.fluency import likelihoods
from elude_steer.steering.plan import Plan

OBJECTS = ("ball", "bird", "cat", "cow", "dog", "tree")
PLACES = ("beach", "park")


def read(caption):
    """Every word that is an object or a place; a sentence ends with a point."""
    said = set(caption.rstrip(".").split())
    return Reading(frozenset(said & set(OBJECTS)), frozenset(said & set(PLACES)), caption.endswith("."))


def world_of(*pictures, words=OBJECTS):
    cases = [Case(Image.new("RGB", (8, 8 + i)), frozenset(p.split())) for i, p in enumerate(pictures)]
    return World("hand-made", cases, words, read)


def outcome(success=True, kept=1.0, invented=(), well_formed=True, likelihood=None):
    return Outcome(Task(0, "", "dog"), "", success, True, kept, tuple(invented), well_formed, likelihood)


# One edit


@pytest.mark.parametrize(
    ("after", "gone", "kept", "invented", "clean"),
    [
        ("a cat and a ball in the park.", True, 1.0, (), True),
        ("a dog a cat and a ball in the park.", False, 1.0, (), False),
        ("a cat in the park.", True, 2 / 3, (), False),
        ("nothing", True, 0.0, (), False),
        ("a cow a bird a cat and a ball in the park.", True, 1.0, ("bird", "cow"), False),
        ("a cat a ball and a tree in the park.", True, 1.0, (), True),  # the tree is there; it was only not named
        ("a cat and a ball on the beach.", True, 2 / 3, (), False),
    ],
)
def test_a_removal_is_judged_by_what_the_captions_say(after, gone, kept, invented, clean):
    world = world_of("dog cat ball tree")
    got = score_caption(world, Task(0, "a dog a cat and a ball in the park.", "dog"), after)
    assert (got.gone, got.named, got.invented) == (gone, True, invented)
    assert got.kept == pytest.approx(kept)
    assert got.success is gone
    assert got.clean is clean
    assert got.well_formed is after.endswith(".")


@pytest.mark.parametrize(
    ("after", "gone", "named", "invented", "clean"),
    [
        ("a cow and a cat.", True, True, (), True),
        ("a cat.", True, False, (), False),
        ("a dog a cow and a cat.", False, True, (), False),
        ("a cow a bird and a cat.", True, True, ("bird",), False),
    ],
)
def test_a_replacement_wants_the_new_one_too(after, gone, named, invented, clean):
    got = score_caption(world_of("dog cat"), Task(0, "a dog and a cat.", "dog", "cow"), after)
    assert (got.gone, got.named, got.invented, got.clean) == (gone, named, invented, clean)
    assert got.success is (gone and named)
    assert got.kept == 1


def test_where_nothing_else_was_named_everything_is_kept():
    assert score_caption(world_of("dog"), Task(0, "a dog.", "dog"), "").kept == 1


@settings(deadline=None)
@given(st.data())
def test_identities_of_any_outcome(data):
    words = st.lists(st.sampled_from([*OBJECTS, *PLACES]), max_size=6).map(" ".join)
    there = ["dog", *data.draw(st.lists(st.sampled_from(OBJECTS), max_size=4))]
    plus = data.draw(st.sampled_from([None, "cow"]))
    world = world_of(" ".join(there))
    task = Task(0, data.draw(words) + " dog", "dog", plus)
    after = data.draw(words)
    got = score_caption(world, task, after)
    assert 0 <= got.kept <= 1
    assert got.success <= got.gone
    assert not got.clean or (got.success and got.kept == 1 and got.invented == ())
    assert not set(got.invented) & (set(there) | {plus})
    if plus is None:  # nothing changed: nothing lost, nothing gone
        same = score_caption(world, task, task.baseline)
        assert (same.gone, same.kept) == (False, 1)


# Which edits are asked for


def test_tasks_take_what_is_there_and_named():
    world = world_of("dog cat", "dog", "ball", "")
    said = ["a dog and a cow.", "a cat.", "a ball.", "a dog."]
    tasks = make_tasks(world, said, "remove")
    assert [(task.case, task.minus, task.plus) for task in tasks] == [(0, "dog", None), (2, "ball", None)]
    assert [task.baseline for task in tasks] == [said[0], said[2]]


def test_what_replaces_is_neither_there_nor_named():
    world = world_of(*["dog cat"] * 60)
    tasks = make_tasks(world, ["a dog a cat and a bird."] * 60, "replace", seed=4)
    assert {task.minus for task in tasks} == {"dog", "cat"}
    assert {task.plus for task in tasks} == {"ball", "cow", "tree"}


def test_tasks_are_drawn_by_seed_and_picture():
    said = ["a dog a cat a ball and a tree."] * 30
    world = world_of(*["dog cat ball tree"] * 30)
    tasks = make_tasks(world, said, "replace", seed=1)
    assert make_tasks(world, said, "replace", seed=1) == tasks
    assert make_tasks(world, said, "replace", seed=2) != tasks
    # Leaving out the last pictures does not change the edits of the first.
    assert make_tasks(world_of(*["dog cat ball tree"] * 10), said[:10], "replace", seed=1) == tasks[:10]
    # Both kinds take away the same objects, so that they can be compared.
    assert [task.minus for task in make_tasks(world, said, "remove", seed=1)] == [task.minus for task in tasks]


def test_a_picture_that_leaves_nothing_to_put_there_is_left_out():
    world = world_of("dog cat", "dog", words=("dog", "cat"))
    assert [task.case for task in make_tasks(world, ["a dog.", "a dog."], "replace")] == [1]
    assert len(make_tasks(world, ["a dog.", "a dog."], "remove")) == 2


def test_another_kind_of_edit_is_refused():
    with pytest.raises(SpecError, match=r"an edit is 'remove' or 'replace', not 'swap'\."):
        make_tasks(world_of("dog"), ["a dog."], "swap")


# Sums


def test_shares_are_means():
    outcomes = [
        outcome(),
        outcome(invented=["cow", "bird"]),
        outcome(kept=0.5),
        outcome(success=False, kept=0.0, well_formed=False),
    ]
    score = summarize("remove", outcomes)
    assert (score.kind, score.edits) == ("remove", 4)
    assert (score.success, score.gone, score.kept) == (0.75, 0.75, 0.625)
    assert (score.invented, score.clean, score.well_formed) == (0.25, 0.25, 0.75)
    assert score.harmonic == pytest.approx(2 * 0.75 * 0.625 / (0.75 + 0.625))
    assert score.to_dict()["intervals"]["kept"] == score.intervals["kept"]


def test_without_a_grammar_no_share_is_well_formed():
    score = summarize("remove", [outcome(well_formed=None, likelihood=x) for x in (-1.0, -0.5, 0.0)])
    assert (score.well_formed, score.likelihood) == (None, -0.5)
    assert "well_formed" not in score.intervals
    low, high = score.intervals["likelihood"]
    assert -1 <= low < -0.5 < high <= 0
    assert score.to_dict()["likelihood"] == -0.5


def test_a_likelihood_is_the_mean_of_those_that_are_known():
    score = summarize("remove", [outcome(likelihood=-2.0), outcome(), outcome(likelihood=-2.0)])
    assert (score.edits, score.well_formed, score.likelihood) == (3, 1, -2)
    assert score.intervals["likelihood"] == (-2, -2)
    assert summarize("remove", [outcome()]).likelihood is None


def test_where_all_agree_the_interval_is_a_point():
    score = summarize("remove", [outcome()] * 9)
    assert score.harmonic == score.clean == 1
    assert set(score.intervals) == {"success", "gone", "kept", "invented", "clean", "well_formed", "harmonic"}
    for name, interval in score.intervals.items():
        assert interval == pytest.approx((0, 0) if name == "invented" else (1, 1))


def test_without_success_the_harmonic_mean_is_nothing():
    score = summarize("remove", [outcome(success=False)] * 5)
    assert (score.success, score.kept, score.harmonic) == (0, 1, 0)
    assert score.intervals["harmonic"] == (0, 0)
    assert summarize("remove", [outcome(success=False, kept=0.0)] * 5).harmonic == 0


def test_intervals_have_the_width_of_a_share():
    score = summarize("remove", [outcome(success=i % 4 != 0) for i in range(400)])
    low, high = score.intervals["success"]
    assert low < score.success == 0.75 < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.75 * 0.25 / 400), rel=0.15)
    few = summarize("remove", [outcome(success=i % 4 != 0) for i in range(40)]).intervals["success"]
    assert few[1] - few[0] > high - low


def test_intervals_come_from_the_seed():
    outcomes = [outcome(kept=i / 20) for i in range(20)]
    assert summarize("remove", outcomes, seed=3) == summarize("remove", outcomes, seed=3)
    assert summarize("remove", outcomes, seed=3).intervals != summarize("remove", outcomes, seed=4).intervals


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 0.5, 1]), st.booleans()), min_size=1, max_size=12))
def test_identities_of_any_score(rows):
    score = summarize("remove", [outcome(s, k, ["cow"] if i else []) for s, k, i in rows], rounds=50)
    assert score.clean <= score.success <= score.gone
    assert min(score.success, score.kept) - 1e-9 <= score.harmonic <= max(score.success, score.kept) + 1e-9
    for low, high in score.intervals.values():
        assert 0 <= low <= high <= 1 + 1e-9


def test_a_single_edit_and_none():
    assert summarize("replace", [outcome()]).intervals["success"] == (1, 1)
    with pytest.raises(SpecError, match="there are no edits to sum up: no baseline names an object that is in its"):
        summarize("remove", [])


# Running them, on a model that does as it is told


class Obedient:
    """Says what is in the picture, without the words of the plan's atlas name; remembers how it was asked."""

    def __init__(self, world, tiles=1):
        self.world, self.asked, self.tiles = world, [], tiles
        self.vlm = self

    def grid(self, size):
        return self

    def captions(self, images, plans, prompt):
        self.asked.append((len(images), prompt))
        there = {id(case.image): case.objects for case in self.world.cases}
        return [
            [" ".join(sorted(there[id(image)] - {plan.atlas if plan else ""})) + "." for plan in own]
            for image, own in zip(images, plans, strict=True)
        ]


def test_edits_run_in_batches_and_in_order():
    world = world_of("dog cat", "ball", "cat tree", "bird cow", "cow")
    steerer, steps = Obedient(world), []
    said = caption_baselines(steerer, world, "What?", batch_size=2)
    assert said == ["cat dog.", "ball.", "cat tree.", "bird cow.", "cow."]
    assert steerer.asked == [(2, "What?"), (2, "What?"), (1, "What?")]
    large = Obedient(world, tiles=50)
    assert caption_baselines(large, world, "What?") == said
    assert [count for count, _ in large.asked] == [2, 2, 1]  # of 128 tiles at once
    tasks = make_tasks(world, said, "remove")
    outcomes = run_edits(steerer, world, tasks, lambda task: Plan(atlas=task.minus), batch_size=3, step=steps.append)
    assert steps == [3, 2]
    assert [one.task for one in outcomes] == tasks
    assert all(one.clean for one in outcomes)
    idle = run_edits(steerer, world, tasks, lambda task: Plan())
    assert not any(one.success for one in idle)
    assert summarize("remove", idle).kept == 1


def test_a_case_holds_a_picture_or_reads_it(tmp_path):
    picture = Image.new("RGB", (4, 3), "red")
    assert Case(picture, frozenset()).image is picture
    picture.save(tmp_path / "a.png")
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        case = Case(path, frozenset())
        assert case.image.size == (4, 3)
        assert case.image is not case.image


# How likely a caption is, on toyland's own model


@pytest.fixture(scope="module")
def world():
    return toyland_world(91, 6)


@pytest.fixture(scope="module")
def said(steerer, world):
    return caption_baselines(steerer, world)


def without_grammar(world):
    return replace(world, read=lambda caption: replace(world.read(caption), well_formed=None))


def generated(vlm, image):
    """The mean log-probability of the tokens of a caption, its end with them, by generation itself."""
    inputs = vlm.inputs([image])
    got = vlm.model.generate(
        **inputs, do_sample=False, max_new_tokens=64, output_logits=True, return_dict_in_generate=True
    )
    new = got.sequences[0, inputs["input_ids"].shape[1] :]
    return torch.stack(got.logits)[:, 0].log_softmax(-1).gather(-1, new[:, None]).mean().item()


def test_a_likelihood_is_what_generation_gives(steerer, world, said):
    images = [case.image for case in world.cases]
    assert len({image.size for image in images}) > 1  # so that the rows of a batch are padded
    got = likelihoods(steerer.vlm, images, [[caption] for caption in said])
    expected = [[generated(steerer.vlm, image)] for image in images]
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_texts_of_any_length_share_a_batch(steerer, world, said, no_hooks_left):
    no_hooks_left(steerer.vlm.model)
    images, texts = [case.image for case in world.cases[:2]], [[said[0], "", "dog", said[0]], [said[1] * 3]]
    together = likelihoods(steerer.vlm, images, texts)
    assert [len(own) for own in together] == [4, 1]
    assert together[0][0] == together[0][3]
    for image, own, values in zip(images, texts, together, strict=True):
        for text, value in zip(own, values, strict=True):
            np.testing.assert_allclose(likelihoods(steerer.vlm, [image], [[text]]), [[value]], atol=1e-4)


def test_what_is_no_sentence_is_less_likely(steerer, world, said):
    words = said[0].split()
    broken = [" ".join(reversed(words)), " ".join(words[:-1]), said[0] + " and", "", said[3]]
    ((own, *others),) = likelihoods(steerer.vlm, [world.cases[0].image], [[said[0], *broken]])
    assert -0.5 < own <= 0
    assert all(other < own - 0.3 for other in others)


def test_a_text_may_look_like_a_special_token(steerer, world):
    ((value,),) = likelihoods(steerer.vlm, [world.cases[0].image], [["a <image> of <|im_end|>"]])
    assert np.isfinite(value)


def test_likelihoods_of_nothing_and_of_too_much(steerer, world):
    image = world.cases[0].image
    assert likelihoods(steerer.vlm, [], []) == []
    assert likelihoods(steerer.vlm, [image], [[]]) == [[]]
    with pytest.raises(SpecError, match="2 lists of texts for 1 pictures; give each picture one"):
        likelihoods(steerer.vlm, [image], [["a dog"], ["a cat"]])


def test_every_token_that_ends_an_answer_counts(steerer, world, said, monkeypatch):
    vlm = replace(steerer.vlm, processor=copy.deepcopy(steerer.vlm.processor))
    image, settings = world.cases[0].image, vlm.model.generation_config
    ((one,),) = likelihoods(vlm, [image], [[said[0]]])
    monkeypatch.setattr(settings, "eos_token_id", [settings.eos_token_id, vlm.processor.tokenizer.pad_token_id])
    ((two,),) = likelihoods(vlm, [image], [[said[0]]])
    assert one <= two <= 0
    monkeypatch.setattr(settings, "eos_token_id", None)
    assert likelihoods(vlm, [image], [[said[0]]]) == [[one]]  # the tokenizer knows
    vlm.processor.tokenizer.eos_token = None
    with pytest.raises(ModelError, match="captioner names no token that ends an answer; set its eos_token_id"):
        likelihoods(vlm, [image], [[said[0]]])


def test_edits_are_weighed_where_there_is_no_grammar(steerer, world, said):
    tasks, bare = make_tasks(world, said, "remove"), without_grammar(world)

    def run(world, **options):
        return run_edits(steerer, world, tasks, lambda task: steerer.plan(minus=[task.minus]), batch_size=4, **options)

    plain, weighed = run(world), run(bare)
    assert [one.caption for one in plain] == [one.caption for one in weighed]
    assert all(one.likelihood is None and one.well_formed is not None for one in plain)
    assert all(one.well_formed is None for one in weighed)
    for one in weighed:
        texts = [[one.caption, one.task.baseline]]
        ((after, before),) = likelihoods(steerer.vlm, [world.cases[one.task.case].image], texts)
        assert one.likelihood == pytest.approx(after - before, abs=1e-4)
    assert any(one.likelihood < 0 for one in weighed)
    both = run(world, likelihood=True)
    assert [one.likelihood for one in both] == [one.likelihood for one in weighed]
    assert [one.well_formed for one in both] == [one.well_formed for one in plain]
    assert all(one.likelihood is one.well_formed is None for one in run(bare, likelihood=False))


def test_a_caption_that_stays_is_as_likely_as_it_was(steerer, world, said):
    tasks = make_tasks(world, said, "remove")
    idle = run_edits(steerer, world, tasks, lambda task: Plan(), likelihood=True)
    assert [one.likelihood for one in idle] == [0] * len(tasks)


# Toyland


@pytest.mark.parametrize("count", [-1, 4])
def test_scenes_that_there_are_none_of_are_refused(count):
    with pytest.raises(SpecError, match=rf"min_objects is {count}; a scene of toyland has 0 to 3 objects\."):
        toyland_world(5, 1, min_objects=count)


def test_counts_and_shares_that_cannot_be_meant_are_refused():
    for count in (0, -3):
        with pytest.raises(SpecError, match=rf"count is {count}; take at least 1 scene\."):
            toyland_world(5, count)
    for visible in (-0.1, 1.5, float("nan")):
        with pytest.raises(SpecError, match=rf"min_visible is {visible:g}; it is a share, 0 to 1\."):
            toyland_world(5, 1, min_visible=visible)


def test_the_bounds_themselves_are_scenes():
    assert all(len(case.objects) == 3 for case in toyland_world(5, 3, min_objects=3, min_visible=1).cases)
    assert len(toyland_world(5, 3, min_objects=0, min_visible=0).cases) == 3


def test_toyland_gives_scenes_with_their_truth():
    world = toyland_world(77, 5)
    assert len(world.cases) == 5
    assert all(len(case.objects) >= 2 and case.objects <= set(world.words) for case in world.cases)
    again = toyland_world(77, 5)
    assert [case.image.tobytes() for case in again.cases] == [case.image.tobytes() for case in world.cases]


def test_toylands_captions_are_read_by_its_grammar():
    from elude_steer.toyland import scenes

    world = toyland_world(77, 1)
    for scene in scenes(77, 20):
        said = world.read(scene.caption)
        assert said.well_formed
        assert said.objects <= set(scene.objects)
    nonsense = world.read("of of the")
    assert not nonsense.well_formed
    assert nonsense.objects == frozenset()


def test_worlds_of_other_scenes_have_other_names():
    names = [
        toyland_world(5, 1, min_objects=count, min_visible=share).name
        for count, share in [(2, 0.6), (1, 0.6), (2, 0.5)]
    ]
    assert len({*names, toyland_world(6, 1).name}) == 4


def test_an_outcome_says_plainly_what_counts():
    good = outcome()
    assert good.success
    assert good.clean
    for change in ({"gone": False}, {"named": False}, {"kept": 0.9}, {"invented": ("cow",)}):
        assert not replace(good, **change).clean
