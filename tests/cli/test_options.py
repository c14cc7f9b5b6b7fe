from types import SimpleNamespace

import click
import pytest
import torch

from elude_steer.cli import cli
from elude_steer.cli.options import open_argument
from elude_steer.errors import ImageError
from elude_steer.models.sources import decoding
from elude_steer.models.vlm import report_tokens

TEDDY = "demos/images/toyland-teddy.png"


def commands(group=cli, path=()):
    """All commands with the words that call them."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_that_computes_has_threads():
    options = {path: {flag for p in command.params for flag in p.opts} for path, command in commands()}
    computing = {" ".join(path) for path, flags in options.items() if flags & {"--device", "--processes"}}
    with_threads = {" ".join(path) for path, flags in options.items() if "--threads" in flags}
    assert computing == with_threads
    assert with_threads >= {"build", "steer", "run", "caption", "sweep", "export", "demo"}
    assert with_threads >= {"evaluate", "compare", "ablate", "judge"}


@pytest.mark.parametrize(
    "command",
    [
        ["caption", TEDDY],
        ["steer", TEDDY, "--minus", "teddy"],
        ["run", "toyland-teddy"],
        ["sweep", TEDDY, "--minus", "teddy", "--grid", "nu=6"],
        ["evaluate", "toyland", "--limit", "4", "--measures", "faithfulness"],
    ],
)
def test_threads_reach_the_model_and_are_given_back(run, command):
    before, seen = torch.get_num_threads(), set()
    with report_tokens(lambda _count: seen.add(torch.get_num_threads())):
        code, _, err = run(*command, "--threads", "2")
    assert code == 0, err
    assert seen == {2}
    assert torch.get_num_threads() == before


def test_no_threads_are_refused(run):
    code, _, err = run("caption", TEDDY, "--threads", "0")
    assert code == 2
    assert "0 is not in the range x>=1" in err


def test_standard_input_that_never_ends_is_not_read_to_its_end(monkeypatch):
    class Endless:
        def read(self, count=-1):
            assert 0 <= count <= 10**6, "all of it is asked for"
            return bytes(count)

    monkeypatch.setattr(decoding, "MAX_MEMORY", 999_999)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Endless()))
    with pytest.raises(ImageError, match="standard input has more than 1 MB; give it one image"):
        open_argument("-")
