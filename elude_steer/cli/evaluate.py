"""The commands that measure: evaluate, compare, ablate, judge."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elude_steer.cli.checks import check_images, check_spec, check_variations
from elude_steer.cli.options import (
    DEVICE,
    THREADS,
    TRUST,
    format_number,
    hide_loading_bars,
    print_note,
    print_progress,
    print_table,
    require_atlas,
    require_model,
    with_options,
)

if TYPE_CHECKING:
    from elude_steer.evaluation.compare.methods import Part


@click.command()
@click.argument("atlas", callback=require_atlas)
@click.option("--measures", help="Some of faithfulness,monosemanticity,dictionary,efficiency [default: all].")
@click.option("--images", help="Images to measure on [default: those of the atlas's spec].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="Number of images.")
@click.option(
    "--again",
    metavar="ATLAS",
    callback=require_atlas,
    help="An atlas of a second run of the same build, to measure stability.",
)
@click.option("--model", callback=require_model, help="Another copy of the model [default: the one of the atlas].")
@with_options(DEVICE, THREADS, TRUST)
@click.option(
    "--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Passes to time for efficiency."
)
@click.option("--compile", "compiled", is_flag=True, help="Time the model under torch.compile, as the paper does.")
@click.option("--head", metavar="MODEL", help="A classifier on the backbone; the images are in one folder per class.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="Write evaluation.json and report.html.")
@click.option("--card", is_flag=True, help="Write the results into the atlas's model card, for the Hub.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    atlas: str,
    measures: str | None,
    images: str | None,
    limit: int,
    again: str | None,
    model: str | None,
    device: str | None,
    threads: int | None,
    trust_remote_code: bool,
    runs: int,
    compiled: bool,
    head: str | None,
    out: Path | None,
    card: bool,
    as_json: bool,
) -> None:
    """Measure ATLAS: how faithful the split is, how monosemantic its sub-units are, and what it costs.

    \b
    elude-steer evaluate toyland --limit 200 --out evaluation
    elude-steer evaluate my-atlas --measures monosemanticity,dictionary --images photos
    elude-steer evaluate my-atlas --card
    """  # noqa: D301
    from elude_steer.atlas.manifest import COPY_FIRST, check_not_shipped, find_atlas
    from elude_steer.errors import StorageError
    from elude_steer.evaluation.measures import MEASURES, check_measures
    from elude_steer.utils.files import check_folder

    if out is not None:
        check_folder(out)
    names = [name.strip() for name in measures.split(",") if name.strip()] if measures is not None else MEASURES
    check_measures(names, again, head)
    check_images(images)
    if card and (folder := find_atlas(atlas)) is None:
        raise StorageError(f"'{atlas}' is on the Hub; --card needs a folder: `hf download {atlas} --local-dir FOLDER`.")
    if card:
        check_not_shipped(atlas, folder, COPY_FIRST)
    from elude_steer.evaluation.evaluate import evaluate as measure

    hide_loading_bars()
    if compiled:  # torch prints pages about what it cannot compile
        import logging

        logging.getLogger("torch").setLevel(logging.ERROR)
    result = measure(
        atlas,
        images=images,
        limit=limit,
        measures=names,
        again=again,
        model=model,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        warm_up=max(1, runs // 5),
        runs=runs,
        compiled=compiled,
        head=head,
        log=lambda name: print_progress(f"measuring {name}"),
    )
    if out is not None:
        print_note(result.save(out))
    if card:
        print_note(result.atlas.update_card(evaluation=result.for_card()) / "README.md")
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
        return
    print_note(f"measured on {result.image_count:,} images")
    rows = [(row.measure, row.name, format_number(row.value), format_number(row.units)) for row in result.rows]
    print_table([("", "", "sub-units", "units"), *rows], text_columns=2)


@click.command()
@click.argument("spec", required=False)
@click.option(
    "--work", type=click.Path(path_type=Path), required=True, help="Folder of finished work, from which a run resumes."
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Folder for the table and figures."
)
@click.option("--method", "methods", multiple=True, help="Compare only this method; may be repeated [default: all].")
@click.option("--seed", "seeds", type=int, multiple=True, help="Only this token seed; may be repeated [default: all].")
@click.option(
    "--part",
    "parts",
    type=click.Choice(["measures", "edits"]),
    multiple=True,
    help="Only what latents mean, or only steering; the other part of the results in --out stays [default: both].",
)
@click.option("--processes", type=click.IntRange(min=1), help="Processes on this machine [default: one per core].")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads per process, for atlases [default: the cores of a process]."
)
@click.option("--small", is_flag=True, help="Run a small version of a few minutes, to try the command.")
@click.option("--images", help="With SPEC: images to learn from [default: those of SPEC].")
@click.option("--held-out", help="With SPEC: images to measure on.")
@click.option("--limit", type=click.IntRange(min=2), help="With SPEC: number of images to learn from.")
@click.option("--held-out-limit", type=click.IntRange(min=2), help="With SPEC: number of images to measure on.")
@click.option("--preset", help="With SPEC: the budget, paper, small or tiny [default: small].")
@click.option("--head", metavar="MODEL", help="With SPEC: a classifier on the backbone, for the accuracy.")
@with_options(DEVICE, TRUST)
def compare(
    spec: str | None,
    work: Path,
    out: Path,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    parts: tuple[Part, ...],
    processes: int | None,
    threads: int | None,
    small: bool,
    images: str | None,
    held_out: str | None,
    limit: int | None,
    held_out_limit: int | None,
    preset: str | None,
    head: str | None,
    device: str | None,
    trust_remote_code: bool,
) -> None:
    """Compare ELUDe with raw units, other splits and sparse autoencoders: on toyland, or on the backbone of SPEC.

    \b
    elude-steer compare --work work --out results
    elude-steer compare dinov2-small-layer12 --images train --held-out val --work work --out results
    elude-steer compare --work work --out results --method "raw units" --method "topk SAE"
    elude-steer compare --work work --out results --part edits --seed 42
    """  # noqa: D301
    from elude_steer.evaluation.compare.methods import METHODS, PARTS, SMALL, Size, check_seeds, find_methods
    from elude_steer.utils.files import check_folder

    given = {
        "--images": images,
        "--held-out": held_out,
        "--preset": preset,
        "--head": head,
        "--limit": limit,
        "--held-out-limit": held_out_limit,
        "--device": device,
        "--trust-remote-code": trust_remote_code or None,
    }
    if spec is not None:
        if small or parts or processes:
            raise click.UsageError("--small, --part and --processes are for toyland; leave them out, or SPEC.")
        sources = {"images": images, "held_out": held_out, "limit": limit, "held_out_limit": held_out_limit}
        running = {"device": device, "threads": threads, "trust_remote_code": trust_remote_code}
        _compare_backbone(spec, work, out, methods, seeds, preset, {**sources, "head": head, **running})
        return
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"{name} needs SPEC, which names a backbone; without it, toyland is compared.")
    size = SMALL if small else Size()
    chosen = find_methods(methods or METHODS)
    check_seeds(size, seeds)
    for folder in (work, out):
        check_folder(folder)
    from elude_steer.evaluation.compare.run import Comparison
    from elude_steer.evaluation.compare.table import write_results
    from elude_steer.utils.parallel import launch
    from elude_steer.utils.threads import count_cores

    hide_loading_bars()
    alone = "WORLD_SIZE" not in os.environ
    count = processes or count_cores()
    if alone and count > 1:
        options = ["--work", str(work), "--out", str(out), *(["--small"] if small else [])]
        options += ["--threads", str(threads)] if threads else []
        for name, values in {"--method": methods, "--seed": seeds, "--part": parts}.items():
            options += [text for value in values for text in (name, str(value))]
        launch(count, ["compare", *options])
    comparison = Comparison(work, size, print_progress, threads)
    rows = comparison.run(chosen, seeds or None, parts or PARTS)  # reads what other processes have computed
    if alone:
        click.echo(write_results(size, rows, out))


def _compare_backbone(
    name: str,
    work: Path,
    out: Path,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    preset: str | None,
    options: dict[str, Any],
) -> None:
    """Compare methods on the backbone of a spec; writes tables.md and tables.json."""
    from elude_steer.evaluation.tables.setup import TableSetup, find_preset
    from elude_steer.utils.files import check_folder

    spec = check_spec(name, ())
    options["images"] = options["images"] or spec.images.source
    for option in ("images", "held_out"):
        if options[option] is None:
            raise click.UsageError(f"--{option.replace('_', '-')} is missing; name a folder of images.")
        check_images(options[option])
    for folder in (work, out):
        check_folder(folder)
    setup = TableSetup(spec, work=work, preset=find_preset(preset or "small"), log=print_progress, **options)
    setup.find_seeds(seeds or None)
    setup.find_methods(methods or None)
    from elude_steer.evaluation.tables.report import write_tables
    from elude_steer.evaluation.tables.run import run_table

    hide_loading_bars()
    rows = run_table(setup, methods or None, seeds or None)
    click.echo(write_tables(setup, out, rows))


@click.command()
@click.argument("spec")
@click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="NAME=V,V,…",
    help="A setting and its values; may be repeated [default: the paper's ablations].",
)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change the spec for all rows.")
@click.option(
    "--work", type=click.Path(path_type=Path), required=True, help="Folder of finished work, from which a run resumes."
)
@click.option("--images", help="Images to measure on [default: those of the spec].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="Number of images.")
@with_options(DEVICE, THREADS, TRUST)
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="Write ablations.md and ablations.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ablate(
    spec: str,
    varied: tuple[str, ...],
    changes: tuple[str, ...],
    work: Path,
    images: str | None,
    limit: int,
    device: str | None,
    threads: int | None,
    trust_remote_code: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Build SPEC with one setting changed at a time, and measure each atlas.

    \b
    elude-steer ablate toyland --work work --images toyland:77001 --vary clusters.selection=leaf,eom
    elude-steer ablate toyland --work work --vary tokens.per_image=16,48 --vary clusters.top_k=1000,4000
    """  # noqa: D301
    from elude_steer.utils.files import check_folder

    vary: dict[str, list[str]] = {}
    for text in varied:
        name, _, values = text.partition("=")
        vary.setdefault(name.strip(), []).extend(value.strip() for value in values.split(",") if value.strip())
    check_variations(check_spec(spec, changes), vary)
    for folder in (work, *([] if out is None else [out])):
        check_folder(folder)
    check_images(images)
    from elude_steer.evaluation.ablate import ablate as build_each
    from elude_steer.evaluation.ablate import write_rows

    hide_loading_bars()
    rows = build_each(
        spec,
        vary or None,
        work,
        images=images,
        limit=limit,
        settings=changes,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        log=print_progress,
    )
    if out is not None:
        options = [f"--vary {text}" for text in varied] + [f"--set {text}" for text in changes]
        options += [f"--images {images}"] if images else []
        command = " ".join(["elude-steer ablate", spec, *options, f"--limit {limit}"])
        print_note(write_rows(rows, command, out))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [value if isinstance(value := row.get(name), str) else format_number(value) for name in columns] for row in rows
    ]
    print_table([columns, *cells], text_columns=2)


