"""Toyland's captioner: a small LLaVA-OneVision of transformers' own classes, and how it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from demos.toyland.training_loop import Course, learn
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


def words() -> list[str]:
    """Everything the captioner can read or say."""
    said = {"nothing", "a", "an", "on", "above", "under", "next", "to", "with", JUMPING, *OBJECTS, "user", "assistant"}
    for text in (*PLACES.values(), *PROMPTS):
        said |= set(text.lower().replace(".", " .").replace("?", " ?").split())
    return [*SPECIAL, *sorted(said)]


def word_tokenizer(known: Sequence[str], **options: Any) -> Any:
    """A tokenizer of whole words in lower case."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>", **options
    )


def tokenizer() -> Any:
    """The captioner's words, and the marks of a conversation."""
    marks = ["<image>", "<video>"]
    return word_tokenizer(
        words(), bos_token="<|im_start|>", additional_special_tokens=marks, clean_up_tokenization_spaces=False
    )


def vision_config(*, head: bool) -> Any:
    """The eyes of captioner and labeller; the head sums a picture up in one vector, which only the labeller needs."""
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
        vocab_size=len(words()),
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
    """Writes the captioner as the Hub would have it: half-precision weights, image processor, tokenizer, template."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    images = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=PINPOINTS,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    # The processor of the same name without its video half, which needs torchvision to be made.
    parts = {"get_attributes": classmethod(lambda _cls: ["image_processor", "tokenizer"])}
    image_only: Any = type("LlavaOnevisionProcessor", (LlavaOnevisionProcessor,), parts)
    image_only(
        image_processor=images,
        tokenizer=tokenizer(),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    model.half().save_pretrained(folder)
    model.float()


def tiles(image: Image.Image) -> torch.Tensor:
    """A picture's tiles as the image processor makes them, for sizes of whole tiles: `(tiles, 3, side, side)`."""
    base = image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    across, down = image.width // SIDE, image.height // SIDE
    crops = [(x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE) for y in range(down) for x in range(across)]
    stack = np.stack([np.asarray(base), *(np.asarray(image.crop(box)) for box in crops)])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 127.5 - 1


