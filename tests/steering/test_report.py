import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from elude_steer.models.vlm import PatchGrid
from elude_steer.recipe_files import load_recipe
from elude_steer.specs import ExpectSpec, Recipe, Settings, StepSpec
from elude_steer.steering.plan import Concept, Plan
from elude_steer.steering.report import write_report
from elude_steer.steering.result import SteeredCaption, render_captions
from elude_steer.steering.run_recipe import StepResult, run_recipe
from elude_steer.steering.steerer import Steerer
from tests.helpers.markup import Reader, embedded_images

EVIL = "<script>alert('1')</script> & \"dog\""
GRID = PatchGrid(np.array([[(c / 2, r / 2, (c + 1) / 2, (r + 1) / 2) for r in range(2) for c in range(2)]]), (2, 2))


def step_result(minus=("dog",), caption="a man on a motorcycle.", missing=(), size=(40, 30), gone=(), notes=(), **more):
    maps = {word: (np.array([[0.0, 1.0, 0.2, 0.0]]), np.array([[False, True, False, False]])) for word in minus}
    plan = Plan(tuple(Concept(word, "minus", Settings(), ()) for word in minus))
    provenance = {"model": "some/model", "layer": "layers.25.mlp.fc2", "atlas": "small", "prompt": "What is it?"} | more
    image = Image.new("RGB", size, (90, 120, 60))
    result = SteeredCaption("a dog on a motorcycle.", caption, plan, maps, GRID, image, tuple(notes), provenance)
    return StepResult(StepSpec(minus=tuple(minus), expect=ExpectSpec(gone=tuple(gone))), result, tuple(missing))


def page_of(tmp_path, *done):
    recipes = [(Recipe(f"recipe-{i}", "small", ()), own) for i, own in enumerate(done)]
    return write_report(tmp_path / "out.html", recipes).read_text(encoding="utf-8")


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    page = page_of(tmp_path, [step_result()])
    read = Reader(page)
    assert read.open == []  # every tag is closed
    assert "http:" not in page
    assert "https:" not in page
    assert not {"script", "link", "iframe"} & set(read.tags)
    assert "@import" not in page
    assert "url(" not in page
    for tag, name, value in read.attributes:
        assert name not in ("href", "srcset")
        assert name != "src" or (tag == "img" and value.startswith("data:image/png;base64,"))


def test_the_page_shows_captions_settings_images_and_maps(tmp_path):
    page = page_of(tmp_path, [step_result(), step_result(minus=("dog", "hat"), caption="a road.")], [step_result()])
    text = Reader(page).text
    for part in ("recipe-0", "recipe-1", "baseline", "a dog on a motorcycle.", "-dog -hat", "gamma -15", "kappa 100"):
        assert part in text
    assert "model: some/model layer: layers.25.mlp.fc2 atlas: small prompt: What is it?" in text
    assert len(embedded_images(page)) == 2 + 3 + 1  # the image of each recipe, and a map for each word of each edit
    assert "<title>recipe-0, recipe-1</title>" in page


def test_the_page_names_unmet_expectations(tmp_path):
    done = [
        step_result(gone=["dog"]),
        step_result(gone=["dog"], missing=["'dog' is still there", "no cat"]),
        step_result(),
    ]
    text = Reader(page_of(tmp_path, done)).text
    assert "3 edits; 1 of 2 did what the recipe expects." in text
    assert "Not as expected: 'dog' is still there; no cat." in text
    assert text.count("As expected.") == 1  # an edit without expectations is not judged


def test_recipes_without_expectations_are_not_judged(tmp_path):
    text = Reader(page_of(tmp_path, [step_result()])).text
    assert "1 edit." in text
    assert "xpected" not in text


def test_the_page_shows_notes(tmp_path):
    assert (
        "the caption did not change"
        in Reader(page_of(tmp_path, [step_result(notes=["the caption did not change"])])).text
    )


def test_changed_words_are_marked_in_both_captions(tmp_path):
    result = step_result()
    page = page_of(tmp_path, [result])
    assert render_captions(result.result) in page
    assert re.search(r"a <del [^>]+>dog</del> on a motorcycle\.", page)
    assert re.search(r"a <ins [^>]+>man</ins> on a motorcycle\.", page)


def test_the_page_shows_settings_that_count_or_differ_from_the_papers(tmp_path):
    cat = Concept("cat", "plus", Settings(mode="place", strength=2.5, nu="all"), ())
    hen = Concept("hen", "minus", Settings(mode="place", seen=0.25, force=True), ())
    cow = Concept("cow", "plus", Settings(per="image"), ())
    one = step_result()
    changed = replace(one, result=replace(one.result, plan=Plan((*one.result.plan.concepts, cat, hen, cow))))
    text = Reader(page_of(tmp_path, [changed])).text
    assert "dog: mode scale, gamma -15, kappa 100, nu 50" in text
    assert "cat: mode place, strength 2.5, fit 0.4 hen: mode place, strength 1, fit 0.4, seen 0.25, force cow:" in text
    assert "cow: mode scale, alpha 15, kappa 100, nu 50, per image" in text


def test_a_model_folder_is_shown_without_its_path(tmp_path):
    assert "model: models/mine layer" in Reader(page_of(tmp_path, [step_result(model="/home/anna/models/mine")])).text


def test_toyland_makes_a_page(tmp_path):
    recipe = load_recipe("toyland-teddy")
    done = run_recipe(recipe, Steerer.load(recipe.atlas))
    page = write_report(tmp_path / "out.html", [(recipe, done)]).read_text(encoding="utf-8")
    text = Reader(page).text
    assert recipe.name in text
    for one in done:
        assert one.result.caption in text
        assert one.title in text
        assert all(problem in text for problem in one.missing)
    assert len(embedded_images(page)) == 1 + sum(len(one.result.maps) for one in done)


def test_all_text_is_escaped(tmp_path):
    evil = step_result(minus=(EVIL,), caption=EVIL, missing=[EVIL], model=EVIL, layer=EVIL, atlas=EVIL, prompt=EVIL)
    path = write_report(tmp_path / "out.html", [(Recipe(EVIL, "small", ()), [evil])])
    page = path.read_text(encoding="utf-8")
    read = Reader(page)
    assert "script" not in read.tags
    assert "<script" not in page
    assert read.open == []
    assert EVIL in "".join(read.words)
    names = {name for _, name, _ in read.attributes}
    assert names <= {"lang", "charset", "name", "content", "class", "alt", "src", "style"}  # no quote let one more in


def test_images_have_the_size_at_which_they_are_shown(tmp_path):
    small, *_ = embedded_images(page_of(tmp_path, [step_result(size=(40, 30))]))
    assert small.size == (480, 360)
    large, *_ = embedded_images(page_of(tmp_path, [step_result(size=(4000, 3000))]))
    assert large.size == (480, 360)
    assert (tmp_path / "out.html").stat().st_size < 1e6


def test_a_page_without_recipes_or_results(tmp_path):
    for page in (page_of(tmp_path), page_of(tmp_path, [])):
        assert Reader(page).open == []
        assert not {"article", "section"} & set(Reader(page).tags)


def test_a_failed_report_leaves_the_old_page(tmp_path):
    (tmp_path / "out.html").write_text("old")
    broken = step_result()
    broken.result.maps["dog"] = (np.zeros((3, 3)), None)
    with pytest.raises(ValueError, match="reshape"):
        page_of(tmp_path, [broken])
    assert (tmp_path / "out.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
