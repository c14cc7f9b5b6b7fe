"""A recipe that touches every patch as an ordinary checkpoint: the edit folded into one layer's weight and bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elude_steer import __version__
from elude_steer.errors import SpecError, StorageError
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import new_folder, write_file


def export(steerer: Steerer, plan: Plan, out: str | Path) -> Path:
    """Writes the model with the plan inside it; loading it needs nothing of ours.

    Args:
        steerer: the model and its atlas.
        plan: one that folds: mode scale, nu all.
        out: a new folder.
    """
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"'{out}' is already there; give a new folder.")
    if not plan.has_effect:
        raise SpecError("the plan changes nothing, so the checkpoint would be the model itself; name a word.")
    if not plan.is_linear:
        raise SpecError(
            "only an edit of every patch can be weights: patches are chosen, or values set, for each picture anew. The "
            "nearest that can: mode scale, nu all (`--set mode=scale --set nu=all`); look at its captions first."
        )
    prepared = steerer.gather_weights(plan)
    if prepared is None:
        raise SpecError("there is no plan to export.")
    weight, bias = prepared.weight_change
    layer: Any = steerer.vlm.layer
    name, model = steerer.vlm.layer_name, steerer.vlm.model
    state = dict(model.state_dict())
    for key, tensor, more in (("weight", layer.weight, weight), ("bias", layer.bias, bias)):
        if tensor is not None:
            state[f"{name}.{key}"] = (tensor.float() + more.to(tensor.device)).to(tensor.dtype).contiguous()
            if not torch.isfinite(state[f"{name}.{key}"]).all():
                raise SpecError("the folded weights are not finite; use smaller gains.")
    with new_folder(folder) as new:
        model.save_pretrained(new, state_dict=state)
        steerer.vlm.processor.save_pretrained(new)
        card = _card(steerer, plan)
        write_file(new / "README.md", lambda file: file.write(card.encode()))
    return folder


def _card(steerer: Steerer, plan: Plan) -> str:
    model = steerer.atlas.about["model"].get("id") or steerer.vlm.id
    lines = "\n".join(f"    {line}" for line in str(plan).splitlines())
    return (
        f"---\nbase_model: {model}\ntags: [steering]\n---\n\n# {model}, steered\n\n"
        f"`{model}` with an edit folded into `{steerer.vlm.layer_name}`; no other weight differs. Made with "
        f"elude_steer {__version__} and the atlas `{steerer.atlas.name}`; loading it needs only transformers.\n\n"
        f"{lines}\n\n**It says things about pictures that are not so, on purpose.** Do not use it where somebody "
        "relies on its captions without knowing that.\n"
    )
