"""Photoland's labeller: transformers' own `VisionTextDualEncoderModel`, which scores photos against words.

It joins the tower, with one more block, and MiniLM, a sentence encoder. What is trained is the last block of each and
the projections behind them: on the captions of photos (which belongs to which), and on single words (which photo shows
what its captions name). It is needed to label the sub-units of an atlas, not to use one, so it is not part of the
package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from demos.photoland.captioner import Schedule
from demos.photoland.features import MEAN, STD
from demos.photoland.flickr8k import Photo
from demos.photoland.tower import SIDE, make_tower
from demos.toyland.training_loop import train_networks
from elude_steer.evaluation.edits.caption_reader import plural

WIDTH = 256
SCHEDULE = Schedule(passes=4, peak=1e-3, shown=1.0, seed=3, size=100, warmup=50)
LENGTH = 32  # tokens of a text


def new_model(onnx: Path, teacher: Path, seed: int) -> Any:
    """The dual encoder, with the blocks of the tower and of MiniLM, and untrained projections."""
    from transformers import BertModel, VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    vision, text = make_tower(onnx, blocks=12), BertModel.from_pretrained(teacher, dtype=torch.float32)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision.config, text.config, projection_dim=WIDTH)
    torch.manual_seed(seed)
    model = VisionTextDualEncoderModel(config, vision_model=vision, text_model=text)
    model.requires_grad_(requires_grad=False)
    for part in trained_parts(model).values():
        part.requires_grad_(requires_grad=True)
    return model


def trained_parts(model: Any) -> dict[str, nn.Module]:
    """The modules that training changes."""
    return {
        "vision_block": model.vision_model.encoder.layer[-1],
        "vision_norm": model.vision_model.layernorm,
        "text_block": model.text_model.encoder.layer[-1],
        "pooler": model.text_model.pooler,
        "vision_projection": model.visual_projection,
        "text_projection": model.text_projection,
    }


def save(model: Any, teacher: Path, folder: Path) -> None:
    """Save the labeller in the Hub's format, in half precision."""
    from transformers import AutoTokenizer
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    images = BitImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=list(MEAN), image_std=list(STD)
    )
    images.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    model.half().save_pretrained(folder)
    model.float()


@dataclass(frozen=True)
class Texts:
    """What the frozen blocks of the text encoder make of some texts: `(texts, tokens, width)`, and the mask."""

    states: torch.Tensor
    mask: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def encode(cls, model: Any, tokenizer: Any, texts: Sequence[str]) -> Texts:
        """Run texts through all blocks but the last."""
        states = torch.zeros(len(texts), LENGTH, model.text_model.config.hidden_size, dtype=torch.half)
        mask = torch.zeros(len(texts), LENGTH, dtype=torch.bool)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
        for start in range(0, len(order), 250):
            part = order[start : start + 250]
            options = {"padding": "longest", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
            inputs = tokenizer([texts[i] for i in part], **options)
            hidden = model.text_model(**inputs, output_hidden_states=True).hidden_states[-2]
            states[part, : hidden.shape[1]] = hidden.half()
            mask[part, : hidden.shape[1]] = inputs["attention_mask"].bool()
        return cls(states.clone(), mask.clone())

    def embed(self, model: Any, rows: Sequence[int] | slice) -> torch.Tensor:
        """Unit vectors of some of the texts, through the trained parts."""
        states, mask = self.states[rows].float(), self.mask[rows]
        longest = int(mask.sum(1).max())
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None, None, :longest]
        out = model.text_model.encoder.layer[-1](states[:, :longest], attention_mask=added)
        hidden = out[0] if isinstance(out, tuple) else out
        return F.normalize(model.text_projection(model.text_model.pooler(hidden)), dim=-1)


def embed_features(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Unit vectors of photos from what the tower made of them, `(photos, 1 + patches, width)`."""
    out = model.vision_model.encoder.layer[-1](features)
    hidden = model.vision_model.layernorm(out[0] if isinstance(out, tuple) else out)
    return F.normalize(model.visual_projection(hidden[:, 0]), dim=-1)


def words_in(photos: Sequence[Photo], words: Sequence[str]) -> torch.Tensor:
    """How many captions of each photo name each word or its plural, `(photos, words)`."""
    forms = [{f" {word} ", f" {plural(word)} "} for word in words]
    texts = [[f" {caption} " for caption in photo.captions] for photo in photos]
    counts = [[sum(any(form in text for form in own) for text in five) for own in forms] for five in texts]
    return torch.tensor(counts)


def train(
    model: Any,
    tokenizer: Any,
    photos: Sequence[Photo],
    features: Sequence[np.ndarray],
    words: Sequence[str],
    work: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train the labeller in place; `features` are those of the photos and of their mirror images."""
    captions = Texts.encode(model, tokenizer, [caption for photo in photos for caption in photo.captions])
    single = Texts.encode(model, tokenizer, words)
    counts = words_in(photos, words)
    scale = nn.ParameterDict({"caption": torch.tensor(2.7), "word": torch.tensor(2.7), "bias": torch.tensor(-5.0)})

    def compute_loss(step: int, batch: list[int]) -> torch.Tensor:
        rng = np.random.default_rng([SCHEDULE.seed, step, 7])
        sides = rng.integers(0, len(features), len(batch))
        shown = np.stack([features[side][i] for side, i in zip(sides, batch, strict=True)])
        images = embed_features(model, torch.from_numpy(shown.astype(np.float32)))
        texts = captions.embed(model, [5 * i + int(rng.integers(5)) for i in batch])
        logits = images @ texts.T * scale["caption"].exp()
        same = torch.arange(len(batch))
        pairs = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
        named = counts[batch]
        scores = images @ single.embed(model, slice(None)).T * scale["word"].exp() + scale["bias"]
        known = (named != 1).float()  # one caption alone may be wrong
        single_loss = F.binary_cross_entropy_with_logits(scores, (named > 1).float(), known, reduction="sum")
        return pairs + 0.2 * single_loss / len(batch)

    networks = {**trained_parts(model), "scale": scale}
    return train_networks("labeller", networks, SCHEDULE, compute_loss, work / "labeller.pt", log)
