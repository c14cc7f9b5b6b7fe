"""The command line: parse, call one function of the library, print. Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from elude_steer import __version__
from elude_steer.cli import evaluate, steer, tools
from elude_steer.errors import EludeSteerError, EludeSteerWarning


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="elude-steer")
def cli() -> None:
    """Split a vision model's units into single-concept sub-units, without changing what it computes.

    \b
    elude-steer recipes list
    elude-steer build llava-onevision-0.5b --images photos/ --out my-atlas
    elude-steer atlases show my-atlas
    """  # noqa: D301 - click's own mark for lines that stay as they are


@cli.command()
@click.argument("spec")
@click.option("--images", help="Probing images: a folder, a text file with a path a line, or hf:DATASET.")
@click.option(
    "--out", type=click.Path(), help="Folder of the atlas [default: its name under ELUDE_STEER_HOME/atlases]."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change the spec: clusters.top_k=5000.")
@click.option("--device", help="Where to compute: cpu, cuda, cuda:1, mps.")
@click.option("--processes", type=click.IntRange(min=1), help="Processes on this machine [default: 1, or torchrun's].")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of one core a process [default: all cores].")
@click.option("--work", type=click.Path(), help="Folder of unfinished work [default: under ELUDE_STEER_HOME/work].")
@click.option("--quiet", is_flag=True, help="No progress, no times.")
def build(spec: str, settings: tuple[str, ...], **options: Any) -> None:
    """Build the atlas of SPEC, a YAML file or a shipped recipe; run again to go on after an interruption.

    \b
    elude-steer build llava-onevision-0.5b --images photos/ --set clusters.top_k=5000 --out my-atlas
    torchrun --nproc_per_node 4 -m elude_steer build dinov2-base-layer12 --images imagenet/train
    """  # noqa: D301
    from elude_steer.atlas.build.pipeline import build

    if options["quiet"] or not sys.stderr.isatty():
        steer.hide_loading_bars()
    if not options["quiet"]:
        steer.show_log()
    atlas = build(spec, settings=settings, **options)
    if int(os.environ.get("RANK", "0")) == 0:
        click.echo(atlas.folder)


@cli.group()
def atlases() -> None:
    """The atlases at hand."""


@atlases.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_atlases(as_json: bool) -> None:
    """List the atlases under ELUDE_STEER_HOME."""
    from elude_steer.atlas.manifest import list_atlases, read_manifest
    from elude_steer.errors import AtlasError
    from elude_steer.utils.files import home

    rows = []
    for name, path in list_atlases():
        try:
            rows.append({"name": name, "path": str(path), **_summary(read_manifest(path))})
        except AtlasError as error:  # the others are still of use
            click.echo(f"elude-steer: note: {error}", err=True)
    if not rows and not as_json:
        click.echo(f"no atlases under {home() / 'atlases'} yet; `elude-steer build` makes one.", err=True)
    _show(rows, ("name", "model", "layer", "units", "sub_units"), as_json)


@atlases.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="The whole manifest.")
def show_atlas(name: str, as_json: bool) -> None:
    """Show what the atlas NAME (a folder, or a name of `atlases list`) is of and how it was made."""
    from elude_steer.atlas.manifest import check_files, find_atlas, read_manifest
    from elude_steer.errors import AtlasError

    folder = find_atlas(name)
    if folder is None:
        raise AtlasError(f"atlas '{name}' is not at hand; download it with `elude_steer.Atlas.load('{name}')`.")
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    if as_json:
        click.echo(json.dumps(manifest, indent=2, ensure_ascii=False))
        return
    shown = {**_summary(manifest), "images": manifest["images"], "instances": manifest["instances"]}
    shown |= {"backend": manifest["backend"], "files": f"{len(manifest['files'])}, all as written", "folder": folder}
    for key, value in shown.items():
        click.echo(f"{key.replace('_', '-'):<10} {value}")


@atlases.command("check")
@click.argument("name")
@click.option("--model", help="Hub id or folder [default: the model it was built for].")
@click.option("--revision", help="Of the model [default: the one it was built for].")
def check_atlas(name: str, model: str | None, revision: str | None) -> None:
    """Say whether the atlas NAME is whole and fits its model, or another one."""
    from dataclasses import replace

    from elude_steer.atlas.atlas import Atlas
    from elude_steer.atlas.build.pipeline import load_tower
    from elude_steer.specs import ModelSpec

    steer.hide_loading_bars()
    atlas = Atlas.load(name)
    spec = ModelSpec(**atlas.about["spec"]["model"])
    tower = load_tower(replace(spec, id=model or spec.id, revision=revision or (None if model else spec.revision)))
    atlas.check(tower.layer)
    click.echo(f"{name}: whole, and made for {model or spec.id}")


@cli.command()
@click.argument("image")
@click.option("--model", default="toyland/captioner", show_default=True, help="Hub id or folder.")
@click.option("--prompt", help="What to ask [default: Describe this image in one sentence.].")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@click.option("--device", help="Where to compute: cpu, cuda, mps.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or auto.")
def caption(image: str, model: str, prompt: str | None, max_new_tokens: int, device: str | None, dtype: str) -> None:
    """Caption IMAGE (a path, or - for standard input) greedily.

    \b
    elude-steer caption scenes/scene-0000.png
    elude-steer caption photo.jpg --model llava-hf/llava-onevision-qwen2-0.5b-ov-hf --device cuda
    """  # noqa: D301
    from elude_steer.models.images import open_image

    picture = open_image(sys.stdin.buffer.read() if image == "-" else Path(image))
    from elude_steer.models.vlm import PROMPT, Vlm

    steer.hide_loading_bars()
    vlm = Vlm.load(model, device=device, dtype=dtype)
    click.echo(vlm.caption([picture], prompt or PROMPT, max_new_tokens)[0])


@cli.command()
@click.argument("atlas")
@click.option("--like", metavar="WORD", help="The sub-units that match a word, best first.")
@click.option("--by", type=click.Choice(["label", "score"]), default="label", show_default=True, help="How they rank.")
@click.option("--group", is_flag=True, help="Sub-units of different units that say the same, together.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many lines.")
@click.option("--trust-remote-code", is_flag=True, default=None, help="Let code that comes with the matcher run.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def concepts(
    atlas: str, like: str | None, by: str, group: bool, limit: int, trust_remote_code: bool | None, as_json: bool
) -> None:
    """List what the sub-units of ATLAS are called, or those that match a word.

    \b
    elude-steer concepts toyland
    elude-steer concepts toyland --like puppy --limit 5
    """  # noqa: D301
    from elude_steer.atlas.atlas import Atlas

    loaded = Atlas.load(atlas)
    labels = loaded.require_labels()
    if like is not None:
        found = loaded.search(like, limit=limit, by=by, trust_remote_code=trust_remote_code)
        rows = [match._asdict() for match in found]
        for row in rows:
            row |= {"similarity": round(row["similarity"], 4), "score": round(row["score"], 4)}
        _show(rows, ("sub_unit", "unit", "part", "label", "via", "similarity", "score"), as_json, head=True)
    elif group:
        _show(labels.redundant_groups()[:limit], ("sub_units", "label", "members"), as_json, head=True)
    else:
        rows = [{"label": label, "sub_units": count} for label, count in labels.counts.items()]
        _show(rows[:limit], ("label", "sub_units"), as_json, head=True)
        if len(rows) > limit and not as_json:
            click.echo(f"elude-steer: note: {len(rows) - limit} more labels; --limit {len(rows)} shows all.", err=True)


for command in (steer.steer, steer.run, tools.sweep, tools.export, tools.demo):
    cli.add_command(command)
for command in (evaluate.evaluate, evaluate.compare, evaluate.ablate, evaluate.judge):
    cli.add_command(command)


@cli.group("toyland")
def toyland_group() -> None:
    """The small world that comes with the package."""


@toyland_group.command("draw")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--count", type=click.IntRange(min=1), default=20, show_default=True, help="How many scenes.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which scenes.")
def draw_scenes(out: Path, count: int, seed: int) -> None:
    """Draw scenes into the folder OUT, with their captions and truth in captions.jsonl."""
    from elude_steer.toyland.scenes import write_scenes

    click.echo(write_scenes(out, count, seed))


@cli.group()
def recipes() -> None:
    """The recipes that come with the package."""


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_recipes(as_json: bool) -> None:
    """List the shipped recipes."""
    from elude_steer.recipe_files import list_recipes

    rows = [{**one._asdict(), "path": str(one.path)} for one in list_recipes()]
    _show(rows, ("kind", "name", "summary"), as_json)


@recipes.command("show")
@click.argument("name")
def show_recipe(name: str) -> None:
    """Print the recipe NAME."""
    from elude_steer.recipe_files import find_recipe

    click.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes.command("copy")
@click.argument("name")
@click.argument("target", default=".")
def copy_recipe(name: str, target: str) -> None:
    """Copy the recipe NAME to TARGET (a folder or a new file) to change it."""
    from elude_steer.errors import StorageError
    from elude_steer.recipe_files import find_recipe
    from elude_steer.utils.files import write_file

    source = find_recipe(name)
    path = Path(target) / source.name if target.endswith("/") or Path(target).is_dir() else Path(target)
    if path.exists():
        raise StorageError(f"'{path}' is already there; give another name.")
    data = source.read_bytes()
    write_file(path, lambda file: file.write(data))
    click.echo(path)


@recipes.command("check")
@click.argument("files", nargs=-1, required=True)
def check_recipes(files: tuple[str, ...]) -> None:
    """Say whether each of FILES (or names of shipped recipes) is right, and all that is wrong with it."""
    from elude_steer.errors import SpecError
    from elude_steer.recipe_files import check_recipe

    problems: list[str] = []
    for name in files:
        try:
            check_recipe(name)
            click.echo(f"{name}: right")
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def env(as_json: bool) -> None:
    """Show versions, extras and folders, for a bug report."""
    import platform

    from elude_steer.utils import optional
    from elude_steer.utils.files import home

    core = ("elude-steer", "torch", "transformers", "sentence-transformers", "hdbscan", "accelerate", "numpy")
    report: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    report |= {name: optional.version(name) or "missing" for name in core}
    report |= {f"[{extra}]": optional.is_installed(package) for package, extra in optional.EXTRAS.items()}
    report["torchvision"] = optional.version("torchvision") or "not installed (not needed)"
    report["ELUDE_STEER_HOME"] = str(home())
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        shown = {True: "installed", False: "not installed"}.get(value, value) if isinstance(value, bool) else value
        click.echo(f"{key:<22} {shown}")


def main() -> None:
    """Runs the command line: one line for an error, exit 1, and no traceback."""
    with warnings.catch_warnings():
        # What other packages warn their developers about is of no use to somebody at a command line.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", EludeSteerWarning)
        warnings.showwarning = lambda message, *_, **__: click.echo(f"elude-steer: note: {message}", err=True)
        try:
            cli(standalone_mode=False)
        except EludeSteerError as error:
            _fail(str(error))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            _fail("stopped; finished work is kept, run the same command again to go on.", 130)
        except BrokenPipeError:  # `elude-steer … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as error:
            if os.environ.get("ELUDE_STEER_DEBUG"):
                raise
            what = " ".join(str(error).split()) or "no further word"
            _fail(f"unexpected {type(error).__name__}: {what} (ELUDE_STEER_DEBUG=1 shows where; please report it)")


def _fail(message: str, code: int = 1) -> None:
    told = os.environ.get("ELUDE_STEER_ERROR_FILE")
    if told:
        Path(told).write_text(message, encoding="utf-8")
    else:
        for line in message.splitlines():
            click.echo(f"elude-steer: {line}", err=True)
    sys.exit(code)


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
    keys = ("layer", "units", "sub_units")
    return {"model": manifest["model"]["id"], **{key: manifest[key] for key in keys}}


def _show(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool, head: bool = False) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    cells = [[str(row[column]) for column in columns] for row in rows]
    if head and cells:
        cells.insert(0, [column.replace("_", "-") for column in columns])
    steer.print_table(cells)
