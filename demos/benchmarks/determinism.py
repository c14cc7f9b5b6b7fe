"""Build one atlas in several ways and compare the bits: threads, processes, chunk sizes, file order, batch size.

    python demos/benchmarks/determinism.py [--backend fast] [--spec SPEC --images FOLDER] [--json OUT]

Without a spec it makes a small LLaVA-OneVision with random weights and images for it; with the backend `fast` its layer
is wide enough that products are approximated.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elude_steer as es
from elude_steer.atlas.build import stages, token_store
from elude_steer.method.fast_hdbscan import EXACT_DIMENSIONS
from elude_steer.recipe_files import load_spec
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, SplitSpec, TokensSpec
from tests.helpers.tiny import save_images, save_llava


def small_spec(folder: Path, backend: str) -> tuple[AtlasSpec, Path]:
    """The spec of a small atlas, and the folder of its images."""
    mlp = 2 * EXACT_DIMENSIONS if backend == "fast" else 512
    spec = AtlasSpec(
        "small",
        ModelSpec(str(save_llava(folder / "model", side=96, patch=12, width=128, mlp=mlp)), "layers.1.mlp.fc2"),
        tokens=TokensSpec(per_image=8),
        clusters=ClustersSpec(top_k=2000, min_cluster_size=30, min_samples=10, backend=backend),
        split=SplitSpec(winner_rule="gap"),
    )
    return spec, save_images(folder / "images", 400)


def agreement(one: es.Atlas, other: es.Atlas) -> tuple[float, float]:
    """Fraction of units with equally many sub-units, and fraction of equal bits among the sub-units of those."""
    same, bits = 0, []
    for unit in range(one.d_out):
        a, b = one.sub_units_of(unit), other.sub_units_of(unit)
        if len(a) == len(b):
            same += 1
            bits.append((one.members(list(a)) == other.members(list(b))).float().mean())
    return same / one.d_out, float(torch.stack(bits).mean()) if bits else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="exact", choices=["exact", "fast", "hdbscan"])
    parser.add_argument("--spec", help="name or path of an atlas spec")
    parser.add_argument("--images", type=Path, help="folder of images for the spec")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec, images = (
            (load_spec(options.spec), options.images) if options.spec else small_spec(folder, options.backend)
        )
        copies = folder / "copies"
        for path in sorted(images.rglob("*.*"), reverse=True):
            (copies / path.relative_to(images)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copies / path.relative_to(images))
        rows, reference = [], None
        size = spec.tokens.batch_size
        variants = {
            "one thread": {"threads": 1},
            "the same again": {"threads": 1},
            "three threads": {"threads": 3},
            "two processes": {"processes": 2, "threads": 1},
            "files copied in reverse order": {"images": copies},
            "shards of one batch": {"shard": size},
            "top-k in chunks of 1,024": {"chunk": 1},
            f"batch size {size * 2} instead of {size}": {"settings": [f"tokens.batch_size={size * 2}"]},
            f"batch size 1 instead of {size}": {"settings": ["tokens.batch_size=1"]},
        }
        for number, (variant, change) in enumerate(variants.items()):
            shard, chunk = change.pop("shard", 64), change.pop("chunk", 8)
            stages.SHARD_IMAGES = shard
            token_store._blocks_that_fit = lambda weight, chunk=chunk: chunk
            start = time.perf_counter()
            defaults = {
                "images": images,
                "out": folder / f"atlas-{number}",
                "work": folder / f"work-{number}",
                "quiet": True,
            }
            atlas = es.build(spec, **{**defaults, **change})
            seconds = time.perf_counter() - start
            bits = (atlas.folder / "memberships.safetensors").read_bytes()
            reference = reference or (atlas, bits)
            units, equal = agreement(reference[0], atlas)
            rows.append([variant, bits == reference[1], units, equal, seconds])
    print("| variant | same bytes | units with equally many sub-units | equal bits in those | seconds |")
    print("|---|---|---|---|---|")
    for variant, same, units, equal, seconds in rows:
        print(f"| {variant} | {'yes' if same else 'no'} | {units:.1%} | {equal:.2%} | {seconds:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
