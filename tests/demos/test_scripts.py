"""Every script shows its help."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

DEMOS = Path(__file__).parents[2] / "demos"
WAIT = 240  # seconds, enough for a busy machine
LIBRARIES = {  # modules without a command
    "toyland/captioner.py", "toyland/labeller.py", "toyland/matcher.py", "toyland/report.py",
    "toyland/training_loop.py", "vocabulary/wordnet.py", "space/app.py", "photoland/__init__.py",
    "photoland/captioner.py", "photoland/features.py", "photoland/flickr8k.py", "photoland/labeller.py",
    "photoland/parts.py", "photoland/tower.py",
}  # fmt: skip
SHOW_HELP = """
import contextlib, io, json, os, runpy, sys
texts, scripts = {}, sys.argv[1:]
for script in scripts:
    out = io.StringIO()
    sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        texts[script] = out.getvalue() if not error.code else f"exit {error.code}"
print(json.dumps(texts))
"""


def isolated_environment(folder, **more):
    """The environment of a process that downloads nothing and writes into a folder."""
    homes = ("ELUDE_STEER_HOME", "IPYTHONDIR", "GRADIO_TEMP_DIR")
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(DEMOS.parent)}
    return os.environ | {name: str(folder / name.lower()) for name in homes} | offline | more


def test_every_script_shows_its_help(tmp_path):
    """In one process, because most of the time goes into imports."""
    files = [path for path in DEMOS.rglob("*.py") if path.relative_to(DEMOS).as_posix() not in LIBRARIES]
    scripts = sorted(map(str, files))
    command = [sys.executable, "-c", SHOW_HELP, *scripts]
    env = isolated_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout.splitlines()[-1])
    assert len(scripts) >= 20
    assert list(texts) == scripts
    for script, text in texts.items():
        assert text.startswith("usage: "), (script, text)
        description = text.partition("\n\n")[2].partition("options:")[0]
        assert Path(script).stem in description, f"{script} does not say how to run it"


def fetch(address, process):
    """The text at an address once it answers with 200; None if the process ends or the time is over."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + WAIT
    while process.poll() is None and time.monotonic() < end:
        try:
            with direct.open(address, timeout=WAIT) as answer:
                return answer.read().decode() if answer.status == 200 else None
        except urllib.error.HTTPError:
            return None
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    return None
