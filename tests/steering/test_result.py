import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from elude_steer.demo.html_parts import captions
from elude_steer.errors import AtlasError
from elude_steer.models.vlm import PatchGrid
from elude_steer.specs import Recipe, Settings, StepSpec
from elude_steer.steering.plan import Concept, Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.report import write_report
from elude_steer.steering.result import SteeredCaption, render_captions, render_maps, result_notes
from elude_steer.steering.run_recipe import StepResult, format_table
from elude_steer.steering.steerer import Steerer
from elude_steer.toyland import scenes
from tests.helpers.markup import Reader, embedded_images

EVIL = "<script>alert('1')</script> & \"dog\""
GRID = PatchGrid(np.array([[(c / 2, r / 2, (c + 1) / 2, (r + 1) / 2) for r in range(2) for c in range(2)]]), (2, 2))


@pytest.fixture(scope="module")
def steered():
    """A real result: toyland with one object removed and another added."""
    scene = next(scene for scene in scenes(seed=5, n=50) if len(scene.things) == 2)
    steerer = Steerer.load("toyland")
    plan = steerer.plan(minus=[scene.objects[0]], plus=["boat"], mode="place")
    return steerer.explain(scene.image, plan, notes=["a note."])


def result_of(baseline, caption, words=("dog",), **more):
    maps = {word: (np.array([[0.0, 0.5, 0.2, 0.0]]), np.array([[False, True, False, False]])) for word in words}
    plan = Plan(tuple(Concept(word, "minus", Settings(), ()) for word in words))
    return SteeredCaption(baseline, caption, plan, maps, GRID, Image.new("RGB", (40, 20), "green"), **more)


# Words


@pytest.mark.parametrize(
    ("before", "after", "gone", "new"),
    [
        ("a dog.", "a dog.", (), ()),
        ("A dog, a cat", "a (cat) and a dog!", (), ()),
        ("a dog on a road", "a cat on a road", ("dog",), ("cat",)),
        ("dog dog dog", "cat", ("dog",), ("cat",)),
        ("a dog", "", ("dog",), ()),
        ("", "Cats", (), ("cats",)),
        ("a dog - here", "dog", (), ()),  # neither punctuation nor words like "here"
        ("a t-shirt", "a shirt", ("t-shirt",), ("shirt",)),
        ("a man's dog", "a man", ("man's", "dog"), ("man",)),
    ],
)
def test_gone_and_new_words(before, after, gone, new):
    result = result_of(before, after)
    assert (result.gone, result.new) == (gone, new)
    assert {word.strip(".,!()").lower() for _, word in Reader(render_captions(result)).marks} == {*gone, *new}


def test_changed_words_are_marked_in_both_captions():
    read = Reader(render_captions(result_of("A Dog, a cat and a dog.", "a bird, a cat.")))
    assert read.marks == [("del", "Dog,"), ("del", "dog."), ("ins", "bird,")]
    assert read.text == "baseline A Dog, a cat and a dog. steered a bird, a cat."


# In a terminal


def test_repr_shows_captions_plan_and_notes(steered):
    lines = repr(steered).splitlines()
    assert lines[0] == f"baseline  {steered.baseline}"
    assert lines[1] == f"steered   {steered.caption}"
    assert [line[10:] for line in lines[2:-1]] == str(steered.plan).splitlines()
    assert lines[-1] == "note      a note."
    assert str(steered) == steered.caption


def test_repr_keeps_captions_of_any_number_of_lines_in_one_column():
    result = replace(result_of("one\ntwo", ""), plan=Plan())
    assert repr(result).splitlines() == [
        "baseline  one",
        "          two",
        "steered   ",
        "          nothing is changed",
    ]


# In a notebook


def test_a_notebook_shows_both_captions_and_a_map_for_each_word(steered):
    page = steered._repr_html_()
    read = Reader(page)
    minus, plus = steered.maps
    for part in (steered.baseline, steered.caption, f"-{minus}", f"+{plus}", "a note.", "what was done", "fires up to"):
        assert part in read.text
    assert [word for tag, word in read.marks if tag == "del"] == [w for w in steered.baseline.split() if w == minus]
    assert len(embedded_images(page)) == 2
    assert len(page) < 200_000


def test_maps_have_the_size_at_which_they_are_shown():
    result = result_of("a dog", "a cat")
    (shown,) = embedded_images(result._repr_html_())
    assert shown.size == (200, 100)
    assert np.array_equal(np.asarray(shown), np.asarray(result.heatmap("dog", side=200)))
    dense = render_maps(result, side=160, density=2)
    assert embedded_images(dense)[0].size == (320, 160)
    assert "width:160px" in dense
    assert "fires up to 50%" in Reader(dense).text


def test_the_html_has_no_scripts_links_or_text_colours(steered):
    page = steered._repr_html_()
    read = Reader(page)
    assert not {"script", "style", "link", "iframe"} & set(read.tags)
    assert {name for _, name, _ in read.attributes} == {"style", "alt", "src"}
    assert all(value.startswith("data:image/png;base64,") for _, name, value in read.attributes if name == "src")
    styles = ";".join(value for _, name, value in read.attributes if name == "style")
    assert not re.search(r"(?:^|;)\s*color:|#[0-9a-f]{3}", styles)  # the notebook decides on light or dark
    assert "url(" not in styles


def test_all_text_is_escaped():
    evil = result_of(EVIL, f"{EVIL} new", words=(EVIL,), notes=(EVIL,))
    page = evil._repr_html_()
    read = Reader(page)
    assert "<script" not in page
    assert "script" not in read.tags
    assert {name for _, name, _ in read.attributes} == {"style", "alt", "src"}  # no quote let one more in
    assert ("img", "alt", f"where {EVIL} fires") in read.attributes
    assert read.text.count("<script>alert('1')</script>") == 5  # two captions, a map, a note, the plan


