"""What steering costs at the size of LLaVA-OneVision 0.5B: operations, time, memory, and a sweep of nine settings.

    python demos/benchmarks/steering_cost.py [--parts memory cost sweep] [--work FOLDER] [--json OUT]

A checkpoint of that size with random weights and an atlas of its last fc2 (see full_size_model.py) are written to
`--work` and loaded as any other. Two words of 200 sub-units each are scaled, on 50 patches a tile (`nu 50`) or on all
(`nu all`), while 32 tokens are written about a picture of two tiles. `explicit` is the layer with all its 9,216
sub-units, as the paper runs it.

memory: every caption has a process of its own; `bare` loads no atlas and no matcher, `unsteered` loads them.
cost: operations are those of matrix products, convolutions and attention. The overhead is fc2 as steered less fc2 as it
is, the ways taking turns on the picture's own input, as a share of a whole caption.
sweep: the library's nine captions beside one pass of the tower and, from its output on, nine greedy decodings in one
batch. The naive way is nine captions, each steered from the picture on.
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
from full_size_model import picture, save_atlas, save_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers.modeling_outputs import BaseModelOutput

from elude_steer import Steerer, Vlm
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.method.layers import SplitLinear
from elude_steer.models.hooks import replace_forward, swap_module
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.steering.intervention import make_edited_forward

TOKENS = 32
WAYS = ("bare", "nu 50", "nu all", "explicit")
ALONE = ("bare", "unsteered", *WAYS[1:])  # for memory
PAPER = "the paper's explicit layer, DINOv2-B/14, expansion 8, batch 256, H100: + 15 % time, + 15 % memory"
# The counter knows attention on GPUs only.
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FORMULAS = {ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
Rows = list[tuple[str, float, float | None]]  # what was measured, how much it is, the most it may be


class Bench:
    """The loaded model and what is asked of it; bare, without an atlas."""

    def __init__(self, work: Path, size: tuple[int, int], bare: bool = False) -> None:
        self.steerer: Any = None if bare else Steerer.load(str(work / "atlas"))
        self.vlm = Vlm.load(str(work / "model")) if bare else self.steerer.vlm
        self.vlm.model.generation_config.min_new_tokens = TOKENS  # every caption is as long
        self.kappa, self.nus = (200, (25, 50, 100)) if self.vlm.patch_shape[0] == 27 else (10, (2, 4, 8))
        self.image = picture(*size)

    def caption(self) -> str:
        """Of the picture, as the model is now."""
        return self.vlm.caption([self.image], max_new_tokens=TOKENS)[0]

    def plan(self, **settings: Any) -> Any:
        """Two words, scaled."""
        how = {"mode": "scale", "kappa": self.kappa, "nu": self.nus[1], **settings}
        return self.steerer.prepare_plan(["dog"], ["biker"], settings=how)[0]

    def explicit(self) -> SplitLinear:
        """The layer as all its sub-units."""
        return SplitLinear(self.vlm.layer, self.steerer.atlas.members(), self.steerer.atlas.units)

    def way(self, name: str) -> AbstractContextManager[Any]:
        """Inside, captions are made in this way."""
        if name == "explicit":
            return swap_module(self.vlm.model, self.vlm.layer_name, self.explicit())
        plans = {"nu 50": self.plan, "nu all": lambda: self.plan(nu="all")}
        return self.steerer.applied(plans[name]()) if name in plans else nullcontext()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def counted(work: Callable[[], Any]) -> tuple[Any, float]:
    """What comes out, and 1e9 operations it took."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        return work(), counter.get_total_flops() / 1e9


def compared(what: str, unit: str, values: dict[str, float], most: dict[str, float]) -> Rows:
    """Each way's value, and how many percent it is above that of the bare model."""
    rows: Rows = [(f"{what}, {name}, {unit}", value, None) for name, value in values.items()]
    more = {name: 100 * (value / values["bare"] - 1) for name, value in values.items() if name != "bare"}
    return rows + [(f"{what}, {name}, % more", value, most.get(name)) for name, value in more.items()]


def memory(options: argparse.Namespace) -> Rows:
    """Peaks of processes that make one caption each."""
    size = map(str, options.picture)
    command = [sys.executable, __file__, "--work", str(options.work), "--picture", *size, "--alone"]
    peaks: dict[str, list[float]] = {name: [] for name in ALONE}
    for _ in range(options.rounds):
        for name, own in peaks.items():
            own.append(float(subprocess.run([*command, name], check=True, capture_output=True).stdout))
    return compared("peak memory", "GB", {n: median(own) for n, own in peaks.items()}, {"nu 50": 2, "nu all": 2})


def one_caption(options: argparse.Namespace) -> float:
    """The peak of this process in GB after a single caption, which takes more than loading does."""
    bench = Bench(options.work, options.picture, bare=options.alone == "bare")
    with bench.way(options.alone):
        bench.caption()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def cost(bench: Bench, rounds: int) -> Rows:
    """Operations of a caption, and the time of fc2 as a share of it."""
    operations = {}
    for name in WAYS:
        with bench.way(name):
            operations[name] = counted(bench.caption)[1]
    whole = median(timed(bench.caption)[1] for _ in range(rounds))
    rows = compared("operations", "1e9", operations, {"nu 50": 0.5, "nu all": 0})
    rows += [("preparing a plan, s", timed(lambda: bench.steerer.gather_weights(bench.plan()))[1], None)]
    rows += [("caption, s", whole, None)]
    for name, own in (seconds := fc2_seconds(bench)).items():
        more = median(one - bare for one, bare in zip(own, seconds["bare"], strict=True))
        rows.append((f"fc2, {name}, ms", 1e3 * median(own), None))
        rows.append((f"overhead, {name}, % of a caption", 100 * more / whole, 1 if "nu" in name else None))
    return rows


