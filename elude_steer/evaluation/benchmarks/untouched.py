"""Images that an edit should not touch, because they do not show what it removes: what changes all the same?

`run_absent` counts captions that change. `run_side_effects` measures how far the next-token distributions move (KL),
how natural the captions are to the unsteered model (perplexity), and whether they repeat themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.benchmarks.answers import Answerer, Inquiry, answer_all, ask_model, find_work
from elude_steer.evaluation.benchmarks.dataset import AnnotatedSet, images_for, make_world
from elude_steer.evaluation.benchmarks.measured import UNSTEERED, Metric, measure_rows, ratio
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.benchmarks.result import BenchmarkResult, Example, describe_run, list_names
from elude_steer.evaluation.benchmarks.rows import EDIT, Row, known_words, sparing_rows
from elude_steer.evaluation.edits.benchmark import Task, World, make_tasks, score_caption
from elude_steer.evaluation.edits.fluency import divergences, likelihoods, repetition
from elude_steer.evaluation.result_files import compute_in_parts
from elude_steer.models.prefix_cache import image_batches, run_prefix
from elude_steer.models.vlm import PROMPT
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer

ABSENT_METRICS: Mapping[str, Metric] = {"changed": ratio(1, 0), "kept": ratio(2, 0), "invented": ratio(3, 0)}
_KL, _LIKELIHOOD, _REPETITION, _WORDS = 2, 3, 4, 5
SIDE_EFFECT_METRICS: Mapping[str, Metric] = {
    "changed": ratio(1, 0),
    "KL": ratio(_KL, 0),
    "perplexity": lambda means: np.exp(-means[..., _LIKELIHOOD]),
    "repetition": ratio(_REPETITION, 0),
    "words": ratio(_WORDS, 0),
}


def run_absent(
    steerer: Steerer[Atlas], data: AnnotatedSet, options: BenchmarkOptions, *, ask: Answerer = ask_model
) -> BenchmarkResult:
    """Remove classes that are not in the images, and count the captions that change.

    Args:
        steerer: the model and its atlas.
        data: the images.
        options: the edit and the images; without words to remove, each image gets a random class that it lacks.
        ask: captions the images; by default the model itself.
    """
    rows, world, inquiries, captions = _caption(steerer, data, options, ask)
    baselines = captions[UNSTEERED]
    counts = {}
    for row, texts in captions.items():
        own = []
        for inquiry, before, text in zip(inquiries, baselines, texts, strict=True):
            outcome = score_caption(world, Task(inquiry.case, before, inquiry.minus[0], present=False), text)
            own.append((1, outcome.changed, outcome.kept, bool(outcome.invented)))
        counts[row] = np.array(own, dtype=float)
    table = measure_rows(_name_group(options), counts, ABSENT_METRICS, options.seed)
    about = describe_run(steerer, data, options, options.prompt or PROMPT, len(inquiries))
    examples = _list_examples(world, inquiries, captions, [row.name for row in rows])
    return BenchmarkResult("absent", about, tuple(ABSENT_METRICS), tuple(table), examples)


def run_side_effects(
    steerer: Steerer[Atlas], data: AnnotatedSet, options: BenchmarkOptions, *, ask: Answerer = ask_model
) -> BenchmarkResult:
    """Remove classes that are not in the images, and measure what else moves; arguments as of `run_absent`."""
    rows, world, inquiries, captions = _caption(steerer, data, options, ask)
    texts = [[captions[row.name][number] for row in rows] for number in range(len(inquiries))]
    by_inquiry = dict(zip(inquiries, texts, strict=True))

    def measure_part(part: Sequence[Inquiry]) -> list[Any]:
        found: list[Any] = []
        for batch, images in image_batches(
            steerer.vlm, part, lambda one: world.cases[one.case].image, MAX_BATCH_IMAGES
        ):
            found += _measure_batch(rows, batch, images, [by_inquiry[one] for one in batch])
        return found

    folder = find_work("side effects", rows, world, inquiries, texts, work=options.work)
    measured = compute_in_parts(folder, inquiries, measure_part, "measuring")
    counts = {}
    for number, row in enumerate(rows):
        own = [
            (1, text[number] != text[0], *values[number], repetition(text[number]), len(text[number].split()))
            for text, values in zip(texts, measured, strict=True)
        ]
        counts[row.name] = np.array(own, dtype=float)
    table = measure_rows(_name_group(options), counts, SIDE_EFFECT_METRICS, options.seed)
    about = describe_run(steerer, data, options, options.prompt or PROMPT, len(inquiries))
    examples = _list_examples(world, inquiries, captions, [row.name for row in rows])
    return BenchmarkResult("side-effects", about, tuple(SIDE_EFFECT_METRICS), tuple(table), examples)


def _caption(
    steerer: Steerer[Atlas], data: AnnotatedSet, options: BenchmarkOptions, ask: Answerer
) -> tuple[list[Row], World, list[Inquiry], dict[str, list[str]]]:
    """The rows, the images, what is removed from each, and the captions by row.

    Images whose unsteered caption names what is removed are left out: there, a change is no side effect.
    """
    world = make_world(data, images_for("absent", data, options))
    rows = sparing_rows(steerer, options)
    prompt = options.prompt or PROMPT
    answer = partial(answer_all, max_new_tokens=options.max_new_tokens, work=options.work, ask=ask)
    every = [Inquiry(number, (), (prompt,)) for number in range(len(world.cases))]
    baselines = [text for ((text,),) in answer(rows[:1], world, every)]
    inquiries = _choose_removals(steerer, world, baselines, data, options, prompt)
    answers = answer(rows[1:], world, inquiries)
    captions = {UNSTEERED: [baselines[one.case] for one in inquiries]}
    captions |= {row.name: [own[0][number] for own in answers] for number, row in enumerate(rows[1:])}
    return rows, world, inquiries, captions


def _choose_removals(
    steerer: Steerer[Atlas],
    world: World,
    baselines: Sequence[str],
    data: AnnotatedSet,
    options: BenchmarkOptions,
    prompt: str,
) -> list[Inquiry]:
    if options.minus:
        erased = set(data.find_classes(options.minus, "minus"))
        free = [number for number, text in enumerate(baselines) if not world.read(text).objects & erased]
        inquiries = [Inquiry(number, options.minus, (prompt,)) for number in free]
    else:
        known = replace(world, vocabulary=tuple(known_words(steerer, world.vocabulary, options.settings)))
        tasks = make_tasks(known, baselines, "absent", options.seed)
        inquiries = [Inquiry(task.case, (task.minus,), (prompt,)) for task in tasks]
    if not inquiries:
        raise SpecError(
            "every caption names what is to be removed, or no class of the images is one that the atlas knows."
        )
    return inquiries


def _measure_batch(
    rows: Sequence[Row], inquiries: Sequence[Inquiry], images: Sequence[Any], texts: Sequence[Sequence[str]]
) -> list[list[tuple[float, float]]]:
    """For each image and row, the divergence from the unsteered model and the likelihood of the row's caption."""
    vlm, prompt = rows[0].steerer.vlm, inquiries[0].questions[0]
    prefix = run_prefix(vlm, images, prompt)
    natural = likelihoods(vlm, images, texts, prompt, prefix=prefix)
    moved: list[list[float]] = []
    for row in rows:
        plans = [row.plan(one.minus) or Plan() for one in inquiries]
        if row.name == UNSTEERED:
            moved.append([0.0] * len(images))
        else:
            moved.append(divergences(row.steerer, images, plans, [own[0] for own in texts], prompt, prefix=prefix))
    return [[(moved[row][i], natural[i][row]) for row in range(len(rows))] for i in range(len(images))]


def _name_group(options: BenchmarkOptions) -> str:
    return f"without {list_names(options.minus)}" if options.minus else "a random class that is absent"


def _list_examples(
    world: World, inquiries: Sequence[Inquiry], captions: Mapping[str, Sequence[str]], rows: Sequence[str]
) -> tuple[Example, ...]:
    """The first images whose caption changes under the edit."""
    changed = [n for n, text in enumerate(captions[EDIT]) if text != captions[UNSTEERED][n]]
    return tuple(
        Example(
            world.cases[inquiries[n].case],
            f"minus {list_names(inquiries[n].minus)}",
            {row: captions[row][n] for row in rows},
        )
        for n in changed[:12]
    )
