"""The README is short, its example prints what it says, and .ci/run finds the test command in it."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_has_at_most_250_lines():
    assert len(README.splitlines()) <= 250


def test_the_test_command_is_marked_for_ci():
    assert re.search(r"<!-- test command -->\n```bash\n.* -m pytest -n auto\n```\n<!-- end -->", README)


def test_the_first_example_prints_the_output_below_it(tmp_path, monkeypatch):
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    (tmp_path / "demos").symlink_to(ROOT / "demos")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == output


def test_the_first_image_shows_what_the_default_settings_give():
    import runpy

    import elude_steer as es

    script = runpy.run_path(str(ROOT / "demos" / "readme_steering_image.py"))
    removed, replaced = script["EDITS"]
    assert set(removed) | set(replaced) == {"minus", "plus"}  # and no settings
    flags = script["_flags"](replaced)
    assert f"`elude-steer steer {script['SCENE'].relative_to(ROOT)} {flags}` prints the last caption" in README
    assert es.steer(script["SCENE"], **removed).caption == "a chair in a room"
    assert es.steer(script["SCENE"], **replaced).caption == "a dog on a chair in a room"
