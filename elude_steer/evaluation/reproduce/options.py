"""What `reproduce` is asked to run, and how a recipe is adapted to a smaller budget and other checkpoints.

Nothing here loads torch before an image set is counted, so that wrong names are refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from elude_steer.errors import SpecError
from elude_steer.evaluation.reproduce.paper import read_table
from elude_steer.models.images import ImageSet, image_set
from elude_steer.specs import AtlasSpec
from elude_steer.utils.yaml_schema import override

PRESETS = ("paper", "small", "tiny")
PAPER_INSTANCES = 2 * 1_281_167  # two tokens of every image of ImageNet-1k


@dataclass(frozen=True)
class ReproduceOptions:
    """Everything that a run is asked for.

    Attributes:
        images: the images that methods learn from.
        held_out: the images to measure on; None for those that methods learn from.
        work: folder of finished pieces, from which a run continues.
        rows: the rows to run: methods, settings of the ablations, or edits; empty for all.
        backbones: recipe -> model to use in its place, None for its own; empty for all of the table.
        seeds: seeds of the token draws; empty for those of the preset.
        limit: largest number of images to learn from, spread over all.
        held_out_limit: the same of those to measure on.
        preset: `paper`, or a smaller budget.
        protocol: how `efficiency` times passes; None takes the paper's with preset `paper`, else the small one.
        passes: number of timed passes instead of the protocol's; a fifth as many run before them.
        heads: recipe -> a classifier on the backbone.
        judges: of the images of units, as `MODEL@URL`.
        pairs: comparisons for each pair of methods and draw.
        scenes: images of the edits.
        recipes: of the edits; empty for the paper's.
        atlas: an atlas for the edits, which is not built then.
        changes: to the recipes' specs, such as `clusters.top_k=500`.
        device: where models run.
        threads: on a CPU.
        trust_remote_code: whether code that comes with models may run.
        log: called with a line for each step.
    """

    images: Any = None
    held_out: Any = None
    work: Path = Path("work")
    rows: tuple[str, ...] = ()
    backbones: Mapping[str, str | None] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    limit: int | None = None
    held_out_limit: int | None = None
    preset: Literal["paper", "small", "tiny"] = "paper"
    protocol: Literal["paper", "small"] | None = None
    passes: int | None = None
    heads: Mapping[str, str] = field(default_factory=dict)
    judges: tuple[str, ...] = ()
    pairs: int = 50
    scenes: str | None = None
    recipes: tuple[str, ...] = ()
    atlas: str | None = None
    changes: tuple[str, ...] = ()
    device: str | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    log: Callable[[str], object] = field(default=lambda line: None)

    def adapt(self, spec: AtlasSpec) -> AtlasSpec:
        """A recipe with the checkpoint, the sizes and the changes of this run.

        With fewer images than the paper has, a unit keeps the same share of the instances, and the smallest cluster
        the same share of these, as far as there are enough.
        """
        model = self.backbones.get(spec.name)
        if model is not None:
            spec = replace(spec, model=replace(spec.model, id=model, revision=None))
        if self.preset != "paper":
            spec = scale_sizes(spec, self.count(self.images, self.limit))
        return override(spec, self.changes)

    @property
    def measured_on(self) -> Any:
        """The images to measure on."""
        return self.images if self.held_out is None else self.held_out

    def count(self, source: Any, limit: int | None) -> int:
        """Number of images of a source."""
        found = image_set(source, limit=limit).length
        if found is None:
            raise SpecError("`reproduce` reads its images several times, which a stream does not allow; give a folder.")
        return found

    def image_set(self, source: Any, spec: AtlasSpec, limit: int | None) -> ImageSet:
        """The images of a source, at most so many."""
        return image_set(
            self.limited(source, spec, limit), split=spec.images.split, column=spec.images.column, limit=limit
        )

    def limited(self, source: Any, spec: AtlasSpec, limit: int | None) -> Any:
        """A folder's images as paths if only some are taken, spread over all, because folders are sorted by class."""
        if limit is None or not isinstance(source, str | Path) or not Path(source).expanduser().is_dir():
            return source
        folder = Path(source).expanduser()
        names = [item.id for item in image_set(folder).items()]
        if len(names) <= limit:
            return source
        return [str(folder / names[number * len(names) // limit]) for number in range(limit)]


def scale_sizes(spec: AtlasSpec, images: int) -> AtlasSpec:
    """The sizes of a recipe for fewer images: the paper's shares of instances, as far as there are enough."""
    from elude_steer.atlas.build.sizes import MIN_TOP_K, SMALLEST, tokens_per_image

    per_image = max(int(spec.tokens.per_image) if spec.tokens.per_image != "auto" else 2, tokens_per_image(images))
    instances = per_image * images
    if instances >= PAPER_INSTANCES or spec.clusters.top_k == "auto" or spec.clusters.min_cluster_size == "auto":
        return spec
    top_k, smallest = int(spec.clusters.top_k), int(spec.clusters.min_cluster_size)
    scaled = min(instances, max(MIN_TOP_K, round(top_k * instances / PAPER_INSTANCES)))
    size = max(SMALLEST, round(smallest * scaled / top_k))
    return replace(
        spec,
        tokens=replace(spec.tokens, per_image=per_image),
        clusters=replace(spec.clusters, top_k=scaled, min_cluster_size=size),
    )


def check_names(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names that are given, or all that are known; raises for another."""
    for name in given:
        if name not in known:
            raise SpecError(f"there is no {what} '{name}' here; there are {', '.join(known)}.")
    return list(given) or list(known)


# Rows that the paper's tables do not have and that can be asked for.
MORE_ROWS = (
    "ELUDe (gap)",
    "random split",
    "k-means on contributions",
    "clusters of activations",
    "DPCiCNN (supervised)",
)


def find_backbones(name: str, options: ReproduceOptions) -> list[str]:
    """The recipes of a table that are run; raises for one that it does not have."""
    return check_names(list(options.backbones), read_table(name).backbones, "backbone")


def find_rows(name: str, backbone: str, options: ReproduceOptions) -> list[str]:
    """The rows of a backbone that are run, in the paper's order; raises for one that there is not."""
    known = list(read_table(name).methods(backbone))
    if options.rows and name in ("interpretability", "generalization", "stability"):
        known += MORE_ROWS
    chosen = check_names(options.rows, known, "row")
    return [row for row in known if row in chosen]
