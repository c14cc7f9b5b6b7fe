"""The comparison as a page: tables, figures, and everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elude_steer.evaluation.compare.methods import SUPERVISED, Size, grids
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.utils import plotting
from elude_steer.utils.files import write_file


def _known(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"


def _points(size: Size) -> int:
    (count,) = {len(grid_points(grid)) for grid in grids(size).values()}
    return count


def _steering(of: Mapping[str, Sequence[Any]], kind: str, title: str, point: str | None) -> list[str]:
    """A table of edits: every method in both modes, at one of its points."""
    lines = [
        "",
        f"## Steering: {kind}{title}",
        "",
        "| method | mode | success | kept | invented | clean | well formed | harmonic (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shown = ("success", "kept", "invented", "clean", "well_formed")
    for method, rows in of.items():
        for mode in ("scale", "place"):
            parts = [row[f"{mode} {kind}"] for row in rows]
            parts = [part[point] for part in parts] if point else parts
            shares = " | ".join(f"{np.mean([part[name] for part in parts]):.1%}" for name in shown)
            low, high = np.mean([part["intervals"]["harmonic"] for part in parts], axis=0)
            harmonic = np.mean([part["harmonic"] for part in parts])
            lines.append(f"| {method} | {mode} | {shares} | {harmonic:.3f} ({low:.3f} to {high:.3f}) |")
    return lines


def write_results(comparison: Comparison, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """The table as Markdown with its figure, and everything as JSON."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    of = {method: [row for row in rows if row["method"] == method] for method in methods}

    def mean(method: str, name: str) -> float:
        return float(np.mean([row[name] for row in of[method]]))

    size = comparison.size
    lines = [
        "# Toyland: ELUDe beside everything else",
        "",
        f"{size.scenes} held-out scenes, token seeds {', '.join(map(str, size.seeds))}; means over the seeds. "
        "Written by `elude-steer compare`.",
        "",
        f"- MS-Score on {size.scenes:,} scenes and on {size.many:,}. It looks at 100 pictures of a latent: of "
        f"{size.scenes:,} scenes some 4 % show a given object, so that most of the 100 cannot have one in common, and "
        "what counts is how nearly a latent is off for the rest; among more scenes, as in the paper, it says whether "
        "the strongest belong together.",
        "- Latents that never fire on these scenes count neither for the MS-Score nor for the clean share.",
        "- Clean (at least 60 % of a latent's 100 strongest patches show one thing), objects that some clean "
        "latent shows (of 44), clean latents that are named rightly.",
        "- R2 and captions that stay word for word where the layer gives what the latents make of it; patches that a "
        "linear head on it takes for what they show.",
        f"- Stability: {size.runs} runs of ELUDe on the same tokens, two of the others, and other draws of tokens. "
        "Collinearity: 1 says that there are duplicates.",
        "- Cost: minutes of one core to make the latents, to name them, and to measure and steer with them. ELUDe is "
        "named as it is made, and its two rules share all work up to the clusters, which counts for the first.",
        f"- Autoencoders have as many latents as ELUDe (gap) has sub-units; {size.epochs} epochs of small batches "
        f"(pursuit a third of them), at the best of {size.trials} settings by the paper's rule, tried on a sixth of "
        "the tokens.",
        f"- Steering: each method and mode at the best of {_points(size)} settings, by the harmonic mean of success "
        f"and kept on {size.tuning} other scenes; below, by the share of clean edits on them. Success: the "
        "thing is gone, or the other is there; kept: the share of the rest that is still named; "
        "invented: something is named that is neither there nor asked for; clean: all three.",
        "",
        "## What latents mean, and whether the model is still the model",
        "",
        f"| method | latents | never fire | MS-Score | of {size.many:,} | clean | objects | named | R2 | captions | "
        "head | same tokens | other tokens | collinearity | make | name | measure |",
        "|" + "---|" * 17,
    ]
    for method in methods:
        get = partial(mean, method)
        lines.append(
            f"| {method} | {get('latents'):.0f} | {get('never fire'):.1%} | {get('MS-Score'):.1f} | "
            f"{get('MS-Score of many'):.1f} | {get('clean'):.1%} | {get('objects'):.0f} | "
            f"{get('named rightly'):.1%} | {100 * get('R2'):.2f} | {get('same captions'):.1%} | "
            f"{get('accuracy'):.1%} | {_known(comparison.repeated(method))} | {_known(comparison.stability(method))} | "
            f"{get('collinearity'):.3f} | "
            f"{get('made') / 60:.1f} | {get('named') / 60:.1f} | {get('seconds') / 60:.1f} |"
        )
    for kind in ("remove", "replace"):
        for title, point in (("", None), (", at the cleanest point", "cleanest")):
            lines += _steering(of, kind, title, point)
    shown = [method for method in methods if method not in SUPERVISED]  # directions rebuild nothing: far below all
    points = [(mean(method, "MS-Score of many") / 100, mean(method, "R2")) for method in shown]
    marked = [number for number, method in enumerate(shown) if method.startswith("ELUDe")]
    chart = plotting.scatter(points, x=f"MS-Score of {size.many:,} scenes", y="R2", marked=marked, names=shown)
    write_file(out / "toyland-pareto.png", lambda file: chart.save(file, "PNG"))
    lines += ["", "![MS-Score against R2; ELUDe is red](toyland-pareto.png)", ""]
    write_file(out / "toyland.md", lambda file: file.write("\n".join(lines).encode()))
    text = json.dumps(list(rows), indent=1)
    write_file(out / "toyland.json", lambda file: file.write(text.encode()))
    return out / "toyland.md"
