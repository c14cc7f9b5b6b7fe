"""Any torch model to an atlas of one of its layers, without a spec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import check_counts, run_and_save, work_folder
from elude_steer.atlas.build.sizes import check_memory
from elude_steer.atlas.build.stages import Build
from elude_steer.atlas.manifest import check_name, check_target
from elude_steer.errors import ImageError
from elude_steer.method.layers import layer_parameters
from elude_steer.models.hooks import find_layer, record
from elude_steer.models.images import ImageSet, image_set
from elude_steer.models.vision import Tower
from elude_steer.specs import (
    AtlasSpec,
    ClustersSpec,
    LabelsSpec,
    MatcherSpec,
    ModelSpec,
    ReferencesSpec,
    SplitSpec,
    TokensSpec,
)
from elude_steer.utils.files import home
from elude_steer.utils.parallel import worker_group
from elude_steer.utils.yaml_schema import validate


def disentangle(
    model: nn.Module,
    *,
    layer: str,
    images: Any,
    preprocess: Callable[[Any], torch.Tensor] | None = None,
    name: str = "disentangled",
    tokens: TokensSpec | None = None,
    clusters: ClustersSpec | None = None,
    split: SplitSpec | None = None,
    references: ReferencesSpec | None = None,
    labels: LabelsSpec | None = None,
    matcher: MatcherSpec | None = None,
    skip_tokens: Sequence[int] = (),
    out: str | Path | None = None,
    threads: int | None = None,
    work: str | Path | None = None,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> Atlas:
    """Split one linear layer of any torch model, without a vision-language model.

    Args:
        model: any module that takes a batch of prepared images.
        layer: the end of the dotted name of an nn.Linear or a 1x1 nn.Conv2d.
        images: a folder, paths, a dataset, or any iterable of PIL images or tensors.
        preprocess: turns one image into one tensor; None if the images are tensors already.
        name: of the atlas.
        tokens: see `TokensSpec`; by default the number of tokens follows the number of images.
        clusters: see `ClustersSpec`; by default the sizes follow the number of tokens.
        split: see `SplitSpec`.
        references: see `ReferencesSpec`.
        labels: see `LabelsSpec`; without a scorer the sub-units get no labels.
        matcher: see `MatcherSpec`.
        skip_tokens: positions of tokens to leave out, such as register tokens.
        out: the folder to write; by default one with that name under `ELUDE_STEER_HOME/atlases`.
        threads: how many, one core each; by default all cores.
        work: the folder for unfinished and reusable stages.
        quiet: hide progress bars.
        trust_remote_code: whether code that comes with the scorer of `labels` may run.

    Example:
        >>> atlas = disentangle(model, layer="blocks.11.mlp.fc2", images="photos/", preprocess=transform)
    """
    full_name, module = find_layer(model, layer)
    target = check_target(Path(out) if out else home() / "atlases" / check_name(name))
    check_counts(threads, None)
    spec = validate(
        AtlasSpec(
            name,
            ModelSpec(id=type(model).__name__, layer=full_name, kind="vision"),
            tokens=TokensSpec() if tokens is None else tokens,
            clusters=ClustersSpec() if clusters is None else clusters,
            split=SplitSpec() if split is None else split,
            references=ReferencesSpec() if references is None else references,
            labels=LabelsSpec() if labels is None else labels,
            matcher=MatcherSpec() if matcher is None else matcher,
        )
    )
    probing_images = image_set(images)
    parameter = next(model.parameters())
    check_memory(spec, probing_images.length, layer_parameters(module)[0].shape[1], parameter.device)

    def prepare(batch: Sequence[Any]) -> torch.Tensor:
        prepared = [preprocess(image) if preprocess else image for image in batch]
        if not all(isinstance(one, torch.Tensor | np.ndarray) for one in prepared):
            kinds = {type(one).__name__ for one in prepared}
            raise ImageError(
                f"the model takes tensors, not {', '.join(kinds)}; pass preprocess= to turn an image into a tensor."
            )
        return torch.stack([torch.as_tensor(one) for one in prepared]).to(parameter.device, parameter.dtype)

    was_training = model.training
    model.eval()
    try:
        settings = {"samples": _hash_samples(model, module, probing_images, prepare)}
        tower = Tower(model, full_name, module, prepare, tuple(skip_tokens), settings=settings)
        with worker_group(None, threads) as workers:
            run = Build(tower, probing_images, spec, workers, work_folder(work), quiet, trust_remote_code)
            return run_and_save(run, target, {"id": type(model).__name__})
    finally:
        model.train(was_training)


@torch.inference_mode()
def _hash_samples(
    model: nn.Module,
    layer: nn.Module,
    images: ImageSet,
    prepare: Callable[[Sequence[Any]], torch.Tensor],
    count: int = 8,
) -> str | None:
    """A hash of the layer's inputs for some images, because other code or hooks do not show in the weights.

    The whole model runs on each of these images, so that a layer that runs more than once is noticed.
    """
    if images.fingerprint is None or images.length is None:
        return None
    step, digest = max(1, images.length // count), hashlib.blake2b(digest_size=16)
    for item in islice(images.items(), 0, None, step):
        try:
            image, _ = item.read()
        except Exception:  # noqa: BLE001, S112  # nosec B112
            continue  # collect_tokens reports files that cannot be read
        with record(layer, stop=False) as recorded:
            model(prepare([image]))
        digest.update(recorded.input.cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
