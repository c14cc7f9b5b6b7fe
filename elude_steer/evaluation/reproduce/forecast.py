"""What a run will take: hours of every piece from measured rates, disk and memory from the sizes of what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elude_steer.atlas.build.sizes import clustering_size, fitting_backend, resolve_clusters, resolve_tokens
from elude_steer.evaluation.compare.methods import METHODS, Method
from elude_steer.evaluation.measures.efficiency import timed
from elude_steer.evaluation.reproduce.edits import Edit
from elude_steer.evaluation.reproduce.experiment import RAW, Experiment, make_order
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.rates import Rates, measure_rates
from elude_steer.evaluation.reproduce.steering import atlas_folder, atlas_spec, needs_build
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.efficiency import try_passes
from elude_steer.evaluation.tables.measure import head_classes
from elude_steer.evaluation.tables.properties import CHANGED, COMPARED
from elude_steer.evaluation.tables.run import list_rows
from elude_steer.method.backends import memory_needed
from elude_steer.models.images import image_set, open_image
from elude_steer.models.vision import Tower
from elude_steer.models.vlm import Vlm
from elude_steer.specs import AtlasSpec
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.memory import format_bytes

_HALF, _SINGLE = 2, 4  # bytes of a number
_PURE = 0.3  # of the time of ELUDe's clusters, for k-means on the same contributions


@dataclass
class Forecast:
    """What a run will take.

    Attributes:
        pieces: seconds of each piece; those that are there already take none.
        disk: bytes that are written.
        memory: bytes of main memory at most.
        questions: to judges, whose time is not predicted.
        on_gpu: whether seconds are by the clock.
        notes: remarks as sentences.
    """

    pieces: dict[str, float] = field(default_factory=dict)
    disk: float = 0
    memory: float = 0
    questions: int = 0
    on_gpu: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all pieces."""
        return sum(self.pieces.values())

    def lines(self) -> list[str]:
        """The forecast in words, a line each."""
        kind = "" if self.on_gpu else " of one core"
        lines = [f"time    {format_time(self.seconds)}{kind}, in {len(self.pieces)} pieces"]
        groups: dict[str, float] = {}
        for name, seconds in self.pieces.items():
            groups[name.partition(":")[0]] = groups.get(name.partition(":")[0], 0) + seconds
        if len(groups) > 1:
            lines += [f"        {format_time(seconds)}  {name}" for name, seconds in groups.items()]
        lines.append(f"disk    {format_bytes(self.disk)}")
        lines.append(f"memory  {format_bytes(self.memory)}")
        if self.questions:
            lines.append(f"judges  {self.questions:,} questions to each, whose time is theirs")
        return [*lines, *self.notes]


