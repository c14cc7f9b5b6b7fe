"""Toyland's captioner: a small LLaVA-OneVision of transformers' own classes, and its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from demos.toyland.training_loop import Schedule, train_networks
from elude_steer.models.saving import save_processor
from elude_steer.toyland.scenes import CLUTTER, PATCH, SIDE, Scene
from elude_steer.toyland.world import JUMPING, OBJECTS, PLACES

PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
PROMPTS = (
    "Describe this image in one sentence.",
    "Describe this image in one sentence.",
    "Describe this image in one sentence.",
    "What is in this picture?",
    "Describe the image.",
    "Write a caption for this picture.",
    "What do you see?",
)
SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
CLASSES = (*OBJECTS, *PLACES, CLUTTER)  # what a patch can show


def caption_words() -> list[str]:
    """The captioner's vocabulary: special tokens, then all words of captions and prompts."""
    words = {"nothing", "a", "an", "on", "above", "under", "next", "to", "with", JUMPING, *OBJECTS, "user", "assistant"}
    for text in (*PLACES.values(), *PROMPTS):
        words |= set(text.lower().replace(".", " .").replace("?", " ?").split())
    return [*SPECIAL, *sorted(words)]


def word_tokenizer(words: Sequence[str], **options: Any) -> Any:
    """A tokenizer of whole words in lower case."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>", **options
    )


def make_tokenizer() -> Any:
    """The captioner's tokenizer, with the special tokens of a conversation."""
    special = ["<image>", "<video>"]
    return word_tokenizer(
        caption_words(), bos_token="<|im_start|>", additional_special_tokens=special, clean_up_tokenization_spaces=False
    )


def vision_config(*, head: bool) -> Any:
    """The vision tower of captioner and labeller; only the labeller has the head, which pools an image."""
    from transformers import SiglipVisionConfig

    return SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=head,
    )


def new_model(seed: int) -> Any:
    """The untrained captioner."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Config

    ids = {word: i for i, word in enumerate(SPECIAL)}
    text = Qwen2Config(
        vocab_size=len(caption_words()),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<pad>"],
    )
    config = LlavaOnevisionConfig(
        vision_config=vision_config(head=False),
        text_config=text,
        image_grid_pinpoints=PINPOINTS,
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<pad>"],
    )
    torch.manual_seed(seed)
    return LlavaOnevisionForConditionalGeneration(config)


def save(model: Any, folder: Path) -> None:
    """Save the captioner in the Hub's format: half-precision weights, image processor, tokenizer, chat template."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    images = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=PINPOINTS,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    # The processor of the same name without its video part, which needs torchvision.
    parts = {"get_attributes": classmethod(lambda _cls: ["image_processor", "tokenizer"])}
    image_only: Any = type("LlavaOnevisionProcessor", (LlavaOnevisionProcessor,), parts)
    processor = image_only(
        image_processor=images,
        tokenizer=make_tokenizer(),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    )
    save_processor(processor, folder)
    model.half().save_pretrained(folder)
    model.float()


def tiles(image: Image.Image) -> torch.Tensor:
    """The tiles that the image processor makes of an image whose size is whole tiles, `(tiles, 3, side, side)`."""
    base = image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    across, down = image.width // SIDE, image.height // SIDE
    crops = [(x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE) for y in range(down) for x in range(across)]
    stack = np.stack([np.asarray(base), *(np.asarray(image.crop(box)) for box in crops)])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 127.5 - 1


def base_tile(image: Image.Image) -> torch.Tensor:
    """Only the tile that shows the whole image, `(3, side, side)`."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def patch_classes(scene: Scene) -> torch.Tensor:
    """Index into `CLASSES` of what each patch of a square scene shows, `(patches,)`; `scene.patches`, but faster."""
    kinds = [*range(1, len(scene.things) + 1), 255]
    cells = scene.truth.reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    cover = np.stack([(cells == kind).mean((1, 3)) for kind in kinds])  # (kinds, rows, columns)
    ids = np.array([CLASSES.index(name) for name in (*scene.objects, CLUTTER)])
    classes = np.where(cover.max(0) >= 0.3, ids[cover.argmax(0)], CLASSES.index(scene.background))
    return torch.from_numpy(classes.ravel())


class CaptionerLosses:
    """Losses of the captioner, composed from the model's parts so that training computes only what it needs."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokenizer = model, make_tokenizer()
        self.patch_head = nn.Linear(128, len(CLASSES))

    def patch_features(self, pixels: torch.Tensor) -> torch.Tensor:
        """The tower's output before the projector, `(tiles, patches, width)`."""
        return self.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]

    def patch_loss(self, features: torch.Tensor, scenes: Sequence[Scene]) -> torch.Tensor:
        """Cross-entropy of classifying what each patch shows."""
        targets = torch.stack([patch_classes(scene) for scene in scenes])
        return F.cross_entropy(self.patch_head(features).flatten(0, 1), targets.flatten())

    def caption_loss(self, images: Sequence[torch.Tensor], scenes: Sequence[Scene], prompt: str) -> torch.Tensor:
        """Cross-entropy of the correct captions; `images` are the packed patches of each image, `(tokens, width)`."""
        inner, tokenize = self.model.model, self.tokenizer
        head, tail = f"<|im_start|>user <image> {prompt}<|im_end|><|im_start|>assistant".split("<image>")
        ends = [f"{tail} {scene.caption}<|im_end|>" for scene in scenes]
        before = tokenize(head, add_special_tokens=False, return_tensors="pt").input_ids
        after = tokenize(ends, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        prompt_length = len(tokenize(tail, add_special_tokens=False).input_ids)
        embed = inner.language_model.embed_tokens
        rows = [
            torch.cat([embed(before[0]), patches, embed(text)])
            for patches, text in zip(images, after.input_ids, strict=True)
        ]
        longest = max(map(len, rows))
        inputs = torch.stack(
            [F.pad(row, (0, 0, longest - len(row), 0)) for row in rows]
        )  # pad on the left, as generation does
        mask = torch.stack([F.pad(torch.ones(len(row)), (longest - len(row), 0)) for row in rows])
        width = after.input_ids.shape[1]
        mask[:, -width:] *= after.attention_mask
        positions = (mask.cumsum(1) - 1).clamp_min(0).long()
        out = inner.language_model(inputs_embeds=inputs, attention_mask=mask.long(), position_ids=positions)
        hidden = out.last_hidden_state[:, -(width - prompt_length + 1) : -1]
        padding = after.attention_mask[:, prompt_length:] == 0
        targets = after.input_ids[:, prompt_length:].masked_fill(padding, -100)
        return F.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100)

    def pack(self, features: torch.Tensor, scenes: Sequence[Scene], counts: Sequence[int]) -> list[torch.Tensor]:
        """Project the patches of each image and pack them with newlines, as the model does."""
        inner = self.model.model
        projected = inner.multi_modal_projector(features).split(list(counts))
        sizes = [(scene.image.height, scene.image.width) for scene in scenes]
        return inner.pack_image_features(projected, sizes, image_newline=inner.image_newline)[0]


