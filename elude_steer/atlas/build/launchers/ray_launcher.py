"""Pieces of a build as Ray tasks: one a piece, begun again where a worker or a machine is lost, on any cluster.

Ray moves the pickled build and stages to the workers, restarts what is lost, and uses machines that come and go. The
results are files: in the work folder, if all machines share it, or behind a URL.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from elude_steer.atlas.build.launchers.resources import Resources
from elude_steer.atlas.build.launchers.worker import hash_bytes, run_task
from elude_steer.errors import ProcessError
from elude_steer.utils import optional
from elude_steer.utils.threads import count_cores

_IN_FLIGHT = 4096  # tasks that are submitted and not done; more would only fill the scheduler
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

    joined = not ray.is_initialized()
    if joined:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            options |= {"num_cpus": processes or count_cores(), "include_dashboard": False}
            # Ray lets its workers wait for every other program of a machine; these are the user's own work.
            os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray raises plain ones, too
            line = " ".join(str(error).split())[:200]
            if address is None:
                raise ProcessError(f"Ray does not start here ({line}); run the same command again.") from error
            raise ProcessError(
                f"there is no Ray cluster at '{address}' ({line}); start one with `ray start --head`, or leave out "
                "--address."
            ) from error
    try:
        _check_fits(ray, resources)
        yield RayLauncher(resources)
    finally:
        if joined:
            ray.shutdown()


def _check_fits(ray: Any, resources: Resources) -> None:
    """Raise if no machine of the cluster has what one task asks for: Ray would wait for one without a word."""
    asked = {"CPU": float(resources.cpus), "GPU": resources.gpus, "memory": resources.memory * 1e9}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if nodes and not any(all(node.get(name, 0) >= count for name, count in asked.items()) for node in nodes):
        largest = {name: max(node.get(name, 0) for node in nodes) for name in asked}
        raise ProcessError(
            f"no machine of the Ray cluster has what a task asks for (cpus={resources.cpus}, gpus={resources.gpus:g}, "
            f"memory={resources.memory:g}); the largest numbers are cpus={largest['CPU']:g}, gpus={largest['GPU']:g}, "
            f"memory={largest['memory'] / 1e9:.1f}. Ask for less, or start such a machine first."
        )


def _run(references: list[Any], names: tuple[str, str], task: Any) -> str | None:
    """The body of a Ray task."""
    import ray
    from ray import cloudpickle

    def read(number: int) -> Callable[[], Any]:
        return lambda: cloudpickle.loads(ray.get(references[number]))

    return run_task(names[0], read(0), names[1], read(1), task)
