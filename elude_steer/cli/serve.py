"""The commands that listen at an address: the demo page, and the server for programs."""

from __future__ import annotations

from dataclasses import replace
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


@click.command()
@click.option("--atlas", default="toyland", show_default=True, callback=require_atlas, help="A folder, name or Hub id.")
@click.option("--model", callback=require_model, help="Another copy of the model [default: the one in the atlas].")
@with_options(*LOADING, *PLACING)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve. Others than this machine's own are refused without API keys.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-keys",
    metavar="FILE",
    help="Answer only requests with one of the keys in this file, one a line [default: ELUDE_STEER_API_KEYS].",
)
@click.option("--name", help="What clients call the model [default: the name of the atlas].")
@click.option("--recipe", "recipes", multiple=True, metavar="FILE", help="A recipe that requests can name; repeatable.")
@click.option("--batch", type=click.IntRange(1, 512), default=32, show_default=True, help="Requests answered together.")
@click.option(
    "--image-cache", type=click.IntRange(0), default=1024, show_default=True, help="MB of tower outputs kept of images."
)
@click.option("--max-pixels", type=click.IntRange(1), default=20_000_000, show_default=True, help="Of an image.")
@click.option("--max-mb", type=click.IntRange(1, 100), default=10, show_default=True, help="MB of an image's file.")
@click.option("--max-images", type=click.IntRange(1, 64), default=8, show_default=True, help="In a request.")
@click.option(
    "--max-words", type=click.IntRange(1), default=8, show_default=True, help="To remove, and as many to add."
)
@click.option("--max-prompt", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of an answer.")
@click.option("--max-waiting", type=click.IntRange(1, 4096), default=256, show_default=True, help="Requests at a time.")
@click.option("--rate", type=click.IntRange(1), help="Requests a minute for each key or address [default: no limit].")
def serve(
    atlas: str,
    model: str | None,
    device: str | None,
    threads: int | None,
    dtype: str | None,
    trust_remote_code: bool,
    device_map: Any,
    quantize: str | None,
    host: str,
    port: int,
    api_keys: str | None,
    name: str | None,
    recipes: tuple[str, ...],
    batch: int,
    image_cache: int,
    rate: int | None,
    **limits: int,
) -> None:
    """Serve a model over OpenAI's API; each request may carry an edit of its own (needs the extra `serve`).

    \b
    elude-steer serve
    elude-steer serve --atlas my-atlas --device cuda --host 0.0.0.0 --api-keys keys.txt --rate 60
    curl http://127.0.0.1:8000/v1/models
    """  # noqa: D301
    from elude_steer.atlas.manifest import read_defaults
    from elude_steer.recipe_files import check_files, load_recipe
    from elude_steer.server.access import check_reach, read_keys
    from elude_steer.utils import optional

    keys = read_keys(api_keys)
    check_reach(host, keys)
    for recipe in recipes:
        check_files(replace(load_recipe(recipe), image=None))
    read_defaults(atlas)  # refuses an atlas that cannot be steered
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        optional.require(package, "elude-steer serve")
    from elude_steer.server import launch
    from elude_steer.steering.steerer import Steerer

    launch.open_socket(host, port).close()  # before the minutes of loading a model
    steerer = Steerer.load(
        atlas,
        model=model,
        device=device,
        threads=threads,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
    )
    launch.serve(
        steerer,
        host=host,
        port=port,
        keys=keys,
        name=name,
        recipes=recipes,
        limits=_make_limits(rate, **limits),
        batch=batch,
        cache_bytes=image_cache * 2**20,
        on_ready=lambda address: click.echo(address, err=True),
    )
    click.echo("stopped; nothing is left running.", err=True)


def _make_limits(
    rate: int | None,
    max_pixels: int,
    max_mb: int,
    max_images: int,
    max_words: int,
    max_prompt: int,
    max_tokens: int,
    max_waiting: int,
) -> Any:
    """The limits of requests as the options give them."""
    from elude_steer.server.access import Limits

    return Limits(
        pixels=max_pixels,
        image_bytes=max_mb * 2**20,
        images=max_images,
        words=max_words,
        prompt_tokens=max_prompt,
        answer_tokens=max_tokens,
        default_tokens=min(max_tokens, Limits.default_tokens),
        waiting=max_waiting,
        rate=rate or 0,
    )
