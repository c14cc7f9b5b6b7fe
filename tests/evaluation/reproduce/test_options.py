import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.reproduce.experiment import Experiment
from elude_steer.evaluation.reproduce.options import ReproduceOptions, find_backbones, find_rows, scale_sizes
from elude_steer.evaluation.tables.efficiency import PAPER_PROTOCOL, SMALL_PROTOCOL
from elude_steer.recipe_files import load_spec


def test_fewer_images_keep_the_papers_shares():
    spec = load_spec("dinov2-base-layer12")
    scaled = scale_sizes(spec, 10_000)
    assert scaled.tokens.per_image == 2 and scaled.clusters.top_k == round(400_000 * 20_000 / 2_562_334)
    assert scaled.clusters.min_cluster_size == 8  # 1,000 of 400,000
    assert scale_sizes(spec, 1_281_167) == spec
    few = scale_sizes(spec, 100)  # then more tokens of an image
    assert (few.tokens.per_image, few.clusters.min_cluster_size) == (100, 5)
    narrow = scale_sizes(load_spec("dinov2-base-layer12-ef4"), 100)
    assert narrow.clusters.top_k < few.clusters.top_k / 5


def test_the_papers_budget_is_the_recipe():
    spec = load_spec("siglip2-base-layer12")
    assert ReproduceOptions("toyland:3", limit=4).adapt(spec) == spec
    changed = ReproduceOptions(
        "toyland:3", limit=4, preset="small", backbones={spec.name: "somewhere"}, changes=("clusters.top_k=77",)
    ).adapt(spec)
    assert (changed.model.id, changed.clusters.top_k, changed.clusters.selection) == ("somewhere", 77, "leaf")


def test_a_limit_is_spread_over_the_folder(image_folder):
    options = ReproduceOptions(str(image_folder))
    spec = load_spec("dinov2-base-layer12")
    assert options.limited(str(image_folder), spec, None) == str(image_folder)
    assert options.limited(str(image_folder), spec, 400) == str(image_folder)
    some = options.limited(str(image_folder), spec, 4)
    whole = [item.id for item in options.image_set(str(image_folder), spec, None).items()]
    assert [path.removeprefix(f"{image_folder}/") for path in some] == [whole[0], whole[10], whole[20], whole[30]]


def test_rows_and_backbones():
    options = ReproduceOptions(rows=("topk SAE", "raw units", "random split"), backbones={"dinov2-base-layer12": None})
    assert find_backbones("interpretability", options) == ["dinov2-base-layer12"]
    assert find_rows("interpretability", "dinov2-base-layer12", options) == ["raw units", "topk SAE", "random split"]
    with pytest.raises(SpecError, match=r"there is no row 'topk SAE' here; there are split\.winner_rule=random"):
        find_rows("ablations", "dinov2-base-layer12-ef4", options)
    assert len(find_rows("generalization", "dinov2-base-layer12-ef4", ReproduceOptions())) == 6
    with pytest.raises(SpecError, match="there is no backbone 'dinov2-base-layer12' here; there are"):
        find_backbones("generalization", options)


def test_the_protocol_is_the_presets_unless_it_is_given():
    def protocol(**given):
        return Experiment("efficiency", ReproduceOptions(**given)).protocol

    assert protocol() == protocol(preset="tiny", protocol="paper") == PAPER_PROTOCOL
    assert protocol(preset="tiny") == protocol(protocol="small") == SMALL_PROTOCOL
    few = protocol(preset="small", protocol="paper", passes=10)
    assert (few.batch, few.warm_up, few.runs, few.compiled, few.statistic) == (256, 2, 10, True, "mean")
