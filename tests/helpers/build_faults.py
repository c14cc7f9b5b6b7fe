"""A full disk, and a kill, at calls of the file system in a whole build; run as a program, because it forks.

    python -m tests.helpers.build_faults FOLDER [--every 1] [--first 1]

For every call that changes what is on disk, or every k-th, a build of a tiny model with labels meets the fault. Then
the same build runs undisturbed on what is left, and must give the bytes of a build that met none. Prints JSON: the
calls, what was found after each fault, and each case that broke a promise.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import EludeSteerError
from elude_steer.utils.files import is_leftover
from tests.helpers.faults import fault_at, full_disk, in_child, kill, no_room_after
from tests.helpers.tiny import save_images, save_llava

SPEC = """
name: tiny
model: {{id: "{0}/model", layer: layers.1.mlp.fc2}}
images: {{source: "{0}/images"}}
tokens: {{per_image: 6}}
clusters: {{top_k: 90, backend: exact, min_cluster_size: 8}}
split: {{winner_rule: gap}}
references: {{keep: 5, thumbnails: 16}}
labels: {{scorer: "{0}/scorer", vocabulary: toyland, top_k: 12}}
matcher: {{id: toyland/matcher}}
"""
IMAGES = 16
LIMITS = (0, 100, 1000, 4000, 20_000, 60_000)  # bytes that a file may have


class Trial:
    """Builds of one spec in a folder, and what is wrong with them.

    Attributes:
        folder: holds the model, its images and, for each build, a folder.
        whole: the bytes of an undisturbed build.
        problems: what broke a promise.
        outcomes: how often what was found.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems, self.outcomes = folder, [], Counter()
        save_llava(folder / "model")
        save_images(folder / "images", IMAGES)
        labeller.save(labeller.new_model(3), folder / "scorer")
        (folder / "spec.yaml").write_text(SPEC.format(folder), encoding="utf-8")
        self.build("whole")  # imports, too
        self.whole = self.read("whole")

    def build(self, name: str) -> None:
        """Build in the folder of this name."""
        os.environ["ELUDE_STEER_HOME"] = str(self.folder / name / "home")
        place = self.folder / name
        place.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            es.build(self.folder / "spec.yaml", out=place / "atlas", work=place / "work", threads=1, quiet=True)

    def read(self, name: str) -> dict[str, bytes]:
        """The files of an atlas; its card and manifest name the time."""
        files = [path for path in (self.folder / name / "atlas").rglob("*") if path.is_file()]
        return {path.name: b"" if path.name in ("manifest.json", "README.md") else path.read_bytes() for path in files}

    def count(self) -> int:
        """How many calls of a build change what is on disk."""
        with fault_at(0, kill, changing=True) as calls:
            self.build("counted")
        shutil.rmtree(self.folder / "counted")
        return len(calls)

    def try_fault(self, kind: str, number: int) -> None:
        """Let a build meet a fault, look at what it leaves, and build again."""
        name = f"{kind}-{number}"
        place = self.folder / name
        place.mkdir()
        fault = {
            "kill": lambda: fault_at(number, kill, changing=True),
            "disk": lambda: fault_at(number, full_disk, changing=True, lasting=True),
            "once": lambda: fault_at(number, full_disk, changing=True),
            "size": lambda: no_room_after(number),
            "none": nullcontext,
        }
        ended = in_child(lambda: self._run(name, fault[kind]))
        told = place / "error.txt"
        text = told.read_text() if told.exists() else ""
        found = (
            "killed" if ended == -signal.SIGKILL else "refused" if ended == 3 else "built" if ended == 0 else "broken"
        )
        if found == "broken" or (found == "killed" and kind != "kill"):
            self.problems.append([name, f"ended with {ended}: {text}"])
        if found == "refused" and ("\n" in text or "no room left" not in text):
            self.problems.append([name, f"not one line about the disk: {text}"])
        if self.check(name, f"after {found}"):
            found += ", atlas there"
        left = [] if found.startswith("killed") else self.leftovers(name)
        if left:
            self.problems.append([name, f"left behind: {left}"])
        ended = in_child(lambda: self._run(name, fault["none"]))
        if ended != 0 or not self.check(name, "built again"):
            self.problems.append([name, f"the next build ended with {ended}: {told.read_text() if ended == 3 else ''}"])
        if left := self.leftovers(name):
            self.problems.append([name, f"the next build left behind: {left}"])
        self.outcomes[f"{kind}: {found}"] += 1
        shutil.rmtree(place)

    def check(self, name: str, when: str) -> bool:
        """Whether there is an atlas; it must be the whole one."""
        out = self.folder / name / "atlas"
        if not out.exists():
            return False
        Atlas.load(out)
        if self.read(name) != self.whole:
            self.problems.append([name, f"{when}, the atlas is another one"])
        return True

    def leftovers(self, name: str) -> list[str]:
        """Unfinished files and folders."""
        return [path.name for path in (self.folder / name).rglob("*") if is_leftover(path)]

    def _run(self, name: str, fault: Callable[[], object]) -> None:
        told = self.folder / name / "error.txt"
        text, code = "", 0
        try:
            with fault():
                self.build(name)
        except EludeSteerError as error:
            text, code = str(error), 3
        except BaseException:  # noqa: BLE001 - what is looked for
            import traceback

            text, code = traceback.format_exc(), 4
        if code:
            told.write_text(text)
            os._exit(code)


def main() -> None:
    """Try the faults, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty one")
    parser.add_argument("--every", type=int, default=1, help="try every k-th call")
    parser.add_argument("--first", type=int, default=1, help="from this one")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    before, trial = sum(os.times()[:4]), Trial(given.folder)
    calls = trial.count()
    for kind in ("kill", "disk", "once"):
        for number in range(given.first, calls + 1, given.every):
            trial.try_fault(kind, number)
            if sys.stderr.isatty():
                print(f"\r{kind} {number}/{calls}, {time.process_time():.0f} s", end="", file=sys.stderr)
    for limit in LIMITS:
        trial.try_fault("size", limit)
    seconds = round(sum(os.times()[:4]) - before, 1)
    print(json.dumps({"calls": calls, "outcomes": trial.outcomes, "problems": trial.problems, "cpu_seconds": seconds}))


if __name__ == "__main__":
    main()
