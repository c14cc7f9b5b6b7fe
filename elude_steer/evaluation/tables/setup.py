"""What a table is made of: a backbone and a layer, images, and the budget of the methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import METHODS, Method, find_methods
from elude_steer.models.images import ImageSet, Item, image_set
from elude_steer.specs import AtlasSpec, LabelsSpec, SplitSpec
from elude_steer.utils.fingerprint import make_key, versions

if TYPE_CHECKING:
    from elude_steer.evaluation.baselines.sae import SaeSpec

_AUTOENCODERS = tuple(name for name, method in METHODS.items() if method.kind == "sae")
# Differences of means need to know what each token shows; DPCiCNN needs classes, and is left out without them.
_ALL = tuple(name for name, method in METHODS.items() if method.kind != "means")
NEEDS_CLASSES = (
    "'DPCiCNN (supervised)' needs classes: put the images into one folder for each class, name a classifier of the "
    "backbone, or leave the method out."
)


@dataclass(frozen=True)
class Preset:
    """The budget of a table.

    Attributes:
        name: how it is called.
        seeds: of the draws of tokens; all methods are made once from each.
        training_seeds: of the runs on one draw; the first is that of the table.
        epochs: training epochs of an autoencoder; matching pursuit takes `pursuit` of them.
        pursuit: the share of the epochs that matching pursuit takes, whose steps take many times as long.
        batch_size: tokens of a training step.
        grid: the settings that are tried: the paper's, all crossed, or nine points.
        rates: learning rates of the grid of nine points.
        trials: at most so many points of the grid; None tries all.
        trial_epochs: epochs of a trial.
        trial_stride: a trial trains on every so many-th token of the first draw.
        dead: which latents the loss revives: those dead in the batch, as in the paper, or for 50 steps.
        expansion: latents of an autoencoder for each unit; None gives it as many as ELUDe has sub-units.
        runs: how often each method is made from the same tokens for the stability.
        methods: names of the methods that run by default.
    """

    name: str
    seeds: tuple[int, ...] = (42, 123, 999)
    training_seeds: tuple[int, ...] = (42, 7, 1024)
    epochs: int = 50
    pursuit: float = 1.0
    batch_size: int = 4096
    grid: Literal["paper", "nine"] = "paper"
    rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    trials: int | None = None
    trial_epochs: int = 50
    trial_stride: int = 1
    dead: Literal["batch", "steps"] = "batch"
    expansion: float | None = 8.0
    runs: int = 3
    methods: tuple[str, ...] = _ALL

    @property
    def base_rule(self) -> str:
        """The rule of the atlas that sets the number of parts and latents of other methods."""
        rules = [METHODS[name].variant for name in self.methods if METHODS[name].kind == "atlas"]
        return rules[0] if rules else "gap"

    def sae_spec(self, kind: Any, latents: int, run: int = 0) -> SaeSpec:
        """The settings of an autoencoder before trials choose some of them."""
        from elude_steer.evaluation.baselines.sae import SaeSpec

        epochs = max(1, round(self.epochs * (self.pursuit if kind == "matching_pursuit" else 1)))
        return SaeSpec(
            kind,
            latents,
            active=0.1 if kind == "archetypal" else 20,
            dead_after=0 if self.dead == "batch" else 50,
            epochs=epochs,
            batch_size=self.batch_size,
            seed=self.training_seeds[run],
        )

    def trial_specs(self, spec: SaeSpec) -> list[SaeSpec]:
        """What is tried before an autoencoder is trained with the settings that do best."""
        from elude_steer.evaluation.baselines.sae import make_grid, make_paper_grid

        share = spec.epochs / self.epochs
        short = replace(spec, epochs=max(1, round(self.trial_epochs * share)), seed=self.training_seeds[0])
        grid = make_paper_grid(short) if self.grid == "paper" else make_grid(short, self.rates)
        return grid[: self.trials]


# As in the paper: its methods, an expansion of 8, and 99 points of grids, each trained like the reported autoencoders,
# and the transcoder's 27.
PAPER = Preset("paper", methods=("raw units", *_AUTOENCODERS, "ELUDe (unique)"))
# For one machine without a GPU. With small batches, six epochs have enough steps; the learning rates suit so few.
SMALL = Preset(
    "small",
    epochs=6,
    pursuit=1 / 3,
    batch_size=1024,
    grid="nine",
    rates=(5e-4, 2e-3, 5e-3),
    trial_epochs=3,
    trial_stride=6,
    dead="steps",
    expansion=None,
    runs=2,
)
TINY = replace(SMALL, name="tiny", seeds=(42, 123), epochs=2, batch_size=64, trials=1, trial_epochs=1, trial_stride=1)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (PAPER, SMALL, TINY)}


def find_preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise SpecError(f"there is no preset '{name}'; there are {', '.join(PRESETS)}.")
    return PRESETS[name]


@dataclass(frozen=True, eq=False)
class TableSetup:
    """One backbone and one of its layers, on some images.

    Attributes:
        spec: how an atlas of the layer is built; its model, tokens and clusters count, and its labels do not.
        images: the probing images, which methods learn from; see `images.image_set`.
        held_out: the images to measure on.
        work: folder for everything that is made; a further run continues from it.
        preset: the budget.
        limit: maximum number of probing images.
        held_out_limit: maximum number of images to measure on.
        head: an image classifier of transformers on the same backbone, for the accuracy; models of timm have their own.
        classes: class of each image, by its id; by default, its folder, or a scene's first object.
        device: where models run.
        threads: threads of torch on a CPU; by default the model's size and the free cores decide.
        trust_remote_code: whether code that comes with the model may run.
        log: called with a line for each step.

    Example:
        >>> setup = TableSetup(load_spec("dinov2-base-layer12"), "imagenet/train", "imagenet/val", Path("work"))
        >>> rows = run_table(setup, ["raw units", "ELUDe (unique)"])
    """

    spec: AtlasSpec
    images: Any
    held_out: Any
    work: Path
    preset: Preset = SMALL
    limit: int | None = None
    held_out_limit: int | None = None
    head: str | None = None
    classes: Mapping[str, str] | None = None
    device: str | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    log: Callable[[str], object] = field(default=lambda line: None)

    @property
    def name(self) -> str:
        """The name of the backbone and layer in tables."""
        return self.spec.name

    @cached_property
    def image_set(self) -> ImageSet:
        """The probing images."""
        return self._open(self.images, self.limit)

    @cached_property
    def held_out_set(self) -> ImageSet:
        """The images to measure on."""
        return self._open(self.held_out, self.held_out_limit)

    def _open(self, source: Any, limit: int | None) -> ImageSet:
        spec = self.spec.images
        found = image_set(source, split=spec.split, column=spec.column, limit=limit)
        if found.length is None:
            raise SpecError("a table reads its images several times, which a stream does not allow; give a folder.")
        return found

    def atlas_spec(self, seed: int, rule: str = "gap") -> AtlasSpec:
        """The spec of an atlas of this layer, without labels."""
        return replace(
            self.spec,
            tokens=replace(self.spec.tokens, seed=seed),
            split=SplitSpec(winner_rule=rule),  # type: ignore[arg-type]
            labels=LabelsSpec(scorer=None),
        )

    @cached_property
    def folder(self) -> Path:
        """Where everything of this setup is stored; another model, image, budget or version has another folder."""
        causes = [
            asdict(self.spec.model),
            {**asdict(self.spec.tokens), "seed": None},
            asdict(self.spec.clusters),
            self.image_set.fingerprint,
            self.held_out_set.fingerprint,
            {**asdict(self.preset), "methods": None},  # of which only the base rule changes what the others are
            self.preset.base_rule,
            self.head,
            None if self.classes is None else sorted(self.classes.items()),
            versions(),
        ]
        return Path(self.work).expanduser() / f"{self.name}-{make_key(*causes)}"

    def default_methods(self) -> list[str]:
        """The methods that run if nobody names some: those of the preset that can run here."""
        return [name for name in self.preset.methods if METHODS[name].kind != "classes" or self._knows_classes]

    @cached_property
    def _knows_classes(self) -> bool:
        """Whether probing images have classes, or a classifier can tell them."""
        classified = self.head is not None or self.spec.model.kind == "timm"
        return classified or has_classes(list(self.image_set.items()), self.classes)

    def find_methods(self, names: Sequence[str] | None) -> list[Method]:
        """The methods with these names, or the default ones; raises for one that cannot run here."""
        methods = find_methods(self.default_methods() if names is None else names)
        for method in methods:
            if method.kind == "means":
                raise SpecError(f"'{method.name}' needs to know what each token shows; only toyland's `compare` does.")
            if method.kind == "classes" and not self._knows_classes:
                raise SpecError(NEEDS_CLASSES)
        return methods

    def find_seeds(self, seeds: Sequence[int] | None) -> list[int]:
        """The token seeds, by default all of the preset; raises for one that it does not have."""
        chosen = list(self.preset.seeds if seeds is None else seeds)
        for seed in chosen:
            if seed not in self.preset.seeds:
                known = ", ".join(map(str, self.preset.seeds))
                raise SpecError(f"there is no token seed {seed} in preset '{self.preset.name}'; there are {known}.")
        return chosen


_SCENE = re.compile(r"toyland:([0-9]{1,18}):([0-9]{1,18})")  # the id of one; a file may begin like it


def class_of(id: str, classes: Mapping[str, str] | None) -> str | None:
    """The class of an image: that of its id, or of its file's name, or its folder; None where there is none."""
    if classes is not None:
        return classes.get(id, classes.get(Path(id).name))
    if scene := _SCENE.fullmatch(id):
        return _first_object(int(scene[1]), int(scene[2]))
    parent = Path(id).parent.name
    return parent or None


@cache
def _first_object(seed: int, number: int) -> str | None:
    """The first object of a scene; None for a scene without objects."""
    from elude_steer.toyland.scenes import scenes

    return next((thing.name for thing in next(scenes(seed, 1, start=number)).things), None)


def has_classes(items: Sequence[Item], classes: Mapping[str, str] | None) -> bool:
    """Whether the images are of at least two classes."""
    return len({class_of(item.id, classes) for item in items} - {None}) > 1
