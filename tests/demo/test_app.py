"""The demo in a real browser: what a visitor does, and what they see."""

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
from elude_steer.demo.presenter import Presenter
from elude_steer.demo.session import EditRequest, Picture, region, shipped_examples
from elude_steer.models.vlm import PROMPT
from elude_steer.recipe_files import load_recipe
from elude_steer.steering.run_recipe import run_recipe
from tests.helpers.visitor import CHROMIUM, PHONE, WAIT, WIDE, Visitor, chromium, served

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
    with served() as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def visit(browser, address):
    """Opens the page in a session of its own; at the end nothing may have failed or gone to another host."""
    with ExitStack() as stack:
        came = []

        def opened(**options):
            came.append(Visitor(browser, address, **options))
            stack.callback(came[-1].close)
            return came[-1]

        yield opened
        assert [visitor.problems for visitor in came] == [[] for _ in came]


@pytest.fixture(scope="module")
def page(steerer):
    """What the page should answer."""
    return Presenter(steerer, shipped_examples("toyland"))


def wanted(page, example, minus=(), plus=(), mark=None, **settings):
    path = next(one.path for one in page.examples if one.name == example)
    return EditRequest(Picture.of(path), mark, tuple(minus), tuple(plus), PROMPT, settings)


def expected(page, example, minus=(), plus=(), mark=None, **settings):
    result = page.steer(wanted(page, example, minus, plus, mark, **settings))
    return result.baseline, result.caption


def seen(visitor):
    return visitor.page.locator("#easel .shown").get_attribute("src")


def test_the_whole_act(visit, steerer):
    """Example, minus dog, plus biker, press: both captions as the library says them, and a map for each word."""
    visitor = visit()
    visitor.example("dog")
    plain = seen(visitor)
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.press()
    result = steerer.steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"])
    assert visitor.captions() == (result.baseline, result.caption)
    assert visitor.page.locator("#said del").all_inner_texts() == list(result.gone)
    assert set(visitor.page.locator("#said ins").all_inner_texts()) == set(result.new)
    views = visitor.page.locator("#easel .views button")
    views.first.wait_for(timeout=WAIT)
    assert views.all_inner_texts() == ["picture", "\N{MINUS SIGN} dog", "+ biker"]
    assert views.nth(1).get_attribute("aria-pressed") == "true"  # the first word's map is in sight
    dog = seen(visitor)
    views.nth(2).click()
    biker = seen(visitor)
    visitor.page.locator("#easel .views button").first.click()
    assert len({plain, dog, biker}) == 3
    assert seen(visitor) == plain


def test_nothing_of_the_main_act_needs_scrolling_on_a_laptop(visit):
    visitor = visit()
    visitor.words("minus", "cat")
    visitor.press()
    for part in ("#examples", "#easel .shown", "#minus", "#plus", "#press", "#said .steered"):
        box = visitor.page.locator(part).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= WIDE[1]
    left, right = (visitor.page.locator(part).bounding_box() for part in ("#easel", "#said"))
    assert left["x"] + left["width"] <= right["x"]


def test_what_is_typed_counts_without_the_enter_key(visit, page):
    visitor = visit()
    visitor.example("teddy")
    visitor.page.locator("#minus input").click()
    visitor.page.keyboard.type("teddy")
    visitor.press()
    assert visitor.captions() == expected(page, "teddy", ["teddy"])


def test_words_of_the_atlas_are_suggested(visit):
    visitor = visit()
    visitor.page.locator("#plus input").click()
    visitor.page.keyboard.type("mot")
    assert visitor.page.locator("#plus [role=option]").all_inner_texts()[0].strip().endswith("motorcycle")


def test_what_is_missing_is_asked_for(visit):
    visitor = visit()
    assert "say what should go or come" in visitor.press()
    visitor.words("minus", EVIL)
    assert "alert" in visitor.press()  # told as it was typed, and not run


