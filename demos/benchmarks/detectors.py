"""Whether a concept is in a scene, and where: sub-units beside raw units, a random split and the dual encoder.

    python demos/benchmarks/detectors.py --work FOLDER --json demos/results/detectors.json

All detectors are fitted in the same way to the same scenes (those of the shipped atlas) and measured on other ones:
the area under the curve over scenes with and without each concept, and the mean intersection over union of the region
and the patches that show the concept. `all` fits weights to all latents, as an atlas does; `12` and `1` take the mean
of the 12 latents, or the single one, that go best with a word. The dual encoder says nothing about patches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.baselines.splits import from_atlas, from_members, raw_units
from elude_steer.evaluation.compare.labelling import Vocabulary
from elude_steer.evaluation.compare.scene_activations import SceneActivations
from elude_steer.method.concept_fit import Presence, find_region, fit_detectors, measure_presence, strongest_mean
from elude_steer.method.splitting import random_memberships
from elude_steer.models.vlm import Vlm

FIT_SEED, SEED = 31, 7301  # scenes of the shipped atlas; fresh ones
WORDS = (*toyland.OBJECTS, *toyland.PLACES)


def dictionaries(vlm: Vlm, atlas: Atlas) -> dict[str, Dictionary]:
    """Sub-units, raw units, and units split at random into as many parts."""
    counts = torch.bincount(atlas.units, minlength=atlas.d_out)
    members = [random_memberships(int(count), atlas.d_in, 42_000_126 + unit) for unit, count in enumerate(counts)]
    units = torch.repeat_interleave(torch.arange(atlas.d_out), counts)
    return {
        "ELUDe": from_atlas("ELUDe", vlm.layer, atlas),
        "raw units": raw_units("raw units", vlm.layer),
        "random split": from_members("random split", vlm.layer, torch.cat(members), units),
    }


def best_latents(means: torch.Tensor, presence: Presence, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and biases of detectors that take the mean of the few latents that go best with a word."""
    scaled = (means - means.mean(0)) / means.std(0).clamp_min(1e-9)
    fit = scaled.T @ (presence.degree.double() - presence.degree.double().mean(0))  # (S, W)
    weights = torch.zeros_like(fit)
    top = fit.topk(count, dim=0).indices
    weights.scatter_(0, top, (1 / means.std(0).clamp_min(1e-9) / count)[:, None].expand_as(fit).gather(0, top))
    readings = means @ weights
    base = torch.stack([column[mask].median() for column, mask in zip(readings.T, presence.lacks.T, strict=True)])
    return weights.T, -base


def measure(
    dictionary: Dictionary, fitted: SceneActivations, held_out: SceneActivations, words: torch.Tensor, fit: float
) -> dict[str, Any]:
    """The areas under the curve and the intersections over union of a dictionary's detectors."""
    presence = measure_presence(torch.from_numpy(np.array(fitted.vectors)).float() @ words.T)
    means = torch.stack([dictionary.read(q).mean(0) for q in fitted.layer_inputs()]).double()
    kinds = {"all": fit_detectors(means, presence), **{str(n): best_latents(means, presence, n) for n in (12, 1)}}
    found: dict[str, Any] = {}
    for name, (weights, bias) in kinds.items():
        scores, overlaps = [], []
        for q, shown in zip(held_out.layer_inputs(), held_out.shown_by_image(), strict=True):
            readings = dictionary.read(q) @ weights.float().T + bias.float()
            scores.append(strongest_mean(readings))
            region = find_region(readings, fit).numpy()
            for number, word in enumerate(WORDS):
                there = shown == word
                if there.any():
                    overlaps.append((region[:, number] & there).sum() / (region[:, number] | there).sum())
        found[name] = {"auc": area(torch.stack(scores).numpy(), held_out), "iou": float(np.mean(overlaps))}
    return found


def area(scores: np.ndarray, held_out: SceneActivations) -> float:
    """The mean area under the curve over the words."""
    shown = [set(names.tolist()) for names in held_out.shown_by_image()]
    areas = []
    for number, word in enumerate(WORDS):
        truth = np.array([word in names for names in shown])
        if truth.any() and not truth.all():
            areas.append(roc_auc_score(truth, scores[:, number]))
    return float(np.mean(areas))


@torch.inference_mode()
def run(work: Path, scenes: int, count: int) -> Mapping[str, Any]:
    """Measure all detectors."""
    atlas = Atlas.load("toyland")
    vlm = Vlm.load("toyland/captioner", layer=atlas.about["layer"])
    vocabulary = Vocabulary.load(atlas.about["spec"])
    work.mkdir(parents=True, exist_ok=True)
    fitted = SceneActivations.prepare(vlm, vocabulary.encoder, FIT_SEED, scenes, work)
    held_out = SceneActivations.prepare(vlm, vocabulary.encoder, SEED, count, work)
    words = torch.stack([vocabulary.vectors[vocabulary.words.index(word)] for word in WORDS]).float()
    fit = float(atlas.require_calibration().fit)
    rows: dict[str, Any] = {}
    for name, dictionary in dictionaries(vlm, atlas).items():
        rows[name] = measure(dictionary, fitted, held_out, words, fit)
        print(name, json.dumps(rows[name]), flush=True)
    similarities = np.array(held_out.vectors) @ words.numpy().T
    rows["dual encoder"] = {"all": {"auc": area(similarities, held_out), "iou": None}}
    print("dual encoder", json.dumps(rows["dual encoder"]))
    return rows


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the activations of scenes")
    parser.add_argument("--fitted", type=int, default=3000, help="scenes to fit detectors to")
    parser.add_argument("--scenes", type=int, default=1000, help="scenes to measure on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(options.work, options.fitted, options.scenes)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