@click.command()
@click.argument("atlases", nargs=-1, required=True)
@click.option(
    "--judge", "judges", multiple=True, required=True, metavar="MODEL@URL[#VARIABLE]", help="A judge; may be repeated."
)
@click.option("--images", help="Images to show [default: those of the first atlas's spec].")
@click.option("--limit", type=click.IntRange(min=9), default=500, show_default=True, help="Number of images.")
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Comparisons for each pair of methods.",
)
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True, help="Seed of the drawn pairs.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder of answers, so that no question is asked twice.")
@with_options(DEVICE, THREADS, TRUST)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def judge(
    atlases: tuple[str, ...],
    judges: tuple[str, ...],
    images: str | None,
    limit: int,
    pairs: int,
    seed: int,
    work: Path | None,
    device: str | None,
    threads: int | None,
    trust_remote_code: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Let vision-language models judge whose images belong together, those of ATLASES or of the units before.

    \b
    elude-steer judge toyland --judge qwen3-vl@http://localhost:8000/v1
    elude-steer judge one-atlas another --judge gpt-5@https://api.openai.com/v1#OPENAI_API_KEY --pairs 20
    """  # noqa: D301
    from elude_steer.atlas.manifest import find_atlas
    from elude_steer.evaluation.measures.llm_judges import check_judges, read_judge
    from elude_steer.utils.files import check_folder

    parsed = [read_judge(text) for text in judges]
    check_judges(parsed)
    for name in atlases:
        find_atlas(name)
    check_images(images)
    if work is not None:
        check_folder(work)
    from elude_steer.evaluation.judge_atlases import judge_atlases

    hide_loading_bars()

    def confirm(count: int) -> None:
        print_note(f"{count:,} questions to ask")
        if count and not yes and sys.stdin.isatty():
            click.confirm("ask them?", abort=True, err=True)

    result = judge_atlases(
        atlases,
        parsed,
        images=images,
        limit=limit,
        count=pairs,
        seed=seed,
        work=work,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        confirm=confirm,
        log=print_note,
    )
    if as_json:
        click.echo(json.dumps(_replace_nan(asdict(result)), indent=2))
        return
    decided = {name: rate for name, rate in result.rates.items() if rate == rate}
    order = sorted(result.rates, key=lambda name: -decided.get(name, -1.0))
    ranges = {name: " to ".join(f"{end:.1%}" for end in result.intervals[name]) for name in decided}
    rows = [(name, f"{decided[name]:.1%}" if name in decided else "-", ranges.get(name, "-")) for name in order]
    print_table([("", "won", "95 %"), *rows], text_columns=1)
    for name, wrong in result.wrong.items():
        if wrong or result.missing[name]:
            print_note(
                f"judge '{name}': {wrong} answers are neither A nor B, {result.missing[name]} are missing; answers are "
                "kept, and asked again only with another --work"
            )
    if result.ties:
        print_note(f"{result.ties} of {result.pairs} pairs have no majority and are not counted")


def _replace_nan(value: Any) -> Any:
    """The same values with None instead of NaN, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: _replace_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(part) for part in value]
    return None if isinstance(value, float) and value != value else value
