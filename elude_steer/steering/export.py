"""Export an edit of every patch, folded into one layer's weight and bias: as a checkpoint, or as a LoRA adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.card import CAPTIONING
from elude_steer.errors import SpecError
from elude_steer.method.layers import layer_parameters
from elude_steer.models.hooks import record, replace_forward
from elude_steer.models.images import open_image
from elude_steer.models.saving import has_video_part, save_processor
from elude_steer.models.vlm import PROMPT, Vlm, limit_logits
from elude_steer.steering.plan import NOT_LINEAR, Plan
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import check_folder, new_folder, write_file
from elude_steer.utils.hub import find_base_model, front_matter, read_license

_WARNING = (
    "**On purpose, it says things about images that are not true.** Do not use it where somebody relies on its "
    "captions without knowing that.\n"
)
_PIPELINE = f"""\
```python
from PIL import Image
from transformers import pipeline

caption = pipeline("image-text-to-text", model="FOLDER")
content = [{{"type": "image", "image": Image.open("photo.jpg")}}, {{"type": "text", "text": "{PROMPT}"}}]
answer = caption(text=[{{"role": "user", "content": content}}], max_new_tokens=64, return_full_text=False)
print(answer[0]["generated_text"])
```
"""
_WITHOUT_TORCHVISION = f"""\
```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

model = AutoModelForImageTextToText.from_pretrained("FOLDER")
images = AutoImageProcessor.from_pretrained("FOLDER", backend="pil")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")

pixels = images(Image.open("photo.jpg").convert("RGB"), return_tensors="pt")
count = sum(len(part) for part in model.get_image_features(**pixels).pooler_output)  # tokens of the image
content = [{{"type": "image"}}, {{"type": "text", "text": "{PROMPT}"}}]
message = [{{"role": "user", "content": content}}]
text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text.replace("IMAGE_TOKEN", "IMAGE_TOKEN" * count), return_tensors="pt")
tokens = model.generate(**inputs, **pixels, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
```
"""
_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained("BASE")
model = PeftModel.from_pretrained(model, "FOLDER")
```
"""


def export(steerer: Steerer[Atlas], plan: Plan, out: str | Path) -> Path:
    """Write the model with the plan folded into its weights; transformers loads it without this package.

    Args:
        steerer: the model and its atlas.
        plan: a linear one (`Plan.is_linear`): mode scale, nu all.
        out: a new folder.
    """
    folder = check_folder(out, new=True)
    changes = dict(zip(("weight", "bias"), _fold(steerer, plan), strict=True))
    vlm, layer = steerer.vlm, steerer.vlm.layer
    state = dict(vlm.model.state_dict())
    for key, change in changes.items():
        tensor = getattr(layer, key)
        if tensor is not None:
            state[f"{vlm.layer_name}.{key}"] = (tensor.float() + change).to(tensor.dtype).contiguous()
            if not torch.isfinite(state[f"{vlm.layer_name}.{key}"]).all():
                raise SpecError("the folded weights are not finite; use smaller gains.")
    with new_folder(folder) as new:
        vlm.model.save_pretrained(new, state_dict=state)
        save_processor(vlm.processor, new, model_id=vlm.id, revision=vlm.revision)
        _write_text(new / "README.md", _checkpoint_card(steerer, plan))
    return folder


