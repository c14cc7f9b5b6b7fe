"""The demo in a real browser: what a visitor does, and what they see."""

import shutil
import socket
import subprocess
import sys

import pytest

from elude_steer import toyland

pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="browser tests need Debian's chromium: apt-get install chromium"
)
WAIT = 60_000  # milliseconds; a busy machine is slow


@pytest.fixture(scope="module")
def address():
    """The page as the command serves it, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "elude_steer", "demo", "--no-browser", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        yield next(line.strip() for line in lines if line.startswith("http"))
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page in a session of its own; at the end nothing may have failed or gone to another host."""
    pages, problems = [], []

    def opened(**options):
        page = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options}).new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        # Gradio closes the streams of its answers from the page's side, which counts as failed.
        page.on("requestfailed", lambda r: None if "/queue/data" in r.url else problems.append(f"failed: {r.url}"))
        page.on("request", lambda request: None if local(request.url, address) else problems.append(request.url))
        page.goto(address)
        page.wait_for_selector("#press", timeout=WAIT)
        page.wait_for_selector("#editor canvas", timeout=WAIT)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert not problems


def local(url, address):
    return url.startswith((address, "data:", "blob:"))


def example(page, name):
    names = ["cats", "dog", "frisbee", "teddy", "train"]
    page.locator("#examples .thumbnail-item").nth(names.index(name)).click()
    page.wait_for_timeout(800)


def words(page, box, *given):
    for word in given:
        page.locator(f"#{box} input").click()
        page.locator(f"#{box} input").fill(word)
        page.keyboard.press("Enter")
    page.keyboard.press("Escape")


def press(page, wanted="#said .captions ins, #said .captions del, #said .complaint, #said .note"):
    page.locator("#press").click()
    page.wait_for_selector(wanted, timeout=WAIT)
    return page.locator("#said").inner_text()


def test_the_whole_act(visit, steerer):
    """Example, minus dog, plus biker, press: both captions as the library says them, and a map for each word."""
    page = visit()
    example(page, "dog")
    words(page, "minus", "dog")
    words(page, "plus", "biker")
    said = press(page)
    result = steerer.steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"])
    assert result.baseline in said
    assert result.caption in said
    assert page.locator("#said del").all_inner_texts() == list(result.gone)
    assert set(page.locator("#said ins").all_inner_texts()) == set(result.new)
    page.wait_for_selector("#maps img", timeout=WAIT)
    assert page.locator("#maps .thumbnail-item img").count() == 2


def test_a_word_that_nobody_gave_is_asked_for(visit):
    page = visit()
    assert "there is no picture yet" in press(page)
    example(page, "teddy")
    page.locator("#press").click()
    page.wait_for_function("document.querySelector('#said').innerText.includes('say what should go')", timeout=WAIT)


def test_two_visitors_never_see_each_others_captions(visit, steerer):
    one, two = visit(), visit()
    example(one, "teddy")
    example(two, "train")
    words(one, "minus", "teddy")
    words(two, "minus", "train")
    first, second = press(one), press(two)
    assert steerer.steer("demos/images/toyland-teddy.png", minus=["teddy"]).caption in first
    assert steerer.steer("demos/images/toyland-train.png", minus=["train"]).caption in second
    assert "train" not in first
    assert "teddy" not in second


def test_a_picture_of_ones_own(visit, steerer, tmp_path):
    scene = next(scene for scene in toyland.scenes(seed=71, n=30) if len(scene.things) == 2)
    scene.image.save(tmp_path / "mine.png")
    page = visit()
    page.locator("#editor input[type=file]").first.set_input_files(tmp_path / "mine.png")
    page.wait_for_timeout(1500)
    words(page, "minus", scene.objects[0])
    said = press(page)
    assert steerer.vlm.caption([scene.image])[0] in said


def test_the_recipe_can_be_taken_home(visit, tmp_path):
    from elude_steer.recipe import check_recipe

    page = visit()
    example(page, "teddy")
    words(page, "minus", "teddy")
    press(page)
    page.locator("#recipe button").first.click()
    page.wait_for_selector("#save", timeout=WAIT)
    with page.expect_download(timeout=WAIT) as download:
        page.locator("#save").click()
    download.value.save_as(tmp_path / "mine.yaml")
    assert check_recipe(tmp_path / "mine.yaml").steps[0].minus == ("teddy",)


def test_the_explorer_finds_sub_units_and_shows_what_they_fire_for(visit):
    page = visit()
    page.get_by_role("tab", name="Explore").click()
    page.locator("#search textarea, #search input").first.fill("puppy")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#found').innerText.includes('dog')", timeout=WAIT)
    page.locator("#found td >> visible=true").first.click()
    page.wait_for_selector(".part img >> visible=true", timeout=WAIT)
    assert page.locator(".part img >> visible=true").count() >= 4
    assert page.locator(".whole img >> visible=true").count() >= 4
