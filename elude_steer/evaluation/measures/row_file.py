"""A table of numbers in a temporary file, for tables that are larger than the memory they are worth."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch

from elude_steer.errors import StorageError
from elude_steer.utils.files import explain_write_errors
from elude_steer.utils.memory import format_bytes


class RowFile:
    """Rows of float32, zero until they are written. The file disappears with the object, or with the process.

    It is read and written, not mapped: mapped pages would count as memory of the process.

    Args:
        rows: how many.
        width: numbers in each.
        content: what the rows are, for the error where the folder of temporary files (`TMPDIR`) has too little room.
    """

    def __init__(self, rows: int, width: int, content: str) -> None:
        self.shape, self._bytes = (rows, width), 4 * width
        self._folder = Path(tempfile.gettempdir())
        needed, free = rows * self._bytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise StorageError(
                f"{content} take {format_bytes(needed)} in a temporary file, and '{self._folder}' has "
                f"{format_bytes(free)} free; set TMPDIR to a folder with more room."
            )
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, it is open as long as the object is there
        weakref.finalize(self, self._file.close)
        self._file.truncate(needed)  # takes no room yet

    def write(self, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values`, `(n, width)`, to the rows with these numbers."""
        with explain_write_errors(self._folder / "temporary file"):
            for number, row in zip(numbers.tolist(), values.float().contiguous().numpy(), strict=True):
                self._file.seek(number * self._bytes)
                self._file.write(row)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`, `(stop - start, width)`."""
        out = np.empty((stop - start, self.shape[1]), np.float32)
        left = memoryview(out.data).cast("B")
        self._file.seek(start * self._bytes)
        while len(left):  # one call reads at most 2 GB
            left = left[self._file.readinto(left) :]
        return torch.from_numpy(out)
