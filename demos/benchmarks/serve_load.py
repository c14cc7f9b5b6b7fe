"""Load on `elude-steer serve`: clients with different edits, beside the same server without edits.

    python demos/benchmarks/serve_load.py --seconds 60 --out demos/results/serve_load.md

A server runs in a process of its own. Clients send one request after the other, each with its own edit, in windows that
alternate with windows in which they send the same images without an edit, so that what else the machine does hits both
alike. Every answer is compared with the library's own: `Steerer.steer` for that image and edit alone.
"""

import argparse
import asyncio
import base64
import io
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx2
import psutil

from elude_steer import Steerer, toyland
from elude_steer.models.vlm import PROMPT

Edit = dict[str, Any]
ADDED = ("teddy", "ball", "balloon", "cake", "cat", "umbrella", "clock")
PLACES = (("beach", "snow"), ("park", "desert"), ("room", "street"), ("street", "forest"), ("snow", "room"))


class Reply(NamedTuple):
    """An answer: the numbers of its image and edit (-1 is none), its text, and what it took."""

    image: int
    edit: int
    text: str
    seconds: float
    tokens: int


class Window(NamedTuple):
    """What happened in a window: seconds of the clock and of the server's CPU, and its memory at the end."""

    steered: bool
    seconds: float
    cpu: float
    replies: list[Reply]
    memory: int

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.replies) / self.seconds


def make_edits(scenes: Sequence[toyland.Scene], count: int) -> list[Edit]:
    """Different edits: things that come, things of these scenes that leave, things and places that are replaced."""
    seen = Counter(thing.name for scene in scenes for thing in scene.things)
    common = [name for name, _ in seen.most_common(8)]
    made = [{"plus": [word]} for word in ADDED]
    made += [{"minus": [word]} for word in common[:4]]
    made += [{"minus": [old], "plus": [new], "strength": 1.25} for old, new in pairwise(common[3:])]
    made += [{"minus": [old], "plus": [new]} for old, new in PLACES]
    return made[:count]


def data_uri(image: Any) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def library_answers(steerer: Steerer, images: Sequence[Any], edits: Sequence[Edit]) -> dict[tuple[int, int], str]:
    """What the library answers by itself, image by image: `(image, edit)` to text; edit -1 is none."""
    wanted = {}
    for number, image in enumerate(images):
        wanted[number, -1] = steerer.vlm.caption([image])[0]
        for which, edit in enumerate(edits):
            wanted[number, which] = steerer.steer(image, baseline=False, **edit).caption
    return wanted


async def run_client(
    client: httpx2.AsyncClient,
    body: dict[str, Any],
    uris: Sequence[str],
    which: int,
    end: float,
    done: list,
    number: int,
) -> int:
    """One client in one window: a request after the other, until the time is over."""
    while time.monotonic() < end:
        image = number % len(uris)
        content = [{"type": "image_url", "image_url": {"url": uris[image]}}, {"type": "text", "text": PROMPT}]
        begin, messages = time.monotonic(), [{"role": "user", "content": content}]
        response = await client.post("/chat/completions", json={"model": "toyland", "messages": messages, **body})
        answer = response.json()
        text = answer["choices"][0]["message"]["content"] if response.status_code == 200 else response.text
        tokens = answer.get("usage", {}).get("completion_tokens", 0)
        done.append(Reply(image, which, text, time.monotonic() - begin, tokens))
        number += 1
    return number


async def run_windows(
    address: str, server: psutil.Process, uris: Sequence[str], edits: Sequence[Edit], seconds: float, windows: int
) -> list[Window]:
    """Alternating windows with and without edits, a client for each edit."""
    rows, numbers = [], {kind: list(range(len(edits))) for kind in (True, False)}  # the next image of each client
    limits = httpx2.Limits(max_connections=len(edits))
    async with httpx2.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        for window in range(-2, 2 * windows):  # the first two warm up
            # Of two neighbouring windows each kind comes first as often as the other.
            steered = (window % 2 == 0) ^ (window % 4 >= 2)
            done, begin, cpu = [], time.monotonic(), sum(server.cpu_times()[:2])
            end = begin + seconds / windows
            jobs = [
                run_client(client, {"steer": edit}, uris, n, end, done, number)
                if steered
                else run_client(client, {}, uris, -1, end, done, number)
                for n, (edit, number) in enumerate(zip(edits, numbers[steered], strict=True))
            ]
            numbers[steered] = await asyncio.gather(*jobs)
            used = sum(server.cpu_times()[:2]) - cpu
            if window >= 0:
                rows.append(Window(steered, time.monotonic() - begin, used, done, server.memory_info().rss))
    return rows


