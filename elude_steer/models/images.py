"""Sets of pictures: a folder, a list of paths, a Hugging Face dataset, or anything that can be looped over."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from elude_steer.errors import EludeSteerWarning, ImageError
from elude_steer.utils import optional

MAX_PIXELS = 100_000_000
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


@dataclass(frozen=True)
class Item:
    """One picture that has not been read yet: its place in the set, its name, and how to get it with a content hash."""

    index: int
    id: str
    read: Callable[[], tuple[Any, bytes]]


@dataclass(frozen=True)
class ImageSet:
    """Pictures in a fixed order.

    Attributes:
        name: where they come from, for messages.
        items: makes a new iterator over them.
        length: how many, or None for a stream.
        fingerprint: tells sets apart before they are read; None for a stream, which cannot be told apart.
    """

    name: str
    items: Callable[[], Iterator[Item]]
    length: int | None
    fingerprint: str | None


def image_set(source: Any, *, split: str = "train", column: str = "image", limit: int | None = None) -> ImageSet:
    """The pictures of any kind of source.

    Args:
        source: a folder (searched to its depths), a text file with a path a line, a list of paths, `hf:` and a
            dataset's id, `toyland:` and a seed (scenes drawn on the spot), or a sequence or iterable of PIL images or
            tensors; of tuples the first part is taken.
        split: of a Hugging Face dataset.
        column: of a Hugging Face dataset.
        limit: only the first so many.
    """
    if isinstance(source, str) and source.startswith("hf:"):
        return _dataset(source.removeprefix("hf:"), split, column, limit)
    if isinstance(source, str) and source.startswith("toyland:"):
        return _scenes(source.removeprefix("toyland:"), limit)
    if hasattr(source, "batch_size") and hasattr(source, "dataset"):
        raise ImageError("a DataLoader gives batches; give its pictures one by one: images=loader.dataset.")
    if isinstance(source, str | os.PathLike):
        if not str(source).strip():
            raise ImageError("the path to the images is empty; give a folder.")
        return _files(*_listed(Path(source).expanduser()), limit)
    if isinstance(source, Sequence) and source and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [Path(path).expanduser() for path in source]
        return _files("the list of paths", {str(path): path for path in paths}, limit)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _sequence(source, limit)
    if isinstance(source, Iterable):
        return _stream(source, limit)
    raise ImageError(f"images cannot be taken from a {type(source).__name__}; give a folder, paths or pictures.")


def read_image(path: Path) -> tuple[Any, bytes]:
    """The picture in a file, upright and in RGB, and the hash of the file's bytes."""
    data = path.read_bytes()
    return _decoded(data), hashlib.blake2b(data, digest_size=16).digest()


def open_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Any:
    """One picture, upright and in RGB, from a path, the bytes of a file, or a PIL image; what is wrong is one line.

    Files of more than `max_pixels` pixels are refused before they are decoded.
    """
    if hasattr(source, "mode") and hasattr(source, "convert"):
        return source.convert("RGB")
    if not isinstance(source, bytes | str | os.PathLike):
        raise ImageError(f"a picture is a path, the bytes of a file or a PIL image, not a {type(source).__name__}.")
    name = "the given bytes" if isinstance(source, bytes) else f"'{source}'"
    try:
        data = source if isinstance(source, bytes) else Path(source).expanduser().read_bytes()
        return _decoded(data, max_pixels)
    except ImageError as error:
        raise ImageError(f"{name} cannot be read as an image: {error}.") from error
    except OSError as error:
        raise ImageError(f"{name} cannot be read: {error.strerror or error}; check the path.") from error


def _decoded(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "EPS":
                raise ImageError("EPS is a program that draws, not a picture; save it as PNG")
            if image.width * image.height > max_pixels:  # refused before anything is decoded
                raise ImageError(f"{image.width} x {image.height} pixels are more than {max_pixels:,}")
            return _eight_bit(ImageOps.exif_transpose(image)).convert("RGB")
    except UnidentifiedImageError as error:
        raise ImageError("no image in a format that Pillow knows") from error
    except (OSError, SyntaxError) as error:  # Pillow's words for files that end too early or are damaged inside
        raise ImageError(f"the file is damaged ({error})") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"it has more than {max_pixels:,} pixels") from error


