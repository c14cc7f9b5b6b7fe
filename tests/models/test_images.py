import io
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from elude_steer.errors import ImageError, MissingPackageError
from elude_steer.models.images import image_set, open_image, open_images, read_image
from tests.helpers.tiny import save_images


@pytest.fixture
def folder(tmp_path):
    return save_images(tmp_path / "set", 7)


def ids(images):
    return [item.id for item in images.items()]


def test_a_folder_is_searched_with_its_sub_folders_and_sorted(folder):
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.png").write_bytes(b"")
    (folder / "LOUD.PNG").write_bytes((folder / "image-0001.png").read_bytes())
    found = ids(image_set(folder))
    assert found == sorted(found)
    assert len(found) == 8
    assert "sub/image-0000.png" in found
    assert "LOUD.PNG" in found


def test_the_order_of_a_list_or_text_file_does_not_matter(folder):
    paths = sorted(folder.rglob("*.png"))
    assert ids(image_set(paths)) == ids(image_set(paths[::-1]))
    text = folder / "list.txt"
    text.write_text("# two\n\nsub/image-0005.png\nimage-0001.png\n")
    assert ids(image_set(text)) == ["image-0001.png", "sub/image-0005.png"]
    image, _ = next(image_set(str(text)).items()).read()
    assert image.size == (56, 28)


def test_images_in_memory_and_streams(folder):
    loaded = [Image.open(path) for path in sorted(folder.rglob("*.png"))]
    images = image_set(loaded)
    assert images.length == 7
    assert image_set([(image, 3) for image in loaded]).fingerprint == images.fingerprint
    assert image_set(loaded[::-1]).fingerprint != images.fingerprint
    stream = image_set(iter(loaded))
    assert (stream.length, stream.fingerprint) == (None, None)
    assert [item.read()[1] for item in stream.items()] == [item.read()[1] for item in images.items()]
    batch = image_set(torch.rand(4, 3, 8, 8))
    assert batch.length == 4
    assert len({item.read()[1] for item in batch.items()}) == 4
    assert image_set(np.zeros((4, 3, 8, 8))).length == 4


def test_the_hash_depends_on_the_content_only(folder, tmp_path):
    original = folder / "image-0001.png"
    copy = tmp_path / "other name.png"
    copy.write_bytes(original.read_bytes())
    assert read_image(original)[1] == read_image(copy)[1]
    assert read_image(original)[1] != read_image(folder / "image-0002.png")[1]


def test_the_fingerprint_changes_with_the_files(folder):
    before = image_set(folder).fingerprint
    assert image_set(folder).fingerprint == before
    (folder / "image-0001.png").write_bytes((folder / "image-0002.png").read_bytes())
    assert image_set(folder).fingerprint != before
    assert image_set(folder, limit=1).fingerprint != image_set(folder, limit=2).fingerprint


def test_images_are_turned_upright_and_converted_to_rgb(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("L", (20, 10), 200).save(tmp_path / "x.jpg", exif=exif)
    image, _ = read_image(tmp_path / "x.jpg")
    assert (image.size, image.mode) == ((10, 20), "RGB")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: p / "nowhere", r"no folder or file '.*nowhere' with images"),
        (lambda p: p, r"holds no images \(looked for \.avif \.bmp .*\.png"),
        (lambda p: _write(p / "empty.txt", b"\n# nothing\n"), "lists no images; write one path per line"),
        (lambda p: _write(p / "data.bin", b"\xff\xfe\x00\x80"), "neither an image nor a text file"),
        (lambda p: [], "the list of images is empty"),
        (lambda p: 5, "images cannot be taken from an int; give a folder, paths or images"),
    ],
)
def test_unusable_sources_are_refused(tmp_path, make, text):
    with pytest.raises(ImageError, match=text):
        image_set(make(tmp_path))


def _write(path, data):
    path.write_bytes(data)
    return path


def test_a_missing_datasets_package_raises_a_one_line_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"images.source 'hf:x' needs .* `pip install 'elude-steer\[data\]'`"):
        image_set("hf:x")


