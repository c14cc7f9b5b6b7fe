"""Read requests for chat completions: bytes of strangers become plain values, or one line says what is wrong.

Nothing here opens a file, an address or an image, and nothing takes more memory than the body that came.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from elude_steer.errors import did_you_mean, type_with_article
from elude_steer.server.access import Limits, RefusedError
from elude_steer.specs import Settings

MAX_STOPS, _MAX_STOP = 4, 100  # texts that end an answer, and their characters
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields of OpenAI's API that change nothing about a greedy answer.
_HARMLESS = {"user", "metadata", "store", "service_tier", "seed", "safety_identifier", "prompt_cache_key", "tools",
             "tool_choice", "functions", "parallel_tool_calls"}  # fmt: skip
# Fields of which only these values give what this server gives, and what to say of others.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "one answer a request: leave it out"),
    "temperature": ((None, 0), "greedy answers, which are the same every time: leave it out, or send 0"),
    "top_p": ((None, 1), "greedy answers: leave it out, or send 1"),
    "presence_penalty": ((None, 0), "greedy answers without penalties: leave it out"),
    "frequency_penalty": ((None, 0), "greedy answers without penalties: leave it out"),
    "logprobs": ((None, False), "no probabilities: leave it out"),
    "top_logprobs": ((None, 0), "no probabilities: leave it out"),
    "logit_bias": ((None, {}), "greedy answers without a bias: leave it out"),
    "response_format": ((None, {"type": "text"}), "plain text: leave it out"),
    "modalities": ((None, ["text"]), "text: leave it out"),
}
_OWN = ("model", "messages", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "steer")
SETTINGS = tuple(item.name for item in fields(Settings))


@dataclass(frozen=True)
class EditRequest:
    """An edit as a request asks for it: words with settings, or the name of a recipe and the number of its step."""

    minus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    where: tuple[float, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    step: int = 1

    @property
    def key(self) -> str:
        """The same text for the same edit."""
        return json.dumps([self.minus, self.plus, self.where, self.settings, self.recipe, self.step])


@dataclass(frozen=True)
class ChatRequest:
    """A request for a chat completion.

    Attributes:
        model: the name of the model.
        messages: as chat templates take them: roles, and lists of parts of type `text` and `image`.
        images: of all parts in their order: the bytes of a file, or the name of an uploaded one.
        edit: None is the model without edits.
        max_tokens: the longest answer.
        stop: texts that end the answer.
        stream: whether the answer is sent as it is written.
        include_usage: whether a stream ends with the number of tokens.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[bytes | str, ...]
    edit: EditRequest | None
    max_tokens: int
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def parse_chat(body: bytes | bytearray, limits: Limits) -> ChatRequest:
    """Read the body of a request; raises `RefusedError` for everything that cannot be answered."""
    values = load_json(body)
    known = [*_OWN, *_ONLY, *_HARMLESS]
    for name in values:
        if name not in known:
            raise _wrong(name, f"there is no field {_show(name)}.{did_you_mean(name, known)}")
    for name, (allowed, what) in _ONLY.items():
        given = values.get(name)
        if not any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in allowed):
            raise _wrong(name, f"{name} is {_show(given)}, and this server gives {what}.")
    if values.get("tools") or values.get("functions"):
        raise _wrong("tools", "this server calls no tools; leave them out.")
    model = _text(values.get("model"), "model", 'the name of a model, as /v1/models lists it: "model": "toyland"')
    messages, images = _read_messages(values.get("messages"), limits)
    options = _typed(
        values.get("stream_options") or {}, Mapping, "stream_options", 'an object: {"include_usage": true}'
    )
    return ChatRequest(
        model,
        messages,
        images,
        None if values.get("steer") is None else _read_edit(values["steer"], limits),
        _read_max_tokens(values, limits),
        _read_stop(values.get("stop")),
        _flag(values.get("stream"), "stream"),
        _flag(options.get("include_usage"), "stream_options.include_usage"),
    )


