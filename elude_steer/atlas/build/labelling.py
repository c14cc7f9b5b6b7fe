"""The last stages of a build: what every picture does to every sub-unit, and from that the sub-units' names.

As in `stages`, each is kept on disk under a hash of all it depends on; pictures stream through in fixed batches, and
memory does not grow with their number.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.build import tokens
from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.stages import Build
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.matching import group_redundant
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.errors import SpecError, StorageError
from elude_steer.method.clip_dissect import GROUP, Dissection, Dissector, log_prior
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.models.dual_encoder import DualEncoder, EmbeddingCache, load_dual_encoder
from elude_steer.models.images import Item
from elude_steer.utils.files import explain_write_errors, read_array, read_tensors, write_array, write_tensors
from elude_steer.utils.fingerprint import make_key, versions

_BLOCK = 2 * GROUP  # sub-units whose evidence is one file
_ROWS = 256  # pictures of one product with the words: fixed, because another shape may round differently
_CORRELATED = 10_000  # pictures are enough to tell whether two sub-units say the same


@dataclass
class Naming:
    """Names for the sub-units of an atlas; made before the atlas is built, so that mistakes show before the work."""

    run: Build
    atlas: Atlas = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        spec = self.run.spec.labels
        if self.run.images.fingerprint is None or self.run.images.length is None:
            raise SpecError(
                "names need a second look at the images, and a stream is read once; give a folder or a list, or set "
                "labels.scorer: null."
            )
        self.every = -(-self.run.images.length // spec.images)
        self.vocabulary = read_vocabulary(spec.vocabulary, stop_words=spec.stop_words)
        if "{}" not in spec.template:
            raise SpecError(f"labels.template is '{spec.template}'; it says where the word goes: 'a photo of a {{}}'.")
        self.scorer: DualEncoder = load_dual_encoder(
            spec.scorer or "",
            library=spec.library,
            pretrained=spec.pretrained,
            revision=spec.revision,
            device=str(self.run.tower.device),
            dtype=spec.dtype,
        )

    def named(self, atlas: Atlas, key: str) -> tuple[Atlas, dict[str, bytes] | None]:
        """The atlas with names and with references from whole pictures, and the thumbnails that were asked for.

        Args:
            atlas: whose sub-units have no names yet.
            key: tells it from others.
        """
        self.atlas, self.key = atlas, key
        pooled, seen = self.pooled(), self.seen()
        pictures = self._shards(pooled, "images").int()
        if not torch.equal(pictures, self._shards(seen, "images").int()):
            raise StorageError(
                f"some pictures could be read once and not again; delete '{pooled}' and '{seen}', and run it again."
            )
        spec = self.run.spec.labels
        how = Dissection.for_method(spec.method, top_k=spec.top_k, a=spec.a, lam=spec.lam, min_prob=spec.min_prob)
        how = how.clamp_top_k(len(pictures), warn=self.run.workers.rank == 0)
        top = self.strongest(pooled, how.top_k)
        fit, key = self.fit(seen, how)
        words, scores = self.words(fit, pooled, top, key)
        groups = self.groups(pooled, scores[:, 0].copy())
        about = {"scorer": spec.scorer, "scorer_key": self.scorer.key, "pictures": len(pictures), **asdict(how)}
        labels = Labels(tuple(self.vocabulary), words, scores, groups, about)
        atlas = self._referenced(top, pictures, self._shards(pooled, "tokens").int())
        return replace(atlas, labels=labels), self._thumbnails(atlas)

    def pooled(self) -> Path:
        """For each picture the strongest patch of every sub-unit, and of every unit: value and place."""
        folder = self.run.stage_folder("pooled", make_key("pooled", self.key, self.every))
        weight, bias = self._rows
        tower = self.run.tower

        def look(batch: Sequence[Item]) -> list[dict[str, torch.Tensor]]:
            found = []
            for item, q in self.run.cache.layer_inputs(batch):
                values, places = tokens.strongest_patches(q, tower.token_indices(q.shape[1]), weight, bias)
                number = torch.tensor(item.index, dtype=torch.int32)
                found.append({"values": values, "places": places, "images": number, "tokens": torch.tensor(q.shape[1])})
            return found

        self._walk("pooling", folder, look)
        return folder

    def seen(self) -> Path:
        """What the scorer makes of each picture."""
        device = str(self.run.tower.device.type)
        cut = (self.run.spec.tokens.batch_size, self.run.shard)  # into files, which carry numbers
        key = make_key("seen", self.scorer.key, self.run.images.fingerprint, self.every, cut, device, versions())
        folder = self.run.stage_folder("seen", key)
        cache = EmbeddingCache(self.scorer)

        def look(batch: Sequence[Item]) -> list[dict[str, torch.Tensor]]:
            skipped: dict[str, str] = {}  # told when they were collected
            read = [(item, *got) for item in batch if (got := read_item(item, skipped)) is not None]
            if not read:
                return []
            vectors = cache.embed([(image, digest) for _, image, digest in read])
            numbers = [torch.tensor(item.index, dtype=torch.int32) for item, _, _ in read]
            return [{"vectors": v, "images": n} for v, n in zip(vectors, numbers, strict=True)]

        self._walk("scoring", folder, look)
        return folder

    def strongest(self, pooled: Path, top_k: int) -> dict[str, torch.Tensor]:
        """Each row's strongest pictures: `rows` in the order of the walk, `values` and `places`, `(R, k)` each."""
        k = max(top_k, self.run.spec.references.keep)
        path = pooled / f"strongest-{k}.safetensors"
        if self.run.workers.rank == 0 and not path.exists():
            best: dict[str, torch.Tensor] = {}
            start = 0
            for shard in self._read(pooled):
                rows = torch.arange(start, start + len(shard["values"]), dtype=torch.int32)
                new = {"values": shard["values"].T, "places": shard["places"].T}
                new["rows"] = rows.expand(len(new["values"]), -1)
                best = {name: torch.cat([best[name], new[name]], 1) if best else new[name] for name in new}
                order = best["values"].sort(dim=1, descending=True, stable=True).indices[:, :k]
                best = {name: tensor.gather(1, order) for name, tensor in best.items()}
                start += len(rows)
            write_tensors(path, {name: tensor.contiguous() for name, tensor in best.items()})
        self.run.workers.barrier()
        return read_tensors(path)

    def fit(self, seen: Path, how: Dissection) -> tuple[Dissector, str]:
        """How well every word fits every picture, on the disk."""
        spec = self.run.spec.labels
        key = make_key("fit", seen.name, self.vocabulary, spec.template, asdict(how), self.key)
        folder = self.run.stage_folder("evidence", key)
        path = folder / "prepared.npy"
        if self.run.workers.rank == 0 and not path.exists():
            texts = self.scorer.embed_texts([spec.template.replace("{}", word) for word in self.vocabulary])
            vectors = self._shards(seen, "vectors")
            self._prepare(path, vectors, texts, how)
        self.run.workers.barrier()
        prepared = torch.from_numpy(np.load(path, mmap_mode="c")).to(self.run.tower.device)
        return Dissector(how, prepared), key

    def _prepare(self, path: Path, vectors: torch.Tensor, texts: torch.Tensor, how: Dissection) -> None:
        """Writes what is the same for all sub-units, `(N, M)`, a block of pictures at a time, or of words."""
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        shape = (len(vectors), len(texts))
        with explain_write_errors(path):
            out = np.lib.format.open_memmap(temporary, "w+", np.float32, shape)
            if how.method == "cos_cubed":  # centred over the pictures, so all of them for some words
                for at in range(0, shape[1], _ROWS):
                    out[:, at : at + _ROWS] = Dissector.from_similarities(
                        _product(texts[at : at + _ROWS], vectors).T, how
                    ).prepared.numpy()
            else:
                for at in range(0, shape[0], _ROWS):
                    out[at : at + _ROWS] = Dissector.from_similarities(
                        _product(vectors[at : at + _ROWS], texts), how
                    ).prepared.numpy()
            out.flush()
            del out
            temporary.replace(path)

    def words(
        self, fit: Dissector, pooled: Path, top: Mapping[str, torch.Tensor], key: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each sub-unit's best words and their scores; the prior runs over all that own something."""
        folder = self.run.stage_folder("evidence", key)
        alive = (~self.atlas.dead).nonzero()[:, 0]
        blocks = [alive[start : start + _BLOCK] for start in range(0, len(alive), _BLOCK)]
        device = fit.prepared.device

        def path(number: int) -> Path:
            return folder / f"block-{number:06d}.npy"

        def work(number: int) -> None:
            if fit.settings.method == "cos_cubed":
                columns = torch.cat([shard["values"][:, blocks[number]] for shard in self._read(pooled)])
                rows = fit.evidence(columns.to(device))
            else:
                rows = fit.evidence_from_images(top["rows"][blocks[number], : fit.settings.top_k].long().to(device))
            write_array(path(number), rows.cpu().numpy())

        self.run.each("naming", range(len(blocks)), path, work, "blocks")

        def evidence() -> Iterator[torch.Tensor]:
            return (torch.from_numpy(np.array(read_array(path(number)))) for number in range(len(blocks)))

        whole = log_prior(evidence)
        keep = min(self.run.spec.labels.keep, len(self.vocabulary))
        words = np.full((len(self.atlas), keep), -1, np.int32)
        scores = np.full((len(self.atlas), keep), -np.inf, np.float32)
        for block, rows in zip(blocks, evidence(), strict=True):
            found = Dissector(fit.settings, rows[:0]).best_concepts(rows, whole, keep)
            words[block.numpy()], scores[block.numpy()] = found.words.int().numpy(), found.scores.numpy()
        return words, scores

    def groups(self, pooled: Path, strength: np.ndarray) -> np.ndarray:
        """Which sub-units say the same, by how they go together over the pictures."""
        count = len(self.atlas)
        if self.run.workers.rank:
            return np.arange(count, dtype=np.int32)  # the first process writes the atlas
        total, square, product, seen = torch.zeros(count).double(), torch.zeros(count).double(), None, 0
        shift = None
        paths = sorted(pooled.glob("shard-*.safetensors"))
        for path in paths[:: max(1, -(-len(paths) * self.run.shard // _CORRELATED))]:  # evenly spread
            shard = read_tensors(path)
            if not shard:
                continue
            values = shard["values"][:, :count]
            shift = values.mean(0) if shift is None else shift  # sums of large numbers would lose digits
            values = values - shift
            total += values.double().sum(0)
            square += values.double().square().sum(0)
            more = (values.T @ values).double()
            product = more if product is None else product.add_(more)
            seen += len(values)
        if product is None:
            return np.arange(count, dtype=np.int32)
        spread = (square / seen - (total / seen).square()).clamp_min(0).sqrt()
        product = product.div_(seen).sub_(torch.outer(total / seen, total / seen))
        product /= torch.outer(spread, spread).clamp_min(1e-12)
        found = group_redundant(product.numpy(), self.atlas.units.numpy(), strength, self.run.spec.labels.same)
        return found.astype(np.int32)

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and biases of all sub-units, then of all units."""
        run, members = self.run, self.atlas.members()
        weight, bias = sub_unit_parameters(run.weight.cpu(), run.bias.cpu(), members, self.atlas.units)
        device = run.tower.device
        return torch.cat([weight, run.weight.cpu()]).to(device), torch.cat([bias, run.bias.cpu()]).to(device)

    def _walk(
        self,
        label: str,
        folder: Path,
        look: Callable[[Sequence[Item]], list[dict[str, torch.Tensor]]],
    ) -> None:
        """Shows every picture once; what comes out of each batch is kept, a file a shard."""
        total = -(-(self.run.images.length or 0) // self.every)
        with self.run.bar(label, total, "images") as bar:

            def work(piece: tuple[int, list[list[Item]]]) -> None:
                number, batches = piece
                if not _shard(folder, number).exists():
                    rows: list[dict[str, torch.Tensor]] = []
                    for batch in batches:
                        if self.run.workers.stopped.is_set():
                            return
                        rows += look(batch)
                        bar.update(len(batch))
                    joined = {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
                    write_tensors(_shard(folder, number), joined)
                else:
                    bar.update(sum(map(len, batches)))

            self.run.workers.each(tokens.iterate_shards(self.run.images, self.run.plan(), self.every), work)

    def _read(self, folder: Path) -> Iterator[dict[str, torch.Tensor]]:
        for path in sorted(folder.glob("shard-*.safetensors")):
            shard = read_tensors(path)
            if shard:
                yield shard

    def _shards(self, folder: Path, name: str) -> torch.Tensor:
        return torch.cat([shard[name] for shard in self._read(folder)])

    def _referenced(self, top: Mapping[str, torch.Tensor], pictures: torch.Tensor, tokens: torch.Tensor) -> Atlas:
        """The atlas with the strongest whole pictures in the place of the strongest stored tokens."""
        keep, count = self.run.spec.references.keep, len(self.atlas)
        per = tokens[top["rows"][:, :keep].long()]  # (R, keep) tokens of a tile
        names = {item.index: item.id for item in self.run.images.items()}
        numbers = pictures[top["rows"][:, :keep].long()]  # (R, keep) which image of the set
        used = numbers.unique()
        at = torch.searchsorted(used, numbers).int()
        places = top["places"][:, :keep]

        def of(rows: slice, old: References) -> References:
            kept = (top["values"][rows, :keep], at[rows], places[rows] // per[rows], places[rows] % per[rows])
            return References(old.activation, *(tensor.contiguous() for tensor in kept))

        return replace(
            self.atlas,
            references=of(slice(0, count), self.atlas.references),
            unit_references=of(slice(count, None), self.atlas.unit_references),
            image_ids=tuple(names[int(number)] for number in used),
        )

    def _thumbnails(self, atlas: Atlas) -> dict[str, bytes] | None:
        side = self.run.spec.references.thumbnails
        if side is None or self.run.workers.rank:
            return None
        wanted = {name: number for number, name in enumerate(atlas.image_ids)}
        found = {}
        for item in self.run.images.items():
            if item.id in wanted:
                image = item.read()[0].convert("RGB")
                image.thumbnail((side, side))
                data = io.BytesIO()
                image.save(data, "JPEG", quality=85)
                found[f"{wanted[item.id]:06d}.jpg"] = data.getvalue()
        return found


def _product(vectors: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(_ROWS, vectors.shape[1])
    whole[: len(vectors)] = vectors
    return (whole @ texts.T)[: len(vectors)]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.safetensors"
