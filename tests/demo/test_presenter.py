"""What the demo answers, without a browser and without Gradio."""

import ast
import base64
import html
import io
import json
import re
import shutil
import struct
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elude_steer import Steerer
from elude_steer.atlas.atlas import Atlas
from elude_steer.demo import html_parts, presenter, session
from elude_steer.demo.presenter import TUNABLE, Presenter
from elude_steer.demo.session import EditRequest, Picture, RateLimit
from elude_steer.errors import EludeSteerError, ImageError, SpecError, StoppedError
from elude_steer.models.vlm import PROMPT
from elude_steer.recipe_files import load_recipe
from elude_steer.specs import Recipe, SteeringSpec, StepSpec
from elude_steer.steering.run_recipe import run_recipe, step_settings
from elude_steer.utils.yaml_schema import parse_document
from tests.helpers.markup import Reader

DOG, TEDDY, TRAIN, CATS = (
    Path(f"demos/images/toyland-{name}.png").resolve() for name in ("dog", "teddy", "train", "cats")
)
NAMES = ["dog.png", "my best dog.png", "it's.png", 'a "dog".png', 'a\'b "c" $(d) `e`;f.png', "${alert(1)}<script>.png"]
EVIL = "<script>alert('1')</script> ${x} {{x}} `x` \"dog\""
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def page(steerer):
    return Presenter(steerer, session.shipped_examples("toyland"))


@pytest.fixture(autouse=True)
def nothing_is_being_done(page):
    yield
    assert page._running == {}


def wanted(path=DOG, minus=("dog",), plus=(), mark=None, prompt="", **given):
    picture = path if path is None or isinstance(path, Picture) else Picture.of(path)
    return EditRequest(picture, mark, tuple(minus), tuple(plus), prompt, given)


def mask_of(left, top, right, bottom, size=(96, 96)):
    mask = np.zeros((size[1], size[0]), bool)
    mask[top:bottom, left:right] = True
    return mask


def mark_of(mask):
    """A mask as the page sends it: white on black, opaque, in an address that holds all of it."""
    shown = Image.fromarray(np.repeat(mask.astype(np.uint8)[..., None] * 255, 3, -1)).convert("RGBA")
    return address_of(shown)


def address_of(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def huge(side):
    """The address of a PNG that says to be as large, and is not."""
    data = bytes_of(address_of(Image.new("1", (8, 8))))
    head = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return (
        "data:image/png;base64,"
        + base64.b64encode(data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]).decode()
    )


def bytes_of(address):
    return base64.b64decode(address.partition(",")[2], validate=True)


def same(one, other):
    assert one.maps.keys() == other.maps.keys()
    assert (one.baseline, one.caption) == (other.baseline, other.caption)
    assert one.plan == other.plan
    assert one.notes == other.notes
    assert all(np.array_equal(a, b) for word in one.maps for a, b in zip(one.maps[word], other.maps[word], strict=True))


def rows(told):
    """What the page is told when each of its rows or buttons is chosen."""
    return [json.loads(value) for _, name, value in Reader(told).attributes if name == "data-row"]


def cells(told):
    """The cells of a table behind the first, a list for each row."""
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", told)]
    return [[html.unescape(cell) for cell in line[1:]] for line in lines if line]


# Pictures


def test_a_picture_keeps_its_bytes_and_its_name(tmp_path):
    taken = Picture.of(DOG)
    assert taken == Picture("toyland-dog.png", DOG.read_bytes()) == Picture.of(str(DOG))
    with Image.open(DOG) as image:
        assert np.array_equal(np.asarray(taken.opened()), np.asarray(image.convert("RGB")))


