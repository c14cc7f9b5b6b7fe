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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from elude_steer.errors import StorageError

if TYPE_CHECKING:
    import numpy as np
    import torch

# Sub-packages with models and an atlas of their own, and what their images are.
WORLDS = {"toyland": "drawn scenes", "photoland": "photographs"}
REPORT_ENDINGS = (".html", ".htm")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg")
_TEMPORARY = re.compile(r"\.(?:tmp|old)-(\d+)(?:-\d+)?$")


def home() -> Path:
    """The folder of atlases, caches and unfinished work: `ELUDE_STEER_HOME`, or one in the user's cache."""
    return Path(os.environ.get("ELUDE_STEER_HOME") or "~/.cache/elude_steer").expanduser()


def resolve_id(id: str) -> str:
    """The id or folder to load for an id; `toyland/captioner` and the like become folders inside the package."""
    shipped = re.fullmatch(rf"({'|'.join(WORLDS)})/(\w+)", id)
    if shipped and (folder := Path(__file__).parents[1] / shipped[1] / "data" / shipped[2]).is_dir():
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


def check_file(path: str | Path, endings: Sequence[str]) -> Path:
    """Return the path of a file to write, or raise if it cannot be written; for results that come after long work.

    The folder of an output must be there: a path with a typing error makes no folders.

    Args:
        path: the file; it may be there, and is replaced.
        endings: those that its name may have, such as `.png`.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in endings:
        known = endings[0] if len(endings) == 1 else f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise StorageError(f"'{path}' does not end in {known}; give a file name that does.")
    if os.path.isdir(file):  # noqa: PTH112, Path raises on a name that is too long
        raise StorageError(f"'{path}' is a folder; give the name of a file.")
    _check_place(file.parent, file.name)
    return file


def check_folder(path: str | Path, *, new: bool = False) -> Path:
    """Return the path of a folder to write to, or raise if it cannot be written; the folder it lies in must be there.

    Args:
        path: the folder; it is made if it is not there.
        new: whether to refuse a folder with files in it.
    """
    folder = Path(path).expanduser()
    if not os.path.lexists(folder):
        _check_place(folder.absolute().parent, folder.name)
        return folder
    if not folder.is_dir():
        raise StorageError(f"'{path}' is a file, not a folder; give another path.")
    _check_place(folder, "its files")
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
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"'{folder}' is not writable; give another folder, or change its permissions.")
    if len(os.fsencode(name)) > 200:  # with the ending of the unfinished file, 255 bytes is what file systems take
        raise StorageError(f"'{name[:40]}…' is too long for the name of a file; give a shorter one.")


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
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG):
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