def test_a_plan_without_words_has_no_maps():
    page = replace(result_of("a dog", "a dog", words=()), plan=Plan())._repr_html_()
    assert embedded_images(page) == []
    assert "nothing is changed" in Reader(page).text


# Maps, values and notes


def test_a_map_of_another_word_is_refused():
    with pytest.raises(AtlasError, match="there is no map of 'cat'; the plan has maps of 'dog'"):
        result_of("a dog", "a dog").heatmap("cat")
    with pytest.raises(AtlasError, match="the plan has maps of no words"):
        result_of("a dog", "a dog", words=()).heatmap("cat")


def test_to_dict_can_be_written_as_json(steered):
    import json

    values = json.loads(json.dumps(steered.to_dict()))
    assert values["gone"] == list(steered.gone)
    assert set(values["maps"]) == set(steered.maps)
    assert values["seen"] == {word: round(share, 4) for word, share in steered.seen.items()}
    assert list(values["seen"]) == list(steered.plan.words("minus"))


@pytest.mark.parametrize(
    ("mode", "cure"), [("scale", "or mode place"), ("place", r"more strength, or a smaller fit\.$")]
)
def test_an_unchanged_caption_gives_a_note_with_settings_to_try(mode, cure):
    plan = Plan((Concept("dog", "minus", Settings(mode=mode), ()),))
    (note,) = result_notes("a dog", "a dog", plan, {}, {})
    assert note.startswith("the caption did not change; try more")
    assert re.search(cure, note)
    assert result_notes("a dog", "a cat", plan, {}, {}) == []


def test_a_concept_that_hardly_fires_gives_a_note():
    plan = Plan((Concept("dog", "minus", Settings(), ()),))
    (note,) = result_notes("a cat", "a bird", plan, {"dog": (np.full((1, 4), 0.05), np.ones((1, 4), bool))}, {})
    assert note == "'dog' hardly fires in this image: there may be nothing to remove."
    assert result_notes("a cat", "a cat", Plan(), {}, {}) == ["nothing was asked for: name a word in minus or plus."]


def test_a_word_without_a_free_place_gives_a_note_that_says_what_to_do():
    plan = Plan((Concept("cow", "plus", Settings(mode="place"), ()),))
    readings, nowhere, somewhere = np.zeros((1, 4)), np.zeros((1, 4)), np.eye(1, 4)
    (note,) = result_notes("a dog", "a dog", plan, {"cow": (readings, nowhere)}, {})
    assert note.startswith("there is no free place for 'cow' in this image, so it was left out: name what it replaces")
    assert all(cure in note for cure in ("`--minus`", "`--where`", "`--force`")) and "\n" not in note
    (note,) = result_notes("a dog", "a dog", plan, {"cow": (readings, somewhere)}, {})
    assert note.startswith("the caption did not change")


def test_words_that_are_not_seen_give_notes_that_say_what_was_left():
    def place(word, role="minus", where=None, **settings):
        return Concept(word, role, Settings(mode="place", **settings), (), Region.from_value(where))

    def notes(*concepts, where=None, **seen):
        return result_notes("a dog", "a dog", Plan(concepts, Region.from_value(where)), {}, seen)

    box = (0, 0, 9, 9)
    nothing = "'dog' is not seen in this image (0.2 of what it reaches where it is); nothing was changed; "
    nothing += "`--force` edits anyway."
    left = nothing.replace("nothing was changed", "it was left as it is")
    unchanged = "the caption did not change; try more strength, or a smaller fit."
    assert notes(place("dog"), dog=0.2) == [nothing]
    assert notes(place("dog"), place("cow", "plus"), dog=0.2) == [nothing]
    assert notes(place("dog"), place("cat"), dog=0.2, cat=0.9) == [left]
    # What is placed or scaled elsewhere did change.
    assert notes(place("dog"), place("cow", "plus", box), dog=0.2) == [left]
    assert notes(place("dog"), place("cow", "plus"), where=box, dog=0.2) == [left]
    assert notes(place("dog"), Concept("cow", "plus", Settings(), ()), dog=0.2) == [left]
    # Nothing is said of words that were changed.
    assert notes(place("dog", force=True), dog=0.2) == [unchanged]
    assert notes(place("dog", seen=0.1), dog=0.2) == [unchanged]
    assert notes(place("dog", where=box), dog=0.2) == [unchanged]
    assert notes(place("dog"), dog=-0.3)[0].startswith("'dog' is not seen in this image (0.0 of")


def test_a_result_without_baseline_shows_only_the_caption():
    result = result_of(None, "a cat on a street")
    assert (result.gone, result.new) == ((), ())
    assert repr(result).startswith("steered   a cat on a street\n")
    assert json.loads(json.dumps(result.to_dict()))["baseline"] is None
    for shown in (render_captions(result), result._repr_html_(), captions(result)):
        assert ">baseline<" not in shown and "None" not in shown
        assert "a cat on a street" in shown
    assert not any("did not change" in note for note in result_notes(None, "a cat", result.plan, {}, {}))


def test_tables_and_reports_of_results_without_baseline_leave_it_out(tmp_path):
    step = StepResult(StepSpec(minus=("dog",)), result_of(None, "a cat on a street", provenance={}), ())
    assert format_table([step]) == "-dog  a cat on a street"
    page = write_report(tmp_path / "r.html", [(Recipe("x", "small", ()), [step])]).read_text()
    assert "a cat on a street" in page and "None on" not in page and "<p>None</p>" not in page
