"""Every kind of SAE has the sparsity of its name, learns planted concepts, and is reproducible."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from elude_steer import toyland
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines import SAE_KINDS
from elude_steer.evaluation.baselines import sae as sae_module
from elude_steer.evaluation.baselines.sae import (
    Quality,
    Sae,
    SaeSpec,
    choose_best,
    from_sae,
    make_grid,
    make_paper_grid,
    quality,
    train_sae,
    try_settings,
)
from elude_steer.utils import optional
from tests.helpers.checks import import_problem, run_in_own_environment, run_script

kinds = pytest.mark.parametrize("kind", SAE_KINDS)


def planted(tokens=3000, d=24, concepts=32, active=3, seed=0):
    """Tokens that are sums of a few of many directions."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.nn.functional.normalize(torch.randn(concepts, d, generator=generator), dim=1)
    chosen = torch.rand(tokens, concepts, generator=generator).topk(active, dim=1).indices
    codes = torch.zeros(tokens, concepts).scatter(1, chosen, 1 + torch.rand(tokens, active, generator=generator))
    return codes @ atoms + 0.7, atoms


def spec_of(kind, **given):
    active = 0.1 if kind == "archetypal" else 3
    own = {"latents": 40, "active": active, "epochs": 60, "batch_size": 256, "learning_rate": 5e-3, "sparsity": 4e-2}
    return SaeSpec(kind, **{**own, **given})


def targets_of(kind, x):
    return (torch.cat([x, x[:, :4].sin()], 1), x) if kind == "transcoder" else (x, None)


@kinds
def test_it_learns_planted_concepts(kind):
    x, _ = planted()
    inputs, targets = targets_of(kind, x)
    found = quality(train_sae(spec_of(kind), inputs, targets), inputs, targets)
    assert found.r2 > 0.8
    assert found.active < 14
    assert quality(Sae(spec_of(kind), inputs, x if targets is None else targets).eval(), inputs, targets).r2 < found.r2


@kinds
def test_the_same_seed_gives_the_same_bits(kind):
    x, _ = planted(400)
    inputs, targets = targets_of(kind, x)
    spec = spec_of(kind, epochs=3)
    one, same, other = (train_sae(s, inputs, targets) for s in (spec, spec, replace(spec, seed=1)))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(one.encode(inputs), other.encode(inputs))


@pytest.mark.parametrize("kind", ["topk", "matching_pursuit", "archetypal"])
def test_no_more_latents_fire_than_allowed(kind):
    x, _ = planted(300)
    sae = train_sae(spec_of(kind, epochs=2), x)
    assert int((sae.encode(x) > 0).sum(1).max()) <= sae.spec.count
    assert spec_of("archetypal").count == 4


@pytest.mark.parametrize("kind", ["batch_topk", "matryoshka"])
def test_batch_kinds_reach_their_mean_count_and_tokens_do_not_affect_each_other(kind):
    x, _ = planted(600)
    sae = train_sae(spec_of(kind, epochs=20), x)
    assert float((sae.encode(x) > 0).float().sum(1).mean()) == pytest.approx(3, rel=0.25)
    assert torch.allclose(sae.encode(x)[:5], sae.encode(x[:5]), atol=1e-5)
    assert sae.threshold > 0


def test_the_first_latents_of_matryoshka_reconstruct_more():
    x, _ = planted()
    found = {}
    for kind in ("matryoshka", "batch_topk"):
        sae = train_sae(spec_of(kind), x)
        codes = sae.encode(x)
        codes[:, 10:] = 0
        found[kind] = float((sae.decode(codes) - x).square().mean())
    assert found["matryoshka"] < found["batch_topk"]


def test_matching_pursuit_takes_the_best_match_first():
    x, _ = planted(50)
    sae = train_sae(spec_of("matching_pursuit", epochs=1, active=1, latents=6), x)
    unit = (x - sae.target_mean) / sae.target_scale @ sae.dictionary().T
    codes = sae.encode(x) / sae.target_scale
    assert torch.equal(codes.argmax(1), unit.argmax(1))
    assert torch.allclose(codes.max(1).values, unit.max(1).values.clamp_min(0), atol=1e-5)


