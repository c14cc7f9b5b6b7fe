"""The file system of a URL, through fsspec, with one-line errors.

The credentials are those that the store's own library finds: environment variables, its configuration file, or the
role of the machine. None are read from a URL or a spec.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from elude_steer.errors import EludeSteerError, MissingPackageError, StorageError
from elude_steer.utils import optional

Value = TypeVar("Value")
_PAUSES = (0.5, 2.0)  # seconds before a read that failed is tried again
# protocol -> the package that speaks it; None: fsspec or huggingface_hub alone. fsspec knows others, some of which
# start programs or read what a file of a stranger names, so they are not opened.
PROTOCOLS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hf": None,
    "file": None, "memory": None, "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip


def is_url(path: object) -> bool:
    """Whether a path is a URL such as `s3://bucket/folder`."""
    return isinstance(path, str) and "://" in path


def join_url(url: str, *parts: str) -> str:
    """A URL below another."""
    return "/".join([url.rstrip("/"), *parts])


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL or path, and the path inside it."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    if "::" in url or protocol not in PROTOCOLS:
        raise StorageError(
            f"'{url}' is not a URL that is read here; give one of {', '.join(f'{name}://' for name in PROTOCOLS)}"
        )
    package = PROTOCOLS[protocol]
    if package in optional.EXTRAS:
        optional.require(package, f"'{url}'")
    from fsspec.core import url_to_fs

    with explain_remote_errors(url):
        try:
            filesystem, path = url_to_fs(url if "://" in url else str(Path(url).expanduser().absolute()))
        except ImportError as error:
            raise MissingPackageError(f"'{url}' needs the package '{package}'; `pip install {package}`.") from error
    return filesystem, path


@contextmanager
def explain_remote_errors(url: str) -> Iterator[None]:
    """Turn whatever a store's library raises into one line."""
    try:
        yield
    except EludeSteerError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"there is no '{url}'; check the URL.") from error
    except PermissionError as error:
        raise StorageError(f"'{url}' refuses access ({_one_line(error)}); check your credentials for it.") from error
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise StorageError(
            f"'{url}' cannot be read or written ({_one_line(error)}); finished work is kept: run the same command "
            "again."
        ) from error


def read_again(url: str, read: Callable[[], Value]) -> Value:
    """What `read` returns; if the store fails, `read` is called again after a pause, twice at most."""
    for pause in _PAUSES:
        try:
            with explain_remote_errors(url):
                return read()
        except StorageError as error:
            if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError | PermissionError):
                raise
            time.sleep(pause)
    with explain_remote_errors(url):
        return read()


def check_url(url: str) -> str:
    """Return the URL of a folder to write to; raise if nothing can be written there."""
    filesystem, path = open_filesystem(url)
    probe = f"{path.rstrip('/')}/.elude-steer-{os.getpid()}"
    with explain_remote_errors(url):
        make_folder(filesystem, path)
        filesystem.pipe_file(probe, b"")
        filesystem.rm_file(probe)
    return url


def make_folder(filesystem: Any, path: str) -> None:
    """Make a folder where there are folders; an object store needs none, and might make a bucket instead."""
    if "file" in filesystem.protocol:
        filesystem.makedirs(path, exist_ok=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
