"""Recipes as frozen dataclasses: one class a section, the same names in both; `documents` reads the YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
        autocast: What the tower's matrix products are computed in in a build; null leaves them as they are.
    """

    id: str
    layer: str
    kind: Literal["vlm", "vision", "timm"] = "vlm"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None


@dataclass(frozen=True)
class ImagesSpec:
    """The probing images.

    Attributes:
        source: A folder, a text file of paths, `hf:` and a dataset id, or `toyland:` and the seed of drawn scenes; null
            leaves it to the caller (`--images`).
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
        reuse: Keep what the tower gives on the disk until the atlas is done, as far as there is room (a quarter of what
            is free), so that names need no second pass; changes the time, and
            last bits where names come from fewer pictures than tokens.
    """

    per_image: int | Literal["all"] = field(default=2, metadata={"min": 1})
    seed: int = field(default=42, metadata={"min": 0})
    dtype: Literal["float16", "float32"] = "float16"
    batch_size: int = field(default=8, metadata={"min": 1})
    reuse: bool = True


@dataclass(frozen=True)
class ClustersSpec:
    """How the strongest instances of a unit are grouped.

    Attributes:
        top_k: How many instances of largest activation a unit is judged by.
        backend: Whose HDBSCAN; `auto` takes the best one installed, `fast` approximates.
        selection: Which clusters of the tree count: its leaves, or those with the largest excess of mass.
        min_cluster_size: The smallest group that counts as a cluster.
        min_samples: HDBSCAN's density setting; null means min_cluster_size.
        umap_components: Reduce to this many dimensions with UMAP first; null does not.
        umap_neighbors: UMAP's neighbourhood, where UMAP is used.
        seed: Of whatever is random in the grouping.
        units: Only the first so many units are split, the others stay whole; for trials.
    """

    top_k: int = field(default=10000, metadata={"min": 2})
    backend: Literal["auto", "exact", "fast", "hdbscan", "cuml"] = "auto"
    selection: Literal["leaf", "eom"] = "leaf"
    min_cluster_size: int = field(default=1000, metadata={"min": 2})
    min_samples: int | None = field(default=None, metadata={"min": 1})
    umap_components: int | None = field(default=None, metadata={"min": 1})
    umap_neighbors: int = field(default=15, metadata={"min": 2})
    seed: int = field(default=42, metadata={"min": 0})
    units: int | None = field(default=None, metadata={"min": 1})


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
        thumbnails: Side in pixels of small copies of the pictures they come from; null stores none.
        streams: How many pictures tell what units carry where a sub-unit fires, for `level: stream`; 0 for none.
    """

    instances: int = field(default=100, metadata={"min": 1})
    keep: int = field(default=25, metadata={"min": 1})
    thumbnails: int | None = field(default=None, metadata={"min": 8})
    streams: int = field(default=10_000, metadata={"min": 0})


@dataclass(frozen=True)
class LabelsSpec:
    """How sub-units get their names (CLIP-Dissect).

    Attributes:
        scorer: The model that scores pictures against words, a Hub id or folder; null leaves sub-units without names.
        library: Whose model that is; `open_clip` needs the extra of that name.
        pretrained: The tag of open_clip's weights.
        revision: The commit or tag to load; null takes the newest.
        dtype: What the scorer computes in.
        images: From how many of the probing images at most, evenly spread, names and references are found.
        vocabulary: A text file with a word a line, or `nouns` or `toyland`, which come with the package.
        template: What the scorer is given for a word.
        stop_words: Whether function words are taken out of the vocabulary.
        method: How words are judged.
        top_k: How many of a sub-unit's strongest images count; null is the method's own, as for the next three.
        a: How sharply a picture decides between words.
        lam: How much a word that fits every sub-unit is held back.
        min_prob: Keeps logarithms finite.
        keep: How many words are kept for each sub-unit.
        same: From which correlation on two sub-units say the same.
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
class MatcherSpec:
    """What finds sub-units by word.

    Attributes:
        id: A sentence-transformers model: a Hub id or folder.
        revision: The commit or tag to load; null takes the newest.
        trust_remote_code: Whether code that comes with the model may run.
    """

    id: str = "perplexity-ai/pplx-embed-v1-0.6b"
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class SteeringSpec:
    """How words change sub-units where nobody says otherwise; null leaves it to the paper's values.

    Attributes:
        mode: Multiply sub-units where they fire, or set those of plus words on a region.
        alpha: What plus sub-units are multiplied by.
        gamma: What minus sub-units are multiplied by.
        beta: How many times their level sub-units are set to, in `place`.
        level: What that is a multiple of: a sub-unit's own activation, or what its unit carries behind the residual.
        reach: How many times the stream other units than a word's own are moved by, in `place`.
        fill: How many sub-units of the surroundings take the place of a removed word, in `place`.
        kappa: How many sub-units a word stands for.
        nu: On how many patches; `all` is every patch.
        per: Whether nu counts in every tile or over the whole picture.
        fit: Share of its peak that a word must fire with on a patch of its region, in `place`; nu is then the most.
        smooth: Whether a word's region is sought in the mean of neighbouring patches, in `place`.
        by: How sub-units are found.
        min_similarity: Sub-units found by a word less close than this are left alone.
    """

    mode: Literal["scale", "place"] | None = None
    alpha: float | None = None
    gamma: float | None = None
    beta: float | None = None
    level: Literal["reference", "stream"] | None = None
    reach: float | None = None
    fill: int | None = field(default=None, metadata={"min": 0})
    kappa: int | None = field(default=None, metadata={"min": 1})
    nu: int | Literal["all"] | None = field(default=None, metadata={"min": 1})
    per: Literal["tile", "image"] | None = None
    fit: float | None = field(default=None, metadata={"min": 0})
    smooth: bool | None = None
    by: Literal["label", "score"] | None = None
    min_similarity: float | None = None


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
        labels: How sub-units get their names.
        matcher: What finds them by word.
        steering: How they are changed where nobody says otherwise.
    """

    name: str
    model: ModelSpec
    images: ImagesSpec = field(default_factory=ImagesSpec)
    tokens: TokensSpec = field(default_factory=TokensSpec)
    clusters: ClustersSpec = field(default_factory=ClustersSpec)
    split: SplitSpec = field(default_factory=SplitSpec)
    references: ReferencesSpec = field(default_factory=ReferencesSpec)
    labels: LabelsSpec = field(default_factory=LabelsSpec)
    matcher: MatcherSpec = field(default_factory=MatcherSpec)
    steering: SteeringSpec = field(default_factory=SteeringSpec)


@dataclass(frozen=True)
class ExpectSpec:
    """What an edit should do to the caption.

    Attributes:
        gone: Words that should no longer be there.
        new: Words of which at least one should be there.
    """

    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepSpec:
    """One edit: words, and settings where they are not the atlas's own.

    Attributes:
        minus: Words that should go.
        plus: Words that should come.
        where: For `place`, left, top, right, bottom in pixels; empty goes where the minus words fire.
        mask: In the place of `where`, a picture that is white where plus words go, relative to the recipe.
        settings: How sub-units are changed.
        expect: What should happen.
    """

    minus: tuple[str, ...] = ()
    plus: tuple[str, ...] = ()
    where: tuple[float, ...] = ()
    mask: str | None = None
    settings: SteeringSpec = field(default_factory=SteeringSpec)
    expect: ExpectSpec = field(default_factory=ExpectSpec)

    @property
    def region(self) -> str | tuple[float, ...] | None:
        """Where plus words go, as `Steerer.plan` takes it."""
        return self.mask or self.where or None


@dataclass(frozen=True)
class Recipe:
    """What to change in the caption of a picture: edits that are made one by one, each from the baseline.

    Attributes:
        name: What it is called.
        atlas: Whose sub-units: a folder, a name of `elude-steer atlases list`, or a Hub id.
        steps: The edits.
        image: The picture, relative to the recipe; null leaves it to the caller (`--image`).
        prompt: The question.
        max_new_tokens: The longest answer.
    """

    name: str
    atlas: str
    steps: tuple[StepSpec, ...]
    image: str | None = None
    prompt: str = "Describe this image in one sentence."
    max_new_tokens: int = field(default=64, metadata={"min": 1})
