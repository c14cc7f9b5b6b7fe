import sys
from itertools import islice
from types import SimpleNamespace

import pytest

from elude_steer.errors import ImageError, StorageError
from elude_steer.models.images import image_set
from elude_steer.trust import UntrustedCodeError
from elude_steer.utils.remote import filesystems


class Rows:
    """What the library's streaming dataset does, over parts in memory."""

    column_names = ("image", "label")
    fails = ()  # numbers of reads at which the connection breaks

    def __init__(self, parts, read):
        self.parts, self.read = parts, read

    @property
    def num_shards(self):
        return len(self.parts)

    def select_columns(self, names):
        return self

    def cast_column(self, name, kind):
        assert kind == "undecoded"
        return self

    def with_format(self, name):
        assert name == "arrow"
        return SimpleNamespace(
            iter=lambda size: (part[i : i + size] for part in self.parts for i in range(0, len(part), size))
        )

    def shard(self, num_shards, index):
        return Rows([self.parts[index]], self.read)

    def __iter__(self):
        for part in self.parts:
            for row in part:
                self.read.append(row["image"]["path"])
                if len(self.read) in self.fails:
                    raise RuntimeError("the client has been closed")
                yield row


@pytest.fixture
def stream(image_folder, monkeypatch, tmp_path):
    """The images of the folder as a dataset in three parts; returns the paths of rows that were read."""
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))
    paths, read = sorted(image_folder.rglob("*.png"), key=lambda path: path.relative_to(image_folder).as_posix()), []
    rows = [{"image": {"bytes": path.read_bytes(), "path": path.name}} for path in paths]
    data = Rows([rows[:10], rows[10:33], rows[33:]], read)
    builder = SimpleNamespace(hash="1", as_streaming_dataset=lambda split: data)
    library = SimpleNamespace(load_dataset_builder=lambda id: builder, Image=lambda decode: "undecoded")
    monkeypatch.setitem(sys.modules, "datasets", library)
    return SimpleNamespace(read=read, library=library, rows=rows, data=data)


def test_images_have_the_bytes_and_hashes_of_the_folder(stream, image_folder):
    streamed = image_set("hf-stream:me/photos")
    assert streamed.length == 40 and list(streamed.runs) == [0, 10, 33]
    for one, other in zip(image_set(image_folder).items(), streamed.items(), strict=True):
        (image, digest), (same, same_digest) = one.read(), other.read()
        assert digest == same_digest and image.tobytes() == same.tobytes()
    assert len(stream.read) == 40, "each row was read once"


def test_a_part_is_read_from_its_beginning_and_then_on(stream):
    streamed = image_set("hf-stream:me/photos", limit=35)
    for item in islice(streamed.select(range(12, 16)), 4):
        item.read()
    assert len(stream.read) == 6, "two rows were passed over"
    next(streamed.select(range(11, 12))).read()
    assert len(stream.read) == 8
    assert streamed.length == 35 and streamed.fingerprint != image_set("hf-stream:me/photos").fingerprint


def test_paths_of_a_strangers_table_are_not_opened(stream, tmp_path):
    stream.rows[0]["image"].update(bytes=None, path="/etc/passwd")
    with pytest.raises(ImageError, match="holds the path of an image instead of its bytes"):
        next(image_set("hf-stream:me/photos").items()).read()


def test_what_cannot_be_streamed_is_one_line(stream):
    with pytest.raises(ImageError, match="has no column 'picture'; it has image, label"):
        image_set("hf-stream:me/photos", column="picture")
    stream.data.parts = [[]]
    with pytest.raises(ImageError, match="split 'test' of dataset 'me/photos' is empty"):
        image_set("hf-stream:me/photos", split="test")

    def refuse(id):
        raise ValueError("pass trust_remote_code=True")

    stream.library.load_dataset_builder = refuse
    with pytest.raises((UntrustedCodeError, ImageError), match=r"could not be loaded|brings code of its own"):
        image_set("hf-stream:me/photos")


def test_a_connection_that_breaks_is_opened_again(stream, image_folder, monkeypatch):
    monkeypatch.setattr(filesystems, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(Rows, "fails", (5, 20))
    digests = [item.read()[1] for item in image_set("hf-stream:me/photos").items()]
    assert digests == [item.read()[1] for item in image_set(image_folder).items()]
    monkeypatch.setattr(Rows, "fails", range(10**6))
    with pytest.raises(StorageError, match=r"'hf-stream:me/photos' cannot be read .*the client has been closed"):
        next(image_set("hf-stream:me/photos").items()).read()
