"""Starting Ray on this machine: more than one attempt, errors in one line, and an environment that stays as it was."""

import os
import sys
from types import SimpleNamespace

import pytest

from elude_steer.atlas.build.launchers import ray_launcher
from elude_steer.atlas.build.launchers.ray_launcher import RayLauncher, connect
from elude_steer.atlas.build.launchers.resources import Resources
from elude_steer.errors import ProcessError
from elude_steer.utils.parallel import checkout


class FakeRay:
    """Ray as far as starting it goes: `failures` attempts fail; its workers answer unless `hangs`."""

    def __init__(self, failures=0, *, hangs=False, broken=False):
        self.failures, self.hangs, self.broken = failures, hangs, broken
        self.starts, self.stops, self.submitted = [], 0, []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.job_config = SimpleNamespace(JobConfig=lambda **options: options)

    def is_initialized(self):
        return False

    def init(self, **options):
        self.safe = os.environ.get("PYTHONSAFEPATH")
        self.starts.append((options, {name: os.environ.get(name) for name in ray_launcher._SETTINGS}))
        if len(self.starts) <= self.failures:
            raise TimeoutError("the raylet did not\nregister in time")

    def shutdown(self):
        self.stops += 1

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 4.0, "memory": 8e9}}]

    def remote(self, function):
        def submit():
            self.submitted.append(function)
            return len(self.submitted)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=submit))

    def wait(self, references, **_):
        return ([], references) if self.hangs else (references[:1], references[1:])

    def get(self, _):
        if self.broken:
            raise RuntimeError("no module named\n torch")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(ray_launcher.time, "sleep", lambda _: None)
    for name in (*ray_launcher._SETTINGS, "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def use(monkeypatch):
    def install(ray):
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(ray_launcher.optional, "require", lambda *_: ray)
        return ray

    return install


def test_ray_is_started_again_if_it_does_not_start(use, monkeypatch):
    own = "RAY_worker_niceness"
    monkeypatch.setenv(own, "7")
    ray = use(FakeRay(failures=2))
    with connect(Resources(), None, 3) as launcher:
        assert len(launcher.warming) == len(ray.submitted) == 3, "each worker imports early"
        launcher._await_worker(ray)
        assert launcher.warming == []
    assert len(ray.starts) == 3 and ray.stops == 3
    options, environment = ray.starts[-1]
    assert options["num_cpus"] == 3
    assert environment == ray_launcher._SETTINGS | {own: "7"}
    assert os.environ[own] == "7"
    assert not (set(ray_launcher._SETTINGS) - {own}) & set(os.environ)


def test_what_does_not_start_is_said_in_one_line(use):
    ray = use(FakeRay(failures=9))
    with (
        pytest.raises(ProcessError, match=r"did not register in time; tried 3 times\); .*--launcher local") as error,
        connect(Resources(), None, 2),
    ):
        pass
    assert "\n" not in str(error.value)
    assert ray.stops == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hangs": True}, r"did not start within 10 minutes"), ({"broken": True}, r"\(no module named torch\)")],
)
def test_workers_that_do_not_work_are_an_error(use, options, message):
    ray = use(FakeRay(**options))
    with connect(Resources(), None, 2) as launcher, pytest.raises(ProcessError, match=message):
        launcher._await_worker(ray)


def test_a_cluster_of_the_user_is_joined_and_left_as_it_is(use):
    ray = use(FakeRay())
    with connect(Resources(), "auto", None) as launcher:
        assert not launcher.warming and not ray.submitted
    assert ray.starts[0][0]["address"] == "auto" and "num_cpus" not in ray.starts[0][0]
    assert not any(ray.starts[0][1].values())
    ray = use(FakeRay(failures=1))
    with (
        pytest.raises(ProcessError, match=r"there is no Ray cluster at 'auto' \(the raylet did not register in time\)"),
        connect(Resources(), "auto", None),
    ):
        pass


@pytest.mark.parametrize("address", [None, "auto"])
def test_workers_import_nothing_from_the_current_folder(address, use):
    ray = use(FakeRay())
    with connect(Resources(), address, 1):
        pass
    assert ray.starts[0][0]["job_config"] == {"_client_job": True, "_py_driver_sys_path": checkout()}
    assert ray.safe == (None if address else "1") and "PYTHONSAFEPATH" not in os.environ


def test_a_launcher_without_workers_of_its_own_does_not_wait():
    RayLauncher(Resources())._await_worker(None)
