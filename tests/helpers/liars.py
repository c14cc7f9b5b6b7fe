"""Atlases that lie: every file changed in every way, with hashes that fit, and what a user does with an atlas.

By hand, with more cases than the tests run: `python -m tests.helpers.liars 20000 --seed 1`.
"""

import argparse
import collections
import copy
import hashlib
import json
import random
import struct
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.calibration import Calibration
from elude_steer.atlas.familiarity import Familiarity
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.manifest import _checksum, _text, check_captions, default_settings
from elude_steer.atlas.reference_images import ReferenceImages, find_image_source
from elude_steer.errors import EludeSteerError
from elude_steer.models.matcher import Matcher
from elude_steer.steering.plan import make_plan
from tests.helpers.atlases import make_atlas

JPEG = b"\xff\xd8\xff\xe0" + bytes(60)
DTYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64}
DEEP = "[" * 100_000 + "]" * 100_000
VALUES = (
    None, True, -1, 0, 1, 7, 2**31, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "a" * 300,
    "b" * 100_000, "../../etc/passwd", "/etc/passwd", "toyland:1", "hf:/etc", [], {}, [1], ["a", "b"], {"a": {"b": []}},
    json.loads("[" * 200 + "]" * 200),
)  # fmt: skip


def make_full_atlas(folder: Path) -> Path:
    """Save a small atlas that has every file an atlas can have."""
    g, plain = torch.Generator().manual_seed(0), make_atlas()
    count, d_in, d_out, words = len(plain), plain.d_in, plain.d_out, ("dog", "cat", "tall tree", "sea")
    order = np.random.default_rng(0).permuted(np.tile(np.arange(4, dtype=np.int32), (count, 1)), axis=1)[:, :3]
    order[3] = -1
    scores = np.where(order < 0, -np.inf, np.linspace(3, 1, 3)).astype(np.float32)
    groups = np.arange(count, dtype=np.int32)
    groups[5] = 2
    labels = Labels(words, order, scores, groups, {"scorer": "some/scorer", "top_k": 5, "lam": None})
    calibration = Calibration(
        torch.tensor([0, 2, 3], dtype=torch.int32),
        (2 * torch.rand(3, count, generator=g) - 1).half(),
        torch.rand(3, generator=g),
        torch.randn(3, generator=g),
        torch.tensor([[0.1, 1.0]] * 3),
        torch.randn(3, d_out, generator=g).half(),
        torch.tensor(0.4),
        torch.tensor(3, dtype=torch.int32),
    )
    familiarity = Familiarity(
        torch.randn(d_in, generator=g), torch.rand(d_in, generator=g) + 0.1,
        torch.randn(2, d_in, generator=g).half(), torch.tensor(3.0),
    )  # fmt: skip
    model = {"id": "some/model", "revision": "abc", "kind": "vlm"}
    rows = [{"measure": "faithfulness", "name": "R2", "value": 0.5, "units": None}]
    evaluation = {"images": "toyland:1", "image_count": 7, "elude_steer": "0.1.0", "rows": rows}
    built = {"built": "float32", **dict.fromkeys(("float32", "bfloat16", "float16"), "0" * 64)}
    about = {**plain.about, "model": model, "evaluation": evaluation, "weights_by_dtype": built, "class": "Some"}
    full = replace(plain, about=about, labels=labels, calibration=calibration, familiarity=familiarity)
    return full.save(folder, {"000000.jpg": JPEG, "000003.jpg": JPEG})


