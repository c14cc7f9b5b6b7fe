"""Draw the first image of the README: a scene, heatmaps of two concepts, and the captions before and after.

python demos/readme_steering_image.py demos/images/steering.png
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import elude_steer as es

INK, SOFT, GONE, NEW, PAPER = (29, 33, 41), (102, 106, 120), (179, 38, 30), (20, 113, 61), (255, 255, 255)
SIDE, GAP = 300, 20
SCENE = Path(__file__).parent / "images" / "toyland-teddy.png"
EDITS = ({"minus": "teddy"}, {"minus": "teddy", "plus": "dog"})  # with the atlas's own settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    options = parser.parse_args()
    results = [(_flags(edit), es.steer(SCENE, **edit)) for edit in EDITS]
    image, first = Image.open(SCENE).convert("RGB"), results[0][1]
    large, small = ImageFont.load_default(24), ImageFont.load_default(17)
    sheet = Image.new("RGB", (3 * SIDE + 4 * GAP, SIDE + 250), PAPER)
    draw = ImageDraw.Draw(sheet)
    panels = [
        ("the image", image.resize((SIDE, SIDE), Image.Resampling.NEAREST)),
        ("where 'teddy' is active", first.heatmap("teddy", side=SIDE)),
        ("where 'dog' is placed", results[1][1].heatmap("dog", side=SIDE)),
    ]
    for number, (title, panel) in enumerate(panels):
        left = GAP + number * (SIDE + GAP)
        draw.text((left, 8), title, SOFT, font=small)
        sheet.paste(panel, (left, 34))
    top = SIDE + 52
    draw.text((GAP, top), "baseline", SOFT, font=small)
    draw.text((GAP + 210, top - 5), first.baseline, INK, font=large)
    for title, result in results:
        top += 58
        draw.text((GAP, top), title, SOFT, font=small)
        left = GAP + 210
        for word in result.caption.split():
            draw.text((left, top - 5), word, NEW if word in result.new else INK, font=large)
            left += large.getlength(word + " ")
    draw.text((GAP, top + 40), "green: new", NEW, font=small)
    sheet.save(options.out, optimize=True)


def _flags(edit: dict[str, str]) -> str:
    """The options of `elude-steer steer` that make this edit."""
    return " ".join(f"--{name} {value}" for name, value in edit.items())


if __name__ == "__main__":
    main()