def start_server(port: int) -> tuple[subprocess.Popen[str], str]:
    """The server's process and address."""
    command = [sys.executable, "-m", "elude_steer", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            return process, found.group()
    raise SystemExit("the server did not start")


def describe(
    rows: Sequence[Window], wanted: dict[tuple[int, int], str], edits: int, memory: int
) -> tuple[list[str], int]:
    """The lines of the result, and how many answers are not the library's."""
    steered, bare = ([row for row in rows if row.steered is kind] for kind in (True, False))
    values = []
    for kind in (steered, bare):
        replies = [reply for row in kind for reply in row.replies]
        seconds, count = sum(row.seconds for row in kind), len(replies)
        tokens, cpu = sum(reply.tokens for reply in replies), sum(row.cpu for row in kind)
        delay = median(reply.seconds for reply in replies)
        values.append((seconds, count, count / seconds, tokens / seconds, count / cpu, 1000 * cpu / count, delay))
    pairs = [row.rate / other.rate for row, other in zip(steered, bare, strict=True)]
    (s1, n1, r1, t1, c1, m1, d1), (s0, n0, r0, t0, c0, m0, d0) = values
    lines = [
        "| | with edits | without | ratio |",
        "|---|---|---|---|",
        f"| seconds | {s1:.0f} | {s0:.0f} | |",
        f"| answers | {n1:,} | {n0:,} | |",
        f"| answers a second | {r1:.1f} | {r0:.1f} | **{r1 / r0:.3f}** |",
        f"| the same, median of {len(pairs)} pairs of windows | | | {median(pairs):.3f} |",
        f"| tokens a second | {t1:.0f} | {t0:.0f} | {t1 / t0:.3f} |",
        f"| answers for a CPU second of the server | {c1:.1f} | {c0:.1f} | {c1 / c0:.3f} |",
        f"| CPU milliseconds of the server an answer | {m1:.1f} | {m0:.1f} | |",
        f"| median seconds to an answer | {d1:.2f} | {d0:.2f} | |",
    ]
    replies = [reply for row in rows for reply in row.replies]
    wrong = [reply for reply in replies if reply.text != wanted[reply.image, reply.edit]]
    changed = sum(wanted[one.image, one.edit] != wanted[one.image, -1] for row in steered for one in row.replies)
    memories = ", ".join(f"{row.memory / 2**20:.0f}" for row in rows)
    lines += [
        "",
        f"{edits} clients send requests to `elude-steer serve` with toyland's atlas, each with its own edit. "
        f"{len(replies) - len(wrong):,} of {len(replies):,} answers are the library's own; {changed:,} of the {n1:,} "
        "steered answers differ from those without the edit: many edits remove something that their image does not "
        f"show. Memory of the server after each window, in MB: {memories} (at the start {memory / 2**20:.0f}).",
    ]
    lines += [f"- image {o.image}, edit {o.edit}: '{o.text}', not '{wanted[o.image, o.edit]}'" for o in wrong[:5]]
    return lines, len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20, help="at most 20, each with an edit of its own")
    parser.add_argument("--seconds", type=float, default=60, help="of load with edits, and as many without")
    parser.add_argument("--windows", type=int, default=6, help="of each kind")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    steerer = Steerer.load("toyland", threads=1)
    scenes = list(toyland.scenes(seed=50_002, n=options.images))
    images, edits = [scene.image for scene in scenes], make_edits(scenes, options.clients)
    wanted = library_answers(steerer, images, edits)
    process, address = start_server(options.port)
    try:
        server = psutil.Process(process.pid)
        memory = server.memory_info().rss
        uris = [data_uri(image) for image in images]
        rows = asyncio.run(run_windows(address, server, uris, edits, options.seconds, options.windows))
        counts = httpx2.get(address.removesuffix("/v1") + "/metrics").text
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    lines, wrong = describe(rows, wanted, len(edits), memory)
    names = ("tower_images_total", "known_images_total", "batch_rows_count", "batch_rows_sum")
    found = {name: float(re.search(rf"^elude_steer_{name} (\S+)", counts, re.MULTILINE).group(1)) for name in names}
    lines += [
        "",
        f"The tower ran for {found['tower_images_total']:.0f} images; in {found['known_images_total']:,.0f} requests "
        "the image was known already. A batch had "
        f"{found['batch_rows_sum'] / found['batch_rows_count']:.1f} requests. The server ended with code {code} after "
        "SIGTERM.",
        "",
        f"`python demos/benchmarks/serve_load.py {' '.join(sys.argv[1:])}`, scenes of seed 50,002, Python "
        f"{platform.python_version()}, one thread of torch.",
    ]
    text = "\n".join(["# Load on the server", "", *lines, ""])
    print(text)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    sys.exit(1 if wrong or code else 0)


if __name__ == "__main__":
    main()
