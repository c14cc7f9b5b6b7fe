from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.specs import Recipe, Settings
from elude_steer.steering.settings import format_setting, merge_settings
from elude_steer.utils.yaml_schema import parse_document


def test_the_papers_values_are_the_defaults():
    assert merge_settings() == merge_settings({}, {}) == Settings()
    assert (Settings().mode, Settings().per, Settings().by) == ("scale", "tile", "label")


def test_the_first_layer_with_a_value_decides_and_none_counts_as_not_given():
    settings = merge_settings({"gamma": None, "alpha": 2}, {"gamma": -2, "alpha": 3}, {"gamma": -3, "nu": 4})
    assert (settings.alpha, settings.gamma, settings.nu, settings.kappa) == (2.0, -2.0, 4, 100)


def test_numpy_values_become_plain_python_values():
    settings = merge_settings({"kappa": np.int64(5), "alpha": np.float32(2.5), "gamma": -3, "nu": np.int32(7)})
    values = (settings.kappa, settings.alpha, settings.gamma, settings.nu)
    assert values == (5, 2.5, -3.0, 7)
    assert [type(value) for value in values] == [int, float, float, int]
    assert settings == merge_settings({"kappa": 5, "alpha": 2.5, "gamma": -3.0, "nu": 7})


def test_settings_are_frozen_and_hashable():
    settings = merge_settings({"alpha": 2})
    assert hash(settings) == hash(replace(settings))
    with pytest.raises(FrozenInstanceError):
        settings.alpha = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kappa": 0}, "kappa: must be a whole number of at least 1, not 0"),
        ({"kappa": -3}, "kappa: must be .*, not -3"),
        ({"kappa": 2.5}, "kappa: must be .*, not 2.5"),
        ({"kappa": "5"}, "kappa: must be .*, not '5'"),
        ({"kappa": True}, "kappa: must be .*, not True"),
        ({"nu": 0}, "nu: must be a whole number of at least 1 or all, not 0"),
        ({"nu": -1}, "nu: must be .*, not -1"),
        ({"nu": 2.5}, "nu: must be .*, not 2.5"),
        ({"nu": 2.0}, "nu: must be .*, not 2.0"),
        ({"nu": float("nan")}, "nu: must be .*, not nan"),
        ({"nu": float("inf")}, "nu: must be .*, not inf"),
        ({"nu": True}, "nu: must be .*, not True"),
        ({"nu": "al"}, "nu: must be .*, not 'al'. Did you mean 'all'"),
        ({"nu": "3"}, "nu: must be .*, not '3'"),
        ({"nu": [3]}, r"nu: must be .*, not \[3\]"),
        ({"nu": (3,)}, r"nu: must be .*, not \(3,\)"),
        ({"alpha": float("nan")}, "alpha: must be a finite number, not nan"),
        ({"gamma": float("-inf")}, "gamma: must be a finite number, not -inf"),
        ({"strength": "20"}, "strength: must be a finite number of at least 0, not '20'"),
        ({"strength": True}, "strength: must be .*, not True"),
        ({"strength": -0.1}, "strength: must be .*, not -0.1"),
        ({"seen": float("nan")}, "seen: must be a finite number, not nan"),
        ({"min_similarity": float("nan")}, "min_similarity: must be a finite number, not nan"),
        ({"fit": -0.1}, "fit: must be a finite number from 0 to 1, not -0.1"),
        ({"fit": 1.5}, "fit: must be a finite number from 0 to 1, not 1.5"),
        ({"force": 1}, "force: must be true or false, not 1"),
        ({"mode": "push"}, "mode: must be scale or place, not 'push'"),
        ({"per": 3}, "per: must be tile or image, not 3"),
        ({"by": "labels"}, "by: must be label or score, not 'labels'. Did you mean 'label'"),
        ({"gama": 3}, "there is no setting 'gama'. Did you mean 'gamma'"),
        ({"zebra": 3}, r"there is no setting 'zebra'\. The settings are mode, strength, "),
    ],
    ids=str,
)
def test_a_wrong_setting_is_reported_in_one_line(values, message):
    merge_settings({"kappa": 1, "nu": 1, "alpha": 1, "strength": 1})  # 1 equals True, and True is still refused
    with pytest.raises(SpecError, match=message) as caught:
        merge_settings(values)
    assert "\n" not in str(caught.value)


def test_several_wrong_settings_are_reported_together():
    with pytest.raises(SpecError) as caught:
        merge_settings({"kappa": 0, "mode": "push"})
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["mode", "kappa"]


def test_an_unknown_setting_is_refused_in_every_layer():
    with pytest.raises(SpecError, match="no setting 'nuu'"):
        merge_settings({"nu": 3}, {}, {"nuu": None})


@pytest.mark.parametrize("name", ["beta", "level", "reach", "fill", "smooth"])
def test_a_setting_of_an_older_version_is_refused_with_what_to_use(name):
    assert name in Settings.removed and not hasattr(Settings(), name)
    for layers in ([{name: 1}], [{"strength": 2}, {name: None}]):
        with pytest.raises(SpecError, match=f"there is no setting '{name}' any more: .*; use strength") as caught:
            merge_settings(*layers)
        assert "\n" not in str(caught.value)


def test_a_recipe_with_settings_of_an_older_version_loads_with_one_warning():
    text = """
    name: old
    atlas: toyland
    steps:
      - {minus: [dog], plus: [cat], settings: {mode: place, beta: 2, level: stream, reach: 1, nu: 8}}
      - {minus: [dog], settings: {fill: 4, smooth: true, fit: 0.5}}
    """
    with pytest.warns(EludeSteerWarning) as caught:
        recipe = parse_document(Recipe, text, "old.yaml")
    (message,) = [str(one.message) for one in caught]
    for place in ("old.yaml: ", *(f"steps[0].settings.{name}" for name in ("beta", "level", "reach"))):
        assert place in message
    assert all(f"steps[1].settings.{name}" in message for name in ("fill", "smooth"))
    assert "have no effect: mode place has one strength now" in message
    first, second = (step.settings for step in recipe.steps)
    assert (first.mode, first.nu, first.strength) == ("place", 8, None)
    assert (second.mode, second.fit) == (None, 0.5)


def test_settings_are_written_in_words():
    assert [format_setting("strength", 1.0), format_setting("kappa", 6)] == ["strength 1", "kappa 6"]
    assert [format_setting("force", True), format_setting("force", False)] == ["force", "not force"]
