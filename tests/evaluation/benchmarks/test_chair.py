from collections import Counter

import numpy as np
import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation import result_files
from elude_steer.evaluation.benchmarks.answers import ask_model
from elude_steer.evaluation.benchmarks.chair import count_caption, run_chair, score_captions
from elude_steer.evaluation.benchmarks.dataset import images_for
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.edits.annotations import coco_reader
from elude_steer.toyland import parse, scenes
from tests.evaluation.benchmarks.conftest import SEED


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a passenger train and two passengers", {"train": 1, "person": 1}),
        ("passenger jets over an adult elephant", {"airplane": 1, "elephant": 1}),
        ("the toilet seat and a hot dog", {"toilet": 1, "hot dog": 1}),
        ("a bow tie, a baby bird and a baby", {"tie": 1, "bird": 1, "person": 1}),
        ("a dog sees another dog and a puppy", {"dog": 3}),
    ],
)
def test_double_words_are_one_word(caption, expected):
    assert coco_reader().count(caption) == expected


def test_scores_of_a_hand_computed_example():
    captions = [
        "A man and a dog next to a hot dog and a chair.",  # 4 mentions; hot dog and chair are not there
        "A passenger train at a train station",  # 1 mention; the bench is missed
        "A toilet seat, a cat and another cat",  # 3 mentions; the cat, named twice, is not there
    ]
    truth = [{"dog", "person"}, {"train", "bench"}, {"toilet"}]
    rows = score_captions({"unsteered": captions}, truth, np.array([True, False, False]), coco_reader(), {"dog"})
    table = {row.group: {name: value.value for name, value in row.values.items()} for row in rows}
    assert table["all images"] == pytest.approx(
        {
            "CHAIR_s": 2 / 3,
            "CHAIR_i": 4 / 8,
            "recall": 4 / 5,
            "recall of others": 3 / 4,
            "names the erased": 1 / 3,
            "words": 28 / 3,
        }
    )
    assert table["dog, shown"]["CHAIR_i"] == pytest.approx(2 / 4)
    assert table["dog, not shown"]["CHAIR_s"] == pytest.approx(1 / 2)


def test_what_the_edit_adds_does_not_count():
    counts = count_caption("a cat and a dog", {"dog", "cat"}, coco_reader(), frozenset(), frozenset({"cat"}))
    assert counts[:6].tolist() == [1, 0, 1, 0, 1, 1]
    assert count_caption("", {"dog"}, coco_reader())[:6].tolist() == [1, 0, 0, 0, 1, 0]


def test_an_independent_count_on_fifty_scenes_agrees(steerer, toyland_data, tmp_path):
    """The scenes themselves and toyland's grammar say the same as COCO's files and the reader of captions."""
    options, said = BenchmarkOptions(("dog",), limit=50, controls=False, prompt="Describe this image."), []

    def record(rows, images, inquiries, max_new_tokens):
        answers = ask_model(rows, images, inquiries, max_new_tokens)
        said.extend(zip(inquiries, answers, strict=True))
        return answers

    result = run_chair(steerer, toyland_data, options, ask=record)
    drawn, numbers = list(scenes(SEED, 300)), [image.file for image in images_for("chair", toyland_data, options)]
    assert len(said) == 50
    for number, row in enumerate(("unsteered", "edit")):
        totals, wrong_captions, dogs = Counter(), 0, 0
        for inquiry, ((captions),) in said:
            things = drawn[int(numbers[inquiry.case][6:10])].objects
            named = parse(captions[number]).objects
            wrong = [thing for thing in named if thing not in things]
            wrong_captions += len(wrong) > 0
            dogs += "dog" in named
            totals.update(mentions=len(named), wrong=len(wrong), true=len(set(things)))
            totals.update(found=len(set(things).intersection(named)))
        for column, value in {
            "CHAIR_s": wrong_captions / 50,
            "CHAIR_i": totals["wrong"] / totals["mentions"],
            "recall": totals["found"] / totals["true"],
            "names the erased": dogs / 50,
        }.items():
            assert result.value(row, "all images", column).value == pytest.approx(value), (row, column)
    shown = "dog, shown"
    assert result.value("unsteered", shown, "names the erased").value > 0.9
    assert result.value("edit", shown, "names the erased").value < 0.2
    assert result.value("edit", shown, "names the erased").change_interval[1] < -0.5
    gone = result.value("edit", shown, "recall").value, result.value("edit", shown, "recall of others").value
    assert gone[0] < gone[1]


def test_an_interrupted_run_goes_on(steerer, toyland_data, tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "ITEMS_PER_FILE", 2)
    options = BenchmarkOptions(("dog",), limit=6, controls=False, work=tmp_path / "work")
    asked = []

    def stop_at_third(rows, images, inquiries, max_new_tokens):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append([inquiry.case for inquiry in inquiries])
        return ask_model(rows, images, inquiries, max_new_tokens)

    with pytest.raises(KeyboardInterrupt):
        run_chair(steerer, toyland_data, options, ask=stop_at_third)
    assert asked == [[0, 1], [2, 3]]
    asked.clear()
    again = run_chair(steerer, toyland_data, options, ask=stop_at_third)
    assert asked == [[4, 5]]
    whole = run_chair(steerer, toyland_data, BenchmarkOptions(("dog",), limit=6, controls=False))
    assert again.to_dict() == whole.to_dict()


def test_captions_are_needed(steerer, write_coco):
    with pytest.raises(SpecError, match="CHAIR takes what is true from instances and captions"):
        run_chair(steerer, write_coco([{"dog"}, {"cat"}]), BenchmarkOptions(("dog",)))