def test_what_is_no_picture_is_refused_by_its_name_alone(tmp_path):
    whole = DOG.read_bytes()
    (tmp_path / "note.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    for name, told in {
        "note.png": "^'note.png' cannot be read as an image: no image in a format that Pillow knows",
        "empty.png": "^'empty.png' cannot be read",
        "half.png": "^'half.png' cannot be read.*truncated",
        "none.png": "^'none.png' cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(ImageError, match=told) as caught:
            Picture.of(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) not in str(caught.value)  # nobody's business on a public page


def test_a_picture_damaged_in_its_middle_is_refused_in_a_sentence(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    whole = bytes_of(address_of(Image.fromarray(noise)))
    first, second, *_ = (found.start() for found in re.finditer(b"IDAT", whole))
    assert first < second
    (tmp_path / "broken.png").write_bytes(whole[:second] + b"\xff\xff\xff\xff" + whole[second + 4 :])
    with pytest.raises(ImageError, match=r"'broken\.png' cannot be read"):
        Picture.of(tmp_path / "broken.png")


# Settings


def test_the_atlas_own_settings_are_none_to_speak_of(page):
    assert page.settings(page.field_values()) == {}
    assert page.settings(page.field_values({})) == page.settings(page.field_values({"kappa": None})) == {}


GIVEN = [
    {},
    {"mode": "scale"},
    {"kappa": 7, "nu": "all"},
    {"nu": 7},
    {"gamma": -3.5, "alpha": 2.0, "beta": 4.0, "fill": 0},
    {"mode": "scale", "kappa": 1, "nu": 1, "gamma": 0.0, "alpha": 0.0, "beta": 0.0, "fill": 3},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_settings_come_back_as_they_were(page, given):
    fields = page.field_values(given)
    assert len(fields) == len(TUNABLE)
    assert page.settings(fields) == given
    gradios = [float(value) if isinstance(value, int) else value for value in fields]  # it knows one kind of number
    again = page.settings(gradios)
    assert again == given
    assert {type(again[name]) for name in ("kappa", "nu", "fill") if name in again} <= {int, str}
    assert page.field_values(vars(SteeringSpec(**given))) == fields  # as of a recipe's step
    page.steerer.prepare_plan(["dog"], [], None, again)  # they are settings


@pytest.mark.parametrize("nothing", [None, ""])
def test_what_is_left_empty_is_the_atlas_own(page, nothing):
    assert page.settings([nothing] * len(TUNABLE)) == {}


@pytest.mark.parametrize("text", ["7", " 7 ", "07"])
def test_patches_are_typed(page, text):
    assert page.settings([*page.field_values()[:2], text, *page.field_values()[3:]]) == {"nu": 7}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *[("nu", text, "^nu: must be ") for text in ("nonsense", "7.5", "-3", "0", "--5", "1-", "²", "al")],
        ("kappa", 2.5, "^kappa: must be .*, not 2.5"),
        ("kappa", 0, "^kappa: must be .*, not 0"),
        ("fill", -1.0, "^fill: must be .*, not -1"),
        ("gamma", float("nan"), "^gamma: must be .*, not nan"),
        ("beta", "much", "^beta: must be .*, not 'much'"),
        ("mode", "push", "^mode: must be scale or place, not 'push'"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(page, name, value, told):
    values = page.field_values()
    values[TUNABLE.index(name)] = value
    with pytest.raises(SpecError, match=told) as caught:
        page.steer(wanted(**page.settings(values)))
    assert "\n" not in str(caught.value)


def test_every_setting_that_can_be_tuned_has_a_hint():
    assert set(presenter.HINTS) == set(TUNABLE)


# Steering


@pytest.mark.parametrize(
    ("path", "minus", "plus", "given"),
    [
        (DOG, ["dog"], ["biker"], {"nu": 6}),
        (CATS, ["cat", "blanket"], [], {}),
        (TEDDY, ["chair"], ["table"], {"kappa": 16, "gamma": -5.0}),
        (TRAIN, ["train"], [], {"mode": "scale", "nu": "all", "gamma": -50.0}),
    ],
)
def test_the_page_says_what_the_library_says(page, steerer, path, minus, plus, given):
    same(page.steer(wanted(path, minus, plus, **given)), steerer.steer(path, minus=minus, plus=plus, **given))


def test_a_mark_is_a_mask(page, steerer):
    mask = mask_of(10, 5, 60, 50)
    by_hand = steerer.steer(DOG, minus=["dog"], plus=["biker"], where=mask)
    marked = page.steer(wanted(plus=["biker"], mark=mark_of(mask)))
    same(marked, by_hand)
    assert marked.plan.where is not None
    large = mask.repeat(5, 0).repeat(5, 1)  # the page shows small pictures large
    same_place = page.steer(wanted(plus=["biker"], mark=mark_of(large)))
    assert (same_place.caption, same_place.maps.keys()) == (by_hand.caption, by_hand.maps.keys())


def test_what_is_marked_is_placed_whatever_the_mode(page, steerer):
    mask = mask_of(48, 48, 96, 96)
    marked = page.steer(wanted(TEDDY, ["teddy"], ["dog"], mark_of(mask), mode="scale"))
    same(marked, steerer.steer(TEDDY, minus=["teddy"], plus=["dog"], where=mask, mode="place"))
    alone = page.steer(wanted(TEDDY, [], ["bird"], mark_of(mask)))
    same(alone, steerer.steer(TEDDY, plus=["bird"], where=mask))


@pytest.mark.parametrize("mark", [None, "", mark_of(mask_of(0, 0, 0, 0))], ids=["none", "empty", "black"])
def test_without_a_mark_there_is_no_region(page, mark):
    assert session.region(mark) is None
    same(page.steer(wanted(plus=["biker"], nu=6, mark=mark)), page.steer(wanted(plus=["biker"], nu=6)))


def test_a_question_of_ones_own_is_asked(page, steerer):
    asked = page.steer(wanted(prompt="What is this?"))
    assert asked.provenance["prompt"] == "What is this?"
    assert asked.baseline == steerer.vlm.caption([Picture.of(DOG).opened()], "What is this?")[0]
    assert page.steer(wanted()).provenance["prompt"] == PROMPT


DAMAGED = {
    "no address": "nonsense",
    "no data": "data:image/png;base64,",
    "no base64": "data:image/png;base64,@@@",
    "other letters": "é,é",
    "no picture": "data:image/png;base64," + base64.b64encode(b"hello").decode(),
    "half a picture": mark_of(mask_of(0, 0, 9, 9))[:90],
    "too large": mark_of(mask_of(0, 0, 9, 9, (1921, 1))),
    "far too large": huge(20_000),
    "too long": "data:image/png;base64," + "A" * 2_000_000,
    "no text": 5,
}


@pytest.mark.parametrize("mark", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_mark_is_asked_for_again(page, mark):
    for answer in (page.steer, page.take_home):
        with pytest.raises(ImageError, match=r"^what was marked did not arrive whole; mark it again\.$"):
            answer(wanted(plus=["biker"], mark=mark))


def test_the_soft_edge_of_a_brush_is_cut_at_half():
    mark = Image.fromarray(np.array([[0, 100, 127, 128, 255]], np.uint8))
    assert session.region(address_of(mark)).tolist() == [[False, False, False, True, True]]


def test_a_mark_may_be_as_large_as_the_page_shows_it_on_a_fine_screen():
    mask = mask_of(3, 1, 900, 40, (1920, 1080))
    assert np.array_equal(session.region(mark_of(mask)), mask)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"path": None}, ImageError, "there is no picture yet; choose an example, or bring one of yours"),
        ({"minus": ()}, SpecError, "say what should go or come: pick a word, or type one"),
        ({"minus": (" ",)}, SpecError, "a concept is a word, not ' '"),
        ({"plus": ("dog",)}, SpecError, "'dog' is in minus and in plus"),
        ({"path": Picture("x.png", b"no")}, ImageError, "^'x.png' cannot be read as an image"),
        ({"gamma": -3e38, "mode": "scale", "nu": 5}, EludeSteerError, "use smaller gains"),
    ],
)
def test_what_cannot_be_steered_is_a_sentence(page, given, error, told):
    with pytest.raises(error, match=told) as caught:
        page.steer(wanted(**given))
    assert "\n" not in str(caught.value)
    assert Reader(html_parts.complaint(caught.value)).text == " ".join(str(caught.value).split())


def test_words_of_visitors_are_only_words(page):
    """In every answer that shows them, notes and titles included."""
    result = page.steer(wanted(plus=[EVIL], prompt=EVIL))
    assert any(EVIL in note for note in result.notes)
    home = page.take_home(wanted(Picture(EVIL, DOG.read_bytes()), plus=[EVIL], prompt=EVIL))
    for told in (html_parts.captions(result), page.reasons(result), home):
        read = Reader(told)
        assert "<script>alert(" in read.text
        assert "script" not in read.tags
        assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert [view["name"] for view in page.views(result)["views"]] == ["picture", "\N{MINUS SIGN} dog", f"+ {EVIL}"]


# Finding settings


def test_a_dozen_points_around_the_atlas_own_are_tried_best_first(page):
    found = page.find(wanted(plus=["biker"]))
    points = [(row["kappa"], row["nu"]) for row in found.rows]
    own = (page.own.kappa, page.own.nu)
    assert own in points
    assert len(points) == len(set(points)) == 12
    for values, at in ([kappa for kappa, _ in points], own[0]), ([nu for _, nu in points], own[1]):
        assert min(values) < at < max(values)
    assert found.best == {name: found.rows[0][name] for name in found.best}
    order = [(row["success"], row["kept"]) for row in found.rows]
    assert order == sorted(order, reverse=True)


def test_what_was_tried_can_be_chosen_and_says_the_same_then(page):
    found = page.find(wanted(plus=["biker"], gamma=-5.0))
    told = page.tried(found)
    chosen = rows(told)
    assert len(chosen) == 12
    for row, one in zip(found.rows, chosen, strict=True):
        assert one == {"kappa": row["kappa"], "nu": row["nu"], "gamma": -5.0}
    for at in (0, 5, 11):
        given = page.settings(page.field_values(chosen[at]))
        assert page.steer(wanted(plus=["biker"], **given)).caption == found.rows[at]["caption"]
    assert Reader(told).text.count(found.rows[0]["caption"]) >= 1


@pytest.mark.parametrize(("minus", "plus"), [([], ["dog"]), (["dog", "motorcycle"], []), (["dog"], ["biker", "cow"])])
def test_settings_are_found_for_one_word(page, minus, plus):
    with pytest.raises(SpecError, match="settings are tried for one word that goes, and at most one that comes"):
        page.find(wanted(minus=minus, plus=plus))
    with pytest.raises(ImageError, match="there is no picture yet"):
        page.find(wanted(None, minus, plus))


@pytest.mark.parametrize(("own", "count"), [({"nu": "all"}, 9), ({"nu": 1, "kappa": 1}, 6)], ids=str)
def test_points_are_sensible_whatever_the_atlas_own(steerer, own, count):
    other = Presenter(steerer)
    other.own = replace(other.own, **own)
    points = [(row["kappa"], row["nu"]) for row in other.find(wanted()).rows]
    assert len(points) == len(set(points)) == count
    assert (other.own.kappa, other.own.nu) in points


# Views


def opened(view):
    assert view["source"].startswith("data:image/jpeg;base64,")
    return Image.open(io.BytesIO(bytes_of(view["source"])))


def test_a_new_picture_takes_its_mark_with_it_and_a_result_does_not(page):
    taken = Picture.of(DOG)
    new, told = page.view(taken), page.views(page.steer(wanted(plus=["biker"])))
    assert (new["fresh"], new["chosen"], [view["name"] for view in new["views"]]) == (True, 0, ["picture"])
    assert not told.get("fresh")
    assert [view["name"] for view in told["views"]] == ["picture", "\N{MINUS SIGN} dog", "+ biker"]
    assert told["chosen"] == 1
    assert new["views"][0] == told["views"][0]
    assert json.loads(json.dumps(told)) == told


def test_views_are_the_heat_maps(page):
    result = page.steer(wanted(plus=["biker"]))
    first, *maps = map(opened, page.views(result)["views"])
    assert {view.size for view in (first, *maps)} == {(480, 480)}
    for word, view in zip(result.maps, maps, strict=True):
        wanted_map = np.asarray(result.heatmap(word, side=480), float)
        assert np.abs(np.asarray(view, float) - wanted_map).mean() < 4  # JPEG


def test_without_words_the_picture_is_in_sight(page, steerer):
    plan, _ = steerer.prepare_plan()
    told = page.views(steerer.explain(DOG, plan))
    assert (told["chosen"], len(told["views"])) == (0, 1)


# Why, and what else there is


def test_every_changed_sub_unit_is_listed_and_can_be_looked_at(page):
    result = page.steer(wanted(plus=["biker"], kappa=3))
    told = page.reasons(result)
    edits = [edit for concept in result.plan.concepts for edit in concept.edits]
    assert [row["sub_unit"] for row in rows(told)] == [edit.sub_unit for edit in edits]
    assert [row[2:] for row in cells(told)] == [[str(edit.unit), str(edit.sub_unit)] for edit in edits]
    for row in rows(told)[:2]:
        assert f"Sub-unit {row['sub_unit']}: " in page.specimen(row["sub_unit"])


def test_every_concept_is_listed_with_its_count_and_can_be_searched(page, steerer):
    told, counts = page.concepts(), steerer.atlas.require_labels().counts
    assert [row["word"] for row in rows(told)] == list(counts) == page.words
    assert cells(told) == [[str(count)] for count in counts.values()]
    assert rows(page.search(page.words[0]))


def test_a_search_finds_what_means_the_same(page, steerer):
    told = page.search("puppy")
    found = [row["sub_unit"] for row in rows(told)]
    assert len(found) == len(set(found)) == 24
    named = steerer.atlas.require_labels()
    assert [named[one] for one in found[:3]] == ["dog"] * 3
    close = [float(row[0]) for row in cells(told)]
    assert close == sorted(close, reverse=True)
    assert [row[2:] for row in cells(told)] == [[str(int(steerer.atlas.units[one])), str(one)] for one in found]


def test_a_search_is_for_a_word(page):
    with pytest.raises(SpecError, match="a concept is a word, not '  '"):
        page.search("  ")
    read = Reader(page.search(EVIL))
    assert f"Sub-units for '{EVIL}'" in read.text
    assert "script" not in read.tags


def test_a_specimen_is_shown_beside_its_unit_and_its_siblings(page, steerer):
    sub_unit = steerer.plan(minus=["dog"]).edits[0].sub_unit
    unit = int(steerer.atlas.units[sub_unit])
    told = page.specimen(sub_unit)
    read = Reader(told)
    assert f"Sub-unit {sub_unit}: {steerer.atlas.require_labels()[sub_unit]}" in read.text
    assert f"Unit {unit}, before the split" in read.text
    assert [row["sub_unit"] for row in rows(told)] == [n for n in steerer.atlas.sub_units_of(unit) if n != sub_unit]
    sources = [value for _, name, value in read.attributes if name == "src"]
    assert len(sources) >= 8
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)


