"""Bounds how often visitors of a public page may run the model."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from elude_steer.errors import SpecError

_WINDOW = 60  # seconds


class RateLimit:
    """Counts requests within a sliding minute, per visitor and in total.

    Args:
        per_visitor: requests that one visitor may send within a minute.
        total: requests that all visitors together may send within a minute.
        clock: returns the time in seconds.
    """

    def __init__(self, per_visitor: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_visitor, self.total, self.clock = per_visitor, total, clock
        self._requests: dict[str, deque[float]] = defaultdict(deque)
        self._lock = threading.Lock()

    def check(self, visitor: str) -> None:
        """Count one request; raise if there were too many. A refused request does not count."""
        with self._lock:
            now = self.clock()
            self._forget_before(now - _WINDOW)
            if len(self._requests.get(visitor, ())) >= self.per_visitor:
                raise SpecError(f"this page allows {self.per_visitor} requests a minute per visitor; wait a moment.")
            if sum(map(len, self._requests.values())) >= self.total:
                raise SpecError("too many people are using this page right now; try again in a minute.")
            self._requests[visitor].append(now)

    def _forget_before(self, start: float) -> None:
        for visitor in list(self._requests):
            times = self._requests[visitor]
            while times and times[0] < start:
                times.popleft()
            if not times:
                del self._requests[visitor]
