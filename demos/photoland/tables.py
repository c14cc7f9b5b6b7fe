"""The paper's table for photoland's tower on photographs.

    python -m demos.photoland.tables --photos PHOTOS --work WORK --out demos/results
    python -m demos.photoland.tables --page-only --out demos/results

All methods on a DINOv2-S, the layer of the shipped atlas, from three draws of tokens. PHOTOS holds `train` and `test`
with Flickr8k's photos and captions, as `python -m demos.photoland.make` leaves them in its work folder. A photo's
class, for the accuracy and for DPCiCNN, is the rarest concept that its captions agree on, of those that enough photos
show.

Rows are files below WORK: an interrupted run continues. `--out` writes them as JSON and as a page; the second command
writes the page anew from the JSON file.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.reproduce.paper import read_table
from elude_steer.evaluation.tables.efficiency import Protocol, run_efficiency
from elude_steer.evaluation.tables.properties import run_properties
from elude_steer.evaluation.tables.report import page_lines, read_rows, write_tables
from elude_steer.evaluation.tables.run import TableRow, run_table, summarize
from elude_steer.evaluation.tables.setup import SMALL, TableSetup
from elude_steer.evaluation.tables.stability import StabilityRow, run_stability
from elude_steer.models.images import find_images
from elude_steer.recipe_files import load_spec

SPEC = Path(__file__).parent / "atlas.yaml"
TIMED = Protocol(batch=8, warm_up=3, runs=15, compiled=False, statistic="median", alternate=True, clock="process")
NAME = "photoland_tables"
PAPER_BACKBONE = "dinov2-small-layer12"  # of which this tower is a copy, fine-tuned
MEASURES = {"MS-Score": 1, "R2": 100, "accuracy": 100}  # that the paper has, and what ours are multiplied by
BESIDE = (
    "The paper's numbers are of DINOv2-S/14, layer 12, on ImageNet. Here the layer is the one before it, of other "
    "weights, and photographs, sizes, budget and classes differ, so the differences say nothing about the paper."
)
MADE_BY = (
    "Made by `python -m demos.photoland.tables --photos PHOTOS --work WORK --out demos/results`. The budget is small: "
    "1,000 photos, nine short trials for each autoencoder. The accuracies are of a probe fitted to few photos."
)
ENOUGH = 40  # probing photos that must show a concept for it to be a class


def photo_classes(photos: Path, paths: list[Path]) -> dict[str, str]:
    """The class of each photo by the name of its file; photos without one are left out."""
    chosen, shown = {path.name for path in paths}, dict[str, frozenset[str]]()
    for split in ("train", "test"):
        world = photo_world(photos / split, min_concepts=0)
        shown |= {Path(case.source).name: case.objects for case in world.cases}
    counts = Counter(concept for name in sorted(chosen) for concept in sorted(shown.get(name, ())))
    known = {concept for concept, count in counts.items() if count >= ENOUGH}
    found = {name: sorted(concepts & known, key=lambda one: (counts[one], one)) for name, concepts in shown.items()}
    return {name: concepts[0] for name, concepts in found.items() if concepts}


def make_setup(photos: Path, work: Path, build: int, measure: int, top_k: int, smallest: int) -> TableSetup:
    """The table's backbone, photos and budget."""
    spec = load_spec(SPEC)
    spec = replace(spec, clusters=replace(spec.clusters, top_k=top_k, min_cluster_size=smallest))
    train, test = find_images(photos / "train")[:build], find_images(photos / "test")[:measure]
    return TableSetup(
        spec,
        train,
        test,
        work,
        SMALL,
        classes=photo_classes(photos, train),
        threads=1,
        log=lambda line: print(line, flush=True),
    )


