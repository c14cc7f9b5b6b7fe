"""What can go wrong, each kind also a built-in, so that `except ValueError` works as users expect."""

from __future__ import annotations

from collections.abc import Sequence


class EludeSteerError(Exception):
    """Base of every error this package raises on purpose: one sentence that names the cure."""


class SpecError(EludeSteerError, ValueError):
    """A recipe or an argument says something that cannot be done; carries every problem found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class LayerError(EludeSteerError, LookupError):
    """The layer named is not there, is there twice, or is not linear."""


class ImageError(EludeSteerError, ValueError):
    """Images that cannot be found or read."""


class AtlasError(EludeSteerError, ValueError):
    """An atlas that is missing, damaged or made for other weights."""


class ModelError(EludeSteerError, ValueError):
    """A model that does not load whole or gives what the method cannot use."""


class StorageError(EludeSteerError, OSError):
    """Something could not be written; what was finished before is kept."""


class MissingPackageError(EludeSteerError, ImportError):
    """An optional package is asked for and not installed."""


class ProcessError(EludeSteerError, RuntimeError):
    """One of several processes failed or did not start."""


class StoppedError(EludeSteerError, RuntimeError):
    """Somebody stopped what was being done."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` for the known word most like this one, or an empty string."""
    import difflib

    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


class EludeSteerWarning(UserWarning):
    """Something worth knowing that stops nothing."""
