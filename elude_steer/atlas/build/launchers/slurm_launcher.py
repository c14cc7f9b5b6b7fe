"""Pieces of a build in jobs of SLURM, through submitit: an array for each stage, each job of which does a share.

What was lost with a job (preempted, out of time, a node that failed) is submitted again in another array. submitit
needs one folder that all nodes see; results are there, or behind a URL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elude_steer.atlas.build.launchers.resources import Resources
from elude_steer.atlas.build.launchers.worker import hash_bytes, run_task
from elude_steer.errors import ProcessError
from elude_steer.utils import optional
from elude_steer.utils.parallel import WorkerGroup, import_settings, set_variables

_POLL = 2.0  # seconds between two looks at the queue


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

    def each(
        self, pieces: Iterable[Any], work: Callable[[Any], None], on_done: Callable[[Any], None] | None = None
    ) -> None:
        """Do all pieces in job arrays and wait for them."""
        import cloudpickle

        left = list(pieces)
        payload = cloudpickle.dumps(self.origin), cloudpickle.dumps(work)
        rounds = 0
        while left:
            shares = [left[first :: self.resources.jobs] for first in range(min(len(left), self.resources.jobs))]
            jobs = self._submit(payload, shares)
            lost: list[Any] = []
            for job, share in zip(jobs, shares, strict=True):
                problem, cause = self._wait(job)
                if problem is not None:
                    self._cancel(jobs)
                    raise ProcessError(problem)
                if cause is not None:
                    lost += share
                elif on_done is not None:
                    for piece in share:
                        on_done(piece)
            rounds += 1
            if lost and rounds > self.resources.retries:
                raise ProcessError(
                    f"{len(lost)} pieces were lost with their jobs {rounds} times ({cause}); see the logs in "
                    f"'{self.folder}'. Finished work is kept: run the same command again."
                )
            left = lost

    def barrier(self) -> None:
        """Nobody else runs this program."""

    def _submit(self, payload: tuple[bytes, bytes], shares: Sequence[Sequence[Any]]) -> list[Any]:
        import submitit

        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.resources.cluster)
        executor.update_parameters(**self._parameters(len(shares)))
        try:
            with set_variables(import_settings()):  # which `sbatch` hands on
                jobs: list[Any] = executor.map_array(_run_share, [payload] * len(shares), shares)
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

    def _wait(self, job: Any) -> tuple[str | None, str | None]:
        """What is wrong with the work of a job, or with the job; both None if it is done."""
        while not job.done():
            time.sleep(min(_POLL, 0.1 if self.resources.cluster != "slurm" else _POLL))
        try:
            return job.result(), None
        except Exception as error:  # noqa: BLE001 - submitit tells of a lost job with errors of many types
            return None, " ".join(str(error).split())[:300] or type(error).__name__

    @staticmethod
    def _cancel(jobs: Sequence[Any]) -> None:
        for job in jobs:
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


def _run_share(payload: tuple[bytes, bytes], share: Sequence[Any]) -> str | None:
    """The body of a job: its pieces, as many at a time as it has cores."""
    import cloudpickle

    origin, work = payload
    names = hash_bytes(origin), hash_bytes(work)
    problems: list[str] = []
    threads = cloudpickle.loads(origin).threads

    def do(piece: Any) -> None:
        problem = run_task(
            names[0], lambda: cloudpickle.loads(origin), names[1], lambda: cloudpickle.loads(work), piece
        )
        if problem is not None:
            raise ProcessError(problem)

    try:
        do(share[0])  # opens the build before threads share it
        WorkerGroup(threads=threads).each(share[1:], do)
    except ProcessError as error:
        problems.append(str(error))
    return problems[0] if problems else None
