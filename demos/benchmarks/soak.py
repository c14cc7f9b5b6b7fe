"""A soak: many edits in one process, then many requests to a demo; memory must stay flat.

    python -m demos.benchmarks.soak [--steers 10000] [--requests 500] [--seed 0]

Prints the resident memory at ten moments, after what is free was given back to the system: malloc keeps pieces of it,
the more so the more threads there are. It exits with 1 if the second half grows by more than 20 MB, or if the
caption without edits is another one in the end.
"""

import argparse
import contextlib
import ctypes
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import elude_steer as es
from elude_steer import toyland

WORDS = ("dog", "cat", "teddy", "train", "chair", "frisbee", "biker", "bear")


def watch(name: str, count: int, step: Callable[[int], object]) -> bool:
    """Do a step many times; print memory at ten moments, and return whether the second half is flat."""
    process, seen, start = psutil.Process(), [], time.process_time()
    for number in range(count):
        step(number)
        if (number + 1) % max(1, count // 10) == 0:
            give_back()
            seen.append(process.memory_info().rss / 1e6)
            print(f"{name}: {number + 1}: {seen[-1]:.0f} MB, {time.process_time() - start:.0f} CPU s", flush=True)
    growth = max(seen[len(seen) // 2 :]) - seen[len(seen) // 2 - 1]
    print(f"{name}: the second half grows by {growth:.1f} MB")
    return growth <= 20


def give_back() -> None:
    """Give free memory back to the system, where its library of C can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def soak_steers(count: int, seed: int) -> bool:
    """Edits of other images, words and settings, each with its own plan."""
    steerer, rng = es.Steerer.load("toyland"), random.Random(seed)
    images = [scene.image for scene in toyland.scenes(seed=seed + 70_000, n=16)]
    before = steerer.vlm.caption(images[:1])

    def step(_: int) -> None:
        minus, plus = rng.sample(WORDS, 2)
        mode = rng.choice(({"mode": "place", "force": True}, {"mode": "scale"}))
        plan = steerer.plan(minus=[minus], plus=[plus][: rng.randrange(2)], **mode)
        with steerer.applied(plan):
            steerer.vlm.caption([rng.choice(images)], max_new_tokens=4)

    return watch("steers", count, step) and steerer.vlm.caption(images[:1]) == before


def soak_demo(count: int, seed: int) -> bool:
    """Requests of programs to a demo in this process, over its port."""
    from gradio_client import Client, handle_file

    from elude_steer.demo.launch import serve

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "scene.png"
        next(iter(toyland.scenes(seed=seed + 71_000, n=1))).image.save(image)
        app = serve(es.Steerer.load("toyland"), browse=False, wait=False)
        client = Client(app.local_url, verbose=False)
        flat = watch(
            "demo",
            count,
            lambda _: client.predict(handle_file(str(image)), [rng.choice(WORDS)], api_name="/steer"),
        )
        app.close()
    return flat


def main() -> None:
    """Soak, and exit with 1 if memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steers", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    flat = [soak_steers(given.steers, given.seed)] if given.steers else []
    flat += [soak_demo(given.requests, given.seed)] if given.requests else []
    sys.exit(not all(flat))


if __name__ == "__main__":
    main()