class Files:
    """The files of an atlas, open for changes; `write` makes their hashes fit."""

    def __init__(self, folder: Path) -> None:
        names = [path for path in folder.rglob("*") if path.is_file()]
        self.raw = {path.relative_to(folder).as_posix(): path.read_bytes() for path in names}
        self.manifest = json.loads(self.raw.pop("manifest.json"))
        self.manifest_text: str | None = None
        self.tensors = {name: read_safetensors(raw) for name, raw in self.raw.items() if name.endswith(".safetensors")}
        self.json = {name: json.loads(raw) for name, raw in self.raw.items() if name.endswith(".json")}

    def write(self, folder: Path) -> None:
        for name, tensors in self.tensors.items():
            if name in self.raw:
                self.raw[name] = write_safetensors(tensors)
        for name, content in self.json.items():
            if name in self.raw:
                self.raw[name] = json.dumps(content).encode()
        self.write_raw(folder)

    def write_raw(self, folder: Path) -> None:
        files = self.manifest.get("files")
        for name, raw in self.raw.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
            if isinstance(files, dict) and name in files:
                files[name] = hashlib.sha256(raw).hexdigest()
        if "checksum" in self.manifest:
            self.manifest["checksum"] = checksum(self.manifest)
        text = _text(self.manifest) if self.manifest_text is None else self.manifest_text
        (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def checksum(manifest):
    try:
        return _checksum(manifest)
    except UnicodeEncodeError:
        return "0" * 64


def read_safetensors(raw):
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + stop]
        found[name] = (entry["dtype"], np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy())
    return found


def write_safetensors(tensors, change=None):
    """The bytes of a file; `change` may edit its header."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if change is not None:
        change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# Changes: each takes the files and a source of chance, and says what it did.


def change_tensor(files, rng, file=None, name=None, how=None):
    file = file or rng.choice(sorted(files.tensors))
    tensors = files.tensors[file]
    if not tensors:
        return "nothing"
    name = name or rng.choice(sorted(tensors))
    dtype, array = tensors[name]
    how = how or rng.choice(TENSOR_CHANGES)
    if how == "drop":
        del tensors[name]
    elif how == "rename":
        tensors[rng.choice(["x", name.upper(), "a" * 500])] = tensors.pop(name)
    elif how == "retype":
        other = rng.choice(sorted(DTYPES))
        with np.errstate(all="ignore"):
            tensors[name] = (other, array.astype(DTYPES[other]))
    elif how == "relabel":  # the same bytes under another type
        same = [kind for kind, size in DTYPES.items() if np.dtype(size).itemsize == array.itemsize]
        tensors[name] = (rng.choice(same), array)
    elif how == "reshape":
        shapes = [array[None]]
        if array.ndim:
            shapes += [array.reshape(-1), array[:0], array[:1], array.T, np.concatenate([array, array])]
        tensors[name] = (dtype, rng.choice(shapes))
    elif how == "shuffle" and array.ndim:
        tensors[name] = (dtype, array[rng.sample(range(len(array)), len(array))])
    elif array.size:
        flat = array.reshape(-1).copy()
        where = slice(None) if rng.random() < 0.3 else rng.randrange(flat.size)
        numbers = [0, 1, 2, 5, 100, -1, -2, 127, 2**31 - 1, -(2**31)]
        if array.dtype.kind == "f":
            numbers += [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 6e4, 1e-30]
        with np.errstate(all="ignore"):
            number = np.array(rng.choice(numbers))
            flat[where] = number.astype(array.dtype)
        tensors[name] = (dtype, flat.reshape(array.shape))
    return f"{file}: {name}: {how}"


TENSOR_CHANGES = ("drop", "rename", "retype", "relabel", "reshape", "shuffle", "value", "value", "value")


def paths_of(value, path=()):
    """All places in a JSON value."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        yield from paths_of(inner, (*path, key))


def change_json(files, rng, file=None, path=None, how=None, value=None):
    file = file or rng.choice(["manifest.json", "manifest.json", *sorted(files.json)])
    whole = files.manifest if file == "manifest.json" else files.json[file]
    path = path or rng.choice([path for path in paths_of(whole) if path] or [()])
    if not path:
        return "nothing"
    target = whole
    for key in path[:-1]:
        target = target[key]
    how = how or rng.choice(("drop", "rename", "value", "value", "value", "extra", "double"))
    if how == "drop":
        del target[path[-1]]
    elif how == "rename" and isinstance(target, dict):
        target[rng.choice(["x", "../x", "/etc/passwd", "thumbnails/999999.jpg", "\x1b"])] = target.pop(path[-1])
    elif how == "extra" and isinstance(target, dict):
        target["later"] = copy.deepcopy(rng.choice(VALUES))
    elif how == "double" and isinstance(target, list):
        target.append(target[path[-1]])
    else:
        target[path[-1]] = copy.deepcopy(rng.choice(VALUES) if value is None else value)
    return f"{file}: {'.'.join(map(str, path))[:60]}: {how}"


