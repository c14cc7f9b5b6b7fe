"""MS-Score."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elude_steer.errors import StorageError
from elude_steer.evaluation.measures.monosemanticity import Peaks, gather_peaks, mean_percent, ms_score
from elude_steer.evaluation.measures.row_file import RowFile
from elude_steer.utils.memory import peak_megabytes, reset_peak


def unit_rows(count, d, seed):
    rows = torch.randn(count, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def test_identical_images_score_one_and_orthogonal_ones_zero():
    weights = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ms_score(unit_rows(1, 30, 1).expand(20, 30), weights) == pytest.approx(1, abs=1e-12)
    assert ms_score(torch.eye(20, dtype=torch.float64), weights) == pytest.approx(0, abs=1e-12)
    assert ms_score(torch.tensor([[1.0, 0], [-1, 0]]), torch.ones(2)) == pytest.approx(-1, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_the_score_equals_the_sum_over_all_pairs(count, d, seed):
    e = unit_rows(count, d, seed)
    w = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1e-3
    above = below = 0.0
    for i in range(count):
        for j in range(count):
            if i != j:
                above += float(w[i] * w[j] * (e[i] @ e[j]))
                below += float(w[i] * w[j])
    assert ms_score(e, w) == pytest.approx(above / below, abs=1e-12)


def test_a_single_image_has_no_score():
    assert torch.tensor(ms_score(torch.eye(3), torch.tensor([1.0, 0, 0]))).isnan()


def naive_scores(values, outputs, count):
    """Scores of all sub-units from all images at once, `(images, tokens, ...)`."""
    best, token = values.max(1)
    found = []
    for unit in range(values.shape[2]):
        v = best[:, unit].double()
        if v.max() <= 0 or v.max() == v.min():
            found.append(float("nan"))
            continue
        top = v.argsort(descending=True, stable=True)[:count]
        e = torch.stack([outputs[i, token[i, unit]] for i in top.tolist()])
        found.append(ms_score(torch.nn.functional.normalize(e, dim=-1), (v[top] - v.min()) / (v.max() - v.min())))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("count", [3, 10, 100])
def test_scores_image_by_image_equal_those_of_all_at_once(count):
    values = torch.randn(30, 5, 8, generator=torch.Generator().manual_seed(1))
    outputs = torch.randn(30, 5, 6, generator=torch.Generator().manual_seed(2))
    values[..., 3] = -values[..., 3].abs()  # never fires
    values[..., 4] = 2.0  # constant
    values[..., 5] = (values[..., 5] * 2).round()  # many ties
    peaks = Peaks(8, 6, count)
    for one, other in zip(values, outputs, strict=True):
        peaks.add(one, other)
    expected = naive_scores(values, outputs, count)
    assert torch.allclose(peaks.scores(), expected, atol=1e-6, equal_nan=True)
    assert peaks.scores().isnan().tolist() == [False, False, False, True, True, False, False, False]
    assert mean_percent(peaks.scores()) == pytest.approx(float(expected[~expected.isnan()].mean()) * 100, abs=1e-4)


def test_sub_units_of_one_concept_score_higher_than_a_unit_of_two():
    """Two kinds of images, a sub-unit for each, and a unit for both."""
    generator = torch.Generator().manual_seed(3)
    layer = torch.randn(12, 20, generator=generator)
    kinds = torch.linalg.qr(torch.randn(20, 2, generator=generator)).Q.T * 4  # of equal length
    images = [kinds[i % 2] + 0.1 * torch.randn(4, 20, generator=generator) for i in range(60)]
    readers = torch.cat([kinds, kinds.sum(0, keepdim=True)])
    scores = gather_peaks(images, lambda q: q @ readers.T, lambda q: q @ layer.T, count=20).scores()
    assert scores[:2].min() > 0.9
    assert scores[2] < 0.7


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="no images"):
        gather_peaks([], lambda q: q, lambda q: q)


def test_silent_sub_units_never_fire_whatever_their_score():
    peaks = Peaks(3, 2)
    for value in (1.0, 2.0):
        peaks.add(torch.tensor([[value, -value, 0.5]]), torch.ones(1, 2))
    assert peaks.silent.tolist() == [False, True, False]
    assert peaks.scores().isnan().all()  # the weaker of two images has weight zero
    with pytest.raises(ValueError, match="the 101 strongest images are asked for, but only 100 are stored"):
        peaks.top(101)
    with pytest.raises(ValueError, match="not finite"):
        peaks.add(torch.tensor([[1.0, torch.nan, 0]]), torch.ones(1, 2))


def peak_growth(sub_units, width=512):
    """Megabytes by which collecting and scoring raise this process's peak."""
    device = torch.device("cpu")
    reset_peak(device)
    before = peak_megabytes(device)
    if before is None:
        pytest.skip("this system does not report peaks")
    peaks = Peaks(sub_units, width, 100)
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        peaks.add(torch.rand(2, sub_units, generator=generator), torch.randn(2, width, generator=generator))
    peaks.scores()
    return peak_megabytes(device) - before


def test_memory_does_not_grow_with_the_embeddings_of_the_sub_units():
    peak_growth(100)
    small, large = peak_growth(500), peak_growth(4000)
    # In memory, the embeddings of 3,500 more sub-units would take 717 MB; values and numbers of images take 4.
    assert large - small < 60


def test_rows_in_a_file_are_those_that_were_written():
    table = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    rows = RowFile(60, 7, "the rows")
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    rows.write(order, torch.zeros(50, 7))
    rows.write(order, table[order])
    assert torch.equal(rows.read(10, 50), table[10:])
    assert torch.equal(rows.read(50, 60), torch.zeros(10, 7))


def test_a_full_disk_is_refused_before_anything_is_measured():
    with pytest.raises(StorageError, match=r"of 1,000,000,000 sub-units take 461 TB .* set TMPDIR to a folder"):
        RowFile(10**11, 1152, "the strongest images of 1,000,000,000 sub-units")
