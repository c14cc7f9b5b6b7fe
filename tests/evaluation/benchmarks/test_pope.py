import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.benchmarks.answers import Inquiry, ask_model
from elude_steer.evaluation.benchmarks.dataset import rank_classes
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions, check_template, format_question
from elude_steer.evaluation.benchmarks.pope import (
    SPLITS,
    Question,
    is_clear,
    make_questions,
    read_answer,
    run_pope,
    score_answers,
)
from elude_steer.toyland import parse

ROWS = [{"dog", "cat", "person"}, {"cat", "person"}, {"bus", "car", "person"}, {"dog", "car"}, {"car"}]


@pytest.mark.parametrize(
    ("text", "yes", "clear"),
    [
        ("Yes, there is a dog in the image.", True, True),
        ("No, there is no dog.", False, True),
        ("no", False, True),
        ("NO!", False, True),
        ("There is not a dog.", False, True),
        ("Yes. There is no cat, though.", True, True),  # only the first sentence counts
        ("a dog on a street", True, False),  # what POPE's rule cannot read is yes
        ("nothing notable", True, False),
        ("", True, False),
    ],
)
def test_answers_are_read_by_popes_rule(text, yes, clear):
    assert (read_answer(text), is_clear(text)) == (yes, clear)


def test_questions_have_an_article_and_one_place_for_the_class():
    assert format_question("Is there a {} in the image?", "dog") == "Is there a dog in the image?"
    assert format_question("Is there a {} in the image?", "apple") == "Is there an apple in the image?"
    assert format_question("A banana, and {}?", "orange") == "A banana, and orange?"
    for text in ("Is there a dog?", "{} and {}"):
        with pytest.raises(SpecError, match=r"POPE needs one \{\} for the class"):
            check_template(text)


def test_questions_of_a_hand_made_set(write_coco):
    # Without dog: person 3, car 3 (COCO names it after person), cat 2, bus 1. With person: cat 2, bus 1, car 1.
    # With car: bus 1, person 1. With cat: person 2.
    data = write_coco(ROWS)
    assert rank_classes(data, data.images) == ["person", "car", "cat", "dog", "bus"]
    for seed in range(6):
        questions = make_questions(
            data, data.images, ["dog"], set(), BenchmarkOptions(("dog",), per_image=1, seed=seed)
        )
        for image, own in zip(data.images, questions, strict=True):
            (positive,) = [q for q in own if q.present and q.splits]
            assert positive.name in image.objects - {"dog"} and positive.splits == SPLITS
            negative = {split: [q.name for q in own if split in q.splits and not q.present] for split in SPLITS}
            assert all(len(names) == 1 and names[0] not in image.objects | {"dog"} for names in negative.values())
            assert own[-1] == Question("dog", "dog" in image.objects)
            popular = {"0.png": "car", "1.png": "car", "2.png": "cat", "3.png": "person", "4.png": "person"}
            assert negative["popular"] == [popular[image.file]]
            adversarial = {("0.png", "person"): "car", ("1.png", "person"): "car", ("2.png", "person"): "cat"}
            adversarial |= {("3.png", "car"): "person", ("4.png", "car"): "person"}
            if (image.file, positive.name) in adversarial:
                assert negative["adversarial"] == [adversarial[image.file, positive.name]]


def test_each_split_has_as_many_questions_of_either_answer(toyland_data):
    options = BenchmarkOptions(("dog",), per_image=2, seed=1)
    images = [image for image in toyland_data.images if len(image.objects - {"dog", "cat"}) >= 2]
    questions = make_questions(toyland_data, images, ["dog"], {"cat"}, options)
    for own in questions:
        names = [q.name for q in own]
        assert len(set(names)) == len(names) and "cat" not in names
        for split in SPLITS:
            assert sorted(q.present for q in own if split in q.splits) == [False, False, True, True]
    assert questions == make_questions(toyland_data, images, ["dog"], {"cat"}, options)
    other = BenchmarkOptions(("dog",), per_image=2, seed=2)
    assert questions != make_questions(toyland_data, images, ["dog"], {"cat"}, other)


def test_scores_of_a_hand_computed_example():
    questions = [
        [Question("cat", True, SPLITS), Question("car", False, SPLITS[:2]), Question("bus", False, SPLITS[2:])],
        [Question("person", True, SPLITS), Question("car", False, SPLITS)],
    ]
    questions[0].append(Question("dog", True))
    questions[1].append(Question("dog", False))
    before = [["Yes, there is.", "No.", "Yes", "Yes."], ["no", "Yes.", "No"]]
    after = [["Yes, there is.", "No.", "Yes", "No, there is not."], ["no", "Yes.", "No"]]
    answers = [[list(pair) for pair in zip(b, a, strict=True)] for b, a in zip(before, after, strict=True)]
    rows = score_answers(questions, answers, ["unsteered", "edit"], "dog")
    table = {(row.row, row.group): {name: value.value for name, value in row.values.items()} for row in rows}
    # random: yes to cat (right), no to car (right), no to person (wrong), yes to car (wrong)
    assert table["unsteered", "random"] == {
        "accuracy": 0.5, "precision": 0.5, "recall": 0.5, "F1": 0.5, "yes": 0.5, "unclear": 0,
    }  # fmt: skip
    # adversarial: one right yes, two wrong yes, one wrong no
    expected = {"accuracy": 1 / 4, "precision": 1 / 3, "recall": 1 / 2, "F1": 2 / 5, "yes": 3 / 4, "unclear": 0}
    assert table["edit", "adversarial"] == pytest.approx(expected)
    assert table["unsteered", "dog, shown"] == {"yes": 1, "unclear": 0}
    assert table["edit", "dog, shown"] == {"yes": 0, "unclear": 0}
    assert table["edit", "dog, not shown"] == {"yes": 0, "unclear": 0}
    (change,) = [row.values["yes"].change for row in rows if (row.row, row.group) == ("edit", "dog, shown")]
    assert change == -1


def answer_by_caption(rows, images, inquiries, max_new_tokens):
    """Answers as a model that looks would: it describes the image under the row and says what it sees."""
    described = [Inquiry(one.case, one.minus, ("Describe this image in one sentence.",)) for one in inquiries]
    answers = []
    for inquiry, ((captions),) in zip(inquiries, ask_model(rows, images, described, 24), strict=True):
        own = []
        for question in inquiry.questions:
            name = question.removesuffix(" in the image?").split()[-1]
            own.append(["Yes." if name in parse(text).objects else f"No, there is no {name}." for text in captions])
        answers.append(own)
    return answers


def test_erasing_a_class_changes_the_answers_about_it_alone(steerer, toyland_data):
    options = BenchmarkOptions(("dog",), limit=14, per_image=1)
    result = run_pope(steerer, toyland_data, options, ask=answer_by_caption)
    assert [row.row for row in result.rows[:3]] == ["unsteered", "edit", "random direction"]
    assert result.rows[3].row.startswith("another word (")
    assert result.value("unsteered", "dog, shown", "yes").value >= 0.8
    assert result.value("edit", "dog, shown", "yes").value <= 0.2
    assert result.value("random direction", "dog, shown", "yes").value >= 0.6
    assert result.value("edit", "dog, not shown", "yes").value == 0
    for split in SPLITS:
        assert result.value("unsteered", split, "F1").value >= 0.8
        assert result.value("edit", split, "F1").value >= 0.75
    assert result.notes == () and result.value("edit", "random", "unclear").value == 0
    assert any(example.question == "Is there a dog in the image?" for example in result.examples)
