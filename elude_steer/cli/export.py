"""The command that exports an edit as weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.checks import check_edit
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
        raise SpecError(f"recipe '{loaded.name}' has {len(loaded.steps)} edits, not {step}; --step counts from 1.")
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
