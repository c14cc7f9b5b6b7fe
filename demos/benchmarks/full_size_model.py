"""Write a LLaVA-OneVision of the size of the 0.5B checkpoint with random weights, and an atlas of its last fc2.

    python demos/benchmarks/full_size_model.py FOLDER [--tiny]

It downloads nothing. Configuration, shards, tokenizer and processor are written in the Hub's format (3.6 GB of
float32), so that the library loads them like any other model. The captions are meaningless words. `--tiny` writes a
small model with the same parts, in seconds.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from elude_steer import Vlm
from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.weights import weights_hash
from elude_steer.method.splitting import random_memberships
from elude_steer.models.saving import save_processor
from elude_steer.specs import AtlasSpec, MatcherSpec, ModelSpec
from elude_steer.toyland import OBJECTS

FULL: dict[str, Any] = {
    "side": 384, "patch": 14, "width": 1152, "mlp": 4304, "layers": 26, "heads": 16,
    "text": {
        "vocab_size": 152_000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "side": 56, "patch": 14, "width": 64, "mlp": 160, "layers": 4, "heads": 4,
    "text": {
        "vocab_size": 1_000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4_096,
    },
}  # fmt: skip
EXPANSION = 8  # sub-units per unit, as in the paper
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]  # in the order of their numbers
WORDS = ["user", "assistant", "Describe", "this", "image", "in", "one", "sentence", ".", ",", "?"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else '\n' + part.text }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def save_model(folder: Path, *, tiny: bool = False, seed: int = 0) -> Path:
    """Write the checkpoint to `folder`, unless it exists."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    if (folder / "video_preprocessor_config.json").exists():  # written last
        return folder
    size = TINY if tiny else FULL
    numbers = _special_numbers(size)
    text = {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6, **size["text"]}
    ends = {"bos_token_id": numbers["<|im_start|>"], "eos_token_id": numbers["<|im_end|>"]}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": size["width"], "intermediate_size": size["mlp"],
        "num_hidden_layers": size["layers"], "num_attention_heads": size["heads"], "image_size": size["side"],
        "patch_size": size["patch"], "vision_use_head": False,
    }  # fmt: skip
    config = LlavaOnevisionConfig(
        vision_config=vision, text_config={**text, **ends, "pad_token_id": numbers["<|endoftext|>"]},
        image_grid_pinpoints=_pinpoints(size["side"]), image_token_index=numbers["<image>"],
        video_token_index=numbers["<video>"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.02)  # initial biases are zero, which would hide errors in handling them
            elif "language_model.layers" in name and parameter.dim() == 2:
                parameter.mul_(4)  # initial layers add so little that every caption repeats its last word
    model.save_pretrained(folder, max_shard_size="1GB")
    _save_processor(folder, size)
    return folder


def _special_numbers(size: dict[str, Any]) -> dict[str, int]:
    first = 151_643 if size is FULL else size["text"]["vocab_size"] - len(SPECIAL)
    return {name: first + index for index, name in enumerate(SPECIAL)}


def _pinpoints(side: int) -> list[list[int]]:
    return [[rows * side, columns * side] for rows in range(1, 7) for columns in range(1, 7)]


def _save_processor(folder: Path, size: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    numbers = _special_numbers(size)
    words = [*WORDS, *OBJECTS]  # made-up words fill the rest of the vocabulary
    vocabulary = {word: number for number, word in enumerate(words)} | numbers
    taken = set(vocabulary.values())
    vocabulary |= {f"word{n}": n for n in range(size["text"]["vocab_size"]) if n not in taken}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|endoftext|>", unk_token="<|endoftext|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<image>", "<video>"],
    )  # fmt: skip
    side = size["side"]
    images = LlavaOnevisionImageProcessorPil(
        size={"height": side, "width": side}, image_grid_pinpoints=_pinpoints(side)
    )
    # Making the video part needs torchvision; `save_processor` writes its settings without it.
    parts = {"get_attributes": classmethod(lambda _cls: ["image_processor", "tokenizer"])}
    image_only: Any = type("LlavaOnevisionProcessor", (LlavaOnevisionProcessor,), parts)
    processor = image_only(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=(side // size["patch"]) ** 2,
        vision_feature_select_strategy="full", chat_template=TEMPLATE,
    )  # fmt: skip
    save_processor(processor, folder)


def save_atlas(folder: Path, model: Path, *, seed: int = 0) -> Path:
    """Write an atlas of the model's last fc2 to `folder`, unless it exists; every unit is split at random into eight.

    The labels are toyland's objects, so that toyland's matcher finds them.
    """
    if (folder / "manifest.json").exists():
        return folder
    vlm = Vlm.load(str(model))
    d_out, d_in = vlm.layer.weight.shape
    members = torch.cat([random_memberships(EXPANSION, d_in, seed + unit) for unit in range(d_out)])  # (S, d_in)
    count, rng = len(members), np.random.default_rng(seed)

    def references(rows: int) -> References:
        return References(torch.ones(rows), torch.ones(rows, 4), *torch.zeros(3, rows, 4, dtype=torch.int32).unbind())

    words = (np.arange(count, dtype=np.int32) % len(OBJECTS))[rng.permutation(count)][:, None]
    labels = Labels(tuple(OBJECTS), words, rng.random((count, 1), np.float32), np.arange(count, dtype=np.int32), {})
    spec = AtlasSpec(folder.name, ModelSpec(str(model), vlm.layer_name), matcher=MatcherSpec("toyland/matcher"))
    about = {
        "name": folder.name, "model": {"id": str(model), "revision": None}, "layer": vlm.layer_name, "d_in": d_in,
        "d_out": d_out, "units": d_out, "sub_units": count, "images": 1, "instances": 1, "backend": "random",
        "weights": weights_hash(vlm.layer), "versions": {},
        "spec": asdict(spec),
    }  # fmt: skip
    units = torch.arange(d_out).repeat_interleave(EXPANSION)
    packed = torch.from_numpy(np.packbits(members.numpy(), axis=1))
    nothing = torch.zeros(d_out), torch.zeros(count, dtype=torch.int32)
    atlas = Atlas(packed, units, *nothing, references(count), references(d_out), ("none",), about, labels=labels)
    return atlas.save(folder)


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth coloured noise."""
    small = np.random.default_rng(seed).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the model and the atlas")
    parser.add_argument("--tiny", action="store_true", help="write a small model")
    options = parser.parse_args()
    model = save_model(options.folder / "model", tiny=options.tiny)
    print(model, save_atlas(options.folder / "atlas", model), sep="\n")


if __name__ == "__main__":
    main()
