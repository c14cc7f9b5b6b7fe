"""A concept as a detector and a direction, fitted to what a dual encoder says of many images.

The dual encoder says how much a word fits an image, but not where. The *detector* of a word reads the sub-units: it is
their linear combination that comes closest to the dual encoder's word on the mean over an image's patches, and because
it is linear it can be read on every single patch. The *direction* of a word is what the residual stream carries more
where the word is, all other words being equal: without that, the direction of a dog would hold the grass below it.

In shapes, N counts images, W words and S sub-units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RIDGE = 0.1  # of the variance of a sub-unit; half or three times as much measures the same
_DIRECTION_RIDGE = 1.0  # of the mean variance of the words
_MIN_POSITIVE, _MAX_POSITIVE = 0.01, 0.10  # share of the images that count as showing a word
_MIN_IMAGES = 20
_DEVIATIONS = 3.0  # above the most common similarity, an image counts as showing the word
# The patches on the edge of a region carry less: its inner ones lie so much further from the stream without the word.
_INNER = 1.5
# Patches whose mean reading says whether a word is in an image. More than a small thing covers would hide it: with a
# twentieth of toyland's patches four times as many things go unseen at the same share of false alarms.
PEAKS = 3
SURE, UNLIKELY = 0.8, 0.2  # presences from which an image surely shows a word, and below which it hardly does


@dataclass(frozen=True, eq=False)
class Presence:
    """How much each word is in each image, as far as the dual encoder knows.

    Attributes:
        shows: `(N, W)` bool, the images that most surely show a word.
        lacks: `(N, W)` bool, the half of the images that a word fits least.
        degree: `(N, W)` 0 for the median of those without, 1 for the median of those with it, and between.
    """

    shows: torch.Tensor
    lacks: torch.Tensor
    degree: torch.Tensor


def measure_presence(similarities: torch.Tensor) -> Presence:
    """Find out which images show which word.

    Most words are in few images: the others form the bulk of the similarities, whose lower side tells its width. Images
    far above the bulk show the word.

    Args:
        similarities: `(N, W)` of the dual encoder.
    """
    images, words = similarities.shape
    values = similarities.double()
    order = values.argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(images)[:, None].expand(-1, words))
    fewest = min(images // 2, max(_MIN_IMAGES, int(_MIN_POSITIVE * images)))
    counts = torch.tensor([_count_above_bulk(column) for column in values.T])
    counts = counts.clamp(fewest, max(fewest, int(_MAX_POSITIVE * images)))
    shows, lacks = rank < counts, rank >= images - images // 2
    low = torch.stack([column[mask].median() for column, mask in zip(values.T, lacks.T, strict=True)])
    high = torch.stack([column[mask].median() for column, mask in zip(values.T, shows.T, strict=True)])
    degree = ((values - low) / (high - low).clamp_min(1e-9)).clamp(0, 1)
    return Presence(shows, lacks, degree.float())


def _count_above_bulk(values: torch.Tensor) -> int:
    """How many values lie far above the most common one (the half-sample mode, by the width of the side below it)."""
    ordered = values.sort().values
    part = ordered
    while len(part) > 20:
        half = len(part) // 2
        start = int((part[half:] - part[: len(part) - half]).argmin())
        part = part[start : start + half]
    mode = part.median()
    below = ordered[ordered < mode]
    width = (below - mode).square().mean().sqrt() if len(below) else torch.tensor(0.0)
    return int((values > mode + _DEVIATIONS * width).sum())


def fit_detectors(means: torch.Tensor, presence: Presence) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `(W, S)` and biases `(W,)` of detectors, which read 0 on images without the word.

    Args:
        means: `(N, S)` mean activation of each sub-unit over the patches of each image.
        presence: of the words in the images.
    """
    x, degree = means.double(), presence.degree.double()
    centre, deviation = x.mean(0), x.std(0)
    alive = deviation > 1e-6 * deviation.max()
    scaled = torch.where(alive, (x - centre) / deviation.clamp_min(1e-30), 0.0)
    target, strength = degree - degree.mean(0), _RIDGE * len(x)
    if x.shape[1] <= len(x):
        gram = scaled.T @ scaled
        weights = torch.linalg.solve(gram + strength * torch.eye(len(gram)), scaled.T @ target)
    else:  # the same weights, by the smaller of both systems
        gram = scaled @ scaled.T
        weights = scaled.T @ torch.linalg.solve(gram + strength * torch.eye(len(gram)), target)
    weights = torch.where(alive[:, None], weights / deviation.clamp_min(1e-30)[:, None], 0.0).T  # (W, S)
    readings = x @ weights.T
    base = torch.stack([column[mask].median() for column, mask in zip(readings.T, presence.lacks.T, strict=True)])
    return weights, -base


