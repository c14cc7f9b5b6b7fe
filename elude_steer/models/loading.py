"""Load models of the Hub or of a folder: completely or not at all, with one-line errors.

Every model, processor and tokenizer of transformers that the package uses is loaded by a function of this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch

from elude_steer.errors import EludeSteerError, ModelError
from elude_steer.models.execution.quantized import (
    check_quantizer,
    import_bitsandbytes,
    make_config,
    modules_to_keep,
)
from elude_steer.specs import DTYPES
from elude_steer.trust import call_loader
from elude_steer.utils import optional
from elude_steer.utils.files import read_bytes, resolve_id
from elude_steer.utils.hub import check_available, why_unreachable
from elude_steer.utils.terms import show_terms

_ADAPTER, _INDEX = "adapter_config.json", "model.safetensors.index.json"
_PROCESSOR, _AUDIO = "processor_config.json", "audio_tokenizer_config.json"
SETTINGS = ("*config*.json", "modules.json", "*.index.json")  # names of files that say how a model is loaded
_MAX_SETTINGS = 2**24  # bytes of such a file


def load_pretrained(
    auto_class: Any,
    model_id: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantize: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """Load a model in eval mode and move it to its device; raise if a weight is missing or left over.

    Weights are read from safetensors files alone: other formats hold pickles.

    Args:
        auto_class: a class of transformers with `from_pretrained`, such as `AutoModel`.
        model_id: a Hub id, a folder, or `toyland/…`.
        revision: commit, tag or branch on the Hub.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: where the model goes, the CPU by default; ignored with `device_map`.
        device_map: as in transformers.
        quantize: one of `QUANTIZERS`, for everything inside the language model; None changes nothing.
        attn_implementation: as in transformers; a kernel of the Hub (`user/name`) is code.
        trust_remote_code: whether code that comes with the model may run.
        check: called with the model before its weights are checked; raises if it is a model of the wrong kind.
    """
    target = check_device(device) if device_map is None else None
    if optional.is_installed("kernels"):
        import_bitsandbytes(trust_remote_code is True)  # before a checkpoint that needs it
    options: dict[str, Any] = {}
    if quantize is not None:
        check_quantizer(quantize)
        keep = modules_to_keep(_make_empty(auto_class, model_id, revision, trust_remote_code))
        options["quantization_config"] = make_config(quantize, keep, as_dtype(dtype), trust_remote_code is True)
        # Quantised weights are made on their device, and some cannot be moved.
        device_map, target = ({"": str(target)}, None) if target is not None else (device_map, None)
    model, info = _from_pretrained(
        auto_class,
        model_id,
        revision,
        trust_remote_code,
        dtype=as_dtype(dtype),
        device_map=device_map,
        attn_implementation=attn_implementation,
        output_loading_info=True,
        use_safetensors=True,
        **options,
    )
    if check is not None:
        check(model)
    refuse_partial_load(model_id, info)
    model.eval()
    return model if target is None else model.to(target)


def _make_empty(auto_class: Any, model_id: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The model without weights, from its settings alone."""
    from transformers import AutoConfig

    config = _from_pretrained(AutoConfig, model_id, revision, trust_remote_code)
    with torch.device("meta"):
        return call_loader(
            auto_class.from_config, config, subject=f"model '{model_id}'", trust_remote_code=trust_remote_code
        )


