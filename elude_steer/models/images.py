"""Sets of images: a folder, a list of paths, a Hugging Face dataset, or any iterable."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from elude_steer.errors import EludeSteerWarning, ImageError, type_with_article
from elude_steer.models.sources.decoding import MAX_MEMORY, MAX_PIXELS, convert_given, decode, from_array
from elude_steer.models.sources.patterns import names_shards
from elude_steer.models.sources.streamed import StreamedDataset, load_from_hub
from elude_steer.models.sources.tar import TarShards
from elude_steer.utils.files import read_bytes
from elude_steer.utils.remote.filesystems import is_url

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


@dataclass(frozen=True)
class Item:
    """One image that is not read yet: its index in the set, its name, and a function that reads it and its hash."""

    index: int
    id: str
    read: Callable[[], tuple[Any, bytes]]


@dataclass(frozen=True)
class ImageSet:
    """Images in a fixed order.

    Attributes:
        name: where the images come from, for messages.
        items: creates a new iterator over the images.
        length: number of images; None for a stream.
        identify: computes the fingerprint.
        pick: creates an iterator over the images of these numbers; None where all before have to be created.
        runs: the first image of each part that is read from front to back; None where any image can be read.
    """

    name: str
    items: Callable[[], Iterator[Item]]
    length: int | None
    identify: Callable[[], str | None]
    pick: Callable[[range], Iterator[Item]] | None = None
    runs: Sequence[int] | None = None

    def select(self, numbers: range) -> Iterator[Item]:
        """Create an iterator over the images of these numbers."""
        if self.pick is not None:
            return self.pick(numbers)
        return islice(self.items(), numbers.start, numbers.stop, numbers.step)

    @cached_property
    def fingerprint(self) -> str | None:
        """Identifies the set; None for a stream, which cannot be identified.

        It is computed when it is first asked for, because for images in memory or of a data set all are read.
        """
        return self.identify()


def image_set(source: Any, *, split: str = "train", column: str = "image", limit: int | None = None) -> ImageSet:
    """Create the set of images of any kind of source.

    Args:
        source: a folder (searched with its sub-folders), a text file with one path per line, a list of paths, `hf:`
            and the id of a dataset (`hf-stream:` reads it without a copy on this machine), a pattern of tar files such
            as `s3://bucket/shards/{000..099}.tar`, `toyland:` and a seed (scenes are drawn when they are read), or a
            sequence or iterable of PIL images, arrays or tensors, or of tuples that begin with one.
        split: split of a Hugging Face dataset.
        column: column of a Hugging Face dataset.
        limit: take only this many images, the first ones.
    """
    if isinstance(source, str) and source.startswith("hf:"):
        return _dataset(source.removeprefix("hf:"), split, column, limit)
    if isinstance(source, str) and source.startswith("hf-stream:"):
        return _in_parts(source, StreamedDataset.open(source.removeprefix("hf-stream:"), split, column), limit)
    if names_shards(source):
        return _in_parts(source, TarShards.open(source, SUFFIXES), limit)
    if is_url(source):
        raise ImageError(f"behind a URL, images are read from tar shards: give '{source.rstrip('/')}/*.tar'.")
    if isinstance(source, str) and source.startswith("toyland:"):
        return _scenes(source.removeprefix("toyland:"), limit)
    if hasattr(source, "batch_size") and hasattr(source, "dataset"):
        raise ImageError("a DataLoader yields batches; give single images: images=loader.dataset.")
    if isinstance(source, str | os.PathLike):
        if not str(source).strip():
            raise ImageError("the path to the images is empty; give a folder.")
        return _files(*_list_files(Path(source).expanduser()), limit)
    if isinstance(source, Sequence) and source and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [Path(path).expanduser() for path in source]
        return _files("the list of paths", {str(path): path for path in paths}, limit)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _sequence(source, limit)
    if isinstance(source, Iterable):
        return _stream(source, limit)
    raise ImageError(f"images cannot be taken from {type_with_article(source)}; give a folder, paths or images.")


def read_image(path: Path) -> tuple[Any, bytes]:
    """Read the image in a file, upright and in RGB, and the hash of the file's bytes."""
    return _read_file(_read_bytes(path))


