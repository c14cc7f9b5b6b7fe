"""Draws what the README opens with: a picture, where each word fires, and the captions before and after.

python demos/readme_steering_image.py demos/images/steering.png
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import elude_steer as es

INK, SOFT, GONE, NEW, PAPER = (29, 33, 41), (102, 106, 120), (179, 38, 30), (20, 113, 61), (255, 255, 255)
SIDE, GAP = 300, 20


def main() -> None:
    picture = Path(__file__).parent / "images" / "toyland-dog.png"
    both = {"minus": ["dog"], "plus": ["biker"]}
    rows = [("minus dog", {"minus": ["dog"], "kappa": 6}), ("minus dog, plus biker", both)]
    results = [(title, es.steer(picture, **words)) for title, words in rows]
    image, first = Image.open(picture).convert("RGB"), results[0][1]
    large, small = ImageFont.load_default(24), ImageFont.load_default(17)
    sheet = Image.new("RGB", (3 * SIDE + 4 * GAP, SIDE + 250), PAPER)
    draw = ImageDraw.Draw(sheet)
    shown = [
        ("the picture", image.resize((SIDE, SIDE), Image.Resampling.NEAREST)),
        ("where 'dog' fires", first.heatmap("dog", side=SIDE)),
        ("where 'biker' is put", results[1][1].heatmap("biker", side=SIDE)),
    ]
    for number, (title, part) in enumerate(shown):
        left = GAP + number * (SIDE + GAP)
        draw.text((left, 8), title, SOFT, font=small)
        sheet.paste(part, (left, 34))
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
    sheet.save(sys.argv[1], optimize=True)


if __name__ == "__main__":
    main()
