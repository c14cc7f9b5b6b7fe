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
    """The words that are objects or places; a sentence ends with a full stop."""
    words = caption.rstrip(".").split()
    objects, places = (frozenset(words) & set(known) for known in (OBJECTS, PLACES))
    return Reading(objects, places, caption.endswith("."), frozenset(w for w in objects if words.count(w) > 1))


def make_world(*images, vocabulary=OBJECTS):
    """A world whose images contain the objects and the place in each text."""
    words = [frozenset(text.split()) for text in images]
    cases = [
        Case(Image.new("RGB", (8, 8 + i)), there - set(PLACES), places=there & set(PLACES))
        for i, there in enumerate(words)
    ]
    return World("hand-made", cases, vocabulary, read, PLACES)


def make_outcome(success=True, kept=1.0, invented=(), well_formed=True, likelihood=None, repeated=()):
    made = Outcome(Task(0, "", "dog"), "", success, True, kept, tuple(invented), well_formed, tuple(repeated))
    return replace(made, likelihood=likelihood)


# One edit


@pytest.mark.parametrize(
    ("after", "gone", "kept", "invented", "clean"),
    [
        ("a cat and a ball in the park.", True, 1.0, (), True),
        ("a dog a cat and a ball in the park.", False, 1.0, (), False),
        ("a cat in the park.", True, 2 / 3, (), False),
        ("nothing", True, 0.0, (), False),
        ("a cow a bird a cat and a ball in the park.", True, 1.0, ("bird", "cow"), False),
        (
            "a cat a ball and a tree in the park.",
            True,
            1.0,
            (),
            True,
        ),  # the tree is in the image; the baseline did not name it
        ("a cat and a ball on the beach.", True, 2 / 3, (), False),
        ("a cat and a ball in the park", True, 1.0, (), False),  # no sentence
        ("a cat and a ball and a cat in the park.", True, 1.0, (), False),  # the cat twice
    ],
)
def test_a_removal_is_scored_by_what_the_captions_say(after, gone, kept, invented, clean):
    world = make_world("dog cat ball tree")
    got = score_caption(world, Task(0, "a dog a cat and a ball in the park.", "dog"), after)
    assert (got.gone, got.plus_named, got.invented) == (gone, True, invented)
    assert got.kept == pytest.approx(kept)
    assert got.success is gone
    assert got.clean is clean
    assert got.well_formed is after.endswith(".")


@pytest.mark.parametrize(
    ("after", "gone", "plus_named", "invented", "clean"),
    [
        ("a cow and a cat.", True, True, (), True),
        ("a cat.", True, False, (), False),
        ("a dog a cow and a cat.", False, True, (), False),
        ("a cow a bird and a cat.", True, True, ("bird",), False),
    ],
)
def test_a_replacement_must_also_name_the_new_object(after, gone, plus_named, invented, clean):
    got = score_caption(make_world("dog cat"), Task(0, "a dog and a cat.", "dog", "cow"), after)
    assert (got.gone, got.plus_named, got.invented, got.clean) == (gone, plus_named, invented, clean)
    assert got.success is (gone and plus_named)
    assert got.kept == 1


def test_only_what_the_edit_repeats_counts_against_it():
    world, task = make_world("dog cat ball"), Task(0, "a dog a cat and a cat and a ball.", "dog")
    same, more = (score_caption(world, task, f"a cat and a cat and a {text}.") for text in ("ball", "ball and a ball"))
    assert (same.repeated, same.clean) == ((), True)  # the baseline names the cat twice, too
    assert (more.repeated, more.clean, more.success) == (("ball",), False, True)


@pytest.mark.parametrize(
    ("after", "gone", "plus_named", "kept", "invented", "clean"),
    [
        ("a cow a bird and a ball.", True, True, 1.0, (), True),
        ("a cow and a bird.", True, True, 0.0, (), False),
        ("a cow a cat and a ball.", False, False, 1.0, (), False),  # only the first
        ("a bird a dog and a ball.", False, False, 1.0, (), False),  # only the second
        ("a cow a bird a cat and a ball.", False, True, 1.0, (), False),
        ("a cow and a ball.", True, False, 1.0, (), False),
        ("a cow a bird a tree and a ball.", True, True, 1.0, ("tree",), False),
    ],
)
def test_two_replacements_must_both_succeed(after, gone, plus_named, kept, invented, clean):
    task = Task(0, "a dog a cat and a ball.", "dog", "cow", second=("cat", "bird"))
    assert (task.removed, task.added) == (("dog", "cat"), ("cow", "bird"))
    got = score_caption(make_world("dog cat ball"), task, after)
    assert (got.gone, got.plus_named, got.kept, got.invented) == (gone, plus_named, kept, invented)
    assert got.success is (gone and plus_named)
    assert got.clean is clean


