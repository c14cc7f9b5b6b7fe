import threading

import pytest
import torch

from elude_steer import Steerer, steer
from elude_steer.errors import SpecError
from elude_steer.models.images import open_image
from elude_steer.models.vlm import Vlm, report_tokens
from elude_steer.toyland import scenes
from elude_steer.utils import threads as module
from elude_steer.utils.threads import (
    PARAMETERS_PER_THREAD,
    _read_quota,
    caller_threads,
    choose_threads,
    count_cores,
    count_free_cores,
    use_threads,
)

TEDDY = "demos/images/toyland-teddy.png"


@pytest.fixture(autouse=True)
def callers_number():
    """The caller computes with three threads, and still does after every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(module, "count_cores", lambda: 8)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_the_callers_number_comes_back():
    with use_threads(1):
        assert torch.get_num_threads() == 1
        with use_threads(2):
            assert torch.get_num_threads() == caller_threads() == 2
        assert torch.get_num_threads() == caller_threads() == 1
    assert torch.get_num_threads() == caller_threads() == 3
    with pytest.raises(KeyError), use_threads(1):
        raise KeyError


def test_it_comes_back_in_every_thread_whoever_leaves_first():
    entered, left, seen = threading.Event(), threading.Event(), {}

    def compute():
        with use_threads(1):
            entered.set()
            left.wait(30)
        seen["after"] = torch.get_num_threads()

    other = threading.Thread(target=compute)
    with use_threads(1):
        other.start()
        assert entered.wait(30)
    assert torch.get_num_threads() == 3  # while the other thread is still inside
    left.set()
    other.join()
    assert seen == {"after": 3}


def test_small_models_get_one_thread_and_large_ones_the_free_cores(idle, monkeypatch):
    assert choose_threads(2_000_000) == 1
    assert choose_threads(3 * PARAMETERS_PER_THREAD) == 3
    assert choose_threads(7_000_000_000) == 8
    monkeypatch.setattr(module.os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert choose_threads(7_000_000_000) in (2, 3)  # this process may have computed just now
    monkeypatch.setattr(module.os, "getloadavg", lambda: (60.0, 0.0, 0.0))
    assert choose_threads(7_000_000_000) == 1


def test_own_load_does_not_count(idle, monkeypatch):
    monkeypatch.setattr(module.os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    monkeypatch.setattr(module, "_START", (module.time.monotonic() - 600, module.time.process_time() - 4800))
    assert count_free_cores() == 8


def test_cores_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid: {0, 2, 5}, raising=False)
    monkeypatch.setattr(module, "_read_quota", lambda: None)
    assert count_cores() == 3
    monkeypatch.setattr(module, "_read_quota", lambda: 1.5)
    assert count_cores() == 2


def test_quotas_of_both_versions(tmp_path):
    assert _read_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _read_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert _read_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _read_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert _read_quota(tmp_path) == 0.5


def record_threads(run):
    """The numbers of threads that torch has while tokens are generated."""
    seen = set()
    with report_tokens(lambda _count: seen.add(torch.get_num_threads())):
        run()
    return seen


def test_toyland_computes_with_one_thread(idle):
    image = open_image(TEDDY)
    assert record_threads(lambda: steer(TEDDY, minus=["teddy"])) == {1}
    assert record_threads(lambda: steer(TEDDY, minus=["teddy"], threads=2)) == {2}
    steerer = Steerer.load("toyland", threads=2)
    assert record_threads(lambda: steerer.captions([image], [[None]])) == {2}
    assert record_threads(lambda: steerer.vlm.caption([image])) == {2}
    assert record_threads(lambda: Vlm.load("toyland/captioner").caption([image])) == {1}


def test_nobody_gets_more_than_the_caller_allows(idle, monkeypatch):
    monkeypatch.setattr(module, "PARAMETERS_PER_THREAD", 1000)
    vlm = Vlm.load("toyland/captioner")
    assert record_threads(lambda: vlm.caption([open_image(TEDDY)])) == {3}  # of eight
    with use_threads(1):
        assert record_threads(lambda: vlm.caption([open_image(TEDDY)])) == {1}


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2"])
def test_wrong_numbers_are_refused_at_once(threads):
    with pytest.raises(SpecError, match=r"threads is .*; give a whole number of at least 1"):
        Steerer.load("nosuch", threads=threads)


def test_captions_do_not_depend_on_the_number_of_threads():
    images = [scene.image for scene in scenes(31, 12)]
    captions, logits = [], []
    for threads in (1, 2, 3):
        steerer = Steerer.load("toyland", threads=threads)
        plan = steerer.plan(minus=["dog", "cat"], plus=["biker"])
        captions.append(steerer.captions(images, [[None, plan]] * len(images)))
        with steerer.use_threads(), torch.inference_mode():
            logits.append(steerer.vlm.model(**steerer.vlm.inputs(images)).logits)
    assert captions[0] == captions[1] == captions[2]
    for other in logits[1:]:  # sums over parts may round otherwise
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=1e-4)