def test_images_of_16_bits_keep_their_shades(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    shades = np.asarray(read_image(tmp_path / "x.png")[0])[..., 0]
    assert len(np.unique(shades)) > 50
    assert shades.max() == 255


def test_pipes_loops_links_and_odd_names_in_a_folder(folder, tmp_path):
    import os

    os.mkfifo(folder / "pipe.png")  # reading it would block
    (folder / "loop").symlink_to(folder)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o.png").write_bytes((folder / "image-0001.png").read_bytes())
    (folder / "linked").symlink_to(outside)
    (folder / os.fsdecode(b"bad\xff.png")).write_bytes((folder / "image-0002.png").read_bytes())
    found = ids(image_set(folder))
    assert "linked/o.png" in found
    assert "bad\\xff.png" in found
    assert len(found) == 9


def test_loaders_empty_paths_and_dicts_are_refused():
    from torch.utils.data import DataLoader

    with pytest.raises(ImageError, match=r"a DataLoader yields batches; .* images=loader\.dataset"):
        image_set(DataLoader([torch.zeros(3)]))
    with pytest.raises(ImageError, match="the path to the images is empty"):
        image_set("")
    item = next(image_set([{"image": 1}]).items())
    with pytest.raises(ImageError, match="a dict instead of a PIL image, an array or a tensor"):
        item.read()


# Arrays and lists


def test_arrays_of_bytes_are_images():
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (5, 7, 3), np.uint8)
    assert np.array_equal(np.asarray(open_image(colour)), colour)
    assert np.array_equal(np.asarray(open_image(colour[:, ::-1])), colour[:, ::-1])
    alpha = np.concatenate([colour, np.zeros((5, 7, 1), np.uint8)], 2)
    assert np.array_equal(np.asarray(open_image(alpha)), colour)
    assert np.array_equal(np.asarray(open_image(colour[..., 0])), np.repeat(colour[..., :1], 3, 2))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 3)), r"an array of float64 may have any range; give uint8: .*\(array \* 255\)"),
        (np.zeros((4, 4), np.uint16), "an array of uint16 may have any range"),
        (np.zeros((4, 4), bool), "an array of bool may have any range"),
        (np.zeros((3, 5, 5), np.uint8), "an array of 3 x 5 x 5 values is no image; give height x width, "),
        (np.zeros((2, 4, 4, 3), np.uint8), "several images as a list"),
        (np.zeros((0, 4, 3), np.uint8), "an array of 0 x 4 x 3 values is no image"),
        (np.zeros((), np.uint8), "an array of no values is no image"),
        (np.zeros((50, 50), np.uint8), "an array of 50 x 50 values has more than 2,000 pixels"),
        (3, "a PIL image or a NumPy array, not an int"),
    ],
)
def test_other_arrays_are_refused_with_what_would_be_right(source, message):
    with pytest.raises(ImageError, match=message) as caught:
        open_image(source, max_pixels=2000)
    assert "\n" not in str(caught.value)


def test_an_error_in_a_list_names_the_place():
    with pytest.raises(ImageError, match=r"^image 1 of the list: 'none\.png' cannot be read: No such file"):
        open_images([np.zeros((4, 4), np.uint8), "none.png"])


# Files of strangers


def encode(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def png(width, height, *chunks, depth=8, colour=2):
    """A PNG of given chunks behind a header that may say anything."""
    header = (b"IHDR", struct.pack(">2I5B", width, height, depth, colour, 0, 0, 0))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (header, *chunks, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PIXELS = (b"IDAT", zlib.compress(bytes(4 * 13)))
DDS = (
    b"DDS "
    + struct.pack("<7I", 124, 0x1007, 4, 4, 0, 0, 0)
    + bytes(44)
    + struct.pack("<2I4s5I", 32, 4, b"ABCD", *[0] * 5)
)
STRANGE = {
    "a text chunk that grows to 30 MB": png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(30_000_000))), PIXELS),
    "many text chunks": png(4, 4, *[(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000)))] * 70, PIXELS),
    "a plain PPM that is cut": b"P3\n4 4\n255\n1 2 3 4",
    "a plain PPM with words": b"P3\n4 4\n255\n1 2 x 4",
    "a PPM without an end": b"P6\n4 4\n",
    "a DDS of an unknown kind": DDS + bytes(64),
    "a QOI": b"qoif" + struct.pack(">2I2B", 4, 4, 3, 0) + bytes(8),
    "a QOI that is cut": b"qoif" + struct.pack(">2I2B", 4000, 4000, 3, 0),
    "an AVIF that is cut": b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B" + bytes(40),
    "a TIFF of nothing": b"II*\0\x08\0\0\0\xff\xff" + bytes(30),
    "a GIF without an image": b"GIF89a\4\0\4\0\0\0\0;",
    "nothing": b"",
}


