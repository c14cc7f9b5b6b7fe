"""Run code in a process where elude_steer cannot be imported, as users of exported models have it."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
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
# Runs each piece of code in a fork of its own, after the imports that all need: these take longer than the rest.
SERVER = f"""\
import json, os, traceback
{PREPARE_TORCHVISION}
sys.modules["elude_steer"] = None
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
import transformers.models.llava_onevision.modeling_llava_onevision

def run(code, folder, out, err):
    os.chdir(folder)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    try:
        exec(code, {{"__name__": "__main__"}})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""
# Largest error of a channel between 0 and 1: torchvision rounds a resized image by up to one grey level otherwise.
GREY_LEVEL = 1.001 / 255 if find_spec("torchvision") else 0.0


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd="/",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # ends it
    return server


def run_without_package(code: str, folder: Path) -> list[str]:
    """Run Python code in a folder and return the lines that it prints."""
    server, out, err = _server(), folder / "plain-child.out", folder / "plain-child.err"
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([code, str(folder), str(out), str(err)]), file=server.stdin, flush=True)
    status = server.stdout.readline()
    assert status == "0\n", err.read_text() if err.exists() else f"the process ended: {status!r}"
    return out.read_text().strip().splitlines()
