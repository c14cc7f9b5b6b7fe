import json
import tracemalloc

import pytest
from PIL import Image

from elude_steer.errors import EludeSteerError, EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.annotations import coco_reader
from elude_steer.evaluation.edits.benchmark import caption_baselines, make_tasks, run_edits, summarize
from elude_steer.evaluation.edits.caption_reader import plural
from elude_steer.evaluation.edits.coco import coco_world, read_caption
from elude_steer.models.images import open_image
from elude_steer.steering.steerer import Steerer
from elude_steer.toyland import scenes

NAMES = list(coco_reader().names)


def classes_in(caption):
    return set(read_caption(caption).objects)


@pytest.fixture
def small(tmp_path):
    """Images of 100 x 100 pixels; each row gives an image's classes with the share of the image that they cover."""
    rows = [
        {"dog": 0.3, "person": 0.2},
        {"dog": 0.3, "cat": 0.009},
        {"hot dog": 0.5, "dining table": 0.4, "fork": 0.001},
        {"cat": 0.2},
        {},
        {"bus": 0.01, "car": 0.01},
    ]
    return write(tmp_path, rows)


def write(folder, rows, **changes):
    (folder / "images").mkdir(exist_ok=True)
    ids = {name: 7 + 3 * i for i, name in enumerate(NAMES)}
    content = {"images": [], "annotations": [], "categories": [{"id": i, "name": n} for n, i in ids.items()]}
    for number, row in enumerate(rows):
        Image.new("RGB", (100, 100), (number * 20, 0, 0)).save(folder / "images" / f"{number:03}.png")
        size = {"width": 100, "height": 100}
        content["images"].append({"id": 500 + number, "file_name": f"{number:03}.png", **size})
        for name, share in row.items():
            for _ in range(2):  # in two pieces: their sum counts
                piece = {"image_id": 500 + number, "category_id": ids[name], "area": share * 1e4 / 2}
                content["annotations"].append(piece)
    path = folder / "instances_small.json"
    path.write_text(json.dumps(content | changes), encoding="utf-8")
    return path, folder / "images"


# Reading captions


def test_each_of_the_80_classes_is_found_by_its_name():
    assert len(NAMES) == 80
    for name in NAMES:
        assert classes_in(f"There is an {name}.") == {name}
        assert classes_in(f"{name.upper()}") == ({name} if name != "orange" else set())  # alone, orange may be a colour


def test_every_synonym_and_its_plural_mean_one_class():
    for name, others in coco_reader().synonyms.items():
        for other in others:
            assert classes_in(f"a photo of the {other} here") == {name}, other
            assert classes_in(f"a photo of two {plural(other)} here") == {name}, other
        assert classes_in(f"many {plural(name)}") == {name}


def test_no_name_means_two_classes():
    names = [other for name, others in coco_reader().synonyms.items() for other in (name, *others)]
    names += coco_reader().other_meanings
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("person", "people"), ("woman", "women"), ("child", "children"), ("knife", "knives"), ("mouse", "mice"),
        ("bus", "buses"), ("couch", "couches"), ("toothbrush", "toothbrushes"), ("baby", "babies"), ("toy", "toys"),
        ("traffic light", "traffic lights"), ("wine glass", "wine glasses"), ("policeman", "policemen"),
    ],
)  # fmt: skip
def test_plurals_of_english(one, several):
    assert plural(one) == several


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A man eats a hot dog.", {"person", "hot dog"}),
        ("Two hot dogs and a dog.", {"hot dog", "dog"}),
        ("A teddy bear next to a bear", {"teddy bear", "bear"}),
        ("teddy bears", {"teddy bear"}),
        ("cars wait at a traffic-light", {"car", "traffic light"}),
        ("a train car on the train tracks", {"train"}),
        ("a microwave oven", {"microwave"}),
        ("a bus stop without anyone", set()),
        ("a baby elephant and a baby", {"elephant", "person"}),
        ("the toilet bowl", {"toilet"}),
        ("a dogma about catalogues, carpets and bananarama", set()),
        ("the man's dog's ball", {"person", "dog", "sports ball"}),
        ("A DOG, a Cat;(a cow)", {"dog", "cat", "cow"}),
        ("hot\n dog", {"hot dog"}),
        ("", set()),
    ],
)
def test_captions_are_read_by_whole_words_and_longest_names(caption, expected):
    assert classes_in(caption) == expected


