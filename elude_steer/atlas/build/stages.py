"""What all stages of a build share: the spec, the tower, the images, the workers, progress bars and folders.

A stage is a function `stage(build, …) -> StageFolder` whose other arguments are the folders of the stages before it, or
the atlas so far. It opens a folder under a key made from its causes, does the pieces of work that are not there yet,
and returns the folder. Nothing is done twice: not after an interruption, and not by another build with the same causes.
Stages that only add to the atlas return the atlas and keep nothing. `pipeline.run_stages` calls them in order.

The pieces of a stage may be done by other processes, on other machines. So a piece is a number or a range, what does it
can be pickled (a build and a folder become their names), and it reads only the stages that `needs` lists.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from elude_steer.errors import EludeSteerWarning, ProcessError, SpecError
from elude_steer.method.layers import layer_parameters
from elude_steer.models.images import ImageSet, Item
from elude_steer.models.vision import Tower
from elude_steer.specs import AtlasSpec
from elude_steer.utils.files import explain_write_errors, remove_leftovers, wait_for
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.memory import peak_megabytes, reset_peak
from elude_steer.utils.parallel import Launcher
from elude_steer.utils.remote.filesystems import join_url
from elude_steer.utils.remote.mirror import Mirror
from elude_steer.utils.remote.root import find_folder

_LOG = logging.getLogger(__name__)
_BLOCK_UNITS = (
    32  # units that share one pass over the store; fixed, because another shape of product may round differently
)
SHARD_IMAGES = 64  # images in one piece of a stage; never changes the result
_OPENED: dict[str, Build] = {}  # by key: the builds that this process has opened for another one


@dataclass(frozen=True)
class StageFolder:
    """The finished work of one stage: its folder, and a key that stands for everything the work depends on."""

    path: Path
    key: str
    url: str | None = None

    @property
    def mirror(self) -> Mirror:
        """The folder and the store behind it."""
        return Mirror(self.path, self.url)

    def __reduce__(self) -> tuple[Callable[[str, str], StageFolder], tuple[str, str]]:
        return _find_stage, (self.path.name, self.key)


def _find_stage(name: str, key: str) -> StageFolder:
    path, url = find_folder(name)
    path.mkdir(parents=True, exist_ok=True)
    return StageFolder(path, key, url)


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
        url: the store behind the work folder, which other machines reach; None if there is none.
        key: names this build in other processes; empty if no other process can open it.
        weight: `(d_out, d_in)` of the target layer.
        bias: `(d_out,)` of the target layer.
        backend: the clustering backend, once it is chosen.
        labelling: what labels sub-units, once it is loaded.
    """

    tower: Tower
    images: ImageSet
    spec: AtlasSpec
    workers: Launcher
    work: Path
    quiet: bool
    trust_remote_code: bool = False
    shard: int = field(default_factory=lambda: SHARD_IMAGES)
    url: str | None = None
    key: str = ""
    weight: torch.Tensor = field(init=False)
    bias: torch.Tensor = field(init=False)
    backend: str = field(init=False, default="")
    labelling: Any = field(init=False, default=None, repr=False)
    _bar: Any = field(init=False, default=None, repr=False)
    _shown: threading.local = field(init=False, default_factory=threading.local, repr=False)

    def __post_init__(self) -> None:
        self.weight, self.bias = (tensor.float() for tensor in layer_parameters(self.tower.layer))
        check_memory(
            self.spec, self.images.length, self.weight.shape[1], self.tower.device, self.workers.local
        )  # before the fingerprint, for which images may be read
        self.spec = resolve_tokens(self.spec, self.images.length)
        if self.images.fingerprint is None:  # a stream can be read only once, so nobody can use its stages again
            if self.workers.world > 1 or self.workers.travels or self.url:
                raise SpecError("several processes cannot share a stream of images; give a folder or a list.")
            self.work = self.work / f"stream-{uuid.uuid4().hex[:12]}"

    def __reduce__(self) -> tuple[Callable[..., Build], tuple[Any, ...]]:
        return reopen, (self.key, self.spec, self.backend)

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
        return StageFolder(folder, key, None if self.url is None else join_url(self.url, folder.name))

    def settle(self, folder: StageFolder, work: Callable[[], None], *files: Path) -> None:
        """Do in the main process what is done once, unless it is done already, and give all processes the files.

        Args:
            folder: the stage.
            work: writes the files; it is called only if the last of them is not there.
            files: what it leaves, the last of them last.
        """
        folder.mirror.bring()
        if self.is_main:
            if not files[-1].exists():
                work()
            if not folder.mirror.has(files[-1]):
                folder.mirror.share(files)
        self.workers.barrier()
        folder.mirror.bring()

    @cached_property
    def cache(self) -> ActivationCache:
        """The activations of images that later stages need again."""
        spec = self.spec
        step = self.image_step(spec.labels.images)
        # Machines that share a store do not share these. Of every n-th image alone, the tower would then compute other
        # last bits than of all, on some machines and not on others.
        reuse = spec.tokens.reuse and (self.url is None or step == 1)
        if not reuse or spec.labels.scorer is None or not self.images.length:
            return ActivationCache(self.tower, None)
        folder = self.open_stage("activations", *self.source, spec.tokens.batch_size).path
        return ActivationCache(
            self.tower,
            folder,
            keep=lambda index: index % step == 0,
            processes=max(self.workers.world, self.workers.local),
        )

    def image_step(self, max_images: int) -> int:
        """The smallest n such that every n-th image makes at most `max_images`."""
        return -(-(self.images.length or 0) // max_images)

    def shards(self, step: int = 1) -> Iterable[Any]:
        """The numbers of all shards of every `step`-th image; of a stream, what `open_shard` takes instead."""
        if self.images.length is None:
            return iterate_shards(self.images, self.spec.tokens.batch_size, self.shard, step)
        return range(-(-self.images.length // (step * self._images_per_shard())))

    def open_shard(self, shard: Any, step: int = 1) -> tuple[int, list[list[Item]]]:
        """The number and the batches of a shard, cut in the same way every time."""
        if not isinstance(shard, int):
            return shard[0], shard[1]
        count, size = self._images_per_shard(), self.spec.tokens.batch_size
        end = min((shard + 1) * count * step, self.images.length or 0)
        items = iter(self.images.select(range(shard * count * step, end, step)))
        return shard, list(iter(lambda: list(islice(items, size)), []))

    def shard_size(self, shard: Any, step: int = 1) -> int:
        """How many images a shard has."""
        if not isinstance(shard, int):
            return sum(map(len, shard[1]))
        count = self._images_per_shard()
        return len(range(shard * count * step, min((shard + 1) * count * step, self.images.length or 0), step))

    def shard_groups(self, step: int = 1) -> list[list[int]] | None:
        """Shards that one process should read one after another, because their images are read in order."""
        starts = self.images.runs
        if starts is None:
            return None
        groups: dict[int, list[int]] = {}
        for shard in self.shards(step):
            groups.setdefault(bisect_right(starts, shard * self._images_per_shard() * step), []).append(shard)
        return list(groups.values())

    def _images_per_shard(self) -> int:
        """Whole batches only, so that the size of a shard cannot change a batch."""
        return max(1, self.shard // self.spec.tokens.batch_size) * self.spec.tokens.batch_size

    def unit_blocks(self, count: int | None = None) -> list[range]:
        """Blocks of units, up to the block that holds the first `count` units; None for all."""
        starts = range(0, len(self.weight) if count is None else count, _BLOCK_UNITS)
        return [range(start, min(start + _BLOCK_UNITS, len(self.weight))) for start in starts]

    def run_pieces(
        self,
        label: str,
        folder: StageFolder,
        pieces: Iterable[Any],
        files: Callable[[Any], Sequence[Path]],
        work: Callable[[Any], None],
        unit: str,
        *,
        needs: Sequence[StageFolder] = (),
        size: Callable[[Any], int] = lambda piece: 1,
        total: int | None = None,
        groups: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """Do the pieces of work whose file does not exist yet, with a progress bar.

        Args:
            label: what the bar is called.
            folder: the stage.
            pieces: the pieces of work, shared by all workers.
            files: those that a finished piece leaves; the last one is written last.
            work: does one piece.
            unit: what the bar counts.
            needs: the finished stages that `work` reads.
            size: how many of these a piece is; `work` may call `advance` before it has done all of them.
            total: how many of these there are; None for the number of pieces.
            groups: the pieces that one process should do one after another; None for each on its own.
        """
        task = _Task(self, folder, tuple(needs), files, work)
        tasks = ([piece] for piece in pieces) if groups is None else iter(groups)
        count = total if total is not None else len(pieces) if isinstance(pieces, Sequence) else None
        with self.progress_bar(label, count, unit) as bar:
            self._bar = bar
            if self.workers.travels:
                tasks = self._skip_finished(folder, tasks, files, size)

            def on_done(task: Sequence[Any]) -> None:
                if self.workers.travels and self.url is None:
                    wait_for([files(piece)[-1] for piece in task])
                bar.update(sum(map(size, task)) - getattr(self._shown, "count", 0))
                self._shown.count = 0

            try:
                self.workers.each(tasks, task, on_done)
            finally:
                self._bar = None
        folder.mirror.bring()

    def _skip_finished(
        self,
        folder: StageFolder,
        tasks: Iterable[Sequence[Any]],
        files: Callable[[Any], Sequence[Path]],
        size: Callable[[Any], int],
    ) -> Iterator[list[Any]]:
        """What is left to do, so that nothing that is done travels."""
        finished = folder.mirror.finished()
        for task in tasks:
            left = []
            for piece in task:
                last = files(piece)[-1]
                if last.exists() if finished is None else last.name in finished:
                    self._bar.update(size(piece))
                else:
                    left.append(piece)
            if left:
                yield left

    def advance(self, count: int) -> None:
        """Show that a part of a piece is done, where this process shows progress."""
        if self._bar is not None:
            self._shown.count = getattr(self._shown, "count", 0) + count
            self._bar.update(count)

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


@dataclass(frozen=True)
class _Task:
    """Does pieces of a stage and shares what they leave; it can be pickled."""

    build: Build
    folder: StageFolder
    needs: tuple[StageFolder, ...]
    files: Callable[[Any], Sequence[Path]]
    work: Callable[[Any], None]

    def __call__(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            files = self.files(piece)
            if self.build.workers.stopped.is_set() or self.folder.mirror.has(files[-1]):
                continue
            for stage in self.needs:
                stage.mirror.bring(once=True)
            if not files[-1].exists():
                self.work(piece)
            if files[-1].exists():  # not after an error elsewhere
                self.folder.mirror.share(files)


def reopen(key: str, spec: AtlasSpec, backend: str) -> Build:
    """The build of this key as this process has opened it, with the sizes that are settled by now."""
    if key not in _OPENED:
        raise ProcessError("a model that was given in memory stays in its process; use the launcher 'local'.")
    build = _OPENED[key]
    build.spec, build.backend = spec, backend
    return build


def register(build: Build) -> None:
    """Let `reopen` find a build in this process; only one is kept, because each holds a model."""
    _OPENED.clear()
    _OPENED[build.key] = build


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