def test_archetypes_stay_close_to_the_tokens():
    x, _ = planted(800)
    sae = train_sae(spec_of("archetypal", epochs=10), x)
    atoms = sae.dictionary() / sae.log_radius.exp()
    assert (
        float(torch.cdist(atoms, sae.points).min(1).values.max())
        <= float(torch.cdist(sae.points, sae.points).max()) + 1
    )


def test_jumprelu_is_zero_below_its_threshold_and_the_threshold_learns():
    x, _ = planted(500)
    sae = train_sae(spec_of("jumprelu", epochs=5), x)
    codes, threshold = sae.encode(x) / sae.target_scale, sae.log_threshold.exp()
    assert bool(((codes == 0) | (codes > threshold)).all())
    assert float((sae.log_threshold - sae.log_threshold[0]).abs().max()) > 0


def test_codes_are_in_the_scale_of_the_target():
    """Decoding multiplies codes with directions, as steering does."""
    x, _ = planted(200)
    sae = train_sae(spec_of("topk", epochs=2), 50 * x)
    codes = sae.encode(50 * x)
    assert torch.allclose(sae.decode(codes), codes @ sae.dictionary() + sae.target_mean)
    assert torch.allclose(sae.dictionary().norm(dim=1), torch.ones(40), atol=1e-5)
    assert sae.encode((50 * x).reshape(4, 50, -1)).shape == (4, 50, 40)


@pytest.mark.parametrize("given", [{"kind": "sparse"}, {"latents": 0}, {"epochs": 0}, {"batch_size": 1}, {"active": 0}])
def test_impossible_specs_are_refused(given):
    with pytest.raises(SpecError, match="an SAE"):
        SaeSpec(**{"kind": "topk", "latents": 4, **given})


def test_the_grid_and_the_choice_follow_the_paper():
    assert len(make_grid(spec_of("topk"))) == 9
    assert {one.sparsity for one in make_grid(spec_of("vanilla"))} == {1e-3, 5e-3, 2e-2}
    assert {s.sparsity for s in make_grid(spec_of("jumprelu"))} == {1e-4, 1e-3, 1e-2}
    one, two, three = (spec_of("topk", seed=i) for i in range(3))
    tried = [(one, Quality(0.9, 20, 0)), (two, Quality(0.88, 4, 0)), (three, Quality(0.1, 2, 0))]
    assert choose_best(tried) == two


def test_settings_are_tried_on_a_part_of_the_tokens():
    tokens, _ = planted(1800)
    spec = spec_of("topk", batch_size=50)
    found = try_settings(spec, tokens, (1e-9, 1e-2, 1e-8))
    assert found["learning_rate"] == 1e-2  # with the others nothing is learnt
    assert set(found) == {"learning_rate", "revive", "sparsity"}


def test_overcomplete_agrees_given_the_same_weights(tmp_path):
    if not optional.is_installed("overcomplete"):
        pytest.skip("overcomplete is not installed: it needs torchvision; -m slow tests it in its own environment")
    if cause := import_problem("overcomplete"):
        pytest.skip(f"overcomplete cannot be imported: {cause}")
    run_script(sys.executable, "overcomplete_check.py", tmp_path)


@pytest.mark.slow
def test_overcomplete_in_its_own_environment():
    run_in_own_environment("overcomplete_check.py", "baselines", "matplotlib<3.11")  # 0.3.0 needs an older one


def test_unusable_tokens_are_refused():
    x = torch.randn(20, 4)
    for given, targets, line in ((x[:0], None, "at least two tokens"), (x, x[:5], "as many targets, not 20 and 5"),
                                 (x * torch.nan, None, "not finite")):  # fmt: skip
        with pytest.raises(SpecError, match=line):
            train_sae(SaeSpec("topk", 8, epochs=1), given, targets)


def test_a_diverged_sae_is_not_the_best():
    specs = [SaeSpec("topk", 8, seed=seed) for seed in (1, 2)]
    assert choose_best([(specs[0], Quality(math.nan, 1.0, 0.0)), (specs[1], Quality(0.5, 3.0, 0.0))]) is specs[1]


def test_quality_of_constant_tokens_is_finite():
    x = torch.ones(50, 4)
    sae = train_sae(SaeSpec("topk", 8, epochs=1, batch_size=16), x)
    assert math.isfinite(quality(sae, x).r2)


@pytest.fixture(scope="module")
def layer_inputs(steerer):
    images = [scene.image for scene in toyland.scenes(9, 12)]
    return torch.cat([steerer.vlm.encode([image])[0].flatten(0, 1) for image in images]).clone()


