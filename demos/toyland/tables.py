"""The paper's tables for toyland's tower on scenes.

    python -m demos.toyland.tables --work WORK --out demos/results

All methods on the last layer of the captioner's vision tower from three draws of tokens, their stability and
properties, and some of them on two layers before it. It is `elude-steer reproduce` with toyland's tower in place of the
paper's backbones; see demos/guides/reproduce.md. A scene's class, for the accuracy and for DPCiCNN, is its first
object.

Rows are files below WORK: an interrupted run continues. `--out` writes them as JSON and as a page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.reproduce.experiment import Experiment
from elude_steer.evaluation.reproduce.forecast import format_time
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.run import reproduce
from elude_steer.evaluation.tables.report import table_lines, write_tables
from elude_steer.evaluation.tables.run import TableRow, rows_as_json, run_table
from elude_steer.evaluation.tables.stability import run_stability

# Layer -> the table of `reproduce` that its rows are of, and the backbone whose place it takes there.
LAYERS = {
    5: ("interpretability", "dinov2-base-layer12"),
    4: ("generalization", "dinov2-base-layer11"),
    3: ("generalization", "dinov2-base-layer10"),
}
LAST = 5


def make_experiment(layer: int, given: argparse.Namespace) -> Experiment:
    """The table of one layer."""
    name, backbone = LAYERS[layer]
    changes = (
        "model.kind=vlm",
        f"tokens.per_image={given.per_image}",
        f"clusters.top_k={given.top_k}",
        f"clusters.min_cluster_size={given.smallest}",
        f"model.layer=layers.{layer}.mlp.fc2",
    )
    rows = tuple(name for name, method in METHODS.items() if method.kind != "means") if layer == LAST else ()
    options = ReproduceOptions(
        "toyland:31",
        "toyland:77001",
        given.work,
        rows=rows,
        backbones={backbone: "toyland/captioner"},
        seeds=() if layer == LAST else (42,),
        limit=given.build,
        held_out_limit=given.measure,
        preset="small",
        changes=changes,
        threads=1,
        log=lambda line: print(line, flush=True),
    )
    return Experiment(name, options)


def run(experiment: Experiment) -> tuple[list[TableRow], TableResult]:
    """All rows of a layer, and what `reproduce` makes of them."""
    result = reproduce(experiment.name, experiment.options)
    if not isinstance(result, TableResult):
        raise TypeError("a table was expected.")
    (backbone,) = experiment.backbones
    return run_table(experiment.setup(backbone), experiment.methods(backbone), experiment.seeds), result


def hours_line(result: TableResult, layer: int) -> str:
    """What a layer took, predicted and measured."""
    pieces = [piece for name, piece in result.hours["pieces"].items() if name.startswith(f"{LAYERS[layer][1]}:")]
    predicted, measured = (3600 * sum(piece[name] for piece in pieces) for name in ("predicted", "measured"))
    return (
        f"- layer {layer}: predicted {format_time(predicted)} of one core, measured {format_time(measured)}, a factor "
        f"of {max(predicted, measured) / max(1e-9, min(predicted, measured)):.2f}."
    )


def write_page(found: dict[int, tuple[list[TableRow], TableResult]], given: argparse.Namespace) -> Path:
    """The page and the JSON file of all layers that are there."""
    experiment = make_experiment(LAST, given)
    (backbone,) = experiment.backbones
    setup, (rows, result) = experiment.setup(backbone), found[LAST]
    stable = run_stability(setup, experiment.methods(backbone))
    about = [
        "",
        "Scenes of toyland, by the command `reproduce`, which knows the backbone as dinov2-base-layer12, whose place "
        "it takes. A scene's class is its first object; the accuracy is that of a linear probe on the mean of the "
        "tower's last stream. What a setting of the clustering is worth: [ablations](ablations.md).",
    ]
    page = write_tables(setup, given.out, rows, stable, result.properties[backbone], name="toyland_tables", about=about)
    content: dict[str, Any] = json.loads((given.out / "toyland_tables.json").read_text(encoding="utf-8"))
    lines = [page.read_text(encoding="utf-8")]
    others = [layer for layer in found if layer != LAST]
    lines += ["## Other layers", ""] if others else []
    for layer in others:
        lines += [f"Layer `layers.{layer}.mlp.fc2`, one draw of tokens:", "", *table_lines(found[layer][0]), ""]
    content["other layers"] = {layer: rows_as_json(found[layer][0]) for layer in others}
    lines += ["## Predicted and measured", "", *(hours_line(found[layer][1], layer) for layer in found), ""]
    content["hours"] = {layer: dict(found[layer][1].hours) for layer in found}
    page.write_text("\n".join(lines), encoding="utf-8")
    (given.out / "toyland_tables.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return page


def main() -> None:
    """Make all rows, layer by layer; with --out also the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--build", type=int, default=600, help="scenes to learn from")
    parser.add_argument("--measure", type=int, default=250, help="scenes to measure on")
    parser.add_argument("--per-image", type=int, default=48, help="tokens of a scene")
    parser.add_argument("--top-k", type=int, default=1500, help="instances of a unit")
    parser.add_argument("--smallest", type=int, default=15, help="instances of the smallest cluster")
    parser.add_argument("--layer", action="append", type=int, choices=tuple(LAYERS), help="only this layer")
    parser.add_argument("--out", type=Path, help="folder for the page and its JSON file; needs the last layer")
    given = parser.parse_args()
    found = {layer: run(make_experiment(layer, given)) for layer in given.layer or LAYERS}
    if given.out and LAST in found:
        print(write_page(found, given))


if __name__ == "__main__":
    main()
