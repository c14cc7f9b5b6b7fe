"""The demo as a Hugging Face Space: its files are complete and valid, and it serves its page and its tools."""

import json
import os
import runpy
import socket
import subprocess
import sys
import tomllib
from contextlib import contextmanager

import pytest
import yaml

from elude_steer.atlas.manifest import list_shipped
from tests.demos.test_scripts import DEMOS, WAIT, fetch, isolated_environment
from tests.helpers.hub import serve_hub
from tests.helpers.programs import call

SPACE = DEMOS / "space"
PROJECT = tomllib.loads((DEMOS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# A stand-in for the package `spaces` on ZeroGPU: it runs functions in a forked process.
LENDING = """
import multiprocessing, pickle

def GPU(function):
    def run(*arguments):
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        sent = pickle.dumps(arguments)

        def work():
            theirs.send_bytes(pickle.dumps(function(*pickle.loads(sent))))

        process = fork.Process(target=work)
        process.start()
        answer = ours.recv_bytes()
        process.join()
        print("lent", flush=True)
        return pickle.loads(answer)

    return run
"""


@contextmanager
def serve_space(folder, tmp_path, **more):
    """Start a Space as the Hub does: by `python app.py`, with the address in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = isolated_environment(tmp_path, GRADIO_SERVER_NAME="127.0.0.1", GRADIO_SERVER_PORT=port, **more)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "app.py"], cwd=folder, env=env, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/", process
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def needs_demo():
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")
    pytest.importorskip("mcp", reason="the MCP server needs mcp: pip install 'elude-steer[mcp]'")


def front_matter():
    _, head, body = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_readme_configures_the_space():
    from packaging.requirements import Requirement

    about, body = front_matter()
    assert about["sdk"] == "gradio"
    demo = next(Requirement(line) for line in PROJECT["optional-dependencies"]["demo"])
    assert demo.specifier.contains(about["sdk_version"])
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(about["python_version"])
    assert isinstance(about["python_version"], str)  # 3.10 would be read as 3.1
    assert (SPACE / about["app_file"]).is_file()
    assert " AND " in PROJECT["license"]  # photoland has terms of its own, which the Hub has no name for
    assert about["license"] == "other"
    assert len(about["short_description"]) <= 60
    colors = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {about["colorFrom"], about["colorTo"]} <= colors
    assert "mcp-server" in about["tags"]
    assert "false on purpose" in body


def test_the_requirements_are_those_of_the_package():
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mcp"]]
    assert [line for line in lines if not line.startswith("#")] == wanted


def test_the_space_serves_its_page_and_its_tools_from_its_own_folder(tmp_path, needs_demo, steerer):
    """With the package next to app.py and not from this checkout."""
    folder = runpy.run_path(str(DEMOS / "publish_space.py"))["collect"](tmp_path / "space")
    assert not list(folder.rglob("__pycache__"))
    with serve_space(folder, tmp_path, PYTHONPATH="", PYTHONDONTWRITEBYTECODE="") as (address, process):
        page, config = (fetch(f"{address}{path}", process) for path in ("", "config"))
        assert page is not None and config is not None, (tmp_path / "log").read_text()
        tools, (failed, texts) = call("mcp", address, ("steer", {"image": "teddy", "minus": ["teddy"]}))
    assert (folder / "elude_steer" / "__pycache__").is_dir()  # it was imported from here
    log = (tmp_path / "log").read_text()
    assert json.loads(config)["title"] == "elude_steer" and "elude_steer" in page
    assert "atlas toyland" in config
    assert "toyland-teddy: " in config  # one of the example edits
    further = list_shipped()[1:]
    assert set(tools) == {"steer", "concepts", *(f"{name}_{one}" for one in further for name in ("steer", "concepts"))}
    result = steerer.steer(DEMOS / "images" / "toyland-teddy.png", minus=["teddy"])
    assert not failed and texts[:2] == [result.baseline, result.caption]
    assert "Traceback" not in log, log


def test_a_gpu_is_borrowed_where_the_package_spaces_is(tmp_path, needs_demo, steerer):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "spaces.py").write_text(LENDING)
    path = os.pathsep.join([str(tmp_path / "packages"), str(DEMOS.parent)])
    with serve_space(SPACE, tmp_path, PYTHONPATH=path) as (address, process):
        assert fetch(address, process) is not None, (tmp_path / "log").read_text()
        calls = [
            ("steer", {"image": "dog", "minus": ["dog"], "plus": ["biker"]}),
            ("steer", {"image": "dog", "minus": ["democracy"]}),
        ]
        _, (failed, texts), (refused, (error,)) = call("mcp", address, *calls)
    result = steerer.steer(DEMOS / "images" / "toyland-dog.png", minus=["dog"], plus=["biker"])
    assert not failed and texts[:2] == [result.baseline, result.caption]
    assert refused and "knows nothing like 'democracy'" in error
    assert (tmp_path / "log").read_text().count("lent") == 2


def test_the_space_is_uploaded(tmp_path):
    with serve_hub(tmp_path / "hub") as endpoint:
        env = isolated_environment(tmp_path, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "home"), HF_TOKEN="hf_test")
        env["HF_HUB_OFFLINE"] = "0"
        command = [sys.executable, "demos/publish_space.py", "me/demo"]
        done = subprocess.run(command, cwd=DEMOS.parent, env=env, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert "me/demo/commit/" in done.stdout
    uploaded = tmp_path / "hub" / "me" / "demo"
    for name in ("README.md", "app.py", "requirements.txt", "elude_steer/toyland/data/atlas/manifest.json"):
        source = DEMOS.parent / name if name.startswith("elude_steer/") else SPACE / name
        assert (uploaded / name).read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [((), "give the id of a Space, or a folder: --out FOLDER"), (("me/demo",), "HF_HUB_OFFLINE is set; connect")],
)
def test_what_cannot_be_published_is_said_in_one_line(tmp_path, options, message):
    command = [sys.executable, "demos/publish_space.py", *options]
    env = isolated_environment(tmp_path)
    done = subprocess.run(command, cwd=DEMOS.parent, env=env, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
