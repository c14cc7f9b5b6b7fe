"""What the commands share: options, tables, notes, and what other libraries may print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from elude_steer.models.execution.quantized import QUANTIZERS
from elude_steer.specs import DTYPES, Settings

# What torch calls devices; "gpu" is not among them.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mlu", "musa", "mtia", "xla", "meta")


def _check_device(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuse what no torch calls a device, before torch is loaded."""
    name, colon, number = (value or "cpu").partition(":")
    if name not in _DEVICES or (colon and not number.isdecimal()):
        raise click.BadParameter(f"'{value}' is not a device; use cpu, cuda, cuda:1 or mps.")
    return value


DEVICE = click.option("--device", callback=_check_device, help="Where to compute: cpu, cuda, cuda:1, mps.")
THREADS = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads on a CPU [default: by the size of the model and the free cores].",
)
TRUST = click.option(
    "--trust-remote-code", is_flag=True, help="Let code that comes with the models run; read it first."
)


def _read_device_map(context: click.Context, _option: click.Parameter, value: str | None) -> Any:
    """Read the file of a device map, and refuse a device beside it, before torch is loaded."""
    from elude_steer.models.execution.device_maps import read_device_map

    found = read_device_map(value)
    if found is not None and context.params.get("device") is not None:
        raise click.BadParameter("--device puts the whole model on one device; give it or --device-map.")
    return found


def _check_quantize(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuse a package that is not installed, before a model is loaded."""
    from elude_steer.models.execution.quantized import check_quantizer

    check_quantizer(value)
    return value


PLACING = (
    click.option(
        "--device-map",
        metavar="NAME|FILE",
        callback=_read_device_map,
        help="Spread the model over all devices, main memory and disk: auto, balanced, balanced_low_0, sequential, or "
        "a JSON file of modules and devices.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(tuple(QUANTIZERS)),
        callback=_check_quantize,
        help="Quantise the language model while it loads (needs the extra `quantize`); the vision tower stays whole.",
    ),
)
LOADING = (
    DEVICE,
    THREADS,
    click.option("--dtype", type=click.Choice(DTYPES), help="Number type [default: as the atlas was built]."),
    TRUST,
)


def with_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Add options to a command, in the order of its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def setting_options() -> list[Callable[..., Any]]:
    """An option for each field of `Settings`."""
    types = get_type_hints(Settings)
    return [_setting_option(item, types[item.name]) for item in fields(Settings)]


def _setting_option(item: Field[Any], kind: Any) -> Callable[..., Any]:
    name, text = item.name.replace("_", "-"), item.metadata["help"]
    if kind is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=text)
    if get_origin(kind) is Literal:
        return click.option(f"--{name}", type=click.Choice(list(get_args(kind))), help=text)
    return click.option(f"--{name}", type=kind if kind in (int, float) else str, help=text)


def read_nu(text: str | None) -> int | str | None:
    """The setting nu, a number or `all`, of its option."""
    is_number = text is not None and len(text) <= 18 and text.removeprefix("-").isdecimal()
    return int(text) if is_number and text is not None else text


def require_model(_context: click.Context, _parameter: click.Parameter, model: str | None) -> str | None:
    """Refuse a model that cannot be loaded here, before the libraries that load models are imported."""
    import os

    from elude_steer.errors import ModelError
    from elude_steer.utils.files import resolve_id
    from elude_steer.utils.hub import check_available

    if model is not None:
        source = resolve_id(model)
        is_path = not source.strip() or source.startswith((".", "/")) or source.count("/") > 1
        if is_path and not os.path.isdir(source):  # noqa: PTH112, Path raises on a text that is too long for a name
            raise ModelError(f"there is no folder '{model}' to load a model from; check the path, or give a Hub id.")
        check_available(source)
    return model


def require_atlas(_context: click.Context, _parameter: click.Parameter, atlas: str | None) -> str | None:
    """Refuse an atlas that is neither here nor on the Hub, before torch is imported."""
    from elude_steer.atlas.manifest import find_atlas, read_manifest

    if atlas is not None and (folder := find_atlas(atlas)) is not None:
        read_manifest(folder)
    return atlas


def open_argument(image: str) -> Any:
    """Open the image of a command's argument: a path, or - for standard input."""
    from pathlib import Path

    from elude_steer.errors import ImageError
    from elude_steer.models.images import open_image
    from elude_steer.models.sources.decoding import MAX_MEMORY

    if image != "-":
        return open_image(Path(image))
    data = sys.stdin.buffer.read(MAX_MEMORY + 1)  # what never ends is not read to its end
    if len(data) > MAX_MEMORY:
        raise ImageError(f"standard input has more than {MAX_MEMORY / 1e6:,.0f} MB; give it one image.")
    return open_image(data)


def print_note(text: object) -> None:
    """Print a note on stderr."""
    click.echo(f"elude-steer: note: {text}", err=True)


def print_progress(text: str) -> None:
    """Print on stderr what is being done."""
    click.echo(f"{text} …", err=True)


def print_table(rows: Sequence[Sequence[str]], text_columns: int = sys.maxsize) -> None:
    """Print rows in columns: the first `text_columns` are aligned left, the others, which are numbers, right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if n < text_columns else cell.rjust(width) for n, (cell, width) in pairs]
        click.echo("  ".join(cells).rstrip())


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool, header: bool = False) -> None:
    """Print some columns of rows as a table, or everything as JSON."""
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    cells = [[str(row[column]) for column in columns] for row in rows]
    if header and cells:
        cells.insert(0, [column.replace("_", "-") for column in columns])
    print_table(cells)


def format_number(value: float | None) -> str:
    """A number with four digits, or nothing."""
    return "" if value is None else f"{value:,.4g}"


def show_log() -> None:
    """Show the library's log on stderr, one note per line."""
    import logging

    class Handler(logging.Handler):
        """Writes to the standard error of the moment: a program that calls commands may exchange it in between."""

        def emit(self, record: logging.LogRecord) -> None:
            click.echo(self.format(record), err=True)

    handler = Handler()
    handler.setFormatter(logging.Formatter("elude-steer: note: %(message)s"))
    log = logging.getLogger("elude_steer")
    log.setLevel(logging.INFO)
    log.handlers = [handler]


def hide_loading_bars() -> None:
    """Hide the progress bars of transformers and its messages for developers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
