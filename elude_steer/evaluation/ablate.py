"""Ablations of a build spec: change one setting at a time, then build, label and measure the atlas."""

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


def default_variations(spec: AtlasSpec) -> dict[str, list[str]]:
    """The settings that `ablate` varies by default: the paper's ablations, and half and double of the spec's sizes.

    Sizes that the spec leaves to `auto` are not known here, and are left out.
    """
    smallest, top_k, per_image = spec.clusters.min_cluster_size, spec.clusters.top_k, spec.tokens.per_image
    variations = {
        "split.winner_rule": ["unique", "gap", "winner", "random"],
        "split.rho_score": ["margin", "ratio"],
        "clusters.selection": ["leaf", "eom"],
    }
    if isinstance(smallest, int):
        variations["clusters.min_cluster_size"] = [str(max(2, smallest // 2)), str(2 * smallest)]
        variations["clusters.min_samples"] = ["1", str(max(1, smallest // 2))]
    if isinstance(top_k, int):
        variations["clusters.top_k"] = [str(max(2, top_k // 2)), str(2 * top_k)]
    if optional.is_installed("umap"):
        variations["clusters.umap_components"] = ["32"]
    if isinstance(per_image, int):
        variations["tokens.per_image"] = [str(max(1, per_image // 2)), str(2 * per_image)]
    layer = spec.model.layer
    for block in list(re.finditer(r"(?<=\.)\d+(?=\.)", layer))[-1:]:  # of layers.5.mlp.fc2
        if int(block[0]) > 0:
            variations["model.layer"] = [f"{layer[: block.start()]}{int(block[0]) - 1}{layer[block.end() :]}"]
    return variations


def ablate(
    spec: str,
    vary: Mapping[str, Sequence[str]] | None,
    work: Path,
    *,
    probing: Any = None,
    images: Any = None,
    limit: int = 500,
    settings: Sequence[str] = (),
    device: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], object] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure the spec as it is, and with every other value of each setting; it resumes where it stopped.

    Args:
        spec: a build spec, by path or name.
        vary: setting -> values, such as `{"clusters.min_cluster_size": ["20", "30", "60"]}`; None for
            `default_variations`, nothing for the spec as it is.
        work: where stages, atlases and rows are stored.
        probing: images to build from; by default the spec's.
        images: images to measure on, preferably not those that the atlas is built from; by default the spec's own.
        limit: maximum number of images.
        settings: changes to the spec for all rows.
        device: where the models run.
        threads: threads on a CPU; by default as `build` and `evaluate` choose them.
        trust_remote_code: whether code that comes with the models may run; what the spec says allows nothing.
        log: called with a line for each step.
    """
    plain = override(load_spec(spec), settings)
    variants: list[tuple[str, str]] = [("", "")]
    for name, values in (default_variations(plain) if vary is None else vary).items():
        if not values or not name:
            raise SpecError(f"--vary {name or '='} has no values; write {name or 'clusters.selection'}=V,V.")
        variants += [(name, value) for value in values]
    probing_source = plain.images.source if probing is None else probing
    source = probing_source if images is None else images
    measured_on = None if source is None else image_set(source, split=plain.images.split, column=plain.images.column)
    causes = [None if measured_on is None else measured_on.fingerprint]
    causes += [] if probing is None else [image_set(probing).fingerprint]
    specs = {}  # read all before anything is built, so that mistakes show at once
    for name, value in variants:
        changed = [*settings, *([f"{name}={value}"] if name else [])]
        variant = override(load_spec(spec), changed)
        if name and variant == plain:  # it has its row already
            log(f"{name}={value} is what the spec has anyway")
        else:
            if variant.model != plain.model:
                load_tower(variant.model, trust_remote_code=trust_remote_code)  # raises where there is no such layer
            specs[name, value] = (changed, make_key("ablation", str(variant), *causes, limit, versions())[:12])
    rows = []
    for (name, value), (changed, key) in specs.items():

        def build_and_measure(changed: list[str] = changed, key: str = key) -> dict[str, Any]:
            out = work / f"atlas-{key}"
            options: dict[str, Any] = {"device": device, "threads": threads, "trust_remote_code": trust_remote_code}
            atlas = build(spec, images=probing, out=out, work=work / "stages", settings=changed, **options)
            measures = ("faithfulness", "monosemanticity", "dictionary")
            evaluation = evaluate(
                str(out), images=source if probing is not None else images, limit=limit, measures=measures, **options
            )
            numbers = {row.name: row.value for row in evaluation.rows}
            return {"sub-units": len(atlas), "a unit": len(atlas) / atlas.d_out, **numbers}

        log(f"{name}={value}" if name else "the spec as it is")
        rows.append(
            {"setting": name or "as it is", "value": value, **load_or_make(work / f"row-{key}.json", build_and_measure)}
        )
    return rows


def write_rows(rows: Sequence[Mapping[str, Any]], about: str, out: Path) -> Path:
    """Write the rows as a Markdown table, ablations.md, and as ablations.json; returns the path of the table.

    Args:
        rows: the rows that `ablate` returned.
        about: the command that made them, for the reader.
        out: the folder.
    """
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "seconds"]
    lines = [
        "# What each setting of a build is worth",
        "",
        f"Written by `{about}`. One setting is changed at a time; the first row is the unchanged spec. "
        "Each row is one build with one token seed, so differences of a few tenths mean little.",
        "",
        f"| {' | '.join({'a unit': 'per unit'}.get(name, name) for name in columns)} |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [value if isinstance(value := row.get(name, ""), str) else f"{value:,.4g}" for name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    text = json.dumps(list(rows), indent=1)
    write_file(out / "ablations.json", lambda file: file.write(text.encode()))
    write_file(out / "ablations.md", lambda file: file.write("\n".join([*lines, ""]).encode()))
    return out / "ablations.md"
