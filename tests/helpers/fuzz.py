"""Files of strangers: each loader gets changed copies of good files, and must refuse them in its own words or be right.

The tests run a few hundred cases; `demos/benchmarks/fuzz.py` runs as many as one likes. A case is made from its seed
alone, so that `make_case(loader, seed)` makes a failing one again.
"""

import base64
import io
import json
import random
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from elude_steer.errors import EludeSteerError

SECONDS = 10.0  # of CPU time, after which a case counts as a hang
ROOT = Path(__file__).parents[2]
TOKENS = {
    "yaml": (
        b"\\U00110000", b"\\UFFFFFFFF", b'"\\0"', b"\0", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ",
        b"? ", b"- ", b"[", b"{", b"\xff", b"\n", b"\t", b"None", b"null", b"1e400", b"9" * 400, b"0x10",
        b"on", b"~", b"|\n", b"%YAML 9\n", b"---\n", b'"\\ud800"', "\u2028".encode(), b"[" * 500,
        b"{a: " * 300, b"x" * 2000, b"../../etc/passwd",
    ),
    "json": (
        b"[", b"{", b"]", b"}", b'"', b",", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999",
        b"9" * 5000, b"\0", b"\xff", b'"\\ud800"', b'"../../etc/passwd"', b'"/etc/passwd"', b"[" * 3000,
        b'{"a":' * 3000, b'"' + b"x" * 3000 + b'"', b"1.5", b'"a\\u0000b"', b'{"answer": "B"}', b"{}", b"[]",
    ),
    "image": (
        b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\0", b"IEND", b"IDAT", b"zTXt", b"eXIf", b"\xff\xd8",
        b"\xff\xd9", b"P3\n", b"P6\n", b"P7\n", b"II*\0", b"MM\0*", b"RIFF", b"WEBP", b"ftypavif", b"DDS ",
        b"qoif", b"%!PS", b"GIF89a",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """What is attacked: good files, pieces that are put into them, and the function that must survive.

    Attributes:
        corpus: makes the good files.
        tokens: the pieces.
        load: reads one file, given as bytes, in an empty folder; raises what it raises.
    """

    corpus: Callable[[], list[bytes]]
    tokens: tuple[bytes, ...]
    load: Callable[[bytes, Path], object]


@dataclass
class Outcome:
    """What happened to the cases of a loader."""

    cases: int = 0
    refused: int = 0
    accepted: int = 0
    tracebacks: list[tuple[str, str]] = field(default_factory=list)  # seed and text
    hangs: list[str] = field(default_factory=list)  # seeds
    peak_mb: float = 0.0
    seconds: float = 0.0


class Hang(BaseException):
    """A case took too long."""


def mutate(data: bytes, rng: random.Random, tokens: tuple[bytes, ...]) -> bytes:
    """A copy of a file with one to four changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 2, 4, 16, 200)))
        kind = rng.randrange(6)
        if kind == 0:  # other bytes
            data = data[:start] + rng.randbytes(end - start) + data[end:]
        elif kind == 1:  # cut out
            data = data[:start] + data[end:]
        elif kind == 2:  # cut off
            data = data[:start] if rng.random() < 0.3 else data
        elif kind == 3:  # repeated
            data = data[:end] + data[start:end] * rng.choice((1, 3, 50)) + data[end:]
        else:  # a piece that means something
            data = data[:start] + rng.choice(tokens) + data[end if kind == 4 else start :]
    return data


def make_case(loader: Loader, seed: str) -> bytes:
    """The file of a seed."""
    rng = random.Random(seed)
    return mutate(rng.choice(loader.corpus()), rng, loader.tokens) if loader.corpus() else seed.encode()


def fuzz(name: str, cases: int, folder: Path, seed: int = 0) -> Outcome:
    """Run the cases `SEED-0` to `SEED-(cases-1)` of a loader."""
    loader, outcome = LOADERS[name], Outcome(cases)
    previous = signal.signal(signal.SIGVTALRM, _stop)
    begin = time.process_time()
    try:
        for number in range(cases):
            _run_case(loader, f"{seed}-{number}", folder / "case", outcome)
    finally:
        signal.signal(signal.SIGVTALRM, previous)
    outcome.seconds = time.process_time() - begin
    outcome.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return outcome


def _stop(*_: object) -> None:
    raise Hang


def _run_case(loader: Loader, seed: str, folder: Path, outcome: Outcome) -> None:
    data = make_case(loader, seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader.load(data, folder)
        outcome.accepted += 1
    except Hang:
        outcome.hangs.append(seed)
    except EludeSteerError as error:
        if _is_clear(str(error)):
            outcome.refused += 1
        else:
            outcome.tracebacks.append((seed, f"unclear: {str(error)[:300]!r}"))
    except Exception:  # noqa: BLE001 - what is looked for
        outcome.tracebacks.append((seed, traceback.format_exc()))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _is_clear(text: str) -> bool:
    """Whether a message can be printed, says something and is not endless."""
    lines = text.splitlines()
    return 0 < len(lines) <= 60 and all(line.isprintable() and len(line) < 1000 for line in lines)


# Recipes and specs


@cache
def _documents(kind: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "recipes" / kind).rglob("*.yaml"))][:8]


def _load_recipe(data: bytes, folder: Path) -> None:
    from elude_steer.recipe_files import check_files, load_recipe, parse_recipe
    from elude_steer.utils.yaml_schema import dump_document

    (folder / "case.yaml").write_bytes(data)
    recipe = load_recipe(folder / "case.yaml")
    assert parse_recipe(dump_document(recipe)) == recipe
    check_files(recipe)


def _load_spec(data: bytes, folder: Path) -> None:
    from elude_steer.recipe_files import load_spec, parse_spec
    from elude_steer.utils.yaml_schema import dump_document

    (folder / "case.yaml").write_bytes(data)
    spec = load_spec(folder / "case.yaml")
    assert parse_spec(dump_document(spec)) == spec


# Images


@cache
def _images() -> list[bytes]:
    import numpy as np
    from PIL import Image

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 20, 3), np.uint8))
    files = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "AVIF", "QOI", "DDS", "TGA", "ICO", "JPEG2000"):
        data = io.BytesIO()
        try:
            noise.save(data, kind)
        except (KeyError, OSError, ValueError):  # this Pillow does not write it
            continue
        files.append(data.getvalue())
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({"exif": exif}, {"progressive": True}):
        data = io.BytesIO()
        noise.save(data, "JPEG", **options)
        files.append(data.getvalue())
    deep = io.BytesIO()
    Image.fromarray(np.arange(480, dtype=np.uint16).reshape(24, 20) * 100).save(deep, "PNG")
    text = b"a\0\0" + zlib.compress(bytes(5_000_000))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    files += [deep.getvalue(), deep.getvalue()[:33] + chunk + deep.getvalue()[33:]]
    return [*files, b"P3\n3 2\n255\n" + b" ".join(b"%d" % i for i in range(18)) + b"\n"]


def _load_image(data: bytes, folder: Path) -> None:
    from elude_steer.models.images import open_image

    (folder / "case").write_bytes(data)
    image = open_image(folder / "case")
    assert image.mode == "RGB" and image.width * image.height > 0
    image.getpixel((image.width - 1, image.height - 1))


# COCO


@cache
def _coco() -> list[bytes]:
    classes = ("person", "dog", "cat", "hot dog")
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 100, "height": 80} for n in range(4)],
        "annotations": [{"image_id": n % 4, "category_id": n % 3, "area": 900.5 + n} for n in range(12)],
        "categories": [{"id": n, "name": name} for n, name in enumerate(classes)],
    }
    return [json.dumps(content).encode(), json.dumps(content, indent=1).encode()]


def _load_coco(data: bytes, folder: Path) -> None:
    from elude_steer.evaluation.edits.coco import coco_world

    (folder / "images").mkdir()
    for number in range(4):
        (folder / "images" / f"{number}.png").write_bytes(b"")
    (folder / "instances.json").write_bytes(data)
    world = coco_world(folder / "instances.json", folder / "images", min_classes=1)
    inside = (folder / "images").resolve()
    assert all(inside in Path(case.source).resolve().parents for case in world.cases)


# Answers of judges


@cache
def _answers() -> list[bytes]:
    plain = '{"reason_a": "dogs", "reason_b": "nothing", "answer": "A"}'
    texts = [plain, f"Well: ```json\n{plain}\n``` so.", '{"x": {"answer": "A"}} {"answer": "b"}']
    return [text.encode() for text in texts] + [json.dumps({"text": text}).encode() for text in texts]


def _load_answer(data: bytes, folder: Path) -> None:
    from elude_steer.evaluation.measures.llm_judges import _load_reply, read_answer

    assert read_answer(data.decode("utf-8", "surrogateescape")) in (None, "A", "B")
    stored = folder / "reply.json"
    stored.write_bytes(data)
    text = _load_reply(stored)
    assert stored.exists() == (text is not None)
    if text is None:
        raise EludeSteerError("deleted, so that the judge is asked again")
    assert read_answer(text) in (None, "A", "B")


# Requests to the server


@cache
def _requests() -> list[bytes]:
    image = base64.b64encode(_images()[0]).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": parts}]
    turns = [*messages, {"role": "assistant", "content": "a dog"}, {"role": "user", "content": "and now?"}]
    edits = (
        None,
        {"minus": ["dog"], "plus": {"biker": {"strength": 2, "where": [1, 2, 30, 40]}}, "strength": 1.5},
        {"recipe": "toyland-dog", "step": 2},
    )
    return [
        json.dumps({"model": "toyland", "messages": one, "steer": edit, "max_tokens": 9, "stop": ["."]}).encode()
        for one in (messages, turns)
        for edit in edits
    ]


def _load_request(data: bytes, folder: Path) -> None:
    from elude_steer.models.images import open_image
    from elude_steer.server.access import Limits
    from elude_steer.server.requests import parse_chat
    from elude_steer.steering.plan import read_concepts

    request = parse_chat(data, Limits())
    assert 0 < len(request.images) <= 8 and 0 < request.max_tokens <= 1024
    assert sum(part["type"] == "image" for message in request.messages for part in message["content"]) == len(
        request.images
    )
    for image in request.images:
        assert isinstance(image, str) or open_image(image, max_pixels=10**6).mode == "RGB"
    if request.edit is not None and request.edit.recipe is None:
        read_concepts(request.edit.minus, request.edit.plus, request.edit.where, request.edit.settings)
    assert not list(folder.iterdir())


# Atlases whose hashes fit


def _load_atlas(data: bytes, folder: Path) -> None:
    """The case is a seed: `liars` changes the files of an atlas and makes their hashes fit."""
    from tests.helpers import liars

    base = folder.parent / "atlas"
    if not base.exists():
        liars.make_full_atlas(base)
    outcome, done = liars.try_case(base, folder, liars.change_several, data.decode())
    if outcome == "refused":
        raise EludeSteerError("refused")
    if outcome != "sound":
        raise AssertionError(f"{done}: {outcome}")


LOADERS = {
    "recipe": Loader(lambda: _documents("steering"), TOKENS["yaml"], _load_recipe),
    "spec": Loader(lambda: _documents("atlases"), TOKENS["yaml"], _load_spec),
    "image": Loader(_images, TOKENS["image"], _load_image),
    "coco": Loader(_coco, TOKENS["json"], _load_coco),
    "request": Loader(_requests, TOKENS["json"], _load_request),
    "judge": Loader(_answers, TOKENS["json"], _load_answer),
    "atlas": Loader(list, (), _load_atlas),
}
