"""The last stages: how well every word fits every image, and from that the labels of sub-units (CLIP-Dissect)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.pooling import (
    image_shard_paths,
    read_dissection,
    read_image_rows,
    read_ranking,
    write_image_rows,
)
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.matching import group_redundant
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.errors import SpecError, StorageError
from elude_steer.method.clip_dissect import GROUP, Dissection, Dissector, log_prior
from elude_steer.models.dual_encoder import DualEncoder, EmbeddingCache, load_dual_encoder
from elude_steer.models.images import Item
from elude_steer.utils.files import new_array, read_array, read_tensors, write_array
from elude_steer.utils.fingerprint import versions

_BLOCK_SUB_UNITS = 2 * GROUP  # sub-units whose evidence is one file
_PRODUCT_ROWS = 256  # rows of one product with the words; fixed, because another shape may round differently
_MAX_CORRELATED = 10_000  # images; enough to see whether two sub-units are redundant


@dataclass(frozen=True)
class Labelling:
    """What labels sub-units: the words, and the model that compares them with images."""

    vocabulary: list[str]
    encoder: DualEncoder

    @cached_property
    def embeddings(self) -> EmbeddingCache:
        """The vectors of images, kept on this machine."""
        return EmbeddingCache(self.encoder)


def prepare_labelling(build: Build) -> Labelling | None:
    """Load what the labelling stages need; None if the spec asks for no labels.

    It comes before all stages, so that mistakes show before the work. Loaded once in each process.
    """
    if build.labelling is None:
        build.labelling = _load_labelling(build)
    return build.labelling


def _load_labelling(build: Build) -> Labelling | None:
    spec = build.spec.labels
    if spec.scorer is None:
        if build.spec.references.thumbnails is not None:
            raise SpecError("references.thumbnails are made with the labels: set labels.scorer, or thumbnails: null.")
        return None
    if build.images.fingerprint is None or build.images.length is None:
        raise SpecError(
            "labels need the images a second time, and a stream can be read only once; give a folder or a list, or set "
            "labels.scorer: null."
        )
    vocabulary = read_vocabulary(spec.vocabulary, stop_words=spec.stop_words)
    if "{}" not in spec.template:
        raise SpecError(f"labels.template is '{spec.template}'; mark the place of the word: 'a photo of a {{}}'.")
    encoder = load_dual_encoder(
        spec.scorer,
        library=spec.library,
        pretrained=spec.pretrained,
        revision=spec.revision,
        device=str(build.tower.device),
        dtype=spec.dtype,
        trust_remote_code=build.trust_remote_code,
    )
    return Labelling(vocabulary, encoder)


def embed_images(build: Build, labelling: Labelling) -> StageFolder:
    """Write the dual encoder's vector of each image."""
    step = build.image_step(build.spec.labels.images)
    device = str(build.tower.device.type)
    shard_size = (build.spec.tokens.batch_size, build.shard)  # a cause, because shards are numbered files
    folder = build.open_stage(
        "image-vectors", labelling.encoder.key, build.images.fingerprint, step, shard_size, device, versions()
    )

    def process(build: Build, batch: Sequence[Item]) -> list[dict[str, torch.Tensor]]:
        cache = _embedding_cache(build)
        skipped: dict[str, str] = {}  # already reported when tokens were collected
        loaded = [(item, *got) for item in batch if (got := read_item(item, skipped)) is not None]
        if not loaded:
            return []
        vectors = cache.embed([(image, digest) for _, image, digest in loaded])
        indices = [torch.tensor(item.index, dtype=torch.int32) for item, _, _ in loaded]
        return [{"vectors": vector, "images": index} for vector, index in zip(vectors, indices, strict=True)]

    write_image_rows(build, "scoring", folder, step, process)
    return folder


def _embedding_cache(build: Build) -> EmbeddingCache:
    labelling = prepare_labelling(build)
    if labelling is None:
        raise SpecError("images are embedded by a dual encoder: set labels.scorer.")
    return labelling.embeddings


