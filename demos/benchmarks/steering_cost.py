"""The cost of steering at the size of LLaVA-OneVision 0.5B: operations, time, memory, and a sweep of nine settings.

    python demos/benchmarks/steering_cost.py [--parts memory cost sweep] [--work FOLDER] [--json OUT]

It writes a checkpoint of that size with random weights and an atlas of its last fc2 (see full_size_model.py) to
`--work`, and loads them like any other model. It scales two concepts of 200 sub-units each, on 50 patches per tile
(`nu 50`) or on all (`nu all`), while the model generates 32 tokens for an image of two tiles. `explicit` is the split
layer with all its 9,216 sub-units, as the paper runs it.

memory: every caption has its own process; `bare` loads no atlas and no matcher, `unsteered` loads both.
cost: counts the operations of matrix products, convolutions and attention. The overhead is the time of the steered fc2
minus that of the original fc2, on the image's own input and alternating, as a fraction of the time of a caption.
sweep: compares the library's nine captions with one pass of the tower and, from its output on, nine greedy decodings in
one batch. The naive way makes nine captions, each steered from the image on.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from full_size_model import noise_image, save_atlas, save_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers.modeling_outputs import BaseModelOutput

from elude_steer import Steerer, Vlm
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.method.layers import SplitLinear
from elude_steer.models.hooks import replace_forward, swap_module
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.steering.intervention import make_edited_forward

TOKENS = 32
VARIANTS = ("bare", "nu 50", "nu all", "explicit")
MEMORY_VARIANTS = ("bare", "unsteered", *VARIANTS[1:])
PAPER = "the paper's explicit layer, DINOv2-B/14, expansion 8, batch 256, H100: + 15 % time, + 15 % memory"
# torch's counter knows attention on GPUs only.
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FORMULAS = {ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
Rows = list[tuple[str, float, float | None]]  # name, value, largest allowed value


class Bench:
    """The loaded model and its image; with `bare`, without an atlas."""

    def __init__(self, work: Path, size: tuple[int, int], bare: bool = False) -> None:
        self.steerer: Any = None if bare else Steerer.load(str(work / "atlas"))
        self.vlm = Vlm.load(str(work / "model")) if bare else self.steerer.vlm
        self.vlm.model.generation_config.min_new_tokens = TOKENS  # so that all captions have the same length
        self.kappa, self.nus = (200, (25, 50, 100)) if self.vlm.patch_shape[0] == 27 else (10, (2, 4, 8))
        self.image = noise_image(*size)

    def caption(self) -> str:
        """Caption the image with the model as it is now."""
        return self.vlm.caption([self.image], max_new_tokens=TOKENS)[0]

    def plan(self, **settings: Any) -> Any:
        """A plan that scales two concepts."""
        settings = {"mode": "scale", "kappa": self.kappa, "nu": self.nus[1], **settings}
        return self.steerer.prepare_plan(["dog"], ["biker"], settings=settings)[0]

    def explicit(self) -> SplitLinear:
        """The layer split into all its sub-units."""
        return SplitLinear(self.vlm.layer, self.steerer.atlas.members(), self.steerer.atlas.units)

    def apply(self, name: str) -> AbstractContextManager[Any]:
        """Apply a variant inside the context."""
        if name == "explicit":
            return swap_module(self.vlm.model, self.vlm.layer_name, self.explicit())
        plans = {"nu 50": self.plan, "nu all": lambda: self.plan(nu="all")}
        return self.steerer.applied(plans[name]()) if name in plans else nullcontext()


def measure_seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and its seconds."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def count_operations(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and its operations in units of 1e9."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        return work(), counter.get_total_flops() / 1e9


def compare_variants(what: str, unit: str, values: dict[str, float], limits: dict[str, float]) -> Rows:
    """The value of each variant, and by how many percent it exceeds that of the bare model."""
    rows: Rows = [(f"{what}, {name}, {unit}", value, None) for name, value in values.items()]
    more = {name: 100 * (value / values["bare"] - 1) for name, value in values.items() if name != "bare"}
    return rows + [(f"{what}, {name}, % more", value, limits.get(name)) for name, value in more.items()]


def memory(options: argparse.Namespace) -> Rows:
    """Peak memory of processes that make one caption each."""
    size = map(str, options.image_size)
    command = [sys.executable, __file__, "--work", str(options.work), "--image-size", *size, "--alone"]
    peaks: dict[str, list[float]] = {name: [] for name in MEMORY_VARIANTS}
    for _ in range(options.rounds):
        for name, values in peaks.items():
            values.append(float(subprocess.run([*command, name], check=True, capture_output=True).stdout))
    return compare_variants(
        "peak memory", "GB", {name: median(values) for name, values in peaks.items()}, {"nu 50": 2, "nu all": 2}
    )


def caption_peak(options: argparse.Namespace) -> float:
    """The peak memory of this process in GB after one caption, which needs more than loading."""
    bench = Bench(options.work, options.image_size, bare=options.alone == "bare")
    with bench.apply(options.alone):
        bench.caption()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def cost(bench: Bench, rounds: int) -> Rows:
    """Operations of a caption, and the overhead of fc2 as a fraction of its time."""
    operations = {}
    for name in VARIANTS:
        with bench.apply(name):
            operations[name] = count_operations(bench.caption)[1]
    caption_seconds = median(measure_seconds(bench.caption)[1] for _ in range(rounds))
    rows = compare_variants("operations", "1e9", operations, {"nu 50": 0.5, "nu all": 0})
    rows += [("preparing a plan, s", measure_seconds(lambda: bench.steerer.gather_weights(bench.plan()))[1], None)]
    rows += [("caption, s", caption_seconds, None)]
    seconds = fc2_seconds(bench)
    for name, values in seconds.items():
        more = median(value - bare for value, bare in zip(values, seconds["bare"], strict=True))
        rows.append((f"fc2, {name}, ms", 1e3 * median(values), None))
        rows.append((f"overhead, {name}, % of a caption", 100 * more / caption_seconds, 1 if "nu" in name else None))
    return rows


@torch.inference_mode()
def fc2_seconds(bench: Bench, runs: int = 30) -> dict[str, list[float]]:
    """Seconds of fc2 in each variant; the variants alternate."""
    vlm = bench.vlm
    q = run_prefix(vlm, [bench.image]).q[0]  # (tiles, patches, d_in)
    explicit = bench.explicit()
    plans = {"nu 50": bench.plan(), "nu all": bench.plan(nu="all")}
    forwards: dict[str, Any] = {"bare": lambda original, x: original(x), "explicit": lambda _original, x: explicit(x)}
    forwards |= {
        name: make_edited_forward(vlm.layer, [bench.steerer.gather_weights(plan)], lambda x: [x], [None])
        for name, plan in plans.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _, name in itertools.product(range(runs + 2), VARIANTS):  # the first two runs warm up
        with replace_forward(vlm.layer, forwards[name]):
            seconds[name].append(measure_seconds(lambda: vlm.layer(q))[1])
    return {name: values[2:] for name, values in seconds.items()}


def sweep(bench: Bench, rounds: int) -> Rows:
    """Compare the library's sweep of nine settings with its lower bound and with the naive way."""
    points = grid_points({"gamma": (-5, -15, -50), "nu": bench.nus})

    def run_sweep() -> list[str]:
        plans = [bench.plan(**point) for point in points]
        return bench.steerer.captions([bench.image], [plans], max_new_tokens=TOKENS)[0]

    bench.caption()  # warm up
    (captions, sweep_operations), first = measure_seconds(
        lambda: count_operations(run_sweep)
    )  # the first round counts too
    (prefix, tower_operations), second = measure_seconds(lambda: count_operations(lambda: run_tower(bench)))
    (plain, decoding_operations), third = measure_seconds(
        lambda: count_operations(lambda: decode(bench, *prefix, len(points)))
    )
    works = (run_sweep, lambda: run_tower(bench), lambda: decode(bench, *prefix, len(points)))
    seconds = [[first, second, third]] + [[measure_seconds(work)[1] for work in works] for _ in range(rounds - 1)]
    naive, start = [], time.perf_counter()
    for point in points:
        with bench.steerer.applied(bench.plan(**point)):
            naive.append(bench.caption())
    names = ("the sweep", "a tower's pass", "nine decodings")
    return [
        ("nine captions, naive, s", time.perf_counter() - start, None),
        *((f"{name}, s", median(column), None) for name, column in zip(names, zip(*seconds, strict=True), strict=True)),
        ("sweep / (pass + decodings), operations", sweep_operations / (tower_operations + decoding_operations), None),
        ("sweep / (pass + decodings), time", median(a / (b + c) for a, b, c in seconds), 1.0),
        ("captions of the sweep equal to the naive", sum(a == b for a, b in zip(captions, naive, strict=True)), None),
        ("captions of the sweep that differ", len(set(captions)), None),
        ("decodings equal to the bare caption", plain.count(bench.caption()), None),
    ]


