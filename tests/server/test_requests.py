import json
import sys

import pytest

from elude_steer.server.access import Limits, RefusedError
from elude_steer.server.requests import parse_chat
from tests.server.conftest import chat

LIMITS = Limits(image_bytes=100_000)


def parse(**fields):
    return parse_chat(json.dumps(chat(**fields)).encode(), LIMITS)


def parse_content(*parts, role="user"):
    body = {"model": "toyland", "messages": [{"role": role, "content": list(parts)}]}
    return parse_chat(json.dumps(body).encode(), LIMITS)


def test_a_request_is_read_whole():
    request = parse(
        steer={"minus": ["dog"], "plus": {"biker": {"strength": 2}}, "where": [1, 2, 3, 4], "strength": 1.5},
        max_completion_tokens=7, stop="on", stream=True, stream_options={"include_usage": True}, seed=3, user="me",
    )  # fmt: skip
    assert request.model == "toyland" and len(request.images) == 1
    assert request.messages[0]["content"][0] == {"type": "image"}
    assert (request.max_tokens, request.stop, request.stream, request.include_usage) == (7, ("on",), True, True)
    assert request.edit.minus == {"dog": {}} and request.edit.plus == {"biker": {"strength": 2}}
    assert request.edit.where == (1, 2, 3, 4) and request.edit.settings == {"strength": 1.5}