@dataclass
class StreamSums:
    """Sums over the patches of images, from which directions are found; sums of several parts add up.

    Attributes:
        products: `(W, W)` of the words' degrees on a patch.
        streams: `(W, d_out)` of a degree and the stream.
        degrees: `(W,)`.
        stream: `(d_out,)`.
        patches: their number.
        shown: `(W, d_out)` the stream on the regions of words in images that surely show them.
        shown_patches: `(W,)`.
        lacked: `(W, d_out)` the mean stream of images that hardly show a word.
        lacked_images: `(W,)`.
    """

    products: torch.Tensor
    streams: torch.Tensor
    degrees: torch.Tensor
    stream: torch.Tensor
    patches: torch.Tensor
    shown: torch.Tensor
    shown_patches: torch.Tensor
    lacked: torch.Tensor
    lacked_images: torch.Tensor

    @classmethod
    def empty(cls, words: int, d_out: int) -> StreamSums:
        """Sums over nothing."""
        shapes = ((words, words), (words, d_out), (words,), (d_out,), (), (words, d_out), (words,), (words, d_out))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in (*shapes, (words,))))

    def add(self, readings: torch.Tensor, stream: torch.Tensor, degree: torch.Tensor, fit: float) -> None:
        """Add an image.

        Args:
            readings: `(patches, W)` of the detectors.
            stream: `(patches, d_out)`.
            degree: `(W,)` presence of the words in the image.
            fit: see `find_region`.
        """
        region, stream = find_region(readings, fit).float(), stream.float()
        weighted = degree * region
        self.products += weighted.T @ weighted
        self.streams += weighted.T @ stream
        self.degrees += weighted.sum(0)
        self.stream += stream.sum(0)
        self.patches += len(stream)
        shown = region * (degree >= SURE)
        self.shown += shown.T @ stream
        self.shown_patches += shown.sum(0)
        lacks = (degree <= UNLIKELY).float()
        self.lacked += lacks[:, None] * stream.mean(0)
        self.lacked_images += lacks

    def directions(self) -> torch.Tensor:
        """What each word adds to the stream of a patch, all other words being equal, `(W, d_out)`.

        Its length is how far the stream on the word's inner patches lies from that of images without it.
        """
        count = self.patches.clamp_min(1)
        degrees, stream = self.degrees / count, self.stream / count
        spread = self.products / count - torch.outer(degrees, degrees)
        shared = self.streams / count - torch.outer(degrees, stream)
        ridge = _DIRECTION_RIDGE * spread.diagonal().mean().clamp_min(1e-12)
        found = torch.linalg.solve(spread + ridge * torch.eye(len(spread), dtype=spread.dtype), shared)
        unit = found / found.norm(dim=1, keepdim=True).clamp_min(1e-30)
        there = self.shown / self.shown_patches.clamp_min(1)[:, None]
        elsewhere = self.lacked / self.lacked_images.clamp_min(1)[:, None]
        length = _INNER * ((there - elsewhere) * unit).sum(1).clamp_min(0)
        return unit * length[:, None] * (self.shown_patches > 0)[:, None]


def find_region(readings: torch.Tensor, fit: float) -> torch.Tensor:
    """Where a detector reads at least a share of its highest reading in the image; 0 takes every patch.

    Args:
        readings: `(patches, …)` of the detectors on all patches of an image.
        fit: the share.
    """
    if fit <= 0:
        return torch.ones_like(readings, dtype=torch.bool)
    highest = readings.amax(0)
    return (readings >= fit * highest) & (highest > 0)


def strongest_mean(readings: torch.Tensor, count: int = PEAKS) -> torch.Tensor:
    """The mean over the highest readings of an image; of all where it has fewer patches."""
    return readings.topk(min(len(readings), count), dim=0).values.mean(0)
