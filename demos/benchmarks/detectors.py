"""Whether a concept is in a scene, and where: sub-units beside other latents and the dual encoder.

    python demos/benchmarks/detectors.py --work FOLDER --json demos/results/detectors.json

All detectors are fitted in the same way to the same scenes (those of the shipped atlas) and measured on other ones:
the area under the curve over scenes with and without each concept, and the mean intersection over union of the region
and the patches that show the concept. `all` fits weights to all latents, as an atlas does; `12` and `1` take the mean
of the 12 latents, or the single one, that go best with a word. The dual encoder says nothing about patches. Areas of
every word are in the JSON file. `python -m demos.photoland.detectors` does the same on photographs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.baselines.sae import SaeSpec, from_sae, train_sae, try_settings
from elude_steer.evaluation.baselines.splits import from_atlas, from_members, raw_units
from elude_steer.evaluation.compare.labelling import Vocabulary
from elude_steer.evaluation.compare.scene_activations import SceneActivations
from elude_steer.method.concept_fit import Presence, find_region, fit_detectors, measure_presence, strongest_mean
from elude_steer.method.splitting import random_memberships
from elude_steer.models.vlm import Vlm

FIT_SEED, SEED = 31, 7301  # scenes of the shipped atlas; fresh ones
TOKENS = 20  # of each scene, that an autoencoder learns from
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


def top_k_autoencoder(vlm: Vlm, atlas: Atlas, fitted: SceneActivations) -> Dictionary:
    """A TopK autoencoder of the layer's outputs, with as many latents as there are sub-units."""
    rng = np.random.default_rng(42)
    chosen = [q[rng.choice(len(q), min(TOKENS, len(q)), replace=False)] for q in fitted.layer_inputs()]
    outputs = vlm.layer(torch.cat(chosen)).clone()
    spec = SaeSpec("topk", len(atlas), epochs=12, batch_size=1024, seed=42)
    with torch.inference_mode(mode=False):
        tokens = outputs.clone()
        sae = train_sae(replace(spec, **try_settings(spec, tokens, (5e-4, 2e-3, 5e-3))), tokens)
    return from_sae("TopK SAE", sae, vlm.layer)


def detector_kinds(means: torch.Tensor, presence: Presence) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Detectors of all latents, of the 12 that go best with a word, and of the single best one."""
    few = {str(count): best_latents(means, presence, count) for count in (12, 1)}
    return {"all": fit_detectors(means, presence), **few}


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
    found: dict[str, Any] = {}
    for name, (weights, bias) in detector_kinds(means, presence).items():
        scores, overlaps = [], []
        for q, shown in zip(held_out.layer_inputs(), held_out.shown_by_image(), strict=True):
            readings = dictionary.read(q) @ weights.float().T + bias.float()
            scores.append(strongest_mean(readings, max(3, len(readings) // 20)))
            region = find_region(readings, fit).numpy()
            for number, word in enumerate(WORDS):
                there = shown == word
                if there.any():
                    overlaps.append((region[:, number] & there).sum() / (region[:, number] | there).sum())
        found[name] = {**areas(torch.stack(scores).numpy(), held_out), "iou": float(np.mean(overlaps))}
    return found


def areas(scores: np.ndarray, held_out: SceneActivations) -> dict[str, Any]:
    """The area under the curve of every word, and their mean."""
    shown = [set(names.tolist()) for names in held_out.shown_by_image()]
    found = {}
    for number, word in enumerate(WORDS):
        truth = np.array([word in names for names in shown])
        if truth.any() and not truth.all():
            found[word] = float(roc_auc_score(truth, scores[:, number]))
    return {
        "auc": float(np.mean(list(found.values()))),
        "words": {word: round(area, 4) for word, area in found.items()},
    }


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
    for name, dictionary in {**dictionaries(vlm, atlas), "TopK SAE": top_k_autoencoder(vlm, atlas, fitted)}.items():
        rows[name] = measure(dictionary, fitted, held_out, words, fit)
        print_row(name, rows[name])
    similarities = np.array(held_out.vectors) @ words.numpy().T
    rows["dual encoder"] = {"all": {**areas(similarities, held_out), "iou": None}}
    print_row("dual encoder", rows["dual encoder"])
    return rows


def print_row(name: str, row: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the areas and overlaps of a row, for each kind of detector."""
    cells = [
        f"{kind}: " + " ".join(f"{key} {value:.3f}" for key, value in found.items() if isinstance(value, float))
        for kind, found in row.items()
    ]
    print(f"{name:14}", "; ".join(cells), flush=True)


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
