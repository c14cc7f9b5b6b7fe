"""Planted truth: a unit that responds to known concepts, with which the result of the method is compared.

It is a unit of a linear layer with the inputs `q` of its strongest instances, made as follows. All numbers were fixed
before the method was run on the result.

- The weights have random signs and log-normal magnitudes. Half of them are negative outside the supports, a fifth
  inside: an instance is only among a unit's strongest if the dimensions that it activates excite the unit in sum.
- A concept has a *support*, 48 of 512 input dimensions; each shares a third of it with the next concept's. It has its
  own strength on each of them (0.5 to 1.5), and an instance multiplies each by a random gain (log-normal of
  mean 1, sigma 0.5, so that a dimension varies by half its size).
- All dimensions have background activity, a normal number cut off at zero: sparse and positive, as after a ReLU.
- Cluster sizes grow geometrically from 60 to 300.
- A fifth of all instances are noise: each dimension is drawn independently from its values over the concepts'
  instances. Noise has all marginals of the data and none of its joint structure.

The levels set the background's energy (its expected squared norm over all dimensions) against the signal's, in steps of
half a decade: `clear`, a tenth, where the concept determines an instance; `medium`, a third; `hard`, as much, where
half of an instance has nothing to do with the concept. Weights are independent of both, so the same ratio
holds for the contributions.

The method runs unchanged, with one setting: min_cluster_size is 30, half of the smallest cluster.

Chance can make a unit harder than its level: large weights may gather in the third that two concepts share, and a
concept may draw so many negative weights that it hardly excites the unit. Such units are not removed:
with 30 seeds instead of 5, clear units fall short of one cluster per concept, or of a sub-unit that is strongest on its
own, in 6 of 210 cases (`gap`: 7).

`python -m tests.helpers.planted` prints the tables; `--seeds 30` uses more draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from elude_steer.method.clustering import Clusters, cluster
from elude_steer.method.contributions import cluster_means, contributions, representatives
from elude_steer.method.splitting import UnitSplit, activations_by_cluster, split_unit

D_IN = 512
SUPPORT = 48
SMALLEST, LARGEST = 60, 300
NOISE = 0.2
GAIN_SIGMA = 0.5
LEVELS = {"clear": 0.1, "medium": 10**-0.5, "hard": 1.0}
MIN_CLUSTER_SIZE = SMALLEST // 2
RULES = ("unique", "gap")
CONTROL = "random"  # a split that ignores the clusters, to show the measures' values by chance


@dataclass(frozen=True)
class Planted:
    """A unit, its instances and the truth about them.

    Attributes:
        q: `(instances, d_in)` inputs, strongest instance first.
        weight: `(d_in,)` of the unit.
        bias: of the unit.
        truth: `(instances,)` int64: the concept of each instance, -1 for noise.
        supports: `(concepts, d_in)` bool: which dimensions a concept activates.
    """

    q: torch.Tensor
    weight: torch.Tensor
    bias: float
    truth: np.ndarray
    supports: np.ndarray


def plant(concepts: int, level: str, seed: int) -> Planted:
    """Make a unit with some number of concepts at one of `LEVELS`; the same seed gives the same unit."""
    rng = np.random.default_rng((seed, concepts, list(LEVELS).index(level)))
    supports = _supports(rng, concepts)
    weight = rng.lognormal(0, 0.5, D_IN) * np.where(rng.random(D_IN) < np.where(supports.any(0), 0.2, 0.5), -1, 1)
    strengths = supports * rng.uniform(0.5, 1.5, (concepts, D_IN))

    sizes = np.geomspace(SMALLEST, LARGEST, concepts).round().astype(int) if concepts > 1 else [LARGEST]
    truth = np.repeat(np.arange(concepts), sizes)
    gains = rng.lognormal(-(GAIN_SIGMA**2) / 2, GAIN_SIGMA, (len(truth), D_IN))
    signal = strengths[truth] * gains
    # E[max(z, 0)^2] is one half, so this scale gives the background the level's share of the signal's energy.
    background = np.maximum(rng.normal(size=signal.shape), 0)
    background *= np.sqrt(LEVELS[level] * (signal**2).sum(1).mean() / (D_IN / 2))
    q = signal + background

    noise = round(len(q) * NOISE / (1 - NOISE))
    q = np.concatenate([q, np.take_along_axis(q, rng.integers(len(q), size=(noise, D_IN)), 0)])
    truth = np.concatenate([truth, np.full(noise, -1)])
    order = np.argsort(-(q @ weight), kind="stable")
    bias = 0.1 * rng.normal() * (q @ weight).mean()
    as_float = (torch.from_numpy(array).float() for array in (q[order], weight))
    return Planted(*as_float, float(bias), truth[order], supports)


def _supports(rng: np.random.Generator, concepts: int) -> np.ndarray:
    starts = np.arange(concepts)[:, None] * (SUPPORT - SUPPORT // 3)
    places = np.arange(D_IN) - starts  # (concepts, d_in)
    return ((places >= 0) & (places < SUPPORT))[:, rng.permutation(D_IN)]


@dataclass(frozen=True)
class Found:
    """The method's result for a planted unit.

    Attributes:
        clusters: of its contributions.
        split: the unit's sub-units.
        activations: A of `activations_by_cluster`, or None if the unit stays whole.
    """

    clusters: Clusters
    split: UnitSplit
    activations: torch.Tensor | None


def find(planted: Planted, rules: Sequence[str] = RULES) -> dict[str, Found]:
    """Run the method's steps on a planted unit, for each winner rule."""
    c = contributions(planted.q, planted.weight)
    clusters = cluster(c, backend="exact", selection="leaf", min_cluster_size=MIN_CLUSTER_SIZE)
    labels, k = torch.from_numpy(clusters.labels), clusters.count
    if k < 2:
        whole = split_unit(c.new_empty(k, D_IN), c.new_empty(k, D_IN), planted.weight, planted.bias)
        return {rule: Found(clusters, whole, None) for rule in rules}
    r = representatives(c, labels, torch.from_numpy(clusters.probabilities).float(), k)
    means = cluster_means(planted.q, labels, k)
    found = {}
    for rule in rules:
        split = split_unit(r, means, planted.weight, planted.bias, winner_rule=rule)
        activations = activations_by_cluster(split.members, means, planted.weight, planted.bias)
        found[rule] = Found(clusters, split, activations)
    return found