def change_bytes(files, rng):
    """Changes below the level of tensors and values."""
    file = rng.choice(sorted(files.raw))
    raw = files.raw[file]
    how = rng.choice(("cut", "empty", "longer", "flip", "length", "shape", "offsets", "deep", "metadata"))
    if how in ("length", "shape", "offsets", "metadata") and file not in files.tensors:
        how = "flip"
    tensors, name = files.tensors.pop(file, None), None
    files.json.pop(file, None)
    if how == "cut":
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif how == "empty":
        raw = b""
    elif how == "longer":
        raw += bytes(rng.randrange(1, 99))
    elif how == "length":
        raw = struct.pack("<Q", rng.choice([0, 1, 2**16, 2**31, 2**63, 2**64 - 1])) + raw[8:]
    elif how in ("shape", "offsets", "metadata"):
        name = rng.choice(sorted(tensors) or [""])

        def change(header):
            if how == "metadata" or not name:
                header["__metadata__"] = rng.choice([{"format": "pt"}, {"a": 1}, [], None, {"a": {"b": []}}])
            elif how == "shape":
                header[name]["shape"] = rng.choice(
                    [[10**9, 10**9], [2**62, 4], [0, 10**12], [-1], [1.5], "x", None, [10**5] * 3, [[]], [True]]
                )
            else:
                header[name]["data_offsets"] = rng.choice([[0, 2**40], [5, 2], [-1, 4], [0], None, "x", [0, 0]])

        raw = write_safetensors(tensors, change)
    elif how == "deep":
        raw = DEEP.encode() if file not in (tensors or {}) else struct.pack("<Q", len(DEEP)) + DEEP.encode()
    elif raw:
        at = rng.randrange(min(len(raw), 400) if rng.random() < 0.5 else len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    files.raw[file] = raw
    return f"{file}: {name or 'bytes'}: {how}"


def change_manifest_text(files, rng):
    how = rng.choice(("deep", "cut", "twice", "number"))
    text = _text(files.manifest)
    files.manifest_text = {
        "deep": '{"a": ' + DEEP + "}",
        "cut": text[: rng.randrange(len(text))],
        "twice": text.replace('"format": 1,', '"format": 1,\n  "format": 1,'),
        "number": text.replace('"format": 1', '"format": 1' + "0" * 5000),
    }[how]
    return f"manifest.json: text: {how}"


def change_sizes(files, rng):
    """A manifest that announces more than there is, in all places at once."""
    key = rng.choice(("d_in", "d_out", "sub_units", "units", "images", "instances"))
    number = rng.choice([0, -1, 2, 20, 22, 24, 2**20, 2**31 - 1, 2**31, 10**12])
    files.manifest[key] = number
    if key == "d_out":
        files.manifest["units"] = number
    return f"manifest.json: {key} {number}: sizes"


def change_listing(files, rng):
    name = rng.choice(sorted(files.raw))
    how = rng.choice(("missing", "unlisted", "unlisted and there", "extra"))
    if how == "missing":
        del files.raw[name]
    elif how == "extra":
        other = rng.choice(["code.py", "model.bin", "thumbnails/000009.jpg", "thumbnails/x.jpg", "../up", "a\\b", "."])
        files.manifest["files"][other] = "0" * 64
    else:
        files.manifest["files"].pop(name, None)
        if how == "unlisted":
            files.raw.pop(name)
    return f"{name}: files: {how}"


CHANGES = (
    change_tensor, change_tensor, change_tensor, change_json, change_json, change_bytes, change_sizes, change_listing,
    change_manifest_text,
)  # fmt: skip


# What a user does with an atlas


class WordModel:
    """Vectors of words by their letters."""

    def encode(self, words, **_):
        seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little") for word in words]
        return np.stack([np.random.default_rng(seed).standard_normal(16) for seed in seeds]).astype(np.float32)


def use(folder: Path) -> None:
    """Load an atlas and use every part of it."""
    atlas = Atlas.load(folder)
    repr(atlas), atlas.card(), atlas.dead.sum(), atlas.fingerprint, default_settings(atlas.about)
    layer = nn.Linear(atlas.d_in, atlas.d_out)
    assert atlas.sub_units(range(len(atlas)), layer).weight.shape == (len(atlas), atlas.d_in)
    total = torch.zeros_like(layer.weight).index_add_(0, atlas.units, atlas.sub_units(range(len(atlas)), layer).weight)
    torch.testing.assert_close(total, layer.weight, rtol=1e-4, atol=1e-5)  # the sub-units add up to their units
    assert all(len(atlas.sub_units_of(unit)) for unit in range(atlas.d_out))
    pictures = ReferenceImages(atlas, None)
    for sub_unit in range(len(atlas)):
        for image in atlas.references.images[sub_unit].tolist():
            assert isinstance(pictures.atlas.image_ids[image], str)
    assert set(atlas.thumbnails()) <= {f"{number:06d}.jpg" for number in range(len(atlas.image_ids))}
    source = find_image_source(atlas)
    assert source is None or source.startswith("toyland:")
    if atlas.familiarity is not None:
        atlas.familiarity.is_unlike(torch.ones(atlas.d_in))
    if atlas.calibration is not None:
        for row in range(len(atlas.calibration)):
            atlas.calibration.presence(row, atlas.detector(row, layer)(torch.ones(3, atlas.d_in)).detach())
            atlas.calibration.direction(row)
    if atlas.labels is None:
        return
    labels = atlas.labels
    [labels.best(sub_unit) for sub_unit in range(len(atlas))], labels.redundant_groups()
    words = list(labels.counts)[:2]
    matcher = Matcher("fake", "fake", WordModel())
    for mode in ("scale", "place") if words else ():
        if mode == "scale" or atlas.calibration is not None:
            settings = {"mode": mode, "min_similarity": -1.0}
            defaults = default_settings(atlas.about)
            plan, _ = make_plan(atlas, matcher, minus=words[:1], settings=settings, defaults=defaults)
            plan.to_dict(), str(plan), plan.key
    check_captions(atlas.about)


def try_case(base: Path, folder: Path, change, seed) -> tuple[str, str]:
    """Change the files of an atlas, write them and use it: what happened, and what was changed."""
    files = Files(base)
    done = change(files, random.Random(seed))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder)
    try:
        use(folder)
    except EludeSteerError as error:
        return ("refused" if "\n" not in str(error) and len(str(error)) < 600 else f"long: {error}"), done
    except Exception:  # noqa: BLE001 - what the test looks for
        return traceback.format_exc(), done
    return "sound", done


