"""How often visitors may run the model."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elude_steer.demo.rate_limit import RateLimit
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