def test_a_marked_region_gets_what_is_added(visit, page):
    visitor = visit()
    visitor.example("teddy")
    visitor.words("plus", "cat")
    visitor.paint((0.15, 0.8), (0.35, 0.85), brush=120)
    visitor.press()
    mark = visitor.mark()
    rows, columns = region(mark).nonzero()
    assert columns.mean() / region(mark).shape[1] == pytest.approx(0.25, abs=0.05)
    assert rows.mean() / region(mark).shape[0] == pytest.approx(0.825, abs=0.05)
    assert visitor.captions() == expected(page, "teddy", plus=["cat"], mark=mark)
    visitor.page.locator("#easel .clear").click()
    assert visitor.mark() == ""
    assert "name what it replaces under Remove, or mark where" in visitor.press()
    visitor.paint((0.5, 0.5))
    visitor.example("dog")  # another picture takes the mark away
    assert visitor.mark() == ""


def test_a_region_can_be_marked_by_keyboard(visit):
    visitor = visit()
    visitor.page.locator("#easel .brush").focus()
    visitor.page.keyboard.press("Enter")
    visitor.page.locator("#easel .mark").focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowUp", " "):
        visitor.page.keyboard.press(key)
    rows, columns = region(visitor.mark()).nonzero()
    assert columns.mean() < 240
    assert rows.mean() < 240


def test_a_picture_of_ones_own(visit, steerer, tmp_path):
    scenes = [scene for scene in toyland.scenes(seed=71, n=30) if len(scene.things) == 2][:2]
    for number, scene in enumerate(scenes):
        scene.image.save(tmp_path / f"mine {number}.png")
    visitor = visit()
    before = seen(visitor)
    visitor.bring(tmp_path / "mine 0.png")
    visitor.page.wait_for_function("before => document.querySelector('#easel .shown').src !== before", arg=before)
    visitor.words("minus", scenes[0].objects[0])
    visitor.press()
    result = steerer.steer(scenes[0].image, minus=[scenes[0].objects[0]])
    assert visitor.captions() == (result.baseline, result.caption)
    data = base64.b64encode((tmp_path / "mine 1.png").read_bytes()).decode()  # dropped on the easel
    before = seen(visitor)
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
    ("name", "data"), [("notes.png", b"no picture at all"), ("cut.png", None), ("empty.png", b"")], ids=lambda v: str(v)
)
def test_a_bad_upload_is_a_sentence_and_the_old_picture_stays(visit, page, tmp_path, name, data):
    path = next(one.path for one in page.examples if one.name == "cats")
    (tmp_path / name).write_bytes(path.read_bytes()[:900] if data is None else data)
    visitor = visit()
    before = visitor.html()
    visitor.bring(tmp_path / name)
    said = visitor.answer(before)
    assert f"'{name}' cannot be read as an image" in said
    assert "/" not in said  # no path of the machine
    visitor.words("minus", "cat")
    visitor.press()
    assert visitor.captions() == expected(page, "cats", ["cat"])


def test_two_visitors_never_see_each_others_captions(visit, page):
    one, two = visit(), visit()
    one.example("teddy")
    two.example("train")
    for first, second in (("teddy", "train"), ("chair", "bicycle"), ("room", "graffiti")):
        one.words("minus", first)
        two.words("minus", second)
        waiting = one.start(), two.start()
        one.answer(waiting[0])
        two.answer(waiting[1])
        assert one.captions() == expected(page, "teddy", [first])
        assert two.captions() == expected(page, "train", [second])
        assert f"minus=['{first}']" not in two.page.content()
        views = (v.page.locator("#easel .views button").nth(1).inner_text() for v in (one, two))
        assert tuple(views) == (f"\N{MINUS SIGN} {first}", f"\N{MINUS SIGN} {second}")


def test_settings_count_and_can_be_reset(visit, page):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.open("settings")
    visitor.page.locator("#set-nu textarea, #set-nu input").first.fill("6")
    visitor.page.locator("#set-kappa input").fill("17")
    visitor.press()
    assert visitor.captions() == expected(page, "dog", ["dog"], ["biker"], nu=6, kappa=17)
    visitor.page.get_by_label("scale", exact=True).check()
    visitor.press()
    assert visitor.captions() == expected(page, "dog", ["dog"], ["biker"], nu=6, kappa=17, mode="scale")
    visitor.page.locator("#reset").click()
    visitor.page.wait_for_function("document.querySelector('#set-kappa input').value === '12'", timeout=WAIT)
    visitor.press()
    assert visitor.captions() == expected(page, "dog", ["dog"], ["biker"])
    visitor.page.locator("#set-nu textarea, #set-nu input").first.fill("many")
    assert "nu: must be a whole number of at least 1 or all, not 'many'" in visitor.press()


