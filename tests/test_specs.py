import pickle
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from elude_steer.recipe_files import parse_spec
from elude_steer.specs import AtlasSpec, ModelSpec, SettingArguments, Settings, SteeringSpec, StepSpec, demo_hints
from elude_steer.utils.yaml_schema import dump_document, override, parse_document

SMALL = """\
name: small
model:
  id: facebook/dinov2-small
  layer: encoder.layer.11.mlp.fc2
"""

NAMES = [item.name for item in fields(Settings)]


def test_missing_keys_take_their_defaults():
    small = parse_spec(SMALL)
    assert small == AtlasSpec("small", ModelSpec("facebook/dinov2-small", "encoder.layer.11.mlp.fc2"))
    assert (small.model.kind, small.tokens.per_image, small.clusters.top_k) == ("vlm", "auto", "auto")
    assert small.clusters.min_samples is None
    assert small.references.keep == 25


def test_specs_are_frozen_and_compare():
    small = parse_spec(SMALL)
    with pytest.raises(FrozenInstanceError):
        small.name = "other"
    with pytest.raises(FrozenInstanceError):
        small.steering.gamma = 3.0
    assert len({small, parse_spec(SMALL)}) == 1


# The settings of an edit


def test_the_yaml_section_has_every_setting_in_its_order_and_null_by_default():
    assert list(asdict(SteeringSpec()).items()) == [(name, None) for name in NAMES]
    assert list(asdict(parse_spec(SMALL))["steering"]) == NAMES


def test_every_setting_can_be_given_and_set_back_to_null():
    for name, value in asdict(Settings()).items():
        given = parse_document(SteeringSpec, dump_document(SteeringSpec(**{name: value})))
        assert asdict(given) == asdict(SteeringSpec()) | {name: value}
        assert override(given, [f"{name}=null"]) == SteeringSpec()


def test_the_yaml_section_can_be_pickled():
    step = StepSpec(("dog",), settings=SteeringSpec(nu="all"))
    assert pickle.loads(pickle.dumps(step)) == step


def test_the_keyword_arguments_are_the_settings():
    """Type checkers need the arguments written out; this compares them with the settings, field by field."""
    arguments, types = get_type_hints(SettingArguments), get_type_hints(Settings)
    assert list(arguments) == NAMES

    def as_argument(kind):
        """A choice is an argument of type str."""
        if get_origin(kind) is Literal:
            return {type(choice) for choice in get_args(kind)}
        parts = get_args(kind)
        return {part for inner in parts for part in as_argument(inner)} if parts else {kind}

    for name in NAMES:
        assert arguments[name] == Union[(*as_argument(types[name]), type(None))], name


def test_every_setting_has_a_help_text():
    for item in fields(Settings):
        assert item.metadata["help"].endswith("."), item.name


def test_the_demo_shows_settings_with_a_hint_in_its_order():
    assert list(demo_hints()) == ["strength", "mode", "fit", "seen", "gamma", "alpha", "kappa", "nu"]
    assert all(demo_hints().values())
    assert all(bool(item.metadata["hint"]) is (item.name in demo_hints()) for item in fields(Settings))


# Edits


def test_the_region_of_a_step_is_its_mask_or_its_box():
    assert StepSpec().region is None
    assert StepSpec(where=(1.0, 2.0, 3.0, 4.0)).region == (1.0, 2.0, 3.0, 4.0)
    assert StepSpec(mask="mask.png").region == "mask.png"
