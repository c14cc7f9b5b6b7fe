"""The demo in a real browser: what visitors do and see."""

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from elude_steer import toyland
from elude_steer.demo.session import EditRequest, ImageFile, decode_mark
from elude_steer.models.vlm import PROMPT
from elude_steer.recipe_files import load_recipe
from elude_steer.steering.run_recipe import run_recipe
from tests.helpers.visitor import CHROMIUM, PHONE, WAIT, WIDE, Visitor, chromium, serve_demo

needed = os.environ.get("ELUDE_STEER_BROWSER_TESTS") == "required"
if not needed:
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")
    pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: pip install playwright")
    pytest.importorskip("axe_playwright_python", reason="browser tests need axe: pip install axe-playwright-python")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not needed, reason="browser tests need Debian's chromium: apt-get install chromium"
)
ROOT = Path(__file__).parents[2]
EVIL = "${alert(1)} <script>alert(2)</script> `x` {{y}} \"'"


@pytest.fixture(scope="module")
def address():
    with serve_demo("--atlas", "toyland") as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def visit(browser, address):
    """Opens the page in a new session; at the end, no session may have failed or contacted another host."""
    with ExitStack() as stack:
        visitors = []

        def open_page(**options):
            visitors.append(Visitor(browser, address, **options))
            stack.callback(visitors[-1].close)
            return visitors[-1]

        yield open_page
        assert [visitor.problems for visitor in visitors] == [[] for _ in visitors]


def make_request(presenter, example, minus=(), plus=(), mark=None, **settings):
    path = next(one.path for one in presenter.examples if one.name == example)
    return EditRequest(ImageFile.from_path(path), mark, tuple(minus), tuple(plus), PROMPT, settings)


def expected(presenter, example, minus=(), plus=(), mark=None, **settings):
    """The baseline and the steered caption that the page should show."""
    result = presenter.steer(make_request(presenter, example, minus, plus, mark, **settings))
    return result.baseline, result.caption


def image_source(visitor):
    return visitor.page.locator("#easel .shown").get_attribute("src")


def test_an_edit_from_start_to_end(visit, steerer):
    """Choose an example, remove dog, add biker: the page shows the library's captions and a map per concept."""
    visitor = visit()
    visitor.example("dog")
    plain = image_source(visitor)
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.press()
    result = steerer.steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"])
    assert visitor.captions() == (result.baseline, result.caption)
    assert visitor.page.locator("#plain .gone").all_inner_texts() == list(result.gone)
    assert set(visitor.page.locator("#said ins").all_inner_texts()) == set(result.new)
    views = visitor.page.locator("#easel .views button")
    views.first.wait_for(timeout=WAIT)
    assert views.all_inner_texts() == ["image", "\N{MINUS SIGN} dog", "+ biker"]
    assert views.nth(1).get_attribute("aria-pressed") == "true"  # the first concept's map is shown
    dog = image_source(visitor)
    views.nth(2).click()
    biker = image_source(visitor)
    visitor.page.locator("#easel .views button").first.click()
    assert len({plain, dog, biker}) == 3
    assert image_source(visitor) == plain


def plain_caption(visitor, text):
    """Wait for the caption without edits."""
    visitor.page.wait_for_function(
        "text => document.querySelector('#plain p')?.innerText === text", arg=text, timeout=WAIT
    )


def test_the_caption_without_edits_stands_there_before_anything_is_pressed(visit, presenter, steerer, tmp_path):
    """Of the first image, of a chosen example, and of an upload."""
    visitor = visit()
    captions = {one.name: presenter.caption(ImageFile.from_path(one.path)) for one in presenter.examples}
    plain_caption(visitor, captions["cats"])
    visitor.example("train")
    plain_caption(visitor, captions["train"])
    scene = next(scene for scene in toyland.scenes(seed=73, n=30) if len(scene.things) == 2)
    scene.image.save(tmp_path / "mine.png")
    visitor.bring(tmp_path / "mine.png")
    plain_caption(visitor, steerer.vlm.caption([scene.image])[0])
    assert visitor.page.locator("#said .card").count() == 0


