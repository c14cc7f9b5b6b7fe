"""Code of strangers runs only if the caller allows it: every command and function that loads anything is attacked.

A new command fails `test_no_command_is_forgotten` until `WALK` says how a stranger could reach it.
"""

from pathlib import Path

import click
import pytest
from huggingface_hub import constants

from elude_steer.cli.entry_point import cli
from tests.helpers.strangers import Stranger

ROOT = Path(__file__).parents[1]
IMAGE = str(ROOT / "demos" / "images" / "toyland-dog.png")
IMAGES = ("--images", "toyland:7")
COMPARE = ("--work", "{out}", "--out", "{out}-2", "--small", "--processes", "1", "--method", "ELUDe (gap)")
JUDGE = ("--judge", "nobody@http://127.0.0.1:9/v1")

# command -> attacks; of each the arguments, which the stranger's files are part of. `{out}` is a new folder.
WALK = {
    "ablate": {
        "model": lambda s: (s.spec(model=s.model()), *IMAGES, "--work", "{out}"),
        "scorer": lambda s: (s.spec(scorer=s.model()), *IMAGES, "--work", "{out}"),
    },
    "atlases calibrate": {
        "model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--out", "{out}"),
        "scorer": lambda s: (s.atlas(scorer=s.model()), *IMAGES, "--out", "{out}"),
    },
    "atlases check": {
        "model": lambda s: (s.atlas(model=s.model()),),
        "option": lambda s: ("toyland", "--model", s.model()),
    },
    "build": {
        "model": lambda s: (s.spec(model=s.model()), "--out", "{out}"),
        "scorer": lambda s: (s.spec(scorer=s.model()), "--out", "{out}"),
    },
    "caption": {"model": lambda s: (IMAGE, "--model", s.model())},
    "concepts": {"matcher": lambda s: (s.atlas(matcher=s.matcher()), "--like", "puppy")},
    "demo": {
        "model": lambda s: ("--atlas", s.atlas(model=s.model()), "--no-browser"),
        "matcher": lambda s: ("--atlas", s.atlas(matcher=s.matcher()), "--no-browser"),
        "option": lambda s: ("--atlas", "toyland", "--model", s.model(), "--no-browser"),
    },
    "evaluate": {
        "model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--limit", "4"),
        "option": lambda s: ("toyland", "--model", s.model(), *IMAGES, "--limit", "4"),
        "head": lambda s: ("toyland", "--head", s.model(), *IMAGES, "--limit", "4", "--measures", "faithfulness"),
    },
    "export": {
        "model": lambda s: (s.recipe(model=s.model()), "{out}"),
        "matcher": lambda s: (s.recipe(matcher=s.matcher()), "{out}"),
        "option": lambda s: ("toyland-dog", "{out}", "--set", "mode=scale", "--set", "nu=all", "--model", s.model()),
    },
    "judge": {"model": lambda s: (s.atlas(model=s.model()), *IMAGES, "--limit", "9", *JUDGE, "--yes")},
    "run": {
        "model": lambda s: (s.recipe(model=s.model()),),
        "matcher": lambda s: (s.recipe(matcher=s.matcher()),),
        "option": lambda s: ("toyland-dog", "--atlas", s.atlas(matcher=s.matcher())),
    },
    "steer": {
        "model": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(model=s.model())),
        "matcher": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(matcher=s.matcher())),
        "option": lambda s: (IMAGE, "--minus", "dog", "--model", s.model()),
    },
    "sweep": {
        "model": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(model=s.model())),
        "matcher": lambda s: (IMAGE, "--minus", "dog", "--atlas", s.atlas(matcher=s.matcher())),
    },
}

# Commands that load no model, or only those of the package: nothing that a stranger sends makes them run code, and they
# have no switch that would allow it.
NEVER = {
    # It reads the shipped spec by its name, and the folder in which it runs has a file of that name.
    "compare": lambda s: (s.spec("toyland", scorer=s.model(), model=s.model()), *COMPARE),
    "atlases list": lambda s: (s.atlas(model=s.model()),),
    "atlases show": lambda s: (s.atlas(model=s.model(), matcher=s.matcher()),),
    "recipes check": lambda s: (s.recipe(model=s.model()), s.spec(model=s.model())),
    "recipes copy": lambda s: (s.recipe(model=s.model()), "{out}/"),
    "recipes list": lambda s: (),
    "recipes show": lambda s: (s.recipe(model=s.model()),),
    "toyland draw": lambda s: ("{out}", "--count", "1"),
    "env": lambda s: (),
}
CASES = [(command, attack) for command, attacks in WALK.items() for attack in attacks]


def commands(command=cli, name=""):
    """All commands that do something, by the words that call them."""
    if not isinstance(command, click.Group):
        return {name: command}
    return {
        path: found
        for word in command.commands
        for path, found in commands(command.commands[word], f"{name} {word}".strip()).items()
    }


@pytest.fixture(autouse=True)
def separate_folders(tmp_path, monkeypatch):
    """Everything that is written, code of models too, lies in the folder of the test, and there is no network."""
    import transformers.dynamic_module_utils as dynamic

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "hub").mkdir()


@pytest.fixture(params=["folder", "hub"])
def stranger(request, tmp_path):
    """Whose files are folders that somebody unzipped, or repositories in the Hub's cache."""
    return Stranger(tmp_path / "here", tmp_path / "hub" if request.param == "hub" else None)


@pytest.fixture
def attack(run, tmp_path):
    def call(command, arguments, *more):
        return run(*command.split(), *(text.replace("{out}", str(tmp_path / "out")) for text in arguments), *more)

    return call


def test_no_command_is_forgotten():
    assert set(commands()) == {*WALK, *NEVER}
    assert not set(WALK) & set(NEVER)


def test_commands_that_load_models_have_the_switch_and_no_others():
    switches = {name: [p for p in found.params if p.name == "trust_remote_code"] for name, found in commands().items()}
    assert {name for name, options in switches.items() if options} == set(WALK)
    for (option,) in filter(None, switches.values()):
        assert option.is_flag and not option.envvar and option.get_default(click.Context(cli)) is False


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_no_command_runs_code_of_strangers(command, kind, stranger, attack):
    code, _, err = attack(command, WALK[command][kind](stranger))
    assert not stranger.code_ran
    assert code == 1 and "--trust-remote-code" in err, err


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_commands_run_it_if_the_caller_says_so(command, kind, stranger, attack):
    code, _, err = attack(command, WALK[command][kind](stranger), "--trust-remote-code")
    assert stranger.code_ran, err
    assert code == 1 and "the code ran" in err, err


@pytest.mark.parametrize("command", NEVER)
def test_the_other_commands_run_no_code(command, stranger, attack):
    arguments = NEVER[command](stranger)
    if command in ("compare", "atlases list"):
        arguments = arguments[1:]
    attack(command, arguments)
    assert not stranger.code_ran
