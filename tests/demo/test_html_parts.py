"""The pieces of HTML of the demo's page, as a browser reads them."""

import base64
import io
import json
from dataclasses import replace

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
IMAGE = Image.new("RGB", (40, 20), (200, 30, 60))
EVIL = (
    "<script>alert('1')</script>", '"><img src=x onerror="alert(1)">', "' onclick='alert(1)", "${alert(1)}", "`${x}`",
    "{{x}}", "</code></pre><b>", "--><!--", "&lt;b&gt;", "&amp;quot;", "a\\u003cb", "é ☂ \N{MINUS SIGN} hut",
)  # fmt: skip
evil = pytest.mark.parametrize("text", EVIL)


def make_result(baseline="a dog", caption="a cat", edits=(), notes=(), seconds=0.25):
    plan = Plan((Concept("dog", "minus", Settings(), tuple(edits)), Concept("cat", "plus", Settings(), tuple(edits))))
    return SteeredCaption(baseline, caption, plan, {}, GRID, IMAGE, tuple(notes), seconds=seconds)


def make_seen(word, share):
    """The result for a word to remove that reads this share of what it reaches where it is."""
    plan = Plan((Concept(word, "minus", Settings(mode="place", seen=0.5), ()),))
    note = f"'{word}' is not seen in this image; `--force` edits anyway."
    return SteeredCaption("a dog", "a dog", plan, {}, GRID, IMAGE, (note, "another."), seconds=0.25, seen={word: share})


def make_edit(sub_unit):
    return Edit(sub_unit, sub_unit // 2, "scale", -15.0, "puppy", "dog", 1.0, 2.5)


def values(markup, name):
    """The values of an attribute on all tags that have it."""
    return [value for _, attribute, value in Reader(markup).attributes if attribute == name]


def row_data(markup):
    return [json.loads(value) for value in values(markup, "data-row")]


def images(markup):
    found = []
    for source in values(markup, "src"):
        assert source.startswith("data:image/jpeg;base64,")
        found.append(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))))
    return found


def everything(text):
    """Every piece of HTML, with the text everywhere where a text from outside can be."""
    data = {"word": text, text: [text, 1, None]}
    button = html_parts.button(text, data, image=IMAGE, pressed=True)
    return {
        "captions": html_parts.captions(make_result(f"{text} dog", f"{text} cat", notes=(text,)), with_baseline=True),
        "steered caption": html_parts.captions(make_result(f"{text} dog", f"{text} cat", notes=(text,))),
        "clickable caption": html_parts.clickable_caption("dog cup", lambda one: text if one == "dog" else None),
        "named buttons": html_parts.named_buttons(text, [button]),
        "folded buttons": html_parts.folded_buttons(text, [button]),
        "unseen word": html_parts.captions(make_seen(text, 0.1)),
        "hint": html_parts.hint(text),
        "error message": html_parts.error_message(SpecError(text)),
        "table": html_parts.table(text, (text, text), [(data, (text, text)), (data, (text, 1))]),
        "empty table": html_parts.table(text, (), []),
        "button": html_parts.button(text, data),
        "button with an image": button,
        "button row": html_parts.button_row(text, [button, button]),
        "image strip": html_parts.image_strip(text, [IMAGE, IMAGE]),
        "empty image strip": html_parts.image_strip(text, []),
        "code": html_parts.code_block(text, text, {text: None}),
    }


# Escaping


@evil
def test_a_text_from_outside_adds_no_tag_and_no_attribute(text):
    """The page has the same structure as for a harmless text."""
    harmless = everything("cup")  # both captions contain it, so it is not marked as changed
    for name, markup in everything(text).items():
        read, expected = Reader(markup), Reader(harmless[name])
        assert read.tags == expected.tags, name
        assert [one[:2] for one in read.attributes] == [one[:2] for one in expected.attributes], name


@evil
def test_a_text_from_outside_is_shown_unchanged(text):
    parts = everything(text)
    counts = {
        "captions": 3,
        "steered caption": 2,
        "hint": 1,
        "error message": 1,
        "table": 6,
        "empty table": 1,
        "button": 1,
    }
    for name, count in counts.items():
        assert Reader(parts[name]).text.count(" ".join(text.split())) == count, name
    assert values(parts["button"], "title") == [text]
    assert values(parts["button with an image"], "alt") == [text]
    assert values(parts["button row"], "aria-label") == [text]
    assert values(parts["image strip"], "alt") == [f"{text}: 1", f"{text}: 2"]
    assert values(parts["table"], "aria-label") == [text]
    assert values(parts["code"], "aria-label") == [text]
    assert [json.loads(value) for value in values(parts["code"], "data-save")] == [{text: None}]
    assert Reader(parts["code"]).words.count(text) == 2  # title and text, unchanged