def test_settings_are_found_and_chosen_from(visit, page):
    visitor = visit()
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.open("settings")
    visitor.press("#tune", "#tried")
    found = page.find(wanted(page, "dog", ["dog"], ["biker"]))
    captions = visitor.page.locator("#tried tbody [data-row]").all_inner_texts()
    assert captions == [row["caption"] for row in found.rows]
    before = visitor.html()
    visitor.page.locator("#tried tbody tr").nth(1).click()
    visitor.answer(before)
    assert visitor.captions()[1] == captions[1]
    assert visitor.page.locator("#set-kappa input").input_value() == str(found.rows[1]["kappa"])


def test_why_shows_what_the_split_did(visit, page):
    visitor = visit()
    visitor.words("minus", "cat")
    visitor.open("why")
    visitor.press("#press", "#reasons")
    plan = page.steer(wanted(page, "cats", ["cat"])).plan
    rows = [json.loads(row.get_attribute("data-row")) for row in visitor.page.locator("#reasons [data-row]").all()]
    assert [row["sub_unit"] for row in rows] == [edit.sub_unit for edit in plan.concepts[0].edits]
    visitor.press("#reasons tbody tr >> nth=2", "#specimen")
    sub_unit, unit = plan.concepts[0].edits[2].sub_unit, plan.concepts[0].edits[2].unit
    said = visitor.page.locator("#specimen").inner_text()
    assert f"Sub-unit {sub_unit}: cat" in said
    assert f"Unit {unit}, before the split" in said
    assert visitor.page.locator("#specimen .strip img").count() == 16


def test_the_recipe_can_be_taken_home_and_brought_back(visit, page, steerer, tmp_path):
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
    (ran,) = run_recipe(load_recipe(tmp_path / "steering.yaml"), steerer, "demos/images/toyland-teddy.png")
    assert visitor.captions() == (ran.result.baseline, ran.result.caption)

    other = visit()
    other.open("recipe")
    other.bring(tmp_path / "steering.yaml", "given")
    other.page.wait_for_function("document.querySelector('#plus').innerText.includes('cat')", timeout=WAIT)
    assert "teddy" in other.page.locator("#minus").inner_text()
    (tmp_path / "bad.yaml").write_text("name: x\nstep: []\n")
    before = other.html()
    other.bring(tmp_path / "bad.yaml", "given")
    assert "steps" in other.answer(before)


def test_a_shipped_edit_is_one_press_away(visit, page):
    visitor = visit()
    visitor.example("dog")
    visitor.edit(1)
    assert visitor.captions() == expected(page, "dog", ["dog"], ["biker"])


def test_the_explorer_finds_sub_units_and_shows_what_they_fire_for(visit, page):
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
    visitor.page.locator("#specimen-found .choices button").first.click()  # another part of the same unit
    visitor.answer(before, "#specimen-found")
    visitor.press("#concepts tbody tr >> nth=3", "#found")
    word = next(iter(list(page.steerer.atlas.require_labels().counts)[3:]))
    assert f"Sub-units for '{word}'" in visitor.page.locator("#found").inner_text()
    assert visitor.page.locator("#search textarea, #search input").first.input_value() == word


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_fits_and_can_be_read(visit, size, scheme):
    """No state is wider than the window, and axe finds nothing serious that is ours."""
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
    """Rules of axe that a page breaks seriously, and where."""
    from axe_playwright_python.sync_playwright import Axe

    broken = Axe().run(page).response["violations"]
    return {
        one["id"]: [node["html"][:200] for node in one["nodes"]]
        for one in broken
        if one["impact"] in ("serious", "critical")
    }


