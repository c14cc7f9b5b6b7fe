"""What the rows of a benchmark answer to questions about images. The tower runs once per image; finished parts stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from elude_steer.evaluation.benchmarks.rows import Row, Words
from elude_steer.evaluation.edits.benchmark import World, list_causes
from elude_steer.evaluation.result_files import compute_in_parts
from elude_steer.models.prefix_cache import change_prompt, image_batches, run_prefix
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES
from elude_steer.utils.files import home
from elude_steer.utils.fingerprint import make_key

Answers = list[list[list[str]]]  # by image, question and row


@dataclass(frozen=True)
class Inquiry:
    """Questions about one image under one edit.

    Attributes:
        case: the number of the image in its world.
        minus: the words that the edit removes.
        questions: at least one.
    """

    case: int
    minus: Words
    questions: tuple[str, ...]


class Answerer(Protocol):
    """Answers questions about images under each row."""

    def __call__(
        self, rows: Sequence[Row], images: Sequence[Any], inquiries: Sequence[Inquiry], max_new_tokens: int
    ) -> Answers:
        """The answers by image, question and row."""


def ask_model(rows: Sequence[Row], images: Sequence[Any], inquiries: Sequence[Inquiry], max_new_tokens: int) -> Answers:
    """Ask the model itself. In each round every image has its next question, so that batches stay full."""
    vlm = rows[0].steerer.vlm
    prefix = run_prefix(vlm, images, inquiries[0].questions[0])
    answers: Answers = [[[] for _ in inquiry.questions] for inquiry in inquiries]
    for number in range(max(len(inquiry.questions) for inquiry in inquiries)):
        asked = [number < len(inquiry.questions) for inquiry in inquiries]  # others only fill their row of the inputs
        prompts = [inquiry.questions[min(number, len(inquiry.questions) - 1)] for inquiry in inquiries]
        prompted = change_prompt(vlm, prefix, images, prompts)
        for row in rows:
            pairs = zip(inquiries, asked, strict=True)
            plans = [[row.plan(inquiry.minus)] if is_asked else [] for inquiry, is_asked in pairs]
            texts = row.steerer.captions(images, plans, max_new_tokens=max_new_tokens, prefix=prompted)
            for own, text in zip(answers, texts, strict=True):
                if text:
                    own[number] += text
    return answers


def answer_all(
    rows: Sequence[Row],
    world: World,
    inquiries: Sequence[Inquiry],
    *,
    max_new_tokens: int,
    work: Path | None = None,
    ask: Answerer = ask_model,
) -> Answers:
    """The answers to all inquiries, by inquiry, question and row. An interrupted run resumes.

    Args:
        rows: the ways to answer.
        world: the images.
        inquiries: what is asked about them.
        max_new_tokens: the longest answer.
        work: folder for finished parts; by default below `ELUDE_STEER_HOME`.
        ask: answers the questions about some images.
    """
    steerer = rows[0].steerer

    def read_image(inquiry: Inquiry) -> Any:
        return world.cases[inquiry.case].image

    def answer_part(part: Sequence[Inquiry]) -> Answers:
        answers: Answers = []
        for batch, images in image_batches(steerer.vlm, part, read_image, MAX_BATCH_IMAGES):
            answers += ask(rows, images, batch, max_new_tokens)
        return answers

    folder = find_work("answers", rows, world, inquiries, max_new_tokens, work=work)
    return compute_in_parts(folder, inquiries, answer_part, "answering")


def find_work(
    name: str, rows: Sequence[Row], world: World, inquiries: Sequence[Inquiry], *causes: Any, work: Path | None
) -> Path:
    """The folder of finished parts, whose name depends on everything that the parts depend on."""
    used = list(dict.fromkeys(inquiry.minus for inquiry in inquiries))
    plans = [[row.name, _directions(row), [plan.key if (plan := row.plan(m)) else None for m in used]] for row in rows]
    asked = [asdict(inquiry) for inquiry in inquiries]
    key = make_key("benchmark", name, *list_causes(rows[0].steerer, world), plans, asked, *causes)
    return (work or home() / "work") / f"benchmark-{key}"


def _directions(row: Row) -> float | None:
    """A number that tells random directions of one seed from those of another."""
    calibration = getattr(row.steerer.atlas, "calibration", None)
    return None if calibration is None else float(calibration.directions.float().sum())
