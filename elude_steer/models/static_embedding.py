"""Static embeddings: each token has one vector, and a text is the mean of its tokens.

They are stored in the format of sentence-transformers. Importing that package takes longer than everything else that
a caption needs, and a mean of vectors does not need it: folders that contain nothing else are read here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from elude_steer.utils.files import read_bytes, read_tensors

_WEIGHT = "embedding.weight"
_MAX_BYTES = 2**24  # of a file of settings


@dataclass(frozen=True, eq=False)
class StaticEmbedding:
    """A tokenizer and the vectors of its tokens, `(tokens, width)`; `encode` gives what sentence-transformers gives."""

    tokenizer: Any
    weight: torch.Tensor

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], **_options: Any) -> np.ndarray:
        """Return the mean of the vectors of each text's tokens, `(texts, width)`; zeros for a text without tokens.

        Args:
            texts: words or sentences.
            **_options: those of sentence-transformers that concern arrays and progress bars, which change nothing here.
        """
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        offsets = torch.tensor(np.cumsum([0, *map(len, ids)])[:-1])
        tokens = torch.tensor([token for text in ids for token in text], dtype=torch.long)
        device = self.weight.device
        vectors: np.ndarray = embedding_bag(tokens.to(device), self.weight, offsets.to(device)).cpu().numpy()
        return vectors


def load_static_embedding(folder: Path, device: str = "cpu") -> StaticEmbedding | None:
    """Load the static embedding of a folder; None if there is anything else to compute, such as prompts or layers."""
    modules = _read(folder / "modules.json", [])
    config = _read(folder / "config_sentence_transformers.json", {})
    if not isinstance(modules, list) or not isinstance(config, dict) or len(modules) != 1:
        return None
    kind, prompts = (
        str(modules[0].get("type")),
        {name: text for name, text in config.get("prompts", {}).items() if text},
    )
    if not (kind.startswith("sentence_transformers.") and kind.endswith(".StaticEmbedding")) or prompts:
        return None
    if config.get("truncate_dim") or config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return None
    below = PurePath(str(modules[0].get("path", "")))
    if below.is_absolute() or ".." in below.parts:
        return None
    inner = folder / below
    if not (inner / "tokenizer.json").is_file() or not (inner / "model.safetensors").is_file():
        return None
    tensors = read_tensors(inner / "model.safetensors")
    if set(tensors) != {_WEIGHT} or tensors[_WEIGHT].dtype != torch.float32:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(inner / "tokenizer.json"))
    tokenizer.no_padding()
    return StaticEmbedding(tokenizer, tensors[_WEIGHT].to(device))


def _read(path: Path, default: Any) -> Any:
    """The content of a JSON file; the default where there is none that can be read."""
    try:
        return json.loads(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return default
