"""Time and memory of a forward pass, measured as in the paper: warm-up passes, then timed passes."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from elude_steer.utils.memory import reset_peak
from elude_steer.utils.progress import progress_bar


@dataclass(frozen=True)
class Cost:
    """What one variant of a model costs.

    Attributes:
        milliseconds: median time of a pass, or mean time.
        megabytes: peak memory of tensors: on a GPU of all that are there during the passes, on a CPU of the model's own
            and of what a pass allocates beside them.
        slower: extra time as a share of the first variant's, compared pass by pass.
        larger: extra memory as a share of the first variant's.
        deviation: of the times of single passes, in milliseconds.
    """

    milliseconds: float
    megabytes: float
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
    model: nn.Module | None = None,
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
        model: on a CPU, its parameters and buffers count as memory, each in its variant.
    """
    if not variants or runs < 1:
        raise ValueError("measure_costs needs at least one variant and one run.")
    device = torch.device(device)
    cuda, now = device.type == "cuda", time.process_time if clock == "process" else time.perf_counter
    if cuda and clock == "process":
        raise ValueError("a GPU's passes take time that passes, not that of the process: clock='wall'.")
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float] = {}
    with progress_bar("timing", "passes", len(variants) * (warm_up + runs)) as advance:
        for name, variant in variants.items():
            with variant():
                run = compiler(call) if compiler is not None else call
                for _ in range(warm_up):  # in inference mode too: another mode would compile again, and keep a graph
                    _time_call(run, cuda, now)
                    advance(1)
                reset_peak(device)
                for _ in range(runs if compiler is not None else 1):
                    seconds[name].append(_time_call(run, cuda, now))
                    advance(1)
                peaks[name] = torch.cuda.max_memory_allocated(device) / 1e6 if cuda else _cpu_megabytes(run, model)
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
        larger = peaks[name] / bare_peak - 1 if bare_peak else None
        average = statistics.median if statistic == "median" else statistics.mean
        ratios = [a / b for a, b in zip(times, seconds[first], strict=True)]
        slower = (average(ratios) if statistic == "median" else average(times) / average(seconds[first])) - 1
        deviation = 1000 * statistics.stdev(times) if len(times) > 1 else 0.0
        costs[name] = Cost(1000 * average(times), peaks[name], slower, larger, deviation)
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


def _cpu_megabytes(run: Callable[[], Any], model: nn.Module | None) -> float:
    """What `torch.cuda.max_memory_allocated` tells of a GPU; the process's own peak would include all earlier work."""
    tensors = [] if model is None else chain(model.parameters(), model.buffers())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    with _without_messages(), torch.profiler.profile(profile_memory=True) as profile:
        _time_call(run, False, time.perf_counter)
    if profile.profiler is None or profile.profiler.kineto_results is None:
        raise RuntimeError("torch's profiler recorded nothing.")
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):  # what is allocated, and below 0 what is freed
        held += event.nbytes()
        peak = max(peak, held)
    return (sum(storages.values()) + peak) / 1e6


@contextmanager
def _without_messages() -> Iterator[None]:
    """Drop what torch's profiler logs to standard error when it starts and stops."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed, so nothing is seen
        yield
        return
    try:
        sys.stderr.flush()
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The seconds that a call takes: of the processor on a CPU, whose cores may have other work, else by the clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
