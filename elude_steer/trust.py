"""The gate: code that comes with a model or a dataset runs only if the caller allows it.

Transformers, sentence-transformers, timm, open_clip and datasets can run Python files or pickles of whoever wrote what
they load. `call_loader` is the only way to call them in this package; `tests/test_trust.py` finds other ways.

Permission is an argument, `trust_remote_code=True` or `--trust-remote-code`, that the caller gives for one call. A
manifest, a spec or a recipe is a file of somebody else: it can say that a model needs its code, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elude_steer.errors import ModelError

_SECONDS_TO_ANSWER = "TIME_OUT_REMOTE_CODE"
_lock = threading.Lock()
_silent: list[float] = []  # what transformers had before each call that is under way, which ends with the last of them


class UntrustedCodeError(ModelError):
    """Something brings code of its own, and the caller did not allow it to run."""

    def __init__(self, subject: str, cause: str) -> None:
        super().__init__(
            f"{subject} {cause}, which does not run unless you allow it; read it, pin the revision, then add "
            "--trust-remote-code (in Python, trust_remote_code=True)."
        )


def check_needs(spec: Mapping[str, Any], parts: Sequence[str], trust_remote_code: bool) -> None:
    """Raise if a spec says that a model needs its own code, and the caller does not allow it.

    Args:
        spec: a build spec as plain values, such as that of a manifest.
        parts: the sections that are going to be loaded: `model`, `matcher`.
        trust_remote_code: what the caller says.
    """
    for part in parts:
        section = spec.get(part) or {}
        if section.get("trust_remote_code") and trust_remote_code is not True:
            raise UntrustedCodeError(f"{part} '{section['id']}'", "needs code of its own")


def call_loader(
    load: Callable[..., Any],
    *arguments: Any,
    subject: str,
    trust_remote_code: bool,
    code: str | None = None,
    has_switch: bool = True,
    **options: Any,
) -> Any:
    """Call a function of another library that may run code of what it loads; raise if it would and must not.

    Args:
        load: the function, such as `AutoModel.from_pretrained`.
        *arguments: for the function.
        subject: what is loaded, such as `model 'a/b'`.
        trust_remote_code: what the caller says; only True allows code.
        code: what could run, such as `a pickle`, where that is known before the call and `load` would not ask.
        has_switch: whether the function takes `trust_remote_code`.
        **options: for the function.
    """
    allowed = trust_remote_code is True
    if code is not None and not allowed:
        raise UntrustedCodeError(subject, f"brings {code}")
    if has_switch:
        options["trust_remote_code"] = allowed
    try:
        if allowed:
            return load(*arguments, **options)
        with _refuse_instead_of_asking():
            return load(*arguments, **options)
    except Exception as error:
        if not allowed and "trust_remote_code" in str(error):  # the libraries' refusals name their switch
            raise UntrustedCodeError(subject, "brings code of its own") from error
        raise


@contextmanager
def _refuse_instead_of_asking() -> Iterator[None]:
    """Inside, transformers asks nobody on the terminal whether code may run.

    It would where a loader calls another one without handing the switch on, and would run the code for a "y".
    """
    from transformers import dynamic_module_utils

    with _lock:
        _silent.append(getattr(dynamic_module_utils, _SECONDS_TO_ANSWER))
        setattr(dynamic_module_utils, _SECONDS_TO_ANSWER, 0)
    try:
        yield
    finally:
        with _lock:
            seconds = _silent[0]
            _silent.pop()
            if not _silent:
                setattr(dynamic_module_utils, _SECONDS_TO_ANSWER, seconds)