@pytest.mark.parametrize("sub_unit", [-1, 1360, 10**30, 3.0, "3", "<b>", None, [3], {"sub_unit": 3}, True], ids=repr)
def test_a_sub_unit_that_is_none_is_refused_in_a_sentence(page, sub_unit):
    assert len(page.steerer.atlas) == 1360
    with pytest.raises(SpecError, match=r"^there is no sub-unit .*; atlas 'toyland' has 0 to 1359\.$"):
        page.specimen(sub_unit)


def test_the_first_and_the_last_sub_unit_are_there(page):
    for sub_unit in (0, len(page.steerer.atlas) - 1):
        assert f"Sub-unit {sub_unit}: " in page.specimen(sub_unit)


# Taking home


def texts(told):
    """The recipe and the Python call as somebody copies them."""
    return [html.unescape(text) for text in re.findall(r"<code>(.*?)</code>", told, re.DOTALL)]


@pytest.fixture
def at_home(tmp_path, monkeypatch, page, steerer):
    """What the recipe and the Python call say in a folder with the picture and the mark beside them."""

    def both(asked):
        monkeypatch.chdir(tmp_path)
        recipe, call = texts(page.take_home(asked))
        (tmp_path / "steering.yaml").write_text(recipe, encoding="utf-8")
        (tmp_path / asked.picture.name).write_bytes(asked.picture.data)
        if asked.mark and "mark.png" in recipe + call:  # as the page saves it
            (tmp_path / "mark.png").write_bytes(bytes_of(asked.mark))
        (command,) = (line for line in recipe.splitlines() if "elude-steer run" in line)
        *start, image = typed(command.removeprefix("#"))
        assert start == ["elude-steer", "run", "steering.yaml", "--image"]
        (ran,) = run_recipe(load_recipe("steering.yaml"), steerer, image)
        return ran.result.caption, executed(call)

    return both


