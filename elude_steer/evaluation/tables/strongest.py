"""The images of a table that activate each latent of a method most."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elude_steer.evaluation.baselines.dictionary import linear_outputs
from elude_steer.evaluation.compare.methods import Method
from elude_steer.evaluation.measures.monosemanticity import Peaks
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.utils.files import read_tensors, write_tensors

KEPT = 16  # images of each latent


def strongest_images(bench: Bench, method: Method, seed: int) -> torch.Tensor:
    """Indices of the held-out images that activate each latent most, `(S, 16)`, strongest first.

    -1 stands where a latent never fires or there are fewer images.
    """
    path = bench.folder / "strongest" / f"{method.number:02d}-{seed}.safetensors"
    if not path.exists():
        write_tensors(path, {"images": _find(bench, bench.dictionary(method, seed).read)})
    return read_tensors(path)["images"]


def strongest_of_units(bench: Bench) -> torch.Tensor:
    """The same for the units of the layer."""
    path = bench.folder / "strongest" / "units.safetensors"
    if not path.exists():
        write_tensors(path, {"images": _find(bench, linear_outputs(bench.tower.layer))})
    return read_tensors(path)["images"]


@torch.inference_mode()
def _find(bench: Bench, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    peaks, indices = None, []
    for item, q, _ in bench.held_out.activations():
        codes = read(q)
        peaks = peaks or Peaks(codes.shape[1], 1, KEPT)
        peaks.add(codes, codes[:, :1])  # the stored outputs are of no use here
        indices.append(item.index)
    if peaks is None:
        return torch.full((0, KEPT), -1)
    values, order = peaks.values.sort(dim=1, descending=True, stable=True)
    rows = peaks.images.gather(1, order)
    found = torch.tensor(indices)[rows.clamp_min(0)]
    return found.masked_fill((values == -torch.inf) | peaks.silent[:, None], -1)
