"""An atlas's card: what it is, how it was made, how to load it, for whoever finds it on the Hub."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elude_steer.atlas.labels import Labels
from elude_steer.method.fast_hdbscan import APPROXIMATION
from elude_steer.utils.hub import find_base_model, front_matter

CAPTIONING, FEATURES = "image-text-to-text", "image-feature-extraction"  # the Hub's names of tasks
_DATASET = ("hf:", "hf-stream:")


def render_card(about: Mapping[str, Any], units: torch.Tensor, dead: torch.Tensor, labels: Labels | None) -> str:
    """The model card of an atlas as Markdown.

    Args:
        about: the atlas's manifest; its `evaluation`, if there is one, holds measured results.
        units: `(S,)`, the unit of each sub-unit.
        dead: `(S,)` bool, the sub-units that own no dimension.
        labels: of the sub-units; None if there are none.
    """
    model, name, d_out = about.get("model", {}), about.get("name", "atlas"), int(about["d_out"])
    rows = {
        "units": d_out,
        "sub-units": f"{len(units)} ({len(units) / d_out:.2f} a unit)",
        "units left whole": int((torch.bincount(units, minlength=d_out) == 1).sum()),
        "sub-units that own nothing": int(dead.sum()),
        "input dimensions": about["d_in"],
        "instances": f"{about.get('instances')} from {about.get('images')} images",
        "clustering": f"fast: {APPROXIMATION}" if about.get("backend") == "fast" else about.get("backend"),
        "labels": _describe_labels(labels),
        "built with": ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    steer = f'\nprint(es.steer("photo.jpg", minus=["dog"], atlas="{name}").caption)' if _has_captions(about) else ""
    return (
        f"{_metadata(about)}\n"
        f"# {name}\n\nSub-units of layer `{about.get('layer')}` of `{model.get('id')}` (revision "
        f"{model.get('revision') or 'not pinned'}), split by elude_steer without changing the model.\n\n"
        f"| | |\n|---|---|\n{table}\n{_describe_evaluation(about.get('evaluation'))}\n"
        "```python\nimport elude_steer as es\n\n"
        f'atlas = es.Atlas.load("{name}")  # this folder or its Hub id{steer}\n```\n\n'
        "The whole recipe stands in `manifest.json` under `spec`. In a git repository, put `* -text` into "
        "`.gitattributes`: changed line ends count as damage.\n"
    )


def describe_measurement(images: str, image_count: int, version: str, rows: Sequence[Mapping[str, Any]]) -> dict:
    """The results of an evaluation as a manifest keeps them for the card.

    Times and memory depend on the machine, and so they are left out.

    Args:
        images: name of the image source; of a folder only the last part is kept.
        image_count: number of images.
        version: of this package.
        rows: the numbers, as `report.Row` has them.
    """
    source = images if images.startswith((*_DATASET, "toyland:")) else Path(images).name
    kept = [dict(row) for row in rows if row["measure"] != "efficiency" and _is_number(row["value"])]
    return {"images": source, "image_count": image_count, "elude_steer": version, "rows": kept}


def _metadata(about: Mapping[str, Any]) -> str:
    model, spec, images = about.get("model", {}), about.get("spec", {}), about.get("spec", {}).get("images", {})
    source = str(images.get("source") or "")
    base = find_base_model(str(model["id"]), str(model.get("kind"))) if model.get("id") else None
    return front_matter(
        license=spec.get("license"),
        library_name="elude_steer",
        pipeline_tag=_task(about),
        base_model=base,
        # The Hub would take it for a fine-tuned copy of the weights; an atlas works only together with its model.
        base_model_relation=base and "adapter",
        datasets=[source.partition(":")[2]] if source.startswith(_DATASET) else None,
        tags=["interpretability", "steering"] if _has_captions(about) else ["interpretability"],
        **_model_index(about),
    )


def _model_index(about: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelCardData` for the results; empty if nothing was measured."""
    from huggingface_hub import EvalResult

    evaluation = about.get("evaluation")
    if not evaluation or not evaluation["rows"]:
        return {}
    source = evaluation["images"]
    results = [
        EvalResult(
            task_type=_task(about),
            dataset_type=source.partition(":")[2 if source.startswith(_DATASET) else 0],
            dataset_name=f"{evaluation['image_count']} images of {source}",
            metric_type=re.sub(r"\W+", "_", row["name"].lower()).strip("_"),
            metric_name=row["name"],
            metric_value=float(f"{row['value']:.6g}"),
        )
        for row in evaluation["rows"]
    ]
    return {"model_name": about.get("name", "atlas"), "eval_results": results}


def _describe_evaluation(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return ""
    lines = [
        f"| {row['name']} | {row['value']:.4g} | {'' if row.get('units') is None else format(row['units'], '.4g')} |"
        for row in evaluation["rows"]
    ]
    return (
        f"\nMeasured on {evaluation['image_count']:,} images of {evaluation['images']}, by elude_steer "
        f"{evaluation['elude_steer']}:\n\n| | sub-units | units before the split |\n|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def _describe_labels(labels: Labels | None) -> str:
    if labels is None:
        return "none"
    return f"{len(labels.counts)} of {len(labels.vocabulary)} words, by {labels.about.get('scorer')}"


def _has_captions(about: Mapping[str, Any]) -> bool:
    return bool(about.get("model", {}).get("kind") == "vlm")


def _task(about: Mapping[str, Any]) -> str:
    return CAPTIONING if _has_captions(about) else FEATURES


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
