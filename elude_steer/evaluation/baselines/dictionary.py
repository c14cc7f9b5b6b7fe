"""What ELUDe is held against, each as a dictionary: what its latents read from the layer, and what they write.

Splits take the same instances and give every unit as many parts as ELUDe found in it; autoencoders have as many
latents as there are sub-units. So all have one expansion and one set of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.atlas.labels import Labels
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.sae import Sae
from elude_steer.method.clustering import distances
from elude_steer.method.contributions import cluster_means, contributions, representatives
from elude_steer.method.layers import SubUnits, layer_parameters, sub_unit_parameters
from elude_steer.method.splitting import random_memberships, split_unit

Split = Literal["random", "pure", "activations"]


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Latents of one layer.

    Attributes:
        name: of the method.
        read: the layer's inputs `(…, d_in)` to activations `(…, S)`.
        write: `(S, d_out)` what one unit of activation adds to the layer's output.
        base: `(d_out,)` the output where nothing is active.
        atoms: `(S, d)` the vectors that make the dictionary: incoming weights of sub-units, directions of latents.
        units: `(S,)` the unit each is a part of; all 0 where there are no units.
        names: `(S,)` what latents are called by those who made them; empty where dissection names them.
    """

    name: str
    read: Callable[[torch.Tensor], torch.Tensor]
    write: torch.Tensor
    base: torch.Tensor
    atoms: torch.Tensor
    units: torch.Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.write)

    def reconstruct(self, q: torch.Tensor) -> torch.Tensor:
        """The layer's output, as far as the dictionary gives it, `(…, d_out)`."""
        return self.read(q) @ self.write + self.base


def by_unit(atoms: torch.Tensor, units: torch.Tensor) -> list[torch.Tensor]:
    """The vectors of each unit, those without length left out."""
    alive = atoms.norm(dim=1) > 0
    return [atoms[(units == unit) & alive] for unit in units.unique()]


