"""The paper's tables for toyland's tower on scenes.

    python -m demos.toyland.tables --work WORK --out demos/results
    python -m demos.toyland.tables --page-only --out demos/results

All methods on the last layer of the captioner's vision tower from three draws of tokens, their stability and
properties, and some of them on two layers before it. It is `elude-steer reproduce` with toyland's tower in place of the
paper's backbones; see demos/guides/reproduce.md. A scene's class, for the accuracy and for DPCiCNN, is its first
object.

Rows are files below WORK: an interrupted run continues. `--out` writes them as JSON and as a page; the second command
writes the page anew from the JSON file. What the page says about its numbers stands in tables.txt beside this script:
read it again when the numbers change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.reproduce.experiment import Experiment
from elude_steer.evaluation.reproduce.forecast import format_time
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.run import reproduce
from elude_steer.evaluation.tables.report import page_lines, read_rows, table_lines, write_tables
from elude_steer.evaluation.tables.run import TableRow, rows_as_json, run_table
from elude_steer.evaluation.tables.stability import run_stability

# Layer -> the table of `reproduce` that its rows are of, and the backbone whose place it takes there.
LAYERS = {
    5: ("interpretability", "dinov2-base-layer12"),
    4: ("generalization", "dinov2-base-layer11"),
    3: ("generalization", "dinov2-base-layer10"),
}
LAST = 5
NAME, JUDGED = "toyland_tables", "stand-in judge"
PROSE = Path(__file__).with_name("tables.txt")
ABOUT = (
    "Scenes of toyland, by the command `reproduce`, which knows the backbone as dinov2-base-layer12, whose place it "
    "takes. A scene's class is its first object; the accuracy is that of a linear probe on the mean of the tower's "
    "last stream. What a setting of the clustering is worth: [ablations](ablations.md)."
)


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


def write_page(found: dict[int, tuple[list[TableRow], TableResult]], given: argparse.Namespace) -> Path:
    """The page and the JSON file of all layers that are there; a stand-in's judgements in the file are kept."""
    experiment, path = make_experiment(LAST, given), given.out / f"{NAME}.json"
    (backbone,) = experiment.backbones
    setup, (rows, result) = experiment.setup(backbone), found[LAST]
    kept = {name: value for name, value in (_read(path) if path.exists() else {}).items() if name == JUDGED}
    stable = run_stability(setup, experiment.methods(backbone))
    write_tables(setup, given.out, rows, stable, result.properties[backbone], name=NAME)
    others = {str(layer): rows_as_json(found[layer][0]) for layer in found if layer != LAST}
    hours = {str(layer): dict(found[layer][1].hours) for layer in found}
    content = {**_read(path), "other layers": others, "hours": hours, **kept}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return write_page_from_json(given.out)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write_page_from_json(out: Path) -> Path:
    """The page of a JSON file that is there, with what is written by hand about its numbers."""
    content, prose = _read(out / f"{NAME}.json"), read_prose()
    about = ["", ABOUT, "", "## What it shows", "", prose["What it shows"]]
    lines = page_lines({**content, "backbone": "toyland"}, about=about)
    lines += ["## Other layers", ""] if content["other layers"] else []
    for layer, rows in content["other layers"].items():
        own = table_lines(read_rows(TableRow, rows))
        lines += [f"Layer `layers.{layer}.mlp.fc2`, one draw of tokens:", "", *own, ""]
    if JUDGED in content:
        lines += ["## Judges: a stand-in, no vision-language model", "", prose["Judges"], "", *judge_lines(content), ""]
    lines += ["## Predicted and measured", ""]
    lines += [hours_line(layer, hours) for layer, hours in content["hours"].items()]
    measured = 3600 * sum(hours["measured"] for hours in content["hours"].values())
    lines += [
        "",
        prose["Predicted and measured"],
        "",
        f"{made_by(content)}, in {format_time(measured)} of one core.",
        "",
    ]
    path = out / f"{NAME}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read_prose() -> dict[str, str]:
    """The paragraphs of tables.txt by their headings."""
    parts = PROSE.read_text(encoding="utf-8").split("## ")[1:]
    return {heading: text.strip() for heading, _, text in (part.partition("\n") for part in parts)}


def hours_line(layer: str, hours: Mapping[str, Any]) -> str:
    """What a layer took, predicted and measured."""
    predicted, measured = 3600 * hours["predicted"], 3600 * hours["measured"]
    return (
        f"- layer {layer}: predicted {format_time(predicted)} of one core, measured {format_time(measured)}, a factor "
        f"of {max(predicted, measured) / max(1e-9, min(predicted, measured)):.2f}."
    )


def judge_lines(content: Mapping[str, Any]) -> list[str]:
    """The table of the stand-in's judgements."""
    heads = ["| method | win rate (%) | width of the 95 % interval |", "|---|---|---|"]
    rows = content[JUDGED]["rows"]
    return heads + [f"| {row['method']} | {row['value']:.0f} | {row['deviation']:.0f} |" for row in rows]


def made_by(content: Mapping[str, Any]) -> str:
    """The command of these sizes."""
    sizes = f"--build {content['images']} --measure {content['held out']} --per-image {content['tokens']['per_image']}"
    clusters = f"--top-k {content['clusters']['top_k']} --smallest {content['clusters']['min_cluster_size']}"
    return f"Made by `python -m demos.toyland.tables {sizes} {clusters} --work WORK --out demos/results`"


def main() -> None:
    """Make all rows, layer by layer; with --out also the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of everything that is made")
    parser.add_argument("--page-only", action="store_true", help="write the page from the JSON file in --out")
    parser.add_argument("--build", type=int, default=600, help="scenes to learn from")
    parser.add_argument("--measure", type=int, default=250, help="scenes to measure on")
    parser.add_argument("--per-image", type=int, default=48, help="tokens of a scene")
    parser.add_argument("--top-k", type=int, default=1500, help="instances of a unit")
    parser.add_argument("--smallest", type=int, default=15, help="instances of the smallest cluster")
    parser.add_argument("--layer", action="append", type=int, choices=tuple(LAYERS), help="only this layer")
    parser.add_argument("--out", type=Path, help="folder for the page and its JSON file; needs the last layer")
    given = parser.parse_args()
    if given.page_only:
        if given.out is None:
            parser.error("--page-only needs --out FOLDER, where the JSON file is")
        print(write_page_from_json(given.out))
        return
    if given.work is None:
        parser.error("--work is missing")
    found = {layer: run(make_experiment(layer, given)) for layer in given.layer or LAYERS}
    if given.out and LAST in found:
        print(write_page(found, given))


if __name__ == "__main__":
    main()
