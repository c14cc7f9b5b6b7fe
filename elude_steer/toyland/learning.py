"""One way of learning for all of toyland's networks: seeded scenes, a warm start, checkpoints, a word now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from elude_steer.storage import write_file
from elude_steer.toyland.scenes import Scene, draw_scene


@dataclass(frozen=True)
class Course:
    """How much is learned, and from what.

    Attributes:
        steps: batches.
        size: scenes a batch.
        peak: highest learning rate.
        wide: share of pictures of two tiles.
        seed: of the scenes.
    """

    steps: int
    size: int
    peak: float
    wide: float
    seed: int

    def rate(self, step: int, warm: int = 200) -> float:
        """The learning rate: up in a line, down in half a cosine."""
        if step < warm:
            return self.peak * (step + 1) / warm
        return self.peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))))

    def batches(self, start: int = 0) -> Iterator[tuple[int, list[Scene]]]:
        """Numbered batches of new scenes, always the same; drawn one ahead, in a thread."""

        def draw(number: int) -> list[Scene]:
            return [draw_scene(np.random.default_rng([self.seed, number, i]), wide=self.wide) for i in range(self.size)]

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(draw, start)
            for number in range(start, self.steps):
                ready = waiting.result()
                waiting = pool.submit(draw, number + 1)
                yield number, ready


def learn(
    label: str,
    networks: Mapping[str, nn.Module],
    course: Course,
    loss_of: Callable[[int, list[Scene]], torch.Tensor],
    checkpoint: Path,
    log: Callable[[str], None],
) -> list[float]:
    """Trains the networks in place and returns the mean loss of every 50 batches; goes on from the checkpoint."""
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=course.peak, weight_decay=0.02, betas=(0.9, 0.98))
    start, losses = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, network in networks.items():
            network.load_state_dict(state["networks"][name])
        optimizer.load_state_dict(state["optimizer"])
        start, losses = state["step"], state["losses"]
    recent, since = [], time.perf_counter()
    for step, scenes in course.batches(start):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        loss = loss_of(step, scenes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == course.steps:
            losses.append(sum(recent) / len(recent))
            speed = len(recent) * course.size / (time.perf_counter() - since)
            left = (course.steps - step - 1) * course.size / speed / 60
            log(f"{label}: {step + 1}/{course.steps}, loss {losses[-1]:.3f}, {speed:.0f} scenes/s, {left:.0f} min left")
            recent, since = [], time.perf_counter()
        if (step + 1) % 100 == 0 or step + 1 == course.steps:
            state = {"networks": {name: network.state_dict() for name, network in networks.items()}}
            state |= {"optimizer": optimizer.state_dict(), "step": step + 1, "losses": losses}
            write_file(checkpoint, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]
    return losses
