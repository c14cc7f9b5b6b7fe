"""The notebook runs and shows what its stored outputs show; `python -m tests.demos.test_notebook` runs it again."""

import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.demos.test_scripts import DEMOS, WAIT, isolated_environment

NOTEBOOK = DEMOS / "quickstart.ipynb"
MAX_BYTES = 400_000
PNG = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
LOCAL_PATH = re.compile(r"/(?:work|tmp|home|root|Users|usr|opt|var|mnt)/|\b[A-Z]:\\")


@pytest.fixture
def notebook():
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="the notebook needs jupyter: pip install 'elude-steer[test]'")
    return read_notebook()


def read_notebook():
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook, cwd, folder):
    """Run a notebook from top to bottom with the Python that runs this test."""
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
    client.execute(env=isolated_environment(folder), cleanup_kc=True)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_texts(cell):
    """The texts of a cell's outputs, without images, whose bytes depend on zlib and Pillow."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output.name, output.text))
        else:
            parts = sorted(output.data.items())
            found += [(kind, PNG.sub("", text) if kind.startswith("text/") else "") for kind, text in parts]
    return found


def output_images(cell):
    """The pixels of a cell's images, including those inside HTML."""
    parts = [output.data for output in cell.outputs if "data" in output]
    found = [part["image/png"] for part in parts if "image/png" in part]
    found += [data for part in parts for data in PNG.findall(part.get("text/html", ""))]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), float) for data in found]


def test_running_the_notebook_gives_its_stored_outputs(notebook, tmp_path):
    for old, new in zip(code_cells(notebook), code_cells(execute(read_notebook(), DEMOS, tmp_path)), strict=True):
        assert output_texts(new) == output_texts(old), f"cell '{old.id}' differs: `python -m tests.demos.test_notebook`"
        for before, after in zip(output_images(old), output_images(new), strict=True):
            assert before.shape == after.shape
            assert np.abs(before - after).mean() < 2, f"cell '{old.id}' shows another image"


def test_the_notebook_needs_no_files_around_it(notebook, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    notebook.cells = code_cells(notebook)[:2]
    before, _, _ = notebook.cells[1].source.partition("steerer = ")  # without the model, which takes longest to load
    notebook.cells[1].source = (
        before + "assert all(Image.open(path).size == (96, 96) for path in (teddy, dog, frisbee))"
    )
    execute(notebook, tmp_path / "elsewhere", tmp_path)


# Stands in for pip: writes down its arguments, and installs an empty package next to itself.
PIP = """
import json, pathlib, sys

folder = pathlib.Path(__file__).parents[1]
(folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
(folder / "elude_steer").mkdir()
(folder / "elude_steer" / "__init__.py").write_text("")
"""


def run_install_cell(source, folder, cwd):
    """Run the cell in a Python that sees no installed packages; return the arguments of pip, and what it printed."""
    packages = folder / "packages"
    (packages / "pip").mkdir(parents=True)
    (packages / "pip" / "__init__.py").write_text("")  # without it, Python would prefer the real pip
    (packages / "pip" / "__main__.py").write_text(PIP)
    cwd.mkdir(parents=True, exist_ok=True)
    code = f"{source}\nimport elude_steer\nprint(elude_steer.__file__)"
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    arguments = packages / "arguments.json"
    return json.loads(arguments.read_text()) if arguments.exists() else None, done


ADDRESS = "https://github.com/OWNER/REPOSITORY"


@pytest.mark.parametrize(
    ("address", "clone", "expected"),
    [
        ("", True, "CLONE"),
        (ADDRESS, True, "CLONE"),
        (ADDRESS, False, f"elude-steer @ git+{ADDRESS}"),
        ("", False, None),
    ],
)
def test_the_notebook_installs_the_package(notebook, tmp_path, address, clone, expected):
    source = code_cells(notebook)[0].source
    assert '\nREPOSITORY = "" ' in source
    source = source.replace('REPOSITORY = ""', f"REPOSITORY = {address!r}", 1)
    folder = tmp_path / "content"
    if clone:  # a package that cannot be imported from the folder of the notebook
        (folder / "elude_steer").mkdir(parents=True)
        (folder / "elude_steer" / "__init__.py").write_text("raise ImportError")
    arguments, done = run_install_cell(source, tmp_path, folder / "demos")
    if expected is None:
        assert arguments is None
        assert done.stderr.strip().endswith("write the address of its repository into REPOSITORY above.")
        return
    assert done.returncode == 0, done.stderr
    assert arguments == ["install", "-q", str(folder) if expected == "CLONE" else expected]
    assert done.stdout.strip() == str(tmp_path / "packages" / "elude_steer" / "__init__.py")


def test_the_notebook_installs_nothing_where_the_package_is(notebook, tmp_path):
    source = code_cells(notebook)[0].source
    (tmp_path / "packages" / "elude_steer").mkdir(parents=True)
    (tmp_path / "packages" / "elude_steer" / "__init__.py").write_text("")
    arguments, done = run_install_cell(source, tmp_path, tmp_path / "content")
    assert done.returncode == 0, done.stderr
    assert arguments is None


def test_the_notebook_was_run_in_order_and_has_no_local_paths(notebook):
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    for cell in notebook.cells:
        assert not cell.metadata  # no times
        outputs = output_texts(cell) if cell.cell_type == "code" else []
        text = "\n".join([cell.source, *(text for _, text in outputs)])
        assert not LOCAL_PATH.search(text), cell.id
        assert str(DEMOS.parent) not in text, cell.id
        assert all(text.startswith("EludeSteerWarning: ") for kind, text in outputs if kind == "stderr"), cell.id


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        run = execute(read_notebook(), DEMOS, Path(folder))
    run.metadata["language_info"] = {"name": "python"}  # no versions
    nbformat.write(run, NOTEBOOK)