def load_json(body: bytes | bytearray) -> Mapping[str, Any]:
    """The object of a JSON text; numbers that JSON does not have (NaN) are refused."""
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RefusedError("the request is nested too deeply; send what OpenAI's API takes.") from error
    except ValueError as error:  # also numbers of thousands of digits, and what is not UTF-8
        what = " ".join(str(error).split())[:120].encode("ascii", "backslashreplace").decode()
        raise RefusedError(f"the body is no JSON ({what}); send a JSON object.") from error
    if not isinstance(values, dict):
        raise RefusedError(f'the body is {type_with_article(values)}; send a JSON object: {{"model": …}}.')
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _read_messages(values: Any, limits: Limits) -> tuple[tuple[Mapping[str, Any], ...], tuple[bytes | str, ...]]:
    example = '[{"role": "user", "content": [{"type": "image_url", …}, {"type": "text", "text": "…"}]}]'
    if not isinstance(values, list) or not values:
        raise _wrong("messages", f"messages is {_show(values)}; send a list: {example}.")
    if len(values) > limits.messages:
        raise _wrong("messages", f"there are {len(values):,} messages; this server takes {limits.messages}.")
    messages, images, length = [], list[bytes | str](), 0
    for number, message in enumerate(values):
        place = f"messages[{number}]"
        _typed(message, Mapping, place, "an object with role and content")
        role = _ROLES.get(message.get("role")) if isinstance(message.get("role"), str) else None
        if role is None:
            raise _wrong(f"{place}.role", f"{place}.role is {_show(message.get('role'))}; send {', '.join(_ROLES)}.")
        # An answer of this server can be empty, and clients send it back as an earlier turn.
        parts = _read_content(message.get("content"), f"{place}.content", images, limits, role == "assistant")
        length += sum(len(part["text"]) for part in parts if part["type"] == "text")
        if length > limits.text:
            raise _wrong("messages", f"the messages have more than {limits.text:,} characters; send a shorter text.")
        if role != "user" and any(part["type"] == "image" for part in parts):
            raise _wrong(f"{place}.content", f"{place} is of the {role}; images stand in messages of the user.")
        messages.append({"role": role, "content": parts})
    if messages[-1]["role"] != "user":
        raise _wrong("messages", "the last message is not of the user; there is nothing to answer.")
    if not images:
        raise _wrong(
            "messages",
            'there is no image, and this server answers about images: {"type": "image_url", "image_url": {"url": '
            '"data:image/png;base64,…"}}.',
        )
    return tuple(messages), tuple(images)


def _read_content(
    value: Any, place: str, images: list[bytes | str], limits: Limits, may_be_empty: bool
) -> list[dict[str, str]]:
    """The parts of a message; its images are added to those of the request."""
    if isinstance(value, str):
        return [{"type": "text", "text": _text(value, place, "a text", may_be_empty)}]
    if not isinstance(value, list) or not value:
        raise _wrong(place, f"{place} is {_show(value)}; send a text, or a list of parts.")
    parts = []
    for number, part in enumerate(value):
        inner = f"{place}[{number}]"
        _typed(part, Mapping, inner, 'an object: {"type": "text", "text": "…"}')
        kind = part.get("type")
        if kind == "text":
            parts.append({"type": "text", "text": _text(part.get("text"), f"{inner}.text", "a text", may_be_empty)})
            continue
        if kind == "image_url":
            images.append(_read_image_url(part.get("image_url"), f"{inner}.image_url", limits))
        elif kind == "file":
            images.append(_read_file_id(part.get("file"), f"{inner}.file"))
        else:
            raise _wrong(f"{inner}.type", f"{inner}.type is {_show(kind)}; send text, image_url or file.")
        if len(images) > limits.images:
            raise _wrong(place, f"there are more than {limits.images} images, which is what this server takes.")
        parts.append({"type": "image"})
    return parts


def _read_image_url(value: Any, place: str, limits: Limits) -> bytes:
    """The bytes of a data URI."""
    url = value.get("url") if isinstance(value, Mapping) else value
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (comma and head[:5].casefold() == "data:" and head.endswith(";base64")):
        # An address is not repeated and never opened: a server that fetches what strangers name can be sent anywhere.
        raise _wrong(
            place,
            "this server opens no addresses and no files; send the image itself, as "
            '{"url": "data:image/png;base64,…"}, or upload it to /v1/files first.',
        )
    if len(data) * 3 // 4 > limits.image_bytes:
        raise RefusedError(
            f"the image has more than {limits.image_bytes / 2**20:g} MB; send a smaller one.", 413, param=place
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(place, "the image is no base64; send a data URI: data:image/png;base64,….") from error


def _read_file_id(value: Any, place: str) -> str:
    name = value.get("file_id") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name.startswith("file-") or len(name) > 64:
        raise _wrong(place, f'{place} is {_show(value)}; send what /v1/files answered: {{"file_id": "file-…"}}.')
    return name


def _read_edit(value: Any, limits: Limits) -> EditRequest:
    example = '{"minus": ["dog"], "plus": ["biker"], "strength": 1.5}, or {"recipe": "toyland-dog"}'
    _typed(value, Mapping, "steer", f"an object: {example}")
    known = ("minus", "plus", "where", "recipe", "step", *SETTINGS)
    for name in value:
        if name not in known and name not in Settings.removed:
            raise _wrong("steer", f"steer has no field {_show(name)}.{did_you_mean(name, known)}")
    if value.get("recipe") is not None:
        return _read_recipe(value)
    if value.get("step") is not None:
        raise _wrong("steer.step", "steer.step is the number of an edit of a recipe; name the recipe too.")
    minus = _read_words(value.get("minus"), "steer.minus", limits)
    plus = _read_words(value.get("plus"), "steer.plus", limits)
    if not minus and not plus:
        raise _wrong("steer", f"steer names no concept; send {example}, or leave it out.")
    settings = {name: value[name] for name in value if name not in known[:5] and value[name] is not None}
    _check_settings(settings, "steer")
    return EditRequest(minus, plus, _read_box(value.get("where"), "steer.where"), settings)


def _read_recipe(value: Mapping[str, Any]) -> EditRequest:
    name = _text(value["recipe"], "steer.recipe", "the name of a recipe")
    more = [key for key in value if key not in ("recipe", "step") and value[key] is not None]
    if more:
        raise _wrong(
            "steer", f"steer has a recipe and {_show(more[0])}; a recipe says all of an edit: send one of them."
        )
    step = 1 if value.get("step") is None else value["step"]
    if type(step) is not int or step < 1:
        raise _wrong("steer.step", f"steer.step is {_show(step)}; send the number of an edit, from 1.")
    return EditRequest(recipe=name, step=step)


def _read_words(value: Any, place: str, limits: Limits) -> dict[str, dict[str, Any]]:
    """The words, each with its settings."""
    value = [value] if isinstance(value, str) else value or {}
    if isinstance(value, list):
        if len(value) > limits.words:
            raise _wrong(place, f"{place} has {len(value):,} words; this server takes {limits.words}.")
        value = {word if isinstance(word, str) else _raise_word(word, place): {} for word in value}
    _typed(value, Mapping, place, 'a list of words: ["dog"], or words with settings: {"dog": {"strength": 2}}')
    if len(value) > limits.words:
        raise _wrong(place, f"{place} has {len(value):,} words; this server takes {limits.words}.")
    words = {}
    for word, settings in value.items():
        _text(word, place, "a word")
        if len(word) > limits.word or "\0" in word:
            raise _wrong(place, f"{_show(word)} is no word: it has a NUL, or more than {limits.word} characters.")
        _typed(settings, Mapping, f"{place}.{_show(word)}", 'an object of settings: {"strength": 2}')
        own = {name: one for name, one in settings.items() if name != "where"}
        _check_settings(own, place)
        box = _read_box(settings.get("where"), f"{place}.where")
        words[word] = {**own, **({} if box is None else {"where": box})}
    return words


def _raise_word(word: Any, place: str) -> str:
    raise _wrong(place, f'{place} has {_show(word)}, which is no word; send texts: ["dog"].')


def _check_settings(settings: Mapping[str, Any], place: str) -> None:
    """Refuse values that are no setting whatever its name; the plan checks the rest."""
    for name, value in settings.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, str) and len(value) <= 20 and value.isprintable():
            continue
        if isinstance(value, int | float) and abs(value) <= 1e6 and math.isfinite(value):
            continue
        raise _wrong(
            place, f"{place}: {_show(name)} is {_show(value)}; send a number of at most a million, or a choice."
        )


def _read_box(value: Any, place: str) -> tuple[float, ...] | None:
    """A box in pixels. Not the file of a mask: a request names no files."""
    if value is None:
        return None
    numbers = value if isinstance(value, list) else []
    good = all(type(one) in (int, float) and abs(one) <= 1e6 for one in numbers)
    if len(numbers) != 4 or not good:
        raise _wrong(place, f"{place} is {_show(value)}; send a box in pixels: [left, top, right, bottom].")
    return tuple(numbers)


def _read_max_tokens(values: Mapping[str, Any], limits: Limits) -> int:
    names = [name for name in ("max_completion_tokens", "max_tokens") if values.get(name) is not None]
    if not names:
        return limits.default_tokens
    count = values[names[0]]
    if type(count) is not int or count < 1:
        raise _wrong(names[0], f"{names[0]} is {_show(count)}; send a whole number of at least 1.")
    if count > limits.answer_tokens:
        raise _wrong(
            names[0], f"{names[0]} is {_show(count)}; an answer of this server has at most {limits.answer_tokens:,}."
        )
    return count


def _read_stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    good = isinstance(texts, list) and all(isinstance(one, str) and 0 < len(one) <= _MAX_STOP for one in texts)
    if not good or len(texts) > MAX_STOPS:
        raise _wrong("stop", f"stop is {_show(value)}; send up to {MAX_STOPS} texts of up to {_MAX_STOP} characters.")
    return tuple(texts)


def _text(value: Any, place: str, right: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise _wrong(place, f"{place} is {_show(value)}; send {right}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can say and no tokenizer can read
        raise _wrong(place, f"{place} has a character that no text can hold; send UTF-8.") from error
    return value


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool | None):
        raise _wrong(place, f"{place} is {_show(value)}; send true or false.")
    return bool(value)


def _typed(value: Any, kind: type, place: str, right: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(place, f"{place} is {_show(value)}; send {right}.")
    return value


def _wrong(param: str, message: str) -> RefusedError:
    return RefusedError(message, param=param)


def _show(value: Any) -> str:
    """A value of a stranger in a sentence: short, in one line, printable."""
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
        return f"{type_with_article(value)} of {len(value):,}"
    if isinstance(value, int) and abs(value) > 10**18:
        return "a huge number"
    text = "missing" if value is None else json.dumps(value) if isinstance(value, bool) else repr(value)
    text = text if len(text) <= 60 else f"{text[:60]}…"
    return text.encode("ascii", "backslashreplace").decode() if not text.isprintable() else text
