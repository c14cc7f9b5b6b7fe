"""Whether a concept is in a photo, and where: sub-units beside other latents and the dual encoder.

    python -m demos.photoland.detectors --work WORK --json demos/results/photoland_detectors.json

WORK is the folder of `python -m demos.photoland.make`. All detectors are fitted in the same way to what the dual
encoder says of the training photos, and measured on the test photos. *Whether*: the area under the curve between photos
whose captions name a concept and photos whose captions do not. *Where*, against boxes drawn by hand on 40 test
photos (`boxes.json`): the intersection over union of the boxes and the region, and the area under the curve over the
patches of a photo, which needs no threshold. `all` fits weights to all latents, as an atlas does; `12` and `1` take the
12 latents, or the single one, that go best with a word. The whole photo, and the half of it around the centre, say
what a region is worth that knows nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from demos.benchmarks.detectors import detector_kinds, dictionaries, print_row
from demos.photoland.compare import Comparison
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.method.concept_fit import find_region, measure_presence
from elude_steer.steering.regions import Region

BOXES = Path(__file__).parent / "boxes.json"
FIT = 0.4  # the default of the setting; the shipped atlas edits whole photos
LEAST = 10  # photos that must show a concept
LARGEST = 0.8  # share of a photo; what fills more has no place in it


@dataclass(frozen=True, eq=False)
class Truth:
    """What is in the test photos.

    Attributes:
        words: the concepts that are measured.
        shows: `(photos, words)` 1 where captions name the concept, 0 where none does, -1 where it is not known.
        boxed: the patches that show a concept, `(patches,)` bool, by the numbers of photo and word.
    """

    words: tuple[str, ...]
    shows: np.ndarray
    boxed: Mapping[tuple[int, int], np.ndarray]

    @classmethod
    def read(cls, comparison: Comparison, vocabulary: Sequence[str]) -> Truth:
        """The truth of all test photos, from their captions and from the boxes."""
        test = comparison.work / "photos" / "test"
        cases = {Path(case.source).name: case for case in photo_world(test, min_concepts=0).cases}
        names = [Path(item.id).name for item in comparison.held_out.items]
        boxes = json.loads(BOXES.read_text(encoding="utf-8"))["photos"]
        concepts = sorted({concept for case in cases.values() for concept in case.objects} & set(vocabulary))
        rows = [[_shows(cases[name], concept) for concept in concepts] for name in names]
        shows = np.array(rows)
        kept = (shows == 1).sum(0) >= LEAST
        words = tuple(concept for concept, keep in zip(concepts, kept, strict=True) if keep)
        boxed = {}
        for photo, name in enumerate(names):
            for concept, found in boxes.get(name, {"concepts": {}})["concepts"].items():
                if concept in words:
                    size = tuple(boxes[name]["size"])
                    grid = comparison.vlm.grid(size).boxes
                    covered = [Region(box=tuple(box)).covered_patches(grid, size) for box in found]
                    there = np.logical_or.reduce(covered).reshape(-1)
                    if there.mean() <= LARGEST:
                        boxed[photo, words.index(concept)] = there
        return cls(words, shows[:, kept], boxed)

    def areas(self, scores: np.ndarray) -> dict[str, Any]:
        """The area under the curve of every concept, and their mean; `scores` is `(photos, words)`."""
        found = {}
        for number, word in enumerate(self.words):
            known = self.shows[:, number] >= 0
            found[word] = float(roc_auc_score(self.shows[known, number], scores[known, number]))
        return {"auc": float(np.mean(list(found.values()))), "words": {word: round(v, 4) for word, v in found.items()}}

    def overlaps(self, readings: Mapping[int, np.ndarray]) -> dict[str, float]:
        """How well regions match the boxes; `readings` are `(patches, words)` of the photos with boxes."""
        overlaps, patches = [], []
        for (photo, number), there in self.boxed.items():
            values = readings[photo][:, number]
            region = find_region(torch.from_numpy(values), FIT).numpy()
            overlaps.append((region & there).sum() / (region | there).sum())
            patches.append(roc_auc_score(there, values))
        return {"iou": float(np.mean(overlaps)), "patches": float(np.mean(patches))}


def _shows(case: Any, concept: str) -> int:
    if concept in case.objects:
        return 1
    return -1 if concept in case.possible else 0


def measure(dictionary: Dictionary, comparison: Comparison, truth: Truth, words: torch.Tensor) -> dict[str, Any]:
    """The areas under the curve and the overlaps of a dictionary's detectors."""
    presence = measure_presence(torch.from_numpy(np.array(comparison.probing.vectors)).float() @ words.T)
    means = torch.stack([dictionary.read(q).mean(0) for q in comparison.probing.layer_inputs()]).double()
    kinds, with_boxes = detector_kinds(means, presence), {photo for photo, _ in truth.boxed}
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in kinds}
    shown: dict[str, dict[int, np.ndarray]] = {name: {} for name in kinds}
    rows, columns = comparison.vlm.patch_shape or (1, 1)
    for photo, q in enumerate(comparison.held_out.layer_inputs()):
        latents = dictionary.read(q[-rows * columns :])  # without CLS, as an edit reads them
        for name, (weights, bias) in kinds.items():
            readings = latents @ weights.float().T + bias.float()
            scores[name].append(readings.mean(0))  # as an atlas does whose regions are whole images
            if photo in with_boxes:
                shown[name][photo] = readings.numpy()
    return {name: {**truth.areas(torch.stack(scores[name]).numpy()), **truth.overlaps(shown[name])} for name in kinds}


