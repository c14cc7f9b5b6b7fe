"""Models that accelerate spreads over devices, main memory and disk (`device_map`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elude_steer.errors import ModelError
from elude_steer.utils.files import read_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

_MAX_BYTES = 10_000_000
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def read_device_map(text: str | None) -> str | dict[str, int | str] | None:
    """The `device_map` of transformers for the option of the command line: a strategy, or the file of a JSON object."""
    if text is None or text in STRATEGIES:
        return text
    path = Path(text)
    if not os.path.isfile(path):  # noqa: PTH113, Path raises on a name that is too long
        raise ModelError(
            f"--device-map is '{text[:60]}'; give {', '.join(STRATEGIES)}, or a JSON file that names a device for each "
            'part of the model, such as {"model.vision_tower": 0, "model.language_model": 1, "lm_head": "cpu"}.'
        )
    try:
        found = json.loads(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"the device map '{path}' is not a JSON file ({str(error)[:100]}).") from error
    if not isinstance(found, dict) or not found or not all(_is_place(place) for place in found.values()):
        raise ModelError(
            f"the device map '{path}' must be an object of module names and devices: a number, 'cpu', 'disk', 'cuda:1'."
        )
    return found


def _is_place(place: Any) -> bool:
    return (isinstance(place, int) and not isinstance(place, bool) and place >= 0) or isinstance(place, str)


def input_device(model: nn.Module) -> torch.device:
    """The device that inputs of a model go to: that of its first parameter that is in memory."""
    import torch

    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def keep_in_memory(module: nn.Module) -> None:
    """Load the weights of an offloaded module and its submodules for good, on the device where they compute.

    Steering reads the target layer's weights, which accelerate otherwise loads for the length of each call only.
    """
    from accelerate.hooks import AlignDevicesHook, SequentialHook
    from accelerate.utils import set_module_tensor_to_device

    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
            if not isinstance(one, AlignDevicesHook) or not one.offload:
                continue
            for name, tensor in list(part.named_parameters(recurse=one.place_submodules)):
                if tensor.is_meta:
                    set_module_tensor_to_device(part, name, one.execution_device, value=one.weights_map[name])
            one.offload = False
