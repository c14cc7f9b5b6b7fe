import pytest

from elude_steer.toyland import scenes
from elude_steer.toyland.world import CONCEPTS, OBJECTS, PLACES, Mention, caption, parse

PAPER = "dog motorcycle biker train bus graffiti teddy chair table frisbee ball jumping room beach park cat baby bear"


def test_the_world_has_the_concepts_of_the_paper():
    assert len(OBJECTS) >= 40
    assert len(PLACES) >= 8
    assert {*PAPER.split(), "blanket", "sunglasses", "clean wall"} <= set(CONCEPTS)
    assert len(set(CONCEPTS)) == len(CONCEPTS)


def test_parsing_a_caption_gives_the_scene():
    for scene in scenes(seed=5, n=300):
        parsed = parse(scene.caption)
        assert parsed.well_formed
        assert parsed.objects == scene.objects
        assert parsed.place == scene.background
        assert parsed.relation == scene.relation
        assert parsed.jumping == tuple(thing.name for thing in scene.things if thing.jumping)


@pytest.mark.parametrize(
    "text", ["", "dog", "a dog", "a dog dog in a park", "an dog in a park", "a dog next to in a park", "in a park",
             "a dog on a cat with a bus with a car in a park", "a jumping in a park"],
)  # fmt: skip
def test_captions_outside_the_grammar_are_not_well_formed(text):
    assert not parse(text).well_formed


def test_articles():
    assert (
        caption("next to", [Mention("apple"), Mention("sunglasses")], "room") == "an apple next to sunglasses in a room"
    )
