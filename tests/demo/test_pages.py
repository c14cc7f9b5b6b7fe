"""Several atlases in one demo: a page each, links between them, and what the pages share."""

import os
import re
import shutil
import sys
import threading
from concurrent.futures import TimeoutError as NotYet
from types import SimpleNamespace

import pytest

from elude_steer.atlas import manifest
from elude_steer.demo import launch
from elude_steer.demo.pages import make_pages, page_links
from elude_steer.demo.presenter import WORKERS
from elude_steer.demo.session import decode_mark
from elude_steer.errors import SpecError
from elude_steer.steering.steerer import Steerer
from tests.demo.helpers import CATS, TEDDY
from tests.helpers.markup import Reader
from tests.helpers.programs import call
from tests.helpers.visitor import CHROMIUM, PHONE, WAIT, WIDE, Visitor, chromium, serve_demo

gradio = pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")
needed = os.environ.get("ELUDE_STEER_BROWSER_TESTS") == "required"
in_browser = pytest.mark.skipif(
    CHROMIUM is None and not needed, reason="browser tests need Debian's chromium: apt-get install chromium"
)
# The slow demo, which notes in a file the pages whose running requests are stopped, and how many requests run.
NOTING = """
import sys
from elude_steer.demo.presenter import Presenter
from elude_steer.cli.entry_point import main
from elude_steer.demo import running as requests
from tests.helpers.slow_demo import report_tokens_slowly

def stop(self, visitor, reason="Stopped.", stop=Presenter.stop):
    if visitor in self._running:
        with open(notes, "a") as file:
            print(self.name, file=file)
    stop(self, visitor, reason)

def answer(self, *arguments, answer=Presenter.answer):
    running.append(self)
    with open(notes, "a") as file:
        print(len(running), file=file)
    try:
        return answer(self, *arguments)
    finally:
        running.remove(self)

notes, running = sys.argv.pop(1), []
Presenter.stop, Presenter.answer = stop, answer
requests.report_tokens = report_tokens_slowly
main()
"""


def make_named(*names):
    return make_pages([SimpleNamespace(name=name) for name in names], reserved=gradio.routes.INTERNAL_ROUTES)


def test_every_page_has_a_name_an_address_and_functions_of_its_own():
    names = ("toyland", "My atlas, \N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}", "my-atlas")
    pages = make_named(*names, "config", "\N{CJK UNIFIED IDEOGRAPH-732B}", "My Atlas", "toyland", "toyland")
    assert [page.name for page in pages] == [
        *names, "config", "\N{CJK UNIFIED IDEOGRAPH-732B}", "My Atlas", "toyland 2", "toyland 3",
    ]  # fmt: skip
    paths = ["", "my-atlas-ete", "my-atlas", "config-2", "atlas", "my-atlas-2", "toyland-2", "toyland-3"]
    assert [page.path for page in pages] == paths
    assert [page.suffix for page in pages[:2]] == ["", "_my_atlas_ete"]
    assert all(re.fullmatch("[a-z0-9-]*", path) for path in paths)
    assert not {*paths} & {*gradio.routes.INTERNAL_ROUTES}


def test_links_mark_the_shown_page_and_a_lone_page_has_none():
    assert page_links(make_named("toyland"), make_named("toyland")[0]) == ""
    pages = make_named("toyland", "<b> & co")
    text = page_links(pages, pages[1])
    assert [pair for _, *pair in Reader(text).attributes if pair[0] in ("href", "aria-current")] == [
        ["href", "."],
        ["href", "b-co"],
        ["aria-current", "page"],
    ]
    assert "&lt;b&gt; &amp; co" in text


def test_pages_share_the_threads_for_heavy_work(steerer):
    first, second = launch._make_presenters([steerer, steerer], None, False, None)
    release, started = threading.Event(), threading.Semaphore(0)

    def work():
        started.release()
        return release.wait(20)

    for _ in range(WORKERS):
        threading.Thread(target=first.run_in_worker, args=(work,), daemon=True).start()
        assert started.acquire(timeout=20)
    waiting = second._workers.submit(lambda: "done")
    with pytest.raises(NotYet):
        waiting.result(0.3)
    release.set()
    assert waiting.result(20) == "done"


def test_every_model_is_warmed_up_one_after_the_other():
    done = []
    fakes = [SimpleNamespace(run_in_worker=lambda job: job(), warm_up=lambda n=n: done.append(n)) for n in range(3)]
    launch._warm_up(fakes)
    assert done == [0, 1, 2]


