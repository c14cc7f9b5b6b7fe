"""`reproduce`: what a run takes, and the run itself, for tables and edits alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from elude_steer.evaluation.reproduce.edits import PAPER_RECIPES, find_images, list_edits
from elude_steer.evaluation.reproduce.edits_result import EditsResult
from elude_steer.evaluation.reproduce.experiment import UMAP, UMAP_SETTING, Experiment
from elude_steer.evaluation.reproduce.forecast import Forecast, forecast_edits, forecast_tables
from elude_steer.evaluation.reproduce.ledger import Ledger
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.result import TableResult
from elude_steer.evaluation.reproduce.steering import find_hours_key, needs_build, run_edits
from elude_steer.evaluation.reproduce.tables import draw_collages, measure_properties, run_experiment
from elude_steer.evaluation.tables.efficiency import PAPER_PROTOCOL
from elude_steer.evaluation.tables.measure import PROBE, accuracy_source
from elude_steer.evaluation.tables.setup import PAPER
from elude_steer.models.images import image_set
from elude_steer.utils import optional
from elude_steer.utils.fingerprint import versions

Result = TableResult | EditsResult
_NOTES = {
    "stability": "The paper prints the collinearity as coherence and calls higher better; 100 means that there are "
    "duplicates. Deviations of the paper's stability and coherence are as printed, not in percent.",
    "efficiency": "Milliseconds were measured on another machine than the paper's: compare the ratios `slower` and "
    "`more memory`, which stand beside the paper's. Memory is the peak of tensors in a pass, the weights included. "
    "Input dim is the width of what a method reads.",
}
_LEARNT, _MEASURED = 1_281_167, 50_000  # images of ImageNet that the paper learns from, and measures on


def forecast(name: str, options: ReproduceOptions) -> Forecast:
    """What a run will take, from short trials on this machine.

    Args:
        name: of the table, or `steering`.
        options: what to run.
    """
    if name == "steering":
        edits = list_edits(options.recipes or PAPER_RECIPES, options.rows)
        return forecast_edits(edits, find_images(edits, options.scenes), options)
    return forecast_tables(Experiment(name, options))


def reproduce(
    name: str,
    options: ReproduceOptions,
    *,
    on_forecast: Callable[[Forecast], object] = lambda found: None,
    confirm: Callable[[int], object] = lambda count: None,
) -> Result:
    """Run a table of the paper, or its edits; finished pieces of an earlier run are read.

    Args:
        name: of the table, or `steering`.
        options: what to run.
        on_forecast: called with what it will take before it starts.
        confirm: called with the number of questions before judges are asked.

    Example:
        >>> result = reproduce("interpretability", ReproduceOptions("train", "val", rows=("raw units",)))
        >>> result.save(Path("results"))
    """
    expected = forecast(name, options)
    on_forecast(expected)
    path = options.work / f"hours-{name}.json"
    if name == "steering":
        edits = list_edits(options.recipes or PAPER_RECIPES, options.rows)
        images = find_images(edits, options.scenes)
        find_key = partial(find_hours_key, edits=edits, images=images, options=options)
        ledger = Ledger(path, expected.on_gpu, find_key)
        ledger.predict(expected.pieces)
        rows = run_edits(edits, images, options, ledger)
        ledger.finish()
        about = {**_describe(options), "paper": any(edit.paper for edit in edits)}
        return EditsResult(rows, about, ledger.to_dict(), _edit_notes(edits, options))
    experiment = Experiment(name, options)
    ledger = Ledger(path, expected.on_gpu, experiment.find_key)
    ledger.predict(expected.pieces)
    found = run_experiment(experiment, ledger, confirm)
    properties, collages = measure_properties(experiment, ledger), draw_collages(experiment, ledger)
    ledger.finish()
    about, notes = _describe_table(experiment), _notes(experiment)
    return TableResult(experiment.table, found, about, ledger.to_dict(), notes, properties, collages)


def _describe(options: ReproduceOptions) -> dict[str, Any]:
    return {"preset": options.preset, "changes": list(options.changes), "versions": versions()}


def _describe_table(experiment: Experiment) -> dict[str, Any]:
    options = experiment.options
    models = {name: experiment.spec(name).model.id for name in experiment.backbones}
    return {
        **_describe(options),
        "models": {name: _short(model) for name, model in models.items()},
        "images": {"name": _short(options.images), "count": options.count(options.images, options.limit)},
        "held out": {
            "name": _short(options.measured_on),
            "count": options.count(options.measured_on, options.held_out_limit),
        },
        "seeds": experiment.draws,
        "differs": _differences(experiment),
    }


def _short(source: Any) -> str:
    """The last part of a path, because the rest is private; a Hub id as it is."""
    text = str(source)
    return Path(text).name if Path(text).expanduser().exists() else text


def _differences(experiment: Experiment) -> list[str]:
    """What of a run is not as in the paper."""
    options, found = experiment.options, []
    if options.preset != "paper":
        sizes = {name: experiment.spec(name) for name in experiment.backbones}
        first = next(iter(sizes.values()))
        found.append(
            f"the smaller budget '{options.preset}' ({first.tokens.per_image} tokens of an image, a unit's "
            f"{first.clusters.top_k} strongest, clusters of at least {first.clusters.min_cluster_size})"
        )
    replaced = [name for name, model in options.backbones.items() if model is not None]
    found += [f"another checkpoint for {', '.join(replaced)}"] if replaced else []
    found += _count_differences(experiment)
    if experiment.name == "efficiency" and experiment.protocol != PAPER_PROTOCOL:
        protocol = experiment.protocol
        found.append(
            f"{protocol.runs} timed passes of {protocol.batch} images after {protocol.warm_up} "
            f"({'' if protocol.compiled else 'not '}compiled, {protocol.statistic})"
        )
    found += [f"changes {', '.join(options.changes)}"] if options.changes else []
    return found + _list_missing(experiment)


def _count_differences(experiment: Experiment) -> list[str]:
    """Numbers of images and draws that are not the paper's."""
    options, found = experiment.options, []
    learnt = options.count(options.images, options.limit)
    measured = options.count(options.measured_on, options.held_out_limit)
    found += [f"{learnt:,} images to learn from instead of {_LEARNT:,}"] if learnt != _LEARNT else []
    if options.held_out is None:
        found.append("measured on the images that methods learnt from")
    elif measured != _MEASURED:
        found.append(f"{measured:,} images to measure on instead of {_MEASURED:,}")
    draws = PAPER.seeds[:1] if experiment.uses_one_draw else PAPER.seeds
    if tuple(experiment.draws) != draws:
        given = ", ".join(map(str, experiment.draws))
        found.append(f"token seed{'s' * (len(experiment.draws) > 1)} {given} instead of {', '.join(map(str, draws))}")
    return found


