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
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from elude_steer.errors import EludeSteerError, StorageError

if TYPE_CHECKING:
    import numpy as np
    import torch

# Sub-packages with models and an atlas of their own, and what their images are.
WORLDS = {"toyland": "drawn scenes", "photoland": "photographs"}
REPORT_ENDINGS = (".html", ".htm")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg")
# An unfinished file or folder: process, thread, and where a process of that number means the same.
_UNFINISHED = re.compile(r"\.(?:tmp|old)-(\d+)(?:-\d+(?:-([0-9a-f]{8}))?)?$")
_SECONDS, _DAY = 60, 86400  # how long what another container or machine may be writing is left alone
_UNWRITABLE = (
    errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.EBUSY, errno.EIO,
    errno.EINVAL, errno.ELOOP, errno.EXDEV, errno.ENOTEMPTY, errno.EISDIR,
)  # fmt: skip


def home() -> Path:
    """The folder of atlases, caches and unfinished work: `ELUDE_STEER_HOME`, or one in the user's cache."""
    return Path(os.environ.get("ELUDE_STEER_HOME") or "~/.cache/elude_steer").expanduser()


def resolve_id(id: str) -> str:
    """The id or folder to load for an id; `toyland/captioner` and the like become folders inside the package."""
    shipped = re.fullmatch(rf"({'|'.join(WORLDS)})/(\w+)", id)
    if shipped and (folder := Path(__file__).parents[1] / shipped[1] / "data" / shipped[2]).is_dir():
        return str(folder)
    return str(Path(id).expanduser()) if id.startswith("~") else id


def write_file(path: Path, write: Callable[[IO[bytes]], object], *, clean: bool = False) -> None:
    """Write a file that appears only once it is complete and on disk.

    Args:
        path: the file; its folder is made if it is not there.
        write: writes the content.
        clean: delete what killed processes left in the folder; only for folders of this package's own.
    """
    temporary = unfinished_path(path)
    with explain_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if clean:
                remove_leftovers(path.parent)
            with temporary.open("wb") as file:
                _lock(file.fileno())
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def unfinished_path(path: Path, kind: str = "tmp") -> Path:
    """Where to write a file or folder until it is complete; its name tells others who writes it."""
    import threading

    return path.with_name(f"{path.name}.{kind}-{os.getpid()}-{threading.get_ident()}-{_place()}")


def check_file(path: str | Path, endings: Sequence[str]) -> Path:
    """Return the path of a file to write, or raise if it cannot be written; for results that come after long work.

    The folder of an output must be there: a path with a typing error makes no folders.

    Args:
        path: the file; it may be there, and is replaced.
        endings: those that its name may have, such as `.png`.
    """
    file = Path(path).expanduser()
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} is not the path of a file; give another one.")
    if file.suffix.lower() not in endings:
        known = endings[0] if len(endings) == 1 else f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise StorageError(f"'{path}' does not end in {known}; give a file name that does.")
    if os.path.isdir(file):  # noqa: PTH112, Path raises on a name that is too long
        raise StorageError(f"'{path}' is a folder; give the name of a file.")
    _check_place(file.parent, file.name)
    return file


def check_folder(path: str | Path, *, new: bool = False, replaced: bool = False) -> Path:
    """Return the path of a folder to write to, or raise if it cannot be written; the folder it lies in must be there.

    Args:
        path: the folder; it is made if it is not there.
        new: whether to refuse a folder with files in it.
        replaced: whether `new_folder` will replace it, for which the folder around it must be writable, too.
    """
    folder = Path(path).expanduser()
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} is not the path of a folder; give another one.")
    if not os.path.lexists(folder):
        _check_place(folder.absolute().parent, folder.name)
        return folder
    if not folder.is_dir():
        raise StorageError(f"'{path}' is a file, not a folder; give another path.")
    _check_place(folder, "its files")
    if new or replaced:
        if folder.is_mount():
            raise StorageError(f"'{path}' is a mounted disk, which cannot be replaced; give a new folder inside it.")
        _check_place(folder.absolute().parent, folder.name)
    if new and any(folder.iterdir()):
        raise StorageError(f"'{path}' already exists and is not an empty folder; give a new one.")
    return folder


def check_new_recipe(path: str | Path) -> Path:
    """Return the path of a YAML file to write; raise if it cannot be written, or is there already."""
    file = check_file(path, (".yaml", ".yml"))
    if os.path.lexists(file):
        raise StorageError(f"'{path}' already exists; choose another name.")
    return file


def write_image(path: Path, image: Any) -> None:
    """Write a PIL image in the format of the path's ending, one of `IMAGE_ENDINGS`, in the same way."""
    data = io.BytesIO()
    image.convert("RGB").save(data, "PNG" if path.suffix.lower() == ".png" else "JPEG")
    write_file(path, lambda file: file.write(data.getvalue()))


def _check_place(folder: Path, name: str) -> None:
    """Raise if nothing can be written into a folder."""
    if not folder.is_dir():
        raise StorageError(f"there is no folder '{folder}' for '{name}'; make it first, or give another path.")
    try:  # permissions alone do not tell: a disk may be read-only or full, and /proc takes no files
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(
            f"'{folder}' is not writable ({error.strerror or error}); give another folder, or change its permissions."
        ) from error
    if len(os.fsencode(name)) > 200:  # with the ending of the unfinished file, 255 bytes is what file systems take
        raise StorageError(f"'{name[:40]}…' is too long for the name of a file; give a shorter one.")


