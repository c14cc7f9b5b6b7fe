"""Photoland: a small captioner of photographs, in transformers' own LLaVA class on a DINOv2 tower, and its atlas.

The code that loads real models loads these too: `photoland/captioner` is an id, `photoland` an atlas. They are for
research and education: `data/TERMS.txt` is shown once, `data/LICENSE.txt` has details. `demos/photoland/` makes them.

Example:
    >>> import elude_steer as es
    >>> es.steer("photo.jpg", minus=["woman"], plus=["dog"], atlas="photoland").caption
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
CAPTIONER = DATA / "captioner"

__all__ = ["CAPTIONER", "DATA"]
