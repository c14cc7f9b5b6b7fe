"""Images in plain tar files, as WebDataset has them, each read from its place without unpacking anything.

A shard may come from a stranger. A member's name is only a name: it becomes the id of an image and never a path,
nothing is written to disk, links and devices are passed over, and headers, names, members and their number are bounded.
The bytes of a member go through the same decoder as those of a file.

The images are those of all shards in the order of their names, as in the folder that the shards were made from; so
batches, seeds and results are the folder's, whatever the size of the shards.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elude_steer.errors import ImageError, StorageError
from elude_steer.models.sources.patterns import ShardFile, list_shards
from elude_steer.utils.files import home, write_file
from elude_steer.utils.fingerprint import make_key
from elude_steer.utils.remote.filesystems import explain_remote_errors, open_filesystem, read_again

MAX_MEMBER = 256_000_000  # bytes of one image's file
MAX_NAME = 500  # letters
MAX_MEMBERS = 2_000_000  # of one shard
_MAX_HEADER = 1_000_000  # bytes that a header may take; tarfile would read one of any size
_WINDOW = 8_000_000  # bytes that are read ahead where images are read in order
_AT_A_TIME = 8  # shards whose headers are read at once
_BLOCK = 512


@dataclass(frozen=True)
class Member:
    """One image of a shard: its name, the shard's number, and where in the shard its bytes are."""

    name: str
    shard: int
    start: int
    size: int


@dataclass(eq=False)
class TarShards:
    """The images of tar files, sorted by name.

    Attributes:
        name: the pattern.
        shards: the files.
        members: the images.
    """

    name: str
    shards: Sequence[ShardFile]
    members: Sequence[Member]
    _windows: threading.local = field(default_factory=threading.local, repr=False)

    @classmethod
    def open(cls, pattern: str, suffixes: frozenset[str]) -> TarShards:
        """List the images of all shards; the list of a shard is kept on this machine.

        Args:
            pattern: the files; see `list_shards`.
            suffixes: the endings of images; other members, such as labels, are passed over.
        """
        shards = list_shards(pattern)
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = list(pool.map(lambda shard: _read_index(shard, suffixes), shards))
        names = [name for index in found for name, _, _ in index]
        if not names:
            raise ImageError(f"the shards of '{pattern}' hold no images (looked for {' '.join(sorted(suffixes))}).")
        # Of shards whose members have the same names, the name of the shard is needed, too.
        stems = [posixpath.basename(shard.url).removesuffix(".tar") + "/" for shard in shards]
        prefixes = stems if len(set(names)) < len(names) else [""] * len(shards)
        members = [
            Member(prefixes[number] + name, number, start, size)
            for number, index in enumerate(found)
            for name, start, size in index
        ]
        members.sort(key=lambda member: (member.name, member.shard, member.start))
        if len({member.name for member in members}) < len(members):
            raise ImageError(f"a shard of '{pattern}' holds several images of one name; give each a name of its own.")
        return cls(pattern, shards, members)

    def __reduce__(self) -> tuple[Any, ...]:
        return TarShards, (self.name, self.shards, self.members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def starts(self) -> None:
        """Any image can be read."""
        return None

    def name_of(self, number: int) -> str:
        """The id of an image."""
        return self.members[number].name

    def fingerprint(self, length: int) -> str:
        """Identifies the first so many images, as far as the stores tell when a file has changed."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(f"{shard.size}\0{shard.version}\0".encode())
        for member in self.members[:length]:
            digest.update(f"{member.name}\0{member.shard}\0{member.start}\0{member.size}\0".encode())
        return digest.hexdigest()

    def read(self, number: int) -> bytes:
        """The bytes of an image; where images are read in order, some of the next are read with it."""
        member = self.members[number]
        if member.size > MAX_MEMBER:
            raise ImageError(f"{member.size:,} bytes are more than {MAX_MEMBER:,}")
        shard, start, data = getattr(self._windows, "read", None) or (-1, 0, b"")
        if shard != member.shard or not start <= member.start <= member.start + member.size <= start + len(data):
            in_order = getattr(self._windows, "number", None) == number - 1
            self._windows.read = None  # a large window and its successor need not be there together
            shard, start, data = member.shard, member.start, self._fetch(member, _WINDOW if in_order else 0)
            self._windows.read = (shard, start, data)
        self._windows.number = number
        return data[member.start - start :][: member.size]

    def _fetch(self, member: Member, ahead: int) -> bytes:
        shard = self.shards[member.shard]
        filesystem, path = open_filesystem(shard.url)
        end = min(shard.size, member.start + max(member.size, ahead))
        data: bytes = read_again(shard.url, lambda: filesystem.cat_file(path, start=member.start, end=end))
        if len(data) < member.size:
            raise StorageError(f"'{shard.url}' has changed since its images were listed; run the same command again.")
        return data


class _BoundedFile:
    """A file whose reads are as short and as few as those of headers."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._reads = file, 16 + 4 * size // _BLOCK

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes."""
        self._reads -= 1
        if not 0 <= size <= _MAX_HEADER or self._reads < 0:
            raise tarfile.ReadError("a header is too long, or leads back")
        data: bytes = self._file.read(size)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position."""
        if position < 0:
            raise tarfile.ReadError("a header leads back")
        return int(self._file.seek(position, whence))

    def tell(self) -> int:
        """The position."""
        return int(self._file.tell())


def _read_index(shard: ShardFile, suffixes: frozenset[str]) -> list[tuple[str, int, int]]:
    """Name, start and size of each image of a shard."""
    path = home() / "cache" / "shards" / f"{make_key(shard.url, shard.size, shard.version, sorted(suffixes))}.json"
    with suppress(OSError, ValueError, TypeError):
        return [(str(name), int(start), int(size)) for name, start, size in json.loads(path.read_bytes())]
    found = list(_scan(shard, suffixes))
    with suppress(StorageError):  # it is read again
        write_file(path, lambda file: file.write(json.dumps(found).encode()), clean=True)
    return found


def _scan(shard: ShardFile, suffixes: frozenset[str]) -> Iterator[tuple[str, int, int]]:
    filesystem, path = open_filesystem(shard.url)
    count, last = 0, -1
    with explain_remote_errors(shard.url), filesystem.open(path, "rb") as file:
        try:
            bounded: Any = _BoundedFile(file, shard.size)
            with tarfile.open(fileobj=bounded, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined] # tarfile keeps all of them
                    count += 1
                    end = member.offset_data + member.size
                    if count > MAX_MEMBERS or member.offset <= last or member.size < 0 or end > shard.size:
                        raise tarfile.ReadError("it has too many members, or one that is not inside it")
                    last = member.offset
                    if member.isreg() and not member.issparse() and (name := _image_name(member.name, suffixes)):
                        yield name, member.offset_data, member.size
        except (tarfile.TarError, ValueError, EOFError, RecursionError, OverflowError) as error:
            line = " ".join(str(error).split())[:200]
            raise ImageError(f"'{shard.url}' is not a sound tar file ({line}); make it again.") from error


def _image_name(name: str, suffixes: frozenset[str]) -> str | None:
    """The id of an image; None for what is no image, or is hidden."""
    plain = posixpath.normpath(name)
    base = posixpath.basename(plain)
    if base.startswith(".") or posixpath.splitext(base)[1].lower() not in suffixes:
        return None
    if len(plain) > MAX_NAME or plain.startswith(("/", "../")) or "\\" in plain:
        raise tarfile.ReadError(f"the name {plain[:60]!a} is too long, or leads out of a folder")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in plain)
