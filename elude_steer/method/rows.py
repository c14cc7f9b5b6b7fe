"""Rows of numbers that need not be in memory all at once, such as a unit's contributions at the paper's scale."""

from __future__ import annotations

from typing import Protocol

import torch

from elude_steer.errors import ModelError


class Rows(Protocol):
    """Rows of numbers, all in memory (a tensor) or read when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, then their length."""
        ...

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of the rows with these numbers."""
        ...


def read_rows(x: Rows, rows: torch.Tensor) -> torch.Tensor:
    """The rows with these numbers in main memory, `(rows, length)`; raises if one of their numbers is not finite."""
    values = x[rows].cpu()
    if not torch.isfinite(values).all():
        raise ModelError("some contributions are not finite; check the model for NaN and infinite values.")
    return values