@torch.inference_mode()
def run_tower(bench: Bench) -> tuple[Any, torch.Tensor]:
    """The model's inputs for the image, and the tower's output, `(tiles, patches, width)`."""
    inputs, part = bench.vlm.inputs([bench.image]), bench.vlm.model.get_submodule(bench.vlm.within)
    return inputs, part(inputs["pixel_values"].flatten(0, 1), output_hidden_states=True).hidden_states[-1]


def decode(bench: Bench, inputs: Any, features: torch.Tensor, count: int) -> list[str]:
    """Greedy captions of a batch with the same image `count` times, from the tower's output."""
    rows = {name: value.repeat_interleave(count, 0) for name, value in inputs.items()}
    output = BaseModelOutput(hidden_states=(features.repeat(count, 1, 1),))
    with replace_forward(bench.vlm.model.get_submodule(bench.vlm.within), lambda *_args, **_kwargs: output):
        return bench.vlm.answer(rows, TOKENS)


PARTS = {"memory": memory, "cost": cost, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--image-size", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="size of the image [default: one tile]"
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the checkpoint for the next run")
    parser.add_argument("--tiny", action="store_true", help="use a small model, to try the script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=MEMORY_VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.image_size = options.image_size or ([56, 56] if options.tiny else [384, 384])
    if options.alone:
        print(caption_peak(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        save_atlas(options.work / "atlas", save_model(options.work / "model", tiny=options.tiny))
        load_bench = cache(lambda: Bench(options.work, options.image_size))
        rows: Rows = []
        for part in options.parts:
            found = PARTS[part](*([options] if part == "memory" else [load_bench(), options.rounds]))
            for name, value, limit in found:
                verdict = "" if limit is None else f"  at most {limit:g}: {'yes' if value <= limit else 'NO'}"
                print(f"{name:<44}{value:>12.3f}{verdict}", flush=True)
            rows += found
    print(PAPER)
    if options.json:
        machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        listed = [{"name": name, "value": value, "at most": limit} for name, value, limit in rows]
        options.json.write_text(json.dumps({**machine, "paper": PAPER, "rows": listed}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
