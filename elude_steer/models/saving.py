"""Save processors of vision-language models with every file that transformers' `AutoProcessor` reads."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

# What the settings of a video processor share with those of the image processor.
_SHARED = (
    "do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "merge_size", "patch_size",
    "resample", "rescale_factor", "size", "temporal_patch_size",
)  # fmt: skip


def save_processor(processor: Any, folder: Path, *, model_id: str = "", revision: str | None = None) -> None:
    """Save a processor with the settings of its video part, even if it was made without torchvision.

    Where torchvision is installed, `AutoProcessor` refuses a checkpoint without these settings, also for images alone.

    Args:
        processor: of a vision-language model, with or without its video part.
        folder: where the checkpoint is written.
        model_id: the checkpoint that the processor was loaded from; its own video settings are taken over.
        revision: commit, tag or branch of that checkpoint on the Hub.
    """
    from transformers.utils import VIDEO_PROCESSOR_NAME

    _without_state(processor).save_pretrained(folder)
    if not has_video_part(processor):
        return
    video = getattr(processor, "video_processor", None)
    if video is not None:
        video.save_pretrained(folder)
        return
    settings = _checkpoint_video_settings(model_id, revision) or _image_settings(processor)
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / VIDEO_PROCESSOR_NAME).write_text(text, encoding="utf-8")


def _without_state(processor: Any) -> Any:
    """A copy whose tokenizer has forgotten how it padded last, which would be saved with it."""
    inner = getattr(getattr(processor, "tokenizer", None), "backend_tokenizer", None)
    if inner is None:
        return processor
    plain = copy.copy(processor)
    plain.tokenizer = copy.deepcopy(processor.tokenizer)
    plain.tokenizer.backend_tokenizer.no_padding()
    plain.tokenizer.backend_tokenizer.no_truncation()
    return plain


def has_video_part(processor: Any) -> bool:
    """Whether processors of this class have a video part, for which transformers wants torchvision."""
    return "video_processor" in inspect.signature(type(processor).__init__).parameters


def _checkpoint_video_settings(model_id: str, revision: str | None) -> dict[str, Any]:
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    if not model_id:
        return {}
    settings: dict[str, Any] = get_video_processor_config(model_id, revision=revision)
    return settings


def _image_settings(processor: Any) -> dict[str, Any]:
    """Return settings that prepare each frame like an image; which class uses them follows from the model's config."""
    values = processor.image_processor.to_dict()
    return {name: values[name] for name in _SHARED if values.get(name) is not None}
