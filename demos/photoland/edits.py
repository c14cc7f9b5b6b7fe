"""How well `place` edits Flickr8k's test photos, and which part of it does what: `python -m demos.photoland.edits`.

    python -m demos.photoland.edits --work WORK --json demos/results/photoland_edits.json

WORK is the folder of `python -m demos.photoland.make`. Rows: the atlas as shipped; the paper's mode (`scale`); without
the gate that leaves out words that are not seen; and with parts of `place` exchanged: its directions by supervised
differences of means (which images show a word is taken from their captions), its detectors by those of raw units, of a
random split, of a TopK autoencoder, or by the dual encoder's word on whether a concept is there. Each row does all
kinds of edits on the same photos. Settings were chosen on development photos.

A stronger edit does more and keeps less, so two kinds of directions are compared where they keep the same: the rows of
other strengths give both curves, and the last lines say what supervised directions do at the shares that the shipped
ones keep.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demos.benchmarks.detectors import dictionaries
from demos.photoland.compare import Comparison
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.baselines.dictionary import Levels, NamedDictionary
from elude_steer.evaluation.compare.labelling import calibrate_dictionary
from elude_steer.evaluation.edits.benchmark import Score, Task, caption_baselines, make_tasks, run_edits, summarize
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.edits.sweep import plan_or_empty
from elude_steer.method.concept_fit import measure_presence
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer

KINDS = ("remove", "replace", "absent")
COLUMNS = ("success", "kept", "invented", "clean")
SHIPPED, SUPERVISED = "as shipped", "supervised directions"
STRENGTHS = (1.0, 1.5, 2.0, 4.0)  # beside that of the atlas


def with_detectors_of(name: str, steerer: Steerer[Atlas], comparison: Comparison) -> Steerer[Any]:
    """A steerer whose detectors and directions come from other latents."""
    atlas, found = steerer.atlas, dictionaries(steerer.vlm, steerer.atlas)
    dictionary = found[name] if name in found else comparison.dictionary(name, "small")
    fit = float(atlas.require_calibration().fit)
    calibration = calibrate_dictionary(dictionary, comparison.probing, comparison.vocabulary, fit)
    labels = replace(atlas.require_labels(), words=np.zeros((len(dictionary), 1), np.int32))
    levels = Levels(torch.ones(len(dictionary)))
    latents = NamedDictionary(dictionary, labels, levels, calibration, atlas.about)
    return Steerer(steerer.vlm, latents, steerer.matcher)


def with_true_directions(steerer: Steerer[Atlas], comparison: Comparison) -> Steerer[Atlas]:
    """A steerer with supervised directions: the mean stream of photos that show a concept minus that of the others.

    They are as long as the shipped ones, so that a strength means the same.
    """
    atlas, calibration = steerer.atlas, steerer.atlas.require_calibration()
    world = photo_world(comparison.work / "photos" / "train", min_concepts=0)
    truth = {Path(case.source).name: case for case in world.cases}
    streams = torch.stack([stream.mean(0) for _, stream in comparison.probing.activations()])
    names = [Path(item.id).name for item in comparison.probing.items]
    directions, vocabulary = calibration.directions.float().clone(), atlas.require_labels().vocabulary
    for row, word in enumerate(calibration.words.tolist()):
        concept = vocabulary[word]
        shows = torch.tensor([concept in truth[name].objects for name in names])
        lacks = torch.tensor([concept not in truth[name].objects | truth[name].possible for name in names])
        if shows.any():
            found = streams[shows].mean(0) - streams[lacks].mean(0)
            directions[row] = found * (directions[row].norm() / found.norm())
    return replace(steerer, atlas=replace(atlas, calibration=replace(calibration, directions=directions)))


class EncoderGate:
    """Leaves out words that the dual encoder does not see in a photo.

    Args:
        comparison: gives the dual encoder, the words and the training photos.
        share: the presence from which a word counts as seen.
    """

    def __init__(self, comparison: Comparison, share: float) -> None:
        vocabulary, probing = comparison.vocabulary, comparison.probing
        self.vocabulary, self.share = vocabulary, share
        similarities = torch.from_numpy(np.array(probing.vectors)).float() @ vocabulary.vectors.float().T
        presence = measure_presence(similarities)
        pairs = zip(similarities.T, presence.lacks.T, presence.shows.T, strict=True)
        self.levels = [(float(c[lacks].median()), float(c[shows].median())) for c, lacks, shows in pairs]

    def sees(self, image: Any, word: str) -> bool:
        """Whether the word is in the image."""
        number = self.vocabulary.words.index(word)
        similarity = float(self.vocabulary.encoder.embed_images([image])[0].float() @ self.vocabulary.vectors[number])
        low, high = self.levels[number]
        return (similarity - low) / (high - low) >= self.share


def at_same_kept(rows: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What supervised directions do at the shares that the shipped ones keep, between the strengths that were tried.

    Strengths at which the shipped directions keep more or less than all of the supervised rows are left out.
    """
    curve = sorted((r["kept"], r["success"]) for r in rows if r["row"].startswith(SUPERVISED) and r["kind"] == kind)
    found = []
    for own in (row for row in rows if row["row"].startswith(SHIPPED) and row["kind"] == kind):
        if curve[0][0] <= own["kept"] <= curve[-1][0]:
            done = float(np.interp(own["kept"], *zip(*curve, strict=True)))
            values = {"kept": own["kept"], "shipped": own["success"], "supervised": done}
            found.append({"kind": kind, "row": own["row"], **values})
    return found


