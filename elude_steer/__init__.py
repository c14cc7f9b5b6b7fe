"""elude_steer: name a concept, change what a vision-language model says about a picture."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> module; loaded on first use, so that importing the package (and `elude-steer --help`) imports no torch
_PUBLIC = {
    "steer": "steering",
    "Steerer": "steering",
    "SteeredCaption": "results",
    "Plan": "plans",
    "build": "pipeline",
    "disentangle": "pipeline",
    "Atlas": "atlas",
    "AtlasSpec": "recipe",
    "TokensSpec": "recipe",
    "ClustersSpec": "recipe",
    "SplitSpec": "recipe",
    "ReferencesSpec": "recipe",
    "LabelsSpec": "recipe",
    "MatcherSpec": "recipe",
    "SplitLinear": "splitting",
    "SplitConv1x1": "splitting",
    "Vlm": "vlm",
    "EludeSteerError": "errors",
    "EludeSteerWarning": "errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'elude_steer' has no attribute '{name}'; it has {', '.join(_PUBLIC)}.")
    value = getattr(importlib.import_module(f"elude_steer.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
