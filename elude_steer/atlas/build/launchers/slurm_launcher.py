"""Pieces of a build in jobs of SLURM, through submitit: an array for each stage, each job of which does a share.

What was lost with a job (preempted, out of time, a node that failed) is submitted again in another array. submitit
needs one folder that all nodes see; results are there, or behind a URL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from elude_steer.atlas.build.launchers.resources import Resources
from elude_steer.atlas.build.launchers.worker import hash_bytes, run_task
from elude_steer.errors import ProcessError
from elude_steer.utils import optional
from elude_steer.utils.files import explain_write_errors, wait_for, write_file
from elude_steer.utils.parallel import WorkerGroup, import_settings, set_variables

_POLL = 2.0  # seconds between two looks at the queue


@dataclass(frozen=True)
class Payload:
    """What all jobs of a stage read from the folder.

    Attributes:
        folder: where the files are.
        origin: the name of the file with the build.
        work: the name of the file with the function that does a piece.
        threads: pieces that a job does at a time.
    """

    folder: Path
    origin: str
    work: str
    threads: int

    def read(self, name: str) -> Any:
        """The value in one of the files, if it is what was written."""
        import cloudpickle

        path = payload_path(self.folder, name)
        wait_for([path])
        with explain_write_errors(path):
            data = path.read_bytes()
        if hash_bytes(data) != name:
            raise ProcessError(f"'{path}' is damaged; delete it and run the same command again.")
        return cloudpickle.loads(data)


def payload_path(folder: Path, name: str) -> Path:
    """Where a value is that all jobs read."""
    return folder / f"shared-{name}.pkl"


@dataclass
class SlurmLauncher:
    """A `Launcher` whose pieces are done by job arrays."""

    resources: Resources
    folder: Path
    rank: int = 0
    world: int = 1
    threads: int = 1
    local: int = 1
    stopped: threading.Event = field(default_factory=threading.Event)
    travels: bool = True
    origin: Any = None  # what `worker.describe_build` gives; set once the build is there
    _saved: dict[str, str] = field(default_factory=dict)  # names of files with what jobs read

    def each(
        self, pieces: Iterable[Any], work: Callable[[Any], None], on_done: Callable[[Any], None] | None = None
    ) -> None:
        """Do all pieces in job arrays and wait for them."""
        left = list(pieces)
        if not left:
            return
        if "origin" not in self._saved:
            self._saved["origin"] = self._save(self.origin)
        threads = 1 if self.origin is None else self.origin.threads
        payload = Payload(self.folder, self._saved["origin"], self._save(work), threads)
        rounds = 0
        while left:
            shares = [left[first :: self.resources.jobs] for first in range(min(len(left), self.resources.jobs))]
            jobs = self._submit(payload, shares)
            try:
                lost, cause = self._collect(jobs, shares, on_done)
            except BaseException:  # Ctrl-C too: nothing goes on without this process
                self.stopped.set()
                self._cancel(jobs)
                raise
            rounds += 1
            if lost and rounds > self.resources.retries:
                raise ProcessError(
                    f"{len(lost)} pieces were lost with their jobs {rounds} times ({cause}); see the logs in "
                    f"'{self.folder}'. Finished work is kept: run the same command again."
                )
            left = lost

    def barrier(self) -> None:
        """Nobody else runs this program."""

    def _save(self, value: Any) -> str:
        """Write a value to the folder, once for all jobs: a list of a million images in each would take gigabytes."""
        import cloudpickle

        data = cloudpickle.dumps(value)
        name = hash_bytes(data)
        write_file(payload_path(self.folder, name), lambda file: file.write(data))
        return name

    def _collect(
        self, jobs: Sequence[Any], shares: Sequence[Sequence[Any]], on_done: Callable[[Any], None] | None
    ) -> tuple[list[Any], str | None]:
        """Wait for all jobs; returns the pieces of those that were lost, and why. A job's error is raised at once."""
        running = dict(enumerate(zip(jobs, shares, strict=True)))
        lost: list[Any] = []
        cause = None
        while running:
            for number, (job, share) in [one for one in running.items() if one[1][0].done()]:
                del running[number]
                problem, found = self._result(job)
                if problem is not None:
                    raise ProcessError(problem)
                if found is not None:
                    lost, cause = [*lost, *share], found
                elif on_done is not None:
                    for piece in share:
                        on_done(piece)
            if running:
                time.sleep(_POLL if self.resources.cluster == "slurm" else min(_POLL, 0.1))
        return lost, cause

    def _submit(self, payload: Payload, shares: Sequence[Sequence[Any]]) -> list[Any]:
        import submitit

        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.resources.cluster)
        executor.update_parameters(**self._parameters(len(shares)))
        try:
            with set_variables(import_settings()):  # which `sbatch` hands on
                jobs: list[Any] = executor.map_array(partial(_run_share, payload), shares)
        except Exception as error:
            line = " ".join(str(error).split())[:300]
            raise ProcessError(
                f"SLURM takes no jobs ({type(error).__name__}: {line}); try `sbatch` by hand."
            ) from error
        return jobs

    def _parameters(self, shares: int) -> dict[str, Any]:
        resources = self.resources
        asked: dict[str, Any] = {
            "name": "elude-steer", "timeout_min": resources.minutes, "cpus_per_task": resources.cpus,
            "gpus_per_node": int(resources.gpus) or None, "mem_gb": resources.memory or None,
            "slurm_array_parallelism": shares, "slurm_partition": resources.partition or None,
            "slurm_account": resources.account or None, "slurm_qos": resources.qos or None,
            "slurm_constraint": resources.constraint or None,
        }  # fmt: skip
        return {name: value for name, value in asked.items() if value is not None}

    @staticmethod
    def _result(job: Any) -> tuple[str | None, str | None]:
        """What is wrong with the work of a job that has ended, or with the job; both None if it is done."""
        try:
            return job.result(), None
        except Exception as error:  # noqa: BLE001 - submitit tells of a lost job with errors of many types
            return None, " ".join(str(error).split())[:300] or type(error).__name__

    @staticmethod
    def _cancel(jobs: Sequence[Any]) -> None:
        for job in jobs:
            with suppress(Exception):  # the others are cancelled nevertheless
                if not job.done():
                    job.cancel()


def connect(resources: Resources, folder: Path) -> SlurmLauncher:
    """The launcher of this cluster; raise if SLURM is not there.

    Args:
        resources: what each job asks for.
        folder: for submitit's files and logs; all nodes must see it.
    """
    submitit = optional.require("submitit", "--launcher slurm")
    if resources.cluster == "slurm" and submitit.AutoExecutor(folder=folder).cluster != "slurm":
        raise ProcessError(
            "`srun` is not on this machine, so there is no SLURM here; run this on a login node, or try the launcher "
            "without: --resource cluster=local."
        )
    return SlurmLauncher(resources, folder)


def _run_share(payload: Payload, share: Sequence[Any]) -> str | None:
    """The body of a job: its pieces, as many at a time as it has cores."""
    origin, work = payload.origin, payload.work

    def do(piece: Any) -> None:
        problem = run_task(origin, lambda: payload.read(origin), work, lambda: payload.read(work), piece)
        if problem is not None:
            raise ProcessError(problem)

    try:
        do(share[0])  # opens the build before threads share it
        WorkerGroup(threads=payload.threads).each(share[1:], do)
    except ProcessError as error:
        return str(error)
    return None
