"""An atlas's card: what it is, how it was made, how to load it, for whoever finds it on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elude_steer.atlas.labels import Labels
from elude_steer.method.fast_hdbscan import APPROXIMATION


def render_card(about: Mapping[str, Any], units: torch.Tensor, dead: torch.Tensor, labels: Labels | None) -> str:
    """The model card of an atlas as Markdown.

    Args:
        about: the atlas's manifest.
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
    return (
        f"---\nlibrary_name: elude_steer\nbase_model: {model.get('id')}\ntags: [steering]\n---\n\n"
        f"# {name}\n\nSub-units of layer `{about.get('layer')}` of `{model.get('id')}` (revision "
        f"{model.get('revision') or 'not pinned'}), split by elude_steer without changing the model.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```python\nimport elude_steer as es\n\n"
        f'atlas = es.Atlas.load("{name}")  # this folder or its Hub id\n```\n\n'
        "The whole recipe stands in `manifest.json` under `spec`.\n"
    )


def _describe_labels(labels: Labels | None) -> str:
    if labels is None:
        return "none"
    return f"{len(labels.counts)} of {len(labels.vocabulary)} words, by {labels.about.get('scorer')}"
