"""LLM rank: vision-language judges say which of two methods' top pictures belong together better.

Judges stand behind any endpoint that speaks OpenAI's protocol. Every answer is kept on disk as soon as it comes, so a
run that ends half way goes on with what is missing, and nothing is asked twice.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from elude_steer.errors import SpecError
from elude_steer.utils import optional
from elude_steer.utils.files import write_file

CELL, SIDE = 336, 3  # pixels of a picture in a grid, and pictures along its side
PROMPT = (
    "You see two grids, A and B. Each shows the nine pictures that one unit of a vision model responds to most. A "
    "grid is coherent if one property that you can name, such as an object, a part, a texture, a colour or a scene, is "
    "shared by its pictures. First describe in a sentence what the pictures of each grid have in common. Then decide "
    "which grid is more coherent. Answer with JSON and nothing else: "
    '{"reason_a": "...", "reason_b": "...", "answer": "A" or "B"}'
)
_GIVE_UP = 3  # calls in a row that fail, after which a judge is left alone


@dataclass(frozen=True)
class Judge:
    """A model behind an endpoint.

    Attributes:
        model: its name there.
        url: of the endpoint, up to and with `/v1`.
        key: the name of the environment variable that holds its key; empty where none is needed.
    """

    model: str
    url: str
    key: str = ""


@dataclass(frozen=True, eq=False)
class Pair:
    """One unit of each of two methods.

    Attributes:
        one, other: the methods.
        grids: their pictures, a grid each.
        about: tells it from others in reports.
    """

    one: str
    other: str
    grids: tuple[Image.Image, Image.Image]
    about: str = ""


@dataclass(frozen=True)
class Answer:
    """What one judge said of one presentation.

    Attributes:
        judge: its name.
        pair: number of the pair.
        swapped: whether the other method stood first.
        winner: the method that it chose; None where what it said is no answer.
        text: what it said.
    """

    judge: str
    pair: int
    swapped: bool
    winner: str | None
    text: str


@dataclass(frozen=True)
class Ranking:
    """What judges think.

    Attributes:
        rates: method -> share of the presentations it won, of those with a winner.
        intervals: of each, 95 %.
        presentations: how many there were.
        ties: presentations without a majority, which count for nobody.
        wrong: answers that are none, by judge.
        missing: questions without an answer, by judge; a further run asks them again.
    """

    rates: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    presentations: int
    ties: int
    wrong: Mapping[str, int]
    missing: Mapping[str, int]


def picture_grid(pictures: Sequence[Any]) -> Image.Image:
    """Up to nine pictures, three by three; each is cut to a square in its middle."""
    sheet = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    for number, picture in enumerate(pictures[: SIDE * SIDE]):
        cell = ImageOps.fit(picture.convert("RGB"), (CELL, CELL), Image.Resampling.BICUBIC)
        sheet.paste(cell, (number % SIDE * CELL, number // SIDE * CELL))
    return sheet


def read_answer(text: str) -> str | None:
    """A or B, from JSON somewhere in a text, the last that says so; None where there is none."""
    decoder, answer, at = json.JSONDecoder(), None, (text or "").find("{")
    while at >= 0:
        try:
            said, end = decoder.raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            given = said.get("answer")
            if isinstance(given, str) and given.strip().upper() in ("A", "B"):
                answer = given.strip().upper()
        at = text.find("{", end)
    return answer


def ask(
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
    """Every judge's answer to every pair, shown twice with sides swapped.

    Args:
        judges: who is asked.
        pairs: what they are asked about.
        folder: where answers are kept.
        confirm: called once with the number of questions left to ask, before the first; raise from it to stop.
        log: called with a line about each judge that is given up.
        threads: questions at a time.
        timeout: seconds for one answer.
        retries: how often a call that fails for a passing reason is made again.
    """
    openai = check_judges(judges)
    clients = [
        openai.OpenAI(base_url=judge.url, api_key=_key(judge), timeout=timeout, max_retries=retries) for judge in judges
    ]
    questions = [(j, n, swap) for j in range(len(judges)) for n in range(len(pairs)) for swap in (False, True)]
    images = [tuple(_encoded(grid) for grid in pair.grids) for pair in pairs]

    def path(question: tuple[int, int, bool]) -> Path:
        judge, pair, swap = question
        one, other = images[pair][::-1] if swap else images[pair]
        asked = json.dumps([judges[judge].model, judges[judge].url, PROMPT, one, other])
        return folder / f"{hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}.json"

    left = [question for question in questions if _kept(path(question)) is None]
    confirm(len(left))
    failed, lock, waiting, stopped = Counter[int](), threading.Lock(), iter(left), threading.Event()
    bar = tqdm(total=len(left), desc="asking", unit=" questions", disable=None)

    def one(question: tuple[int, int, bool]) -> None:
        judge, pair, swap = question
        if failed[judge] >= _GIVE_UP or path(question).exists():  # equal grids are one question
            return
        shown = images[pair][::-1] if swap else images[pair]
        try:
            text = _call(clients[judge], judges[judge].model, shown)
        except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            with lock:
                failed[judge] += 1
                if failed[judge] == _GIVE_UP:
                    why = str(error).splitlines()[0] if str(error) else type(error).__name__
                    if not isinstance(error, openai.OpenAIError):  # a page of HTML, JSON of another kind
                        why = f"it does not answer as a chat endpoint does ({why}); is the URL right? Most end in /v1"
                    log(f"judge '{judges[judge].model}' at {judges[judge].url} is left alone from now on: {why}")
            return
        failed[judge] = 0
        write_file(path(question), lambda file: file.write(json.dumps({"text": text}).encode()))

    def work() -> None:
        while not stopped.is_set():
            with lock:
                question = next(waiting, None)
            if question is None:
                return
            one(question)
            bar.update()

    # Threads that end with the process: an endpoint that hangs must not keep anybody who gives up waiting.
    crew = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    try:
        for thread in crew:
            thread.start()
        for thread in crew:
            while thread.is_alive():
                thread.join(0.2)
    finally:  # also after an interrupt in a notebook, where the process goes on
        stopped.set()
        bar.close()
        for client in clients:
            client.close()
    found, names = [], names_of(judges)
    for judge, pair, swap in questions:
        text = _kept(path((judge, pair, swap)))
        if text is not None:
            methods = (pairs[pair].one, pairs[pair].other)
            letter = read_answer(text)
            winner = None if letter is None else methods[(letter == "B") != swap]
            found.append(Answer(names[judge], pair, swap, winner, text))
    return found


def check_judges(judges: Sequence[Judge]) -> Any:
    """The client's library; raises where it, or the key of a judge, is missing, or where one is named twice."""
    openai = optional.require("openai", "the judge")
    if not judges:
        raise SpecError("nobody to ask; name a judge: --judge MODEL@URL.")
    for judge, count in Counter(judges).items():
        if count > 1:
            raise SpecError(f"judge '{judge.model}' at {judge.url} is named {count} times; once is enough.")
        _key(judge)
    return openai


