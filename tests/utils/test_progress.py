import ast
import io
import sys
import time
from pathlib import Path

import pytest

import elude_steer
from elude_steer.evaluation.edits.benchmark import caption_baselines, make_tasks, run_edits, toyland_world
from elude_steer.evaluation.edits.sweep import sweep
from elude_steer.evaluation.evaluate import evaluate
from elude_steer.evaluation.judge_atlases import draw_pairs
from elude_steer.steering.plan import Plan
from elude_steer.utils import progress
from elude_steer.utils.progress import progress_bar, track

PACKAGE = Path(elude_steer.__file__).parent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Call it for what a terminal shows from now on, without the second before a bar appears."""

    def show(delay=0.0):
        shown = Terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(progress, "DELAY", delay)
        return shown

    return show


def test_items_are_counted_on_a_terminal(terminal):
    shown = terminal()
    assert list(track(range(3), "drawing", "scenes")) == [0, 1, 2]
    assert "drawing" in shown.getvalue() and "0/3" in shown.getvalue() and " scenes" in shown.getvalue()
    with progress_bar("timing", "passes", 4) as advance:
        time.sleep(0.2)  # bars are drawn ten times a second
        advance(3)
    assert "3/4" in shown.getvalue()


def test_short_work_shows_nothing(terminal):
    shown = terminal(delay=60.0)
    list(track(range(3), "drawing", "scenes"))
    assert "drawing" not in shown.getvalue()


def test_nothing_is_shown_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    list(track(range(3), "drawing", "scenes"))
    assert capsys.readouterr() == ("", "")


def test_all_parts_of_an_evaluation_show_progress(terminal):
    shown = terminal()
    evaluate("toyland", images="toyland:5", limit=8, again="toyland", warm_up=1, runs=2)
    for label in ("encoding", "scoring", "captioning", "comparing", "matching", "timing"):
        assert label in shown.getvalue(), label


def test_sweeps_and_edits_show_progress(terminal, steerer, tmp_path):
    shown = terminal()
    world = toyland_world(5, 4)
    sweep(steerer, world, "remove", {"nu": [6]}, work=tmp_path)
    tasks = make_tasks(world, caption_baselines(steerer, world), "remove")
    run_edits(steerer, world, tasks, lambda _task: Plan())
    for label in ("drawing", "captioning", "sweeping", "editing"):
        assert label in shown.getvalue(), label


def test_drawing_pairs_shows_progress(terminal):
    import torch
    from PIL import Image

    shown = terminal()
    methods = {"one": torch.zeros(2, 9, dtype=torch.long), "other": torch.zeros(2, 9, dtype=torch.long)}
    draw_pairs(methods, lambda _number: Image.new("RGB", (8, 8)), count=2)
    assert "drawing" in shown.getvalue()


def test_loops_over_images_show_progress():
    """Every function of `evaluation` that runs a model on batches of images shows how far it is."""
    found = 0
    for path in sorted((PACKAGE / "evaluation").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inner = {node for function in functions for node in ast.walk(function) if node is not function}
        for function in (one for one in functions if one not in inner):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
            heavy = [loop for loop in loops if {"image_batches", "read_batches"} & called(loop.iter)]
            found += len(heavy)
            if heavy and function.name != "caption_agreement":  # its callers track the images that they give
                assert {"track", "progress_bar", "compute_in_parts"} & called(function), f"{path.name}: {function.name}"
    assert found >= 5


def called(node):
    """Names of the functions that are called in a piece of code."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}
