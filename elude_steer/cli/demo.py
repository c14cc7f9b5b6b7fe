"""The command that opens the demo page."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from elude_steer.cli.checks import check_images
from elude_steer.cli.options import LOADING, PLACING, hide_loading_bars, require_atlas, require_model, with_options


def _require_atlases(context: click.Context, option: click.Parameter, atlases: tuple[str, ...]) -> tuple[str, ...]:
    """The given atlases, or those that come with the package; refuses what cannot be loaded, and repetitions."""
    from elude_steer.atlas.manifest import list_shipped, locate_atlas

    seen = set()
    for atlas in atlases:
        require_atlas(context, option, atlas)
        if (folder := locate_atlas(atlas)[0]) in seen:
            raise click.BadParameter(f"atlas '{atlas}' is given twice; name each atlas once.")
        seen.add(folder)
    return atlases or tuple(list_shipped())


@click.command()
@click.option(
    "--atlas",
    "atlases",
    callback=_require_atlases,
    multiple=True,
    help="A folder, a name, or a Hub id; repeat it for a page each [default: all that come with the package].",
)
@click.option("--model", callback=require_model, help="Another copy of the model, for one atlas [default: its own].")
@click.option(
    "--images",
    help="Folder or hf:DATASET that one atlas was built from, to show images of its sub-units [default: its "
    "thumbnails, or the images it names if it was built on this machine].",
)
@with_options(*LOADING, *PLACING)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to serve; the default is this machine alone."
)
@click.option("--port", type=click.IntRange(1, 65535), help="[default: the first free one from 7860 on]")
@click.option("--share", is_flag=True, help="Get a public address, through Gradio's servers.")
@click.option(
    "--auth",
    metavar="FILE",
    help="Ask visitors for the name and password in this file, as NAME:PASSWORD [default: ELUDE_STEER_AUTH]. They are "
    "not taken from the command line, which others on this machine can read.",
)
@click.option("--mcp", is_flag=True, help="Serve the page's functions as tools for language models, too (MCP).")
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def demo(
    atlases: tuple[str, ...],
    model: str | None,
    images: str | None,
    device: str | None,
    threads: int | None,
    dtype: str | None,
    trust_remote_code: bool,
    device_map: Any,
    quantize: str | None,
    host: str,
    port: int | None,
    share: bool,
    auth: str | None,
    mcp: bool,
    no_browser: bool,
) -> None:
    """Open a page on which to steer captions and browse atlases (needs the extra `demo`).

    \b
    elude-steer demo
    elude-steer demo --atlas toyland --atlas my-atlas
    elude-steer demo --atlas my-atlas --device cuda --auth password.txt
    elude-steer demo --mcp --no-browser
    """  # noqa: D301
    from elude_steer.atlas.manifest import read_defaults
    from elude_steer.demo.access import check_mcp, read_auth
    from elude_steer.errors import SpecError
    from elude_steer.utils import optional

    password = read_auth(auth)
    if model is not None and len(atlases) > 1:
        raise SpecError(f"--model is for one atlas, not for {', '.join(atlases)}; choose one: --atlas {atlases[0]}.")
    if images is not None and len(atlases) > 1:
        raise SpecError(f"--images are those of one atlas, not of {', '.join(atlases)}: --atlas {atlases[0]}.")
    check_images(images)
    for atlas in atlases:
        read_defaults(atlas)  # refuses an atlas that cannot be steered
    optional.require("gradio", "the demo")
    check_mcp(mcp, password)
    from elude_steer.demo.launch import serve
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    load = partial(
        Steerer.load,
        device=device,
        threads=threads,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
    )
    serve(
        [load(atlas, model=model) for atlas in atlases],
        host=host,
        port=port,
        share=share,
        auth=password,
        browse=not no_browser,
        mcp=mcp,
        images=images,
        on_ready=lambda address: click.echo(address, err=True),
    )