@pytest.mark.parametrize(
    ("after", "gone", "plus_named", "kept", "clean"),
    [
        ("a dog and a cat in the park.", True, True, 1.0, True),
        ("a dog in the park.", True, True, 0.5, False),
        ("a dog and a cat on the beach.", False, False, 1.0, False),
        ("a dog and a cat.", True, False, 1.0, False),
        ("a dog and a cat on the beach in the park.", False, True, 1.0, False),
        ("a dog a cat and a cow in the park.", True, True, 1.0, False),
    ],
)
def test_a_new_place_keeps_the_objects(after, gone, plus_named, kept, clean):
    task = Task(0, "a dog and a cat on the beach.", "beach", "park")
    got = score_caption(make_world("dog cat beach"), task, after)
    assert (got.gone, got.plus_named, got.kept, got.clean) == (gone, plus_named, kept, clean)


def test_everything_is_kept_if_the_baseline_named_nothing_else():
    assert score_caption(make_world("dog"), Task(0, "a dog.", "dog"), "").kept == 1


@settings(deadline=None)
@given(st.data())
def test_identities_of_any_outcome(data):
    words = st.lists(st.sampled_from([*OBJECTS, *PLACES]), max_size=6).map(" ".join)
    there = ["dog", *data.draw(st.lists(st.sampled_from(OBJECTS), max_size=4))]
    plus = data.draw(st.sampled_from([None, "cow"]))
    world = make_world(" ".join(there))
    task = Task(0, data.draw(words) + " dog", "dog", plus)
    after = data.draw(words) + data.draw(st.sampled_from(["", "."]))
    got = score_caption(world, task, after)
    assert 0 <= got.kept <= 1
    assert got.success <= got.gone
    assert not got.clean or (got.success and got.kept == 1 and got.invented == got.repeated == ())
    assert not got.clean or got.well_formed
    assert not set(got.invented) & (set(there) | {plus})
    if plus is None:  # an unchanged caption loses nothing
        same = score_caption(world, task, task.baseline)
        assert (same.gone, same.kept) == (False, 1)


# Tasks


def test_tasks_remove_objects_that_are_there_and_named():
    world = make_world("dog cat", "dog", "ball", "")
    baselines = ["a dog and a cow.", "a cat.", "a ball.", "a dog."]
    tasks = make_tasks(world, baselines, "remove")
    assert [(task.case, task.minus, task.plus) for task in tasks] == [(0, "dog", None), (2, "ball", None)]
    assert [task.baseline for task in tasks] == [baselines[0], baselines[2]]


def test_a_replacement_is_neither_there_nor_named():
    world = make_world(*["dog cat"] * 60)
    tasks = make_tasks(world, ["a dog a cat and a bird."] * 60, "replace", seed=4)
    assert {task.minus for task in tasks} == {"dog", "cat"}
    assert {task.plus for task in tasks} == {"ball", "cow", "tree"}


def test_tasks_depend_on_the_seed_and_the_image_only():
    baselines = ["a dog a cat a ball and a tree."] * 30
    world = make_world(*["dog cat ball tree"] * 30)
    tasks = make_tasks(world, baselines, "replace", seed=1)
    assert make_tasks(world, baselines, "replace", seed=1) == tasks
    assert make_tasks(world, baselines, "replace", seed=2) != tasks
    # Leaving out the last images does not change the edits of the first.
    assert make_tasks(make_world(*["dog cat ball tree"] * 10), baselines[:10], "replace", seed=1) == tasks[:10]
    # Both kinds remove the same objects, so that they can be compared.
    assert [task.minus for task in make_tasks(world, baselines, "remove", seed=1)] == [task.minus for task in tasks]


