"""How well photoland's captioner describes photos that it was not trained on: `python -m demos.photoland.report`.

    python -m demos.photoland.report --photos WORK/photos/test --model WORK/models/captioner --sheet sheet.png

BLEU-1 to 4 are those of sacrebleu, over all five references and without smoothing, as papers on Flickr8k report them.
CIDEr is pycocoevalcap's; its document frequencies come from the same references, so it compares with nothing else.
Needs `pip install sacrebleu pycocoevalcap`. The sheet of photos is for looking at: Flickr8k's photos may not be
published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demos.photoland.flickr8k import clean
from elude_steer.evaluation.edits.annotations import read_captions
from elude_steer.evaluation.edits.benchmark import World
from elude_steer.evaluation.edits.photos import CAPTIONS, photo_world
from elude_steer.models.images import open_image
from elude_steer.models.vlm import Vlm
from elude_steer.utils.progress import track


def caption_photos(vlm: Vlm, paths: Sequence[Path], batch_size: int = 25) -> dict[str, str]:
    """The greedy caption of each photo, by its file's name."""
    found = {}
    for start in track(range(0, len(paths), batch_size), "captioning", "batches"):
        part = paths[start : start + batch_size]
        captions = vlm.caption([open_image(path) for path in part])
        found |= {path.name: caption for path, caption in zip(part, captions, strict=True)}
    return found


def bleu(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """BLEU-1 to 4, in percent."""
    from sacrebleu.metrics import BLEU

    names = sorted(captions)
    most = max(len(references[name]) for name in names)
    streams = [[references[name][i] if i < len(references[name]) else None for name in names] for i in range(most)]
    scores = {}
    for order in range(1, 5):
        metric = BLEU(max_ngram_order=order, tokenize="none", smooth_method="none", force=True)
        scores[f"BLEU-{order}"] = metric.corpus_score([captions[name] for name in names], streams).score
    return scores


def cider(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> float:
    """CIDEr, as a multiple: 0.5 is often printed as 50."""
    from pycocoevalcap.cider.cider import Cider

    score, _ = Cider().compute_score({n: list(references[n]) for n in captions}, {n: [c] for n, c in captions.items()})
    return float(score)


def score_concepts(world: World, captions: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each concept: in how many photos it is, and how often captions name it rightly and wrongly.

    A concept that only one reference names counts neither way.
    """
    rows = []
    for word in world.vocabulary:
        counts = {"photos": 0, "named": 0, "wrong": 0}
        for case in world.cases:
            named = word in world.read(captions[Path(case.source).name]).objects
            counts["photos"] += word in case.objects
            counts["named"] += named and word in case.objects
            counts["wrong"] += named and word not in case.objects | case.possible
        said = counts["named"] + counts["wrong"]
        precision = counts["named"] / said if said else None
        recall = counts["named"] / counts["photos"] if counts["photos"] else None
        rows.append({"concept": word, **counts, "precision": precision, "recall": recall})
    return rows


def write_sheet(path: Path, photos: Sequence[Path], captions: Mapping[str, str]) -> None:
    """A sheet of photos with their captions, to look at."""
    from PIL import Image, ImageDraw

    width, height, columns = 300, 250, 6
    sheet = Image.new("RGB", (columns * width, -(-len(photos) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, photo in enumerate(photos):
        x, y = number % columns * width, number // columns * height
        image = open_image(photo)
        image.thumbnail((width - 10, height - 50))
        sheet.paste(image, (x + 5, y + 5))
        words, lines = captions[photo.name].split(), [""]
        for word in words:
            lines = [*lines[:-1], f"{lines[-1]} {word}"] if len(lines[-1]) + len(word) < 46 else [*lines, word]
        for row, line in enumerate(lines[:3]):
            draw.text((x + 5, y + height - 44 + 13 * row), line.strip(), fill="black")
    sheet.save(path)


def main() -> None:
    """Caption the photos, print the scores, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--photos", type=Path, required=True, help="folder with photos and captions.json")
    parser.add_argument("--model", required=True, help="folder or id of the captioner")
    parser.add_argument("--limit", type=int, help="number of photos [default: all]")
    parser.add_argument("--out", type=Path, help="JSON file for scores and captions")
    parser.add_argument("--sheet", type=Path, help="image with the first 24 photos and their captions")
    options = parser.parse_args()
    world = photo_world(options.photos, limit=options.limit, min_concepts=0)
    references = {
        name: [clean(text) for text in texts] for name, texts in read_captions(options.photos / CAPTIONS).items()
    }
    paths = [Path(case.source) for case in world.cases]
    captions = caption_photos(Vlm.load(options.model), paths)
    rows = score_concepts(world, captions)
    known = [row for row in rows if row["photos"] >= 10]
    said = sum(row["named"] + row["wrong"] for row in known)
    scores = {
        "photos": len(paths),
        **bleu(captions, references),
        "CIDEr": cider(captions, references),
        "concepts in at least 10 photos": len(known),
        "precision": sum(row["named"] for row in known) / max(1, said),
        "recall": sum(row["named"] for row in known) / max(1, sum(row["photos"] for row in known)),
    }
    print(json.dumps(scores, indent=1))
    if options.out:
        options.out.write_text(json.dumps({"scores": scores, "concepts": rows, "captions": captions}, indent=1))
    if options.sheet:
        write_sheet(options.sheet, paths[:24], captions)


if __name__ == "__main__":
    main()
