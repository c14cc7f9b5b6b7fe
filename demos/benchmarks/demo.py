"""The demo's page: how soon it can be used, how long a press takes, and twenty clients at once for a minute.

    python demos/benchmarks/demo.py [--rounds 5] [--presses 20] [--clients 20] [--seconds 60] [--json OUT]

Needs the extras `demo` and `test`, and Debian's chromium. Processes of the demo and of the bare imports take turns, so
that both see the same machine. Every answer to a client is held against the one that the library gives alone.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elude_steer import toyland
from elude_steer.demo.presenter import Presenter
from elude_steer.models.vlm import PROMPT
from elude_steer.steering.result import mark_changes
from elude_steer.steering.steerer import Steerer
from tests.helpers.visitor import EXAMPLES, Visitor, chromium, serve_demo

BARE = (
    "import torch, gradio, sentence_transformers; from transformers import LlavaOnevisionForConditionalGeneration; "
    "from gradio import networking"
)
WORDS = {"cats": ("cat", "tablecloth"), "dog": ("dog", "motorcycle"), "teddy": ("teddy", "chair"), "train": ("train",)}


def opening(browser: Any, rounds: int) -> dict[str, float]:
    """From the start of the process until somebody can press, beside the bare imports."""
    bare, ready = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True)
        bare.append(time.perf_counter() - start)
        start = time.perf_counter()
        with serve_demo() as (address, _):
            visitor = Visitor(browser, address)
            visitor.page.locator("#press").click(trial=True)  # could be pressed
            ready.append(time.perf_counter() - start)
            visitor.close()
    beyond = [one - other for one, other in zip(ready[1:], bare[1:], strict=True)]  # the first fills the disk's cache
    return {
        "bare imports, s": statistics.median(bare[1:]),
        "process to usable page, s": statistics.median(ready[1:]),
        "beyond the imports, s": statistics.median(beyond),
        "beyond the imports, worst, s": max(beyond),
    }


# Timed by the page itself: from the click to the frame that shows both captions.
CLICK = """() => new Promise((done) => {
    const said = document.querySelector('#said'), start = performance.now(), old = said.querySelector('.captions');
    const before = old?.dataset.seconds;
    new MutationObserver((_, observer) => {
        const now = said.querySelector('.captions[data-seconds]');
        if (!now || now.dataset.seconds === before) return;
        observer.disconnect();
        requestAnimationFrame(() => done((performance.now() - start) / 1000));
    }).observe(said, {subtree: true, childList: true, attributes: true, characterData: true});
    document.querySelector('#press').click();
})"""


def pressing(browser: Any, address: str, presses: int) -> dict[str, float]:
    """From the click to both captions, as the browser sees it; the first press of a new page included."""
    visitor, took = Visitor(browser, address), []
    for number in range(presses):
        name = EXAMPLES[number % len(EXAMPLES)]
        visitor.example(name)
        words = WORDS.get(name, ("dog",))
        visitor.words("minus", words[number // len(EXAMPLES) % len(words)])
        visitor.words("plus", *(["biker"] if number % 2 else []))
        took.append(visitor.page.evaluate(CLICK))
        visitor.page.wait_for_timeout(300)
    visitor.close()
    return {"click to captions, median, s": statistics.median(took), "worst, s": max(took), "first, s": took[0]}


def memory(process: int) -> float:
    """Megabytes of a process that are in use."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def crowd(address: str, process: int, clients: int, seconds: float, seed: int = 91) -> dict[str, object]:
    """Clients that press again and again, each with pictures and words of its own."""
    from gradio_client import Client, handle_file

    steerer = Steerer.load("toyland")
    fields = Presenter(steerer).field_values()
    scenes = [scene for scene in toyland.scenes(seed=seed, n=3 * clients) if len(scene.objects) >= 2][:clients]
    tasks, truth = [], {}
    for number, scene in enumerate(scenes):
        for minus, plus in (((scene.objects[0],), ()), ((scene.objects[1],), ("biker",)), (scene.objects[:2], ())):
            words = (tuple(minus), tuple(plus))
            plan, _ = steerer.prepare_plan(minus, plus)
            truth[number, words] = mark_changes(steerer.explain(scene.image, plan))
            tasks.append((number, words))
    errors: list[str] = []
    wrong: list[str] = []
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        connected = []
        for number, scene in enumerate(scenes):
            path = Path(folder) / f"{number}.png"
            scene.image.save(path)
            client = Client(address, verbose=False)
            client.predict(handle_file(path), api_name="/bring")
            connected.append(client)
        before, until, used = memory(process), time.monotonic() + seconds, []

        def come(number: int) -> None:
            dice = random.Random(number)
            own = [words for who, words in tasks if who == number]
            while time.monotonic() < until:
                minus, plus = words = dice.choice(own)
                start = time.perf_counter()
                try:
                    job = connected[number].submit("", list(minus), list(plus), PROMPT, *fields, api_name="/steer")
                    said = job.result()[-1]
                except Exception as error:  # noqa: BLE001
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                waits.append(time.perf_counter() - start)
                if not all(caption in said for caption in truth[number, words]):
                    wrong.append(said)

        threads = [threading.Thread(target=come, args=(number,)) for number in range(len(scenes))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            used.append(memory(process))
        for client in connected:
            client.close()
    third = len(used) // 3
    return {
        "clients": len(scenes),
        "answers": len(waits),
        "answers a second": len(waits) / seconds,
        "errors": len(errors),
        "mixed or wrong": len(wrong),
        "median wait, s": statistics.median(waits),
        "worst wait, s": max(waits),
        "memory before, MB": before,
        "memory, first third, MB": statistics.median(used[:third]),
        "memory, last third, MB": statistics.median(used[-third:]),
        "first error": (errors or wrong or [""])[0][:300],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--presses", type=int, default=20)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    with chromium() as browser:
        found |= opening(browser, options.rounds)
        with serve_demo() as (address, process):
            time.sleep(3)
            found |= pressing(browser, address, options.presses)
            found |= crowd(address, process.pid, options.clients, options.seconds)
    for name, value in found.items():
        print(f"{name:<32}{value:.3f}" if isinstance(value, float) else f"{name:<32}{value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
