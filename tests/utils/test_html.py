from elude_steer.utils.html import escape, image_tag, page
from tests.helpers.markup import Reader

TRICKY = "a <b> & \"c\" 'd'"


def test_a_page_is_a_complete_document():
    text = page("Report", "<h1>Title</h1>", style="h1 { color: red }")
    assert text.startswith("<!doctype html>\n") and text.endswith("</html>\n")
    reader = Reader(text)
    assert reader.tags == ["html", "head", "meta", "title", "meta", "style", "body", "h1"]
    assert ("meta", "charset", "utf-8") in reader.attributes
    assert ("html", "lang", "en") in reader.attributes
    assert "h1 { color: red }" in text


def test_a_page_without_a_style_has_no_style_element():
    assert "style" not in Reader(page("Report", "<p>text</p>")).tags


def test_the_title_is_escaped_and_the_body_is_not():
    reader = Reader(page(TRICKY, "<p>body</p>"))
    assert TRICKY in reader.text
    assert reader.tags.count("b") == 0 and reader.tags.count("p") == 1


def test_escaped_text_reads_back_between_tags_and_in_attributes():
    reader = Reader(f'<p title="{escape(TRICKY)}">{escape(TRICKY)}</p>')
    assert reader.text == TRICKY
    assert reader.attributes == [("p", "title", TRICKY)]
    assert escape(3) == "3"


def test_an_image_tag_escapes_its_description():
    assert Reader(image_tag("data:,", TRICKY)).attributes == [("img", "alt", TRICKY), ("img", "src", "data:,")]
