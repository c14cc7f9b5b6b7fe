"""Small atlases made without a build."""

from dataclasses import asdict

import numpy as np
import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.weights import weights_hash
from elude_steer.specs import AtlasSpec, ModelSpec


def make_atlas(units=6, parts=(1, 3, 2, 2, 4, 1), d_in=21, seed=0, layer=None):
    """An atlas with random memberships and references, and the hash of the layer's weights."""
    rng = np.random.default_rng(seed)
    owners = np.repeat(np.arange(units), parts)
    members = rng.random((len(owners), d_in)) < 0.4
    for unit in range(units):  # every input dimension has an owner
        mine = np.flatnonzero(owners == unit)
        members[mine[0], ~members[mine].any(0)] = True
    n = len(owners)

    def references(count):
        g = torch.Generator().manual_seed(seed)
        numbers = [torch.randint(0, 5, (count, 4), generator=g, dtype=torch.int32) for _ in range(3)]
        return References(torch.rand(count, generator=g), torch.rand(count, 4, generator=g), *numbers)

    layer = layer or nn.Linear(d_in, units)
    about = {
        "name": "small", "model": {"id": "some/model", "revision": "abc"}, "layer": "fc2", "d_in": d_in, "d_out": units,
        "units": units, "sub_units": n, "images": 5, "instances": 50, "backend": "exact",
        "weights": weights_hash(layer), "versions": {},
        "spec": asdict(AtlasSpec("small", ModelSpec("some/model", "fc2"))),
    }  # fmt: skip
    return Atlas(
        torch.from_numpy(np.packbits(members, axis=1)), torch.from_numpy(owners), torch.rand(units),
        torch.arange(n, dtype=torch.int32), references(n), references(units), tuple("abcde"), about,
    )  # fmt: skip