def typed(command):
    """The words of a command as a shell understands it."""
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def executed(call):
    """What the last line of a program is."""
    *statements, last = ast.parse(call).body
    known = {}
    exec(compile(ast.Module(statements, []), "call", "exec"), known)
    return eval(compile(ast.Expression(last.value), "call", "eval"), known)


CORNER = mark_of(mask_of(0, 0, 48, 48))
LOW = mark_of(mask_of(40, 40, 96, 96))
TAKEN = {
    "minus": {"path": CATS, "minus": ["cat", "blanket"]},
    "minus and plus": {"path": TEDDY, "minus": ["chair"], "plus": ["table"]},
    "settings": {"plus": ["biker"], "nu": 6, "kappa": 20, "gamma": -5.0},
    "scaled": {"path": TRAIN, "minus": ["train"], "mode": "scale", "nu": "all", "gamma": -50.0},
    "a question": {"prompt": 'What\'s "this"?\n#: {}'},
    "marked": {"plus": ["biker"], "mark": CORNER},
    "marked alone": {"path": TEDDY, "minus": [], "plus": ["bird"], "mark": LOW},
    "marked with settings": {"path": TEDDY, "minus": ["teddy"], "plus": ["dog"], "mark": CORNER, "beta": 30.0},
    "marked for what goes": {"path": TRAIN, "minus": ["train"], "mark": LOW},
    "marked against the mode": {"path": TEDDY, "minus": ["teddy"], "plus": ["dog"], "mark": CORNER, "mode": "scale"},
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_what_is_taken_home_says_the_same_there(page, at_home, given):
    asked = wanted(**given)
    said = page.steer(asked)
    assert said.notes == ()  # or the call would warn
    assert at_home(asked) == (said.caption, said.caption)


@names
def test_whatever_the_picture_is_called(page, at_home, name):
    asked = wanted(Picture(name, DOG.read_bytes()), plus=["biker"], nu=6)
    assert at_home(asked) == (page.steer(asked).caption,) * 2


def test_a_mark_goes_home_as_a_file_and_only_where_there_is_one(page):
    for mark, named in ((None, False), (mark_of(mask_of(0, 0, 0, 0)), False), (CORNER, True)):
        recipe, call = texts(page.take_home(wanted(plus=["biker"], mark=mark)))
        assert parse_document(Recipe, recipe).steps[0].mask == ("mark.png" if named else None)
        assert ("where='mark.png'" in call) is named


def test_the_recipe_leaves_out_what_is_as_it_would_be_anyway(page):
    recipe, call = texts(page.take_home(wanted()))
    (step,) = parse_document(Recipe, recipe).steps
    assert step == StepSpec(("dog",))
    assert not re.search("settings|mask|prompt|null", recipe)
    assert call.splitlines()[-1] == "es.steer('toyland-dog.png', minus=['dog']).caption"


def test_without_a_picture_there_is_one_to_think_of(page):
    recipe, call = texts(page.take_home(wanted(None)))
    assert "--image photo.png" in recipe
    assert "es.steer('photo.png'" in call


def test_another_atlas_is_named():
    asked = wanted(kappa=3)
    assert parse_document(Recipe, session.recipe_text("a.png", asked, "/some where/else")).atlas == "/some where/else"
    assert "atlas='/some where/else'" in session.python_call("a.png", asked, "/some where/else")
    assert "atlas" not in session.python_call("a.png", asked, "toyland")


words_of_any_kind = st.text(min_size=1).filter(str.strip)


@settings(deadline=None, max_examples=30)
@given(name=words_of_any_kind, minus=st.lists(words_of_any_kind, max_size=2), prompt=words_of_any_kind)
def test_a_recipe_and_a_call_can_be_read_whatever_was_typed(name, minus, prompt):
    """Line breaks and quotes of every alphabet neither end a comment nor a text."""
    asked = EditRequest(None, None, tuple(minus), ("cat",), prompt, {"nu": "all", "gamma": -2.0})
    found = parse_document(Recipe, session.recipe_text(name, asked, "toyland"))
    assert (found.steps[0].minus, found.steps[0].plus, found.prompt) == (tuple(minus), ("cat",), prompt)
    assert step_settings(found.steps[0]) == asked.settings
    call = ast.parse(session.python_call(name, asked, "toyland")).body[-1].value.value
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert ast.literal_eval(call.args[0]) == name
    assert (given.get("minus", []), given["prompt"], given["nu"]) == (minus, prompt, "all")


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029", "\x07", "\x00"], ids=ascii)
def test_what_was_typed_stays_in_its_comment(ending):
    typed = f"dog{ending}atlas: other"
    for name, word in ((typed, "dog"), ("dog.png", typed)):
        asked = EditRequest(None, None, (word,), (), "", {})
        found = parse_document(Recipe, session.recipe_text(name, asked, "toyland"))
        assert (found.atlas, found.steps[0].minus) == ("toyland", (word,))


def test_what_was_taken_home_can_be_brought_back(page, tmp_path):
    asked = wanted(plus=["biker"], nu=6, prompt="What is it?")
    (tmp_path / "mine.yaml").write_text(texts(page.take_home(asked))[0], encoding="utf-8")
    recipe = session.read_recipe(tmp_path / "mine.yaml")
    (step,) = recipe.steps
    assert (step.minus, step.plus, recipe.prompt) == (asked.minus, asked.plus, asked.prompt)
    assert page.settings(page.field_values(vars(step.settings))) == asked.settings


def test_the_mark_goes_home_as_it_was_when_it_was_answered(page):
    told = page.take_home(wanted(plus=["biker"], mark=CORNER))
    (files,) = (json.loads(value) for _, name, value in Reader(told).attributes if name == "data-save")
    assert list(files) == ["steering.yaml", "mark.png"]
    assert files["steering.yaml"] is None
    assert np.array_equal(session.region(files["mark.png"]), session.region(CORNER))


# What is told under the captions


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, []),
        ({"nu": 6, "gamma": -5.0}, ["Settings that are not the atlas's own: nu 6, gamma -5.0."]),
        ({"mark": True}, ["Removed in the marked region alone."]),
        (
            {"mark": True, "plus": ["biker"]},
            ["What is added went to the mark, what is removed goes where it fires."],
        ),
        ({"mark": True, "minus": [], "plus": ["biker"]}, []),
        (
            {"mark": True, "mode": "scale"},
            [
                "Settings that are not the atlas's own: mode scale.",
                "There is a mark, so place did it: scale has no region.",
                "Removed in the marked region alone.",
            ],
        ),
    ],
)
def test_what_made_a_difference_out_of_sight_is_told(page, given, told):
    asked = wanted(**{**given, "mark": CORNER if given.get("mark") else None})
    _, result = page.answered(page.board(1), asked)
    assert list(result.notes)[len(result.notes) - len(told) :] == told
    assert not any("Settings" in note for note in result.notes[: len(result.notes) - len(told)])


