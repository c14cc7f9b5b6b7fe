"""The demo's own pieces of a Gradio page.

Gradio's ImageEditor, Gallery and Dataframe do the same and more, but the first is too wide for a phone and takes
seconds to appear, and the others can hardly be used by keyboard or screen reader. These are plain HTML.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from elude_steer.utils import optional

_BARE: dict[str, Any] = {"padding": False, "apply_default_css": False}
_FOLDER = Path(__file__).parent / "assets"


@cache
def asset(name: str) -> str:
    """A file of the page: style sheet, markup or script."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def easel(name: str, value: Mapping[str, Any]) -> Any:
    """The picture with its heat maps and a brush; see `easel.js` for its value. It is shown to, never sent."""
    gr = optional.require("gradio", "the demo")
    # Nothing of a visitor is ever put into the template: Gradio would run `${…}` in it as a program.
    return gr.HTML(value, html_template=asset("easel.html"), js_on_load=asset("easel.js"), elem_id=name, **_BARE)


def choices(name: str, value: str = "") -> Any:
    """HTML from `fragments` whose buttons and rows can be chosen: `.select` is told what stands on them."""
    gr = optional.require("gradio", "the demo")
    return gr.HTML(value, js_on_load=asset("choices.js"), elem_id=name, elem_classes=["ours"], **_BARE)


def text(name: str, value: str) -> Any:
    """HTML that is only read."""
    gr = optional.require("gradio", "the demo")
    return gr.HTML(value, elem_id=name, elem_classes=["ours"], **_BARE)
