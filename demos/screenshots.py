"""Pictures of every state of the demo's page, at both widths and in both themes.

    python demos/screenshots.py OUT_FOLDER

Needs the extras `demo` and `test`, and Debian's chromium. The README shows two of them, in `demos/images/`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.visitor import PHONE, WIDE, Visitor, chromium, serve_demo


def walk(visitor: Visitor, name: str, folder: Path) -> None:
    """A visit from beginning to end."""

    def shot(state: str, whole: bool = False) -> None:
        visitor.shot(folder / f"{name}-{state}.png", whole)

    shot("1-start")
    visitor.page.locator("#plus input").click()
    visitor.page.keyboard.type("b")
    shot("2-words")
    visitor.page.keyboard.press("Escape")
    visitor.words("plus")
    visitor.example("dog")
    before = visitor.html()
    visitor.page.locator("#edits [data-row]").nth(1).click()
    visitor.page.wait_for_selector("#said .card")
    visitor.answer(before)
    visitor.page.wait_for_selector("#easel .views button")
    shot("3-steered")
    visitor.example("teddy")
    visitor.words("minus")
    visitor.words("plus", "cat")
    visitor.paint((0.12, 0.78), (0.3, 0.84))
    shot("4-marked")
    visitor.press()
    shot("5-placed")
    visitor.page.locator("#easel .clear").click()
    visitor.page.locator("#easel .brush").click()
    visitor.words("minus", "teddy")
    visitor.open("settings")
    visitor.press("#tune", "#tried")
    shot("6-settings", whole=True)
    visitor.press()
    visitor.open("settings")
    visitor.open("why")
    visitor.press("#reasons tbody tr >> nth=0", "#specimen")
    shot("7-why", whole=True)
    visitor.open("why")
    visitor.open("recipe")
    shot("8-recipe", whole=True)
    visitor.open("recipe")
    visitor.words("minus")
    visitor.words("plus")
    visitor.press()
    shot("9-asked")
    with tempfile.TemporaryDirectory() as place:
        bad = Path(place) / "notes.png"
        bad.write_text("no picture")
        before = visitor.html()
        visitor.bring(bad)
        visitor.answer(before)
    shot("10-bad-upload")
    visitor.tab("Explore")
    shot("11-explore")
    visitor.press("#concepts tbody tr:has-text('motorcycle')", "#found")
    visitor.press("#found tbody tr >> nth=0", "#specimen-found")
    shot("12-explored", whole=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    options: Any = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with serve_demo() as (address, _), chromium() as browser:
        for width, size in (("wide", WIDE), ("phone", PHONE)):
            for scheme in ("light", "dark"):
                visitor = Visitor(browser, address, size=size, scheme=scheme, touch=size == PHONE)
                walk(visitor, f"{width}-{scheme}", options.folder)
                visitor.close()
                print(f"{width}, {scheme}: {visitor.problems or 'fine'}")


if __name__ == "__main__":
    main()
