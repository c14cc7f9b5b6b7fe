"""The training loop of toyland's and photoland's models: seeded batches, Muon and AdamW, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elude_steer.toyland.scenes import Scene, draw_scene
from elude_steer.utils.files import write_file

DECAY = 0.02


@dataclass(frozen=True)
class Schedule:
    """The length, learning rate and scenes of one training phase.

    Attributes:
        steps: number of batches.
        size: scenes per batch.
        peak: highest learning rate of AdamW; the highest of Muon is twice this.
        wide: fraction of images of two tiles.
        seed: seed of the scenes.
        clutter: fraction of scenes with objects that the caption does not mention.
        crowd: fraction of scenes that are forced to have three objects.
        hide: fraction of scenes with several objects in which one of them is not painted.
    """

    steps: int
    size: int
    peak: float
    wide: float
    seed: int
    clutter: float = 0.4
    crowd: float = 0.0
    hide: float = 0.0

    def learning_rate(self, step: int, warmup: int = 50) -> float:
        """The learning rate of a step: linear warm-up, then half a cosine."""
        return cosine_rate(step, self.steps, self.peak, warmup)

    def batches(self, start: int = 0) -> Iterator[tuple[int, list[Scene]]]:
        """Numbered batches of scenes, determined by the seed; a thread draws one batch ahead."""

        def draw(number: int) -> list[Scene]:
            generators = [np.random.default_rng([self.seed, number, i]) for i in range(self.size)]
            options = {"wide": self.wide, "clutter": self.clutter, "crowd": self.crowd, "hide": self.hide}
            return [draw_scene(rng, **options) for rng in generators]

        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(draw, start)
            for number in range(start, self.steps):
                batch = pending.result()
                pending = pool.submit(draw, number + 1)
                yield number, batch


def cosine_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


class Muon(torch.optim.Optimizer):
    """Muon: each matrix moves by its momentum with all singular values set to one.

    It needs a third of the scenes that AdamW needs to learn patches. torch.optim.Muon computes in bfloat16, which takes
    40 times as long on a processor without it, and one matrix at a time; this one computes all matrices of a shape
    together.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
                direction = matrix.grad.lerp(momentum, group["momentum"])
                shapes.setdefault(tuple(wide.shape), []).append((wide, direction if wide is matrix else direction.T))
            for shape, pairs in shapes.items():
                updates = orthogonalize(torch.stack([direction for _, direction in pairs]))
                for (wide, _), update in zip(pairs, updates, strict=True):
                    wide.mul_(1 - group["lr"] * DECAY).add_(update, alpha=-0.2 * group["lr"] * shape[1] ** 0.5)


def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of wide matrices `(n, rows, columns)` near one, by five Newton-Schulz iterations."""
    stack = stack / (torch.linalg.matrix_norm(stack, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), stack, beta=3.4445)
    return stack


def train_networks(
    label: str,
    networks: Mapping[str, nn.Module],
    schedule: Any,
    compute_loss: Callable[[int, Any], torch.Tensor],
    checkpoint: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train the networks in place, starting from the checkpoint if there is one.

    Args:
        label: name of the phase in the log.
        networks: name -> network; the names are those of the checkpoint.
        schedule: the phase: a `Schedule`, or an object with its methods and its attributes `peak`, `steps` and `size`.
        compute_loss: computes the loss of a step and its batch.
        checkpoint: file to resume from and to write to.
        log: called with a line of progress every 50 batches.

    Returns:
        For the report: the mean loss of every 50 batches, the number of images, and the minutes of all runs together.
    """
    named = {f"{name}.{key}": p for name, network in networks.items() for key, p in network.named_parameters()}
    parameters = list(named.values())
    inner = {key for key, p in named.items() if p.ndim == 2 and "embed" not in key and "head" not in key}
    matrices, rest = [named[key] for key in named if key in inner], [named[key] for key in named if key not in inner]
    muon = Muon(matrices, schedule.peak)
    adamw = torch.optim.AdamW(rest, lr=schedule.peak, weight_decay=DECAY, betas=(0.9, 0.98), fused=True)
    start, losses, minutes = 0, [], 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, network in networks.items():
            network.load_state_dict(state["networks"][name])
        muon.load_state_dict(state["turning"])
        adamw.load_state_dict(state["stepping"])
        start, losses, minutes = state["step"], state["losses"], state["minutes"]
    recent, since, saved = [], time.perf_counter(), time.perf_counter()
    for step, batch in schedule.batches(start):
        rate = schedule.learning_rate(step)
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 2 * rate, rate
        loss = compute_loss(step, batch)
        muon.zero_grad()
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        muon.step()
        adamw.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == schedule.steps:
            losses.append(sum(recent) / len(recent))
            speed = len(recent) * schedule.size / (time.perf_counter() - since)
            minutes_left = (schedule.steps - step - 1) * schedule.size / speed / 60
            progress = f"{label}: {step + 1}/{schedule.steps}, loss {losses[-1]:.3f}"
            log(f"{progress}, {speed:.0f} images/s, {minutes_left:.0f} min left")
            recent, since = [], time.perf_counter()
        if (step + 1) % 100 == 0 or step + 1 == schedule.steps:
            minutes, saved = minutes + (time.perf_counter() - saved) / 60, time.perf_counter()
            state = {"networks": {name: network.state_dict() for name, network in networks.items()}}
            state |= {
                "turning": muon.state_dict(),
                "stepping": adamw.state_dict(),
                "step": step + 1,
                "losses": losses,
                "minutes": minutes,
            }
            write_file(checkpoint, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]
    return {"losses": losses, "scenes": schedule.steps * schedule.size, "minutes": round(minutes, 1)}
