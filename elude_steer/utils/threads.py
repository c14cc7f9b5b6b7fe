"""How many threads torch computes with: chosen by the size of the model and the cores that are free, and undone after.

Threads of torch wait for each other several times in every layer. In a small model, or on cores that other programs
use, they wait longer than they compute: a model of 2 million parameters becomes 17 to 50 times slower.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from elude_steer.errors import SpecError

PARAMETERS_PER_THREAD = 20_000_000  # a model smaller than this gains nothing from a second thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_LOCK = threading.Lock()
_START = (time.monotonic(), time.process_time())


class _Callers:
    """What the callers of this process had set before, while any thread is inside `use_threads`."""

    inside = 0
    threads = 1


class _Local(threading.local):
    """The number that `use_threads` has set in this thread; None outside."""

    threads: int | None = None


_CALLERS, _LOCAL = _Callers(), _Local()


Method = Callable[Concatenate[Any, Arguments], Result]


def with_threads(method: Method[Arguments, Result]) -> Method[Arguments, Result]:
    """Run a method inside the `use_threads` of its object."""

    @functools.wraps(method)
    def run(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.use_threads():
            return method(self, *args, **kwargs)

    return run


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with `count` threads; afterwards with as many as the caller had, also after an error.

    The number is torch's own for the process, so contexts in several threads at once share it: each sets it when it
    enters, and when it leaves it sets what was there before the first of them.
    """
    outer = _LOCAL.threads
    with _LOCK:
        if not _CALLERS.inside:
            _CALLERS.threads = torch.get_num_threads()
        _CALLERS.inside += 1
        before = outer or _CALLERS.threads
    try:
        _LOCAL.threads = count
        _set(count)
        yield
    finally:
        _LOCAL.threads = outer
        _set(before)
        with _LOCK:
            _CALLERS.inside -= 1


def _set(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def caller_threads() -> int:
    """The number that holds for the caller: of the `use_threads` around it in this thread, or else what it has set."""
    with _LOCK:
        return _LOCAL.threads or (_CALLERS.threads if _CALLERS.inside else torch.get_num_threads())


def check_threads(threads: int | None) -> None:
    """Raise unless it is None or a whole number of at least 1."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise SpecError(f"threads is {threads!r}; give a whole number of at least 1, or None to let the size decide.")


def choose_threads(parameters: int) -> int:
    """The number of threads that suits a model with so many parameters on the cores that are free now."""
    return max(1, min(parameters // PARAMETERS_PER_THREAD, count_free_cores()))


def count_free_cores() -> int:
    """The cores that this process may use and other programs do not, by the load of the last minute; at least 1."""
    cores = count_cores()
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return cores
    # The load includes this process. It is an average whose weights fall with a time constant of a minute.
    elapsed, computed = time.monotonic() - _START[0], time.process_time() - _START[1]
    own = computed / max(elapsed, 1e-3) * (1 - math.exp(-elapsed / 60))
    busy = max(0.0, load - own) / (os.cpu_count() or 1)
    return max(1, round(cores * (1 - busy)))


def count_cores() -> int:
    """The cores that this process may use: those of its affinity, no more than the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _read_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _read_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cores that the quota of a control group allows, of version 2 or 1; None without a quota."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError):  # no control groups, or "max"
        return None
