"""Requests of the demo's visitors while they run: in worker threads, stoppable, and on a borrowed GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from elude_steer.errors import EludeSteerError, StoppedError
from elude_steer.models.vlm import report_tokens

Q = TypeVar("Q")
T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class _Request:
    """A running request of a visitor."""

    stop_reason: str | None = None  # None while it may go on

    def raise_if_stopped(self) -> None:
        if self.stop_reason is not None:
            raise StoppedError(self.stop_reason)


class StoppableRequests:
    """Runs requests in worker threads; a visitor has one at a time, which can be stopped.

    Args:
        workers: the threads.
    """

    def __init__(self, workers: ThreadPoolExecutor) -> None:
        self._workers = workers
        self._opener = ThreadPoolExecutor(1)
        self._running: dict[str, _Request] = {}

    def run_in_worker(self, job: Callable[[], T]) -> T:
        """Run heavy work in a worker thread and wait for its result."""
        return self._workers.submit(copy_context().run, job).result()

    def run_beside(self, job: Callable[[], T]) -> T:
        """Run light work in a thread of its own, one job at a time, and wait for its result; the model may be busy."""
        return self._opener.submit(copy_context().run, job).result()

    @contextmanager
    def stoppable(self, visitor: str, on_token: Callable[[int], object] = lambda count: None) -> Iterator[None]:
        """Inside, the model can be stopped by `stop`. Entering stops the visitor's earlier request.

        Args:
            visitor: whose request it is.
            on_token: called with the length of the answer after each generated token.
        """
        self.stop(visitor, "")
        request = self._running[visitor] = _Request()

        def check_and_report(count: int) -> None:
            request.raise_if_stopped()
            on_token(count)

        try:
            with report_tokens(check_and_report):
                yield
            request.raise_if_stopped()  # discard an answer that nobody waits for any more
        finally:
            if self._running.get(visitor) is request:
                del self._running[visitor]

    def stop(self, visitor: str, reason: str = "Stopped.") -> None:
        """Stop the visitor's running request, if there is one; pass an empty reason if another request replaces it."""
        request = self._running.get(visitor)
        if request is not None:
            request.stop_reason = reason


def run_on(gpu: Decorator, method: Callable[[Q], T]) -> Callable[[Q], T]:
    """A method on a borrowed GPU. Its errors travel as results: `spaces.GPU` passes on only the name of an error."""

    def attempt(request: Q) -> T | EludeSteerError:
        try:
            return method(request)
        except EludeSteerError as error:
            return error

    borrowed = gpu(attempt)

    def call(request: Q) -> T:
        result = borrowed(request)
        if isinstance(result, EludeSteerError):
            raise result
        return cast(T, result)

    return call
