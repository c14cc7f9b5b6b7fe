"""POPE: yes-or-no questions about objects that are in an image and about others that are not, before and after an edit.

After Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (2023). Each image has as many
questions whose answer is yes as questions whose answer is no. The latter ask for a random class, for the most frequent
class that is absent, or for the class that most often occurs with one that is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.benchmarks.answers import Answerer, Answers, Inquiry, answer_all, ask_model
from elude_steer.evaluation.benchmarks.dataset import AnnotatedSet, images_for, make_world, rank_classes
from elude_steer.evaluation.benchmarks.measured import Metric, ResultRow, measure_rows, ratio
from elude_steer.evaluation.benchmarks.options import QUESTION, BenchmarkOptions, check_template, format_question
from elude_steer.evaluation.benchmarks.result import BenchmarkResult, Example, describe_run, list_names
from elude_steer.evaluation.benchmarks.rows import EDIT, erasing_rows
from elude_steer.evaluation.edits.annotations import AnnotatedImage
from elude_steer.steering.steerer import Steerer

SPLITS = ("random", "popular", "adversarial")
_TP, _FP, _TN, _FN, _UNCLEAR = range(5)
_ALL = (_TP, _FP, _TN, _FN)


def _f1(means: np.ndarray) -> np.ndarray:
    return ratio((_TP, _TP), (_TP, _TP, _FP, _FN))(means)


METRICS: Mapping[str, Metric] = {
    "accuracy": ratio((_TP, _TN), _ALL),
    "precision": ratio(_TP, (_TP, _FP)),
    "recall": ratio(_TP, (_TP, _FN)),
    "F1": _f1,
    "yes": ratio((_TP, _FP), _ALL),
    "unclear": ratio(_UNCLEAR, _ALL),
}


@dataclass(frozen=True)
class Question:
    """A question about one class in one image.

    Attributes:
        name: the class.
        present: whether the answer is yes.
        splits: those that it belongs to; none for a question about a class that the edit removes.
    """

    name: str
    present: bool
    splits: tuple[str, ...] = ()


def read_answer(text: str) -> bool:
    """Whether an answer means yes, by POPE's rule of thumb: no `no` or `not` among the words of its first sentence."""
    return not {"no", "not"} & set(_first_words(text))


def is_clear(text: str) -> bool:
    """Whether an answer says yes, no or not in its first sentence; POPE reads all others as yes."""
    return bool({"yes", "no", "not"} & set(_first_words(text)))


def _first_words(text: str) -> list[str]:
    return re.split(r"[\s,!?;:]+", text.partition(".")[0].lower().strip())


def make_questions(
    data: AnnotatedSet,
    images: Sequence[AnnotatedImage],
    erased: Sequence[str],
    skipped: Set[str],
    options: BenchmarkOptions,
) -> list[list[Question]]:
    """The questions about each image: those of the three splits, and one about each erased class.

    The questions whose answer is yes are the same in all splits.

    Args:
        data: all images, in which classes are counted.
        images: those to ask about.
        erased: the classes that the edit removes; no split asks for them.
        skipped: further classes that no split asks for, such as those that the edit adds.
        options: the seed and the number of questions.
    """
    left_out = {*erased, *skipped}
    together = _count_pairs(data.images)
    classes = [name for name in rank_classes(data, data.images) if name not in left_out]
    questions = []
    for number, image in enumerate(images):
        rng = np.random.default_rng([options.seed, number])
        present = [name for name in data.classes if name in image.objects - left_out]
        positive = rng.permutation(present)[: options.per_image].tolist()
        absent = [name for name in classes if name not in image.objects]
        shuffled = rng.permutation(absent).tolist()
        negative: dict[str, list[str]] = {
            "random": shuffled[: len(positive)],
            "popular": absent[: len(positive)],
            "adversarial": _choose_adversarial(positive, absent, shuffled, together),
        }
        own = [Question(name, True, SPLITS) for name in positive]
        for name in dict.fromkeys(name for names in negative.values() for name in names):
            own.append(Question(name, False, tuple(split for split in SPLITS if name in negative[split])))
        questions.append(own + [Question(name, name in image.objects) for name in erased])
    return questions


def _count_pairs(images: Sequence[AnnotatedImage]) -> dict[str, Counter[str]]:
    """For each class, in how many images each other class occurs with it."""
    together: dict[str, Counter[str]] = {}
    for image in images:
        for name in image.objects:
            together.setdefault(name, Counter()).update(image.objects - {name})
    return together


