"""Small randomly initialised models as the Hub stores them, and images for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from elude_steer.models.saving import save_processor

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
    """Save a LLaVA-OneVision of transformers; by default with tiles of 4 x 4 patches and a target layer of 40 -> 16."""
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
    with torch.no_grad():  # biases start at zero, which would hide mistakes with them
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
    processor = ImageOnly(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=tokens, vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    )  # fmt: skip
    save_processor(processor, folder)


def save_images(folder: Path, count: int, *, seed: int = 0, sizes=((28, 28), (56, 28), (28, 56), (40, 30))) -> Path:
    """Save smooth coloured noise in several shapes as PNG files, some of them in a sub-folder."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        small = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        path = folder / ("sub" if i % 5 == 0 else ".") / f"image-{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder


# The families: for each a tiny model, its processor and its image token, as on the Hub.

FAMILIES = (
    "llava", "llava_dinov2", "llava_registers", "llava_vit", "llava_siglip", "llava_next", "idefics3", "smolvlm",
    "qwen2_vl", "qwen2_5_vl", "paligemma", "gemma3", "internvl",
)  # fmt: skip
_TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
_TOKENS = ["<start>", "<end>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
_TOKENS += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]


def save_family(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Save a random checkpoint of one of `FAMILIES`; tiles have 4 x 4 patches of 7 pixels, or patches are packed."""
    model, parts, options = globals()[f"_{family}"]()
    torch.manual_seed(seed)
    model = model[0](model[1])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or not parameter.any():  # parameters of zero would hide mistakes
                parameter.normal_(0, 0.5)
            elif "language_model" not in name or "embed" in name:
                parameter.mul_(1 if "norm" in name else 10)
            elif name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter.mul_(20)  # else its words would hardly depend on the image
    model.save_pretrained(folder)
    processor, images = parts
    attributes = ["image_processor", "tokenizer"]
    image_only = type(processor.__name__, (processor,), {"get_attributes": classmethod(lambda _cls: attributes)})
    if "video_processor" in processor.get_attributes():
        options = {"video_processor": None, **options}
    template = TEMPLATE.replace("<image>", options.pop("image_token_text", "<image>"))
    processor = image_only(image_processor=images, tokenizer=_tokenizer(), chat_template=template, **options)
    save_processor(processor, folder)
    return folder


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *WORDS, *_TOKENS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {
        "image_token": "<image>", "video_token": "<video>", "boi_token": "<start>", "eoi_token": "<end>",
        "start_image_token": "<start>", "end_image_token": "<end>", "context_image_token": "<image>",
    }  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>",
        additional_special_tokens=_TOKENS, extra_special_tokens=named,
    )  # fmt: skip


_VOCABULARY = len(SPECIAL) + len(WORDS) + len(_TOKENS)


def _llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=7, projection_dim=16, **_VISION),
        text_config=LlamaConfig(vocab_size=_VOCABULARY, **_TEXT), image_token_id=4,
    )  # fmt: skip
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    options = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return (LlavaForConditionalGeneration, config), (LlavaProcessor, images), options


def _llava_with(vision_config, *, before, strategy="default"):
    """LLaVA with another tower, all of whose blocks are read; `before` counts the tokens before the patches."""
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    config = LlavaConfig(
        vision_config=vision_config, text_config=LlamaConfig(vocab_size=_VOCABULARY, **_TEXT), image_token_id=4,
        vision_feature_layer=-1, vision_feature_select_strategy=strategy,
    )  # fmt: skip
    images = BitImageProcessorPil(size={"height": 28, "width": 28}, do_center_crop=False)
    options = {"patch_size": 7, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": before}
    return (LlavaForConditionalGeneration, config), (LlavaProcessor, images), options


def _llava_dinov2():  # its blocks call one module, drop_path, before and behind the target
    from transformers import Dinov2Config

    options = {name: value for name, value in _VISION.items() if name != "intermediate_size"}
    return _llava_with(Dinov2Config(image_size=28, patch_size=7, mlp_ratio=3, **options), before=1)


def _llava_registers():
    from transformers import Dinov2WithRegistersConfig

    options = {name: value for name, value in _VISION.items() if name != "intermediate_size"}
    config = Dinov2WithRegistersConfig(image_size=28, patch_size=7, mlp_ratio=3, num_register_tokens=2, **options)
    return _llava_with(config, before=3)


def _llava_vit():
    from transformers import ViTConfig

    return _llava_with(ViTConfig(image_size=28, patch_size=7, **_VISION), before=1)


def _llava_siglip():
    from transformers import SiglipVisionConfig

    return _llava_with(SiglipVisionConfig(image_size=28, patch_size=7, **_VISION), before=0, strategy="full")


def _llava_next():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=7, projection_dim=16, **_VISION),
        text_config=LlamaConfig(vocab_size=_VOCABULARY, **_TEXT), image_token_id=4, image_grid_pinpoints=pinpoints(28),
    )  # fmt: skip
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints(28), **sizes)
    options = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return (LlavaNextForConditionalGeneration, config), (LlavaNextProcessor, images), options


def _idefics3():
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    config = Idefics3Config(
        vision_config={"image_size": 28, "patch_size": 7, **_VISION}, scale_factor=2, image_token_id=4, pad_token_id=0,
        text_config={"model_type": "llama", "vocab_size": _VOCABULARY, **_TEXT},
    )  # fmt: skip
    images = Idefics3ImageProcessorPil(size={"longest_edge": 84}, max_image_size={"longest_edge": 28})
    return (Idefics3ForConditionalGeneration, config), (Idefics3Processor, images), {"image_seq_len": 4}


def _smolvlm():
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    config = SmolVLMConfig(
        vision_config={"image_size": 28, "patch_size": 7, **_VISION}, scale_factor=2, image_token_id=4, pad_token_id=0,
        text_config={"model_type": "llama", "vocab_size": _VOCABULARY, **_TEXT},
    )  # fmt: skip
    images = SmolVLMImageProcessorPil(size={"longest_edge": 84}, max_image_size={"longest_edge": 28})
    return (SmolVLMForConditionalGeneration, config), (SmolVLMProcessor, images), {"image_seq_len": 4}


def _qwen2_vl():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    vision = {"depth": 3, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 3, "num_heads": 2, "patch_size": 7}
    return (Qwen2VLForConditionalGeneration, _qwen(Qwen2VLConfig, vision)), (Qwen2VLProcessor, _qwen_images()), {}


def _qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    vision = {
        "depth": 3, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 40, "num_heads": 2, "patch_size": 7,
        "window_size": 28, "fullatt_block_indexes": [2],
    }  # fmt: skip
    model = (Qwen2_5_VLForConditionalGeneration, _qwen(Qwen2_5_VLConfig, vision))
    return model, (Qwen2_5_VLProcessor, _qwen_images()), {}


def _qwen(config, vision):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return config(
        vision_config=vision, text_config={"vocab_size": _VOCABULARY, "rope_parameters": rope, **_TEXT},
        image_token_id=4, video_token_id=5, vision_start_token_id=30, vision_end_token_id=31,
    )  # fmt: skip


def _qwen_images():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}, patch_size=7)


def _paligemma():
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    config = PaliGemmaConfig(
        vision_config={"image_size": 28, "patch_size": 7, "vision_use_head": False, "projection_dim": 16, **_VISION},
        text_config={"model_type": "gemma", "vocab_size": _VOCABULARY + 1152, "head_dim": 8, **_TEXT},
        image_token_index=4, projection_dim=16, hidden_size=16,
    )  # fmt: skip  # its processor adds 1152 places to any tokenizer
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    return (PaliGemmaForConditionalGeneration, config), (PaliGemmaProcessor, images), {}


def _gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    config = Gemma3Config(
        vision_config={"image_size": 28, "patch_size": 7, "vision_use_head": False, **_VISION},
        text_config={"vocab_size": _VOCABULARY, "head_dim": 8, **_TEXT},
        image_token_id=4, boi_token_index=30, eoi_token_index=31, mm_tokens_per_image=4,
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    options = {"image_seq_length": 4, "image_token_text": "<start>"}
    return (Gemma3ForConditionalGeneration, config), (Gemma3Processor, images), options


def _internvl():
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    config = InternVLConfig(
        vision_config={"image_size": [28, 28], "patch_size": [7, 7], **_VISION},
        text_config={"model_type": "qwen2", "vocab_size": _VOCABULARY, **_TEXT}, image_token_id=4,
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4)
    return (InternVLForConditionalGeneration, config), (InternVLProcessor, images), {"image_seq_length": 4}


def save_classifier(folder: Path, classes: Sequence[str]) -> Path:
    """Save a small DINOv2 with a head for these classes, as `head`, and without it, as `backbone`."""
    from transformers import Dinov2Config, Dinov2ForImageClassification
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7)
    config.id2label = dict(enumerate(classes))
    torch.manual_seed(0)
    model = Dinov2ForImageClassification(config)
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(folder / "head")
    model.dinov2.save_pretrained(folder / "backbone")
    processor = BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    for name in ("head", "backbone"):
        processor.save_pretrained(folder / name)
    return folder