def open_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Any:
    """Open one image, upright and in RGB, with one-line errors.

    Args:
        source: a path, the bytes of a file, a PIL image, or a NumPy array of uint8: `(height, width)` is grey,
            `(height, width, 3)` is RGB, `(height, width, 4)` is RGB with alpha, which is dropped. Arrays of other
            types are refused, because their range (0 to 1, 0 to 255, normalized) is unknown.
        max_pixels: files with more pixels are refused before they are decoded.
    """
    if hasattr(source, "mode") and hasattr(source, "convert"):
        return convert_given(source)
    if not isinstance(source, bytes | str | os.PathLike):
        return from_array(source, max_pixels)
    name = "the given bytes" if isinstance(source, bytes) else f"'{_escape(str(source))}'"
    try:
        data = source if isinstance(source, bytes) else _read_bytes(Path(source))
        return decode(data, max_pixels)
    except ImageError as error:
        raise ImageError(f"{name} cannot be read as an image: {error}.") from error
    except OSError as error:
        raise ImageError(f"{name} cannot be read: {error.strerror or error}; check the path.") from error


def _read_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path.expanduser(), MAX_MEMORY)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or a user without a home
        raise ImageError(f"this is not the path of a file ({error})") from error


def find_images(folder: Path) -> list[Path]:
    """The images of a folder and its sub-folders, sorted by path; raises if there are none."""
    found = _list_files(folder)[1]
    return [found[name] for name in sorted(found)]


def open_images(sources: Sequence[Any]) -> list[Any]:
    """Open several images; the error names the first that cannot be opened by its place in the list."""
    opened = []
    for number, source in enumerate(sources):
        try:
            opened.append(open_image(source))
        except ImageError as error:
            raise ImageError(f"image {number} of the list: {error}") from error
    return opened


