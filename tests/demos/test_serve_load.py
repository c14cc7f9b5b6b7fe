"""The result of the load on the server says what the script says."""

from pathlib import Path

from demos.benchmarks import serve_load
from demos.benchmarks.serve_load import Reply, Window

RESULT = Path(__file__).parents[2] / "demos" / "results" / "serve_load.md"


def test_the_result_is_described_as_it_stands_in_the_file():
    replies = {
        True: [Reply(0, 0, "a cat", 0.2, 3), Reply(0, 1, "a dog", 0.2, 3)],
        False: [Reply(0, -1, "a dog", 0.2, 3)],
    }
    wanted = {(0, 0): "a cat", (0, 1): "a dog", (0, -1): "a dog"}
    rows = [Window(kind, 2.0, 1.0, own, 2**20) for kind, own in replies.items()]
    lines, wrong = serve_load.describe(rows, wanted, 2, 2**20)
    assert wrong == 0
    assert "3 of 3 answers are the library's own; 1 of the 2 steered answers differ from those without" in lines[-1]
    shown = RESULT.read_text(encoding="utf-8")
    for part in (
        "clients send requests to `elude-steer serve` with toyland's atlas, each with its own edit.",
        "many edits remove something that their image does not show. Memory of the server after each window",
    ):
        assert part in lines[-1] and part in shown
    wanted[0, 1] = "a bird"
    lines, wrong = serve_load.describe(rows, wanted, 2, 2**20)
    assert wrong == 1 and lines[-1] == "- image 0, edit 1: 'a dog', not 'a bird'"
