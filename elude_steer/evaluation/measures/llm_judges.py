"""LLM rank: vision-language judges decide which of two methods has the more coherent top images.

A judge is any endpoint that speaks OpenAI's protocol. Every answer is stored on disk as soon as it arrives, so an
interrupted run continues with the missing ones, and no question is asked twice.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from elude_steer.errors import SpecError
from elude_steer.utils import optional
from elude_steer.utils.files import read_bytes, write_file

CELL, SIDE = 336, 3  # pixels of an image in a grid, and images along its side
# Stored replies are found by this text: another wording asks everything again.
PROMPT = (
    "You see two grids, A and B. Each shows the nine pictures that one unit of a vision model responds to most. A "
    "grid is coherent if one property that you can name, such as an object, a part, a texture, a colour or a scene, is "
    "shared by its pictures. First describe in a sentence what the pictures of each grid have in common. Then decide "
    "which grid is more coherent. Answer with JSON and nothing else: "
    '{"reason_a": "...", "reason_b": "...", "answer": "A" or "B"}'
)
_GIVE_UP = 3  # failed calls in a row after which a judge is not asked any more
_MAX_STORED = 2**20  # bytes of a stored reply
_MAX_REPLY, _MAX_DEPTH = 20_000, 50  # characters and nested brackets; a reply of 256 tokens has far fewer


@dataclass(frozen=True)
class Judge:
    """A model behind an endpoint.

    Attributes:
        model: its name at the endpoint.
        url: the endpoint's address, including `/v1`.
        key: name of the environment variable that holds the API key; empty where none is needed.
    """

    model: str
    url: str
    key: str = ""


def read_judge(text: str) -> Judge:
    """Parse a judge from `MODEL@URL`, or from `MODEL@URL#VARIABLE` where an environment variable holds its key."""
    found = re.fullmatch(r"(.+?)@(https?://[^#\s]+)(?:#(\w+))?", text.strip())
    if found is None:
        raise SpecError(
            f"'{text}' is not a judge; write MODEL@URL or MODEL@URL#VARIABLE: qwen3-vl@http://localhost:8000/v1"
        )
    try:
        address = urlsplit(found[2])
        if not address.hostname or address.port == 0:
            raise ValueError("no host")
    except ValueError as error:
        raise SpecError(
            f"'{found[2]}' is not an address ({error}); write one such as http://localhost:8000/v1"
        ) from error
    return Judge(found[1], found[2], found[3] or "")


@dataclass(frozen=True, eq=False)
class Pair:
    """One unit of each of two methods.

    Attributes:
        one, other: the methods.
        grids: a grid of images of each.
        about: identifies the pair in reports.
    """

    one: str
    other: str
    grids: tuple[Image.Image, Image.Image]
    about: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer of one judge to one presentation of a pair.

    Attributes:
        judge: the judge's name.
        pair: number of the pair.
        swapped: whether the other method came first.
        winner: the method that the judge chose; None where the text contains no answer.
        text: the reply.
    """

    judge: str
    pair: int
    swapped: bool
    winner: str | None
    text: str


@dataclass(frozen=True)
class Ranking:
    """Win rates of methods.

    Attributes:
        rates: method -> share of its pairs that it won, among those with a winner.
        intervals: method -> 95 % interval of the rate.
        pairs: number of pairs.
        ties: pairs without a majority, which count for no method.
        wrong: judge -> replies that contain no answer.
        missing: judge -> questions without a reply; a further run asks them again.
    """

    rates: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    pairs: int
    ties: int
    wrong: Mapping[str, int]
    missing: Mapping[str, int]


