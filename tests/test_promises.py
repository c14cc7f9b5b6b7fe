"""What `demos/guides/promises.md` promises is tested, and what pyproject.toml allows is tried."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMISES = (ROOT / "demos" / "guides" / "promises.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROMISES)


def test_every_promise_names_tests():
    sections = re.split(r"^## ", PROMISES, flags=re.MULTILINE)[1:]
    assert len(sections) >= 6 and len(TESTS) > 35
    assert all("::test_" in section for section in sections)


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_the_tests_behind_the_promises_exist_and_run_by_default(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (test,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert not any(kept_out(mark) for mark in test.decorator_list)
    assert not any(kept_out(statement) for statement in tree.body if isinstance(statement, (ast.Assign, ast.Expr)))


def kept_out(code):
    """Whether a mark or a statement of a module leaves tests out, but where gradio or a browser is not installed.

    `.ci/run` has both.
    """
    text = ast.unparse(code)
    leaves_out = re.search(r"mark\.(slow|gpu|skip)|pytest\.(importorskip|skip)|^(slow|gpu)$", text)
    return leaves_out is not None and not re.search(r"gradio|chromium", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("code", "out"),
    [
        ("pytestmark = pytest.mark.slow", True),
        ("pytestmark = [pytest.mark.gpu]", True),
        ("pytest.importorskip('ray')", True),
        ("ray = pytest.importorskip('ray')", True),
        ("pytest.mark.skip", True),
        ("slow", True),
        ("gradio = pytest.importorskip('gradio')", False),
        ("SKIPPED = re.compile('skip')", False),
    ],
)
def test_tests_that_do_not_run_by_default_are_seen(code, out):
    (statement,) = ast.parse(code).body
    assert kept_out(statement.value if code in ("pytest.mark.skip", "slow") else statement) is out


def without_network(*command):
    """Run a command of Python in a namespace that has nothing but a loopback, which is down."""
    return subprocess.run(
        ["unshare", "--map-root-user", "--net", sys.executable, *command],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)} | {"HF_HUB_OFFLINE": "0"},
    )  # fmt: skip


def test_steering_needs_no_network(tmp_path, monkeypatch):
    """The Hub's libraries are not told to stay offline: nothing asks for it."""
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    try:
        interfaces = without_network(
            "-c", "import os; print(*os.listdir('/sys/class/net'), len(open('/proc/net/route').readlines()))"
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if interfaces.returncode:
        pytest.skip(f"this machine allows no namespaces: {interfaces.stderr.strip()}")
    assert interfaces.stdout.split()[-1] in ("0", "1"), "there are routes"
    image = ROOT / "demos" / "images" / "toyland-teddy.png"
    done = without_network("-m", "elude_steer", "steer", str(image), "--minus", "teddy")
    assert (done.returncode, done.stdout) == (0, "a chair in a room\n"), done.stderr


def test_the_lowest_versions_are_those_of_pyproject():
    spec = importlib.util.spec_from_file_location("lowest", ROOT / ".ci" / "lowest.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert script.lowest(text) == script.FILE.read_text(encoding="utf-8"), "run `python .ci/lowest.py`"
    with pytest.raises(SystemExit, match="'tqdm' has no lower bound"):
        script.lowest(text.replace('"tqdm>=4.66.3"', '"tqdm"'))
