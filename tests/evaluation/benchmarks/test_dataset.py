import pytest

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.benchmarks.dataset import (
    choose_images,
    find_captions,
    images_for,
    make_world,
    rank_classes,
    read_dataset,
)
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.edits.annotations import coco_reader
from elude_steer.toyland import OBJECTS, scenes
from tests.evaluation.benchmarks.conftest import SEED

ROWS = [{"dog", "person"}, {"dog", "cat", "car"}, {"cat", "person"}, {"car", "person"}, {"bus"}, {"person"}]


def files(images):
    return [image.file for image in images]


def test_toyland_writes_what_is_in_its_scenes(toyland_data):
    assert toyland_data.classes == tuple(OBJECTS)
    truth = {f"scene-{n:04}.png": set(scene.objects) for n, scene in enumerate(scenes(SEED, 300))}
    assert {image.file: set(image.objects) for image in toyland_data.images} == truth
    assert {image.file: set(toyland_data.may_show(image)) for image in toyland_data.images} == truth


def test_words_are_classes_by_name_synonym_or_plural(write_coco):
    data = write_coco(ROWS)
    assert data.reader is coco_reader()
    assert data.find_classes(["Puppy", "dog", "hot  dogs"], "minus") == ("dog", "hot dog")
    assert data.classes_among(["dragon", "kittens"]) == {"cat"}
    with pytest.raises(SpecError, match=r"minus is 'dgo', which is no class of 'instances_x'. Did you mean 'dog'"):
        data.find_classes(["dgo"], "minus")
    with pytest.raises(SpecError, match=r"plus is 'xyzzy', which is no class of 'instances_x'. It has person, bic"):
        data.find_classes(["xyzzy"], "plus")


def test_other_categories_are_read_by_their_names_or_by_a_file(write_coco, tmp_path):
    assert write_coco([{"dragon", "dog"}]).reader.read("two dragons and a puppy") == {"dragon"}
    words = tmp_path / "words.txt"
    words.write_text("# mine\ndragon: wyrm\ndog: puppy\n: hot dog\n")
    assert write_coco([{"dragon", "dog"}], synonyms=words).reader.read("wyrms, a puppy, a hot dog") == {"dragon", "dog"}
    words.write_text("dog: puppy")
    with pytest.raises(SpecError, match="has a category 'dragon', which is not in the file of synonyms"):
        write_coco([{"dragon", "dog"}], synonyms=words)


@pytest.mark.parametrize(
    ("text", "message"),
    [("dog", "has a line 'dog' without a colon"), ("# none", "names no class"), (None, "cannot be read: No such file")],
)
def test_wrong_files_of_synonyms_are_refused(write_coco, tmp_path, text, message):
    path = tmp_path / "words.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=message):
        write_coco(ROWS, synonyms=path)


def test_every_other_image_shows_the_erased_class(write_coco):
    data = write_coco(ROWS)
    chosen = choose_images(data, {"dog"}, limit=4, seed=3)
    assert [bool(image.objects & {"dog"}) for image in chosen] == [True, False, True, False]
    assert len(choose_images(data, {"dog"}, limit=99)) == 6
    assert files(choose_images(data, {"dog"}, limit=2, seed=3)) == files(chosen)[:2]
    orders = {tuple(files(choose_images(data, {"dog"}, limit=6, seed=seed, balance=False))) for seed in range(5)}
    assert len(orders) > 1


def test_images_of_which_it_is_unclear_are_left_out(write_coco):
    data = write_coco(ROWS, captions=[["a dog"], [], ["a puppy and a cat"], ["a car"], [], ["a man"]])
    assert "2.png" not in files(choose_images(data, {"dog"}, limit=9))
    assert set(files(choose_images(data, {"dog"}, limit=9, shown=False))) == {"3.png", "4.png", "5.png"}
    case = make_world(data, data.images).cases[2]
    assert (case.objects, case.possible) == ({"cat", "person"}, {"cat", "person", "dog"})


def test_pope_needs_other_classes(write_coco):
    data = write_coco(ROWS)
    options = BenchmarkOptions(("dog",), per_image=2)
    assert set(files(images_for("pope", data, options))) == {"1.png", "2.png", "3.png"}
    with pytest.raises(SpecError, match="no image of 'instances_x' shows 'dog' and 3 other classes"):
        images_for("pope", data, BenchmarkOptions(("dog",)))
    with pytest.raises(SpecError, match="no image of 'instances_x' shows 'zebra'; erase a class"):
        images_for("chair", data, BenchmarkOptions(("zebra",)))
    with pytest.raises(SpecError, match="leaves out 'dog'"):
        images_for("absent", write_coco([{"dog"}]), BenchmarkOptions(("dog",)))


def test_classes_are_ranked_by_how_many_images_show_them(write_coco):
    data = write_coco(ROWS)
    assert rank_classes(data, data.images) == ["person", "car", "cat", "dog", "bus"]


def test_captions_are_found_beside_instances(write_coco, tmp_path):
    write_coco(ROWS, captions=[["a dog"]] * 6)
    assert find_captions(tmp_path / "instances_x.json") == tmp_path / "captions_x.json"
    assert find_captions(tmp_path / "other.json") is None
    assert find_captions(tmp_path / "instances_y.json") is None


def test_wrong_folders_and_captions_are_refused(write_coco, tmp_path):
    write_coco(ROWS, captions=[["a dog"]] * 6)
    path = tmp_path / "instances_x.json"
    with pytest.raises(ImageError, match=r"there is no folder '.*nowhere' with the images of 'instances_x.json'"):
        read_dataset(path, tmp_path / "nowhere")
    (tmp_path / "other.json").write_text('{"images": [{"id": 1, "file_name": "x.png"}], "annotations": []}')
    with pytest.raises(SpecError, match="has captions for none of the images"):
        read_dataset(path, tmp_path, captions=tmp_path / "other.json")
    (tmp_path / "0.png").unlink()
    with pytest.warns(EludeSteerWarning, match="1 images of 'instances_x.json' are not in folder"):
        assert len(read_dataset(path, tmp_path).images) == 5
    path.write_text(path.read_text().replace("1.png", "../1.png"))
    with pytest.raises(SpecError, match="lies outside its folder"):
        read_dataset(path, tmp_path)
    path.write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(SpecError, match="has no images"):
        read_dataset(path, tmp_path)
