import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.reproduce.paper import TABLES, read_edits, read_properties, read_table
from elude_steer.evaluation.tables.properties import PROPERTIES
from elude_steer.recipe_files import load_recipe, load_spec


@pytest.mark.parametrize(
    ("table", "backbone", "method", "measure", "value"),
    [
        ("interpretability", "augreg-vit-b16-layer12", "archetypal SAE", "MS-Score", (59.15, 3.99)),
        ("interpretability", "augreg-vit-b16-layer12", "raw units", "accuracy", (85.1, None)),
        ("interpretability", "dinov2-base-layer12", "vanilla SAE", "R2", (47.76, 0.05)),
        ("interpretability", "dinov2-base-layer12", "batch topk SAE", "LLM rank", (4, None)),
        ("interpretability", "dinov2-base-layer12", "ELUDe (unique)", "MS-Score", (64.85, 0.52)),
        ("generalization", "siglip2-base-layer12", "ELUDe (unique)", "MS-Score", (67.98, 3.2)),
        ("generalization", "convnextv2-base-stage4", "batch topk SAE", "MS-Score", (25.65, 0.12)),
        ("generalization", "dinov2-large-layer23", "matryoshka SAE", "LLM rank", (1, None)),
        ("generalization", "dinov2-base-layer12-ef16", "archetypal SAE", "R2", (85.26, 0.07)),
        ("generalization", "dinov2-small-layer12", "raw units", "accuracy", (81.16, None)),
        ("ablations", "dinov2-base-layer12-ef4", "clusters.min_cluster_size=500", "MS-Score", (61.09, 3.57)),
        ("ablations", "dinov2-base-layer12-ef4", "clusters.umap_components", "MS-Score", (54.24, 0.57)),
        ("stability", "dinov2-base-layer12", "batch topk SAE", "stability", (58.93, 0.0029)),
        ("stability", "dinov2-base-layer12", "ELUDe (unique)", "effective rank", (739.6, 0.06)),
        ("efficiency", "dinov2-base-layer12", "matching pursuit SAE", "ms per batch", (1186.13, 4.93)),
        ("efficiency", "dinov2-base-layer12", "ELUDe (unique)", "peak MB", (577.49, 5.3)),
        ("judge", "augreg-vit-b16-layer12", "ELUDe (unique)", "win rate", (77.93, None)),
        ("judge", "dinov2-base-layer12", "jumprelu SAE", "win rate", (29.39, None)),
        ("configurations", "dinov2-base-layer12-ef16", "ELUDe (unique)", "expansion", (11.41, None)),
    ],
)
def test_values_are_the_papers(table, backbone, method, measure, value):
    assert read_table(table).find(backbone, method).values[measure] == value


def test_every_backbone_has_a_recipe_and_every_row_a_method():
    sizes = {}
    for name in TABLES:
        table = read_table(name)
        sizes[name] = len(table.rows)
        assert len({(row.backbone, row.method) for row in table.rows}) == len(table.rows)
        for row in table.rows:
            assert load_spec(row.backbone).name == row.backbone
            assert set(row.values) <= set(table.columns)
            assert name == "ablations" or row.method in METHODS
    expected = {"interpretability": 20, "generalization": 48, "ablations": 10, "stability": 9, "efficiency": 10}
    assert sizes == {**expected, "judge": 20, "configurations": 10}


def test_the_papers_properties():
    found = read_properties()
    assert len(found) == 8 and found.keys() <= METHODS.keys()
    assert all(tuple(marks) == PROPERTIES for marks in found.values())
    assert [name for name, marks in found.items() if all(marks.values())] == ["ELUDe (unique)"]
    assert found["archetypal SAE"]["stable"] and not found["topk SAE"]["stable"]
    assert not found["DPCiCNN (supervised)"]["unsupervised"]


def test_win_rates_lie_in_their_intervals():
    for row in read_table("judge").rows:
        low, high = row.intervals["win rate"]
        assert low < row.values["win rate"][0] < high


def test_the_edits_are_the_recipes_steps():
    edits = read_edits()
    assert len(edits) == 14
    for edit in edits:
        step = load_recipe(edit.recipe).steps[int(edit.row.rsplit("-", 1)[1]) - 1]
        assert (step.minus, step.plus) == (edit.minus, edit.plus)
        for name, value in (edit.settings or {}).items():
            assert getattr(step.settings, name) == value
        assert edit.baseline.endswith(".") and edit.caption.endswith(".")
    assert [edit.row for edit in edits if edit.settings is None] == ["dog-1", "dog-2"]


def test_an_unknown_table_is_refused():
    with pytest.raises(SpecError, match="there is no table 'figures' of the paper; there are interpretability"):
        read_table("figures")
