"""The package's errors. Each is also a built-in error, so that `except ValueError` works as users expect."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_LINE = 900  # characters


class EludeSteerError(Exception):
    """Base of all errors that this package raises on purpose; the message says how to fix the problem."""


class SpecError(EludeSteerError, ValueError):
    """A recipe or an argument is not valid; `problems` holds all problems, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = tuple(map(_shorten, (problems,) if isinstance(problems, str) else problems))
        super().__init__("\n".join(self.problems))


def _shorten(line: str) -> str:
    """A line without its middle, where somebody else's text would make it endless."""
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 250]} … {line[-200:]}"


class LayerError(EludeSteerError, LookupError):
    """The layer does not exist, is ambiguous, or is not linear."""


class ImageError(EludeSteerError, ValueError):
    """An image cannot be found or read."""


class AtlasError(EludeSteerError, ValueError):
    """An atlas is missing, damaged, or made for other weights."""


class ModelError(EludeSteerError, ValueError):
    """A model does not load completely, or gives outputs that the method cannot use."""


class StorageError(EludeSteerError, OSError):
    """A file or folder cannot be written or read; finished work is kept."""


class MissingPackageError(EludeSteerError, ImportError):
    """An optional package is needed and not installed."""


class ProcessError(EludeSteerError, RuntimeError):
    """One of several processes failed or did not start."""


class StoppedError(EludeSteerError, RuntimeError):
    """The user stopped the work."""


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """` Did you mean 'x'?` with the choice most similar to the word, or an empty string."""
    import difflib

    if len(word) > 100:  # the comparison takes the product of both lengths, and nobody means a choice with so much
        return ""
    match = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def with_article(name: str) -> str:
    """`an AtlasSpec`, `a list`."""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def type_with_article(value: object) -> str:
    """`an int`, `a list`, `None`: the type of a value, as a sentence names it."""
    return "None" if value is None else with_article(type(value).__name__)


class EludeSteerWarning(UserWarning):
    """Something the user should know that stops nothing."""