def make_grid(images: Sequence[Any]) -> Image.Image:
    """Up to nine images, three by three; each is cropped to a square at its centre."""
    sheet = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    for number, image in enumerate(images[: SIDE * SIDE]):
        cell = ImageOps.fit(image.convert("RGB"), (CELL, CELL), Image.Resampling.BICUBIC)
        sheet.paste(cell, (number % SIDE * CELL, number // SIDE * CELL))
    return sheet


def read_answer(text: str) -> str | None:
    """A or B, from the last JSON object in a text that says so; None where there is none."""
    if _is_excessive(text or ""):
        return None
    decoder, answer, start = json.JSONDecoder(), None, (text or "").find("{")
    while start >= 0:
        try:
            content, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            letter = content.get("answer")
            if isinstance(letter, str) and letter.strip().upper() in ("A", "B"):
                answer = letter.strip().upper()
        start = text.find("{", end)
    return answer


def _is_excessive(text: str) -> bool:
    """Whether a reply is longer or nested more deeply than any answer."""
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", text[:_MAX_REPLY]):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return len(text) > _MAX_REPLY or deepest > _MAX_DEPTH


def ask_judges(
    judges: Sequence[Judge],
    pairs: Sequence[Pair],
    folder: Path,
    *,
    confirm: Callable[[int], object] = lambda count: None,
    log: Callable[[str], object] = lambda line: None,
    threads: int = 4,
    timeout: float = 120,
    retries: int = 5,
) -> list[Answer]:
    """Ask every judge about every pair, presented twice with sides swapped.

    Args:
        judges: the judges to ask.
        pairs: the pairs to ask about.
        folder: where replies are stored.
        confirm: called once with the number of questions left to ask, before the first; raise from it to stop.
        log: called with a line about each judge that is given up.
        threads: number of questions that are asked at the same time.
        timeout: seconds to wait for one reply.
        retries: how often to repeat a call that failed for a temporary reason.
    """
    openai = check_judges(judges)
    clients = [
        openai.OpenAI(base_url=judge.url, api_key=_find_key(judge), timeout=timeout, max_retries=retries)
        for judge in judges
    ]
    questions = [(j, n, swap) for j in range(len(judges)) for n in range(len(pairs)) for swap in (False, True)]
    images = [tuple(_encode_png(grid) for grid in pair.grids) for pair in pairs]

    def path(question: tuple[int, int, bool]) -> Path:
        judge, pair, swap = question
        first, second = images[pair][::-1] if swap else images[pair]
        content = json.dumps([judges[judge].model, judges[judge].url, PROMPT, first, second])
        return folder / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.json"

    left = [question for question in questions if _load_reply(path(question)) is None]
    confirm(len(left))
    failed, lock, waiting, stopped = Counter[int](), threading.Lock(), iter(left), threading.Event()
    bar = tqdm(total=len(left), desc="asking", unit=" questions", disable=None)

    def ask(question: tuple[int, int, bool]) -> None:
        judge, pair, swap = question
        if failed[judge] >= _GIVE_UP or path(question).exists():  # equal grids are one question
            return
        presented = images[pair][::-1] if swap else images[pair]
        try:
            text = _call(clients[judge], judges[judge].model, presented)
        except (openai.OpenAIError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            with lock:
                failed[judge] += 1
                if failed[judge] == _GIVE_UP:
                    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
                    if not isinstance(error, openai.OpenAIError):  # an HTML page, or other JSON
                        cause = (
                            f"it does not reply as a chat endpoint ({cause[:200]}); is the URL right? Most end in /v1"
                        )
                    log(f"judge '{judges[judge].model}' at {judges[judge].url} is not asked any more: {cause}")
            return
        failed[judge] = 0
        write_file(path(question), lambda file: file.write(json.dumps({"text": text}).encode()))

    problems: list[Exception] = []

    def work() -> None:
        while not stopped.is_set():
            with lock:
                question = next(waiting, None)
            if question is None:
                return
            try:
                ask(question)
            except Exception as error:  # noqa: BLE001 - raised again below: a full disk, for example
                problems.append(error)
                stopped.set()
            bar.update()

    # Daemon threads end with the process: an endpoint that hangs must not block a user who gives up.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    try:
        for thread in workers:
            thread.start()
        for thread in workers:
            while thread.is_alive():
                thread.join(0.2)
    finally:  # also after an interrupt in a notebook, where the process continues
        stopped.set()
        bar.close()
        for client in clients:
            client.close()
    if problems:
        raise problems[0]
    answers, names = [], judge_names(judges)
    for judge, pair, swap in questions:
        text = _load_reply(path((judge, pair, swap)))
        if text is not None:
            methods = (pairs[pair].one, pairs[pair].other)
            letter = read_answer(text)
            winner = None if letter is None else methods[(letter == "B") != swap]
            answers.append(Answer(names[judge], pair, swap, winner, text))
    return answers


def check_judges(judges: Sequence[Judge]) -> Any:
    """Import the client library; raises if it or a judge's key is missing, or if a judge is named twice."""
    openai = optional.require("openai", "the judge")
    if not judges:
        raise SpecError("there is no judge to ask; name one: --judge MODEL@URL.")
    for judge, count in Counter(judges).items():
        if count > 1:
            raise SpecError(f"judge '{judge.model}' at {judge.url} is named {count} times; once is enough.")
        _find_key(judge)
    return openai


def _load_reply(path: Path) -> str | None:
    """A stored reply; None where there is none. A damaged file is deleted, so that the question is asked again."""
    try:
        text = json.loads(read_bytes(path, _MAX_STORED))["text"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str) or _is_excessive(text):
        path.unlink()
        return None
    return text


def _find_key(judge: Judge) -> str:
    if not judge.key:
        return "none"  # the client requires a key, local endpoints do not
    if not os.environ.get(judge.key):
        raise SpecError(f"judge '{judge.model}' needs its key in the environment: export {judge.key}=…")
    return os.environ[judge.key]


def _encode_png(grid: Image.Image) -> str:
    data = io.BytesIO()
    grid.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def _call(client: Any, model: str, images: Sequence[str]) -> str:
    content: list[dict[str, Any]] = []
    for letter, image in zip("AB", images, strict=True):
        content.append({"type": "text", "text": f"Grid {letter}:"})
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}})
    content.append({"type": "text", "text": PROMPT})
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, seed=42, max_tokens=256
    )
    if not reply.choices:
        raise ValueError("the reply has no choices")
    text = str(reply.choices[0].message.content or "")
    if _is_excessive(text):  # raised, so that it is not stored
        raise ValueError(f"the reply is too long or nested too deeply ({len(text):,} characters)")
    return text