def check_same_images(pooled: StageFolder, ranking: StageFolder, vectors: StageFolder) -> None:
    """Raise unless the images that were pooled are those that were embedded."""
    embedded = torch.cat([shard["images"] for shard in read_image_rows(vectors)]).int()
    if not torch.equal(read_ranking(ranking)["images"], embedded):
        folders = "', '".join(str(folder.path) for folder in (pooled, ranking, vectors))
        raise StorageError(f"some images could be read once and not again; delete '{folders}', and run it again.")


def choose_dissection(build: Build, ranking: StageFolder) -> Dissection:
    """The settings of the spec, with no more images for each sub-unit than there are."""
    return read_dissection(build).clamp_top_k(len(read_ranking(ranking)["images"]), warn=build.is_main)


def fit_words(build: Build, labelling: Labelling, vectors: StageFolder, settings: Dissection) -> StageFolder:
    """Write how well every word fits every image, `(N, M)`: what is the same for all sub-units."""
    template, vocabulary = build.spec.labels.template, labelling.vocabulary
    folder = build.open_stage("word-fit", vectors.key, vocabulary, template, asdict(settings))

    def work() -> None:
        texts = labelling.encoder.embed_texts([template.replace("{}", word) for word in vocabulary])
        images = torch.cat([shard["vectors"] for shard in read_image_rows(vectors)])
        _write_fit(_fit_path(folder), images, texts, settings)

    build.settle(folder, work, _fit_path(folder))
    return folder


def _write_fit(path: Path, images: torch.Tensor, texts: torch.Tensor, settings: Dissection) -> None:
    """Write the fit a block at a time: of words for `cos_cubed`, which is centred over all images, else of images."""
    with new_array(path, (len(images), len(texts))) as out:
        if settings.method == "cos_cubed":
            for start in range(0, len(texts), _PRODUCT_ROWS):
                block = slice(start, start + _PRODUCT_ROWS)
                similarities = _fixed_shape_product(texts[block], images).T
                out[:, block] = Dissector.from_similarities(similarities, settings).prepared.numpy()
        else:
            for start in range(0, len(images), _PRODUCT_ROWS):
                block = slice(start, start + _PRODUCT_ROWS)
                similarities = _fixed_shape_product(images[block], texts)
                out[block] = Dissector.from_similarities(similarities, settings).prepared.numpy()


def _fixed_shape_product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(_PRODUCT_ROWS, rows.shape[1])
    padded[: len(rows)] = rows
    return (padded @ columns.T)[: len(rows)]


def gather_evidence(
    build: Build, atlas: Atlas, settings: Dissection, fit: StageFolder, pooled: StageFolder, ranking: StageFolder
) -> StageFolder:
    """Write how well every word fits each sub-unit before the prior, one file for each block of living sub-units."""
    folder = build.open_stage("evidence", fit.key, pooled.key)
    blocks = _blocks_of_living(atlas)

    def work(number: int) -> None:
        block = blocks[number]
        prepared = _open_fit(_fit_path(fit), build.tower.device)
        dissector = Dissector(settings, prepared)
        if settings.method == "cos_cubed":
            activations = torch.cat([shard["values"][:, block] for shard in read_image_rows(pooled)])
            rows = dissector.evidence(activations.to(prepared.device))
        else:
            images = read_ranking(ranking)["rows"][block, : settings.top_k].long()
            rows = dissector.evidence_from_images(images.to(prepared.device))
        write_array(_evidence_path(folder, number), rows.cpu().numpy())

    files = lambda number: (_evidence_path(folder, number),)  # noqa: E731
    needs = [fit, ranking, *([pooled] if settings.method == "cos_cubed" else [])]
    build.run_pieces("labelling", folder, range(len(blocks)), files, work, "blocks", needs=needs)
    return folder