def of_members(name: str, layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> Dictionary:
    """Parts of units: who owns which input, `(S, d_in)` bool, and of which unit, `(S,)`."""
    weight, bias = (tensor.float() for tensor in layer_parameters(layer))
    own = units.to(weight.device)
    rows = SubUnits(*sub_unit_parameters(weight, bias, members.to(weight.device), own), own)
    base = torch.zeros_like(weight[:, 0])
    return Dictionary(name, rows.activations, F.one_hot(own, len(weight)).float(), base, rows.weight, units)


def of_atlas(name: str, layer: nn.Module, atlas: Atlas) -> Dictionary:
    """The sub-units of an atlas."""
    return of_members(name, layer, atlas.members(), atlas.units)


def raw_units(layer: nn.Module) -> Dictionary:
    """The units as they are."""
    weight, _ = layer_parameters(layer)
    return of_members("raw units", layer, torch.ones(weight.shape, dtype=torch.bool), torch.arange(len(weight)))


def split_otherwise(kind: Split, layer: nn.Module, store: TokenStore, atlas: Atlas, *, seed: int = 42) -> Dictionary:
    """The units of an atlas in as many parts, found in another way.

    Args:
        kind: `random` shares inputs out by lot; `pure` groups contributions by k-means, as PURE does; `activations`
            groups the inputs themselves by Ward's method, as DNRwCV does. The groups become parts by our split.
        layer: that is split.
        store: the instances that the atlas was made from.
        atlas: says how many parts, how many instances a unit is judged by, and which rule shares inputs out.
        seed: of the lot and of k-means.
    """
    weight, bias = (tensor.float().cpu() for tensor in layer_parameters(layer))
    spec = atlas.about["spec"]
    counts = torch.bincount(atlas.units, minlength=atlas.d_out).tolist()
    found = []
    for start in range(0, len(weight), 32):
        stop = min(start + 32, len(weight))
        _, rows = strongest_instances(store, weight[start:stop], bias[start:stop], spec["clusters"]["top_k"])
        for unit in range(start, stop):
            parts = counts[unit]
            if parts < 2 or kind == "random":
                found.append(random_memberships(parts, atlas.d_in, seed * 1_000_003 + unit))
                continue
            q = store.gather(rows[unit - start].numpy())
            c = contributions(q, weight[unit])
            labels = torch.from_numpy(_groups(kind, c, q, parts, seed))
            centres = representatives(c, labels, torch.ones(len(c)), parts)
            rule = spec["split"]["winner_rule"]
            means = cluster_means(q, labels, parts)
            found.append(split_unit(centres, means, weight[unit], float(bias[unit]), winner_rule=rule).members)
    names = {"random": "random split", "pure": "k-means on contributions", "activations": "clusters of activations"}
    units = torch.repeat_interleave(torch.arange(len(weight)), torch.tensor([len(one) for one in found]))
    return of_members(names[kind], layer, torch.cat(found), units)


def _groups(kind: str, c: torch.Tensor, q: torch.Tensor, parts: int, seed: int) -> np.ndarray:
    if kind == "pure":
        from sklearn.cluster import KMeans

        return np.asarray(KMeans(parts, n_init=1, random_state=seed).fit_predict(c.numpy())).astype(np.int64)
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    # The library would take the distances pair by pair, which is most of its time; products are much faster.
    tree = linkage(squareform(distances(q).numpy(), checks=False), "ward")
    return np.asarray(cut_tree(tree, n_clusters=parts)[:, 0]).astype(np.int64)


def of_sae(sae: Sae, layer: nn.Module) -> Dictionary:
    """The latents of an autoencoder of the layer's output; a transcoder's read the layer's input."""
    transcoder, atoms = sae.spec.kind == "transcoder", sae.dictionary()

    given = _outputs(layer)

    def read(q: torch.Tensor) -> torch.Tensor:
        return sae.encode(q if transcoder else given(q))

    name = f"{sae.spec.kind.replace('_', ' ')}{'' if transcoder else ' SAE'}"
    return Dictionary(name, read, atoms, sae.target_mean, atoms, torch.zeros(len(atoms), dtype=torch.long))


def _outputs(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a layer gives by itself, also while something else stands in its place."""
    weight, bias = (tensor.float() for tensor in layer_parameters(layer))
    return lambda q: F.linear(q.float(), weight, bias)


def difference_of_means(
    layer: nn.Module, pictures: Sequence[tuple[torch.Tensor, Any]], words: Sequence[str]
) -> Dictionary:
    """Supervised: for each word the mean output where it is to be seen, less the mean where it is not.

    Args:
        layer: whose output.
        pictures: for each picture the layer's inputs, `(tokens, d_in)`, and what every token shows.
        words: that get a latent each.
    """
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    total, count, given = torch.zeros(0), 0, _outputs(layer)
    for q, shown in pictures:
        out, names = given(q).double(), np.asarray(shown)
        total = out.sum(0) if not count else total + out.sum(0)
        count += len(out)
        for word in set(names) & set(words):
            here = torch.from_numpy(names == word)
            sums[word] = sums.get(word, torch.zeros_like(total)) + out[here].sum(0)
            counts[word] = counts.get(word, 0) + int(here.sum())
    known = [word for word in dict.fromkeys(words) if counts.get(word)]
    if not known:
        raise SpecError("none of the words is shown by any token; there are no means to compare.")
    atoms = torch.stack([sums[w] / counts[w] - (total - sums[w]) / max(1, count - counts[w]) for w in known]).float()
    atoms, base = F.normalize(atoms, dim=1), (total / count).float()

    def read(q: torch.Tensor) -> torch.Tensor:
        return (given(q) - base) @ atoms.T

    units = torch.zeros(len(atoms), dtype=torch.long)
    return Dictionary("difference of means (supervised)", read, atoms, base, atoms, units, tuple(known))


@dataclass(frozen=True, eq=False)
class Latents:
    """Some latents as the arithmetic of an edit; the counterpart of `SubUnits`."""

    dictionary: Dictionary
    rows: torch.Tensor

    def activations(self, q: torch.Tensor) -> torch.Tensor:
        """`(…, m)` of inputs `(…, d_in)`."""
        return self.dictionary.read(q)[..., self.rows]

    def mean_activations(self, q: torch.Tensor) -> torch.Tensor:
        """`(m,)` over tokens."""
        return self.activations(q).mean(0)

    def add_change(self, total: torch.Tensor, change: torch.Tensor) -> None:
        """Adds what the change of their activations writes."""
        total += change @ self.dictionary.write[self.rows]

    def select(self, rows: torch.Tensor) -> Latents:
        """A few of them."""
        return Latents(self.dictionary, self.rows[rows])


@dataclass(frozen=True)
class Levels:
    """What "fully on" is for each latent, `(S,)`."""

    activation: torch.Tensor


@dataclass(frozen=True, eq=False)
class NamedDictionary:
    """A dictionary with names, which a steerer takes in the place of an atlas.

    Attributes:
        dictionary: the latents.
        labels: what they are called.
        references: what "fully on" is.
        streams: `(S, d_out)` what is behind the residual connection where each fires, less the mean over all.
        about: what stands for the atlas's manifest.
    """

    dictionary: Dictionary
    labels: Labels
    references: Levels
    streams: torch.Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dictionary)

    @property
    def name(self) -> str:
        """Of the method."""
        return self.dictionary.name

    @property
    def d_out(self) -> int:
        """Units of the layer."""
        return self.dictionary.write.shape[1]

    @property
    def units(self) -> torch.Tensor:
        """For whom it matters: every latent by itself."""
        return torch.arange(len(self))

    @cached_property
    def fingerprint(self) -> str:
        """Of what the latents are, what they are called, and what "on" is for them."""
        digest = hashlib.sha256(self.labels.words.tobytes() + self.labels.scores.tobytes())
        streams = [] if self.streams is None else [self.streams]
        for tensor in (self.dictionary.atoms, self.references.activation, *streams):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def require_labels(self) -> Labels:
        """The labels."""
        return self.labels

    def check(self, layer: nn.Module) -> None:
        """A dictionary is made with the layer at hand."""

    def sub_units(self, numbers: torch.Tensor | Sequence[int], layer: nn.Module) -> Latents:
        """Some latents as arithmetic."""
        return Latents(self.dictionary, torch.as_tensor(numbers, dtype=torch.long).to(self.dictionary.write.device))

    def target_levels(self, numbers: torch.Tensor | Sequence[int], level: str) -> torch.Tensor:
        """What "on" is for the latents of one concept, `(n,)`.

        `reference`: each one's own. `stream`: together they write what the stream carries where the concept is, as far
        as they can; of all ways to do so the smallest. For parts of units that is what an atlas does.
        """
        wanted = torch.as_tensor(numbers, dtype=torch.long)
        if level == "reference" or self.streams is None or not len(wanted):
            return self.references.activation[wanted]
        carried = self.streams[wanted].double().mean(0)
        return (torch.linalg.pinv(self._writes(wanted).double().T) @ carried).float()

    def stream_outside(self, numbers: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """What the stream carries where a concept is and its latents do not write, `(d_out,)`."""
        wanted = torch.as_tensor(numbers, dtype=torch.long)
        if self.streams is None:
            return torch.zeros(self.d_out)
        return self.streams[wanted].float().mean(0) - self.target_levels(wanted, "stream") @ self._writes(wanted)

    def _writes(self, wanted: torch.Tensor) -> torch.Tensor:
        return self.dictionary.write[wanted.to(self.dictionary.write.device)].cpu()
