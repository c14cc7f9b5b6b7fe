"""Draw the sprite sheet from an emoji font: `python -m demos.toyland.make_sprites FONT`.

FONT is NotoColorEmoji.ttf with bitmap glyphs (Debian's fonts-noto-color-emoji); its licence is in NOTICE. The sheet is
committed, so this script runs only when the world changes. The sheet has the objects in the order of `world.OBJECTS`,
then the clutter: objects that no caption mentions.
"""

from __future__ import annotations

import argparse

from PIL import Image, ImageDraw, ImageFont

from elude_steer.toyland import DATA, OBJECTS

SIZE = 64
COLUMNS = 12
CLUTTER = "🦀🐙🦋🐌🐝🦂🐸🐧🦉🐊🦔🦇🍇🍉🍓🥕🌽🥦🍩🍔🧀🍟🥨🍪☕🔑🔨✂📎🧲"
CLUTTER += "🔭💡🎧📷🧭🧯🪣🧵🎲🧩🎯🏆🎺🥁🎻🪘⚓🛞🛴🚁🚜🛶🗿🌵🌴🍁🪨🧊⛄🎃"
SHEET = DATA / "sprites.png"


def draw_glyph(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """Draw one emoji, cropped and fitted into a square."""
    canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((10, 10), character, font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise SystemExit(f"the font has no glyph for {character!r}")
    return fit_into_square(canvas.crop(box))


def fit_into_square(image: Image.Image) -> Image.Image:
    """Scale an image so that its longer side fills a `SIZE` square, at the bottom of the square."""
    scale = SIZE / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    square.paste(small, ((SIZE - small.width) // 2, SIZE - small.height))
    return square


def draw_table() -> Image.Image:
    """Draw a table, which the font lacks."""
    image = Image.new("RGBA", (128, 96), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    for x in (12, 104):
        draw.rectangle((x, 22, x + 12, 95), fill=(110, 66, 30, 255))
    for x in (34, 84):
        draw.rectangle((x, 22, x + 8, 78), fill=(84, 49, 22, 255))
    draw.rounded_rectangle((0, 6, 127, 26), 6, fill=(166, 104, 52, 255), outline=(96, 56, 26, 255), width=3)
    return fit_into_square(image)


def draw_blanket() -> Image.Image:
    """Draw a chequered blanket with a fringe, which the font lacks too."""
    image = Image.new("RGBA", (128, 88), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    for column in range(8):
        for row in range(5):
            colour = ((198, 60, 74, 255), (245, 232, 214, 255))[(column + row) % 2]
            draw.rectangle((column * 16, 4 + row * 15, column * 16 + 15, 18 + row * 15), fill=colour)
    for x in range(2, 128, 6):
        draw.line((x, 79, x, 87), fill=(198, 60, 74, 255), width=2)
    return fit_into_square(image)


def main(font_path: str) -> None:
    """Write the sprite sheet."""
    font = ImageFont.truetype(font_path, 109)
    drawings = {"table": draw_table, "blanket": draw_blanket}
    sprites = [draw_glyph(font, emoji) if emoji else drawings[name]() for name, emoji in OBJECTS.items()]
    sprites += [draw_glyph(font, character) for character in CLUTTER]
    rows = -(-len(sprites) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * SIZE, rows * SIZE), (0, 0, 0, 0))
    for number, sprite in enumerate(sprites):
        sheet.paste(sprite, (number % COLUMNS * SIZE, number // COLUMNS * SIZE))
    SHEET.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(SHEET, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("font")
    main(parser.parse_args().font)