def write_page(setup: TableSetup, rows: Sequence[TableRow], stable: Sequence[StabilityRow], out: Path) -> Path:
    """The page and the JSON file of all parts that are there."""
    methods = list(dict.fromkeys(row.method for row in rows))
    properties = run_properties(setup, [name for name in methods if name != "raw units"])
    timed = [name for name in methods if METHODS[name].kind in ("atlas", "sae")]
    efficiency = run_efficiency(setup, timed, protocol=TIMED)
    write_tables(setup, out, rows, stable, properties, efficiency, name=NAME)
    content = {**_read_content(out), "classes": len(set((setup.classes or {}).values()))}
    (out / f"{NAME}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return write_page_from_json(out)


def _read_content(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / f"{NAME}.json").read_text(encoding="utf-8"))
    return content


def write_page_from_json(out: Path) -> Path:
    """The page of a JSON file that is there."""
    content = _read_content(out)
    about = [
        "",
        f"Photographs of Flickr8k. A photo's class is the rarest of {content['classes']} concepts that its captions "
        "agree on; the accuracy is that of a linear probe on the mean of the tower's last stream. Times are of the "
        f"process, on a CPU that others share: {TIMED.runs} passes of {TIMED.batch} photos, in turns. The peak memory "
        "of a process that times one row after the other says nothing about methods, and is not shown.",
    ]
    timed = [{**row, "megabytes": None, "larger": None} for row in content.get("efficiency", ())]
    lines = page_lines({**content, "efficiency": timed}, about=about)
    lines += [*paper_lines(read_rows(TableRow, content["rows"])), "", MADE_BY, ""]
    path = out / f"{NAME}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def paper_lines(rows: Sequence[TableRow]) -> list[str]:
    """Our numbers beside the paper's, of the methods that it has for this backbone."""
    found, table = summarize(rows), read_table("generalization")
    heads = [head for name, scale in MEASURES.items() for head in (f"{name} (%)" if scale == 100 else name, "paper")]
    lines = [
        "## Beside the paper",
        "",
        BESIDE,
        "",
        f"| method | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for method in table.methods(PAPER_BACKBONE):
        paper, cells = table.find(PAPER_BACKBONE, method), [method]
        if paper is None or method not in found:
            continue
        for name, scale in MEASURES.items():
            theirs, deviation = paper.values[name]
            cells.append(_with_deviation(*(scale * value for value in found[method][name])))
            cells.append(_with_deviation(theirs, deviation))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _with_deviation(value: float, deviation: float | None) -> str:
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def main() -> None:
    """Make all rows, seed by seed, then the stability; with --out also properties, times and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="folder with train and test")
    parser.add_argument("--work", type=Path, help="folder of everything that is made")
    parser.add_argument("--page-only", action="store_true", help="write the page from the JSON file in --out")
    parser.add_argument("--build", type=int, default=1000, help="photos to learn from")
    parser.add_argument("--measure", type=int, default=500, help="photos to measure on")
    parser.add_argument("--top-k", type=int, default=1000, help="instances of a unit")
    parser.add_argument("--smallest", type=int, default=10, help="instances of the smallest cluster")
    parser.add_argument("--method", action="append", choices=tuple(METHODS), help="only this method")
    parser.add_argument("--seed", action="append", type=int, help="only this draw of tokens")
    parser.add_argument("--out", type=Path, help="folder for the page and its JSON file")
    options = parser.parse_args()
    if options.page_only:
        if options.out is None:
            parser.error("--page-only needs --out FOLDER, where the JSON file is")
        print(write_page_from_json(options.out))
        return
    if options.photos is None or options.work is None:
        parser.error("--photos and --work are missing")
    torch.set_num_threads(1)
    sizes = (options.build, options.measure, options.top_k, options.smallest)
    setup = make_setup(options.photos, options.work, *sizes)
    rows: list[TableRow] = []
    for seed in options.seed or setup.preset.seeds:
        rows += run_table(setup, options.method, [seed], on_row=lambda row: print(json.dumps(asdict(row)), flush=True))
    stable = run_stability(setup, options.method)
    for row in stable:
        print(json.dumps(asdict(row)), flush=True)
    if options.out:
        print(write_page(setup, rows, stable, options.out))


if __name__ == "__main__":
    main()
