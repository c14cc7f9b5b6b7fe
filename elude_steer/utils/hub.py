"""What concerns the Hugging Face Hub: whether it can be reached, and the metadata of model cards. Needs no torch."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elude_steer.errors import ModelError
from elude_steer.utils.files import read_bytes, resolve_id

_WAIT = 1.5  # seconds for the name and the connection
_REMEMBER = 30.0  # seconds for which an answer counts
_MAX_CARD = 2**22  # bytes of a model card
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


def find_base_model(model: str, kind: str = "vlm") -> str | None:
    """The Hub id of a model, for the `base_model` of a card; None for a folder or a model of this package.

    Args:
        model: a Hub id, a folder, or a name of timm.
        kind: as in `ModelSpec`; timm's names are those of repositories under `timm/`.
    """
    name = model.removeprefix("hf-hub:").removeprefix("hf_hub:")
    if kind == "timm" and "/" not in name and not Path(name).exists():
        return f"timm/{name}"
    return name if is_hub_id(resolve_id(name)) else None


def front_matter(**fields: Any) -> str:
    """The metadata at the top of a model card, with its fences; fields that are None or empty are left out.

    Args:
        **fields: those of `huggingface_hub.ModelCardData`, in the order to write them.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(**{name: value for name, value in fields.items() if value})
    return f"---\n{data.to_yaml(original_order=list(fields)).strip()}\n---\n"


def read_license(model: str, revision: str | None = None) -> dict[str, str]:
    """The fields about the licence in a model's card; empty if the card names none or is not within reach.

    Args:
        model: a folder or a Hub id.
        revision: the commit or tag of the Hub.
    """
    import yaml
    from huggingface_hub import ModelCard, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    card = Path(resolve_id(model)) / "README.md"
    try:
        if is_hub_id(resolve_id(model)):
            offline = bool(why_unreachable())
            card = Path(hf_hub_download(model, "README.md", revision=revision, local_files_only=offline))
        found = ModelCard(read_bytes(card, _MAX_CARD).decode(), ignore_metadata_errors=True).data.to_dict()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError, yaml.YAMLError):
        return {}
    return {name: found[name] for name in ("license", "license_name", "license_link") if found.get(name)}


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