def _eight_bit(image: Any) -> Any:
    """Pictures of 16 bits a pixel brought down to 8; Pillow would cut off all above 255."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.float64)
    return Image.fromarray((values / (257 if values.max() > 255 else 1)).round().clip(0, 255).astype(np.uint8))


def _listed(path: Path) -> tuple[str, dict[str, Path]]:
    if path.is_dir():
        found: dict[str, Path] = {}
        for full in _walk(path):
            if full.suffix.lower() in SUFFIXES and not full.name.startswith(".") and not _special(full):
                found[_printable(full.relative_to(path).as_posix())] = full
        if not found:
            kinds = " ".join(sorted(SUFFIXES))
            raise ImageError(f"folder '{path}' holds no images (looked for {kinds} in it and its sub-folders).")
        return str(path), found
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return str(path), {path.name: path}
    if path.is_file():
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise ImageError(f"'{path}' is neither an image nor a text file with a path a line.") from error
        names = [line for line in lines if line and not line.startswith("#")]
        if not names:
            raise ImageError(f"'{path}' lists no images; write one path a line.")
        return str(path), {name: path.parent / Path(name).expanduser() for name in names}
    raise ImageError(f"no folder or file '{path}' to take images from; check the path.")


def _walk(path: Path) -> Iterator[Path]:
    """All files below a folder, links followed, none twice; a folder that cannot be opened is told."""
    seen: set[str] = set()

    def told(error: OSError) -> None:
        shut.append(error.filename)

    shut: list[str] = []
    for folder, folders, names in os.walk(path, followlinks=True, onerror=told):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (Path(folder) / name for name in names)
        seen.add(real)
    if shut:
        warnings.warn(
            f"{len(shut)} folders below '{path}' cannot be opened and were left out: {shut[0]}, …",
            EludeSteerWarning,
            stacklevel=2,
        )


def _special(path: Path) -> bool:
    """Pipes and devices, which would be waited for; a broken link is left to be named as unreadable."""
    return path.exists() and not path.is_file()


def _printable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _files(name: str, paths: dict[str, Path], limit: int | None) -> ImageSet:
    # Sorted by name, so that neither the disk's nor a list's order matters.
    ids = sorted(paths)[:limit]
    digest = hashlib.blake2b(digest_size=16)
    for id in ids:
        try:
            stat = paths[id].stat()
            readable = os.access(paths[id], os.R_OK)
            digest.update(f"{id}\0{stat.st_size}\0{stat.st_mtime_ns}\0{readable}".encode())
        except OSError:
            digest.update(f"{id}\0missing\0".encode())

    def items() -> Iterator[Item]:
        for index, id in enumerate(ids):
            yield Item(index, id, lambda path=paths[id]: read_image(path))  # type: ignore[misc]

    return ImageSet(name, items, len(ids), digest.hexdigest())


def _dataset(id: str, split: str, column: str, limit: int | None) -> ImageSet:
    datasets = optional.require("datasets", f"images.source 'hf:{id}'")
    try:
        data = datasets.load_dataset(id, split=split)
    except Exception as error:  # the library's own kinds of errors are many, and all mean the same here
        raise ImageError(f"dataset '{id}' (split '{split}') could not be loaded: {error}") from error
    if column not in data.column_names:
        raise ImageError(f"dataset '{id}' has no column '{column}'; it has {', '.join(data.column_names)}.")
    length = min(len(data), limit or len(data))

    def items() -> Iterator[Item]:
        for index in range(length):
            yield Item(index, f"{id}/{split}/{index}", lambda i=index: _hashed(data[i][column]))  # type: ignore[misc]

    return ImageSet(f"hf:{id}", items, length, f"{data._fingerprint}-{column}-{length}")


def _sequence(source: Any, limit: int | None) -> ImageSet:
    length = min(len(source), limit or len(source))
    if not length:
        raise ImageError("the list of images is empty.")

    def items() -> Iterator[Item]:
        for index in range(length):
            yield Item(index, f"{index:08d}", lambda i=index: _hashed(source[i]))  # type: ignore[misc]

    digest = hashlib.blake2b(digest_size=16)
    for index in range(length):
        try:
            digest.update(_hashed(source[index])[1])
        except Exception as error:  # noqa: BLE001 - left out and named when collecting
            digest.update(str(error).encode())
    return ImageSet("the given images", items, length, digest.hexdigest())


def _scenes(seed: str, limit: int | None) -> ImageSet:
    from elude_steer.toyland.scenes import scenes

    if not seed.isdecimal():
        raise ImageError(f"'toyland:{seed}' wants the seed of the scenes, a whole number: toyland:0.")
    count = limit or 1000
    version = _hashed(next(scenes(int(seed), 1)).image)[1].hex()  # another way of drawing is another set

    def items() -> Iterator[Item]:
        for index in range(count):
            read = lambda i=index: _hashed(next(scenes(int(seed), 1, start=i)).image)  # noqa: E731
            yield Item(index, f"toyland:{seed}:{index}", read)

    return ImageSet(f"toyland:{seed}", items, count, f"toyland {seed} {count} {version}")


def _stream(source: Iterable[Any], limit: int | None) -> ImageSet:
    def items() -> Iterator[Item]:
        for index, image in enumerate(islice(source, limit)):
            yield Item(index, f"{index:08d}", lambda image=image: _hashed(image))  # type: ignore[misc]

    return ImageSet("the stream of images", items, None, None)


def _hashed(image: Any) -> tuple[Any, bytes]:
    """A picture held in memory and the hash of its content; of `(picture, label)` the picture."""
    if isinstance(image, tuple | list):
        image = image[0]
    if not hasattr(image, "tobytes") and not hasattr(image, "detach"):
        raise ImageError(f"a {type(image).__name__} where a PIL image, an array or a tensor was expected")
    digest = hashlib.blake2b(digest_size=16)
    if hasattr(image, "tobytes") and hasattr(image, "mode"):  # PIL
        digest.update(f"{image.mode}{image.size}".encode() + image.tobytes())
    else:
        array = image.detach().cpu().contiguous().numpy() if hasattr(image, "detach") else image
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return image, digest.digest()
