"""The saved product: which sub-units a layer's units fall into, what drives each, and what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elude_steer.atlas import card
from elude_steer.atlas.labels import Labels, Match
from elude_steer.atlas.manifest import (
    check_files,
    check_target,
    download_atlas,
    find_atlas,
    read_manifest,
    write_manifest,
)
from elude_steer.errors import AtlasError
from elude_steer.method.layers import SubUnits, divide_among_owners, layer_parameters
from elude_steer.models.matcher import Matcher, load_matcher
from elude_steer.utils.files import new_folder, write_file

_MEMBERSHIPS, _REFERENCES, _STREAMS, _IMAGES, _CARD = (
    "memberships.safetensors",
    "references.safetensors",
    "streams.safetensors",
    "images.json",
    "README.md",
)


@dataclass(frozen=True, eq=False)
class References:
    """The strongest stored instances of sub-units (or of units), strongest first.

    Attributes:
        activation: `(n,)` mean over the strongest instances: what "fully on" is.
        values: `(n, kept)` activation at each.
        images: `(n, kept)` int32 index into the atlas's `image_ids`.
        tiles: `(n, kept)` int32.
        tokens: `(n, kept)` int32, the token within its tile.
    """

    activation: torch.Tensor
    values: torch.Tensor
    images: torch.Tensor
    tiles: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Atlas:
    """All sub-units of one layer.

    Attributes:
        packed: `(S, ceil(d_in / 8))` uint8, the memberships, a bit a dimension.
        units: `(S,)` int64 the unit each sub-unit belongs to, ascending.
        rho: `(d_out,)` the margin chosen for each unit.
        sizes: `(S,)` instances in each sub-unit's cluster; 0 for units left whole.
        references: of the sub-units.
        unit_references: of the whole units.
        image_ids: the names of the images that references point to.
        about: everything the manifest says.
        folder: where it was loaded from.
        labels: what the sub-units are called; None before they are named.
        downloaded: whether it came from the Hub, where anybody may have written its spec.
        streams: `(S, d_out)` float16 what each unit carries behind the residual connection where a sub-unit fires,
            less the mean over all sub-units; None where nobody measured it.
    """

    packed: torch.Tensor
    units: torch.Tensor
    rho: torch.Tensor
    sizes: torch.Tensor
    references: References
    unit_references: References
    image_ids: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    labels: Labels | None = None
    downloaded: bool = False
    streams: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return str(self.about.get("name", "atlas"))

    @property
    def d_in(self) -> int:
        """Input dimensions of the layer."""
        return int(self.about["d_in"])

    @property
    def d_out(self) -> int:
        """Units of the layer."""
        return int(self.about["d_out"])

    def __len__(self) -> int:
        return len(self.units)

    def __repr__(self) -> str:
        layer = self.about.get("layer", "?")
        return f"Atlas({self.name!r}: {len(self)} sub-units of {self.d_out} units, layer {layer!r})"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the layer's weights and of who owns what: atlases with the same number their sub-units alike."""
        digest = hashlib.sha256(str(self.about.get("weights", "")).encode())
        digest.update(self.packed.numpy().tobytes())
        digest.update(self.units.numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def dead(self) -> torch.Tensor:
        """`(S,)` bool: sub-units that own no dimension; they are counted and nothing else."""
        return ~self.packed.bool().any(1)

    @cached_property
    def _first(self) -> torch.Tensor:
        return torch.searchsorted(self.units, torch.arange(self.d_out + 1))

    def sub_units_of(self, unit: int) -> range:
        """The sub-units of one unit."""
        if not 0 <= unit < self.d_out:
            raise AtlasError(f"atlas '{self.name}' has units 0 to {self.d_out - 1}, not {unit}.")
        return range(int(self._first[unit]), int(self._first[unit + 1]))

    def members(self, sub_units: torch.Tensor | Sequence[int] | None = None) -> torch.Tensor:
        """Who owns what, `(n, d_in)` bool, for some sub-units or for all."""
        packed = self.packed if sub_units is None else self.packed[torch.as_tensor(sub_units)]
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=self.d_in).view(bool))

    def parameters(
        self, sub_units: torch.Tensor | Sequence[int], weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `(n, d_in)` and biases `(n,)` of some sub-units, from the layer's own weight and bias."""
        wanted = torch.as_tensor(sub_units, dtype=torch.long)
        if wanted.numel() == 0:
            return weight.new_empty(0, self.d_in), bias.new_empty(0)
        if int(wanted.min()) < 0 or int(wanted.max()) >= len(self):
            raise AtlasError(f"atlas '{self.name}' has sub-units 0 to {len(self) - 1}, not {wanted.tolist()}.")
        weight = weight.flatten(1)  # a convolution's has two dimensions more
        units, local = self.units[wanted].unique(return_inverse=True)
        first, last = self._first[units], self._first[units + 1]
        every = torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        bits = np.unpackbits(self.packed[every].numpy(), axis=1, count=self.d_in)
        # Counted in the smallest type, unit by unit: most of the time goes into moving these bytes.
        kind = np.uint8 if int((last - first).max()) < 256 else np.int32
        parts = np.split(bits, np.cumsum((last - first).numpy())[:-1])
        owners = torch.from_numpy(np.stack([part.sum(0, dtype=kind) for part in parts]))
        members = torch.from_numpy(bits.view(bool))[torch.searchsorted(every, wanted)]
        of = self.units[wanted].to(weight.device)
        return divide_among_owners(weight[of], bias[of], members.to(weight.device), owners[local].to(weight.device))

    def sub_units(self, sub_units: torch.Tensor | Sequence[int], layer: nn.Module) -> SubUnits:
        """Some sub-units as arithmetic, on the layer's device."""
        weight, bias = (tensor.float() for tensor in layer_parameters(layer))
        wanted = torch.as_tensor(sub_units, dtype=torch.long)
        return SubUnits(*self.parameters(wanted, weight, bias), self.units[wanted].to(weight.device))

    def target_levels(self, sub_units: torch.Tensor | Sequence[int], level: str) -> torch.Tensor:
        """What "on" is for the sub-units of one concept, `(n,)`.

        Args:
            sub_units: that mean one thing together.
            level: `reference` is the activation of each where it is strongest. `stream` is what its unit carries
                where the concept is: the mean over all of them, because they tell of the same thing, shared by those
                of one unit. A layer may well write against what is already there; only the stream tells what is read.
        """
        wanted = torch.as_tensor(sub_units, dtype=torch.long)
        if level == "reference":
            return self.references.activation[wanted]
        if self.streams is None:
            raise AtlasError(f"atlas '{self.name}' has no streams; build it again, or use level: reference.")
        units = self.units[wanted]
        carried = self.streams[wanted].float().mean(0)[units] if len(wanted) else torch.empty(0)
        return carried / torch.bincount(units, minlength=self.d_out)[units]

    def stream_outside(self, sub_units: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """What the stream carries where a concept is, on the units that have none of its sub-units, `(d_out,)`."""
        wanted = torch.as_tensor(sub_units, dtype=torch.long)
        self.target_levels([], "stream")  # raises where there are no streams
        carried = self.streams[wanted].float().mean(0)  # type: ignore[index]
        return carried.index_fill(0, self.units[wanted], 0.0)

    def require_labels(self) -> Labels:
        """The labels; raises where sub-units have no names."""
        if self.labels is None:
            raise AtlasError(
                f"the sub-units of atlas '{self.name}' have no names; build it again with a scorer: "
                "`elude-steer build … --set labels.scorer=google/siglip2-so400m-patch14-384`."
            )
        return self.labels

    def matcher(self, *, trust_remote_code: bool | None = None) -> Matcher:
        """The model that finds this atlas's sub-units by word, as its spec has it."""
        spec = dict(self.about.get("spec", {}).get("matcher", {}))
        if not spec:
            raise AtlasError(f"atlas '{self.name}' names no matcher; build it again with a matcher section.")
        spec["trust_remote_code"] = self.allows_remote_code(spec["trust_remote_code"], trust_remote_code)
        return load_matcher(spec.pop("id"), **spec)

    def allows_remote_code(self, written: bool, asked: bool | None) -> bool:
        """Whether foreign code may run: as asked; else as the spec says, but not that of an atlas from the Hub."""
        return asked if asked is not None else written and not self.downloaded

    def search(
        self, word: str, *, limit: int = 20, by: str = "label", trust_remote_code: bool | None = None
    ) -> list[Match]:
        """The sub-units that match a word, best first.

        Args:
            word: anything; what it means is compared with the labels, not how it is spelt.
            limit: how many.
            by: `label`, the closeness of each sub-unit's label, or `score`, how well the closest words fit it.
            trust_remote_code: whether code that comes with the matcher may run; None as the atlas's spec has it.

        Example:
            >>> atlas.search("puppy", limit=3)
        """
        labels = self.require_labels()
        matcher = self.matcher(trust_remote_code=trust_remote_code)
        return labels.search(matcher, word, self.units.numpy(), limit=limit, by=by)

    def check(self, layer: nn.Module) -> None:
        """Raises unless `layer` carries the weights this atlas was built for."""
        loaded, built = weights_hash(layer), self.about["weights"]
        if loaded != built:
            revision = self.about["model"].get("revision")
            raise AtlasError(
                f"atlas '{self.name}' was built for other weights of this layer (hash {built[:8]}…, loaded "
                f"{loaded[:8]}…); rebuild it with `elude-steer build`, or load '{self.about['model'].get('id')}'"
                + (f", revision {revision}." if revision else ".")
            )

    def save(self, folder: str | Path, thumbnails: Mapping[str, bytes] | None = None) -> Path:
        """Writes the atlas as a folder, whole or not at all; `thumbnails` are picture files by name."""
        from safetensors.torch import save

        folder = check_target(Path(folder))
        tensors = {"members": self.packed, "units": self.units.int(), "rho": self.rho, "sizes": self.sizes.int()}
        references = {
            f"{kind}.{key}": getattr(value, key).contiguous()
            for kind, value in (("sub_units", self.references), ("units", self.unit_references))
            for key in References.__dataclass_fields__
        }
        with new_folder(folder) as new:
            write_file(new / _MEMBERSHIPS, lambda file: file.write(save(tensors)))
            write_file(new / _REFERENCES, lambda file: file.write(save(references)))
            write_file(new / _IMAGES, lambda file: file.write(json.dumps(self.image_ids, indent=0).encode()))
            if self.labels is not None:
                self.labels.save(new)
            if self.streams is not None:
                streams = {"streams": self.streams.contiguous()}
                write_file(new / _STREAMS, lambda file: file.write(save(streams)))
            for name, picture in (thumbnails or {}).items():
                write_file(new / "thumbnails" / name, lambda file, picture=picture: file.write(picture))  # type: ignore[misc]
            write_file(new / _CARD, lambda file: file.write(self.card().encode()))
            about = {k: v for k, v in self.about.items() if k not in ("format", "files", "checksum")}
            write_manifest(new, about)
        return folder

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None) -> Atlas:
        """An atlas by folder, by name under `ELUDE_STEER_HOME`, or by Hub id; every file is checked.

        Example:
            >>> atlas = Atlas.load("my-atlas")
            >>> len(atlas), atlas.about["layer"]
        """
        folder = find_atlas(name)
        downloaded = folder is None
        if folder is None:
            folder = download_atlas(str(name), revision)
        about = read_manifest(folder)
        check_files(folder, about)
        return replace(cls._read(folder, about), downloaded=downloaded)

    from_pretrained = load

    @classmethod
    def _read(cls, folder: Path, about: Mapping[str, Any]) -> Atlas:
        from safetensors.torch import load_file

        tensors = load_file(folder / _MEMBERSHIPS)
        references = load_file(folder / _REFERENCES)
        of_sub_units, of_units = (
            References(**{key: references[f"{kind}.{key}"] for key in References.__dataclass_fields__})
            for kind in ("sub_units", "units")
        )
        streams = load_file(folder / _STREAMS)["streams"] if (folder / _STREAMS).is_file() else None
        images = json.loads((folder / _IMAGES).read_text(encoding="utf-8"))
        return cls(
            tensors["members"],
            tensors["units"].long(),
            tensors["rho"],
            tensors["sizes"],
            of_sub_units,
            of_units,
            tuple(images),
            about,
            folder,
            Labels.load(folder),
            streams=streams,
        )

    def card(self) -> str:
        """The model card: what this is, how it was made, how to load it."""
        return card.card(self.about, self.units, self.dead, self.labels)

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Uploads the atlas to the Hub; returns its address."""
        from huggingface_hub import HfApi

        if self.folder is None:
            raise AtlasError("save the atlas before pushing it: `atlas.save(folder)`, then `Atlas.load(folder)`.")
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.upload_folder(repo_id=repo_id, folder_path=self.folder, commit_message="Upload atlas")
        return str(info.commit_url)


def weights_hash(layer: nn.Module) -> str:
    """A hash of a layer's weight and bias as bfloat16: the same whether a model is loaded in full precision or half."""
    digest = hashlib.sha256()
    for tensor in layer_parameters(layer):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.bfloat16().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