@pytest.mark.parametrize(("count", "examples"), [(0, None), (2, ())])
def test_examples_are_for_one_atlas(steerer, count, examples):
    with pytest.raises(SpecError, match=r"serve\(\[one, two\]\)"):
        launch.serve([steerer] * count, examples=examples)


def test_without_an_atlas_all_that_come_with_the_package_are_served(run, monkeypatch):
    assert manifest.list_shipped()[0] == manifest.EMBEDDED_ATLAS
    served = []
    monkeypatch.setattr(manifest, "list_shipped", lambda: ["toyland", "second"])
    monkeypatch.setattr(manifest, "find_atlas", lambda name: None)
    monkeypatch.setattr(Steerer, "load", lambda atlas, **options: atlas)
    monkeypatch.setattr(launch, "serve", lambda steerers, **options: served.append(steerers))
    for options in ((), ("--atlas", "second"), ("--atlas", "second", "--atlas", "toyland")):
        code, _, err = run("demo", *options)
        assert code == 0, err
    assert served == [["toyland", "second"], ["second"], ["second", "toyland"]]
    code, _, err = run("demo", "--model", "toyland/captioner")
    assert (code, "--model is for one atlas, not for toyland, second" in err) == (1, True)


# Two atlases in a browser


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An `ELUDE_STEER_HOME` with a copy of toyland's atlas, called second, that has other default settings."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "atlases" / "second"
    shutil.copytree(manifest.find_atlas("toyland"), folder)
    content = {k: v for k, v in manifest.read_manifest(folder).items() if k not in ("format", "files", "checksum")}
    content["spec"]["steering"] |= {"mode": "scale", "gamma": -50.0}
    manifest.write_manifest(folder, content)
    return home


@pytest.fixture(scope="module")
def second(home):
    return Steerer.load(str(home / "atlases" / "second"))


