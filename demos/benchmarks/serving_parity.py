"""Compare the ways into serving engines with the hook: captions and logits side by side, on scenes of toyland.

    python demos/benchmarks/serving_parity.py [--scenes 50] [--out demos/results/serving_parity.md]

From each scene one thing is removed that its caption names. In mode `scale` on every patch, the edit runs as a hook,
as a LoRA adapter loaded by plain peft, as the same adapter without its bias, and as image embeddings for the bare
model. In mode `place`, an edit depends on the image, so only the hook and the embeddings can run it. Logits are those
of the first word of the answer; the largest difference from the hook's is printed. `--out` writes a page with the
summary.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from elude_steer import Plan, Steerer, toyland
from elude_steer.cli.options import hide_loading_bars
from elude_steer.steering.export import export_adapter

SEED = 50_006
SCALE = {"mode": "scale", "nu": "all", "kappa": 24, "gamma": -50.0}
Answer = tuple[str, torch.Tensor]  # the caption, and the logits of its first word
PAGE = """\
# Adapters and embeddings against the hook

Written by `demos/benchmarks/serving_parity.py --out`, on {scenes} scenes of toyland (seed {seed}), in float32 on a CPU,
with torch {torch}, transformers {transformers} and peft {peft}. From each scene one thing is removed that its caption
names. *Adapter*: the edit exported with `--as peft`, loaded by plain peft; *without bias*: the same with `--no-bias`.
*Embeddings*: what `Steerer.embeds` returns, given to the bare model of transformers as `inputs_embeds`. The hook is
what `elude-steer steer` runs. Logits are those of the first word of the answer.

| mode | way | captions equal to the hook's | largest difference of the logits |
|---|---|---|---|
{rows}

{changed}
The hook changes the logits by up to {edit}. Mode `place` depends on the image, so no adapter can hold it.
[Serving](../guides/serving.md) says how to use each way, and what was not tried.
"""


@dataclass
class Summary:
    """How close a way comes to the hook, over all cases."""

    mode: str
    way: str
    equal: int = 0
    cases: int = 0
    error: float = 0.0

    def add(self, answer: Answer, expected: Answer) -> float:
        """Count one case, and return the largest difference of its logits."""
        error = float((answer[1] - expected[1]).abs().max())
        self.equal, self.cases = self.equal + (answer[0] == expected[0]), self.cases + 1
        self.error = max(self.error, error)
        return error


@dataclass
class Comparison:
    """All ways in one mode, and what the edits do."""

    mode: str
    summaries: list[Summary]
    changed: int = 0  # captions that the hook changes
    edit: float = 0.0  # largest change that the hook makes to the logits


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


def compare(mode: str, ways: dict[str, Callable[[Any, Plan], Answer]], bare: Ways, cases: list[Any]) -> Comparison:
    """Print the hook's caption of each case, what differs, and a summary."""
    result = Comparison(mode, [Summary(mode, way) for way in ways])
    print(f"\nmode {mode}\n{'':<13}largest difference of the logits from the hook's")
    print(f"{'removed':<13}{''.join(f'{way:<22}' for way in ways)}caption of the hook")
    for word, image, plan in cases:
        expected, before = bare.hook(image, plan), bare.hook(image, Plan())
        result.changed += expected[0] != before[0]
        result.edit = max(result.edit, float((expected[1] - before[1]).abs().max()))
        answers = {way: run(image, plan) for way, run in ways.items()}
        cells = ""
        for summary in result.summaries:
            error, same = summary.add(answers[summary.way], expected), answers[summary.way][0] == expected[0]
            cells += f"{error:.1e}{'' if same else '  !'}".ljust(22)
        print(f"{word:<13}{cells}{expected[0]}", flush=True)
        for way, (caption, _) in answers.items():
            if caption != expected[0]:
                print(f"{'':<13}! {way}: {caption}")
    print(f"the edit changes {result.changed} of {len(cases)} captions, and logits by up to {result.edit:.2g}")
    for one in result.summaries:
        print(f"{one.way}: {one.equal} of {one.cases} captions equal, logits within {one.error:.1e}")
    return result


def write_page(path: Path, comparisons: list[Comparison], scenes: int) -> None:
    """Write the summary as Markdown."""
    rows = [
        f"| `{one.mode}` | {one.way} | {one.equal} of {one.cases} | {one.error:.1e} |"
        for comparison in comparisons
        for one in comparison.summaries
    ]
    changed = [f"mode `{one.mode}` changes {one.changed} of the {scenes} captions" for one in comparisons]
    edits = [f"{one.edit:.2g} in `{one.mode}`" for one in comparisons]
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    text = f"{' and '.join(changed)}.".capitalize()
    page = PAGE.format(
        rows="\n".join(rows), changed=text, edit=" and ".join(edits), scenes=scenes, seed=SEED, **versions
    )
    path.write_text(page, encoding="utf-8")


def draw_scenes(steerer: Steerer[Any], count: int) -> list[tuple[str, Any]]:
    """Scenes of which the caption names a thing: this thing, and the image."""
    drawn = list(toyland.scenes(seed=SEED, n=count + count // 5 + 5))
    captions = steerer.vlm.caption([scene.image for scene in drawn])
    named = (
        ([word for word in scene.objects if word in caption.split()], scene.image)
        for scene, caption in zip(drawn, captions, strict=True)
    )
    return [(words[0], image) for words, image in named if words][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write the summary to this Markdown file")
    options = parser.parse_args()
    hide_loading_bars()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # peft's own
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(Path(folder))
        scenes = draw_scenes(ways.steerer, options.scenes)
        every = {
            "adapter": ways.adapter,
            "adapter without bias": lambda image, plan: ways.adapter(image, plan, bias=False),
            "embeddings": ways.embeddings,
        }
        comparisons = []
        for mode, settings, some in (("scale", SCALE, every), ("place", {}, {"embeddings": ways.embeddings})):
            plans = {word: ways.steerer.plan(minus=[word], **settings) for word, _ in scenes}
            cases = [(word, image, plans[word]) for word, image in scenes]
            comparisons.append(compare(mode, some, ways, cases))
    if options.out is not None:
        write_page(options.out, comparisons, len(scenes))


if __name__ == "__main__":
    main()
