"""Lists of concepts: a text file with one concept per line, or a list that comes with the package."""

from __future__ import annotations

import io
from pathlib import Path

from elude_steer.errors import SpecError, did_you_mean
from elude_steer.utils.files import read_bytes

WORDS = Path(__file__).parent / "vocabularies"
_MAX_BYTES = 2**26  # of a list of words; that of all English nouns has 2 million
_FUNCTION_WORDS = (
    "a an the this that these those some any no every each either neither both all few many much more most other "
    "another such same own i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his "
    "himself she her hers herself it its itself they them their theirs themselves one who whom whose which what and or "
    "but nor so yet if unless because although though while whereas until than whether as of in on at by for with "
    "without within from to into onto upon over under above below between among through during before after against "
    "about around across along behind beside besides beyond near next off out up down toward towards since per via not "
    "never very too also just only even still already again then there here now when where why how be am is are was "
    "were been being have has had having do does did doing will would shall should can could may might must ought"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def shipped_vocabularies() -> dict[str, Path]:
    """The lists that come with the package, name to file."""
    return {path.stem: path for path in sorted(WORDS.glob("*.txt"))}


def read_vocabulary(source: str | Path, *, stop_words: bool = False) -> list[str]:
    """Read the concepts of a list in order, each once.

    Args:
        source: the name of a list that comes with the package, or a UTF-8 text file with one concept per line; blank
            lines are ignored. Give a file with the name of a shipped list with its folder: `./nouns`.
        stop_words: drop function words such as "the".

    Example:
        >>> read_vocabulary("toyland")[:3]
        ['dog', 'cat', 'bear']
    """
    shipped = shipped_vocabularies()
    cure = f"give a text file with one concept per line, or one of {', '.join(map(repr, shipped))}."
    path = shipped.get(str(source)) or Path(source).expanduser()
    try:
        text = io.TextIOWrapper(io.BytesIO(read_bytes(path, _MAX_BYTES)), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise SpecError(f"vocabulary '{source}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    except OSError as error:
        meant = did_you_mean(path.stem, [*shipped])
        raise SpecError(f"vocabulary '{source}' cannot be read ({error.strerror or error}); {cure}{meant}") from error
    if "\0" in text:  # UTF-16 without a byte order mark decodes, but not to words
        raise SpecError(f"vocabulary '{source}' is not UTF-8 text (it holds zero bytes); save it as UTF-8.")
    # Only line ends separate concepts, as in text editors; concatenated files may hold byte order marks inside.
    lines = (line.replace("\ufeff", "").strip() for line in text.split("\n"))
    words = list(dict.fromkeys(line for line in lines if line))
    if not words:
        raise SpecError(f"vocabulary '{source}' is empty; {cure}")
    concepts = [word for word in words if not stop_words or word.lower() not in FUNCTION_WORDS]
    if not concepts:
        raise SpecError(f"vocabulary '{source}' holds only function words; keep them, or add concepts.")
    return concepts
