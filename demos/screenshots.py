"""Screenshots of every state of the demo's page, at two widths and in two themes.

    python demos/screenshots.py OUT_FOLDER

Needs the extras `demo` and `test`, and Debian's chromium. The guide of steering shows two of them, from
`demos/screens/`: `wide-light-3-steered` as `steer`, and `wide-light-12-explored` as `explore`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.visitor import PHONE, WIDE, Visitor, chromium, serve_demo


def visit_page(visitor: Visitor, name: str, folder: Path) -> None:
    """Visit every state of the page and save a screenshot of each."""

    def save_screenshot(state: str, whole: bool = False) -> None:
        visitor.shot(folder / f"{name}-{state}.png", whole)

    save_screenshot("1-start")
    visitor.page.locator("#plus input").click()
    visitor.page.keyboard.type("b")
    save_screenshot("2-words")
    visitor.page.keyboard.press("Escape")
    visitor.words("plus")
    visitor.example("dog")
    before = visitor.html()
    visitor.page.locator("#edits [data-row]").nth(1).click()
    visitor.page.wait_for_selector("#said .card")
    visitor.answer(before)
    visitor.page.wait_for_selector("#easel .views button")
    save_screenshot("3-steered")
    visitor.press("#dose", "#doses")
    save_screenshot("13-dose", whole=True)
    visitor.example("teddy")
    visitor.words("minus")
    visitor.words("plus", "cat")
    visitor.paint((0.12, 0.78), (0.3, 0.84))
    save_screenshot("4-marked")
    visitor.press()
    save_screenshot("5-placed")
    visitor.page.locator("#easel .clear").click()
    visitor.page.locator("#easel .brush").click()
    visitor.words("minus", "teddy")
    visitor.open("settings")
    visitor.press("#tune", "#tried")
    save_screenshot("6-settings", whole=True)
    visitor.press()
    visitor.open("settings")
    visitor.open("why")
    visitor.press("#reasons tbody tr >> nth=0", "#specimen")
    save_screenshot("7-why", whole=True)
    visitor.open("why")
    visitor.open("recipe")
    save_screenshot("8-recipe", whole=True)
    visitor.open("recipe")
    visitor.words("minus")
    visitor.words("plus")
    visitor.press()
    save_screenshot("9-asked")
    with tempfile.TemporaryDirectory() as temporary:
        bad = Path(temporary) / "notes.png"
        bad.write_text("not an image")
        before = visitor.html()
        visitor.bring(bad)
        visitor.answer(before)
    save_screenshot("10-bad-upload")
    visitor.tab("Explore")
    save_screenshot("11-explore")
    visitor.press("#concepts tbody tr:has-text('motorcycle')", "#found")
    visitor.press("#found tbody tr >> nth=0", "#specimen-found")
    save_screenshot("12-explored", whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the screenshots")
    options: Any = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with serve_demo("--atlas", "toyland") as (address, _), chromium() as browser:
        for width, size in (("wide", WIDE), ("phone", PHONE)):
            for scheme in ("light", "dark"):
                visitor = Visitor(browser, address, size=size, scheme=scheme, touch=size == PHONE)
                visit_page(visitor, f"{width}-{scheme}", options.folder)
                visitor.close()
                print(f"{width}, {scheme}: {visitor.problems or 'fine'}")


if __name__ == "__main__":
    main()
