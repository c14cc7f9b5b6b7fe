"""The whole comparison on toyland: builds, trains, names, measures and steers; goes on where it was.

Rows are dealt out to processes; each is one file, so that who makes it changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import build
from elude_steer.atlas.build.stages import Build
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.atlas.build.tokens import collect_tokens
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines import dictionary
from elude_steer.evaluation.baselines.dictionary import Dictionary, Levels, NamedDictionary
from elude_steer.evaluation.baselines.sae import KINDS, Sae, SaeSpec, best_of, grid_of, quality, train_sae
from elude_steer.evaluation.compare.measure import (
    Contest,
    Seen,
    classes_of,
    measure_dictionary,
    name_dictionary,
    scorer_and_words,
)
from elude_steer.evaluation.compare.methods import (
    METHODS,
    RULES,
    SPLITS,
    SUPERVISED,
    Size,
    check_methods,
    grids,
    method_of,
)
from elude_steer.evaluation.edits.benchmark import toyland_world
from elude_steer.evaluation.measures.faithfulness import linear_head
from elude_steer.evaluation.measures.monosemanticity import gather_peaks, mean_percent
from elude_steer.evaluation.measures.stability import stability
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.method.clip_dissect import Dissection
from elude_steer.models.images import image_set
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec
from elude_steer.utils.files import read_tensors, write_file, write_tensors
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.parallel import WorkerGroup, worker_group

REPORTED = 93_311  # seed of the scenes that are steered for the report
# With batches of 1,024 six epochs have as many steps as 24 with 4,096; the rates are for so few.
_BATCH, _RATES = 1024, (5e-4, 2e-3, 5e-3)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One comparison and where it keeps what it has done."""

    work: Path
    size: Size = field(default_factory=Size)
    log: Callable[[str], object] = lambda line: None
    _stores: dict[int, TokenStore] = field(default_factory=dict)

    @cached_property
    def vlm(self) -> Vlm:
        """The model that is steered."""
        return Vlm.load("toyland/captioner")

    @cached_property
    def spec(self) -> AtlasSpec:
        """Toyland's recipe, at this size."""
        spec = load_spec("toyland")
        if self.size.pictures is None:
            return spec
        images = replace(spec.images, limit=self.size.pictures)
        return replace(spec, images=images, clusters=replace(spec.clusters, top_k=600, min_cluster_size=12))

    def atlas(self, rule: str, seed: int, run: int = 0) -> Atlas:
        """ELUDe's, built once; further runs begin with nothing."""
        again = f"-run{run}" if run else ""
        out = self.work / f"atlas-{rule}-{seed}{again}"
        if not (out / "manifest.json").exists():
            spec = replace(
                self.spec,
                tokens=replace(self.spec.tokens, seed=seed),
                split=replace(self.spec.split, winner_rule=rule),  # type: ignore[arg-type]
            )
            with worker_group() as workers, self._paid(f"ELUDe ({rule})", seed, run, workers):
                build(spec, out=out, work=self.work / f"stages{again}", quiet=True)
        return Atlas.load(out)

    @contextmanager
    def _paid(
        self, method: str, seed: int, run: int = 0, workers: WorkerGroup | None = None, *, resumes: bool = True
    ) -> Iterator[None]:
        """Counts what making a method's latents costs, in seconds of a core; a group of workers works together.

        The costs of what `resumes` after an interruption add up; the rest is done again as a whole.
        """
        path = self._cost(method, seed, run)
        start = time.process_time()
        try:
            yield
        finally:
            if workers is None or workers.rank == 0:
                spent = (time.process_time() - start) * (1 if workers is None else workers.world)
                spent += json.loads(path.read_text()) if resumes and path.exists() else 0
                write_file(path, lambda file: file.write(json.dumps(spent).encode()))

    def _cost(self, method: str, seed: int, run: int = 0) -> Path:
        return self.work / "costs" / f"{METHODS.index(method):02d}-{seed}-{run}.json"

    @cached_property
    def _scorer(self) -> tuple[Any, list[str], torch.Tensor]:
        return scorer_and_words(asdict(self.spec))

    @cached_property
    def naming(self) -> Seen:
        """The pictures that name latents: those that the atlases were made from."""
        source = str(self.spec.images.source).removeprefix("toyland:")
        return Seen.of(self.vlm, self._scorer[0], int(source), int(self.spec.images.limit or 0), self.work)

    @cached_property
    def held_out(self) -> Seen:
        """Scenes that nothing was made from."""
        return Seen.of(self.vlm, self._scorer[0], 77_001, self.size.scenes, self.work)

    @cached_property
    def many(self) -> Seen:
        """So many of them that everything is shown by as many as the MS-Score looks at."""
        return Seen.of(self.vlm, self._scorer[0], 77_001, self.size.many, self.work)

    @cached_property
    def edits(self) -> Contest:
        """Scenes to steer."""
        matcher = self.atlas("gap", self.size.seeds[0]).matcher()
        # Of two seeds that nothing was trained or named with; nobody looked at the second while grids were made.
        tuning, reported = toyland_world(61_007, self.size.tuning), toyland_world(REPORTED, self.size.scenes)
        return Contest(self.vlm, matcher, tuning, reported, self.work)

    @cached_property
    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A linear classifier of what a token shows, of the layer's own outputs."""
        rows = np.linspace(0, len(self.naming.q) - 1, min(40_000, len(self.naming.q))).astype(int)
        outputs = self.vlm.layer(torch.from_numpy(self.naming.q[rows].astype(np.float32))).detach()
        return linear_head(outputs, classes_of(self.naming.shown[rows]))

    def store(self, seed: int) -> TokenStore:
        """The tokens of a draw, as the atlas of that seed has them."""
        if seed not in self._stores:  # several processes gather them together, so before rows are dealt out
            spec = replace(self.spec, tokens=replace(self.spec.tokens, seed=seed))
            pictures = image_set(spec.images.source, limit=spec.images.limit)
            with worker_group(None, None) as workers:
                folder = collect_tokens(Build(self.vlm, pictures, spec, workers, self.work / "stages", True))
            self._stores[seed] = TokenStore(folder.path)
        return self._stores[seed]

    def dictionary(self, method: str, seed: int, run: int = 0) -> Dictionary:
        """What a method makes of the tokens of a draw; further runs start from other random numbers."""
        layer = self.vlm.layer
        if method.startswith("ELUDe"):
            rule = method.partition("(")[2].rstrip(")")
            return replace(dictionary.of_atlas(method, layer, self.atlas(rule, seed, run)), name=method)
        if method == "raw units":
            return dictionary.raw_units(layer)
        atlas, chance = self.atlas("gap", seed), seed + 1000 * run
        if method in SPLITS:
            split: Any = SPLITS[method]
            with self._paid(method, seed, run, resumes=False):
                return dictionary.split_otherwise(split, layer, self.store(seed), atlas, seed=chance)
        if method in SUPERVISED:
            seen = self.naming
            rows = [(q, seen.shown[at]) for q, at in zip(seen.inputs(), seen.pictures(), strict=True)]
            known = [word for word in (*toyland.OBJECTS, *toyland.PLACES) if word in self._scorer[1]]
            with self._paid(method, seed, run, resumes=False):
                return dictionary.difference_of_means(layer, rows, known)
        kind = next(kind for kind in KINDS if method_of(kind) == method)
        return dictionary.of_sae(self.sae(kind, seed, len(atlas), run), layer)

    def sae(self, kind: Any, seed: int, latents: int, run: int = 0) -> Sae:
        """An autoencoder, trained once; its settings are chosen on the first seed, by the paper's rule."""
        epochs = max(1, self.size.epochs // (3 if kind == "matching_pursuit" else 1))
        active = 0.1 if kind == "archetypal" else 20
        spec = SaeSpec(kind, latents, active=active, epochs=epochs, batch_size=_BATCH, seed=seed + 1000 * run)
        spec = self.chosen(spec)
        given, wanted = self._tokens(kind, seed)
        path = self.work / f"sae-{kind}-{seed}-{run}.safetensors"
        if not path.exists():
            with self._paid(method_of(kind), seed, run, resumes=False):
                write_tensors(path, train_sae(spec, given, wanted).state_dict())
        sae = Sae(spec, given, given if wanted is None else wanted)
        sae.load_state_dict(read_tensors(path))
        return sae.eval().requires_grad_(False)

    @torch.no_grad()
    def _tokens(self, kind: str, seed: int, every: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What an autoencoder reads, and what it should give where that is something else."""
        inputs = self.store(seed).read(0, len(self.store(seed)))[::every]
        outputs = torch.cat([self.vlm.layer(part) for part in inputs.split(8192)])
        return (inputs, outputs) if kind == "transcoder" else (outputs, None)

    def chosen(self, spec: SaeSpec) -> SaeSpec:
        """The same with the settings that did best in trials."""

        def tried() -> dict[str, Any]:
            given, wanted = self._tokens(spec.kind, self.size.seeds[0], every=6)
            short = replace(spec, epochs=max(1, spec.epochs // 2), seed=self.size.seeds[0])
            specs = grid_of(short, _RATES)[: self.size.trials]
            found = [(one, quality(train_sae(one, given, wanted), given, wanted)) for one in specs]
            return {"best": _varied(best_of(found)), "tried": [[_varied(s), asdict(q)] for s, q in found]}

        return replace(spec, **load_or_make(self.work / f"trials-{spec.kind}.json", tried)["best"])

    def lexicon(self, method: str, seed: int, dictionary: Dictionary) -> NamedDictionary:
        """A method's dictionary with names."""
        if method.startswith("ELUDe"):  # its atlas has been named by the same dissection of the same pictures
            atlas = self.atlas(method.partition("(")[2].rstrip(")"), seed)
            levels = Levels(atlas.references.activation)
            return NamedDictionary(dictionary, atlas.require_labels(), levels, atlas.streams, atlas.about)
        _, vocabulary, texts = self._scorer
        labels = self.spec.labels
        how = Dissection.for_method(
            labels.method, top_k=labels.top_k, a=labels.a, lam=labels.lam, min_prob=labels.min_prob
        )
        return name_dictionary(dictionary, self.naming, texts, vocabulary, how)

    def result(self, method: str, seed: int) -> dict[str, Any]:
        """Everything measured of one method and seed; each part is a file, so that only what is missing is done."""
        stem = f"{METHODS.index(method):02d}-{seed}"

        @cache
        def lexicon() -> tuple[NamedDictionary, float]:
            self.log(f"{method}, seed {seed}")
            dictionary = self.dictionary(method, seed)
            write_tensors(self._vectors(method, seed), _atoms(dictionary))
            start = time.process_time()
            return self.lexicon(method, seed, dictionary), time.process_time() - start

        def measured() -> dict[str, Any]:
            latents, named = lexicon()
            found = measure_dictionary(latents, self.vlm, self.held_out, self.head)
            cost = self._cost(method, seed)
            made = json.loads(cost.read_text()) if cost.exists() else 0.0
            return {**found, "made": made, "named": named}

        def of_many() -> dict[str, Any]:
            peaks = gather_peaks(self.many.inputs(), lexicon()[0].dictionary.read, self.vlm.layer)
            return {"MS-Score of many": mean_percent(peaks.scores())}

        def agreement() -> dict[str, Any]:
            return {"same captions": self.edits.agreement(lexicon()[0].dictionary)}

        path = self.work / "results" / f"{stem}-measured.json"
        if not path.exists():
            lexicon()  # making and naming have costs of their own
        row = {"method": method, "seed": seed, **load_or_make(path, measured)}
        further = {f"many-{self.size.many}": of_many, f"captions-{make_key(REPORTED)[:8]}": agreement}
        for name, make in further.items():
            found = load_or_make(self.work / "results" / f"{stem}-{name}.json", make)
            row |= {**found, "seconds": row["seconds"] + found["seconds"]}
        for (mode, kind), points in grids(self.size).items():
            path = self.work / "results" / f"{stem}-{mode}-{kind}-{make_key(points, REPORTED)[:8]}.json"
            row[f"{mode} {kind}"] = load_or_make(path, lambda: self.edits.steer(lexicon()[0], kind, points))  # noqa: B023
            row["seconds"] += row[f"{mode} {kind}"]["seconds"]
        return row

    def run(self, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
        """All of it, a row a method and seed; every process of a team comes here, and does its share."""
        rows = [(method, seed) for method in check_methods(methods) for seed in self.size.seeds]
        self._check_work()
        with worker_group(None, 1) as workers:
            self._prepare(workers, methods)
            workers.each(rows, lambda row: _do(self.result(*row)))
            self._again(methods, workers)
        return [self.result(*row) for row in rows]

    def _check_work(self) -> None:
        """Refuses a folder that holds another comparison, whose files have the same names."""
        made_of = make_key(self.vlm.fingerprint(), self._scorer[0].key, asdict(self.spec), versions())
        about = {**asdict(self.size), "methods": METHODS, "made of": made_of}
        path, own = self.work / "size.json", json.dumps(about, indent=1)
        if path.exists() and path.read_text(encoding="utf-8") != own:
            other = "of another size, or of another model, recipe or version"
            raise SpecError(f"'{self.work}' holds a comparison {other}; give another folder: --work FOLDER.")
        write_file(path, lambda file: file.write(own.encode()))

    def _prepare(self, workers: WorkerGroup, methods: Sequence[str]) -> None:
        """What all rows need: atlases and tokens, which processes make together, then the rest, one piece each."""
        rules = [rule for rule in RULES if rule == "gap" or f"ELUDe ({rule})" in methods]
        for seed in self.size.seeds:
            for rule in rules:
                self.log(f"atlas of rule {rule}, seed {seed}")
                self.atlas(rule, seed)
            self.store(seed)
        latents = len(self.atlas("gap", self.size.seeds[0]))
        kinds = [kind for kind in KINDS if method_of(kind) in methods]
        workers.each([lambda: self.naming, lambda: self.many, lambda: self.held_out], lambda make: _do(make()))
        workers.each(kinds, lambda kind: _do(self.sae(kind, self.size.seeds[0], latents)))

    def _again(self, methods: Sequence[str], workers: WorkerGroup) -> None:
        """Further runs of methods on the tokens of the first seed, as vectors."""
        seed = self.size.seeds[0]
        pieces = [(method, run) for method in methods for run in range(1, self._runs(method))]
        for method, run in pieces:
            if method.startswith("ELUDe"):  # all processes build an atlas together
                self.log(f"{method}, run {run + 1}")
                self.atlas(method.partition("(")[2].rstrip(")"), seed, run)

        def vectors(piece: tuple[str, int]) -> None:
            method, run = piece
            if not (path := self._vectors(method, seed, run)).exists():
                self.log(f"{method}, run {run + 1}")
                write_tensors(path, _atoms(self.dictionary(method, seed, run)))

        workers.each(pieces, vectors)

    def _runs(self, method: str) -> int:
        return self.size.runs if method.startswith("ELUDe") else min(2, self.size.runs)

    def _vectors(self, method: str, seed: int, run: int = 0) -> Path:
        again = f"-run{run}" if run else ""
        return self.work / "results" / f"{METHODS.index(method):02d}-{seed}{again}.safetensors"

    def stability(self, method: str) -> float:
        """How alike the dictionaries of different token draws are."""
        return _alike([self._vectors(method, seed) for seed in self.size.seeds])

    def repeated(self, method: str) -> float:
        """How alike the dictionaries of several runs on the same tokens are; NaN before there is a second."""
        return _alike([self._vectors(method, self.size.seeds[0], run) for run in range(self._runs(method))])


def _do(made: object) -> None:
    """What was made is on disk."""


def _alike(paths: Sequence[Path]) -> float:
    runs = [dictionary.by_unit(**read_tensors(path)) for path in paths if path.exists()]
    pairs = list(combinations(runs, 2))
    return float(np.mean([stability(a, b) for a, b in pairs])) if pairs else float("nan")


def _varied(spec: SaeSpec) -> dict[str, float]:
    return {"learning_rate": spec.learning_rate, "revive": spec.revive, "sparsity": spec.sparsity}


def _atoms(dictionary: Dictionary) -> dict[str, torch.Tensor]:
    return {"atoms": dictionary.atoms.contiguous(), "units": dictionary.units.contiguous()}
