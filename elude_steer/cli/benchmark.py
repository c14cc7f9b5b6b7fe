"""The benchmarks of an edit on images in COCO's formats: pope, chair, absent, side-effects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elude_steer.cli.checks import check_coco, check_edit, split_words
from elude_steer.cli.options import (
    LOADING,
    hide_loading_bars,
    print_note,
    print_progress,
    print_table,
    read_nu,
    require_atlas,
    require_model,
    setting_options,
    with_options,
)
from elude_steer.errors import SpecError

if TYPE_CHECKING:
    from elude_steer.evaluation.benchmarks.dataset import AnnotatedSet
    from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
    from elude_steer.evaluation.benchmarks.result import BenchmarkResult

_MINUS = "Classes to remove, separated by commas; may be repeated"
_DATA = (
    click.option(
        "--coco",
        nargs=2,
        required=True,
        metavar="JSON FOLDER",
        help="COCO's instances, such as instances_val2017.json, and the folder of the images.",
    ),
    click.option(
        "--captions",
        type=click.Path(path_type=Path),
        metavar="JSON",
        help="COCO's captions; what they name counts as possibly there [default: captions… beside instances…].",
    ),
    click.option(
        "--synonyms",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Words for the classes, a line each, dog: puppy, hound [default: ours for COCO's classes].",
    ),
    click.option(
        "--atlas", callback=require_atlas, default="toyland", show_default=True, help="A folder, a name, or a Hub id."
    ),
    click.option("--model", callback=require_model, help="Another copy of the model [default: the one of the atlas]."),
)
_PLUS = click.option("--plus", multiple=True, metavar="WORD,…", help="Concepts to add, separated by commas.")
_BALANCE = click.option(
    "--balance/--no-balance",
    default=True,
    show_default=True,
    help="Let every other image show a removed class, or take images as they come.",
)
_OUTPUT = (
    click.option("--limit", type=click.IntRange(min=1), default=500, show_default=True, help="Number of images."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all draws."),
    click.option("--controls/--no-controls", default=True, show_default=True, help="Measure the controls too."),
    *LOADING,
    click.option(
        "--work",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Folder of finished parts, from which a run resumes [default: under ELUDE_STEER_HOME/work].",
    ),
    click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="Write the JSON file and the page."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def _length(default: int) -> Callable[..., Any]:
    return click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Maximum length of an answer.",
    )


@click.group()
def benchmark() -> None:
    """Measure hallucination and side effects of an edit on images with COCO's annotations.

    \b
    elude-steer toyland draw scenes --count 200 --coco
    elude-steer benchmark chair --coco scenes/instances.json scenes --minus dog --out results
    """  # noqa: D301


@benchmark.command()
@with_options(*_DATA)
@click.option("--minus", multiple=True, required=True, metavar="WORD,…", help=f"{_MINUS}.")
@with_options(_PLUS, *setting_options(), _BALANCE)
@click.option(
    "--per-image",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Questions for each image and split whose answer is yes, and as many whose answer is no.",
)
@click.option("--prompt", help="The question, with {} for the class [default: Is there a {} in the image?].")
@with_options(_length(16), *_OUTPUT)
def pope(**options: Any) -> None:
    """Ask what is in images before and after classes are erased (POPE).

    For the erased classes: how often the answer is yes where they are and where they are not. For all others: accuracy,
    precision, recall, F1 and the share of yes, for questions about random, frequent and co-occurring absent classes.

    \b
    elude-steer benchmark pope --coco instances_val2017.json val2017 --atlas my-atlas --minus dog --out results
    """  # noqa: D301
    from elude_steer.evaluation.benchmarks.options import check_template

    if options["prompt"] is not None:
        check_template(options["prompt"])
    _run("pope", options)


@benchmark.command()
@with_options(*_DATA)
@click.option("--minus", multiple=True, required=True, metavar="WORD,…", help=f"{_MINUS}.")
@with_options(_PLUS, *setting_options(), _BALANCE)
@click.option("--prompt", help="The question [default: Please describe this image in detail.].")
@with_options(_length(64), *_OUTPUT)
def chair(**options: Any) -> None:
    """Count what captions name that is not there, before and after classes are erased (CHAIR).

    CHAIR_s is the share of captions that name a class which is not in the image, CHAIR_i the share of such mentions
    among all mentions. What is there is taken from instances and captions.

    \b
    elude-steer benchmark chair --coco instances_val2017.json val2017 --atlas my-atlas --minus dog --out results
    """  # noqa: D301
    _run("chair", options)


@benchmark.command()
@with_options(*_DATA)
@click.option("--minus", multiple=True, metavar="WORD,…", help=f"{_MINUS} [default: a random absent one].")
@with_options(*setting_options())
@click.option("--prompt", help="The question [default: Describe this image in one sentence.].")
@with_options(_length(64), *_OUTPUT)
def absent(**options: Any) -> None:
    """Remove classes that are not in the images, and count the captions that change.

    \b
    elude-steer benchmark absent --coco instances_val2017.json val2017 --atlas my-atlas --out results
    """  # noqa: D301
    _run("absent", options)


@benchmark.command("side-effects")
@with_options(*_DATA)
@click.option("--minus", multiple=True, metavar="WORD,…", help=f"{_MINUS} [default: a random absent one].")
@with_options(*setting_options())
@click.option("--prompt", help="The question [default: Describe this image in one sentence.].")
@with_options(_length(64), *_OUTPUT)
def side_effects(**options: Any) -> None:
    """Measure what an edit moves in images that do not show what it removes.

    KL is the divergence of the next-token distributions in nats a token, perplexity that of the steered caption under
    the unsteered model, repetition the share of pairs of words that a caption has had before.

    \b
    elude-steer benchmark side-effects --coco instances_val2017.json val2017 --atlas my-atlas --minus dog
    """  # noqa: D301
    _run("side-effects", options)


def _run(name: str, options: dict[str, Any]) -> None:
    """Check everything, load the model, measure and print."""
    loading = {one: options.pop(one) for one in ("device", "threads", "dtype", "trust_remote_code", "model")}
    atlas, out, as_json = (options.pop(one) for one in ("atlas", "out", "as_json"))
    data, chosen, count = _check(name, atlas, out, options)
    from elude_steer.steering.steerer import Steerer

    hide_loading_bars()
    steerer = Steerer.load(atlas, **loading)
    print_progress(f"measuring on {count:,} images of {data.name}")
    result = _find_benchmark(name)(steerer, data, chosen)
    if out is not None:
        print_note(result.save(out))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        print_table(result.table(), text_columns=2)
    for note in result.notes:
        print_note(note)


def _check(
    name: str, atlas: str, out: Path | None, options: dict[str, Any]
) -> tuple[AnnotatedSet, BenchmarkOptions, int]:
    """Read the annotations and the edit; raise for all that is wrong without a model.

    Args:
        name: of the benchmark.
        atlas: whose settings count.
        out: the folder of the results.
        options: of the command; what is left after the options that all benchmarks share are the settings.
    """
    from elude_steer.evaluation.benchmarks.dataset import find_captions, images_for, read_dataset
    from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
    from elude_steer.utils.files import check_folder

    coco, captions, synonyms = (options.pop(one) for one in ("coco", "captions", "synonyms"))
    minus, plus = (tuple(split_words(options.pop(one, ()))) for one in ("minus", "plus"))
    own = ("limit", "seed", "balance", "controls", "prompt", "max_new_tokens", "per_image", "work")
    shared = {one: options.pop(one) for one in own if one in options}
    shared["prompt"] = shared["prompt"] or ""
    settings = {**options, "nu": read_nu(options["nu"])}
    check_edit(atlas, list(minus), list(plus), settings=settings)
    for folder in (out, shared["work"]):
        if folder is not None:
            check_folder(folder)
    check_coco(*coco)
    captions = captions or find_captions(coco[0])
    if name == "chair" and captions is None:
        raise SpecError(
            f"CHAIR takes what is true from instances and captions, and there is no file of captions beside "
            f"'{coco[0]}'; give it: --captions captions_val2017.json."
        )
    # POPE asks about what is annotated, as in the paper.
    data = read_dataset(*coco, captions=None if name == "pope" else captions, synonyms=synonyms)
    chosen = BenchmarkOptions(minus, plus, settings, **shared)
    return data, chosen, len(images_for(name, data, chosen))


def _find_benchmark(name: str) -> Callable[..., BenchmarkResult]:
    from elude_steer.evaluation.benchmarks.chair import run_chair
    from elude_steer.evaluation.benchmarks.pope import run_pope
    from elude_steer.evaluation.benchmarks.untouched import run_absent, run_side_effects

    return {"pope": run_pope, "chair": run_chair, "absent": run_absent, "side-effects": run_side_effects}[name]