def export_adapter(steerer: Steerer[Atlas], plan: Plan, out: str | Path, *, bias: bool = True) -> Path:
    """Write the plan as a LoRA adapter of the target layer, which peft loads without this package.

    Its rank is the number of units that the plan touches: B picks them, A holds the change of their rows.

    Args:
        steerer: the model and its atlas.
        plan: a linear one (`Plan.is_linear`): mode scale, nu all.
        out: a new folder.
        bias: whether the adapter holds the change of the bias; without it, the edit is not exact
            (`measure_bias_error`), but engines load it that refuse a bias.

    Example:
        >>> from elude_steer import Steerer
        >>> from elude_steer.steering.export import export_adapter
        >>> steerer = Steerer.load("toyland")
        >>> export_adapter(steerer, steerer.plan(minus=["dog"], mode="scale", nu="all"), "adapter")
        PosixPath('adapter')
    """
    from safetensors.torch import save

    folder = check_folder(out, new=True)
    weight, more_bias = _fold(steerer, plan)
    vlm = steerer.vlm
    units = (weight.any(1) | (more_bias != 0)).nonzero()[:, 0]
    rank, prefix = len(units), f"base_model.model.{vlm.layer_name}"
    bias = bias and bool(more_bias.any())
    tensors = {
        f"{prefix}.lora_A.weight": weight[units],
        f"{prefix}.lora_B.weight": F.one_hot(units, len(weight)).T.to(weight.dtype),
    }
    if bias:
        tensors[f"{prefix}.lora_B.bias"] = more_bias
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": vlm.id,
        "revision": vlm.revision,
        "target_modules": [vlm.layer_name],
        "r": rank,
        "lora_alpha": rank,  # so that B A is added as it is
        "lora_dropout": 0.0,
        "lora_bias": bias,
        "bias": "none",
        "inference_mode": True,
        "task_type": None,
    }
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    with new_folder(folder) as new:
        write_file(new / "adapter_model.safetensors", lambda file: file.write(data))
        _write_text(new / "README.md", _adapter_card(steerer, plan, rank, bias=bias))
        _write_text(new / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


@dataclass(frozen=True)
class BiasError:
    """What an adapter without its bias gets wrong on one image.

    Attributes:
        output: largest error of the layer's output.
        edit: largest change that the whole edit makes to the layer's output.
        logits: largest error of the logits of the first word.
        logits_edit: largest change that the whole edit makes to these logits.
        captions: the caption with the bias, and without it.
    """

    output: float
    edit: float
    logits: float
    logits_edit: float
    captions: tuple[str, str]

    def __str__(self) -> str:
        exact, without = self.captions
        said = "the caption is the same" if exact == without else f"the caption is '{without}', not '{exact}'"
        return (
            f"without the bias, the layer's output is off by at most {self.output:.3g} where the edit changes it by "
            f"{self.edit:.3g}, and the first word's logits by {self.logits:.3g} where it changes them by "
            f"{self.logits_edit:.3g}; {said}."
        )


@torch.inference_mode()
def measure_bias_error(steerer: Steerer[Atlas], plan: Plan, image: Any, prompt: str = PROMPT) -> BiasError:
    """Measure on an image what an adapter without its bias gets wrong."""
    weight_change, bias_change = _fold(steerer, plan)
    vlm, opened = steerer.vlm, open_image(image)
    weight, bias = layer_parameters(vlm.layer)
    inputs = vlm.inputs([opened], prompt)

    def run(weight_change: torch.Tensor, bias_change: torch.Tensor) -> tuple[torch.Tensor, str]:
        def compute(_original: Any, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, (weight + weight_change).to(x.dtype), (bias + bias_change).to(x.dtype))

        with replace_forward(vlm.layer, compute):
            logits = vlm.model(**inputs, **limit_logits(vlm.model, 1)).logits[0, -1].float()
            return logits, vlm.answer(inputs)[0]

    with record(vlm.layer) as recorded:
        vlm.model(**inputs)
    exact, caption = run(weight_change, bias_change)
    without, other = run(weight_change, torch.zeros_like(bias_change))
    bare, _ = run(torch.zeros_like(weight_change), torch.zeros_like(bias_change))
    edit = F.linear(recorded.input.float(), weight_change, bias_change)
    output, of_edit, logits, logits_of_edit = (
        float(one.abs().max()) for one in (bias_change, edit, exact - without, exact - bare)
    )
    return BiasError(output, of_edit, logits, logits_of_edit, (caption, other))


def _fold(steerer: Steerer[Atlas], plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the plan adds to the layer's weight and bias; raise if it cannot be folded into them."""
    if not plan.has_effect:
        raise SpecError("the plan changes nothing, so the checkpoint would be the model; name a word in minus or plus.")
    if not plan.is_linear:
        raise SpecError(NOT_LINEAR)
    prepared = steerer.gather_weights(plan)
    if prepared is None:
        raise SpecError("there is no plan to export.")
    weight, bias = prepared.weight_change
    if not torch.isfinite(weight).all() or not torch.isfinite(bias).all():
        raise SpecError("the folded weights are not finite; use smaller gains.")
    return weight, bias


def _write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))


