"""Bounds how often visitors of a public page may run the model and upload files, and how much they may send."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from elude_steer.errors import SpecError

_WINDOW = 60  # seconds
LIGHT = 3  # requests that run no model, for each that does


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

    def scaled(self, factor: int) -> RateLimit:
        """A limit of its own that allows more, for requests that run no model."""
        return RateLimit(factor * self.per_visitor, factor * self.total, self.clock)

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


class BoundedRequests:
    """ASGI middleware: paces uploads by address, and refuses requests whose body is too large before it is read.

    Gradio limits the size of an uploaded file itself, but neither their number nor the size of other requests.

    Args:
        app: the application behind it.
        uploads: bounds the uploads of a visitor; None for no bound.
        max_body: largest body of other requests, in bytes.
    """

    def __init__(self, app: Any, uploads: RateLimit | None, max_body: int) -> None:
        self.app, self.uploads, self.max_body = app, uploads, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it with status 413 or 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
        elif scope["path"].rstrip("/").endswith("/upload"):
            try:
                if self.uploads:
                    self.uploads.check(str((scope.get("client") or ("",))[0]))
            except SpecError as error:
                await _refuse(send, 429, str(error))
                return
            await self.app(scope, receive, send)
        elif _content_length(scope) > self.max_body:
            await _refuse(send, 413, f"the request has more than {self.max_body // 2**20} MB.")
        else:
            await self.app(scope, _bounded(receive, self.max_body), send)


def _content_length(scope: Any) -> int:
    value = dict(scope["headers"]).get(b"content-length", b"0")
    return int(value) if value.isdigit() else 0


def _bounded(receive: Any, max_body: int) -> Any:
    """`receive` for a body of unknown length: what goes on for too long is cut off, as if the visitor had left."""
    count = 0

    async def receive_part() -> Any:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        return message if count <= max_body else {"type": "http.disconnect"}

    return receive_part


async def _refuse(send: Any, status: int, message: str) -> None:
    body = json.dumps({"error": message, "detail": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