def rank_methods(
    judges: Sequence[Judge], pairs: Sequence[Pair], answers: Sequence[Answer], *, rounds: int = 1000, seed: int = 0
) -> Ranking:
    """Win rates from answers: a pair goes to the method that most answers name, of all judges and both presentations.

    A judge that always names the first grid says nothing about a pair, and its two answers cancel. Three judges cannot
    tie in one presentation; in a pair they can.
    """
    votes: dict[int, Counter[str]] = {}
    for answer in answers:
        if answer.winner is not None:
            votes.setdefault(answer.pair, Counter())[answer.winner] += 1
    games: list[tuple[str, str]] = []  # winner and loser
    ties = 0
    for number, counted in sorted(votes.items()):
        (first, count), *rest = counted.most_common()
        if rest and rest[0][1] == count:
            ties += 1
            continue
        pair = pairs[number]
        games.append((first, pair.other if first == pair.one else pair.one))
    methods = sorted({name for pair in pairs for name in (pair.one, pair.other)})
    won = np.array([[winner == name for name in methods] for winner, _ in games], dtype=float).reshape(-1, len(methods))
    played = np.array([[name in game for name in methods] for game in games], dtype=float).reshape(-1, len(methods))
    rates = _win_rates(won.sum(0), played.sum(0))
    low, high = rates.copy(), rates.copy()
    if games:
        drawn = np.random.default_rng(seed).multinomial(len(games), [1 / len(games)] * len(games), rounds)
        spread = _win_rates(drawn @ won, drawn @ played)  # (rounds, methods)
        has_rate = ~np.isnan(rates)
        low[has_rate], high[has_rate] = np.nanquantile(spread[:, has_rate], [0.025, 0.975], axis=0)
    replies, wrong = Counter(a.judge for a in answers), Counter(a.judge for a in answers if a.winner is None)
    names = judge_names(judges)
    return Ranking(
        {name: float(rate) for name, rate in zip(methods, rates, strict=True)},
        {name: (float(a), float(b)) for name, a, b in zip(methods, low, high, strict=True)},
        len(pairs),
        ties,
        {name: wrong[name] for name in names},
        {name: 2 * len(pairs) - replies[name] for name in names},
    )


def _win_rates(won: np.ndarray, played: np.ndarray) -> np.ndarray:
    """Share of games that each method won; NaN for a method that played none."""
    return np.where(played > 0, won / np.maximum(played, 1), np.nan)


def judge_names(judges: Sequence[Judge]) -> list[str]:
    """Names for reports: the model, with its address where the same model is asked at several addresses."""
    models = Counter(judge.model for judge in judges)
    return [judge.model if models[judge.model] == 1 else f"{judge.model}@{judge.url}" for judge in judges]
