"""Requests that are stopped, or replaced by the visitor's next one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elude_steer.errors import ImageError, StoppedError
from tests.demo.helpers import make_request


class Pause:
    """An `on_token` callback that blocks at the first token until `resume` is set."""

    def __init__(self):
        self.counts, self.reached, self.resume = [], threading.Event(), threading.Event()

    def __call__(self, count):
        self.counts.append(count)
        self.reached.set()
        assert self.resume.wait(20)


@pytest.fixture
def start_request(presenter):
    """Starts a request in a thread and waits until it pauses at its first token; resumes all at the end."""
    pauses = []
    with ThreadPoolExecutor(4) as pool:

        def start(visitor, answer=presenter.steer, **options):
            pause = Pause()
            pauses.append(pause)

            def work():
                with presenter.stoppable(visitor, pause):
                    return answer(make_request(**options))

            future = pool.submit(work)
            assert pause.reached.wait(20)
            return future, pause

        yield start
        for pause in pauses:
            pause.resume.set()


@pytest.fixture(scope="module")
def caption(presenter):
    return presenter.steer(make_request()).caption


def test_tokens_are_counted_while_a_request_runs(presenter, caption):
    counts = []
    with presenter.stoppable("ann", counts.append):
        assert set(presenter._running) == {"ann"}
        assert presenter.steer(make_request()).caption == caption
    assert counts == list(range(1, len(counts) + 1))
    assert len(counts) >= len(caption.split())
    assert presenter._running == {}
    presenter.steer(make_request())
    assert len(counts) == counts[-1]  # the callback is gone


@pytest.mark.parametrize("name", ["steer", "find_settings", "try_doses"])
def test_stop_ends_a_running_request(presenter, start_request, caption, name):
    future, pause = start_request("ann", getattr(presenter, name))
    presenter.stop("ann")
    pause.resume.set()
    with pytest.raises(StoppedError, match="Stopped"):
        future.result(20)
    assert pause.counts == [1]
    assert presenter._running == {}
    assert presenter.steer(make_request()).caption == caption  # the model is unchanged


def test_a_second_request_ends_the_first_and_keeps_running(presenter, start_request, caption):
    first, first_pause = start_request("ann")
    second, second_pause = start_request("ann")
    first_pause.resume.set()
    with pytest.raises(StoppedError):
        first.result(20)
    assert set(presenter._running) == {"ann"}  # the end of the first did not remove the second
    second_pause.resume.set()
    assert second.result(20).caption == caption


def test_a_second_request_can_be_stopped_after_the_first_has_ended(presenter, start_request):
    first, first_pause = start_request("ann")
    second, second_pause = start_request("ann")
    first_pause.resume.set()
    assert isinstance(first.exception(20), StoppedError)
    presenter.stop("ann")
    second_pause.resume.set()
    assert isinstance(second.exception(20), StoppedError)


def test_stop_leaves_other_visitors_alone(presenter, start_request, caption):
    ann, ann_pause = start_request("ann")
    bob, bob_pause = start_request("bob")
    presenter.stop("ann")
    presenter.stop("nobody")
    ann_pause.resume.set()
    bob_pause.resume.set()
    assert isinstance(ann.exception(20), StoppedError)
    assert bob.result(20).caption == caption


def test_a_failed_request_is_not_left_running(presenter, caption):
    with pytest.raises(ImageError), presenter.stoppable("ann"):
        presenter.steer(make_request(None))
    with pytest.raises(ZeroDivisionError), presenter.stoppable("ann", lambda count: 1 / 0):
        presenter.steer(make_request())
    assert presenter._running == {}
    presenter.stop("ann")  # nothing runs, and the next request must not be stopped by it
    with presenter.stoppable("ann"):
        assert presenter.steer(make_request()).caption == caption
