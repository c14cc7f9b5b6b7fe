"""Small randomly initialised models in the shape the Hub gives them, and pictures to show them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} "
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SENTENCE = "user assistant a dog cat on the beach with ball next to in park train describe this image one sentence ."
WORDS = SENTENCE.split()
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]


def save_llava(
    folder: Path, *, seed: int = 0, layers: int = 2, side: int = 28, patch: int = 7, width: int = 16, mlp: int = 40
) -> Path:
    """A LLaVA-OneVision of transformers' own classes; tiles of 4 x 4 patches and a target of 40 -> 16 if not told."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=2, image_size=side,
        patch_size=patch, vision_use_head=False,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, bos_token_id=2, eos_token_id=3,
        pad_token_id=0,
    )  # fmt: skip
    config = LlavaOnevisionConfig(
        vision_config=vision, text_config=text, image_grid_pinpoints=pinpoints(side),
        image_token_id=4, video_token_id=5, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(config)
    with torch.no_grad():  # fresh biases are zero, which would hide mistakes about them
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "fc" in name:
                parameter.mul_(20)
    model.save_pretrained(folder)
    _save_processor(folder, side, (side // patch) ** 2)
    return folder


def pinpoints(side: int) -> list[list[int]]:
    return [[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]]


def _save_processor(folder: Path, side: int, tokens: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>",
        additional_special_tokens=["<image>", "<video>"],
    )  # fmt: skip
    images = LlavaOnevisionImageProcessorPil(size={"height": side, "width": side}, image_grid_pinpoints=pinpoints(side))

    class ImageOnly(LlavaOnevisionProcessor):
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    ImageOnly.__name__ = "LlavaOnevisionProcessor"
    ImageOnly(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=tokens, vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def save_pictures(folder: Path, count: int, *, seed: int = 0, sizes=((28, 28), (56, 28), (28, 56), (40, 30))) -> Path:
    """Smooth coloured noise in several shapes, as PNG files, some in a sub-folder."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        small = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        path = folder / ("sub" if i % 5 == 0 else ".") / f"picture-{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder
