"""The command that builds an atlas."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from elude_steer.cli.checks import check_images, check_spec
from elude_steer.cli.options import DEVICE, TRUST, hide_loading_bars, show_log, with_options


@click.command()
@click.argument("spec")
@click.option("--images", help="Probing images: a folder, a text file with one path per line, or hf:DATASET.")
@click.option(
    "--out", type=click.Path(), help="Folder of the atlas [default: its name under ELUDE_STEER_HOME/atlases]."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change the spec: clusters.top_k=5000.")
@with_options(DEVICE)
@click.option("--processes", type=click.IntRange(min=1), help="Processes on this machine [default: 1, or torchrun's].")
@click.option("--threads", type=click.IntRange(min=1), help="Threads per process, one core each [default: all cores].")
@click.option("--work", type=click.Path(), help="Folder of unfinished work [default: under ELUDE_STEER_HOME/work].")
@click.option("--quiet", is_flag=True, help="Show no progress and no times.")
@click.option(
    "--launcher",
    type=click.Choice(["local", "ray", "slurm"]),
    default="local",
    help="Where the pieces of a build are done.",
)
@click.option("--address", help="Of a Ray cluster; auto for the one of this machine [default: start one here].")
@click.option("--resource", "resources", multiple=True, metavar="KEY=VALUE", help="What a task asks for: gpus=1.")
@with_options(TRUST)
def build(spec: str, settings: tuple[str, ...], **options: Any) -> None:
    """Build the atlas of SPEC, a YAML file or a shipped recipe. Run it again to resume after an interruption.

    \b
    elude-steer build llava-onevision-0.5b --images photos/ --set clusters.top_k=5000 --out my-atlas
    torchrun --nproc_per_node 4 -m elude_steer build dinov2-base-layer12 --images imagenet/train
    elude-steer build dinov2-base-layer12 --images 's3://b/{000..099}.tar' --work s3://b/work --launcher ray
    """  # noqa: D301
    from elude_steer.atlas.build.launchers.resources import read_resources
    from elude_steer.atlas.manifest import check_name, check_target
    from elude_steer.errors import SpecError
    from elude_steer.utils.files import check_folder
    from elude_steer.utils.remote.filesystems import is_url

    loaded = check_spec(spec, settings)
    read_resources(options["launcher"], options["resources"], options["address"])
    if options["out"] is None:
        check_name(loaded.name)
    elif not is_url(options["out"]):
        check_target(check_folder(options["out"], replaced=True))
    if options["work"] is not None and not is_url(options["work"]):
        check_folder(options["work"])
    source = options["images"] if options["images"] is not None else loaded.images.source
    if source is None:
        raise SpecError(f"spec '{loaded.name}' leaves the probing images open; pass --images FOLDER (images=…).")
    check_images(source)
    from elude_steer.atlas.build.pipeline import build

    if options["quiet"] or not sys.stderr.isatty():
        hide_loading_bars()
    if not options["quiet"]:
        show_log()
    atlas = build(spec, settings=settings, **options)
    if int(os.environ.get("RANK", "0")) == 0:
        click.echo(options["out"] if is_url(options["out"]) else atlas.folder)
