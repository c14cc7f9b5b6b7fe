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
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
import psutil

from elude_steer import Steerer, toyland
from elude_steer.models.vlm import PROMPT

ADDED = ("teddy", "ball", "balloon", "cake", "cat", "umbrella", "clock")
PLACES = (("beach", "snow"), ("park", "desert"), ("room", "street"), ("street", "forest"), ("snow", "room"))


def make_edits(images, count):
    """Different edits: things that come, things of these scenes that leave, things and places that are replaced."""
    seen = Counter(thing.name for scene in images for thing in scene.things)
    common = [name for name, _ in seen.most_common(8)]
    made = [{"plus": [word]} for word in ADDED]
    made += [{"minus": [word]} for word in common[:4]]
    made += [{"minus": [old], "plus": [new], "strength": 1.25} for old, new in pairwise(common[3:])]
    made += [{"minus": [old], "plus": [new]} for old, new in PLACES]
    return made[:count]


def data_uri(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def library_answers(steerer, images, edits):
    """What the library answers by itself, image by image: `(image, edit)` to text; edit -1 is none."""
    wanted = {}
    for number, image in enumerate(images):
        wanted[number, -1] = steerer.vlm.caption([image])[0]
        for which, edit in enumerate(edits):
            wanted[number, which] = steerer.steer(image, baseline=False, **edit).caption
    return wanted


async def run_client(client, which, uris, edits, steered, end, done, offset):
    """One client in one window: a request after the other, until the time is over."""
    number = offset
    while time.monotonic() < end:
        image = number % len(uris)
        content = [{"type": "image_url", "image_url": {"url": uris[image]}}, {"type": "text", "text": PROMPT}]
        body = {"model": "toyland", "messages": [{"role": "user", "content": content}]}
        if steered:
            body["steer"] = edits[which]
        begin = time.monotonic()
        response = await client.post("/chat/completions", json=body)
        answer = response.json()
        text = answer["choices"][0]["message"]["content"] if response.status_code == 200 else response.text
        tokens = answer.get("usage", {}).get("completion_tokens", 0)
        done.append((image, which if steered else -1, text, time.monotonic() - begin, tokens))
        number += 1
    return number


async def run_windows(address, server, uris, edits, clients, seconds, windows):
    """Alternating windows; returns one row each: steered, seconds, CPU seconds, answers, memory."""
    rows, offsets = [], {True: [0] * clients, False: [0] * clients}
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        for window in range(-2, 2 * windows):  # the first two warm up
            # Of two neighbouring windows each kind comes first as often as the other.
            steered = (window % 2 == 0) ^ (window % 4 >= 2)
            done, begin, cpu = [], time.monotonic(), sum(server.cpu_times()[:2])
            jobs = [
                run_client(client, n, uris, edits, steered, begin + seconds / windows, done, offsets[steered][n] + n)
                for n in range(clients)
            ]
            ends = await asyncio.gather(*jobs)
            offsets[steered] = [end - n for n, end in enumerate(ends)]
            used = sum(server.cpu_times()[:2]) - cpu
            if window >= 0:
                rows.append((steered, time.monotonic() - begin, used, done, server.memory_info().rss))
    return rows


def start_server(port):
    """The server's process and address."""
    command = [sys.executable, "-m", "elude_steer", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            return process, found.group()
    raise SystemExit("the server did not start")


def describe(rows, wanted, edits, clients, memory):
    """The lines of the result."""
    kinds = {"with edits": True, "without": False}
    lines = ["| | with edits | without | ratio |", "|---|---|---|---|"]
    sums = {
        name: [
            sum(values)
            for values in zip(*((r[1], r[2], len(r[3]), sum(a[4] for a in r[3])) for r in rows if r[0] == kind))
        ]
        for name, kind in kinds.items()
    }
    (s1, c1, n1, t1), (s0, c0, n0, t0) = sums["with edits"], sums["without"]
    ratios = [
        (len(b[3]) / b[1]) / (len(a[3]) / a[1]) if b[0] else (len(a[3]) / a[1]) / (len(b[3]) / b[1])
        for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]
    delay = {k: median(a[3] for r in rows if r[0] == kind for a in r[3]) for k, kind in kinds.items()}
    lines += [
        f"| seconds | {s1:.0f} | {s0:.0f} | |",
        f"| answers | {n1:,} | {n0:,} | |",
        f"| answers a second | {n1 / s1:.1f} | {n0 / s0:.1f} | **{(n1 / s1) / (n0 / s0):.3f}** |",
        f"| the same, median of pairs of windows | | | {median(ratios):.3f} |",
        f"| tokens a second | {t1 / s1:.0f} | {t0 / s0:.0f} | {(t1 / s1) / (t0 / s0):.3f} |",
        f"| CPU milliseconds of the server an answer | {1000 * c1 / n1:.1f} | {1000 * c0 / n0:.1f} "
        f"| {(c0 / n0) / (c1 / n1):.3f} |",
        f"| median seconds to an answer | {delay['with edits']:.2f} | {delay['without']:.2f} | |",
    ]
    wrong = [(a, wanted[a[0], a[1]]) for row in rows for a in row[3] if a[2] != wanted[a[0], a[1]]]
    right = n1 + n0 - len(wrong)
    changed = sum(wanted[a[0], a[1]] != wanted[a[0], -1] for row in rows if row[0] for a in row[3])
    memories = [row[4] / 2**20 for row in rows]
    lines += [
        "",
        f"{clients} clients, {len(edits)} edits. {right:,} of {n1 + n0:,} answers are the library's own; "
        f"{changed:,} of the {n1:,} steered ones differ from the answer without the edit. Memory of the server after "
        f"each window, in MB: {', '.join(f'{one:.0f}' for one in memories)} (at the start {memory / 2**20:.0f}).",
    ]
    lines += [f"- image {a[0]}, edit {a[1]}: '{a[2]}', the library '{right}'" for a, right in wrong[:5]]
    return lines, len(wrong)


def main():
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
        load = run_windows(address, server, uris, edits, options.clients, options.seconds, options.windows)
        rows = asyncio.run(load)
        counts = httpx.get(address.removesuffix("/v1") + "/metrics").text
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    lines, wrong = describe(rows, wanted, edits, options.clients, memory)
    names = ("tower_images_total", "known_images_total", "batch_rows_count", "batch_rows_sum")
    found = {name: float(re.search(rf"^elude_steer_{name} (\S+)", counts, re.MULTILINE).group(1)) for name in names}
    lines += [
        "",
        f"The tower ran for {found['tower_images_total']:.0f} images; {found['known_images_total']:.0f} times an image "
        f"was known. A batch had {found['batch_rows_sum'] / found['batch_rows_count']:.1f} requests. The server ended "
        f"with code {code} after SIGTERM.",
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