@evil
def test_nothing_is_executed_or_loaded(text):
    for name, markup in everything(text).items():
        read = Reader(markup)
        assert not {"script", "style", "link", "iframe", "form", "a"} & set(read.tags), name
        assert not [one for _, one, _ in read.attributes if one.startswith("on") or one in ("href", "srcset")], name
        assert all(one.startswith("data:image/jpeg;base64,") for one in values(markup, "src")), name


@settings(deadline=None, max_examples=60)
@given(text=st.text(), data=st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_row_data_arrives_unchanged(text, data):
    assert row_data(html_parts.button(text, data)) == [data]
    assert row_data(html_parts.table("t", ("a", "b"), [(data, (text, 1))] * 2)) == [data, data]


# Captions


def test_the_steered_caption_is_shown_and_says_what_is_gone():
    markup = html_parts.captions(make_result("a dog in a park", "a cat in a park", notes=("a note.",)))
    read = Reader(markup)
    assert read.marks == [("ins", "cat")]
    assert read.text.startswith("Steered, it says a cat in a park")
    assert "a dog" not in read.text  # the page shows the baseline above
    assert [json.loads(value) for value in values(markup, "data-gone")] == [["dog"]]
    assert read.text.endswith("a note.")
    assert ("div", "role", "status") in read.attributes  # announced by screen readers


def test_the_answer_to_another_question_stands_beside_its_own_baseline():
    markup = html_parts.captions(make_result("a dog in a park", "a cat in a park"), with_baseline=True)
    read = Reader(markup)
    assert read.marks == [("del", "dog"), ("ins", "cat")]
    assert read.text.startswith("Without the edit a dog in a park Steered, it says a cat in a park")
    assert values(markup, "data-gone") == ["[]"]  # the caption above is the answer to another question


def test_a_sub_unit_of_two_concepts_is_counted_once():
    assert "3 sub-units changed, both captions in 0.25 s" in html_parts.captions(
        make_result(edits=(make_edit(1), make_edit(2), make_edit(9)))
    )
    assert "0 sub-units changed" in html_parts.captions(make_result())


def test_sub_units_that_are_only_read_are_not_counted_as_changed():
    read = [replace(make_edit(number), kind="read") for number in (1, 2)]
    assert "2 sub-units read, both captions" in html_parts.captions(make_result(edits=read))
    assert "1 sub-units changed, 2 sub-units read" in html_parts.captions(make_result(edits=[*read, make_edit(9)]))


@pytest.mark.parametrize(("share", "shown"), [(0.07, "7%"), (-0.3, "0%"), (0.49, "49%")])
def test_an_unseen_word_has_its_share_beside_it_and_no_second_note(share, shown):
    text = Reader(html_parts.captions(make_seen("umbrella", share))).text
    assert f"umbrella not seen: {shown} \N{MIDDLE DOT} left as it is; seen means at least 50%." in text
    assert "is not seen in this image" not in text
    assert text.endswith("another.")


def test_a_seen_word_has_its_share_and_keeps_its_notes():
    text = Reader(html_parts.captions(make_seen("umbrella", 1.2))).text
    assert "umbrella seen: 120%" in text
    assert "left as it is" not in text
    assert "is not seen in this image" in text  # whatever it says, only the badge may replace it


def test_the_longest_known_words_of_a_caption_are_buttons():
    known = {"hot dog": "hot dog", "dog": "dog", "fire": "fire"}
    markup = html_parts.clickable_caption("a hot dog by a dog and fire", known.get)
    assert row_data(markup) == [{"word": word} for word in ("hot dog", "dog", "fire")]
    assert values(markup, "title") == ["Remove hot dog", "Remove dog", "Remove fire"]
    assert Reader(markup).text.startswith("The model says a hot dog by a dog and fire")
    assert html_parts.clickable_caption("", known.get).count("<button") == 0


def test_captions_may_be_empty():
    assert Reader(html_parts.captions(make_result("", ""))).text.startswith("Steered, it says 0 sub-units")


def test_screen_readers_announce_hints_and_errors():
    assert values(html_parts.hint("press"), "role") == ["status"]
    message = html_parts.error_message(SpecError(["one.", "two."]))
    assert values(message, "role") == ["alert"]
    assert Reader(message).text == "one. two."


# Tables


def test_a_table_has_a_cell_for_each_value_and_a_button_for_each_row():
    lines = [({"sub_unit": 4}, ("dog", 0.5, "x", 7)), ({"sub_unit": 5}, ("cat", 1, "y", -8))]
    markup = html_parts.table("Found", ("label", "similarity", "via", "unit"), lines)
    read = Reader(markup)
    assert [read.tags.count(tag) for tag in ("table", "tr", "th", "td", "button")] == [1, 3, 4, 8, 2]
    assert row_data(markup) == [data for data, _ in lines]
    assert read.text == "Found label similarity via unit dog 0.5 x 7 cat 1 y -8"
    assert values(markup, "scope") == ["col"] * 4


def test_only_cells_that_say_so_are_html():
    lines = [({}, ("<b>a</b>", "<b>b</b>", html_parts.Html("<b>c</b>")))]
    assert Reader(html_parts.table("t", ("x", "y", "z"), lines)).tags.count("b") == 1


def test_cells_with_numbers_have_their_own_class():
    markup = html_parts.table("t", ("a", "b", "c", "d"), [({}, (1, 2, 2.5, "3"))])
    assert [value for tag, name, value in Reader(markup).attributes if (tag, name) == ("td", "class")] == [
        "n",
        "n",
        "t",
    ]


@pytest.mark.parametrize("headers", [(), ("label", "unit")])
def test_an_empty_table_is_a_sentence(headers):
    read = Reader(html_parts.table("Sub-units", headers, []))
    assert read.text == "Sub-units: nothing yet."
    assert not {"table", "th", "button"} & set(read.tags)


# Buttons, images and texts


def test_a_button_shows_its_text_or_its_image():
    plain, with_image = html_parts.button("dog", {"step": 1}), html_parts.button("dog", {"step": 1}, image=IMAGE)
    assert Reader(plain).text == "dog"
    assert images(plain) == []
    assert Reader(with_image).text == ""
    (shown,) = images(with_image)
    assert shown.size == IMAGE.size
    assert np.abs(np.asarray(shown, float) - np.asarray(IMAGE, float)).max() < 8  # JPEG
    assert values(plain, "type") == values(with_image, "type") == ["button"]  # it submits no form


def test_one_of_several_buttons_is_pressed():
    buttons = [html_parts.button(str(number), {"n": number}, pressed=number == 1) for number in range(3)]
    markup = html_parts.button_row("Numbers", buttons)
    assert values(markup, "aria-pressed") == ["true"]
    assert "aria-pressed" not in buttons[0] + buttons[2]
    assert row_data(markup) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert values(markup, "role") == ["group"]
    assert html_parts.button_row("Numbers", []) == ""


def test_folded_buttons_open_with_their_title():
    markup = html_parts.folded_buttons("Instead", [html_parts.button("cat", {"instead": "cat"})])
    assert Reader(markup).tags[:2] == ["details", "summary"]
    assert Reader(markup).text == "Instead cat"
    assert values(markup, "open") == []
    assert html_parts.folded_buttons("Instead", []) == ""


def test_an_image_strip_shows_its_images_in_order_or_says_that_there_are_none():
    drawn = [Image.new("RGB", (10 + number, 10)) for number in range(3)]
    assert [one.size for one in images(html_parts.image_strip("dog", drawn))] == [one.size for one in drawn]
    empty = html_parts.image_strip("dog", [])
    assert images(empty) == []
    assert Reader(empty).text == "dog The images are not available: the atlas has no thumbnails of them."


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), min_size=1))
def test_a_code_block_shows_the_text_unchanged(text):
    assert "".join(Reader(html_parts.code_block("Recipe", text)).words) == f"RecipeCopy{text}"


def test_a_code_block_can_be_saved_only_if_it_has_files():
    assert values(html_parts.code_block("Recipe", "a: b"), "data-save") == []
    files = {"steering.yaml": None, "mark.png": "data:image/png;base64,AA=="}
    saved = html_parts.code_block("Recipe", "a: b", files)
    assert [json.loads(value) for value in values(saved, "data-save")] == [files]
    assert len(values(saved, "data-copy")) == 1
