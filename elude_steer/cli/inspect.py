"""The commands that show what is there: atlases, concepts, recipes, toyland, env."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unicodedata import category

import click

from elude_steer.cli.checks import check_images, check_steps
from elude_steer.cli.options import (
    DEVICE,
    TRUST,
    hide_loading_bars,
    print_note,
    print_rows,
    require_atlas,
    require_model,
    show_log,
    with_options,
)

_HIDDEN = ("Cc", "Cf")  # categories of letters that a terminal obeys instead of showing them


@click.group()
def atlases() -> None:
    """List, show, check and calibrate local atlases."""


@atlases.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_atlases(as_json: bool) -> None:
    """List the atlases under ELUDE_STEER_HOME."""
    from elude_steer.atlas.manifest import list_atlases, read_manifest
    from elude_steer.errors import AtlasError
    from elude_steer.utils.files import home

    rows = []
    for name, path in list_atlases():
        try:
            rows.append({"name": name, "path": str(path), **_summary(read_manifest(path))})
        except AtlasError as error:  # one damaged atlas does not hide the others
            print_note(error)
    if not rows and not as_json:
        click.echo(f"no atlases under {home() / 'atlases'} yet; `elude-steer build` makes one.", err=True)
    print_rows(rows, ("name", "model", "layer", "units", "sub_units"), as_json)


@atlases.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as JSON.")
def show_atlas(name: str, as_json: bool) -> None:
    """Show the model, layer and build of the atlas NAME (a folder, or a name of `atlases list`)."""
    from elude_steer.atlas.manifest import check_files, find_atlas, read_manifest
    from elude_steer.errors import AtlasError

    folder = find_atlas(name)
    if folder is None:
        raise AtlasError(f"atlas '{name}' is not on this machine; download it with `elude_steer.Atlas.load('{name}')`.")
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    if as_json:
        click.echo(json.dumps(manifest, indent=2, ensure_ascii=False))
        return
    lines = {**_summary(manifest), "images": manifest["images"], "instances": manifest["instances"]}
    lines |= {"backend": manifest["backend"], "files": f"{len(manifest['files'])}, all as written", "folder": folder}
    for key, value in lines.items():
        click.echo(f"{key.replace('_', '-'):<10} {value}")


@atlases.command("check")
@click.argument("name", callback=require_atlas)
@click.option("--model", callback=require_model, help="Hub id or folder [default: the model the atlas was built for].")
@click.option("--revision", help="Revision of the model [default: the one the atlas was built for].")
@with_options(TRUST)
def check_atlas(name: str, model: str | None, revision: str | None, trust_remote_code: bool) -> None:
    """Check that the atlas NAME is complete and fits its model, or another one."""
    from dataclasses import replace

    from elude_steer.atlas.atlas import Atlas
    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.specs import ModelSpec

    hide_loading_bars()
    atlas = Atlas.load(name)
    spec = ModelSpec(**atlas.about["spec"]["model"])
    if model is not None:
        spec = replace(spec, id=model, revision=None, trust_remote_code=False)
    tower = load_tower(replace(spec, revision=revision or spec.revision), trust_remote_code=trust_remote_code)
    atlas.check(tower.layer, tower.read_stored)
    click.echo(f"{name}: complete, and made for {spec.id}")


@atlases.command("calibrate")
@click.argument("name", callback=require_atlas)
@click.option("--images", help="The probing images: a folder, a text file with one path per line, or hf:DATASET.")
@click.option("--out", type=click.Path(), required=True, help="Folder of the new atlas.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change the spec: calibration.fit=0.2.")
@with_options(DEVICE)
@click.option("--threads", type=click.IntRange(min=1), help="Threads, one core each [default: all cores].")
@click.option("--work", type=click.Path(), help="Folder of unfinished work [default: under ELUDE_STEER_HOME/work].")
@click.option("--quiet", is_flag=True, help="Show no progress and no times.")
@with_options(TRUST)
def calibrate_atlas(name: str, settings: tuple[str, ...], **options: Any) -> None:
    """Copy an atlas and add what mode place needs: the detector and the direction of each word.

    Needs the probing images and the dual encoder that labelled the atlas; its sub-units and labels stay.

    \b
    elude-steer atlases calibrate my-atlas --images photos/ --out my-atlas-2
    """  # noqa: D301
    from elude_steer.atlas.manifest import check_target
    from elude_steer.utils.files import check_folder

    check_target(check_folder(options["out"], replaced=True))
    if options["images"] is not None:
        check_images(options["images"])
    from elude_steer.atlas.build.pipeline import calibrate

    if options["quiet"] or not sys.stderr.isatty():
        hide_loading_bars()
    if not options["quiet"]:
        show_log()
    click.echo(calibrate(name, options.pop("out"), settings=settings, **options).folder)


@click.command()
@click.argument("atlas", callback=require_atlas)
@click.option("--like", metavar="WORD", help="Show the sub-units that match a word, best first.")
@click.option(
    "--by",
    type=click.Choice(["label", "score"]),
    default="label",
    show_default=True,
    help="Rank them by the similarity of their label, or by the score of the closest words.",
)
@click.option("--group", is_flag=True, help="Group redundant sub-units of different units.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Number of lines.")
@with_options(TRUST)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def concepts(
    atlas: str, like: str | None, by: str, group: bool, limit: int, trust_remote_code: bool, as_json: bool
) -> None:
    """List the labels of ATLAS, or the sub-units that match a word.

    \b
    elude-steer concepts toyland
    elude-steer concepts toyland --like puppy --limit 5
    """  # noqa: D301
    from elude_steer.atlas.matching import normalize_word

    if like is not None:
        normalize_word(like)
    from elude_steer.atlas.atlas import Atlas

    loaded = Atlas.load(atlas)
    labels = loaded.require_labels()
    if like is not None:
        matches = loaded.search(like, limit=limit, by=by, trust_remote_code=trust_remote_code)
        rows = [match._asdict() for match in matches]
        for row in rows:
            row |= {"similarity": round(row["similarity"], 4), "score": round(row["score"], 4)}
        print_rows(rows, ("sub_unit", "unit", "part", "label", "via", "similarity", "score"), as_json, header=True)
    elif group:
        print_rows(labels.redundant_groups()[:limit], ("sub_units", "label", "members"), as_json, header=True)
    else:
        rows = [{"label": label, "sub_units": count} for label, count in labels.counts.items()]
        print_rows(rows[:limit], ("label", "sub_units"), as_json, header=True)
        if len(rows) > limit and not as_json:
            print_note(f"{len(rows) - limit} more labels; --limit {len(rows)} shows all.")


@click.group()
def toyland() -> None:
    """Draw scenes of the small world that comes with the package."""


@toyland.command("draw")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--count", type=click.IntRange(min=1), default=20, show_default=True, help="Number of scenes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the scenes.")
@click.option("--coco", is_flag=True, help="Write instances.json and captions.json in COCO's formats too.")
def draw_scenes(out: Path, count: int, seed: int, coco: bool) -> None:
    """Draw scenes into the folder OUT, with their captions and contents in captions.jsonl."""
    from elude_steer.toyland.scenes import write_scenes

    click.echo(write_scenes(out, count, seed, coco=coco))


@click.group()
def recipes() -> None:
    """List, show, copy and check recipes."""


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_recipes(as_json: bool) -> None:
    """List the recipes that come with the package."""
    from elude_steer.recipe_files import list_recipes

    rows = [{**recipe._asdict(), "path": str(recipe.path)} for recipe in list_recipes()]
    print_rows(rows, ("kind", "name", "summary"), as_json)


@recipes.command("show")
@click.argument("name")
def show_recipe(name: str) -> None:
    """Print the recipe NAME."""
    from elude_steer.recipe_files import find_recipe, read_text

    text = read_text(find_recipe(name))
    # What a stranger wrote is shown as it is, but for what would move the cursor or turn the text around.
    click.echo("".join(ascii(c)[1:-1] if category(c) in _HIDDEN and c not in "\n\t" else c for c in text), nl=False)


@recipes.command("copy")
@click.argument("name")
@click.argument("target", default=".")
def copy_recipe(name: str, target: str) -> None:
    """Copy the recipe NAME to TARGET (a folder, or a new .yaml file), to edit it; its image is copied beside it."""
    from elude_steer.recipe_files import copy_recipe

    path, *images = copy_recipe(name, target)
    click.echo(path)
    for image in images:
        print_note(f"its image: {image}")


@recipes.command("check")
@click.argument("files", nargs=-1, required=True)
def check_recipes(files: tuple[str, ...]) -> None:
    """Check each of FILES (or names of shipped recipes), and report all problems."""
    from elude_steer.errors import SpecError
    from elude_steer.recipe_files import check_files, load_any_recipe
    from elude_steer.specs import Recipe

    problems: list[str] = []
    for name in files:
        try:
            loaded = load_any_recipe(name)
            if isinstance(loaded, Recipe):
                check_files(loaded)
                check_steps(loaded)
            click.echo(f"{name}: valid")
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Show versions, extras and folders, for a bug report."""
    import platform

    from elude_steer.utils import optional
    from elude_steer.utils.files import home

    core = ("elude-steer", "torch", "transformers", "sentence-transformers", "hdbscan", "accelerate", "numpy")
    report: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    report |= {name: optional.version(name) or "missing" for name in core}
    for package, extra in optional.EXTRAS.items():
        report[f"[{extra}]"] = optional.is_installed(package) and report.get(f"[{extra}]", True)
    report["torchvision"] = optional.version("torchvision") or "not installed (not needed)"
    report["ELUDE_STEER_HOME"] = str(home())
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        text = ("installed" if value else "not installed") if isinstance(value, bool) else value
        click.echo(f"{key:<22} {text}")


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
    keys = ("layer", "units", "sub_units")
    return {"model": manifest["model"]["id"], **{key: manifest[key] for key in keys}}
