"""The part of a comparison's page that is about steering: what was done, and a table for each mode and kind of edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elude_steer.evaluation.compare.grids import GRIDS, SUPERVISED
from elude_steer.evaluation.compare.methods import Size
from elude_steer.steering.settings import format_setting

_COLUMNS = {"done": "success", "kept": "kept", "invented": "invented", "clean": "clean"}
Rows = Sequence[Mapping[str, Any]]


def steering_section(by_method: Mapping[str, Rows], size: Size) -> list[str]:
    """The lines of the section; none if nothing was steered."""
    edited = {name: [row for row in rows if "edits" in row] for name, rows in by_method.items()}
    edited = {name: rows for name, rows in edited.items() if rows}
    if not edited:
        return []
    lines = _explanation(edited, size)
    for kind in ("remove", "replace"):
        for mode in ("place", "scale"):
            lines += _table(edited, mode, kind)
    return lines


def _explanation(edited: Mapping[str, Rows], size: Size) -> list[str]:
    seeds = sorted({row["seed"] for rows in edited.values() for row in rows})
    first = next(iter(edited.values()))[0]["edits"]
    tried = " and ".join(f"{first[f'{mode} remove']['tried']} of `{mode}`" for mode in ("place", "scale"))
    left_out = "" if set(size.seeds) == set(seeds) else " Methods that are not in the tables were not steered."
    return [
        "",
        "## Steering",
        "",
        f"{first['place remove']['edits']:,} edits of scenes that nothing was made or tuned with; token "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}.{left_out} In brackets: 95 % intervals by "
        "bootstrap over the scenes.",
        "",
        "- Done: the object is no longer named, and the new one is. Kept: share of the other objects and places that "
        "are still named. Invented: something is named that is neither there nor asked for. Clean: done, all else "
        "kept, nothing invented, a sentence, nothing named twice. Absent: captions that change, and should not, when "
        "an object is removed that is not there, with the same settings.",
        f"- Every method tries the same settings ({tried}) and takes the one with most clean edits on "
        f"{size.tuning_scenes} other scenes: all are tried on a third of these scenes, the better quarter on all. A "
        "setting with * lies on the border of the grid, so a better one may lie outside.",
        "- `place`: the detectors and directions of all methods are found by the same code, from the same scenes; "
        "detectors read the method's latents, and the regions that they find give the directions. With supervised "
        "directions, the detectors stay and the stream's part is the same for all: the mean stream of the patches that "
        "truly show a word minus that of all others. What differs between methods there is their latents' part.",
        "- Difference of means is told what every patch shows, for its detectors as for its directions. It learns no "
        "dictionary.",
        "- CPU minutes are those of the row's edits, tuning included.",
    ]


def _table(edited: Mapping[str, Rows], mode: str, kind: str) -> list[str]:
    """One row for each method."""
    beside = mode == "place"
    heads = ["method", *_COLUMNS, *(["absent"] if kind == "remove" else []), "settings"]
    heads += ["done, supervised directions", "clean, supervised directions", "their settings"] if beside else []
    heads.append("minutes")
    title = "remove an object" if kind == "remove" else "replace an object by another"
    lines = ["", f"### `{mode}`: {title}", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for method, rows in edited.items():
        own = [row["edits"][f"{mode} {kind}"] for row in rows]
        cells = [method, *(_share(own, name) for name in _COLUMNS.values())]
        cells += [_share([score["absent"] for score in own], "success", inverted=True)] if kind == "remove" else []
        cells.append(_settings(own, mode, kind))
        other = [row["edits"].get(f"{mode} {kind}{SUPERVISED}") for row in rows]
        if beside:
            cells += _supervised_cells([score for score in other if score], mode, kind)
        seconds = [score["seconds"] + (more["seconds"] if more else 0) for score, more in zip(own, other, strict=True)]
        cells.append(f"{np.mean(seconds) / 60:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _supervised_cells(scores: Rows, mode: str, kind: str) -> list[str]:
    """What a method does with supervised directions; empty for one that has no others."""
    if not scores:
        return ["", "", ""]
    return [_share(scores, "success"), _share(scores, "clean"), _settings(scores, mode, kind)]


def _share(scores: Rows, name: str, *, inverted: bool = False) -> str:
    """The mean over seeds with the mean interval, in percent."""
    value, (low, high) = (np.mean([score[name] for score in scores]), _interval(scores, name))
    if inverted:
        value, low, high = 1 - value, 1 - high, 1 - low
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _interval(scores: Rows, name: str) -> tuple[float, float]:
    low, high = np.mean([score["intervals"][name] for score in scores], axis=0)
    return float(low), float(high)


def _settings(scores: Rows, mode: str, kind: str) -> str:
    """The settings that vary, with a star on the grid's border; one entry for each choice of the seeds."""
    varied = [name for name, values in GRIDS[mode, kind].items() if len(values) > 1]  # type: ignore[index]
    texts = [
        ", ".join(format_setting(name, s["settings"][name]) + "*" * (name in s["border"]) for name in varied)
        for s in scores
    ]
    return "; ".join(dict.fromkeys(texts))
