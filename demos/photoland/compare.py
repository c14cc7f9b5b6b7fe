"""ELUDe beside other dictionaries on photographs: `python -m demos.photoland.compare --work WORK`.

Every method gets the same tokens, the same photos to be labelled with, and as many latents as ELUDe has sub-units. What
is measured on Flickr8k's test photos, which nothing was made, labelled or tuned with:

- MS-Score and R2, as in the paper, and the share of captions that stay the same when the dictionary's reconstruction
  takes the layer's place;
- *one concept*: the share of latents of whose 20 strongest photos at least 10 show the same concept, by their captions;
- *rightly named*: the share of those whose label is that concept.

Then each method removes, replaces, and removes what is absent, with the best point of one grid, chosen on development
photos. Rows are files below WORK/compare: an interrupted run continues. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import build
from elude_steer.atlas.build.stages import Build
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.atlas.build.tokens import collect_tokens
from elude_steer.evaluation.baselines.dictionary import Dictionary, NamedDictionary
from elude_steer.evaluation.baselines.sae import Sae, SaeSpec, from_sae, train_sae, try_settings
from elude_steer.evaluation.baselines.splits import from_atlas, raw_units, split_units
from elude_steer.evaluation.compare.edit_trial import EditTrial
from elude_steer.evaluation.compare.image_activations import ImageActivations
from elude_steer.evaluation.compare.labelling import Vocabulary, label_dictionary
from elude_steer.evaluation.edits.benchmark import World, make_tasks, run_edits, summarize
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.edits.sweep import best_point, plan_or_empty, sweep
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.monosemanticity import Peaks, gather_peaks, mean_percent
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.method.clip_dissect import Dissection
from elude_steer.models.images import image_set
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import read_tensors, write_tensors
from elude_steer.utils.parallel import worker_group

SPEC = Path(__file__).parent / "atlas.yaml"
# Instances of a unit and smallest cluster of each expansion; the first is that of the shipped atlas.
EXPANSIONS = {"small": (3000, 20), "large": (1500, 5)}
METHODS = ("ELUDe (gap)", "ELUDe (unique)", "raw units", "random split", "k-means", "TopK SAE", "archetypal SAE")
STEERED = ("ELUDe (gap)", "raw units", "random split", "TopK SAE")
STRONGEST, SHARED = 20, 10  # photos of a latent, and how many of them must show one concept
SEED = 42

_SCALE = {"mode": ("scale",), "kappa": (2, 8), "nu": (30, "all"), "by": ("score",)}
_PLACE = {"mode": ("place",), "strength": (0.5, 1, 2, 3), "fit": (0, 0.2, 0.4), "seen": (0.8,)}  # seen as shipped
GRIDS: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = {  # 12 points each
    ("scale", "remove"): {**_SCALE, "gamma": (-5, -20, -50)},
    ("scale", "replace"): {**_SCALE, "gamma": (-20,), "alpha": (5, 20, 50)},
    ("place", "remove"): _PLACE,
    ("place", "replace"): _PLACE,
}


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Attributes:
        work: the folder that `python -m demos.photoland.make` filled; results go below `compare` in it.
        model: id or folder of the captioner.
        dev: number of photos to choose settings on.
        test: number of photos to steer.
        labelled: number of training photos that label and calibrate every method's latents.
    """

    work: Path
    model: str
    dev: int = 60
    test: int = 300
    labelled: int = 3000

    @property
    def out(self) -> Path:
        """Where everything that is made is stored."""
        return self.work / "compare"

    @cached_property
    def vlm(self) -> Vlm:
        """The captioner with its layer."""
        return Vlm.load(self.model, layer=self.spec("small").model.layer)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words that label latents, and the labeller."""
        return Vocabulary.load(asdict(self.spec("small")))

    @cached_property
    def probing(self) -> ImageActivations:
        """The training photos that label latents."""
        return self._photos("train", self.labelled)

    @cached_property
    def held_out(self) -> ImageActivations:
        """The test photos."""
        return self._photos("test")

    def _photos(self, split: str, limit: int | None = None) -> ImageActivations:
        folder, photos = self.out / f"photos-{split}", self.work / "photos" / split
        return ImageActivations.of_folder(self.vlm, self.vocabulary.encoder, photos, folder, limit)

    @cached_property
    def world(self) -> World:
        """All test photos with what their captions name."""
        return photo_world(self.work / "photos" / "test", min_concepts=0)

    @cached_property
    def edit_trial(self) -> EditTrial:
        """The photos to choose settings on and to steer."""
        tuning = photo_world(self.work / "photos" / "dev", limit=self.dev)
        reported = photo_world(self.work / "photos" / "test", limit=self.test)
        return EditTrial(self.vlm, Atlas.load("photoland").matcher(), tuning, reported, reported, self.out)

    @cache  # noqa: B019 - there is one comparison a process
    def spec(self, expansion: str) -> AtlasSpec:
        """The spec of an expansion."""
        spec = load_spec(SPEC)
        top_k, smallest = EXPANSIONS[expansion]
        clusters = replace(spec.clusters, top_k=top_k, min_cluster_size=smallest)
        labels = replace(spec.labels, scorer=str(self.work / "models" / "labeller"))
        return replace(spec, model=replace(spec.model, id=self.model), clusters=clusters, labels=labels)

    def atlas(self, expansion: str, rule: str) -> Atlas:
        """An atlas without labels, built once; both rules share their clusters."""
        folder = self.out / f"atlas-{expansion}-{rule}"
        if not (folder / "manifest.json").exists():
            spec = self.spec(expansion)
            split, labels = replace(spec.split, winner_rule=rule), replace(spec.labels, scorer=None)  # type: ignore[arg-type]
            spec = replace(spec, split=split, labels=labels)
            build(spec, images=self.work / "photos" / "train", out=folder, work=self.out / "stages", threads=1)
        return Atlas.load(folder)

    @cached_property
    def store(self) -> TokenStore:
        """The tokens that every method learns from."""
        images = image_set(self.work / "photos" / "train", limit=self.spec("small").images.limit)
        with worker_group(None, 1) as workers:
            tokens = collect_tokens(Build(self.vlm, images, self.spec("small"), workers, self.out / "stages", False))
        return TokenStore(tokens.path)

    def dictionary(self, method: str, expansion: str) -> Dictionary:
        """The dictionary of a method."""
        layer, atlas = self.vlm.layer, self.atlas(expansion, "unique" if "unique" in method else "gap")
        if method.startswith("ELUDe"):
            return from_atlas(method, layer, atlas)
        if method == "raw units":
            return raw_units(method, layer)
        if method in ("random split", "k-means"):
            split = "random" if method == "random split" else "pure"
            return split_units(method, split, layer, self.store, atlas, seed=SEED)  # type: ignore[arg-type]
        return from_sae(method, self.train_sae(method.split()[0].lower(), len(atlas)), layer)

    def train_sae(self, kind: str, latents: int) -> Sae:
        """An SAE of the layer's outputs; its settings are the best of nine short trials, by the paper's rule.

        The archetypal one mixes as many points as it has latents, so nine trials of the large one would take hours: it
        has the settings of the small one.
        """
        active = 0.1 if kind == "archetypal" else 20
        spec = SaeSpec(kind, latents, active=active, epochs=6, batch_size=1024, seed=SEED)  # type: ignore[arg-type]
        with torch.no_grad():
            tokens = self.store.read(0, len(self.store))
            outputs = torch.cat([self.vlm.layer(part) for part in tokens.split(8192)])

        tried = len(self.atlas("small", "gap")) if kind == "archetypal" else latents
        if tried != latents and not (self.out / f"trials-{kind}-{tried}.json").exists():
            self.train_sae(kind, tried)
        path = self.out / f"trials-{kind}-{tried}.json"
        chosen = load_or_make(path, lambda: try_settings(spec, outputs, (5e-4, 2e-3, 5e-3)))
        chosen.pop("seconds")
        spec, stored = replace(spec, **chosen), self.out / f"sae-{kind}-{latents}.safetensors"
        if not stored.exists():
            write_tensors(stored, train_sae(spec, outputs).state_dict())
        sae = Sae(spec, outputs, outputs)
        sae.load_state_dict(read_tensors(stored))
        return sae.eval().requires_grad_(False)

    @cache  # noqa: B019
    def latents(self, method: str, expansion: str, *, calibrated: bool = False) -> NamedDictionary:
        """A method's dictionary with labels, from the same photos for every method; calibrated, it can place."""
        labels = self.spec(expansion).labels
        settings = Dissection.for_method(
            labels.method, top_k=labels.top_k, a=labels.a, lam=labels.lam, min_prob=labels.min_prob
        )
        fit = self.spec(expansion).calibration.fit if calibrated else None
        dictionary = self.dictionary(method, expansion)
        return label_dictionary(dictionary, self.probing, self.vocabulary, settings, fit=fit)

    def measure(self, method: str, expansion: str) -> dict[str, Any]:
        """The row of a method."""
        stem = f"{expansion}-{method.replace(' ', '-')}.json"
        row = load_or_make(self.out / f"measured-{stem}", lambda: self._measure(self.latents(method, expansion)))

        def compare_captions() -> dict[str, Any]:
            return {"captions kept": self.edit_trial.caption_agreement(self.latents(method, expansion).dictionary)}

        kept = load_or_make(self.out / f"captions-{stem}", compare_captions)
        return {**row, **kept, "seconds": row["seconds"] + kept["seconds"]}

    @torch.inference_mode()
    def _measure(self, latents: NamedDictionary) -> dict[str, Any]:
        dictionary, r2 = latents.dictionary, R2()
        peaks = gather_peaks(self.held_out.layer_inputs(), dictionary.read, self.vlm.layer)
        for q in self.held_out.layer_inputs():
            r2.add(self.vlm.layer(q), dictionary.reconstruct(q))
        truth = {Path(case.source).name: case.objects for case in self.world.cases}
        named = [truth[Path(item.id).name] for item in self.held_out.items]
        return {
            "latents": len(dictionary),
            "never fire": float(peaks.silent.float().mean()),
            "MS-Score": mean_percent(peaks.scores()),
            "R2": r2.value,
            **concept_shares(peaks, named, latents.labels, self.world.read),
        }

    def steer(self, method: str, mode: str) -> dict[str, Any]:
        """The scores of a method's edits at the point that does best on development photos."""
        path = self.out / f"steered-{mode}-{method.replace(' ', '-')}.json"
        return load_or_make(path, lambda: self._steer(self.latents(method, "small", calibrated=True), mode))

    def _steer(self, latents: NamedDictionary, mode: str) -> dict[str, Any]:
        trial = self.edit_trial
        steerer = Steerer(trial.vlm, latents, trial.matcher)
        found = {}
        for kind in ("remove", "replace"):
            points = sweep(steerer, trial.tuning, kind, GRIDS[mode, kind], work=self.out)  # type: ignore[arg-type]
            best = best_point(points, "harmonic", min_kept=0.0)  # hardly any edit of a photo is clean
            found[kind] = self._score(steerer, kind, best.settings)
        found["absent"] = self._score(steerer, "absent", found["remove"]["settings"])
        return found

    def _score(self, steerer: Steerer, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        world = self.edit_trial.reported
        tasks = make_tasks(world, self.edit_trial.baselines, kind)  # type: ignore[arg-type]
        outcomes = run_edits(
            steerer, world, tasks, lambda task: plan_or_empty(steerer, task, settings), likelihood=False
        )
        shown = [[o.task.minus, o.task.plus, o.task.baseline, o.caption, o.success, o.clean] for o in outcomes]
        return {"settings": dict(settings), **summarize(kind, outcomes).to_dict(), "captions": shown}


def concept_shares(
    peaks: Peaks, named: Sequence[frozenset[str]], labels: Sequence[str] | Any, read: Callable[[str], Any]
) -> dict[str, float]:
    """How many latents fire for one concept, how often their label is it, and how often random photos share one."""
    values, order = peaks.values.sort(dim=1, descending=True, stable=True)
    strongest = peaks.images.gather(1, order)[:, :STRONGEST]
    fires = (peaks.highest > 0) & (values[:, STRONGEST - 1] > -torch.inf)
    concepts = {
        number: shared_concept([named[i] for i in strongest[number]]) for number in fires.nonzero()[:, 0].tolist()
    }
    single = {number: concept for number, concept in concepts.items() if concept}
    right = sum(concept in read(labels[number]).objects for number, concept in single.items())
    rng = np.random.default_rng(0)
    draws = [shared_concept([named[i] for i in rng.choice(len(named), STRONGEST, False)]) for _ in range(2000)]
    return {
        "one concept": len(single) / max(1, len(concepts)),
        "random photos": sum(map(bool, draws)) / len(draws),
        "rightly named": right / max(1, len(single)),
        "concepts": len(set(single.values())),
    }


def shared_concept(photos: Sequence[frozenset[str]]) -> str:
    """The concept that most photos show, if enough do; empty if not."""
    counts = Counter(concept for photo in photos for concept in sorted(photo))
    concept, count = counts.most_common(1)[0] if counts else ("", 0)
    return concept if count >= SHARED else ""


def main() -> None:
    """Measure and steer with the chosen methods; print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder of `python -m demos.photoland.make`")
    parser.add_argument("--model", default="photoland/captioner", help="id or folder of the captioner")
    parser.add_argument("--part", choices=("measure", "steer"), action="append", help="do only this part")
    parser.add_argument("--expansion", choices=tuple(EXPANSIONS), action="append", help="measure only this one")
    parser.add_argument("--method", choices=METHODS, action="append", help="do only this method")
    parser.add_argument("--out", type=Path, help="JSON file for all rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comparison, methods = Comparison(options.work, options.model), options.method or METHODS
    rows: list[dict[str, Any]] = []
    for expansion in options.expansion or EXPANSIONS:
        for method in methods if "measure" in (options.part or ("measure",)) else ():
            rows.append({"expansion": expansion, "method": method, **comparison.measure(method, expansion)})
            print(json.dumps(rows[-1]), flush=True)
    for method in STEERED if "steer" in (options.part or ("steer",)) else ():
        for mode in ("scale", "place") if method in methods else ():
            rows.append({"mode": mode, "method": method, **comparison.steer(method, mode)})
            shown = {kind: rows[-1][kind]["clean"] for kind in ("remove", "replace", "absent")}
            print(method, mode, json.dumps(shown), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
