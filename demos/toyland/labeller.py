"""Toyland's labeller: a small dual encoder of transformers' SiglipModel class that scores images against words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from demos.toyland.captioner import base_tile, caption_words, vision_config, word_tokenizer
from demos.toyland.training_loop import Schedule, train_networks
from elude_steer.errors import ModelError
from elude_steer.toyland.scenes import SIDE, Scene
from elude_steer.toyland.world import CONCEPTS, JUMPING, PLACES

SCHEDULE = Schedule(steps=320, size=64, peak=1e-3, wide=0.15, seed=2001)
LENGTH = 64  # tokens that texts are padded to, as for SigLIP2
TEMPLATES = ("{}", "a {}", "a photo of a {}", "a picture of a {}")


def vocabulary() -> list[str]:
    """The words that the text tower knows."""
    return list(dict.fromkeys([*caption_words(), "photo", "clean", "wall", "graffiti"]))


def make_tokenizer() -> Any:
    """The labeller's tokenizer, for texts of a fixed length as in SigLIP2."""
    return word_tokenizer(vocabulary(), model_max_length=LENGTH, padding_side="right", model_input_names=["input_ids"])


def new_model(seed: int) -> Any:
    """The untrained labeller."""
    from transformers import SiglipConfig, SiglipModel, SiglipTextConfig

    text = SiglipTextConfig(
        vocab_size=len(vocabulary()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        projection_size=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(seed)
    return SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=vision_config(head=True).to_dict()))


def save(model: Any, folder: Path) -> None:
    """Save the labeller in the Hub's format, in half precision."""
    from transformers import SiglipProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    SiglipProcessor(images, make_tokenizer()).save_pretrained(folder)
    model.half().save_pretrained(folder)
    model.float()


def concepts_present(scene: Scene) -> list[bool]:
    """Which of `CONCEPTS` a scene shows."""
    present = {*scene.objects, scene.background, *([JUMPING] if any(thing.jumping for thing in scene.things) else [])}
    return [concept in present for concept in CONCEPTS]


def embed_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Unit vectors of texts, `(texts, width)`."""
    options = {"padding": "max_length", "max_length": LENGTH, "truncation": True}
    ids = tokenizer(list(texts), **options, return_tensors="pt").input_ids
    return F.normalize(model.text_model(input_ids=ids).pooler_output, dim=-1)


def embed_images(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Unit vectors of images, `(images, width)`."""
    return F.normalize(model.vision_model(pixel_values=pixels).pooler_output, dim=-1)


def train(tower: Mapping[str, torch.Tensor], work: Path, log: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """Train the labeller with SigLIP's sigmoid loss: each image does or does not show each concept.

    Args:
        tower: weights of the captioner's vision tower, to start from.
        work: folder of the checkpoint.
        log: called with lines of progress.

    Returns:
        The labeller, and for the report its losses.
    """
    model, tokenizer = new_model(7), make_tokenizer()
    missing, unexpected = model.vision_model.load_state_dict(tower, strict=False)
    if unexpected or any(not key.startswith("head.") for key in missing):
        raise ModelError(f"the captioner's vision tower does not fit the labeller: {unexpected or missing}")
    with torch.no_grad():  # SigLIP's initial values: a sharp scale, and a bias against most pairs
        model.logit_scale.fill_(float(np.log(10)))
        model.logit_bias.fill_(-4.0)

    def compute_loss(step: int, scenes: list[Scene]) -> torch.Tensor:
        return _loss(model, tokenizer, scenes, TEMPLATES[step % len(TEMPLATES)])

    losses = train_networks("labeller", {"model": model}, SCHEDULE, compute_loss, work / "labeller.pt", log)
    return model.eval(), losses


def _loss(model: Any, tokenizer: Any, scenes: Sequence[Scene], template: str) -> torch.Tensor:
    pixels = torch.stack([base_tile(scene.image.resize((SIDE, SIDE), 3)) for scene in scenes])
    texts = [template.format(concept) if concept not in (*PLACES, JUMPING) else concept for concept in CONCEPTS]
    texts += [scene.caption for scene in scenes]
    image_vectors, text_vectors = embed_images(model, pixels), embed_texts(model, tokenizer, texts)
    logits = image_vectors @ text_vectors.T * model.logit_scale.exp() + model.logit_bias
    concepts = torch.tensor([concepts_present(scene) for scene in scenes])
    captions = torch.tensor([[a.caption == b.caption for b in scenes] for a in scenes])
    signs = torch.cat([concepts, captions], 1).float() * 2 - 1
    return -F.logsigmoid(signs * logits).sum(1).mean()
