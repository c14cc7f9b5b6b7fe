"""The commands that measure: evaluate one atlas, compare methods, try the settings of a build."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from elude_steer.commands import hide_loading_bars, print_table


@click.command()
@click.argument("atlas")
@click.option("--measures", help="Some of faithfulness,monosemanticity,dictionary,efficiency [default: all].")
@click.option("--images", help="Pictures to measure on [default: those of the atlas's recipe].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="How many pictures.")
@click.option("--again", metavar="ATLAS", help="Another run of the same build, for the stability.")
@click.option("--model", help="Another copy of the model [default: the one of the atlas].")
@click.option("--device", help="Where to compute: cpu, cuda, mps.")
@click.option("--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Passes for the efficiency.")
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
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure ATLAS: is the split faithful, are its sub-units of one mind, and what does it cost?

    \b
    elude-steer evaluate toyland --limit 200 --out evaluation
    elude-steer evaluate my-atlas --measures monosemanticity,dictionary --images photos
    """  # noqa: D301
    from elude_steer.evaluating import MEASURES
    from elude_steer.evaluating import evaluate as measure

    hide_loading_bars()
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
        told=lambda name: click.echo(f"measuring {name} …", err=True),
    )
    if out is not None:
        click.echo(f"elude-steer: note: {found.save(out)}", err=True)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    rows = [(row.measure, row.name, _shown(row.value), _shown(row.units)) for row in found.rows]
    print_table([("", "", "sub-units", "units"), *rows], texts=2)


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Keeps what is done; a run goes on there.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Table and figures.")
@click.option("--method", "methods", multiple=True, help="Only this one; may be repeated [default: all].")
@click.option("--processes", type=click.IntRange(min=1), help="Processes on this machine [default: one a core].")
@click.option("--small", is_flag=True, help="A minute's worth, to try the command itself.")
def compare(work: Path, out: Path, methods: tuple[str, ...], processes: int | None, small: bool) -> None:
    """Compare ELUDe on toyland with raw units, other splits, sparse autoencoders and supervised directions.

    \b
    elude-steer compare --work work --out results
    elude-steer compare --work work --out results --method "raw units" --method "topk SAE"
    """  # noqa: D301
    from elude_steer.contest import METHODS, SMALL, Comparison, Size, check_methods
    from elude_steer.standings import write_results
    from elude_steer.workers import launch

    hide_loading_bars()
    wanted = check_methods(methods or METHODS)
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
    "--vary", "varied", multiple=True, metavar="NAME=V,V,…", help="A setting and its values; may be repeated."
)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change the spec for every row.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Keeps what is done; a run goes on there.")
@click.option("--images", help="Pictures to measure on [default: the spec's own].")
@click.option("--limit", type=click.IntRange(min=2), default=500, show_default=True, help="How many of them.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def ablate(
    spec: str,
    varied: tuple[str, ...],
    changes: tuple[str, ...],
    work: Path,
    images: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Build SPEC with one setting changed at a time, and measure each atlas.

    \b
    elude-steer ablate toyland --work work --images toyland:77001 --vary clusters.selection=leaf,eom
    elude-steer ablate toyland --work work --vary tokens.per_image=16,48 --vary clusters.top_k=1000,4000
    """  # noqa: D301
    from elude_steer.ablating import PAPERS
    from elude_steer.ablating import ablate as build_each

    hide_loading_bars()
    vary: dict[str, list[str]] = {}
    for text in varied:
        name, _, values = text.partition("=")
        vary.setdefault(name.strip(), []).extend(value.strip() for value in values.split(",") if value.strip())
    told: Any = lambda line: click.echo(f"{line} …", err=True)  # noqa: E731
    found = build_each(spec, vary or PAPERS, work, images=images, limit=limit, settings=changes, told=told)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    columns = list(dict.fromkeys(name for row in found for name in row))
    cells = [[value if isinstance(value := row.get(name), str) else _shown(value) for name in columns] for row in found]
    print_table([columns, *cells], texts=2)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