@torch.inference_mode()
def fc2_seconds(bench: Bench, runs: int = 30) -> dict[str, list[float]]:
    """Seconds of fc2 in each way, the ways taking turns."""
    vlm = bench.vlm
    q = run_prefix(vlm, [bench.image]).q[0]  # (tiles, patches, d_in)
    explicit = bench.explicit()
    plans = {"nu 50": bench.plan(), "nu all": bench.plan(nu="all")}
    computes: dict[str, Any] = {"bare": lambda original, x: original(x), "explicit": lambda _original, x: explicit(x)}
    computes |= {
        name: make_edited_forward(vlm.layer, [bench.steerer.gather_weights(plan)], lambda x: [x], [None])
        for name, plan in plans.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _, name in itertools.product(range(runs + 2), WAYS):  # two warm up
        with replace_forward(vlm.layer, computes[name]):
            seconds[name].append(timed(lambda: vlm.layer(q))[1])
    return {name: own[2:] for name, own in seconds.items()}


def sweep(bench: Bench, rounds: int) -> Rows:
    """Nine settings in the library's way, in the reference's, and in the naive one."""
    points = grid_points({"gamma": (-5, -15, -50), "nu": bench.nus})

    def swept() -> list[str]:
        plans = [bench.plan(**point) for point in points]
        return bench.steerer.captions([bench.image], [plans], max_new_tokens=TOKENS)[0]

    bench.caption()  # warms up
    (said, own), first = timed(lambda: counted(swept))  # the first round is counted too
    (seen, passing), second = timed(lambda: counted(lambda: tower(bench)))
    (plain, decoding), third = timed(lambda: counted(lambda: decode(bench, *seen, len(points))))
    works = (swept, lambda: tower(bench), lambda: decode(bench, *seen, len(points)))
    took = [[first, second, third]] + [[timed(work)[1] for work in works] for _ in range(rounds - 1)]
    naive, start = [], time.perf_counter()
    for point in points:
        with bench.steerer.applied(bench.plan(**point)):
            naive.append(bench.caption())
    names = ("the sweep", "a tower's pass", "nine decodings")
    return [
        ("nine captions, naive, s", time.perf_counter() - start, None),
        *((f"{name}, s", median(column), None) for name, column in zip(names, zip(*took, strict=True), strict=True)),
        ("sweep / (pass + decodings), operations", own / (passing + decoding), None),
        ("sweep / (pass + decodings), time", median(a / (b + c) for a, b, c in took), 1.0),
        ("captions of the sweep equal to the naive", sum(a == b for a, b in zip(said, naive, strict=True)), None),
        ("captions of the sweep that differ", len(set(said)), None),
        ("decodings equal to the bare caption", plain.count(bench.caption()), None),
    ]


@torch.inference_mode()
def tower(bench: Bench) -> tuple[Any, torch.Tensor]:
    """From the picture to the model's inputs and what the tower makes of them, `(tiles, patches, width)`."""
    inputs, part = bench.vlm.inputs([bench.image]), bench.vlm.model.get_submodule(bench.vlm.within)
    return inputs, part(inputs["pixel_values"].flatten(0, 1), output_hidden_states=True).hidden_states[-1]


def decode(bench: Bench, inputs: Any, seen: torch.Tensor, count: int) -> list[str]:
    """Greedy captions of a batch that has the same picture `count` times; the tower does not run."""
    rows = {name: value.repeat_interleave(count, 0) for name, value in inputs.items()}
    output = BaseModelOutput(hidden_states=(seen.repeat(count, 1, 1),))
    with replace_forward(bench.vlm.model.get_submodule(bench.vlm.within), lambda *_args, **_kwargs: output):
        return bench.vlm.answer(rows, TOKENS)


PARTS = {"memory": memory, "cost": cost, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="by default that of a tile")
    parser.add_argument("--work", type=Path, help="keeps the checkpoint for the next time")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=ALONE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.picture = options.picture or ([56, 56] if options.tiny else [384, 384])
    if options.alone:
        print(one_caption(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        save_atlas(options.work / "atlas", save_model(options.work / "model", tiny=options.tiny))
        loaded = cache(lambda: Bench(options.work, options.picture))
        rows: Rows = []
        for part in options.parts:
            found = PARTS[part](*([options] if part == "memory" else [loaded(), options.rounds]))
            for name, value, most in found:
                must = "" if most is None else f"  at most {most:g}: {'yes' if value <= most else 'NO'}"
                print(f"{name:<44}{value:>12.3f}{must}", flush=True)
            rows += found
    print(PAPER)
    if options.json:
        told = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__, "paper": PAPER}
        named = [{"name": name, "value": value, "at most": most} for name, value, most in rows]
        options.json.write_text(json.dumps({**told, "rows": named}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
