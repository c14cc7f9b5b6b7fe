"""What each setting of a build is worth: one changed at a time, the atlas built, named and measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elude_steer.atlas.build.pipeline import build, load_tower
from elude_steer.errors import SpecError
from elude_steer.evaluation.evaluate import evaluate
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.models.images import image_set
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec
from elude_steer.utils import optional
from elude_steer.utils.files import write_file
from elude_steer.utils.fingerprint import make_key, versions
from elude_steer.utils.yaml_schema import override


def questions(spec: AtlasSpec) -> dict[str, list[str]]:
    """What a spec is asked if nobody says: the paper's ablations, sizes at half and double the spec's own."""
    clusters, samples = spec.clusters, spec.clusters.min_cluster_size
    asked = {
        "split.winner_rule": ["unique", "gap", "winner", "random"],
        "split.rho_score": ["margin", "ratio"],
        "clusters.selection": ["leaf", "eom"],
        "clusters.min_cluster_size": [str(max(2, samples // 2)), str(2 * samples)],
        "clusters.min_samples": ["1", str(max(1, samples // 2))],
        "clusters.top_k": [str(max(2, clusters.top_k // 2)), str(2 * clusters.top_k)],
    }
    if optional.is_installed("umap"):
        asked["clusters.umap_components"] = ["32"]
    if isinstance(spec.tokens.per_image, int):
        asked["tokens.per_image"] = [str(max(1, spec.tokens.per_image // 2)), str(2 * spec.tokens.per_image)]
    layer = spec.model.layer
    for block in list(re.finditer(r"(?<=\.)\d+(?=\.)", layer))[-1:]:  # of layers.5.mlp.fc2
        if int(block[0]) > 0:
            asked["model.layer"] = [f"{layer[: block.start()]}{int(block[0]) - 1}{layer[block.end() :]}"]
    return asked


def ablate(
    spec: str,
    vary: Mapping[str, Sequence[str]] | None,
    work: Path,
    *,
    images: Any = None,
    limit: int = 500,
    settings: Sequence[str] = (),
    log: Callable[[str], object] = lambda line: None,
) -> list[dict[str, Any]]:
    """A row for the spec as it is, and one for every other value of each setting; goes on where it was.

    Args:
        spec: a build spec, by path or name.
        vary: setting -> values, e.g. `{"clusters.min_cluster_size": ["20", "30", "60"]}`; None: see `questions`.
        work: where stages, atlases and rows are kept.
        images: pictures to measure on, of which the spec should not be made; by default the spec's own.
        limit: how many.
        settings: changes that count for every row.
        log: called with a line for each step.
    """
    plain = override(load_spec(spec), settings)
    variants: list[tuple[str, str]] = [("", "")]
    for name, values in (vary or questions(plain)).items():
        if not values or not name:
            raise SpecError(f"--vary {name or '='} has no values; write {name or 'clusters.selection'}=V,V.")
        variants += [(name, value) for value in values]
    own_set, source = plain.images, plain.images.source if images is None else images
    shown = None if source is None else image_set(source, split=own_set.split, column=own_set.column)
    pictures = None if shown is None else shown.fingerprint
    specs = {}  # all are read before anything is built, so that mistakes show at once
    for name, value in variants:
        changed = [*settings, *([f"{name}={value}"] if name else [])]
        own = override(load_spec(spec), changed)
        if name and own == plain:  # it has its row already
            log(f"{name}={value} is what the spec says by itself")
        else:
            if own.model != plain.model:
                load_tower(own.model)  # raises where there is no such layer
            specs[name, value] = (changed, make_key("ablation", str(own), pictures, limit, versions())[:12])
    rows = []
    for (name, value), (changed, key) in specs.items():

        def measured(changed: list[str] = changed, key: str = key) -> dict[str, Any]:
            out = work / f"atlas-{key}"
            atlas = build(spec, out=out, work=work / "stages", settings=changed, quiet=True)
            measures = ("faithfulness", "monosemanticity", "dictionary")
            found = evaluate(str(out), images=images, limit=limit, measures=measures)
            numbers = {row.name: row.value for row in found.rows}
            return {"sub-units": len(atlas), "a unit": len(atlas) / atlas.d_out, **numbers}

        log(f"{name}={value}" if name else "the spec as it is")
        rows.append({"setting": name or "as it is", "value": value, **load_or_make(work / f"row-{key}.json", measured)})
    return rows


def write_rows(rows: Sequence[Mapping[str, Any]], about: str, out: Path) -> Path:
    """The rows as a table in Markdown, and as JSON beside it.

    Args:
        rows: what `ablate` gave.
        about: the command, for who reads the page.
        out: the folder.
    """
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "seconds"]
    lines = [
        "# What each setting of a build is worth",
        "",
        f"Written by `{about}`. One setting is changed at a time; the first row is the spec as it is.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [value if isinstance(value := row.get(name, ""), str) else f"{value:,.4g}" for name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    text = json.dumps(list(rows), indent=1)
    write_file(out / "ablations.json", lambda file: file.write(text.encode()))
    write_file(out / "ablations.md", lambda file: file.write("\n".join([*lines, ""]).encode()))
    return out / "ablations.md"
