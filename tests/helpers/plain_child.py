"""Run code in a process where elude_steer cannot be imported, as users of exported models have it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="torchvision is not installed; .ci/run has an environment with it"
)
# A process that a test starts needs these lines before transformers, as the tests' own process does (conftest.py).
PREPARE_TORCHVISION = f"""\
import sys
from importlib.util import find_spec
if find_spec("torchvision"):
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from checks import register_missing_operators
    register_missing_operators()
"""
HEAD = f"""\
import sys
sys.modules["elude_steer"] = None
{PREPARE_TORCHVISION}"""
# Largest error of a channel between 0 and 1: torchvision rounds a resized image by up to one grey level otherwise.
GREY_LEVEL = 1.001 / 255 if find_spec("torchvision") else 0.0


def run_without_package(code: str, folder: Path) -> list[str]:
    """Run Python code in a folder and return the lines that it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", HEAD + code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()
