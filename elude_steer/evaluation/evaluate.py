"""Measure an atlas: faithfulness, monosemanticity, geometry of the dictionary and efficiency, against the raw units.

Images are read one batch at a time, and one pass of the tower serves all measures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.pipeline import load_tower
from elude_steer.atlas.reference_images import check_source
from elude_steer.errors import EludeSteerWarning, ImageError
from elude_steer.evaluation.measures import MEASURES, check_measures
from elude_steer.evaluation.measures.classifier_head import head_accuracy
from elude_steer.evaluation.measures.efficiency import measure_costs
from elude_steer.evaluation.measures.faithfulness import R2, caption_agreement
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.monosemanticity import Peaks, mean_percent
from elude_steer.evaluation.measures.stability import stability
from elude_steer.evaluation.report import MS_ROW, R2_ROW, Evaluation, Row
from elude_steer.method.layers import layer_parameters, split_layer
from elude_steer.models.hooks import swap_module
from elude_steer.models.images import ImageSet, Item, image_set
from elude_steer.models.vision import Tower
from elude_steer.models.vlm import Vlm, limit_logits
from elude_steer.specs import ModelSpec
from elude_steer.utils.progress import track
from elude_steer.utils.threads import check_threads


def evaluate(
    atlas: str,
    *,
    images: Any = None,
    limit: int = 500,
    measures: Sequence[str] = MEASURES,
    again: str | None = None,
    model: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    warm_up: int = 10,
    runs: int = 50,
    compiled: bool = False,
    head: str | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], object] = lambda line: None,
) -> Evaluation:
    """Measure an atlas.

    Args:
        atlas: a folder, a name, or a Hub id.
        images: images to measure on, as for a build; by default those of its recipe.
        limit: maximum number of images.
        measures: some of `MEASURES`.
        again: the atlas of another run of the same build, for the stability.
        model: another copy of the model.
        device: where the model runs.
        threads: threads of torch while it computes on a CPU; by default the model's size and the free cores decide.
        warm_up: passes before the efficiency is measured; the paper has 100.
        runs: passes that are timed; the paper has 500.
        compiled: whether to time the model after `torch.compile`, as the paper does.
        head: an image classifier on the same backbone, by folder or Hub id. Images must be in folders named after their
            classes; its accuracy is measured with the original and with the explicit layer.
        trust_remote_code: whether code that comes with the model or the head may run.
        log: called with the name of each step.

    Example:
        >>> evaluation = evaluate("toyland", images="toyland:77001", limit=100)
        >>> evaluation.save(Path("evaluation"))
    """
    measures = tuple(dict.fromkeys(measures))
    check_measures(measures, again, head)
    check_threads(threads)
    loaded, other = Atlas.load(atlas), Atlas.load(again) if again is not None else None
    tower = load_atlas_tower(loaded, model, device, threads, trust_remote_code=trust_remote_code)
    if other is not None:
        other.check(tower.layer, tower.read_stored)
    source = open_images(loaded, images, limit)
    items, r2, peaks = choose_items(source, limit), R2(), dict[str, Peaks]()
    with_r2, with_peaks = "faithfulness" in measures, "monosemanticity" in measures
    rows: list[Row] = []
    with tower.use_threads():
        if with_r2 or with_peaks:
            log("what the layer sees")
            items, r2, peaks = run_tower(loaded, tower, items, with_r2=with_r2, with_peaks=with_peaks)
        scores = {kind: found.scores() for kind, found in peaks.items()}
        silent = [float(found.silent.double().mean()) for found in peaks.values()]
        del peaks  # gigabytes at full size, which must not count as memory of the model
        for name in measures:
            log(name)
            if name == "faithfulness":
                rows += _measure_faithfulness(loaded, tower, items, r2)
                if head is not None:
                    names = [item.id for item in source.items()]
                    shares = head_accuracy(
                        head, loaded, items, names, device=device, trust_remote_code=trust_remote_code
                    )
                    rows.append(Row(name, f"accuracy of '{head}'", *shares))
            elif name == "monosemanticity":
                rows += _measure_monosemanticity(list(scores.values()), silent, len(items))
            elif name == "dictionary":
                rows += _measure_dictionary(loaded, other, str(again), tower)
            else:
                (batch,) = islice(read_batches(items, 8), 1)
                rows += _measure_efficiency(loaded, tower, [image for _, image in batch], warm_up, runs, compiled)
    unit_scores = scores.get("units")
    return Evaluation(loaded, tower, source.name, len(items), tuple(rows), scores.get("sub-units"), unit_scores)


def load_atlas_tower(
    atlas: Atlas,
    model: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> Tower:
    """The model that an atlas was built for, or another copy of it."""
    spec = ModelSpec(**atlas.about["spec"]["model"])
    spec = replace(spec, id=model, revision=None, trust_remote_code=False) if model else spec
    tower = load_tower(spec, device, trust_remote_code=trust_remote_code)
    atlas.check(tower.layer, tower.read_stored)
    return replace(tower, threads=threads)


def open_images(atlas: Atlas, images: Any, limit: int) -> ImageSet:
    """The images to measure on, by default those of the atlas's recipe, if it was built on this machine.

    Of files the set holds all, so that `choose_items` can spread its choice over all folders; of other sources it holds
    the first `limit`.
    """
    spec = atlas.about["spec"]["images"]
    source = check_source(atlas) if images is None else images
    files = isinstance(source, str | Path) and Path(source).exists()
    return image_set(source, split=spec["split"], column=spec["column"], limit=None if files else limit)


def choose_items(source: ImageSet, limit: int) -> list[Item]:
    """Up to `limit` images, evenly spread over a source; none of them is read yet."""
    length = source.length
    chosen = None if length is None or length <= limit else {number * length // limit for number in range(limit)}
    items = list(islice((item for item in source.items() if chosen is None or item.index in chosen), limit))
    if not items:
        raise ImageError(f"{source.name} has no images to measure on.")
    return items


def read_batches(items: Sequence[Item], size: int) -> Iterator[list[tuple[Item, Any]]]:
    """Read images in batches of at most `size`; unreadable ones are left out and named in a warning."""
    skipped: dict[str, str] = {}
    for start in range(0, len(items), size):
        batch = items[start : start + size]
        images = [(item, result[0]) for item in batch if (result := read_item(item, skipped)) is not None]
        if images:
            yield images
    if skipped:
        names = "; ".join(f"{name} ({cause})" for name, cause in list(skipped.items())[:5])
        more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        if len(skipped) == len(items):
            raise ImageError(f"none of the {len(items)} images can be read: {names}{more}.")
        text = f"{len(skipped)} images cannot be read and were left out: {names}{more}"
        warnings.warn(text, EludeSteerWarning, stacklevel=2)


@torch.inference_mode()
def run_tower(
    atlas: Atlas, tower: Tower, items: Sequence[Item], *, with_r2: bool = True, with_peaks: bool = True
) -> tuple[list[Item], R2, dict[str, Peaks]]:
    """Run the tower once over the images, in batches of the same size as when the atlas was built.

    Returns:
        The items that could be read; R2 of the explicit layer against the layer, both in the precision of the model;
        the strongest images of `sub-units`, and of `units` before the split. What is not asked for is empty.
    """
    weight, bias = (tensor.float() for tensor in layer_parameters(tower.layer))
    readable, r2, peaks = list[Item](), R2(), dict[str, Peaks]()
    if with_r2:
        layer = _as_linear(tower.layer)
        explicit = split_layer(layer, atlas.members().to(tower.device), atlas.units.to(tower.device))
    if with_peaks:
        sub_units = atlas.sub_units(range(len(atlas)), tower.layer)
        peaks = {"sub-units": Peaks(len(atlas), len(weight)), "units": Peaks(len(weight), len(weight))}
    size = int(atlas.about["spec"]["tokens"]["batch_size"])
    for batch in track(read_batches(items, size), "encoding", "batches", -(-len(items) // size)):
        readable += [item for item, _ in batch]
        for tiles in tower.encode([image for _, image in batch]):  # (tiles, tokens, d_in)
            q = tiles[:, tower.token_indices(tiles.shape[1]).to(tiles.device)].flatten(0, 1)
            if with_r2:
                inputs = q.to(layer.weight.dtype)
                r2.add(layer(inputs).float(), explicit(inputs).float())
            if with_peaks:
                out = q.float() @ weight.T + bias  # (tokens, d_out)
                peaks["sub-units"].add(sub_units.activations(q), out)
                peaks["units"].add(out, out)
    return readable, r2, peaks


@torch.inference_mode()
def _measure_faithfulness(atlas: Atlas, tower: Tower, items: Sequence[Item], r2: R2) -> list[Row]:
    rows = [Row("faithfulness", R2_ROW, r2.value)]
    if isinstance(tower, Vlm):
        explicit = split_layer(tower.layer, atlas.members().to(tower.device), atlas.units.to(tower.device))
        captioned = items[:50]
        images = (item.read()[0] for item in captioned)
        share = caption_agreement(tower, explicit, track(images, "captioning", "images", len(captioned)))
        # The name is a key of ablations.json, so it stays.
        rows.append(Row("faithfulness", f"same caption, {len(captioned)} images", share))
    return rows


def _measure_monosemanticity(scores: Sequence[torch.Tensor], silent: Sequence[float], images: int) -> list[Row]:
    """Rows from the scores of sub-units and units, and the shares of them that never fire."""
    means = [None if values.isnan().all() else mean_percent(values) for values in scores]
    if None in means:
        text = f"{images} images give no MS-Score: it needs at least three that differ; give more of them."
        warnings.warn(text, EludeSteerWarning, stacklevel=3)
    return [Row("monosemanticity", MS_ROW, *means), Row("monosemanticity", "never fire, share", *silent)]


def _measure_dictionary(atlas: Atlas, other: Atlas | None, other_name: str, tower: Tower) -> list[Row]:
    weight = layer_parameters(tower.layer)[0].float().cpu()

    def vectors_by_unit(atlas: Atlas) -> list[torch.Tensor]:
        """The incoming weights of the living sub-units, unit by unit."""
        rows = atlas.sub_units(range(len(atlas)), tower.layer).weight.cpu()
        units = [list(atlas.sub_units_of(unit)) for unit in range(atlas.d_out)]
        return [rows[numbers][~atlas.dead[numbers]] for numbers in units]

    by_unit = vectors_by_unit(atlas)
    alive = torch.cat(by_unit)
    rows = [
        Row("dictionary", "effective rank of the incoming weights", effective_rank(alive), effective_rank(weight)),
        Row("dictionary", "collinearity (1 = duplicates)", collinearity(alive), collinearity(weight)),
    ]
    if other is not None:
        rows.append(Row("dictionary", f"stability against '{other_name}'", stability(by_unit, vectors_by_unit(other))))
    return rows


def _measure_efficiency(
    atlas: Atlas, tower: Tower, images: Sequence[Any], warm_up: int, runs: int, compiled: bool
) -> list[Row]:
    inputs = tower.prepare(images)
    options = limit_logits(tower.model, 1)

    @cache  # made on first use, so that the peak of the bare model does not include it
    def explicit() -> nn.Module:
        return split_layer(tower.layer, atlas.members().to(tower.device), atlas.units.to(tower.device))

    def call() -> None:
        if isinstance(inputs, torch.Tensor):
            tower.model(inputs.to(tower.device))
        else:
            tower.model(**inputs, **options)

    variants: dict[str, Callable[[], Any]] = {
        "bare": nullcontext,
        "explicit": lambda: swap_module(tower.model, tower.layer_name, explicit()),
    }
    compiler = torch.compile if compiled else None
    costs = measure_costs(
        call, variants, warm_up=warm_up, runs=runs, compiler=compiler, device=tower.device, model=tower.model
    )
    split, bare = costs["explicit"], costs["bare"]
    return [
        Row("efficiency", f"explicit layer, ms a batch of {len(images)}", split.milliseconds, bare.milliseconds),
        Row("efficiency", "explicit layer, % more time, pass by pass", 100 * split.slower, 0.0),
        Row("efficiency", "explicit layer, peak MB", split.megabytes, bare.megabytes),
    ]


def _as_linear(layer: nn.Module) -> nn.Linear:
    """The layer itself, or the linear layer that a 1x1 convolution applies at each position of a map."""
    if isinstance(layer, nn.Linear):
        return layer
    weight, bias = layer_parameters(layer)
    linear = nn.Linear(weight.shape[1], len(weight), device=weight.device, dtype=next(layer.parameters()).dtype)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear
