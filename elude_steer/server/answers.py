"""Answers while they are written, and as OpenAI's API sends them."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: all of it.
        finish_reason: `stop`, or `length` if it has as many tokens as it may have.
        prompt_tokens: tokens of the prompt with its images.
        answer_tokens: generated tokens.
        steer: what was changed; None without an edit.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    answer_tokens: int
    steer: dict[str, Any] | None

    @property
    def usage(self) -> dict[str, int]:
        """Its tokens as the API counts them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
        }


class Writing:
    """An answer that is being generated: watches for its end, and gives the text that is certain so far.

    Args:
        decode: the text of some tokens, without white space around it.
        max_tokens: the longest answer.
        ends: tokens that end an answer.
        stop: texts that end an answer and do not belong to it.
        stream: whether text is wanted before the end.
        sent: text that was sent before, when the same answer was begun already.
        whole_words: whether the last word may change when more follows: some tokenizers take spaces back.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        max_tokens: int,
        ends: frozenset[int],
        stop: Sequence[str] = (),
        stream: bool = False,
        sent: str = "",
        whole_words: bool = False,
    ) -> None:
        self.decode, self.max_tokens, self.ends, self.stop, self.stream = decode, max_tokens, ends, tuple(stop), stream
        self.whole_words = whole_words
        self.text, self.sent, self.finish_reason = "", sent, ""
        self.count = 0

    def read(self, tokens: Sequence[int]) -> str:
        """Take all tokens so far and return text to send; `finish_reason` is set when they are complete."""
        self.count = len(tokens)
        ended = tokens[-1] in self.ends
        full = ended or self.count >= self.max_tokens
        if not (full or self.stream or self.stop):
            return ""
        text = self.decode(tokens)
        cut = min((at for one in self.stop if (at := text.find(one)) >= 0), default=-1)
        if cut >= 0:
            text, full, ended = text[:cut].rstrip(), True, True
        if full:
            self.text, self.finish_reason = text, "stop" if ended else "length"
        certain = text if full else self._certain(text)
        if not self.stream or not certain.startswith(self.sent):
            return ""  # the rest may still come; at the end, `differs` says that it did not
        new, self.sent = certain[len(self.sent) :], certain
        return new

    @property
    def differs(self) -> bool:
        """Whether the complete answer does not begin with what was sent of it."""
        return self.stream and bool(self.finish_reason) and not self.text.startswith(self.sent)

    def _certain(self, text: str) -> str:
        """The text without an end that later tokens may change: half a character, word or text of `stop`."""
        text = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        if self.whole_words:
            text = re.sub(r"\s*\S*$", "", text)
        kept = max((n for one in self.stop for n in range(1, len(one)) if text.endswith(one[:n])), default=0)
        return text[: len(text) - kept].rstrip()


class Completion:
    """The response to one request, whole or in chunks."""

    def __init__(self, model: str, fingerprint: str) -> None:
        kind = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", **kind}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response in one piece."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": answer.usage,
            "steer": answer.steer,
        }

    def begin(self) -> str:
        """The first event of a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> str:
        """An event with more text."""
        return self._chunk({"content": text})

    def end(self, answer: Answer, include_usage: bool) -> str:
        """The last events of a stream."""
        events = self._chunk({}, answer.finish_reason, steer=answer.steer)
        if include_usage:
            events += _event({**self.head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage})
        return f"{events}data: [DONE]\n\n"

    def error(self, body: dict[str, Any]) -> str:
        """The last event of a stream that fails."""
        return _event(body)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**self.head, "object": "chat.completion.chunk", "choices": [choice], **more})


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
