"""elude_steer: name a concept, change what a vision-language model says about an image."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it for true; importing typing takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# name -> its module, loaded on first use, so that `import elude_steer` and `elude-steer --help` load no torch
_PUBLIC = {
    "steer": "steering.steerer",
    "Steerer": "steering.steerer",
    "SteeredCaption": "steering.result",
    "Plan": "steering.plan",
    "tune": "evaluation.edits.tune",
    "build": "atlas.build.pipeline",
    "disentangle": "atlas.build.disentangle",
    "Atlas": "atlas.atlas",
    "evaluate": "evaluation.evaluate",
    "Vlm": "models.vlm",
    "SplitLinear": "method.layers",
    "SplitConv1x1": "method.layers",
    "EludeSteerError": "errors",
    "EludeSteerWarning": "errors",
}
# name -> module that is the value itself
_NAMESPACES = {"specs": "specs", "hooks": "models.hooks", "toyland": "toyland", "photoland": "photoland"}
# names that were public before they moved to a namespace
_ALIASES = dict.fromkeys(
    ("AtlasSpec", "TokensSpec", "ClustersSpec", "SplitSpec", "ReferencesSpec", "LabelsSpec", "MatcherSpec"), "specs"
)
__all__ = ["__version__", *_PUBLIC, *_NAMESPACES]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        value = importlib.import_module(f"elude_steer.{_NAMESPACES[name]}")
    elif name in _PUBLIC or name in _ALIASES:
        value = getattr(importlib.import_module(f"elude_steer.{_PUBLIC.get(name) or _ALIASES[name]}"), name)
    else:
        known = ", ".join((*_PUBLIC, *_NAMESPACES))
        raise AttributeError(f"module 'elude_steer' has no attribute '{name}'; it has {known}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
