"""Build toyland's atlas with one and with several processes: seconds of each stage, equal bytes, token store size.

    python demos/benchmarks/parallel_build.py [--images 1500] [--units 48] [--rounds 3] [--processes 2]

The command runs as a user would run it, from scratch each time, with one thread per process; the variants alternate.
The seconds are those that the build reports for its stages. Targets for two processes: collecting and clustering
together take at most 0.65 of the time of one process, and the store takes at most 2 % more than its tokens.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

STAGE = re.compile(r"note: (\w+): ([\d.]+) s")


def run_build(folder: Path, processes: int, options: argparse.Namespace) -> tuple[dict[str, float], str, Path]:
    """Seconds of each stage, a hash of the atlas's tensors, and the token store."""
    folder.mkdir()
    limits = [f"images.limit={options.images}", f"clusters.units={options.units}"]
    command = [sys.executable, "-m", "elude_steer", "build", "toyland", "--out", str(folder / "atlas")]
    command += ["--work", str(folder / "work"), "--processes", str(processes), "--threads", "1"]
    done = subprocess.run(
        [*command, *(part for limit in limits for part in ("--set", limit))], capture_output=True, text=True, check=True
    )
    bits = b"".join(path.read_bytes() for path in sorted((folder / "atlas").glob("*.safetensors")))
    (store,) = (folder / "work").glob("tokens-*/")
    return (
        {name: float(seconds) for name, seconds in STAGE.findall(done.stderr)},
        hashlib.sha256(bits).hexdigest(),
        store,
    )


def store_size(store: Path) -> tuple[int, int]:
    """Bytes of the tokens themselves, and of all files of the store."""
    from elude_steer.atlas.build.token_store import TokenStore

    shape, tokens = json.loads((store / "shape.json").read_text()), TokenStore(store)
    width = {"float16": 2, "float32": 4}[shape["dtype"]]
    return len(tokens) * tokens.d_in * width, sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.processes < 2:
        parser.error("--processes must be at least 2; one process is always measured for comparison.")
    runs: dict[int, list[dict[str, float]]] = {1: [], options.processes: []}
    hashes = set()
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for processes, rounds in runs.items():
                seconds, bits, store = run_build(Path(name) / f"{number}-{processes}", processes, options)
                rounds.append(seconds)
                hashes.add(bits)
        needed, used = store_size(store)
    one, several = runs.values()
    print(f"| stage | one process, s | {options.processes} processes, s | ratio |\n|---|---|---|---|")
    for stage in one[0]:
        a, b = (median(seconds[stage] for seconds in rounds) for rounds in (one, several))
        print(f"| {stage} | {a:.2f} | {b:.2f} | {b / a if a else float('nan'):.2f} |")
    both = [[seconds["collecting"] + seconds["clustering"] for seconds in rounds] for rounds in (one, several)]
    ratios = [b / a for a, b in zip(*both, strict=True)]
    print(f"collecting and clustering, ratios {', '.join(f'{r:.3f}' for r in ratios)}: median {median(ratios):.3f}")
    print(f"the same bytes in all {2 * options.rounds} builds: {'yes' if len(hashes) == 1 else 'NO'}")
    print(f"token store: {used:,} bytes for {needed:,} of tokens, {used / needed - 1:.2%} more")


if __name__ == "__main__":
    main()