def base_tile(image: Image.Image) -> torch.Tensor:
    """Only the tile that shows the whole picture, `(3, side, side)`."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def patch_classes(scene: Scene) -> torch.Tensor:
    """Which of `CLASSES` each patch of a square scene shows, `(patches,)`: `scene.patches` in numbers, and faster."""
    kinds = [*range(1, len(scene.things) + 1), 255]
    cells = scene.truth.reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    cover = np.stack([(cells == kind).mean((1, 3)) for kind in kinds])  # (kinds, rows, columns)
    ids = np.array([CLASSES.index(name) for name in (*scene.objects, CLUTTER)])
    shown = np.where(cover.max(0) >= 0.3, ids[cover.argmax(0)], CLASSES.index(scene.background))
    return torch.from_numpy(shown.ravel())


class Captioning:
    """Losses of the captioner, put together from its parts so that only what is learned from is computed."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokenizer = model, tokenizer()
        self.patch_head = nn.Linear(128, len(CLASSES))

    def seen(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the language model reads of each patch, before the projector: `(tiles, patches, width)`."""
        return self.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]

    def patch_loss(self, seen: torch.Tensor, scenes: Sequence[Scene]) -> torch.Tensor:
        """Does each patch know what it shows?"""
        wanted = torch.stack([patch_classes(scene) for scene in scenes])
        return F.cross_entropy(self.patch_head(seen).flatten(0, 1), wanted.flatten())

    def caption_loss(self, images: Sequence[torch.Tensor], scenes: Sequence[Scene], prompt: str) -> torch.Tensor:
        """Is the right caption likely? `images` are the packed patches of each picture, `(tokens, width)`."""
        inner, names = self.model.model, self.tokenizer
        head, tail = f"<|im_start|>user <image> {prompt}<|im_end|><|im_start|>assistant".split("<image>")
        ends = [f"{tail} {scene.caption}<|im_end|>" for scene in scenes]
        before = names(head, add_special_tokens=False, return_tensors="pt").input_ids
        after = names(ends, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        asked = len(names(tail, add_special_tokens=False).input_ids)
        embed = inner.language_model.embed_tokens
        rows = [
            torch.cat([embed(before[0]), patches, embed(text)])
            for patches, text in zip(images, after.input_ids, strict=True)
        ]
        longest = max(map(len, rows))
        inputs = torch.stack([F.pad(row, (0, 0, longest - len(row), 0)) for row in rows])  # left, as generation does
        reading = torch.stack([F.pad(torch.ones(len(row)), (longest - len(row), 0)) for row in rows])
        width = after.input_ids.shape[1]
        reading[:, -width:] *= after.attention_mask
        places = (reading.cumsum(1) - 1).clamp_min(0).long()
        out = inner.language_model(inputs_embeds=inputs, attention_mask=reading.long(), position_ids=places)
        said = out.last_hidden_state[:, -(width - asked + 1) : -1]
        wanted = after.input_ids[:, asked:].masked_fill(after.attention_mask[:, asked:] == 0, -100)
        return F.cross_entropy(self.model.lm_head(said).flatten(0, 1), wanted.flatten(), ignore_index=-100)

    def packed(self, seen: torch.Tensor, scenes: Sequence[Scene], counts: Sequence[int]) -> list[torch.Tensor]:
        """The projected patches of each picture with its newlines, as the model itself packs them."""
        inner = self.model.model
        features = inner.multi_modal_projector(seen).split(list(counts))
        sizes = [(scene.image.height, scene.image.width) for scene in scenes]
        return inner.pack_image_features(features, sizes, image_newline=inner.image_newline)[0]


PHASES = {
    "patches": Course(steps=400, size=64, peak=3e-3, wide=0.0, seed=1001),
    "captions": Course(steps=2000, size=48, peak=2e-3, wide=0.0, seed=1002),
    "tiles": Course(steps=1400, size=48, peak=1.5e-3, wide=0.3, seed=1003),
    "crowds": Course(steps=800, size=48, peak=1.2e-3, wide=0.25, seed=1004, clutter=0.65, crowd=0.35),
    "polish": Course(steps=360, size=48, peak=9e-4, wide=0.2, seed=1005, clutter=0.65, crowd=0.2),
}


def train(work: Path, log: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """The trained captioner and how each phase went: patches, captions of one tile, of all tiles, of what is hard."""
    task = Captioning(new_model(0))
    task.model.train()
    networks = {"model": task.model, "head": task.patch_head}  # the head on the patches is thrown away afterwards
    phases = {}
    for phase, course in PHASES.items():

        def loss_of(step: int, scenes: list[Scene], phase: str = phase) -> torch.Tensor:
            return phase_loss(phase, task, scenes, PROMPTS[step % len(PROMPTS)])

        label = f"captioner, {phase}"
        phases[phase] = learn(label, networks, course, loss_of, work / f"captioner-{phase}.pt", log)
    return task.model.eval(), phases


def phase_loss(name: str, task: Captioning, scenes: Sequence[Scene], prompt: str) -> torch.Tensor:
    """What is learned from in each phase: patches alone, then captions of one tile, then of all tiles."""
    if name not in ("patches", "captions"):
        # The one tile of a square picture is the picture again: the tower sees it once.
        square = [scene.image.size == (SIDE, SIDE) for scene in scenes]
        stacks = [tiles(scene.image)[int(alone) :] for scene, alone in zip(scenes, square, strict=True)]
        parts = task.seen(torch.cat(stacks)).split([len(stack) for stack in stacks])
        whole = [torch.cat([part, part]) if alone else part for part, alone in zip(parts, square, strict=True)]
        counts = [len(part) for part in whole]
        base = torch.stack([part[0] for part, alone in zip(whole, square, strict=True) if alone])
        patches = task.patch_loss(base, [scene for scene, alone in zip(scenes, square, strict=True) if alone])
        return task.caption_loss(task.packed(torch.cat(whole), scenes, counts), scenes, prompt) + 0.2 * patches
    seen = task.seen(torch.stack([base_tile(scene.image) for scene in scenes]))
    patches = task.patch_loss(seen, scenes)
    if name == "patches":
        return patches
    return task.caption_loss(task.packed(seen, scenes, [1] * len(scenes)), scenes, prompt) + 0.3 * patches
