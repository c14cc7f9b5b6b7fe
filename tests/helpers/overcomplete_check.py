"""Check that our autoencoders and measures agree with overcomplete; runs in an environment with overcomplete.

With the same weights in both, codes, reconstructions and gradients are compared on the same tokens. Comments name the
intended differences where they are corrected. Overcomplete has no Matryoshka, no transcoder and no effective rank;
test_measures.py compares the effective rank with closed forms.
"""

import copy
from importlib.metadata import version

import torch
from checks import register_missing_operators

D, LATENTS, ACTIVE, TOKENS = 24, 64, 5, 2000
_differences: list[tuple[str, float]] = []
_changed_counts: list[int] = []


def assert_close(what, ours, theirs, most=2e-5):
    """Note the largest difference, relative to the root mean square of the values."""
    ours, theirs = (torch.as_tensor(values).detach().double() for values in (ours, theirs))
    assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    difference = float((ours - theirs).abs().max() / theirs.square().mean().sqrt().clamp_min(1e-12))
    _differences.append((what, difference))
    assert difference < most, f"{what}: {difference:.2e}"


def same_latents(what, ours, theirs):
    """Rounding may change the choice between equally good latents, in at most one token of a thousand."""
    other = ((ours != 0) != (theirs != 0)).any(1)
    _changed_counts.append(int(other.sum()))
    assert int(other.sum()) <= len(ours) // 1000, f"{what}: {int(other.sum())} tokens have other latents"
    return ~other


