"""Loading models of the Hub or of a folder, whole or not at all, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elude_steer.errors import EludeSteerError, ModelError


def check_device(device: str | torch.device | None) -> torch.device:
    """The device, the CPU if none is named; raises in one line where there is no such device."""
    try:
        return torch.zeros(1, device=device or "cpu").device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelError(
            f"device '{device}' cannot be used here ({cause}); use 'cpu', or one that is there."
        ) from error


def as_dtype(dtype: str | torch.dtype) -> Any:
    """A torch dtype from its name; `auto` stays, for transformers."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype '{dtype}' is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'.")
    return found


def pil_backend() -> dict[str, str]:
    """The argument that makes transformers prepare images with PIL where torchvision is missing."""
    from transformers.utils import is_torchvision_available

    return {} if is_torchvision_available() else {"backend": "pil"}


def refuse_partial_load(model_id: str, info: Mapping[str, Any]) -> None:
    """Raises where a checkpoint and its class do not fit: transformers only warns and leaves weights random."""
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            problems.append(f"{len(keys)} {kind.replace('_', ' ')} (first: '{keys[0]}')")
    if problems:
        raise ModelError(
            f"'{model_id}' does not load whole: {', '.join(problems)}; such weights would stay random or be dropped. "
            "Use the transformers version that wrote it, or another revision."
        )


@contextmanager
def explain_load_errors(model_id: str) -> Iterator[None]:
    """Turns what loaders raise for an unknown, unreachable or damaged model into one line."""
    if model_id.startswith((".", "/", "~")) and not Path(model_id).is_dir():
        raise ModelError(f"there is no folder '{model_id}' to load a model from; check the path, or give a Hub id.")
    try:
        yield
    except EludeSteerError:
        raise
    except Exception as error:  # each loader has kinds of its own, and all mean the same here
        cause = str(error).strip().splitlines()
        raise ModelError(
            f"model '{model_id}' could not be loaded: {cause[0] if cause else type(error).__name__}"
        ) from error