@pytest.fixture(scope="module")
def demo(home):
    """The address of a demo with two atlases, and the file of its notes."""
    notes = home / "notes"
    notes.touch()
    command = [sys.executable, "-c", NOTING, str(notes), "demo", "--no-browser", "--atlas", "toyland"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELUDE_STEER_HOME", str(home))
        mcp = ["--mcp"] if needed or pytest.importorskip("mcp") else []
        with serve_demo(command=[*command, "--atlas", "second", *mcp]) as (address, _):
            yield address, notes


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: pip install playwright")
    with chromium() as opened:
        yield opened


@pytest.fixture
def visit(browser, demo):
    visitors = []

    def open_page(path="", **options):
        visitors.append(Visitor(browser, demo[0], path=path, **options))
        return visitors[-1]

    yield open_page
    problems = [visitor.problems for visitor in visitors]
    for visitor in visitors:
        visitor.close()
    assert problems == [[] for _ in visitors]


def shown_atlas(visitor):
    """The name of the marked link; the page must have no other links between pages."""
    assert visitor.page.get_by_role("navigation").count() == 1
    return visitor.page.locator("#head nav [aria-current=page]").inner_text()


def switch(visitor, name):
    visitor.page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    visitor.page.wait_for_selector(f"#head [aria-current]:has-text('{name}')", timeout=WAIT)
    visitor.wait_for_page()


@in_browser
def test_a_visitor_switches_between_atlases_and_back(visit, demo, steerer, second):
    visitor = visit()
    assert shown_atlas(visitor) == "toyland"
    assert visitor.page.locator("#head nav").bounding_box()["y"] < 60
    visitor.words("minus", "cat")
    visitor.press()
    one = steerer.steer(CATS, minus=["cat"])
    assert visitor.captions() == (one.baseline, one.caption)
    switch(visitor, "second")
    assert (visitor.page.url, shown_atlas(visitor)) == (demo[0] + "second", "second")
    assert "atlas second: " in visitor.page.locator("#head .about").inner_text()
    assert visitor.page.locator("#press").count() == visitor.page.locator("#easel").count() == 1
    assert visitor.page.locator("#said .card").count() == 0  # a page of its own
    visitor.words("minus", "cat")
    visitor.press()
    two = second.steer(CATS, minus=["cat"])
    assert visitor.captions() == (two.baseline, two.caption)
    assert one.caption != two.caption
    assert visitor.page.locator("#said .steered").bounding_box()["y"] < WIDE[1]
    visitor.page.go_back()
    visitor.page.wait_for_selector("#head [aria-current]:has-text('toyland')", timeout=WAIT)
    visitor.wait_for_page()
    assert (visitor.page.url, shown_atlas(visitor)) == (demo[0], "toyland")


@in_browser
def test_an_address_opens_its_atlas_where_everything_works(visit, second):
    """The settings, an example, the brush, the recipe and the explorer belong to the page's atlas."""
    visitor = visit("second", size=PHONE, scheme="dark")
    assert shown_atlas(visitor) == "second"
    assert visitor.too_wide() <= 0
    visitor.open("settings")
    assert visitor.page.get_by_label("scale", exact=True).is_checked()
    assert visitor.page.locator("#set-gamma input").input_value() == "-50"
    visitor.page.wait_for_selector("#plain button:has-text('cat')", timeout=WAIT)  # the first image's caption
    visitor.words("minus", "cat")
    visitor.page.wait_for_selector("#swaps details", timeout=WAIT)
    assert "mode scale has no strength" in visitor.press("#dose", "#doses")
    visitor.words("minus")
    visitor.example("teddy")
    visitor.words("plus", "cat")
    visitor.paint((0.15, 0.8), (0.35, 0.85), brush=120)
    visitor.open("recipe")
    visitor.press("#press", "#taken")
    expected = second.steer(TEDDY, plus=["cat"], where=decode_mark(visitor.mark()), mode="place")
    assert visitor.captions() == (expected.baseline, expected.caption)
    assert "atlases/second" in visitor.page.locator("#taken").inner_text()
    visitor.tab("Explore")
    visitor.press("#concepts tbody tr >> nth=0", "#found")
    assert visitor.page.locator("#found tbody tr").count() > 0


@in_browser
def test_leaving_a_page_stops_its_request(visit, demo):
    for path, name, other in (("", "toyland", "second"), ("second", "second", "toyland")):
        demo[1].write_text("")
        visitor = visit(path)
        visitor.words("minus", "cat")
        visitor.start()
        visitor.page.wait_for_selector("#said .progress-bar", timeout=WAIT)
        switch(visitor, other)
        # Gradio logs in the page that is left that its request was cut off.
        visitor.problems[:] = [text for text in visitor.problems if not re.search("AbortError|errored out", text)]
        for _ in range(100):
            if name in demo[1].read_text():
                break
            visitor.page.wait_for_timeout(100)
        assert set(demo[1].read_text().split()) - {"1"} == {name}


@in_browser
def test_two_requests_run_at_a_time_over_all_pages(visit, demo):
    visitors = [visit(path) for path in ("", "second", "", "second")]
    for visitor in visitors:
        visitor.words("minus", "cat")
    demo[1].write_text("")
    before = [visitor.start() for visitor in visitors]
    for visitor, old in zip(visitors, before, strict=True):
        visitor.answer(old)
        assert visitor.page.locator("#said .card").count() == 1
    counts = [int(line) for line in demo[1].read_text().split()]
    assert (len(counts), max(counts)) == (4, 2)


@in_browser
@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_the_links_are_accessible(visit, size, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    visitor = visit(size=size, scheme=scheme)
    assert visitor.too_wide() <= 0
    found = axe.run(visitor.page, context="#head nav").response
    assert found["violations"] == []
    assert any(rule["id"] == "color-contrast" for rule in found["passes"])  # axe has looked at the links
    visitor.page.get_by_role("link", name="second", exact=True).focus()
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_url("**/second", timeout=WAIT)
    visitor.wait_for_page()


def test_programs_reach_every_atlas(demo, steerer, second):
    pytest.importorskip("mcp", reason="the MCP server needs mcp: pip install 'elude-steer[mcp]'")
    arguments = {"image": "cats", "minus": ["cat"]}
    calls = [("steer", arguments), ("steer_second", arguments), ("concepts_second", {"limit": 2})]
    tools, one, two, concepts = call("mcp", demo[0], *calls)
    assert set(tools) == {"steer", "concepts", "steer_second", "concepts_second"}
    assert tools["steer_second"]["description"].startswith("Atlas 'second'. Caption an image")
    for (failed, texts), which in ((one, steerer), (two, second)):
        assert not failed, texts
        result = which.steer(CATS, minus=["cat"])
        assert texts[:2] == [result.baseline, result.caption]
    assert concepts == [False, [str(list(second.atlas.labels.counts)[:2])]]
