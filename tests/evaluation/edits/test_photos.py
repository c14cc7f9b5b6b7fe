import json

import pytest
from PIL import Image

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.benchmark import Task, make_tasks, score_caption, summarize
from elude_steer.evaluation.edits.photos import concept_names, photo_world, read_caption

DOGS = ["a dog runs in the snow", "two puppies play", "a brown dog", "an animal by a tree", "a dog jumps"]
MEN = ["a man on a bench", "a guy sits", "two men", "a person reads", "someone on a bench"]


def write(folder, captions):
    """A photo for each list of captions, in the format of COCO's captions."""
    content = {"images": [], "annotations": []}
    for number, texts in enumerate(captions):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(folder / f"{number}.png")
        content["images"].append({"id": number, "file_name": f"{number}.png"})
        content["annotations"] += [{"image_id": number, "caption": text} for text in texts]
    (folder / "captions.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def world(tmp_path):
    return photo_world(write(tmp_path, [DOGS, MEN]))


def case(world, word):
    return next(one for one in world.cases if word in one.objects)


def test_there_are_at_least_forty_concepts():
    assert len(concept_names()) >= 40
    for name in concept_names():
        assert read_caption(f"there is a {name} here").objects == {name}


def test_two_captions_make_a_concept_true_and_one_makes_it_possible(world):
    dogs = case(world, "dog")
    assert dogs.objects == {"dog"}
    assert dogs.possible >= {"dog", "snow", "tree"}
    assert case(world, "man").objects == {"man", "bench"}
    assert "people" in case(world, "man").possible


def test_what_one_caption_names_is_not_invented(world):
    number = world.cases.index(case(world, "dog"))
    task = Task(number, "a dog in the snow", "dog")
    assert score_caption(world, task, "a tree in the snow").invented == ()
    assert score_caption(world, task, "a horse in the snow").invented == ("horse",)


def test_absent_edits_succeed_if_nothing_changes(world):
    baselines = ["a dog in the snow", "a man on a bench"]
    tasks = make_tasks(world, baselines, "absent")
    assert len(tasks) == 2
    for task in tasks:
        assert not task.present
        own = world.cases[task.case]
        assert task.minus not in own.objects | own.possible | read_caption(task.baseline).objects
    same = [score_caption(world, task, task.baseline) for task in tasks]
    other = [score_caption(world, task, "a horse") for task in tasks]
    assert summarize("absent", same).success == 1
    assert summarize("absent", other).success == 0


def test_photos_outside_the_folder_are_refused(tmp_path):
    write(tmp_path, [DOGS])
    path = tmp_path / "captions.json"
    path.write_text(path.read_text().replace("0.png", "../0.png"))
    with pytest.raises(SpecError, match="lies outside its folder"):
        photo_world(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not JSON; give one such as captions_val2017.json"),
        ("[]", "has no list 'images'"),
        ('{"images": [{"id": 1}], "annotations": []}', "an entry is malformed"),
        ('{"images": [], "annotations": []}', "agree on no concept"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "captions.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        photo_world(tmp_path)


def test_missing_photos_are_refused(tmp_path):
    write(tmp_path, [DOGS])
    (tmp_path / "0.png").unlink()
    with pytest.raises(ImageError, match="none of the photos"):
        photo_world(tmp_path)


def test_photos_that_are_missing_are_left_out_with_a_warning(tmp_path):
    folder = write(tmp_path, [DOGS, MEN])
    (folder / "1.png").unlink()
    with pytest.warns(EludeSteerWarning, match=r"1 photos of '.*' are not in its folder"):
        assert len(photo_world(folder).cases) == 1


def test_the_limit_takes_a_prefix(tmp_path):
    folder = write(tmp_path, [DOGS, MEN, DOGS, MEN])
    few, all_ = photo_world(folder, limit=2), photo_world(folder)
    assert [one.source for one in few.cases] == [one.source for one in all_.cases][:2]
    assert few.name != all_.name
