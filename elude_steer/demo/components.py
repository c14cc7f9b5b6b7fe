"""The demo's own Gradio components, made of plain HTML.

They replace Gradio's ImageEditor, which is too wide for a phone and takes seconds to appear, and its Gallery and
Dataframe, which are hard to use by keyboard or screen reader.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from elude_steer.utils import optional

_NO_STYLE: dict[str, Any] = {"padding": False, "apply_default_css": False}
_FOLDER = Path(__file__).parent / "assets"


@cache
def read_asset(name: str) -> str:
    """The text of a style sheet, template or script of the page."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def image_viewer(element_id: str, value: Mapping[str, Any]) -> Any:
    """The image with its heat maps and a brush to mark a region. `image_viewer.js` documents the value.

    The value only goes to the browser: the mark comes back through `window.eludeSteerMark`.
    """
    gr = optional.require("gradio", "the demo")
    # Never put a visitor's text into the template: Gradio would run `${…}` in it as code.
    template, script = read_asset("image_viewer.html"), read_asset("image_viewer.js")
    return gr.HTML(value, html_template=template, js_on_load=script, elem_id=element_id, **_NO_STYLE)


def clickable_html(element_id: str, value: str = "") -> Any:
    """HTML from `html_parts` with buttons or rows; `.select` receives the data of the one that is clicked."""
    gr = optional.require("gradio", "the demo")
    script = read_asset("clickable.js")
    return gr.HTML(value, js_on_load=script, elem_id=element_id, elem_classes=["ours"], **_NO_STYLE)


def page_state(element_id: str) -> Any:
    """An invisible element that keeps what the page marks true to its fields; `.select` fires when the strength moves.

    `page_state.js` documents what it does.
    """
    gr = optional.require("gradio", "the demo")
    return gr.HTML("", js_on_load=read_asset("page_state.js"), elem_id=element_id, **_NO_STYLE)


def static_html(element_id: str, value: str) -> Any:
    """HTML without anything to click."""
    gr = optional.require("gradio", "the demo")
    return gr.HTML(value, elem_id=element_id, elem_classes=["ours"], **_NO_STYLE)
