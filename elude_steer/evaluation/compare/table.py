"""The results of a comparison: a Markdown page with tables and a figure, and everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elude_steer.evaluation.compare.methods import METHODS, Size
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.utils import plotting
from elude_steer.utils.files import write_file


def write_results(comparison: Comparison, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write toyland.md with its figure and toyland.json; returns the path of the page."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    by_method = {name: [row for row in rows if row["method"] == name] for name in names}

    def mean(method: str, measure: str) -> float:
        return float(np.mean([row[measure] for row in by_method[method]]))

    size = comparison.size
    lines = [
        *_introduction(size),
        "",
        "## What latents mean, and whether the model is still the model",
        "",
        f"| method | latents | never fire | MS-Score | of {size.ms_scenes:,} | clean | objects | named | R2 | "
        "captions | head | same tokens | other tokens | collinearity | make | name | measure |",
        "|" + "---|" * 17,
    ]
    for name in names:
        get = partial(mean, name)
        across_runs = comparison.stability_across_runs(METHODS[name])
        across_draws = comparison.stability_across_draws(METHODS[name])
        lines.append(
            f"| {name} | {get('latents'):.0f} | {get('never fire'):.1%} | {get('MS-Score'):.1f} | "
            f"{get('MS-Score of many'):.1f} | {get('clean'):.1%} | {get('objects'):.0f} | "
            f"{get('named rightly'):.1%} | {100 * get('R2'):.2f} | {get('same captions'):.1%} | "
            f"{get('accuracy'):.1%} | {_format_number(across_runs)} | {_format_number(across_draws)} | "
            f"{get('collinearity'):.3f} | "
            f"{get('made') / 60:.1f} | {get('named') / 60:.1f} | {get('seconds') / 60:.1f} |"
        )
    for kind in ("remove", "replace"):
        for title, point in (("", None), (", at the cleanest point", "cleanest")):
            lines += _steering_table(by_method, kind, title, point)
    shown = [name for name in names if not METHODS[name].supervised]  # directions reconstruct nothing: far below all
    points = [(mean(name, "MS-Score of many") / 100, mean(name, "R2")) for name in shown]
    marked = [number for number, name in enumerate(shown) if METHODS[name].kind == "atlas"]
    chart = plotting.scatter(points, x=f"MS-Score of {size.ms_scenes:,} scenes", y="R2", marked=marked, names=shown)
    write_file(out / "toyland-pareto.png", lambda file: chart.save(file, "PNG"))
    lines += ["", "![MS-Score against R2; ELUDe is red](toyland-pareto.png)", ""]
    write_file(out / "toyland.md", lambda file: file.write("\n".join(lines).encode()))
    text = json.dumps(list(rows), indent=1)
    write_file(out / "toyland.json", lambda file: file.write(text.encode()))
    return out / "toyland.md"


def _introduction(size: Size) -> list[str]:
    """The title and an explanation of every column."""
    return [
        "# Toyland: ELUDe and the other methods",
        "",
        f"{size.scenes} held-out scenes, token seeds {', '.join(map(str, size.seeds))}; means over the seeds. "
        "Written by `elude-steer compare`.",
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
        "- Make, name, measure: CPU minutes to make the latents, to label them, and to measure and steer with them. "
        "ELUDe labels while it builds. Its two rules share all work up to the clusters, which counts for the first.",
        f"- Autoencoders have as many latents as ELUDe (gap) has sub-units. They train for {size.epochs} epochs of "
        f"small batches (matching pursuit for a third of them), with the best of {size.trials} settings by the paper's "
        "rule, tried on a sixth of the tokens.",
        f"- Steering: each method and mode uses the best of {_grid_size(size)} settings, by the harmonic mean of "
        f"success and kept on {size.tuning_scenes} other scenes; the tables of the cleanest point choose by the share "
        "of clean edits on them. Success: the object is gone, or the new one is named. Kept: share of the rest that is "
        "still named. Invented: something is named that is neither there nor asked for. Clean: all three.",
    ]


def _steering_table(by_method: Mapping[str, Sequence[Any]], kind: str, title: str, point: str | None) -> list[str]:
    """A table of edits: every method in both modes, at one of its points."""
    lines = [
        "",
        f"## Steering: {kind}{title}",
        "",
        "| method | mode | success | kept | invented | clean | well formed | harmonic (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    columns = ("success", "kept", "invented", "clean", "well_formed")
    for method, rows in by_method.items():
        for mode in ("scale", "place"):
            scores = [row[f"{mode} {kind}"] for row in rows]
            scores = [score[point] for score in scores] if point else scores
            shares = " | ".join(f"{np.mean([score[name] for score in scores]):.1%}" for name in columns)
            low, high = np.mean([score["intervals"]["harmonic"] for score in scores], axis=0)
            harmonic = np.mean([score["harmonic"] for score in scores])
            lines.append(f"| {method} | {mode} | {shares} | {harmonic:.3f} ({low:.3f} to {high:.3f}) |")
    return lines


def _grid_size(size: Size) -> int:
    """The number of points of a grid, which is the same for all methods."""
    grids = (grid for method in METHODS.values() for grid in method.grids_for(size).values())
    (count,) = {len(grid_points(grid)) for grid in grids}
    return count


def _format_number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"
