"""What a layer costs when it runs, the way the paper measures it: passes that warm up, passes that count, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from elude_steer.utils.memory import peak_megabytes, reset_peak


@dataclass(frozen=True)
class Cost:
    """What one way of running a model takes.

    Attributes:
        milliseconds: median of a pass.
        megabytes: the peak while passes ran: of the GPU's memory, or else of the process; None where nobody tells.
        slower: share of time beyond the first way's, pass by pass.
        larger: share of memory beyond the first way's.
    """

    milliseconds: float
    megabytes: float | None
    slower: float = 0.0
    larger: float | None = None


def measure(
    call: Callable[[], Any],
    ways: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    *,
    warm_up: int = 100,
    runs: int = 500,
    compiled: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Cost]:
    """What each way costs beside the first one.

    Ways take turns pass by pass, so that a machine that is busy for a while is so for all of them; where the call is
    compiled (the paper does), each way runs by itself, because another layer means another program.

    Args:
        call: one forward pass.
        ways: name -> context in which the pass runs that way; the first is the bare model (`nullcontext`).
        warm_up: passes that do not count.
        runs: passes that do.
        compiled: e.g. `torch.compile`; makes another callable of `call` for each way.
        device: what the passes run on.
    """
    if not ways or runs < 1:
        raise ValueError("measure needs at least one way and one run.")
    on = torch.device(device)
    cuda = on.type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float | None] = {}
    for name, way in ways.items():
        with way():
            own = compiled(call) if compiled is not None else call
            for _ in range(warm_up):
                _timed(own, cuda)  # in the mode that counts: another would be compiled again, and keep a graph
            reset_peak(on)
            for _ in range(runs if compiled is not None else 1):
                seconds[name].append(_timed(own, cuda))
            peaks[name] = peak_megabytes(on)
    if compiled is None:
        for _ in range(runs - 1):
            for name, way in ways.items():
                with way():
                    seconds[name].append(_timed(call, cuda))
    first = next(iter(ways))
    bare = peaks[first]
    found = {}
    for name, own_seconds in seconds.items():
        pairs = zip(own_seconds, seconds[first], strict=True)
        peak = peaks[name]
        larger = peak / bare - 1 if peak is not None and bare else None
        slower = statistics.median(a / b for a, b in pairs) - 1
        found[name] = Cost(1000 * statistics.median(own_seconds), peak, slower, larger)
    return found


def _timed(call: Callable[[], Any], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        call()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
