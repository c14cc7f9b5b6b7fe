"""Toyland's labeller: a small dual encoder of transformers' SiglipModel class that scores pictures against words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from demos.toyland.captioner import base_tile, vision_config, word_tokenizer, words
from demos.toyland.training_loop import Course, learn
from elude_steer.errors import ModelError
from elude_steer.toyland.scenes import SIDE, Scene
from elude_steer.toyland.world import CONCEPTS, JUMPING, PLACES

COURSE = Course(steps=320, size=64, peak=1e-3, wide=0.15, seed=2001)
LENGTH = 64  # tokens of a text, as SigLIP2 pads
FRAMES = ("{}", "a {}", "a photo of a {}", "a picture of a {}")


def vocabulary() -> list[str]:
    """What the text tower can read."""
    return list(dict.fromkeys([*words(), "photo", "clean", "wall", "graffiti"]))


def tokenizer() -> Any:
    """Texts of a fixed length, as SigLIP2 wants them."""
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
    """Writes the labeller as the Hub would have it, in half precision."""
    from transformers import SiglipProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    SiglipProcessor(images, tokenizer()).save_pretrained(folder)
    model.half().save_pretrained(folder)
    model.float()


def present(scene: Scene) -> list[bool]:
    """Which of `CONCEPTS` a scene shows."""
    shown = {*scene.objects, scene.background, *([JUMPING] if any(thing.jumping for thing in scene.things) else [])}
    return [concept in shown for concept in CONCEPTS]


def embed_texts(model: Any, names: Any, texts: Sequence[str]) -> torch.Tensor:
    """Unit vectors of some texts, `(texts, width)`."""
    ids = names(list(texts), padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt").input_ids
    return F.normalize(model.text_model(input_ids=ids).pooler_output, dim=-1)


def embed_images(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Unit vectors of some pictures, `(pictures, width)`."""
    return F.normalize(model.vision_model(pixel_values=pixels).pooler_output, dim=-1)


def train(tower: Mapping[str, torch.Tensor], work: Path, log: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """The trained labeller: every picture is told yes or no for every concept, as SigLIP's sigmoid loss does.

    Args:
        tower: the weights of the captioner's vision tower, to start from.
        work: where the checkpoint is.
        log: gets a line now and then.
    """
    model, names = new_model(7), tokenizer()
    missing, unexpected = model.vision_model.load_state_dict(tower, strict=False)
    if unexpected or any(not key.startswith("head.") for key in missing):
        raise ModelError(f"the captioner's tower is not the labeller's: {unexpected or missing}")
    with torch.no_grad():  # as SigLIP starts: sharp, and sure that most pairs do not fit
        model.logit_scale.fill_(float(np.log(10)))
        model.logit_bias.fill_(-4.0)

    def loss_of(step: int, scenes: list[Scene]) -> torch.Tensor:
        return _loss(model, names, scenes, FRAMES[step % len(FRAMES)])

    course = learn("labeller", {"model": model}, COURSE, loss_of, work / "labeller.pt", log)
    return model.eval(), course


def _loss(model: Any, names: Any, scenes: Sequence[Scene], frame: str) -> torch.Tensor:
    pixels = torch.stack([base_tile(scene.image.resize((SIDE, SIDE), 3)) for scene in scenes])
    texts = [frame.format(concept) if concept not in (*PLACES, JUMPING) else concept for concept in CONCEPTS]
    texts += [scene.caption for scene in scenes]
    pictures, said = embed_images(model, pixels), embed_texts(model, names, texts)
    logits = pictures @ said.T * model.logit_scale.exp() + model.logit_bias
    of_concepts = torch.tensor([present(scene) for scene in scenes])
    of_captions = torch.tensor([[a.caption == b.caption for b in scenes] for a in scenes])
    signs = torch.cat([of_concepts, of_captions], 1).float() * 2 - 1
    return -F.logsigmoid(signs * logits).sum(1).mean()
