"""A client that sends steered image embeddings to a server of another engine, which runs the model as it is."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from elude_steer.errors import EludeSteerError, ModelError
from elude_steer.models.images import open_image
from elude_steer.models.vlm import PROMPT
from elude_steer.specs import SettingArguments
from elude_steer.steering.plan import Plan, Words
from elude_steer.steering.steerer import Steerer


class EngineError(EludeSteerError, RuntimeError):
    """A server cannot be reached, or refuses a request."""


@dataclass(frozen=True)
class EmbedsClient:
    """Asks a server that takes image embeddings in the place of images, as vLLM does with `--enable-mm-embeds`.

    The vision tower runs here, with the edit; the server never sees the image.

    Attributes:
        steerer: loaded in the number type that the server uses.
        model: what the server calls the model.
        base_url: its address.
        api_key: its key, if it asks for one.
        timeout: seconds to wait for an answer.

    Example:
        >>> steerer = Steerer.load("my-atlas", dtype="bfloat16")
        >>> client = EmbedsClient(steerer, "llava-hf/llava-onevision-qwen2-0.5b-ov-hf")
        >>> client.ask("photo.jpg", minus=["dog"])
    """

    steerer: Steerer[Any]
    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0

    def ask(
        self,
        image: Any,
        *,
        minus: Words = (),
        plus: Words = (),
        where: Any = None,
        prompt: str = PROMPT,
        max_tokens: int = 64,
        **settings: Unpack[SettingArguments],
    ) -> str:
        """Return the server's answer about an image under an edit; the arguments are those of `Steerer.steer`."""
        plan = None
        if minus or plus:
            plan = self.steerer.plan(minus=minus, plus=plus, where=where, **settings)
        content = [embeds_part(self.steerer, image, plan), {"type": "text", "text": prompt}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        answer = self._post({**body, "max_tokens": max_tokens, "temperature": 0})
        try:
            return str(answer["choices"][0]["message"]["content"]).strip()
        except (LookupError, TypeError) as error:
            raise EngineError(
                f"{self.base_url} answers without choices; is it a server of chat completions?"
            ) from error

    def _post(self, body: Mapping[str, Any]) -> Any:
        import httpx2

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        address = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            response = httpx2.post(address, json=body, headers=headers, timeout=self.timeout)
            response.raise_for_status()
            return response.json()
        except httpx2.HTTPStatusError as error:
            text = " ".join(error.response.text.split())[:300]
            raise EngineError(f"{address} answers {error.response.status_code}: {text}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            what = " ".join(str(error).split())[:200]
            raise EngineError(f"{address} cannot be asked ({what}); check the address and whether it runs.") from error


def embeds_part(steerer: Steerer[Any], image: Any, plan: Plan | None = None) -> dict[str, Any]:
    """The part of a message that stands for an image under a plan, in the form of vLLM's `image_embeds`.

    Engines keep what they compute for an image under its `uuid`. Here it is the hash of the embeddings, so that it
    differs between edits, and between a model and another one.
    """
    if getattr(steerer.vlm.model.config.vision_config, "deepstack_visual_indexes", None):
        raise ModelError(
            f"{type(steerer.vlm.model).__name__} reads several layers of its tower, and embeddings of the last one "
            "alone do not hold what an edit changes; use `elude-steer serve`, or an exported checkpoint."
        )
    opened = open_image(image)
    embeds = steerer.embeds(opened, plan).cpu()
    tensors = {"image_embeds": embeds}
    inputs = steerer.vlm.inputs([opened])
    if "image_grid_thw" in inputs:  # the Qwen-VL families place tokens by it
        tensors["image_grid_thw"] = inputs["image_grid_thw"][0].cpu()
    values = {name: _encode(tensor) for name, tensor in tensors.items()}
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    sent: Any = values if len(values) > 1 else values["image_embeds"]
    return {"type": "image_embeds", "image_embeds": sent, "uuid": digest.hexdigest()}


def _encode(tensor: torch.Tensor) -> str:
    data = io.BytesIO()
    torch.save(tensor.contiguous().clone(), data)  # a view would be saved with all that it is a view of
    return base64.b64encode(data.getvalue()).decode()