def load_image_processor(model_id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the image processor of a model."""
    from transformers import AutoImageProcessor

    return _from_pretrained(AutoImageProcessor, model_id, revision, trust_remote_code, **_pil_backend())


def load_tokenizer(model_id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, model_id, revision, trust_remote_code)


def load_processor(
    model_id: str, model_type: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the processor of a vision-language model.

    It handles no videos without torchvision, or if the checkpoint lacks the settings for them.

    Args:
        model_id: a Hub id, a folder, or `toyland/…`.
        model_type: as in the model's config.
        revision: commit, tag or branch on the Hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    backend, name = _pil_backend(), PROCESSOR_MAPPING_NAMES.get(model_type)

    def load(processor_class: Any) -> Any:
        return _from_pretrained(processor_class, model_id, revision or "main", trust_remote_code, **backend)

    if name is None:
        return load(AutoProcessor)
    # Without torchvision a video processor cannot be created, and then neither can the processor that contains it.
    if backend:
        processor = load(_without_videos(name))
        # transformers hands the backend for images to the tokenizer too, and would save it as the tokenizer's.
        getattr(getattr(processor, "tokenizer", None), "init_kwargs", {}).pop("backend", None)
        return processor
    try:
        return load(AutoProcessor)
    except ModelError as error:
        try:
            return load(_without_videos(name))
        except ModelError:
            raise error from error.__cause__


def _without_videos(name: str) -> Any:
    """Return transformers' processor class of this name without its video part."""
    from transformers import ProcessorMixin
    from transformers.models.auto.processing_auto import processor_class_from_name

    full = processor_class_from_name(name)
    parts = [part for part in full.get_attributes() if "video" not in part]
    missing = {part: None for part in full.get_attributes() if "video" in part}

    def from_args_and_dict(cls: Any, args: Any, values: dict[str, Any], **options: Any) -> Any:
        return full.from_args_and_dict.__func__(cls, args, {**values, **missing}, **options)

    image_only: Any = type(name, (full,), {})
    image_only.get_attributes = classmethod(lambda _cls: parts)
    image_only.from_args_and_dict = classmethod(from_args_and_dict)
    image_only.apply_chat_template = ProcessorMixin.apply_chat_template  # some override it and use the video processor
    return image_only


def _from_pretrained(
    auto_class: Any, model_id: str, revision: str | None, trust_remote_code: bool, **options: Any
) -> Any:
    source = resolve_id(model_id)
    check_available(source)
    show_terms(source)
    if not Path(source).is_dir() and why_unreachable():
        options["local_files_only"] = True
    with explain_load_errors(source), hide_weight_bars():
        revision = _resolve_commit(source, revision)  # so that what is loaded is what was inspected
        if "attn_implementation" in options:  # a model, and no part of its preparation
            settings = {**_read_settings(source, revision), "attn_implementation": options["attn_implementation"]}
            files = {name: _find_file(source, name, revision) for name in (_ADAPTER, _INDEX)}
            code = _find_code(settings, files[_ADAPTER])
            _check_weight_names(settings, files[_INDEX])
        else:
            found = (_find_file(source, name, revision) for name in (_AUDIO, _PROCESSOR))
            code = next((code for path in found if path and (code := _find_code_in_file(path))), None)
        return call_loader(
            auto_class.from_pretrained,
            source,
            subject=f"model '{model_id}'",
            trust_remote_code=trust_remote_code,
            code=code,
            revision=revision,
            **options,
        )


def inspect_folder(folder: Path) -> str | None:
    """Read all settings in a folder of models; returns what code they name, for `call_loader`, or None.

    Raises:
        ValueError: if settings cannot be read, or name weights that are no safetensors of that folder.
    """
    found = None
    for pattern in SETTINGS:
        for path in sorted(folder.rglob(pattern)):
            found = _find_code_in_file(path) or found
    return found


def _find_code_in_file(path: Path) -> str | None:
    """What code a file of settings names, as `inspect_folder`."""
    try:
        settings = json.loads(read_bytes(path, _MAX_SETTINGS))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its '{path.name}' cannot be read; get another copy.") from error
    if path.name == _INDEX:
        _check_weight_names({}, path)
    elif isinstance(settings, dict):
        _check_weight_names(settings, None)
    if path.name == _AUDIO:
        settings = {"audio_tokenizer": settings}
    return _find_code(settings, path if path.name == _ADAPTER else None)


def _find_code(settings: Any, adapter: Path | None) -> str | None:
    """The code that settings name, at any depth, or that an adapter could name: a kernel of the Hub is code."""
    if adapter is not None:  # transformers loads it with the model, and peft imports what its settings name
        return "an adapter, whose settings can name code"
    left: list[tuple[bool, Any]] = [(False, settings)]  # whether it chooses an implementation, and a value
    while left:
        chooses, value = left.pop()
        if isinstance(value, dict):
            if value.get("use_kernels"):
                return "kernels of the Hub"
            if "audio_tokenizer" in value:  # transformers loads it without any of the checks of this module
                return "an audio tokenizer, another model that it names"
            left += [
                (chooses or "_implementation" in str(key) or key == "kernel_config", inner)
                for key, inner in value.items()
            ]
        elif isinstance(value, list):
            left += [(chooses, inner) for inner in value]
        elif chooses and isinstance(value, str) and "/" in value:
            return f"the kernel '{value}'"
    return None


def _check_weight_names(settings: Mapping[str, Any], index: Path | None) -> None:
    """Raise if a checkpoint names files of weights that are no safetensors, or that lie elsewhere."""
    names = {str(name) for name in (settings.get("transformers_weights"),) if name is not None}
    if index is not None:
        content = json.loads(read_bytes(index, _MAX_SETTINGS))
        shards = content.get("weight_map") if isinstance(content, dict) else None
        names |= set(map(str, shards.values())) if isinstance(shards, dict) else {str(shards)}
    for name in sorted(names):
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            raise ValueError(f"its weights are in {ascii(name)[:60]}; only safetensors are read.")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"its weights are in {ascii(name)[:60]}, outside the model; get another copy.")


