"""Merging of the layers that give settings: the caller, a recipe, the atlas, and last the paper's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from elude_steer.errors import SpecError, did_you_mean
from elude_steer.specs import Settings
from elude_steer.utils.yaml_schema import validate


def merge_settings(*layers: Mapping[str, Any]) -> Settings:
    """Merge settings by name, check them, and fill the rest with the paper's values.

    Args:
        *layers: The first layer that has a setting decides; None counts as not given.

    Raises:
        SpecError: If a name is unknown or a value is not valid.
    """
    names = [field.name for field in fields(Settings)]
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        for name, value in layer.items():
            if name in Settings.removed:
                raise SpecError(f"there is no setting '{name}' any more: {Settings.removed[name]}; use strength.")
            if name not in names:
                known = ", ".join(names)
                raise SpecError(
                    f"there is no setting '{str(name)[:60]}'.{did_you_mean(name, names)} The settings are {known}."
                )
            if value is not None:
                merged[name] = value.item() if isinstance(value, np.generic) else value
    return validate(Settings(**merged))


def format_setting(name: str, value: Any) -> str:
    """A setting in words: `kappa 6`, `force`, `not force`."""
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