def test_latents_of_an_sae_read_the_output_of_the_layer(steerer, layer_inputs):
    layer = steerer.vlm.layer
    with torch.no_grad():
        outputs = layer(layer_inputs)
    sae = train_sae(SaeSpec("topk", 200, epochs=3, batch_size=256, learning_rate=3e-3), outputs)
    dictionary = from_sae("topk SAE", sae, layer)
    with torch.no_grad():
        assert torch.equal(dictionary.read(layer_inputs), sae.encode(layer(layer_inputs)))
        assert torch.allclose(dictionary.reconstruct(layer_inputs), sae.decode(sae.encode(layer(layer_inputs))))
    assert dictionary.name == "topk SAE"


def test_latents_of_a_transcoder_read_the_input_of_the_layer(steerer, layer_inputs):
    layer = steerer.vlm.layer
    with torch.no_grad():
        outputs = layer(layer_inputs)
    sae = train_sae(SaeSpec("transcoder", 64, epochs=1, batch_size=256), layer_inputs, outputs)
    dictionary = from_sae("transcoder", sae, layer)
    assert torch.equal(dictionary.read(layer_inputs), sae.encode(layer_inputs))
    assert dictionary.write.shape == (64, layer.out_features)


def test_an_sae_is_on_the_device_of_its_tokens():
    """The meta device refuses tensors from another device, as a GPU does."""
    inputs = torch.zeros(50, 4, device="meta")
    for kind in sorted(set(SAE_KINDS) - {"archetypal"}):  # its points are rows that must hold values
        sae = Sae(SaeSpec(kind, 8), inputs, inputs)
        assert {tensor.device.type for tensor in (*sae.parameters(), *sae.buffers())} == {"meta"}
        if kind not in ("batch_topk", "matryoshka"):
            assert sae.encode(inputs).shape == (50, 8)


@kinds
def test_a_trained_sae_comes_back_from_its_file(kind):
    inputs, targets = targets_of(kind, planted(tokens=300)[0])
    trained = train_sae(spec_of(kind, epochs=1), inputs, targets)
    loaded = Sae.from_state(trained.spec, trained.state_dict())
    assert torch.equal(loaded.encode(inputs), trained.encode(inputs))
    assert torch.equal(loaded.dictionary(), trained.dictionary()) and not loaded.training
    assert quality(loaded, inputs, targets) == quality(trained, inputs, targets)


def test_the_paper_revives_what_is_dead_in_the_batch():
    """The term is the mean pre-activation of latents that fire for no token of the batch, times its weight."""
    x, _ = planted(tokens=64)
    sae = Sae(spec_of("topk", latents=200, active=2, dead_after=0, revive=0.5), x, x).train()
    before, codes = sae(x)
    dead = (codes == 0).all(0)
    assert 0 < dead.sum() < 200
    plain = (codes @ sae.dictionary() - (x - sae.target_mean) / sae.target_scale).square().mean()
    loss, _ = sae_module._loss(sae, x, x, torch.zeros(200))
    assert loss.item() == pytest.approx((plain - 0.5 * before[:, dead].mean()).item(), rel=1e-5)
    sae.spec = replace(sae.spec, dead_after=50)  # nothing has been silent for so long
    assert sae_module._loss(sae, x, x, torch.zeros(200))[0].item() == pytest.approx(plain.item(), rel=1e-5)


def test_the_paper_s_grid_crosses_all_settings():
    for kind, count in {"vanilla": 27, "jumprelu": 27, "transcoder": 27, "topk": 9, "archetypal": 9}.items():
        grid = make_paper_grid(spec_of(kind))
        assert len({tuple(spec.varied.values()) for spec in grid}) == len(grid) == count


def test_many_tokens_are_summed_in_pieces(monkeypatch):
    x, _ = planted(tokens=500)
    whole = sae_module._centre_and_scale(x)
    trained = train_sae(spec_of("topk", epochs=2), x)
    measured = quality(trained, x)
    monkeypatch.setattr(sae_module, "_PIECE", 64)
    for one, other in zip(whole, sae_module._centre_and_scale(x), strict=True):
        assert torch.allclose(one, other, rtol=1e-6)
    assert quality(trained, x).r2 == pytest.approx(measured.r2, rel=1e-6)
