"""What a process does that works for a build of another one: open that build once, then do pieces of its stages.

What travels are two pickles: the build (its spec, the images that it found and a hash of all that its numbers depend
on), and for each stage the function that does a piece. Both are made by the process that the user started; a process
reads them from its engine, or from a file whose hash the engine tells, never as a work folder has them to which others
may write.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.stages import Build, register
from elude_steer.errors import EludeSteerError, ProcessError
from elude_steer.models.images import ImageSet
from elude_steer.models.loading import as_dtype
from elude_steer.models.vision import Tower, load_timm, load_vision
from elude_steer.models.vlm import Vlm
from elude_steer.specs import AtlasSpec, ModelSpec
from elude_steer.trust import check_needs
from elude_steer.utils.files import home
from elude_steer.utils.fingerprint import make_key
from elude_steer.utils.parallel import WorkerGroup
from elude_steer.utils.remote.root import enter_root

_loaded: dict[str, Any] = {}  # what this process has opened: the key of its build, and the last stage's function


@dataclass(frozen=True)
class Origin:
    """What another process needs to open a build.

    Attributes:
        key: names the build.
        spec: its settings.
        images: its images, as the first process has found them.
        source: what the tower's numbers depend on; every process must find the same.
        device: the kind of device, such as `cuda`.
        work: the work folder, if all processes share it.
        url: the store behind it, if there is one; each machine then has a work folder of its own.
        shard: images in one file.
        trust_remote_code: whether code that comes with the models may run.
        threads: pieces that a process does at a time.
        samples: hashes of some images, as the first process has read them.
    """

    key: str
    spec: AtlasSpec
    images: ImageSet
    source: tuple[Any, ...]
    device: str
    work: Path
    url: str | None
    shard: int
    trust_remote_code: bool
    threads: int
    samples: tuple[str | None, ...]


def describe_build(build: Build, threads: int = 1) -> Origin:
    """What another process needs to open this build."""
    if not build.key:
        raise ProcessError("a model that was given in memory stays in its process; use the launcher 'local'.")
    device = str(build.tower.device.type)
    options = (build.work, build.url, build.shard, build.trust_remote_code, threads, hash_samples(build.images))
    return Origin(build.key, build.spec, build.images, build.source, device, *options)


def mirror_folder(url: str) -> Path:
    """The folder of this machine in which the stages of a URL are kept."""
    return home() / "mirrors" / make_key(url)


def open_build(origin: Origin) -> Build:
    """Open a build in this process, with its model; raise if this machine would compute other numbers."""
    torch.set_num_threads(1)  # a sum over several threads depends on their number
    spec = origin.spec
    tower = load_tower(spec.model, origin.device, trust_remote_code=origin.trust_remote_code)
    work = origin.work if origin.url is None else mirror_folder(origin.url)
    workers = WorkerGroup(threads=origin.threads)
    options = (workers, work, True, origin.trust_remote_code, origin.shard, origin.url, origin.key)
    build = Build(tower, origin.images, spec, *options)
    for mine, theirs in zip(build.source, origin.source, strict=True):
        if mine != theirs:
            raise ProcessError(
                f"a machine that should do a part of the build has {_shorten(mine)} where the first one has "
                f"{_shorten(theirs)}; give all machines the same packages, models and images."
            )
    if hash_samples(origin.images) != origin.samples:  # otherwise it would leave out all images that it cannot read
        raise ProcessError(
            f"a machine that should do a part of the build does not read the same images of {origin.images.name}; give "
            "all machines the same folder, or tar shards behind a URL."
        )
    enter_root(work, origin.url)
    register(build)
    return build


def hash_samples(images: ImageSet, count: int = 8) -> tuple[str | None, ...]:
    """Hashes of some images, evenly spread; None for one that cannot be read."""
    length = images.length or 1
    step, found = (max(1, length // count) if images.runs is None else length), []  # a part is read from its beginning
    for item in islice(images.select(range(0, images.length or 1, step)), count):
        got = read_item(item, {})
        found.append(None if got is None else got[1].hex())
    return tuple(found)


def run_task(
    origin_key: str,
    read_origin: Callable[[], Origin],
    stage: str,
    read_work: Callable[[], Callable[[Any], None]],
    task: Any,
) -> str | None:
    """Do one task in this process; returns the text of an error that the user can do something about.

    Args:
        origin_key: of the build.
        read_origin: gives the build, if this process does not have it yet.
        stage: names the function that does the task.
        read_work: gives that function, if this process does not have it yet.
        task: its argument.
    """
    try:
        if _loaded.get("origin") != origin_key:
            _loaded.clear()
            open_build(read_origin())
            _loaded["origin"] = origin_key
        if _loaded.get("stage") != stage:
            _loaded.pop("work", None)
            _loaded["work"], _loaded["stage"] = read_work(), stage
        _note(f"begin {stage} {task}")
        _loaded["work"](task)
        _note(f"end {stage} {task}")
    except EludeSteerError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the first process prints it in one line
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"unexpected {type(error).__name__} in {Path(last.filename).name}, line {last.lineno}: {error}"
    return None


def _note(line: str) -> None:
    """Write down what this process does, for those who ask which machine did what."""
    folder = os.environ.get("ELUDE_STEER_TASK_LOG")
    if folder:
        with (Path(folder) / f"{os.uname().nodename}-{os.getpid()}.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def hash_bytes(data: bytes) -> str:
    """A name for pickled work."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _shorten(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def load_tower(model: ModelSpec, device: str | None = None, *, trust_remote_code: bool = False) -> Tower:
    """Load the model of a spec with its target layer.

    Args:
        model: the model; that it needs its own code allows nothing.
        device: where the model runs.
        trust_remote_code: whether code that comes with the model may run.
    """
    check_needs({"model": asdict(model)}, ("model",), trust_remote_code)
    if model.kind == "timm":
        options: dict[str, Any] = {"device": device, "dtype": model.dtype, "trust_remote_code": trust_remote_code}
        tower = load_timm(model.id, layer=model.layer, **options)
    else:
        load = Vlm.load if model.kind == "vlm" else load_vision
        tower = load(
            model.id,
            layer=model.layer,
            device=device,
            dtype=model.dtype,
            revision=model.revision,
            attn_implementation=model.attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    return replace(tower, autocast=as_dtype(model.autocast)) if model.autocast else tower
