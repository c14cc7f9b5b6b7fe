"""Recipes as frozen dataclasses: one class a section, the same names in both; `documents` reads the YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from elude_steer.documents import parse_document
from elude_steer.errors import SpecError, closest


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and which of its layers is taken apart.

    Attributes:
        id: A Hub id, a folder, or a timm name.
        layer: The end of the target's dotted name, such as `encoder.layer.11.mlp.fc2`; layers count from 0.
        kind: A vision-language model, a vision model of transformers, or one of timm.
        revision: The commit or tag to load; null takes the newest.
        dtype: What the model computes in; `auto` is what its checkpoint was saved in.
        attn_implementation: The attention of transformers to use; null leaves the choice to it.
        trust_remote_code: Whether code that comes with the checkpoint may run.
    """

    id: str
    layer: str
    kind: Literal["vlm", "vision", "timm"] = "vlm"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ImagesSpec:
    """The probing images.

    Attributes:
        source: A folder, a text file of paths, or `hf:` and a dataset id; null leaves it to the caller (`--images`).
        split: The split of a dataset.
        column: The column of a dataset that holds the images.
        limit: How many images to take at most; null takes all.
    """

    source: str | None = None
    split: str = "train"
    column: str = "image"
    limit: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class TokensSpec:
    """What is kept of each image.

    Attributes:
        per_image: How many random tokens, drawn over all tiles; `all` keeps every one.
        seed: Of the draw.
        dtype: What the layer's inputs are stored in.
        batch_size: Images in one forward pass.
    """

    per_image: int | Literal["all"] = field(default=2, metadata={"min": 1})
    seed: int = field(default=42, metadata={"min": 0})
    dtype: Literal["float16", "float32"] = "float16"
    batch_size: int = field(default=8, metadata={"min": 1})


@dataclass(frozen=True)
class ClustersSpec:
    """How the strongest instances of a unit are grouped.

    Attributes:
        top_k: How many instances of largest activation a unit is judged by.
        backend: Whose HDBSCAN; `auto` takes the best one installed.
        selection: Which clusters of the tree count: its leaves, or those with the largest excess of mass.
        min_cluster_size: The smallest group that counts as a cluster.
        min_samples: HDBSCAN's density setting; null means min_cluster_size.
        umap_components: Reduce to this many dimensions with UMAP first; null does not.
        umap_neighbors: UMAP's neighbourhood, where UMAP is used.
        seed: Of whatever is random in the grouping.
    """

    top_k: int = field(default=10000, metadata={"min": 2})
    backend: Literal["auto", "exact", "hdbscan", "cuml"] = "auto"
    selection: Literal["leaf", "eom"] = "leaf"
    min_cluster_size: int = field(default=1000, metadata={"min": 2})
    min_samples: int | None = field(default=None, metadata={"min": 1})
    umap_components: int | None = field(default=None, metadata={"min": 1})
    umap_neighbors: int = field(default=15, metadata={"min": 2})
    seed: int = field(default=42, metadata={"min": 0})


@dataclass(frozen=True)
class SplitSpec:
    """How a unit's weights are shared out among its sub-units.

    Attributes:
        winner_rule: Who owns an input dimension: `unique` is the paper's rule, `gap` the widest gap, `winner` always
            the largest alone, `random` a random partition to compare with.
        rho_score: What the threshold rho is chosen by.
        seed: Of the random partition.
    """

    winner_rule: Literal["unique", "gap", "winner", "random"] = "unique"
    rho_score: Literal["margin", "ratio"] = "margin"
    seed: int = field(default=42, metadata={"min": 0})


@dataclass(frozen=True)
class ReferencesSpec:
    """What is remembered of a sub-unit's strongest instances.

    Attributes:
        instances: How many of them its reference activation is the mean of.
        keep: How many of them are stored by image and patch.
    """

    instances: int = field(default=100, metadata={"min": 1})
    keep: int = field(default=25, metadata={"min": 1})


@dataclass(frozen=True)
class AtlasSpec:
    """How an atlas is built; the sections stand in the order of the run.

    Attributes:
        name: What the atlas is called.
        model: Which model and layer.
        images: The probing images.
        tokens: What is kept of each image.
        clusters: How a unit's instances are grouped.
        split: How its weights are shared out.
        references: What is remembered of each sub-unit.
    """

    name: str
    model: ModelSpec
    images: ImagesSpec = field(default_factory=ImagesSpec)
    tokens: TokensSpec = field(default_factory=TokensSpec)
    clusters: ClustersSpec = field(default_factory=ClustersSpec)
    split: SplitSpec = field(default_factory=SplitSpec)
    references: ReferencesSpec = field(default_factory=ReferencesSpec)


class Shipped(NamedTuple):
    """One recipe that comes with the package; `kind` is its folder, `summary` its first comment line."""

    kind: str
    name: str
    path: Path
    summary: str


def load_spec(path_or_name: str | Path) -> AtlasSpec:
    """The build spec in a YAML file, or in the shipped recipe of that name.

    Example:
        >>> load_spec("dinov2-base-layer12").clusters.top_k
        400000
    """
    path = find_recipe(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return parse_spec(text, where=str(path))


def find_recipe(path_or_name: str | Path) -> Path:
    """The YAML file of a path or of a shipped recipe's name."""
    # A folder of the same name is no obstacle: `--out NAME` makes one.
    if Path(path_or_name).is_file():
        return Path(path_or_name)
    shipped = {recipe.name: recipe.path for recipe in list_recipes()}
    name = str(path_or_name).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    hint = closest(Path(name).name, list(shipped))
    raise SpecError(f"'{path_or_name}' is neither a file nor a shipped recipe.{hint} See `elude-steer recipes list`.")


def parse_spec(text: str, where: str = "<text>") -> AtlasSpec:
    """The build spec that a YAML text says; `where` names the text in error messages."""
    return parse_document(AtlasSpec, text, where)


def recipes_dir() -> Path:
    """The folder of shipped recipes: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def list_recipes() -> list[Shipped]:
    """Every shipped recipe, sorted by kind and name."""
    root = recipes_dir()
    found = []
    for path in root.glob("*/**/*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.lstrip("#").strip() if first.startswith("#") else ""
        found.append(Shipped(path.relative_to(root).parts[0], path.stem, path, summary))
    return sorted(found)
