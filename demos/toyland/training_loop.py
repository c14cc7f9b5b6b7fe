"""One way of learning for all of toyland's networks: seeded scenes, a warm start, checkpoints, a word now and then."""

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
class Course:
    """How much is learned, and from what.

    Attributes:
        steps: batches.
        size: scenes a batch.
        peak: highest learning rate, of what is no matrix; matrices turn at twice this rate.
        wide: share of pictures of two tiles.
        seed: of the scenes.
        clutter: share of scenes with things that no caption names.
        crowd: share of scenes that have three objects whatever the lot says.
    """

    steps: int
    size: int
    peak: float
    wide: float
    seed: int
    clutter: float = 0.4
    crowd: float = 0.0

    def rate(self, step: int, warm: int = 50) -> float:
        """The learning rate: up in a line, down in half a cosine."""
        if step < warm:
            return self.peak * (step + 1) / warm
        return self.peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))))

    def batches(self, start: int = 0) -> Iterator[tuple[int, list[Scene]]]:
        """Numbered batches of new scenes, always the same; drawn one ahead, in a thread."""

        def draw(number: int) -> list[Scene]:
            chances = [np.random.default_rng([self.seed, number, i]) for i in range(self.size)]
            return [draw_scene(rng, wide=self.wide, clutter=self.clutter, crowd=self.crowd) for rng in chances]

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(draw, start)
            for number in range(start, self.steps):
                ready = waiting.result()
                waiting = pool.submit(draw, number + 1)
                yield number, ready


class Turning(torch.optim.Optimizer):
    """Muon: every matrix moves by its momentum with all singular values made one.

    Patches are learned from a third of the scenes that AdamW needs. torch.optim.Muon computes in bfloat16, which
    takes 40 times as long on a processor without it, and one matrix at a time; here all of a shape go together.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix once."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
                way = matrix.grad.lerp(momentum, group["momentum"])
                shapes.setdefault(tuple(wide.shape), []).append((wide, way if wide is matrix else way.T))
            for shape, pairs in shapes.items():
                turned = whitened(torch.stack([way for _, way in pairs]))
                for (wide, _), move in zip(pairs, turned, strict=True):
                    wide.mul_(1 - group["lr"] * DECAY).add_(move, alpha=-0.2 * group["lr"] * shape[1] ** 0.5)


def whitened(stack: torch.Tensor) -> torch.Tensor:
    """Wide matrices `(n, rows, columns)` with singular values near one, by five rounds of a Newton-Schulz quintic."""
    stack = stack / (torch.linalg.matrix_norm(stack, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), stack, beta=3.4445)
    return stack


def learn(
    label: str,
    networks: Mapping[str, nn.Module],
    course: Course,
    loss_of: Callable[[int, list[Scene]], torch.Tensor],
    checkpoint: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Trains the networks in place; goes on from the checkpoint.

    Returns:
        For the report: the mean loss of every 50 batches, scenes, minutes over all sittings.
    """
    named = {f"{name}.{key}": p for name, network in networks.items() for key, p in network.named_parameters()}
    parameters = list(named.values())
    inner = {key for key, p in named.items() if p.ndim == 2 and "embed" not in key and "head" not in key}
    matrices, rest = [named[key] for key in named if key in inner], [named[key] for key in named if key not in inner]
    turning = Turning(matrices, course.peak)
    stepping = torch.optim.AdamW(rest, lr=course.peak, weight_decay=DECAY, betas=(0.9, 0.98), fused=True)
    start, losses, minutes = 0, [], 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, network in networks.items():
            network.load_state_dict(state["networks"][name])
        turning.load_state_dict(state["turning"])
        stepping.load_state_dict(state["stepping"])
        start, losses, minutes = state["step"], state["losses"], state["minutes"]
    recent, since, saved = [], time.perf_counter(), time.perf_counter()
    for step, scenes in course.batches(start):
        turning.param_groups[0]["lr"], stepping.param_groups[0]["lr"] = 2 * course.rate(step), course.rate(step)
        loss = loss_of(step, scenes)
        turning.zero_grad()
        stepping.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        turning.step()
        stepping.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == course.steps:
            losses.append(sum(recent) / len(recent))
            speed = len(recent) * course.size / (time.perf_counter() - since)
            left = (course.steps - step - 1) * course.size / speed / 60
            log(f"{label}: {step + 1}/{course.steps}, loss {losses[-1]:.3f}, {speed:.0f} scenes/s, {left:.0f} min left")
            recent, since = [], time.perf_counter()
        if (step + 1) % 100 == 0 or step + 1 == course.steps:
            minutes, saved = minutes + (time.perf_counter() - saved) / 60, time.perf_counter()
            state = {"networks": {name: network.state_dict() for name, network in networks.items()}}
            state |= {
                "turning": turning.state_dict(),
                "stepping": stepping.state_dict(),
                "step": step + 1,
                "losses": losses,
                "minutes": minutes,
            }
            write_file(checkpoint, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]
    return {"losses": losses, "scenes": course.steps * course.size, "minutes": round(minutes, 1)}
