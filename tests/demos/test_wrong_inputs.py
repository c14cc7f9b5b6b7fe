"""The page of wrong inputs is what the commands answer now."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "demos" / "results" / "wrong_inputs.md"


def test_every_wrong_input_is_answered_by_one_line_as_the_page_says(tmp_path):
    command = [sys.executable, ROOT / "demos" / "wrong_inputs.py", tmp_path / "page.md"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text.count("$ elude-steer ") >= 40
    assert text == PAGE.read_text(encoding="utf-8"), f"run `python demos/wrong_inputs.py {PAGE.relative_to(ROOT)}`"
