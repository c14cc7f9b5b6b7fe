"""Build toyland's atlas in one process, in two, and by two Ray workers, also while workers are killed: time and bytes.

    python demos/benchmarks/launchers.py [--images 600] [--units 24] [--rounds 1] [--kills 5]

Needs the extra `ray`. The command runs as a user would run it, from scratch each time; in the last build a worker that
is doing a piece is killed at random moments. The seconds are those of the whole command, on the clock. Targets: the
same bytes everywhere; no piece is done more than twice; Ray takes at most 1.15 of the time of two processes. A piece is
begun once more for each of its workers that is killed.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import psutil

VARIANTS = {
    "one process": ["--processes", "1", "--threads", "1"],
    "two processes": ["--processes", "2", "--threads", "1"],
    "two Ray workers": ["--launcher", "ray", "--processes", "2"],
    "two Ray workers, killed": ["--launcher", "ray", "--processes", "2"],
}


def start_build(folder: Path, variant: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one build in a folder of its own."""
    (folder / "tasks").mkdir(parents=True)
    settings = [f"images.limit={options.images}", f"clusters.units={options.units}", "clusters.top_k=1000"]
    command = [sys.executable, "-m", "elude_steer", "build", "toyland", "--out", str(folder / "atlas")]
    command += ["--work", str(folder / "work"), *VARIANTS[variant]]
    environment = {
        **os.environ, "ELUDE_STEER_TASK_LOG": str(folder / "tasks"), "ELUDE_STEER_HOME": str(folder / "home"),
    }  # fmt: skip
    command += [part for setting in settings for part in ("--set", setting)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def busy_workers(build: subprocess.Popen[str]) -> list[psutil.Process]:
    """The Ray workers of a build that are doing a piece."""
    found = []
    for child in psutil.Process(build.pid).children(recursive=True):
        try:
            if "ray::" in " ".join(child.cmdline()) and "IDLE" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def kill_workers(build: subprocess.Popen[str], folder: Path, kills: int, rng: random.Random, longest: float) -> int:
    """Kill busy workers at random moments, each while a piece is begun and not ended; returns how many were killed.

    Between two moments there are at most `longest` seconds.
    """
    killed = 0
    while build.poll() is None and killed < kills:
        time.sleep(rng.uniform(0.5, longest))
        workers = [worker for worker in busy_workers(build) if is_inside_a_piece(folder, worker.pid)]
        if workers:
            rng.choice(workers).kill()
            killed += 1
    return killed


def is_inside_a_piece(folder: Path, pid: int) -> bool:
    """Whether a worker has begun a piece and not ended it."""
    lines = [line for path in (folder / "tasks").glob(f"*-{pid}.log") for line in path.read_text().splitlines()]
    return bool(lines) and lines[-1].startswith("begin")


def count_tasks(folder: Path) -> tuple[int, int, int]:
    """How many tasks there were, the largest number of times that one was begun, and of times that one was ended."""
    lines = [line for path in (folder / "tasks").glob("*.log") for line in path.read_text().splitlines()]
    begun, ended = (Counter(line[len(word) :] for line in lines if line.startswith(word)) for word in ("begin", "end"))
    return len(begun), max(begun.values(), default=0), max(ended.values(), default=0)


def hash_atlas(folder: Path) -> str:
    """One hash of the names and bytes of all files of an atlas."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--gap", type=float, default=12, help="seconds between two kills at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=VARIANTS, action="append", help="One of the builds; may be repeated.")
    options = parser.parse_args()
    variants = options.only or list(VARIANTS)
    rng, hashes = random.Random(options.seed), set()
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for variant in variants:
                folder = Path(name) / f"{number}-{variant.replace(' ', '-').replace(',', '')}"
                start = time.perf_counter()
                build = start_build(folder, variant, options)
                killed = kill_workers(build, folder, options.kills, rng, options.gap) if "killed" in variant else 0
                _, errors = build.communicate()
                if build.returncode:
                    raise SystemExit(f"{variant}: {errors}")
                seconds[variant].append(time.perf_counter() - start)
                hashes.add(hash_atlas(folder / "atlas"))
                tasks, begun, ended = count_tasks(folder)
                print(
                    f"{variant}: {seconds[variant][-1]:.1f} s, load {os.getloadavg()[0]:.1f}, {killed} workers killed, "
                    f"{tasks} tasks, each begun at most {begun} times and ended at most {ended} times",
                    flush=True,
                )
                print("  " + " | ".join(line.partition("note: ")[2] for line in errors.splitlines()), flush=True)
    middle = {variant: median(values) for variant, values in seconds.items() if values}
    if {"two Ray workers", "two processes"} <= set(middle):
        print(f"two Ray workers / two processes: {middle['two Ray workers'] / middle['two processes']:.2f}")
    print(f"the same bytes in all {options.rounds * len(variants)} builds: {'yes' if len(hashes) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
