"""Draws scenes of toyland with their true captions and what the captioner says.

python demos/readme_toyland_image.py demos/images/toyland.png --count 32 --seed 90002
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from demos.toyland.report import caption_scenes, held_out_scenes
from elude_steer import Vlm, toyland

COLUMNS, CELL, PICTURE, MARGIN = 4, (384, 128), 112, 8
INK, RIGHT, WRONG, PAPER = (34, 38, 46), (24, 128, 72), (196, 44, 52), (250, 249, 246)


def wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--seed", type=int, default=90002)
    options = parser.parse_args()
    shown = held_out_scenes(options.seed, options.count)
    said = caption_scenes(Vlm.load(str(toyland.CAPTIONER)), shown)
    font = ImageFont.load_default(13)
    rows = -(-len(shown) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL[0] + MARGIN, rows * CELL[1] + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (scene, caption) in enumerate(zip(shown, said, strict=True)):
        x, y = MARGIN + number % COLUMNS * CELL[0], MARGIN + number // COLUMNS * CELL[1]
        scale = PICTURE / max(scene.image.size) if scene.image.width <= scene.image.height else 150 / scene.image.width
        picture = scene.image.resize((round(scene.image.width * scale), round(scene.image.height * scale)), 1)
        sheet.paste(picture, (x, y))
        left, width = x + picture.width + 8, CELL[0] - picture.width - 24
        right = caption == scene.caption
        truth = wrapped(scene.caption, font, width)
        draw.multiline_text((left, y), truth, INK, font=font, spacing=3)
        lower = y + 6 + 17 * (truth.count("\n") + 1)
        verdict, colour = ("says the same", RIGHT) if right else (wrapped(caption, font, width), WRONG)
        draw.multiline_text((left, lower), verdict, colour, font=font, spacing=3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.out, optimize=True)
    right = sum(caption == scene.caption for scene, caption in zip(shown, said, strict=True))
    print(f"{options.out}: {right} of {len(shown)} captions exactly right")


if __name__ == "__main__":
    main()
