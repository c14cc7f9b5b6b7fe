"""The commands that caption and steer: steer, run, caption, sweep, export."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.checks import check_coco, check_edit, check_grid, check_steps, split_words
from elude_steer.cli.options import (
    DEVICE,
    LOADING,
    THREADS,
    hide_loading_bars,
    open_argument,
    print_note,
    require_atlas,
    require_model,
    setting_options,
    with_options,
)
from elude_steer.specs import DTYPES


@click.command()
@click.argument("image")
@click.option(
    "--minus", multiple=True, metavar="WORD,…", help="Concepts to remove, separated by commas; may be repeated."
)
@click.option("--plus", multiple=True, metavar="WORD,…", help="Concepts to add, separated by commas; may be repeated.")
@click.option(
    "--atlas", callback=require_atlas, default="toyland", show_default=True, help="A folder, a name, or a Hub id."
)
@click.option("--model", callback=require_model, help="Another copy of the model [default: the one of the atlas].")
@click.option("--where", metavar="L,T,R,B", help="Region for plus words: a box in pixels, or the file of a mask.")
@with_options(*setting_options())
@click.option("--prompt", help="The question [default: Describe this image in one sentence.].")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Maximum length of the answer."
)
@with_options(*LOADING)
@click.option("--heatmap", type=click.Path(path_type=Path), metavar="OUT.png", help="Draw where each word fires.")
@click.option("--plan", "plan_only", is_flag=True, help="Only print what would be changed.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
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
    threads: int | None,
    dtype: str | None,
    trust_remote_code: bool | None,
    heatmap: Path | None,
    plan_only: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Caption IMAGE (a path, or - for standard input) with some concepts removed or added.

    \b
    elude-steer steer dog.png --minus dog
    elude-steer steer dog.png --minus dog --plus biker --heatmap where.png
    """  # noqa: D301
    from elude_steer.utils.files import IMAGE_ENDINGS, check_file

    settings["nu"] = _read_nu(settings["nu"])
    words: dict[str, Any] = {"minus": split_words(minus), "plus": split_words(plus), "where": _read_region(where)}
    if heatmap is not None:
        heatmap = check_file(heatmap, IMAGE_ENDINGS)
    opened = open_argument(image)
    check_edit(atlas, **words, settings=settings, size=opened.size)
    from elude_steer.models.vlm import PROMPT
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(
        atlas, model=model, device=device, threads=threads, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if plan_only:
        plan = steerer.plan(**words, **settings)
        click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else str(plan))
        return
    result = steerer.steer(opened, **words, prompt=prompt or PROMPT, max_new_tokens=max_new_tokens, **settings)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        click.echo(f"baseline: {result.baseline}", err=True)
        click.echo(result.caption)
    if heatmap is not None:
        _save_heatmaps(result, heatmap)


