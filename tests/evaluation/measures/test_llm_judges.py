"""Judges behind a small server that behaves, and misbehaves, as real ones do."""

import json
import math
import signal
import subprocess
import sys
import threading
import time

import pytest
from PIL import Image

from elude_steer.errors import SpecError, StorageError
from elude_steer.evaluation.measures import llm_judges
from elude_steer.evaluation.measures.llm_judges import (
    CELL,
    Answer,
    Judge,
    Pair,
    ask_judges,
    make_grid,
    rank_methods,
    read_answer,
)
from tests.helpers.judge_server import Server, answer

openai = pytest.importorskip("openai", reason="the judge needs openai: pip install 'elude-steer[judge]'")


def grid(colour):
    return make_grid([Image.new("RGB", (40, 30), colour)] * 9)


def pairs(count):
    """ELUDe's grids are red and the others blue; all differ."""
    return [Pair("elude", "raw", (grid((250, i, 0)), grid((0, i, 250))), str(i)) for i in range(count)]


def is_red(address):
    import base64
    import io

    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return image.getpixel((5, 5))[0] > 128


def prefers_red(_model, first, _second, _count):
    return answer("A" if is_red(first) else "B")


def test_a_grid_is_three_by_three():
    images = [Image.new("RGB", (50 + i, 40), (i * 20, 0, 0)) for i in range(12)]
    sheet = make_grid(images)
    assert sheet.size == (3 * CELL, 3 * CELL) == (1008, 1008)
    for number in range(9):
        position = (number % 3 * CELL + 10, number // 3 * CELL + 10)
        assert sheet.getpixel(position) == (number * 20, 0, 0)
    assert make_grid(images[:1]).getpixel((1000, 1000)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ('{"answer": "A"}', "A"),
        ('```json\n{"reason_a": "dogs", "reason_b": "-", "answer": " b "}\n```', "B"),
        ('I think {"answer": "A"} no, wait: {"answer": "B"}', "B"),
        ('{"reason_a": "{x} and }", "reason_b": "y", "answer": "A"}', "A"),
        ('{"why": {"answer": "B"}}', None),
        ('{"answer": "C"}', None),
        ('{"answer": A}', None),
        ('{"answer": ["A"]}', None),
        ("A", None),
        ("", None),
        ("[1]", None),
    ],
)
def test_replies_are_parsed_or_counted_as_wrong(text, letter):
    assert read_answer(text) == letter


def test_the_order_of_grids_does_not_matter_and_nothing_is_asked_twice(tmp_path):
    left = []
    with Server(prefers_red) as server:
        judges = [Judge(name, server.url) for name in ("one", "two", "three")]
        found = ask_judges(judges, pairs(4), tmp_path, confirm=left.append)
        assert left == [4 * 2 * 3]  # called before the first question
        assert sum(server.asked.values()) == 24
        body = server.bodies[0]
        assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 42, 256)
        assert {a.winner for a in found} == {"elude"}
        again = ask_judges(judges, pairs(4), tmp_path, confirm=left.append)
        assert left[1] == 0
        assert sum(server.asked.values()) == 24  # nothing is asked twice
        assert again == found
    ranking = rank_methods(judges, pairs(4), found)
    assert ranking.rates == {"elude": 1.0, "raw": 0.0}
    assert ranking.intervals["elude"] == (1.0, 1.0)
    assert (ranking.pairs, ranking.ties) == (4, 0)


def test_a_judge_that_always_chooses_a_favours_no_method(tmp_path):
    with Server(lambda *_: answer("A")) as server:
        judges = [Judge("one", server.url)]
        ranking = rank_methods(judges, pairs(5), ask_judges(judges, pairs(5), tmp_path))
    assert (ranking.pairs, ranking.ties) == (5, 5)
    assert all(math.isnan(rate) for rate in ranking.rates.values())


def test_a_pair_goes_to_the_method_that_most_answers_name_over_both_presentations():
    """Three judges cannot tie in one presentation; what counts is all six answers about a pair."""
    won = [
        [("a", "a"), ("a", "b"), ("b", "b")],  # a tie: three answers each
        [("a", "a"), ("a", "b"), ("a", "b")],  # four answers for a
        [("b", "b"), ("a", "b"), (None, "b")],  # four for b
    ]
    shown = [Pair("a", "b", (grid("red"), grid("blue")))] * 3
    answers = [
        Answer(f"judge {j}", number, bool(swapped), winner, "")
        for number, judges in enumerate(won)
        for j, pair in enumerate(judges)
        for swapped, winner in enumerate(pair)
    ]
    ranking = rank_methods([Judge(f"judge {j}", "") for j in range(3)], shown, answers)
    assert (ranking.pairs, ranking.ties, ranking.rates) == (3, 1, {"a": 0.5, "b": 0.5})


