import json
from dataclasses import replace

import numpy as np
import pytest

from elude_steer.steering.plan import Concept, Detector, Edit, Plan, read_concepts
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings


def edit(sub_unit=3, kind="scale", amount=-15.0, via="dog", similarity=1.0):
    return Edit(sub_unit, sub_unit // 2, kind, amount, "puppy", via, similarity, 2.5)


def concept(*edits, word="dog", role="minus", **settings):
    return Concept(word, role, merge_settings(settings), edits)


def placed(word="dog", role="minus", where=None, **settings):
    edits = (edit(1, "read", 8.25, word), edit(5, "read", 0.5, word))
    return Concept(
        word,
        role,
        merge_settings({"mode": "place", **settings}),
        edits,
        Region.from_value(where),
        Detector(7, word, 0.8),
    )


PLANS = {
    "empty": Plan(),
    "scaled": Plan(
        (concept(edit(), edit(4)), concept(edit(7, amount=3.0), word="cat", role="plus")), None, "toy", "ab"
    ),
    "placed": Plan((placed(strength=2, force=True), placed("cat", "plus")), None, "toy", "ab"),
    "marked": Plan((placed("cat", "plus"),), Region.from_value((1, 2, 3, 4)), "toy", "ab"),
    "masked": Plan((placed(), placed("cat", "plus", np.eye(3))), None, "toy", "ab"),
    "no edits": Plan((concept(word="zebra"),), None, "toy", "ab"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_is_the_same_after_json(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.key == plan.key


def test_different_plans_have_different_keys():
    plan = PLANS["scaled"]
    others = [
        *PLANS.values(),
        replace(plan, where=Region.from_value((1, 2, 3, 4))),
        replace(plan, where=Region.from_value((1, 2, 3, 5))),
        replace(plan, weights="cd"),
        replace(plan, concepts=plan.concepts[:1]),
        replace(plan, concepts=plan.concepts[::-1]),
        replace(plan, concepts=(concept(edit(), edit(4), nu="all"), plan.concepts[1])),
        replace(plan, concepts=(concept(edit(), edit(4, amount=2.0)), plan.concepts[1])),
    ]
    assert len({one.key for one in others}) == len(set(others)) == len(others)


def test_integers_and_floats_give_the_same_plan():
    one, other = (Plan((concept(edit(), gamma=g, min_similarity=m),)) for g, m in [(-3, 0), (-3.0, 0.0)])
    assert one == other
    assert one.key == other.key


def test_a_plan_lists_its_edits_and_words():
    plan = PLANS["scaled"]
    assert [one.sub_unit for one in plan.edits] == [3, 4, 7]
    assert (plan.words("minus"), plan.words("plus")) == (("dog",), ("cat",))
    assert (Plan().edits, Plan().words("minus")) == ((), ())


def test_a_gain_of_one_and_a_strength_of_zero_have_no_effect():
    assert not Plan().has_effect
    assert not PLANS["no edits"].has_effect
    assert not Plan((concept(edit(amount=1.0)),)).has_effect
    assert Plan((concept(edit(amount=1.0), edit(4, amount=0.0)),)).has_effect
    assert Plan((placed(),)).has_effect
    assert not Plan((placed(strength=0), placed("cat", "plus", strength=0))).has_effect
    assert Plan((placed(strength=0), placed("cat", "plus"))).has_effect
    assert not Plan((concept(word="zebra", mode="place"),)).has_effect  # without a detector


def test_a_plan_is_linear_if_it_scales_every_patch():
    every, some = concept(edit(), nu="all"), concept(edit(), nu=50)
    assert Plan((every,)).is_linear
    assert Plan((every, concept(word="zebra", nu=3))).is_linear  # a concept without sub-units does nothing
    assert Plan().is_linear
    for plan in (
        Plan((some,)),
        Plan((every, some)),
        Plan((placed(nu="all"),)),
        Plan((every, placed(nu="all", fit=0, force=True))),
        Plan((replace(placed(nu="all"), edits=()),)),  # a detector that names no sub-unit
    ):
        assert not plan.is_linear


def test_a_plan_prints_what_it_does():
    many = [edit(i, via=f"word{i}", similarity=0.9 - i / 10) for i in range(6)]
    plan = Plan(
        (
            concept(edit(1), edit(2), edit(3, via="puppy", similarity=0.81), gamma=-10, nu=25, per="image"),
            concept(*many, word="hat", nu="all"),
            concept(edit(10, "scale", 8.0, "cow"), word="cow", role="plus", alpha=8, nu=1),
        )
    )
    assert str(plan).splitlines() == [
        "-dog: 3 sub-units times -10 on 25 patches an image",
        "  2 by 'dog' (1.00), 1 by 'puppy' (0.81)",
        "-hat: 6 sub-units times -15 on every patch",
        "  1 by 'word0' (0.90), 1 by 'word1' (0.80), 1 by 'word2' (0.70), 1 by 'word3' (0.60) and 2 more words",
        "+cow: 1 sub-unit times 8 on 1 patch a tile",
        "  1 by 'cow' (1.00)",
    ]


def test_an_empty_plan_and_a_concept_without_sub_units_print():
    assert str(Plan()) == "nothing is changed"
    assert str(PLANS["no edits"]) == "-zebra: 0 sub-units times -15 on 50 patches a tile"


def test_a_plan_prints_where_concepts_are_taken_out_and_put_in():
    plan = Plan(
        (
            placed(strength=1.5),
            placed("cat", fit=0, force=True),
            placed("cow", "plus", strength=0.25),
            placed("hen", "plus", (1, 2, 3, 4)),
        )
    )
    assert str(plan).splitlines() == [
        "-dog: taken out with strength 1.5 where it reads at least 40% of its peak, if it is seen",
        "  by 'dog' (0.80)",
        "-cat: taken out with strength 1 in the whole image",
        "  by 'cat' (0.80)",
        "+cow: put in with strength 0.25 in place of 'dog'",
        "  by 'cow' (0.80)",
        "+hen: put in with strength 1 in the marked region",
        "  by 'hen' (0.80)",
    ]


def test_a_plus_word_has_the_minus_word_of_the_same_place_in_order_as_partner():
    dog, cat, cow, hen = placed(), placed("cat"), placed("cow", "plus"), placed("hen", "plus")
    plan = Plan((dog, cat, cow, hen))
    assert [plan.partner(one) for one in plan.concepts] == [None, None, dog, cat]
    marked = placed("cow", "plus", (1, 2, 3, 4))
    plan = Plan((dog, cat, marked, hen))
    assert [plan.partner(one) for one in plan.concepts] == [None, None, None, dog]  # who has a region takes no other
    plan = Plan((dog, cow), Region.from_value((1, 2, 3, 4)))
    assert (plan.partner(cow), plan.marked_region(cow), plan.marked_region(dog)) == (None, plan.where, None)
    assert Plan((dog,), plan.where).marked_region(dog) == plan.where
    scaled = concept(edit(), word="hat")
    assert Plan((scaled, dog, cow)).partner(cow) == dog  # a scaled word has no region


@pytest.mark.parametrize(
    ("call", "free"),
    [
        ({"plus": ["cow"]}, ["cow"]),
        ({"minus": {"dog": {"mode": "scale"}}, "plus": ["cow"]}, ["cow"]),
        ({"minus": ["dog"], "plus": ["cow", "hen"]}, ["hen"]),
        ({"minus": ["dog"], "plus": {"cow": {"mode": "scale"}, "hen": {}}}, []),
        ({"minus": ["dog", "cat"], "plus": ["a", "b", "c"]}, ["c"]),
    ],
)
def test_words_to_place_that_outnumber_the_regions_go_to_free_places(call, free):
    def find(**more):
        plan = Plan(tuple(read_concepts(**call, **more)), Region.from_value(more.get("where")))
        return [concept.word for concept in plan.concepts if plan.needs_free_place(concept)]

    assert find(settings={"mode": "place"}) == free
    assert find(settings={"mode": "place"}, where=(1, 2, 3, 4)) == []
    assert find(settings={"mode": "scale"}) == []


def test_a_plan_says_that_a_word_goes_to_a_free_place():
    plan = Plan((placed("cow", "plus", strength=2), placed("hen", "plus", fit=0)))
    assert str(plan).splitlines()[::2] == [
        "+cow: put in with strength 2 in a free place",
        "+hen: put in with strength 1 in the whole image",
    ]
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.has_effect and not plan.is_linear


def test_words_with_a_region_need_no_minus_word():
    own = {"hen": {"where": (1, 2, 3, 4)}}
    assert len(read_concepts(minus=["dog"], plus={"cow": {}, **own}, settings={"mode": "place"})) == 3
    assert len(read_concepts(plus=own, settings={"mode": "place"})) == 1