@pytest.mark.parametrize(
    "caption",
    ["an orange.", "an orange", "the orange on a plate", "an orange and an apple", "one orange, cut", "two oranges"],
)
def test_orange_as_a_fruit_counts(caption):
    assert "orange" in classes_in(caption)


@pytest.mark.parametrize(
    "caption", ["an orange cat", "an orange and white cat", "a wall painted orange", "orange juice", "the orange bus"]
)
def test_orange_as_a_colour_does_not_count(caption):
    assert "orange" not in classes_in(caption)


# Images


def test_images_with_enough_large_classes_are_taken(small):
    world = coco_world(*small)
    found = {case.source.name: set(case.objects) for case in world.cases}
    assert found == {
        "000.png": {"dog", "person"},
        "002.png": {"hot dog", "dining table", "fork"},  # the fork is small but present
        "005.png": {"bus", "car"},  # exactly 1 % is enough
    }
    assert world.vocabulary == tuple(NAMES)
    assert world.read("two dogs").objects == {"dog"}
    assert len(coco_world(*small, min_classes=1).cases) == 5


def test_edits_on_coco_have_a_likelihood_and_no_grammar(tmp_path):
    drawn = [scene for scene in scenes(seed=8, n=60) if {"dog", "cat", "horse", "bus"} & set(scene.objects)][:4]
    rows = [dict.fromkeys(set(scene.objects) & set(NAMES), 0.2) for scene in drawn]
    path, folder = write(tmp_path, rows)
    for number, scene in enumerate(drawn):
        scene.image.save(folder / f"{number:03}.png")
    world, steerer = coco_world(path, folder, min_classes=1), Steerer.load("toyland")
    tasks = make_tasks(world, caption_baselines(steerer, world), "remove")
    assert tasks
    outcomes = run_edits(steerer, world, tasks, lambda task: steerer.plan(minus=[task.minus]))
    assert all(one.well_formed is None and isinstance(one.likelihood, float) for one in outcomes)
    score = summarize("remove", outcomes)
    assert score.well_formed is None
    assert score.intervals["likelihood"][0] <= score.likelihood <= score.intervals["likelihood"][1]


def test_images_are_opened_only_when_they_are_used(small, monkeypatch):
    opened = []
    monkeypatch.setattr(
        "elude_steer.evaluation.edits.benchmark.open_image", lambda path: opened.append(path) or open_image(path)
    )
    cases = coco_world(*small).cases
    assert opened == []
    case = next(case for case in cases if case.source.name == "002.png")
    assert case.image.getpixel((0, 0)) == (40, 0, 0)
    assert case.image is not case.image
    assert len(opened) == 3


def test_the_seed_decides_the_order_and_the_limit_cuts_it(small):
    def files(**settings):
        return [case.source.name for case in coco_world(*small, **settings).cases]

    all_files = files(min_classes=1, seed=3)
    assert files(min_classes=1, seed=3) == all_files
    assert files(min_classes=1, seed=3, limit=2) == all_files[:2]
    assert files(min_classes=1, seed=3, limit=99) == all_files
    assert len({tuple(files(min_classes=1, seed=seed)) for seed in range(8)}) > 1


def test_worlds_of_other_images_have_other_names(small):
    names = {coco_world(*small, limit=1, seed=seed).name for seed in range(20)}
    assert len(names) == 3
    assert coco_world(*small).name == coco_world(*small).name
    assert coco_world(*small).name.startswith("coco:instances_small:")


def test_missing_images_cause_a_warning(small):
    _, folder = small
    (folder / "000.png").unlink()
    with pytest.warns(EludeSteerWarning, match="1 images of 'instances_small.json' are not in folder"):
        assert len(coco_world(*small).cases) == 2