def _kept(path: Path) -> str | None:
    """An answer that was kept; None where there is none, or a damaged file, which is asked for again."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["text"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        path.unlink()
        return None


def _key(judge: Judge) -> str:
    if not judge.key:
        return "none"  # the client wants one, endpoints of one's own do not
    if not os.environ.get(judge.key):
        raise SpecError(f"judge '{judge.model}' wants its key in the environment: export {judge.key}=…")
    return os.environ[judge.key]


def _encoded(grid: Image.Image) -> str:
    data = io.BytesIO()
    grid.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def _call(client: Any, model: str, images: Sequence[str]) -> str:
    content: list[dict[str, Any]] = []
    for letter, image in zip("AB", images, strict=True):
        content.append({"type": "text", "text": f"Grid {letter}:"})
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}})
    content.append({"type": "text", "text": PROMPT})
    said = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, seed=42, max_tokens=256
    )
    if not said.choices:
        raise ValueError("it gives no choices")
    return str(said.choices[0].message.content or "")


def rank(
    judges: Sequence[Judge], pairs: Sequence[Pair], answers: Sequence[Answer], *, rounds: int = 1000, seed: int = 0
) -> Ranking:
    """Win rates from answers: in each presentation the method that most judges chose wins."""
    votes: dict[tuple[int, bool], Counter[str]] = {}
    for answer in answers:
        if answer.winner is not None:
            votes.setdefault((answer.pair, answer.swapped), Counter())[answer.winner] += 1
    games: list[tuple[str, str]] = []  # winner and loser
    of: list[int] = []  # whose pair
    ties = 0
    for (number, _), counted in sorted(votes.items()):
        (first, most), *rest = counted.most_common()
        if rest and rest[0][1] == most:
            ties += 1
            continue
        pair = pairs[number]
        games.append((first, pair.other if first == pair.one else pair.one))
        of.append(number)
    methods = sorted({name for pair in pairs for name in (pair.one, pair.other)})
    won = np.array([[winner == name for name in methods] for winner, _ in games], dtype=float).reshape(-1, len(methods))
    played = np.array([[name in game for name in methods] for game in games], dtype=float).reshape(-1, len(methods))
    rates = _rates(won.sum(0), played.sum(0))
    low, high = rates.copy(), rates.copy()
    if games:  # whole pairs are drawn: the two presentations of one show the same grids
        shown, at = np.unique(of, return_inverse=True)
        drawn = np.random.default_rng(seed).multinomial(len(shown), [1 / len(shown)] * len(shown), rounds)[:, at]
        spread = _rates(drawn @ won, drawn @ played)  # (rounds, methods)
        known = ~np.isnan(rates)
        low[known], high[known] = np.nanquantile(spread[:, known], [0.025, 0.975], axis=0)
    asked, wrong = Counter(a.judge for a in answers), Counter(a.judge for a in answers if a.winner is None)
    names = names_of(judges)
    return Ranking(
        {name: float(rate) for name, rate in zip(methods, rates, strict=True)},
        {name: (float(a), float(b)) for name, a, b in zip(methods, low, high, strict=True)},
        2 * len(pairs),
        ties,
        {name: wrong[name] for name in names},
        {name: 2 * len(pairs) - asked[name] for name in names},
    )


def _rates(won: np.ndarray, played: np.ndarray) -> np.ndarray:
    """Shares of games that were won; NaN for who played none."""
    return np.where(played > 0, won / np.maximum(played, 1), np.nan)


def names_of(judges: Sequence[Judge]) -> list[str]:
    """What judges are called: by their model, and by their address too where one model is asked at several."""
    models = Counter(judge.model for judge in judges)
    return [judge.model if models[judge.model] == 1 else f"{judge.model}@{judge.url}" for judge in judges]
