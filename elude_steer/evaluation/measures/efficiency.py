"""Time and memory of a forward pass, measured as in the paper: warm-up passes, then timed passes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from elude_steer.utils.memory import peak_megabytes, reset_peak
from elude_steer.utils.progress import progress_bar


@dataclass(frozen=True)
class Cost:
    """What one variant of a model costs.

    Attributes:
        milliseconds: median time of a pass, or mean time.
        megabytes: peak memory during the passes, of the GPU or else of the process; None where it is unknown.
        slower: extra time as a share of the first variant's, compared pass by pass.
        larger: extra memory as a share of the first variant's.
        deviation: of the times of single passes, in milliseconds.
    """

    milliseconds: float
    megabytes: float | None
    slower: float = 0.0
    larger: float | None = None
    deviation: float = 0.0


def measure_costs(
    call: Callable[[], Any],
    variants: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    *,
    warm_up: int = 100,
    runs: int = 500,
    compiler: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    device: str | torch.device = "cpu",
    clock: Literal["wall", "process"] = "wall",
    statistic: Literal["median", "mean"] = "median",
) -> dict[str, Cost]:
    """The cost of each variant, relative to the first one.

    Variants alternate pass by pass, so that other load on the machine affects all of them. With a compiler (as in the
    paper), each variant runs on its own, because another layer means another program.

    Args:
        call: runs one forward pass.
        variants: name -> context in which the pass runs; the first is the bare model (`nullcontext`).
        warm_up: passes before the measurement.
        runs: passes that are timed.
        compiler: for example `torch.compile`; compiles `call` anew for each variant.
        device: the device that the passes run on.
        clock: what is counted: the time that passes, or on a CPU the process's own, which other load does not lengthen.
        statistic: the median is robust against other load on the machine; the paper takes the mean.
    """
    if not variants or runs < 1:
        raise ValueError("measure_costs needs at least one variant and one run.")
    device = torch.device(device)
    cuda, now = device.type == "cuda", time.process_time if clock == "process" else time.perf_counter
    if cuda and clock == "process":
        raise ValueError("a GPU's passes take time that passes, not that of the process: clock='wall'.")
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float | None] = {}
    with progress_bar("timing", "passes", len(variants) * (warm_up + runs)) as advance:
        for name, variant in variants.items():
            with variant():
                run = compiler(call) if compiler is not None else call
                for _ in range(warm_up):
                    _time_call(
                        run, cuda, now
                    )  # in inference mode too: another mode would compile again, and keep a graph
                    advance(1)
                reset_peak(device)
                for _ in range(runs if compiler is not None else 1):
                    seconds[name].append(_time_call(run, cuda, now))
                    advance(1)
                peaks[name] = peak_megabytes(device)
        if compiler is None:
            for _ in range(runs - 1):
                for name, variant in variants.items():
                    with variant():
                        seconds[name].append(_time_call(call, cuda, now))
                    advance(1)
    first = next(iter(variants))
    bare_peak = peaks[first]
    costs = {}
    for name, times in seconds.items():
        peak = peaks[name]
        larger = peak / bare_peak - 1 if peak is not None and bare_peak else None
        average = statistics.median if statistic == "median" else statistics.mean
        ratios = [a / b for a, b in zip(times, seconds[first], strict=True)]
        slower = (average(ratios) if statistic == "median" else average(times) / average(seconds[first])) - 1
        deviation = 1000 * statistics.stdev(times) if len(times) > 1 else 0.0
        costs[name] = Cost(1000 * average(times), peak, slower, larger, deviation)
    return costs


def _time_call(call: Callable[[], Any], cuda: bool, now: Callable[[], float]) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = now()
    with torch.inference_mode():
        call()
    if cuda:
        torch.cuda.synchronize()
    return now() - start


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The seconds that a call takes: of the processor on a CPU, whose cores may have other work, else by the clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
