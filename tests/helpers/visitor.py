"""The demo in a process of its own, and a visitor who uses it in a browser."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, PHONE = (1440, 900), (390, 844)
WAIT = 60_000  # milliseconds; a busy machine is slow
EXAMPLES = ("cats", "dog", "frisbee", "teddy", "train")


@contextmanager
def serve_demo(*options, command=None):
    """Start the demo in its own process; yield its address and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command or [sys.executable, "-m", "elude_steer", "demo", "--no-browser", *options]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in iter(process.stderr.readline, ""):
            lines.append(line)
            if line.startswith("http"):
                break
        else:
            raise RuntimeError(f"the demo did not start: {''.join(lines)}")
        yield f"http://127.0.0.1:{port}/", process
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


@contextmanager
def chromium():
    """Chromium, controlled by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visitor:
    """One session in a browser; `problems` collects errors of the page and its requests."""

    def __init__(self, browser, address, *, path="", size=WIDE, scheme="light", touch=False):
        self.address, self.problems = address, []
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=touch)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        # Gradio's page closes the streams of answers, and the browser that of a page it leaves; both count as failed.
        self.page.on(
            "requestfailed", lambda r: None if self._is_stream(r.url) else self.problems.append(f"lost {r.url}")
        )
        self.page.on("request", lambda r: None if self._local(r.url) else self.problems.append(f"outside: {r.url}"))
        self.page.on("response", lambda r: self.problems.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        start = time.perf_counter()
        self.page.goto(address + path)
        self.wait_for_page()
        self.opened = time.perf_counter() - start

    def _is_stream(self, url):
        return "/queue/data" in url or "/heartbeat/" in url

    def _local(self, url):
        return url.startswith((self.address, "data:", "blob:"))

    def wait_for_page(self):
        self.page.wait_for_selector("#press", timeout=WAIT)
        self.page.wait_for_selector("#easel .shown", timeout=WAIT)

    def close(self):
        self.context.close()

    def example(self, name):
        """Choose an example and wait for its image."""
        self._change("#easel .shown", "src", lambda: self.page.locator(f"#examples [title={name}]").click())

    def _change(self, where, attribute, act):
        before = self.page.locator(where).get_attribute(attribute)
        pressed = self.chosen()
        act()
        if self.chosen() != pressed:
            self.page.wait_for_function(
                "([where, name, before]) => document.querySelector(where).getAttribute(name) !== before",
                arg=[where, attribute, before],
                timeout=WAIT,
            )

    def edit(self, number):
        """Press one of an example's edits and wait for its captions."""
        before = self.html()
        self.page.locator("#edits [data-row]").nth(number).click()
        self.page.wait_for_selector("#said .card", timeout=WAIT)
        self.answer(before)

    def chosen(self):
        """The name of the chosen example, or an empty string."""
        return "".join(one.get_attribute("title") for one in self.page.locator("#examples [aria-pressed=true]").all())

    def words(self, box, *words):
        """Replace the words in a box."""
        tokens = self.page.locator(f"#{box} .token")
        if tokens.count():
            self.page.locator(f"#{box} .remove-all").click()  # waits until the page lets it be clicked
            tokens.first.wait_for(state="detached")
        for word in words:
            self.page.locator(f"#{box} input").click()
            self.page.locator(f"#{box} input").fill(word)
            self.page.keyboard.press("Enter")
        self.page.keyboard.press("Escape")

    def press(self, button="#press", where="#said"):
        """Press a button, wait for the answer and return its text."""
        before = self.start(button, where)
        return self.answer(before, where)

    def start(self, button="#press", where="#said"):
        before = self.html(where)
        self.page.locator(button).click()
        return before

    def html(self, where="#said"):
        """The HTML of an element, without Gradio's progress signs."""
        return self.page.locator(f"{where} [id^=html-]").inner_html()

    def answer(self, before, where="#said"):
        self.page.wait_for_function(
            """([where, before]) => document.querySelector(`${where} [id^=html-]`).innerHTML !== before
            && [...document.querySelectorAll('.card, .complaint, tr, .hint, .specimens, .code')]
                .some((one) => one.closest(where))
            && !document.querySelector(`${where} .pending, ${where} .generating`)""",
            arg=[where, before],
            timeout=WAIT,
        )
        return self.page.locator(where).inner_text()

    def captions(self):
        """The baseline and the steered caption."""
        return tuple(self.page.locator(where).first.inner_text() for where in ("#plain p", "#said .steered p"))

    def open(self, accordion):
        self.page.locator(f"#{accordion} > button, #{accordion} .label-wrap").first.click()
        self.page.wait_for_timeout(300)

    def tab(self, name):
        self.page.get_by_role("tab", name=name).click()

    def paint(self, *points, brush=None):
        """Drag the brush over points, given as shares of the image."""
        button = self.page.locator("#easel .brush")
        if button.get_attribute("aria-pressed") != "true":
            button.click()
        if brush is not None:
            self.page.locator("#easel .tools input").fill(str(brush))
        self.page.locator("#easel .stage").scroll_into_view_if_needed()
        box = self.page.locator("#easel .mark").bounding_box()
        positions = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*positions[0])
        self.page.mouse.down()
        for x, y in positions[1:]:
            self.page.mouse.move(x, y, steps=6)
        self.page.mouse.up()

    def mark(self):
        return self.page.evaluate("window.eludeSteerMark()")

    def bring(self, path, button="bring"):
        self.page.locator(f"input[type=file]:has(+ #{button})").set_input_files(path)

    def shot(self, path, whole=False):
        self.page.mouse.move(0, 0)
        self.page.wait_for_timeout(400)
        self.page.screenshot(path=str(path), full_page=whole)

    def too_wide(self):
        """The number of pixels by which the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
