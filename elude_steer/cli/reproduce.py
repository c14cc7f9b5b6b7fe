"""The command `reproduce`: the paper's tables and edits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elude_steer.cli.checks import check_images, check_spec
from elude_steer.cli.options import (
    DEVICE,
    THREADS,
    TRUST,
    hide_loading_bars,
    print_note,
    print_progress,
    print_table,
    require_atlas,
    require_model,
    with_options,
)
from elude_steer.errors import SpecError

if TYPE_CHECKING:
    from elude_steer.evaluation.reproduce.forecast import Forecast
    from elude_steer.evaluation.reproduce.options import ReproduceOptions

_NAMES = ("steering", "interpretability", "generalization", "ablations", "stability", "efficiency", "judge")
_PRESETS = ("paper", "small", "tiny")


@click.command()
@click.argument("name", type=click.Choice(_NAMES))
@click.option("--images", help="Images to learn from, as the training images of ImageNet: a folder, or hf: and an id.")
@click.option("--held-out", help="Images to measure on, one folder for each class [default: those to learn from].")
@click.option("--scenes", metavar="FOLDER", help="Images of the edits: train.jpg, …; or a JSON file of their paths.")
@click.option("--plan", is_flag=True, help="Say what it will take, and stop.")
@click.option("--rows", multiple=True, metavar="ROW,…", help="Only these rows, such as 'topk SAE' or train-2.")
@click.option(
    "--backbones",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="Only this backbone, a name of `recipes list`; with = from another checkpoint; may be repeated.",
)
@click.option("--seeds", metavar="N,…", help="Only these draws of tokens [default: 42,123,999].")
@click.option("--limit", type=click.IntRange(min=4), help="Learn from so many images, spread over all.")
@click.option("--held-out-limit", type=click.IntRange(min=2), help="Measure on so many images, spread over all.")
@click.option(
    "--preset",
    type=click.Choice(_PRESETS),
    default="paper",
    show_default=True,
    help="The budget: the paper's; one for a machine without a GPU; one to try the command.",
)
@click.option("--head", "heads", multiple=True, metavar="NAME=MODEL", help="A classifier on a backbone, for accuracy.")
@click.option("--judge", "judges", multiple=True, metavar="MODEL@URL[#VARIABLE]", help="A judge; may be repeated.")
@click.option("--pairs", type=click.IntRange(min=1), default=50, show_default=True, help="Pairs that judges compare.")
@click.option(
    "--recipe", "recipes", multiple=True, help="Edits of this recipe instead of the paper's; may be repeated."
)
@click.option("--atlas", callback=require_atlas, help="Make the edits with this atlas, and build none.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change the recipes of all backbones.")
@with_options(DEVICE, THREADS, TRUST)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of finished pieces, from which a run goes on [default: under ELUDE_STEER_HOME/work].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    default="reproduced",
    show_default=True,
    help="Folder for the JSON file, the table and the page.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(name: str, plan: bool, out: Path, as_json: bool, **options: Any) -> None:
    """Run a table of the paper, or its fourteen edits, and show the paper's numbers beside yours.

    It says first what it will take, from short trials on this machine, and goes on after an interruption if it is
    called again.

    \b
    elude-steer reproduce interpretability --images imagenet/train --held-out imagenet/val --plan
    elude-steer reproduce generalization --images train --held-out val --preset small --limit 2000
    elude-steer reproduce steering --images imagenet/train --scenes photos --device cuda --trust-remote-code
    elude-steer reproduce steering --recipe photo-temple
    """  # noqa: D301
    from elude_steer.utils.files import check_folder

    chosen = _read_options(name, options)
    for folder in (out, chosen.work):
        check_folder(folder)
    _check(name, chosen)
    from elude_steer.evaluation.reproduce.run import forecast
    from elude_steer.evaluation.reproduce.run import reproduce as run

    hide_loading_bars()
    if plan:
        found = forecast(name, chosen)
        if as_json:
            click.echo(json.dumps(_as_dict(found), indent=2))
        else:
            click.echo("\n".join(found.lines()))
        return
    result = run(
        name,
        chosen,
        on_forecast=lambda found: print_note("\nelude-steer: note: ".join(found.lines())),
        confirm=lambda count: print_note(f"{count:,} questions to ask"),
    )
    print_note(result.save(out))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        print_table(result.text())
    for note in result.notes:
        print_note(note)


def _as_dict(found: Forecast) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "unit": "seconds by the clock" if found.on_gpu else "seconds of one core",
        "pieces": found.pieces,
        "disk": found.disk,
        "memory": found.memory,
        "questions": found.questions,
        "notes": found.notes,
    }


def _read_options(name: str, options: dict[str, Any]) -> ReproduceOptions:
    """The options of a run; raises for texts that cannot be read."""
    from elude_steer.evaluation.reproduce.options import ReproduceOptions
    from elude_steer.utils.files import home

    texts: dict[str, Any] = {one: tuple(options.pop(one)) for one in ("judges", "recipes", "changes")}
    rows = tuple(row.strip() for text in options.pop("rows") for row in text.split(","))
    backbones: dict[str, str | None] = {}
    for text in options.pop("backbones"):
        for part in text.split(","):
            recipe, given, model = part.partition("=")
            backbones[recipe.strip()] = model if given else None
    heads = dict(_pair(text) for text in options.pop("heads"))
    for model in (*backbones.values(), *heads.values()):
        require_model(None, None, model)  # type: ignore[arg-type]
    options["work"] = options["work"] or home() / "work" / "reproduce"
    seeds = _read_seeds(options.pop("seeds"))
    return ReproduceOptions(
        rows=rows, backbones=backbones, heads=heads, seeds=seeds, log=print_progress, **texts, **options
    )


def _pair(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not value:
        raise SpecError(f"--head is '{text}'; write the name of a backbone and a model: dinov2-base-layer12=MODEL.")
    return name.strip(), value


def _read_seeds(text: str | None) -> tuple[int, ...]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal():
            raise SpecError(f"--seeds is '{text}'; write numbers: --seeds 42,123.")
    return tuple(map(int, parts))


def _check(name: str, options: ReproduceOptions) -> None:
    """Raise for all that is wrong without a model."""
    from elude_steer.evaluation.measures.llm_judges import check_judges, read_judge

    if options.judges:
        check_judges([read_judge(text) for text in options.judges])
    for source in (options.images, options.held_out):
        check_images(source)
    if name == "steering":
        _check_edits(options)
        return
    for given, switch in ((options.scenes, "--scenes"), (options.recipes, "--recipe"), (options.atlas, "--atlas")):
        if given:
            raise SpecError(f"{switch} belongs to `reproduce steering`, not to `reproduce {name}`.")
    if options.images is None:
        raise SpecError("a table needs images to learn from: --images FOLDER, such as ImageNet's training images.")
    if name == "judge" and not options.judges:
        raise SpecError("`reproduce judge` needs judges: --judge MODEL@URL, an OpenAI-compatible endpoint.")
    from elude_steer.evaluation.reproduce.experiment import Experiment

    experiment = Experiment(name, options)
    for backbone in experiment.backbones:
        experiment.methods(backbone)
        check_spec(backbone, options.changes)
    for backbone in options.heads:
        if backbone not in experiment.backbones:
            raise SpecError(f"--head names '{backbone}', which is not run; there are {_list(experiment.backbones)}.")
    _ = experiment.seeds


def _check_edits(options: ReproduceOptions) -> None:
    from elude_steer.evaluation.reproduce.edits import PAPER_RECIPES, find_images, list_edits

    edits = list_edits(options.recipes or PAPER_RECIPES, options.rows)
    find_images(edits, options.scenes)
    built = options.atlas is None and any(edit.recipe.name in PAPER_RECIPES for edit in edits)
    if built and options.images is None:
        raise SpecError(
            "the paper's edits need an atlas of LLaVA-OneVision: --images FOLDER to build one, or --atlas one that is "
            "there."
        )
    known = ["llava-onevision-0.5b-unique"]
    for backbone in options.backbones:
        if backbone not in known:
            raise SpecError(f"there is no backbone '{backbone}' here; there is {_list(known)}.")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
