"""The notebook and the Space work; `python -m tests.demos.test_scripts` runs the notebook anew."""

import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

DEMOS = Path(__file__).parents[2] / "demos"
NOTEBOOK = DEMOS / "quickstart.ipynb"
LARGEST = 400_000  # bytes
WAIT = 240  # seconds; a busy machine is slow
PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
SOMEWHERE = re.compile(r"/(?:work|tmp|home|root|Users|usr|opt|var|mnt)/|\b[A-Z]:\\")


@pytest.fixture
def notebook():
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="the notebook needs jupyter: pip install 'elude-steer[test]'")
    return read()


def read():
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def executed(notebook, cwd, folder):
    """A notebook run from top to bottom in this very Python, whatever else is installed as python3."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    kernel = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=str(folder / "kernel.json"),
    )
    options = {"timeout": WAIT, "record_timing": False, "coalesce_streams": True, "store_widget_state": False}
    client = NotebookClient(notebook, km=kernel, resources={"metadata": {"path": str(cwd)}}, **options)
    client.execute(env=alone(folder), cleanup_kc=True)
    return notebook


def alone(folder, **more):
    """The environment of a process that fetches nothing and keeps what it writes in a folder."""
    own = ("ELUDE_STEER_HOME", "IPYTHONDIR", "GRADIO_TEMP_DIR")
    return os.environ | {name: str(folder / name.lower()) for name in own} | {"HF_HUB_OFFLINE": "1"} | more


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell):
    """What a cell writes and shows as text; pictures are taken out, for their bytes depend on zlib and Pillow."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output.name, output.text))
        else:
            parts = sorted(output.data.items())
            found += [(kind, PICTURE.sub("", text) if kind.startswith("text/") else "") for kind, text in parts]
    return found


def shown(cell):
    """The pixels of a cell's pictures, those inside HTML too."""
    parts = [output.data for output in cell.outputs if "data" in output]
    found = [part["image/png"] for part in parts if "image/png" in part]
    found += [data for part in parts for data in PICTURE.findall(part.get("text/html", ""))]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), float) for data in found]


def test_the_notebook_says_what_the_code_says(notebook, tmp_path):
    for old, new in zip(code(notebook), code(executed(read(), DEMOS, tmp_path)), strict=True):
        assert said(new) == said(old), f"cell '{old.id}' says something else: `python -m tests.demos.test_scripts`"
        for before, after in zip(shown(old), shown(new), strict=True):
            assert before.shape == after.shape
            assert np.abs(before - after).mean() < 2, f"cell '{old.id}' shows something else"


def test_the_notebook_finds_its_pictures_from_the_root_too(notebook, tmp_path):
    notebook.cells = code(notebook)[:1]
    before, _, _ = notebook.cells[0].source.partition("steerer = ")  # the model takes longest, and is not asked for
    notebook.cells[0].source = before + "assert teddy.is_file() and dog.is_file()"
    executed(notebook, DEMOS.parent, tmp_path)


def test_the_notebook_was_run_in_order_and_tells_nothing_of_the_machine(notebook):
    assert NOTEBOOK.stat().st_size < LARGEST
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    for cell in notebook.cells:
        assert not cell.metadata  # no times
        told = said(cell) if cell.cell_type == "code" else []
        text = "\n".join([cell.source, *(text for _, text in told)])
        assert not SOMEWHERE.search(text), cell.id
        assert str(DEMOS.parent) not in text, cell.id
        assert all(text.startswith("EludeSteerWarning: ") for kind, text in told if kind == "stderr"), cell.id


def test_the_space_serves(tmp_path):
    """As a Space starts it: by `python app.py`, with the address in the environment."""
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'elude-steer[demo]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = alone(tmp_path, GRADIO_SERVER_NAME="127.0.0.1", GRADIO_SERVER_PORT=port)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "app.py"], cwd=DEMOS, env=env, stdout=log, stderr=log)
        try:
            page, config = (fetch(f"http://127.0.0.1:{port}{path}", process) for path in ("/", "/config"))
        finally:
            process.terminate()
            process.wait(30)
    log = (tmp_path / "log").read_text()
    assert page is not None and config is not None, log
    assert "elude_steer" in page
    about = json.loads(config)
    assert about["title"] == "elude_steer"
    assert "atlas toyland" in config
    assert "toyland-teddy: " in config  # an edit of the examples
    assert "Traceback" not in log, log


def fetch(address, process):
    """What is at an address once it answers with 200; None where the server ended, or never did."""
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


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        run = executed(read(), DEMOS, Path(folder))
    run.metadata["language_info"] = {"name": "python"}  # no versions
    nbformat.write(run, NOTEBOOK)