def test_what_is_added_alone_is_asked_for_its_place_in_the_pages_words(page):
    with pytest.raises(SpecError, match="'cat' needs a place: name what it replaces under Remove, or mark where on"):
        page.steer(wanted(minus=[], plus=["cat"]))
    assert page.steer(wanted(minus=[], plus=["cat"], mode="scale")).plan.words("plus") == ("cat",)


def test_words_and_questions_have_a_longest_length(page):
    for press in (page.steer, page.find):
        with pytest.raises(SpecError, match="a…' has 101 letters; a word or a few have at most 100"):
            press(wanted(minus=["a" * 101]))
        with pytest.raises(SpecError, match="a question has at most 1,000 letters here"):
            press(wanted(prompt="a" * 1001))
    with pytest.raises(SpecError, match="has 5,000 letters"):
        page.search("a" * 5000)
    assert page.settings(["place", 24, "9" * 5000, 0, -15, 15, 20, 2, 80])["nu"] == "9" * 5000  # refused as no number


def test_what_an_edit_brought_leaves_with_the_picture(page):
    given = ("What is it?", *page.field_values({"nu": 40}))
    board = replace(page.board(0), given=given)
    assert page.released(board, given) == [PROMPT, *page.field_values()]
    mine = [PROMPT, *page.field_values({"nu": 40})]  # as somebody typed it
    assert page.released(board, mine) == mine
    assert page.released(page.board(0), mine) == mine