def format_time(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`, `120 days`.

    Example:
        >>> format_time(5400)
        '1.5 h'
    """
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "s" else f"{amount:.0f} {unit}"
    return f"{seconds / 86400:,.1f} days"


def forecast_tables(experiment: Experiment) -> Forecast:
    """What the rows of a table take that are not there yet; loads each backbone and tries it out."""
    total, options = Forecast(), experiment.options
    for backbone in experiment.backbones:
        setup = experiment.setup(backbone)
        images, held = options.count(setup.images, None), options.count(setup.held_out, None)
        spec = resolve_tokens(setup.spec, images)
        if experiment.name in ("interpretability", "generalization") and not options.judges:
            methods = make_order(experiment.methods(backbone))
            left = [row for row in list_rows(setup, methods, experiment.seeds) if not row[2]]
            drawn = experiment.collage_method(backbone) is None or experiment.collages_path(backbone).exists()
            if not left and drawn and not experiment.unmeasured_properties(backbone):
                continue
        options.log(f"trying out {spec.model.id.rstrip('/').rsplit('/', 1)[-1]} on this machine")
        bench = Bench(setup)
        tower = bench.tower
        if bench.is_classified and experiment.name in ("interpretability", "generalization"):
            head_classes(
                bench, bench.held_out.items
            )  # refuses classes that the head does not have, before hours of work
        instances = images * int(spec.tokens.per_image)
        spec = resolve_clusters(spec, instances)
        rates = measure_rates(tower, spec, list(setup.image_set.items()), instances)
        passes = try_passes(bench, experiment.protocol) if experiment.name == "efficiency" else (0.0, 0.0)
        sizes = _Sizes(experiment, spec, images, held, instances, rates, setup.head is not None, passes)
        total.on_gpu = tower.device.type != "cpu"
        total.pieces |= sizes.pieces(backbone)
        total.disk += sizes.disk()
        total.memory = max(total.memory, sizes.memory(tower))
    if options.judges:
        for backbone in experiment.backbones:
            count = len(experiment.methods(backbone))
            total.questions += count * (count - 1) // 2 * options.pairs * 2 * len(experiment.seeds)
    return total


@dataclass(frozen=True, eq=False)
class _Sizes:
    """The sizes of one backbone's work."""

    experiment: Experiment
    spec: AtlasSpec
    images: int
    held: int
    instances: int
    rates: Rates
    has_head: bool
    passes: tuple[float, float]  # seconds of compiling the backbone, and of a pass

    @property
    def latents(self) -> int:
        """Latents of an autoencoder, or about as many parts as ELUDe finds."""
        expansion = self.experiment.setup(self.spec.name).preset.expansion
        return round((self.rates.parts if expansion is None else expansion) * self.rates.d_out)

    @property
    def parts(self) -> int:
        """About as many parts as ELUDe finds."""
        return round(self.rates.parts * self.rates.d_out)

    def pieces(self, backbone: str) -> dict[str, float]:
        """Seconds of each piece, under the names by which the run counts them."""
        name, experiment = self.experiment.name, self.experiment
        methods, seeds, found = make_order(experiment.methods(backbone)), experiment.seeds, dict[str, float]()
        once = self.images * self.rates.image
        tables = name not in ("ablations", "efficiency")  # rows of other tables of the same setup are there, too
        done = {row[:2] for row in list_rows(experiment.setup(backbone), methods, seeds) if row[2]} if tables else set()
        if name in ("interpretability", "generalization"):
            waiting = once + self.held * self.rates.held_out + (self.held * self.rates.image if self.has_head else 0)
            clustered = {seed for method, seed in done if self._needs_clusters(METHODS[method])}
            for method in methods:
                for number, seed in enumerate(seeds):
                    if (method, seed) in done:
                        continue
                    clusters = self._needs_clusters(METHODS[method]) and seed not in clustered
                    spent = self._row(METHODS[method], number == 0, clusters)
                    found[f"{backbone}: {method}, seed {seed}"] = waiting + spent
                    clustered |= {seed} if clusters else set()
                    waiting = 0.0
            found |= self._shown(backbone)
        elif name == "ablations":
            for number, (row, _, _) in enumerate(experiment.variations(backbone)):
                for seed in seeds:
                    shared = once if number == 0 else 0.0
                    measured = self.held * self.rates.held_out + self.rates.measuring(self.parts, self.held)
                    measured += self.rates.measuring(self.rates.d_out, self.held)
                    found[f"{backbone}: {row}, seed {seed}"] = shared + self._clusters + self._split + measured
        elif name == "stability":
            runs = experiment.preset.runs
            renewed = set[int]()  # runs whose clusters are there
            for number, method in enumerate(methods):
                kind, made = METHODS[method], 0.0
                for run in range(1 if method == RAW else runs):
                    if run == 0 and (method, seeds[0]) in done:
                        continue
                    clusters = self._needs_clusters(kind) and (run == 0 or kind.kind == "atlas") and run not in renewed
                    made += self._make(kind, run == 0, clusters)
                    renewed |= {run} if clusters else set()
                found[f"{backbone}: {method}, runs on seed {seeds[0]}"] = made + (
                    once if number == 0 and not done else 0.0
                )
        elif name == "efficiency":
            protocol = experiment.protocol
            timed_methods = [METHODS[method] for method in methods if method != RAW]
            made = once + sum(self._make(method, True) for method in timed_methods) + self._clusters
            tokens = self.rates.tokens * protocol.batch
            a_pass = [self.passes[1]] * (1 + len(timed_methods))
            a_pass += [tokens * self._reading(method) for method in timed_methods]
            compiling = (self.passes[0] + protocol.batch * self.rates.image) * (1 + len(timed_methods))
            runs_ = protocol.warm_up + protocol.runs
            found[f"{backbone}: passes, seed {seeds[0]}"] = made + compiling + runs_ * sum(a_pass)
        else:
            left = [(method, seed) for method in methods for seed in seeds if (method, seed) not in done]
            made = sum(self._make(METHODS[method], seed == seeds[0]) for method, seed in left)
            clustered = {seed for method, seed in done if self._needs_clusters(METHODS[method])}
            anew = {seed for method, seed in left if self._needs_clusters(METHODS[method])} - clustered
            made += len(anew) * self._clusters
            made += 0.0 if done else once + self.held * self.rates.held_out
            ranked = sum(self.held * self.rates.tokens * self._reading(METHODS[method]) for method in methods)
            found[f"{backbone}: judges"] = made + len(seeds) * ranked
        return found

    def _shown(self, backbone: str) -> dict[str, float]:
        """Seconds of the properties, for which a method is made once more, and of the collages."""
        experiment, rates, found = self.experiment, self.rates, dict[str, float]()
        again, clustered = experiment.runs - 1, False
        for name in make_order(experiment.unmeasured_properties(backbone)):
            method = METHODS[name]
            anew = method.kind == "atlas" and not clustered
            clustered |= anew
            width, sae = self._width(method), self._sae(method)
            checked = rates.measuring(width, min(self.held, COMPARED), sae) + again * rates.measuring(width, 0, sae)
            changed = 2 * CHANGED * rates.image
            found[f"{backbone}: {name}, properties"] = again * self._make(method, False, anew) + checked + changed
        if experiment.collage_method(backbone) is not None and not experiment.collages_path(backbone).exists():
            read = [
                rates.measuring(width, self.held) - rates.measuring(width, 0) for width in (rates.d_out, self.parts)
            ]
            found[f"{backbone}: collages"] = sum(read)
        return found

    def _row(self, method: Method, first: bool, clusters: bool) -> float:
        measured = self.rates.measuring(self._width(method), self.held, self._sae(method))
        head = self.held * self.rates.image if self.has_head else 0.0
        return self._make(method, first, clusters) + measured + head

    def _make(self, method: Method, first: bool, clusters: bool = False) -> float:
        """Seconds to make a dictionary; its settings are tried on the first draw.

        Args:
            method: which.
            first: whether settings are tried.
            clusters: whether ELUDe's clusters have to be made, which all that need them share.
        """
        shared = self._clusters if clusters else 0.0
        spec = self._sae(method)
        if spec is None:
            others = {"activations": self._clusters, "pure": _PURE * self._clusters}
            made = 0.0 if method.kind == "units" else self._split + others.get(method.variant, 0.0)
            return shared + made
        seconds = self.rates.training(spec, self.instances)
        preset = self.experiment.setup(self.spec.name).preset
        trials = preset.trial_specs(spec)
        if first and len(trials) > 1:
            tokens = max(1, self.instances // preset.trial_stride)
            checked = tokens * self.rates.encoding(spec)
            seconds += len(trials) * (self.rates.training(trials[0], tokens) + checked)
        return shared + seconds

    def _needs_clusters(self, method: Method) -> bool:
        """Whether a method needs ELUDe's clusters: as its parts, or for the number of its own."""
        by_number = self.experiment.setup(self.spec.name).preset.expansion is None
        return method.kind in ("atlas", "split", "classes") or (method.kind == "sae" and by_number)

    @property
    def _clusters(self) -> float:
        return self.rates.d_out * self.rates.unit

    @property
    def _split(self) -> float:
        """Seconds to order instances and to divide units by clusters that are there."""
        return self.instances * self.rates.d_in * (2 * self.rates.d_out + self.parts) * self.rates.multiply

    def _sae(self, method: Method) -> Any:
        preset = self.experiment.setup(self.spec.name).preset
        return preset.sae_spec(method.variant, self.latents) if method.kind == "sae" else None

    def _width(self, method: Method) -> int:
        return self.rates.d_out if method.kind == "units" else self.latents if method.kind == "sae" else self.parts

    def _reading(self, method: Method) -> float:
        """Seconds to read and write one token."""
        spec = self._sae(method)
        if spec is not None:
            return self.rates.encoding(spec)
        return self.rates.multiply * self._width(method) * (self.rates.d_in + self.rates.d_out)

    def disk(self) -> float:
        """Bytes: tokens of all draws, activations of images to measure on, weights of autoencoders, and atlases."""
        rates, preset = self.rates, self.experiment.preset
        tokens = self.instances * rates.d_in * _HALF * len(preset.seeds)
        held = self.held * rates.tokens * (rates.d_in + rates.d_out) * _HALF
        methods = [METHODS[name] for name in self.experiment.methods(self.spec.name) if name in METHODS]
        count = sum(method.kind == "sae" for method in methods)
        weights = 3 * count * self.latents * (rates.d_in + rates.d_out) * _SINGLE * len(self.experiment.seeds)
        parts = self.parts * rates.d_in * (3 * _SINGLE + 1) * len(self.experiment.seeds)
        return tokens + held + weights + parts

    def memory(self, tower: Tower) -> float:
        """Bytes: the model, and the largest of clustering a unit, training, and the images of the MS-Score."""
        rates = self.rates
        model = sum(p.numel() * p.element_size() for p in tower.model.parameters())
        size = clustering_size(self.spec.clusters, self.instances, rates.d_in)
        clustering = memory_needed(fitting_backend(self.spec.clusters.backend, size, tower.device, 1), size)
        training = self.instances * (rates.d_in + rates.d_out) * _SINGLE + 12 * self.latents * rates.d_in * _SINGLE
        peaks = max(self.latents, self.parts) * 100 * rates.d_out * _SINGLE
        return model + max(clustering, training, peaks)


def forecast_edits(edits: Sequence[Edit], images: Mapping[str, Any], options: ReproduceOptions) -> Forecast:
    """What the edits take: the atlas if it has to be built, and the captions."""
    found = Forecast()
    scenes = {edit.scene: images[edit.row] for edit in edits}
    if not needs_build(edits, options):
        steerer = Steerer.load(
            options.atlas or edits[0].recipe.atlas,
            device=options.device,
            threads=options.threads,
            trust_remote_code=options.trust_remote_code,
        )
        return _forecast_captions(found, steerer.vlm, edits, scenes)
    spec = atlas_spec(options)
    count = options.count(options.images, options.limit)
    model = Vlm.load(
        spec.model.id, layer=spec.model.layer, device=options.device, trust_remote_code=options.trust_remote_code
    )
    options.log(f"trying out {spec.model.id.rstrip('/').rsplit('/', 1)[-1]} on this machine")
    spec = resolve_tokens(spec, count)
    instances = count * int(spec.tokens.per_image)
    spec = resolve_clusters(spec, instances)
    items = list(image_set(options.limited(options.images, spec, options.limit), limit=options.limit).items())
    rates = measure_rates(model, spec, items, instances)
    found.on_gpu = model.device.type != "cpu"
    parts = round(rates.parts * rates.d_out)
    ranked = instances * rates.d_in * (2 * rates.d_out + parts) * rates.multiply
    # The tower runs once for the tokens, and again for the images that label and calibrate.
    labelled = min(count, spec.labels.images) + min(count, spec.calibration.images)
    if not (atlas_folder(spec, options) / "manifest.json").exists():
        read = labelled * rates.tokens * rates.d_in * parts * rates.multiply
        found.pieces["atlas"] = (count + labelled) * rates.image + rates.d_out * rates.unit + ranked + read
    _forecast_captions(found, model, edits, scenes)
    found.disk += instances * rates.d_in * _HALF + parts * rates.d_in * (3 * _SINGLE + 1)
    size = clustering_size(spec.clusters, instances, rates.d_in)
    clustering = memory_needed(fitting_backend(spec.clusters.backend, size, model.device, 1), size)
    found.memory += clustering
    if spec.labels.scorer is not None:
        found.notes.append(
            f"The labeller {spec.labels.scorer.rsplit('/', 1)[-1]}, which sees {min(count, spec.labels.images):,} "
            "images, is not in these hours."
        )
    return found


def _forecast_captions(found: Forecast, model: Vlm, edits: Sequence[Edit], scenes: Mapping[str, Any]) -> Forecast:
    """Add the captions of all edits, by the time of one, and the memory of the model."""
    image = open_image(next(iter(scenes.values())))
    model.caption([image])
    caption = timed(lambda: model.caption([image]), model.device)
    for scene in scenes:
        found.pieces[f"captions of {scene}"] = caption * (1 + sum(edit.scene == scene for edit in edits))
    found.on_gpu = model.device.type != "cpu"
    found.memory += sum(p.numel() * p.element_size() for p in model.model.parameters())
    return found