def _choose_adversarial(
    positive: Sequence[str], absent: Sequence[str], shuffled: Sequence[str], together: Mapping[str, Counter[str]]
) -> list[str]:
    """For each class that is there, the absent one that most often occurs with it; at random where none ever does."""
    chosen: list[str] = []
    for name in positive:
        free = [one for one in absent if one not in chosen]
        best = max(free, key=lambda one: together[name][one])  # the more frequent of two that occur as often
        chosen.append(best if together[name][best] else next(one for one in shuffled if one not in chosen))
    return chosen


def run_pope(
    steerer: Steerer[Atlas], data: AnnotatedSet, options: BenchmarkOptions, *, ask: Answerer = ask_model
) -> BenchmarkResult:
    """Ask about objects before and after classes are erased.

    Args:
        steerer: the model and its atlas.
        data: the images.
        options: the edit and the images.
        ask: answers the questions; by default the model itself.
    """
    template = check_template(options.prompt or QUESTION)
    erased, added = data.find_classes(options.minus, "minus"), data.classes_among(options.plus)
    images = images_for("pope", data, options)
    questions = make_questions(data, images, erased, added, options)
    rows = erasing_rows(steerer, rank_classes(data, images), {*erased, *added}, options)
    inquiries = [
        Inquiry(number, options.minus, tuple(format_question(template, one.name) for one in own))
        for number, own in enumerate(questions)
    ]
    world = make_world(data, images)
    answers = answer_all(rows, world, inquiries, max_new_tokens=options.max_new_tokens, work=options.work, ask=ask)
    names = [row.name for row in rows]
    table = score_answers(questions, answers, names, list_names(erased), options.seed)
    return BenchmarkResult(
        "pope",
        describe_run(steerer, data, options, template, len(images)),
        tuple(METRICS),
        tuple(table),
        _list_examples(world.cases, inquiries, answers, names),
        _list_notes(answers),
    )


def score_answers(
    questions: Sequence[Sequence[Question]], answers: Answers, rows: Sequence[str], erased: str, seed: int = 0
) -> list[ResultRow]:
    """The table: each split without the erased classes, then these where they are and where they are not.

    Args:
        questions: of each image.
        answers: by image, question and row.
        rows: the names of the rows.
        erased: the erased classes in words.
        seed: seed of the resampling.
    """
    table: list[ResultRow] = []
    groups = {split: [[split in q.splits for q in own] for own in questions] for split in SPLITS}
    for there, name in ((True, f"{erased}, shown"), (False, f"{erased}, not shown")):
        groups[name] = [[not q.splits and q.present is there for q in own] for own in questions]
    for group, chosen in groups.items():
        counts = {row: _count(questions, answers, chosen, number) for number, row in enumerate(rows)}
        metrics = METRICS if group in SPLITS else {name: METRICS[name] for name in ("yes", "unclear")}
        table += measure_rows(group, counts, metrics, seed)
    return table


def _count(
    questions: Sequence[Sequence[Question]], answers: Answers, chosen: Sequence[Sequence[bool]], row: int
) -> np.ndarray:
    """Counts `(images, 5)` of the chosen questions, for the images that have one."""
    counted = []
    for own, texts, mask in zip(questions, answers, chosen, strict=True):
        counts = np.zeros(5)
        for question, text, is_chosen in zip(own, texts, mask, strict=True):
            if is_chosen:
                yes = read_answer(text[row])
                counts[(_TP if yes else _FN) if question.present else (_FP if yes else _TN)] += 1
                counts[_UNCLEAR] += not is_clear(text[row])
        if any(mask):
            counted.append(counts)
    return np.array(counted).reshape(-1, 5)


def _list_examples(
    cases: Sequence[object], inquiries: Sequence[Inquiry], answers: Answers, rows: Sequence[str], limit: int = 12
) -> tuple[Example, ...]:
    """The first images of which an answer changes, with that answer."""
    examples: list[Example] = []
    edit = rows.index(EDIT)
    for inquiry, texts in zip(inquiries, answers, strict=True):
        for question, text in zip(inquiry.questions, texts, strict=True):
            if read_answer(text[0]) != read_answer(text[edit]) and len(examples) < limit:
                examples.append(Example(cases[inquiry.case], question, dict(zip(rows, text, strict=True))))
                break
    return tuple(examples)


def _list_notes(answers: Answers) -> tuple[str, ...]:
    texts = [text for own in answers for question in own for text in question]
    unclear = sum(not is_clear(text) for text in texts)
    if unclear <= len(texts) / 20:
        return ()
    return (
        f"{unclear:,} of {len(texts):,} answers say neither yes nor no and are read as yes, such as "
        f"'{next(text for text in texts if not is_clear(text))}'; this model may not answer questions.",
    )