# Pages that strangers see


def test_strangers_bring_no_huge_pictures_and_are_not_told_where_the_atlas_lies(steerer, tmp_path):
    public, own = Presenter(steerer, public=True), Presenter(steerer)
    Image.new("1", (5000, 4100)).save(tmp_path / "large.png")
    with pytest.raises(ImageError, match=r"'large\.png' cannot be .* 5000 x 4100 pixels are more than 20,"):
        public.brought(tmp_path / "large.png")
    assert own.brought(tmp_path / "large.png").picture.name == "large.png"
    shutil.copytree(steerer.atlas.folder, tmp_path / "here")
    moved = Steerer(steerer.vlm, Atlas.load(tmp_path / "here"), steerer.matcher)
    assert str(tmp_path) in Presenter(moved).take_home(wanted())
    assert str(tmp_path) not in Presenter(moved, public=True).take_home(wanted())


# Recipes and examples


def test_what_the_page_has_no_field_for_is_told(page, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: a\natlas: there/ours\nmax_new_tokens: 9\n"
        "steps: [{minus: [dog], settings: {nu: 6, per: image, smooth: false, level: stream}}]\n"
    )
    assert session.left_out(session.read_recipe(path), TUNABLE, page.own, "toyland") == [
        "This page has no field for max_new_tokens, per, smooth: left out.",
        "It was written for atlas 'ours', this page has 'toyland'.",
    ]
    for example in page.examples:
        assert session.left_out(example.recipe, TUNABLE, page.own, "toyland") == []


