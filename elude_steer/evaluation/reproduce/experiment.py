"""What a table of the paper asks for: its backbones and rows, as setups that `evaluation.tables` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.reproduce.options import ReproduceOptions, find_backbones, find_rows
from elude_steer.evaluation.reproduce.paper import AS_IT_IS, PaperTable, read_table
from elude_steer.evaluation.tables.properties import has_properties
from elude_steer.evaluation.tables.setup import PRESETS, Preset, TableSetup
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec
from elude_steer.utils.fingerprint import make_key

if TYPE_CHECKING:
    from elude_steer.evaluation.tables.efficiency import Protocol

NAMES = ("steering", "interpretability", "generalization", "ablations", "stability", "efficiency", "judge")
ELUDE = "ELUDe (unique)"
RAW = "raw units"  # the paper's "backbone only"
UMAP_SETTING = "clusters.umap_components"  # the paper's row with UMAP before the clustering
UMAP = "32"  # dimensions; the paper does not say how many


@dataclass(frozen=True, eq=False)
class Experiment:
    """One table and what is run of it.

    Attributes:
        name: of the table.
        options: what to run.
    """

    name: str
    options: ReproduceOptions

    @cached_property
    def table(self) -> PaperTable:
        """The paper's table."""
        return read_table(self.name)

    @cached_property
    def backbones(self) -> list[str]:
        """The recipes that are run."""
        return find_backbones(self.name, self.options)

    def methods(self, backbone: str) -> list[str]:
        """The rows of a backbone that are run, in the paper's order."""
        return find_rows(self.name, backbone, self.options)

    @cached_property
    def preset(self) -> Preset:
        """The budget; ELUDe is the paper's in all rows, so it sets the number of parts of other methods."""
        preset = PRESETS[self.options.preset]
        methods = tuple(name for name in METHODS if name in read_table("interpretability").methods(_FIRST))
        return replace(preset, methods=methods)

    @cached_property
    def protocol(self) -> Protocol:
        """How passes are timed."""
        from elude_steer.evaluation.tables.efficiency import PAPER_PROTOCOL, SMALL_PROTOCOL

        name = self.options.protocol or ("paper" if self.options.preset == "paper" else "small")
        protocol, passes = PAPER_PROTOCOL if name == "paper" else SMALL_PROTOCOL, self.options.passes
        return protocol if passes is None else replace(protocol, warm_up=max(1, passes // 5), runs=passes)

    @cached_property
    def seeds(self) -> list[int]:
        """The token draws that are run."""
        for seed in self.options.seeds:
            if seed not in self.preset.seeds:
                known = ", ".join(map(str, self.preset.seeds))
                raise SpecError(f"there is no token seed {seed} in preset '{self.preset.name}'; there are {known}.")
        return list(self.options.seeds or self.preset.seeds)

    @property
    def draws(self) -> list[int]:
        """The token draws that rows are made from."""
        return self.seeds[:1] if self.uses_one_draw else self.seeds

    @property
    def uses_one_draw(self) -> bool:
        """Whether rows are of the first draw alone: runs are compared on it, or passes timed, which are the same."""
        return self.name in ("stability", "efficiency")

    def spec(self, backbone: str) -> AtlasSpec:
        """How the atlas of a backbone is built."""
        return self.options.adapt(load_spec(backbone))

    def setup(self, backbone: str) -> TableSetup:
        """The backbone on this run's images. The EF4 rows have half of the paper's latents, those of EF16 twice."""
        options, spec, preset = self.options, self.spec(backbone), self.preset
        if preset.expansion is not None:
            factor = {"ef4": 4.0, "ef16": 16.0}.get(backbone.rsplit("-", 1)[-1])
            preset = preset if factor is None else replace(preset, expansion=factor)
        return TableSetup(
            spec,
            options.limited(options.images, spec, options.limit),
            options.limited(options.measured_on, spec, options.held_out_limit),
            options.work,
            preset,
            limit=options.limit,
            held_out_limit=options.held_out_limit,
            head=options.heads.get(backbone),
            device=options.device,
            threads=options.threads,
            trust_remote_code=options.trust_remote_code,
            log=options.log,
        )

    @cached_property
    def _folders(self) -> dict[str, str]:
        """Names of the setups' folders, which say what a setup is; found once, because all images count."""
        return {backbone: self.setup(backbone).folder.name for backbone in self.backbones}

    def find_key(self, piece: str) -> str:
        """What the hours of a piece, `backbone: …`, depend on: the setup, and what several rows share."""
        backbone, _, what = piece.partition(": ")
        shared: list[object] = []
        if what == "judges":
            shared = [self.options.judges, self.options.pairs, self.seeds, self.methods(backbone)]
        elif what == "collages":
            shared = [self.collage_method(backbone)]
        elif self.name == "efficiency":
            shared = [asdict(self.protocol), self.methods(backbone)]
        return make_key(self._folders[backbone], shared)

    @property
    def shows_parts(self) -> bool:
        """Whether the properties of methods and collages of units belong to the page."""
        return self.name in ("interpretability", "generalization")

    @property
    def runs(self) -> int:
        """Runs on the same tokens that decide whether a method is stable; `stability` has more where the paper has."""
        return min(2, self.preset.runs)

    def unmeasured_properties(self, backbone: str) -> list[str]:
        """The methods whose properties are not there yet."""
        setup = self.setup(backbone)
        return [name for name in self.property_methods(backbone) if not has_properties(setup, name, self.seeds[0])]

    def property_methods(self, backbone: str) -> list[str]:
        """The methods that have properties: all but the units, which divide nothing."""
        return [name for name in self.methods(backbone) if name != RAW] if self.shows_parts else []

    def collage_method(self, backbone: str) -> str | None:
        """The method whose parts are shown: ELUDe, or else another split of units that is run."""
        methods = self.methods(backbone) if self.shows_parts else []  # rows of the ablations are no methods
        splits = [name for name in methods if METHODS[name].splits_units and name != RAW]
        return make_order(splits)[0] if splits else None

    def collages_path(self, backbone: str) -> Path:
        """The file of the collages of a backbone."""
        number = METHODS[self.collage_method(backbone) or RAW].number
        return self.setup(backbone).folder / "collages" / f"{number:02d}-{self.seeds[0]}.json"

    def variations(self, backbone: str) -> list[tuple[str, str, str]]:
        """The rows of the ablations: the paper's name of each, the setting, and its value at this run's sizes."""
        clusters, paper = self.spec(backbone).clusters, load_spec(backbone).clusters
        found = []
        for row in self.methods(backbone):
            if row == AS_IT_IS:
                found.append((row, "", ""))
                continue
            setting, _, value = row.partition("=")
            if value.isdecimal() and int(value) > 1 and clusters.min_cluster_size != paper.min_cluster_size:
                share = int(value) / int(paper.min_cluster_size)
                value = str(max(2, round(share * int(clusters.min_cluster_size))))
            found.append((row, setting, value or UMAP))
        return found


_FIRST = "dinov2-base-layer12"


def make_order(methods: Sequence[str]) -> list[str]:
    """ELUDe first, because it sets the sizes of other methods, then the others in their order."""
    return sorted(methods, key=lambda name: (name != ELUDE, list(methods).index(name)))
