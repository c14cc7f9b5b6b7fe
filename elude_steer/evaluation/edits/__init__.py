"""The benchmark of edits: worlds, sweeps over settings, tuning."""

from typing import Literal

Kind = Literal["remove", "replace"]  # of edits
