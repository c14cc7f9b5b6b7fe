"""What all stages of a build share: the spec, the tower, the images, the workers, progress bars and folders.

A stage is a function `stage(build, …) -> StageFolder` whose other arguments are the folders of the stages before it, or
the atlas so far. It opens a folder under a key made from its causes, does the pieces of work that are not there yet,
and returns the folder. Nothing is done twice: not after an interruption, and not by another build with the same causes.
Stages that only add to the atlas return the atlas and keep nothing. `pipeline.run_stages` calls them in order.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.activation_cache import ActivationCache
from elude_steer.atlas.build.sizes import check_memory, resolve_clusters, resolve_tokens
from elude_steer.atlas.reference_images import record_build
from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.method.layers import layer_parameters
from elude_steer.models.images import ImageSet, Item
from elude_steer.models.vision import Tower
from elude_steer.specs import AtlasSpec
from elude_steer.utils.files import explain_write_errors, remove_leftovers
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.memory import peak_megabytes, reset_peak
from elude_steer.utils.parallel import WorkerGroup

_LOG = logging.getLogger(__name__)
_BLOCK_UNITS = (
    32  # units that share one pass over the store; fixed, because another shape of product may round differently
)


@dataclass(frozen=True)
class StageFolder:
    """The finished work of one stage: its folder, and a key that stands for everything the work depends on."""

    path: Path
    key: str


@dataclass
class Build:
    """One build of an atlas.

    Attributes:
        tower: the model and its target layer.
        images: the probing images.
        spec: the settings of all stages; `auto` gives way to numbers as soon as they are known.
        workers: the processes and threads that share the work.
        work: the folder that holds the folders of stages.
        quiet: whether progress bars are hidden.
        trust_remote_code: whether code that comes with the dual encoder may run.
        shard: images in one file of a stage; never changes the result.
        weight: `(d_out, d_in)` of the target layer.
        bias: `(d_out,)` of the target layer.
        backend: the clustering backend, once it is chosen.
    """

    tower: Tower
    images: ImageSet
    spec: AtlasSpec
    workers: WorkerGroup
    work: Path
    quiet: bool
    trust_remote_code: bool = False
    shard: int = 64
    weight: torch.Tensor = field(init=False)
    bias: torch.Tensor = field(init=False)
    backend: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.weight, self.bias = (tensor.float() for tensor in layer_parameters(self.tower.layer))
        check_memory(
            self.spec, self.images.length, self.weight.shape[1], self.tower.device, self.workers.local
        )  # before the fingerprint, for which images may be read
        self.spec = resolve_tokens(self.spec, self.images.length)
        if self.images.fingerprint is None:  # a stream can be read only once, so nobody can use its stages again
            if self.workers.world > 1:
                raise SpecError("several processes cannot share a stream of images; give a folder or a list.")
            self.work = self.work / f"stream-{uuid.uuid4().hex[:12]}"

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.workers.rank == 0

    @cached_property
    def source(self) -> tuple[Any, ...]:
        """The causes of everything the tower computes: its weights, the images, the kind of device, the versions."""
        return self.tower.fingerprint(), self.images.fingerprint, str(self.tower.device.type), versions()

    def settle_sizes(self, images: int, instances: int) -> None:
        """Replace what is still `auto` in the spec, now that the number of stored instances is known."""
        self.spec = resolve_clusters(resolve_tokens(self.spec, images), instances)

    def open_stage(self, name: str, *causes: Any) -> StageFolder:
        """Make or find the folder of a stage; its key is a hash of the name and the causes."""
        key = make_key(name, *causes)
        folder = self.work / f"{name}-{key}"
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
        return StageFolder(folder, key)

    @cached_property
    def cache(self) -> ActivationCache:
        """The activations of images that later stages need again."""
        spec = self.spec
        if not spec.tokens.reuse or spec.labels.scorer is None or not self.images.length:
            return ActivationCache(self.tower, None)
        folder = self.open_stage("activations", *self.source, spec.tokens.batch_size).path
        step = self.image_step(spec.labels.images)
        return ActivationCache(
            self.tower,
            folder,
            keep=lambda index: index % step == 0,
            processes=self.workers.world,
        )

    def image_step(self, max_images: int) -> int:
        """The smallest n such that every n-th image makes at most `max_images`."""
        return -(-(self.images.length or 0) // max_images)

    def shards(self, step: int = 1) -> Iterator[tuple[int, list[list[Item]]]]:
        """Every `step`-th image in numbered lists of batches, cut in the same way every time."""
        return iterate_shards(self.images, self.spec.tokens.batch_size, self.shard, step)

    def unit_blocks(self, count: int | None = None) -> list[range]:
        """Blocks of units, up to the block that holds the first `count` units; None for all."""
        starts = range(0, len(self.weight) if count is None else count, _BLOCK_UNITS)
        return [range(start, min(start + _BLOCK_UNITS, len(self.weight))) for start in starts]

    def run_pieces(
        self, label: str, pieces: Sequence[Any], path: Callable[[Any], Path], work: Callable[[Any], None], unit: str
    ) -> None:
        """Do the pieces of work whose file does not exist yet, with a progress bar.

        Args:
            label: what the bar is called.
            pieces: the pieces of work, shared by all workers.
            path: the file that a finished piece leaves.
            work: does one piece.
            unit: what the bar counts.
        """
        with self.progress_bar(label, len(pieces), unit) as bar:

            def do_piece(piece: Any) -> None:
                if not path(piece).exists() and not self.workers.stopped.is_set():
                    work(piece)
                bar.update(1)

            self.workers.each(pieces, do_piece)

    @contextmanager
    def progress_bar(self, label: str, total: int | None, unit: str) -> Iterator[Any]:
        """Show a bar for this process's share of the work, and log the time and memory it took."""
        share = None if total is None else -(-total // self.workers.world)
        hidden = True if self.quiet or not self.is_main else None  # None: hidden where there is no terminal
        start = time.perf_counter()
        reset_peak(self.tower.device)
        with tqdm(total=share, desc=f"{label:<10}", unit=f" {unit}", disable=hidden, dynamic_ncols=True) as bar:
            yield bar
        if self.is_main:
            peak = peak_megabytes(self.tower.device)
            memory = "" if peak is None else f", {peak / 1000:.2f} GB"
            _LOG.info("%s: %.1f s%s", label, time.perf_counter() - start, memory)

    def save(self, atlas: Atlas, out: Path, thumbnails: Mapping[str, bytes] | None = None) -> Atlas:
        """Write the atlas in the main process; returns it as loaded from disk."""
        if self.is_main:
            if len(atlas) == atlas.d_out:
                spec = self.spec.clusters
                instances = min(int(spec.top_k), atlas.about["instances"])
                warn(
                    f"no unit was split: no clusters of at least clusters.min_cluster_size = {spec.min_cluster_size} "
                    f"among {instances} instances a unit; lower it, or use more images or tokens."
                )
            atlas.save(out, thumbnails)
        self.workers.barrier()
        saved = Atlas.load(out)
        if self.is_main:
            record_build(saved)
        return saved

    def remove_cache(self) -> None:
        """Delete the cached activations."""
        self.workers.barrier()
        if self.is_main:
            self.cache.remove()

    def remove_stream_work(self) -> None:
        """Delete the stages of a stream of images, which nobody can use again."""
        if self.images.fingerprint is None:
            shutil.rmtree(self.work, ignore_errors=True)


def iterate_shards(
    images: ImageSet, batch_size: int, shard: int = 64, step: int = 1
) -> Iterator[tuple[int, list[list[Item]]]]:
    """Numbered lists of batches, about `shard` images each, of every `step`-th image.

    A shard holds whole batches only, so that its size cannot change a batch.
    """
    items, number = islice(images.items(), 0, None, step), 0
    count = max(1, shard // batch_size)
    while batches := [batch for _ in range(count) if (batch := list(islice(items, batch_size)))]:
        yield number, batches
        number += 1


def block_path(folder: StageFolder, block: range, suffix: str = ".safetensors") -> Path:
    """The file of a block of units."""
    return folder.path / f"block-{block.start:06d}{suffix}"


def warn(message: str) -> None:
    """Warn the user; the command line shows it as one line."""
    warnings.warn(message, EludeSteerWarning, stacklevel=3)
