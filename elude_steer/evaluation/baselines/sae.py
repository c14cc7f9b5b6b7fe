"""Sparse autoencoders as baselines: seven kinds and a transcoder in one small network, and their training.

They are written by hand because overcomplete has neither Matryoshka nor a transcoder and needs torchvision. Where
overcomplete can be imported, tests compare the kinds that both have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines import SAE_KINDS, SaeKind
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs
from elude_steer.utils.progress import track

_NESTED = (1 / 8, 1 / 4, 1 / 2, 1)  # shares of the latents that each level of Matryoshka uses
_RELAXED = 1.0  # how far an archetype may leave the convex hull of the points
_BAND = 0.03  # width around JumpReLU's threshold in which it gets a gradient
_PENALTIES: dict[str, tuple[float, ...]] = {  # the paper's weights of L1, and of L0 for JumpReLU
    "vanilla": (1e-3, 5e-3, 2e-2),
    "transcoder": (1e-3, 5e-3, 2e-2),
    "jumprelu": (1e-4, 1e-3, 1e-2),
}
_PIECE = 262_144  # tokens that are summed at a time


@dataclass(frozen=True)
class SaeSpec:
    """Training settings of an SAE; the defaults are the paper's, but for `dead_after`.

    Attributes:
        kind: the kind of SAE.
        latents: number of latents.
        active: active latents per token, for kinds that fix their number; below one, a share of all latents
            (archetypal: 0.1).
        sparsity: weight of the sparsity penalty: L1 for vanilla and the transcoder, L0 for JumpReLU.
        revive: weight of the loss term that revives dead latents.
        dead_after: steps without firing after which a latent is dead; 0, as in the paper, revives those that fire for
            no token of the batch.
        learning_rate: the highest learning rate of Adam.
        epochs: passes over the tokens.
        batch_size: tokens per step.
        seed: for the initial weights and the order of tokens.
    """

    kind: SaeKind
    latents: int
    active: float = 20
    sparsity: float = 1e-3
    revive: float = 1e-4
    dead_after: int = 50
    learning_rate: float = 5e-4
    epochs: int = 50
    batch_size: int = 4096
    seed: int = 42

    def __post_init__(self) -> None:
        if self.kind not in SAE_KINDS:
            raise SpecError(f"an SAE is one of {', '.join(SAE_KINDS)}, not '{self.kind}'.")
        if self.latents < 1 or self.epochs < 1 or self.batch_size < 2 or self.active <= 0:
            raise SpecError("an SAE needs latents, epochs and active latents, and batches of at least 2 tokens.")

    @property
    def count(self) -> int:
        """Number of latents that fire for a token."""
        active = self.active * self.latents if self.active < 1 else self.active
        return max(1, min(self.latents, round(active)))

    @property
    def varied(self) -> dict[str, float]:
        """The settings that trials vary."""
        return {"learning_rate": self.learning_rate, "revive": self.revive, "sparsity": self.sparsity}


class Sae(nn.Module):
    """An autoencoder of a layer's output; a transcoder maps the layer's input to its output.

    Internally, inputs and targets are centred and scaled to unit variance. Codes are returned in the scale of the
    target, since every row of `dictionary` has length 1.
    """

    def __init__(self, spec: SaeSpec, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)  # on the CPU: the same weights for every device
        device = targets.device
        for name, values in (("input", inputs), ("target", targets)):
            mean, spread = _centre_and_scale(values)
            self.register_buffer(f"{name}_mean", mean)
            self.register_buffer(f"{name}_scale", spread)
        d_in, d_out = inputs.shape[1], targets.shape[1]
        atoms = F.normalize(torch.randn(spec.latents, d_out, generator=generator), dim=1).to(device)
        if spec.kind == "archetypal":
            points = (_archetypes(targets, spec, generator) - self.target_mean) / self.target_scale
            self.register_buffer("points", points)
            self.mixture = nn.Parameter(torch.eye(spec.latents, len(points), device=device))
            self.relaxed = nn.Parameter(torch.zeros(spec.latents, d_out, device=device))
            self.log_radius = nn.Parameter(torch.zeros((), device=device))
            atoms = F.normalize(points[torch.arange(spec.latents) % len(points)], dim=1)
        else:
            self.atoms = nn.Parameter(atoms)
        drawn = torch.randn(spec.latents, d_in, generator=generator) / math.sqrt(d_in) if d_in != d_out else None
        tied = atoms if drawn is None else drawn.to(device)
        if spec.kind != "matching_pursuit":
            self.encoder = nn.Parameter(tied.clone())
            self.encoder_bias = nn.Parameter(torch.zeros(spec.latents, device=device))
        if spec.kind == "jumprelu":
            self.log_threshold = nn.Parameter(torch.full((spec.latents,), math.log(0.1), device=device))
        self.register_buffer(
            "threshold", torch.tensor(-1.0, device=device)
        )  # of batch_topk and matryoshka in eval mode
        self.input_mean: torch.Tensor
        self.input_scale: torch.Tensor
        self.target_mean: torch.Tensor
        self.target_scale: torch.Tensor
        self.threshold: torch.Tensor
        self.points: torch.Tensor
        if spec.kind == "archetypal":
            # Many archetypes are active at once and none has length 1: scale the encoder so that sums have the right
            # length.
            sample = inputs[:: max(1, len(inputs) // 2048)]
            with torch.no_grad():
                output, target = self(sample)[1] @ self.dictionary(), (sample - self.target_mean) / self.target_scale
                self.encoder.mul_(((output * target).sum() / output.square().sum().clamp_min(1e-12)).clamp_min(1e-6))

    @classmethod
    def from_state(cls, spec: SaeSpec, state: Mapping[str, torch.Tensor]) -> Sae:
        """A trained SAE from its `state_dict`; needs no tokens."""
        sae = cls.__new__(cls)
        nn.Module.__init__(sae)
        sae.spec = spec
        for name, tensor in state.items():
            if name.endswith(("_mean", "_scale")) or name in ("points", "threshold"):
                sae.register_buffer(name, tensor)
            else:
                setattr(sae, name, nn.Parameter(tensor))
        return sae.eval().requires_grad_(False)

    def dictionary(self) -> torch.Tensor:
        """The latents' directions, `(latents, d_out)`, each of length 1; archetypes keep their own length."""
        if self.spec.kind != "archetypal":
            return F.normalize(self.atoms, dim=1)
        share = self.mixture.clamp_min(0)
        share = share / share.sum(1, keepdim=True).clamp_min(1e-8)
        relaxed = self.relaxed * (_RELAXED / self.relaxed.norm(dim=1, keepdim=True).clamp_min(_RELAXED))
        return (share @ self.points + relaxed) * self.log_radius.exp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations before and after they are made sparse, `(tokens, latents)` each."""
        x = (x.float() - self.input_mean) / self.input_scale
        if self.spec.kind == "matching_pursuit":
            return self._pursue(x)
        before = x @ self.encoder.T + self.encoder_bias
        return before, self._sparsify(before)

    def _sparsify(self, before: torch.Tensor) -> torch.Tensor:
        kind, fired = self.spec.kind, before.relu()
        if kind in ("vanilla", "transcoder"):
            return fired
        if kind == "jumprelu":
            return _JumpRelu.apply(before, self.log_threshold.exp())
        if kind in ("topk", "archetypal"):
            top = fired.topk(self.spec.count, dim=-1)
            return torch.zeros_like(fired).scatter(-1, top.indices, top.values)
        threshold = self.threshold
        if self.training:  # `count` latents per token on average over the batch
            threshold = fired.flatten().topk(self.spec.count * len(fired)).values[-1].detach()
            self.threshold.copy_(threshold if self.threshold < 0 else 0.9 * self.threshold + 0.1 * threshold)
        return fired * (fired >= threshold.clamp_min(1e-12))

    def _pursue(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Matching pursuit: greedily pick one latent after another, each for the residual of those before."""
        atoms, residual = self.dictionary(), x
        codes = torch.zeros(len(x), len(atoms), device=x.device)
        first = None
        for _ in range(self.spec.count):
            match = residual @ atoms.T
            first = match if first is None else first
            value, index = match.max(1)
            value = value.clamp_min(0)
            codes = codes.scatter_add(1, index[:, None], value[:, None])
            residual = residual - value[:, None] * atoms[index]
        return first if first is not None else codes, codes

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Codes of tokens, `(…, latents)`, in the scale of the target."""
        flat = x.reshape(-1, x.shape[-1])
        return (self(flat)[1] * self.target_scale).reshape(*x.shape[:-1], -1)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Reconstruct the target from codes, `(…, d_out)`."""
        return codes @ self.dictionary() + self.target_mean


