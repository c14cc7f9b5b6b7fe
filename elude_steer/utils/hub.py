"""Whether the Hugging Face Hub can be reached, so that work that needs it fails at once. Needs no torch."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from elude_steer.errors import ModelError

_WAIT = 1.5  # seconds for the name and the connection
_REMEMBER = 30.0  # seconds for which an answer counts
_answers: dict[str, tuple[float, str | None]] = {}  # by address: when it was found, and what was wrong


def why_unreachable() -> str | None:
    """What is wrong with the connection to the Hub, as the end of a sentence; None if there is one.

    The libraries try for half a minute where there is no network. This takes at most 1.5 seconds, or the seconds in
    HF_HUB_ETAG_TIMEOUT for networks that are slower.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = constants.ENDPOINT
    found, problem = _answers.get(endpoint, (-_REMEMBER, None))
    if time.monotonic() - found >= _REMEMBER:
        problem = _find_problem(endpoint)
        _answers[endpoint] = time.monotonic(), problem
    return problem


def is_cached(repo_id: str) -> bool:
    """Whether any version of a model or atlas of the Hub is in the libraries' cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")
    return any(folder.glob("snapshots/*/*"))


def is_hub_id(name: str) -> bool:
    """Whether a name can only be that of a repository on the Hub: `user/name`, and no path of this machine."""
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not Path(name).exists()


def check_available(name: str, kind: str = "model") -> None:
    """Raise if a Hub id can be loaded neither from the cache nor from the Hub; other names pass."""
    if is_hub_id(name) and not is_cached(name) and (problem := why_unreachable()):
        raise ModelError(
            f"{kind} '{name}' is not in the cache of the Hub's files, and {problem}; give a folder, or connect to the "
            "Hub."
        )


def _find_problem(endpoint: str) -> str | None:
    address = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    seconds = max(_WAIT, float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0))
    problem = [f"'{host}' does not answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), seconds).close()
            problem[0] = ""
        except TimeoutError:
            pass
        except OSError as error:
            problem[0] = f"'{host}' cannot be reached ({error.strerror or error})"

    # In a thread, because looking up a name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return problem[0] or None