@pytest.mark.parametrize("name", STRANGE)
def test_damaged_files_and_bombs_are_refused_in_one_line(name):
    with pytest.raises(ImageError, match=r"^the given bytes cannot be read as an image: ") as caught:
        open_image(STRANGE[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("path", ["a\0b.png", "~no-such-user-here/x.png", "\ud800.png"])
def test_paths_that_cannot_be_are_refused_in_one_line(path):
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(path)


def test_a_given_image_whose_file_is_cut_is_refused():
    cut = Image.open(io.BytesIO(encode(Image.effect_noise((64, 64), 50))[:900]))
    with pytest.raises(ImageError, match="the given image cannot be read: "):
        open_image(cut)


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_deep_images_are_converted_in_bounded_memory(mode):
    values = (np.arange(4_000_000, dtype=np.uint32) % 65536).astype(np.uint16).reshape(2000, 2000)
    data = encode(Image.fromarray(values) if mode == "I;16" else Image.fromarray(values.astype(np.int32)), "TIFF")
    tracemalloc.start()
    image = open_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * values.size  # before: 24 bytes a pixel and more
    assert np.array_equal(np.asarray(image)[..., 0], (values / 257).round().astype(np.uint8))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(9000, 9000, colour=6), "9000 x 9000 pixels of this kind take 648 MB to decode, more than 500"),
        (png(40000, 40000), "more than 100,000,000 pixels"),
        (png(11000, 11000), "11000 x 11000 pixels are more than 100,000,000"),
        (png(9000, 9000, depth=16, colour=0), "9000 x 9000 pixels of this kind take 567 MB"),
    ],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_large_images_are_refused_by_their_header(data, message):
    tracemalloc.start()
    with pytest.raises(ImageError, match=message):
        open_image(data)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_common_formats_are_read(kind):
    image = open_image(encode(Image.new("RGB", (12, 8), "red"), kind))
    assert (image.size, image.mode) == ((12, 8), "RGB")
    assert image.getpixel((5, 5))[0] > 240


# Small files that ask for much


def bmp_with_skips(width, height, commands):
    palette = bytes(range(256)) * 4
    start = 14 + 40 + len(palette)
    about = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(commands), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(commands), 0, 0, start) + about + palette + commands


def tiff_with_tiles(side, data, compression):
    """An image of 16 x 16 pixels in one tile of `side` x `side`."""
    tags = {256: 16, 257: 16, 258: 8, 259: compression, 262: 1, 277: 1, 322: side, 323: side, 324: 134, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def jpeg_with_scans(count):
    data = encode(Image.new("L", (256, 256), 128), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + data[-2:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bmp_with_skips(80_000_000, 1, b"\0\2\0\xff\0\1"), "80000000 x 1 pixels of this kind take 61,840 MB"),
        (tiff_with_tiles(30_000, zlib.compress(bytes(9_000_000)), 8), "16 x 16 pixels of this kind take 1,800 MB"),
        (tiff_with_tiles(30_000, bytes(1000), 5), "16 x 16 pixels of this kind take 1,800 MB"),
        (jpeg_with_scans(200), "206 scans are more than 100"),
    ],
    ids=["BMP that skips", "TIFF of one huge tile", "the same with LZW", "JPEG of many scans"],
)
def test_small_files_that_ask_for_much_are_refused_by_their_header(data, message):
    assert len(data) < 20_000
    tracemalloc.start()
    with pytest.raises(ImageError, match=message):
        open_image(data)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_tiles_and_skips_of_ordinary_size_are_read():
    assert open_image(tiff_with_tiles(64, zlib.compress(bytes(64 * 64)), 8)).size == (16, 16)
    assert open_image(bmp_with_skips(16, 16, b"\x10\5\0\0" * 16 + b"\0\1")).size == (16, 16)
    assert open_image(jpeg_with_scans(20)).size == (256, 256)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_no_image(kind, tmp_path):
    path = tmp_path / "a.png"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(ImageError, match=r"a\.png' cannot be read: it is a pipe or a device, not a file; check the"):
        open_image(path)


def test_seeds_of_scenes_are_numbers_of_a_usual_length():
    for seed in ("9" * 5000, "-1", "\u00b2"):
        with pytest.raises(ImageError, match="needs the seed of the scenes, a whole number") as refused:
            image_set(f"toyland:{seed}")
        assert len(str(refused.value)) < 200


def test_a_folder_holds_all_kinds_that_are_decoded(tmp_path):
    picture = Image.new("RGB", (8, 6), (200, 30, 90))
    for name, kind in (("a.avif", "AVIF"), ("b.jfif", "JPEG"), ("c.AVIF", "AVIF")):
        picture.save(tmp_path / name, kind)
    items = list(image_set(tmp_path).items())
    assert [item.id for item in items] == ["a.avif", "b.jfif", "c.AVIF"]
    assert {item.read()[0].size for item in items} == {(8, 6)}


def test_a_machine_without_memory_is_no_damaged_image(folder, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    path = next(folder.rglob("*.png"))
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        read_image(path)
