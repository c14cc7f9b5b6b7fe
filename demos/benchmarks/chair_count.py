"""CHAIR on photographs against a count of its own: the benchmark's numbers from words alone.

    python demos/benchmarks/chair_count.py --flickr8k FOLDER --photos 50 --minus dog

FOLDER is Flickr8k as its authors distribute it. The classes of a photo are what two of its five captions name; the file
of instances is made of that. Then `benchmark chair` measures photoland before and after the edit, and this script
counts the same captions word by word, with a list of word forms instead of the package's reader.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image

from elude_steer.evaluation.benchmarks.answers import ask_model
from elude_steer.evaluation.benchmarks.chair import run_chair
from elude_steer.evaluation.benchmarks.dataset import images_for, read_dataset
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.steering.steerer import Steerer

# Class -> every form that counts. Nothing of the package is used to read them.
FORMS = {
    "dog": "dog dogs puppy puppies terrier terriers greyhound greyhounds",
    "man": "man men guy guys",
    "woman": "woman women lady ladies",
    "boy": "boy boys",
    "girl": "girl girls",
    "child": "child children kid kids toddler toddlers",
    "ball": "ball balls",
    "water": "water",
    "snow": "snow",
    "beach": "beach beaches",
    "grass": "grass",
    "field": "field fields",
    "bike": "bike bikes bicycle bicycles",
    "rock": "rock rocks",
    "street": "street streets",
    "shirt": "shirt shirts",
}
CLASS_OF = {form: name for name, forms in FORMS.items() for form in forms.split()}
SYNONYMS = {
    "dog": "puppy, terrier, greyhound",
    "man": "guy",
    "woman": "lady",
    "child": "kid, toddler",
    "bike": "bicycle",
}


def words(caption: str) -> list[str]:
    """The words of a caption, without punctuation."""
    return "".join(letter if letter.isalnum() else " " for letter in caption.lower()).split()


def named(caption: str) -> Counter[str]:
    """How often a caption names each class."""
    return Counter(CLASS_OF[word] for word in words(caption) if word in CLASS_OF)


def write_coco(flickr: Path, count: int, folder: Path) -> tuple[Path, Path]:
    """Instances and captions of the first test photos, in COCO's formats."""
    texts, captions = flickr / "Flicker8k_text", read_spoken(flickr)
    files = (texts / "Flickr_8k.testImages.txt").read_text(encoding="utf-8").split()[:count]
    categories = [{"id": number, "name": name} for number, name in enumerate(FORMS, 1)]
    numbers = {row["name"]: row["id"] for row in categories}
    images, instances, spoken = [], [], []
    for number, file in enumerate(files):
        path = flickr / "Flicker8k_Dataset" / file
        (folder / file).symlink_to(path.resolve())
        width, height = Image.open(path).size
        images.append({"id": number, "file_name": file, "width": width, "height": height})
        votes = Counter(name for caption in captions[file] for name in named(caption))
        for name in (name for name, count in votes.items() if count >= 2):
            box = [0, 0, width, height]
            instances.append(
                {
                    "id": len(instances),
                    "image_id": number,
                    "category_id": numbers[name],
                    "bbox": box,
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
        spoken += [{"image_id": number, "caption": caption} for caption in captions[file]]
    one, other = folder / "instances_test.json", folder / "captions_test.json"
    one.write_text(json.dumps({"images": images, "annotations": instances, "categories": categories}))
    other.write_text(json.dumps({"images": images, "annotations": spoken}))
    return one, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flickr8k", type=Path, required=True)
    parser.add_argument("--photos", type=int, default=50)
    parser.add_argument("--minus", default="dog")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        instances, captions = write_coco(given.flickr8k, given.photos, folder)
        synonyms = folder / "synonyms.txt"
        synonyms.write_text("\n".join(f"{name}: {SYNONYMS.get(name, '')}" for name in FORMS))
        data = read_dataset(instances, folder, captions=captions, synonyms=synonyms)
        options = BenchmarkOptions((given.minus,), limit=given.photos, controls=False, work=folder / "work")
        said: list[list[str]] = []

        def record(rows: Any, images: Any, inquiries: Any, max_new_tokens: int) -> Any:
            answers = ask_model(rows, images, inquiries, max_new_tokens)
            said.extend(own[0] for own in answers)  # the caption of every row; there is one question
            return answers

        result = run_chair(Steerer.load("photoland"), data, options, ask=record)
        files = [image.file for image in images_for("chair", data, options)]
    spoken = read_spoken(given.flickr8k)
    annotated = {
        file: {n for n, c in Counter(n for text in spoken[file] for n in named(text)).items() if c >= 2}
        for file in files
    }
    print(f"{len(files)} photos, {sum(map(len, annotated.values()))} annotated classes")
    for number, row in enumerate(("unsteered", "edit")):
        totals: Counter[str] = Counter()
        for file, answers in zip(files, said, strict=True):
            there = annotated[file] | {name for text in spoken[file] for name in named(text)}
            found = named(answers[number])
            wrong = sum(count for name, count in found.items() if name not in there)
            totals.update(mentions=sum(found.values()), wrong=wrong, captions=1, bad=wrong > 0)
            totals.update(true=len(there), hit=len(there & set(found)), dogs=given.minus in found)
        own = {
            "CHAIR_s": totals["bad"] / totals["captions"],
            "CHAIR_i": totals["wrong"] / totals["mentions"],
            "recall": totals["hit"] / totals["true"],
            "names the erased": totals["dogs"] / totals["captions"],
        }
        for column, value in own.items():
            theirs = result.value(row, "all images", column).value
            verdict = "same" if abs(theirs - value) < 1e-9 else "DIFFERENT"
            print(f"{row:<10} {column:<17} benchmark {theirs:.4f}  own count {value:.4f}  {verdict}")


def read_spoken(flickr: Path) -> dict[str, list[str]]:
    """The captions of every photo."""
    found: dict[str, list[str]] = {}
    for line in (flickr / "Flicker8k_text" / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
        name, caption = line.split("\t")
        found.setdefault(name.split("#")[0], []).append(caption)
    return found


if __name__ == "__main__":
    main()