def tokens(seed=0):
    """Sums of a few of many directions, neither centred nor scaled to one."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.nn.functional.normalize(torch.randn(48, D, generator=generator), dim=1)
    chosen = torch.rand(TOKENS, 48, generator=generator).topk(3, dim=1).indices
    codes = torch.zeros(TOKENS, 48).scatter(1, chosen, 1 + torch.rand(TOKENS, 3, generator=generator))
    return 3 * codes @ atoms + torch.linspace(-1, 4, D) + 0.1 * torch.randn(TOKENS, D, generator=generator)


def trained(kind, x, **given):
    from elude_steer.evaluation.baselines.sae import SaeSpec, train_sae

    active = ACTIVE / LATENTS if kind == "archetypal" else ACTIVE
    own = {"latents": LATENTS, "active": active, "epochs": 8, "batch_size": 250, "learning_rate": 5e-3}
    return train_sae(SaeSpec(kind, **{**own, "sparsity": 1e-2, **given}), x)


def with_our_weights(ours, name, *, raw=True, **options):
    """An autoencoder of overcomplete with the weights of ours.

    Ours centres and scales tokens, theirs does not. For raw tokens, the mean goes into the bias and codes stay in the
    tokens' units, as our outputs do; without `raw`, theirs gets the centred and scaled tokens.
    """
    from overcomplete import sae

    if name == "RATopKSAE":
        options["points"] = ours.points
    else:
        options["dictionary_params"] = {"initializer": ours.dictionary().numpy()}
    made = getattr(sae, name)(D, ours.spec.latents, **options)
    scale = float(ours.target_scale) if raw else 1.0
    with torch.no_grad():
        if name == "RATopKSAE":
            made.dictionary.W.copy_(ours.mixture)
            made.dictionary.Relax.copy_(ours.relaxed)
            made.dictionary.multiplier.copy_(ours.log_radius)
        if name != "MpSAE":
            linear = made.encoder.final_block[0]
            linear.weight.copy_(ours.encoder)
            linear.bias.copy_(scale * ours.encoder_bias - (ours.encoder @ ours.input_mean if raw else 0))
        if name == "JumpSAE":
            made.thresholds.copy_(ours.log_threshold + torch.tensor(scale).log())  # both keep its logarithm
    return made


def check_codes(kind, name, x, **options):
    """What ours encodes and decodes, and what theirs does."""
    ours = trained(kind, x)
    theirs = with_our_weights(ours, name, **options).eval()
    given = x - ours.input_mean if kind == "matching_pursuit" else x  # it has no bias to put the mean into
    with torch.no_grad():
        codes = theirs.encode(given)[1]
        made = theirs.decode(codes) + ours.target_mean  # theirs has no bias behind the dictionary
    kept = same_latents(kind, ours.encode(x), codes)
    assert 0 < int((codes[kept] > 0).sum()) < codes.numel()
    assert_close(f"{kind}: dictionary", ours.dictionary(), theirs.get_dictionary())
    assert_close(f"{kind}: codes", ours.encode(x)[kept], codes[kept])
    assert_close(f"{kind}: reconstructions", ours.decode(ours.encode(x))[kept], made[kept])
    return ours


def check_batch_topk(x):
    """Batch by batch while training, the running threshold, and what it gives afterwards.

    Their top_k counts the latents of a whole batch, ours those of a token. Before any training ours lets all positive
    latents through and theirs refuses to encode.
    """
    ours = trained("batch_topk", x)
    ours.threshold.fill_(-1)
    theirs = with_our_weights(ours, "BatchTopKSAE", top_k=ACTIVE * 250)
    scale = ours.target_scale
    ours.train(), theirs.train()
    with torch.no_grad():
        for batch in x.split(250):
            codes, expected = ours.encode(batch), theirs.encode(batch)[1]
            assert int((codes > 0).sum()) == int((expected > 0).sum()) == ACTIVE * 250
            kept = same_latents("batch_topk", codes, expected)
            assert_close("batch_topk: codes of a batch in training", codes[kept], expected[kept])
        assert_close("batch_topk: running threshold", ours.threshold * scale, theirs.running_threshold)
        ours.eval(), theirs.eval()
        codes, expected = ours.encode(x), theirs.encode(x)[1]
        kept = same_latents("batch_topk", codes, expected)
        assert_close("batch_topk: codes afterwards", codes[kept], expected[kept])
        made = theirs.decode(expected) + ours.target_mean
        assert_close("batch_topk: reconstructions", ours.decode(codes)[kept], made[kept])


def check_pursuit_without_a_match(x):
    """Where no direction points the way of what is left, ours stops, and theirs takes a negative amount of the best.

    With few directions that happens; tokens to which it does not are the same.
    """
    ours = trained("matching_pursuit", x, latents=6, active=4, epochs=2)
    theirs = with_our_weights(ours, "MpSAE", k=4).eval()
    with torch.no_grad():
        codes = ours.encode(x)
        each = [with_our_weights(ours, "MpSAE", k=k).eval().encode(x - ours.input_mean)[1] for k in range(1, 5)]
        expected = theirs.encode(x - ours.input_mean)[1]
    steps = torch.stack([now - before for now, before in zip(each, [torch.zeros_like(each[0]), *each], strict=False)])
    matched = (steps > -1e-6).all(0).all(1)
    assert 0 < int(matched.sum()) < len(x)
    assert_close("matching_pursuit: codes where all match, few directions", codes[matched], expected[matched])
    assert bool((codes >= 0).all())
    print(f"tokens for which theirs takes a negative amount, 6 directions: {1 - float(matched.double().mean()):.3f}")


def check_gradients(kind, name, x, **options):
    """Of the squared error, from the same weights; tokens are centred and scaled for both.

    Ours differentiates through the length that it divides directions by; theirs divides the weights themselves and
    does not. So ours is the part of theirs that is at right angles to the direction.
    """
    ours = copy.deepcopy(trained(kind, x)).requires_grad_(True).train()
    theirs = with_our_weights(ours.requires_grad_(False), name, raw=False, **options).train()
    ours.requires_grad_(True)
    batch = x[:250]
    wanted = (batch - ours.input_mean) / ours.input_scale
    (ours(batch)[1] @ ours.dictionary() - wanted).square().mean().backward()
    (theirs(wanted)[2] - wanted).square().mean().backward()
    gradient, unit = theirs.dictionary._weights.grad, ours.dictionary().detach()
    length = ours.atoms.detach().norm(dim=1, keepdim=True)
    across = (gradient - (gradient * unit).sum(1, keepdim=True) * unit) / length
    assert_close(f"{kind}: gradient of the dictionary", ours.atoms.grad, across)
    if kind != "matching_pursuit":
        linear = theirs.encoder.final_block[0]
        assert_close(f"{kind}: gradient of the encoder", ours.encoder.grad, linear.weight.grad)
        assert_close(f"{kind}: gradient of its bias", ours.encoder_bias.grad, linear.bias.grad)
    if kind == "jumprelu":  # their rectangle is 1 / bandwidth high and they divide by the bandwidth once more
        assert float(ours.log_threshold.grad.abs().max()) > 0
        assert_close(
            "jumprelu: gradient of thresholds", ours.log_threshold.grad, theirs.thresholds.grad * theirs.bandwidth
        )


def check_heaviside():
    """The count that JumpReLU is held to, and how thresholds learn from it."""
    from overcomplete.sae.jump_sae import heaviside
    from overcomplete.sae.kernels import rectangle_kernel

    from elude_steer.evaluation.baselines.sae import _BAND, _Fires

    before, weights = torch.randn(500, 16) * 0.2, torch.randn(500, 16)
    found = []
    for count in (_Fires.apply, lambda a, b: heaviside(a, b, rectangle_kernel, torch.tensor(_BAND))):
        threshold = torch.full((16,), 0.1, requires_grad=True)
        fires = count(before, threshold)
        (fires * weights).sum().backward()
        found.append((fires.detach(), threshold.grad))
    assert_close("jumprelu: latents counted", found[0][0], found[1][0])
    assert_close("jumprelu: gradient of the count", found[0][1], found[1][1] * _BAND)


def check_measures(sae, x):
    """Ours take their digits in float64, theirs in float32."""
    from overcomplete import metrics

    from elude_steer.evaluation.baselines.sae import quality
    from elude_steer.evaluation.measures.faithfulness import R2
    from elude_steer.evaluation.measures.geometry import collinearity
    from elude_steer.evaluation.measures.stability import stability

    codes = sae.encode(x)
    made, found = sae.decode(codes), quality(sae, x)

    def r2_of(true, made):
        r2 = R2()
        for a, b in zip(true.split(300), made.split(300), strict=True):
            r2.add(a, b)
        return r2.value

    # Theirs takes one mean over all dimensions, ours one of each: the same where every dimension's is 0.
    mean = x.mean(0)
    assert_close("R2, centred", r2_of(x - mean, made - mean), metrics.r2_score(x - mean, made - mean))
    ours, theirs = r2_of(x, made), float(metrics.r2_score(x, made))
    narrower = x.double().var(0, correction=0).mean() / x.double().var(correction=0)
    assert_close("R2 over their spread", 1 - (1 - ours) * narrower, theirs)
    assert_close("R2 of quality()", found.r2, ours)
    print(f"R2 of tokens that are not centred: ours {ours:.4f}, theirs {theirs:.4f}")

    assert_close("active latents", found.active, metrics.l0(codes, 0).sum())
    assert_close("dead latents", found.dead, metrics.dead_codes(codes).mean())
    one, other = sae.dictionary(), trained("topk", x, seed=1).dictionary()
    for what, a, b in (("trained twice", one, other), ("random", torch.randn(64, D), 7 * torch.randn(64, D))):
        assert_close(f"stability, {what}", stability([a], [b]), 1 - metrics.cosine_hungarian_loss(a, b) / len(a))
        assert_close(f"collinearity, {what}", collinearity(b), metrics.dictionary_collinearity(b)[0])
    assert_close("collinearity, duplicates", collinearity(torch.cat([one, -one[:1]])), 1.0)


def main():
    register_missing_operators()
    import overcomplete  # noqa: F401 - that it imports

    from elude_steer.evaluation.baselines.sae import _BAND

    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = tokens()
    check_codes("vanilla", "SAE", x)
    sae = check_codes("topk", "TopKSAE", x, top_k=ACTIVE)
    check_codes("jumprelu", "JumpSAE", x)
    check_codes("matching_pursuit", "MpSAE", x, k=ACTIVE)
    check_codes("archetypal", "RATopKSAE", x, top_k=ACTIVE)
    check_batch_topk(x)
    check_pursuit_without_a_match(x)
    check_gradients("vanilla", "SAE", x)
    check_gradients("topk", "TopKSAE", x, top_k=ACTIVE)
    check_gradients("batch_topk", "BatchTopKSAE", x, top_k=ACTIVE * 250)
    check_gradients("jumprelu", "JumpSAE", x, kernel="rectangle", bandwidth=_BAND)
    check_gradients("matching_pursuit", "MpSAE", x, k=ACTIVE)
    check_heaviside()
    check_measures(sae, x)
    most: dict[str, float] = {}
    for what, difference in _differences:
        most[what] = max(most.get(what, 0.0), difference)
    for what, difference in most.items():
        print(f"{what:55} {difference:.1e}")
    print(f"tokens for which rounding turned a choice over: {sum(_changed_counts)}")
    print(f"overcomplete {version('overcomplete')}: OK")


if __name__ == "__main__":
    main()
