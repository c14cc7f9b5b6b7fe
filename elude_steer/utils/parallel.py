"""Work in several processes and threads. Each piece is done by one thread, so the result does not depend on which."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from elude_steer.errors import EludeSteerError, ProcessError, SpecError
from elude_steer.utils.threads import count_cores

Piece = TypeVar("Piece")
ERROR_FILE = "ELUDE_STEER_ERROR_FILE"  # a started process writes its error to this file for the one that started it
PARENT = "ELUDE_STEER_PARENT"


class Launcher(Protocol):
    """Does pieces of work somewhere. A piece may be begun again elsewhere, so work that is done leaves a file.

    Attributes:
        rank: of this process among those that run the same program; only the first writes what is written once.
        world: how many run it.
        threads: how many pieces this process does at a time.
        local: how many processes share this machine's memory.
        stopped: set after an error; pieces that have not written anything then write nothing.
        travels: whether `each` sends work to processes that do not run this program.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102 - above

    @property
    def world(self) -> int: ...  # noqa: D102

    @property
    def threads(self) -> int: ...  # noqa: D102

    @property
    def local(self) -> int: ...  # noqa: D102

    @property
    def stopped(self) -> threading.Event: ...  # noqa: D102

    @property
    def travels(self) -> bool: ...  # noqa: D102

    def each(
        self, pieces: Iterable[Piece], work: Callable[[Piece], None], on_done: Callable[[Piece], None] | None = None
    ) -> None:
        """Do all pieces and wait for them; the first error stops the others and is raised."""

    def barrier(self) -> None:
        """Wait until all processes that run this program have arrived here."""


class Slots:
    """A number of places, one for each thread that may do something at a time; in another process there is one."""

    def __init__(self, count: int = 1) -> None:
        self._places = threading.BoundedSemaphore(count)

    def __enter__(self) -> None:
        self._places.acquire()

    def __exit__(self, *_: Any) -> None:
        self._places.release()

    def __reduce__(self) -> tuple[type[Slots], tuple[()]]:
        return Slots, ()


@dataclass(frozen=True)
class WorkerGroup:
    """This process, number `rank` of `world`, with `threads` threads of one core each; `local` share this machine."""

    rank: int = 0
    world: int = 1
    threads: int = 1
    local: int = 1
    stopped: threading.Event = field(default_factory=threading.Event)
    travels: bool = False

    def each(
        self, pieces: Iterable[Piece], work: Callable[[Piece], None], on_done: Callable[[Piece], None] | None = None
    ) -> None:
        """Call `work` on this process's share of the pieces, several at a time, and wait for the other processes.

        Args:
            pieces: the same in all processes.
            work: does one.
            on_done: called with each piece of this process's share that is done.
        """

        def do(piece: Piece) -> None:
            work(piece)
            if on_done is not None:
                on_done(piece)

        mine = (piece for number, piece in enumerate(pieces) if number % self.world == self.rank)
        pool = ThreadPoolExecutor(self.threads)
        running: set[Future[None]] = set()
        try:
            for piece in mine:
                running.add(pool.submit(do, piece))
                if len(running) > self.threads:  # one piece waits; a stream is never read far ahead
                    running = _finish(running, FIRST_COMPLETED)
                _stop_if_orphaned()
            while running:
                running = _finish(running, FIRST_COMPLETED)
        except BaseException:
            self.stopped.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self.barrier()

    def barrier(self) -> None:
        """Wait until all processes have arrived here."""
        if self.world > 1:
            try:
                torch.distributed.barrier()
            except RuntimeError as error:  # gloo tells which connection broke, not why
                raise ProcessError(
                    "another of the processes has ended; finished work is kept: run the same command again."
                ) from error


def _finish(running: set[Future[None]], when: str) -> set[Future[None]]:
    done, waiting = wait(running, return_when=when)
    for future in done:
        future.result()
    return waiting


@contextmanager
def worker_group(processes: int | None = None, threads: int | None = None) -> Iterator[WorkerGroup]:
    """Yield the group of this process: alone, or one of those that torchrun or `launch` started.

    Inside, torch computes with one thread: sums that torch splits over threads depend on the number of threads, pieces
    of work that each thread does completely do not.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if processes is not None and processes != world:
        raise ProcessError(
            f"{processes} processes were requested, and there are {world}; start them with "
            f"`torchrun --nproc_per_node {processes} -m elude_steer build …`, or use --processes alone."
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    started = world > 1 and not torch.distributed.is_initialized()
    try:
        if started:
            # Barriers wait for the slowest piece, which may take hours; `launch` notices a dead process.
            torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
        yield WorkerGroup(rank, world, threads or max(1, count_cores() // local), local)
    finally:
        torch.set_num_threads(before)
        if started and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def import_settings() -> dict[str, str]:
    """Variables for another Python that is to import this package, and nothing of whoever owns the current folder."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an empty one is the current folder
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([*checkout(), *given])}


@contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these variables in its environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def checkout() -> list[str]:
    """The folder that holds this package, unless it is that of all installed packages."""
    folder = str(Path(__file__).resolve().parents[2])
    return [] if folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [folder]


# Why not torchrun, which starts the processes on several machines (`worker_group` works with both): here an error of a
# child is one line of its parent instead of a log of all ranks; a failure, Ctrl-C or SIGTERM ends all children at once;
# and children whose parent was killed end by themselves.
def launch(processes: int, arguments: Sequence[str]) -> None:
    """Run `elude-steer` with these arguments in several processes; the first failure ends all and is raised."""
    if processes < 1:
        raise SpecError(f"processes is {processes}; it must be at least 1.")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # the system picks a free port
        port = probe.getsockname()[1]
        probe.close()
        children = []
        try:
            for rank in range(processes):
                environment = {
                    **os.environ,
                    **import_settings(),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    ERROR_FILE: str(Path(folder) / f"{rank}.txt"),
                    PARENT: str(os.getpid()),
                }
                command = [sys.executable, "-m", "elude_steer", *arguments]
                children.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            _wait_for(children, Path(folder))
        finally:
            for child in children:
                child.kill()
                child.wait()


def _wait_for(children: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    while True:
        codes = [child.poll() for child in children]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(0.2)  # others may fail for the same reason: the error of the lowest rank is raised
            codes = [child.poll() for child in children]
            killed = [rank for rank, code in enumerate(codes) if code and code < 0]
            for rank in range(len(children)):
                # If one was killed, the others fail because it is gone, and their errors do not say that.
                if not killed and (path := folder / f"{rank}.txt").exists():
                    raise EludeSteerError(path.read_text(encoding="utf-8"))
            failed = killed or failed
            code = codes[failed[0]] or 0
            ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"stopped with code {code}"
            raise ProcessError(
                f"process {failed[0] + 1} of {len(children)} {ending}; the others were stopped too. "
                "Finished work is kept: run the same command again."
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _stop_if_orphaned() -> None:
    """End a started process if the one that started it was killed and could not end it."""
    parent = os.environ.get(PARENT)
    if parent and os.getppid() != int(parent):
        raise ProcessError("the process that started this one has ended.")
