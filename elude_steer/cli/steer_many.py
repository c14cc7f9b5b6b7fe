"""Steering of many images: their files, their captions in batches, and one line of output per image."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elude_steer.cli.options import open_argument, print_note, print_progress
from elude_steer.errors import EludeSteerError, ImageError, SpecError

COLUMNS = ("image", "baseline", "caption", "gone", "new", "notes")
_SECONDS = 1.0  # between two lines of progress


@dataclass(frozen=True)
class ImageArgument:
    """One image to caption: its path as the output shows it, and its name without the folder that was given."""

    path: str
    name: Path


@dataclass
class Problems:
    """The images that cannot be captioned; each is reported at once, and all together at the end."""

    paths: list[str]
    captioned: int = 0

    def add(self, path: str, error: Exception) -> None:
        """Report one image and go on."""
        self.paths.append(path)
        print_note(f"{error} It is skipped.")

    def raise_if_any(self) -> None:
        """Raise an error that names the first few images."""
        if self.paths:
            named = ", ".join(self.paths[:3]) + (", …" if len(self.paths) > 3 else "")
            total = self.captioned + len(self.paths)
            raise ImageError(f"{len(self.paths)} of {total} images have no caption: {named}; the notes say why.")


def is_many(arguments: Sequence[str]) -> bool:
    """Whether the arguments are several images, or a folder."""
    return len(arguments) > 1 or os.path.isdir(Path(arguments[0]).expanduser())  # noqa: PTH112, see `find_files`


def find_files(arguments: Sequence[str], problems: Problems) -> list[ImageArgument]:
    """The images of files and folders in the order of the arguments; raises if none of them is there."""
    from elude_steer.models.images import find_images, printable

    files: list[ImageArgument] = []
    first: EludeSteerError | None = None
    for argument in arguments:
        path = Path(argument).expanduser()
        try:
            if os.path.isdir(path):  # noqa: PTH112, Path raises on a text that is too long for a name
                files += [ImageArgument(printable(str(one)), one.relative_to(path)) for one in find_images(path)]
                continue
            if argument != "-" and not os.path.exists(path):  # noqa: PTH110
                raise ImageError(f"there is no file or folder '{argument}'; check the path.")
            files.append(ImageArgument(argument, Path("stdin" if argument == "-" else path.name)))
        except ImageError as error:
            first = first or error
            if len(arguments) > 1:
                problems.add(argument, error)
    if not files and first is not None:
        raise first
    return files


def check_heatmap_folder(folder: Path) -> Path:
    """Return the folder for the heatmaps of many images; raises if it cannot be made."""
    from elude_steer.models.images import SUFFIXES
    from elude_steer.utils.files import check_folder

    if not os.path.isdir(folder) and folder.suffix.lower() in SUFFIXES:  # noqa: PTH112
        raise SpecError(
            f"--heatmap is '{folder}', and there are many images; give a folder: --heatmap {folder.with_suffix('')}."
        )
    return check_folder(folder)


def name_heatmaps(files: Sequence[ImageArgument], folder: Path) -> dict[ImageArgument, Path]:
    """A file below the folder for each image; images of the same name get a number."""
    taken: set[Path] = set()
    named = {}
    for file in dict.fromkeys(files):
        path, number = folder / file.name.with_suffix(".png"), 2
        while path in taken:
            path, number = folder / file.name.with_name(f"{file.name.stem}-{number}.png"), number + 1
        taken.add(path)
        named[file] = path
    return named


def caption_files(
    steerer: Any,
    files: Sequence[ImageArgument],
    explain: Callable[[Sequence[Any]], Sequence[Any]],
    problems: Problems,
) -> Iterator[tuple[ImageArgument, Any]]:
    """Yield each image that can be captioned with its result, batch by batch.

    Args:
        steerer: the model.
        files: the images; each is read when its batch begins.
        explain: gives the results of opened images.
        problems: takes the images that cannot be read or steered.
    """
    from elude_steer.models.prefix_cache import image_batches
    from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES

    def read() -> Iterator[tuple[ImageArgument, Any]]:
        for file in files:
            try:
                image = open_argument(file.path)
                steerer.vlm.grid(image.size)
            except EludeSteerError as error:
                problems.add(file.path, error)
            else:
                yield file, image

    shown = time.monotonic()
    for batch, images in image_batches(steerer.vlm, read(), lambda pair: pair[1], MAX_BATCH_IMAGES):
        results = _explain_each(images, explain)
        if problems.captioned == 0 and (len(batch) > 1 or len(files) == 1):
            _raise_if_all_fail_alike(results)
        for (file, _), result in zip(batch, results, strict=True):
            if isinstance(result, EludeSteerError):
                problems.add(file.path, result)
            else:
                problems.captioned += 1
                yield file, result
        if time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            print_progress(f"captioned {problems.captioned} of {len(files)} images")


def _explain_each(images: Sequence[Any], explain: Callable[[Sequence[Any]], Sequence[Any]]) -> Sequence[Any]:
    """The result of each image, or its error: if a batch fails, its images are captioned one by one."""
    try:
        return explain(images)
    except EludeSteerError as error:
        if len(images) == 1:
            return [error]
    return [result for image in images for result in _explain_each([image], explain)]


def _raise_if_all_fail_alike(results: Sequence[Any]) -> None:
    """Raise the error of all images: it is of the words or the settings, and would be that of all others too."""
    if all(isinstance(result, EludeSteerError) for result in results) and len(set(map(str, results))) == 1:
        raise results[0]


def print_many(
    steerer: Any,
    files: Sequence[ImageArgument],
    explain: Callable[[Sequence[Any]], Sequence[Any]],
    problems: Problems,
    output: str,
    heatmap: Path | None,
    save_heatmap: Callable[[Any, Path], object],
) -> None:
    """Print a line per image, as soon as its batch is done; raises at the end if images were skipped.

    Args:
        steerer: the model.
        files: the images.
        explain: gives the results of opened images.
        problems: the arguments that are no images.
        output: `text`, `json` (JSON Lines) or `csv`.
        heatmap: the folder of the drawings.
        save_heatmap: writes the drawing of a result to a file.
    """
    from elude_steer.steering.result import unlike_note

    heatmaps = None if heatmap is None else name_heatmaps(files, heatmap)
    if output == "csv":
        click.echo(_csv_line([*COLUMNS, *(["heatmap"] if heatmaps else [])]), nl=False)
    note, unlike = unlike_note(steerer.atlas), 0
    for file, result in caption_files(steerer, files, explain, problems):
        unlike += note in result.notes
        row: dict[str, Any] = {"image": file.path, "baseline": result.baseline, "caption": result.caption}
        row |= {"gone": result.gone, "new": result.new, "notes": result.notes}
        if heatmaps is not None:
            save_heatmap(result, heatmaps[file])
            row["heatmap"] = str(heatmaps[file]) if result.maps else None
        if output == "json":
            click.echo(json.dumps({**row, "seconds": round(result.seconds, 3)}))
        elif output == "csv":
            click.echo(_csv_line([" ".join(v) if isinstance(v, tuple) else v for v in row.values()]), nl=False)
        else:
            click.echo(f"{file.path}\t{' '.join(result.caption.split())}")
    if unlike and output == "text":  # the other outputs have the notes of each image
        print_note(note if problems.captioned == 1 else unlike_note(steerer.atlas, unlike, problems.captioned))
    problems.raise_if_any()


def _csv_line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
