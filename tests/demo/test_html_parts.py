"""The pieces of the demo's page, as a browser reads them."""

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elude_steer.demo import html_parts
from elude_steer.errors import SpecError
from elude_steer.models.vlm import PatchGrid
from elude_steer.specs import Settings
from elude_steer.steering.plan import Concept, Edit, Plan
from elude_steer.steering.result import SteeredCaption
from tests.helpers.markup import Reader

GRID = PatchGrid(np.array([[(0, 0, 0.5, 1), (0.5, 0, 1, 1)]]), (1, 2))
PICTURE = Image.new("RGB", (40, 20), (200, 30, 60))
EVIL = (
    "<script>alert('1')</script>", '"><img src=x onerror="alert(1)">', "' onclick='alert(1)", "${alert(1)}", "`${x}`",
    "{{x}}", "</code></pre><b>", "--><!--", "&lt;b&gt;", "&amp;quot;", "a\\u003cb", "é ☂ \N{MINUS SIGN} hut",
)  # fmt: skip
evil = pytest.mark.parametrize("text", EVIL)


def result_of(baseline="a dog", caption="a cat", edits=(), notes=(), seconds=0.25):
    plan = Plan((Concept("dog", "minus", Settings(), tuple(edits)), Concept("cat", "plus", Settings(), tuple(edits))))
    return SteeredCaption(baseline, caption, plan, {}, GRID, PICTURE, tuple(notes), seconds=seconds)


def edit(sub_unit):
    return Edit(sub_unit, sub_unit // 2, "scale", -15.0, "puppy", "dog", 1.0, 2.5)


def values(page, name):
    """What an attribute says on every tag that has it."""
    return [value for _, own, value in Reader(page).attributes if own == name]


def rows(page):
    return [json.loads(value) for value in values(page, "data-row")]


def pictures(page):
    found = []
    for source in values(page, "src"):
        assert source.startswith("data:image/jpeg;base64,")
        found.append(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))))
    return found


def everything(text):
    """Every piece with a text from outside wherever one can stand."""
    told = {"word": text, text: [text, 1, None]}
    button = html_parts.choice(text, told, picture=PICTURE, chosen=True)
    return {
        "captions": html_parts.captions(result_of(f"{text} dog", f"{text} cat", notes=(text,))),
        "hint": html_parts.hint(text),
        "complaint": html_parts.complaint(SpecError(text)),
        "table": html_parts.table(text, (text, text), [(told, (text, text)), (told, (text, 1))]),
        "empty table": html_parts.table(text, (), []),
        "choice": html_parts.choice(text, told),
        "choice with a picture": button,
        "choices": html_parts.choices(text, [button, button]),
        "strip": html_parts.strip(text, [PICTURE, PICTURE]),
        "empty strip": html_parts.strip(text, []),
        "code": html_parts.code(text, text, {text: None}),
    }


# What comes from outside


@evil
def test_a_text_from_outside_adds_no_tag_and_no_attribute(text):
    """Whatever it says, the page is built as it is for a harmless text."""
    tame = everything("cup")  # a word that neither caption has to itself
    for name, page in everything(text).items():
        read, wanted = Reader(page), Reader(tame[name])
        assert read.tags == wanted.tags, name
        assert [one[:2] for one in read.attributes] == [one[:2] for one in wanted.attributes], name


@evil
def test_a_text_from_outside_is_read_as_it_was_written(text):
    pages = everything(text)
    for name, count in {"captions": 3, "hint": 1, "complaint": 1, "table": 6, "empty table": 1, "choice": 1}.items():
        assert Reader(pages[name]).text.count(" ".join(text.split())) == count, name
    assert values(pages["choice"], "title") == [text]
    assert values(pages["choice with a picture"], "alt") == [text]
    assert values(pages["choices"], "aria-label") == [text]
    assert values(pages["strip"], "alt") == [f"{text}: 1", f"{text}: 2"]
    assert values(pages["table"], "aria-label") == [text]
    assert values(pages["code"], "aria-label") == [text]
    assert [json.loads(value) for value in values(pages["code"], "data-save")] == [{text: None}]
    assert Reader(pages["code"]).words.count(text) == 2  # title and text, to the letter


@evil
def test_nothing_runs_and_nothing_is_fetched(text):
    for name, page in everything(text).items():
        read = Reader(page)
        assert not {"script", "style", "link", "iframe", "form", "a"} & set(read.tags), name
        assert not [one for _, one, _ in read.attributes if one.startswith("on") or one in ("href", "srcset")], name
        assert all(one.startswith("data:image/jpeg;base64,") for one in values(page, "src")), name