def _list_missing(experiment: Experiment) -> list[str]:
    """Rows and backbones of the paper's table that are left out."""
    table, found = experiment.table, []
    backbones = [name for name in table.backbones if name not in experiment.backbones]
    rows = [
        (backbone, method)
        for backbone in experiment.backbones
        for method in table.methods(backbone)
        if method not in experiment.methods(backbone)
    ]
    total = sum(len(table.methods(backbone)) for backbone in experiment.backbones)
    found += [f"{len(rows)} of {total} rows left out"] if rows else []
    found += [f"{len(backbones)} of {len(table.backbones)} backbones left out"] if backbones else []
    return found


def _notes(experiment: Experiment) -> list[str]:
    notes = [_NOTES[experiment.name]] if experiment.name in _NOTES else []
    if "LLM rank" in experiment.table.columns and not experiment.options.judges:
        notes.append("LLM rank needs judges: --judge MODEL@URL.")
    if any(UMAP_SETTING in experiment.methods(backbone) for backbone in experiment.backbones):
        notes.append(_note_umap())
    return notes + [note for name in experiment.backbones if (note := _note_accuracy(experiment, name))]


def _note_umap() -> str:
    if not optional.is_installed("umap"):
        return f"The row {UMAP_SETTING} is left out: it needs `pip install 'elude-steer[umap]'`."
    return f"UMAP reduces to {UMAP} dimensions, a number of ours: the paper does not say how many."


def _note_accuracy(experiment: Experiment, backbone: str) -> str | None:
    """What tells the classes for the accuracy of a backbone; None where the table has none, or nothing did."""
    source = accuracy_source(experiment.setup(backbone)) if "accuracy" in experiment.table.columns else None
    if source is None:
        return None
    if source == PROBE:
        return (
            f"Accuracy of {backbone}: a linear probe on the mean of the tokens, and no head as in the paper, so there "
            f"is no difference to it. --head {backbone}=MODEL takes a head."
        )
    head = experiment.options.heads.get(backbone)
    return f"Accuracy of {backbone}: {source if head is None else f'head {_short(head)}'}."


def _edit_notes(edits: Any, options: ReproduceOptions) -> list[str]:
    notes = []
    if any(edit.paper is not None and edit.paper.settings is None for edit in edits):
        notes.append("The paper gives no settings for the two edits of the dog; those here are ours.")
    if needs_build(edits, options):
        notes.append(
            "The paper gives neither the images nor the cluster sizes nor the prompt of this model; the recipe "
            "llava-onevision-0.5b-unique marks what is ours."
        )
    count = image_set(options.images, limit=options.limit).length if options.images is not None else None
    notes += [f"The atlas was built from {count:,} images."] if count and needs_build(edits, options) else []
    return notes
