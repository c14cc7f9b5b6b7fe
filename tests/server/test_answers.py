import json

import pytest

from elude_steer.server.answers import Answer, Completion, Writing

TEXT = "a dog on a motor bike."
END = 999


def write(tokens, **options):
    """What is sent after each token, and the writing; a token is the number of a character of `TEXT`."""
    writing = Writing(
        lambda ids: "".join(TEXT[one] for one in ids if one != END).strip(),
        options.pop("max_tokens", 100),
        frozenset([END]),
        options.pop("stop", ()),
        options.pop("stream", True),
        **options,
    )
    sent = []
    for count in range(1, len(tokens) + 1):
        sent.append(writing.read(tokens[:count]))
        if writing.finish_reason:
            break
    return sent, writing


def test_a_stream_adds_up_to_the_text():
    sent, writing = write([*range(len(TEXT)), END])
    assert "".join(sent) == writing.text == TEXT and writing.finish_reason == "stop"
    assert "" in sent  # white space waits for what follows it
    assert writing.count == len(TEXT) + 1


def test_without_a_stream_nothing_is_sent():
    sent, writing = write([*range(len(TEXT)), END], stream=False)
    assert not any(sent) and writing.text == TEXT


def test_the_longest_answer():
    _, writing = write(range(len(TEXT)), max_tokens=5)
    assert (writing.text, writing.finish_reason, writing.count) == ("a dog", "length", 5)


@pytest.mark.parametrize(("stop", "text"), [(["motor"], "a dog on a"), (["x", "dog", "og"], "a"), (["a"], "")])
def test_what_ends_an_answer_does_not_belong_to_it_and_is_never_sent(stop, text):
    sent, writing = write([*range(len(TEXT)), END], stop=stop)
    assert "".join(sent) == writing.text == text and writing.finish_reason == "stop"


def test_what_only_looks_like_a_stop_is_sent_later():
    sent, writing = write([*range(len(TEXT)), END], stop=["motorway"])
    assert "".join(sent) == writing.text == TEXT
    assert all(not "".join(sent[:n]).endswith("mo") for n in range(len(sent)))


def test_half_a_character_waits():
    decoded = iter(["ä", "ä\N{REPLACEMENT CHARACTER}", "äö"])
    writing = Writing(lambda _: next(decoded), 3, frozenset(), stream=True)
    assert [writing.read([1] * n) for n in (1, 2, 3)] == ["ä", "", "ö"]


def test_an_answer_that_is_begun_again_goes_on():
    sent, writing = write([*range(len(TEXT)), END], sent="a dog on")
    assert "".join(sent) == TEXT.removeprefix("a dog on") and writing.text == TEXT


def decoded(*texts, **options):
    """What is sent while a tokenizer gives these texts after each token, and the writing."""
    steps = iter(texts)
    writing = Writing(lambda _: next(steps), len(texts), frozenset(), stream=True, **options)
    return [writing.read([1] * n) for n in range(1, len(texts) + 1)], writing


def test_spaces_that_a_tokenizer_takes_back_are_not_sent():
    texts = ("I", "I '", "I'm", "I'm do", "I'm do n", "I'm don't", "I'm don't x", "I'm don't x!")
    sent, writing = decoded(*texts, whole_words=True)
    assert "".join(sent) == writing.text == texts[-1] and not writing.differs
    assert sent[:4] == ["", "I", "", "'m"], "the last word waits"


def test_a_text_that_turns_out_otherwise_is_told():
    sent, writing = decoded("I", "I '", "I'm", "I'm here")
    assert sent == ["I", " '", "", ""] and writing.differs
    _, writing = decoded("a", "a b", sent="b")
    assert writing.differs
    sent, writing = decoded("a b", "a c", "a b")
    assert sent == ["a b", "", ""] and not writing.differs, "it came back to what was sent"


def test_events_are_single_lines_of_json():
    completion, answer = Completion("toyland", "abc"), Answer("a\n\ndog", "stop", 3, 2, {"notes": ["\n"]})
    for event in (completion.begin(), completion.text("a\n\ndog"), completion.error({"error": "\n\n"})):
        assert event.startswith("data: {") and event.endswith("\n\n") and event.count("\n") == 2
        json.loads(event[6:])
    assert completion.end(answer, False).count("data: ") == 2 and completion.end(answer, True).count("data: ") == 3
    assert completion.whole(answer)["usage"]["total_tokens"] == 5
