"""Atomic writing of files and folders, and the folder in which the package keeps its data."""

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
    """The folder of atlases, caches and unfinished work: `ELUDE_STEER_HOME`, or one in the user's cache."""
    return Path(os.environ.get("ELUDE_STEER_HOME") or "~/.cache/elude_steer").expanduser()


def resolve_id(id: str) -> str:
    """The id or folder to load for an id; `toyland/captioner` and the like become folders inside the package."""
    shipped = re.fullmatch(r"toyland/(\w+)", id)
    if shipped and (folder := Path(__file__).parents[1] / "toyland" / "data" / shipped[1]).is_dir():
        return str(folder)
    return str(Path(id).expanduser()) if id.startswith("~") else id


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that appears only once it is complete and on disk."""
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
    """Return the folder, or raise if files cannot be written to it; for results that come after hours of work."""
    existing = path.expanduser()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise StorageError(f"'{existing}' is a file, not a folder; give another path.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"'{existing}' is not writable; give another folder, or change its permissions.")
    return path.expanduser()


def read_json(path: Path) -> Any:
    """Read a JSON file; the error names a damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file in the same way."""
    import numpy as np

    data = io.BytesIO()  # writing straight to a file, NumPy reports a full disk like any other error
    np.save(data, array)
    write_file(path, lambda file: file.write(data.getbuffer()))


def read_array(path: Path) -> np.ndarray:
    """Map the array of a `.npy` file into memory."""
    import numpy as np

    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, OSError) as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a `.safetensors` file in the same way."""
    from safetensors.torch import save

    data = save(tensors)
    write_file(path, lambda file: file.write(data))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a `.safetensors` file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` at the end, or is deleted if anything fails."""
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
    """Put back a folder that a killed process had moved aside in order to replace it."""
    if path.exists() or not path.parent.is_dir():
        return
    for aside in path.parent.glob(f"{glob.escape(path.name)}.old-*"):
        if not _is_running(int(aside.name.rpartition("-")[2])):
            aside.rename(path)
            return


def is_leftover(path: Path) -> bool:
    """Whether a file or folder was left behind by an interruption."""
    return bool(re.search(r"\.(tmp|old)-\d+(-\d+)?$", path.name))


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Delete temporary files in `folder`, of one name if given, whose process no longer runs."""
    found = [*folder.glob(f"{glob.escape(name)}*.tmp-*"), *(folder.glob(f"{glob.escape(name)}.old-*") if name else ())]
    for path in found:
        match = _TEMPORARY.search(path.name)
        if match and not _is_running(int(match.group(1))):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk or a folder without permission into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = _free_space(path)
            raise StorageError(
                f"no room left while writing '{path}'{free}; free some and run the same command again "
                "(finished work is kept)."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT):
            raise StorageError(f"'{path}' cannot be written ({error.strerror}); choose another folder.") from error
        raise


def _free_space(path: Path) -> str:
    with contextlib.suppress(OSError):
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        return f" ({shutil.disk_usage(existing).free / 1e6:.0f} MB free)"
    return ""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
