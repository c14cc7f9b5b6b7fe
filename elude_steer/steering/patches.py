"""Which patches something fires on: the strongest of them, and the region of a word."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from elude_steer.steering.settings import Settings


def concept_region(share: torch.Tensor, how: Settings, shape: tuple[int, int]) -> torch.Tensor:
    """The region of a word that fires with these shares, `(tiles, patches)` bool.

    Args:
        share: `(tiles, patches)` how far its sub-units are on, in the mean.
        how: nu, per, smooth and fit count.
        shape: rows and columns of a tile's patches.
    """
    share = smooth_over_neighbours(share, *shape) if how.smooth else share
    region = strongest_mask(share[..., None], how.nu, how.per)[..., 0]
    peak = share.max()
    return region & (share >= how.fit * peak) if how.fit and peak > 0 else region


def smooth_over_neighbours(share: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Each patch with its neighbours, those at its corners counting half, and nothing beyond the edge of a tile."""
    near = torch.tensor([[0.5, 1.0, 0.5], [1.0, 1.0, 1.0], [0.5, 1.0, 0.5]], device=share.device)[None, None] / 7
    return F.conv2d(share.reshape(-1, 1, rows, columns), near, padding=1).reshape(share.shape)


def strongest_mask(activations: torch.Tensor, nu: int | str, per: str) -> torch.Tensor:
    """Where each of m activations is among its nu largest, `(tiles, patches, m)` bool."""
    tiles, patches, m = activations.shape
    flat = activations if per == "tile" else activations.reshape(1, tiles * patches, m)
    if nu == "all" or int(nu) >= flat.shape[1]:
        return torch.ones_like(activations, dtype=torch.bool)
    # A stable sort: of equal patches the first counts, and the tile of a square picture may be the picture again.
    top = flat.sort(dim=1, descending=True, stable=True).indices[:, : int(nu)]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, top, True).reshape(tiles, patches, m)
