"""Terms of use of models that come with the package: shown on standard error, once on each machine."""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from pathlib import Path

from elude_steer.errors import StorageError
from elude_steer.utils.files import home, write_file

TERMS = "TERMS.txt"
_SHOWN: set[Path] = set()  # in this process, where the home folder cannot be written


def show_terms(folder: str) -> None:
    """Print the terms in the folder around a model's, if it came with the package and nobody has seen them here."""
    path = Path(folder).parent / TERMS
    if Path(__file__).parents[1] not in path.parents or path in _SHOWN or not path.is_file():
        return
    _SHOWN.add(path)
    text = path.read_text(encoding="utf-8")
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    seen = home() / "terms" / f"{path.parents[1].name}-{digest}"  # new terms are shown again
    if seen.exists():
        return
    print(text.strip(), file=sys.stderr)
    with suppress(StorageError):
        write_file(seen, lambda file: file.write(text.encode()), clean=True)
