"""Draw held-out scenes of toyland with their true captions and those of the captioner, for the README.

python -m demos.readme_toyland_image demos/images/toyland.png --count 32 --seed 90002
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from demos.toyland.report import caption_scenes, held_out_scenes
from elude_steer import Vlm, toyland

COLUMNS, CELL, IMAGE_SIDE, WIDE_IMAGE, MARGIN = 4, (384, 128), 112, 150, 8
INK, CORRECT, WRONG, PAPER = (34, 38, 46), (24, 128, 72), (196, 44, 52), (250, 249, 246)


def wrap_text(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Break a text into lines of at most `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--count", type=int, default=32, help="number of scenes")
    parser.add_argument("--seed", type=int, default=90002)
    options = parser.parse_args()
    scenes = held_out_scenes(options.seed, options.count)
    captions = caption_scenes(Vlm.load(str(toyland.CAPTIONER)), scenes)
    font = ImageFont.load_default(13)
    rows = -(-len(scenes) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL[0] + MARGIN, rows * CELL[1] + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (scene, caption) in enumerate(zip(scenes, captions, strict=True)):
        x, y = MARGIN + number % COLUMNS * CELL[0], MARGIN + number // COLUMNS * CELL[1]
        is_wide = scene.image.width > scene.image.height
        scale = WIDE_IMAGE / scene.image.width if is_wide else IMAGE_SIDE / max(scene.image.size)
        image = scene.image.resize((round(scene.image.width * scale), round(scene.image.height * scale)), 1)
        sheet.paste(image, (x, y))
        left, width = x + image.width + 8, CELL[0] - image.width - 24
        truth = wrap_text(scene.caption, font, width)
        draw.multiline_text((left, y), truth, INK, font=font, spacing=3)
        lower = y + 6 + 17 * (truth.count("\n") + 1)
        if caption == scene.caption:
            verdict, colour = "says the same", CORRECT
        else:
            verdict, colour = wrap_text(caption, font, width), WRONG
        draw.multiline_text((left, lower), verdict, colour, font=font, spacing=3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.out, optimize=True)
    correct = sum(caption == scene.caption for scene, caption in zip(scenes, captions, strict=True))
    print(f"{options.out}: {correct} of {len(scenes)} captions exactly correct")


if __name__ == "__main__":
    main()
