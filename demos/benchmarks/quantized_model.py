"""Whether edits act in a model with a quantised language model as a plain hook would, and leave it alone otherwise.

    python demos/benchmarks/quantized_model.py [--scenes 50] [--quantize torchao-int8 bitsandbytes-4bit …] [--json OUT]

Toyland's captioner is quantised in each way while it loads (needs the extra `quantize`). The reference is a second copy
that transformers alone loads with the same configuration. Without an edit, both must give the same logits to the bit.
With an edit (mode scale, on all patches: a linear change of the layer), the reference gets it by a forward hook of
torch on its target layer, and both must give the same captions.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from elude_steer import toyland
from elude_steer.models.execution.quantized import QUANTIZERS, make_config, modules_to_keep
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import resolve_id

EDIT: dict[str, Any] = {"mode": "scale", "gamma": -10, "kappa": 100, "nu": "all"}


@torch.inference_mode()
def measure(name: str, scenes: list[Any], plain: Steerer[Any]) -> dict[str, Any]:
    """Compare a quantised steerer with a quantised copy that transformers loads alone."""
    start = time.perf_counter()
    images = [scene.image for scene in scenes]
    steerer = Steerer.load("toyland", quantize=name)
    config = make_config(name, modules_to_keep(plain.vlm.model), torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(
        resolve_id("toyland/captioner"), dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    ).eval()
    other = Vlm.from_model(model, steerer.vlm.processor)
    layer = other.layer
    same_bits = same = changed = as_plain = 0
    for number, (scene, image) in enumerate(zip(scenes, images, strict=True)):
        plan = steerer.plan(minus=[scene.things[0].name], **EDIT)
        edited, unedited = steerer.captions([image], [[plan, None]])[0]
        if number < 10:
            inputs = other.inputs([image])
            same_bits += torch.equal(steerer.vlm.model(**inputs).logits, model(**inputs).logits)
        prepared = steerer.gather_weights(plan)
        assert prepared is not None
        weight, bias = prepared.weight_change

        def hook(_module: Any, args: Any, output: Any, weight: Any = weight, bias: Any = bias) -> Any:
            return output + F.linear(args[0], weight, bias)

        handle = layer.register_forward_hook(hook)
        try:
            same += other.caption([image])[0] == edited
        finally:
            handle.remove()
        changed += edited != unedited
        as_plain += edited == plain.captions([image], [[plan]])[0][0]
    return {
        "quantize": name,
        "scenes": len(images),
        "logits without edit equal to the untouched copy's, of 10": same_bits,
        "edited captions equal to those by a hook in that copy": same,
        "captions that the edit changes": changed,
        "edited captions equal to the model's in full precision": as_plain,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--quantize", nargs="+", choices=QUANTIZERS, default=list(QUANTIZERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    scenes = [scene for scene in toyland.scenes(seed=77_001, n=2 * options.scenes) if scene.things][: options.scenes]
    plain, rows = Steerer.load("toyland"), []
    for name in options.quantize:
        rows.append(measure(name, scenes, plain))
        print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()) + "\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
