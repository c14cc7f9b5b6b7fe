"""How pure toyland's sub-units are, and whether their labels are correct.

    python demos/benchmarks/toyland_purity.py [--quick]

It uses held-out scenes, where the truth about every patch is known: a unit or sub-unit is clean if at least 60 % of its
100 most active patches show one thing, an object or a place. It compares the paper's rule, ours, a random split into
equally many parts, and the units themselves, over three seeds of the token sample. Prints a table and writes
purity.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

import elude_steer as es
from elude_steer import toyland
from elude_steer.evaluation.measures.purity import CLEAN, dominant_concepts
from elude_steer.method.layers import layer_parameters
from elude_steer.toyland.scenes import CLUTTER

HELD_OUT = 77_001  # neither training nor building uses this seed


def encode_held_out(vlm: es.Vlm, count: int) -> tuple[torch.Tensor, np.ndarray]:
    """The layer's inputs for all patches of some scenes, `(patches, d_in)`, and what each patch shows."""
    inputs, shown = [], []
    for scene in toyland.scenes(HELD_OUT, count):
        q = vlm.encode([scene.image])[0]  # (tiles, patches, d_in)
        boxes = vlm.grid(scene.image.size).boxes
        inputs.append(q.flatten(0, 1))
        shown += scene.names_at(boxes.reshape(-1, 4))
    return torch.cat(inputs), np.array(shown)


def row_purity(
    weight: torch.Tensor, bias: torch.Tensor, inputs: torch.Tensor, shown: np.ndarray
) -> list[tuple[str, float]]:
    """For each row, what most of its most active patches show, and the fraction that does."""
    return dominant_concepts((q @ weight.T + bias for q in inputs.split(4096)), shown)


def summarize(rows: list[tuple[str, float]]) -> dict[str, float]:
    """Mean purity, fraction of clean rows, and how many objects and places have a clean row."""
    clean = [name for name, share in rows if share >= CLEAN and name != CLUTTER]
    return {
        "rows": len(rows),
        "mean": float(np.mean([share for _, share in rows])),
        "clean": len(clean) / len(rows),
        "objects": len(set(clean) & set(toyland.OBJECTS)),
        "places": len(set(clean) & set(toyland.PLACES)),
    }


def correct_labels(atlas: es.Atlas, rows: list[tuple[str, float]], alive: np.ndarray) -> float:
    """Fraction of clean sub-units whose label is what they show."""
    pairs = [
        (atlas.labels[int(i)], name)
        for i, (name, share) in zip(alive, rows, strict=True)
        if share >= CLEAN and name != CLUTTER
    ]
    return float(np.mean([label == name for label, name in pairs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use one token seed and 100 scenes")
    parser.add_argument("--work", type=Path, help="folder that keeps the stages [default: a temporary one]")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="change a setting of the spec")
    parser.add_argument("--out", type=Path, default=Path("purity.json"))
    options = parser.parse_args()
    vlm = es.Vlm.load("toyland/captioner")
    inputs, shown = encode_held_out(vlm, 100 if options.quick else 500)
    weight, bias = layer_parameters(vlm.layer)
    table: dict[str, list[dict[str, float]]] = {"raw units": [summarize(row_purity(weight, bias, inputs, shown))]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in (42,) if options.quick else (42, 123, 999):
            for rule in ("random", "unique", "gap"):
                atlas = es.build(
                    "toyland",
                    out=Path(folder) / f"{rule}-{seed}",
                    work=options.work or Path(folder) / "work",
                    settings=[f"tokens.seed={seed}", f"split.winner_rule={rule}", *options.settings],
                    quiet=True,
                )
                alive = (~atlas.dead).nonzero()[:, 0]
                rows = row_purity(*atlas.parameters(alive, weight, bias), inputs, shown)
                line = summarize(rows) | {"named rightly": correct_labels(atlas, rows, alive.numpy())}
                table.setdefault(rule, []).append(line)
                print(f"{rule:>8} seed {seed}: " + ", ".join(f"{k} {v:.3g}" for k, v in line.items()), flush=True)
    means = {name: {k: float(np.mean([line[k] for line in lines])) for k in lines[0]} for name, lines in table.items()}
    print(f"\n{'':>10} {'rows':>6} {'clean':>6} {'mean':>6} {'objects':>8} {'places':>7} {'named rightly':>14}")
    for name, line in means.items():
        correct = f"{line['named rightly']:14.3f}" if "named rightly" in line else f"{'':>14}"
        print(
            f"{name:>10} {line['rows']:6.0f} {line['clean']:6.3f} {line['mean']:6.3f} {line['objects']:8.1f} "
            f"{line['places']:7.1f} {correct}"
        )
    options.out.write_text(json.dumps({"means": means, "runs": table}, indent=1))


if __name__ == "__main__":
    main()
