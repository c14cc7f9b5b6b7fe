"""How fast this machine is with a model: short trials of what a run does most, on a few of its own images.

Seconds are of the processor on a CPU, whose cores may have other work, and by the clock on a GPU. Trials compute with
as many threads as the run: threads that wait for each other on a busy machine take time of the processor, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from elude_steer.atlas.build.sizes import clustering_size, fitting_backend
from elude_steer.atlas.build.unit_clusters import cluster_unit
from elude_steer.errors import ImageError
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs
from elude_steer.evaluation.baselines.sae import Sae, SaeSpec, from_sae, train_sae
from elude_steer.evaluation.evaluate import read_batches
from elude_steer.evaluation.measures.efficiency import timed
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.monosemanticity import TOP_IMAGES, Peaks, mean_percent
from elude_steer.evaluation.tables.measure import measure_atoms
from elude_steer.method.layers import layer_parameters
from elude_steer.models.vision import Tower
from elude_steer.specs import AtlasSpec, ClustersSpec
from elude_steer.utils.threads import use_threads

IMAGES = 12  # that a trial runs on
_MORE_IMAGES, _MORE_SECONDS = 400, 4.0  # for the tokens that are clustered, unless that takes longer
_POOL = 16_000  # tokens of them at most
_UNITS = 16  # that a trial clusters, unless that takes longer than
_PATIENCE = 8.0  # seconds
_LARGEST = 4000  # instances in a trial; more are extrapolated
_BATCHES, _EPOCHS = 2, 2  # of training in a trial
_TOKENS = 2048  # that a trial encodes
_MEASURED = 3  # images that a trial measures


@dataclass(eq=False)
class Rates:
    """What single steps take with one model on this machine, in seconds.

    Attributes:
        tower: the model.
        image: of an image through the tower, as probing images go through it.
        held_out: of an image to measure on, with what is stored of it.
        multiply: of a product, for each multiplication.
        unit: of clustering one unit.
        parts: of a unit, as found in the trial.
        tokens: of an image.
    """

    tower: Tower
    image: float
    held_out: float
    multiply: float
    unit: float
    parts: float
    tokens: int
    _inputs: torch.Tensor
    _outputs: torch.Tensor
    _known: dict[Any, Any] = field(default_factory=dict)

    @property
    def d_in(self) -> int:
        """Inputs of the layer."""
        return int(self._inputs.shape[1])

    @property
    def d_out(self) -> int:
        """Units of the layer."""
        return int(self._outputs.shape[1])

    def training(self, spec: SaeSpec, tokens: int) -> float:
        """Seconds to train an autoencoder on so many tokens."""
        start, step = self._training_steps(spec, tokens)
        return start + step * spec.epochs * max(1, tokens // min(spec.batch_size, tokens))

    def _training_steps(self, spec: SaeSpec, tokens: int) -> tuple[float, float]:
        """What begins a training, and each step of it."""
        size = min(spec.batch_size, tokens)
        key = ("steps", spec.kind, spec.latents, size, spec.active)
        if key not in self._known:
            count = min(_BATCHES * size, tokens)
            rows = torch.randint(len(self._inputs), (count,), generator=torch.Generator().manual_seed(0))
            inputs = self._inputs[rows] if spec.kind == "transcoder" else self._outputs[rows]
            targets = self._outputs[rows] if spec.kind == "transcoder" else None

            def train(epochs: int) -> float:
                some = replace(spec, epochs=epochs)
                return self._time(lambda: train_sae(some, inputs, targets, device=self.tower.device))

            with use_threads(self.tower.threads or 1):  # as a run does
                train(1)  # what happens once in a process is not counted
                few, many = (min(train(1 + more) for _ in range(2)) for more in (0, _EPOCHS))  # with the same beginning
            steps = count // size
            step = max((many - few) / (_EPOCHS * steps), 1e-6)
            self._known[key] = (max(few - steps * step, 0.0), step, count)
        start, step, count = self._known[key]
        if spec.kind == "archetypal":  # it clusters up to twenty tokens for each latent before the first step
            start *= min(tokens, 20 * spec.latents) / min(count, 20 * spec.latents)
        return start, step

    def encoding(self, spec: SaeSpec) -> float:
        """Seconds to encode and decode a token."""
        key = ("encode", spec.kind, spec.latents)
        if key not in self._known:
            sae = self._sae(spec)
            read = (self._inputs if spec.kind == "transcoder" else self._outputs)[:_TOKENS]
            with use_threads(self.tower.threads or 1):
                self._known[key] = self._time(lambda: sae.decode(sae.encode(read))) / len(read)
        return float(self._known[key])

    def measuring(self, latents: int, images: int, spec: SaeSpec | None = None) -> float:
        """Seconds to measure a dictionary on so many images whose activations are stored."""
        key = ("measure", latents, None if spec is None else spec.kind)
        if key not in self._known:
            with self.tower.use_threads():
                self._known[key] = self._measure(latents, spec)
        single, entering, once = self._known[key]
        entries = images if images <= TOP_IMAGES else TOP_IMAGES * (1 + math.log(images / TOP_IMAGES))
        return float(images * single + entries * entering + once)

    def _measure(self, latents: int, spec: SaeSpec | None) -> tuple[float, float, float]:
        """Seconds per image, extra seconds when an image enters the strongest ones, and seconds spent once."""
        layer, generator = self.tower.layer, torch.Generator().manual_seed(0)
        atoms = torch.randn(latents, self.d_in if spec is None else self.d_out, generator=generator)
        units = torch.arange(latents) % self.d_out
        weight = atoms.to(self._inputs.device)
        write = torch.nn.functional.one_hot(units, self.d_out).float().to(weight.device)
        base = torch.zeros(self.d_out, device=weight.device)
        dictionary = Dictionary("trial", lambda q: q @ weight.T, write, base, atoms, units)
        if spec is not None:
            dictionary = from_sae("trial", self._sae(spec), layer)
        outputs_for, peaks, r2 = linear_outputs(layer), Peaks(latents, self.d_out), R2()
        parts = self._inputs.split(self.tokens)[:_MEASURED]

        def read() -> None:
            for q in parts:
                codes, out = dictionary.read(q), outputs_for(q)
                peaks.add(codes, out)
                r2.add(out, codes @ dictionary.write + dictionary.base)

        read()
        both = self._time(read) / len(parts)
        kept, peaks.values = peaks.values, torch.full_like(peaks.values, torch.inf)
        single = self._time(read) / len(parts)
        peaks.values = kept
        once = self._time(lambda: (mean_percent(peaks.scores()), measure_atoms(dictionary.atoms.cpu())))
        return single, max(0.0, both - single), once

    def _sae(self, spec: SaeSpec) -> Sae:
        """An autoencoder that has learnt nothing, which is as fast as any."""
        key = ("sae", spec.kind, spec.latents)
        if key not in self._known:
            few = self._outputs[:_TOKENS]
            inputs = self._inputs[:_TOKENS] if spec.kind == "transcoder" else few
            self._known[key] = Sae(spec, inputs, few).to(self.tower.device).eval().requires_grad_(False)
        return self._known[key]

    def _time(self, call: Callable[[], object]) -> float:
        return timed(call, self.tower.device)


@torch.inference_mode()
def _encode(tower: Tower, images: Sequence[Any], size: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for start in range(0, len(images), size):
        found += tower.encode(images[start : start + size])
    return found


def measure_rates(tower: Tower, spec: AtlasSpec, items: Sequence[Any], instances: int) -> Rates:
    """Try out a model on a few of its images.

    Args:
        tower: the model.
        spec: of the atlas, whose sizes count.
        items: the probing images.
        instances: how many tokens the run stores of them.
    """
    device, size = tower.device, spec.tokens.batch_size
    images: list[Any] = []
    opened = timed(lambda: images.extend(islice(_readable(items), IMAGES)), device)
    if not images:
        raise ImageError("none of the images can be read; check the folder.")
    opened /= len(images)
    with tower.use_threads():
        tower.encode(images[:1])
        pairs: list[Any] = []
        encoded = _encode(tower, images, size)
        image = timed(lambda: _encode(tower, images, size), device) / len(images)
        held = timed(lambda: pairs.extend(pair for one in images for pair in tower.streams([one])), device)
        counted = [q[:, tower.token_indices(q.shape[1]).to(q.device)].flatten(0, 1).float() for q in encoded]
    inputs = torch.cat(counted)
    weight, _ = (tensor.float() for tensor in layer_parameters(tower.layer))
    with use_threads(1):
        outputs = linear_outputs(tower.layer)(inputs)
        multiply = timed(lambda: (inputs @ weight.T).topk(min(100, len(inputs)), dim=0), device) / (
            inputs.numel() * len(weight)
        )
        pool = _draw_tokens(tower, items, size, instances)
        unit, parts = _try_clustering(spec.clusters, pool, weight, instances, device)
    return Rates(
        tower,
        image + opened,
        held / len(images) + opened,
        multiply,
        unit,
        parts,
        max(1, len(inputs) // len(images)),
        inputs,
        outputs,
    )


@torch.inference_mode()
def _draw_tokens(tower: Tower, items: Sequence[Any], size: int, instances: int) -> torch.Tensor:
    """Tokens to try clustering on, as many as the run stores.

    They are from many images, since clusters of few images would each be one image.
    """
    generator, found, seconds = torch.Generator().manual_seed(0), list[torch.Tensor](), 0.0
    wanted = min(instances, _POOL)
    each = -(-wanted // min(len(items), _MORE_IMAGES))
    images = _readable(items[:: max(1, len(items) // _MORE_IMAGES)])

    def encode() -> bool:
        batch = list(islice(images, size))
        for q in tower.encode(batch) if batch else ():
            counted = q[:, tower.token_indices(q.shape[1]).to(q.device)].flatten(0, 1).float()
            found.append(counted[torch.randperm(len(counted), generator=generator).to(counted.device)])
        return bool(batch)

    going, clock = True, time.process_time if tower.device.type == "cpu" else time.perf_counter
    with tower.use_threads():
        while going and seconds < _MORE_SECONDS and sum(len(q[:each]) for q in found) < wanted:
            start = clock()  # of the processor, so that other work on the machine leaves as many images
            going = encode()
            seconds += clock() - start
    each = -(-wanted // max(1, len(found)))  # more of each image if there was no time for enough of them
    return torch.cat([q[:each] for q in found])


def _readable(items: Sequence[Any]) -> Any:
    return (image for batch in read_batches(items, 1) for _, image in batch)


def _try_clustering(
    clusters: ClustersSpec, inputs: torch.Tensor, weight: torch.Tensor, instances: int, device: torch.device
) -> tuple[float, float]:
    """Seconds to cluster a unit, and into how many parts; beyond the largest trial by the growth that trials show."""
    size = clustering_size(clusters, instances, inputs.shape[1])
    backend = fitting_backend(clusters.backend, size, device, 1)
    target = size.instances
    largest = min(target, _LARGEST if backend != "cuml" else 20_000)
    counts = sorted({largest, max(2, largest // 2)}) if target > largest else [largest]
    times, parts = list[float](), 1.0
    few = replace(clusters, backend=backend, min_cluster_size=2)  # type: ignore[arg-type]
    cluster_unit(inputs[:50].cpu(), weight[0].cpu(), few)  # what happens once in a process is not counted
    for count in counts:
        smallest = max(2, round(int(clusters.min_cluster_size) * count / target))
        spec = replace(clusters, backend=backend, min_cluster_size=smallest)  # type: ignore[arg-type]
        seconds, found = list[float](), list[int]()
        for unit in range(0, len(weight), max(1, len(weight) // _UNITS)):
            q = _strongest(inputs, weight[unit], count)
            try_unit = partial(_count, q, weight[unit], spec, found)
            seconds.append(timed(try_unit, device))
            if len(seconds) > 1 and sum(seconds) > _PATIENCE:
                break
        times.append(sum(seconds) / len(seconds))
        parts = sum(found) / len(found)
    if len(times) == 1:
        return times[0], parts
    growth = min(2.0, max(1.0, float(torch.log2(torch.tensor(times[1] / max(times[0], 1e-9))))))
    return times[1] * (target / counts[1]) ** growth, parts


def _count(q: torch.Tensor, weight: torch.Tensor, clusters: ClustersSpec, found: list[int]) -> None:
    """Add the number of parts that the clusters of a unit's inputs make."""
    found.append(max(1, len(cluster_unit(q, weight.cpu(), clusters)["sizes"])))


def _strongest(inputs: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """A unit's strongest inputs, each a little changed; of fewer images than the run has, some several times."""
    generator = torch.Generator().manual_seed(0)
    rows = (inputs @ weight).topk(min(count, len(inputs))).indices.cpu()
    if count > len(inputs):
        rows = torch.cat([rows, torch.randint(len(inputs), (count - len(inputs),), generator=generator)])
    q = inputs[rows].cpu()
    return q * (1 + 0.05 * torch.randn(q.shape, generator=generator))
