"""Models and images that many tests share, and a guard that tests leave shared models unchanged."""

import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores, which spinning threads would block
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from importlib.util import find_spec

import pytest
from torch import nn

from tests.helpers.checks import register_missing_operators

if find_spec("torchvision"):  # before anything imports it
    register_missing_operators()

from elude_steer import toyland
from elude_steer.cli.entry_point import main
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import save_images, save_llava

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward", "generate", "get_image_features")
_shared: list[nn.Module] = []


def model_state(model: nn.Module):
    """A model's modules, their hooks and their replaced methods.

    Hooks that transformers adds in the first forward pass are left out.
    """
    modules = [(name, id(module)) for name, module in model.named_modules()]
    hooks = [
        (name, kind, id(hook))
        for name, module in model.named_modules()
        for kind in HOOKS
        for hook in getattr(module, kind).values()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]
    methods = [(n, m, id(vars(module)[m])) for n, module in model.named_modules() for m in METHODS if m in vars(module)]
    return modules, hooks, methods


@pytest.fixture
def no_hooks_left():
    """Call it with a model: at the end of the test its modules and hooks must be unchanged."""
    watched = []

    def watch(model):
        watched.append((model, model_state(model)))
        return model

    yield watch
    for model, before in watched:
        assert model_state(model) == before, "a hook or a swapped module was left in the model"


@pytest.fixture(autouse=True)
def shared_models_stay_unchanged():
    before = [(model, model_state(model)) for model in _shared]
    yield
    for model, state in before:
        assert model_state(model) == state, "a hook or a swapped module was left in a shared model"


@pytest.fixture
def run(monkeypatch, capsys):
    """Call it with arguments to run the command line in this process; returns exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["elude-steer", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session")
def tiny_llava(tmp_path_factory):
    """The folder of a tiny LLaVA-OneVision checkpoint."""
    return save_llava(tmp_path_factory.mktemp("tiny-llava"))


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A folder of 40 images in four shapes."""
    return save_images(tmp_path_factory.mktemp("images"), 40)


@pytest.fixture(scope="session")
def tiny_vlm(tiny_llava):
    """That checkpoint loaded, with the last fc2 as target; shared, so tests must not change it."""
    vlm = Vlm.load(str(tiny_llava), layer="layers.1.mlp.fc2")
    _shared.append(vlm.model)
    return vlm


@pytest.fixture(scope="session")
def steerer():
    """Toyland's model with its atlas and matcher; shared, so tests must not change it."""
    loaded = Steerer.load("toyland")
    _shared.append(loaded.vlm.model)
    return loaded


@pytest.fixture(scope="session")
def scene():
    """A scene with two things, both of which the unsteered caption names."""
    return next(s for s in toyland.scenes(seed=50_002, n=40) if len(s.things) == 2 and s.image.size == (96, 96))
