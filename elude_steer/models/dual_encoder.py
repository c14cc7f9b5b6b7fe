"""How well words fit pictures: dual encoders of transformers or open_clip behind one interface, and what they saw."""

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
from elude_steer.utils import optional
from elude_steer.utils.files import home, resolve_id

LIBRARIES = ("transformers", "open_clip")
TEXTS = 256  # texts that go through the model together
SIGLIP_LENGTH = 64  # tokens that SigLIP's texts were filled up to when it was trained
_NO_MATTER = ("_name_or_path", "transformers_version")  # of a configuration: vectors do not depend on them


@dataclass(frozen=True, eq=False)
class DualEncoder:
    """A dual encoder: the cosine of a picture's and a text's vector says how well they fit.

    A vector depends on its picture alone but for rounding: matrix products of another shape add up in another order.
    Pictures therefore go through the model as they are given, one call one batch, and who wants the same bits twice
    gives the same batches twice.

    Attributes:
        id: what it was loaded by.
        key: hash of all that the vectors depend on: weights, configuration, preparation of pictures and texts.
        image_encoder: RGB pictures to raw vectors `(n, d)`.
        text_encoder: texts to raw vectors `(m, d)`.
    """

    id: str
    key: str
    image_encoder: Callable[[Sequence[Any]], torch.Tensor]
    text_encoder: Callable[[Sequence[str]], torch.Tensor]

    @torch.no_grad()
    def embed_images(self, pictures: Sequence[Any]) -> torch.Tensor:
        """Unit vectors of PIL images, `(n, d)` float32 on the CPU."""
        if not len(pictures):
            raise ImageError("there are no images to embed.")
        odd = [type(picture).__name__ for picture in pictures if not hasattr(picture, "convert")]
        if odd:
            raise ImageError(f"a {odd[0]} cannot be embedded; give PIL images.")
        return self._unit(self.image_encoder([picture.convert("RGB") for picture in pictures]))

    @torch.no_grad()
    def embed_texts(self, words: Sequence[str]) -> torch.Tensor:
        """Unit vectors of texts, `(m, d)` float32 on the CPU."""
        if not len(words):
            raise SpecError("there are no words to embed.")
        batches = [words[start : start + TEXTS] for start in range(0, len(words), TEXTS)]
        return torch.cat([self._unit(self.text_encoder(batch)) for batch in batches])

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = F.normalize(vectors.float().cpu(), dim=-1)
        if not vectors.isfinite().all():
            raise ModelError(f"scorer '{self.id}' gives vectors that are not finite; load it with dtype 'float32'.")
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
    """The dual encoder of a Hub id, a folder, or a name that open_clip knows.

    Args:
        id: for transformers a Hub id or a folder, for open_clip a name such as `ViT-SO400M-16-SigLIP2-384`.
        library: `transformers`, or `open_clip` (extra `openclip`).
        pretrained: open_clip's tag for the weights (`webli`), or a file of weights; transformers takes none.
        revision: of a Hub id, for transformers.
        device: where the model goes; the CPU if not told.
        dtype: of the weights.
        trust_remote_code: run code that comes with the model, for transformers.

    Example:
        >>> scorer = load_dual_encoder("google/siglip2-so400m-patch14-384")
        >>> scorer.embed_images([picture]) @ scorer.embed_texts(["a dog", "a cat"]).T
    """
    check_device(device)
    if library == "transformers":
        if pretrained is not None:
            raise SpecError(f"pretrained '{pretrained}' is for open_clip; set library: open_clip, or leave it out.")
        return _of_transformers(id, revision, device or "cpu", as_dtype(dtype), trust_remote_code)
    if library == "open_clip":
        if revision is not None or trust_remote_code:
            raise SpecError("revision and trust_remote_code are for transformers; open_clip takes pretrained.")
        return _of_open_clip(id, pretrained, device or "cpu", as_dtype(dtype))
    raise SpecError(
        f"library '{library}' is unknown; use {' or '.join(map(repr, LIBRARIES))}.{did_you_mean(library, LIBRARIES)}"
    )


