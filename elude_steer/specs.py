"""The YAML documents as frozen dataclasses: one class per section, with the same names.

`AtlasSpec` says how to build an atlas, `Recipe` says what to change in captions, `Settings` holds the settings of one
edit. `utils/yaml_schema.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, Unpack, get_args, get_type_hints

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)


@dataclass(frozen=True)
class ModelSpec:
    """The model, and the layer to split.

    Attributes:
        id: A Hub id, a folder, or a timm name.
        layer: The end of the target's dotted name, such as `encoder.layer.11.mlp.fc2`; layers count from 0.
        kind: A vision-language model, a vision model of transformers, or a model of timm.
        revision: The commit or tag to load; null takes the newest.
        dtype: The model's data type; `auto` is that of its checkpoint.
        attn_implementation: The attention implementation of transformers; null lets transformers choose.
        trust_remote_code: Whether it needs code of its own, which runs only if the caller of the build allows it, too.
        autocast: Data type of the tower's matrix products during a build; null keeps the model's.
    """

    id: str
    layer: str
    kind: Literal["vlm", "vision", "timm"] = "vlm"
    revision: str | None = None
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None


@dataclass(frozen=True)
class ImagesSpec:
    """The probing images.

    Attributes:
        source: A folder, a text file of paths, `hf:` and a dataset id, or `toyland:` and the seed of drawn scenes; null
            means that the caller gives them (`--images`).
        split: The split of a dataset.
        column: The column of a dataset that holds the images.
        limit: Maximum number of images; null takes all.
    """

    source: str | None = None
    split: str = "train"
    column: str = "image"
    limit: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class TokensSpec:
    """The tokens stored for each image.

    Attributes:
        per_image: Number of random tokens, drawn over all tiles; `all` stores all tokens. `auto` is 2 (the paper's)
            for many images and more for fewer.
        seed: Seed of the draw.
        dtype: Data type in which the layer's inputs are stored.
        batch_size: Images in one forward pass.
        reuse: Keep the tower's activations on disk until the atlas is done, within a quarter of the free space, so that
            labelling needs no second pass. Changes the time, and the last bits where labels come from fewer images
            than tokens.
    """

    per_image: int | Literal["all", "auto"] = field(default="auto", metadata={"min": 1})
    seed: int = field(default=42, metadata={"min": 0})
    dtype: Literal["float16", "float32"] = "float16"
    batch_size: int = field(default=8, metadata={"min": 1})
    reuse: bool = True


@dataclass(frozen=True)
class ClustersSpec:
    """How the strongest instances of a unit are clustered.

    Attributes:
        top_k: Number of instances per unit, those with the largest activations; `auto` is a share of those stored.
        backend: The implementation of HDBSCAN; `fast` approximates, `auto` takes the most exact one that fits the
            memory.
        selection: Which clusters of the tree to take: its leaves, or those with the largest excess of mass.
        min_cluster_size: The smallest group that counts as a cluster; `auto` is a share of the instances per unit.
        min_samples: HDBSCAN's density setting; null means min_cluster_size.
        umap_components: Reduce to this many dimensions with UMAP first; null does not.
        umap_neighbors: Size of UMAP's neighbourhood, if UMAP is used.
        seed: Seed of the random parts of the clustering.
        units: Split only this many units, the first ones, and leave the others whole; for trials.
    """

    top_k: int | Literal["auto"] = field(default="auto", metadata={"min": 2})
    backend: Literal["auto", "exact", "fast", "hdbscan", "cuml"] = "auto"
    selection: Literal["leaf", "eom"] = "leaf"
    min_cluster_size: int | Literal["auto"] = field(default="auto", metadata={"min": 2})
    min_samples: int | None = field(default=None, metadata={"min": 1})
    umap_components: int | None = field(default=None, metadata={"min": 1})
    umap_neighbors: int = field(default=15, metadata={"min": 2})
    seed: int = field(default=42, metadata={"min": 0})
    units: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class SplitSpec:
    """How a unit's weights are divided among its sub-units.

    Attributes:
        winner_rule: Which sub-units own an input dimension: `unique` is the paper's rule, `gap` cuts at the widest gap,
            `winner` takes the largest alone, `random` is a random partition for comparison.
        rho_score: The score by which the threshold rho is chosen.
        seed: Seed of the random partition.
    """

    winner_rule: Literal["unique", "gap", "winner", "random"] = "unique"
    rho_score: Literal["margin", "ratio"] = "margin"
    seed: int = field(default=42, metadata={"min": 0})


@dataclass(frozen=True)
class ReferencesSpec:
    """What is stored about a sub-unit's strongest instances.

    Attributes:
        instances: Number of instances whose mean is the reference activation.
        keep: Number of instances stored by image and patch.
        thumbnails: Side in pixels of small copies of their images; null stores none.
    """

    instances: int = field(default=100, metadata={"min": 1})
    keep: int = field(default=25, metadata={"min": 1})
    thumbnails: int | None = field(default=None, metadata={"min": 8})

    removed: ClassVar[Mapping[str, str]] = {"streams": "the section `calibration` measures the stream now"}


@dataclass(frozen=True)
class LabelsSpec:
    """How sub-units get their labels (CLIP-Dissect).

    Attributes:
        scorer: The dual encoder that scores images against words, a Hub id or folder; null gives no labels.
        library: The library that loads it; `open_clip` needs the extra `openclip`.
        pretrained: The tag of open_clip's weights.
        revision: The commit or tag to load; null takes the newest.
        dtype: The scorer's data type.
        images: Maximum number of probing images, evenly spread, from which labels and references are found.
        vocabulary: A text file with one word per line, or `nouns` or `toyland`, which come with the package.
        template: The text that the scorer reads for a word, which replaces `{}`.
        stop_words: Whether to remove function words from the vocabulary.
        method: The score of a word for a sub-unit.
        top_k: Number of a sub-unit's strongest images; null takes the method's default, also in the next three.
        a: How sharply an image decides between words.
        lam: Penalty on words that fit every sub-unit.
        min_prob: Smallest probability, which keeps logarithms finite.
        keep: Number of words stored for each sub-unit.
        same: Correlation from which two sub-units count as redundant.
    """

    scorer: str | None = None
    library: Literal["transformers", "open_clip"] = "transformers"
    pretrained: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    images: int = field(default=50000, metadata={"min": 1})
    vocabulary: str = "nouns"
    template: str = "{}"
    stop_words: bool = False
    method: Literal["soft_wpmi", "wpmi", "cos_cubed"] = "soft_wpmi"
    top_k: int | None = field(default=None, metadata={"min": 1})
    a: float | None = None
    lam: float | None = None
    min_prob: float | None = None
    keep: int = field(default=32, metadata={"min": 1})
    same: float = 0.8


@dataclass(frozen=True)
class CalibrationSpec:
    """How the detector and the direction of each word are found, which mode place needs.

    Attributes:
        images: Maximum number of images, of those that give labels; 0 calibrates nothing.
        fit: The share of a word's highest reading in an image that the patches of its region have; 0 takes the whole
            image. For edits, set `steering.fit` to the same.
    """

    images: int = field(default=10_000, metadata={"min": 0})
    fit: float = field(default=0.4, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class MatcherSpec:
    """The text encoder that finds sub-units by word.

    Attributes:
        id: A sentence-transformers model: a Hub id or folder.
        revision: The commit or tag to load; null takes the newest.
        trust_remote_code: Whether it needs code of its own, which runs only if whoever steers allows it, too.
    """

    id: str = "perplexity-ai/pplx-embed-v1-0.6b"
    revision: str | None = None
    trust_remote_code: bool = False


def _setting(default: Any, help: str, *, hint: str = "", demo: int | None = None, **limits: float) -> Any:
    """A field of `Settings`.

    Args:
        default: The value used if nobody gives one.
        help: The help text of the command line's option.
        hint: The line below the demo's field, for people who have not read the paper.
        demo: The position of the demo's field; None leaves the setting out of the page.
        **limits: `min` and `max`.
    """
    return field(default=default, metadata={"help": help, "hint": hint, "demo": demo, **limits})


@dataclass(frozen=True)
class Settings:
    """The settings of an edit, with the paper's values as defaults and the paper's names where it has one.

    Each is written here once. `SteeringSpec`, the options of the command line and the fields of the demo are made from
    these fields.
    """

    mode: Literal["scale", "place"] = _setting(
        "scale",
        "Multiply sub-units where they fire (scale, as in the paper), or take concepts out of the region where they "
        "are and put others there (place).",
        hint="place finds where a word is and changes what the model sees there; scale, the paper's mode, multiplies "
        "sub-units where they fire",
        demo=2,
    )
    strength: float = _setting(
        1.0,
        "How much of a word is taken out or put in, in place; 1 is as much as its images carry.",
        hint="how much of a word is taken out or put in (place); 1 is as much as images with it carry",
        demo=1,
        min=0,
    )
    fit: float = _setting(
        0.4,
        "The share of a word's highest reading in the image that the patches of its region have, in place; 0 takes "
        "the whole image.",
        hint="the share of its peak that a word must reach on the patches of its region (place); 0 takes the image",
        demo=3,
        min=0,
        max=1,
    )
    seen: float = _setting(
        0.5,
        "Leave the image as it is where a minus word reads less than this share of what it reaches where it is, in "
        "place.",
        hint="the share of its usual reading from which a word counts as seen (place)",
        demo=4,
    )
    force: bool = _setting(False, "Change minus words that are not seen, and add words where no place is free (place).")
    min_similarity: float = _setting(0.3, "Refuse words whose closest label is less similar than this cosine.")
    alpha: float = _setting(
        15.0,
        "Multiply the sub-units of plus words by this, in scale.",
        hint="factor for the sub-units of added words (scale)",
        demo=6,
    )
    gamma: float = _setting(
        -15.0,
        "Multiply the sub-units of minus words by this, in scale.",
        hint="factor for the sub-units of removed words (scale)",
        demo=5,
    )
    kappa: int = _setting(
        100,
        "Number of sub-units that stand for a word, in scale.",
        hint="how many sub-units stand for a word (scale)",
        demo=7,
        min=1,
    )
    nu: int | Literal["all"] = _setting(
        50,
        "Number of patches to change, those where a sub-unit fires most, or all, in scale.",
        hint="how many patches of each tile are changed, or all (scale)",
        demo=8,
        min=1,
    )
    per: Literal["tile", "image"] = _setting("tile", "Count nu in each tile, or over the whole image, in scale.")
    by: Literal["label", "score"] = _setting(
        "label", "Find sub-units by the similarity of their label, or by the score of the closest words, in scale."
    )

    removed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("beta", "level", "reach", "fill", "smooth"),
        "mode place has one strength now, and finds the region and the direction of a word by its calibration",
    )


class SettingArguments(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments; None leaves a setting to the atlas.

    Written out for type checkers, which cannot read a generated type; a test compares it with `Settings`.
    """

    mode: str | None
    strength: float | None
    fit: float | None
    seen: float | None
    force: bool | None
    min_similarity: float | None
    alpha: float | None
    gamma: float | None
    kappa: int | None
    nu: int | str | None
    per: str | None
    by: str | None


if TYPE_CHECKING:

    class SteeringSpec:
        """A YAML section of `Settings` in which each may be null."""

        __dataclass_fields__: ClassVar[dict[str, Any]]
        removed: ClassVar[Mapping[str, str]]

        def __init__(self, **settings: Unpack[SettingArguments]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _TYPES = get_type_hints(Settings)
    _OPTIONAL = {item.name: field(default=None, metadata=item.metadata) for item in fields(Settings)}
    SteeringSpec = make_dataclass(
        "SteeringSpec",
        [
            (item.name, _TYPES[item.name] | None, field(default=None, metadata=item.metadata))
            for item in fields(Settings)
        ],
        frozen=True,
        namespace={
            "__module__": __name__,
            "removed": Settings.removed,
            "__doc__": "A YAML section of `Settings` in which each may be null: the atlas or the paper decides.",
        },
    )


def demo_hints() -> dict[str, str]:
    """The settings that the demo shows, in its order, each with its hint."""
    shown = [item for item in fields(Settings) if item.metadata["demo"] is not None]
    return {item.name: item.metadata["hint"] for item in sorted(shown, key=lambda item: item.metadata["demo"])}


@dataclass(frozen=True)
class AtlasSpec:
    """How to build an atlas; the sections follow the order of the build.

    Attributes:
        name: The atlas's name.
        model: The model and its layer.
        images: The probing images.
        tokens: The tokens stored for each image.
        clusters: How a unit's instances are clustered.
        split: How a unit's weights are divided.
        references: What is stored about each sub-unit.
        labels: How sub-units get their labels.
        calibration: How words get detectors and directions.
        matcher: The text encoder that finds sub-units by word.
        steering: The atlas's default settings for edits.
        license: The licence of the atlas for its card on the Hub, such as `apache-2.0`; null names none.
    """

    name: str
    model: ModelSpec
    images: ImagesSpec = field(default_factory=ImagesSpec)
    tokens: TokensSpec = field(default_factory=TokensSpec)
    clusters: ClustersSpec = field(default_factory=ClustersSpec)
    split: SplitSpec = field(default_factory=SplitSpec)
    references: ReferencesSpec = field(default_factory=ReferencesSpec)
    labels: LabelsSpec = field(default_factory=LabelsSpec)
    calibration: CalibrationSpec = field(default_factory=CalibrationSpec)
    matcher: MatcherSpec = field(default_factory=MatcherSpec)
    steering: SteeringSpec = field(default_factory=SteeringSpec)
    license: str | None = None


@dataclass(frozen=True)
class ExpectSpec:
    """The expected effect of an edit on the caption.

    Attributes:
        gone: Words that the caption should no longer contain.
        new: Words of which the caption should contain at least one.
    """

    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepSpec:
    """One edit: words, and the settings that differ from the atlas's.

    Attributes:
        minus: Concepts to remove.
        plus: Concepts to add.
        where: In place mode, the box for plus words: left, top, right, bottom in pixels. Empty means where the minus
            words fire.
        mask: Instead of `where`, an image that is white where plus words go, relative to the recipe.
        settings: The settings of the edit.
        expect: The expected effect.
    """

    minus: tuple[str, ...] = ()
    plus: tuple[str, ...] = ()
    where: tuple[float, ...] = ()
    mask: str | None = None
    settings: SteeringSpec = field(default_factory=SteeringSpec)
    expect: ExpectSpec = field(default_factory=ExpectSpec)

    @property
    def region(self) -> str | tuple[float, ...] | None:
        """The region for plus words, as `Steerer.plan` takes it."""
        return self.mask or self.where or None


@dataclass(frozen=True)
class Recipe:
    """What to change in the caption of an image: separate edits, each made to the unsteered model.

    Attributes:
        name: The recipe's name.
        atlas: A folder, a name of `elude-steer atlases list`, or a Hub id.
        steps: The edits.
        image: The image, relative to the recipe; null means that the caller gives it (`--image`).
        prompt: The question about the image.
        max_new_tokens: Maximum length of an answer in tokens.
    """

    name: str
    atlas: str
    steps: tuple[StepSpec, ...]
    image: str | None = None
    prompt: str = "Describe this image in one sentence."
    max_new_tokens: int = field(default=64, metadata={"min": 1})
