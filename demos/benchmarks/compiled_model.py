"""Whether edits act in a compiled model as in the plain one, and whether it stays what it is without them.

    python demos/benchmarks/compiled_model.py [--scenes 50] [--backend inductor] [--parts both tower language all]

Toyland's captioner is compiled by `torch.compile` in four ways: vision tower and language model (each as one graph,
`fullgraph`), either of them alone, and the whole model (which breaks into several graphs, because transformers' own
code of LLaVA-OneVision has places that cannot be compiled). For each: the captions of all scenes under an edit, from
`Steerer.captions` and from `generate` inside `Steerer.applied`, beside those of the uncompiled model; an edit that was
applied before the model was compiled; and, without an edit, the logits beside those of a second copy of the model,
compiled in the same way and never touched by us.
"""

import argparse
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from elude_steer import toyland
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer

PARTS = {
    "both": ("model.vision_tower", "model.language_model"),
    "tower": ("model.vision_tower",),
    "language": ("model.language_model",),
    "all": ("",),
}


def compile_parts(model: Any, parts: str, backend: str) -> None:
    """Compile some parts of a model in place."""
    for name in PARTS[parts]:
        model.get_submodule(name).compile(backend=backend, fullgraph=bool(name), dynamic=True)


@torch.inference_mode()
def read_logits(vlm: Vlm, images: list[Any]) -> list[torch.Tensor]:
    """The logits of each image on its own."""
    return [vlm.model(**vlm.inputs([image])).logits for image in images]


def plan_edits(steerer: Steerer[Any], scenes: list[Any]) -> list[Any]:
    """For each scene a plan that removes the first thing that it shows."""
    return [steerer.plan(minus=[scene.things[0].name]) for scene in scenes]


def caption_applied(steerer: Steerer[Any], images: list[Any], plans: list[Any]) -> list[str]:
    """Captions by `generate` inside `applied`, in batches of five."""
    found = []
    for start in range(0, len(images), 5):
        with steerer.applied(plans[start : start + 5]):
            found += steerer.vlm.caption(images[start : start + 5])
    return found


def measure(parts: str, backend: str, scenes: list[Any], expected: list[str], plain: list[str]) -> dict[str, Any]:
    """Compile a new copy of the model and compare it with the plain model and with an untouched compiled copy."""
    torch.compiler.reset()
    images = [scene.image for scene in scenes]
    steerer, other = Steerer.load("toyland"), Vlm.load("toyland/captioner")
    plans = plan_edits(steerer, scenes)
    start = time.perf_counter()
    for vlm in (other, steerer.vlm):
        vlm.caption(images[:1])  # in its first call, transformers adds hooks of its own, which cannot be compiled
    compile_parts(other.model, parts, backend)
    reference = read_logits(other, images[:5])
    with steerer.applied(plans[:5]):  # before it is compiled
        compile_parts(steerer.vlm.model, parts, backend)
        first = steerer.vlm.caption(images[:5])
    before = read_logits(steerer.vlm, images[:5])
    captions = steerer.captions(images, [[plan, None] for plan in plans])
    applied = caption_applied(steerer, images, plans)
    after = read_logits(steerer.vlm, images[:5])
    same = [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(reference, before, after, strict=True)]
    return {
        "compiled": parts,
        "scenes": len(images),
        "edited captions equal to the plain model's (captions)": sum(
            a == b for (a, _), b in zip(captions, expected, strict=True)
        ),
        "edited captions equal to the plain model's (applied)": sum(
            a == b for a, b in zip(applied, expected, strict=True)
        ),
        "applied before compiling, of 5": sum(a == b for a, b in zip(first, expected[:5], strict=True)),
        "unedited captions equal to the plain model's": sum(a == b for (_, a), b in zip(captions, plain, strict=True)),
        "captions that the edit changes": sum(a != b for a, b in zip(expected, plain, strict=True)),
        "logits without edit equal to an untouched compiled copy's, of 5": sum(same),
        "those that differ (plain, captions, applied)": [
            three for three in zip(expected, (one for one, _ in captions), applied, strict=True) if len(set(three)) > 1
        ],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # transformers' cache (empty, filled once, grown), a batch of one or more, and two copies of the model ask for more
    # graphs than the eight after which torch gives up.
    torch._dynamo.config.recompile_limit = 64
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    scenes = [scene for scene in toyland.scenes(seed=77_001, n=2 * options.scenes) if scene.things][: options.scenes]
    steerer = Steerer.load("toyland")
    images = [scene.image for scene in scenes]
    pairs = steerer.captions(images, [[plan, None] for plan in plan_edits(steerer, scenes)])
    rows = []
    for parts in options.parts:
        rows.append(measure(parts, options.backend, scenes, [a for a, _ in pairs], [b for _, b in pairs]))
        print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()) + "\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