def test_a_recipe_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "long.yaml").write_text("name: a\natlas: b\nsteps: [{minus: [dog]}]\n" + "#" * 100_000)
    with pytest.raises(SpecError, match="the recipe has more than 100,000 characters"):
        session.read_recipe(tmp_path / "long.yaml")


def test_a_recipe_of_a_visitor_names_no_file_of_this_machine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: a\natlas: b\nimage: /etc/passwd\nsteps: [{minus: [dog], mask: /etc/group}, {plus: [cat]}]\n")
    found = session.read_recipe(path)
    assert found == Recipe("a", "b", (StepSpec(("dog",), mask="group"), StepSpec(plus=("cat",))))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"name: \xff\n", "the recipe cannot be read as UTF-8 text; give a YAML file"),
        (None, "the recipe cannot be read as UTF-8 text; give a YAML file"),
        (b"", "^the recipe:1: the document is empty"),
        (b"name: a\natlas: b\nsteps: []\n", "^the recipe: steps is empty; say at least one edit"),
        (b"name: a\natlas: b\nsteps: [{minus: dog}]\n", r"^the recipe:3: steps\[0\]\.minus: must be a list, not 'dog'"),
        (b"name: [\n", "^the recipe:2: not YAML"),
    ],
)
def test_a_recipe_that_is_none_is_refused_in_a_sentence(tmp_path, content, told):
    path = tmp_path / "secret-folder.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=told) as caught:
        session.read_recipe(path)
    assert "secret" not in str(caught.value)


def test_the_shipped_examples_are_there_with_their_pictures(page):
    found = session.shipped_examples("toyland")
    assert [example.name for example in found] == ["cats", "dog", "frisbee", "teddy", "train"]
    for example in found:
        assert Picture.of(example.path).opened().size == (96, 96)
        assert example.recipe == load_recipe(f"toyland-{example.name}")
    assert (
        session.shipped_examples("llava-onevision-0.5b") == session.shipped_examples("nowhere") == []
    )  # their pictures are not ours


def test_examples_and_their_edits_are_buttons(page, steerer):
    strip = page.examples_strip()
    assert rows(strip) == [{"example": number} for number in range(5)]
    assert strip.count('aria-pressed="true"') == 1
    assert Reader(strip).tags.count("img") == 5
    for number, example in enumerate(page.examples):
        assert [row["step"] for row in rows(page.edits(number))] == list(range(len(example.recipe.steps)))
        assert {row["example"] for row in rows(page.edits(number))} == {number}
    assert Presenter(steerer).examples_strip() == ""


def test_an_edit_in_signs():
    assert (
        session.edit_name(StepSpec(("dog", "hot dog"), ("biker",)))
        == "\N{MINUS SIGN} dog \N{MINUS SIGN} hot dog + biker"
    )
    assert session.edit_name(StepSpec()) == "nothing"


# How often


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def pace(each, together):
    clock = Clock()
    return RateLimit(each, together, clock), clock


def test_each_visitor_has_so_many_presses_a_minute():
    limit, _ = pace(2, 100)
    for _ in range(2):
        limit.check("ann")
        limit.check("bob")
    for visitor in ("ann", "bob"):
        with pytest.raises(SpecError, match="this page takes 2 presses a minute from one visitor; wait a little"):
            limit.check(visitor)
    limit.check("eve")


def test_all_together_have_so_many():
    limit, clock = pace(5, 3)
    for visitor in ("ann", "bob", "eve"):
        limit.check(visitor)
    with pytest.raises(SpecError, match="many people are on this page just now; try again in a minute"):
        limit.check("joe")
    clock.now += 61
    limit.check("joe")


