"""Files that are whole or not there, and the folder where everything of ours lives."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from elude_steer.errors import StorageError

if TYPE_CHECKING:
    import numpy as np
    import torch

_TEMPORARY = re.compile(r"\.(?:tmp|old)-(\d+)(?:-\d+)?$")


def home() -> Path:
    """Where atlases, caches and unfinished work are kept: `ELUDE_STEER_HOME`, or the user's cache folder."""
    return Path(os.environ.get("ELUDE_STEER_HOME") or "~/.cache/elude_steer").expanduser()


def resolve_id(id: str) -> str:
    """What a loader is given for an id: the folder of what comes with the package (`toyland/captioner`), or the id."""
    inside = re.fullmatch(r"toyland/(\w+)", id)
    if inside and (folder := Path(__file__).parents[1] / "toyland" / "data" / inside[1]).is_dir():
        return str(folder)
    return str(Path(id).expanduser()) if id.startswith("~") else id


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file that appears only when it is complete and on the disk."""
    import threading

    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    with explain_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_folder(path: Path) -> Path:
    """The same, or an error where files could not be written into it; for what is written after hours of work."""
    there = path.expanduser()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise StorageError(f"'{there}' is a file, where a folder is wanted; give another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"nothing can be written to '{there}'; give another folder, or ask for the right to.")
    return path.expanduser()


def read_json(path: Path) -> Any:
    """What a file of ours says; one that is damaged is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a `.npy` file in the same way."""
    import numpy as np

    data = io.BytesIO()  # straight to a file, NumPy says a full disk in words that cannot be told from other errors
    np.save(data, array)
    write_file(path, lambda file: file.write(data.getbuffer()))


def read_array(path: Path) -> np.ndarray:
    """An array of a `.npy` file, mapped into memory."""
    import numpy as np

    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, OSError) as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a `.safetensors` file in the same way."""
    from safetensors.torch import save

    data = save(tensors)
    write_file(path, lambda file: file.write(data))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.safetensors` file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `path` at the end, or vanishes if anything fails before."""
    path = path.absolute()
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside = path.with_name(f"{path.name}.old-{os.getpid()}")
    with explain_write_errors(path):
        restore(path)
        remove_leftovers(path.parent, path.name)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            if path.exists():
                path.rename(aside)
            try:
                temporary.rename(path)
            except BaseException:
                if aside.exists():
                    aside.rename(path)
                raise
            shutil.rmtree(aside, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def restore(path: Path) -> None:
    """Puts a folder back that a killed process had set aside while it was about to replace it."""
    if path.exists() or not path.parent.is_dir():
        return
    for aside in path.parent.glob(f"{glob.escape(path.name)}.old-*"):
        if not _alive(int(aside.name.rpartition("-")[2])):
            aside.rename(path)
            return


def is_leftover(path: Path) -> bool:
    """Whether a file or folder is only there because something was interrupted."""
    return bool(re.search(r"\.(tmp|old)-\d+(-\d+)?$", path.name))


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Deletes temporary files in `folder` (of one name) whose process is gone: a killed run leaves them behind."""
    found = [*folder.glob(f"{glob.escape(name)}*.tmp-*"), *(folder.glob(f"{glob.escape(name)}.old-*") if name else ())]
    for path in found:
        match = _TEMPORARY.search(path.name)
        if match and not _alive(int(match.group(1))):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Says in one line that a disk is full or a folder cannot be written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            left = _free(path)
            raise StorageError(
                f"no room left while writing '{path}'{left}; free some and run the same command again "
                "(finished work is kept)."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT):
            raise StorageError(f"'{path}' cannot be written ({error.strerror}); choose another folder.") from error
        raise


def _free(path: Path) -> str:
    with contextlib.suppress(OSError):
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        return f" ({shutil.disk_usage(existing).free / 1e6:.0f} MB free)"
    return ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
