"""The paper's table for photoland's tower on photographs.

    python -m demos.photoland.tables --photos PHOTOS --work WORK --out demos/results

All methods on a DINOv2-S, the layer of the shipped atlas, from three draws of tokens. PHOTOS holds `train` and `test`
with Flickr8k's photos and captions, as `python -m demos.photoland.make` leaves them in its work folder. A photo's
class, for the accuracy and for DPCiCNN, is the rarest concept that its captions agree on, of those that enough photos
show.

Rows are files below WORK: an interrupted run continues. `--out` writes them as JSON and as a page.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.tables.efficiency import Protocol, run_efficiency
from elude_steer.evaluation.tables.properties import run_properties
from elude_steer.evaluation.tables.report import write_tables
from elude_steer.evaluation.tables.run import TableRow, run_table
from elude_steer.evaluation.tables.setup import SMALL, TableSetup
from elude_steer.evaluation.tables.stability import StabilityRow, run_stability
from elude_steer.models.images import find_images
from elude_steer.recipe_files import load_spec

SPEC = Path(__file__).parent / "atlas.yaml"
TIMED = Protocol(batch=8, warm_up=3, runs=15, compiled=False, statistic="median", alternate=True, clock="process")
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
    counts = Counter(setup.classes.values()) if setup.classes else Counter()
    about = [
        "",
        f"Photographs of Flickr8k. A photo's class is the rarest of {len(counts)} concepts that its captions agree on; "
        "the accuracy is that of a linear probe on the mean of the tower's last stream. Times are of the process, on a "
        f"CPU that others share: {TIMED.runs} passes of {TIMED.batch} photos, in turns.",
    ]
    return write_tables(setup, out, rows, stable, properties, efficiency, name="photoland_tables", about=about)


def main() -> None:
    """Make all rows, seed by seed, then the stability; with --out also properties, times and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder with train and test")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--build", type=int, default=1000, help="photos to learn from")
    parser.add_argument("--measure", type=int, default=500, help="photos to measure on")
    parser.add_argument("--top-k", type=int, default=1000, help="instances of a unit")
    parser.add_argument("--smallest", type=int, default=10, help="instances of the smallest cluster")
    parser.add_argument("--method", action="append", choices=tuple(METHODS), help="only this method")
    parser.add_argument("--seed", action="append", type=int, help="only this draw of tokens")
    parser.add_argument("--out", type=Path, help="folder for the page and its JSON file")
    options = parser.parse_args()
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
