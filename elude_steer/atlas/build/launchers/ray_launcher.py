"""Pieces of a build as Ray tasks: one a piece, begun again where a worker or a machine is lost, on any cluster.

Ray moves the pickled build and stages to the workers, restarts what is lost, and uses machines that come and go. The
results are files: in the work folder, if all machines share it, or behind a URL.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from elude_steer.atlas.build.launchers.resources import Resources
from elude_steer.atlas.build.launchers.worker import hash_bytes, run_task
from elude_steer.atlas.build.stages import warn
from elude_steer.errors import ProcessError
from elude_steer.utils import optional
from elude_steer.utils.parallel import checkout, import_settings, set_variables
from elude_steer.utils.threads import count_cores

_IN_FLIGHT = 4096  # tasks that are submitted and not done; more would only fill the scheduler
_ATTEMPTS = 3  # to start Ray on this machine
_START_SECONDS = 600  # until the first worker is there
# Settings for Ray when it starts here, unless the user has set them. By default it gives up soon on a busy machine,
# runs its workers at low priority, and sends usage statistics.
_SETTINGS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_LOG = logging.getLogger(__name__)


@dataclass
class RayLauncher:
    """A `Launcher` whose pieces are Ray tasks."""

    resources: Resources
    rank: int = 0
    world: int = 1
    threads: int = 1
    local: int = 1
    stopped: threading.Event = field(default_factory=threading.Event)
    travels: bool = True
    origin: Any = None  # what `worker.describe_build` gives; set once the build is there
    warming: list[Any] = field(default_factory=list)  # tasks in which the workers of this machine import what they need
    _sent: dict[str, Any] = field(default_factory=dict)

    def each(
        self, pieces: Iterable[Any], work: Callable[[Any], None], on_done: Callable[[Any], None] | None = None
    ) -> None:
        """Do all pieces on the cluster and wait for them."""
        import ray
        from ray import cloudpickle

        tasks = iter(pieces)
        first = next(tasks, None)
        if first is None:
            return
        self._await_worker(ray)
        if "origin" not in self._sent:
            data = cloudpickle.dumps(self.origin)
            self._sent.update(origin=ray.put(data), key=hash_bytes(data))
        data = cloudpickle.dumps(work)
        # In a list, a reference is not fetched before the task begins: most tasks find what it stands for.
        references, names = [self._sent["origin"], ray.put(data)], (self._sent["key"], hash_bytes(data))
        options: dict[str, Any] = {"num_cpus": self.resources.cpus, "max_retries": self.resources.retries}
        if self.resources.gpus:
            options["num_gpus"] = self.resources.gpus
        if self.resources.memory:
            options["memory"] = int(self.resources.memory * 1e9)
        submit = ray.remote(_run).options(**options).remote
        running = {submit(references, names, first): first}
        try:
            for task in tasks:
                while len(running) >= _IN_FLIGHT:
                    self._collect(ray, running, on_done)
                running[submit(references, names, task)] = task
            while running:
                self._collect(ray, running, on_done)
        except BaseException:
            self.stopped.set()
            for reference in running:
                with suppress(Exception):
                    ray.cancel(reference)
            raise

    def barrier(self) -> None:
        """Nobody else runs this program."""

    def _await_worker(self, ray: Any) -> None:
        """Wait until one of the workers that were started here works; raise if none does."""
        if not self.warming:
            return
        ready, _ = ray.wait(self.warming, num_returns=1, timeout=_START_SECONDS)
        self.warming = []
        if not ready:
            raise ProcessError(
                f"Ray's workers did not start within {_START_SECONDS // 60} minutes; the machine may have too much "
                "else to do, or too little memory. Run the same command again, or use --launcher local --processes N."
            )
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            raise ProcessError(
                f"Ray's workers fail here ({_shorten(error)}); use --launcher local --processes N."
            ) from error

    def _collect(self, ray: Any, running: dict[Any, Any], on_done: Callable[[Any], None] | None) -> None:
        ready, _ = ray.wait(list(running)[:_IN_FLIGHT], num_returns=1, timeout=None)
        for reference in ready:
            task = running.pop(reference)
            try:
                problem = ray.get(reference)
            except ray.exceptions.RayError as error:
                kind = type(error).__name__
                raise ProcessError(
                    f"Ray gave up a piece after {self.resources.retries} retries ({kind}); were its workers killed for "
                    "want of memory? Finished work is kept: run the same command again, perhaps with more "
                    "--resource memory=GIGABYTES."
                ) from error
            if problem is not None:
                raise ProcessError(problem)
            if on_done is not None:
                on_done(task)


@contextmanager
def connect(resources: Resources, address: str | None, processes: int | None) -> Iterator[RayLauncher]:
    """Join a Ray cluster, or start one on this machine, and yield its launcher; leave it in the end.

    Args:
        resources: what each task asks for.
        address: of the cluster; None starts one here, which ends with this process.
        processes: how many workers to start here; None for one a core.
    """
    optional.require("ray", "--launcher ray")
    import ray

    is_new = not ray.is_initialized()
    workers = processes or count_cores()
    if is_new and address is None:
        _start(ray, workers)
    elif is_new:
        _join(ray, str(address))
    try:
        _check_fits(ray, resources, may_grow=address is not None)
        launcher = RayLauncher(resources)
        if is_new and address is None:
            # They import while this process loads the model.
            warm = ray.remote(_import_all).options(num_cpus=resources.cpus, max_retries=resources.retries).remote
            launcher.warming = [warm() for _ in range(max(1, workers // resources.cpus))]
        yield launcher
    finally:
        if is_new:
            ray.shutdown()


def _start(ray: Any, workers: int) -> None:
    """Start Ray on this machine; a machine that does much else may need more than one attempt."""
    settings = {name: value for name, value in _SETTINGS.items() if name not in os.environ} | import_settings()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with set_variables(settings):
                ray.init(
                    num_cpus=workers,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    job_config=_imports(ray),
                )
        except Exception as error:  # Ray raises plain ones, too
            with suppress(Exception):
                ray.shutdown()
            if attempt == _ATTEMPTS:
                raise ProcessError(
                    f"Ray does not start here ({_shorten(error)}; tried {attempt} times); run the same command again, "
                    "or use --launcher local --processes N."
                ) from error
            _LOG.info("Ray does not start (%s); trying again", _shorten(error))
            time.sleep(attempt)
        else:
            return


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, job_config=_imports(ray))
    except Exception as error:  # Ray raises plain ones, too
        raise ProcessError(
            f"there is no Ray cluster at '{address}' ({_shorten(error)}); start one with `ray start --head`, or leave "
            "out --address."
        ) from error


def _imports(ray: Any) -> Any:
    """Where workers look for modules: Ray puts the current folder, which may be anybody's, before all others."""
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=checkout())


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _import_all() -> None:
    """A task that imports what pieces need; a worker that has done it begins its first piece at once."""
    import transformers

    for name in ("AutoModelForImageTextToText", "AutoProcessor"):
        getattr(transformers, name)


