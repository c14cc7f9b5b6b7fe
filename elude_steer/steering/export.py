"""Export a steered model as an ordinary checkpoint: an edit of every patch, folded into one layer's weight and bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError, StorageError
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import new_folder, write_file


def export(steerer: Steerer[Atlas], plan: Plan, out: str | Path) -> Path:
    """Write the model with the plan folded into its weights; transformers loads it without this package.

    Args:
        steerer: the model and its atlas.
        plan: a linear one (`Plan.is_linear`): mode scale, nu all.
        out: a new folder.
    """
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"'{out}' already exists and is not an empty folder; give a new one.")
    if not plan.has_effect:
        raise SpecError("the plan changes nothing, so the checkpoint would be the model; name a word in minus or plus.")
    if not plan.is_linear:
        raise SpecError(
            "only an edit of every patch can be weights; this plan chooses patches, or sets values, for each image. "
            "The closest that can: mode scale, nu all (`--set mode=scale --set nu=all`); check its captions first."
        )
    prepared = steerer.gather_weights(plan)
    if prepared is None:
        raise SpecError("there is no plan to export.")
    weight_change, bias_change = prepared.weight_change
    layer: Any = steerer.vlm.layer
    name, model = steerer.vlm.layer_name, steerer.vlm.model
    state = dict(model.state_dict())
    for key, tensor, change in (("weight", layer.weight, weight_change), ("bias", layer.bias, bias_change)):
        if tensor is not None:
            state[f"{name}.{key}"] = (tensor.float() + change.to(tensor.device)).to(tensor.dtype).contiguous()
            if not torch.isfinite(state[f"{name}.{key}"]).all():
                raise SpecError("the folded weights are not finite; use smaller gains.")
    with new_folder(folder) as new:
        model.save_pretrained(new, state_dict=state)
        steerer.vlm.processor.save_pretrained(new)
        card = _card(steerer, plan)
        write_file(new / "README.md", lambda file: file.write(card.encode()))
    return folder


def _card(steerer: Steerer[Atlas], plan: Plan) -> str:
    model = steerer.atlas.about["model"].get("id") or steerer.vlm.id
    lines = "\n".join(f"    {line}" for line in str(plan).splitlines())
    return (
        f"---\nbase_model: {model}\ntags: [steering]\n---\n\n# {model}, steered\n\n"
        f"`{model}` with an edit folded into `{steerer.vlm.layer_name}`; no other weight differs. Made with "
        f"elude_steer {__version__} and the atlas `{steerer.atlas.name}`; loading it needs only transformers.\n\n"
        f"{lines}\n\n**On purpose, it says things about images that are not true.** Do not use it where somebody "
        "relies on its captions without knowing that.\n"
    )