def blind_regions(truth: Truth, side: int) -> dict[str, Any]:
    """What regions are worth that know nothing: the whole photo, and the half around its centre."""
    rows, columns = np.indices((side, side))
    distance = np.maximum(abs(rows - (side - 1) / 2), abs(columns - (side - 1) / 2)).reshape(-1)
    centre = distance <= np.median(distance)
    pairs = {"whole photo": np.ones(side * side, dtype=bool), "centre": centre}
    found: dict[str, Any] = {}
    for name, region in pairs.items():
        overlaps = [(region & there).sum() / (region | there).sum() for there in truth.boxed.values()]
        patches = [roc_auc_score(there, region) for there in truth.boxed.values()]
        found[name] = {"all": {"auc": 0.5, "iou": float(np.mean(overlaps)), "patches": float(np.mean(patches))}}
    return found


@torch.inference_mode()
def run(work: Path) -> dict[str, Any]:
    """Measure all detectors."""
    comparison, atlas = Comparison(work, "photoland/captioner"), Atlas.load("photoland")
    vocabulary = comparison.vocabulary
    truth = Truth.read(comparison, vocabulary.words)
    words = torch.stack([vocabulary.vectors[vocabulary.words.index(word)] for word in truth.words]).float()
    found = dictionaries(comparison.vlm, atlas)
    with torch.inference_mode(mode=False):
        found["TopK SAE"] = comparison.dictionary("TopK SAE", "small")
    rows: dict[str, Any] = {}
    for name, dictionary in found.items():
        rows[name] = measure(dictionary, comparison, truth, words)
        print_row(name, rows[name])
    similarities = np.array(comparison.held_out.vectors) @ words.numpy().T
    rows["dual encoder"] = {"all": {**truth.areas(similarities), "iou": None}}
    rows.update(blind_regions(truth, round(len(next(iter(truth.boxed.values()))) ** 0.5)))
    for name in ("dual encoder", "whole photo", "centre"):
        print_row(name, rows[name])
    counts = {"concepts": len(truth.words), "regions": len(truth.boxed), "photos": len({p for p, _ in truth.boxed})}
    return {"counts": counts, "rows": rows}


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of `python -m demos.photoland.make`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.work)
    print(json.dumps(found["counts"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