def test_the_minute_slides():
    limit, clock = pace(2, 100)
    limit.check("ann")
    clock.now += 40
    limit.check("ann")
    for later, free in ((19, False), (2, True), (1, False), (30, False), (10, True)):
        clock.now += later
        if free:
            limit.check("ann")
        else:
            with pytest.raises(SpecError, match="2 presses a minute"):
                limit.check("ann")


def test_who_was_refused_has_not_pressed():
    limit, clock = pace(1, 100)
    limit.check("ann")
    for _ in range(6):
        clock.now += 10
        with pytest.raises(SpecError, match="1 presses a minute"):
            limit.check("ann")
    clock.now += 1
    limit.check("ann")


def test_nobody_is_remembered_longer_than_a_minute():
    limit, clock = pace(3, 10)
    for number in range(500):
        clock.now += 7
        limit.check(f"visitor {number}")
        assert len(limit._pressed) <= 9
    limit, clock = pace(1, 5)
    for number in range(500):  # all at once, and most refused
        try:
            limit.check(f"visitor {number}")
        except SpecError:
            assert number >= 5
    assert len(limit._pressed) == 5


def test_many_at_once_are_counted_right():
    limit, _ = pace(100, 50)
    ready = threading.Barrier(8)

    def press(visitor):
        ready.wait()
        done = 0
        for _ in range(20):
            try:
                limit.check(visitor)
                done += 1
            except SpecError:
                pass
        return done

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(press, "abcdefgh")) == 50


# Stopping


class Held:
    """Told of tokens: it stops at the first until it may go on, so that something can happen meanwhile."""

    def __init__(self):
        self.tokens, self.begun, self.go = [], threading.Event(), threading.Event()

    def __call__(self, tokens):
        self.tokens.append(tokens)
        self.begun.set()
        assert self.go.wait(20)


@pytest.fixture
def press(page):
    """Presses in a thread of its own; at the end all that were held go on."""
    held = []
    with ThreadPoolExecutor(4) as pool:

        def begin(visitor, answer=page.steer, **given):
            hold = Held()
            held.append(hold)

            def work():
                with page.working(visitor, hold):
                    return answer(wanted(**given))

            done = pool.submit(work)
            assert hold.begun.wait(20)
            return done, hold

        yield begin
        for hold in held:
            hold.go.set()


@pytest.fixture(scope="module")
def said(page):
    return page.steer(wanted()).caption


def test_what_is_worked_on_is_told_and_forgotten(page, said):
    told = []
    with page.working("ann", told.append):
        assert set(page._running) == {"ann"}
        assert page.steer(wanted()).caption == said
    assert told == list(range(1, len(told) + 1))
    assert len(told) >= len(said.split())
    assert page._running == {}
    page.steer(wanted())
    assert len(told) == told[-1]  # nobody listens any more


@pytest.mark.parametrize("answer", ["steer", "find"])
def test_a_stop_ends_a_caption_under_way(page, press, said, answer):
    done, held = press("ann", getattr(page, answer))
    page.stop("ann")
    held.go.set()
    with pytest.raises(StoppedError, match="Stopped"):
        done.result(20)
    assert held.tokens == [1]
    assert page._running == {}
    assert page.steer(wanted()).caption == said  # the model is as it was


def test_a_second_press_ends_the_first_and_stays(page, press, said):
    first, held = press("ann")
    second, other = press("ann")
    held.go.set()
    with pytest.raises(StoppedError):
        first.result(20)
    assert set(page._running) == {"ann"}  # the first has not taken the second's place away
    other.go.set()
    assert second.result(20).caption == said


def test_a_second_press_can_be_stopped_when_the_first_has_ended(page, press):
    first, held = press("ann")
    second, other = press("ann")
    held.go.set()
    assert isinstance(first.exception(20), StoppedError)
    page.stop("ann")
    other.go.set()
    assert isinstance(second.exception(20), StoppedError)


def test_other_visitors_go_on(page, press, said):
    ann, held = press("ann")
    bob, other = press("bob")
    page.stop("ann")
    page.stop("nobody")
    held.go.set()
    other.go.set()
    assert isinstance(ann.exception(20), StoppedError)
    assert bob.result(20).caption == said


def test_whatever_ends_the_work_it_is_forgotten(page, said):
    with pytest.raises(ImageError), page.working("ann"):
        page.steer(wanted(None))
    with pytest.raises(ZeroDivisionError), page.working("ann", lambda tokens: 1 / 0):
        page.steer(wanted())
    assert page._running == {}
    page.stop("ann")  # nothing to stop, and nothing that the next press would stop at
    with page.working("ann"):
        assert page.steer(wanted()).caption == said


# The rest


def test_warming_up_changes_nothing(steerer, said):
    fresh = Presenter(steerer)
    fresh.warm_up()
    assert fresh._running == {}
    assert fresh.steer(wanted()).caption == said
