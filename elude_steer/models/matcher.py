"""The text model that compares words, and the vectors of complete vocabularies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from elude_steer.errors import ModelError, StorageError
from elude_steer.models.static_embedding import load_static_embedding
from elude_steer.trust import UntrustedCodeError, call_loader
from elude_steer.utils.files import home, read_array, resolve_id, write_array
from elude_steer.utils.hub import check_available, why_unreachable

_VECTORS: dict[str, np.ndarray] = {}  # vectors of vocabularies, by content and matcher
_PROBES = ("dog", "a red car", "Häuser", "the sea at night", "42")


@dataclass(frozen=True, eq=False)
class Matcher:
    """A sentence-transformers model that embeds words; `key` identifies it by the vectors that it computes."""

    id: str
    key: str
    model: Any

    def embed(self, words: Sequence[str]) -> np.ndarray:
        """Return unit vectors of words, `(words, width)` float32."""
        return _embed(self.model, words)


def load_matcher(
    id: str, *, revision: str | None = None, trust_remote_code: bool = False, device: str | None = None
) -> Matcher:
    """Load the matcher of a Hub id or folder, once per process.

    Args:
        id: e.g. `perplexity-ai/pplx-embed-v1-0.6b`, or `toyland/matcher`.
        revision: commit, tag or branch on the Hub.
        trust_remote_code: whether code that comes with the model may run.
        device: where it computes, the CPU by default.

    Example:
        >>> load_matcher("toyland/matcher").embed(["puppy", "dog"]) @ ...
    """
    return _load(resolve_id(id), id, revision, trust_remote_code, device or "cpu")


def check_matcher(id: str) -> None:
    """Raise if a matcher can be loaded neither from this machine nor from the Hub."""
    if not os.environ.get("SENTENCE_TRANSFORMERS_HOME"):  # the library's own cache, if there is one
        check_available(resolve_id(id), "matcher")


@lru_cache(maxsize=4)
def _load(source: str, id: str, revision: str | None, trust_remote_code: bool, device: str) -> Matcher:
    folder = Path(source)
    if source.startswith((".", "/")) and not folder.is_dir():
        raise ModelError(f"there is no folder '{id}' to load a matcher from; check matcher.id, or give a Hub id.")
    check_matcher(id)
    try:
        model = load_static_embedding(folder, device) if folder.is_dir() else None
        if model is None:
            model = _load_sentence_transformer(source, id, revision, trust_remote_code, device)
    except UntrustedCodeError:
        raise
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"matcher '{id}' could not be loaded: {cause}") from error
    # The vectors of a few words identify a model as surely as its weights, without reading gigabytes.
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{id}{revision}".encode() + _embed(model, _PROBES).tobytes())
    return Matcher(id, digest.hexdigest(), model)


def _load_sentence_transformer(source: str, id: str, revision: str | None, trust_remote_code: bool, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    from elude_steer.models.loading import SETTINGS, hide_weight_bars, inspect_folder

    local: dict[str, Any] = {"local_files_only": True} if Path(source).is_dir() or why_unreachable() else {}
    folder, cache = Path(source), os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    with hide_weight_bars():
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            names = list(SETTINGS)
            folder = Path(snapshot_download(source, revision=revision, cache_dir=cache, allow_patterns=names, **local))
            revision = folder.name  # the commit, so that what is loaded is what was inspected
        return call_loader(
            SentenceTransformer,
            source,
            subject=f"matcher '{id}'",
            trust_remote_code=trust_remote_code,
            code=inspect_folder(folder),
            revision=revision,
            device=device,
            model_kwargs={"use_safetensors": True},  # other formats hold pickles
            **local,
        )


def _embed(model: Any, words: Sequence[str]) -> np.ndarray:
    # Some models return int8 vectors that are not normalised, whose products overflow.
    raw = np.asarray(model.encode(list(words), convert_to_numpy=True, show_progress_bar=False), dtype=np.float32)
    return raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-12)


def vocabulary_vectors(matcher: Matcher, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Return unit vectors of a complete vocabulary, `(M, width)`, computed once and stored in memory and on disk."""
    key = hashlib.blake2b("\n".join((matcher.key, *vocabulary)).encode(), digest_size=12).hexdigest()
    if key not in _VECTORS:
        path = home() / "cache" / f"words-{key}.npy"
        try:
            vectors = np.array(read_array(path)) if path.exists() else None
        except StorageError:
            vectors = None  # damaged, so compute it again
        if vectors is None or len(vectors) != len(vocabulary):
            vectors = matcher.embed(vocabulary)
            with suppress(StorageError):  # without the file, the next process computes it again
                write_array(path, vectors, clean=True)
        _VECTORS[key] = vectors
    return _VECTORS[key]
