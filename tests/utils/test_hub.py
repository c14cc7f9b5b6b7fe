import os
import socket
import subprocess
import sys
import time

import pytest

from elude_steer.errors import ModelError
from elude_steer.utils import hub
from tests.helpers.hub import serve_hub

IMAGE = "demos/images/toyland-dog.png"
UNREACHABLE = "http://127.0.0.1:9"  # nothing listens there

LIBRARY = """
import sys, time
import elude_steer as es
from elude_steer.models.loading import load_tokenizer
from elude_steer.models.matcher import load_matcher

atlas = es.Atlas.load("toyland")
calls = {
    "model": lambda: es.Vlm.load("nosuch/model"),
    "tokenizer": lambda: load_tokenizer("bare-name"),
    "atlas": lambda: es.Steerer.load("nosuch/atlas"),
    "matcher": lambda: load_matcher("nosuch/matcher"),
    "push": lambda: atlas.push_to_hub("me/toyland"),
}
import sentence_transformers, transformers  # their import takes longer than the question
for name, call in calls.items():
    start = time.perf_counter()
    try:
        call()
    except es.EludeSteerError as error:
        print(name, round(time.perf_counter() - start, 1), str(error).count("\\n"), error)
"""


def run_without_network(*arguments, home, **environment):
    variables = {**os.environ, "HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        variables.pop(name, None)
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)


def test_the_library_says_at_once_that_there_is_no_network(tmp_path):
    done = run_without_network("-c", LIBRARY, home=tmp_path)
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in done.stdout.splitlines()}
    assert set(lines) == {"model", "tokenizer", "atlas", "matcher", "push"}, done.stderr
    assert "Retry" not in done.stderr
    for name, (seconds, breaks, text) in lines.items():
        assert float(seconds) < 2, name
        assert breaks == "0", text
    assert "model 'nosuch/model' is not in the cache of the Hub's files, and '127.0.0.1' cannot be reached" in str(
        lines
    )
    assert "matcher 'nosuch/matcher' is not in the cache" in lines["matcher"][2]
    assert "atlas 'nosuch/atlas' is neither installed nor in the cache" in lines["atlas"][2]
    assert lines["push"][2].endswith("(Connection refused); connect to the Hub and push again.")


COMMAND = """
import sys
from elude_steer.cli.entry_point import main
sys.argv = ["elude-steer", *sys.argv[1:]]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("steer", IMAGE, "--minus", "dog", "--model", "nosuch/model"),
        ("caption", IMAGE, "--model", "nosuch/model"),
        ("atlases", "check", "toyland", "--model", "nosuch/model"),
        ("evaluate", "toyland", "--model", "nosuch/model"),
        ("steer", IMAGE, "--minus", "dog", "--atlas", "nosuch/atlas"),
        ("concepts", "nosuch/atlas"),
    ],
    ids=" ".join,
)
def test_a_command_refuses_a_model_or_an_atlas_before_it_imports_torch(arguments, tmp_path):
    done = run_without_network("-c", COMMAND, *arguments, home=tmp_path)
    assert done.returncode == 1
    assert done.stdout.split() == ["False"]
    assert len(done.stderr.splitlines()) == 1
    assert "'nosuch/" in done.stderr
    assert "in the cache of the Hub's files, and '127.0.0.1' cannot be reached (Connection refused); " in done.stderr


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    from huggingface_hub import constants

    def choose(address, offline=False):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_answers", {})
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return choose


def test_a_server_that_answers_is_reachable(endpoint, tmp_path):
    with serve_hub(tmp_path) as address:
        endpoint(address)
        assert hub.why_unreachable() is None
        hub.check_available("me/model")
        endpoint(address, offline=True)
        assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"


def test_a_name_that_nobody_knows_and_a_silent_server(endpoint):
    endpoint("https://hub.invalid")
    assert hub.why_unreachable().startswith("'hub.invalid' ")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.perf_counter()
        assert "'127.0.0.1'" in hub.why_unreachable()
        assert time.perf_counter() - start < 2


def test_what_is_on_this_machine_needs_no_network(endpoint, tmp_path, monkeypatch):
    endpoint(UNREACHABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "folder").mkdir(parents=True)
    (tmp_path / "cache/models--me--model/snapshots/abc").mkdir(parents=True)
    (tmp_path / "cache/models--me--model/snapshots/abc/config.json").write_text("{}")
    for name in ("some/folder", "/no/folder", "./no/folder", "bare-name", "me/model"):
        hub.check_available(name)
    with pytest.raises(
        ModelError, match=r"model 'me/other' is not in the cache .* give a folder, or connect to the Hub"
    ):
        hub.check_available("me/other")


def test_the_licence_of_a_model_is_read_from_the_hub_and_then_from_the_cache(tmp_path):
    (tmp_path / "hub" / "me" / "model").mkdir(parents=True)
    (tmp_path / "hub" / "me" / "model" / "README.md").write_text("---\nlicense: mit\n---\n# a model\n")
    (tmp_path / "hub" / "me" / "bare").mkdir(parents=True)
    code = "import sys; from elude_steer.utils.hub import read_license; print(*map(read_license, sys.argv[1:]))"
    command = ("-c", code, "me/model", "me/bare", "me/none", "toyland/captioner", "bare name")
    with serve_hub(tmp_path / "hub") as endpoint:
        done = run_without_network(*command, home=tmp_path / "home", HF_ENDPOINT=endpoint)
    assert done.stdout.strip() == "{'license': 'mit'} {} {} {} {}", done.stderr
    done = run_without_network(*command, home=tmp_path / "home", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == "{'license': 'mit'} {} {} {} {}", done.stderr
