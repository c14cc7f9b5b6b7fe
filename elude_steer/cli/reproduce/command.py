"""The command `reproduce`: the paper's tables and edits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elude_steer.cli.options import (
    DEVICE,
    THREADS,
    TRUST,
    hide_loading_bars,
    print_note,
    print_table,
    require_atlas,
    with_options,
)

if TYPE_CHECKING:
    from elude_steer.evaluation.reproduce.forecast import Forecast

_NAMES = ("steering", "interpretability", "generalization", "ablations", "stability", "efficiency", "judge")
_PROTOCOLS = ("paper", "small")
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
@click.option(
    "--protocol",
    type=click.Choice(_PROTOCOLS),
    help="Timing for `efficiency`: paper is 500 compiled passes of 256 images, small is 15 passes of 8 "
    "[default: by --preset].",
)
@click.option("--passes", type=click.IntRange(min=1), help="Number of timed passes, to try `efficiency`.")
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
    from elude_steer.cli.reproduce.checks import check_options, read_options
    from elude_steer.utils.files import check_folder

    check_folder(out)
    chosen = read_options(options)
    check_options(name, chosen)
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