def wait_for(files: Sequence[Path], seconds: float = 60.0) -> None:
    """Wait until files that another machine has written are seen here; raise if they do not appear."""
    end = time.monotonic() + seconds  # a folder of the network may show new files late
    for file in files:
        while not file.exists():
            if time.monotonic() > end:
                raise StorageError(
                    f"'{file}' was written by another machine and is not seen here; give --work a folder that all "
                    "machines share, or a URL such as s3://bucket/work."
                )
            os.listdir(file.parent)  # noqa: PTH208 - looks again
            time.sleep(0.05)


def read_bytes(path: str | Path, limit: int) -> bytes:
    """Read a file that somebody else may have written: a pipe or a device, which may never end, is an `OSError`.

    Args:
        path: the file.
        limit: the most bytes that it may have; a larger one is an `OSError`, too.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        size = max(found.st_size, 2**16)  # files of the system say that they have 0 bytes
        data = file.read(min(limit, size) + 1) if found.st_size <= limit else b""
    if max(len(data), found.st_size) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit / 1e6:,.0f} MB")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer does not block."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: Path, kind: type | tuple[type, ...] | None = None, keys: Sequence[str] = ()) -> Any:
    """Read a JSON file of this package; the error names a damaged one, one of another `kind` or without these keys."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (kind is None or isinstance(found, kind)) and all(key in found for key in keys):
            return found
        raise ValueError("it is JSON of something else")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"'{path}' is damaged; delete it and run the same command again.") from error


def write_array(path: Path, array: np.ndarray, *, clean: bool = False) -> None:
    """Write a `.npy` file in the same way."""
    import numpy as np

    data = io.BytesIO()  # writing straight to a file, NumPy reports a full disk like any other error
    np.save(data, array)
    write_file(path, lambda file: file.write(data.getbuffer()), clean=clean)


@contextmanager
def new_array(path: Path, shape: tuple[int, ...], dtype: str = "float32") -> Iterator[np.ndarray]:
    """Yield an array in a `.npy` file that is mapped into memory; the file appears once it is complete and on disk."""
    import numpy as np

    temporary = unfinished_path(path)
    with explain_write_errors(path):
        try:
            array = np.lib.format.open_memmap(temporary, "w+", dtype, shape)
            with hold(temporary):
                _take_room(temporary)
                yield array
                array.flush()
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _take_room(path: Path) -> None:
    """Take the disk space of a mapped file: where it lacks later, the system ends the process without a word."""
    with path.open("r+b") as file, contextlib.suppress(AttributeError):  # not every system can
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # nor every file system
                raise


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
    temporary, aside = unfinished_path(path), unfinished_path(path, "old")
    with explain_write_errors(path):
        restore(path)
        remove_leftovers(path.parent, path.name)
        try:
            temporary.mkdir(parents=True)
            with hold(temporary), hold(path):
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
        if is_leftover(aside) and aside.is_dir() and (_is_abandoned(aside) or _is_locked(aside) is False):
            aside.rename(path)
            return


def is_leftover(path: Path) -> bool:
    """Whether a file or folder was left behind by an interruption, or is being written."""
    return bool(_UNFINISHED.search(path.name))


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Delete temporary files in `folder`, of one name if given, that nobody is writing any more."""
    found = [*folder.glob(f"{glob.escape(name)}*.tmp-*"), *(folder.glob(f"{glob.escape(name)}.old-*") if name else ())]
    for path in found:
        if is_leftover(path) and _is_abandoned(path):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Inside, other processes can tell that a file or folder is in use, also from another container."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = _open_at_once(str(path), os.O_RDONLY)
        _lock(descriptor)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock of an open file if the file system has locks; it ends with the process or the file."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds a file or folder; None if the file system cannot tell."""
    descriptor = None
    try:
        import fcntl

        descriptor = _open_at_once(str(path), os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return False


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes an unfinished file any more.

    The number of a process says so only where it was given. From another container or machine, and if the number was
    given again, the writer's lock counts, and else the time since the last change.
    """
    found = _UNFINISHED.search(path.name)
    if found is None:
        return False
    if found[2] == _place() and not _is_running(int(found[1])):
        return True
    locked = _is_locked(path)
    try:
        seconds = time.time() - max(path.stat().st_mtime, path.stat().st_ctime)
    except OSError:  # it is gone
        return False
    return not locked and seconds > (_SECONDS if locked is False and found[2] else _DAY)


@cache
def _place() -> str:
    """Identifies this start of this machine and, in a container, its own numbers of processes; eight hex digits."""
    import hashlib
    import platform

    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk or a folder without permission into one line that says what to do."""
    try:
        yield
    except EludeSteerError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else _number_in_text(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = _free_space(path)
            raise StorageError(
                f"no room left while writing '{path}'{free}; free some and run the same command again "
                "(finished work is kept)."
            ) from error
        if number in _UNWRITABLE:
            raise StorageError(f"'{path}' cannot be written ({os.strerror(number)}); choose another folder.") from error
        raise


def _number_in_text(error: Exception) -> int | None:
    """The number of the system's error in the text of an error of safetensors, which is no OSError."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


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
