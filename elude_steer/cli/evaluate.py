"""The commands that measure: evaluate one atlas, compare methods, try the settings of a build."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.steer import hide_loading_bars, print_table
from elude_steer.utils.files import check_folder


@click.command()
@click.argument("atlas")
@click.option("--measures", help="Some of faithfulness,monosemanticity,dictionary,efficiency [default: all].")
@click.option("--images", help="Pictures to measure on [default: those of the atlas's recipe].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="How many pictures.")
@click.option("--again", metavar="ATLAS", help="Another run of the same build, for the stability.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@click.option("--device", help="Where to compute: cpu, cuda, mps.")
@click.option("--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Passes for the efficiency.")
@click.option("--compile", "compiled", is_flag=True, help="Time what torch.compile makes of the model, as the paper.")
@click.option("--head", metavar="MODEL", help="A classifier on the backbone; pictures lie in folders of their classes.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="evaluation.json and report.html.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def evaluate(
    atlas: str,
    measures: str | None,
    images: str | None,
    limit: int,
    again: str | None,
    model: str | None,
    device: str | None,
    runs: int,
    compiled: bool,
    head: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure ATLAS: is the split faithful, are its sub-units of one mind, and what does it cost?

    \b
    elude-steer evaluate toyland --limit 200 --out evaluation
    elude-steer evaluate my-atlas --measures monosemanticity,dictionary --images photos
    """  # noqa: D301
    from elude_steer.evaluation.evaluate import MEASURES
    from elude_steer.evaluation.evaluate import evaluate as measure

    hide_loading_bars()
    if out is not None:
        check_folder(out)
    if compiled:  # what it cannot compile it says in pages
        logging.getLogger("torch").setLevel(logging.ERROR)
    wanted = [name.strip() for name in measures.split(",") if name.strip()] if measures is not None else MEASURES
    found = measure(
        atlas,
        images=images,
        limit=limit,
        measures=wanted,
        again=again,
        model=model,
        device=device,
        warm_up=max(1, runs // 5),
        runs=runs,
        compiled=compiled,
        head=head,
        log=lambda name: click.echo(f"measuring {name} …", err=True),
    )
    if out is not None:
        click.echo(f"elude-steer: note: {found.save(out)}", err=True)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    click.echo(f"elude-steer: note: measured on {found.image_count:,} pictures", err=True)
    rows = [(row.measure, row.name, _shown(row.value), _shown(row.units)) for row in found.rows]
    print_table([("", "", "sub-units", "units"), *rows], texts=2)


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Keeps what is done; a run goes on there.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Table and figures.")
@click.option("--method", "methods", multiple=True, help="Only this one; may be repeated [default: all].")
@click.option("--processes", type=click.IntRange(min=1), help="Processes on this machine [default: one a core].")
@click.option("--small", is_flag=True, help="A few minutes' worth, to try the command itself.")
def compare(work: Path, out: Path, methods: tuple[str, ...], processes: int | None, small: bool) -> None:
    """Compare ELUDe on toyland with raw units, other splits, sparse autoencoders and supervised directions.

    \b
    elude-steer compare --work work --out results
    elude-steer compare --work work --out results --method "raw units" --method "topk SAE"
    """  # noqa: D301
    from elude_steer.evaluation.compare.methods import METHODS, SMALL, Size, check_methods
    from elude_steer.evaluation.compare.run import Comparison
    from elude_steer.evaluation.compare.table import write_results
    from elude_steer.utils.parallel import launch

    hide_loading_bars()
    wanted = check_methods(methods or METHODS)
    check_folder(out)
    alone = "WORLD_SIZE" not in os.environ
    count = processes or os.cpu_count() or 1
    if alone and count > 1:
        options = ["--work", str(work), "--out", str(out), *(["--small"] if small else [])]
        launch(count, ["compare", *options, *(part for method in methods for part in ("--method", method))])
    told: Any = lambda line: click.echo(f"{line} …", err=True)  # noqa: E731
    comparison = Comparison(work, SMALL if small else Size(), told)
    rows = comparison.run(wanted)  # where processes were started all is there by now
    if alone:
        click.echo(write_results(comparison, rows, out))


@click.command()
@click.argument("spec")
@click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="NAME=V,V,…",
    help="A setting and its values; may be repeated [default: the paper's ablations].",
)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change the spec for every row.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Keeps what is done; a run goes on there.")
@click.option("--images", help="Pictures to measure on [default: the spec's own].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="How many of them.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="ablations.md and ablations.json.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def ablate(
    spec: str,
    varied: tuple[str, ...],
    changes: tuple[str, ...],
    work: Path,
    images: str | None,
    limit: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Build SPEC with one setting changed at a time, and measure each atlas.

    \b
    elude-steer ablate toyland --work work --images toyland:77001 --vary clusters.selection=leaf,eom
    elude-steer ablate toyland --work work --vary tokens.per_image=16,48 --vary clusters.top_k=1000,4000
    """  # noqa: D301
    from elude_steer.evaluation.ablate import ablate as build_each
    from elude_steer.evaluation.ablate import write_rows

    hide_loading_bars()
    if out is not None:
        check_folder(out)
    vary: dict[str, list[str]] = {}
    for text in varied:
        name, _, values = text.partition("=")
        vary.setdefault(name.strip(), []).extend(value.strip() for value in values.split(",") if value.strip())
    told: Any = lambda line: click.echo(f"{line} …", err=True)  # noqa: E731
    found = build_each(spec, vary or None, work, images=images, limit=limit, settings=changes, log=told)
    if out is not None:
        asked = [f"--vary {text}" for text in varied] + [f"--set {text}" for text in changes]
        shown = f" --images {images}" if images else ""
        about = " ".join(["elude-steer ablate", spec, *asked]) + f"{shown} --limit {limit}"
        click.echo(f"elude-steer: note: {write_rows(found, about, out)}", err=True)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    columns = list(dict.fromkeys(name for row in found for name in row))
    cells = [[value if isinstance(value := row.get(name), str) else _shown(value) for name in columns] for row in found]
    print_table([columns, *cells], texts=2)


@click.command()
@click.argument("atlases", nargs=-1, required=True)
@click.option("--judge", "judges", multiple=True, required=True, metavar="MODEL@URL[#VARIABLE]", help="Who is asked.")
@click.option("--images", help="Pictures to show [default: those of the first atlas's recipe].")
@click.option("--limit", type=click.IntRange(min=9), default=500, show_default=True, help="How many pictures.")
@click.option("--pairs", type=click.IntRange(min=1), default=50, show_default=True, help="Pairs of every two methods.")
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True, help="Of the lot that draws pairs.")
@click.option("--work", type=click.Path(path_type=Path), help="Keeps answers, so that nothing is asked twice.")
@click.option("--device", help="Where to compute: cpu, cuda, mps.")
@click.option("--yes", is_flag=True, help="Ask without asking whether to.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def judge(
    atlases: tuple[str, ...],
    judges: tuple[str, ...],
    images: str | None,
    limit: int,
    pairs: int,
    seed: int,
    work: Path | None,
    device: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Let vision-language models say whose pictures belong together better: ATLASES, and the units before the split.

    \b
    elude-steer judge toyland --judge qwen3-vl@http://localhost:8000/v1
    elude-steer judge one-atlas another --judge gpt-5@https://api.openai.com/v1#OPENAI_API_KEY --pairs 20
    """  # noqa: D301
    from elude_steer.evaluation.judge_atlases import judge_atlases, read_judge

    hide_loading_bars()
    told: Any = lambda line: click.echo(f"elude-steer: note: {line}", err=True)  # noqa: E731

    def calls(count: int) -> None:
        told(f"{count:,} questions to ask")
        if count and not yes and sys.stdin.isatty():
            click.confirm("ask them?", abort=True, err=True)

    found = judge_atlases(
        atlases,
        [read_judge(text) for text in judges],
        images=images,
        limit=limit,
        count=pairs,
        seed=seed,
        work=work,
        device=device,
        confirm=calls,
        log=told,
    )
    if as_json:
        click.echo(json.dumps(_plain(asdict(found)), indent=2))
        return
    order = sorted(found.rates, key=lambda name: -found.rates[name])
    ranges = {name: " to ".join(f"{end:.1%}" for end in found.intervals[name]) for name in order}
    print_table([("", "won", "95 %"), *((name, f"{found.rates[name]:.1%}", ranges[name]) for name in order)], texts=1)
    for name in found.wrong:
        if found.wrong[name] or found.missing[name]:
            text = f"judge '{name}': {found.wrong[name]} answers are neither A nor B, {found.missing[name]} are missing"
            told(f"{text}; what was answered is kept, and asked again only with another --work")
    if found.ties:
        told(f"{found.ties} of {found.presentations} presentations have no majority and count for nobody")


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _plain(value: Any) -> Any:
    """The same for JSON, which has no word for what is not a number."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and value != value else value
