"""An atlas: the sub-units of one layer's units, what activates each of them, and how the atlas was built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from elude_steer.atlas.calibration import Calibration, LinearReading, WordReadings, copy_parameters
from elude_steer.atlas.card import render_card
from elude_steer.atlas.familiarity import Familiarity
from elude_steer.atlas.labels import Labels, Match
from elude_steer.atlas.manifest import (
    CARD,
    COPY_FIRST,
    check_files,
    check_not_shipped,
    check_target,
    download_atlas,
    find_atlas,
    find_commit,
    read_manifest,
    replace_card,
    upload_atlas,
    write_manifest,
)
from elude_steer.atlas.manifest_rules import CALIBRATION, FAMILIARITY, IMAGES, LABEL_SCORES, MEMBERSHIPS, REFERENCES
from elude_steer.atlas.validate import read_content
from elude_steer.atlas.weights import StoredParameters, check_weights
from elude_steer.errors import AtlasError
from elude_steer.method.layers import SubUnits, divide_among_owners, layer_parameters
from elude_steer.models.matcher import Matcher, load_matcher
from elude_steer.trust import check_needs
from elude_steer.utils.files import new_folder, write_file

_ROWS = 1024  # sub-units whose weights are computed at a time


@dataclass(frozen=True, eq=False)
class References:
    """The strongest instances of sub-units (or of units), strongest first.

    Attributes:
        activation: `(n,)` mean over the strongest instances: what "fully on" means.
        values: `(n, keep)` activation at each instance.
        images: `(n, keep)` int32 index into the atlas's `image_ids`.
        tiles: `(n, keep)` int32.
        tokens: `(n, keep)` int32, the token within its tile.
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
        packed: `(S, ceil(d_in / 8))` uint8, the memberships, one bit for each input dimension.
        units: `(S,)` int64, the unit of each sub-unit, ascending.
        rho: `(d_out,)`, the margin chosen for each unit.
        sizes: `(S,)`, the number of instances in each sub-unit's cluster; 0 for units that are not split.
        references: of the sub-units.
        unit_references: of the units before the split.
        image_ids: the ids of the images that references point to.
        about: the content of the manifest.
        folder: where it was loaded from.
        labels: the labels of the sub-units; None if it was built without.
        downloaded: whether it came from the Hub, where anybody may have written its spec.
        commit: the commit of the Hub that it came as; None for an atlas of another place.
        familiarity: what the images have in common that it was built from; None if it was not measured.
        calibration: the detectors and directions of words, for mode place; None if it was not measured.
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
    commit: str | None = None
    familiarity: Familiarity | None = None
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        """The name used in messages."""
        return str(self.about.get("name", "atlas"))

    @property
    def d_in(self) -> int:
        """Number of input dimensions of the layer."""
        return int(self.about["d_in"])

    @property
    def d_out(self) -> int:
        """Number of units of the layer."""
        return int(self.about["d_out"])

    def __len__(self) -> int:
        return len(self.units)

    def __repr__(self) -> str:
        layer = self.about.get("layer", "?")
        return f"Atlas({self.name!r}: {len(self)} sub-units of {self.d_out} units, layer {layer!r})"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the layer's weights and the memberships; atlases that share it have the same sub-units."""
        digest = hashlib.sha256(str(self.about.get("weights", "")).encode())
        digest.update(self.packed.numpy().tobytes())
        digest.update(self.units.numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def dead(self) -> torch.Tensor:
        """`(S,)` bool: sub-units that own no dimension; they are counted and otherwise ignored."""
        return ~self.packed.bool().any(1)

    @cached_property
    def _first(self) -> torch.Tensor:
        return torch.searchsorted(self.units, torch.arange(self.d_out + 1))

    def sub_units_of(self, unit: int) -> range:
        """The numbers of one unit's sub-units."""
        if not 0 <= unit < self.d_out:
            raise AtlasError(f"atlas '{self.name}' has units 0 to {self.d_out - 1}, not {unit}.")
        return range(int(self._first[unit]), int(self._first[unit + 1]))

    def members(self, sub_units: torch.Tensor | Sequence[int] | None = None) -> torch.Tensor:
        """Memberships, `(n, d_in)` bool, of some sub-units or of all."""
        packed = self.packed if sub_units is None else self.packed[torch.as_tensor(sub_units)]
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=self.d_in).view(bool))

    def parameters(
        self, sub_units: torch.Tensor | Sequence[int], weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `(n, d_in)` and biases `(n,)` of some sub-units, computed from the layer's weight and bias."""
        numbers = torch.as_tensor(sub_units, dtype=torch.long)
        if numbers.numel() == 0:
            return weight.new_empty(0, self.d_in), bias.new_empty(0)
        if int(numbers.min()) < 0 or int(numbers.max()) >= len(self):
            raise AtlasError(f"atlas '{self.name}' has sub-units 0 to {len(self) - 1}, not {numbers.tolist()}.")
        weight = weight.flatten(1)  # the weight of a convolution has two more dimensions
        units, local = self.units[numbers].unique(return_inverse=True)
        first, last = self._first[units], self._first[units + 1]
        siblings = torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        bits = np.unpackbits(self.packed[siblings].numpy(), axis=1, count=self.d_in)
        # Counted in the smallest type, unit by unit, because most of the time goes into moving these bytes.
        kind = np.uint8 if int((last - first).max()) < 256 else np.int32
        parts = np.split(bits, np.cumsum((last - first).numpy())[:-1])
        owners = torch.from_numpy(np.stack([part.sum(0, dtype=kind) for part in parts]))
        members = torch.from_numpy(bits.view(bool))[torch.searchsorted(siblings, numbers)]
        owner = self.units[numbers].to(weight.device)
        return divide_among_owners(
            weight[owner], bias[owner], members.to(weight.device), owners[local].to(weight.device)
        )

    def sub_units(self, sub_units: torch.Tensor | Sequence[int], layer: nn.Module) -> SubUnits:
        """The weights of some sub-units on the layer's device, ready to compute their activations."""
        weight, bias = (tensor.float() for tensor in layer_parameters(layer))
        numbers = torch.as_tensor(sub_units, dtype=torch.long)
        return SubUnits(*self.parameters(numbers, weight, bias), self.units[numbers].to(weight.device))

    def detector(self, row: int, layer: nn.Module) -> LinearReading:
        """The detector of a calibrated word as a linear function of the layer's input, on the layer's device."""
        weights, bias = self.require_calibration().detector(row)
        everything = self.sub_units(range(len(self)), layer)
        weights = weights.to(everything.weight)
        return LinearReading(weights @ everything.weight, weights @ everything.bias + bias)

    def read_all_words(self, q: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Readings `(…, W)` of the detectors of all calibrated words, for inputs `(…, d_in)` of the layer."""
        readings = _WORD_READINGS.get(self)
        if readings is None or not readings.fits(layer):
            # Kept beyond this call, so independent of the caller's gradient mode, inference mode and autocast.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                readings = _WORD_READINGS[self] = self._fold_detectors(layer)
        return readings(q)

    def _fold_detectors(self, layer: nn.Module) -> WordReadings:
        """The detectors of all words as a function of the layer's input, which needs no sub-units any more."""
        calibration, (weight, bias) = self.require_calibration(), layer_parameters(layer)
        weight, bias = weight.float(), bias.float()
        scale = calibration.scale.to(weight)
        total = weight.new_zeros(len(calibration), self.d_in)
        offset = calibration.bias.to(weight)
        for first in range(0, len(self), _ROWS):
            numbers = torch.arange(first, min(first + _ROWS, len(self)))
            parts, biases = self.parameters(numbers, weight, bias)
            shares = calibration.weights[:, numbers].to(weight) * scale[:, None]
            total += shares @ parts
            offset = offset + shares @ biases
        return WordReadings(total, offset, *copy_parameters(layer))

    def require_calibration(self) -> Calibration:
        """The calibration; raises if the atlas has none."""
        if self.calibration is None:
            raise AtlasError(
                f"atlas '{self.name}' is not calibrated, and mode place needs that; add it with `elude-steer atlases "
                f"calibrate {self.name} --images FOLDER --out NEW`, or use mode scale (`--mode scale`)."
            )
        return self.calibration

    def require_labels(self) -> Labels:
        """The labels; raises if the atlas has none."""
        if self.labels is None:
            raise AtlasError(
                f"the sub-units of atlas '{self.name}' have no labels; build it again with a scorer: "
                "`elude-steer build … --set labels.scorer=google/siglip2-so400m-patch14-384`."
            )
        return self.labels

    def matcher(self, *, trust_remote_code: bool = False) -> Matcher:
        """Load the model that matches words with labels; `trust_remote_code` lets code that comes with it run."""
        spec = self.about.get("spec", {}).get("matcher")
        if not spec:
            raise AtlasError(f"the spec of atlas '{self.name}' has no matcher; build it again with a matcher section.")
        check_needs(self.about["spec"], ("matcher",), trust_remote_code)
        return load_matcher(spec["id"], revision=spec["revision"], trust_remote_code=trust_remote_code)

    def search(self, word: str, *, limit: int = 20, by: str = "label", trust_remote_code: bool = False) -> list[Match]:
        """The sub-units that match a word, best first.

        Args:
            word: any word; its meaning is compared with the labels, not its spelling.
            limit: the maximum number of sub-units.
            by: `label` ranks by the similarity of each sub-unit's label; `score` by how well the closest words fit it.
            trust_remote_code: whether code that comes with the matcher may run.

        Example:
            >>> atlas.search("puppy", limit=3)
        """
        labels = self.require_labels()
        matcher = self.matcher(trust_remote_code=trust_remote_code)
        return labels.search(matcher, word, self.units.numpy(), limit=limit, by=by)

    def check(self, layer: nn.Module, read_stored: Callable[[], StoredParameters] | None = None) -> None:
        """Raise unless `layer` has the weights that this atlas was built for.

        Args:
            layer: in any data type in which its checkpoint can be loaded.
            read_stored: reads the layer's weights from its checkpoint, such as `Tower.read_stored`; it is called only
                where two roundings cannot be compared without.
        """
        check_weights(self.about, layer, read_stored)

    def save(self, folder: str | Path, thumbnails: Mapping[str, bytes] | None = None) -> Path:
        """Write the atlas as a folder, completely or not at all; `thumbnails` are image files by name."""
        from safetensors.torch import save

        folder = check_target(Path(folder))
        tensors = {"members": self.packed, "units": self.units.int(), "rho": self.rho, "sizes": self.sizes.int()}
        references = {
            f"{kind}.{key}": getattr(value, key).contiguous()
            for kind, value in (("sub_units", self.references), ("units", self.unit_references))
            for key in References.__dataclass_fields__
        }
        with new_folder(folder) as new:
            write_file(new / MEMBERSHIPS, lambda file: file.write(save(tensors)))
            write_file(new / REFERENCES, lambda file: file.write(save(references)))
            write_file(new / IMAGES, lambda file: file.write(json.dumps(self.image_ids, indent=0).encode()))
            if self.labels is not None:
                self.labels.save(new)
            if self.familiarity is not None:
                self.familiarity.save(new)
            if self.calibration is not None:
                self.calibration.save(new)
            for name, data in (thumbnails or {}).items():
                write_file(new / "thumbnails" / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
            write_file(new / CARD, lambda file: file.write(self.card().encode()))
            about = {k: v for k, v in self.about.items() if k not in ("format", "files", "checksum")}
            write_manifest(new, about)
        return folder

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None) -> Atlas:
        """Load an atlas from a folder, by name under `ELUDE_STEER_HOME`, or by Hub id, and check everything in it.

        Args:
            name: the folder, name or Hub id.
            revision: for a Hub id, the commit, tag or branch; of a complete commit hash, no other commit is loaded.

        Example:
            >>> atlas = Atlas.load("my-atlas")
            >>> len(atlas), atlas.about["layer"]
        """
        folder = find_atlas(name)
        if downloaded := folder is None:
            folder = download_atlas(str(name), revision)
        elif revision is not None:
            raise AtlasError(f"revision is for atlases of the Hub, and '{name}' is '{folder}'; leave it out.")
        about = read_manifest(folder)
        check_files(folder, about)
        commit = find_commit(folder)
        return replace(cls._read(folder, about), downloaded=downloaded or commit is not None, commit=commit)

    from_pretrained = load

    @classmethod
    def _read(cls, folder: Path, about: Mapping[str, Any]) -> Atlas:
        content = read_content(folder, about)
        tensors, references, labels = content.tensors[MEMBERSHIPS], content.tensors[REFERENCES], None
        of_sub_units, of_units = (
            References(**{key: references[f"{kind}.{key}"] for key in References.__dataclass_fields__})
            for kind in ("sub_units", "units")
        )
        if content.labels is not None:
            scores = {key: tensor.numpy() for key, tensor in content.tensors[LABEL_SCORES].items()}
            labels = Labels(tuple(content.labels["vocabulary"]), **scores, about=content.labels["about"])
        familiarity, calibration = content.tensors.get(FAMILIARITY), content.tensors.get(CALIBRATION)
        return cls(
            tensors["members"],
            tensors["units"].long(),
            tensors["rho"],
            tensors["sizes"],
            of_sub_units,
            of_units,
            content.images,
            about,
            folder,
            labels,
            familiarity=None if familiarity is None else Familiarity(**familiarity),
            calibration=None if calibration is None else Calibration(**calibration),
        )

    def thumbnail(self, image: int) -> bytes | None:
        """The file of a reference image's thumbnail; None if the atlas lists none, or if it has changed since."""
        name = f"thumbnails/{image:06d}.jpg"
        expected = self.about.get("files", {}).get(name)
        if self.folder is None or expected is None or not (self.folder / name).is_file():
            return None
        data = (self.folder / name).read_bytes()
        return data if hashlib.sha256(data).hexdigest() == expected else None

    def thumbnails(self) -> dict[str, bytes]:
        """All thumbnails by the names of their files, as `save` takes them."""
        found = {f"{image:06d}.jpg": self.thumbnail(image) for image in range(len(self.image_ids))}
        return {name: data for name, data in found.items() if data is not None}

    def card(self) -> str:
        """The model card: what this atlas is, how it was built and how to load it."""
        return render_card(self.about, self.units, self.dead, self.labels)

    def update_card(self, *, license: str | None = None, evaluation: Mapping[str, Any] | None = None) -> Path:
        """Write the card of a saved atlas again, and its manifest; no other file changes. Returns the folder.

        Args:
            license: the licence of the atlas, as the Hub writes it: `apache-2.0`; None keeps the one it has.
            evaluation: measured results, from `Evaluation.for_card`; None keeps those it has.

        Example:
            >>> Atlas.load("my-atlas").update_card(license="apache-2.0")
        """
        if self.folder is None or self.downloaded:
            raise AtlasError(
                "save the atlas before changing its card: `atlas.save(folder)`, then `Atlas.load(folder)`."
            )
        folder, about = check_not_shipped(self.name, self.folder, COPY_FIRST), dict(self.about)
        if license is not None:
            about["spec"] = {**about.get("spec", {}), "license": license}
        if evaluation is not None:
            about["evaluation"] = dict(evaluation)
        replace_card(folder, about, replace(self, about=about).card())
        return folder

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the atlas to the Hub; returns the address of the commit."""
        if self.folder is None:
            raise AtlasError("save the atlas before pushing it: `atlas.save(folder)`, then `Atlas.load(folder)`.")
        return upload_atlas(self.folder, repo_id, private=private, token=token)


# For each atlas the readings of the layer that was read last. Neither copies nor pickles of an atlas take them along.
_WORD_READINGS: WeakKeyDictionary[Atlas, WordReadings] = WeakKeyDictionary()