@torch.inference_mode()
def run(work: Path, count: int, split: str) -> dict[str, Any]:
    """Measure all rows."""
    comparison, shipped = Comparison(work, "photoland/captioner"), Steerer.load("photoland")
    world = photo_world(work / "photos" / split, limit=count)
    baselines = caption_baselines(shipped, world)
    tasks = {kind: make_tasks(world, baselines, kind) for kind in KINDS}  # type: ignore[arg-type]
    gate = EncoderGate(comparison, float(shipped.defaults["seen"]))

    def ask_encoder(steerer: Steerer[Any], task: Task) -> Plan:
        seen = gate.sees(world.cases[task.case].image, task.minus)
        return plan_or_empty(steerer, task, {"force": True}) if seen else Plan()

    def row(steerer: Steerer[Any], **settings: Any) -> tuple[Steerer[Any], Callable[[Task], Plan]]:
        return steerer, lambda task: plan_or_empty(steerer, task, settings)

    supervised = with_true_directions(shipped, comparison)
    rows: dict[str, Callable[[], tuple[Steerer[Any], Callable[[Task], Plan]]]] = {
        SHIPPED: lambda: row(shipped),
        SUPERVISED: lambda: row(supervised),
        "no gate": lambda: row(shipped, force=True),
        "no gate, supervised directions": lambda: row(supervised, force=True),
        "gate by the dual encoder": lambda: (shipped, lambda task: ask_encoder(shipped, task)),
        "scale (the paper's mode)": lambda: row(shipped, mode="scale", gamma=-20, alpha=20, kappa=8),
        "detectors of raw units": lambda: row(with_detectors_of("raw units", shipped, comparison)),
        "detectors of a TopK SAE": lambda: row(with_detectors_of("TopK SAE", shipped, comparison)),
        "detectors of a random split": lambda: row(with_detectors_of("random split", shipped, comparison)),
    }
    for strength in STRENGTHS:
        rows[f"{SHIPPED}, strength {strength:g}"] = lambda s=strength: row(shipped, strength=s)  # type: ignore[misc]
        rows[f"{SUPERVISED}, strength {strength:g}"] = lambda s=strength: row(supervised, strength=s)  # type: ignore[misc]
    found: list[dict[str, Any]] = []
    for name, make in rows.items():
        steerer, make_plan = make()
        for kind in KINDS if "strength" not in name else KINDS[:2]:
            score: Score = summarize(kind, run_edits(steerer, world, tasks[kind], make_plan, likelihood=False))
            found.append({"row": name, **score.to_dict()})
            cells = "".join(f"{getattr(score, column):10.3f}" for column in COLUMNS)
            print(f"{name + ', ' + kind:40}{score.edits:6}{cells}", flush=True)
    same = [one for kind in KINDS[:2] for one in at_same_kept(found, kind)]
    for one in same:
        print("at the same share kept:", json.dumps(one))
    return {"rows": found, "at the same kept": same}


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of `python -m demos.photoland.make`")
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--split", default="test", help="dev or test")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':40}{'edits':>6}{''.join(f'{name:>10}' for name in COLUMNS)}")
    found = run(options.work, options.photos, options.split)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
