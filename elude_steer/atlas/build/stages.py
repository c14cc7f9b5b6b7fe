"""The stages of a build, each kept on disk under a hash of all it depends on, so that nothing is done twice."""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock
from tqdm import tqdm

from elude_steer.atlas.atlas import Atlas, References, weights_hash
from elude_steer.atlas.build import tokens
from elude_steer.atlas.build.activation_cache import ActivationCache
from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.method.clustering import cluster, resolve_backend
from elude_steer.method.contributions import contributions, no_clusters, summarize_clusters
from elude_steer.method.layers import layer_parameters, sub_unit_parameters
from elude_steer.method.splitting import split_unit
from elude_steer.models.images import ImageSet
from elude_steer.models.vision import Tower
from elude_steer.specs import AtlasSpec, ClustersSpec
from elude_steer.utils import optional
from elude_steer.utils.files import (
    explain_write_errors,
    read_array,
    read_tensors,
    remove_leftovers,
    write_array,
    write_file,
    write_tensors,
)
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.memory import peak_megabytes, reset_peak
from elude_steer.utils.parallel import WorkerGroup

_LOG = logging.getLogger(__name__)
_UNITS = 32  # that share one pass over the store; fixed, because another shape of product may round differently


@dataclass
class Build:
    """One build: what it is made from, and who works where. Every method is a stage; each uses those above it."""

    tower: Tower
    images: ImageSet
    spec: AtlasSpec
    workers: WorkerGroup
    work: Path
    quiet: bool
    shard: int = 64  # images a file while collecting; never changes the result
    weight: torch.Tensor = field(init=False)  # (d_out, d_in)
    bias: torch.Tensor = field(init=False)  # (d_out,)
    backend: str = field(init=False)

    def __post_init__(self) -> None:
        if self.images.fingerprint is None:  # a stream is never seen twice, so its stages are of no further use
            if self.workers.world > 1:
                raise SpecError("several processes cannot share a stream of images; give a folder or a list.")
            self.work = self.work / f"stream-{uuid.uuid4().hex[:12]}"
        self.weight, self.bias = (tensor.float() for tensor in layer_parameters(self.tower.layer))
        self.backend = resolve_backend(self.spec.clusters.backend, self.tower.device)

    def split(self, model: Mapping[str, Any]) -> tuple[Atlas, str]:
        """Runs all stages up to the atlas whose sub-units have no names yet; its key tells it from others."""
        folder, key = self.collected()
        store = tokens.TokenStore(folder)

        rows, key = self.ranked(store, key)
        units, key = self.clustered(store, rows, key)
        blocks, key = self.divided(store, units, key)
        return self.assembled(store, blocks, model), key

    def save(self, atlas: Atlas, out: Path, thumbnails: Mapping[str, bytes] | None = None) -> Atlas:
        """Writes the atlas, in one of the processes."""
        if self.workers.rank == 0:
            smallest, most = self.spec.clusters.min_cluster_size, self.spec.clusters.top_k
            if len(atlas) == atlas.d_out:
                warn(
                    f"no unit was split: no clusters of at least clusters.min_cluster_size = {smallest} among "
                    f"{min(most, atlas.about['instances'])} instances a unit; lower it, or use more images or tokens."
                )
            atlas.save(out, thumbnails)
        self.workers.barrier()
        return Atlas.load(out)

    def clean(self) -> None:
        """Removes the stages of a stream, which nobody can use again."""
        if self.images.fingerprint is None:
            shutil.rmtree(self.work, ignore_errors=True)

    def tidy(self) -> None:
        """Removes what was only kept to save time."""
        self.workers.barrier()
        if self.workers.rank == 0:
            self.cache.remove()

    def collected(self) -> tuple[Path, str]:
        """The token store: a random few tokens of every image."""
        key = self._collected_key()
        folder = self.stage_folder("tokens", key)
        # Another build of the same tokens waits here and then finds them done. The lock of a killed process is free.
        with FileLock(str(folder) + ".lock") if self.workers.rank == 0 else nullcontext():
            self.workers.barrier()
            self._collect(folder)
        self.workers.barrier()
        return folder, key

    def _collected_key(self) -> str:
        return make_key("tokens", self._source[0], self._source[1], asdict(self.plan()), *self._source[2:])

    @cached_property
    def _source(self) -> tuple[Any, ...]:
        device = str(self.tower.device.type)
        return self.tower.fingerprint(), self.images.fingerprint, device, versions()

    @cached_property
    def cache(self) -> ActivationCache:
        """What the tower gives for pictures that are needed more than once."""
        spec, length = self.spec, self.images.length
        if not spec.tokens.reuse or spec.labels.scorer is None or not length:
            return ActivationCache(self.tower, None)
        folder = self.stage_folder("activations", make_key("activations", *self._source, spec.tokens.batch_size))
        steps = [-(-length // most) for most in (spec.labels.images, spec.references.streams) if most]
        return ActivationCache(
            self.tower, folder, keep=lambda n: any(n % step == 0 for step in steps), processes=self.workers.world
        )

    def plan(self) -> tokens.TokenPlan:
        """How images are cut into batches and shards."""
        spec = self.spec.tokens
        return tokens.TokenPlan(spec.per_image, spec.seed, spec.dtype, spec.batch_size, self.shard)

    def _collect(self, folder: Path) -> None:
        plan, counted = self.plan(), folder / "counted.json"
        if not counted.exists():
            total = self.images.length
            with self.bar("collecting", total, "images") as bar:

                def work(piece: tuple[int, list[Any]]) -> None:
                    number, batches = piece
                    if tokens.shard_path(folder, number).exists():
                        bar.update(sum(map(len, batches)))
                        return
                    look, stopped = self.cache.encode, self.workers.stopped
                    tokens.collect_shard(
                        self.tower, batches, plan, folder, number, look=look, stopped=stopped, step=bar.update
                    )

                count = tokens.Counted(tokens.iterate_shards(self.images, plan))
                self.workers.each(count, work)
            if self.workers.rank == 0:
                write_file(counted, lambda file: file.write(json.dumps(count.seen).encode()))
        if self.workers.rank == 0:
            count = json.loads(counted.read_text())
            skipped = tokens.merge_shards(folder, count, self.images.name, self.images.length)
            if skipped:
                more = f"; and {len(skipped) - 5} more in '{folder / 'merged.json'}'" if len(skipped) > 5 else ""
                shown = "; ".join(skipped[:5]) + more
                warn(f"{len(skipped)} images of {self.images.name} cannot be read and were left out: {shown}")

    def ranked(self, store: tokens.TokenStore, key: str) -> tuple[Path, str]:
        """The numbers of each unit's strongest instances."""
        k = self.spec.clusters.top_k
        if k > len(store) and self.workers.rank == 0:
            warn(f"clusters.top_k is {k}, but only {len(store)} instances are stored: all of them are used.")
        key = make_key("rows", key, min(k, len(store)))  # the layer's weights are part of the tower's fingerprint
        folder = self.stage_folder("rows", key)

        def work(block: range) -> None:
            _, rows = tokens.strongest_instances(
                store, self.weight[block.start : block.stop], self.bias[block.start : block.stop], k
            )
            write_array(_block_path(folder, block, ".npy"), rows.int().cpu().numpy())

        self.each(
            "ranking", self._blocks(self._split_units), lambda block: _block_path(folder, block, ".npy"), work, "blocks"
        )
        return folder, key

    def clustered(self, store: tokens.TokenStore, rows: Path, key: str) -> tuple[Path, str]:
        """Each unit's clusters: their representatives, mean inputs and sizes."""
        spec = replace(self.spec.clusters, backend=cast(Any, self.backend))
        used = ["hdbscan", *["cuml-cu12"] * (spec.backend == "cuml"), *["umap-learn"] * bool(spec.umap_components)]
        key = make_key("clusters", key, asdict(spec), *(optional.version(name) for name in used))
        folder = self.stage_folder("clusters", key)

        def work(unit: int) -> None:
            if unit >= self._split_units:
                write_tensors(_unit_path(folder, unit), no_clusters(self.weight.shape[1]))
                return
            block = range(unit - unit % _UNITS, min(unit - unit % _UNITS + _UNITS, len(self.weight)))
            numbers = read_array(_block_path(rows, block, ".npy"))[unit - block.start]
            tensors = cluster_unit(store.gather(np.asarray(numbers)), self.weight[unit].cpu(), spec)
            write_tensors(_unit_path(folder, unit), tensors)

        self.each("clustering", range(len(self.weight)), lambda unit: _unit_path(folder, unit), work, "units")
        return folder, key

    def divided(self, store: tokens.TokenStore, units: Path, key: str) -> tuple[Path, str]:
        """Each unit's sub-units, and the strongest instances of both."""
        kept = [self.spec.references.instances, self.spec.references.keep]
        key = make_key("split", key, asdict(self.spec.split), kept)
        folder = self.stage_folder("split", key)

        def work(block: range) -> None:
            write_tensors(_block_path(folder, block, ".safetensors"), self._divide(store, units, block))

        self.each("splitting", self._blocks(), lambda b: _block_path(folder, b, ".safetensors"), work, "blocks")
        return folder, key

    def _divide(self, store: tokens.TokenStore, folder: Path, block: range) -> dict[str, torch.Tensor]:
        rule, weight, bias = self.spec.split, self.weight.cpu(), self.bias.cpu()
        found = [read_tensors(_unit_path(folder, unit)) for unit in block]
        splits = [
            split_unit(
                unit["representatives"],
                unit["means"],
                weight[number],
                float(bias[number]),
                winner_rule=rule.winner_rule,
                rho_score=rule.rho_score,
                seed=rule.seed * 1_000_003 + number,
            )
            for number, unit in zip(block, found, strict=True)
        ]
        members = torch.cat([split.members for split in splits])
        owners = torch.tensor([unit for unit, split in zip(block, splits, strict=True) for _ in split.members])
        sizes = [unit["sizes"] if len(unit["sizes"]) > 1 else torch.zeros(1, dtype=torch.int32) for unit in found]
        parts = sub_unit_parameters(weight, bias, members, owners)
        return {
            "members": torch.from_numpy(np.packbits(members.numpy(), axis=1)),
            "units": owners.int(),
            "rho": torch.tensor([split.rho for split in splits]),
            "sizes": torch.cat(sizes),
            **self._strongest("sub_units", store, *parts),
            **self._strongest("units", store, weight[block.start : block.stop], bias[block.start : block.stop]),
        }

    def _strongest(
        self, kind: str, store: tokens.TokenStore, weight: torch.Tensor, bias: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        spec, device = self.spec.references, self.tower.device
        most = max(spec.instances, spec.keep)
        values, rows = (t.cpu() for t in tokens.strongest_instances(store, weight.to(device), bias.to(device), most))
        mean = values[:, : spec.instances].double().mean(1).float()
        return {
            f"{kind}.activation": mean,
            f"{kind}.values": values[:, : spec.keep].contiguous(),
            f"{kind}.rows": rows[:, : spec.keep].contiguous(),
        }

    def assembled(self, store: tokens.TokenStore, folder: Path, model: Mapping[str, Any]) -> Atlas:
        """The atlas of all blocks."""
        blocks = [read_tensors(_block_path(folder, block, ".safetensors")) for block in self._blocks()]
        joined = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        used = np.unique(
            np.concatenate([store.places["image"][joined[f"{k}.rows"]].ravel() for k in ("sub_units", "units")])
        )
        about = {
            "name": self.spec.name,
            "model": dict(model),
            "class": type(self.tower.model).__name__,
            "layer": self.tower.layer_name,
            "weights": weights_hash(self.tower.layer),
            "d_in": self.weight.shape[1],
            "d_out": len(self.weight),
            "units": len(self.weight),
            "sub_units": len(joined["units"]),
            "images": len(store.image_ids),
            "instances": len(store),
            "backend": self.backend,
            "spec": asdict(self.spec),
            "versions": versions(),
        }
        of_sub_units, of_units = (_references(kind, joined, store.places, used) for kind in ("sub_units", "units"))
        names = tuple(store.image_ids[int(number)] for number in used)
        units, rho, sizes = joined["units"].long(), joined["rho"], joined["sizes"]
        return Atlas(joined["members"], units, rho, sizes, of_sub_units, of_units, names, about)

    @property
    def _split_units(self) -> int:
        return min(len(self.weight), self.spec.clusters.units or len(self.weight))

    def _blocks(self, wanted: int | None = None) -> list[range]:
        """Blocks of units up to the one that holds the last wanted."""
        count = len(self.weight)
        starts = range(0, count if wanted is None else wanted, _UNITS)
        return [range(start, min(start + _UNITS, count)) for start in starts]

    def each(
        self, label: str, pieces: Sequence[Any], path: Callable[[Any], Path], work: Callable[[Any], None], unit: str
    ) -> None:
        """Does what is not done yet of some pieces of work, with a bar."""
        with self.bar(label, len(pieces), unit) as bar:

            def one(piece: Any) -> None:
                if not path(piece).exists() and not self.workers.stopped.is_set():
                    work(piece)
                bar.update(1)

            self.workers.each(pieces, one)

    @contextmanager
    def bar(self, label: str, total: int | None, unit: str) -> Iterator[Any]:
        """A bar for this process's share of the work; the time it took goes to the log."""
        share = None if total is None else -(-total // self.workers.world)
        hidden = True if self.quiet or self.workers.rank else None  # None: hidden where there is no terminal
        start = time.perf_counter()
        reset_peak(self.tower.device)
        with tqdm(total=share, desc=f"{label:<10}", unit=f" {unit}", disable=hidden, dynamic_ncols=True) as shown:
            yield shown
        if self.workers.rank == 0:
            peak = peak_megabytes(self.tower.device)
            memory = "" if peak is None else f", {peak / 1000:.2f} GB"
            _LOG.info("%s: %.1f s%s", label, time.perf_counter() - start, memory)

    def stage_folder(self, stage: str, key: str) -> Path:
        """Where a stage keeps what it has done."""
        folder = self.work / f"{stage}-{key}"
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
        return folder


def cluster_unit(q: torch.Tensor, weight: torch.Tensor, spec: ClustersSpec) -> dict[str, torch.Tensor]:
    """Summary of the clusters among a unit's strongest inputs, `(instances, d_in)`."""
    c = contributions(q, weight)
    clusters = cluster(
        c,
        backend=spec.backend,
        selection=spec.selection,
        min_cluster_size=spec.min_cluster_size,
        min_samples=spec.min_samples,
        umap_components=spec.umap_components,
        umap_neighbors=spec.umap_neighbors,
        seed=spec.seed,
    )
    return summarize_clusters(q, c, clusters)


def _references(kind: str, joined: Mapping[str, torch.Tensor], places: np.ndarray, used: np.ndarray) -> References:
    at = places[joined[f"{kind}.rows"].numpy()]
    images = np.searchsorted(used, at["image"])
    numbers = [torch.from_numpy(array.astype(np.int32)) for array in (images, at["tile"], at["token"])]
    return References(joined[f"{kind}.activation"], joined[f"{kind}.values"], *numbers)


def warn(message: str) -> None:
    """Says something worth knowing; the command line shows it as one line."""
    warnings.warn(message, EludeSteerWarning, stacklevel=3)


def _block_path(folder: Path, block: range, suffix: str) -> Path:
    return folder / f"block-{block.start:06d}{suffix}"


def _unit_path(folder: Path, unit: int) -> Path:
    return folder / f"unit-{unit:06d}.safetensors"
