"""Pipes and devices where a file is expected: refused in one line, and nothing waits or fills the memory."""

import os
import signal

import pytest

from tests.test_trust import IMAGE

CASES = (
    "steer {x} --minus dog", "caption {x}", "run {x}", "run toyland-dog --image {x}", "sweep {x} --minus dog",
    "build {x} --out out", "build toyland --images {x} --out out", "evaluate toyland --images {x}",
    "recipes check {x}", "recipes show {x}", "recipes copy {x} out/", "concepts {x}", "atlases show {x}",
    "sweep --coco {x} . --minus dog", "demo --no-browser --atlas {x}", "export {x} out",
    f"steer {IMAGE} --minus dog --atlas {{x}}", f"steer {IMAGE} --minus dog --model {{x}}",
)  # fmt: skip


@pytest.fixture(params=["pipe", "device", "folder of pipes"])
def endless(request, tmp_path):
    path = tmp_path / "x.png"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
        (path / "a.png").symlink_to("/dev/zero")
        for name in ("b.png", "manifest.json", "config.json", "modules.json"):
            os.mkfifo(path / name)
    return path


def stop(*_):
    pytest.fail("the command waits or reads without an end")


@pytest.mark.parametrize("command", CASES)
def test_what_never_ends_is_refused_in_one_line(command, endless, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        code, out, err = run(*(word.format(x=endless) for word in command.split()))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert code == 1 and not out and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