BARE = """
import sys, gradio as gr
with gr.Blocks(analytics_enabled=False) as app:
    with gr.Tabs():
        with gr.Tab("one"):
            gr.Dropdown(["a", "b"], value=["a"], label="words", multiselect=True, allow_custom_value=True)
            gr.Dropdown(["a", "b"], label="recipe")
            gr.Button("press", variant="primary", elem_id="press")
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
    """What axe finds in a page that has nothing but Gradio's own pieces."""
    key = (
        visitor.page.viewport_size["width"],
        visitor.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches"),
    )
    if key not in _bare:
        with served(command=[sys.executable, "-c", BARE]) as (address, _):
            page = visitor.context.new_page()
            page.goto(address)
            page.wait_for_selector("#press", timeout=WAIT)
            _bare[key] = serious(page)
            page.get_by_role("tab", name="two").click()
            _bare[key] |= serious(page)
            page.close()
    return _bare[key]


def test_many_clients_at_once_each_get_their_own(address):
    """The benchmark's crowd, here of eight for a few seconds; in a process, because its sockets stay open."""
    script = (
        "import json, os, sys; sys.path[:0] = ['demos/benchmarks', '.']; import demo; "
        "print(json.dumps(demo.crowd(sys.argv[1], os.getpid(), 8, 6)))"
    )
    done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answers"] >= 8
    assert (found["errors"], found["mixed or wrong"], found["first error"]) == (0, 0, "")


def test_a_password_is_asked_for(tmp_path):
    with served("--auth", "me:secret") as (address, _):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address + "config")
        refused.value.close()  # it holds the connection
        assert refused.value.code == 401


def test_a_page_that_is_pressed_too_often_says_so(browser):
    script = (
        "import sys; from elude_steer.demo.presenter import Presenter; "
        "from elude_steer.demo.session import RateLimit, shipped_examples; "
        "from elude_steer import Steerer; from elude_steer.demo.app import make_app; "
        "app = make_app(Presenter(Steerer.load(), shipped_examples('toyland')), rate_limit=RateLimit(2, 10)); "
        "app.launch(server_name='127.0.0.1', server_port=int(sys.argv[-1]), prevent_thread_lock=True, quiet=True); "
        "print('http', file=sys.stderr, flush=True); app.block_thread()"
    )
    with served(command=[sys.executable, "-c", script]) as (address, _):
        visitor = Visitor(browser, address)
        visitor.words("minus", "cat")
        for _ in range(2):
            visitor.press()
            visitor.captions()
        assert "2 presses a minute" in visitor.press()
        visitor.close()


@pytest.mark.parametrize("given", ["me", "me:", ":secret", ""])
def test_half_a_password_is_refused(given):
    command = [sys.executable, "-m", "elude_steer", "demo", "--auth", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"elude-steer: --auth is '{given}'; it is a name and a password: --auth me:secret."
    ]


@pytest.fixture(scope="module")
def slow_address():
    with served(command=[sys.executable, "-m", "tests.helpers.slow_demo", "demo", "--no-browser"]) as (address, _):
        yield address


@pytest.fixture
def slow(browser, slow_address):
    """A visitor of a page whose model takes seconds, with a press under way on the dog."""
    visitor = Visitor(browser, slow_address)
    visitor.example("dog")
    visitor.words("minus", "dog")
    visitor.words("plus", "biker")
    visitor.press()  # the first one also warms up
    visitor.words("plus", "cow")
    visitor.start()
    visitor.page.wait_for_selector("#said .progress-bar", timeout=WAIT)
    yield visitor
    assert visitor.problems == []
    visitor.close()


def settled(visitor, milliseconds=7000):
    """What stands there when whatever was under way would have been done."""
    visitor.page.wait_for_timeout(milliseconds)
    return seen(visitor), visitor.html()


def test_another_picture_ends_the_press_for_the_last_one(slow, tmp_path):
    slow.example("teddy")
    assert settled(slow) == (seen(slow), slow.html())
    picture = seen(slow)
    assert "press Steer" in slow.page.locator("#said").inner_text()
    slow.words("minus", "chair")
    slow.words("plus")
    slow.start()
    slow.page.wait_for_selector("#said .progress-bar", timeout=WAIT)
    next(toyland.scenes(seed=72, n=1)).image.save(tmp_path / "mine.png")
    slow.bring(tmp_path / "mine.png")
    slow.page.wait_for_function("before => document.querySelector('#easel .shown').src !== before", arg=picture)
    brought = seen(slow)
    assert slow.chosen() == ""  # no example any more
    assert settled(slow)[0] == brought
    assert slow.page.locator("#said .card").count() == 0


