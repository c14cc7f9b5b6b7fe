"""What each setting of a build is worth: one changed at a time, the atlas built, named and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elude_steer.comparing import kept
from elude_steer.documents import override
from elude_steer.errors import SpecError
from elude_steer.evaluating import evaluate
from elude_steer.keys import key_of
from elude_steer.pipeline import build
from elude_steer.shipped import load_spec

# The paper's own questions, for `--vary` without a value.
PAPERS: Mapping[str, Sequence[str]] = {
    "split.winner_rule": ("unique", "gap", "winner", "random"),
    "split.rho_score": ("margin", "ratio"),
    "clusters.selection": ("leaf", "eom"),
}


def ablate(
    spec: str,
    vary: Mapping[str, Sequence[str]],
    work: Path,
    *,
    images: Any = None,
    limit: int = 500,
    settings: Sequence[str] = (),
    told: Callable[[str], object] = lambda line: None,
) -> list[dict[str, Any]]:
    """A row for the spec as it is, and one for every other value of each setting; goes on where it was.

    Args:
        spec: a build spec, by path or name.
        vary: setting -> values, e.g. `{"clusters.min_cluster_size": ["20", "30", "60"]}`.
        work: where stages, atlases and rows are kept.
        images: pictures to measure on, of which the spec should not be made; by default the spec's own.
        limit: how many.
        settings: changes that count for every row.
        told: hears what is being done.
    """
    plain = override(load_spec(spec), settings)
    variants: list[tuple[str, str]] = [("", "")]
    for name, values in vary.items():
        if not values:
            raise SpecError(f"--vary {name} has no values; write {name}=V,V.")
        variants += [(name, value) for value in values]
    specs = {}  # all are read before anything is built, so that mistakes show at once
    for name, value in variants:
        changed = [*settings, *([f"{name}={value}"] if name else [])]
        own = override(load_spec(spec), changed)
        if not name or own != plain:  # the spec as it is has its row already
            specs[name, value] = (changed, key_of("ablation", str(own), str(images), limit)[:12])
    rows = []
    for (name, value), (changed, key) in specs.items():

        def measured(changed: list[str] = changed, key: str = key) -> dict[str, Any]:
            out = work / f"atlas-{key}"
            atlas = build(spec, out=out, work=work / "stages", settings=changed, quiet=True)
            measures = ("faithfulness", "monosemanticity", "dictionary")
            found = evaluate(str(out), images=images, limit=limit, measures=measures)
            numbers = {row.name: row.value for row in found.rows}
            return {"sub-units": len(atlas), "a unit": len(atlas) / atlas.d_out, **numbers}

        told(f"{name}={value}" if name else "the spec as it is")
        rows.append({"setting": name or "as it is", "value": value, **kept(work / f"row-{key}.json", measured)})
    return rows
