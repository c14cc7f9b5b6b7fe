import pytest
import torch

from elude_steer.errors import EludeSteerWarning, SpecError
from elude_steer.method.clip_dissect import Dissection, Dissector, dissect, log_prior

SETTINGS = [("soft_wpmi", {}), ("soft_wpmi", {"top_k": 20}), ("wpmi", {}), ("cos_cubed", {})]
# Results of the original implementation on the closed-form inputs below: the best words, and some rows of scores.
GOLDEN = {
    0: ([0, 4, 1, 4, 2], {
        0: [1.506241, -2.297806, -5.742477, -1.169647, -3.210754, -0.034821, -0.604218],
        4: [-2.872971, -2.285217, 1.601364, -2.141830, -4.354767, 0.892303, -0.860779],
    }),
    1: ([1, 3, 4, 6, 2], {0: [-0.745144, 1.065586, -2.360233, -1.405487, 0.052471, -0.547760, -0.504089]}),
    2: ([1, 3, 4, 0, 2], {0: [-21.886635, -21.495979, -22.131348, -22.015839, -22.007339, -21.757687, -22.320957]}),
    3: ([0, 5, 4, 0, 2], {4: [-0.023840, 0.021407, 0.248848, -0.046331, -0.022181, -0.018213, -0.016798]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def closed_form():
    i, m, u = (torch.arange(n, dtype=torch.float64) for n in (120, 7, 5))
    similarities = 0.20 + 0.10 * torch.sin(0.37 * i[:, None] * (m + 1) + 0.5 * m)
    activations = torch.cos(0.23 * i[:, None] * (u + 1) + 0.9 * u) * (1 + 0.1 * u)
    return activations.float(), similarities.float()


def formula_scores(activations, similarities, settings):
    """Scores by the published formulas, in float64."""
    top = activations.double().sort(dim=0, descending=True, stable=True).indices[: settings.top_k]
    p_word = torch.softmax(similarities.double() * settings.a, 1)
    rows = []
    for u in range(activations.shape[1]):
        terms = p_word[top[:, u]]
        if settings.method == "soft_wpmi":
            j = torch.arange(settings.top_k, dtype=torch.float64)[:, None]
            terms = 1 + (settings.p_start - j / settings.top_k * (settings.p_start - settings.p_end)) * (terms - 1)
        rows.append((terms + settings.min_prob).log().sum(0))
    s = torch.stack(rows)
    return s - settings.lam * (s.logsumexp(0) - torch.log(torch.tensor(float(len(s)), dtype=torch.float64)))


@pytest.mark.parametrize("number", GOLDEN)
def test_golden_values(closed_form, number):
    method, settings = SETTINGS[number]
    best = dissect(*closed_form, Dissection.for_method(method, **settings), keep=7)
    scores = torch.empty(5, 7).scatter_(1, best.words, best.scores)
    first, rows = GOLDEN[number]
    assert best.words[:, 0].tolist() == first
    for row, expected in rows.items():  # sums of 100 logarithms in float32: processors differ by 1.5e-5
        torch.testing.assert_close(scores[row], torch.tensor(expected), atol=5e-5, rtol=0)


@pytest.mark.parametrize(("method", "settings"), SETTINGS)
def test_blocks_never_change_a_bit(method, settings):
    generator = torch.Generator().manual_seed(3)
    activations = torch.randn(300, 150, generator=generator)
    similarities = torch.rand(300, 401, generator=generator) * 0.3
    chosen = Dissection.for_method(method, **settings)
    expected = dissect(activations, similarities, chosen, block=150)
    for block in (1, 7, 64):
        best = dissect(activations, similarities, chosen, block=block)
        assert torch.equal(best.words, expected.words)
        assert torch.equal(best.scores, expected.scores)


@pytest.mark.parametrize(("method", "settings"), SETTINGS[:3])
def test_scores_equal_the_published_formulas(method, settings):
    generator = torch.Generator().manual_seed(4)
    activations = torch.randn(200, 20, generator=generator)
    similarities = torch.rand(200, 300, generator=generator) * 0.4
    chosen = Dissection.for_method(method, **settings)
    best = dissect(activations, similarities, chosen, keep=300)
    scores = torch.empty(20, 300).scatter_(1, best.words, best.scores)
    torch.testing.assert_close(
        scores.double(), formula_scores(activations, similarities, chosen), atol=5e-4, rtol=0
    )  # float32, as in the original


def test_the_prior_is_over_all_sub_units(closed_form):
    activations, similarities = closed_form
    dissector = Dissector.from_similarities(similarities, Dissection())
    rows = dissector.evidence(activations)
    together = log_prior(lambda: [rows])
    assert torch.equal(log_prior(lambda: [rows[:2], rows[2:]]), together)
    torch.testing.assert_close(together, rows.double().logsumexp(0) - torch.tensor(5.0).double().log())
    assert not torch.equal(
        dissector.best_concepts(rows[:1], log_prior(lambda: [rows[:1]])).scores,
        dissector.best_concepts(rows[:1], together).scores,
    )


def test_planted_units_get_their_words():
    """A unit that is active for the images of one word only gets that word."""
    generator = torch.Generator().manual_seed(5)
    words, each = 30, 20
    shows = torch.arange(words).repeat_interleave(each)  # the word that each image shows
    similarities = 0.1 + 0.02 * torch.randn(len(shows), words, generator=generator)
    similarities[torch.arange(len(shows)), shows] += 0.25
    planted = torch.randperm(words, generator=generator)
    activations = (shows[:, None] == planted).float() + 0.05 * torch.randn(len(shows), words, generator=generator)
    for settings in (
        Dissection(top_k=each),
        Dissection.for_method("wpmi", top_k=each, a=10.0),
        Dissection.for_method("cos_cubed"),
    ):
        assert torch.equal(dissect(activations, similarities, settings).words[:, 0], planted)


def test_fewer_images_than_top_k_are_all_used_with_a_warning(closed_form):
    activations, similarities = closed_form
    with pytest.warns(EludeSteerWarning, match=r"labels.top_k is 100, but there are only 30 images"):
        best = dissect(activations[:30], similarities[:30])
    assert best.words.shape == (5, 7)
    with pytest.warns(EludeSteerWarning):
        one = dissect(activations[:1], similarities[:1, :1])
    assert one.words.shape == (5, 1)
    assert torch.isfinite(one.scores).all()


def test_equal_images_and_words_keep_their_order():
    best = dissect(torch.zeros(4, 2), torch.full((4, 5), 0.2), Dissection(top_k=2))
    assert best.words.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_terms_never_underflow():
    settings = Dissection(top_k=100, p_start=1.0, p_end=1.0, a=1000.0)
    similarities = torch.zeros(100, 3)
    similarities[:, 0] = 1
    best = dissect(torch.randn(100, 2), similarities, settings)
    assert torch.isfinite(best.scores).all()


def test_unknown_methods_and_settings_are_refused():
    with pytest.raises(SpecError, match=r"the method is 'pmi'; it is one of 'soft_wpmi', 'wpmi', 'cos_cubed'"):
        Dissection.for_method("pmi")
    with pytest.raises(SpecError, match="no setting 'topk'"):
        Dissection.for_method("wpmi", topk=3)
    with pytest.raises(SpecError, match="no sub-units"):
        dissect(torch.zeros(4, 0), torch.zeros(4, 2), Dissection(top_k=2))
