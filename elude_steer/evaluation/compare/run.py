"""The whole comparison on toyland: builds, trains, labels, measures and steers; it resumes where it stopped.

Rows are distributed over processes. Each row is a file, so the result does not depend on which process made it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import build
from elude_steer.atlas.build.stages import Build
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.atlas.build.tokens import collect_tokens
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary, Levels, NamedDictionary
from elude_steer.evaluation.baselines.difference_of_means import difference_of_means
from elude_steer.evaluation.baselines.sae import (
    Sae,
    SaeSpec,
    choose_best,
    from_sae,
    make_grid,
    quality,
    train_sae,
)
from elude_steer.evaluation.baselines.splits import from_atlas, raw_units, split_by_class, split_units
from elude_steer.evaluation.compare.edit_trial import EditTrial
from elude_steer.evaluation.compare.grids import GRIDS, SUPERVISED, Grid, take_values
from elude_steer.evaluation.compare.labelling import (
    Vocabulary,
    calibrate_dictionary,
    label_dictionary,
    with_key,
)
from elude_steer.evaluation.compare.measure import mean_stability, measure_dictionary
from elude_steer.evaluation.compare.methods import ELUDE, METHODS, PARTS, Method, Part, Size, check_seeds
from elude_steer.evaluation.compare.scene_activations import SceneActivations, class_numbers
from elude_steer.evaluation.compare.supervised import calibrate_with_truth, true_directions
from elude_steer.evaluation.edits import Kind
from elude_steer.evaluation.edits.benchmark import toyland_world
from elude_steer.evaluation.measures.faithfulness import linear_head
from elude_steer.evaluation.measures.monosemanticity import gather_peaks, mean_percent
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.method.clip_dissect import Dissection
from elude_steer.models.images import image_set
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import load_spec, recipes_dir
from elude_steer.specs import AtlasSpec
from elude_steer.utils.files import read_json, read_tensors, write_file, write_tensors
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.parallel import WorkerGroup, worker_group

# Seeds of scenes that nothing was trained or labelled with. Nobody looked at the reported ones while grids were chosen.
_HELD_OUT, _TUNING, REPORTED = 77_001, 61_007, 93_311
# With batches of 1,024, six epochs have as many steps as 24 epochs with 4,096; the learning rates suit so few steps.
_BATCH, _RATES = 1024, (5e-4, 2e-3, 5e-3)
MakeLatents = Callable[[], tuple[NamedDictionary, float]]  # and the seconds that labelling takes


@dataclass(frozen=True, eq=False)
class Comparison:
    """One comparison.

    Attributes:
        work: folder for everything that is made; a further run continues from it.
        size: how large it is.
        log: called with a line for each step.
        threads: threads of each process while it builds atlases; by default its share of the cores.
    """

    work: Path
    size: Size = field(default_factory=Size)
    log: Callable[[str], object] = lambda line: None
    threads: int | None = None
    _stores: dict[int, TokenStore] = field(default_factory=dict)

    @cached_property
    def vlm(self) -> Vlm:
        """The model to steer."""
        return Vlm.load("toyland/captioner")

    @cached_property
    def spec(self) -> AtlasSpec:
        """Toyland's recipe at this size."""
        spec = load_spec(recipes_dir() / "atlases" / "toyland.yaml")  # not a file of that name in the current folder
        if self.size.images is None:
            return spec
        images = replace(spec.images, limit=self.size.images)
        return replace(spec, images=images, clusters=replace(spec.clusters, top_k=600, min_cluster_size=12))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words that label latents, and the dual encoder."""
        return Vocabulary.load(asdict(self.spec))

    @cached_property
    def probing_scenes(self) -> SceneActivations:
        """The scenes that label latents: those that the atlases are built from."""
        seed = int(str(self.spec.images.source).removeprefix("toyland:"))
        return self._scenes(seed, int(self.spec.images.limit or 0))

    @cached_property
    def held_out_scenes(self) -> SceneActivations:
        """Scenes that nothing is made from."""
        return self._scenes(_HELD_OUT, self.size.scenes)

    @cached_property
    def ms_scenes(self) -> SceneActivations:
        """Held-out scenes enough for every object to be in as many as the MS-Score takes into account."""
        return self._scenes(_HELD_OUT, self.size.ms_scenes)

    def _scenes(self, seed: int, count: int) -> SceneActivations:
        return SceneActivations.prepare(self.vlm, self.vocabulary.encoder, seed, count, self.work)

    @cached_property
    def edit_trial(self) -> EditTrial:
        """The scenes to edit."""
        matcher = self.atlas(ELUDE, self.size.seeds[0]).matcher()
        tuning = toyland_world(_TUNING, self.size.tuning_scenes)
        edited = toyland_world(REPORTED, self.size.edited_scenes)
        return EditTrial(self.vlm, matcher, tuning, edited, toyland_world(REPORTED, self.size.scenes), self.work)

    @cached_property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A linear classifier from the layer's own outputs to what a token shows."""
        inputs, shown = self.probing_scenes.sample(40_000)
        return linear_head(self.vlm.layer(inputs).detach(), class_numbers(shown))

    def store(self, seed: int) -> TokenStore:
        """The tokens of a draw, the same as the atlas of that seed has."""
        if seed not in self._stores:  # all processes collect them together, before rows are distributed
            spec = replace(self.spec, tokens=replace(self.spec.tokens, seed=seed))
            images = image_set(spec.images.source, limit=spec.images.limit)
            with worker_group(None, self.threads) as workers:
                tokens = collect_tokens(Build(self.vlm, images, spec, workers, self.work / "stages", False))
            self._stores[seed] = TokenStore(tokens.path)
        return self._stores[seed]

    def atlas(self, method: Method, seed: int, run: int = 0) -> Atlas:
        """The atlas of an ELUDe method, built once; further runs reuse no stage."""
        again = f"-run{run}" if run else ""
        out = self.work / f"atlas-{method.variant}-{seed}{again}"
        if not (out / "manifest.json").exists():
            spec = replace(
                self.spec,
                tokens=replace(self.spec.tokens, seed=seed),
                split=replace(self.spec.split, winner_rule=cast(Any, method.variant)),
            )
            with worker_group() as workers, self._count_cost(method, seed, run, workers):
                build(spec, out=out, work=self.work / f"stages{again}", threads=self.threads)
        return Atlas.load(out)

    def dictionary(self, method: Method, seed: int, run: int = 0) -> Dictionary:
        """The dictionary that a method makes from the tokens of a draw; further runs use other random numbers."""
        make = {
            "atlas": self._make_from_atlas,
            "units": self._make_raw_units,
            "split": self._make_split,
            "sae": self._make_sae,
            "means": self._make_means,
            "classes": self._make_from_classes,
        }
        return make[method.kind](method, seed, run)

    def _make_from_atlas(self, method: Method, seed: int, run: int) -> Dictionary:
        return from_atlas(method.name, self.vlm.layer, self.atlas(method, seed, run))

    def _make_raw_units(self, method: Method, _seed: int, _run: int) -> Dictionary:
        return raw_units(method.name, self.vlm.layer)

    def _make_split(self, method: Method, seed: int, run: int) -> Dictionary:
        atlas, store, split = self.atlas(ELUDE, seed), self.store(seed), cast(Any, method.variant)
        with self._count_cost(method, seed, run, resumes=False):
            return split_units(method.name, split, self.vlm.layer, store, atlas, seed=seed + 1000 * run)

    def _make_sae(self, method: Method, seed: int, run: int) -> Dictionary:
        return from_sae(method.name, self.sae(method, seed, run), self.vlm.layer)

    def _make_means(self, method: Method, seed: int, run: int) -> Dictionary:
        images = list(zip(self.probing_scenes.layer_inputs(), self.probing_scenes.shown_by_image(), strict=True))
        concepts = [word for word in (*toyland.OBJECTS, *toyland.PLACES) if word in self.vocabulary.words]
        with self._count_cost(method, seed, run, resumes=False):
            return difference_of_means(method.name, self.vlm.layer, images, concepts)

    def _make_from_classes(self, method: Method, seed: int, run: int) -> Dictionary:
        atlas, store = self.atlas(ELUDE, seed), self.store(seed)
        with self._count_cost(method, seed, run, resumes=False):
            classes = self.probing_scenes.instance_classes(store.places)
            return split_by_class(method.name, self.vlm.layer, store, atlas, classes)

    def sae(self, method: Method, seed: int, run: int = 0) -> Sae:
        """A method's SAE, trained once; its settings are chosen on the first seed, by the paper's rule."""
        kind, latents = cast(Any, method.variant), len(self.atlas(ELUDE, seed))
        epochs = max(1, self.size.epochs // (3 if kind == "matching_pursuit" else 1))
        active = 0.1 if kind == "archetypal" else 20
        spec = SaeSpec(kind, latents, active=active, epochs=epochs, batch_size=_BATCH, seed=seed + 1000 * run)
        spec = self._choose_settings(spec)
        inputs, targets = self._sae_tokens(kind, seed)
        path = self.work / f"sae-{kind}-{seed}-{run}.safetensors"
        if not path.exists():
            with self._count_cost(method, seed, run, resumes=False):
                write_tensors(path, train_sae(spec, inputs, targets).state_dict())
        sae = Sae(spec, inputs, inputs if targets is None else targets)
        sae.load_state_dict(read_tensors(path))
        return sae.eval().requires_grad_(False)

    @torch.no_grad()
    def _sae_tokens(self, kind: str, seed: int, stride: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What an SAE reads, and what it should reconstruct where that differs."""
        inputs = self.store(seed).read(0, len(self.store(seed)))[::stride]
        outputs = torch.cat([self.vlm.layer(part) for part in inputs.split(8192)])
        return (inputs, outputs) if kind == "transcoder" else (outputs, None)

    def _choose_settings(self, spec: SaeSpec) -> SaeSpec:
        """The spec with the settings that did best in short trials."""

        def run_trials() -> dict[str, Any]:
            inputs, targets = self._sae_tokens(spec.kind, self.size.seeds[0], stride=6)
            short = replace(spec, epochs=max(1, spec.epochs // 2), seed=self.size.seeds[0])
            specs = make_grid(short, _RATES)[: self.size.trials]
            tried = [(one, quality(train_sae(one, inputs, targets), inputs, targets)) for one in specs]
            return {"best": choose_best(tried).varied, "tried": [[s.varied, asdict(q)] for s, q in tried]}

        return replace(spec, **load_or_make(self.work / f"trials-{spec.kind}.json", run_trials)["best"])

    def label(self, method: Method, seed: int, dictionary: Dictionary) -> NamedDictionary:
        """A method's dictionary with labels, and with detectors and directions that are found alike for all."""
        scenes, fit = self.probing_scenes, self.spec.calibration.fit
        if method.kind == "atlas":  # it has labels from the same dissection of the same images
            atlas = self.atlas(method, seed)
            calibration = calibrate_dictionary(dictionary, scenes, self.vocabulary, fit)
            levels = Levels(atlas.references.activation)
            return with_key(NamedDictionary(dictionary, atlas.require_labels(), levels, calibration))
        labels = self.spec.labels
        settings = Dissection.for_method(
            labels.method, top_k=labels.top_k, a=labels.a, lam=labels.lam, min_prob=labels.min_prob
        )
        latents = label_dictionary(dictionary, scenes, self.vocabulary, settings, fit=fit)
        if method.kind != "means":
            return latents
        calibration = calibrate_with_truth(dictionary, scenes, self.vocabulary.words, fit)
        return with_key(replace(latents, calibration=calibration))

    @cached_property
    def true_directions(self) -> torch.Tensor:
        """Supervised directions of all words."""
        return true_directions(self.probing_scenes, self.vocabulary.words)

    def result(self, method: Method, seed: int, parts: Sequence[Part] = PARTS) -> dict[str, Any]:
        """The results of one method and seed; each piece is a file, and only missing ones are computed."""

        @cache
        def make_latents() -> tuple[NamedDictionary, float]:
            self.log(f"{method.name}, seed {seed}")
            dictionary = self.dictionary(method, seed)
            write_tensors(self._vectors(method, seed), dictionary.vectors())
            start = time.process_time()
            return self.label(method, seed, dictionary), time.process_time() - start

        row: dict[str, Any] = {"method": method.name, "seed": seed}
        row |= self._measure(method, seed, make_latents) if "measures" in parts else {}
        return row | ({"edits": self._edit(method, seed, make_latents)} if "edits" in parts else {})

    def _stem(self, method: Method, seed: int) -> str:
        return str(self.work / "results" / f"{method.number:02d}-{seed}")

    def _measure(self, method: Method, seed: int, make_latents: MakeLatents) -> dict[str, Any]:
        """What a method's latents mean, and how faithful they are."""

        def measure() -> dict[str, Any]:
            latents, labelling_seconds = make_latents()
            numbers = measure_dictionary(latents, self.vlm, self.held_out_scenes, self.head)
            cost = self._cost_path(method, seed)
            made = read_json(cost, (int, float)) if cost.exists() else 0.0
            return {**numbers, "made": made, "named": labelling_seconds}

        def score_many() -> dict[str, Any]:
            read = make_latents()[0].dictionary.read
            peaks = gather_peaks(self.ms_scenes.layer_inputs(), read, self.vlm.layer)
            return {"MS-Score of many": mean_percent(peaks.scores())}

        def compare_captions() -> dict[str, Any]:
            return {"same captions": self.edit_trial.caption_agreement(make_latents()[0].dictionary)}

        path = Path(f"{self._stem(method, seed)}-measured.json")
        if not path.exists():
            make_latents()  # first, because making and labelling have costs of their own
        row = load_or_make(path, measure)
        parts = {f"many-{self.size.ms_scenes}": score_many, f"captions-{make_key(REPORTED)[:8]}": compare_captions}
        for name, make in parts.items():
            numbers = load_or_make(Path(f"{self._stem(method, seed)}-{name}.json"), make)
            row |= {**numbers, "seconds": row["seconds"] + numbers["seconds"]}
        return row

    def _edit(self, method: Method, seed: int, make_latents: MakeLatents) -> dict[str, Any]:
        """How well a method steers: for each mode and kind of edit, and in `place` with supervised directions, too."""
        found: dict[str, Any] = {}
        for (mode, kind), values in GRIDS.items():
            grid = take_values(values, self.size.grid_values)
            for supervised in (False, True) if mode == "place" and method.kind != "means" else (False,):

                def steer(kind: Kind = kind, grid: Grid = grid, supervised: bool = supervised) -> dict[str, Any]:
                    latents = make_latents()[0]
                    if supervised:
                        calibration = replace(latents.require_calibration(), directions=self.true_directions)
                        latents = with_key(replace(latents, calibration=calibration))
                    return self.edit_trial.steer(latents, kind, grid)

                name = f"{mode} {kind}{SUPERVISED if supervised else ''}"
                key = make_key(grid, REPORTED, self.size.edited_scenes)[:8]
                path = Path(f"{self._stem(method, seed)}-{name.replace(' ', '-')}-{key}.json")
                if not path.exists():
                    make_latents()  # first, because the seconds are those of steering
                found[name] = load_or_make(path, steer)
        return found

    def run(
        self,
        methods: Sequence[Method] = tuple(METHODS.values()),
        seeds: Sequence[int] | None = None,
        parts: Sequence[Part] = PARTS,
    ) -> list[dict[str, Any]]:
        """Run everything and return a row for each method and seed; every process calls this and does its share.

        Args:
            methods: some of the methods.
            seeds: some of the seeds of the size; all by default.
            parts: `measures`, `edits`, or both.
        """
        seeds = check_seeds(self.size, seeds)
        rows = [(method, seed) for method in methods for seed in seeds]
        self._check_work()

        def compute(row: tuple[Method, int]) -> None:
            self.result(*row, parts)

        with worker_group(None, 1) as workers:
            self._prepare(workers, methods, seeds, parts)
            workers.each(rows, compute)
            if "measures" in parts:
                self._repeat(workers, methods)
        found = [self.result(*row, parts) for row in rows]
        if "measures" in parts:
            for (method, _), row in zip(rows, found, strict=True):
                row |= {"same tokens": self.stability_across_runs(method)}
                row |= {"other tokens": self.stability_across_draws(method)}
        return found

    def _check_work(self) -> None:
        """Refuse a folder that holds another comparison, whose files have the same names."""
        recipe = {name: part for name, part in asdict(self.spec).items() if name != "license"}  # changes no number
        made_of = make_key(self.vlm.fingerprint(), self.vocabulary.encoder.key, recipe, versions())
        about = {**self.size.to_dict(), "methods": list(METHODS), "made of": made_of}
        path = self.work / "size.json"
        about = json.loads(json.dumps(about))
        stored = read_json(path, dict, ("methods",)) if path.exists() else about
        known = stored["methods"] == about["methods"][: len(stored["methods"])]  # new methods stand at the end
        if not known or {**about, "methods": []} != {**stored, "methods": []}:
            raise SpecError(
                f"'{self.work}' holds a comparison of another size, model, recipe or version; give another folder: "
                "--work FOLDER."
            )
        write_file(path, lambda file: file.write(json.dumps(about, indent=1).encode()))

    def _prepare(
        self, workers: WorkerGroup, methods: Sequence[Method], seeds: Sequence[int], parts: Sequence[Part]
    ) -> None:
        """Make what all rows need: atlases and tokens, which processes make together, then the rest, one piece each."""
        atlases = [method for method in METHODS.values() if method.kind == "atlas"]
        for seed in dict.fromkeys([self.size.seeds[0], *seeds]):  # SAEs are tried out on the first seed
            for method in atlases:
                if method == ELUDE or (method in methods and seed in seeds):
                    self.log(f"atlas of rule {method.variant}, seed {seed}")
                    self.atlas(method, seed)
            self.store(seed)

        def make_scenes(name: str) -> None:
            getattr(self, name)

        def train(method: Method) -> None:
            self.sae(method, seeds[0])

        measured = ["ms_scenes", "held_out_scenes"] if "measures" in parts else []
        workers.each(["probing_scenes", *measured], make_scenes)
        workers.each([method for method in METHODS.values() if method.kind == "sae" and method in methods], train)

    def _repeat(self, workers: WorkerGroup, methods: Sequence[Method]) -> None:
        """Make the dictionaries of further runs on the tokens of the first seed."""
        seed = self.size.seeds[0]
        pieces = [(method, run) for method in methods for run in range(1, self._runs(method))]
        for method, run in pieces:
            if method.kind == "atlas":  # all processes build an atlas together
                self.log(f"{method.name}, run {run + 1}")
                self.atlas(method, seed, run)

        def write_vectors(piece: tuple[Method, int]) -> None:
            method, run = piece
            if not (path := self._vectors(method, seed, run)).exists():
                self.log(f"{method.name}, run {run + 1}")
                write_tensors(path, self.dictionary(method, seed, run).vectors())

        workers.each(pieces, write_vectors)

    def _runs(self, method: Method) -> int:
        return self.size.runs if method.kind == "atlas" else min(2, self.size.runs)

    @contextmanager
    def _count_cost(
        self, method: Method, seed: int, run: int = 0, workers: WorkerGroup | None = None, *, resumes: bool = True
    ) -> Iterator[None]:
        """Store the CPU seconds that making a method's latents takes, summed over a group of workers.

        Costs of work that `resumes` after an interruption add up; other work starts again from the beginning.
        """
        path = self._cost_path(method, seed, run)
        start = time.process_time()
        try:
            yield
        finally:
            if workers is None or workers.rank == 0:
                seconds = (time.process_time() - start) * (1 if workers is None else workers.world)
                seconds += read_json(path, (int, float)) if resumes and path.exists() else 0
                write_file(path, lambda file: file.write(json.dumps(seconds).encode()))

    def _cost_path(self, method: Method, seed: int, run: int = 0) -> Path:
        return self.work / "costs" / f"{method.number:02d}-{seed}-{run}.json"

    def _vectors(self, method: Method, seed: int, run: int = 0) -> Path:
        return self.work / "results" / f"{method.number:02d}-{seed}{f'-run{run}' if run else ''}.safetensors"

    def stability_across_draws(self, method: Method) -> float:
        """Similarity of the dictionaries of different token draws."""
        return mean_stability([self._vectors(method, seed) for seed in self.size.seeds])

    def stability_across_runs(self, method: Method) -> float:
        """Similarity of the dictionaries of several runs on the same tokens; NaN before there is a second."""
        return mean_stability([self._vectors(method, self.size.seeds[0], run) for run in range(self._runs(method))])
