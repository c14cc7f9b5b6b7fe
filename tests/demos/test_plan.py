"""The plan on paper: its tables stand in the guide as the script prints them."""

from pathlib import Path

import pytest

from demos.benchmarks import plan

GUIDE = Path(__file__).parents[2] / "demos" / "guides" / "scaling.md"


@pytest.mark.parametrize("gpu", [True, False])
def test_the_guide_shows_what_the_plan_says(gpu, capsys):
    plan.print_plan(1_280_000, 1152, [8, 16, 32, 64], 32, 400_000, gpu)
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert table.count("\n") == 9 and table in GUIDE.read_text(encoding="utf-8")


def test_what_the_guide_says_breaks_first():
    few, many = plan.Job(machines=8), plan.Job(machines=64)
    assert few.clusters_at_a_time == few.cores, "memory does not break"
    assert plan.Job(memory=32e9).clusters_at_a_time == 15
    assert "leaves it idle 66% of the time" in plan.first_to_break(few)[0]
    assert plan.first_to_break(many)[-1] == "fewer pieces than machines in ranking, splitting, calibrating"
    stages = {stage.name: stage for stage in plan.plan(many)}
    hours = sum(stage.parallel + stage.alone for stage in stages.values())
    assert 0.22 < stages["splitting"].parallel / hours < 0.28
