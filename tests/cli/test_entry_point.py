import pytest

from elude_steer import recipe_files
from tests.helpers.cli import only_error


def test_an_unexpected_error_is_one_line(run, monkeypatch):
    monkeypatch.setattr(recipe_files, "list_recipes", lambda: 1 / 0)
    code, _, err = run("recipes", "list")
    assert code == 1
    assert "unexpected ZeroDivisionError: division by zero (ELUDE_STEER_DEBUG=1 shows where" in only_error(err)
    monkeypatch.setenv("ELUDE_STEER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("recipes", "list")


def test_help_shows_an_example(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "elude-steer build llava-onevision-0.5b" in out


def test_an_unknown_command_is_refused(run):
    code, _, err = run("nonsense")
    assert code == 2
    assert "No such command" in err


def test_the_error_of_a_started_process_goes_to_its_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_ERROR_FILE", str(tmp_path / "error.txt"))
    code, _, err = run("recipes", "show", "nowhere")
    assert (code, err) == (1, "")
    assert (tmp_path / "error.txt").read_text().startswith("'nowhere' is neither a file nor a shipped recipe.")