def test_an_image_without_a_possible_replacement_is_skipped():
    world = make_world("dog cat", "dog", vocabulary=("dog", "cat"))
    assert [task.case for task in make_tasks(world, ["a dog.", "a dog."], "replace")] == [1]
    assert len(make_tasks(world, ["a dog.", "a dog."], "remove")) == 2


def test_two_objects_are_replaced_where_two_are_there_and_named():
    world = make_world(*["dog cat tree"] * 40, "dog", "dog cat")
    baselines = [*["a dog a cat and a cow."] * 40, "a dog.", "a dog."]
    tasks = make_tasks(world, baselines, "two", seed=3)
    assert [task.case for task in tasks] == list(range(40))  # the others have or name only one
    assert {task.removed for task in tasks} == {("dog", "cat"), ("cat", "dog")}
    assert {frozenset(task.added) for task in tasks} == {frozenset({"ball", "bird"})}  # the cow is named
    assert all(task.present and task.second for task in tasks)
    assert make_tasks(world, baselines, "two", seed=3) == tasks
    assert make_tasks(make_world("dog cat", vocabulary=("dog", "cat", "cow")), ["a dog a cat."], "two") == []


def test_a_place_is_replaced_by_another_place():
    world = make_world("dog beach", "dog park", "dog beach", "cat")
    baselines = ["a dog on the beach.", "a dog in the park.", "a dog in the park.", "a cat on the beach."]
    tasks = make_tasks(world, baselines, "place")
    # In the others the baseline names a wrong place, or nobody knows the right one.
    assert [(task.case, task.minus, task.plus) for task in tasks] == [(0, "beach", "park"), (1, "park", "beach")]
    assert make_tasks(replace(world, places=()), baselines, "place") == []


def test_an_object_that_is_not_there_is_added_where_a_caption_has_room():
    world = replace(make_world("dog beach", "dog cat ball", "dog cat"), max_objects=3)
    baselines = ["a dog on the beach.", "a dog a cat a ball.", "a dog a bird."]
    (task,) = make_tasks(world, baselines, "add")  # the others have three objects, one of them only in the caption
    assert (task.case, task.removed, task.added) == (0, (), (task.plus,)) and task.plus not in ("dog", "")
    assert len(make_tasks(replace(world, max_objects=None), baselines, "add", seed=3)) == 3
    done = score_caption(world, task, f"a dog a {task.plus} on the beach.")
    assert done.clean and done.gone and done.kept == 1
    assert not score_caption(world, task, baselines[0]).success
    assert score_caption(world, task, f"a {task.plus} on the beach.").kept == 0.5
    assert toyland_world(3, 1).max_objects == 3


def test_an_unknown_kind_of_edit_is_refused():
    with pytest.raises(SpecError, match=r"an edit is 'remove', .*, 'absent' or 'add', not 'swap'\."):
        make_tasks(make_world("dog"), ["a dog."], "swap")


# Summaries


def test_a_summary_averages_outcomes():
    outcomes = [
        make_outcome(),
        make_outcome(invented=["cow", "bird"]),
        make_outcome(kept=0.5),
        make_outcome(success=False, kept=0.0, well_formed=False),
    ]
    score = summarize("remove", outcomes)
    assert (score.kind, score.edits) == ("remove", 4)
    assert (score.success, score.gone, score.kept) == (0.75, 0.75, 0.625)
    assert (score.invented, score.clean, score.well_formed) == (0.25, 0.25, 0.75)
    assert score.harmonic == pytest.approx(2 * 0.75 * 0.625 / (0.75 + 0.625))
    assert score.to_dict()["intervals"]["kept"] == score.intervals["kept"]


def test_without_a_grammar_well_formed_is_none():
    score = summarize("remove", [make_outcome(well_formed=None, likelihood=x) for x in (-1.0, -0.5, 0.0)])
    assert (score.well_formed, score.likelihood) == (None, -0.5)
    assert "well_formed" not in score.intervals
    low, high = score.intervals["likelihood"]
    assert -1 <= low < -0.5 < high <= 0
    assert score.to_dict()["likelihood"] == -0.5


def test_likelihood_averages_the_known_values():
    score = summarize("remove", [make_outcome(likelihood=-2.0), make_outcome(), make_outcome(likelihood=-2.0)])
    assert (score.edits, score.well_formed, score.likelihood) == (3, 1, -2)
    assert score.intervals["likelihood"] == (-2, -2)
    assert summarize("remove", [make_outcome()]).likelihood is None


