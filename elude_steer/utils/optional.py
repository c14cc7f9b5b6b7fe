"""The only place where optional packages are imported, so that a missing one is a sentence and not a traceback."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from elude_steer.errors import MissingPackageError

# package to import -> the extra that installs it
EXTRAS = {
    "cuml": "gpu",
    "open_clip": "openclip",
    "gradio": "demo",
    "umap": "umap",
    "overcomplete": "baselines",
    "openai": "judge",
    "datasets": "data",
    "timm": "timm",
}


def is_installed(package: str) -> bool:
    """Whether `package` can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, wanted_for: str, otherwise: str = "") -> ModuleType:
    """The imported optional package, or an error that names the feature and the pip line.

    Args:
        package: the name as it is imported, one of `EXTRAS`.
        wanted_for: what asked for it, e.g. `clusters.backend 'cuml'`.
        otherwise: how to do without, e.g. `set clusters.backend: exact`.
    """
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises the latter
        line = f"{wanted_for} needs the package '{package}', which "
        # A package that is there and fails to import has a cause of its own (a torchvision that does not fit torch).
        line += f"does not import here ({error})" if is_installed(package) else "is not installed"
        line += f"; `pip install 'elude-steer[{EXTRAS[package]}]'`"
        raise MissingPackageError(line + (f", or {otherwise}" if otherwise else "") + ".") from error


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
