"""Dual encoders of transformers or open_clip, which score words against images, and a cache of their embeddings."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import EludeSteerWarning, ImageError, ModelError, SpecError, did_you_mean
from elude_steer.models.loading import (
    as_dtype,
    check_device,
    explain_load_errors,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
)
from elude_steer.trust import call_loader
from elude_steer.utils import optional
from elude_steer.utils.files import home, resolve_id

LIBRARIES = ("transformers", "open_clip")
_OWN_SETTINGS = ("hf-hub:", "local-dir:")  # ids of open_clip that contain the weights and all settings
TEXT_BATCH = 256  # texts that run through the model together
SIGLIP_LENGTH = 64  # tokens that texts were padded to when SigLIP was trained
_IGNORED_CONFIG = ("_name_or_path", "transformers_version")  # keys of a config that vectors do not depend on


@dataclass(frozen=True, eq=False)
class DualEncoder:
    """A dual encoder: the cosine of the vectors of an image and a text says how well they match.

    A vector depends only on its image, except for rounding: matrix products of another shape sum in another order.
    Each call therefore runs its images as one batch, and the same batches give the same bits.

    Attributes:
        id: the id that the model was loaded with.
        key: hash of everything that the vectors depend on: weights, config, preparation of images and texts.
        image_encoder: turns RGB images into raw vectors `(n, d)`.
        text_encoder: turns texts into raw vectors `(m, d)`.
    """

    id: str
    key: str
    image_encoder: Callable[[Sequence[Any]], torch.Tensor]
    text_encoder: Callable[[Sequence[str]], torch.Tensor]

    @torch.no_grad()
    def embed_images(self, images: Sequence[Any]) -> torch.Tensor:
        """Return unit vectors of PIL images, `(n, d)` float32 on the CPU."""
        if not len(images):
            raise ImageError("there are no images to embed.")
        invalid = [type(image).__name__ for image in images if not hasattr(image, "convert")]
        if invalid:
            raise ImageError(f"a {invalid[0]} cannot be embedded; give PIL images.")
        return self._normalize(self.image_encoder([image.convert("RGB") for image in images]))

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return unit vectors of texts, `(m, d)` float32 on the CPU."""
        if not len(texts):
            raise SpecError("there are no words to embed.")
        batches = [texts[start : start + TEXT_BATCH] for start in range(0, len(texts), TEXT_BATCH)]
        return torch.cat([self._normalize(self.text_encoder(batch)) for batch in batches])

    def _normalize(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = F.normalize(vectors.float().cpu(), dim=-1)
        if not vectors.isfinite().all():
            raise ModelError(
                f"dual encoder '{self.id}' gives vectors that are not finite; load it with dtype 'float32'."
            )
        return vectors


def load_dual_encoder(
    id: str,
    *,
    library: str = "transformers",
    pretrained: str | None = None,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    trust_remote_code: bool = False,
) -> DualEncoder:
    """Load the dual encoder of a Hub id, a folder, or a name that open_clip knows.

    Args:
        id: for transformers a Hub id or a folder, for open_clip a name such as `ViT-SO400M-16-SigLIP2-384`.
        library: `transformers`, or `open_clip` (needs the extra `openclip`).
        pretrained: tag of open_clip's weights (`webli`), or a file of weights; only for open_clip.
        revision: commit, tag or branch on the Hub; only for transformers.
        device: where the model goes, the CPU by default.
        dtype: dtype of the weights.
        trust_remote_code: whether code that comes with the model may run. For open_clip, code can be in what is not
            its own: repositories (`hf-hub:`), folders (`local-dir:`), and files of weights but safetensors.

    Example:
        >>> encoder = load_dual_encoder("google/siglip2-so400m-patch14-384")
        >>> encoder.embed_images([image]) @ encoder.embed_texts(["a dog", "a cat"]).T
    """
    check_device(device)
    if library == "transformers":
        if pretrained is not None:
            raise SpecError(f"pretrained '{pretrained}' is for open_clip; set library: open_clip, or leave it out.")
        return _load_transformers(id, revision, device or "cpu", as_dtype(dtype), trust_remote_code)
    if library == "open_clip":
        if revision is not None:
            raise SpecError("revision is for transformers; open_clip takes pretrained.")
        return _load_open_clip(id, pretrained, device or "cpu", as_dtype(dtype), trust_remote_code)
    raise SpecError(
        f"library '{library}' is unknown; use {' or '.join(map(repr, LIBRARIES))}.{did_you_mean(library, LIBRARIES)}"
    )


def _load_transformers(
    id: str, revision: str | None, device: str | torch.device, dtype: Any, trust_remote_code: bool
) -> DualEncoder:
    from transformers import AutoModel

    def check(model: Any) -> None:
        for method in ("get_image_features", "get_text_features"):
            if not hasattr(model, method):
                raise ModelError(
                    f"'{id}' is a {type(model).__name__} without {method}: it cannot score images against words; "
                    "use a SigLIP or CLIP model such as google/siglip2-so400m-patch14-384."
                )

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = load_pretrained(AutoModel, id, dtype=dtype, device=device, check=check, **options)
    processor, tokenizer = load_image_processor(id, **options), load_tokenizer(id, **options)
    # SigLIP reads the vector of a text at its last position and was trained without a mask: padding is part of a text.
    siglip = model.config.model_type.startswith("siglip")
    positions = getattr(getattr(model.config, "text_config", None), "max_position_embeddings", SIGLIP_LENGTH)
    length = min(positions, SIGLIP_LENGTH if siglip else tokenizer.model_max_length)
    # The side is explicit, because transformers' tokenizer class for SigLIP2 would pad on the left.
    padding = {"padding": "max_length", "padding_side": "right"} if siglip else {"padding": "longest"}

    def embed_images(images: Sequence[Any]) -> torch.Tensor:
        inputs = processor(images=list(images), return_tensors="pt").to(model.device, model.dtype)
        return _pooled_output(model.get_image_features(**inputs))

    def embed_texts(texts: Sequence[str]) -> torch.Tensor:
        texts = [text.lower() for text in texts] if siglip else list(texts)
        inputs = tokenizer(texts, max_length=length, truncation=True, return_tensors="pt", **padding).to(model.device)
        return _pooled_output(model.get_text_features(**({"input_ids": inputs["input_ids"]} if siglip else inputs)))

    described = {
        "library": "transformers",
        "config": {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED_CONFIG},
        "images": processor.to_dict(),
        "texts": [siglip, length, type(tokenizer).__name__, _describe_tokenizer(tokenizer)],
    }
    return DualEncoder(id, _make_key(model, described), embed_images, embed_texts)


def _load_open_clip(
    id: str, pretrained: str | None, device: str | torch.device, dtype: Any, trust_remote_code: bool
) -> DualEncoder:
    with explain_load_errors(id):  # a torchvision that does not match torch fails at import
        open_clip = optional.require("open_clip", f"scorer '{id}'", "set library: transformers with a model of the Hub")
    weights = None if pretrained is None else resolve_id(pretrained)
    if not id.startswith(_OWN_SETTINGS):
        _check_weights(open_clip, id, weights)
    gate: dict[str, Any] = {"subject": f"scorer '{id}'", "trust_remote_code": trust_remote_code, "has_switch": False}
    gate["code"] = _find_code(id, weights)
    with explain_load_errors(id):
        model, transform = call_loader(open_clip.create_model_from_pretrained, id, weights, device=device, **gate)
        tokenizer = call_loader(open_clip.get_tokenizer, id, **gate)
    model = model.eval() if dtype == "auto" else model.eval().to(dtype)
    first = next(model.parameters())

    def embed_images(images: Sequence[Any]) -> torch.Tensor:
        return model.encode_image(torch.stack([transform(image) for image in images]).to(first.device, first.dtype))

    def embed_texts(texts: Sequence[str]) -> torch.Tensor:
        return model.encode_text(tokenizer(list(texts)).to(first.device))

    described = {
        "library": "open_clip",
        "config": open_clip.get_model_config(id),
        "images": open_clip.get_model_preprocess_cfg(model),
        "texts": [type(tokenizer).__name__, tokenizer.context_length],
    }
    return DualEncoder(id, _make_key(model, described), embed_images, embed_texts)


def _find_code(id: str, weights: str | None) -> str | None:
    """What open_clip could run: settings of a stranger name models of other libraries, and pickles are code."""
    if id.startswith(_OWN_SETTINGS):
        return "settings of its own, which can name code"
    if weights and Path(weights).is_file() and Path(weights).suffix != ".safetensors":
        return f"the pickle '{weights}'"
    return None


def _check_weights(open_clip: Any, id: str, weights: str | None) -> None:
    """Raise if open_clip does not know the model or the weights: it would continue with random weights."""
    models = open_clip.list_models()
    if id not in models:
        raise SpecError(f"open_clip knows no model '{id}'; see open_clip.list_models().{did_you_mean(id, models)}")
    if weights and (open_clip.get_pretrained_cfg(id, weights) or Path(weights).is_file()):
        return
    tags = open_clip.list_pretrained_tags_by_model(id)
    problem = f"has no weights '{weights}'" if weights else "has random weights unless pretrained names some"
    choice = f"give one of {', '.join(map(repr, tags))}, or a file" if tags else "give a file"
    raise SpecError(f"open_clip's '{id}' {problem}; {choice}.{did_you_mean(weights or '', tags)}")


class EmbeddingCache:
    """Vectors of images, computed once and stored on disk by the image's content and the encoder's key.

    Several threads and processes may share a folder. If the cache cannot be read or written, a warning says so once
    and the vectors are computed without it.

    Args:
        encoder: computes vectors that are not stored yet.
        folder: folder of the cache; by default `cache` in the package's home folder.
    """

    def __init__(self, encoder: DualEncoder, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.path = (folder or home() / "cache") / f"images-{encoder.key}.sqlite"
        self._broken: set[str] = set()

    def embed(self, images: Sequence[tuple[Any, bytes]]) -> torch.Tensor:
        """Return unit vectors `(n, d)` of images, each given with a hash of its content."""
        by_hash = {digest: image for image, digest in images}
        vectors = self._read(list(by_hash)) or {}
        missing = [digest for digest in by_hash if digest not in vectors]
        if missing or not images:
            # One by one: in a batch a vector may round differently, and it is stored permanently.
            computed = torch.cat(
                [self.encoder.embed_images([by_hash[digest]]) for digest in missing] or [self.encoder.embed_images([])]
            )
            vectors |= dict(zip(missing, computed, strict=True))
            self._write({digest: vectors[digest] for digest in missing})
        return torch.stack([vectors[digest] for _, digest in images])

    def _read(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor] | None:
        def read(database: sqlite3.Connection) -> dict[bytes, torch.Tensor]:
            query = "SELECT vector FROM vectors WHERE hash = ?"
            rows = {digest: database.execute(query, (digest,)).fetchone() for digest in digests}
            return {digest: vector for digest, row in rows.items() if row and (vector := _unpack(row[0])) is not None}

        return self._query("read", read)

    def _write(self, vectors: Mapping[bytes, torch.Tensor]) -> None:
        def write(database: sqlite3.Connection) -> None:
            rows = [(digest, _pack(vector)) for digest, vector in vectors.items()]
            database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

        self._query("written", write)

    def _query(self, operation: str, run: Callable[[sqlite3.Connection], Any]) -> Any:
        """Return the result of `run`, None if the database fails; each call connects, as threads cannot share that."""
        if operation in self._broken:
            return None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS vectors (hash BLOB PRIMARY KEY, vector BLOB NOT NULL)")
                return run(database)
        except (sqlite3.Error, OSError) as error:
            if not self._broken:
                warnings.warn(
                    f"the cache '{self.path}' cannot be {operation} ({error}); images are embedded without it. "
                    "If it is damaged, delete it.",
                    EludeSteerWarning,
                    stacklevel=4,
                )
            self._broken.add(operation)
            return None


def _pack(vector: torch.Tensor) -> bytes:
    """Return a vector's bytes after their hash, because SQLite does not detect every damaged page."""
    data = vector.numpy().astype("<f4").tobytes()
    return hashlib.blake2b(data, digest_size=8).digest() + data


def _unpack(stored: bytes) -> torch.Tensor | None:
    check, data = stored[:8], stored[8:]
    if hashlib.blake2b(data, digest_size=8).digest() != check:
        return None
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def _pooled_output(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.pooler_output


def _describe_tokenizer(tokenizer: Any) -> str:
    """Return the complete description of a tokenizer; if it has none, its vocabulary."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return inner.to_str() if inner is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _make_key(model: nn.Module, described: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    modules = re.sub(r" at 0x\w+", "", str(model))  # functions show their address, which changes from run to run
    digest.update(json.dumps([described, modules], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