def test_equal_outcomes_have_an_interval_of_zero_width():
    score = summarize("remove", [make_outcome()] * 9)
    assert score.harmonic == score.clean == 1
    assert set(score.intervals) == {"success", "gone", "kept", "invented", "clean", "well_formed", "harmonic"}
    for name, interval in score.intervals.items():
        assert interval == pytest.approx((0, 0) if name == "invented" else (1, 1))


def test_without_success_the_harmonic_mean_is_zero():
    score = summarize("remove", [make_outcome(success=False)] * 5)
    assert (score.success, score.kept, score.harmonic) == (0, 1, 0)
    assert score.intervals["harmonic"] == (0, 0)
    assert summarize("remove", [make_outcome(success=False, kept=0.0)] * 5).harmonic == 0


def test_intervals_have_the_width_of_a_binomial_share():
    score = summarize("remove", [make_outcome(success=i % 4 != 0) for i in range(400)])
    low, high = score.intervals["success"]
    assert low < score.success == 0.75 < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.75 * 0.25 / 400), rel=0.15)
    few = summarize("remove", [make_outcome(success=i % 4 != 0) for i in range(40)]).intervals["success"]
    assert few[1] - few[0] > high - low


def test_intervals_depend_on_the_seed():
    outcomes = [make_outcome(kept=i / 20) for i in range(20)]
    assert summarize("remove", outcomes, seed=3) == summarize("remove", outcomes, seed=3)
    assert summarize("remove", outcomes, seed=3).intervals != summarize("remove", outcomes, seed=4).intervals


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 0.5, 1]), st.booleans()), min_size=1, max_size=12))
def test_identities_of_any_score(rows):
    score = summarize("remove", [make_outcome(s, k, ["cow"] if i else []) for s, k, i in rows], rounds=50)
    assert score.clean <= score.success <= score.gone
    assert min(score.success, score.kept) - 1e-9 <= score.harmonic <= max(score.success, score.kept) + 1e-9
    for low, high in score.intervals.values():
        assert 0 <= low <= high <= 1 + 1e-9


def test_summaries_of_one_edit_and_of_none():
    assert summarize("replace", [make_outcome()]).intervals["success"] == (1, 1)
    with pytest.raises(SpecError, match="there are no edits to summarize: no baseline names an object that is in its"):
        summarize("remove", [])


# Running edits, on a model that follows the plan


class Obedient:
    """Names all objects in the image except the plan's `atlas`; records the calls."""

    def __init__(self, world, tiles=1):
        self.world, self.calls, self.tiles = world, [], tiles
        self.vlm = self

    def grid(self, size):
        return self

    def captions(self, images, plans, prompt):
        self.calls.append((len(images), prompt))
        there = {id(case.image): case.objects for case in self.world.cases}
        return [
            [" ".join(sorted(there[id(image)] - {plan.atlas if plan else ""})) + "." for plan in image_plans]
            for image, image_plans in zip(images, plans, strict=True)
        ]


def test_edits_run_in_batches_and_in_order():
    world = make_world("dog cat", "ball", "cat tree", "bird cow", "cow")
    steerer, progress = Obedient(world), []
    baselines = caption_baselines(steerer, world, "What?", batch_size=2)
    assert baselines == ["cat dog.", "ball.", "cat tree.", "bird cow.", "cow."]
    assert steerer.calls == [(2, "What?"), (2, "What?"), (1, "What?")]
    large = Obedient(world, tiles=50)
    assert caption_baselines(large, world, "What?") == baselines
    assert [count for count, _ in large.calls] == [2, 2, 1]  # at most 128 tiles at once
    tasks = make_tasks(world, baselines, "remove")
    outcomes = run_edits(
        steerer, world, tasks, lambda task: Plan(atlas=task.minus), batch_size=3, on_progress=progress.append
    )
    assert progress == [3, 2]
    assert [one.task for one in outcomes] == tasks
    assert all(one.clean for one in outcomes)
    idle = run_edits(steerer, world, tasks, lambda task: Plan())
    assert not any(one.success for one in idle)
    assert summarize("remove", idle).kept == 1