@settings(deadline=None, max_examples=60)
@given(text=st.text(), told=st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_a_row_is_told_what_was_given_whatever_it_was(text, told):
    assert rows(html_parts.choice(text, told)) == [told]
    assert rows(html_parts.table("t", ("a", "b"), [(told, (text, 1))] * 2)) == [told, told]


# Captions


def test_both_captions_are_there_with_what_is_gone_and_new():
    read = Reader(html_parts.captions(result_of("a dog in a park", "a cat in a park", notes=("a note.",))))
    assert read.marks == [("del", "dog"), ("ins", "cat")]
    assert read.text.startswith("baseline a dog in a park steered a cat in a park")
    assert read.text.endswith("a note.")
    assert ("div", "role", "status") in read.attributes  # told by a screen reader


def test_sub_units_are_counted_once_whoever_wants_them():
    assert "3 sub-units changed, both captions in 0.25 s" in html_parts.captions(
        result_of(edits=(edit(1), edit(2), edit(9)))
    )
    assert "0 sub-units changed" in html_parts.captions(result_of())


def test_empty_captions_are_no_obstacle():
    assert Reader(html_parts.captions(result_of("", ""))).text.startswith("baseline steered 0 sub-units")


def test_what_to_do_and_what_went_wrong_are_announced():
    assert values(html_parts.hint("press"), "role") == ["status"]
    complained = html_parts.complaint(SpecError(["one.", "two."]))
    assert values(complained, "role") == ["alert"]
    assert Reader(complained).text == "one. two."


# Tables


def test_a_table_has_a_cell_for_each_value_and_a_button_for_each_row():
    given = [({"sub_unit": 4}, ("dog", 0.5, "x", 7)), ({"sub_unit": 5}, ("cat", 1, "y", -8))]
    page = html_parts.table("Found", ("label", "similarity", "via", "unit"), given)
    read = Reader(page)
    assert [read.tags.count(tag) for tag in ("table", "tr", "th", "td", "button")] == [1, 3, 4, 8, 2]
    assert rows(page) == [told for told, _ in given]
    assert read.text == "Found label similarity via unit dog 0.5 x 7 cat 1 y -8"
    assert values(page, "scope") == ["col"] * 4


def test_numbers_are_set_apart_from_words():
    page = html_parts.table("t", ("a", "b", "c", "d"), [({}, (1, 2, 2.5, "3"))])
    assert [value for tag, name, value in Reader(page).attributes if (tag, name) == ("td", "class")] == ["n", "n", "t"]


@pytest.mark.parametrize("headers", [(), ("label", "unit")])
def test_an_empty_table_is_a_sentence(headers):
    read = Reader(html_parts.table("Sub-units", headers, []))
    assert read.text == "Sub-units: nothing yet."
    assert not {"table", "th", "button"} & set(read.tags)


# Buttons, pictures and texts


def test_a_button_shows_its_text_or_its_picture():
    plain, drawn = html_parts.choice("dog", {"step": 1}), html_parts.choice("dog", {"step": 1}, picture=PICTURE)
    assert Reader(plain).text == "dog"
    assert pictures(plain) == []
    assert Reader(drawn).text == ""
    (shown,) = pictures(drawn)
    assert shown.size == PICTURE.size
    assert np.abs(np.asarray(shown, float) - np.asarray(PICTURE, float)).max() < 8  # JPEG
    assert values(plain, "type") == values(drawn, "type") == ["button"]  # it sends no form


def test_one_of_several_buttons_is_pressed():
    buttons = [html_parts.choice(str(number), {"n": number}, chosen=number == 1) for number in range(3)]
    page = html_parts.choices("Numbers", buttons)
    assert values(page, "aria-pressed") == ["true"]
    assert "aria-pressed" not in buttons[0] + buttons[2]
    assert rows(page) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert values(page, "role") == ["group"]
    assert html_parts.choices("Numbers", []) == ""


def test_a_strip_shows_its_pictures_in_order_or_says_that_there_are_none():
    drawn = [Image.new("RGB", (10 + number, 10)) for number in range(3)]
    assert [one.size for one in pictures(html_parts.strip("dog", drawn))] == [one.size for one in drawn]
    empty = html_parts.strip("dog", [])
    assert pictures(empty) == []
    assert Reader(empty).text == "dog the pictures are not at hand: the atlas has no thumbnails of them."


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), min_size=1))
def test_a_text_to_copy_is_the_text(text):
    assert "".join(Reader(html_parts.code("Recipe", text)).words) == f"RecipeCopy{text}"


def test_only_a_text_with_a_files_name_can_be_saved():
    assert values(html_parts.code("Recipe", "a: b"), "data-save") == []
    files = {"steering.yaml": None, "mark.png": "data:image/png;base64,AA=="}
    saved = html_parts.code("Recipe", "a: b", files)
    assert [json.loads(value) for value in values(saved, "data-save")] == [files]
    assert len(values(saved, "data-copy")) == 1
