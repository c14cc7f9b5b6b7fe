"""The demo's page: time until it is usable, time of an edit, and a load test with twenty clients for a minute.

    python demos/benchmarks/demo.py [--rounds 5] [--presses 20] [--clients 20] [--seconds 60] [--json OUT]

Needs the extras `demo` and `test`, and Debian's chromium. Processes of the demo and of the bare imports alternate, so
that both run under the same conditions. Every answer to a client is compared with the library's own answer.
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

IMPORTS = (
    "import torch, gradio, sentence_transformers; from transformers import LlavaOnevisionForConditionalGeneration; "
    "from gradio import networking"
)
WORDS = {"cats": ("cat", "tablecloth"), "dog": ("dog", "motorcycle"), "teddy": ("teddy", "chair"), "train": ("train",)}


def measure_start(browser: Any, rounds: int) -> dict[str, float]:
    """Seconds from the start of the process to a usable page, and of the bare imports."""
    bare, ready = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
        bare.append(time.perf_counter() - start)
        start = time.perf_counter()
        with serve_demo("--atlas", "toyland") as (address, _):
            visitor = Visitor(browser, address)
            visitor.page.locator("#press").click(trial=True)  # waits until the button can be clicked
            ready.append(time.perf_counter() - start)
            visitor.close()
    # Without the first round, which fills the disk cache.
    beyond = [page - imports for page, imports in zip(ready[1:], bare[1:], strict=True)]
    return {
        "bare imports, s": statistics.median(bare[1:]),
        "process to usable page, s": statistics.median(ready[1:]),
        "beyond the imports, s": statistics.median(beyond),
        "beyond the imports, worst, s": max(beyond),
    }


# The page itself measures the time from the click to the frame that shows the steered caption.
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


def measure_edits(browser: Any, address: str, presses: int) -> dict[str, float]:
    """Seconds from the click to the steered caption in the browser, including the first click on a new page."""
    visitor, seconds = Visitor(browser, address), []
    for number in range(presses):
        name = EXAMPLES[number % len(EXAMPLES)]
        visitor.example(name)
        words = WORDS.get(name, ("dog",))
        visitor.words("minus", words[number // len(EXAMPLES) % len(words)])
        visitor.words("plus", *(["biker"] if number % 2 else []))
        seconds.append(visitor.page.evaluate(CLICK))
        visitor.page.wait_for_timeout(300)
    visitor.close()
    return {
        "click to captions, median, s": statistics.median(seconds),
        "worst, s": max(seconds),
        "first, s": seconds[0],
    }


def resident_megabytes(process: int) -> float:
    """Resident memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def measure_load(address: str, process: int, clients: int, seconds: float, seed: int = 91) -> dict[str, object]:
    """Let several clients send edits all the time, each with its own image and concepts."""
    from gradio_client import Client, handle_file

    steerer = Steerer.load("toyland")
    fields = Presenter(steerer).field_values()
    scenes = [scene for scene in toyland.scenes(seed=seed, n=3 * clients) if len(scene.objects) >= 2][:clients]
    tasks, truth = [], {}
    for number, scene in enumerate(scenes):
        for minus, plus in (((scene.objects[0],), ()), ((scene.objects[1],), ("biker",)), (scene.objects[:2], ())):
            words = (tuple(minus), tuple(plus))
            plan, _ = steerer.prepare_plan(minus, plus)
            truth[number, words] = mark_changes(steerer.explain(scene.image, plan))["steered"]
            tasks.append((number, words))
    errors: list[str] = []
    wrong: list[str] = []
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        connections = []
        for number, scene in enumerate(scenes):
            path = Path(folder) / f"{number}.png"
            scene.image.save(path)
            client = Client(address, verbose=False)
            client.predict(handle_file(path), "", "", [], [], PROMPT, *fields, api_name="/bring")
            connections.append(client)
        before, end, used = resident_megabytes(process), time.monotonic() + seconds, []

        def run_client(number: int) -> None:
            rng = random.Random(number)
            edits = [words for client, words in tasks if client == number]
            while time.monotonic() < end:
                minus, plus = words = rng.choice(edits)
                start = time.perf_counter()
                try:
                    job = connections[number].submit("", list(minus), list(plus), PROMPT, *fields, api_name="/press")
                    answer = job.result()[-1]
                except Exception as error:  # noqa: BLE001
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                waits.append(time.perf_counter() - start)
                if f"<p>{truth[number, words]}</p>" not in answer:
                    wrong.append(answer)

        threads = [threading.Thread(target=run_client, args=(number,)) for number in range(len(scenes))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            used.append(resident_megabytes(process))
        for client in connections:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--presses", type=int, default=20)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    with chromium() as browser:
        found |= measure_start(browser, options.rounds)
        with serve_demo("--atlas", "toyland") as (address, process):
            time.sleep(3)
            found |= measure_edits(browser, address, options.presses)
            found |= measure_load(address, process.pid, options.clients, options.seconds)
    for name, value in found.items():
        print(f"{name:<32}{value:.3f}" if isinstance(value, float) else f"{name:<32}{value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