def test_a_case_holds_an_image_or_reads_its_file(tmp_path):
    image = Image.new("RGB", (4, 3), "red")
    assert Case(image, frozenset()).image is image
    image.save(tmp_path / "a.png")
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        case = Case(path, frozenset())
        assert case.image.size == (4, 3)
        assert case.image is not case.image


# The likelihood of captions, on toyland's model


@pytest.fixture(scope="module")
def world():
    return toyland_world(91, 6)


@pytest.fixture(scope="module")
def baselines(steerer, world):
    return caption_baselines(steerer, world)


def without_grammar(world):
    return replace(world, read=lambda caption: replace(world.read(caption), well_formed=None))


def generation_likelihood(vlm, image):
    """The mean log-probability of a generated caption's tokens, including its end."""
    inputs = vlm.inputs([image])
    got = vlm.model.generate(
        **inputs, do_sample=False, max_new_tokens=64, output_logits=True, return_dict_in_generate=True
    )
    new = got.sequences[0, inputs["input_ids"].shape[1] :]
    return torch.stack(got.logits)[:, 0].log_softmax(-1).gather(-1, new[:, None]).mean().item()


def test_likelihoods_equal_those_of_generation(steerer, world, baselines):
    images = [case.image for case in world.cases]
    assert len({image.size for image in images}) > 1  # so that rows are padded
    got = likelihoods(steerer.vlm, images, [[caption] for caption in baselines])
    expected = [[generation_likelihood(steerer.vlm, image)] for image in images]
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_texts_of_different_lengths_share_a_batch(steerer, world, baselines, no_hooks_left):
    no_hooks_left(steerer.vlm.model)
    images, texts = (
        [case.image for case in world.cases[:2]],
        [[baselines[0], "", "dog", baselines[0]], [baselines[1] * 3]],
    )
    together = likelihoods(steerer.vlm, images, texts)
    assert [len(values) for values in together] == [4, 1]
    assert together[0][0] == together[0][3]
    for image, image_texts, values in zip(images, texts, together, strict=True):
        for text, value in zip(image_texts, values, strict=True):
            np.testing.assert_allclose(likelihoods(steerer.vlm, [image], [[text]]), [[value]], atol=1e-4)


def test_broken_and_wrong_captions_are_less_likely(steerer, world, baselines):
    words = baselines[0].split()
    broken = [" ".join(reversed(words)), " ".join(words[:-1]), baselines[0] + " and", "", baselines[3]]
    ((first, *others),) = likelihoods(steerer.vlm, [world.cases[0].image], [[baselines[0], *broken]])
    assert -0.5 < first <= 0
    assert all(other < first - 0.3 for other in others)


def test_a_text_may_contain_special_tokens(steerer, world):
    ((value,),) = likelihoods(steerer.vlm, [world.cases[0].image], [["a <image> of <|im_end|>"]])
    assert np.isfinite(value)


def test_likelihoods_need_one_list_of_texts_per_image(steerer, world):
    image = world.cases[0].image
    assert likelihoods(steerer.vlm, [], []) == []
    assert likelihoods(steerer.vlm, [image], [[]]) == [[]]
    with pytest.raises(SpecError, match="2 lists of texts for 1 images; give one list per image"):
        likelihoods(steerer.vlm, [image], [["a dog"], ["a cat"]])


def test_any_end_token_may_end_an_answer(steerer, world, baselines, monkeypatch):
    vlm = replace(steerer.vlm, processor=copy.deepcopy(steerer.vlm.processor))
    image, settings = world.cases[0].image, vlm.model.generation_config
    ((one,),) = likelihoods(vlm, [image], [[baselines[0]]])
    monkeypatch.setattr(settings, "eos_token_id", [settings.eos_token_id, vlm.processor.tokenizer.pad_token_id])
    ((two,),) = likelihoods(vlm, [image], [[baselines[0]]])
    assert one <= two <= 0
    monkeypatch.setattr(settings, "eos_token_id", None)
    assert likelihoods(vlm, [image], [[baselines[0]]]) == [[one]]  # the tokenizer has one
    vlm.processor.tokenizer.eos_token = None
    with pytest.raises(ModelError, match="captioner has no token that ends an answer; set its eos_token_id"):
        likelihoods(vlm, [image], [[baselines[0]]])