def _read_settings(source: str, revision: str | None) -> dict[str, Any]:
    """The settings of a model of transformers; empty if they cannot be read, of which the loader says why."""
    from transformers import PretrainedConfig

    offline = not Path(source).is_dir() and bool(why_unreachable())
    try:
        return dict(PretrainedConfig.get_config_dict(source, revision=revision, local_files_only=offline)[0])
    except (OSError, ValueError, RecursionError):
        return {}


def _resolve_commit(source: str, revision: str | None) -> str | None:
    """The commit that a revision of a model on the Hub stands for; of a folder, and if it cannot be told, as given."""
    path = None if Path(source).is_dir() else _find_file(source, "config.json", revision)
    return path.parent.name if path is not None and path.parent.parent.name == "snapshots" else revision


def _find_file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of a model, which is downloaded if it is on the Hub; None if it has none of this name."""
    from transformers.utils import cached_file

    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.exists() else None
    found = cached_file(
        source,
        name,
        revision=revision,
        local_files_only=bool(why_unreachable()),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


@contextmanager
def hide_weight_bars() -> Iterator[None]:
    """Inside, transformers shows no bar of the weights that it loads; downloads keep theirs."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    downloads = not are_progress_bars_disabled()
    logging.disable_progress_bar()  # hides those of downloads too
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


def _pil_backend() -> dict[str, str]:
    """Return the argument that makes transformers prepare images with PIL where torchvision is missing."""
    from transformers.utils import is_torchvision_available

    return {} if is_torchvision_available() else {"backend": "pil"}


def read_stored_layer(
    model_id: str, name: str, *, revision: str | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield weights and biases of layers as the safetensors files of a checkpoint store them.

    Nothing is downloaded, and nothing comes of a checkpoint that is not here.

    Args:
        model_id: a folder, or a Hub id whose files are in the cache.
        name: the end of the layer's dotted name; what stands before it differs between versions of transformers.
        revision: commit, tag or branch on the Hub.
    """
    from safetensors import safe_open

    files = {}
    for path in _stored_files(resolve_id(model_id), revision):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))

    def read(key: str) -> torch.Tensor | None:
        if key not in files:
            return None
        with safe_open(files[key], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor

    for key in files:
        if f".{key}".endswith(f".{name}.weight") and (weight := read(key)) is not None:
            yield weight, read(key.removesuffix("weight") + "bias")


def _stored_files(source: str, revision: str | None) -> list[Path]:
    """The safetensors files of a folder, or of a Hub id in the cache."""
    if Path(source).is_dir():
        return sorted(Path(source).glob("*.safetensors"))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return []
    return sorted(Path(config).parent.glob("*.safetensors")) if isinstance(config, str) else []


def check_device(device: str | torch.device | None) -> torch.device:
    """Return the device, the CPU if it is None; raise a one-line error if it cannot be used."""
    try:
        return torch.zeros(1, device=device or "cpu").device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelError(
            f"device '{device}' cannot be used here ({cause}); use 'cpu', or a device that this machine has."
        ) from error


def as_dtype(dtype: str | torch.dtype) -> Any:
    """Return the torch dtype of this name; `auto` stays as it is, for transformers."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:  # torch has more, such as int3, which no model computes with
        raise ModelError(f"dtype '{dtype}' is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'.")
    return getattr(torch, dtype)


def refuse_partial_load(model_id: str, info: Mapping[str, Any]) -> None:
    """Raise if checkpoint and model class do not match: transformers only warns and leaves weights random."""
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            problems.append(f"{len(keys)} {kind.replace('_', ' ')} (first: '{keys[0]}')")
    if problems:
        raise ModelError(
            f"'{model_id}' does not load completely: {', '.join(problems)}; these weights would stay random or be "
            "dropped. Use the transformers version that wrote the model, or another revision."
        )


@contextmanager
def explain_load_errors(model_id: str) -> Iterator[None]:
    """Turn the errors that loaders raise for an unknown, unreachable or damaged model into one line."""
    if model_id.startswith((".", "/", "~")) and not Path(model_id).is_dir():
        raise ModelError(f"there is no folder '{model_id}' to load a model from; check the path, or give a Hub id.")
    try:
        yield
    except EludeSteerError:
        raise
    except Exception as error:  # each loader raises exceptions of its own kind, and all mean the same here
        cause = str(error).strip().splitlines()
        raise ModelError(
            f"model '{model_id}' could not be loaded: {cause[0] if cause else type(error).__name__}"
        ) from error
