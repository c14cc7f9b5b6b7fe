"""What a forward pass costs with each method, against the bare backbone: by the paper's protocol, or a smaller one.

As in the paper, ELUDe takes the layer's place, and an autoencoder or transcoder computes behind the layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from elude_steer.errors import ImageError, SpecError
from elude_steer.evaluation.baselines.sae import Sae
from elude_steer.evaluation.compare.methods import METHODS, Method
from elude_steer.evaluation.evaluate import read_batches
from elude_steer.evaluation.measures.efficiency import Cost, measure_costs, timed
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.method.layers import layer_parameters, split_layer
from elude_steer.models.hooks import swap_module
from elude_steer.models.vision import Tower, read_positions

BARE = "backbone"


@dataclass(frozen=True)
class Protocol:
    """How times are taken.

    Attributes:
        batch: images of a pass.
        warm_up: passes before any is timed.
        runs: passes that are timed.
        compiled: whether the model runs under `torch.compile`.
        statistic: what is reported of the times of single passes.
        alternate: whether variants take turns pass by pass, so that other load on the machine affects all alike; not
            possible with `compiled`.
        clock: `wall` counts the time that passes, `process` on a CPU the process's own, whatever else the machine does.
    """

    batch: int = 256
    warm_up: int = 100
    runs: int = 500
    compiled: bool = True
    statistic: Literal["mean", "median"] = "mean"
    alternate: bool = False
    clock: Literal["wall", "process"] = "wall"

    def __post_init__(self) -> None:
        if min(self.batch, self.runs) < 1 or self.warm_up < 0:
            raise SpecError("a protocol needs a batch of images and passes to time.")
        if self.compiled and self.alternate:
            raise SpecError("compiled variants run one after the other; leave out one of compiled and alternate.")


PAPER_PROTOCOL = Protocol()
SMALL_PROTOCOL = Protocol(batch=8, warm_up=3, runs=15, compiled=False, statistic="median", alternate=True)


@dataclass(frozen=True)
class EfficiencyRow:
    """What a pass costs with one method.

    Attributes:
        backbone: name of the backbone and layer.
        method: name of the method; `backbone` for the bare one.
        input_dim: width of what the method reads; 0 for the bare backbone.
        milliseconds: of a pass.
        deviation: of single passes.
        megabytes: peak memory of tensors in a pass; on a CPU of the model's and of those that the pass allocates. None
            in results of earlier versions, which measured the whole process.
        slower: extra time as a share of the bare backbone's.
        larger: extra memory as a share of the bare backbone's.
    """

    backbone: str
    method: str
    input_dim: int
    milliseconds: float
    deviation: float
    megabytes: float | None
    slower: float
    larger: float | None


class BehindLayer(nn.Module):
    """A layer with an autoencoder of its output, or a transcoder, whose reconstruction goes on in its place."""

    def __init__(self, layer: nn.Module, sae: Sae) -> None:
        super().__init__()
        self.layer, self.sae = layer, sae

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """The reconstruction; the layer itself runs, too, and what it gives is used, so that no compiler removes it."""
        out = self.layer(q)
        inputs, true = q, out
        if isinstance(self.layer, nn.Conv2d):
            inputs, true = read_positions(self.layer, q).movedim(1, -1), out.movedim(1, -1)
        read = inputs if self.sae.spec.kind == "transcoder" else true
        change = self.sae.decode(self.sae.encode(read)).to(true.dtype) - true
        return out + (change.movedim(-1, 1) if isinstance(self.layer, nn.Conv2d) else change)


def run_efficiency(
    setup: TableSetup,
    methods: Sequence[str] | None = None,
    *,
    protocol: Protocol = SMALL_PROTOCOL,
    seed: int | None = None,
) -> list[EfficiencyRow]:
    """Time and memory of a pass with each method, the bare backbone first.

    Of a vision-language model, the vision tower alone is timed. Finished measurements are files, which a further run
    reads; delete `efficiency` in the setup's folder to measure again.

    Args:
        setup: the backbone, the images and the budget.
        methods: atlases and autoencoders; by default those of the preset. Other splits cost what an atlas costs.
        protocol: how times are taken.
        seed: the draw of tokens that the methods are made from, by default the first.
    """
    bench, number = Bench(setup), setup.find_seeds(None if seed is None else [seed])[0]
    names = setup.default_methods() if methods is None else list(methods)
    chosen = [method for method in setup.find_methods(names) if methods is not None or method.kind in ("atlas", "sae")]
    for method in chosen:
        if method.kind not in ("atlas", "sae"):
            raise SpecError(f"'{method.name}' has no forward pass of its own to time; choose atlases and autoencoders.")
        bench.dictionary(method, number)  # made before anything is timed
    folder = setup.folder / "efficiency" / _describe(protocol)
    variants = {method.name: _make_layer(bench, method, number) for method in chosen}
    found = _measure_in_turns(bench, variants, protocol, folder) if protocol.alternate else {}
    if not protocol.alternate:
        found = {name: _measure_alone(bench, name, variants.get(name), protocol, folder) for name in (BARE, *variants)}
    return [_make_row(bench, name, found) for name in (BARE, *variants)]


def try_passes(bench: Bench, protocol: Protocol) -> tuple[float, float]:
    """The seconds of compiling the bare backbone and of a pass, of the processor on a CPU; for forecasts."""
    tower = bench.tower
    with tower.use_threads(), torch.inference_mode():
        call = _make_call(bench, protocol.batch)
        torch.compiler.reset()
        run = torch.compile(call) if protocol.compiled else call
        first, second, third = (timed(run, tower.device) for _ in range(3))
    return (max(0.0, first - third) if protocol.compiled else 0.0), min(second, third)


def _describe(protocol: Protocol) -> str:
    values = asdict(protocol).values()
    return "-".join(str(value).lower() for value in values)


def _make_layer(bench: Bench, method: Method, seed: int) -> Callable[[], nn.Module]:
    """A function that makes the layer of a method; called late, so that it takes no memory from the bare backbone."""
    tower = bench.tower

    def make() -> nn.Module:
        if method.kind == "sae":
            return BehindLayer(tower.layer, bench.sae(method, seed, 0))
        atlas = bench.atlas(method.variant, seed)
        return split_layer(tower.layer, atlas.members().to(tower.device), atlas.units.to(tower.device))

    return make


def _make_call(bench: Bench, count: int) -> Callable[[], Any]:
    """A function that runs the backbone on a batch of images, repeated if there are too few."""
    tower, items = bench.tower, bench.held_out.items
    images = [image for batch in islice(read_batches(items, count), 1) for _, image in batch]
    if not images:
        raise ImageError("there are no images to time a pass with.")
    inputs = tower.prepare([images[number % len(images)] for number in range(count)])
    if tower.within:
        part, seen = _timed_part(tower), list[tuple[Any, Any]]()
        handle = part.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        with handle, torch.inference_mode():  # the handle removes the hook
            _run(tower, inputs)
        args, kwargs = seen[0]
        return lambda: part(*args, **kwargs)
    return lambda: _run(tower, inputs)


def _timed_part(tower: Tower) -> nn.Module:
    return tower.model.get_submodule(tower.within) if tower.within else tower.model


def _run(tower: Tower, inputs: torch.Tensor | Mapping[str, Any]) -> Any:
    if isinstance(inputs, torch.Tensor):
        return tower.model(inputs.to(tower.device))
    return tower.model(**inputs)


def _measure_in_turns(
    bench: Bench, variants: Mapping[str, Callable[[], nn.Module]], protocol: Protocol, folder: Path
) -> dict[str, Cost]:
    def measure() -> dict[str, Any]:
        tower, made = bench.tower, dict[str, nn.Module]()

        def swapped(name: str) -> Any:
            if name not in made:
                made[name] = variants[name]()
            return swap_module(tower.model, tower.layer_name, made[name])

        contexts: dict[str, Callable[[], Any]] = {BARE: nullcontext}
        contexts |= {name: lambda name=name: swapped(name) for name in variants}  # type: ignore[misc]
        with tower.use_threads():
            costs = measure_costs(
                _make_call(bench, protocol.batch),
                contexts,
                warm_up=protocol.warm_up,
                runs=protocol.runs,
                device=tower.device,
                statistic=protocol.statistic,
                clock=protocol.clock,
                model=_timed_part(tower),
            )
        return {name: asdict(cost) for name, cost in costs.items()}

    numbers = "-".join(f"{METHODS[name].number:02d}" for name in variants)
    found = load_or_make(folder / f"in-turns-{numbers}.json", measure)
    return {name: Cost(**found[name]) for name in (BARE, *variants)}


def _measure_alone(
    bench: Bench, name: str, make: Callable[[], nn.Module] | None, protocol: Protocol, folder: Path
) -> Cost:
    def measure() -> dict[str, Any]:
        tower, start = bench.tower, time.perf_counter()
        bench.setup.log(f"timing {name}")
        with tower.use_threads():
            context = nullcontext() if make is None else swap_module(tower.model, tower.layer_name, make())
            with context:
                torch.compiler.reset()
                costs = measure_costs(
                    _make_call(bench, protocol.batch),
                    {name: nullcontext},
                    warm_up=protocol.warm_up,
                    runs=protocol.runs,
                    compiler=torch.compile if protocol.compiled else (lambda call: call),
                    device=tower.device,
                    statistic=protocol.statistic,
                    clock=protocol.clock,
                    model=_timed_part(tower),
                )
        return {**asdict(costs[name]), "clock": time.perf_counter() - start}

    stem = "backbone" if make is None else f"{METHODS[name].number:02d}"
    found = load_or_make(folder / f"{stem}.json", measure)
    return Cost(**{key: found[key] for key in ("milliseconds", "megabytes", "slower", "larger", "deviation")})


def _make_row(bench: Bench, name: str, found: Mapping[str, Cost]) -> EfficiencyRow:
    cost, bare = found[name], found[BARE]
    weight, _ = layer_parameters(bench.tower.layer)
    reads_output = name != BARE and METHODS[name].kind == "sae" and METHODS[name].variant != "transcoder"
    width = 0 if name == BARE else weight.shape[0 if reads_output else 1]
    slower = cost.slower if cost.slower or name == BARE else cost.milliseconds / bare.milliseconds - 1
    larger = cost.megabytes / bare.megabytes - 1
    return EfficiencyRow(
        bench.setup.name, name, width, cost.milliseconds, cost.deviation, cost.megabytes, slower, larger
    )
