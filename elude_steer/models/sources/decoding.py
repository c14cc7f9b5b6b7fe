"""One image as RGB, decoded within bounded memory: all that a file can ask for is checked before it is given."""

from __future__ import annotations

import io
from typing import Any

from elude_steer.errors import ImageError, type_with_article

MAX_PIXELS = 100_000_000
MAX_MEMORY = 500_000_000  # bytes that decoding one image may take
# Formats whose decoders are written in C and fast; Pillow's others read pixel by pixel in Python, or run programs.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF")
_BYTES_PER_PIXEL = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # in memory; others have 4
_DECODER_BYTES = {"WEBP": 8, "AVIF": 8, "TIFF": 8}  # per pixel, for what these decoders keep besides the image
_MAX_SCANS = 100  # of a JPEG; cameras and programs write up to about 15
_COMPRESSION, _BITS, _SAMPLES, _TILE_WIDTH, _TILE_HEIGHT = 259, 258, 277, 322, 323  # tags of TIFF
_STRIP = 1_000_000  # pixels that are converted at a time


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """Decode an image file within bounded memory: all that its header tells is checked before anything is decoded."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if data[:4] in (b"%!PS", b"\xc5\xd0\xd3\xc6"):
        raise ImageError("EPS is a program that draws an image, not an image; save it as PNG")
    try:
        Image.init()  # loads the plugins; an older Pillow has no AVIF
        with Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
            if image.width * image.height > max_pixels:
                raise ImageError(f"{image.width} x {image.height} pixels are more than {max_pixels:,}")
            if (scans := _count_scans(image, data)) > _MAX_SCANS:
                raise ImageError(f"{scans:,} scans are more than {_MAX_SCANS}; save it again")
            needed = _memory_needed(image, data)
            if needed > MAX_MEMORY:
                raise ImageError(
                    f"{image.width} x {image.height} pixels of this kind take {needed / 1e6:,.0f} MB to decode, more "
                    f"than {MAX_MEMORY / 1e6:,.0f}; save it as RGB without rotation, or smaller"
                )
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            upright = _to_eight_bit(image)
            return upright if upright.mode == "RGB" else upright.convert("RGB")
    except (ImageError, MemoryError):  # a machine without memory says nothing about the file
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"no image in a format that is read here ({', '.join(_FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"it has more than {max_pixels:,} pixels") from error
    except Exception as error:  # Pillow raises errors of many types for files that are cut or damaged
        raise ImageError(f"the file is damaged ({_in_one_line(error)})") from error


def _memory_needed(image: Any, data: bytes) -> int:
    """Bytes that decoding takes at most: the image, what its decoder keeps, and a converted or turned copy."""
    own = _BYTES_PER_PIXEL.get(image.mode, 4)
    copy = 0 if image.mode == "RGB" else 5 if image.mode.startswith("I") else 4
    # The Exif of a PNG may stand behind its pixels, and to read it Pillow would decode them.
    may_turn = b"eXIf" in data if image.format == "PNG" else image.getexif().get(0x0112, 1) != 1
    turned = own if may_turn else 0
    coefficients = 6 if image.info.get("progressive") else 0
    per_pixel = own + max(copy, turned) + _DECODER_BYTES.get(image.format, 0) + coefficients
    return int(image.width * image.height * per_pixel) + _buffer_needed(image)


def _buffer_needed(image: Any) -> int:
    """Bytes that a decoder takes for a part of the image, whose size the file tells: it can exceed the image."""
    if image.format == "TIFF":
        width, height = (int(image.tag_v2.get(tag) or 0) for tag in (_TILE_WIDTH, _TILE_HEIGHT))
        depth = sum(image.tag_v2.get(_BITS) or (8,)) * int(image.tag_v2.get(_SAMPLES) or 1) // 8 + 1
        return width * height * depth
    if image.tile and image.tile[0][0] == "bmp_rle":
        return 3 * 256 * image.width  # one command skips so many rows, and Pillow writes them out
    return 0


def _count_scans(image: Any, data: bytes) -> int:
    """How often a JPEG runs over the whole image: a small file can ask for it a thousand times."""
    is_jpeg = image.format in ("JPEG", "MPO") or (image.format == "TIFF" and image.tag_v2.get(_COMPRESSION) in (6, 7))
    return data.count(b"\xff\xda") if is_jpeg else 0


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


def convert_given(image: Any) -> Any:
    """A PIL image of the caller in RGB; it may be read from its file only now."""
    try:
        return image.convert("RGB")
    except Exception as error:
        raise ImageError(f"the given image cannot be read: {_in_one_line(error)}.") from error


def from_array(source: Any, max_pixels: int) -> Any:
    """A NumPy array of the caller as an image in RGB; raises for arrays whose range is unknown."""
    import numpy as np
    from PIL import Image

    if not isinstance(source, np.ndarray):
        raise ImageError(
            f"an image is a path, the bytes of a file, a PIL image or a NumPy array, not {type_with_article(source)}."
        )
    shape = " x ".join(map(str, source.shape))
    if source.ndim not in (2, 3) or (source.ndim == 3 and source.shape[2] not in (3, 4)) or not source.size:
        raise ImageError(
            f"an array of {shape or 'no'} values is no image; give height x width, height x width x 3 (RGB) or "
            "height x width x 4, and several images as a list."
        )
    if source.dtype != np.uint8:
        raise ImageError(
            f"an array of {source.dtype} may have any range; give uint8: for values from 0 to 1, "
            "(array * 255).round().astype('uint8')."
        )
    if source.shape[0] * source.shape[1] > max_pixels:
        raise ImageError(f"an array of {shape} values has more than {max_pixels:,} pixels.")
    return Image.fromarray(np.ascontiguousarray(source)).convert("RGB")


def _to_eight_bit(image: Any) -> Any:
    """Scale images of 16 bits per pixel down to 8; Pillow would clip values above 255."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    rows = max(1, _STRIP // image.width)
    tops = range(0, image.height, rows)

    def strip(top: int) -> Any:
        return image.crop((0, top, image.width, min(top + rows, image.height)))

    divisor = 257 if max(int(np.asarray(strip(top)).max()) for top in tops) > 255 else 1
    grey = Image.new("L", image.size)
    for top in tops:
        values = np.asarray(strip(top)).astype(np.float64) / divisor
        grey.paste(Image.fromarray(values.round().clip(0, 255).astype(np.uint8)), (0, top))
    return grey
