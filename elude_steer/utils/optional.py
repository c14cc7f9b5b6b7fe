"""Imports of optional packages, all here, so that a missing one gives a sentence and not a traceback."""

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
    "mcp": "mcp",
    "umap": "umap",
    "overcomplete": "baselines",
    "openai": "judge",
    "datasets": "data",
    "timm": "timm",
    "lmms_eval": "lmms",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "ray": "ray",
    "submitit": "slurm",
    "s3fs": "s3",
    "gcsfs": "gs",
    "torchao": "quantize",
    "bitsandbytes": "quantize",
}


def is_installed(package: str) -> bool:
    """Whether `package` can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, feature: str, alternative: str = "") -> ModuleType:
    """Import an optional package, or raise an error that names the feature and the pip command.

    Args:
        package: The name to import, one of `EXTRAS`.
        feature: What needs it, e.g. `clusters.backend 'cuml'`.
        alternative: How to do without it, e.g. `set clusters.backend: exact`.
    """
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a torchvision that does not match torch raises a RuntimeError
        line = f"{feature} needs the package '{package}', which "
        # An installed package that fails to import has another cause, such as a torchvision that does not match torch.
        line += f"does not import here ({error})" if is_installed(package) else "is not installed"
        line += f"; `pip install 'elude-steer[{EXTRAS[package.partition('.')[0]]}]'`"
        raise MissingPackageError(line + (f", or {alternative}" if alternative else "") + ".") from error


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
