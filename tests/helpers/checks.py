"""Shared by the checks of packages that need torchvision; each is a script that runs in its own environment."""

import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

_libraries = []  # operators disappear with their library


def register_missing_operators():
    """Register what torchvision needs to import: built for CUDA, it lacks these next to a CPU build of torch."""
    import torch

    matching = "cpu" in version("torchvision")  # a CPU build has them
    if _libraries or matching or "cpu" not in torch.__version__:
        return
    library = torch.library.Library("torchvision", "DEF")
    _libraries.append(library)
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def error_line(kind, call):
    """The message of the error that a call must raise, which must be one line."""
    try:
        call()
    except kind as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def import_problem(package):
    """Why a package does not import here, or None if it does."""
    line = f"from checks import register_missing_operators as r; r(); import {package}"
    done = subprocess.run([sys.executable, "-c", line], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def run_script(python, script, folder, *arguments):
    """Run a check with a Python interpreter and return its output, which must end with OK."""
    command = [python, Path(__file__).with_name(script), *arguments]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("OK"), done.stdout
    return done.stdout


def run_in_own_environment(script, extra, *others):
    """Run a check in a new environment with this package, one of its extras, and other requirements."""
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # deleted at once, unlike pytest's, because it takes more than a gigabyte
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", f"{Path(__file__).parents[2]}[{extra}]", *others]
        subprocess.run(install, check=True, capture_output=True, text=True)
        return run_script(python, script, folder)