def _centre_and_scale(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and overall spread of tokens, summed in pieces: millions of tokens in double precision are too many."""
    pieces = values.split(_PIECE)
    if len(pieces) == 1:
        mean = values.double().mean(0)
        variance = (values.double() - mean).square().mean()
    else:
        mean = torch.stack([piece.double().sum(0) for piece in pieces]).sum(0) / len(values)
        squares = torch.stack([(piece.double() - mean).square().sum() for piece in pieces])
        variance = squares.sum() / values.numel()
    return mean.float(), variance.sqrt().clamp_min(1e-12).float()


class _JumpRelu(torch.autograd.Function):
    """x above a threshold, else 0; values close to the threshold give it a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, threshold)
        return x * (x > threshold)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, threshold = ctx.saved_tensors
        near = ((x - threshold).abs() < _BAND / 2).float()
        return grads[0] * (x > threshold), -(threshold / _BAND * near * grads[0]).sum(0)


class _Fires(torch.autograd.Function):
    """1 above a threshold, else 0; the threshold gets its gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, threshold)
        return (x > threshold).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, threshold = ctx.saved_tensors
        near = ((x - threshold).abs() < _BAND / 2).float()
        return torch.zeros_like(x), -(near / _BAND * grads[0]).sum(0)


def train_sae(
    spec: SaeSpec,
    inputs: torch.Tensor,
    targets: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
    on_epoch: Callable[[int], object] | None = None,
) -> Sae:
    """Train an SAE; on one thread of a CPU, the same spec and tokens give the same bits.

    Args:
        spec: the kind and the training settings.
        inputs: `(tokens, d)` the layer's outputs, or for a transcoder the layer's inputs.
        targets: `(tokens, d_out)` what the SAE should reconstruct; by default its inputs.
        device: where it is trained, by default where the tokens are; batches are moved there one by one.
        on_epoch: called with 1 after every epoch.
    """
    targets = inputs if targets is None else targets
    if len(inputs) < 2 or len(inputs) != len(targets):
        raise SpecError(f"an SAE needs at least two tokens, and as many targets, not {len(inputs)} and {len(targets)}.")
    if not all(bool(torch.isfinite(piece).all()) for part in (inputs, targets) for piece in part.split(_PIECE)):
        raise SpecError("the tokens are not finite numbers; an SAE cannot learn from them.")
    place = inputs.device if device is None else device
    sae = Sae(spec, inputs, targets).to(place)
    generator = torch.Generator().manual_seed(spec.seed)
    optimizer = torch.optim.Adam(sae.parameters(), lr=spec.learning_rate)
    size = min(spec.batch_size, len(inputs))
    total = spec.epochs * (len(inputs) // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, total))
    silent = torch.zeros(spec.latents, device=place)  # steps since each latent fired
    for _ in track(range(spec.epochs), "training", "epochs"):
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            loss, codes = _loss(sae, inputs[rows].to(place), targets[rows].to(place), silent)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            silent = torch.where((codes > 0).any(0), 0, silent + 1)
        if on_epoch:
            on_epoch(1)
    return sae.eval().requires_grad_(False)


def _learning_rate_factor(step: int, total: int) -> float:
    """Warm up for a twentieth of the steps, then decay along a cosine."""
    rise = max(1, total // 20)
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


def _loss(
    sae: Sae, inputs: torch.Tensor, targets: torch.Tensor, silent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch and its codes."""
    spec, atoms = sae.spec, sae.dictionary()
    scaled = (targets.float() - sae.target_mean) / sae.target_scale
    before, codes = sae(inputs)
    if spec.kind == "matryoshka":
        ends = [max(1, round(share * spec.latents)) for share in _NESTED]
        parts = [(codes[:, :end] @ atoms[:end] - scaled).square().mean() for end in ends]
        loss = torch.stack(parts).mean()
    else:
        loss = (codes @ atoms - scaled).square().mean()
    if spec.kind in ("vanilla", "transcoder"):
        loss = loss + spec.sparsity * codes.sum(1).mean()
    if spec.kind == "jumprelu":
        fires = _Fires.apply(before, sae.log_threshold.exp())
        loss = loss + spec.sparsity * fires.sum(1).mean()
    dead = silent > spec.dead_after if spec.dead_after else ~(codes > 0).any(0)
    if dead.any():
        loss = loss - spec.revive * before[:, dead].mean()
    return loss, codes.detach()


