"""The command `reproduce` from its options to its files, on toyland's tower."""

import json

import pytest

from elude_steer.evaluation.reproduce import tables

ARGUMENTS = (
    "reproduce", "interpretability", "--images", "toyland:31", "--held-out", "toyland:77001", "--limit", 12,
    "--held-out-limit", 10, "--preset", "tiny", "--seeds", 42, "--rows", "raw units", "--backbones",
    "dinov2-base-layer12=toyland/captioner", "--set", "model.kind=vlm", "--set", "model.layer=layers.5.mlp.fc2",
    "--threads", 1,
)  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    return {"--work": tmp_path / "work", "--out": tmp_path / "out"}


def call(run, folders, *more):
    return run(*ARGUMENTS, *(part for pair in folders.items() for part in pair), *more)


def test_a_plan_says_what_it_will_take_and_makes_nothing(run, folders):
    code, out, err = call(run, folders, "--plan")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["time", "disk", "memory"]
    assert "of one core, in 1 pieces" in out
    assert not folders["--out"].exists() and not list(folders["--work"].rglob("rows"))
    assert not list(folders["--work"].rglob("hours-*")), "nothing was run"


def test_a_run_says_first_what_it_will_take(run, folders, monkeypatch, capsys):
    seen = []
    run_table = tables.run_table
    monkeypatch.setattr(
        tables, "run_table", lambda *arguments: seen.append(capsys.readouterr()) or run_table(*arguments)
    )
    code, out, err = call(run, folders, "--json")
    assert code == 0, err
    (before,) = seen
    assert "elude-steer: note: time " in before.err and "elude-steer: note: memory" in before.err
    assert not before.out and "note: time" not in err, "the forecast comes before the work, and once"
    found = json.loads(out)
    (row,) = found["rows"]
    assert (found["name"], found["seeds"], row["method"]) == ("interpretability", [42], "raw units")
    assert 0 < row["numbers"]["MS-Score"]["value"] < 100 and row["numbers"]["MS-Score"]["paper"] > 0
    assert {path.name for path in folders["--out"].iterdir()} == {
        f"interpretability.{end}" for end in ("json", "txt", "html")
    }
    assert json.loads((folders["--out"] / "interpretability.json").read_text()) == found
    assert str(folders["--out"] / "interpretability.html") in err
