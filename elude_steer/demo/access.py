"""Who can use the page: addresses, visitors, and what cannot be served together. Needs no torch."""

from __future__ import annotations

from typing import Any

from elude_steer.errors import SpecError
from elude_steer.utils import optional

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def visitor_id(request: Any) -> str:
    """The visitor's session; calls of programs may have none."""
    return str(getattr(request, "session_hash", None))


def rate_limit_key(request: Any) -> str:
    """Whose requests are counted together: an address's, because clients choose the names of their sessions."""
    host = request.client.host if request.client else ""
    # Behind a tunnel that does not pass on addresses, all visitors would count as one.
    return visitor_id(request) if host in ("", *LOCAL_HOSTS) else str(host)


def check_mcp(mcp: bool, auth: object) -> None:
    """Raise if an MCP server is asked for and cannot be had: without its package, or with a password."""
    if mcp and auth:
        raise SpecError("Gradio's MCP server asks for no password; leave out --mcp, or --auth.")
    if mcp:
        optional.require("mcp", "the MCP server of the demo", "leave out --mcp")
