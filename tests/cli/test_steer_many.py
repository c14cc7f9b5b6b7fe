"""Steering of several images and folders, as a user types it."""

import csv
import io
import json
import shutil

import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from elude_steer import toyland
from elude_steer.cli.steer_many import ImageArgument, name_heatmaps
from tests.helpers.cli import only_error


@pytest.fixture(scope="module")
def photos(tmp_path_factory, steerer):
    """A folder with sub-folder, hidden file and text; the paths of its images in order, and their captions."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "sub").mkdir()
    scenes = list(toyland.scenes(seed=50_021, n=5))
    paths = [folder / name for name in ("a.png", "b.png", "c.png", "sub/a.png", "sub/b.png")]
    for path, scene in zip(paths, scenes, strict=True):
        scene.image.save(path)
    (folder / "text.txt").write_text("no image")
    shutil.copy(paths[0], folder / ".hidden.png")
    plan = steerer.plan(minus=["dog"])
    results = [steerer.explain(path, plan) for path in paths]
    return folder, paths, results


def test_a_folder_prints_a_line_per_image_with_the_captions_of_single_images(run, photos):
    folder, paths, results = photos
    code, out, err = run("steer", folder, "--minus", "dog")
    assert code == 0, err
    assert out.splitlines() == [f"{path}\t{result.caption}" for path, result in zip(paths, results, strict=True)]
    assert "baseline" not in err


def test_several_images_and_folders_print_json_lines_in_the_order_of_the_arguments(run, photos, tmp_path):
    folder, paths, results = photos
    maps = tmp_path / "maps"
    code, out, err = run("steer", paths[2], folder / "sub", paths[0], "--minus", "dog", "--json", "--heatmap", maps)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    order = [2, 3, 4, 0]
    assert [row["image"] for row in rows] == [str(paths[number]) for number in order]
    for row, number in zip(rows, order, strict=True):
        result = results[number]
        assert (row["baseline"], row["caption"]) == (result.baseline, result.caption)
        assert (tuple(row["gone"]), tuple(row["new"]), tuple(row["notes"])) == (result.gone, result.new, result.notes)
        with Image.open(row["heatmap"]) as drawn:
            assert drawn.format == "PNG"
    assert sorted(path.name for path in maps.iterdir()) == ["a-2.png", "a.png", "b.png", "c.png"]


def test_unreadable_images_are_named_and_skipped_and_nothing_else_is_lost(run, photos, tmp_path):
    _, paths, results = photos
    (tmp_path / "broken.png").write_bytes(paths[0].read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    files = (paths[0], tmp_path / "broken.png", tmp_path / "none.png", tmp_path / "empty", paths[1])
    code, out, err = run("steer", *files, "--minus", "dog", "--csv", "--no-baseline")
    assert code == 1
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["image"], row["caption"]) for row in rows] == [
        (str(path), result.caption) for path, result in zip(paths[:2], results[:2], strict=True)
    ]
    assert {row["baseline"] for row in rows} == {""}
    assert list(rows[0]) == ["image", "baseline", "caption", "gone", "new", "notes"]
    assert "3 of 5 images have no caption" in only_error(err)
    for name in ("broken.png", "none.png", "empty"):
        assert sum(f"{name}'" in line and "skipped" in line for line in err.splitlines()) == 1, err


def test_an_image_outside_the_region_does_not_stop_the_others(run, photos, tmp_path):
    _, paths, _ = photos
    Image.new("RGB", (24, 24)).save(tmp_path / "small.png")
    typed = ("steer", paths[0], tmp_path / "small.png", "--minus", "dog", "--plus", "boat", "--where", "30,30,90,90")
    code, out, err = run(*typed)
    assert code == 1
    assert [line.split("\t")[0] for line in out.splitlines()] == [str(paths[0])]
    assert "small.png" in only_error(err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json", "--csv"), "--json and --csv are two kinds of output; give one"),
        (("--heatmap", "maps.png"), "and there are many images; give a folder: --heatmap maps"),
        (("--heatmap", "/nosuch/maps"), "there is no folder '/nosuch' for 'maps'; make it first"),
    ],
)
def test_options_that_do_not_fit_many_images_are_refused_before_a_model_is_loaded(
    run, photos, monkeypatch, options, message
):
    monkeypatch.setattr("elude_steer.steering.steerer.Steerer.load", None)
    code, out, err = run("steer", photos[0], "--minus", "dog", *options)
    assert (code, out) == (1, "")
    assert message in only_error(err)


def test_arguments_without_a_single_image_are_refused_before_a_model_is_loaded(run, monkeypatch, tmp_path):
    monkeypatch.setattr("elude_steer.steering.steerer.Steerer.load", None)
    code, _, err = run("steer", tmp_path, "--minus", "dog")
    assert code == 1
    assert "holds no images" in only_error(err)
    code, _, err = run("steer", tmp_path / "x.png", tmp_path / "y.png", "--minus", "dog")
    assert code == 1
    assert "there is no file or folder" in only_error(err)


def test_a_prompt_that_no_image_can_take_is_one_error(run, photos):
    code, out, err = run("steer", photos[0], "--minus", "dog", "--prompt", "What is <image>?")
    assert (code, out) == (1, "")
    assert "which stands for the image itself" in only_error(err)
    assert "skipped" not in err


def test_heatmaps_of_one_name_get_numbers(tmp_path):
    files = [ImageArgument(path, tmp_path / path) for path in ("x.png", "x.jpg", "y.webp")]
    files = [ImageArgument(file.path, file.name.relative_to(tmp_path)) for file in [*files, files[0]]]
    assert [path.name for path in name_heatmaps(files, tmp_path).values()] == ["x.png", "x-2.png", "y.png"]


def test_one_image_without_baseline_prints_only_its_caption(run, photos):
    _, paths, results = photos
    code, out, err = run("steer", paths[0], "--minus", "dog", "--no-baseline")
    assert (code, out) == (0, f"{results[0].caption}\n")
    assert "baseline" not in err


def test_photographs_give_one_note_for_all_of_them(run, photos, tmp_path):
    _, paths, _ = photos
    for name in ("china.jpg", "flower.jpg"):
        Image.fromarray(load_sample_image(name)).save(tmp_path / name)
    shutil.copy(paths[0], tmp_path / "scene.png")
    code, out, err = run("steer", tmp_path, "--minus", "dog")
    assert code == 0, err
    assert len(out.splitlines()) == 3
    (line,) = [line for line in err.splitlines() if "unlike" in line]
    assert "note: 2 of 3 images are unlike the images that atlas 'toyland' was built from" in line
    code, out, err = run("steer", tmp_path, "--minus", "dog", "--json")
    assert ["unlike" in " ".join(json.loads(line)["notes"]) for line in out.splitlines()] == [True, True, False]
    assert "unlike" not in err
    code, out, err = run("steer", tmp_path / "china.jpg", "--minus", "dog")
    assert err.count("this image is unlike") == 1
