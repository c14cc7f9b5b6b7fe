from elude_steer.evaluation.benchmarks.answers import Inquiry, ask_model
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.benchmarks.rows import erasing_rows
from elude_steer.toyland import scenes


def test_answers_in_batches_are_those_of_one_image_and_one_question(steerer):
    images = [scene.image for scene in scenes(50_002, 12) if len(scene.things) > 1][:3]
    questions = [("Describe this image in one sentence.", "What is this?"), ("Is there a dog in the image?",)]
    questions.append(("Is there an apple in the image, or something else?", "What?", "Where is the cat?"))
    inquiries = [Inquiry(number, ("dog", "cat"), own) for number, own in enumerate(questions)]
    rows = erasing_rows(steerer, [], set(), BenchmarkOptions(("dog", "cat"), settings={"force": True}))[:2]
    answers = ask_model(rows, images, inquiries, 16)
    assert [[len(texts) for texts in own] for own in answers] == [[2, 2], [2], [2, 2, 2]]
    for image, inquiry, own in zip(images, inquiries, answers, strict=True):
        for question, texts in zip(inquiry.questions, own, strict=True):
            for row, text in zip(rows, texts, strict=True):
                with steerer.applied(row.plan(inquiry.minus)):
                    assert steerer.vlm.caption([image], question, 16) == [text], (row.name, question)
    assert any(before != after for own in answers for before, after in own)