def change_several(files, rng):
    """One to three changes of any kind."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            done.append(rng.choice(CHANGES)(files, rng))
        except (KeyError, IndexError, TypeError, AttributeError):
            done.append("nothing")  # the change before left nothing to change
    return "; ".join(done)


def systematic(base: Path):
    """Every tensor changed in each way, and every place of every JSON file with several values: changes with seeds."""
    files = Files(base)
    for file, tensors in files.tensors.items():
        for name in tensors:
            for seed, how in enumerate([*TENSOR_CHANGES, *["value"] * 6, *["retype", "reshape"] * 3]):
                yield (lambda f, r, file=file, name=name, how=how: change_tensor(f, r, file, name, how)), seed
    for file in ("manifest.json", *files.json):
        whole = files.manifest if file == "manifest.json" else files.json[file]
        for path in paths_of(whole):
            for seed, how in enumerate(("drop", "rename", "extra", "value", "value", "value") if path else ()):
                yield (lambda f, r, file=file, path=path, how=how: change_json(f, r, file, path, how)), seed


def main() -> None:
    import os

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["ELUDE_STEER_HOME"] = home
        base, counts = make_full_atlas(Path(home) / "base"), collections.Counter()
        for case in range(options.cases):
            seed = f"{options.seed}-{case}"
            outcome, done = try_case(base, Path(home) / "case", change_several, seed)
            counts[outcome if outcome in ("refused", "sound") else "other"] += 1
            if outcome not in ("refused", "sound"):
                print(f"{seed}: {done}\n{outcome}")
    print(f"seeds {options.seed}-0 to {options.seed}-{options.cases - 1}: {dict(counts)}")


if __name__ == "__main__":
    main()