def measure(planted: Planted, found: Found) -> dict[str, float]:
    """How much of the truth was found, each as a number that is 1 at best; nan if a whole unit has no such number.

    - ari: adjusted Rand index over the instances that are neither planted noise nor marked as noise.
    - covered: share of the concepts' instances that are in some cluster.
    - count: 1 if as many clusters were found as planted.
    - noise_precision: share of the instances marked as noise that are planted noise.
    - noise_recall: share of the planted noise that is marked as noise.
    - own: share of the sub-units whose mean activation is largest on their own cluster.
    - exclusive: share of the dimensions in exactly one found concept's support and in no other concept's that belong to
      that concept's sub-units alone (a cluster is of the concept most frequent among its instances).
    """
    truth, labels = planted.truth, found.clusters.labels
    marked, noise = labels < 0, truth < 0
    both = ~marked & ~noise
    return {
        "ari": float(adjusted_rand_score(truth[both], labels[both])) if both.any() else float("nan"),
        "covered": _share(~marked[~noise]),
        "count": float(found.clusters.count == len(planted.supports)),
        "noise_precision": _share(noise[marked]),
        "noise_recall": _share(marked[noise]),
        "own": _own(found.activations),
        "exclusive": _exclusive(planted, found),
    }


def _own(activations: torch.Tensor | None) -> float:
    if activations is None:
        return float("nan")
    return _share((activations.argmax(1) == torch.arange(len(activations))).numpy())


def _exclusive(planted: Planted, found: Found) -> float:
    """See `measure`."""
    if found.activations is None:
        return float("nan")
    labels, members = found.clusters.labels, found.split.members.numpy()
    concept = np.array([_most_frequent(planted.truth[labels == c]) for c in range(len(members))])
    dimensions = np.flatnonzero(planted.supports.sum(0) == 1)
    dimensions = dimensions[np.isin(planted.supports[:, dimensions].argmax(0), concept)]
    owns = concept[:, None] == planted.supports[:, dimensions].argmax(0)  # (sub-units, dimensions)
    return _share((members[:, dimensions] <= owns).all(0))


def _most_frequent(truth: np.ndarray) -> int:
    return int(np.bincount(truth + 1).argmax()) - 1


def _share(true: np.ndarray) -> float:
    return float(np.mean(true)) if len(true) else float("nan")


def trial(concepts: int, level: str, seed: int, rules: Sequence[str] = RULES) -> list[dict[str, float | str]]:
    """One planted unit measured under each winner rule."""
    planted = plant(concepts, level, seed)
    about = {"level": level, "concepts": concepts, "seed": seed}
    return [
        {**about, "rule": rule, "found": found.clusters.count, **measure(planted, found)}
        for rule, found in find(planted, rules).items()
    ]


MEASURES = ("ari", "covered", "count", "noise_precision", "noise_recall", "own", "exclusive")


def table(rows: Iterable[dict[str, float | str]], by: Sequence[str]) -> str:
    """Means of every measure for each value of `by`, in Markdown, with the lowest in brackets if it differs."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    lines = ["| " + " | ".join((*by, "units", *MEASURES)) + " |", "|---" * (len(by) + 1 + len(MEASURES)) + "|"]
    for key, group in groups.items():
        cells = [_cell([row[name] for row in group]) for name in MEASURES]
        lines.append("| " + " | ".join((*map(str, key), str(len(group)), *cells)) + " |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    numbers = [value for value in values if not np.isnan(value)]
    if not numbers:
        return "-"
    mean, low = f"{np.mean(numbers):.3f}", f"{min(numbers):.3f}"
    return mean if mean == low else f"{mean} ({low})"


def main() -> None:
    """Print the tables of all levels, numbers of concepts and rules."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.planted", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="units of each kind")
    seeds = range(parser.parse_args().seeds)
    units = [(k, level, seed) for level in LEVELS for k in range(2, 9) for seed in seeds]
    rows = [row for unit in units for row in trial(*unit, rules=(*RULES, CONTROL))]
    print(
        f"Means over 2 to 8 concepts and {len(seeds)} seeds (lowest in brackets); units that stay whole have no own and"
    )
    print(f"exclusive.\n\n{table(rows, ('level', 'rule'))}")
    for rule in RULES:
        chosen = [row for row in rows if row["rule"] == rule]
        print(f"\nBy number of concepts, winner rule `{rule}`:\n\n{table(chosen, ('level', 'concepts'))}")
    whole = [(level, seed, trial(1, level, seed)[0]["found"]) for level in LEVELS for seed in seeds]
    split = [f"{level}, seed {seed}: {count}" for level, seed, count in whole if count > 1]
    print(f"\nUnits with one concept: {len(whole) - len(split)} of {len(whole)} stay whole. {'; '.join(split)}")


if __name__ == "__main__":
    main()