def _check_fits(ray: Any, resources: Resources, *, may_grow: bool = False) -> None:
    """Raise if no machine of the cluster has what one task asks for: Ray would wait for one without a word.

    If the cluster may grow, warn instead: such a machine may be on its way.
    """
    asked = {"CPU": float(resources.cpus), "GPU": resources.gpus, "memory": resources.memory * 1e9}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if nodes and not any(all(node.get(name, 0) >= count for name, count in asked.items()) for node in nodes):
        largest = {name: max(node.get(name, 0) for node in nodes) for name in asked}
        text = (
            f"no machine of the Ray cluster has what a task asks for (cpus={resources.cpus}, gpus={resources.gpus:g}, "
            f"memory={resources.memory:g}); the largest numbers are cpus={largest['CPU']:g}, gpus={largest['GPU']:g}, "
            f"memory={largest['memory'] / 1e9:.1f}. "
        )
        if not may_grow:
            raise ProcessError(f"{text}Ask for less, or start such a machine first.")
        warn(f"{text}The build waits until the cluster has such a machine; to ask for less, stop it and run it again.")


def _run(references: list[Any], names: tuple[str, str], task: Any) -> str | None:
    """The body of a Ray task."""
    import ray
    from ray import cloudpickle

    def read(number: int) -> Callable[[], Any]:
        return lambda: cloudpickle.loads(ray.get(references[number]))

    return run_task(names[0], read(0), names[1], read(1), task)
