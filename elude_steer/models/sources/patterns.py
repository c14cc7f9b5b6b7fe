"""The files that a pattern such as `s3://bucket/shards/{000..099}.tar` names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elude_steer.errors import ImageError, StorageError
from elude_steer.utils.remote.filesystems import explain_remote_errors, is_url, open_filesystem

MAX_SHARDS = 100_000
_MAX_RANGES, _MAX_DIGITS = 8, 18  # of a pattern, and of a number in it
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class ShardFile:
    """A file of images.

    Attributes:
        url: where it is.
        size: in bytes.
        version: changes with its content, as far as the store tells: an entity tag, or the time of the last change.
    """

    url: str
    size: int
    version: str


def names_shards(source: object) -> bool:
    """Whether a source of images is a pattern of tar files."""
    if not isinstance(source, str):
        return False
    if source.endswith(_COMPRESSED):
        raise ImageError(
            f"'{source}' is compressed, and images are read from anywhere in a shard; give plain .tar files (images "
            "are compressed already)."
        )
    return source.endswith(".tar")


def expand(pattern: str) -> list[str]:
    """The texts that a pattern with ranges such as `{000..099}` stands for, in order."""
    found = _RANGE.search(pattern)
    if found is None:
        if "{" in pattern:
            raise ImageError(f"'{pattern}' has braces that are no range; write a range of numbers: {{000..099}}.")
        return [pattern]
    if max(len(found[1]), len(found[2])) > _MAX_DIGITS or pattern.count("{") > _MAX_RANGES:
        raise ImageError(
            f"'{pattern[:60]}…' has more than {_MAX_RANGES} ranges, or a number of more than {_MAX_DIGITS} digits; "
            "write fewer or shorter ones."
        )
    first, last, digits = int(found[1]), int(found[2]), len(found[1])
    if last < first or last - first >= MAX_SHARDS:
        raise ImageError(f"the range '{found[0]}' is empty or has more than {MAX_SHARDS:,} numbers; check it.")
    rest = expand(pattern[found.end() :])
    if (last - first + 1) * len(rest) > MAX_SHARDS:
        raise ImageError(f"'{pattern}' stands for more than {MAX_SHARDS:,} files; use larger shards.")
    return [f"{pattern[: found.start()]}{number:0{digits}d}{end}" for number in range(first, last + 1) for end in rest]


def list_shards(pattern: str) -> list[ShardFile]:
    """The files of a pattern of ranges (`{000..099}`) or wildcards (`*`), sorted by name."""
    filesystem, _ = open_filesystem(pattern.split("{")[0])
    paths: Sequence[str] = expand(pattern)
    with explain_remote_errors(pattern):
        if any("*" in path or "?" in path or "[" in path for path in paths):
            scheme = pattern.partition("://")[0] + "://" if is_url(pattern) else ""
            paths = [f"{scheme}{found}" for path in paths for found in filesystem.glob(open_filesystem(path)[1])]
    if not paths:
        raise ImageError(f"no file fits '{pattern}'; check the pattern.")
    if len(paths) > MAX_SHARDS:
        raise ImageError(f"'{pattern}' fits more than {MAX_SHARDS:,} files; use larger shards.")
    return [_describe(path) for path in sorted(paths)]


def _describe(url: str) -> ShardFile:
    filesystem, path = open_filesystem(url)
    try:
        with explain_remote_errors(url):
            info = filesystem.info(path)
    except StorageError as error:
        raise ImageError(str(error)) from error
    if info.get("type") != "file" or info.get("size") is None:  # a pipe may never end
        raise ImageError(f"'{url}' is not a file whose size is known; give tar files.")
    version = next(
        (str(info[key]) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified") if info.get(key)), ""
    )
    return ShardFile(url, int(info["size"]), version)
