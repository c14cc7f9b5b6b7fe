"""The paper's table of properties, measured: stable, training-free, explicit, lossless, unsupervised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs
from elude_steer.evaluation.compare.methods import Method
from elude_steer.evaluation.evaluate import read_batches
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.accuracy import Reconstruction
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.evaluation.tables.stability import run_stability
from elude_steer.models.vision import Tower
from elude_steer.utils.progress import track

PROPERTIES = ("stable", "training-free", "explicit", "lossless", "unsupervised")
STABLE = 0.999  # similarity of two runs from which they count as the same
EXACT = 1e-4  # largest error of a layer's output, as a share of its largest output, that rounding explains
CHANGES = 1e-2  # error of the change of the stream, which is a small difference of large numbers
COMPARED, CHANGED = 32, 4  # images on which the output is compared, and a part taken away


@dataclass(frozen=True)
class PropertyRow:
    """What a method is, with the measurement behind every answer.

    Attributes:
        method: name of the method.
        stable: whether runs on the same tokens give the same.
        training_free: whether no parameter is trained.
        explicit: whether taking one part away in the model takes away what that part says it adds, and nothing else.
        lossless: whether the parts together give the layer's output.
        unsupervised: whether no label of an image was read.
        evidence: the numbers behind the answers.
    """

    method: str
    stable: bool
    training_free: bool
    explicit: bool
    lossless: bool
    unsupervised: bool
    evidence: dict[str, float]

    def answers(self) -> list[str]:
        """The five answers in the order of `PROPERTIES`, each with the number that it rests on."""
        e = self.evidence
        similarity = e["similarity of runs"]
        only = self.stable and similarity != similarity  # of units, which nothing can make otherwise
        return [
            f"{_yes(self.stable)} ({'one result' if only else f'{similarity:.3f}'})",
            f"{_yes(self.training_free)} ({e['trained parameters']:,.0f} parameters)",
            f"{_yes(self.explicit)} ({e['error of taking one part away']:.0e})",
            f"{_yes(self.lossless)} ({e['error of the output']:.0e})",
            f"{_yes(self.unsupervised)} ({e['labels read']:,.0f} labels)",
        ]


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def run_properties(
    setup: TableSetup, methods: Sequence[str] | None = None, *, seed: int | None = None, runs: int | None = None
) -> list[PropertyRow]:
    """Measure the properties of each method; those of units, which divide nothing, are left out by default.

    K-means on contributions (PURE) and clusters of activations (DNRwCV) stop at clusters as they are published; here
    their clusters become parts by ELUDe's split, which is why they are found to be explicit and lossless.

    Args:
        setup: the backbone, the images and the budget, of two runs at least.
        methods: names of the methods.
        seed: the draw of tokens that methods are made from, by default the first.
        runs: how many runs decide on stability, two at least; by default all of the preset.
    """
    if min(setup.preset.runs, setup.preset.runs if runs is None else runs) < 2:
        raise SpecError("one run does not show whether a method is stable; give 2 runs or more, or leave `runs` out.")
    names = [name for name in setup.default_methods() if name != "raw units"] if methods is None else list(methods)
    stable = {row.method: row.runs for row in run_stability(setup, names, seed=seed, runs=runs)}
    bench, rows = Bench(setup), []
    draw = setup.find_seeds(None if seed is None else [seed])[0]
    for method in setup.find_methods(names):
        found = load_or_make(_path(setup, method, draw), lambda method=method: _measure(bench, method, draw))  # type: ignore[misc]
        evidence = {name: value for name, value in found.items() if name != "seconds"}
        rows.append(_judge(method, {"similarity of runs": stable[method.name], **evidence}))
    return rows


def has_properties(setup: TableSetup, name: str, seed: int) -> bool:
    """Whether a method's properties are there already; loads no model."""
    (method,) = setup.find_methods([name])
    return _path(setup, method, seed).exists()


def _path(setup: TableSetup, method: Method, seed: int) -> Path:
    return setup.folder / "properties" / f"{method.number:02d}-{seed}.json"


def _judge(method: Method, evidence: dict[str, float]) -> PropertyRow:
    return PropertyRow(
        method.name,
        stable=method.kind == "units" or evidence["similarity of runs"] >= STABLE,  # units have one possible result
        training_free=evidence["trained parameters"] == 0,
        explicit=evidence["error of taking one part away"] <= CHANGES,
        lossless=evidence["error of the output"] <= EXACT,
        unsupervised=evidence["labels read"] == 0,
        evidence=evidence,
    )


@torch.inference_mode()
def _measure(bench: Bench, method: Method, seed: int) -> dict[str, Any]:
    before = bench.labels_read
    dictionary = bench.dictionary(method, seed)
    labels = bench.labels_read - before
    trained = 0
    if method.kind == "sae":
        trained = sum(parameter.numel() for parameter in bench.sae(method, seed, 0).parameters())
    outputs_for, largest, lost = linear_outputs(bench.tower.layer), 0.0, 0.0
    for _, q, _ in islice(bench.held_out.activations(), COMPARED):
        out = outputs_for(q)
        largest = max(largest, float(out.abs().max()))
        lost = max(lost, float((dictionary.reconstruct(q) - out).abs().max()))
    return {
        "trained parameters": float(trained),
        "error of taking one part away": _error_of_removal(bench, dictionary),
        "error of the output": lost / largest,
        "labels read": float(labels),
    }


@torch.inference_mode()
def _error_of_removal(bench: Bench, dictionary: Dictionary) -> float:
    """How far the model without its most active part is from what that part says it adds, as a share of the latter.

    The part is taken away where the model computes; the stream behind the block must change by what the part writes,
    on every token of some images.
    """
    tower, worst = bench.tower, 0.0
    scale = 1.0 if tower.stream_scale is None else tower.stream_scale.float()
    with tower.use_threads():
        for (read,) in track(islice(read_batches(bench.held_out.items, 1), CHANGED), "changing", "images", CHANGED):
            (whole,) = _streams(tower, Reconstruction(dictionary, tower.layer), read[1])
            codes = dictionary.read(whole[0].float())
            part = int(codes.flatten(0, -2).max(0).values.argmax())
            (less,) = _streams(tower, Reconstruction(_without(dictionary, part), tower.layer), read[1])
            expected = -codes[..., part, None] * dictionary.write[part] * scale
            error = (less[1] - whole[1]).float() - expected
            worst = max(worst, float(error.abs().max() / expected.abs().max().clamp_min(1e-12)))
    return worst


def _streams(tower: Tower, layer: nn.Module, image: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Layer inputs and stream of an image while what another layer gives goes on in the place of the layer's output."""
    with tower.layer.register_forward_hook(lambda _, inputs, output: layer(inputs[0])):  # removes itself
        return tower.streams([image])


def _without(dictionary: Dictionary, part: int) -> Dictionary:
    """The same dictionary with one latent that never fires."""

    def read(q: torch.Tensor) -> torch.Tensor:
        codes = dictionary.read(q).clone()
        codes[..., part] = 0
        return codes

    return replace(dictionary, read=read)
