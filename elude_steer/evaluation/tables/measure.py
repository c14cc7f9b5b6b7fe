"""What a dictionary is worth on the images of a table, the same for every method, and what its latents show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from elude_steer.errors import ImageError
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs
from elude_steer.evaluation.compare.methods import Method
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.monosemanticity import Peaks, mean_percent
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.setup import TableSetup, class_of
from elude_steer.models.images import Item
from elude_steer.utils.files import read_json, read_tensors, write_tensors

KEPT = 16  # images that are found for each latent
PROBE = "linear probe"


@torch.inference_mode()
def measure_dictionary(bench: Bench, dictionary: Dictionary) -> dict[str, float]:
    """All measures of a dictionary on the held-out images, in one pass over their activations."""
    outputs_for, r2, peaks, probe = linear_outputs(bench.tower.layer), R2(), None, bench.probe
    active, tokens = 0, 0
    items: list[Item] = []
    means: list[torch.Tensor] = []
    for item, q, stream in bench.held_out.activations():
        codes, out = dictionary.read(q), outputs_for(q)
        approximate = codes @ dictionary.write + dictionary.base
        if peaks is None:
            peaks = Peaks(codes.shape[1], out.shape[1])
        peaks.add(codes, out)
        r2.add(out, approximate)
        active, tokens = active + int((codes > 0).sum()), tokens + len(q)
        items.append(item)
        if probe is not None:
            means.append(probe.mean_stream(stream, approximate - out))
    if peaks is None:
        raise ImageError(f"none of the images of {bench.setup.held_out_set.name} can be read.")
    measures = {
        "latents": float(len(dictionary)),
        "expansion": len(dictionary) / dictionary.write.shape[1],
        "MS-Score": mean_percent(peaks.scores()),
        "R2": r2.value,
        "never fire": float(peaks.silent.double().mean()),
        "active": active / tokens,
        **measure_atoms(dictionary.atoms.cpu()),
    }
    baseline = baseline_accuracy(bench)
    if baseline is None:
        return measures
    if bench.head is not None:
        share = bench.head.accuracy(items, head_classes(bench, items), dictionary)
    else:
        share = _probe_accuracy(bench, items, means)
    return {**measures, "accuracy": share, "baseline accuracy": baseline}


def measure_atoms(atoms: torch.Tensor) -> dict[str, float]:
    """The geometry of the vectors of a dictionary, `(S, d)`; those of length zero are dead and left out."""
    alive = atoms.norm(dim=1) > 0
    return {
        "dead": float((~alive).double().mean()),
        "effective rank": effective_rank(atoms[alive]),
        "collinearity": collinearity(atoms[alive]),
    }


@torch.inference_mode()
def baseline_accuracy(bench: Bench) -> float | None:
    """The accuracy of the unchanged backbone; None where it has no classifier or the images have no classes."""
    if not bench.is_classified or (bench.head is None and bench.probe is None):
        return None

    def compute() -> dict[str, Any]:
        if bench.head is not None:
            items = bench.held_out.items
            share = bench.head.accuracy(items, head_classes(bench, items))
            return {"accuracy": share, "classifier": _name_head(bench.setup)}
        pairs = [(item, stream.mean(0).cpu()) for item, _, stream in bench.held_out.activations()]
        share = _probe_accuracy(bench, [item for item, _ in pairs], [mean for _, mean in pairs])
        return {"accuracy": share, "classifier": PROBE}

    return float(load_or_make(_baseline_path(bench.setup), compute)["accuracy"])


def _baseline_path(setup: TableSetup) -> Path:
    return setup.folder / "baseline.json"


def _name_head(setup: TableSetup) -> str:
    return "timm head" if setup.head is None else "head"


def accuracy_source(setup: TableSetup) -> str | None:
    """What tells the classes for the accuracy: `head`, `timm head` or `linear probe`; None if nothing did so far.

    Loads no model.
    """
    path = _baseline_path(setup)
    return read_json(path, dict).get("classifier") if path.exists() else None


def _probe_accuracy(bench: Bench, items: Sequence[Item], means: Sequence[torch.Tensor]) -> float:
    """The accuracy of the probe on mean streams of images, of those that have a class."""
    numbers = torch.tensor(bench.class_numbers(items))
    known = numbers >= 0
    return (
        float("nan")
        if bench.probe is None
        else bench.probe.accuracy(torch.stack(list(means))[known], numbers[known].tolist())
    )


def head_classes(bench: Bench, items: Sequence[Item]) -> list[int]:
    """The classes of images as the head numbers them; none where there is no head."""

    def named(some: Sequence[Item]) -> list[str]:
        return [f"{class_of(item.id, bench.setup.classes)}/{item.index}" for item in some]

    return [] if bench.head is None else bench.head.numbers(named(items), named(bench.held_out.items))


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
