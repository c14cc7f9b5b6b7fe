"""The benchmark of edits: worlds, sweeps over settings, tuning."""

from typing import Literal, get_args

from elude_steer.errors import SpecError

# Of edits: `two` replaces two objects at once, `place` replaces the place, `absent` removes what is not there, `add`
# only adds an object.
Kind = Literal["remove", "replace", "two", "place", "absent", "add"]
KINDS = " or ".join(", ".join(map(repr, get_args(Kind))).rsplit(", ", 1))  # in words


def parse_scenes(source: str) -> tuple[Literal["toyland", "photos"], str]:
    """The kind and the seed or folder of `toyland:SEED` or `photos:FOLDER`."""
    kind, _, where = source.partition(":")
    if kind == "toyland" and where.isdecimal():
        return "toyland", where
    if kind == "photos" and where:
        return "photos", where
    raise SpecError(
        f"--scenes is '{source}'; write toyland:SEED, or photos:FOLDER with captions.json in the folder, or use --coco "
        "with annotations and images."
    )
