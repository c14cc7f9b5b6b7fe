"""The commands that steer a picture: steer and run. Parse, call one function of the library, print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

SETTINGS = (
    click.option("--mode", type=click.Choice(["scale", "place"]), help="Scale where they fire, or set on a region."),
    click.option("--alpha", type=float, help="What plus sub-units are multiplied by."),
    click.option("--gamma", type=float, help="What minus sub-units are multiplied by."),
    click.option("--beta", type=float, help="Times their level that sub-units are set to, in place."),
    click.option("--level", type=click.Choice(["reference", "stream"]), help="What beta is a multiple of."),
    click.option("--reach", type=float, help="Times the stream that other units than a word's own are moved by."),
    click.option("--fill", type=int, help="Sub-units of the surroundings that take a removed word's place."),
    click.option("--kappa", type=int, help="Sub-units a word stands for."),
    click.option("--nu", help="Patches where they are changed, or all."),
    click.option("--per", type=click.Choice(["tile", "image"]), help="Whether nu counts a tile or a picture."),
    click.option("--fit", type=float, help="Share of its peak that a word fires with where its region is."),
    click.option("--smooth/--no-smooth", default=None, help="Seek a word's region in neighbouring patches too."),
    click.option("--by", type=click.Choice(["label", "score"]), help="How sub-units are found."),
    click.option("--min-similarity", type=float, help="Least cosine of a word and a label."),
)


LOADING = (
    click.option("--device", help="Where to compute: cpu, cuda, mps."),
    click.option("--dtype", help="float32, bfloat16, float16 or auto [default: as the atlas was built]."),
    click.option("--trust-remote-code", is_flag=True, default=None, help="Let code that comes with the matcher run."),
)


def print_table(rows: Sequence[Sequence[str]], texts: int = sys.maxsize) -> None:
    """Prints rows in columns: the first so many are texts, the others numbers; by default all are texts."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if n < texts else cell.rjust(width) for n, (cell, width) in pairs]
        click.echo("  ".join(cells).rstrip())


def with_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options to a command, the first on top of its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@click.argument("image")
@click.option("--minus", multiple=True, metavar="WORD", help="What should go; may be repeated.")
@click.option("--plus", multiple=True, metavar="WORD", help="What should come; may be repeated.")
@click.option("--atlas", default="toyland", show_default=True, help="A folder, a name, or a Hub id.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@click.option("--where", metavar="L,T,R,B", help="Where plus words go: a box in pixels, or a mask's file.")
@with_options(*SETTINGS)
@click.option("--prompt", help="What to ask [default: Describe this image in one sentence.].")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@with_options(*LOADING)
@click.option("--heatmap", type=click.Path(path_type=Path), metavar="OUT.png", help="Where each word fires.")
@click.option("--plan", "plan_only", is_flag=True, help="Only say what would be changed.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def steer(
    image: str,
    minus: tuple[str, ...],
    plus: tuple[str, ...],
    atlas: str,
    model: str | None,
    where: str | None,
    prompt: str | None,
    max_new_tokens: int,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool | None,
    heatmap: Path | None,
    plan_only: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Caption IMAGE (a path, or - for standard input) with some concepts taken away or put there.

    \b
    elude-steer steer dog.png --minus dog
    elude-steer steer dog.png --minus dog --plus biker --heatmap where.png
    """  # noqa: D301
    from elude_steer.models.images import open_image

    picture = open_image(sys.stdin.buffer.read() if image == "-" else Path(image))
    region = _region(where)
    settings["nu"] = _nu(settings["nu"])
    from elude_steer.models.vlm import PROMPT
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas, model=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if plan_only:
        plan = steerer.plan(minus=minus, plus=plus, where=region, **settings)
        click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else str(plan))
        return
    result = steerer.steer(
        picture,
        minus=minus,
        plus=plus,
        where=region,
        prompt=prompt or PROMPT,
        max_new_tokens=max_new_tokens,
        **settings,
    )
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        click.echo(f"baseline: {result.baseline}", err=True)
        click.echo(result.caption)
    if heatmap is not None:
        _save_maps(result, heatmap)


@click.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--image", help="A picture in the place of the recipe's own.")
@click.option("--atlas", help="Another atlas than the recipe's.")
@with_options(*LOADING)
@click.option("--report", type=click.Path(path_type=Path), metavar="OUT.html", help="One page with pictures and maps.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def run(
    recipes: tuple[str, ...],
    image: str | None,
    atlas: str | None,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run steering RECIPES (files, or names of `recipes list`): a table of settings and captions for each.

    \b
    elude-steer run toyland-dog toyland-train --report out.html
    elude-steer run llava-train --image train.jpg --device cuda
    """  # noqa: D301
    from elude_steer.recipe_files import load_recipe

    loaded = [load_recipe(name) for name in recipes]
    from elude_steer.steering.run_recipe import format_table, run_recipe
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerers: dict[str, Any] = {}
    done = []
    for recipe in loaded:
        wanted = atlas or recipe.atlas
        if wanted not in steerers:
            steerers[wanted] = Steerer.load(wanted, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        ran = run_recipe(recipe, steerers[wanted], image)
        done.append((recipe, ran))
        if not as_json:
            click.echo(("" if len(done) == 1 else "\n") + f"{recipe.name}\n{format_table(ran)}")
            for one in ran:
                for told in one.missing:
                    click.echo(f"elude-steer: note: {recipe.name}, {one.title}: {told}", err=True)
    if as_json:
        click.echo(
            json.dumps([{"recipe": r.name, "steps": [one.to_dict() for one in ran]} for r, ran in done], indent=2)
        )
    if report is not None:
        from elude_steer.steering.report import write_report

        write_report(report, done)
        click.echo(report, err=True)


def show_log() -> None:
    """Lets the library's log appear, a note a line."""
    import logging

    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("elude-steer: note: %(message)s"))
    log = logging.getLogger("elude_steer")
    log.setLevel(logging.INFO)
    log.handlers = [shown]


def hide_loading_bars() -> None:
    """Keeps transformers' bars, and what it tells developers, off the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _region(text: str | None) -> tuple[float, ...] | str | None:
    from elude_steer.errors import SpecError

    if text is None or os.path.isfile(text):  # noqa: PTH113, a text that is too long for a name is no file
        return text
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 4:
        raise SpecError(
            f"--where is '{text}'; it is a box in pixels (left,top,right,bottom, such as 10,20,60,80), or "
            "the file of a picture that is white where the words go."
        )
    return numbers


def _nu(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def _save_maps(result: Any, path: Path) -> None:
    """One picture with the maps of all words side by side."""
    import io

    from PIL import Image

    from elude_steer.utils.files import write_file
    from elude_steer.utils.plotting import add_title

    maps = [add_title(result.heatmap(word), word) for word in result.maps]
    if not maps:
        return
    sheet = Image.new("RGB", (sum(one.width for one in maps), max(one.height for one in maps)), "white")
    left = 0
    for one in maps:
        sheet.paste(one, (left, 0))
        left += one.width
    data = io.BytesIO()
    sheet.save(data, "PNG")
    write_file(path, lambda file: file.write(data.getvalue()))
