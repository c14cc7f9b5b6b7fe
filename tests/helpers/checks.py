"""What checks of packages that need torchvision share: each runs as a script, in an environment of its own."""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

_kept = []


def register_missing_operators():
    """Beside a CPU build of torch, the registry's torchvision (built for CUDA) lacks these and fails to import."""
    import torch

    if "cpu" not in torch.__version__:
        return
    library = torch.library.Library("torchvision", "DEF")
    _kept.append(library)  # operators go when their library goes
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def raised(kind, call):
    """The one line of an error that a call must end with."""
    try:
        call()
    except kind as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def why_not(package):
    """Why a package does not import here, or None where it does."""
    line = f"from checks import register_missing_operators as r; r(); import {package}"
    done = subprocess.run([sys.executable, "-c", line], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def run_script(python, script, folder, *arguments):
    """A check with some Python: what it printed, where all is well."""
    command = [python, Path(__file__).with_name(script), *arguments]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("OK"), done.stdout
    return done.stdout


def run_in_own_environment(script, extra, *others):
    """A check in a new environment with this package, one of its extras, and what else pip is told."""
    with tempfile.TemporaryDirectory() as folder:  # gone at once, unlike pytest's: it takes more than a gigabyte
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", f"{Path(__file__).parents[2]}[{extra}]", *others]
        subprocess.run(install, check=True, capture_output=True, text=True)
        return run_script(python, script, folder)