def test_a_category_may_have_a_synonym_as_its_name(tmp_path):
    path, folder = write(tmp_path, [{"dog": 0.5, "couch": 0.4}])
    content = json.loads(path.read_text())
    for row in content["categories"]:
        row["name"] = {"couch": "Sofa"}.get(row["name"], row["name"])
    path.write_text(json.dumps(content))
    assert coco_world(path, folder).cases[0].objects == {"dog", "couch"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": None}, "has no list 'categories'; give one such as instances_v"),
        ({"annotations": {}}, "has no list 'annotations'"),
        ({"categories": [{"id": 1, "name": "dragon"}]}, "has a category 'dragon', which is none of COCO's 80 classes"),
        ({"annotations": [{"image_id": 500, "category_id": 7}]}, r"an entry is malformed \(KeyError\('area"),
        ({"annotations": [{"image_id": 500, "category_id": 8, "area": 1}]}, "an entry is malformed"),
        ({"images": [[1, 2]]}, "an entry is malformed"),
        ({"annotations": []}, "no image of '.*' shows 2 classes on 1 % of its area each; lower min_classes"),
    ],
)
def test_other_json_files_are_refused(tmp_path, changes, message):
    path, folder = write(tmp_path, [{"dog": 0.5, "cat": 0.4}], **changes)
    with pytest.raises(SpecError, match=message) as caught:
        coco_world(path, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe\x00", b"[1, 2]", b'"images"'])
def test_files_that_are_not_json_objects_are_refused(small, content):
    path, folder = small
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"is not JSON|has no list|is no COCO instances file"):
        coco_world(path, folder)


def test_files_larger_than_any_of_cocos_are_refused_unread(small, tmp_path):
    annotations = tmp_path / "large.json"
    with annotations.open("wb") as file:
        file.truncate(2**29 + 1)  # without a byte on the disk
    tracemalloc.start()
    with pytest.raises(SpecError, match=r"large\.json' cannot be read: it has more than 537 MB; give one such as inst"):
        coco_world(annotations, small[1])
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_missing_files_are_refused_in_one_line(small, tmp_path):
    path, folder = small
    empty = tmp_path / "train2014"
    empty.mkdir()
    for call, kind, message in [
        (lambda: coco_world(tmp_path / "none.json", folder), SpecError, "cannot be read: No such file"),
        (lambda: coco_world(path, tmp_path / "none"), ImageError, "there is no folder '.*none' with the images of"),
        (lambda: coco_world(path, path), ImageError, "no folder"),
        (lambda: coco_world(path, empty), ImageError, "none of the 3 images of 'instances_small.json', such as"),
        (lambda: coco_world(path, folder, limit=0), SpecError, "limit is 0; take at least 1 image"),
        (lambda: coco_world(path, folder, min_classes=4), SpecError, "shows 4 classes"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert isinstance(caught.value, EludeSteerError)
        assert "\n" not in str(caught.value)


def test_a_broken_image_is_reported_when_it_is_used(small):
    (case, *_) = coco_world(*small).cases
    case.source.write_bytes(b"not an image")
    with pytest.raises(ImageError, match=rf"{case.source.name}' cannot be read as an image"):
        _ = case.image


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.png", r"names the image '../secret.png', which lies outside its folder"),
        ("/etc/passwd", "lies outside its folder"),
        ("a/../../b.png", "lies outside its folder"),
        ("x" * 5000, "which is not the name of a file"),
        ("a\0b.png", r"an image 'a\?b.png', which is not the name of a file"),
        ("\ud800.png", "which is not the name of a file"),
        ("", "which is not the name of a file"),
        (5, "has an image '5', which is not the name of a file"),
    ],
)
def test_names_outside_the_folder_and_no_names_are_refused(small, name, message):
    annotations, images = small
    content = json.loads(annotations.read_text())
    content["images"][0]["file_name"] = name
    annotations.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=message) as caught:
        coco_world(annotations, images)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("content", ["[" * 100_000, '{"images": ' * 50_000])
def test_deeply_nested_annotations_are_refused(small, content):
    small[0].write_text(content)
    with pytest.raises(SpecError, match="nested too deeply"):
        coco_world(*small)


def test_numbers_that_no_image_has_are_refused(small):
    content = json.loads(small[0].read_text())
    content["images"][0]["width"] = 10**400
    small[0].write_text(json.dumps(content))
    with pytest.raises(SpecError, match="an entry is malformed"):
        coco_world(*small)