PHASES = {
    "patches": Schedule(steps=400, size=64, peak=3e-3, wide=0.0, seed=1001),
    "captions": Schedule(steps=2000, size=48, peak=2e-3, wide=0.0, seed=1002),
    "tiles": Schedule(steps=1400, size=48, peak=1.5e-3, wide=0.3, seed=1003),
    "crowds": Schedule(steps=800, size=48, peak=1.2e-3, wide=0.25, seed=1004, clutter=0.65, crowd=0.35),
    "polish": Schedule(steps=360, size=48, peak=9e-4, wide=0.2, seed=1005, clutter=0.65, crowd=0.2),
    "gaps": Schedule(steps=360, size=48, peak=6e-4, wide=0.2, seed=1006, clutter=0.5, crowd=0.2, hide=0.5),
}
# Only the projector and the language model learn in this phase: things that stand apart, or alone in the air, because
# another one is missing. The tower stays, and with it every atlas of it.
LANGUAGE_PHASE = "gaps"


def train(work: Path, log: Callable[[str], None], start: Any = None) -> tuple[Any, dict[str, Any]]:
    """Train the captioner in phases: patches, captions of one tile, of all tiles, of hard scenes, of scenes with gaps.

    Args:
        work: folder for checkpoints.
        log: called with lines of progress.
        start: a captioner that has done all phases but the last; None trains a new one.

    Returns:
        The captioner, and for the report the losses of each phase.
    """
    losses = CaptionerLosses(start if start is not None else new_model(0))
    losses.model.train()
    phases = {}
    for phase, schedule in PHASES.items():
        if start is not None and phase != LANGUAGE_PHASE:
            continue
        networks = {"model": losses.model, "head": losses.patch_head}  # the patch head is not saved with the model
        if phase == LANGUAGE_PHASE:
            networks = language_parts(losses.model)

        def compute_loss(step: int, scenes: list[Scene], phase: str = phase) -> torch.Tensor:
            return phase_loss(phase, losses, scenes, PROMPTS[step % len(PROMPTS)])

        label, checkpoint = f"captioner, {phase}", work / f"captioner-{phase}.pt"
        phases[phase] = train_networks(label, networks, schedule, compute_loss, checkpoint, log)
    return losses.model.eval(), phases


def language_parts(model: Any) -> dict[str, nn.Module]:
    """The modules behind the vision tower; the tower's weights no longer change."""
    model.model.vision_tower.requires_grad_(requires_grad=False)
    projector, language = model.model.multi_modal_projector, model.model.language_model
    parts = {"projector": projector, "language_model": language, "lm_head": model.lm_head}
    for part in parts.values():
        part.requires_grad_(requires_grad=True)
    return parts


def phase_loss(phase: str, losses: CaptionerLosses, scenes: Sequence[Scene], prompt: str) -> torch.Tensor:
    """The loss of a phase: patches alone, then also captions of one tile, then also captions of all tiles."""
    if phase in ("patches", "captions"):
        features = losses.patch_features(torch.stack([base_tile(scene.image) for scene in scenes]))
        patch_loss = losses.patch_loss(features, scenes)
        if phase == "patches":
            return patch_loss
        packed = losses.pack(features, scenes, [1] * len(scenes))
        return losses.caption_loss(packed, scenes, prompt) + 0.3 * patch_loss
    # The only tile of a square image equals its base tile, so the tower computes it once.
    square = [scene.image.size == (SIDE, SIDE) for scene in scenes]
    stacks = [tiles(scene.image)[int(alone) :] for scene, alone in zip(scenes, square, strict=True)]
    parts = losses.patch_features(torch.cat(stacks)).split([len(stack) for stack in stacks])
    images = [torch.cat([part, part]) if alone else part for part, alone in zip(parts, square, strict=True)]
    packed = losses.pack(torch.cat(images), scenes, [len(part) for part in images])
    caption_loss = losses.caption_loss(packed, scenes, prompt)
    if phase == LANGUAGE_PHASE:
        return caption_loss
    base = torch.stack([part[0] for part, alone in zip(images, square, strict=True) if alone])
    patch_loss = losses.patch_loss(base, [scene for scene, alone in zip(scenes, square, strict=True) if alone])
    return caption_loss + 0.2 * patch_loss