def test_likelihoods_are_computed_by_default_without_a_grammar(steerer, world, baselines):
    tasks, bare = make_tasks(world, baselines, "remove"), without_grammar(world)

    def run(world, **options):
        return run_edits(steerer, world, tasks, lambda task: steerer.plan(minus=[task.minus]), batch_size=4, **options)

    with_grammar, without = run(world), run(bare)
    assert [one.caption for one in with_grammar] == [one.caption for one in without]
    assert all(one.likelihood is None and one.well_formed is not None for one in with_grammar)
    assert all(one.well_formed is None for one in without)
    for one in without:
        texts = [[one.caption, one.task.baseline]]
        ((after, before),) = likelihoods(steerer.vlm, [world.cases[one.task.case].image], texts)
        assert one.likelihood == pytest.approx(after - before, abs=1e-4)
    assert any(one.likelihood < 0 for one in without)
    both = run(world, likelihood=True)
    assert [one.likelihood for one in both] == [one.likelihood for one in without]
    assert [one.well_formed for one in both] == [one.well_formed for one in with_grammar]
    assert all(one.likelihood is one.well_formed is None for one in run(bare, likelihood=False))


def test_an_unchanged_caption_has_likelihood_zero(steerer, world, baselines):
    tasks = make_tasks(world, baselines, "remove")
    idle = run_edits(steerer, world, tasks, lambda task: Plan(), likelihood=True)
    assert [one.likelihood for one in idle] == [0] * len(tasks)


# Toyland


@pytest.mark.parametrize("count", [-1, 4])
def test_impossible_numbers_of_objects_are_refused(count):
    with pytest.raises(SpecError, match=rf"min_objects is {count}; a scene of toyland has 0 to 3 objects\."):
        toyland_world(5, 1, min_objects=count)


def test_impossible_counts_and_shares_are_refused():
    for count in (0, -3):
        with pytest.raises(SpecError, match=rf"count is {count}; take at least 1 scene\."):
            toyland_world(5, count)
    for visible in (-0.1, 1.5, float("nan")):
        with pytest.raises(SpecError, match=rf"min_visible is {visible:g}; it is a share, 0 to 1\."):
            toyland_world(5, 1, min_visible=visible)


def test_the_bounds_are_allowed():
    assert all(len(case.objects) == 3 for case in toyland_world(5, 3, min_objects=3, min_visible=1).cases)
    assert len(toyland_world(5, 3, min_objects=0, min_visible=0).cases) == 3


def test_toyland_scenes_come_with_their_objects():
    world = toyland_world(77, 5)
    assert len(world.cases) == 5
    assert all(len(case.objects) >= 2 and case.objects <= set(world.vocabulary) for case in world.cases)
    assert all(len(case.places) == 1 and case.places <= set(world.places) for case in world.cases)
    again = toyland_world(77, 5)
    assert [case.image.tobytes() for case in again.cases] == [case.image.tobytes() for case in world.cases]


def test_toyland_captions_are_read_by_the_grammar():
    from elude_steer.toyland import scenes

    world = toyland_world(77, 1)
    for scene in scenes(77, 20):
        reading = world.read(scene.caption)
        assert reading.well_formed
        assert reading.objects <= set(scene.objects)
    nonsense = world.read("of of the")
    assert not nonsense.well_formed
    assert nonsense.objects == frozenset()
    assert world.read("a dog and a cat in a room").repeated == frozenset()
    assert world.read("a dog and a dog in a room").repeated == {"dog"}


def test_worlds_of_other_scenes_have_other_names():
    names = [
        toyland_world(5, 1, min_objects=count, min_visible=share).name
        for count, share in [(2, 0.6), (1, 0.6), (2, 0.5)]
    ]
    assert len({*names, toyland_world(6, 1).name}) == 4


def test_any_flaw_makes_an_outcome_unclean():
    good = make_outcome()
    assert good.success
    assert good.clean
    for change in (
        {"gone": False},
        {"plus_named": False},
        {"kept": 0.9},
        {"invented": ("cow",)},
        {"repeated": ("cat",)},
        {"well_formed": False},
    ):
        assert not replace(good, **change).clean
    assert replace(good, well_formed=None).clean  # nobody knows without a grammar
