"""The judge against a small server that speaks the protocol, and that behaves as servers do."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from elude_steer.errors import SpecError
from elude_steer.evaluation.judge_atlases import draw_pairs
from elude_steer.evaluation.measures.llm_judges import CELL, Answer, Judge, Pair, ask, picture_grid, rank, read_answer

openai = pytest.importorskip("openai", reason="the judge needs openai: pip install 'elude-steer[judge]'")


class Server:
    """Answers by what `says(model, first, second, count)` returns: a text, a status, or all of the answer as bytes."""

    def __init__(self, says):
        self.says, self.asked, self.bodies = says, Counter(), []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pictures = [part["image_url"]["url"] for part in body["messages"][0]["content"] if "image_url" in part]
                owner.bodies.append(body)
                owner.asked[(body["model"], *pictures)] += 1
                said = owner.says(body["model"], *pictures, sum(owner.asked.values()))
                status = said if isinstance(said, int) else 200
                content = None if isinstance(said, bytes) else said
                text = json.dumps(
                    {"error": {"message": "no"}}
                    if status != 200
                    else {
                        "id": "1",
                        "object": "chat.completion",
                        "created": 0,
                        "model": body["model"],
                        "choices": [
                            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
                        ],
                    }
                ).encode()
                text, kind = (said, "text/html") if isinstance(said, bytes) else (text, "application/json")
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # who asked may have gone
                    self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def grid(colour):
    return picture_grid([Image.new("RGB", (40, 30), colour)] * 9)


def pairs(count):
    """ELUDe's grids are red, the others' are blue, no two alike."""
    return [Pair("elude", "raw", (grid((250, i, 0)), grid((0, i, 250))), str(i)) for i in range(count)]


def answer(letter):
    return json.dumps({"reason_a": "x", "reason_b": "y", "answer": letter})


def is_red(address):
    import base64
    import io

    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return image.getpixel((5, 5))[0] > 128


def prefers_red(_model, first, _second, _count):
    return answer("A" if is_red(first) else "B")


def test_a_grid_is_three_by_three():
    pictures = [Image.new("RGB", (50 + i, 40), (i * 20, 0, 0)) for i in range(12)]
    made = picture_grid(pictures)
    assert made.size == (3 * CELL, 3 * CELL) == (1008, 1008)
    for number in range(9):
        at = (number % 3 * CELL + 10, number // 3 * CELL + 10)
        assert made.getpixel(at) == (number * 20, 0, 0)
    assert picture_grid(pictures[:1]).getpixel((1000, 1000)) == (255, 255, 255)


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
def test_answers_are_read_or_counted_as_wrong(text, letter):
    assert read_answer(text) == letter


def test_what_stands_first_does_not_matter_and_the_protocol_is_kept(tmp_path):
    left = []
    with Server(prefers_red) as server:
        judges = [Judge(name, server.url) for name in ("one", "two", "three")]
        found = ask(judges, pairs(4), tmp_path, confirm=left.append)
        assert left == [4 * 2 * 3]  # told before the first
        assert sum(server.asked.values()) == 24
        body = server.bodies[0]
        assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 42, 256)
        assert {a.winner for a in found} == {"elude"}
        again = ask(judges, pairs(4), tmp_path, confirm=left.append)
        assert left[1] == 0
        assert sum(server.asked.values()) == 24  # nothing is asked twice
        assert again == found
    ranking = rank(judges, pairs(4), found)
    assert ranking.rates == {"elude": 1.0, "raw": 0.0}
    assert ranking.intervals["elude"] == (1.0, 1.0)
    assert (ranking.presentations, ranking.ties) == (8, 0)


def test_who_always_says_a_helps_nobody(tmp_path):
    with Server(lambda *_: answer("A")) as server:
        judges = [Judge("one", server.url)]
        ranking = rank(judges, pairs(5), ask(judges, pairs(5), tmp_path))
    assert ranking.rates == {"elude": 0.5, "raw": 0.5}


def test_slow_answers_and_passing_failures_are_waited_for(tmp_path):
    def says(model, first, second, _count):
        times = server.asked[(model, first, second)]
        if times == 1:
            return 429
        if times == 2:
            return 500
        time.sleep(0.2)
        return prefers_red(model, first, second, 0)

    with Server(says) as server:
        judges = [Judge("one", server.url)]
        found = ask(judges, pairs(2), tmp_path, threads=4, timeout=30)
    assert [a.winner for a in found] == ["elude"] * 4
    assert set(server.asked.values()) == {3}


def test_broken_answers_are_counted_and_not_asked_again(tmp_path):
    def says(model, first, second, _count):
        return '{"answer": ' if model == "broken" else prefers_red(model, first, second, 0)

    with Server(says) as server:
        judges = [Judge("broken", server.url), Judge("whole", server.url)]
        found = ask(judges, pairs(3), tmp_path)
        ask(judges, pairs(3), tmp_path)
        assert sum(server.asked.values()) == 12
    ranking = rank(judges, pairs(3), found)
    assert ranking.wrong == {"broken": 6, "whole": 0}
    assert ranking.missing == {"broken": 0, "whole": 0}
    assert ranking.rates["elude"] == 1.0


def test_a_server_that_dies_half_way_costs_only_what_is_missing(tmp_path):
    said = []

    def says(model, first, second, count):
        return 400 if count > 5 else prefers_red(model, first, second, 0)

    with Server(says) as server:
        judges = [Judge("one", server.url)]
        found = ask(judges, pairs(10), tmp_path, threads=1, log=said.append)
        assert len(found) == 5
        assert sum(server.asked.values()) == 5 + 3  # three failures in a row, and it is left alone
    assert len(said) == 1
    assert "judge 'one'" in said[0]
    assert rank(judges, pairs(10), found).missing == {"one": 15}
    dead = ask(judges, pairs(10), tmp_path, threads=1, retries=0, timeout=2)  # nobody there at all
    assert dead == found


def test_and_goes_on_where_it_was(tmp_path):
    with Server(lambda *a: 400 if a[-1] > 5 else prefers_red(*a)) as server:
        port = server.server.server_port
        ask([Judge("one", server.url)], pairs(4), tmp_path, threads=1)
    with Server(prefers_red) as later:
        judge = Judge("one", f"http://127.0.0.1:{port}/v1")
        left = []
        moved = ask([Judge("one", later.url)], pairs(1), tmp_path / "other", confirm=left.append)
        assert left == [2]
        assert len(moved) == 2
        assert len(ask([judge], pairs(4), tmp_path, threads=1, retries=0, timeout=2)) == 5


@pytest.mark.parametrize(
    "page",
    [b"<html>hello</html>", b'{"answer"', b"[1]", b"{}", b'{"choices": ["hello"]}', b'{"choices": [{"index": 0}]}'],
)
def test_who_is_no_chat_endpoint_is_left_alone_and_others_go_on(tmp_path, page):
    said = []
    with Server(lambda model, *rest: page if model == "odd" else prefers_red(model, *rest)) as server:
        judges = [Judge("odd", server.url), Judge("whole", server.url)]
        found = ask(judges, pairs(3), tmp_path, threads=1, log=said.append)
    assert [a.judge for a in found] == ["whole"] * 6
    assert len(said) == 1
    assert "judge 'odd'" in said[0]
    assert rank(judges, pairs(3), found).missing == {"odd": 6, "whole": 0}


def test_one_model_at_two_addresses_is_two_judges_and_one_twice_a_mistake(tmp_path):
    with Server(prefers_red) as one, Server(prefers_red) as other:
        judges = [Judge("m", one.url), Judge("m", other.url)]
        ranking = rank(judges, pairs(2), ask(judges, pairs(2), tmp_path))
        assert ranking.missing == {f"m@{one.url}": 0, f"m@{other.url}": 0}
        with pytest.raises(SpecError, match=r"judge 'm' at .* is named 2 times; once is enough"):
            ask([judges[0], judges[0]], pairs(1), tmp_path)


def test_a_damaged_answer_is_asked_for_again(tmp_path):
    with Server(prefers_red) as server:
        judges = [Judge("one", server.url)]
        found = ask(judges, pairs(2), tmp_path)
        sorted(tmp_path.glob("*.json"))[0].write_text("{")
        left = []
        assert ask(judges, pairs(2), tmp_path, confirm=left.append) == found
        assert left == [1]


def test_intervals_are_of_pairs_and_not_of_their_two_presentations():
    shown = pairs(40)
    won = [number % 2 == 0 for number in range(40)]
    answers = [
        Answer("one", number, swap, "elude" if won[number] else "raw", "") for number in range(40) for swap in (0, 1)
    ]
    low, high = rank([Judge("one", "")], shown, answers).intervals["elude"]
    assert high - low == pytest.approx(2 * 1.96 * (0.25 / 40) ** 0.5, abs=0.03)  # not the 0.22 of eighty games


def test_who_never_has_a_majority_has_no_rate_and_no_warning():
    three = [Pair("a", "b", (grid("red"), grid("blue"))), Pair("a", "c", (grid("red"), grid("green")))]
    answers = [Answer("one", 0, False, "a", ""), Answer("one", 1, False, "a", ""), Answer("two", 1, False, "c", "")]
    ranking = rank([Judge("one", ""), Judge("two", "x")], three, answers)
    assert ranking.rates["a"] == 1
    assert ranking.rates["c"] != ranking.rates["c"]


def test_an_endpoint_that_hangs_does_not_hold_whoever_gives_up(tmp_path):
    """In a process of its own: an interrupt while answers are waited for."""
    code = (
        "import signal, sys; from pathlib import Path; from PIL import Image;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # whoever runs the tests may have it ignored
        "from elude_steer.evaluation.judge_atlases import *;"
        "grids = tuple(Image.new('RGB', (9, 9), c) for c in ('red', 'blue'));"
        "print('asking', flush=True);"
        "ask([Judge('m', sys.argv[1])], [Pair('a', 'b', grids)], Path(sys.argv[2]))"
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


def test_ties_are_dropped(tmp_path):
    def says(model, first, second, _count):
        red = prefers_red(model, first, second, 0)
        return red if model == "one" else answer("B" if "A" in json.loads(red)["answer"] else "A")

    with Server(says) as server:
        judges = [Judge("one", server.url), Judge("two", server.url)]
        ranking = rank(judges, pairs(3), ask(judges, pairs(3), tmp_path))
    assert ranking.ties == 6
    assert all(rate != rate for rate in ranking.rates.values())  # nobody played


def test_a_missing_key_is_told_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(SpecError, match="judge 'one' wants its key in the environment: export JUDGE_KEY="):
        ask([Judge("one", "http://127.0.0.1:9/v1", "JUDGE_KEY")], pairs(1), tmp_path)


def test_who_is_asked_can_say_no(tmp_path):
    def no(count):
        raise SpecError(f"{count} calls are too many")

    with Server(prefers_red) as server, pytest.raises(SpecError, match="4 calls"):
        ask([Judge("one", server.url)], pairs(2), tmp_path, confirm=no)
    assert not server.asked


def test_the_command_asks_about_an_atlas_and_its_units(run, tmp_path):
    with Server(lambda *_: answer("A")) as server:
        command = ["judge", "toyland", "--judge", f"tiny@{server.url}", "--images", "toyland:77001", "--limit", "12",
                   "--pairs", "3", "--work", tmp_path]  # fmt: skip
        code, out, err = run(*command)
        assert code == 0, err
        assert "6 questions to ask" in err
        # Whoever stands first wins, so that both win half of six.
        assert {line.split("  ")[0]: "50.0%" in line for line in out.splitlines()[1:]} == {
            "toyland": True,
            "units before the split": True,
        }
        assert sum(server.asked.values()) == 6
        code, out, err = run(*command, "--json")
        assert "0 questions to ask" in err
        assert json.loads(out)["presentations"] == 6
        assert sum(server.asked.values()) == 6
    with Server(lambda *_: "no idea") as server:
        odd = ["judge", "toyland", "--judge", f"tiny@{server.url}", "--images", "toyland:77001", "--limit", "12"]
        code, out, err = run(*odd, "--pairs", "1", "--work", tmp_path / "odd")
        assert (code, out) == (1, "")
        assert "there is nothing to rank: 2 answers, neither A nor B" in err
    for url in ("http://[bad/v1", "http://127.0.0.1:99999/v1"):
        code, _, err = run("judge", "toyland", "--judge", f"tiny@{url}")
        assert code == 1
        assert f"'{url}' is no address" in err
    (tmp_path / "file").write_text("")
    code, _, err = run("judge", "toyland", "--judge", "tiny@http://127.0.0.1:9/v1", "--work", tmp_path / "file")
    assert (code, "is a file, not a folder" in err) == (1, True)
    code, _, err = run("judge", "toyland", "--judge", "tiny")
    assert (code, err.strip().count("\n")) == (1, 0)
    assert "'tiny' is no judge; write MODEL@URL" in err


def test_grids_show_what_latents_fire_for():
    tops = {"one": torch.arange(18).reshape(2, 9), "other": torch.arange(18, 27)[None]}
    colour = lambda number: Image.new("RGB", (8, 8), (number, 0, 0))  # noqa: E731
    made = draw_pairs(tops, colour, count=4, seed=1)
    assert [(pair.one, pair.other) for pair in made] == [("one", "other")] * 4
    for pair in made:
        shown = [grid.getpixel((10 + CELL * 2, 10 + CELL * 2))[0] for grid in pair.grids]
        assert shown[0] in (8, 17)
        assert shown[1] == 26
    assert [pair.about for pair in draw_pairs(tops, colour, count=4, seed=1)] == [pair.about for pair in made]
