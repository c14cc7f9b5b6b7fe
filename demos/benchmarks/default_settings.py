"""What the default settings of `es.disentangle` give for 20, 200 and 2,000 images.

    python demos/benchmarks/default_settings.py [--images 20 200] [--seed 601] [--json OUT]

It splits the last layer of toyland's vision tower with no settings given, and measures the sub-units on held-out
scenes: *purity* is the share of the 100 most active patches that show one thing, mean over all units or sub-units. The
control is a random split into equally many parts. The constants in `elude_steer/atlas/build/sizes.py` were chosen with
the scenes of seed 501; the table uses others.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from toyland_purity import encode_held_out, row_purity, summarize

import elude_steer as es
from elude_steer import toyland
from elude_steer.method.layers import layer_parameters


def split(vlm: es.Vlm, images: list[Any], rule: str, folder: Path) -> es.Atlas:
    """Split the layer by these images with the default settings."""

    def preprocess(image: Any) -> torch.Tensor:
        return vlm.prepare([image])["pixel_values"][0, 0]  # the tile that shows the whole image

    return es.disentangle(
        vlm.model.get_submodule(vlm.within),
        layer=vlm.layer_name.removeprefix(f"{vlm.within}."),
        images=images,
        preprocess=preprocess,
        split=es.specs.SplitSpec(winner_rule=rule),
        out=folder / rule,
        work=folder / "work",
        quiet=True,
    )


def measure(vlm: es.Vlm, images: list[Any], inputs: torch.Tensor, shown: Any) -> dict[str, Any]:
    """The settings that were used, and the purity of sub-units and of the random split."""
    weight, bias = layer_parameters(vlm.layer)
    with tempfile.TemporaryDirectory() as folder:
        atlases = {rule: split(vlm, images, rule, Path(folder)) for rule in ("unique", "gap", "random")}
    row: dict[str, Any] = {"images": len(images)}
    for rule, atlas in atlases.items():
        alive = (~atlas.dead).nonzero()[:, 0]
        row[rule] = summarize(row_purity(*atlas.parameters(alive, weight, bias), inputs, shown))["mean"]
    about, units = atlases["unique"].about, atlases["unique"].units
    return row | {
        "per_image": about["spec"]["tokens"]["per_image"],
        "top_k": about["spec"]["clusters"]["top_k"],
        "min_cluster_size": about["spec"]["clusters"]["min_cluster_size"],
        "backend": about["backend"],
        "sub-units": len(units),
        "units split": float((torch.bincount(units) > 1).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[20, 200, 2000], help="numbers of scenes")
    parser.add_argument("--seed", type=int, default=601, help="of the scenes that are used for splitting")
    parser.add_argument("--held-out", type=int, default=200, help="number of scenes that are used for measuring")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    vlm = es.Vlm.load("toyland/captioner")
    inputs, shown = encode_held_out(vlm, options.held_out)
    raw = summarize(row_purity(*layer_parameters(vlm.layer), inputs, shown))["mean"]
    scenes = [scene.image for scene in toyland.scenes(options.seed, max(options.images))]
    columns = ("images", "tokens of each", "top_k", "min_cluster_size", "units split", "sub-units")
    print("| " + " | ".join([*columns, "raw units", "random", "unique", "gap"]) + " |\n" + "|---" * 10 + "|")
    rows = []
    for count in options.images:
        row = measure(vlm, scenes[:count], inputs, shown) | {"raw": raw}
        rows.append(row)
        settings = f"{row['per_image']} | {row['top_k']} | {row['min_cluster_size']}"
        purity = " | ".join(f"{row[name]:.3f}" for name in ("raw", "random", "unique", "gap"))
        print(f"| {count:,} | {settings} | {row['units split']:.0%} | {row['sub-units']:,} | {purity} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
