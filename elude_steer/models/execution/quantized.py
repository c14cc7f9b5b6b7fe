"""Models whose language model is quantised while they load, by torchao or bitsandbytes; the vision tower stays whole.

The method needs the target layer's own weights, and an atlas needs the inputs that it was built from. So everything
outside the language model keeps its numbers: the tower, the projector and the output embedding.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from elude_steer.errors import EludeSteerWarning, ModelError
from elude_steer.utils import optional

# What `quantize` may be -> the package that does it. All of them run on a CPU, too.
QUANTIZERS = {
    "torchao-int8": "torchao",
    "torchao-int8-dynamic": "torchao",
    "bitsandbytes-8bit": "bitsandbytes",
    "bitsandbytes-4bit": "bitsandbytes",
}


def check_quantizer(name: str | None) -> None:
    """Raise unless it is one of `QUANTIZERS` and its package is installed."""
    if name is None:
        return
    if name not in QUANTIZERS:
        raise ModelError(f"quantize is '{name}'; it is one of {', '.join(map(repr, QUANTIZERS))}.")
    if not optional.is_installed(QUANTIZERS[name]):
        optional.require(QUANTIZERS[name], f"quantize '{name}'")


def import_bitsandbytes(trust_remote_code: bool) -> None:
    """Import bitsandbytes; without permission, it gets no kernel of the Hub, which is code.

    On some CPUs it downloads one and runs it while it is imported, and does without if `kernels` is missing.
    """
    if not optional.is_installed("bitsandbytes") or "bitsandbytes" in sys.modules:
        return
    here = sys.modules.get("kernels")
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, log.level = log.level, logging.ERROR  # it complains about the missing kernel
    if not trust_remote_code:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        optional.require("bitsandbytes", "quantize 'bitsandbytes'")
    finally:
        log.level = level
        if not trust_remote_code:
            del sys.modules["kernels"]
            if here is not None:
                sys.modules["kernels"] = here


def make_config(name: str, keep: list[str], dtype: Any, trust_remote_code: bool = False) -> Any:
    """The `quantization_config` of transformers.

    Args:
        name: one of `QUANTIZERS`.
        keep: names of the modules that stay as they are.
        dtype: a torch dtype in which 4-bit weights are multiplied; another value leaves that to bitsandbytes.
        trust_remote_code: whether code of the Hub may run.
    """
    import torch
    from transformers import BitsAndBytesConfig, TorchAoConfig

    check_quantizer(name)
    if QUANTIZERS[name] == "torchao":
        log = logging.getLogger("torchao")
        level, log.level = log.level, logging.ERROR  # it lists the kernels for GPUs that it cannot load here
        try:
            quantization: Any = optional.require("torchao.quantization", f"quantize '{name}'")
        finally:
            log.level = level
        kinds = {
            "torchao-int8": "Int8WeightOnlyConfig",
            "torchao-int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
        }
        return TorchAoConfig(getattr(quantization, kinds[name])(), modules_to_not_convert=keep)
    import_bitsandbytes(trust_remote_code)
    if name == "bitsandbytes-8bit":
        # It says in each product that its inputs become float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep)
    options = {"bnb_4bit_compute_dtype": dtype} if isinstance(dtype, torch.dtype) else {}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=keep, **options)


def modules_to_keep(model: Any) -> list[str]:
    """The names of the modules outside the language model, the uppermost ones; `model` needs no weights.

    The language model is the module that holds the embedding of words.
    """
    embedding = model.get_input_embeddings()
    (language_model,) = [m for m in model.modules() if any(child is embedding for child in m.children())][:1] or [None]
    if language_model is None or language_model is model:
        raise ModelError(f"{type(model).__name__} has no language model of its own part, so it cannot be quantised.")
    inside = set(language_model.modules())

    def outside(module: Any, prefix: str) -> list[str]:
        found = []
        for name, child in module.named_children():
            if child is language_model:
                continue
            holds = any(one is language_model for one in child.modules())
            found += outside(child, f"{prefix}{name}.") if holds else [f"{prefix}{name}"]
        return found

    keep = outside(model, "")
    if shared := [name for name in keep if any(one in inside for one in model.get_submodule(name).modules())]:
        raise ModelError(f"'{shared[0]}' of {type(model).__name__} is part of its language model and stands beside it.")
    return keep


def is_quantized(module: Any) -> bool:
    """Whether the weight of a layer is stored in another form than as plain floating-point numbers."""
    from torch import Tensor, nn

    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    return not weight.is_floating_point() or not {type(weight), type(weight.data)} <= {nn.Parameter, Tensor}


def refuse_quantized_target(model: Any, within: str, layer_name: str) -> None:
    """Raise if the target layer is quantised; warn if another layer of the tower is."""
    quantized = [name for name, module in model.get_submodule(within).named_modules() if is_quantized(module)]
    if is_quantized(model.get_submodule(layer_name)):
        raise ModelError(
            f"layer '{layer_name}' is quantised, so it has no weights of its own to steer; load the checkpoint before "
            "quantisation, and quantise its language model alone: --quantize NAME (in Python, quantize=NAME)."
        )
    if quantized:
        warnings.warn(
            f"{len(quantized)} layers of the vision tower are quantised (first: '{within}.{quantized[0]}'): the target "
            "layer gets other inputs than those that an atlas of the original model was built from.",
            EludeSteerWarning,
            stacklevel=3,
        )
