"""Measures of a dictionary of sub-units or latents, one file for each."""

from collections.abc import Sequence

from elude_steer.errors import SpecError, did_you_mean

MEASURES = ("faithfulness", "monosemanticity", "dictionary", "efficiency")


def check_measures(measures: Sequence[str], again: str | None, head: str | None) -> None:
    """Raise for unknown measures, and for arguments of measures that are not asked for."""
    for name in measures or [""]:
        if name not in MEASURES:
            raise SpecError(
                f"there is no measure '{name}'.{did_you_mean(name, MEASURES)} There are {', '.join(MEASURES)}."
            )
    for argument, name in ((again, "dictionary"), (head, "faithfulness")):
        if argument is not None and name not in measures:
            raise SpecError(f"'{argument}' is for the measure '{name}', which is not asked for; ask for it too.")
