"""Kill builds, saves, exports and comparisons at random moments: what is there afterwards, and what another run makes.

    python -m demos.benchmarks.kills [--kills 100] [--seed 0] [--json OUT]

40 of 100 kills hit a save over an older atlas, 30 an export, 20 a build and 10 a comparison. Each of them runs in a
fork of this process and gets SIGKILL at a random moment of the time that it takes undisturbed. Afterwards whatever has
the name of a result must load and be the old or the new one; a build and a comparison are started again until they
end, and must then give the bytes of an undisturbed run.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import elude_steer as es
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.compare.methods import SMALL, find_methods
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, SplitSpec, TokensSpec
from elude_steer.steering.export import export_adapter
from tests.helpers.atlases import make_atlas
from tests.helpers.faults import in_child
from tests.helpers.tiny import save_images, save_llava

KILLED = -signal.SIGKILL
TIMES = ("seconds", "cost", "minutes", "named")  # keys of a comparison's rows that no two runs share


def measure(work: Callable[[], object]) -> float:
    """Seconds that work takes in a fork."""
    start = time.monotonic()
    if in_child(work) != 0:
        raise SystemExit("the work fails without being killed")
    return time.monotonic() - start


def kill_saves(folder: Path, kills: int, rng: random.Random) -> dict:
    """An atlas is saved over another one."""
    plain, target = make_atlas(), folder / "atlas"
    old, new = (replace(plain, about={**plain.about, "name": name}) for name in ("old", "new"))
    old.save(target)
    seconds, found, done = measure(lambda: new.save(target)), {"old": 0, "new": 0}, 0
    while done < kills:
        old.save(target)
        if in_child(lambda: new.save(target), rng.random() * seconds) == KILLED:
            done += 1
            found[Atlas.load(target).name] += 1
    old.save(target)
    left = [path.name for path in folder.iterdir() if path != target]
    return {"kills": done, "found": found, "left": left}


def kill_exports(folder: Path, kills: int, rng: random.Random) -> dict:
    """An edit is exported as an adapter."""
    steerer = es.Steerer.load("toyland")
    plan = steerer.plan(minus=["dog"], mode="scale", nu="all")
    export_adapter(steerer, plan, folder / "whole")
    whole = read(folder / "whole")
    seconds, found = measure(lambda: export_adapter(steerer, plan, folder / "timed")), {"none": 0, "whole": 0}
    done = number = 0
    while done < kills:
        number += 1
        out = folder / f"adapter-{number}"
        if in_child(lambda out=out: export_adapter(steerer, plan, out), rng.random() * seconds) == KILLED:
            done += 1
            if out.exists() and read(out) != whole:
                raise SystemExit(f"'{out}' is neither whole nor absent")
            found["whole" if out.exists() else "none"] += 1
    return {"kills": done, "found": found, "left": []}


def kill_builds(folder: Path, kills: int, rng: random.Random) -> dict:
    """An atlas of a tiny model is built."""
    model, images = save_llava(folder / "model"), save_images(folder / "images", 120, seed=3)
    spec = AtlasSpec(
        "tiny",
        ModelSpec(str(model), "layers.1.mlp.fc2"),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=600, min_cluster_size=12, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
    )

    def build(name: str) -> Callable[[], object]:
        options = {"out": folder / f"atlas-{name}", "work": folder / f"work-{name}", "threads": 1, "quiet": True}
        return lambda: es.build(spec, images=images, **options)

    seconds = measure(build("whole"))
    whole, found, done, number = read(folder / "atlas-whole"), {"same bytes": 0, "half": 0}, 0, 0
    while done < kills:
        number += 1
        while done < kills and in_child(build(str(number)), rng.random() * seconds) == KILLED:
            done += 1
            if (folder / f"atlas-{number}").exists():
                Atlas.load(folder / f"atlas-{number}")
        if in_child(build(str(number))) != 0:
            raise SystemExit("a build that was killed does not go on")
        found["same bytes" if read(folder / f"atlas-{number}") == whole else "half"] += 1
    return {"kills": done, "found": found, "left": [path.name for path in folder.glob("atlas-*.tmp*")]}


def kill_comparisons(folder: Path, kills: int, rng: random.Random) -> dict:
    """Two methods are compared at the smallest size."""
    methods = find_methods(("raw units",))

    def compare(name: str) -> Callable[[], object]:
        def run() -> None:
            rows = Comparison(folder / f"work-{name}", SMALL, threads=1).run(methods)
            (folder / f"rows-{name}.json").write_text(json.dumps(without_times(rows), sort_keys=True, default=str))

        return run

    seconds = measure(compare("whole"))
    found, done, number = {"same rows": 0, "other rows": 0}, 0, 0
    whole = (folder / "rows-whole.json").read_bytes()
    while done < kills:
        number += 1
        while done < kills and in_child(compare(str(number)), rng.random() * seconds) == KILLED:
            done += 1
        if in_child(compare(str(number))) != 0:
            raise SystemExit("a comparison that was killed does not go on")
        same = (folder / f"rows-{number}.json").read_bytes() == whole
        found["same rows" if same else "other rows"] += 1
    return {"kills": done, "found": found, "left": []}


def without_times(value: object) -> object:
    """The values of rows, without those that say how long something took."""
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def read(folder: Path) -> dict[str, bytes]:
    """The files of a result, without those that hold its name or the time."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if name not in ("manifest.json", "README.md")}


JOBS = {"save-over": (kill_saves, 40), "export": (kill_exports, 30), "build": (kill_builds, 20)}
JOBS["compare"] = (kill_comparisons, 10)


def main() -> None:
    """Kill, and print a table; exit with 1 if anything half-written was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=JOBS, action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # in a fork, several would wait for each other for ever
    rows = {}
    print("| work | kills | found afterwards | left behind | CPU s |\n|---|---|---|---|---|")
    for name in given.only or JOBS:
        job, share = JOBS[name]
        before = sum(os.times()[:4])
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.environ["ELUDE_STEER_HOME"] = f"{folder}/home"
            work = Path(folder) / "work"
            work.mkdir()
            row = job(work, max(1, given.kills * share // 100), random.Random(f"{given.seed} {name}"))
        rows[name] = {**row, "cpu_seconds": round(sum(os.times()[:4]) - before)}
        found = ", ".join(f"{count} {what}" for what, count in row["found"].items())
        left = ", ".join(row["left"]) or "nothing"
        print(f"| {name} | {row['kills']} | {found} | {left} | {rows[name]['cpu_seconds']} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "rows": rows}, indent=1), encoding="utf-8")
    raise SystemExit(
        any(row["left"] or row["found"].get("half") or row["found"].get("other rows") for row in rows.values())
    )


if __name__ == "__main__":
    main()
