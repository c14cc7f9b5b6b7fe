import json
from dataclasses import replace

import numpy as np
import pytest

from elude_steer.steering.plan import Concept, Edit, Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings


def edit(sub_unit=3, kind="scale", amount=-15.0, via="dog", similarity=1.0):
    return Edit(sub_unit, sub_unit // 2, kind, amount, "puppy", via, similarity, 2.5)


def concept(*edits, word="dog", role="minus", **settings):
    return Concept(word, role, merge_settings(settings), edits)


PLANS = {
    "empty": Plan(),
    "scaled": Plan(
        (concept(edit(), edit(4)), concept(edit(7, amount=3.0), word="cat", role="plus")), None, "toy", "ab"
    ),
    "placed": Plan(
        (concept(edit(1, "set", 8.25), role="plus", mode="place"),), Region.from_value((1, 2, 3, 4)), "toy", "ab"
    ),
    "masked": Plan(
        (concept(edit(1, "set", 8.25), role="plus", mode="place"),), Region.from_value(np.eye(3)), "toy", "ab"
    ),
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


def test_a_gain_of_one_has_no_effect_and_a_set_value_has():
    assert not Plan().has_effect
    assert not PLANS["no edits"].has_effect
    assert not Plan((concept(edit(amount=1.0)),)).has_effect
    assert Plan((concept(edit(amount=1.0), edit(4, amount=0.0)),)).has_effect
    assert Plan((concept(edit(kind="set", amount=1.0)),)).has_effect


def test_a_plan_is_linear_if_it_scales_every_patch():
    every, some = concept(edit(), nu="all"), concept(edit(), nu=50)
    placed = concept(edit(kind="set"), nu="all", role="plus", mode="place")
    assert Plan((every,)).is_linear
    assert Plan((every, concept(word="zebra", nu=3))).is_linear  # a concept without sub-units does nothing
    assert Plan().is_linear
    for plan in (Plan((some,)), Plan((every, some)), Plan((placed,)), Plan((every, placed))):
        assert not plan.is_linear


def test_a_plan_prints_what_it_does():
    many = [edit(i, via=f"word{i}", similarity=0.9 - i / 10) for i in range(6)]
    plan = Plan(
        (
            concept(edit(1), edit(2), edit(3, via="puppy", similarity=0.81), gamma=-10, nu=25, per="image"),
            concept(*many, word="hat", nu="all"),
            concept(edit(9, "set", 8.0, "cat"), word="cat", role="plus", mode="place", beta=4),
            concept(edit(10, "scale", 8.0, "cow"), word="cow", role="plus", alpha=8, nu=1),
        )
    )
    assert str(plan).splitlines() == [
        "-dog: 3 sub-units times -10 on 25 patches an image",
        "  2 by 'dog' (1.00), 1 by 'puppy' (0.81)",
        "-hat: 6 sub-units times -15 on every patch",
        "  1 by 'word0' (0.90), 1 by 'word1' (0.80), 1 by 'word2' (0.70), 1 by 'word3' (0.60) and 2 more words",
        "+cat: 1 sub-unit set to 4 x reference on a region of 50 patches a tile",
        "  1 by 'cat' (1.00)",
        "+cow: 1 sub-unit times 8 on 1 patch a tile",
        "  1 by 'cow' (1.00)",
    ]


def test_an_empty_plan_and_a_concept_without_sub_units_print():
    assert str(Plan()) == "nothing is changed"
    assert str(PLANS["no edits"]) == "-zebra: 0 sub-units times -15 on 50 patches a tile"
