"""The whole comparison on toyland: builds, trains, names, measures and steers; goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer import baselines, figures, toyland
from elude_steer.atlas import Atlas
from elude_steer.baselines import Dictionary, Levels, Lexicon
from elude_steer.comparing import Contest, Seen, kept, measure_dictionary, name_dictionary, scorer_and_words
from elude_steer.dissection import Dissection
from elude_steer.edits import Kind, toyland_world
from elude_steer.errors import SpecError
from elude_steer.evaluation.dictionary import stability
from elude_steer.images import image_set
from elude_steer.pipeline import build
from elude_steer.probing import TokenStore
from elude_steer.recipe import AtlasSpec
from elude_steer.saes import KINDS, Sae, SaeSpec, best_of, quality, train_sae
from elude_steer.shipped import load_spec
from elude_steer.stages import Build
from elude_steer.storage import read_tensors, write_file, write_tensors
from elude_steer.vlm import Vlm
from elude_steer.workers import team

RULES = ("gap", "unique")
SPLITS = {"random split": "random", "k-means on contributions": "pure", "clusters of activations": "activations"}
METHODS = (
    *(f"ELUDe ({rule})" for rule in RULES),
    "raw units",
    *SPLITS,
    *(f"{kind.replace('_', ' ')}{'' if kind == 'transcoder' else ' SAE'}" for kind in KINDS),
    "difference of means (supervised)",
)
SUPERVISED = METHODS[-1:]
# One size for everybody: 24 points a mode and kind of edit.
_WHERE = {"kappa": (12, 24), "nu": (6, 10, 14)}
GRIDS: Mapping[tuple[str, Kind], Mapping[str, Sequence[Any]]] = {
    ("scale", "remove"): {"mode": ("scale",), "gamma": (-5, -15, -50, -150), **_WHERE},
    ("scale", "replace"): {"mode": ("scale",), "gamma": (-15,), "alpha": (5, 15, 50, 150), **_WHERE},
    ("place", "remove"): {"mode": ("place",), "gamma": (-15,), "beta": (10, 20), "fill": (0, 80), **_WHERE},
    ("place", "replace"): {"mode": ("place",), "gamma": (-15,), "beta": (5, 10, 20, 40), **_WHERE},
}
_SETTINGS = {"level": ("stream",), "smooth": (True,), "by": ("score",)}  # as the atlas has them


@dataclass(frozen=True)
class Size:
    """How large a comparison is.

    Attributes:
        seeds: of the token draw.
        pictures: that are probed and name latents; None as the recipe has it.
        scenes: that are reported.
        tuning: scenes that settings are chosen on.
        epochs: of an autoencoder; pursuit, which takes ten times as long a step, has a third of them.
        trials: learning rates that are tried, each for a third of the epochs on the first seed.
        grid: points of a grid that are kept, evenly spread; None for all.
    """

    seeds: tuple[int, ...] = (42, 123, 999)
    pictures: int | None = None
    scenes: int = 500
    tuning: int = 60
    epochs: int = 12
    trials: tuple[float, ...] = (5e-4, 2e-3, 5e-3)
    grid: int | None = None


SMALL = Size(seeds=(42, 123), pictures=120, scenes=8, tuning=4, epochs=2, trials=(2e-3,), grid=1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One comparison and where it keeps what it has done."""

    work: Path
    size: Size = Size()
    told: Callable[[str], object] = lambda line: None

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

    def atlas(self, rule: str, seed: int) -> Atlas:
        """ELUDe's, built once."""
        out = self.work / f"atlas-{rule}-{seed}"
        if (out / "manifest.json").exists():
            return Atlas.load(out)
        spec = replace(
            self.spec,
            tokens=replace(self.spec.tokens, seed=seed),
            split=replace(self.spec.split, winner_rule=rule),  # type: ignore[arg-type]
        )
        return build(spec, out=out, work=self.work / "stages", quiet=True)

    @cached_property
    def _scorer(self) -> tuple[Any, list[str], torch.Tensor]:
        return scorer_and_words(self.atlas("gap", self.size.seeds[0]).about["spec"])

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
    def edits(self) -> Contest:
        """Scenes to steer."""
        matcher = self.atlas("gap", self.size.seeds[0]).matcher()
        # Of two seeds that nothing was trained or named with.
        tuning, reported = toyland_world(61_007, self.size.tuning), toyland_world(88_003, self.size.scenes)
        return Contest(self.vlm, matcher, tuning, reported, self.work)

    def store(self, seed: int) -> TokenStore:
        """The tokens of a draw, as the atlas of that seed has them."""
        spec = replace(self.spec, tokens=replace(self.spec.tokens, seed=seed))
        pictures = image_set(spec.images.source, limit=spec.images.limit)
        with team(None, None) as crew:
            folder, _ = Build(self.vlm, pictures, spec, crew, self.work / "stages", True).collected()
        return TokenStore(folder)

    def dictionary(self, method: str, seed: int) -> Dictionary:
        """What a method makes of the tokens of a draw."""
        layer, atlas = self.vlm.layer, self.atlas("gap", seed)
        if method.startswith("ELUDe"):
            rule = method.partition("(")[2].rstrip(")")
            return replace(baselines.of_atlas(method, layer, self.atlas(rule, seed)), name=method)
        if method == "raw units":
            return baselines.raw_units(layer)
        if method in SPLITS:
            split: Any = SPLITS[method]
            return baselines.split_otherwise(split, layer, self.store(seed), atlas, seed=seed)
        if method in SUPERVISED:
            seen = self.naming
            rows = [(q, seen.shown[at]) for q, at in zip(seen.inputs(), seen.pictures(), strict=True)]
            known = [word for word in (*toyland.OBJECTS, *toyland.PLACES) if word in self._scorer[1]]
            return baselines.difference_of_means(layer, rows, known)
        kind = next(kind for kind in KINDS if method.startswith(kind.replace("_", " ") + " ") or method == kind)
        return baselines.of_sae(self.sae(kind, seed, len(atlas)), layer)

    def sae(self, kind: Any, seed: int, latents: int) -> Sae:
        """An autoencoder, trained once; its learning rate is chosen on the first seed, by the paper's rule."""
        store = self.store(seed)
        inputs = store.read(0, len(store))
        with torch.no_grad():
            outputs = torch.cat([self.vlm.layer(part) for part in inputs.split(8192)])
        given, wanted = (inputs, outputs) if kind == "transcoder" else (outputs, None)
        epochs = max(1, self.size.epochs // (3 if kind == "matching_pursuit" else 1))
        active = 0.1 if kind == "archetypal" else 20
        spec = SaeSpec(kind, latents, active=active, epochs=epochs, seed=seed)
        spec = replace(spec, learning_rate=self._rate(spec, given, wanted))
        path = self.work / f"sae-{kind}-{seed}.safetensors"
        if not path.exists():
            write_tensors(path, train_sae(spec, given, wanted).state_dict())
        sae = Sae(spec, given, given if wanted is None else wanted)
        sae.load_state_dict(read_tensors(path))
        return sae.eval().requires_grad_(False)

    def _rate(self, spec: SaeSpec, given: torch.Tensor, wanted: torch.Tensor | None) -> float:
        def tried() -> dict[str, Any]:
            short = replace(spec, epochs=max(1, spec.epochs // 3))
            specs = [replace(short, learning_rate=rate) for rate in self.size.trials]
            found = [(one, quality(train_sae(one, given, wanted), given, wanted)) for one in specs]
            return {
                "rate": best_of(found).learning_rate,
                "tried": [[s.learning_rate, q.r2, q.active] for s, q in found],
            }

        return float(kept(self.work / f"rate-{spec.kind}.json", tried)["rate"])

    def lexicon(self, method: str, seed: int) -> Lexicon:
        """A method's dictionary with names."""
        dictionary = self.dictionary(method, seed)
        if method.startswith("ELUDe"):  # its atlas has been named by the same dissection of the same pictures
            atlas = self.atlas(method.partition("(")[2].rstrip(")"), seed)
            levels = Levels(atlas.references.activation)
            return Lexicon(dictionary, atlas.named(), levels, atlas.streams, atlas.about)
        _, vocabulary, texts = self._scorer
        labels = self.spec.labels
        how = Dissection.of(labels.method, top_k=labels.top_k, a=labels.a, lam=labels.lam, min_prob=labels.min_prob)
        return name_dictionary(dictionary, self.naming, texts, vocabulary, how)

    def result(self, method: str, seed: int) -> dict[str, Any]:
        """Everything measured of one method and seed."""
        path = self.work / "results" / f"{METHODS.index(method):02d}-{seed}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        self.told(f"{method}, seed {seed}")
        lexicon = self.lexicon(method, seed)

        def found() -> dict[str, Any]:
            steered = {
                f"{mode} {kind}": self.edits.steer(lexicon, kind, _thinned({**grid, **_SETTINGS}, self.size.grid))
                for (mode, kind), grid in GRIDS.items()
            }
            return {"method": method, "seed": seed, **measure_dictionary(lexicon, self.vlm, self.held_out), **steered}

        write_tensors(path.with_suffix(".safetensors"), _atoms(lexicon.dictionary))
        return kept(path, found)

    def run(self, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
        """All of it, a row a method and seed."""
        for method in methods:
            if method not in METHODS:
                raise SpecError(f"there is no method '{method}'; there are {', '.join(METHODS)}.")
        return [self.result(method, seed) for method in methods for seed in self.size.seeds]

    def stability(self, method: str) -> float:
        """How alike the dictionaries of different token draws are; raw units and the like are the same always."""
        paths = [self.work / "results" / f"{METHODS.index(method):02d}-{s}.safetensors" for s in self.size.seeds]
        runs = [baselines.by_unit(**read_tensors(path)) for path in paths]
        pairs = [(a, b) for at, a in enumerate(runs) for b in runs[at + 1 :]]
        return float(np.mean([stability(a, b) for a, b in pairs])) if pairs else 1.0


def _atoms(dictionary: Dictionary) -> dict[str, torch.Tensor]:
    return {"atoms": dictionary.atoms.contiguous(), "units": dictionary.units.contiguous()}


def _thinned(grid: Mapping[str, Sequence[Any]], most: int | None) -> Mapping[str, Sequence[Any]]:
    """A grid with fewer values of each setting, for trials."""
    return grid if most is None else {name: values[:most] for name, values in grid.items()}


def write_results(comparison: Comparison, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """The table as Markdown with its figure, and everything as JSON."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    of = {method: [row for row in rows if row["method"] == method] for method in methods}

    def mean(method: str, name: str, part: str | None = None) -> float:
        return float(np.mean([(row[part] if part else row)[name] for row in of[method]]))

    lines = [
        "# Toyland: ELUDe beside everything else",
        "",
        f"{comparison.size.scenes} held-out scenes, token seeds {', '.join(map(str, comparison.size.seeds))}; means "
        "over the seeds. Written by `elude-steer compare`.",
        "",
        "## What latents mean",
        "",
        "| method | latents | MS-Score | clean | objects | named rightly | R2 | stability | collinearity | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        get = partial(mean, method)
        lines.append(
            f"| {method} | {get('latents'):.0f} | {get('MS-Score'):.1f} | {get('clean'):.1%} | {get('objects'):.0f} | "
            f"{get('named rightly'):.1%} | {100 * get('R2'):.2f} | {comparison.stability(method):.3f} | "
            f"{get('collinearity'):.3f} | {get('seconds') / 60:.1f} |"
        )
    for kind in ("remove", "replace"):
        lines += [
            "",
            f"## Steering: {kind}",
            "",
            "| method | mode | success | kept | invented | clean | well formed | harmonic (95 %) |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for method in methods:
            for mode in ("scale", "place"):
                part = f"{mode} {kind}"
                get = partial(mean, method, part=part)
                ends = np.mean([row[part]["intervals"]["harmonic"] for row in of[method]], axis=0)
                lines.append(
                    f"| {method} | {mode} | {get('success'):.1%} | {get('kept'):.1%} | {get('invented'):.1%} | "
                    f"{get('clean'):.1%} | {get('well_formed'):.1%} | {get('harmonic'):.3f} "
                    f"({ends[0]:.3f} to {ends[1]:.3f}) |"
                )
    points = [(mean(method, "MS-Score") / 100, max(0.0, mean(method, "R2"))) for method in methods]
    marked = [number for number, method in enumerate(methods) if method.startswith("ELUDe")]
    chart = figures.scatter(points, x="MS-Score", y="R2", marked=marked)
    write_file(out / "toyland-pareto.png", lambda file: chart.save(file, "PNG"))
    lines += ["", "![MS-Score against R2; ELUDe is red](toyland-pareto.png)", ""]
    write_file(out / "toyland.md", lambda file: file.write("\n".join(lines).encode()))
    text = json.dumps(list(rows), indent=1)
    write_file(out / "toyland.json", lambda file: file.write(text.encode()))
    return out / "toyland.md"
