"""Dictionaries of units and of their parts: raw units, the sub-units of an atlas, and other ways to split units."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.method.clustering import distances
from elude_steer.method.contributions import cluster_means, contributions, representatives
from elude_steer.method.layers import SubUnits, layer_parameters, sub_unit_parameters
from elude_steer.method.splitting import memberships, random_memberships, split_unit

Split = Literal["random", "pure", "activations"]
MARGIN = 0.5  # share of a class's contribution that every other class must stay below, for it to own an input
MAX_WARD = 30_000  # instances of a unit whose distances, all pairs, Ward's method keeps in memory


def from_members(name: str, layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> Dictionary:
    """Parts of units, from the inputs that each part owns, `(S, d_in)` bool, and the unit of each part, `(S,)`."""
    weight, bias = (tensor.float() for tensor in layer_parameters(layer))
    unit_of_row = units.to(weight.device)
    rows = SubUnits(*sub_unit_parameters(weight, bias, members.to(weight.device), unit_of_row), unit_of_row)
    base = torch.zeros_like(weight[:, 0])
    return Dictionary(name, rows.activations, F.one_hot(unit_of_row, len(weight)).float(), base, rows.weight, units)


def from_atlas(name: str, layer: nn.Module, atlas: Atlas) -> Dictionary:
    """The sub-units of an atlas."""
    return from_members(name, layer, atlas.members(), atlas.units)


def raw_units(name: str, layer: nn.Module) -> Dictionary:
    """The units without any split."""
    weight, _ = layer_parameters(layer)
    return from_members(name, layer, torch.ones(weight.shape, dtype=torch.bool), torch.arange(len(weight)))


def split_units(
    name: str, split: Split, layer: nn.Module, store: TokenStore, atlas: Atlas, *, seed: int = 42
) -> Dictionary:
    """The units of an atlas, divided into as many parts in another way.

    Args:
        name: the method's name.
        split: `random` assigns inputs at random; `pure` clusters contributions by k-means, as PURE does; `activations`
            clusters the inputs themselves by Ward's method, as DNRwCV does. Our split turns the clusters into parts.
        layer: the layer to split.
        store: the instances that the atlas was built from.
        atlas: gives the number of parts, the number of instances of each unit, and the rule that assigns inputs.
        seed: for the random split and for k-means.
    """
    weight, bias = (tensor.float().cpu() for tensor in layer_parameters(layer))
    spec = atlas.about["spec"]
    counts = torch.bincount(atlas.units, minlength=atlas.d_out).tolist()
    if split == "activations" and (size := min(int(spec["clusters"]["top_k"]), len(store))) > MAX_WARD:
        raise SpecError(
            f"clusters of activations compare all pairs of a unit's {size:,} instances, and more than {MAX_WARD:,} do "
            "not fit the memory; leave this method out, or lower clusters.top_k."
        )
    members = []
    for start in range(0, len(weight), 32):
        stop = min(start + 32, len(weight))
        _, rows = strongest_instances(store, weight[start:stop], bias[start:stop], spec["clusters"]["top_k"])
        for unit in range(start, stop):
            parts = counts[unit]
            if parts < 2 or split == "random":
                members.append(random_memberships(parts, atlas.d_in, seed * 1_000_003 + unit))
                continue
            q = store.gather(rows[unit - start].numpy())
            c = contributions(q, weight[unit])
            labels = torch.from_numpy(_cluster(split, c, q, parts, seed))
            centres = representatives(c, labels, torch.ones(len(c)), parts)
            rule = spec["split"]["winner_rule"]
            means = cluster_means(q, labels, parts)
            members.append(split_unit(centres, means, weight[unit], float(bias[unit]), winner_rule=rule).members)
    units = torch.repeat_interleave(torch.arange(len(weight)), torch.tensor([len(one) for one in members]))
    return from_members(name, layer, torch.cat(members), units)


def split_by_class(name: str, layer: nn.Module, store: TokenStore, atlas: Atlas, classes: np.ndarray) -> Dictionary:
    """The units of an atlas, each divided by the classes of its strongest instances, as DPCiCNN does with labels.

    A unit's most frequent classes take the place of clusters. A class owns the inputs at which its mean contribution is
    at least twice that of every other class; all other inputs go to a residual part, which stands for no concept. (The
    margin of ELUDe, which is chosen by how well parts separate, would leave nothing to a residual.) A unit that the
    atlas splits gets at most as many parts as there, but no fewer than two classes and a residual; without two classes
    among its instances it stays whole.

    Args:
        name: the method's name.
        layer: the layer to split.
        store: the instances that the atlas was built from.
        atlas: gives the number of parts, the number of instances of each unit, and the size of the smallest cluster.
        classes: `(instances,)` the class of each instance of the store; -1 for none.
    """
    weight, bias = (tensor.float().cpu() for tensor in layer_parameters(layer))
    spec, counts = atlas.about["spec"]["clusters"], torch.bincount(atlas.units, minlength=atlas.d_out).tolist()
    members: list[torch.Tensor] = []
    for start in range(0, len(weight), 32):
        stop = min(start + 32, len(weight))
        _, rows = strongest_instances(store, weight[start:stop], bias[start:stop], spec["top_k"])
        for unit in range(start, stop):
            own = rows[unit - start].numpy()
            most = max(2, counts[unit] - 1) if counts[unit] > 1 else 0
            numbers = _most_frequent(classes[own], most, int(spec["min_cluster_size"]))
            if len(numbers) < 2:
                members.append(torch.ones(1, atlas.d_in, dtype=torch.bool))
                continue
            labelled = np.isin(classes[own], numbers)
            q = store.gather(own[labelled])
            labels = torch.from_numpy(np.searchsorted(numbers, classes[own[labelled]]))
            centres = representatives(contributions(q, weight[unit]), labels, torch.ones(len(q)), len(numbers))
            members.append(_with_residual(memberships(centres, MARGIN, "winner")))
    units = torch.repeat_interleave(torch.arange(len(weight)), torch.tensor([len(one) for one in members]))
    return from_members(name, layer, torch.cat(members), units)


def _most_frequent(classes: np.ndarray, count: int, smallest: int) -> list[int]:
    """Up to `count` classes with most instances, at least `smallest`, in ascending order; ties go to the lower."""
    numbers, sizes = np.unique(classes[classes >= 0], return_counts=True)
    order = np.argsort(-sizes, kind="stable")[:count]
    return sorted(int(numbers[i]) for i in order if sizes[i] >= smallest)


def _with_residual(owners: torch.Tensor) -> torch.Tensor:
    """Owners of each input, where those that all own go to one more part, `(K + 1, d_in)`."""
    shared = owners.all(0)
    return torch.cat([owners & ~shared, shared[None]])


def _cluster(split: Split, c: torch.Tensor, q: torch.Tensor, parts: int, seed: int) -> np.ndarray:
    """A cluster number for each instance, from its contributions `c` or its inputs `q`."""
    if split == "pure":
        from sklearn.cluster import KMeans

        return np.asarray(KMeans(parts, n_init=1, random_state=seed).fit_predict(c.numpy())).astype(np.int64)
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    # scipy would compute the distances pair by pair, which is most of its time; products are much faster.
    tree = linkage(squareform(distances(q).numpy(), checks=False), "ward")
    return np.asarray(cut_tree(tree, n_clusters=parts)[:, 0]).astype(np.int64)
