"""The results of a comparison: a Markdown page with tables and a figure, and everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elude_steer.errors import StorageError
from elude_steer.evaluation.compare.methods import METHODS, SMALL, Size
from elude_steer.evaluation.compare.steering_table import steering_section
from elude_steer.utils import plotting
from elude_steer.utils.files import read_json, write_file


def write_results(size: Size, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write toyland.md with its figure and toyland.json; returns the path of the page.

    Rows that have only measures, or only edits, are completed by those of an earlier toyland.json.
    """
    path = out / "toyland.json"
    if path.exists() and not all("latents" in row and "edits" in row for row in rows):
        earlier = read_json(path, list)
        if not all(isinstance(row, dict) and row.get("method") in METHODS and "seed" in row for row in earlier):
            raise StorageError(f"'{path}' is damaged; delete it and run the same command again.")
        rows = merge_rows(earlier, rows)
    names = list(dict.fromkeys(row["method"] for row in rows))
    by_method = {name: [row for row in rows if row["method"] == name] for name in names}
    measured = {name: [row for row in own if "latents" in row] for name, own in by_method.items()}
    measured = {name: own for name, own in measured.items() if own}
    command = f"elude-steer compare --work work --out {out.as_posix()}{' --small' if size == SMALL else ''}"
    lines = ["# Toyland: ELUDe and the other methods", "", f"Written by `{command}`.", ""]
    if measured:
        lines += [*_introduction(size, measured), "", *_measures_table(size, measured)]
        _draw(size, measured, out)
        lines += ["", "![MS-Score against R2; ELUDe is red](toyland-pareto.png)"]
    lines += [*steering_section(by_method, size), ""]
    write_file(out / "toyland.md", lambda file: file.write("\n".join(lines).encode()))
    text = json.dumps([_without_nan(row) for row in rows], indent=1)
    write_file(path, lambda file: file.write(text.encode()))
    return out / "toyland.md"


def merge_rows(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier run with what a later one has found, in the order of the methods."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for row in (*old, *new):
        key = (row["method"], row["seed"])
        merged[key] = {**merged.get(key, {}), **row}
    return sorted(merged.values(), key=lambda row: list(METHODS).index(row["method"]))


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with None instead of NaN, which JSON cannot express."""
    return {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in row.items()}


def _mean(rows: Sequence[Mapping[str, Any]], measure: str) -> float:
    """The mean over the seeds; NaN where it is unknown."""
    return float(np.mean([np.nan if row[measure] is None else row[measure] for row in rows]))


def _measures_table(size: Size, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    lines = [
        "## What latents mean, and whether the model is still the model",
        "",
        f"| method | latents | never fire | MS-Score | of {size.ms_scenes:,} | clean | objects | named | R2 | "
        "captions | head | same tokens | other tokens | collinearity | make | name | measure |",
        "|" + "---|" * 17,
    ]
    for name, rows in measured.items():
        get = partial(_mean, rows)
        lines.append(
            f"| {name} | {get('latents'):.0f} | {get('never fire'):.1%} | {get('MS-Score'):.1f} | "
            f"{get('MS-Score of many'):.1f} | {get('clean'):.1%} | {get('objects'):.0f} | "
            f"{get('named rightly'):.1%} | {100 * get('R2'):.2f} | {get('same captions'):.1%} | "
            f"{get('accuracy'):.1%} | {_format_number(get('same tokens'))} | {_format_number(get('other tokens'))} | "
            f"{get('collinearity'):.3f} | "
            f"{get('made') / 60:.1f} | {get('named') / 60:.1f} | {get('seconds') / 60:.1f} |"
        )
    return lines


def _draw(size: Size, measured: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> None:
    """Write the figure."""
    shown = [name for name in measured if METHODS[name].kind != "means"]  # directions reconstruct nothing
    points = [(_mean(measured[name], "MS-Score of many") / 100, _mean(measured[name], "R2")) for name in shown]
    marked = [number for number, name in enumerate(shown) if METHODS[name].kind == "atlas"]
    chart = plotting.scatter(points, x=f"MS-Score of {size.ms_scenes:,} scenes", y="R2", marked=marked, names=shown)
    write_file(out / "toyland-pareto.png", lambda file: chart.save(file, "PNG"))


def _introduction(size: Size, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """An explanation of every column of the measures."""
    seeds = sorted({row["seed"] for rows in measured.values() for row in rows})
    return [
        f"{size.scenes} held-out scenes, token seeds {', '.join(map(str, seeds))}; means over the seeds.",
        "",
        f"- MS-Score: on {size.scenes:,} scenes and on {size.ms_scenes:,}. It uses 100 images for each latent. About "
        f"4 % of {size.scenes:,} scenes show a given object, so most of the 100 cannot have an object in common, and "
        "the score depends on how close to zero a latent is for the rest. Among more scenes, as in the paper, it says "
        "whether the strongest images belong together.",
        "- Latents that never fire on these scenes count neither for the MS-Score nor for the clean share.",
        "- Clean: at least 60 % of a latent's 100 strongest patches show one thing. Objects: how many of 44 have a "
        "clean latent. Named: share of clean latents with the right label.",
        "- R2 and captions: explained variance, and share of captions that stay the same word for word, when the "
        "latents' reconstruction replaces the layer's output. Head: share of patches that a linear classifier on it "
        "still recognises.",
        f"- Same tokens, other tokens: stability over {size.runs} runs of ELUDe (two of the others) on the same "
        "tokens, and over other draws of tokens. Collinearity: 1 means that there are duplicates.",
        "- Make, name, measure: CPU minutes to make the latents, to label them, and to measure them. "
        "ELUDe labels while it builds. Its two rules share all work up to the clusters, which counts for the first.",
        f"- Autoencoders have as many latents as ELUDe (gap) has sub-units. They train for {size.epochs} epochs of "
        f"small batches (matching pursuit for a third of them), with the best of {size.trials} settings by the paper's "
        "rule, tried on a sixth of the tokens.",
    ]


def _format_number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"
