import click
import pytest
import torch

from elude_steer.cli import cli
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
