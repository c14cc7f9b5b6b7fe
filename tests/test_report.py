import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from elude_steer.plans import Concept, Plan, Settings
from elude_steer.recipe import ExpectSpec, Recipe, StepSpec
from elude_steer.report import marked, write_report
from elude_steer.results import SteeredCaption
from elude_steer.running import Ran
from elude_steer.vlm import PatchGrid

EVIL = "<script>alert('1')</script> & \"dog\""
GRID = PatchGrid(np.array([[(c / 2, r / 2, (c + 1) / 2, (r + 1) / 2) for r in range(2) for c in range(2)]]), (2, 2))


def ran(minus=("dog",), caption="a man on a motorcycle.", missing=(), size=(40, 30), **more):
    maps = {word: (np.array([[0.0, 1.0, 0.2, 0.0]]), np.array([[False, True, False, False]])) for word in minus}
    plan = Plan(tuple(Concept(word, "minus", Settings(), ()) for word in minus))
    told = {"model": "some/model", "layer": "layers.25.mlp.fc2", "atlas": "small", "prompt": "What is it?"} | more
    picture = Image.new("RGB", size, (90, 120, 60))
    result = SteeredCaption("a dog on a motorcycle.", caption, plan, maps, GRID, picture, (), told)
    return Ran(StepSpec(minus=tuple(minus), expect=ExpectSpec()), result, tuple(missing))


def page_of(tmp_path, *done):
    recipes = [(Recipe(f"recipe-{i}", "small", ()), own) for i, own in enumerate(done)]
    return write_report(tmp_path / "out.html", recipes).read_text(encoding="utf-8")


class Reader(HTMLParser):
    """What a browser makes of a page: its tags, their attributes and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.attributes, self.words = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def pictures(page):
    data = re.findall(r"src='data:image/png;base64,([^']+)'", page)
    return [Image.open(io.BytesIO(base64.b64decode(one))) for one in data]


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    page = page_of(tmp_path, [ran()])
    read = Reader(page)
    assert read.open == []  # every tag is closed
    assert "http:" not in page
    assert "https:" not in page
    assert not {"script", "link", "iframe"} & set(read.tags)
    assert "@import" not in page
    assert "url(" not in page
    for tag, name, value in read.attributes:
        assert name not in ("href", "srcset")
        assert name != "src" or (tag == "img" and value.startswith("data:image/png;base64,"))


def test_it_shows_captions_settings_pictures_and_maps(tmp_path):
    page = page_of(tmp_path, [ran(), ran(minus=("dog", "hat"), caption="a road.")], [ran()])
    text = Reader(page).text
    for part in ("recipe-0", "recipe-1", "baseline", "a dog on a motorcycle.", "-dog -hat", "gamma -15", "kappa 100"):
        assert part in text
    assert "some/model, layers.25.mlp.fc2, atlas small; asked: What is it?" in text
    assert len(pictures(page)) == 2 + 3 + 1  # the picture of each recipe, and a map for each word of each edit
    assert "<title>recipe-0, recipe-1</title>" in page


def test_what_did_not_happen_is_told(tmp_path):
    assert "'dog' is still there" in Reader(page_of(tmp_path, [ran(missing=["'dog' is still there"])])).text


def test_both_marks_are_made(tmp_path):
    page = page_of(tmp_path, [ran()])
    assert "a <ins>man</ins> on a motorcycle. <span class='soft'><del>dog</del></span>" in page


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a dog.", "a dog.", "a dog."),
        ("A dog, a cat", "a cat and a dog!", "a cat and a dog!"),
        ("a dog", "a cat", "a <ins>cat</ins> <span class='soft'><del>dog</del></span>"),
        ("a dog", "", " <span class='soft'><del>dog</del></span>"),
        ("", "Cats", "<ins>Cats</ins>"),
        ("dog dog dog", "cat", "<ins>cat</ins> <span class='soft'><del>dog</del></span>"),
        ("a dog - here", "dog", "dog"),  # neither punctuation nor words like "here" are worth a mark
        ("dog", "the dog & it", "the dog &amp; it"),
        ("<b>", "x < y", "<ins>x</ins> &lt; <ins>y</ins> <span class='soft'><del>b</del></span>"),
    ],
)
def test_marks(before, after, expected):
    assert marked(before, after) == expected


def test_everything_is_escaped(tmp_path):
    evil = ran(minus=(EVIL,), caption=EVIL, missing=[EVIL], model=EVIL, layer=EVIL, atlas=EVIL, prompt=EVIL)
    path = write_report(tmp_path / "out.html", [(Recipe(EVIL, "small", ()), [evil])])
    page = path.read_text(encoding="utf-8")
    read = Reader(page)
    assert "script" not in read.tags
    assert "<script" not in page
    assert read.open == []
    assert EVIL in "".join(read.words)
    names = {name for _, name, _ in read.attributes}
    assert names <= {"lang", "charset", "name", "content", "class", "alt", "src"}  # no quote let one more in


def test_pictures_are_neither_tiny_nor_larger_than_they_are_shown(tmp_path):
    small, *_ = pictures(page_of(tmp_path, [ran(size=(40, 30))]))
    assert small.size == (280, 210)
    large, *_ = pictures(page_of(tmp_path, [ran(size=(4000, 3000))]))
    assert large.size == (560, 420)
    page_of(tmp_path, [ran(size=(4000, 3000))])
    assert (tmp_path / "out.html").stat().st_size < 1e6


def test_a_page_about_nothing(tmp_path):
    for page in (page_of(tmp_path), page_of(tmp_path, [])):
        assert Reader(page).open == []
        assert "section" not in Reader(page).tags


def test_the_page_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "out.html").write_text("old")
    broken = ran()
    broken.result.maps["dog"] = (np.zeros((3, 3)), None)
    with pytest.raises(ValueError, match="reshape"):
        page_of(tmp_path, [broken])
    assert (tmp_path / "out.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