def test_slow_replies_and_temporary_failures_are_waited_for(tmp_path):
    def reply(model, first, second, _count):
        times = server.asked[(model, first, second)]
        if times == 1:
            return 429
        if times == 2:
            return 500
        time.sleep(0.2)
        return prefers_red(model, first, second, 0)

    with Server(reply) as server:
        judges = [Judge("one", server.url)]
        found = ask_judges(judges, pairs(2), tmp_path, threads=4, timeout=30)
    assert [a.winner for a in found] == ["elude"] * 4
    assert set(server.asked.values()) == {3}


def test_malformed_replies_are_counted_and_not_asked_again(tmp_path):
    def reply(model, first, second, _count):
        return '{"answer": ' if model == "broken" else prefers_red(model, first, second, 0)

    with Server(reply) as server:
        judges = [Judge("broken", server.url), Judge("whole", server.url)]
        found = ask_judges(judges, pairs(3), tmp_path)
        ask_judges(judges, pairs(3), tmp_path)
        assert sum(server.asked.values()) == 12
    ranking = rank_methods(judges, pairs(3), found)
    assert ranking.wrong == {"broken": 6, "whole": 0}
    assert ranking.missing == {"broken": 0, "whole": 0}
    assert ranking.rates["elude"] == 1.0


def test_a_judge_that_keeps_failing_is_given_up(tmp_path):
    lines = []

    def reply(model, first, second, count):
        return 400 if count > 5 else prefers_red(model, first, second, 0)

    with Server(reply) as server:
        judges = [Judge("one", server.url)]
        found = ask_judges(judges, pairs(10), tmp_path, threads=1, log=lines.append)
        assert len(found) == 5
        assert sum(server.asked.values()) == 5 + 3  # three failures in a row, and it is not asked any more
    assert len(lines) == 1
    assert "judge 'one'" in lines[0]
    assert rank_methods(judges, pairs(10), found).missing == {"one": 15}
    dead = ask_judges(judges, pairs(10), tmp_path, threads=1, retries=0, timeout=2)  # no server at all
    assert dead == found


def test_stored_replies_are_used_without_the_server(tmp_path):
    with Server(lambda *a: 400 if a[-1] > 5 else prefers_red(*a)) as server:
        port = server.server.server_port
        ask_judges([Judge("one", server.url)], pairs(4), tmp_path, threads=1)
    with Server(prefers_red) as later:
        judge = Judge("one", f"http://127.0.0.1:{port}/v1")
        left = []
        moved = ask_judges([Judge("one", later.url)], pairs(1), tmp_path / "other", confirm=left.append)
        assert left == [2]
        assert len(moved) == 2
        assert len(ask_judges([judge], pairs(4), tmp_path, threads=1, retries=0, timeout=2)) == 5


@pytest.mark.parametrize(
    "page",
    [b"<html>hello</html>", b'{"answer"', b"[1]", b"{}", b'{"choices": ["hello"]}', b'{"choices": [{"index": 0}]}'],
)
def test_an_endpoint_that_is_no_chat_is_given_up_and_others_continue(tmp_path, page):
    lines = []
    with Server(lambda model, *rest: page if model == "odd" else prefers_red(model, *rest)) as server:
        judges = [Judge("odd", server.url), Judge("whole", server.url)]
        found = ask_judges(judges, pairs(3), tmp_path, threads=1, log=lines.append)
    assert [a.judge for a in found] == ["whole"] * 6
    assert len(lines) == 1
    assert "judge 'odd'" in lines[0]
    assert rank_methods(judges, pairs(3), found).missing == {"odd": 6, "whole": 0}


def test_one_model_at_two_addresses_is_two_judges_but_one_judge_twice_is_refused(tmp_path):
    with Server(prefers_red) as one, Server(prefers_red) as other:
        judges = [Judge("m", one.url), Judge("m", other.url)]
        ranking = rank_methods(judges, pairs(2), ask_judges(judges, pairs(2), tmp_path))
        assert ranking.missing == {f"m@{one.url}": 0, f"m@{other.url}": 0}
        with pytest.raises(SpecError, match=r"judge 'm' at .* is named 2 times; once is enough"):
            ask_judges([judges[0], judges[0]], pairs(1), tmp_path)


def test_a_damaged_reply_is_asked_for_again(tmp_path):
    with Server(prefers_red) as server:
        judges = [Judge("one", server.url)]
        found = ask_judges(judges, pairs(2), tmp_path)
        for text in ("{", '{"text": "A"}' + " " * 2**20):
            sorted(tmp_path.glob("*.json"))[0].write_text(text)
            left = []
            assert ask_judges(judges, pairs(2), tmp_path, confirm=left.append) == found
            assert left == [1]


def test_intervals_resample_pairs_and_not_single_presentations():
    shown = pairs(40)
    won = [number % 2 == 0 for number in range(40)]
    answers = [
        Answer("one", number, swap, "elude" if won[number] else "raw", "") for number in range(40) for swap in (0, 1)
    ]
    low, high = rank_methods([Judge("one", "")], shown, answers).intervals["elude"]
    assert high - low == pytest.approx(2 * 1.96 * (0.25 / 40) ** 0.5, abs=0.03)  # not the 0.22 of eighty games


