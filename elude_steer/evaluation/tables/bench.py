"""Makes what the methods of a table need and the methods themselves: tokens, atlases, autoencoders. All are files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.pipeline import load_tower, run_and_save
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.atlas.build.tokens import collect_draws
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs
from elude_steer.evaluation.baselines.sae import Quality, Sae, SaeSpec, choose_best, from_sae, quality, train_sae
from elude_steer.evaluation.baselines.splits import from_atlas, raw_units, split_by_class, split_units
from elude_steer.evaluation.compare.methods import METHODS, Method
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.accuracy import MIN_CLASSES, Head, Probe, load_head
from elude_steer.evaluation.tables.activations import HeldOut, PoolingCache, read_means
from elude_steer.evaluation.tables.setup import NEEDS_CLASSES, TableSetup, class_of, has_classes
from elude_steer.method.layers import layer_parameters
from elude_steer.models.images import Item
from elude_steer.models.vision import Tower
from elude_steer.utils.files import read_json, read_tensors, write_file, write_tensors
from elude_steer.utils.parallel import worker_group
from elude_steer.utils.threads import check_threads, use_threads

_PROBED = 10_000  # images that a linear probe is fitted to


@dataclass
class _Repeat(Build):
    """A build that clusters and splits anew, from the tokens of another."""

    tokens: Path = Path()

    def open_stage(self, name: str, *causes: Any) -> StageFolder:
        """The folder of a stage; tokens are those that are there already."""
        if name != "tokens":
            return super().open_stage(name, *causes)
        own, self.work = self.work, self.tokens
        try:
            return super().open_stage(name, *causes)
        finally:
            self.work = own


@dataclass(frozen=True, eq=False)
class Bench:
    """Everything of one setup; what is asked for is made once and stored."""

    setup: TableSetup
    _read_labels: list[int] = field(default_factory=list)

    @property
    def labels_read(self) -> int:
        """How many labels of images methods have asked for."""
        return sum(self._read_labels)

    @property
    def folder(self) -> Path:
        """Where everything is stored."""
        return self.setup.folder

    @cached_property
    def tower(self) -> Tower:
        """The backbone with its layer; refuses other weights than those that the folder was made with."""
        setup = self.setup
        check_threads(setup.threads)
        loaded = load_tower(setup.spec.model, setup.device, trust_remote_code=setup.trust_remote_code)
        tower = replace(loaded, threads=setup.threads)
        path, found = self.folder / "backbone.json", {"fingerprint": tower.fingerprint()}
        if path.exists() and read_json(path, dict) != found:
            raise SpecError(f"'{self.folder}' was made with other weights of '{setup.spec.model.id}'; delete it.")
        write_file(path, lambda file: file.write(json.dumps(found).encode()))
        return tower

    @cached_property
    def held_out(self) -> HeldOut:
        """The images to measure on."""
        items = list(self.setup.held_out_set.items())
        return HeldOut(self.tower, items, self.folder / "held-out", self.setup.spec.tokens.batch_size)

    @cached_property
    def class_names(self) -> list[str]:
        """The classes of all images, sorted."""
        sets = (self.setup.image_set, self.setup.held_out_set)
        found = {class_of(item.id, self.setup.classes) for images in sets for item in images.items()}
        return sorted(name for name in found if name is not None)

    @cached_property
    def head(self) -> Head | None:
        """The classifier on the backbone, if there is one."""
        setup = self.setup
        return load_head(self.tower, setup.head, setup.device, trust_remote_code=setup.trust_remote_code)

    @property
    def is_classified(self) -> bool:
        """Whether the images to measure on have classes enough for an accuracy."""
        known = has_classes(list(self.setup.held_out_set.items()), self.setup.classes)
        return known and len(self.class_names) >= MIN_CLASSES

    def class_numbers(self, items: Sequence[Item]) -> list[int]:
        """The class of each image as a number; -1 where it has none."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        return [numbers.get(class_of(item.id, self.setup.classes) or "", -1) for item in items]

    @cached_property
    def probe(self) -> Probe | None:
        """A linear probe for backbones without a head, fitted to the probing images; None without their classes."""
        if not self.is_classified or self.head is not None or not self._probe_step:
            return None
        self.store(self.setup.preset.seeds[0])
        items, means = read_means(self.folder / "means", list(self.setup.image_set.items()))
        classes = torch.tensor(self.class_numbers(items))
        if len(classes[classes >= 0].unique()) < MIN_CLASSES:  # a part of the images may lack most of the classes
            return None
        with use_threads(1):
            return Probe.fit(self.tower, means[classes >= 0], classes[classes >= 0])

    @cached_property
    def _probe_step(self) -> int:
        """Of every so many-th probing image the mean stream is stored, to fit a probe; 0 for none."""
        items = list(self.setup.image_set.items())
        if self.setup.head is not None or not self.is_classified or not has_classes(items, self.setup.classes):
            return 0
        return -(-len(items) // _PROBED)

    def store(self, seed: int) -> TokenStore:
        """The tokens of a draw; those of all draws are collected in one pass over the images."""
        return TokenStore(self._token_folders[seed].path)

    @cached_property
    def _token_folders(self) -> dict[int, StageFolder]:
        seeds, setup = self.setup.preset.seeds, self.setup
        _ = self.tower  # first, because loading it is no part of the pass
        with self._count_cost("tower"), worker_group(None, setup.threads) as workers:
            builds = [
                Build(self.tower, setup.image_set, setup.atlas_spec(seed), workers, self.folder / "stages", False)
                for seed in seeds
            ]
            means = self.folder / "means"
            means.mkdir(parents=True, exist_ok=True)
            for build in builds:
                build.cache = PoolingCache(self.tower, means, self._probe_step)
            return dict(zip(seeds, collect_draws(builds), strict=True))

    @property
    def base_rule(self) -> str:
        """The rule of the atlas that sets the number of parts and latents of other methods."""
        return self.setup.preset.base_rule

    def atlas(self, rule: str, seed: int, run: int = 0) -> Atlas:
        """The atlas of a rule; further runs cluster and split anew from the same tokens."""
        again = f"-run{run}" if run else ""
        out = self.folder / f"atlas-{rule}-{seed}{again}"
        if not (out / "manifest.json").exists():
            self.store(seed)
            setup, model = self.setup, self.setup.spec.model
            work = self.folder / f"stages{again}"
            name = f"{_number_of(rule):02d}-{seed}-{run}"
            with self._count_cost(name), worker_group(None, setup.threads) as workers:
                spec = setup.atlas_spec(seed, rule)
                build = _Repeat(self.tower, setup.image_set, spec, workers, work, False, tokens=self.folder / "stages")
                run_and_save(build, out, {"id": model.id, "revision": model.revision, "kind": model.kind})
        return Atlas.load(out)

    def dictionary(self, method: Method, seed: int, run: int = 0) -> Dictionary:
        """The dictionary of a method from the tokens of a draw; its cost does not count what others need, too."""
        self.store(seed)
        if method.kind in ("split", "classes") or (method.kind == "sae" and self.setup.preset.expansion is None):
            self.atlas(self.base_rule, seed)
        if method.kind == "sae":
            self._chosen_settings(self._sae_spec(method, seed, run))
        if method.kind == "atlas":  # counts its own cost, because others may ask for it first
            return self._make(method, seed, run)
        with self._count_cost(f"{method.number:02d}-{seed}-{run}"):
            return self._make(method, seed, run)

    def _make(self, method: Method, seed: int, run: int) -> Dictionary:
        layer = self.tower.layer
        if method.kind == "atlas":
            return from_atlas(method.name, layer, self.atlas(method.variant, seed, run))
        if method.kind == "units":
            return raw_units(method.name, layer)
        if method.kind == "sae":
            return from_sae(method.name, self.sae(method, seed, run), layer)
        store, atlas = self.store(seed), self.atlas(self.base_rule, seed)
        if method.kind == "classes":
            return split_by_class(method.name, layer, store, atlas, self._instance_classes(store))
        number = self.setup.preset.training_seeds[run]
        return split_units(method.name, cast(Any, method.variant), layer, store, atlas, seed=number)

    def _instance_classes(self, store: TokenStore) -> np.ndarray:
        """The class of each stored instance: that of its image."""
        items = list(self.setup.image_set.items())
        self._read_labels.append(len(items))
        by_image = np.full(len(items), -1)
        if has_classes(items, self.setup.classes):
            by_image[[item.index for item in items]] = self.class_numbers(items)
        elif self.head is not None:  # what it sees stands in for what is known
            found = self.head.predict(items)
            by_image[list(found)] = list(found.values())
        else:
            raise SpecError(NEEDS_CLASSES)
        return np.asarray(by_image[store.places["image"]])

    def _sae_spec(self, method: Method, seed: int, run: int) -> SaeSpec:
        expansion, units = self.setup.preset.expansion, len(layer_parameters(self.tower.layer)[1])
        latents = len(self.atlas(self.base_rule, seed)) if expansion is None else round(expansion * units)
        return self.setup.preset.sae_spec(method.variant, latents, run)

    def sae(self, method: Method, seed: int, run: int) -> Sae:
        """An autoencoder, trained once; its settings are chosen on the first draw, by the paper's rule."""
        spec = self._sae_spec(method, seed, run)
        spec = replace(spec, **cast(Any, self._chosen_settings(spec)))
        path = self.folder / "autoencoders" / f"{spec.kind}-{seed}-{run}.safetensors"
        if not path.exists():
            inputs, targets = self._sae_tokens(spec.kind, seed)
            with use_threads(self.setup.threads or 1):
                trained = train_sae(spec, inputs, targets, device=self.tower.device)
            write_tensors(path, {name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()})
        state = {name: tensor.to(self.tower.device) for name, tensor in read_tensors(path).items()}
        return Sae.from_state(spec, state)

    def _chosen_settings(self, spec: SaeSpec) -> dict[str, float]:
        """The settings that did best in trials on the first draw; every trial is a file."""
        folder, first = self.folder / "trials" / spec.kind, self.setup.preset.seeds[0]
        trials = self.setup.preset.trial_specs(spec)
        if self.setup.preset.expansion is None:  # other draws have other numbers of latents
            latents = len(self.atlas(self.base_rule, first))
            trials = [replace(trial, latents=latents) for trial in trials]
        if len(trials) == 1:
            return trials[0].varied

        def run_trial(trial: SaeSpec) -> dict[str, Any]:
            inputs, targets = self._sae_tokens(trial.kind, first, self.setup.preset.trial_stride)
            with use_threads(self.setup.threads or 1):
                sae = train_sae(trial, inputs, targets, device=self.tower.device)
                return {**trial.varied, **asdict(quality(sae, inputs, targets))}

        tried = []
        for number, trial in enumerate(trials):
            if not (path := folder / f"{number:02d}.json").exists():
                self.setup.log(f"{spec.kind}, setting {number + 1} of {len(trials)}")
            tried.append((trial, load_or_make(path, lambda trial=trial: run_trial(trial))))  # type: ignore[misc]
        return choose_best(
            [(trial, Quality(found["r2"], found["active"], found["dead"])) for trial, found in tried]
        ).varied

    @torch.no_grad()
    def _sae_tokens(self, kind: str, seed: int, stride: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What an autoencoder reads and reconstructs: the layer's outputs; a transcoder reads its inputs."""
        store, layer, device = self.store(seed), self.tower.layer, self.tower.device
        rows = np.arange(0, len(store), stride)
        outputs, inputs, compute = [], [], linear_outputs(layer)
        for start in range(0, len(rows), 8192):
            q = store.gather(rows[start : start + 8192])
            outputs.append(compute(q.to(device)).cpu())
            if kind == "transcoder":
                inputs.append(q)
        return (torch.cat(inputs), torch.cat(outputs)) if kind == "transcoder" else (torch.cat(outputs), None)

    @contextmanager
    def _count_cost(self, name: str) -> Iterator[None]:
        """Add the CPU seconds and the time that pass inside to a file, also those of an interrupted run."""
        path, cpu, clock = self.folder / "costs" / f"{name}.json", time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            before = read_json(path, dict, ("cpu", "clock")) if path.exists() else {"cpu": 0.0, "clock": 0.0}
            spent = {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}
            if spent["cpu"] > 0.05 or not path.exists():  # finding that all is there costs nothing
                total = {key: before[key] + spent[key] for key in before}
                write_file(path, lambda file: file.write(json.dumps(total).encode()))

    def cost(self, name: str) -> dict[str, float]:
        """The seconds that something took, of the processor and by the clock."""
        path = self.folder / "costs" / f"{name}.json"
        return dict(read_json(path, dict, ("cpu", "clock"))) if path.exists() else {"cpu": 0.0, "clock": 0.0}

    def vectors_path(self, method: Method, seed: int, run: int = 0) -> Path:
        """Where the vectors of a dictionary are stored, which the stability compares."""
        return self.folder / "vectors" / f"{method.number:02d}-{seed}-{run}.safetensors"


def _number_of(rule: str) -> int:
    """The number of the method that is an atlas of this rule."""
    return next(method.number for method in METHODS.values() if method.kind == "atlas" and method.variant == rule)
