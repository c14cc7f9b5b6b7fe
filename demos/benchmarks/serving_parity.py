"""Compare the ways into serving engines with the hook: captions and logits side by side, on scenes of toyland.

    python demos/benchmarks/serving_parity.py [--scenes 50]

From each scene one thing is removed that its caption names. In mode `scale` on every patch, the edit runs as a hook,
as a LoRA adapter loaded by plain peft, as the same adapter without its bias, and as image embeddings for the bare
model. In mode `place`, an edit depends on the image, so only the hook and the embeddings can run it. Logits are those
of the first word of the answer; the largest difference from the hook's is printed.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from elude_steer import Plan, Steerer, toyland
from elude_steer.cli.options import hide_loading_bars
from elude_steer.steering.export import export_adapter

SCALE = {"mode": "scale", "nu": "all", "kappa": 24, "gamma": -50.0}
Answer = tuple[str, torch.Tensor]  # the caption, and the logits of its first word


class Ways:
    """One steerer and one model for adapters, and the ways to run an edit on them."""

    def __init__(self, folder: Path) -> None:
        self.steerer, self.folder = Steerer.load("toyland"), folder
        self.base = Steerer.load("toyland").vlm.model
        self.model: Any = None  # the base with all adapters so far

    def hook(self, image: Any, plan: Plan) -> Answer:
        """Run the edit in the model."""
        with self.steerer.applied(plan):
            return self._answer(self.steerer.vlm.model, self.steerer.vlm.inputs([image]))

    def embeddings(self, image: Any, plan: Plan) -> Answer:
        """Give edited embeddings to the bare model."""
        inputs, model = self.steerer.vlm.inputs([image]), self.steerer.vlm.model
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        embeds[inputs["input_ids"] == model.config.image_token_id] = self.steerer.embeds(image, plan)
        return self._answer(model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})

    def adapter(self, image: Any, plan: Plan, *, bias: bool = True) -> Answer:
        """Run the edit as an adapter, exported and loaded where it is new."""
        name = f"{plan.key}-{bias}"
        if not (self.folder / name).exists():
            export_adapter(self.steerer, plan, self.folder / name, bias=bias)
            if self.model is None:
                self.model = PeftModel.from_pretrained(self.base, self.folder / name, adapter_name=name)
            else:
                self.model.load_adapter(self.folder / name, adapter_name=name)
        self.model.set_adapter(name)
        return self._answer(self.model, self.steerer.vlm.inputs([image]))

    @torch.inference_mode()
    def _answer(self, model: Any, inputs: Mapping[str, Any]) -> Answer:
        logits = model(**inputs).logits[0, -1]
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=64)[0]
        start = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
        return self.steerer.vlm.processor.tokenizer.decode(tokens[start:], skip_special_tokens=True).strip(), logits


def compare(
    title: str, ways: dict[str, Callable[[Any, Plan], Answer]], cases: list[tuple[str, Any, Plan, str]]
) -> None:
    """Print the hook's caption of each case, what differs, and a summary."""
    equal, errors, changed = dict.fromkeys(ways, 0), {name: [0.0] for name in ways}, 0
    print(f"\n{title}\n{'':<13}largest difference of the logits from the hook's")
    print(f"{'removed':<13}{''.join(f'{name:<18}' for name in ways if name != 'hook')}caption of the hook")
    for word, image, plan, baseline in cases:
        answers = {name: way(image, plan) for name, way in ways.items()}
        caption, logits = answers["hook"]
        changed += caption != baseline
        cells = []
        for name, (own, own_logits) in answers.items():
            equal[name] += own == caption
            errors[name].append(float((own_logits - logits).abs().max()))
            if name != "hook":
                cells.append(f"{errors[name][-1]:.1e}{'' if own == caption else '  !'}")
        print(f"{word:<13}{''.join(f'{cell:<18}' for cell in cells)}{caption}", flush=True)
        for name, (own, _) in answers.items():
            if own != caption:
                print(f"{'':<13}! {name}: {own}")
    print(f"the edit changes {changed} of {len(cases)} captions")
    for name in ways:
        if name != "hook":
            print(f"{name}: {equal[name]} of {len(cases)} captions equal, logits within {max(errors[name]):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=50)
    options = parser.parse_args()
    hide_loading_bars()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # peft's own
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(Path(folder))
        drawn = list(toyland.scenes(seed=50_006, n=options.scenes + options.scenes // 5 + 5))
        captions = ways.steerer.vlm.caption([scene.image for scene in drawn])
        scenes = [
            (named[0], scene.image, caption)
            for scene, caption in zip(drawn, captions, strict=True)
            if (named := [word for word in scene.objects if word in caption.split()])
        ][: options.scenes]
        plans = {word: ways.steerer.plan(minus=[word], **SCALE) for word in {word for word, *_ in scenes}}
        every = {
            "hook": ways.hook,
            "adapter": ways.adapter,
            "adapter, no bias": lambda image, plan: ways.adapter(image, plan, bias=False),
            "embeddings": ways.embeddings,
        }
        compare("mode scale, every patch", every, [(word, image, plans[word], said) for word, image, said in scenes])
        plans = {word: ways.steerer.plan(minus=[word]) for word in plans}
        some = {"hook": ways.hook, "embeddings": ways.embeddings}
        compare("mode place, as shipped", some, [(word, image, plans[word], said) for word, image, said in scenes])


if __name__ == "__main__":
    main()
