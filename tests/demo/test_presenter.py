"""What the demo answers, without a browser and without Gradio."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from elude_steer import Steerer
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.vocabulary import FUNCTION_WORDS
from elude_steer.demo import html_parts
from elude_steer.demo.presenter import DOSES, HINTS, TUNABLE, Presenter
from elude_steer.demo.recipes import shipped_examples
from elude_steer.demo.session import ImageFile, decode_mark
from elude_steer.errors import EludeSteerError, ImageError, SpecError
from elude_steer.models.vlm import PROMPT
from elude_steer.specs import SteeringSpec
from tests.demo.helpers import (
    CATS,
    DOG,
    EVIL,
    TEDDY,
    TRAIN,
    assert_same,
    box_mask,
    decode_uri,
    encode_mark,
    make_request,
    other_cells,
    row_data,
)
from tests.helpers.markup import Reader

# Settings


def test_the_settings_of_the_atlas_are_not_read_as_changes(presenter):
    assert presenter.read_settings(presenter.field_values()) == {}
    for settings in ({}, {"kappa": None}):
        assert presenter.read_settings(presenter.field_values(settings)) == {}


SETTINGS = [
    {},
    {"mode": "scale"},
    {"kappa": 7, "nu": "all"},
    {"nu": 7},
    {"gamma": -3.5, "alpha": 2.0, "strength": 2.5, "fit": 0},
    {"strength": 0, "seen": -1.0},
    {"mode": "scale", "kappa": 1, "nu": 1, "gamma": 0.0, "alpha": 0.0, "strength": 3, "fit": 1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_survive_the_fields(presenter, settings):
    fields = presenter.field_values(settings)
    assert len(fields) == len(TUNABLE)
    assert presenter.read_settings(fields) == settings
    from_gradio = [float(value) if isinstance(value, int) else value for value in fields]  # it has only floats
    again = presenter.read_settings(from_gradio)
    assert again == settings
    assert {type(again[name]) for name in ("kappa", "nu") if name in again} <= {int, str}
    assert presenter.field_values(vars(SteeringSpec(**settings))) == fields  # as in a recipe
    presenter.steerer.prepare_plan(["dog"], [], None, again)  # valid settings


@pytest.mark.parametrize("empty", [None, ""])
def test_empty_fields_mean_the_settings_of_the_atlas(presenter, empty):
    assert presenter.read_settings([empty] * len(TUNABLE)) == {}


@pytest.mark.parametrize("text", ["7", " 7 ", "07"])
def test_nu_is_read_from_text(presenter, text):
    fields = presenter.field_values()
    fields[TUNABLE.index("nu")] = text
    assert presenter.read_settings(fields) == {"nu": 7}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("nu", text, "^nu: must be ") for text in ("nonsense", "7.5", "-3", "0", "--5", "1-", "²", "al")],
        ("kappa", 2.5, "^kappa: must be .*, not 2.5"),
        ("kappa", 0, "^kappa: must be .*, not 0"),
        ("fit", -1.0, "^fit: must be .*, not -1"),
        ("fit", 1.5, "^fit: must be .*, not 1.5"),
        ("strength", -0.5, "^strength: must be .*, not -0.5"),
        ("gamma", float("nan"), "^gamma: must be .*, not nan"),
        ("strength", "much", "^strength: must be .*, not 'much'"),
        ("mode", "push", "^mode: must be scale or place, not 'push'"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(presenter, name, value, message):
    values = presenter.field_values()
    values[TUNABLE.index(name)] = value
    with pytest.raises(SpecError, match=message) as caught:
        presenter.steer(make_request(**presenter.read_settings(values)))
    assert "\n" not in str(caught.value)


def test_every_setting_with_a_field_has_a_hint():
    assert set(HINTS) == set(TUNABLE)
    assert TUNABLE[0] == "strength"


def test_the_slider_has_the_strength_of_the_atlas_and_no_larger_one_than_it_shows(presenter, steerer):
    assert (presenter.field_values()[0], presenter.max_strength) == (steerer.defaults["strength"] or 1, 3)
    assert presenter.field_values({"strength": 7.5})[0] == 3  # of a recipe
    other = Presenter(steerer)
    other.atlas_settings = replace(other.atlas_settings, strength=5.0)
    assert (other.field_values()[0], other.max_strength) == (5, 5)


# The caption without edits


def test_an_example_is_captioned_once_and_an_upload_is_not_stored(steerer, monkeypatch):
    fresh, calls = Presenter(steerer, shipped_examples("toyland")), []
    plain = Presenter._caption_here
    fresh._caption = lambda image: calls.append(image.name) or plain(fresh, image)
    dog, own = ImageFile.from_path(DOG), ImageFile("mine.png", DOG.read_bytes() + b"\0")
    expected = steerer.vlm.caption([dog.open()])[0]
    assert "<button" not in fresh.show_caption(dog)
    assert [fresh.caption(image) for image in (dog, dog, own, own)] == [expected] * 4
    assert calls == ["toyland-dog.png", "mine.png", "mine.png"]
    assert (fresh.is_example(dog), fresh.is_captioned(dog)) == (True, True)
    assert (fresh.is_example(own), fresh.is_captioned(own)) == (False, False)
    assert Reader(fresh.show_caption(dog)).text.startswith(f"The model says {expected}")
    assert "Choose an image first" in fresh.show_caption(None)


def test_the_calibrated_words_of_the_caption_can_be_clicked(presenter, steerer):
    caption = presenter.caption(ImageFile.from_path(DOG))
    markup = presenter.render_caption(caption)
    vocabulary, words = steerer.atlas.require_labels().vocabulary, steerer.atlas.require_calibration().words
    calibrated = {vocabulary[int(number)] for number in words}
    expected = [word for word in caption.split() if word in calibrated]
    assert "dog" in expected
    assert row_data(markup) == [{"word": word} for word in expected]
    assert Reader(markup).text == (
        f"The model says {caption} Click a word to remove it; click it again to put something else there."
    )


def test_other_forms_of_a_calibrated_word_send_the_word(presenter):
    markup = presenter.render_caption("Two dogs, a Cat! and nonsense.")
    assert row_data(markup) == [{"word": "dog"}, {"word": "cat"}]
    assert Reader(markup).text.startswith("The model says Two dogs, a Cat! and nonsense.")
    nothing = presenter.render_caption(EVIL.replace("dog", "x"))
    assert row_data(nothing) == []
    assert "script" not in Reader(nothing).tags
    assert "The atlas knows none of these words." in nothing


def test_words_that_could_stand_there_instead_are_offered(presenter):
    swaps = presenter.list_swaps("dog")
    assert len(swaps) == len(set(swaps)) == 10
    assert "dog" not in swaps
    assert "cat" in swaps[:3]  # close in meaning
    assert set(swaps) <= set(presenter.known_words.values())
    markup = presenter.swap_buttons(["dog", "street"])
    assert row_data(markup) == [{"instead": word} for word in swaps]
    assert "What could stand there instead of 'dog'" in Reader(markup).text
    assert presenter.swap_buttons([]) == presenter.swap_buttons([" "]) == ""
    assert "script" not in Reader(presenter.swap_buttons([EVIL])).tags
    with pytest.raises(SpecError, match="has 101 characters"):
        presenter.swap_buttons(["a" * 101])


# Words that are not seen, and dose curves


def test_a_word_that_is_not_seen_is_marked_with_its_share(presenter):
    result = presenter.steer(make_request(minus=["umbrella", "dog"]))
    assert result.seen["umbrella"] < presenter.atlas_settings.seen <= result.seen["dog"]
    markup = html_parts.captions(result)
    text = Reader(markup).text
    assert f"umbrella not seen: {max(0, result.seen['umbrella']):.0%} \N{MIDDLE DOT} left as it is" in text
    assert f"dog seen: {result.seen['dog']:.0%}" in text
    assert markup.count('class="unseen"') == markup.count('class="seen"') == 1
    assert "--force" not in text  # there is no such option in the page
    assert "0 sub-units changed" not in text
    assert "sub-units read" in text
    lowered = presenter.steer(make_request(minus=["umbrella"], seen=-1.0))
    assert 'class="unseen"' not in html_parts.captions(lowered)


@pytest.mark.parametrize(("minus", "plus"), [(["dog"], []), (["dog"], ["biker"]), (["umbrella"], [])], ids=str)
def test_a_dose_curve_has_the_caption_of_each_strength(presenter, steerer, minus, plus):
    request = make_request(minus=minus, plus=plus, strength=2.5)
    doses = presenter.try_doses(request)
    assert [dose for dose, _ in doses] == list(DOSES) == [0, 0.5, 1, 1.5, 2, 3]
    assert doses[0][1] == presenter.caption(ImageFile.from_path(DOG))
    for dose, caption in doses[1:]:
        plan, _ = steerer.prepare_plan(minus, plus, None, {"strength": dose})
        assert caption == steerer.explain(DOG, plan).caption
    markup = presenter.dose_table(request, doses)
    assert row_data(markup) == [{"strength": dose} for dose in DOSES]
    for cells, (_, caption) in zip(other_cells(markup), doses, strict=True):
        marks = Reader(cells[0]).marks
        gone = [word for tag, word in marks if tag == "del"]
        assert Reader(cells[0]).text == " ".join([caption, *gone])
        assert not {*gone} & {*caption.split()}
        assert {word for tag, word in marks if tag == "ins"} <= {*caption.split()} - {*doses[0][1].split()}
        assert bool(marks) == ({*caption.split()} - {*FUNCTION_WORDS} != {*doses[0][1].split()} - {*FUNCTION_WORDS})
    same = len({caption for _, caption in doses}) == 1
    assert same == (minus == ["umbrella"])
    assert ("The caption is the same at every strength." in markup) == same


def test_a_dose_curve_runs_the_tower_once(presenter, monkeypatch):
    calls = []
    own = type(presenter.steerer).captions
    monkeypatch.setattr(type(presenter.steerer), "captions", lambda *a, **b: calls.append(a[2]) or own(*a, **b))
    presenter.try_doses(make_request())
    ((plans,),) = calls
    assert len(plans) == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": None}, ImageError, "there is no image yet"),
        ({"minus": ()}, SpecError, "name a concept to remove or to add"),
        ({"minus": ("a" * 101,)}, SpecError, "has 101 characters"),
        ({"minus": ("dog",) * 9}, SpecError, "at most 8 concepts"),
        ({"prompt": "a" * 1001}, SpecError, "at most 1,000 characters"),
        ({"mode": "scale"}, SpecError, "mode scale has no strength; choose mode place"),
    ],
    ids=str,
)
def test_a_dose_curve_has_the_limits_of_an_edit(presenter, options, error, message):
    with pytest.raises(error, match=message):
        presenter.try_doses(make_request(**options))


def test_a_dose_curve_of_a_marked_region_and_of_odd_words(presenter):
    corner = encode_mark(box_mask(0, 0, 48, 48))
    request = make_request(plus=[EVIL], mark=corner, mode="scale")  # a mark implies mode place
    doses = presenter.try_doses(request)
    assert len(doses) == 6
    read = Reader(presenter.dose_table(request, doses))
    assert "script" not in read.tags
    assert EVIL in read.text


# Steering


@pytest.mark.parametrize(
    ("path", "minus", "plus", "settings"),
    [
        (DOG, ["dog"], ["biker"], {"strength": 1.5}),
        (CATS, ["cat", "blanket"], [], {}),
        (TEDDY, ["chair"], ["table"], {"fit": 0.5, "seen": 0.1}),
        (TRAIN, ["train"], [], {"mode": "scale", "nu": "all", "gamma": -50.0}),
    ],
)
def test_the_page_and_the_library_give_the_same_result(presenter, steerer, path, minus, plus, settings):
    result = presenter.steer(make_request(path, minus, plus, **settings))
    assert_same(result, steerer.steer(path, minus=minus, plus=plus, **settings))


def test_a_mark_acts_as_a_mask(presenter, steerer):
    mask = box_mask(10, 5, 60, 50)
    expected = steerer.steer(DOG, minus=["dog"], plus=["biker"], where=mask)
    marked = presenter.steer(make_request(plus=["biker"], mark=encode_mark(mask)))
    assert_same(marked, expected)
    assert marked.plan.where is not None
    large = mask.repeat(5, 0).repeat(5, 1)  # the page shows small images enlarged
    enlarged = presenter.steer(make_request(plus=["biker"], mark=encode_mark(large)))
    assert (enlarged.caption, enlarged.maps.keys()) == (expected.caption, expected.maps.keys())


def test_a_mark_implies_mode_place(presenter, steerer):
    mask = box_mask(48, 48, 96, 96)
    marked = presenter.steer(make_request(TEDDY, ["teddy"], ["dog"], encode_mark(mask), mode="scale"))
    assert_same(marked, steerer.steer(TEDDY, minus=["teddy"], plus=["dog"], where=mask, mode="place"))
    alone = presenter.steer(make_request(TEDDY, [], ["bird"], encode_mark(mask)))
    assert_same(alone, steerer.steer(TEDDY, plus=["bird"], where=mask))


@pytest.mark.parametrize("mark", [None, "", encode_mark(box_mask(0, 0, 0, 0))], ids=["none", "empty", "black"])
def test_an_empty_mark_is_no_region(presenter, mark):
    assert decode_mark(mark) is None
    marked, unmarked = (presenter.steer(make_request(plus=["biker"], nu=6, mark=one)) for one in (mark, None))
    assert_same(marked, unmarked)


def test_the_question_reaches_the_model(presenter, steerer):
    result = presenter.steer(make_request(prompt="What is this?"))
    assert result.provenance["prompt"] == "What is this?"
    assert result.baseline == steerer.vlm.caption([ImageFile.from_path(DOG).open()], "What is this?")[0]
    assert presenter.steer(make_request()).provenance["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": None}, ImageError, "there is no image yet; choose an example, or upload your own"),
        ({"minus": ()}, SpecError, "name a concept to remove or to add: pick one from the list, or type it"),
        ({"minus": (" ",)}, SpecError, "a concept is a word, not ' '"),
        ({"plus": ("dog",)}, SpecError, "'dog' is in minus and in plus"),
        ({"path": ImageFile("x.png", b"no")}, ImageError, "^'x.png' cannot be read as an image"),
        ({"gamma": -3e38, "mode": "scale", "nu": 5}, EludeSteerError, "use smaller gains"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(presenter, options, error, message):
    with pytest.raises(error, match=message) as caught:
        presenter.steer(make_request(**options))
    assert "\n" not in str(caught.value)
    assert Reader(html_parts.error_message(caught.value)).text == " ".join(str(caught.value).split())


def test_text_from_visitors_is_escaped(presenter):
    """In every answer that shows it, including notes and titles."""
    result = presenter.steer(make_request(plus=[EVIL], prompt=EVIL))
    assert any(EVIL in note for note in result.notes)
    export = presenter.export_code(make_request(ImageFile(EVIL, DOG.read_bytes()), plus=[EVIL], prompt=EVIL))
    for markup in (html_parts.captions(result), presenter.sub_unit_table(result), export):
        read = Reader(markup)
        assert "<script>alert(" in read.text
        assert "script" not in read.tags
        assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    views = presenter.result_view(result)["views"]
    assert [view["name"] for view in views] == ["image", "\N{MINUS SIGN} dog", f"+ {EVIL}"]


# Finding settings


@pytest.mark.parametrize(
    ("settings", "names"), [({}, ("strength", "fit")), ({"mode": "scale"}, ("kappa", "nu"))], ids=["place", "scale"]
)
def test_a_dozen_settings_near_the_atlas_are_tried_best_first(presenter, settings, names):
    found = presenter.find_settings(make_request(plus=["biker"], **settings))
    points = [tuple(row[name] for name in names) for row in found.rows]
    center = tuple(getattr(presenter.atlas_settings, name) for name in names)
    assert center in points
    assert len(points) == len(set(points)) == 12
    for values, middle in zip(zip(*points, strict=True), center, strict=True):
        assert min(values) < middle < max(values)
    assert found.best == {name: found.rows[0][name] for name in found.best}
    order = [(row["success"], row["kept"]) for row in found.rows]
    assert order == sorted(order, reverse=True)


def test_a_tried_row_holds_the_settings_that_give_its_caption(presenter):
    found = presenter.find_settings(make_request(plus=["biker"], seen=0.3))
    markup = presenter.trials_table(found)
    chosen = row_data(markup)
    assert len(chosen) == 12
    for row, data in zip(found.rows, chosen, strict=True):
        assert data == {"strength": row["strength"], "fit": row["fit"], "seen": 0.3}
    for index in (0, 5, 11):
        settings = presenter.read_settings(presenter.field_values(chosen[index]))
        assert presenter.steer(make_request(plus=["biker"], **settings)).caption == found.rows[index]["caption"]
    assert Reader(markup).text.count(found.rows[0]["caption"]) >= 1


@pytest.mark.parametrize(("minus", "plus"), [([], ["dog"]), (["dog", "motorcycle"], []), (["dog"], ["biker", "cow"])])
def test_settings_are_found_only_for_one_concept(presenter, minus, plus):
    with pytest.raises(SpecError, match="settings can be tried for one concept to remove and at most one"):
        presenter.find_settings(make_request(minus=minus, plus=plus))
    with pytest.raises(ImageError, match="there is no image yet"):
        presenter.find_settings(make_request(None, minus, plus))


@pytest.mark.parametrize(
    ("atlas_settings", "count"),
    [
        ({"mode": "scale", "nu": "all"}, 9),
        ({"mode": "scale", "nu": 1, "kappa": 1}, 6),
        ({"fit": 0.0}, 12),
        ({"fit": 1.0}, 8),
        ({"strength": 0.0}, 3),
    ],
    ids=str,
)
def test_tried_settings_are_distinct_for_any_atlas(steerer, atlas_settings, count):
    other = Presenter(steerer)
    other.atlas_settings = replace(other.atlas_settings, **atlas_settings)
    names = ("strength", "fit") if other.atlas_settings.mode == "place" else ("kappa", "nu")
    request = make_request(mode=other.atlas_settings.mode)
    points = [tuple(row[name] for name in names) for row in other.find_settings(request).rows]
    assert len(points) == len(set(points)) == count
    assert tuple(getattr(other.atlas_settings, name) for name in names) in points


# Views


def open_view(view):
    assert view["source"].startswith("data:image/jpeg;base64,")
    return Image.open(io.BytesIO(decode_uri(view["source"])))


def test_a_new_image_clears_the_mark_and_a_result_does_not(presenter):
    file = ImageFile.from_path(DOG)
    new, result = presenter.image_view(file), presenter.result_view(presenter.steer(make_request(plus=["biker"])))
    assert new["fresh"]
    assert presenter.image_view(file)["fresh"] != new["fresh"]  # also if the same image is chosen again
    assert (new["chosen"], [view["name"] for view in new["views"]]) == (0, ["image"])
    assert not result.get("fresh")
    assert [view["name"] for view in result["views"]] == ["image", "\N{MINUS SIGN} dog", "+ biker"]
    assert result["chosen"] == 1
    assert new["views"][0] == result["views"][0]
    assert json.loads(json.dumps(result)) == result


def test_a_result_shows_the_heat_maps(presenter):
    result = presenter.steer(make_request(plus=["biker"]))
    first, *maps = map(open_view, presenter.result_view(result)["views"])
    assert {view.size for view in (first, *maps)} == {(480, 480)}
    for word, view in zip(result.maps, maps, strict=True):
        expected = np.asarray(result.heatmap(word, side=480), float)
        assert np.abs(np.asarray(view, float) - expected).mean() < 4  # JPEG


def test_without_concepts_the_image_is_shown(presenter, steerer):
    plan, _ = steerer.prepare_plan()
    view = presenter.result_view(steerer.explain(DOG, plan))
    assert (view["chosen"], len(view["views"])) == (0, 1)


# Tables and details of sub-units


def test_every_changed_sub_unit_is_listed_with_its_details(presenter):
    result = presenter.steer(make_request(plus=["biker"], mode="scale", kappa=3))
    markup = presenter.sub_unit_table(result)
    edits = [edit for concept in result.plan.concepts for edit in concept.edits]
    assert [row["sub_unit"] for row in row_data(markup)] == [edit.sub_unit for edit in edits]
    assert [row[2:] for row in other_cells(markup)] == [[str(edit.unit), str(edit.sub_unit)] for edit in edits]
    for row in row_data(markup)[:2]:
        assert f"Sub-unit {row['sub_unit']}: " in presenter.sub_unit_details(row["sub_unit"])


def test_every_concept_is_listed_with_its_count_and_can_be_searched(presenter, steerer):
    markup, counts = presenter.concept_table(), steerer.atlas.require_labels().counts
    assert [row["word"] for row in row_data(markup)] == list(counts) == presenter.concepts
    assert other_cells(markup) == [[str(count)] for count in counts.values()]
    assert row_data(presenter.search(presenter.concepts[0]))


def test_search_finds_concepts_of_similar_meaning(presenter, steerer):
    markup = presenter.search("puppy")
    found = [row["sub_unit"] for row in row_data(markup)]
    assert len(found) == len(set(found)) == 24
    labels = steerer.atlas.require_labels()
    assert [labels[sub_unit] for sub_unit in found[:3]] == ["dog"] * 3
    similarities = [float(row[0]) for row in other_cells(markup)]
    assert similarities == sorted(similarities, reverse=True)
    expected = [[str(int(steerer.atlas.units[sub_unit])), str(sub_unit)] for sub_unit in found]
    assert [row[2:] for row in other_cells(markup)] == expected


def test_search_refuses_blanks_and_escapes_its_word(presenter):
    with pytest.raises(SpecError, match="a concept is a word, not '  '"):
        presenter.search("  ")
    read = Reader(presenter.search(EVIL))
    assert f"Sub-units for '{EVIL}'" in read.text
    assert "script" not in read.tags


def test_details_show_a_sub_unit_its_unit_and_its_siblings(presenter, steerer):
    sub_unit = steerer.plan(minus=["dog"]).edits[0].sub_unit
    unit = int(steerer.atlas.units[sub_unit])
    markup = presenter.sub_unit_details(sub_unit)
    read = Reader(markup)
    assert f"Sub-unit {sub_unit}: {steerer.atlas.require_labels()[sub_unit]}" in read.text
    assert f"Unit {unit}, before the split" in read.text
    siblings = [other for other in steerer.atlas.sub_units_of(unit) if other != sub_unit]
    assert row_data(markup) == [{"sub_unit": other} for other in siblings]
    sources = [value for _, name, value in read.attributes if name == "src"]
    assert len(sources) >= 8
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)


@pytest.mark.parametrize("sub_unit", [-1, 1360, 10**30, 3.0, "3", "<b>", None, [3], {"sub_unit": 3}, True], ids=repr)
def test_an_unknown_sub_unit_is_refused(presenter, sub_unit):
    assert len(presenter.steerer.atlas) == 1360
    with pytest.raises(SpecError, match=r"^there is no sub-unit .*; atlas 'toyland' has 0 to 1359\.$"):
        presenter.sub_unit_details(sub_unit)


def test_the_first_and_the_last_sub_unit_have_details(presenter):
    for sub_unit in (0, len(presenter.steerer.atlas) - 1):
        assert f"Sub-unit {sub_unit}: " in presenter.sub_unit_details(sub_unit)


# Notes under the captions, limits and fields


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({}, []),
        ({"nu": 6, "gamma": -5.0}, ["Settings that differ from the atlas's: nu 6, gamma -5.0."]),
        ({"mark": True}, ["Removed only in the marked region."]),
        (
            {"mark": True, "plus": ["biker"]},
            ["Concepts were added in the marked region and removed wherever they fire."],
        ),
        ({"mark": True, "minus": [], "plus": ["biker"]}, []),
        (
            {"mark": True, "mode": "scale"},
            [
                "Settings that differ from the atlas's: mode scale.",
                "Mode place was used, because a region is marked; mode scale has no regions.",
                "Removed only in the marked region.",
            ],
        ),
    ],
)
def test_notes_name_settings_and_marks_that_are_out_of_sight(presenter, options, notes):
    corner = encode_mark(box_mask(0, 0, 48, 48))
    request = make_request(**{**options, "mark": corner if options.get("mark") else None})
    _, result = presenter.answer(presenter.open_example(1), request)
    start = len(result.notes) - len(notes)
    assert list(result.notes[start:]) == notes
    assert not any("Settings" in note for note in result.notes[:start])


def test_adding_alone_takes_a_free_place(presenter):
    result = presenter.steer(make_request(minus=[], plus=["cat"]))
    assert "put in with strength 1 in a free place" in str(result.plan)
    assert result.maps["cat"][1].any() and "cat" in result.caption
    assert presenter.steer(make_request(minus=[], plus=["cat"], mode="scale")).plan.words("plus") == ("cat",)


def test_words_and_questions_have_a_maximal_length(presenter):
    for answer in (presenter.steer, presenter.find_settings):
        with pytest.raises(SpecError, match="a…' has 101 characters; a concept may have at most 100"):
            answer(make_request(minus=["a" * 101]))
        with pytest.raises(SpecError, match="the question may have at most 1,000 characters here"):
            answer(make_request(prompt="a" * 1001))
    with pytest.raises(SpecError, match="has 5,000 characters"):
        presenter.search("a" * 5000)
    fields = presenter.field_values()
    fields[TUNABLE.index("nu")] = "9" * 5000
    assert presenter.read_settings(fields)["nu"] == "9" * 5000  # still a text, which the settings refuse


def test_fields_filled_by_a_recipe_are_reset_with_the_next_image(presenter):
    loaded = ("What is it?", *presenter.field_values({"nu": 40}))
    state = replace(presenter.open_example(0), loaded_fields=loaded)
    assert presenter.fields_for_next_image(state, loaded) == [PROMPT, *presenter.field_values()]
    typed = [PROMPT, *presenter.field_values({"nu": 40})]
    assert presenter.fields_for_next_image(state, typed) == typed
    assert presenter.fields_for_next_image(presenter.open_example(0), typed) == typed


# Public pages, buttons, warm-up


def test_a_public_page_refuses_huge_images_and_hides_the_folder_of_the_atlas(steerer, tmp_path):
    public, private = Presenter(steerer, public=True), Presenter(steerer)
    Image.new("1", (5000, 4100)).save(tmp_path / "large.png")
    with pytest.raises(ImageError, match=r"'large\.png' cannot be .* 5000 x 4100 pixels are more than 20,"):
        public.open_upload(tmp_path / "large.png")
    assert private.open_upload(tmp_path / "large.png").image.name == "large.png"
    shutil.copytree(steerer.atlas.folder, tmp_path / "here")
    moved = Steerer(steerer.vlm, Atlas.load(tmp_path / "here"), steerer.matcher)
    assert str(tmp_path) in Presenter(moved).export_code(make_request())
    assert str(tmp_path) not in Presenter(moved, public=True).export_code(make_request())


def test_examples_and_their_edits_are_buttons(presenter, steerer):
    buttons = presenter.example_buttons()
    assert row_data(buttons) == [{"example": number} for number in range(5)]
    assert buttons.count('aria-pressed="true"') == 1
    assert Reader(buttons).tags.count("img") == 5
    for number, example in enumerate(presenter.examples):
        expected = [{"example": number, "step": step} for step in range(len(example.recipe.steps))]
        assert row_data(presenter.edit_buttons(number)) == expected
    assert Presenter(steerer).example_buttons() == ""


def test_warming_up_changes_nothing(presenter, steerer):
    fresh = Presenter(steerer)
    fresh.warm_up()
    assert fresh._running == {}
    assert fresh.steer(make_request()).caption == presenter.steer(make_request()).caption
