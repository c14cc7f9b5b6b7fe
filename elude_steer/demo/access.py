"""Who can use the page: addresses, visitors, and what cannot be served together. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from elude_steer.errors import SpecError
from elude_steer.utils import optional

AUTH_VARIABLE = "ELUDE_STEER_AUTH"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def visitor_id(request: Any) -> str:
    """The visitor's session; calls of programs may have none."""
    return str(getattr(request, "session_hash", None))


def rate_limit_key(request: Any) -> str:
    """Whose requests are counted together: an address's, because clients choose the names of their sessions."""
    host = request.client.host if request.client else ""
    # Behind a tunnel that does not pass on addresses, all visitors would count as one.
    return visitor_id(request) if host in ("", *LOCAL_HOSTS) else str(host)


def read_auth(path: str | None) -> tuple[str, str] | None:
    """The name and the password in a file, or else in `ELUDE_STEER_AUTH`; None if there is neither.

    They are not taken from the command line, which everybody on a machine can read.
    """
    text = os.environ.get(AUTH_VARIABLE) if path is None else _read_auth_file(path)
    if text is None:
        return None
    name, colon, password = text.strip().partition(":")
    if not (name and colon and password) or "\n" in password:
        where = AUTH_VARIABLE if path is None else f"'{path}'"
        raise SpecError(f"{where} must hold one name and one password, as NAME:PASSWORD.")
    return name, password


def _read_auth_file(path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            return file.read(10_000)  # a pipe is welcome, a device that never ends is not
    except (OSError, ValueError) as error:
        # The value is not repeated: it may be a password.
        raise SpecError(
            "--auth is the path of a file that holds NAME:PASSWORD, and there is no such file; write one, or set "
            f"{AUTH_VARIABLE}. A password on the command line could be read by others on this machine."
        ) from error


def hide_folders(text: str) -> str:
    """A message without the folders of this machine: of each absolute path only the last part stays."""
    return re.sub(r"(?<![\w:/.<])/(?:[^\s/'\"<>]+/)+", "", text)


def check_mcp(mcp: bool, auth: object) -> None:
    """Raise if an MCP server is asked for and cannot be had: without its package, or with a password."""
    if mcp and auth:
        raise SpecError("Gradio's MCP server asks for no password; leave out --mcp, or the password.")
    if mcp:
        optional.require("mcp", "the MCP server of the demo", "leave out --mcp")
