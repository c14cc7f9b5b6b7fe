"""How often visitors may run the model."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elude_steer.demo.rate_limit import BoundedRequests, RateLimit
from elude_steer.errors import SpecError


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def limit_and_clock(per_visitor, total):
    clock = Clock()
    return RateLimit(per_visitor, total, clock), clock


def test_each_visitor_has_a_limit_per_minute():
    limit, _ = limit_and_clock(2, 100)
    for _ in range(2):
        limit.check("ann")
        limit.check("bob")
    for visitor in ("ann", "bob"):
        with pytest.raises(SpecError, match="this page allows 2 requests a minute per visitor; wait a moment"):
            limit.check(visitor)
    limit.check("eve")


def test_all_visitors_together_have_a_limit():
    limit, clock = limit_and_clock(5, 3)
    for visitor in ("ann", "bob", "eve"):
        limit.check(visitor)
    with pytest.raises(SpecError, match="too many people are using this page right now; try again in a minute"):
        limit.check("joe")
    clock.now += 61
    limit.check("joe")


def test_the_minute_is_a_sliding_window():
    limit, clock = limit_and_clock(2, 100)
    limit.check("ann")
    clock.now += 40
    limit.check("ann")
    for seconds, allowed in ((19, False), (2, True), (1, False), (30, False), (10, True)):
        clock.now += seconds
        if allowed:
            limit.check("ann")
        else:
            with pytest.raises(SpecError, match="2 requests a minute"):
                limit.check("ann")


def test_a_refused_request_does_not_count():
    limit, clock = limit_and_clock(1, 100)
    limit.check("ann")
    for _ in range(6):
        clock.now += 10
        with pytest.raises(SpecError, match="1 requests a minute"):
            limit.check("ann")
    clock.now += 1
    limit.check("ann")


def test_visitors_are_forgotten_after_a_minute():
    limit, clock = limit_and_clock(3, 10)
    for number in range(500):
        clock.now += 7
        limit.check(f"visitor {number}")
        assert len(limit._requests) <= 9
    limit, clock = limit_and_clock(1, 5)
    for number in range(500):  # all at once; most are refused
        try:
            limit.check(f"visitor {number}")
        except SpecError:
            assert number >= 5
    assert len(limit._requests) == 5


def test_requests_from_several_threads_are_counted_correctly():
    limit, _ = limit_and_clock(100, 50)
    ready = threading.Barrier(8)

    def count_allowed(visitor):
        ready.wait()
        allowed = 0
        for _ in range(20):
            try:
                limit.check(visitor)
                allowed += 1
            except SpecError:
                pass
        return allowed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(count_allowed, "abcdefgh")) == 50


# Requests before they reach the page


def answer_of(middleware, path, *parts, length=None, client="203.0.113.5"):
    """The status with which an application that reads all of a request answers it; None if it was cut off."""
    sent, waiting = [], [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": (client, 1)}
    asyncio.run(middleware(scope, receive, send))
    return next((message["status"] for message in sent if "status" in message), None)


async def read_all(_scope, receive, send):
    while (message := await receive())["type"] == "http.request":
        if not message["more_body"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return


def test_uploads_are_paced_by_address():
    middleware = BoundedRequests(read_all, RateLimit(2, 3, Clock()), 100)
    statuses = [answer_of(middleware, "/gradio_api/upload", length=10**6) for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert answer_of(middleware, "/gradio_api/upload", client="203.0.113.6") == 200
    assert answer_of(middleware, "/gradio_api/upload", client="203.0.113.7") == 429
    assert answer_of(middleware, "/gradio_api/run/press", b"x") == 200


def test_large_requests_are_refused_before_they_are_read():
    middleware = BoundedRequests(read_all, None, 100)
    assert answer_of(middleware, "/gradio_api/call/steer", b"x" * 100, length=100) == 200
    assert answer_of(middleware, "/gradio_api/call/steer", length=101) == 413
    assert answer_of(middleware, "/gradio_api/call/steer", b"x" * 60, b"x" * 60) is None  # of unknown length