def test_a_click_on_a_word_removes_it_and_a_second_one_replaces_it(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.words("plus", "cow")  # of an edit before
    plain_caption(visitor, presenter.caption(ImageFile.from_path("demos/images/toyland-dog.png")))
    assert visitor.page.locator("#plain button").all_inner_texts() == ["dog", "motorcycle", "sunglasses", "street"]
    before = visitor.html()
    visitor.page.locator("#plain button").first.click()
    visitor.answer(before)
    assert visitor.captions() == expected(presenter, "dog", ["dog"])
    assert "dog" in visitor.page.locator("#minus").inner_text()
    assert "cow" not in visitor.page.locator("#plus").inner_text()
    visitor.page.wait_for_selector("#swaps details", timeout=WAIT)
    assert visitor.page.locator("#swaps button").first.is_hidden()
    answer = visitor.html()
    visitor.page.locator("#plain button").first.click()  # once more: the list
    visitor.page.wait_for_selector("#swaps button", timeout=WAIT)
    assert visitor.html() == answer
    swaps = visitor.page.locator("#swaps button").all_inner_texts()
    assert swaps == presenter.list_swaps("dog")
    before = visitor.html()
    visitor.page.locator("#swaps button").first.click()
    visitor.answer(before)
    assert visitor.captions() == expected(presenter, "dog", ["dog"], [swaps[0]])
    assert swaps[0] in visitor.page.locator("#plus").inner_text()


def test_words_of_the_caption_can_be_clicked_by_keyboard(visit, presenter):
    visitor = visit()
    visitor.page.wait_for_selector("#plain button", timeout=WAIT)
    visitor.page.locator("#plain button").nth(1).focus()
    before = visitor.html()
    visitor.page.keyboard.press("Enter")
    visitor.answer(before)
    assert visitor.captions() == expected(presenter, "cats", ["blanket"])


def test_the_words_to_put_instead_follow_the_field(visit, presenter):
    visitor = visit()
    assert visitor.page.locator("#swaps").is_hidden()
    visitor.words("minus", "teddy")
    visitor.page.wait_for_selector("#swaps:has-text(\"instead of 'teddy'\")", timeout=WAIT)
    visitor.page.locator("#swaps summary").click()
    assert visitor.page.locator("#swaps button").all_inner_texts() == presenter.list_swaps("teddy")
    visitor.words("minus")
    visitor.page.wait_for_selector("#swaps", state="hidden", timeout=WAIT)


def test_a_word_that_is_not_seen_is_marked(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "umbrella", "dog")
    visitor.press()
    seen = presenter.steer(make_request(presenter, "dog", ["umbrella", "dog"])).seen
    text = visitor.page.locator("#said .unseen").inner_text()
    assert text.startswith(f"umbrella not seen: {max(0, seen['umbrella']):.0%}")
    assert visitor.page.locator("#said .seen").inner_text() == f"dog seen: {seen['dog']:.0%}"


def test_the_strength_is_in_sight_and_takes_effect(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "dog")
    slider = visitor.page.locator("#set-strength input[type=range]")
    assert slider.is_visible()  # though the settings are folded
    assert [slider.get_attribute(name) for name in ("min", "max", "step")] == ["0", "3", "0.1"]
    assert slider.input_value() == "1"
    slider.focus()
    for _ in range(10):
        visitor.page.keyboard.press("ArrowLeft")
    visitor.press()
    baseline, caption = visitor.captions()
    assert baseline == caption == expected(presenter, "dog", ["dog"], strength=0)[1]


def pressed(visitor, part):
    return visitor.page.locator(f"{part} [aria-pressed=true]").all_inner_texts()


def test_pressed_words_are_those_of_the_fields(visit):
    """A word that is clicked is no longer marked once another one is typed, nor is what was put instead."""
    visitor = visit()
    visitor.example("dog")
    visitor.page.wait_for_selector("#plain button:has-text('dog')", timeout=WAIT)
    before = visitor.html()
    visitor.page.locator("#plain button").first.click()
    visitor.answer(before)
    visitor.page.wait_for_selector("#plain [aria-pressed=true]", timeout=WAIT)
    assert (pressed(visitor, "#plain"), pressed(visitor, "#edits")) == (["dog"], ["\N{MINUS SIGN} dog"])
    visitor.words("minus", "sunglasses")
    visitor.page.wait_for_selector("#plain [aria-pressed=true]:has-text('sunglasses')", timeout=WAIT)
    assert (pressed(visitor, "#plain"), pressed(visitor, "#edits")) == (["sunglasses"], [])
    visitor.words("minus", "umbrella")
    visitor.page.wait_for_selector("#plain [aria-pressed=true]", state="detached", timeout=WAIT)


def test_the_baseline_stands_on_the_page_once(visit, presenter):
    visitor = visit()
    visitor.words("minus", "cat")
    visitor.press()
    baseline, caption = expected(presenter, "cats", ["cat"])
    shown = visitor.page.evaluate("document.body.innerText.replace(/\\s+/g, ' ')")
    assert visitor.captions() == (baseline, caption)
    assert shown.count(baseline) == 1
    assert visitor.page.locator("#plain .gone").all_inner_texts() == ["cat"]


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_caption_follows_the_slider(visit, presenter, size):
    visitor = visit(size=size, touch=size == PHONE)
    visitor.example("dog")
    slider = visitor.page.locator("#set-strength input[type=range]")
    slider.focus()
    visitor.page.keyboard.press("ArrowLeft")  # no edit yet: nothing to ask
    visitor.page.wait_for_timeout(800)
    assert "press Steer" in visitor.page.locator("#said").inner_text()
    visitor.words("minus", "dog")
    visitor.press()
    assert visitor.captions() == expected(presenter, "dog", ["dog"], strength=0.9)
    before = visitor.html()
    slider.focus()
    visitor.page.keyboard.press("Home")
    visitor.answer(before)
    assert visitor.captions() == expected(presenter, "dog", ["dog"], strength=0)
    before, box = visitor.html(), slider.bounding_box()
    visitor.page.mouse.click(box["x"] + box["width"] * 2 / 3, box["y"] + box["height"] / 2)
    visitor.answer(before)
    value = float(visitor.page.locator("#set-strength input[type=number]").input_value())
    assert value == pytest.approx(2, abs=0.1)
    assert visitor.captions() == expected(presenter, "dog", ["dog"], strength=value)


def test_a_dose_curve_lists_strengths_and_a_click_uses_one(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    assert "name a concept" in visitor.press("#dose", "#doses")
    visitor.words("minus", "dog")
    visitor.page.wait_for_selector("#swaps details", timeout=WAIT)
    visitor.press("#dose", "#doses")
    visitor.page.wait_for_selector("#doses tr:has([aria-pressed=true]):has-text('1')", timeout=WAIT)
    doses = presenter.try_doses(make_request(presenter, "dog", ["dog"]))
    rows = [tuple(row.locator("td").all_inner_texts()) for row in visitor.page.locator("#doses tbody tr").all()]
    assert [strength for strength, _ in rows] == [f"{dose:g}" for dose, _ in doses]
    assert all(shown.startswith(caption) for (_, shown), (_, caption) in zip(rows, doses, strict=True))
    assert visitor.page.locator("#doses del:has-text('dog')").count() > 0
    before = visitor.html()
    visitor.page.locator("#doses tbody tr").nth(1).click()
    visitor.answer(before)
    assert visitor.captions() == expected(presenter, "dog", ["dog"], strength=0.5)
    assert visitor.page.locator("#set-strength input[type=number]").input_value() == "0.5"
    visitor.example("teddy")  # the curve belongs to the image before
    visitor.page.wait_for_selector("#doses tr", state="detached", timeout=WAIT)


def test_a_lone_page_has_no_links_to_others(visit, address):
    visitor = visit()
    assert visitor.page.locator("nav").count() == 0
    with urllib.request.urlopen(address + "config") as answer:
        functions = {one["api_name"] for one in json.load(answer)["dependencies"]}
    assert {"press", "bring", "find_settings", "dose", "steer", "concepts"} <= functions


def test_steering_needs_no_scrolling_on_a_laptop(visit):
    visitor = visit()
    visitor.words("minus", "cat")
    visitor.press()
    fields = ("#minus", "#plus", "#set-strength", "#press")
    for part in ("#examples", "#easel .shown", "#plain", *fields, "#said .steered"):
        box = visitor.page.locator(part).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= WIDE[1]
    left, right = (visitor.page.locator(part).bounding_box() for part in ("#easel", "#said"))
    assert left["x"] + left["width"] <= right["x"]


def test_a_typed_concept_counts_without_the_enter_key(visit, presenter):
    visitor = visit()
    visitor.example("teddy")
    visitor.page.locator("#minus input").click()
    visitor.page.keyboard.type("teddy")
    visitor.press()
    assert visitor.captions() == expected(presenter, "teddy", ["teddy"])


def test_concepts_of_the_atlas_are_suggested(visit):
    visitor = visit()
    visitor.page.locator("#plus input").click()
    visitor.page.keyboard.type("mot")
    assert visitor.page.locator("#plus [role=option]").all_inner_texts()[0].strip().endswith("motorcycle")


def test_a_missing_concept_and_a_typed_script_are_answered_in_words(visit):
    visitor = visit()
    assert "name a concept to remove or to add" in visitor.press()
    visitor.words("minus", EVIL)
    assert "alert" in visitor.press()  # shown as typed, and not executed


def test_a_concept_is_added_in_the_marked_region(visit, presenter):
    visitor = visit()
    visitor.example("teddy")
    visitor.words("plus", "cat")
    visitor.paint((0.15, 0.8), (0.35, 0.85), brush=120)
    visitor.press()
    mark = visitor.mark()
    rows, columns = decode_mark(mark).nonzero()
    assert columns.mean() / decode_mark(mark).shape[1] == pytest.approx(0.25, abs=0.05)
    assert rows.mean() / decode_mark(mark).shape[0] == pytest.approx(0.825, abs=0.05)
    assert visitor.captions() == expected(presenter, "teddy", plus=["cat"], mark=mark)
    visitor.page.locator("#easel .clear").click()
    assert visitor.mark() == ""
    visitor.press()
    assert visitor.captions() == expected(presenter, "teddy", plus=["cat"])  # in a free place
    visitor.paint((0.5, 0.5))
    visitor.example("dog")  # another image clears the mark
    assert visitor.mark() == ""


def test_a_region_can_be_marked_by_keyboard(visit):
    visitor = visit()
    visitor.page.locator("#easel .brush").focus()
    visitor.page.keyboard.press("Enter")
    visitor.page.locator("#easel .mark").focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowUp", " "):
        visitor.page.keyboard.press(key)
    rows, columns = decode_mark(visitor.mark()).nonzero()
    assert columns.mean() < 240
    assert rows.mean() < 240


def test_images_can_be_uploaded_and_dropped(visit, steerer, tmp_path):
    scenes = [scene for scene in toyland.scenes(seed=71, n=30) if len(scene.things) == 2][:2]
    for number, scene in enumerate(scenes):
        scene.image.save(tmp_path / f"mine {number}.png")
    visitor = visit()
    before = image_source(visitor)
    visitor.bring(tmp_path / "mine 0.png")
    visitor.page.wait_for_function("before => document.querySelector('#easel .shown').src !== before", arg=before)
    visitor.words("minus", scenes[0].objects[0])
    visitor.press()
    result = steerer.steer(scenes[0].image, minus=[scenes[0].objects[0]])
    assert visitor.captions() == (result.baseline, result.caption)
    data = base64.b64encode((tmp_path / "mine 1.png").read_bytes()).decode()  # dropped on the viewer
    before = image_source(visitor)
    visitor.page.evaluate(
        """data => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)), list = new DataTransfer();
            list.items.add(new File([bytes], 'dropped.png', {type: 'image/png'}));
            document.querySelector('#easel .stage').dispatchEvent(new DragEvent('drop', {dataTransfer: list}));
        }""",
        data,
    )
    visitor.page.wait_for_function("before => document.querySelector('#easel .shown').src !== before", arg=before)
    visitor.words("minus", scenes[1].objects[0])
    visitor.press()
    assert visitor.captions()[0] == steerer.vlm.caption([scenes[1].image])[0]


@pytest.mark.parametrize(
    ("name", "data"), [("notes.png", b"not an image"), ("cut.png", None), ("empty.png", b"")], ids=lambda v: str(v)
)
def test_a_bad_upload_is_refused_and_the_old_image_stays(visit, presenter, tmp_path, name, data):
    path = next(one.path for one in presenter.examples if one.name == "cats")
    (tmp_path / name).write_bytes(path.read_bytes()[:900] if data is None else data)
    visitor = visit()
    before = visitor.html()
    visitor.bring(tmp_path / name)
    text = visitor.answer(before)
    assert f"'{name}' cannot be read as an image" in text
    assert "/" not in text  # no path of this machine
    visitor.words("minus", "cat")
    visitor.press()
    assert visitor.captions() == expected(presenter, "cats", ["cat"])


def test_two_visitors_never_see_each_others_captions(visit, presenter):
    one, two = visit(), visit()
    one.example("teddy")
    two.example("train")
    for first, second in (("teddy", "train"), ("chair", "bicycle"), ("room", "graffiti")):
        one.words("minus", first)
        two.words("minus", second)
        waiting = one.start(), two.start()
        one.answer(waiting[0])
        two.answer(waiting[1])
        assert one.captions() == expected(presenter, "teddy", [first])
        assert two.captions() == expected(presenter, "train", [second])
        assert f"minus=['{first}']" not in two.page.content()
        views = (v.page.locator("#easel .views button").nth(1).inner_text() for v in (one, two))
        assert tuple(views) == (f"\N{MINUS SIGN} {first}", f"\N{MINUS SIGN} {second}")


def test_settings_take_effect_and_can_be_reset(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.open("settings")
    visitor.page.locator("#set-strength input[type=number]").fill("0.5")
    visitor.page.locator("#set-fit input").fill("0.9")
    visitor.press()
    assert visitor.captions() == expected(presenter, "dog", ["dog"], ["biker"], strength=0.5, fit=0.9)
    visitor.page.locator("#set-nu textarea, #set-nu input").first.fill("6")
    visitor.page.locator("#set-kappa input").fill("17")
    visitor.page.get_by_label("scale", exact=True).check()
    visitor.press()
    assert visitor.captions() == expected(presenter, "dog", ["dog"], ["biker"], nu=6, kappa=17, mode="scale")
    visitor.page.locator("#reset").click()
    visitor.page.wait_for_function("document.querySelector('#set-kappa input').value === '12'", timeout=WAIT)
    assert visitor.page.locator("#set-strength input[type=number]").input_value() == "1"
    visitor.press()
    assert visitor.captions() == expected(presenter, "dog", ["dog"], ["biker"])
    visitor.page.locator("#set-nu textarea, #set-nu input").first.fill("many")
    assert "nu: must be a whole number of at least 1 or all, not 'many'" in visitor.press()


def test_found_settings_can_be_used(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.open("settings")
    visitor.press("#tune", "#tried")
    found = presenter.find_settings(make_request(presenter, "dog", ["dog"], ["biker"]))
    captions = visitor.page.locator("#tried tbody [data-row]").all_inner_texts()
    assert captions == [row["caption"] for row in found.rows]
    before = visitor.html()
    visitor.page.locator("#tried tbody tr").nth(1).click()
    visitor.answer(before)
    assert visitor.captions()[1] == captions[1]
    strength = visitor.page.locator("#set-strength input[type=number]").input_value()
    assert float(strength) == found.rows[1]["strength"]
    assert visitor.page.locator("#set-fit input").input_value() == str(found.rows[1]["fit"])


def test_why_shows_the_sub_units_of_the_words(visit, presenter):
    visitor = visit()
    visitor.words("minus", "cat")
    visitor.open("why")
    visitor.press("#press", "#reasons")
    plan = presenter.steer(make_request(presenter, "cats", ["cat"])).plan
    rows = [json.loads(row.get_attribute("data-row")) for row in visitor.page.locator("#reasons [data-row]").all()]
    assert [row["sub_unit"] for row in rows] == [edit.sub_unit for edit in plan.concepts[0].edits]
    visitor.press("#reasons tbody tr >> nth=2", "#specimen")
    sub_unit, unit = plan.concepts[0].edits[2].sub_unit, plan.concepts[0].edits[2].unit
    text = visitor.page.locator("#specimen").inner_text()
    assert f"Sub-unit {sub_unit}: {plan.concepts[0].edits[2].label}" in text
    assert f"Unit {unit}, before the split" in text
    assert visitor.page.locator("#specimen .strip img").count() == 16


def test_a_recipe_can_be_saved_run_and_uploaded(visit, presenter, steerer, tmp_path):
    visitor = visit()
    visitor.example("teddy")
    visitor.words("minus", "teddy")
    visitor.words("plus", "cat")
    visitor.paint((0.2, 0.8), (0.4, 0.8))
    visitor.open("recipe")
    visitor.press("#press", "#taken")
    files = []
    visitor.page.on("download", lambda file: files.append(file))
    visitor.page.locator("#taken [data-save]").click()
    for _ in range(50):
        visitor.page.wait_for_timeout(100)
        if len(files) == 2:
            break
    for file in files:
        file.save_as(tmp_path / file.suggested_filename)
    assert sorted(file.suggested_filename for file in files) == ["mark.png", "steering.yaml"]
    (step,) = run_recipe(load_recipe(tmp_path / "steering.yaml"), steerer, "demos/images/toyland-teddy.png")
    assert visitor.captions() == (step.result.baseline, step.result.caption)

    other = visit()
    other.open("recipe")
    other.bring(tmp_path / "steering.yaml", "given")
    other.page.wait_for_function("document.querySelector('#plus').innerText.includes('cat')", timeout=WAIT)
    assert "teddy" in other.page.locator("#minus").inner_text()
    (tmp_path / "bad.yaml").write_text("name: x\nstep: []\n")
    before = other.html()
    other.bring(tmp_path / "bad.yaml", "given")
    assert "steps" in other.answer(before)


def test_a_click_runs_a_shipped_edit(visit, presenter):
    visitor = visit()
    visitor.example("dog")
    visitor.edit(1)
    assert visitor.captions() == expected(presenter, "dog", ["dog"], ["biker"])


def test_explore_finds_sub_units_and_shows_their_images(visit, presenter):
    visitor = visit()
    visitor.tab("Explore")
    visitor.page.locator("#search textarea, #search input").first.fill("puppy")
    before = visitor.html("#found")
    visitor.page.keyboard.press("Enter")
    visitor.answer(before, "#found")
    assert visitor.page.locator("#found tbody [data-row]").first.inner_text() == "dog"
    visitor.press("#found tbody tr >> nth=0", "#specimen-found")
    assert visitor.page.locator("#specimen-found .strip img").count() == 16
    before = visitor.html("#specimen-found")
    visitor.page.locator("#specimen-found .choices button").first.click()  # another sub-unit of the same unit
    visitor.answer(before, "#specimen-found")
    visitor.press("#concepts tbody tr >> nth=3", "#found")
    word = next(iter(list(presenter.steerer.atlas.require_labels().counts)[3:]))
    assert f"Sub-units for '{word}'" in visitor.page.locator("#found").inner_text()
    assert visitor.page.locator("#search textarea, #search input").first.input_value() == word


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_page_fits_the_window_and_is_accessible(visit, size, scheme):
    """Nothing is wider than the window, and axe finds no serious problem that plain Gradio does not have."""
    visitor = visit(size=size, scheme=scheme, touch=size == PHONE)
    assert visitor.too_wide() <= 0
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.press()
    for part in ("settings", "why", "recipe"):
        visitor.open(part)
    visitor.press("#reasons tbody tr >> nth=0", "#specimen")
    visitor.press("#tune", "#tried")
    visitor.press("#dose", "#doses")
    visitor.page.wait_for_selector("#plain button", timeout=WAIT)
    visitor.page.wait_for_selector("#swaps details", timeout=WAIT)
    visitor.page.locator("#swaps summary").click()
    visitor.page.locator("#easel .brush").click()
    assert visitor.too_wide() <= 0
    steer = serious(visitor.page)
    visitor.tab("Explore")
    visitor.press("#concepts tbody tr >> nth=0", "#found")
    visitor.press("#found tbody tr >> nth=0", "#specimen-found")
    assert visitor.too_wide() <= 0
    found = steer | serious(visitor.page)
    assert {rule: where for rule, where in found.items() if rule not in bare_gradio(visitor)} == {}


def serious(page):
    """Serious problems that axe finds, by rule."""
    from axe_playwright_python.sync_playwright import Axe

    found = {}
    for one in Axe().run(page).response["violations"]:
        nodes = [node["html"][:200] for node in one["nodes"]]
        if one["id"] == "color-contrast":  # Gradio's own elements have the colours of its theme
            nodes = [node for node in nodes if "svelte-" not in node]
        if nodes and one["impact"] in ("serious", "critical"):
            found[one["id"]] = nodes
    return found


BARE = """
import sys, gradio as gr
with gr.Blocks(analytics_enabled=False) as app:
    with gr.Tabs():
        with gr.Tab("one"):
            gr.Dropdown(["a", "b"], value=["a"], label="words", multiselect=True, allow_custom_value=True)
            gr.Dropdown(["a", "b"], label="recipe")
            gr.Button("press", variant="primary", elem_id="press")
            gr.Slider(0, 3, 1, step=0.1, label="strength", info="what it does")
            gr.UploadButton("bring")
            with gr.Accordion("more"):
                gr.Radio(["a", "b"], value="a", label="mode", info="what it does")
                gr.Number(1, label="kappa", info="what it does")
                gr.Textbox("1", label="nu", info="what it does")
        with gr.Tab("two"):
            gr.Textbox(label="search", submit_btn=True)
app.launch(server_name="127.0.0.1", server_port=int(sys.argv[-1]), prevent_thread_lock=True, quiet=True)
print(f"http://127.0.0.1:{sys.argv[-1]}", file=sys.stderr, flush=True)
app.block_thread()
"""
_bare: dict = {}


def bare_gradio(visitor):
    """What axe finds in a page with Gradio's own components only."""
    key = (
        visitor.page.viewport_size["width"],
        visitor.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches"),
    )
    if key not in _bare:
        with serve_demo(command=[sys.executable, "-c", BARE]) as (address, _):
            page = visitor.context.new_page()
            page.goto(address)
            page.wait_for_selector("#press", timeout=WAIT)
            _bare[key] = serious(page)
            page.get_by_role("tab", name="two").click()
            _bare[key] |= serious(page)
            page.close()
    return _bare[key]


def test_many_clients_at_once_get_their_own_answers(address):
    """Runs part of the benchmark with eight clients; in a process, because its sockets stay open."""
    script = (
        "import json, os, sys; sys.path[:0] = ['demos/benchmarks', '.']; import demo; "
        "print(json.dumps(demo.measure_load(sys.argv[1], os.getpid(), 8, 6)))"
    )
    done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answers"] >= 8
    assert (found["errors"], found["mixed or wrong"], found["first error"]) == (0, 0, "")


def test_a_password_is_required(tmp_path):
    (tmp_path / "password").write_text("me:secret")
    with serve_demo("--auth", tmp_path / "password") as (address, _):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address + "config")
        refused.value.close()  # it keeps the connection open
        assert refused.value.code == 401


def test_too_many_requests_are_refused(browser, tmp_path):
    script = (
        "import sys; from elude_steer.demo.presenter import Presenter; "
        "from elude_steer.demo.rate_limit import RateLimit; from elude_steer.demo.recipes import shipped_examples; "
        "from elude_steer import Steerer; from elude_steer.demo.app import make_app; "
        "app = make_app(Presenter(Steerer.load(), shipped_examples('toyland')), rate_limit=RateLimit(2, 10)); "
        "app.launch(server_name='127.0.0.1', server_port=int(sys.argv[-1]), prevent_thread_lock=True, quiet=True); "
        "print('http', file=sys.stderr, flush=True); app.block_thread()"
    )
    with serve_demo(command=[sys.executable, "-c", script]) as (address, _):
        visitor = Visitor(browser, address)
        visitor.words("minus", "cat")
        for _ in range(2):
            visitor.press()
            visitor.captions()
        assert "2 requests a minute" in visitor.press()
        assert "2 requests a minute" in visitor.press("#dose", "#doses")
        visitor.example("dog")  # examples are captioned once for all, and so do not count
        visitor.page.wait_for_selector("#plain button:has-text('motorcycle')", timeout=WAIT)
        next(toyland.scenes(seed=74, n=1)).image.save(tmp_path / "mine.png")
        visitor.bring(tmp_path / "mine.png")
        visitor.page.wait_for_selector("#plain .complaint:has-text('2 requests a minute')", timeout=WAIT)
        visitor.close()


def test_a_password_on_the_command_line_is_refused():
    command = [sys.executable, "-m", "elude_steer", "demo", "--auth", "me:secret"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "--auth is the path of a file that holds NAME:PASSWORD" in done.stderr and "secret" not in done.stderr


@pytest.fixture(scope="module")
def slow_address():
    command = [sys.executable, "-m", "tests.helpers.slow_demo", "demo", "--no-browser", "--atlas", "toyland"]
    with serve_demo(command=command) as (address, _):
        yield address


@pytest.fixture
def slow(browser, slow_address):
    """A visitor of a page whose model takes seconds, with a running request for the dog."""
    visitor = Visitor(browser, slow_address)
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.press()  # the first request also warms up
    visitor.words("plus", "cow")
    visitor.start()
    visitor.page.wait_for_selector("#said .progress-bar", timeout=WAIT)
    yield visitor
    assert visitor.problems == []
    visitor.close()


def wait_until_settled(visitor, milliseconds=7000):
    """The image and the answer after any running request would have finished."""
    visitor.page.wait_for_timeout(milliseconds)
    return image_source(visitor), visitor.html()


def test_another_image_stops_the_running_request(slow, tmp_path):
    slow.example("teddy")
    assert wait_until_settled(slow) == (image_source(slow), slow.html())
    before = image_source(slow)
    assert "press Steer" in slow.page.locator("#said").inner_text()
    slow.words("minus", "chair")
    slow.words("plus")
    slow.start()
    slow.page.wait_for_selector("#said .progress-bar", timeout=WAIT)
    next(toyland.scenes(seed=72, n=1)).image.save(tmp_path / "mine.png")
    slow.bring(tmp_path / "mine.png")
    slow.page.wait_for_function("before => document.querySelector('#easel .shown').src !== before", arg=before)
    uploaded = image_source(slow)
    assert slow.chosen() == ""  # it is no example
    assert wait_until_settled(slow)[0] == uploaded
    assert slow.page.locator("#said .card").count() == 0


def test_stop_changes_nothing_and_the_next_request_works(slow, presenter):
    before = image_source(slow)
    slow.page.locator("#stop").click()
    slow.page.wait_for_selector("#said .progress-bar", state="detached", timeout=WAIT)
    image, answer = wait_until_settled(slow)
    assert image == before
    assert "cow" not in answer
    assert "error" not in slow.page.locator("#said").inner_text().lower()
    slow.words("plus")
    slow.press()
    assert slow.captions() == expected(presenter, "dog", ["dog"])


def test_the_last_request_counts(slow, presenter):
    slow.words("plus", "cat")
    slow.page.locator("#press").click()
    slow.page.wait_for_selector("#said ins:has-text('cat'), #said .complaint", timeout=WAIT)
    wait_until_settled(slow)
    assert slow.captions() == expected(presenter, "dog", ["dog"], ["cat"])


def test_a_waiting_request_can_be_stopped(slow, browser, slow_address):
    other, late = (Visitor(browser, slow_address) for _ in range(2))
    for visitor in (other, late):
        visitor.words("minus", "cat")
    slow.start()  # again: on a busy machine the first may have finished
    other.start()  # both workers are busy
    before = late.start()
    late.page.wait_for_timeout(300)
    late.page.locator("#stop").click()
    assert wait_until_settled(late, 9000)[1] == before
    assert other.page.locator("#said .card").count() == 1
    for visitor in (other, late):
        assert visitor.problems == []
        visitor.close()


def test_the_list_of_concepts_closes_after_a_pick(visit):
    visitor = visit()
    visitor.page.locator("#minus input").click()
    visitor.page.locator("#minus [role=option]").first.click()
    visitor.page.wait_for_selector("#minus [role=option]", state="detached", timeout=WAIT)
    visitor.press()
    assert visitor.page.locator("#said .card").count() == 1


def test_choosing_the_same_example_again_clears_the_mark(visit):
    visitor = visit()
    visitor.example("teddy")
    visitor.paint((0.5, 0.5))
    assert visitor.mark()
    visitor.page.locator("#examples [title=teddy]").click()
    visitor.page.wait_for_function("window.eludeSteerMark() === ''", timeout=WAIT)


def test_settings_of_an_edit_are_reset_with_the_next_image(visit, presenter):
    visitor = visit()
    visitor.example("frisbee")
    visitor.edit(2)
    assert "differ from the atlas's: fit 0" in visitor.page.locator("#said").inner_text()
    visitor.example("teddy")
    visitor.words("minus", "teddy")
    visitor.words("plus")
    visitor.press()
    assert visitor.captions() == expected(presenter, "teddy", ["teddy"])
    assert "differ from the atlas's" not in visitor.page.locator("#said").inner_text()


def test_long_words_and_small_windows_stay_within_the_page(visit):
    for size in (PHONE, (844, 390)):
        visitor = visit(size=size)
        visitor.words("minus", "x" * 300)
        assert "has 300 characters" in visitor.press()
        assert visitor.too_wide() <= 0
        assert visitor.page.locator("#easel .shown").bounding_box()["height"] >= 240


def test_search_results_are_visible_on_a_phone(visit):
    visitor = visit(size=PHONE, touch=True)
    visitor.tab("Explore")
    visitor.press("#concepts tbody tr >> nth=0", "#found")
    assert visitor.page.locator("#found tbody tr").first.bounding_box()["y"] < PHONE[1]


def test_a_foreign_address_is_refused_in_one_line():
    command = [sys.executable, "-m", "elude_steer", "demo", "--no-browser", "--host", "203.0.113.7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    message = "'203.0.113.7' is not an address of this machine; choose another --host."
    assert done.stderr.splitlines()[-1] == f"elude-steer: {message}"
    assert "Traceback" not in done.stderr


def test_a_used_port_is_refused_in_one_line(address):
    port = address.rsplit(":", 1)[1].strip("/")
    command = [sys.executable, "-m", "elude_steer", "demo", "--no-browser", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    message = f"port {port} of 127.0.0.1 is in use or not permitted; choose another --port."
    assert done.stderr.splitlines()[-1] == f"elude-steer: {message}"
    assert "Traceback" not in done.stderr
