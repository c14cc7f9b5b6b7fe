"""The benchmark of edits: worlds, sweeps over settings, tuning."""

from typing import Literal

from elude_steer.errors import SpecError

Kind = Literal["remove", "replace"]  # of edits


def parse_scenes(source: str) -> int:
    """The seed of `toyland:SEED`."""
    kind, _, seed = source.partition(":")
    if kind != "toyland" or not seed.isdecimal():
        raise SpecError(f"--scenes is '{source}'; write toyland:SEED, or use --coco with annotations and images.")
    return int(seed)
