"""Write `.ci/lowest.txt`: the lowest versions that pyproject.toml allows, of what the tests without the demo need.

    python .ci/lowest.py [--check]

`.ci/run` installs exactly these into an environment of its own, so that every lower bound is one that was tried. torch
is the exception: no CPU build of an older release can be had. With `--check`, nothing is written: the script exits
with 1 if the file is not what it would write.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".ci" / "lowest.txt"
TORCH = "2.13.0"
TESTS = (  # of the extras
    *("pytest", "pytest-xdist", "hypothesis", "peft", "openai"),
    *("fastapi", "starlette", "uvicorn", "python-multipart", "prometheus-client"),  # the server
)
HEAD = "# Written by `python .ci/lowest.py` from pyproject.toml; see there.\n"


def lowest(pyproject: str) -> str:
    """The text of the file; raises if a dependency has no lower bound."""
    project = tomllib.loads(pyproject)["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    of_tests = [line for line in extras if re.match(r"[\w.-]+", line)[0] in TESTS]
    pins = {}
    for requirement in project["dependencies"] + of_tests:
        found = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml: '{requirement}' has no lower bound; write NAME>=VERSION")
        pins[found[1]] = TORCH if found[1] == "torch" else found[2]
    missing = {*TESTS} - {*pins}
    if missing:
        raise SystemExit(f"pyproject.toml: no extra has {', '.join(sorted(missing))}")
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def main() -> None:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is not up to date")
    text = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not parser.parse_args().check:
        FILE.write_text(text, encoding="utf-8")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != text:
        sys.exit(".ci/lowest.txt is not what pyproject.toml says: run `python .ci/lowest.py`")


if __name__ == "__main__":
    main()