def _of_transformers(
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
    # SigLIP takes a text's vector from its last place and was trained without a mask: padding is part of the text.
    siglip = model.config.model_type.startswith("siglip")
    places = getattr(getattr(model.config, "text_config", None), "max_position_embeddings", SIGLIP_LENGTH)
    length = min(places, SIGLIP_LENGTH if siglip else tokenizer.model_max_length)
    # The side is told, because transformers' class for the tokenizer of SigLIP2 would fill up on the left.
    padding = {"padding": "max_length", "padding_side": "right"} if siglip else {"padding": "longest"}

    def embed_images(pictures: Sequence[Any]) -> torch.Tensor:
        inputs = processor(images=list(pictures), return_tensors="pt").to(model.device, model.dtype)
        return _pooled(model.get_image_features(**inputs))

    def embed_texts(words: Sequence[str]) -> torch.Tensor:
        texts = [word.lower() for word in words] if siglip else list(words)
        inputs = tokenizer(texts, max_length=length, truncation=True, return_tensors="pt", **padding).to(model.device)
        return _pooled(model.get_text_features(**({"input_ids": inputs["input_ids"]} if siglip else inputs)))

    described = {
        "library": "transformers",
        "config": {name: value for name, value in model.config.to_dict().items() if name not in _NO_MATTER},
        "images": processor.to_dict(),
        "texts": [siglip, length, type(tokenizer).__name__, _spelled(tokenizer)],
    }
    return DualEncoder(id, _key(model, described), embed_images, embed_texts)


def _of_open_clip(id: str, pretrained: str | None, device: str | torch.device, dtype: Any) -> DualEncoder:
    with explain_load_errors(id):  # a torchvision that does not fit torch fails to import in words of its own
        open_clip = optional.require("open_clip", f"scorer '{id}'", "set library: transformers with a model of the Hub")
    weights = None if pretrained is None else resolve_id(pretrained)
    if not id.startswith(("hf-hub:", "local-dir:")):  # these bring their weights
        _check_weights(open_clip, id, weights)
    with explain_load_errors(id):
        model, transform = open_clip.create_model_from_pretrained(id, weights, device=device)
        tokenizer = open_clip.get_tokenizer(id)
    model = model.eval() if dtype == "auto" else model.eval().to(dtype)
    first = next(model.parameters())

    def embed_images(pictures: Sequence[Any]) -> torch.Tensor:
        return model.encode_image(
            torch.stack([transform(picture) for picture in pictures]).to(first.device, first.dtype)
        )

    def embed_texts(words: Sequence[str]) -> torch.Tensor:
        return model.encode_text(tokenizer(list(words)).to(first.device))

    described = {
        "library": "open_clip",
        "config": open_clip.get_model_config(id),
        "images": open_clip.get_model_preprocess_cfg(model),
        "texts": [type(tokenizer).__name__, tokenizer.context_length],
    }
    return DualEncoder(id, _key(model, described), embed_images, embed_texts)


def _check_weights(open_clip: Any, id: str, weights: str | None) -> None:
    """Raises where open_clip has no such model or weights: a model with random ones names nothing."""
    models = open_clip.list_models()
    if id not in models:
        raise SpecError(f"open_clip knows no model '{id}'; see open_clip.list_models().{did_you_mean(id, models)}")
    if weights and (open_clip.get_pretrained_cfg(id, weights) or Path(weights).is_file()):
        return
    tags = open_clip.list_pretrained_tags_by_model(id)
    wanted = f"has no weights '{weights}'" if weights else "has random weights until pretrained says which to take"
    choice = f"give one of {', '.join(map(repr, tags))}, or a file" if tags else "give a file"
    raise SpecError(f"open_clip's '{id}' {wanted}; {choice}.{did_you_mean(weights or '', tags)}")


class EmbeddingCache:
    """Vectors of pictures, each computed once: they are kept on the disk by the picture's content and the scorer's key.

    Several threads and processes may share a folder. A cache that cannot be read or written is done without, after one
    warning.

    Args:
        scorer: computes what is not there yet.
        folder: where the cache is; ours in the user's cache folder if not told.
    """

    def __init__(self, scorer: DualEncoder, folder: Path | None = None) -> None:
        self.scorer = scorer
        self.path = (folder or home() / "cache") / f"images-{scorer.key}.sqlite"
        self._broken: set[str] = set()

    def embed(self, pictures: Sequence[tuple[Any, bytes]]) -> torch.Tensor:
        """Unit vectors `(n, d)` of pictures that come with a hash of their content."""
        by_hash = {digest: picture for picture, digest in pictures}
        known = self._read(list(by_hash)) or {}
        fresh = [digest for digest in by_hash if digest not in known]
        if fresh or not pictures:
            # One by one: beside others a picture's vector may round differently, and it is kept for good.
            vectors = torch.cat(
                [self.scorer.embed_images([by_hash[digest]]) for digest in fresh] or [self.scorer.embed_images([])]
            )
            known |= dict(zip(fresh, vectors, strict=True))
            self._write({digest: known[digest] for digest in fresh})
        return torch.stack([known[digest] for _, digest in pictures])

    def _read(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor] | None:
        def read(base: sqlite3.Connection) -> dict[bytes, torch.Tensor]:
            query = "SELECT vector FROM vectors WHERE hash = ?"
            rows = {digest: base.execute(query, (digest,)).fetchone() for digest in digests}
            return {digest: vector for digest, row in rows.items() if row and (vector := _unpacked(row[0])) is not None}

        return self._ask("read", read)

    def _write(self, vectors: Mapping[bytes, torch.Tensor]) -> None:
        def write(base: sqlite3.Connection) -> None:
            rows = [(digest, _packed(vector)) for digest, vector in vectors.items()]
            base.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

        self._ask("written", write)

    def _ask(self, what: str, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """What the data base answers, None if it does not; a new connection each time, as threads cannot share one."""
        if what in self._broken:
            return None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as base, base:
                base.execute("CREATE TABLE IF NOT EXISTS vectors (hash BLOB PRIMARY KEY, vector BLOB NOT NULL)")
                return work(base)
        except (sqlite3.Error, OSError) as error:
            if not self._broken:
                warnings.warn(
                    f"the cache '{self.path}' cannot be {what} ({error}); pictures are embedded without it. "
                    "If it is damaged, delete it.",
                    EludeSteerWarning,
                    stacklevel=4,
                )
            self._broken.add(what)
            return None


def _packed(vector: torch.Tensor) -> bytes:
    """A vector's bytes after a hash of them: of a damaged page SQLite sees only the worst."""
    data = vector.numpy().astype("<f4").tobytes()
    return hashlib.blake2b(data, digest_size=8).digest() + data


def _unpacked(stored: bytes) -> torch.Tensor | None:
    check, data = stored[:8], stored[8:]
    if hashlib.blake2b(data, digest_size=8).digest() != check:
        return None
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def _pooled(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.pooler_output


def _spelled(tokenizer: Any) -> str:
    """All that a tokenizer knows; of those without a description of their own the vocabulary."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return inner.to_str() if inner is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _key(model: nn.Module, described: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    modules = re.sub(r" at 0x\w+", "", str(model))  # functions in it show their address, which changes from run to run
    digest.update(json.dumps([described, modules], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