def test_a_stop_leaves_everything_as_it_was_and_the_next_press_counts(slow, page):
    before = seen(slow)
    slow.page.locator("#stop").click()
    slow.page.wait_for_selector("#said .progress-bar", state="detached", timeout=WAIT)
    picture, said = settled(slow)
    assert picture == before
    assert "cow" not in said
    assert "error" not in slow.page.locator("#said").inner_text().lower()
    slow.words("plus")
    slow.press()
    assert slow.captions() == expected(page, "dog", ["dog"])


def test_the_last_press_counts(slow, page):
    slow.words("plus", "cat")
    slow.page.locator("#press").click()
    slow.page.wait_for_selector("#said ins:has-text('cat'), #said .complaint", timeout=WAIT)
    settled(slow)
    assert slow.captions() == expected(page, "dog", ["dog"], ["cat"])


def test_a_press_that_waits_for_its_turn_can_be_stopped(slow, browser, slow_address):
    other, late = (Visitor(browser, slow_address) for _ in range(2))
    for visitor in (other, late):
        visitor.words("minus", "cat")
    slow.start()  # once more: on a busy machine the first may be done by now
    other.start()  # both places are taken
    before = late.start()
    late.page.wait_for_timeout(300)
    late.page.locator("#stop").click()
    assert settled(late, 9000)[1] == before
    assert other.page.locator("#said .card").count() == 2
    for visitor in (other, late):
        assert visitor.problems == []
        visitor.close()


def test_the_list_of_words_closes_after_a_pick(visit):
    visitor = visit()
    visitor.page.locator("#minus input").click()
    visitor.page.locator("#minus [role=option]").first.click()
    visitor.page.wait_for_selector("#minus [role=option]", state="detached", timeout=WAIT)
    visitor.press()
    assert visitor.page.locator("#said .card").count() == 2


def test_the_same_example_once_more_takes_the_mark_away(visit):
    visitor = visit()
    visitor.example("teddy")
    visitor.paint((0.5, 0.5))
    assert visitor.mark()
    visitor.page.locator("#examples [title=teddy]").click()
    visitor.page.wait_for_function("window.eludeSteerMark() === ''", timeout=WAIT)


def test_settings_of_an_edit_leave_with_its_picture(visit, page):
    visitor = visit()
    visitor.example("dog")
    visitor.edit(0)
    assert "not the atlas's own: kappa 6" in visitor.page.locator("#said").inner_text()
    visitor.example("teddy")
    visitor.words("minus", "teddy")
    visitor.words("plus")
    visitor.press()
    assert visitor.captions() == expected(page, "teddy", ["teddy"])
    assert "not the atlas's own" not in visitor.page.locator("#said").inner_text()


def test_long_words_and_small_windows_stay_within_the_page(visit):
    for size in (PHONE, (844, 390)):
        visitor = visit(size=size)
        visitor.words("minus", "x" * 300)
        assert "has 300 letters" in visitor.press()
        assert visitor.too_wide() <= 0
        assert visitor.page.locator("#easel .shown").bounding_box()["height"] >= 240


def test_what_is_found_on_a_phone_is_in_sight(visit):
    visitor = visit(size=PHONE, touch=True)
    visitor.tab("Explore")
    visitor.press("#concepts tbody tr >> nth=0", "#found")
    assert visitor.page.locator("#found tbody tr").first.bounding_box()["y"] < PHONE[1]


def test_an_address_that_is_not_ours_is_one_line():
    command = [sys.executable, "-m", "elude_steer", "demo", "--no-browser", "--host", "203.0.113.7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = "'203.0.113.7' is no address of this machine; give another --host."
    assert done.stderr.splitlines()[-1] == f"elude-steer: {told}"
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_one_line(address):
    port = address.rsplit(":", 1)[1].strip("/")
    command = [sys.executable, "-m", "elude_steer", "demo", "--no-browser", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = f"port {port} of 127.0.0.1 is taken, or not for you to use; give another --port."
    assert done.stderr.splitlines()[-1] == f"elude-steer: {told}"
    assert "Traceback" not in done.stderr
