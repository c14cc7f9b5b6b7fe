"""Changed copies of good files for each loader: how many are refused in its own words, accepted, or break it.

    python demos/benchmarks/fuzz.py [--cases 20000] [--loader NAME] [--seed 0] [--json OUT]

Each loader runs in a process of its own, so that its peak of memory is its own, with the imports. A case is made from
its seed alone: `python -c "from tests.helpers.fuzz import *; print(make_case(LOADERS['recipe'], '0-17'))"` shows one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.fuzz import LOADERS, Outcome, fuzz  # noqa: E402

MAX_MB = 500  # that a loader may take beyond its imports


def main() -> None:
    """Fuzz the loaders and print a table; exit with 1 if any of them broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="for each loader")
    parser.add_argument("--loader", choices=LOADERS, action="append", help="repeat it for several [default: all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, as JSON
    given = parser.parse_args()
    names = given.loader or list(LOADERS)
    if given.here:
        with tempfile.TemporaryDirectory() as folder:
            fuzz(names[0], 5, Path(folder), seed=-1)  # imports
            before = fuzz(names[0], 0, Path(folder)).peak_mb
            found = fuzz(names[0], given.cases, Path(folder), given.seed)
        print(json.dumps({**asdict(found), "more_mb": found.peak_mb - before}))
        return
    rows = {name: run_in_process(name, given.cases, given.seed) for name in names}
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "rows": rows}, indent=1), encoding="utf-8")
    sys.exit(any(row["tracebacks"] or row["hangs"] or row["more_mb"] > MAX_MB for row in rows.values()))


def run_in_process(name: str, cases: int, seed: int) -> dict:
    """Fuzz one loader; if its process ends, all its cases count as one traceback."""
    command = [sys.executable, __file__, "--here", "--loader", name, "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        ended = Outcome(cases, tracebacks=[("", f"the process ended with code {done.returncode}")])
        return {**asdict(ended), "more_mb": 0.0}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(rows: dict[str, dict]) -> str:
    """The outcomes as Markdown, and below it what broke a loader."""
    lines = [
        "| loader | cases | own errors | accepted | tracebacks | hangs | peak MB | after the imports | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        counts = (row["cases"], row["refused"], row["accepted"], len(row["tracebacks"]), len(row["hangs"]))
        sizes = (f"{row['peak_mb']:.0f}", f"{row['more_mb']:.0f}", f"{row['seconds']:.0f}")
        lines.append(f"| {' | '.join([name, *map(str, counts), *sizes])} |")
    for name, row in rows.items():
        lines += [f"\n{name}, seed {seed}:\n{text}" for seed, text in row["tracebacks"][:5]]
        lines += [f"\n{name}, seed {seed}: a hang" for seed in row["hangs"][:5]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