def _checkpoint_card(steerer: Steerer[Atlas], plan: Plan) -> str:
    """Write the card of a checkpoint with a plan in its weights."""
    model = _model_name(steerer)
    return (
        f"{_metadata(steerer, 'transformers', 'finetune', ['steering'])}\n# {model}, steered\n\n"
        f"`{model}` with an edit folded into `{steerer.vlm.layer_name}`; no other weight differs. "
        f"{_origin(steerer)}; loading it needs only transformers.\n\n{_describe(plan)}\n\n{_WARNING}\n"
        f"## Use it\n\n`FOLDER` is this folder, or its id on the Hub.\n\n{_PIPELINE}{_torchvision_section(steerer.vlm)}"
    )


def _adapter_card(steerer: Steerer[Atlas], plan: Plan, rank: int, *, bias: bool) -> str:
    """Write the card of a LoRA adapter with a plan in it."""
    model = _model_name(steerer)
    exact = "with the change of its bias (`lora_bias`)" if bias else "without the change of the layer's bias"
    return (
        f"{_metadata(steerer, 'peft', 'adapter', ['steering', 'lora'])}\n# {model}, steered\n\n"
        f"A LoRA of rank {rank} for `{steerer.vlm.layer_name}` in the vision tower of `{model}`, {exact}. "
        f"{_origin(steerer)}; loading it needs only peft.\n\n{_describe(plan)}\n\n{_WARNING}\n"
        f"## Use it\n\n`FOLDER` is this folder, or its id on the Hub.\n\n{_ADAPTER.replace('BASE', steerer.vlm.id)}"
    )


def _metadata(steerer: Steerer[Atlas], library: str, relation: str, tags: list[str]) -> str:
    """Write the metadata of a card; the licence is that of the model, if its card names one."""
    vlm, model = steerer.vlm, _model_name(steerer)
    base = find_base_model(model)
    return front_matter(
        **(read_license(vlm.id, vlm.revision) or read_license(model)),
        library_name=library,
        pipeline_tag=CAPTIONING,
        base_model=base,
        base_model_relation=base and relation,
        tags=tags,
    )


def _model_name(steerer: Steerer[Atlas]) -> str:
    return str(steerer.atlas.about["model"].get("id") or steerer.vlm.id)


def _origin(steerer: Steerer[Atlas]) -> str:
    return f"Made with elude_steer {__version__} and the atlas `{steerer.atlas.name}`"


def _describe(plan: Plan) -> str:
    return "\n".join(f"    {line}" for line in str(plan).splitlines())


def _torchvision_section(vlm: Vlm) -> str:
    """Say what models with a video processor need, and how to do without; empty for other models."""
    if not has_video_part(vlm.processor):
        return ""
    text = (
        f"\ntransformers makes the processor of `{vlm.model.config.model_type}` only where torchvision is installed: "
        "`pip install torchvision`."
    )
    if not _expands_only_images(vlm):
        return f"{text}\n"
    snippet = _WITHOUT_TORCHVISION.replace("IMAGE_TOKEN", vlm.processor.image_token)
    return f"{text} Without it, use the image processor and the tokenizer:\n\n{snippet}"


@torch.inference_mode()
def _expands_only_images(vlm: Vlm) -> bool:
    """Whether the processor only repeats the image token, once per embedding, as the snippet in the card does."""
    token: Any = getattr(vlm.processor, "image_token", None)
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    tokenizer = vlm.processor.tokenizer
    if not token or not tokenizer.chat_template:
        return False
    inputs = vlm.inputs([Image.new("RGB", (96, 64))])
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    text = text.replace(token, token * len(vlm.embed_images(inputs)[0]))
    return bool(tokenizer(text).input_ids == inputs["input_ids"][0].tolist())
