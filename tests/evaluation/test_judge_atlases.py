"""Judging atlases: random pairs of grids, and the command."""

import json

import pytest
import torch
from PIL import Image

from elude_steer.evaluation.judge_atlases import draw_pairs
from elude_steer.evaluation.measures.llm_judges import CELL
from tests.helpers.judge_server import Server, answer

pytest.importorskip("openai", reason="the judge needs openai: pip install 'elude-steer[judge]'")


def test_grids_show_the_strongest_images_of_latents():
    tops = {"one": torch.arange(18).reshape(2, 9), "other": torch.arange(18, 27)[None]}
    colour = lambda number: Image.new("RGB", (8, 8), (number, 0, 0))  # noqa: E731
    pairs = draw_pairs(tops, colour, count=4, seed=1)
    assert [(pair.one, pair.other) for pair in pairs] == [("one", "other")] * 4
    for pair in pairs:
        shown = [grid.getpixel((10 + CELL * 2, 10 + CELL * 2))[0] for grid in pair.grids]
        assert shown[0] in (8, 17)
        assert shown[1] == 26
    assert [pair.about for pair in draw_pairs(tops, colour, count=4, seed=1)] == [pair.about for pair in pairs]


def test_the_command_compares_an_atlas_with_its_units(run, tmp_path):
    # It prefers one of two grids wherever that stands.
    with Server(lambda _model, first, second, _count: answer("A" if first < second else "B")) as server:
        command = ["judge", "toyland", "--judge", f"tiny@{server.url}", "--images", "toyland:77001", "--limit", "12",
                   "--pairs", "3", "--work", tmp_path]  # fmt: skip
        code, out, err = run(*command)
        assert code == 0, err
        assert "6 questions to ask" in err
        assert {line.split("  ")[0] for line in out.splitlines()[1:]} == {"toyland", "units before the split"}
        assert sum(server.asked.values()) == 6
        code, out, err = run(*command, "--json")
        assert "0 questions to ask" in err
        found = json.loads(out)
        assert (found["pairs"], found["ties"]) == (3, 0) and sum(found["rates"].values()) == pytest.approx(1)
        assert sum(server.asked.values()) == 6
    with Server(lambda *_: answer("A")) as server:  # which says nothing about a grid
        command[3] = f"biased@{server.url}"
        code, out, err = run(*command)
        assert code == 0 and "3 of 3 pairs have no majority" in err and "nan" not in out
    with Server(lambda *_: "no idea") as server:
        odd = ["judge", "toyland", "--judge", f"tiny@{server.url}", "--images", "toyland:77001", "--limit", "12"]
        code, out, err = run(*odd, "--pairs", "1", "--work", tmp_path / "odd")
        assert (code, out) == (1, "")
        assert "there is nothing to rank: 2 answers, neither A nor B" in err
    for url in ("http://[bad/v1", "http://127.0.0.1:99999/v1"):
        code, _, err = run("judge", "toyland", "--judge", f"tiny@{url}")
        assert code == 1
        assert f"'{url}' is not an address" in err
    (tmp_path / "file").write_text("")
    code, _, err = run("judge", "toyland", "--judge", "tiny@http://127.0.0.1:9/v1", "--work", tmp_path / "file")
    assert (code, "is a file, not a folder" in err) == (1, True)
    code, _, err = run("judge", "toyland", "--judge", "tiny")
    assert (code, err.strip().count("\n")) == (1, 0)
    assert "'tiny' is not a judge; write MODEL@URL" in err
