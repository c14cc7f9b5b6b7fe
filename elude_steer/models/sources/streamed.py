"""Images of a dataset of the Hub, read where they are, part by part, without a copy on this machine.

A part (a parquet file, a tar) can only be read from front to back. So the rows of each part are counted once, and one
process reads the images of a part one after another. The bytes are those of the image's file, as in a folder of them.
"""

from __future__ import annotations

import atexit
import json
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from elude_steer.errors import ImageError, StorageError
from elude_steer.trust import call_loader
from elude_steer.utils import optional
from elude_steer.utils.files import home, write_file
from elude_steer.utils.fingerprint import make_key
from elude_steer.utils.remote.filesystems import read_again

_AT_A_TIME = 8  # parts whose rows are counted at once
_ROWS = 1000  # rows that are counted at a time


def load_from_hub(source: str, id: str, *, builder: bool = False, **options: Any) -> Any:
    """Load a dataset of the Hub, or only its builder, through the gate; raise in one line.

    Args:
        source: the images as the user names them, such as `hf:a/b`.
        id: of the dataset.
        builder: whether its builder is enough, which knows its parts.
        **options: for the library.
    """
    datasets = optional.require("datasets", f"images.source '{source}'")
    if "/" not in id:  # could be one of the library's readers of files, and the one called pandas reads pickles
        raise ImageError(f"dataset '{id}' has no owner; write images.source: {source.partition(':')[0]}:OWNER/{id}.")
    gate: dict[str, Any] = {"subject": f"dataset '{id}'", "trust_remote_code": False, "has_switch": False}
    try:
        if builder:
            return call_loader(datasets.load_dataset_builder, id, **options, **gate)
        return call_loader(datasets.load_dataset, id, **options, **gate)
    except Exception as error:  # the library raises many kinds of errors, and all mean the same here
        where = f" (split '{options['split']}')" if "split" in options else ""
        raise ImageError(f"dataset '{id}'{where} could not be loaded: {error}") from error


@dataclass(eq=False)
class StreamedDataset:
    """The images of a split.

    Attributes:
        id: of the dataset.
        data: the library's streaming dataset, which gives the bytes of images undecoded.
        column: of the images.
        counts: the rows of each part.
        split: of the dataset.
        key: identifies the dataset's files.
    """

    id: str
    data: Any
    column: str
    counts: Sequence[int]
    split: str
    key: str
    _reading: dict[int, tuple[int, int, Any]] = field(default_factory=dict, repr=False)  # by thread: part, row, rows

    def __post_init__(self) -> None:
        atexit.register(_close, weakref.ref(self))  # half-read parts must end before the libraries that read them

    @classmethod
    def open(cls, id: str, split: str, column: str) -> StreamedDataset:
        """Find the parts of a split and count their rows; the counts are kept on this machine."""
        import_error = f"hf-stream:{id}"
        builder = load_from_hub(import_error, id, builder=True)
        datasets = optional.require("datasets", f"images.source '{import_error}'")
        try:
            data = builder.as_streaming_dataset(split=split)
            names = list(data.column_names or data.resolve_features().column_names)
            if column not in names:
                raise ImageError(f"dataset '{id}' has no column '{column}'; it has {', '.join(names)}.")
            data = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
            key = make_key(id, split, column, str(builder.hash), data.num_shards)
            counts = _count_rows(data, key)
        except ImageError:
            raise
        except Exception as error:  # as above
            raise ImageError(f"dataset '{id}' (split '{split}') cannot be streamed: {error}") from error
        if not sum(counts):
            raise ImageError(f"split '{split}' of dataset '{id}' is empty.")
        return cls(id, data, column, counts, split, key)

    def __len__(self) -> int:
        return sum(self.counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedDataset, (self.id, self.data, self.column, self.counts, self.split, self.key)

    @property
    def starts(self) -> list[int]:
        """The number of the first image of each part."""
        return list(accumulate(self.counts, initial=0))[:-1]

    def name_of(self, number: int) -> str:
        """The id of an image."""
        return f"{self.id}/{self.split}/{number}"

    def fingerprint(self, length: int) -> str:
        """Identifies the first so many images."""
        return f"{self.key}-{length}"

    def read(self, number: int) -> bytes:
        """The bytes of an image; a thread that reads in order goes on where it was."""
        starts = self.starts
        part = bisect_right(starts, number) - 1
        image = read_again(f"hf-stream:{self.id}", lambda: self._read_row(part, number - starts[part]))[self.column]
        data = image.get("bytes") if isinstance(image, dict) else None
        if not isinstance(data, bytes):  # a path in a stranger's table is not opened
            raise ImageError("the dataset holds the path of an image instead of its bytes")
        return data

    def _read_row(self, part: int, row: int) -> Any:
        thread = threading.get_ident()
        here, position, rows = self._reading.pop(thread, (-1, 0, iter(())))
        if here != part or position > row:
            position, rows = 0, iter(self.data.shard(num_shards=self.data.num_shards, index=part))
        value = next(islice(rows, row - position, None), None)
        if value is None:
            raise StorageError(f"dataset '{self.id}' has changed since its rows were counted; run again.")
        self._reading[thread] = (part, row + 1, rows)
        return value


def _close(reference: weakref.ref[StreamedDataset]) -> None:
    dataset = reference()
    for _, _, rows in () if dataset is None else dataset._reading.values():
        rows.close()


def _count_rows(data: Any, key: str) -> list[int]:
    path = home() / "cache" / "shards" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):
        return [int(count) for count in json.loads(path.read_bytes())]

    def count(part: int) -> int:
        rows: Iterator[Any] = data.shard(num_shards=data.num_shards, index=part).with_format("arrow").iter(_ROWS)
        return sum(len(batch) for batch in rows)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        counts = list(pool.map(count, range(data.num_shards)))
    with suppress(StorageError):  # they are counted again
        write_file(path, lambda file: file.write(json.dumps(counts).encode()), clean=True)
    return counts
