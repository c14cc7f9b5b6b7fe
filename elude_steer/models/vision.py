"""A torch model, one linear layer in it, and the way from pictures to what that layer is given."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import ImageError, ModelError
from elude_steer.models.hooks import block_of, find_layer, record, record_output
from elude_steer.models.loading import (
    as_dtype,
    check_device,
    explain_load_errors,
    load_image_processor,
    load_pretrained,
)
from elude_steer.utils import optional


@dataclass(frozen=True, eq=False)
class Tower:
    """Where the method is applied: `encode` turns pictures into the target layer's inputs.

    Attributes:
        model: the whole model, in eval mode.
        layer_name: dotted name of the target layer.
        layer: the target layer itself.
        prepare: pictures to what `model` is called with: a tensor, or a mapping of keyword arguments.
        skip_tokens: positions that are no instances (register tokens).
        within: the part of the model that the layer's input depends on; empty means all of it.
        settings: how the pictures are prepared, for the fingerprint.
        autocast: what matrix products are computed in while pictures are looked at, where it is not the model's own.
        turn: on a GPU, whose turn it is: one thread computes while the others read pictures.
    """

    model: nn.Module
    layer_name: str
    layer: nn.Module
    prepare: Callable[[Sequence[Any]], torch.Tensor | Mapping[str, Any]]
    skip_tokens: tuple[int, ...] = ()
    within: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the pictures go: the device of the model's first parameter."""
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def encode(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """The target layer's inputs, one `(tiles, tokens, d_in)` tensor an image; the model runs no further."""
        if not len(images):
            raise ImageError("there are no images to encode.")
        inputs = self.prepare(images)
        with record(self.layer) as seen:
            self._call(inputs)
        return self.split_by_image(self._as_tokens(seen.input), inputs, len(images))

    @torch.inference_mode()
    def streams(self, images: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each image the layer's inputs and, as `(tiles, tokens, d_out)`, what its block hands on.

        That is the residual stream behind the layer. Where a block hands on anything else, it is the layer's own
        output.
        """
        inputs = self.prepare(images)
        block = block_of(self.model, self.layer_name)
        with record(self.layer, stop=False) as given, record_output(block) as made:
            self._call(inputs)
        q, stream = self._as_tokens(given.input), made[0]
        width = self.layer.out_channels if isinstance(self.layer, nn.Conv2d) else int(self.layer.out_features)  # type: ignore[arg-type]
        if stream.dim() == 4 and stream.shape[1] == width and stream.shape[-1] != width:
            stream = stream.movedim(1, -1)  # a map with its channels first
        if stream.shape[-1] != width or stream.numel() != q.shape[:-1].numel() * width:
            stream = self.layer(given.input)
            stream = stream.flatten(2).transpose(1, 2) if isinstance(self.layer, nn.Conv2d) else stream
        stream = stream.reshape(*q.shape[:-1], width)
        count = len(images)
        pairs = zip(self.split_by_image(q, inputs, count), self.split_by_image(stream, inputs, count), strict=True)
        return list(pairs)

    def _as_tokens(self, q: torch.Tensor) -> torch.Tensor:
        """What the layer was given, its maps as rows of tokens."""
        if isinstance(self.layer, nn.Conv2d):
            return _looked_at(self.layer, q).flatten(2).transpose(1, 2)  # (batch, height x width, d_in)
        return q.flatten(1, -2) if q.dim() > 3 else q  # channels-last maps: (batch, height x width, d_in)

    def token_indices(self, tokens: int) -> torch.Tensor:
        """The positions among `tokens` that count as instances."""
        kept = [i for i in range(tokens) if i not in set(self.skip_tokens)]
        return torch.tensor(kept, dtype=torch.long)

    def fingerprint(self) -> str:
        """A hash of everything here that the layer's inputs depend on."""
        digest = hashlib.blake2b(digest_size=16)
        part = self.model.get_submodule(self.within)
        described = {
            "class": type(self.model).__name__,
            "modules": str(part),  # activations and the like are no weights
            "config": _described(part),
            "layer": self.layer_name,
            "skip": self.skip_tokens,
            "settings": dict(self.settings),
            **({"autocast": str(self.autocast)} if self.autocast is not None else {}),
        }
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
        for name, tensor in sorted(part.state_dict().items()):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    def _call(self, inputs: torch.Tensor | Mapping[str, Any]) -> None:
        alone = nullcontext() if self.device.type == "cpu" else self.turn
        with alone, torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            if isinstance(inputs, torch.Tensor):
                self.model(inputs.to(self.device))
            else:
                self.model(**inputs)

    def split_by_image(
        self, q: torch.Tensor, inputs: torch.Tensor | Mapping[str, Any], images: int
    ) -> list[torch.Tensor]:
        """What a layer saw, a `(tiles, tokens, …)` tensor an image."""
        if q.shape[0] % images:
            raise ModelError(
                f"layer '{self.layer_name}' saw {q.shape[0]} rows for {images} images, so rows cannot be told apart; "
                "set tokens.batch_size: 1."
            )
        if q.dim() == 2:  # one vector an image, or the tokens of all images one after the other
            return list(q.reshape(images, 1, -1, q.shape[-1]).unbind(0))
        return list(q.reshape(images, -1, *q.shape[1:]).unbind(0))


def load_vision(
    model_id: str,
    *,
    layer: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Tower:
    """A vision backbone of transformers (DINOv2, ViT, …); of a dual encoder (SigLIP, CLIP) its vision half."""
    from transformers import AutoModel

    target = check_device(device)
    model = load_pretrained(
        AutoModel,
        model_id,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    processor = load_image_processor(model_id, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(model.config, "vision_config", None) is not None:
        model = model.get_submodule(vision_part(model))
    model = model.to(target)
    name, module = find_layer(model, layer)

    def prepare(images: Sequence[Any]) -> Mapping[str, Any]:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels.to(next(model.parameters()).device, next(model.parameters()).dtype)}

    registers = getattr(model.config, "num_register_tokens", 0)
    skip = tuple(range(1, 1 + registers))  # after CLS
    return Tower(model, name, module, prepare, skip, settings={"processor": processor.to_dict()})


def load_timm(
    model_id: str, *, layer: str, device: str | torch.device | None = None, dtype: str | torch.dtype = "float32"
) -> Tower:
    """A vision backbone of timm with its own pre-processing (extra `timm`)."""
    timm = optional.require("timm", f"model.kind 'timm' ({model_id})")
    with explain_load_errors(model_id):
        model = timm.create_model(model_id, pretrained=True).eval().to(check_device(device))
        if dtype != "auto":
            model.to(as_dtype(dtype))
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    name, module = find_layer(model, layer)

    def prepare(images: Sequence[Any]) -> torch.Tensor:
        parameter = next(model.parameters())
        return torch.stack([transform(image) for image in images]).to(parameter.device, parameter.dtype)

    prefix = getattr(model, "num_prefix_tokens", 0)
    skip = tuple(range(prefix - getattr(model, "num_reg_tokens", 0), prefix))
    return Tower(model, name, module, prepare, skip, settings={"transform": str(transform)})


def vision_part(model: nn.Module) -> str:
    """Dotted name of a vision-language model's vision tower: the module built from its config's `vision_config`."""
    wanted = getattr(model.config, "vision_config", None)
    if wanted is not None:
        for name, module in model.named_modules():
            config = getattr(module, "config", None)
            if name and (config is wanted or type(config) is type(wanted)):
                return name
    raise ModelError(f"{type(model).__name__} has no vision tower that its config names (no vision_config).")


def _described(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    if config is None:
        return None
    attention = getattr(config, "_attn_implementation", None)
    if not hasattr(config, "to_dict"):
        return [str(config), attention]
    # Where a checkpoint lies and who wrote it changes nothing.
    return [
        {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")},
        attention,
    ]


def _looked_at(layer: nn.Conv2d, q: torch.Tensor) -> torch.Tensor:
    """The positions of a map that a 1x1 convolution has an output for."""
    if not isinstance(layer.padding, str):  # "same" and "valid" pad nothing at this kernel size
        high, wide = layer.padding
        q = F.pad(q, (wide, wide, high, high))
    return q[:, :, :: layer.stride[0], :: layer.stride[1]]


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:
        raise ModelError("part of the vision tower is offloaded; keep it in memory (device_map='auto' with more room).")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
