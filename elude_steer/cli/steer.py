"""The commands that caption and steer: steer, run, caption."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.checks import check_edit, check_steps, split_words
from elude_steer.cli.options import (
    DEVICE,
    LOADING,
    PLACING,
    THREADS,
    TRUST,
    hide_loading_bars,
    open_argument,
    print_note,
    read_nu,
    require_atlas,
    require_model,
    setting_options,
    with_options,
)
from elude_steer.specs import DTYPES


@click.command()
@click.argument("images", nargs=-1, required=True)
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
@with_options(*LOADING, *PLACING)
@click.option(
    "--heatmap",
    type=click.Path(path_type=Path),
    metavar="OUT.png",
    help="Draw where each word fires; with many images, the folder of the drawings.",
)
@click.option("--plan", "plan_only", is_flag=True, help="Only print what would be changed.")
@click.option("--no-baseline", is_flag=True, help="Do not make the caption without edits.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; with many images, JSON Lines.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a table of all images as CSV.")
def steer(
    images: tuple[str, ...],
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
    trust_remote_code: bool,
    device_map: Any,
    quantize: str | None,
    heatmap: Path | None,
    plan_only: bool,
    no_baseline: bool,
    as_json: bool,
    as_csv: bool,
    **settings: Any,
) -> None:
    """Caption IMAGES (paths, or - for standard input) with some concepts removed or added.

    Several images or a folder, with its sub-folders, print a line each: the path, a tab, the caption; with --json an
    object with image, baseline, caption, gone, new, notes and seconds; with --csv the same columns without seconds.

    \b
    elude-steer steer dog.png --minus dog
    elude-steer steer dog.png --minus dog --plus biker --heatmap where.png
    elude-steer steer a.jpg b.jpg photos/ --minus dog --json > captions.jsonl
    """  # noqa: D301
    from elude_steer.cli.steer_many import Problems, check_heatmap_folder, find_files, is_many, print_many
    from elude_steer.errors import SpecError
    from elude_steer.utils.files import IMAGE_ENDINGS, check_file

    if as_json and as_csv:
        raise SpecError("--json and --csv are two kinds of output; give one.")
    many, problems = as_csv or is_many(images), Problems([])
    settings["nu"] = read_nu(settings["nu"])
    words: dict[str, Any] = {"minus": split_words(minus), "plus": split_words(plus), "where": _read_region(where)}
    if heatmap is not None:
        heatmap = check_heatmap_folder(heatmap) if many else check_file(heatmap, IMAGE_ENDINGS)
    files = find_files(images, problems) if many else []
    opened = None if many else open_argument(images[0])
    check_edit(atlas, **words, settings=settings, size=opened.size if opened else None)
    from elude_steer.models.vlm import PROMPT
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
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
    if plan_only:
        plan = steerer.plan(**words, **settings)
        click.echo(json.dumps(plan.to_dict(), indent=2) if as_json else str(plan))
        return
    captions: dict[str, Any] = {"prompt": prompt or PROMPT, "max_new_tokens": max_new_tokens}
    captions["baseline"] = not no_baseline
    if many:
        plan, notes = steerer.prepare_plan(**words, settings=settings)
        for note in notes:
            print_note(note)
        explain = partial(steerer.explain_each, plan=plan, notes=notes, **captions)
        output = "json" if as_json else "csv" if as_csv else "text"
        print_many(steerer, files, explain, problems, output, heatmap, _save_heatmaps)
        return
    result = steerer.steer(opened, **words, **captions, **settings)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        if result.baseline is not None:
            click.echo(f"baseline: {result.baseline}", err=True)
        click.echo(result.caption)
    if heatmap is not None:
        _save_heatmaps(result, heatmap)


@click.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--image", help="Use this image instead of the recipe's.")
@click.option("--atlas", callback=require_atlas, help="Use this atlas instead of the recipe's.")
@with_options(*LOADING, *PLACING)
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
    trust_remote_code: bool,
    device_map: Any,
    quantize: str | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run steering RECIPES (files, or names of `recipes list`) and print a table of captions for each.

    \b
    elude-steer run toyland-dog toyland-train --report out.html
    elude-steer run llava-train --image train.jpg --device cuda --trust-remote-code
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
                name,
                device=device,
                threads=threads,
                dtype=dtype,
                device_map=device_map,
                quantize=quantize,
                trust_remote_code=trust_remote_code,
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
@with_options(TRUST, *PLACING)
def caption(
    image: str,
    model: str,
    prompt: str | None,
    max_new_tokens: int,
    device: str | None,
    threads: int | None,
    dtype: str,
    trust_remote_code: bool,
    device_map: Any,
    quantize: str | None,
) -> None:
    """Caption IMAGE (a path, or - for standard input) with greedy decoding.

    \b
    elude-steer caption scenes/scene-0000.png
    elude-steer caption photo.jpg --model llava-hf/llava-onevision-qwen2-0.5b-ov-hf --device cuda
    """  # noqa: D301
    opened = open_argument(image)
    from elude_steer.models.vlm import PROMPT, Vlm

    hide_loading_bars()
    vlm = Vlm.load(
        model,
        device=device,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    click.echo(vlm.caption([opened], prompt or PROMPT, max_new_tokens)[0])


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