def _escape(name: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def _list_files(path: Path) -> tuple[str, dict[str, Path]]:
    if path.is_dir():
        found: dict[str, Path] = {}
        for full in _walk(path):
            if full.suffix.lower() in SUFFIXES and not full.name.startswith(".") and not _special(full):
                found[printable(full.relative_to(path).as_posix())] = full
        if not found:
            kinds = " ".join(sorted(SUFFIXES))
            raise ImageError(f"folder '{path}' holds no images (looked for {kinds} in it and its sub-folders).")
        return str(path), found
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return str(path), {path.name: path}
    if path.is_file():
        try:
            lines = [line.strip() for line in read_bytes(path, MAX_MEMORY).decode().splitlines()]
        except UnicodeDecodeError as error:
            raise ImageError(f"'{path}' is neither an image nor a text file with one path per line.") from error
        names = [line for line in lines if line and not line.startswith("#")]
        if not names:
            raise ImageError(f"'{path}' lists no images; write one path per line.")
        return str(path), {name: path.parent / Path(name).expanduser() for name in names}
    raise ImageError(f"there is no folder or file '{path}' with images; check the path.")


def _walk(path: Path) -> Iterator[Path]:
    """Yield all files below a folder once, following links; warn about folders that cannot be opened."""
    visited: set[str] = set()
    unreadable: list[str] = []

    def on_error(error: OSError) -> None:
        unreadable.append(error.filename)

    for folder, folders, names in os.walk(path, followlinks=True, onerror=on_error):
        real = os.path.realpath(folder)
        folders[:] = [] if real in visited else sorted(name for name in folders if not name.startswith("."))
        if real not in visited:
            yield from (Path(folder) / name for name in names)
        visited.add(real)
    if unreadable:
        warnings.warn(
            f"{len(unreadable)} folders below '{path}' cannot be opened and are skipped: {unreadable[0]}, …",
            EludeSteerWarning,
            stacklevel=2,
        )


def _special(path: Path) -> bool:
    """Whether a path is a pipe or a device, which would block; a broken link is not, and reading it reports it."""
    return path.exists() and not path.is_file()


def printable(name: str) -> str:
    """The name of a file as text that can be printed, also if it is no UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _files(name: str, paths: dict[str, Path], limit: int | None) -> ImageSet:
    # Sorted by name, so that the order on disk or in a list does not matter.
    ids = sorted(paths)[:limit]
    digest = hashlib.blake2b(digest_size=16)
    for id in ids:
        try:
            stat = paths[id].stat()
            readable = os.access(paths[id], os.R_OK)
            digest.update(f"{id}\0{stat.st_size}\0{stat.st_mtime_ns}\0{readable}".encode())
        except OSError:
            digest.update(f"{id}\0missing\0".encode())

    def pick(numbers: range) -> Iterator[Item]:
        for index in numbers:
            yield Item(index, ids[index], lambda path=paths[ids[index]]: read_image(path))  # type: ignore[misc]

    fingerprint = digest.hexdigest()  # the files as they are now
    return _indexed(name, pick, len(ids), lambda: fingerprint)


def _indexed(
    name: str,
    pick: Callable[[range], Iterator[Item]],
    length: int,
    identify: Callable[[], str | None],
    runs: Sequence[int] | None = None,
) -> ImageSet:
    """A set of which each image can be created on its own."""
    return ImageSet(name, lambda: pick(range(length)), length, identify, pick, runs)


def _in_parts(name: str, parts: TarShards | StreamedDataset, limit: int | None) -> ImageSet:
    length = min(len(parts), limit or len(parts))

    def pick(numbers: range) -> Iterator[Item]:
        for index in numbers:
            yield Item(index, parts.name_of(index), lambda i=index: _read_file(parts.read(i)))  # type: ignore[misc]

    return _indexed(name, pick, length, lambda: parts.fingerprint(length), parts.starts)


def _read_file(data: bytes) -> tuple[Any, bytes]:
    """The image in the bytes of a file, and their hash."""
    return decode(data), hashlib.blake2b(data, digest_size=16).digest()


def _dataset(id: str, split: str, column: str, limit: int | None) -> ImageSet:
    data = load_from_hub(f"hf:{id}", id, split=split)
    if column not in data.column_names:
        raise ImageError(f"dataset '{id}' has no column '{column}'; it has {', '.join(data.column_names)}.")
    length = min(len(data), limit or len(data))

    def pick(numbers: range) -> Iterator[Item]:
        for index in numbers:
            yield Item(index, f"{id}/{split}/{index}", lambda i=index: _hash_image(data[i][column]))  # type: ignore[misc]

    return _indexed(f"hf:{id}", pick, length, lambda: f"{data._fingerprint}-{column}-{length}")


def _sequence(source: Any, limit: int | None) -> ImageSet:
    length = min(len(source), limit or len(source))
    if not length:
        raise ImageError("the list of images is empty.")

    def pick(numbers: range) -> Iterator[Item]:
        for index in numbers:
            yield Item(index, f"{index:08d}", lambda i=index: _hash_image(source[i]))  # type: ignore[misc]

    def identify() -> str:
        digest = hashlib.blake2b(digest_size=16)
        for index in range(length):
            try:
                digest.update(_hash_image(source[index])[1])
            except Exception as error:  # noqa: BLE001 - skipped and reported when the image is read
                digest.update(str(error).encode())
        return digest.hexdigest()

    return _indexed("the given images", pick, length, identify)


def _scenes(seed: str, limit: int | None) -> ImageSet:
    from elude_steer.toyland.scenes import scenes

    if not seed.isdecimal() or len(seed) > 18:
        raise ImageError(f"'toyland:{seed[:60]}' needs the seed of the scenes, a whole number: toyland:0.")
    count = limit or 1000
    version = _hash_image(next(scenes(int(seed), 1)).image)[1].hex()  # if the drawing changes, so does the set

    def pick(numbers: range) -> Iterator[Item]:
        for index in numbers:
            read = lambda i=index: _hash_image(next(scenes(int(seed), 1, start=i)).image)  # noqa: E731
            yield Item(index, f"toyland:{seed}:{index}", read)

    return _indexed(f"toyland:{seed}", pick, count, lambda: f"toyland {seed} {count} {version}")


def _stream(source: Iterable[Any], limit: int | None) -> ImageSet:
    def items() -> Iterator[Item]:
        for index, image in enumerate(islice(source, limit)):
            yield Item(index, f"{index:08d}", lambda image=image: _hash_image(image))  # type: ignore[misc]

    return ImageSet("the stream of images", items, None, lambda: None)


def _hash_image(image: Any) -> tuple[Any, bytes]:
    """Return an image in memory and the hash of its content; of a tuple such as `(image, label)`, the first element."""
    if isinstance(image, tuple | list):
        image = image[0]
    if not hasattr(image, "tobytes") and not hasattr(image, "detach"):
        raise ImageError(f"{type_with_article(image)} instead of a PIL image, an array or a tensor")
    digest = hashlib.blake2b(digest_size=16)
    if hasattr(image, "tobytes") and hasattr(image, "mode"):  # PIL
        digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
    else:
        array = image.detach().cpu().contiguous().numpy() if hasattr(image, "detach") else image
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return image, digest.digest()
