"""Models and pictures that many tests share, and a guard: what a test does to a shared model, it undoes."""

import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores; threads that spin would take them away
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from torch import nn

from elude_steer import toyland
from elude_steer.cli.group import main
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import save_images, save_llava

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward", "generate")
_shared: list[nn.Module] = []


def state_of(model: nn.Module):
    """A model's modules, the hooks on them and methods in the place of their own.

    Hooks of transformers, put there by the first forward pass, are left out.
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
    """Call it with a model: at the end of the test its modules and hooks must be what they were."""
    watched = []

    def watch(model):
        watched.append((model, state_of(model)))
        return model

    yield watch
    for model, before in watched:
        assert state_of(model) == before, "a hook or a swapped module was left in the model"


@pytest.fixture(autouse=True)
def shared_models_stay_as_they_are():
    before = [(model, state_of(model)) for model in _shared]
    yield
    for model, state in before:
        assert state_of(model) == state, "a hook or a swapped module was left in a shared model"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line in this process: exit code, stdout, stderr."""

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
    """A folder of 40 pictures in four shapes."""
    return save_images(tmp_path_factory.mktemp("pictures"), 40)


@pytest.fixture(scope="session")
def tiny_vlm(tiny_llava):
    """That checkpoint loaded, its target the last fc2; shared, so look and do not touch."""
    vlm = Vlm.load(str(tiny_llava), layer="layers.1.mlp.fc2")
    _shared.append(vlm.model)
    return vlm


@pytest.fixture(scope="session")
def steerer():
    """Toyland's model with its atlas and matcher; shared, so look and do not touch."""
    loaded = Steerer.load("toyland")
    _shared.append(loaded.vlm.model)
    return loaded


@pytest.fixture(scope="session")
def scene():
    """Two things that the caption of the bare model names."""
    return next(s for s in toyland.scenes(seed=50_002, n=40) if len(s.things) == 2 and s.image.size == (96, 96))
