"""Faults at calls of the file system: the n-th one raises, or kills the process."""

import builtins
import errno
import io
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
NEED_ROOM = ("open", "mkdir", "fsync")


@contextmanager
def fault_at(
    number: int, act: Callable[[], object], *, changing: bool = False, lasting: bool = False
) -> Iterator[list[str]]:
    """Inside, `act` is called before the call of this number, from 1; yields the names of the calls so far.

    What C and Rust write by themselves is not among the calls: they go through a file that was opened here, or a full
    disk meets them in `fsync`, or in `no_room_after`.

    Args:
        number: of the call.
        act: raises, or kills.
        changing: count only calls that change what is on disk, not files that are opened to be read.
        lasting: call `act` before all later calls that need room, too.
    """
    calls: list[str] = []
    before = {(os, name): getattr(os, name) for name in NAMES}
    before |= {(module, "open"): module.open for module in (io, builtins)}

    def watch(name, function):
        def call(*arguments, **options):
            if not changing or name != "open" or _opens_to_write(*arguments, **options):
                calls.append(name)
                if len(calls) == number or (lasting and len(calls) > number and name in NEED_ROOM):
                    act()
            return function(*arguments, **options)

        return call

    for (module, name), function in before.items():
        setattr(module, name, watch(name, function))
    try:
        yield calls
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


def _opens_to_write(_file: object, mode: str | int = "r", *_: object, **options: object) -> bool:
    """Whether the arguments of `open`, or those of `os.open`, ask for a file to change."""
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return any(letter in str(options.get("mode", mode)) for letter in "wax+")


@contextmanager
def no_room_after(size: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond so many bytes: the system refuses it, also to C and Rust."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk() -> None:
    """What the system raises where no room is left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object], seconds: float | None = None) -> int:
    """Run work in a fork of this process; returns its exit status.

    Args:
        work: what the child does; it ends with 0, or with 1 if that raises.
        seconds: after which it is killed, unless it ended before.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent looks at what is on disk
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        import time

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(min(0.0005, seconds / 10))
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
