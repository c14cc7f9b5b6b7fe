"""Toyland: a synthetic world of small images, with trained models: a captioner (LLaVA-OneVision), labeller and matcher.

The code that loads real models loads these too; they ship with the package, under `DATA`. `demos/toyland/` trains them.

Example:
    >>> from elude_steer import toyland
    >>> for scene in toyland.scenes(seed=3, n=20):
    ...     print(scene.caption, scene.objects, scene.background)
"""

from __future__ import annotations

from pathlib import Path

from elude_steer.toyland.scenes import Scene, Thing, draw_scene, scenes
from elude_steer.toyland.world import CONCEPTS, OBJECTS, PLACES, parse

DATA = Path(__file__).parent / "data"
CAPTIONER = DATA / "captioner"
LABELLER = DATA / "labeller"
MATCHER = DATA / "matcher"

__all__ = [
    "CAPTIONER",
    "CONCEPTS",
    "DATA",
    "LABELLER",
    "MATCHER",
    "OBJECTS",
    "PLACES",
    "Scene",
    "Thing",
    "draw_scene",
    "parse",
    "scenes",
]