@click.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--image", help="Use this image instead of the recipe's.")
@click.option("--atlas", callback=require_atlas, help="Use this atlas instead of the recipe's.")
@with_options(*LOADING)
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="OUT.html", help="Write a page with images and maps."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def run(
    recipes: tuple[str, ...],
    image: str | None,
    atlas: str | None,
    device: str | None,
    threads: int | None,
    dtype: str | None,
    trust_remote_code: bool | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run steering RECIPES (files, or names of `recipes list`) and print a table of captions for each.

    \b
    elude-steer run toyland-dog toyland-train --report out.html
    elude-steer run llava-train --image train.jpg --device cuda
    """  # noqa: D301
    from elude_steer.models.images import open_image
    from elude_steer.recipe_files import check_files, load_recipe, require_image
    from elude_steer.utils.files import REPORT_ENDINGS, check_file

    if report is not None:
        report = check_file(report, REPORT_ENDINGS)
    loaded = [load_recipe(name) for name in recipes]
    given = None if image is None else open_image(Path(image))
    for recipe in loaded:
        if given is None:
            require_image(recipe)
            check_files(recipe)
        opened = open_image(recipe.image) if given is None else given
        check_steps(recipe, atlas or recipe.atlas, opened.size)
    from elude_steer.steering.run_recipe import format_table, run_recipe
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerers: dict[str, Any] = {}
    done = []
    for recipe in loaded:
        name = atlas or recipe.atlas
        if name not in steerers:
            steerers[name] = Steerer.load(
                name, device=device, threads=threads, dtype=dtype, trust_remote_code=trust_remote_code
            )
        results = run_recipe(recipe, steerers[name], given)
        done.append((recipe, results))
        if not as_json:
            click.echo(("" if len(done) == 1 else "\n") + f"{recipe.name}\n{format_table(results)}")
            for result in results:
                for problem in result.missing:
                    print_note(f"{recipe.name}, {result.title}: {problem}")
    if as_json:
        rows = [{"recipe": recipe.name, "steps": [step.to_dict() for step in results]} for recipe, results in done]
        click.echo(json.dumps(rows, indent=2))
    if report is not None:
        from elude_steer.steering.report import write_report

        write_report(report, done)
        click.echo(report, err=True)


@click.command()
@click.argument("image")
@click.option(
    "--model", callback=require_model, default="toyland/captioner", show_default=True, help="Hub id or folder."
)
@click.option("--prompt", help="The question [default: Describe this image in one sentence.].")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Maximum length of the answer."
)
@with_options(DEVICE, THREADS)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Number type.")
def caption(
    image: str,
    model: str,
    prompt: str | None,
    max_new_tokens: int,
    device: str | None,
    threads: int | None,
    dtype: str,
) -> None:
    """Caption IMAGE (a path, or - for standard input) with greedy decoding.

    \b
    elude-steer caption scenes/scene-0000.png
    elude-steer caption photo.jpg --model llava-hf/llava-onevision-qwen2-0.5b-ov-hf --device cuda
    """  # noqa: D301
    opened = open_argument(image)
    from elude_steer.models.vlm import PROMPT, Vlm

    hide_loading_bars()
    vlm = Vlm.load(model, device=device, dtype=dtype, threads=threads)
    click.echo(vlm.caption([opened], prompt or PROMPT, max_new_tokens)[0])


@click.command()
@click.argument("image", required=False)
@click.option("--minus", metavar="WORD", help="With IMAGE: the concept to remove.")
@click.option("--plus", metavar="WORD", help="With IMAGE: the concept to add.")
@click.option(
    "--kind", type=click.Choice(["remove", "replace"]), default="remove", show_default=True, help="Kind of edits."
)
@click.option("--scenes", default="toyland:60001", show_default=True, help="Images with known objects: toyland:SEED.")
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
    elude-steer sweep dog.png --minus dog --plus biker --grid beta=8,16,24 --grid kappa=20,60
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


@click.command()
@click.argument("recipe")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), default=1, show_default=True, help="Number of the recipe's edit.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the edit's settings: nu=all.")
@click.option("--atlas", callback=require_atlas, help="Use this atlas instead of the recipe's.")
@click.option("--model", callback=require_model, help="Another copy of the model [default: the one of the atlas].")
@click.option(
    "--as",
    "form",
    type=click.Choice(["checkpoint", "peft"]),
    default="checkpoint",
    show_default=True,
    help="A checkpoint of transformers, or a LoRA adapter of peft.",
)
@click.option("--no-bias", is_flag=True, help="With --as peft: leave out the bias, and print the error on the image.")
@click.option("--image", help="Compare captions on this image instead of the recipe's.")
@with_options(*LOADING)
def export(
    recipe: str,
    out: Path,
    step: int,
    changes: tuple[str, ...],
    atlas: str | None,
    model: str | None,
    form: str,
    no_bias: bool,
    image: str | None,
    **loading: Any,
) -> None:
    """Write the model with an edit of RECIPE in its weights to the folder OUT, as a Hugging Face checkpoint.

    With `--as peft`, write only the edit, as a LoRA adapter of the steered layer. Some engines refuse adapters with a
    bias; `--no-bias` leaves it out. The captions of the recipe's image before and after go to standard error.

    \b
    elude-steer export toyland-teddy steered --step 3 --set mode=scale --set nu=all --set kappa=24
    elude-steer export toyland-teddy adapter --step 3 --set mode=scale --set nu=all --set kappa=24 --as peft
    """  # noqa: D301
    from dataclasses import asdict

    from elude_steer.errors import SpecError
    from elude_steer.recipe_files import load_recipe
    from elude_steer.steering.plan import check_foldable
    from elude_steer.utils.files import check_folder
    from elude_steer.utils.yaml_schema import override

    loaded = load_recipe(recipe)
    check_folder(out, new=True)
    if step > len(loaded.steps):
        raise SpecError(f"recipe '{loaded.name}' has {len(loaded.steps)} edits, not {step}.")
    chosen = override(loaded.steps[step - 1], [f"settings.{change}" for change in changes])
    if no_bias and form != "peft":
        raise SpecError("--no-bias is for adapters, and a checkpoint holds the bias: add --as peft, or leave it out.")
    if no_bias and image is None and loaded.image is None:
        raise SpecError(f"recipe '{loaded.name}' has no image to measure the error of --no-bias on; add --image FILE.")
    source = image or loaded.image
    opened = None if source is None else open_argument(source)
    settings = asdict(chosen.settings)
    concepts = check_edit(atlas or loaded.atlas, chosen.minus, chosen.plus, chosen.region, settings)
    check_foldable(concepts)
    from elude_steer.steering.export import export, export_adapter, measure_bias_error
    from elude_steer.steering.run_recipe import step_settings
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas or loaded.atlas, model=model, **loading)
    plan = steerer.plan(minus=chosen.minus, plus=chosen.plus, where=chosen.region, **step_settings(chosen))
    captions = opened and steerer.captions([opened], [[None, plan]], loaded.prompt, loaded.max_new_tokens)[0]
    if form == "peft":
        click.echo(export_adapter(steerer, plan, out, bias=not no_bias))
    else:
        click.echo(export(steerer, plan, out))
    _print_captions(captions)
    if no_bias and opened is not None:
        print_note(str(measure_bias_error(steerer, plan, opened, loaded.prompt)))


def _print_captions(captions: Sequence[str] | None) -> None:
    """Print on stderr what an exported edit changes in the caption of an image."""
    if captions is None:
        print_note("the recipe has no image, so nobody knows what the edit changes; add --image FILE to see it.")
        return
    before, after = captions
    if before == after:
        print_note(
            f"the edit does not change the caption of the image, '{before}'; try more sub-units (--set kappa=…) or a "
            "stronger gain (--set gamma=…)."
        )
        return
    click.echo(f"before: {before}", err=True)
    click.echo(f"after:  {after}", err=True)


def _read_region(text: str | None) -> tuple[float, ...] | str | None:
    """The box or the mask's file of --where."""
    from elude_steer.errors import SpecError

    if text is None or os.path.isfile(text):  # noqa: PTH113, Path raises on a text that is too long for a name
        return text
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 4:
        raise SpecError(
            f"--where is '{text}'; give a box in pixels (left,top,right,bottom, such as 10,20,60,80), or "
            "the file of an image that is white where the words go."
        )
    return numbers


def _read_nu(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def _save_heatmaps(result: Any, path: Path) -> None:
    """Write one image with the heatmaps of all words side by side."""
    from PIL import Image

    from elude_steer.utils.files import write_image
    from elude_steer.utils.plotting import add_title

    heatmaps = [add_title(result.heatmap(word), word) for word in result.maps]
    if not heatmaps:
        return
    sheet = Image.new("RGB", (sum(one.width for one in heatmaps), max(one.height for one in heatmaps)), "white")
    left = 0
    for heatmap in heatmaps:
        sheet.paste(heatmap, (left, 0))
        left += heatmap.width
    write_image(path, sheet)


def _check_many_images(scenes: str, coco: tuple[str, str] | None, plot: Path | None, changed_atlas: str | None) -> None:
    """Refuse a sweep of many images for what is wrong without a model."""
    from elude_steer.atlas.manifest import check_not_shipped, find_atlas
    from elude_steer.evaluation.edits import parse_scenes
    from elude_steer.utils.files import IMAGE_ENDINGS, check_file

    if coco:
        check_coco(*coco)
    else:
        parse_scenes(scenes)
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