def _archetypes(targets: torch.Tensor, spec: SaeSpec, generator: torch.Generator) -> torch.Tensor:
    """The points that archetypes are mixtures of: as many cluster centres of the tokens as there are latents."""
    from sklearn.cluster import MiniBatchKMeans

    rows = torch.randperm(len(targets), generator=generator)[: 20 * spec.latents]
    count = min(spec.latents, len(rows))
    means = MiniBatchKMeans(count, random_state=spec.seed, batch_size=4096, n_init=1, max_iter=20)
    return torch.from_numpy(means.fit(targets[rows].float().cpu().numpy()).cluster_centers_).to(targets.device)


@dataclass(frozen=True)
class Quality:
    """How well an SAE fits its tokens.

    Attributes:
        r2: share of the target's variance that it reconstructs.
        active: mean number of latents that fire for a token.
        dead: share of latents that never fire.
    """

    r2: float
    active: float
    dead: float


@torch.no_grad()
def quality(sae: Sae, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Quality:
    """Measure an SAE on tokens, in batches that bound the memory."""
    targets = inputs if targets is None else targets
    place, error, fired = sae.target_mean.device, 0.0, 0
    ever = torch.zeros(sae.spec.latents, dtype=torch.bool)
    for x, y in zip(inputs.split(8192), targets.split(8192), strict=True):
        codes = sae.encode(x.to(place))
        error += float((sae.decode(codes) - y.to(place).float()).double().square().sum())
        fired += int((codes > 0).sum())
        ever |= (codes > 0).any(0).cpu()
    if len(targets) <= _PIECE:
        spread = float((targets.double() - targets.double().mean(0)).square().sum())
    else:
        spread = float(_centre_and_scale(targets)[1].double().square()) * targets.numel()
    return Quality(
        1 - error / spread if spread else float(error == 0), fired / len(inputs), float((~ever).double().mean())
    )


def make_grid(spec: SaeSpec, rates: Sequence[float] = (1e-4, 5e-4, 1e-3)) -> list[SaeSpec]:
    """Nine variants of a spec, with the paper's values.

    They vary the learning rate and the weight of the sparsity penalty. Kinds with a fixed number of active latents have
    no such penalty and vary `revive` instead. The paper crosses all three settings: `make_paper_grid`.
    """
    sparse = spec.kind in _PENALTIES
    name, values = ("sparsity", _PENALTIES[spec.kind]) if sparse else ("revive", (1e-5, 1e-4, 1e-3))
    points: list[dict[str, Any]] = [{"learning_rate": rate, name: value} for rate in rates for value in values]
    return [replace(spec, **point) for point in points]


def make_paper_grid(spec: SaeSpec) -> list[SaeSpec]:
    """The paper's grid: learning rate times weight of dead latents, times weight of the sparsity where there is one.

    27 points for vanilla, JumpReLU and the transcoder, nine for the others.
    """
    rates, weights = (1e-4, 5e-4, 1e-3), (1e-5, 1e-4, 1e-3)
    penalties = _PENALTIES.get(spec.kind, (spec.sparsity,))
    return [
        replace(spec, learning_rate=rate, revive=weight, sparsity=penalty)
        for rate, weight, penalty in product(rates, weights, penalties)
    ]


def choose_best(tried: Sequence[tuple[SaeSpec, Quality]]) -> SaeSpec:
    """Choose as the paper does: by the mean of 1 - error and 1 - active latents, each scaled to its range."""

    def scaled(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    tried = [(spec, q) for spec, q in tried if math.isfinite(q.r2)] or list(tried)  # leave out those that diverged
    errors, active = scaled([1 - q.r2 for _, q in tried]), scaled([q.active for _, q in tried])
    scores = [(1 - error) / 2 + (1 - count) / 2 for error, count in zip(errors, active, strict=True)]
    return tried[scores.index(max(scores))][0]


def try_settings(spec: SaeSpec, tokens: torch.Tensor, rates: Sequence[float]) -> dict[str, float]:
    """The settings of the best of nine trials, each of half the epochs on a sixth of the tokens.

    Args:
        spec: what will be trained.
        tokens: `(tokens, d)` the layer's outputs.
        rates: three learning rates.
    """
    sample, short = tokens[::6], replace(spec, epochs=max(1, spec.epochs // 2))
    tried = [(one, quality(train_sae(one, sample), sample)) for one in make_grid(short, rates)]
    return choose_best(tried).varied


def from_sae(name: str, sae: Sae, layer: nn.Module) -> Dictionary:
    """The latents of an SAE of the layer's output; those of a transcoder read the layer's input."""
    transcoder, atoms = sae.spec.kind == "transcoder", sae.dictionary()
    outputs_for = linear_outputs(layer)

    def read(q: torch.Tensor) -> torch.Tensor:
        return sae.encode(q if transcoder else outputs_for(q))

    return Dictionary(name, read, atoms, sae.target_mean, atoms, torch.zeros(len(atoms), dtype=torch.long))
