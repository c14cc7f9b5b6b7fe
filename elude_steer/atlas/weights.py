"""Whether a layer has the weights that an atlas was built for, in whatever data type it was loaded.

Rounding to float16 and then to bfloat16 is not rounding to bfloat16, so no single hash fits all data types of one
checkpoint. A manifest therefore records the data type of the build and one hash for each rounding of its weights. A
layer is compared in every data type that holds its values exactly, and in that of the build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from elude_steer.errors import AtlasError
from elude_steer.method.layers import as_parameters, layer_parameters

Parameters = tuple[torch.Tensor, torch.Tensor]  # weight and bias
StoredParameters = Iterable[tuple[torch.Tensor, torch.Tensor | None]]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weights_hash(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> str:
    """A hash of a layer's weight and bias, rounded to a data type."""
    return _hash(layer_parameters(layer), dtype)


def describe_weights(layer: nn.Module) -> dict[str, Any]:
    """What a manifest records of the layer's weights.

    Returns:
        `weights`, the hash in bfloat16, which also older versions compare; `weights_by_dtype`, the data type of the
        build and the hash of the weights in each data type.
    """
    built = _dtype_name(layer)
    hashes = {name: weights_hash(layer, dtype) for name, dtype in _DTYPES.items()}
    return {"weights": hashes["bfloat16"], "weights_by_dtype": {"built": built, **hashes}}


def check_weights(
    about: Mapping[str, Any], layer: nn.Module, read_stored: Callable[[], StoredParameters] | None = None
) -> None:
    """Raise unless a layer has the weights that an atlas was built for.

    Args:
        about: the atlas's manifest.
        layer: the layer as it was loaded.
        read_stored: reads the layer's possible weights and biases from the checkpoint that the layer was loaded from.
            It is called where the recorded hashes decide nothing: two different roundings of one number cannot be
            compared without the number.
    """
    built, hashes = _read_hashes(about)
    loaded, dtype = layer_parameters(layer), _dtype_name(layer)
    if _matches(loaded, built, hashes):
        return
    if not _decides(built, hashes, dtype) and loaded[0].shape == (about.get("d_out"), about.get("d_in")):
        found = [as_parameters(*stored) for stored in (read_stored() if read_stored else ())]
        # Only weights that become those of the layer when they are loaded say anything about the layer.
        origins = [p for p in found if p[0].shape == loaded[0].shape and _same_rounding(p, loaded, _DTYPES[dtype])]
        if any(_matches(parameters, built, hashes) for parameters in origins):
            return
        if not origins:
            raise AtlasError(
                f"atlas '{about.get('name')}' cannot be compared with its layer in {dtype} without the files of the "
                "checkpoint; load the model in float32 (dtype='float32', --dtype float32)."
            )
    model = about.get("model", {})
    revision = model.get("revision")
    raise AtlasError(
        f"atlas '{about.get('name')}' was built for other weights of this layer (hash {about['weights'][:8]}…, loaded "
        f"{weights_hash(layer)[:8]}…); rebuild it with `elude-steer build`, or load '{model.get('id')}'"
        + (f", revision {revision}." if revision else ".")
    )


def _read_hashes(about: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
    """The data type of the build and the recorded hashes; older atlases have only that of bfloat16."""
    recorded = about.get("weights_by_dtype")
    if recorded:
        return recorded["built"], {name: recorded[name] for name in _DTYPES}
    built = about.get("spec", {}).get("model", {}).get("dtype", "float32")
    return built, {"bfloat16": about["weights"]}


def _decides(built: str, hashes: Mapping[str, str], dtype: str) -> bool:
    """Whether every layer of the right checkpoint, loaded in a data type, matches the recorded hashes."""
    if dtype in ("float32", built):
        return True
    return built == "float32" if "float32" in hashes else built != "float16" and dtype == "bfloat16"


def _matches(parameters: Parameters, built: str, hashes: Mapping[str, str]) -> bool:
    if len(hashes) == 1:
        # An older atlas knows the bfloat16 rounding of what was loaded at the build.
        roundings = [parameters, *([_round(parameters, torch.float16)] if built == "float16" else ())]
        return any(_hash(rounded, torch.bfloat16) == hashes["bfloat16"] for rounded in roundings)
    return any(
        _hash(parameters, dtype) == hashes[name]
        for name, dtype in _DTYPES.items()
        if name == built or _same_values(parameters, _round(parameters, dtype))
    )


def _dtype_name(layer: nn.Module) -> str:
    """The data type of a layer's weights; float32 for those that are computed with in float32."""
    return next((name for name, dtype in _DTYPES.items() if layer.weight.dtype == dtype), "float32")


def _round(parameters: Parameters, dtype: torch.dtype) -> Parameters:
    weight, bias = (tensor.to(dtype).to(tensor.dtype) for tensor in parameters)
    return weight, bias


def _same_values(one: Parameters, other: Parameters) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _same_rounding(one: Parameters, other: Parameters, dtype: torch.dtype) -> bool:
    return _hash(one, dtype) == _hash(other, dtype)


def _hash(parameters: Parameters, dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for tensor in parameters:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
