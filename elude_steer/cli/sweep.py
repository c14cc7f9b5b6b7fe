"""The command that tries settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.checks import check_coco, check_edit, check_grid, check_photos
from elude_steer.cli.options import (
    LOADING,
    hide_loading_bars,
    open_argument,
    print_note,
    require_atlas,
    require_model,
    with_options,
)


@click.command()
@click.argument("image", required=False)
@click.option("--minus", metavar="WORD", help="With IMAGE: the concept to remove.")
@click.option("--plus", metavar="WORD", help="With IMAGE: the concept to add.")
@click.option(
    "--kind",
    type=click.Choice(["remove", "replace", "two", "place", "absent", "add"]),
    default="remove",
    show_default=True,
    help="Kind of edits; two replaces two objects, place the place, absent removes what is not there, add only adds.",
)
@click.option(
    "--scenes",
    default="toyland:60001",
    show_default=True,
    help="Images with known objects: toyland:SEED, or photos:FOLDER with captions.json in it.",
)
@click.option("--coco", nargs=2, metavar="JSON FOLDER", help="COCO annotations and images, instead of scenes.")
@click.option("--count", type=click.IntRange(min=1), default=60, show_default=True, help="Number of images.")
@click.option("--grid", "grids", multiple=True, metavar="NAME=V,V,…", help="Values to try; may be repeated.")
@click.option(
    "--by",
    type=click.Choice(["harmonic", "clean", "success", "kept"]),
    default="harmonic",
    show_default=True,
    help="The measure that ranks settings.",
)
@click.option(
    "--atlas", callback=require_atlas, default="toyland", show_default=True, help="A folder, a name, or a Hub id."
)
@click.option("--model", callback=require_model, help="Another copy of the model [default: the one of the atlas].")
@with_options(*LOADING)
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Number of lines.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="OUT.png", help="Plot success against kept.")
@click.option(
    "--write", type=click.Path(path_type=Path), metavar="OUT.yaml", help="With IMAGE: write the best as a recipe."
)
@click.option("--defaults", is_flag=True, help="Make the best settings the atlas's defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def sweep(
    image: str | None,
    minus: str | None,
    plus: str | None,
    kind: Any,
    scenes: str,
    coco: tuple[str, str] | None,
    count: int,
    grids: tuple[str, ...],
    by: Any,
    atlas: str,
    model: str | None,
    limit: int,
    plot: Path | None,
    write: Path | None,
    defaults: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Try a grid of settings on one IMAGE, or on many images with known objects, and list the best first.

    \b
    elude-steer sweep dog.png --minus dog --plus biker --grid strength=0.5,1,2 --grid fit=0.2,0.4
    elude-steer sweep --kind remove --grid gamma=-15,-50 --grid nu=6,12,all --plot sweep.png
    """  # noqa: D301
    _check_sweep_flags(image)
    grid = _read_grid(grids)
    check_grid(grid)
    if image is None:
        _check_many_images(scenes, coco, plot, atlas if defaults else None)
    else:
        _check_one_image(str(minus), plus, write, atlas)
    opened = None if image is None else open_argument(image)
    from elude_steer.evaluation.edits import tune
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas, model=model, **loading)
    if opened is not None:
        result = tune.tune_on_image(steerer, opened, str(minus), plus, grid, by=by, write=write, path=image)
    else:
        result = tune.tune_on_world(steerer, kind, scenes, coco, count, grid, by=by, plot=plot, save_to_atlas=defaults)
    click.echo(json.dumps(result.rows, indent=2) if as_json else result.table(limit))
    for note in result.notes:
        print_note(note)


def _check_many_images(scenes: str, coco: tuple[str, str] | None, plot: Path | None, changed_atlas: str | None) -> None:
    """Refuse a sweep of many images for what is wrong without a model."""
    from elude_steer.atlas.manifest import check_not_shipped, find_atlas
    from elude_steer.evaluation.edits import parse_scenes
    from elude_steer.utils.files import IMAGE_ENDINGS, check_file

    if coco:
        check_coco(*coco)
    elif (parsed := parse_scenes(scenes))[0] == "photos":
        check_photos(parsed[1])
    if plot is not None:
        check_file(plot, IMAGE_ENDINGS)
    if changed_atlas is not None and (folder := find_atlas(changed_atlas)) is not None:
        check_not_shipped(changed_atlas, folder)


def _check_one_image(minus: str, plus: str | None, write: Path | None, atlas: str) -> None:
    """Refuse a sweep of one image for what is wrong without a model."""
    from elude_steer.errors import SpecError
    from elude_steer.utils.files import check_new_recipe

    for flag, text in (("--minus", minus), ("--plus", plus)):
        if text is not None and "," in text:
            raise SpecError(f"{flag} is '{text}'; settings are tried for one concept at a time: {flag} dog.")
    if write is not None:
        check_new_recipe(write)
    check_edit(atlas, [minus], [] if plus is None else [plus])


def _check_sweep_flags(image: str | None) -> None:
    """Refuse the flags for many images if there is an IMAGE, and those for one image if there is none."""
    from elude_steer.errors import SpecError

    typed = _typed_flags()
    if image is None:
        if "--write" in typed:
            raise SpecError(
                "--write makes a recipe for one image, and there is no IMAGE: `elude-steer sweep IMAGE --minus WORD "
                "--write OUT.yaml`; to keep the best settings for many images, use --defaults."
            )
        flags = [flag for flag in typed if flag in ("--minus", "--plus")]
        if flags:
            raise SpecError(
                f"{_flags_are(flags)} for one image, and there is no IMAGE: `elude-steer sweep IMAGE --minus WORD`; "
                "without it, the objects of each image are taken: `elude-steer sweep --kind remove`."
            )
        return
    flags = [flag for flag in typed if flag in ("--kind", "--scenes", "--coco", "--count", "--plot", "--defaults")]
    if flags:
        raise SpecError(
            f"{_flags_are(flags)} for many images, and '{image}' is one: `elude-steer sweep {image} --minus WORD`, or "
            f"leave out the image: `elude-steer sweep {flags[0]} …`."
        )
    if "--minus" not in typed:
        raise SpecError(f"name the concept to remove: `elude-steer sweep {image} --minus WORD`.")


def _typed_flags() -> list[str]:
    """The flags on the command line, in the order of the help."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [p.opts[0] for p in context.command.params if context.get_parameter_source(str(p.name)) is typed]


def _flags_are(flags: list[str]) -> str:
    """`--plot is`, `--kind and --plot are`."""
    return f"{flags[0]} is" if len(flags) == 1 else f"{', '.join(flags[:-1])} and {flags[-1]} are"


def _read_grid(texts: tuple[str, ...]) -> dict[str, list[Any]] | None:
    """Settings and their values; None takes the default grid of the kind of edit."""
    from elude_steer.errors import SpecError

    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise SpecError(f"--grid is '{text}'; give a setting and its values: gamma=-15,-50.")
        if name in grid:
            raise SpecError(f"--grid {name} is given twice; put all its values in one: --grid {name}=V,V.")
        grid[name] = [_read_value(value.strip()) for value in values.split(",")]
    return grid or None


def _read_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
