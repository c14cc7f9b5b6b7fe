"""From a spec and images to an atlas: `build`, and the order of the stages."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.calibrating import MIN_IMAGES, add_calibration
from elude_steer.atlas.build.labelling import (
    add_labels,
    check_same_images,
    choose_dissection,
    embed_images,
    fit_words,
    gather_evidence,
    prepare_labelling,
)
from elude_steer.atlas.build.launchers import ray_launcher, slurm_launcher
from elude_steer.atlas.build.launchers.ray_launcher import RayLauncher
from elude_steer.atlas.build.launchers.resources import Resources, read_resources
from elude_steer.atlas.build.launchers.slurm_launcher import SlurmLauncher
from elude_steer.atlas.build.launchers.worker import describe_build, load_tower, mirror_folder
from elude_steer.atlas.build.pooling import (
    add_familiarity,
    add_references,
    make_thumbnails,
    pool_activations,
    rank_images,
)
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.atlas.build.sub_units import assemble_atlas, split_units
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.atlas.build.tokens import collect_tokens
from elude_steer.atlas.build.unit_clusters import cluster_units, rank_instances
from elude_steer.atlas.manifest import check_name, check_target
from elude_steer.atlas.reference_images import check_source, record_build
from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.models.images import image_set
from elude_steer.models.loading import check_device
from elude_steer.models.sources.patterns import names_shards
from elude_steer.recipe_files import load_spec, parse_spec
from elude_steer.specs import AtlasSpec
from elude_steer.utils.files import home
from elude_steer.utils.fingerprint import make_key
from elude_steer.utils.parallel import Launcher, launch, worker_group
from elude_steer.utils.remote.filesystems import check_url, is_url
from elude_steer.utils.remote.mirror import publish
from elude_steer.utils.yaml_schema import dump_document, override, validate


def build(
    spec: AtlasSpec | str | Path,
    *,
    images: Any = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    device: str | None = None,
    processes: int | None = None,
    threads: int | None = None,
    work: str | Path | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
    launcher: str = "local",
    address: str | None = None,
    resources: Sequence[str] = (),
) -> Atlas:
    """Build the atlas that a spec describes; an interrupted build continues where it stopped.

    Args:
        spec: an `AtlasSpec`, a YAML file, or the name of a shipped recipe.
        images: the probing images, if the spec leaves them open; see `images.image_set`.
        out: the folder to write, or a URL such as `s3://bucket/atlas`; by default one with the spec's name under
            `ELUDE_STEER_HOME/atlases`.
        settings: changes to the spec, such as `clusters.top_k=5000`.
        device: where the model and the products run.
        processes: how many to start on this machine; None for one, or for those that torchrun started.
        threads: how many in each process, one core each; by default all cores.
        work: the folder for unfinished and reusable stages, or a URL; with a URL, machines need no folder in common.
        quiet: hide progress bars.
        trust_remote_code: whether code that comes with the models may run; what the spec says allows nothing.
        launcher: where the pieces are done: `local`, `ray` or `slurm`.
        address: of a Ray cluster, `auto` for the one of this machine; None starts one here.
        resources: what each task asks for, such as `gpus=1`; see `launchers.resources.Resources`.

    Returns:
        The atlas, loaded from where it was written. Its bytes do not depend on processes, threads or interruptions.

    Example:
        >>> atlas = build("recipes/atlases/llava-onevision-0.5b.yaml", images="photos/", out="my-atlas")
    """
    spec = override(validate(spec) if isinstance(spec, AtlasSpec) else load_spec(spec), settings)
    asked = read_resources(launcher, resources, address)
    out_url = check_url(str(out)) if is_url(out) else None
    default = home() / "atlases" / check_name(spec.name) if out is None else Path(out)
    out = check_target(mirror_folder(out_url) / spec.name if out_url else default)
    place, url = find_work(work)
    check_counts(threads, processes)
    check_device(device)
    source = images if images is not None else spec.images.source
    if source is None:
        raise SpecError(f"spec '{spec.name}' leaves the probing images open; pass --images FOLDER (images=…).")
    if isinstance(source, str) and source.startswith(
        ("hf:", "hf-stream:", "toyland:")
    ):  # anybody can open these; the card names them
        spec = replace(spec, images=replace(spec.images, source=source))
    probing_images = image_set(source, split=spec.images.split, column=spec.images.column, limit=spec.images.limit)
    if launcher == "local" and processes is not None and processes != 1 and "WORLD_SIZE" not in os.environ:
        options = {"--out": out, "--device": device, "--threads": threads, "--work": url or place}
        for folder in (out, place):  # the command asks for the folder that they lie in
            folder.parent.mkdir(parents=True, exist_ok=True)
        flags = {"--quiet": quiet, "--trust-remote-code": trust_remote_code is True}
        _build_in_processes(spec, source, processes, options, [flag for flag, given in flags.items() if given])
        return _publish(Atlas.load(out), out_url)
    with _open_launcher(launcher, asked, address, processes, threads, place) as workers:
        if url and workers.world > workers.local:
            raise SpecError("processes on several machines need a folder in common as --work; or --launcher ray.")
        tower = load_tower(spec.model, _device_of_process(device), trust_remote_code=trust_remote_code)
        key = make_key(asdict(spec), probing_images.name, str(url or place))
        run = Build(tower, probing_images, spec, workers, place, quiet, trust_remote_code, url=url, key=key)
        if isinstance(workers, RayLauncher | SlurmLauncher):
            workers.origin = describe_build(run, asked.cpus if launcher == "slurm" else 1)
        described = {"id": spec.model.id, "revision": spec.model.revision, "kind": spec.model.kind}
        return _publish(run_and_save(run, out, described), out_url)


@contextmanager
def _open_launcher(
    name: str, resources: Resources, address: str | None, processes: int | None, threads: int | None, place: Path
) -> Iterator[Launcher]:
    """Yield what does the pieces of a build; with Ray and SLURM this process computes little itself, in one thread."""
    with worker_group(processes if name == "local" else None, threads) as workers:
        if name == "local":
            yield workers
            return
        if workers.world > 1:
            raise SpecError(f"--launcher {name} starts its own workers; run it without torchrun.")
        if name == "slurm":
            yield slurm_launcher.connect(resources, place / "slurm")
            return
        with ray_launcher.connect(resources, address, processes) as cluster:
            yield cluster


def _publish(atlas: Atlas, url: str | None) -> Atlas:
    """Copy an atlas to a URL, if there is one."""
    if url is not None and int(os.environ.get("RANK", "0")) == 0:
        publish(Path(str(atlas.folder)), url, "manifest.json")
    return atlas


def run_and_save(build: Build, out: Path, model: Mapping[str, Any]) -> Atlas:
    """Run all stages, save the atlas, and delete what is of no further use."""
    try:
        atlas, thumbnails = run_stages(build, model)
        saved = build.save(atlas, out, thumbnails)
        build.remove_cache()
        return saved
    finally:
        build.remove_stream_work()


def run_stages(build: Build, model: Mapping[str, Any]) -> tuple[Atlas, dict[str, bytes] | None]:
    """All stages in their order; see `stages` for what they have in common.

    Args:
        build: the build.
        model: what the manifest says of the model.

    Returns:
        The atlas, and its thumbnails as files by name.
    """
    labelling = prepare_labelling(build)
    tokens = collect_tokens(build)
    store = TokenStore(tokens.path)
    build.settle_sizes(len(store.image_ids), len(store))
    rows = rank_instances(build, tokens)
    clusters = cluster_units(build, tokens, rows)
    split = split_units(build, tokens, clusters)
    atlas = assemble_atlas(build, tokens, split, model)
    if labelling is None:
        return atlas, None

    pooled = pool_activations(build, split, atlas)
    atlas = add_familiarity(build, atlas, pooled)
    ranking = rank_images(build, pooled)
    vectors = embed_images(build, labelling)
    check_same_images(pooled, ranking, vectors)
    settings = choose_dissection(build, ranking)
    fit = fit_words(build, labelling, vectors, settings)
    evidence = gather_evidence(build, atlas, settings, fit, pooled, ranking)
    atlas = add_labels(build, atlas, labelling, settings, evidence, pooled, ranking)
    atlas = add_references(build, atlas, ranking)
    atlas = add_calibration(build, atlas, labelling, pooled, vectors)
    return atlas, make_thumbnails(build, atlas)


def calibrate(
    atlas: str | Path,
    out: str | Path,
    *,
    images: Any = None,
    settings: Sequence[str] = (),
    device: str | None = None,
    threads: int | None = None,
    work: str | Path | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> Atlas:
    """Add `calibration` and `familiarity` to an atlas that was built without; its sub-units and labels stay.

    The probing images go through the tower once more. The new files are those that a build would write: to the bit
    where labels come from all probing images, otherwise up to rounding.

    Args:
        atlas: a folder, a name or a Hub id.
        out: the folder to write.
        images: the probing images, if the atlas's spec leaves them open.
        settings: changes to the spec, such as `labels.scorer=FOLDER` or `calibration.fit=0`.
        device: where the model runs.
        threads: how many, one core each; by default all cores.
        work: the folder for unfinished and reusable stages.
        quiet: hide progress bars.
        trust_remote_code: whether code that comes with the models may run; what the spec says allows nothing.

    Example:
        >>> calibrate("my-atlas", "my-atlas-2", images="photos/")
    """
    loaded, target = replace(Atlas.load(atlas), calibration=None), check_target(Path(out))
    loaded.require_labels()
    check_counts(threads, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EludeSteerWarning)  # keys of older versions: the new manifest leaves them out
        spec = override(parse_spec(json.dumps(loaded.about["spec"])), settings)
    source = images if images is not None else choose_source(loaded, spec)
    probing_images = image_set(source, split=spec.images.split, column=spec.images.column, limit=spec.images.limit)
    with worker_group(None, threads) as workers:
        tower = load_tower(spec.model, device, trust_remote_code=trust_remote_code)
        run = Build(tower, probing_images, spec, workers, work_folder(work), quiet, trust_remote_code)
        loaded.check(run.tower.layer, run.tower.read_stored)
        labelling = prepare_labelling(run)
        if labelling is None:
            raise SpecError("calibration needs the dual encoder that gave the labels: --set labels.scorer=ID.")
        if tuple(labelling.vocabulary) != loaded.require_labels().vocabulary:
            raise SpecError(
                f"the vocabulary is not that of the labels of atlas '{loaded.name}'; set labels.vocabulary."
            )
        pooled = pool_activations(run, StageFolder(run.work, loaded.fingerprint), loaded)
        vectors = embed_images(run, labelling)
        measured = add_calibration(run, add_familiarity(run, loaded, pooled), labelling, pooled, vectors)
        if measured.calibration is None:
            raise SpecError(f"too few images to calibrate with; give at least {MIN_IMAGES}.")
        about = {**measured.about, "spec": asdict(run.spec)}
        saved = Atlas.load(replace(measured, about=about).save(target, loaded.thumbnails()))
        if source == spec.images.source:  # the images that the new atlas names are those of this machine
            record_build(saved)
        run.remove_cache()
        return saved


def choose_source(atlas: Atlas, spec: AtlasSpec) -> str:
    """The probing images of an atlas; raise if its spec names none, or some that it must not open here.

    Args:
        atlas: the atlas as it was loaded.
        spec: its spec, perhaps with changes; a source that the user set counts.
    """
    source = spec.images.source
    if source is None:
        raise SpecError(f"the spec of atlas '{atlas.name}' leaves the probing images open; pass --images FOLDER.")
    if source == atlas.about["spec"]["images"]["source"]:
        check_source(atlas)
    return source


def _build_in_processes(
    spec: AtlasSpec, source: Any, processes: int, options: Mapping[str, object], flags: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(source, list | tuple) and all(isinstance(path, str | os.PathLike) for path in source):
            list_file = Path(folder) / "images.txt"
            list_file.write_text("\n".join(str(Path(path).absolute()) for path in source), encoding="utf-8")
            source = list_file
        if not isinstance(source, str | os.PathLike):
            raise SpecError("several processes need images that each can open: a folder, paths or a dataset's id.")
        named = names_shards(str(source)) or str(source).startswith(("hf:", "hf-stream:", "toyland:"))
        images = str(source) if named else str(Path(source).absolute())
        text = Path(folder) / "spec.yaml"
        text.write_text(dump_document(spec), encoding="utf-8")
        arguments = [str(part) for flag, value in options.items() if value is not None for part in (flag, value)]
        launch(processes, ["build", str(text), "--images", images, *arguments, *flags])


def _device_of_process(device: str | None) -> str | None:
    """Each process on a machine uses its own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def work_folder(work: str | Path | None) -> Path:
    """The folder for unfinished and reusable stages."""
    if is_url(work):
        raise SpecError(f"--work '{work}' is a URL, which `build` alone takes; give a folder.")
    return Path(work).expanduser() if work else home() / "work"


def find_work(work: str | Path | None) -> tuple[Path, str | None]:
    """The folder for unfinished and reusable stages, and the URL behind it if `work` is one."""
    if is_url(work):
        return mirror_folder(str(work)), check_url(str(work))
    return work_folder(work), None


def check_counts(threads: int | None, processes: int | None) -> None:
    """Raise unless both are None or at least 1."""
    for name, count in (("threads", threads), ("processes", processes)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise SpecError(f"{name} is {count}; it must be at least 1.")
