from dataclasses import replace

import pytest
import torch

from elude_steer.evaluation.reproduce import rates as trials
from elude_steer.evaluation.reproduce.experiment import Experiment
from elude_steer.evaluation.reproduce.run import forecast
from elude_steer.evaluation.tables.bench import Bench


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [None, 2])
def test_trials_compute_with_as_many_threads_as_a_run(threads, world, tmp_path, monkeypatch, torch_threads):
    """Three threads that wait for each other on a busy machine took thirty times as long as the run's one."""
    used = {}

    def watch(owner, name, label):
        inner = getattr(owner, name)

        def watched(*args, **more):
            used.setdefault(label, set()).add(torch.get_num_threads())
            return inner(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(trials, "train_sae", "training")
    watch(trials, "Peaks", "measuring")
    options = replace(world.options(tmp_path, rows=("topk SAE",)), threads=threads)
    found = forecast("interpretability", options)
    assert used == {label: {threads or 1} for label in ("training", "measuring")}
    assert "dinov2-base-layer12: topk SAE, seed 42" in found.pieces
    assert torch.get_num_threads() == 3


def test_a_slow_moment_of_a_trial_does_not_count(world, tmp_path, monkeypatch):
    setup = Experiment("interpretability", world.options(tmp_path)).setup("dinov2-base-layer12")
    found = trials.measure_rates(Bench(setup).tower, setup.spec, list(setup.image_set.items()), 192)
    seconds = iter([9.0, 1.0, 50.0, 80.0, 3.0])  # the first run, then two of the short and two of the long training
    monkeypatch.setattr(trials.Rates, "_time", lambda self, call: next(seconds))
    spec = replace(trials.SaeSpec("topk", 32), batch_size=96, epochs=50)
    begin, step = found._training_steps(spec, 192)
    assert step == pytest.approx((3.0 - 1.0) / (2 * 2)) and begin == 0.0
