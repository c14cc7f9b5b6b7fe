"""Photoland's vision tower: a DINOv2-S/14 out of an ONNX file, as transformers' own `Dinov2Model`.

The file holds a DINOv2 that its authors fine-tuned to find salient regions, with their head behind it. What is taken:
all blocks but the last, whose output serves the head and tells kinds of things apart worse than the one before it.
What is changed: the position embeddings are interpolated to our number of patches, and `layer_scale2`, which stands
between `mlp.fc2` and the residual stream, is multiplied into `fc2`, so that what the layer writes is what the stream
receives.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.models.loading import refuse_partial_load

BLOCKS = 11  # of 12
PATCH = 14
SIDE = 140  # pixels: 10 x 10 patches


def read_onnx(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of the backbone, named as `Dinov2Model` names them.

    Linear weights have lost their names in the file; the nodes that use them still have theirs.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    arrays = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    state = {name.removeprefix("backbone."): array for name, array in arrays.items() if name.startswith("backbone.")}
    for node in graph.node:
        weight = next((name for name in node.input if name.startswith("onnx::MatMul")), None)
        if weight and (found := re.fullmatch(r"/backbone/(.+)/MatMul", node.name)):
            state[found[1].replace("/", ".") + ".weight"] = arrays[weight].T
        if node.name == "/backbone/embeddings/Concat_6":  # position of CLS, then of the patches
            state["embeddings.position_embeddings"] = np.concatenate(
                [arrays[node.input[0]], _patch_positions(arrays)], 1
            )
    return {name: torch.from_numpy(np.array(array)) for name, array in state.items()}


def _patch_positions(arrays: dict[str, np.ndarray]) -> np.ndarray:
    (positions,) = (array for array in arrays.values() if array.ndim == 3 and array.shape[1] == 37 * 37)
    return positions


def vision_config(*, side: int = SIDE, blocks: int = BLOCKS) -> Any:
    """The config of the tower for images of `side` x `side` pixels."""
    from transformers import Dinov2Config

    return Dinov2Config(
        hidden_size=384, num_hidden_layers=blocks, num_attention_heads=6, image_size=side, patch_size=PATCH
    )


def make_tower(path: Path, *, side: int = SIDE, blocks: int = BLOCKS) -> Any:
    """Convert the ONNX file at `path` to a `Dinov2Model` in eval mode."""
    from transformers import Dinov2Model

    state = read_onnx(path)
    full = Dinov2Model(vision_config(side=518, blocks=1)).eval()
    full.embeddings.position_embeddings.data = state["embeddings.position_embeddings"]
    positions = full.embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + (side // PATCH) ** 2, 384), side, side)
    state["embeddings.position_embeddings"] = positions.detach()
    state["embeddings.mask_token"] = torch.zeros(1, 384)  # the file lacks it; only pre-training uses it
    for number in range(blocks):
        scale = state[f"encoder.layer.{number}.layer_scale2.lambda1"]
        state[f"encoder.layer.{number}.mlp.fc2.weight"] *= scale[:, None]
        state[f"encoder.layer.{number}.mlp.fc2.bias"] *= scale
        scale.fill_(1.0)
    return _load(state, vision_config(side=side, blocks=blocks))


def _load(state: dict[str, torch.Tensor], config: Any) -> Any:
    """Load weights through a checkpoint, because transformers renames the Hub's keys when it reads one."""
    from safetensors.torch import save_file
    from transformers import Dinov2Model

    dropped = [f"encoder.layer.{number}." for number in range(config.num_hidden_layers, 12)]
    kept = {name: value.contiguous() for name, value in state.items() if not name.startswith(tuple(dropped))}
    with tempfile.TemporaryDirectory() as folder:
        save_file(kept, Path(folder) / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        model, info = Dinov2Model.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    refuse_partial_load("the ONNX file", info)
    return model.eval()