def test_a_method_without_a_majority_has_no_rate():
    three = [Pair("a", "b", (grid("red"), grid("blue"))), Pair("a", "c", (grid("red"), grid("green")))]
    answers = [Answer("one", 0, False, "a", ""), Answer("one", 1, False, "a", ""), Answer("two", 1, False, "c", "")]
    ranking = rank_methods([Judge("one", ""), Judge("two", "x")], three, answers)
    assert ranking.rates["a"] == 1
    assert ranking.rates["c"] != ranking.rates["c"]


def test_an_interrupt_ends_the_wait_for_a_hanging_endpoint(tmp_path):
    """In a separate process: an interrupt while replies are awaited."""
    code = (
        "import signal, sys; from pathlib import Path; from PIL import Image;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # the parent process may have it ignored
        "from elude_steer.evaluation.measures.llm_judges import *;"
        "grids = tuple(Image.new('RGB', (9, 9), c) for c in ('red', 'blue'));"
        "print('asking', flush=True);"
        "ask_judges([Judge('m', sys.argv[1])], [Pair('a', 'b', grids)], Path(sys.argv[2]))"
    )
    hold = threading.Event()
    with Server(lambda *_: (hold.wait(60), answer("A"))[1]) as server:
        with subprocess.Popen(
            [sys.executable, "-c", code, server.url, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout.readline() == b"asking\n"
            while not server.asked:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            process.wait(20)
        hold.set()
    assert process.returncode != 0


def test_ties_count_for_no_method(tmp_path):
    def reply(model, first, second, _count):
        red = prefers_red(model, first, second, 0)
        return red if model == "one" else answer("B" if "A" in json.loads(red)["answer"] else "A")

    with Server(reply) as server:
        judges = [Judge("one", server.url), Judge("two", server.url)]
        ranking = rank_methods(judges, pairs(3), ask_judges(judges, pairs(3), tmp_path))
    assert ranking.ties == 3
    assert all(rate != rate for rate in ranking.rates.values())  # no method played


def test_a_missing_key_is_refused_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(SpecError, match="judge 'one' needs its key in the environment: export JUDGE_KEY="):
        ask_judges([Judge("one", "http://127.0.0.1:9/v1", "JUDGE_KEY")], pairs(1), tmp_path)


def test_confirm_can_stop_before_the_first_question(tmp_path):
    def no(count):
        raise SpecError(f"{count} calls are too many")

    with Server(prefers_red) as server, pytest.raises(SpecError, match="4 calls"):
        ask_judges([Judge("one", server.url)], pairs(2), tmp_path, confirm=no)
    assert not server.asked


NESTED = '{"a": ' * 3000


@pytest.mark.parametrize("text", [NESTED, "[" * 100_000, '{"answer": "A"}' + "x" * 30_000, '{"a":[' * 60])
def test_excessive_replies_contain_no_answer(text):
    assert read_answer(text) is None


def test_excessive_replies_are_not_stored(tmp_path):
    lines = []
    with Server(lambda *_: NESTED) as server:
        answers = ask_judges([Judge("j", server.url)], pairs(2), tmp_path, log=lines.append, retries=0)
    assert answers == [] and list(tmp_path.iterdir()) == []
    assert len(lines) == 1 and "the reply is too long or nested too deeply" in lines[0]


def test_a_body_that_is_nested_deeply_is_a_failure_of_the_judge(tmp_path):
    lines = []
    with Server(lambda *_: b"[" * 200_000) as server:
        answers = ask_judges([Judge("j", server.url)], pairs(2), tmp_path, log=lines.append, retries=0)
    assert answers == [] and len(lines) == 1


@pytest.mark.parametrize("content", [json.dumps({"text": NESTED}), '{"text": ' + "[" * 100_000, '{"text": 5}'])
def test_excessive_replies_of_earlier_runs_are_asked_again(tmp_path, content):
    with Server(prefers_red) as server:
        judge = Judge("j", server.url)
        ask_judges([judge], pairs(1), tmp_path)
        for path in tmp_path.iterdir():
            path.write_text(content)
        asked = sum(server.asked.values())
        answers = ask_judges([judge], pairs(1), tmp_path)
        assert sum(server.asked.values()) == 2 * asked
    assert [answer.winner is not None for answer in answers] == [True, True]


def test_a_full_disk_while_asking_ends_the_run_in_one_line(tmp_path, monkeypatch):
    def fail(path, write):
        raise StorageError("no room left")

    monkeypatch.setattr(llm_judges, "write_file", fail)
    with Server(prefers_red) as server, pytest.raises(StorageError, match="no room left"):
        ask_judges([Judge("j", server.url)], pairs(1), tmp_path)
