import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from elude_steer import recipe_files
from elude_steer.cli.entry_point import COMMANDS, cli
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


@pytest.mark.parametrize("width", [60, 80, 100, 110, 150])
def test_help_lists_the_commands_as_click_does(width):
    context = click.Context(cli, terminal_width=width)
    ours, expected = context.make_formatter(), context.make_formatter()
    cli.format_commands(context, ours)
    click.Group.format_commands(cli, context, expected)
    assert ours.getvalue() == expected.getvalue()


def test_the_listed_sentences_begin_the_help_of_their_commands():
    for name, (_, text) in COMMANDS.items():
        assert " ".join(cli.commands[name].help.split()).startswith(text)


def test_help_imports_no_command():
    code = (
        "import sys; sys.argv = ['elude-steer', '--help']\n"
        "from elude_steer.cli import main\n"
        "main()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('elude_steer.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "elude_steer.cli elude_steer.cli.entry_point elude_steer.errors"


def test_an_unknown_command_is_refused(run):
    code, _, err = run("nonsense")
    assert code == 2
    assert "No such command" in err


def test_the_error_of_a_started_process_goes_to_its_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_ERROR_FILE", str(tmp_path / "error.txt"))
    code, _, err = run("recipes", "show", "nowhere")
    assert (code, err) == (1, "")
    assert (tmp_path / "error.txt").read_text().startswith("'nowhere' is neither a file nor a shipped recipe.")


# Signals


def test_sigterm_is_told_in_one_line_and_leaves_nothing_half_written(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from elude_steer.cli import entry_point; import click\n"
        "from elude_steer.utils.files import new_folder, write_file\n"
        "def work():\n"
        "    with new_folder(Path('atlas')) as new:\n"
        "        write_file(Path('done'), lambda file: file.write(b'x'))\n"
        "        write_file(new / 'half', lambda file: (print('ready', flush=True), time.sleep(60)))\n"
        "entry_point.cli = lambda **_: work()\n"
        "entry_point.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    _, err = child.communicate(timeout=60)
    assert err == "elude-steer: stopped by SIGTERM; finished work is kept, run the same command again to go on.\n"
    assert child.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_started_process_ends_with_the_one_that_started_it(tmp_path):
    """The orphan computes and reaches no point at which it could look for its parent."""
    orphan = (
        "import sys, time; from elude_steer.cli import entry_point\n"
        "entry_point.cli = lambda **_: (print('ready', flush=True), time.sleep(60))\n"
        "entry_point.main()\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE, text=True,\n"
        "    env={**os.environ, 'ELUDE_STEER_PARENT': str(os.getpid())})\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
    )
    started = subprocess.Popen([sys.executable, "-c", parent, orphan], stdout=subprocess.PIPE, text=True)
    pid = int(started.stdout.readline())
    started.kill()
    started.communicate(timeout=60)
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
