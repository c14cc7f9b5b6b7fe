"""The commands around steering: sweep finds settings, export makes an edit a checkpoint, demo opens a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.steer import LOADING, hide_loading_bars, with_options


@click.command()
@click.argument("image", required=False)
@click.option("--minus", metavar="WORD", help="With IMAGE: what should go.")
@click.option("--plus", metavar="WORD", help="With IMAGE: what should come.")
@click.option(
    "--kind", type=click.Choice(["remove", "replace"]), default="remove", show_default=True, help="Which edits."
)
@click.option("--scenes", default="toyland:60001", show_default=True, help="Pictures with truth: toyland:SEED.")
@click.option("--coco", nargs=2, metavar="JSON FOLDER", help="COCO's annotations and pictures in the place of scenes.")
@click.option("--count", type=click.IntRange(min=1), default=60, show_default=True, help="How many pictures.")
@click.option("--grid", "grids", multiple=True, metavar="NAME=V,V,…", help="Values to try; may be repeated.")
@click.option(
    "--by", type=click.Choice(["harmonic", "clean", "success", "kept"]), default="harmonic", show_default=True
)
@click.option("--atlas", default="toyland", show_default=True, help="A folder, a name, or a Hub id.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@with_options(*LOADING)
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="How many lines.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="OUT.png", help="Success against kept.")
@click.option("--write", type=click.Path(path_type=Path), metavar="OUT.yaml", help="The winner as a recipe (IMAGE).")
@click.option("--defaults", is_flag=True, help="Make the winner the atlas's own settings.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
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
    """Try a grid of settings: on one IMAGE and a word, or on many pictures with known objects; best first.

    \b
    elude-steer sweep dog.png --minus dog --plus biker --grid beta=8,16,24 --grid kappa=20,60
    elude-steer sweep --kind remove --grid gamma=-15,-50 --grid nu=6,12,all --plot sweep.png
    """  # noqa: D301
    _check_flags(image)
    grid = _grid(grids)
    from elude_steer.evaluation.edits import tune
    from elude_steer.models.images import open_image
    from elude_steer.steering.steerer import Steerer

    picture = None if image is None else open_image(sys.stdin.buffer.read() if image == "-" else Path(image))
    hide_loading_bars()
    steerer = Steerer.load(atlas, model=model, **loading)
    if picture is not None:
        found = tune.tune_on_image(steerer, picture, str(minus), plus, grid, by=by, write=write, path=image)
    else:
        found = tune.tune_on_world(steerer, kind, scenes, coco, count, grid, by=by, plot=plot, save_to_atlas=defaults)
    click.echo(json.dumps(found.rows, indent=2) if as_json else found.table(limit))
    for note in found.notes:
        click.echo(f"elude-steer: note: {note}", err=True)


@click.command()
@click.argument("recipe")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), default=1, show_default=True, help="Which edit of the recipe.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the edit's settings: nu=all.")
@click.option("--atlas", help="Another atlas than the recipe's.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@with_options(*LOADING)
def export(
    recipe: str, out: Path, step: int, changes: tuple[str, ...], atlas: str | None, model: str | None, **loading: Any
) -> None:
    """Write the model with an edit of RECIPE inside it to the folder OUT: an ordinary Hugging Face checkpoint.

    \b
    elude-steer export toyland-cats steered-model --step 3
    """  # noqa: D301
    from elude_steer.errors import SpecError
    from elude_steer.recipe_files import load_recipe
    from elude_steer.utils.yaml_schema import override

    loaded = load_recipe(recipe)
    if step > len(loaded.steps):
        raise SpecError(f"recipe '{loaded.name}' has {len(loaded.steps)} edits, not {step}.")
    chosen = override(loaded.steps[step - 1], [f"settings.{change}" for change in changes])
    from elude_steer.steering.export import export
    from elude_steer.steering.run_recipe import step_settings
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas or loaded.atlas, model=model, **loading)
    plan = steerer.plan(minus=chosen.minus, plus=chosen.plus, where=chosen.region, **step_settings(chosen))
    click.echo(export(steerer, plan, out))


@click.command()
@click.option("--atlas", default="toyland", show_default=True, help="A folder, a name, or a Hub id.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@with_options(*LOADING)
@click.option("--host", default="127.0.0.1", show_default=True, help="Who may see it; by default this machine alone.")
@click.option("--port", type=click.IntRange(1, 65535), help="[default: the first that is free from 7860 on]")
@click.option("--share", is_flag=True, help="A public address, through Gradio's servers.")
@click.option("--auth", metavar="NAME:PASSWORD", help="What visitors have to give.")
@click.option("--no-browser", is_flag=True, help="Do not open one.")
def demo(
    atlas: str,
    model: str | None,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool | None,
    host: str,
    port: int | None,
    share: bool,
    auth: str | None,
    no_browser: bool,
) -> None:
    """Open a page to steer captions in and to browse an atlas (extra `demo`).

    \b
    elude-steer demo
    elude-steer demo --atlas my-atlas --device cuda --auth me:secret
    """  # noqa: D301
    from elude_steer.errors import SpecError
    from elude_steer.utils import optional

    name, colon, password = (auth or "").partition(":")
    if auth is not None and not (name and colon and password):
        raise SpecError(f"--auth is '{auth}'; it is a name and a password: --auth me:secret.")
    optional.require("gradio", "the demo")
    from elude_steer.demo.launch import serve
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas, model=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    serve(
        steerer,
        host=host,
        port=port,
        share=share,
        auth=(name, password) if auth else None,
        browse=not no_browser,
        on_ready=lambda address: click.echo(address, err=True),
    )


def _check_flags(image: str | None) -> None:
    """Refuses flags of a sweep over many pictures where there is one, and the other way round."""
    from elude_steer.errors import SpecError

    given = _given()
    if image is None:
        if "--write" in given:
            raise SpecError(
                "--write makes a recipe for one picture, and there is no IMAGE: `elude-steer sweep IMAGE --minus WORD "
                "--write OUT.yaml`; what wins on many pictures is kept with --defaults."
            )
        words = [flag for flag in given if flag in ("--minus", "--plus")]
        if words:
            raise SpecError(
                f"{_listed(words)} for one picture, and there is no IMAGE: `elude-steer sweep IMAGE --minus WORD`; "
                "without one, each picture's own objects are taken: `elude-steer sweep --kind remove`."
            )
        return
    many = [flag for flag in given if flag in ("--kind", "--scenes", "--coco", "--count", "--plot", "--defaults")]
    if many:
        raise SpecError(
            f"{_listed(many)} for many pictures, and '{image}' is one: `elude-steer sweep {image} --minus WORD`, or "
            f"leave out the picture: `elude-steer sweep {many[0]} …`."
        )
    if "--minus" not in given:
        raise SpecError(f"say what should go: `elude-steer sweep {image} --minus WORD`.")


def _given() -> list[str]:
    """The flags that were typed, in the order of the help."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [p.opts[0] for p in context.command.params if context.get_parameter_source(str(p.name)) is typed]


def _listed(flags: list[str]) -> str:
    """`--plot is`, `--kind and --plot are`."""
    return f"{flags[0]} is" if len(flags) == 1 else f"{', '.join(flags[:-1])} and {flags[-1]} are"


def _grid(texts: tuple[str, ...]) -> dict[str, list[Any]] | None:
    """Settings and their values; None leaves them to the kind of edit."""
    from elude_steer.errors import SpecError

    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise SpecError(f"--grid is '{text}'; it is a setting and its values: gamma=-15,-50.")
        if name in grid:
            raise SpecError(f"--grid {name} is given twice; put all its values in one: --grid {name}=V,V.")
        grid[name] = [_value(value.strip()) for value in values.split(",")]
    return grid or None


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