@lru_cache(maxsize=1)  # on a GPU it is copied there
def _open_fit(path: Path, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.load(path, mmap_mode="c")).to(device)


def add_labels(
    build: Build,
    atlas: Atlas,
    labelling: Labelling,
    settings: Dissection,
    evidence: StageFolder,
    pooled: StageFolder,
    ranking: StageFolder,
) -> Atlas:
    """The atlas with its labels: the best words of each sub-unit, and groups of redundant sub-units."""
    words, scores = _best_words(build, atlas, labelling, settings, evidence)
    groups = _group_sub_units(build, atlas, pooled, scores[:, 0].copy())
    about = {
        "scorer": build.spec.labels.scorer,
        "scorer_key": labelling.encoder.key,
        "pictures": len(read_ranking(ranking)["images"]),
        **asdict(settings),
    }
    return replace(atlas, labels=Labels(tuple(labelling.vocabulary), words, scores, groups, about))


def _best_words(
    build: Build, atlas: Atlas, labelling: Labelling, settings: Dissection, evidence: StageFolder
) -> tuple[np.ndarray, np.ndarray]:
    """Each sub-unit's best words and their scores; the prior runs over all living sub-units."""
    blocks = _blocks_of_living(atlas)

    def read_evidence() -> Iterator[torch.Tensor]:
        return (torch.from_numpy(np.array(read_array(_evidence_path(evidence, n)))) for n in range(len(blocks)))

    prior = log_prior(read_evidence)
    keep = min(build.spec.labels.keep, len(labelling.vocabulary))
    words = np.full((len(atlas), keep), -1, np.int32)
    scores = np.full((len(atlas), keep), -np.inf, np.float32)
    for block, rows in zip(blocks, read_evidence(), strict=True):
        best = Dissector(settings, rows[:0]).best_concepts(rows, prior, keep)
        words[block.numpy()], scores[block.numpy()] = best.words.int().numpy(), best.scores.numpy()
    return words, scores


def _group_sub_units(build: Build, atlas: Atlas, pooled: StageFolder, strength: np.ndarray) -> np.ndarray:
    """Group redundant sub-units by the correlation of their activations over the images."""
    count = len(atlas)
    alone = np.arange(count, dtype=np.int32)
    if not build.is_main:
        return alone  # the main process writes the atlas
    total, square, product, images = torch.zeros(count).double(), torch.zeros(count).double(), None, 0
    shift = None
    paths = image_shard_paths(pooled)
    for path in paths[:: max(1, -(-len(paths) * build.shard // _MAX_CORRELATED))]:  # evenly spread
        shard = read_tensors(path)
        if not shard:
            continue
        values = shard["values"][:, :count]
        shift = values.mean(0) if shift is None else shift  # sums of large numbers would lose digits
        values = values - shift
        total += values.double().sum(0)
        square += values.double().square().sum(0)
        shard_product = (values.T @ values).double()
        product = shard_product if product is None else product.add_(shard_product)
        images += len(values)
    if product is None:
        return alone
    deviation = (square / images - (total / images).square()).clamp_min(0).sqrt()
    product = product.div_(images).sub_(torch.outer(total / images, total / images))
    product /= torch.outer(deviation, deviation).clamp_min(1e-12)
    groups = group_redundant(product.numpy(), atlas.units.numpy(), strength, build.spec.labels.same)
    return groups.astype(np.int32)


def _blocks_of_living(atlas: Atlas) -> list[torch.Tensor]:
    """The numbers of the sub-units that own something, in blocks."""
    living = (~atlas.dead).nonzero()[:, 0]
    return [living[start : start + _BLOCK_SUB_UNITS] for start in range(0, len(living), _BLOCK_SUB_UNITS)]


def _fit_path(folder: StageFolder) -> Path:
    return folder.path / "prepared.npy"


def _evidence_path(folder: StageFolder, number: int) -> Path:
    return folder.path / f"block-{number:06d}.npy"
