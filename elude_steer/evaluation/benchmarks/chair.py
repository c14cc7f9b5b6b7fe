"""CHAIR: how much of what captions name is not in the image, before and after an edit.

After Rohrbach et al., "Object Hallucination in Image Captioning" (2018). A class is in an image if it is annotated or
if one of people's captions names it. Every mention counts, so that a dog that is named twice counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.benchmarks.answers import Answerer, Inquiry, answer_all, ask_model
from elude_steer.evaluation.benchmarks.dataset import AnnotatedSet, images_for, make_world, rank_classes
from elude_steer.evaluation.benchmarks.measured import UNSTEERED, Metric, ResultRow, measure_rows, ratio
from elude_steer.evaluation.benchmarks.options import DETAILED, BenchmarkOptions
from elude_steer.evaluation.benchmarks.result import BenchmarkResult, Example, describe_run, list_names
from elude_steer.evaluation.benchmarks.rows import EDIT, erasing_rows
from elude_steer.evaluation.edits.caption_reader import CaptionReader
from elude_steer.steering.steerer import Steerer

# The columns of the counts of a caption.
(
    _CAPTION,
    _WRONG_CAPTION,
    _MENTIONS,
    _WRONG_MENTIONS,
    _TRUE,
    _FOUND,
    _TRUE_OTHERS,
    _FOUND_OTHERS,
    _NAMES_ERASED,
    _WORDS,
) = range(10)
METRICS: Mapping[str, Metric] = {
    "CHAIR_s": ratio(_WRONG_CAPTION, _CAPTION),
    "CHAIR_i": ratio(_WRONG_MENTIONS, _MENTIONS),
    "recall": ratio(_FOUND, _TRUE),
    "recall of others": ratio(_FOUND_OTHERS, _TRUE_OTHERS),
    "names the erased": ratio(_NAMES_ERASED, _CAPTION),
    "words": ratio(_WORDS, _CAPTION),
}


def count_caption(
    caption: str,
    true: Set[str],
    reader: CaptionReader,
    erased: Set[str] = frozenset(),
    ignored: Set[str] = frozenset(),
) -> np.ndarray:
    """The counts of one caption, `(10,)`; sums of them give the metrics.

    Args:
        caption: what the model says.
        true: the classes that are in the image.
        reader: finds the classes that a caption names.
        erased: the classes that the edit removes.
        ignored: classes that count neither as named nor as true, such as those that the edit adds.
    """
    mentions = {name: count for name, count in reader.count(caption).items() if name not in ignored}
    wrong = sum(count for name, count in mentions.items() if name not in true)
    there = true - ignored
    found = there & set(mentions)
    counts = np.zeros(10)
    counts[_CAPTION] = 1
    counts[_WRONG_CAPTION] = wrong > 0
    counts[_MENTIONS], counts[_WRONG_MENTIONS] = sum(mentions.values()), wrong
    counts[_TRUE], counts[_FOUND] = len(there), len(found)
    counts[_TRUE_OTHERS], counts[_FOUND_OTHERS] = len(there - erased), len(found - erased)
    counts[_NAMES_ERASED] = bool(erased & set(mentions))
    counts[_WORDS] = len(caption.split())
    return counts


def run_chair(
    steerer: Steerer[Atlas], data: AnnotatedSet, options: BenchmarkOptions, *, ask: Answerer = ask_model
) -> BenchmarkResult:
    """Caption images before and after classes are erased, and count what is not there.

    Args:
        steerer: the model and its atlas.
        data: the images, with captions.
        options: the edit and the images.
        ask: captions the images; by default the model itself.
    """
    if not data.named:
        raise SpecError("CHAIR takes what is true from instances and captions; load the images with their captions.")
    erased = frozenset(data.find_classes(options.minus, "minus"))
    added = data.classes_among(options.plus)
    images = images_for("chair", data, options)
    rows = erasing_rows(steerer, rank_classes(data, images), erased | added, options)
    prompt, world = options.prompt or DETAILED, make_world(data, images)
    inquiries = [Inquiry(number, options.minus, (prompt,)) for number in range(len(images))]
    answers = answer_all(rows, world, inquiries, max_new_tokens=options.max_new_tokens, work=options.work, ask=ask)
    captions = {row.name: [own[0][number] for own in answers] for number, row in enumerate(rows)}
    shown = np.array([bool(image.objects & erased) for image in images])
    truth = [data.may_show(image) for image in images]
    table = score_captions(captions, truth, shown, data.reader, erased, added, options.seed)
    changed = [number for number, text in enumerate(captions[EDIT]) if text != captions[UNSTEERED][number]]
    examples = [
        Example(world.cases[number], "", {row: own[number] for row, own in captions.items()}) for number in changed[:12]
    ]
    about = describe_run(steerer, data, options, prompt, len(images))
    return BenchmarkResult("chair", about, tuple(METRICS), tuple(table), tuple(examples))


def score_captions(
    captions: Mapping[str, Sequence[str]],
    truth: Sequence[Set[str]],
    shown: np.ndarray,
    reader: CaptionReader,
    erased: Set[str],
    ignored: Set[str] = frozenset(),
    seed: int = 0,
) -> list[ResultRow]:
    """The table: all images, those that show an erased class, and those that do not.

    Args:
        captions: row -> the caption of each image.
        truth: the classes that are in each image.
        shown: `(images,)` bool, whether an image shows an erased class.
        reader: finds the classes that a caption names.
        erased: the classes that the edit removes.
        ignored: classes that do not count.
        seed: seed of the resampling.
    """
    counts = {
        row: np.array(
            [count_caption(text, true, reader, erased, ignored) for text, true in zip(own, truth, strict=True)]
        )
        for row, own in captions.items()
    }
    names = list_names(sorted(erased))
    groups = {"all images": np.ones_like(shown), f"{names}, shown": shown, f"{names}, not shown": ~shown}
    table: list[ResultRow] = []
    for group, mask in groups.items():
        table += measure_rows(group, {row: own[mask] for row, own in counts.items()}, METRICS, seed)
    return table
