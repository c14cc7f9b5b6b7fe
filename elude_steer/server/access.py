"""Who may ask the server, and how much: API keys, rates, and the limits of one request."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elude_steer.demo.access import LOCAL_HOSTS
from elude_steer.demo.rate_limit import RateLimit
from elude_steer.errors import EludeSteerError, SpecError

KEYS_VARIABLE = "ELUDE_STEER_API_KEYS"
_MIN_KEY, _MAX_KEY = 16, 256  # characters


class RefusedError(EludeSteerError):
    """A request that is not answered, with the fields of an error of OpenAI's API.

    Args:
        message: what was wrong and what would be right.
        status: of the HTTP response.
        code: the kind of error, for programs.
        param: the field of the request that is wrong.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    def to_dict(self) -> dict[str, object]:
        """The body of the response."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """What the server takes at most.

    Attributes:
        pixels: of an image.
        image_bytes: of an image's file.
        images: in a request.
        messages: in a request.
        text: characters of all messages of a request.
        words: concepts to remove, and as many to add.
        word: characters of a concept.
        prompt_tokens: tokens of a prompt with its images; the model's own limit holds too.
        answer_tokens: the longest answer that can be asked for.
        default_tokens: the longest answer where a request does not say.
        body_seconds: until the body of a request is there.
        rate: requests a minute for each key, or for each address without keys; 0 for no bound.
        waiting: requests that are not answered yet; of several keys, each may have half of them.
        waiting_bytes: memory of what these wait with.
        upload_bytes: of all uploaded files.
        upload_seconds: for which an uploaded file is kept.
    """

    pixels: int = 20_000_000
    image_bytes: int = 10 * 2**20
    images: int = 8
    messages: int = 64
    text: int = 32_000
    words: int = 8
    word: int = 100
    prompt_tokens: int = 8192
    answer_tokens: int = 1024
    default_tokens: int = 256
    body_seconds: float = 60
    rate: int = 0
    waiting: int = 256
    waiting_bytes: int = 2 * 2**30
    upload_bytes: int = 256 * 2**20
    upload_seconds: float = 3600

    @property
    def body_bytes(self) -> int:
        """Of the body of a request: its images in base64, and its text with escapes."""
        return self.images * self.image_bytes * 4 // 3 + 6 * self.text + 2**16


@dataclass(frozen=True)
class Access:
    """The keys of a server and the rate of each.

    Attributes:
        keys: the hashes of the keys; without any, everybody may ask.
        rate: bounds the requests of each key, or of each address.
    """

    keys: tuple[bytes, ...] = ()
    rate: RateLimit | None = None

    def identify(self, authorization: str | None, address: str) -> str:
        """Whose request this is: a key's, or an address's. Raises if keys are asked for and this is none of them."""
        if not self.keys:
            return f"address {address}"
        scheme, _, key = (authorization or "").partition(" ")
        found = _hash(key.strip())
        # Every key is compared, so that the time says nothing about which one is close.
        known = [hmac.compare_digest(found, one) for one in self.keys]
        if scheme.casefold() != "bearer" or not any(known):
            what = "there is no API key" if not key else "the API key is not one of this server's"
            raise RefusedError(
                f"{what}; send the header 'Authorization: Bearer KEY' (api_key of the openai client).",
                401,
                code="invalid_api_key",
            )
        return f"key {known.index(True)}"

    @property
    def share(self) -> float:
        """The part of the places and of the memory of waiting requests that one key may take."""
        return 0.5 if len(self.keys) > 1 else 1.0

    def count(self, owner: str) -> None:
        """Count a request of somebody; raise if there were too many in the last minute."""
        if self.rate is None:
            return
        try:
            self.rate.check(owner)
        except SpecError as error:
            raise RefusedError(
                f"this server answers {self.rate.per_visitor} requests a minute per key or address; wait a moment.",
                429,
                code="rate_limit_exceeded",
                retry_after=10,
            ) from error


def make_access(keys: tuple[str, ...], limits: Limits, clock: Callable[[], float] | None = None) -> Access:
    """The access of a server with these keys; `clock` returns the time in seconds."""
    options = {} if clock is None else {"clock": clock}
    rate = RateLimit(limits.rate, 10**9, **options) if limits.rate else None
    return Access(tuple(map(_hash, keys)), rate)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str | None) -> tuple[str, ...]:
    """The API keys in a file, one a line, or else in `ELUDE_STEER_API_KEYS`; none if there is neither.

    They are not taken from the command line, which everybody on a machine can read. What follows a # is a comment,
    up to the end of its line.
    """
    text = os.environ.get(KEYS_VARIABLE) if path is None else _read_file(path)
    if text is None:
        return ()
    # First the comments, then the commas: a comment may list keys that are valid no more.
    lines = [re.split(r"(?:^|[,\s])#", line)[0] for line in text.splitlines()]
    keys = tuple(dict.fromkeys(key for line in lines for part in line.split(",") if (key := part.strip())))
    where = KEYS_VARIABLE if path is None else f"'{path}'"
    if not keys:
        raise SpecError(f"{where} holds no API key; write one a line, for example of `openssl rand -hex 24`.")
    if any(not _MIN_KEY <= len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable() for key in keys):
        raise SpecError(
            f"a key in {where} is not {_MIN_KEY} to {_MAX_KEY} ASCII characters; make one with `openssl rand -hex 24`."
        )
    if any(" " in key for key in keys):
        raise SpecError(f"a key in {where} has a space in it; write one a line.")
    return keys


def _read_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        # The value is not repeated: it may be a key.
        raise SpecError(
            "--api-keys is the path of a file with one key a line, and there is no such file; write one, or set "
            f"{KEYS_VARIABLE}. A key on the command line could be read by others on this machine."
        ) from error


def check_reach(host: str, keys: tuple[str, ...]) -> None:
    """Raise if others than this machine could ask a server without keys."""
    if host not in LOCAL_HOSTS and not keys:
        raise SpecError(
            f"at --host {host} other machines can reach the server, and without API keys anybody may use it; write "
            f"keys into a file (--api-keys FILE) or {KEYS_VARIABLE}, or leave out --host."
        )