def test_the_key_of_an_edit_tells_edits_apart():
    edits = [{"minus": ["a"]}, {"plus": ["a"]}, {"minus": ["a"], "strength": 2}, {"recipe": "a"}, {"minus": ["a", "b"]}]
    assert len({parse(steer=edit).edit.key for edit in edits}) == len(edits)
    assert parse(steer={"minus": "a"}).edit.key == parse(steer={"minus": ["a"]}).edit.key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, "temperature is 0.7, and this server gives greedy answers"),
        ({"n": 2}, "n is 2, and this server gives one answer a request"),
        ({"n": True}, "n is true, and this"),
        ({"logprobs": True}, "no probabilities"),
        ({"tools": [{"type": "function"}]}, "calls no tools"),
        ({"response_format": {"type": "json_object"}}, "plain text"),
        ({"ster": {}}, "there is no field 'ster'. Did you mean 'steer'?"),
        ({"max_tokens": 10**9}, "max_tokens is 1000000000; an answer of this server has at most 1,024"),
        ({"max_tokens": 10**30}, "max_tokens is a huge number"),
        ({"max_tokens": 0}, "a whole number of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is true"),
        ({"stream": "yes"}, "stream is 'yes'; send true or false"),
        ({"stop": ["a"] * 5}, "stop is a list of 5"),
        ({"stop": [""]}, "stop is a list of 1"),
        ({"model": 3}, "model is 3"),
        ({"messages": []}, "messages is a list of 0; send a list"),
        ({"messages": "hello"}, "messages is 'hello'"),
        ({"messages": [{"role": "user", "content": "hi"}] * 65}, "65 messages; this server takes 64"),
        ({"text": "word " * 10_000}, "more than 32,000 characters"),
        ({"text": "\ud800"}, "a character that no text can hold"),
        ({"steer": "dog"}, "steer is 'dog'; send an object"),
        ({"steer": {}}, "steer names no concept"),
        ({"steer": {"minus": ["dog"], "strenght": 2}}, "no field 'strenght'. Did you mean 'strength'?"),
        ({"steer": {"minus": ["x"] * 10_000}}, "steer.minus has 10,000 words; this server takes 8"),
        ({"steer": {"minus": {str(n): {} for n in range(9)}}}, "steer.minus has 9 words"),
        ({"steer": {"minus": ["x" * 101]}}, "more than 100 characters"),
        ({"steer": {"minus": ["a\0b"]}}, "has a NUL"),
        ({"steer": {"minus": [3]}}, "steer.minus has 3, which is no word"),
        ({"steer": {"minus": ["dog"], "strength": 1e300}}, "a number of at most a million"),
        ({"steer": {"minus": ["dog"], "strength": [1]}}, "'strength' is a list of 1"),
        ({"steer": {"minus": ["dog"], "mode": "x" * 30}}, "'mode' is 'xxx"),
        ({"steer": {"minus": ["dog"], "where": "/etc/passwd"}}, r"send a box in pixels"),
        ({"steer": {"minus": {"dog": {"where": "mask.png"}}}}, r"send a box in pixels"),
        ({"steer": {"minus": ["dog"], "where": [0, 0, 1, float("1e9")]}}, r"send a box in pixels"),
        ({"steer": {"recipe": "toyland-dog", "minus": ["dog"]}}, "a recipe says all of an edit"),
        ({"steer": {"recipe": "toyland-dog", "step": 0}}, "steer.step is 0"),
        ({"steer": {"minus": ["dog"], "step": 2}}, "name the recipe too"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(fields, message):
    with pytest.raises(RefusedError) as refused:
        parse(**fields)
    assert message in str(refused.value) and refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no JSON"),
        (b"\xff\xfe", "the body is no JSON"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"steer": {"minus": ["dog"], "strength": -Infinity}}', "-Infinity is no number of JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"[1, 2]", "the body is a list; send a JSON object"),
        (b"null", "the body is None"),
        (b'{"n": ' + b"9" * (sys.get_int_max_str_digits() + 1) + b"}", "the body is no JSON"),
        (b"{}", "model is missing"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, message):
    with pytest.raises(RefusedError, match=message):
        parse_chat(body, LIMITS)


def test_a_number_that_is_no_number_is_refused():
    body = json.dumps(chat(steer={"minus": ["dog"], "strength": 1})).replace('"strength": 1', '"strength": 1e999')
    with pytest.raises(RefusedError, match="a number of at most a million"):
        parse_chat(body.encode(), LIMITS)


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
            400,
            "opens no addresses and no files",
        ),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400, "opens no addresses and no files"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, 400, "opens no addresses and no files"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, 400, "opens no addresses and no files"),
        ({"type": "image_url"}, 400, "opens no addresses and no files"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, 400, "the image is no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,äöü"}}, 400, "the image is no base64"),
        ({"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 200_000}}, 413, "more than 0.0953674 MB"),
        ({"type": "file", "file": {"file_id": "../../etc/passwd"}}, 400, "send what /v1/files answered"),
        ({"type": "file", "file": "x"}, 400, "send what /v1/files answered"),
        ({"type": "image_embeds", "image_embeds": "gASV"}, 400, "send text, image_url or file"),
        ({"type": "input_audio"}, 400, "send text, image_url or file"),
        ({"type": ["text"]}, 400, "is a list of 1; send text"),
        ("text", 400, "send an object"),
        ({"type": "text", "text": 3}, 400, ".text is 3"),
        ({"type": "text", "text": "no image"}, 400, "there is no image"),
    ],
)
def test_images_come_with_the_request_or_not_at_all(part, status, message):
    with pytest.raises(RefusedError) as refused:
        parse_content(part)
    assert message in str(refused.value) and refused.value.status == status
    assert "169.254" not in str(refused.value)


def test_messages_have_roles_and_end_with_the_user():
    image = chat()["messages"][0]["content"][0]
    with pytest.raises(RefusedError, match="images stand in messages of the user"):
        parse_content(image, role="assistant")
    with pytest.raises(RefusedError, match=r"messages\[0\].role is 'tool'; send system, developer, user, assistant"):
        parse_content(image, role="tool")
    with pytest.raises(RefusedError, match="more than 8 images"):
        parse_content(*[image] * 9)
    last = [*chat()["messages"], {"role": "assistant", "content": "a dog"}]
    with pytest.raises(RefusedError, match="the last message is not of the user"):
        parse_chat(json.dumps({"model": "toyland", "messages": last}).encode(), LIMITS)
