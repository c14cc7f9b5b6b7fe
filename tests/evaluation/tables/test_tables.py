"""The paper's tables on backbones that no table was made for: tiny checkpoints of real classes, a few images."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from elude_steer import toyland
from elude_steer.errors import SpecError, StorageError
from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.collages import draw_collages, make_collages
from elude_steer.evaluation.tables.efficiency import BARE, BehindLayer, Protocol, run_efficiency
from elude_steer.evaluation.tables.measure import PROBE, accuracy_source
from elude_steer.evaluation.tables.properties import PROPERTIES, _judge, has_properties, run_properties
from elude_steer.evaluation.tables.report import efficiency_lines, page_lines, write_tables
from elude_steer.evaluation.tables.run import _read_row, _row_path, list_rows, rows_as_json, run_table, summarize
from elude_steer.evaluation.tables.setup import PAPER, SMALL, TINY, TableSetup, class_of, find_preset
from elude_steer.evaluation.tables.stability import run_stability
from elude_steer.models.images import open_image
from elude_steer.models.vision import Tower
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, TokensSpec
from tests.helpers.tiny import save_classifier
from tests.models.test_vision_backbones import DINOV2_PREPROCESSOR

PLACES = ("beach", "kitchen", "park")
SPLITS = ("ELUDe (gap)", "ELUDe (unique)", "random split", "k-means on contributions", "clusters of activations")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small DINOv2 with and without a head, and images in folders of their classes."""
    folder = save_classifier(tmp_path_factory.mktemp("world"), PLACES)
    for split, seed in (("train", 5), ("val", 6)):
        for number, scene in enumerate(toyland.scenes(seed, 24)):
            path = folder / split / PLACES[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            scene.image.save(path)
    return folder


def make_setup(world, work, **changes):
    spec = AtlasSpec(
        "small",
        ModelSpec(id=str(world / "backbone"), layer="1.mlp.fc2", kind="vision"),
        tokens=TokensSpec(per_image=8),
        clusters=ClustersSpec(top_k=60, min_cluster_size=5),
    )
    return TableSetup(spec, world / "train", world / "val", work, **{"preset": TINY, "threads": 1, **changes})


@pytest.fixture(scope="module")
def setup(world, tmp_path_factory):
    return make_setup(world, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def rows(setup):
    """All methods, in one go; every image must go through the tower once for all draws of tokens."""
    encoded = []
    original = Tower.streams
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tower, "streams", lambda self, images: encoded.extend(images) or original(self, images))
        found = run_table(setup)
    assert len(encoded) == 24 + 24  # to learn from, and to measure on
    return found


def test_every_method_has_a_row_for_every_draw(setup, rows):
    methods = [name for name in METHODS if name != "difference of means (supervised)"]
    assert [(row.method, row.seed) for row in rows] == [(name, seed) for name in methods for seed in TINY.seeds]
    for row in rows:
        assert row.measures["latents"] >= 16 and 0 <= row.measures["accuracy"] <= 1
        assert row.measures["baseline accuracy"] == rows[0].measures["baseline accuracy"]
        assert row.seconds["measure"] > 0 and row.seconds["tower"] > 0
    measured = {(row.method, row.seed): row.measures for row in rows}
    for seed in TINY.seeds:
        size = measured["ELUDe (gap)", seed]["latents"]
        assert size > 16  # units were split
        for name in SPLITS:  # they leave the model as it is
            assert measured[name, seed]["R2"] > 1 - 1e-9
            assert measured[name, seed]["accuracy"] == measured[name, seed]["baseline accuracy"]
            assert measured[name, seed]["latents"] == size
        assert measured["topk SAE", seed]["R2"] < 0.99 and measured["topk SAE", seed]["latents"] == size
        assert measured["DPCiCNN (supervised)", seed]["R2"] > 1 - 1e-9
    assert measured["raw units", 42] == measured["raw units", 123]
    assert measured["ELUDe (gap)", 42] != measured["ELUDe (gap)", 123]


def test_rows_are_read_again_and_an_interrupted_table_is_the_same(world, setup, rows, tmp_path):
    assert all(done for _, _, done in list_rows(setup))
    again = run_table(make_setup(world, setup.work))
    assert again == rows
    other, wanted = make_setup(world, tmp_path), ["ELUDe (gap)", "topk SAE"]
    assert not any(done for _, _, done in list_rows(other, wanted))

    def stop(row):
        raise KeyboardInterrupt

    for _ in range(4):  # four rows, each of which ends the run
        with pytest.raises(KeyboardInterrupt):
            run_table(other, wanted, on_row=stop)
        (folder,) = tmp_path.iterdir()
        first = sorted((folder / "rows").iterdir())[0]
        first.rename(first.with_suffix(".done"))
    for path in (folder / "rows").glob("*.done"):
        path.rename(path.with_suffix(".json"))
    measures = {(row.method, row.seed): row.measures for row in rows}
    assert {(r.method, r.seed): r.measures for r in run_table(other, wanted)}.items() <= measures.items()


def test_summary_and_page(setup, rows, tmp_path):
    found = summarize(rows)["ELUDe (gap)"]["MS-Score"]
    values = [row.measures["MS-Score"] for row in rows if row.method == "ELUDe (gap)"]
    assert found == pytest.approx((sum(values) / 2, abs(values[0] - values[1]) / math.sqrt(2)))
    page = write_tables(setup, tmp_path, rows, run_stability(setup, ["raw units", "topk SAE"])).read_text()
    assert page.count("| ELUDe (gap) |") == 1 and "24 images to learn from" in page
    stored = json.loads((tmp_path / "tables.json").read_text())
    assert "\n".join(page_lines(stored)) == page
    assert stored["rows"] == rows_as_json(rows) and stored["stability"][0]["runs"] is None


def test_stability_over_runs_and_draws(setup, rows):
    names = ["ELUDe (gap)", "raw units", "random split", "topk SAE", "DPCiCNN (supervised)"]
    found = {row.method: row for row in run_stability(setup, names)}
    assert found["ELUDe (gap)"].runs == pytest.approx(1, abs=1e-9) and found["ELUDe (gap)"].draws < 1
    assert math.isnan(found["raw units"].runs) and found["raw units"].draws == pytest.approx(1)
    assert found["random split"].runs < 0.999 and found["topk SAE"].runs < 0.999
    assert run_stability(setup, names)[0] == found["ELUDe (gap)"]


def test_properties_are_measured(setup, rows):
    found = {row.method: row for row in run_properties(setup)}
    everything = (True, True, True, True, True)
    answers = {
        name: (row.stable, row.training_free, row.explicit, row.lossless, row.unsupervised)
        for name, row in found.items()
    }
    assert answers["ELUDe (gap)"] == answers["ELUDe (unique)"] == everything
    assert answers["DPCiCNN (supervised)"] == (True, True, True, True, False)
    assert answers["topk SAE"] == (False, False, True, False, True)
    assert "raw units" not in found


def test_one_run_does_not_show_what_is_stable(setup, rows):
    with pytest.raises(SpecError, match=r"one run does not show whether a method is stable; give 2 runs or more"):
        run_properties(setup, ["topk SAE"], runs=1)
    with pytest.raises(SpecError, match="one run does not show"):
        run_properties(replace(setup, preset=replace(TINY, runs=1)), ["topk SAE"])
    evidence = {"similarity of runs": math.nan, "trained parameters": 0.0, "labels read": 0.0}
    evidence |= {"error of taking one part away": 0.0, "error of the output": 0.0}
    units, other = (_judge(METHODS[name], evidence) for name in ("raw units", "topk SAE"))
    assert units.stable and units.answers()[0] == "yes (one result)"
    assert not other.stable and other.answers()[0] == "no (nan)"


def test_the_rule_that_sets_the_sizes_of_others_decides_the_folder(world, tmp_path):
    """`compare` takes their number from one rule and `reproduce` from the other, in the same work folder."""
    gap, same, unique = (
        make_setup(world, tmp_path, preset=replace(TINY, methods=methods))
        for methods in (TINY.methods, ("ELUDe (gap)", "topk SAE"), ("raw units", "topk SAE", "ELUDe (unique)"))
    )
    assert [Bench(one).base_rule for one in (gap, same, unique)] == ["gap", "gap", "unique"]
    assert gap.folder == same.folder != unique.folder


def test_passes_of_a_convolution_are_timed(world, tmp_path):
    """Autoencoders behind a 1 x 1 convolution read its channels at every place, as they would read tokens."""
    from transformers import PoolFormerConfig, PoolFormerModel

    torch.manual_seed(0)
    model = PoolFormerModel(PoolFormerConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], mlp_ratio=2.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:
                parameter.fill_(1)
            elif "conv" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(tmp_path / "conv")
    sizes = {"crop_size": {"height": 56, "width": 56}, "size": {"shortest_edge": 56}}
    (tmp_path / "conv" / "preprocessor_config.json").write_text(json.dumps({**DINOV2_PREPROCESSOR, **sizes}))
    small = make_setup(world, tmp_path, preset=replace(TINY, seeds=(42,)))
    spec = replace(small.spec, model=ModelSpec(str(tmp_path / "conv"), "encoder.block.1.0.output.conv2", kind="vision"))
    convolution = replace(small, spec=spec, images=world / "val")
    names = ["ELUDe (gap)", "topk SAE", "transcoder"]
    found = run_efficiency(convolution, names, protocol=Protocol(batch=2, warm_up=0, runs=1, compiled=False))
    assert [(row.method, row.input_dim) for row in found] == [(BARE, 0), (names[0], 16), (names[1], 8), (names[2], 16)]

    bench, maps = Bench(convolution), torch.randn(2, 16, 3, 5)
    assert isinstance(bench.tower.layer, torch.nn.Conv2d)
    rows = maps.movedim(1, -1)
    with torch.inference_mode():
        for name in names[1:]:
            sae = bench.sae(METHODS[name], 42, 0)
            read = rows if name == "transcoder" else bench.tower.layer(maps).movedim(1, -1)
            expected = sae.decode(sae.encode(read)).movedim(-1, 1)
            torch.testing.assert_close(BehindLayer(bench.tower.layer, sae)(maps), expected)


def test_a_part_that_is_taken_away_changes_the_model_by_what_it_writes(setup, rows, monkeypatch):
    """The control: a dictionary that says something else than it does is not explicit."""
    bench = Bench(setup)
    honest = bench.dictionary(METHODS["topk SAE"], 42)
    from elude_steer.evaluation.tables.properties import CHANGES, _error_of_removal

    assert _error_of_removal(bench, honest) < CHANGES
    liar = replace(honest, write=honest.write.clone())
    wrong = replace(liar, base=liar.base, write=liar.write.roll(1, dims=0))
    reconstruct = type(honest).reconstruct
    monkeypatch.setattr(type(honest), "reconstruct", lambda self, q: reconstruct(replace(self, write=honest.write), q))
    assert _error_of_removal(bench, wrong) > CHANGES


def test_accuracy_with_a_head_runs_the_rest_of_the_model(world, setup, rows, tmp_path):
    with_head = make_setup(world, tmp_path, head=str(world / "head"))
    raw, sae = run_table(with_head, ["raw units", "archetypal SAE"], [42])
    assert raw.measures["accuracy"] == raw.measures["baseline accuracy"]
    assert 0 <= sae.measures["accuracy"] <= 1
    assert (accuracy_source(with_head), accuracy_source(setup)) == ("head", PROBE)
    assert accuracy_source(make_setup(world, tmp_path / "nothing yet")) is None
    # Nobody says what is in the images, so the classifier does.
    unknown = replace(with_head, classes={}, held_out_limit=6)
    (row,) = run_table(unknown, ["DPCiCNN (supervised)"], [42])
    assert row.measures["latents"] > 16 and "accuracy" not in row.measures
    with pytest.raises(SpecError, match="is on another backbone"):
        other = replace(setup.spec, model=replace(setup.spec.model, layer="0.mlp.fc2"))
        from elude_steer.evaluation.tables.accuracy import load_head

        tower = Bench(replace(setup, spec=other, work=tmp_path / "other")).tower
        with torch.no_grad():
            tower.layer.weight.add_(1)
        load_head(tower, str(world / "head"), None)


def test_efficiency_has_every_autoencoder_and_the_bare_backbone_first(setup, rows):
    protocol = Protocol(batch=4, warm_up=1, runs=3, compiled=False, statistic="median", alternate=True, clock="process")
    found = run_efficiency(setup, protocol=protocol)
    names = [row.method for row in found]
    assert names[0] == BARE and set(names[1:]) == {n for n, m in METHODS.items() if m.kind in ("atlas", "sae")}
    assert found[0].slower == 0 and all(row.milliseconds > 0 for row in found)
    widths = {row.method: row.input_dim for row in found}
    assert (widths[BARE], widths["topk SAE"], widths["transcoder"], widths["ELUDe (gap)"]) == (0, 16, 64, 64)
    assert run_efficiency(setup, protocol=protocol) == found  # finished measurements are read
    lines = efficiency_lines([replace(found[0], megabytes=50.0, larger=0.0), replace(found[1], megabytes=None)])
    assert lines[0].endswith("| peak MB | more memory (%) |") and lines[2].endswith("| 50 | 0.0 |")
    unknown = efficiency_lines([replace(row, megabytes=None, larger=None) for row in found])
    assert unknown[0].endswith("| more time (%) |") and unknown[0].count("|") == unknown[2].count("|")
    alone = Protocol(batch=2, warm_up=0, runs=2, compiled=False)
    bare, elude = run_efficiency(setup, ["ELUDe (gap)"], protocol=alone)
    assert elude.slower == pytest.approx(elude.milliseconds / bare.milliseconds - 1)
    with pytest.raises(SpecError, match="has no forward pass of its own"):
        run_efficiency(setup, ["random split"])
    with pytest.raises(SpecError, match="compiled variants run one after the other"):
        Protocol(alternate=True)


def test_collages_show_a_unit_beside_its_parts(setup, rows, tmp_path):
    paths = draw_collages(setup, tmp_path, count=2)
    sizes = [open_image(path).size for path in paths]
    assert len(paths) == 2 and all(width > height > 300 for width, height in sizes)
    with pytest.raises(SpecError, match="there is no unit 16"):
        draw_collages(setup, tmp_path, units=[16])
    with pytest.raises(SpecError, match="are not parts of units; choose ELUDe or another split"):
        draw_collages(setup, tmp_path, method="topk SAE")


def test_the_paper_s_budget(setup):
    specs = {name: PAPER.trial_specs(PAPER.sae_spec(METHODS[name].variant, 128)) for name in PAPER.methods[1:-1]}
    counts = {name: len(found) for name, found in specs.items()}
    assert sum(counts.values()) == 99 + 27 and counts["vanilla SAE"] == counts["transcoder"] == 27
    assert counts["jumprelu SAE"] == 27 and counts["matching pursuit SAE"] == 9
    for found in specs.values():
        assert len({tuple(spec.varied.values()) for spec in found}) == len(found)
        for spec in found:
            assert (spec.epochs, spec.seed, spec.dead_after, spec.batch_size) == (50, 42, 0, 4096)
    assert {spec.sparsity for spec in specs["jumprelu SAE"]} == {1e-4, 1e-3, 1e-2}
    assert {spec.revive for spec in specs["topk SAE"]} == {1e-5, 1e-4, 1e-3}
    small = SMALL.trial_specs(SMALL.sae_spec("matching_pursuit", 10))
    assert len(small) == 9 and small[0].epochs == 1 and small[0].dead_after == 50


def test_what_is_refused(world, setup, tmp_path, run):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, scene in enumerate(toyland.scenes(5, 4)):
        scene.image.save(flat / f"{number}.png")
    unlabelled = replace(setup, images=flat, held_out=flat, work=tmp_path / "work")
    assert "DPCiCNN (supervised)" not in unlabelled.default_methods()
    with pytest.raises(SpecError, match="needs classes"):
        run_table(unlabelled, ["DPCiCNN (supervised)"])
    with pytest.raises(SpecError, match="only toyland's `compare` does"):
        run_table(setup, ["difference of means (supervised)"])
    with pytest.raises(SpecError, match="there is no token seed 7"):
        run_table(setup, seeds=[7])
    with pytest.raises(SpecError, match="there is no preset 'large'; there are paper, small, tiny"):
        find_preset("large")
    with pytest.raises(SpecError, match="a table reads its images several times"):
        list_rows(replace(setup, images=(image for image in [])))


def test_the_command(world, tmp_path, run):
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"name: small\nmodel: {{id: {world / 'backbone'}, layer: 1.mlp.fc2, kind: vision}}\n"
        "tokens: {per_image: 8}\nclusters: {top_k: 60, min_cluster_size: 5}\n"
    )
    images = ("--images", world / "train", "--held-out", world / "val", "--preset", "tiny")
    folders = ("--work", tmp_path / "work", "--out", tmp_path / "out")
    code, out, err = run("compare", spec, *images, *folders, "--method", "raw units", "--seed", 42, "--limit", 12)
    assert code == 0, err
    assert out.strip().endswith("tables.md") and "| raw units | 1 |" in (tmp_path / "out" / "tables.md").read_text()
    for arguments, text in (
        ((spec, *images[:2], *folders), "--held-out is missing"),
        ((spec, *images, *folders, "--small"), "are for toyland"),
        ((*images[:2], *folders), "--images needs SPEC"),
        ((spec, *images[:4], "--preset", "big", *folders), "there is no preset 'big'"),
    ):
        code, _, err = run("compare", *arguments)
        assert code and text in err, err


def test_several_draws_are_the_tokens_of_single_builds(world, tmp_path):
    """One pass for all seeds stores the same files as a pass for each."""
    together, apart = make_setup(world, tmp_path / "a"), make_setup(world, tmp_path / "b")
    for seed in TINY.seeds:
        one = Bench(replace(apart, preset=replace(TINY, seeds=(seed,)))).store(seed)
        other = Bench(together).store(seed)
        assert (one.folder / "tokens.bin").read_bytes() == (other.folder / "tokens.bin").read_bytes()
        assert one.folder.name == other.folder.name
    stores = [Bench(together).store(seed).folder / "tokens.bin" for seed in TINY.seeds]
    assert all(a.read_bytes() != b.read_bytes() for a, b in pairwise(stores))


def test_a_scenes_class_is_its_first_object():
    for number, scene in enumerate(toyland.scenes(31, 12)):
        assert class_of(f"toyland:31:{number}", None) == (scene.objects[0] if scene.objects else None)
    assert class_of("toyland:31:0", {"toyland:31:0": "known"}) == "known"
    assert class_of("train/dog/1.png", None) == "dog"
    for file in ("toyland:x.png", "toyland:1", "toyland:1:2.png", "toyland:1:2:3", f"toyland:1:{'9' * 19}"):
        assert class_of(file, None) is None and class_of(f"cat/{file}", None) == "cat"


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_damaged_files_of_a_table_are_named(text, setup, world, tmp_path):
    own = make_setup(world, tmp_path)
    bench, method = Bench(own), METHODS["raw units"]
    cost, row = own.folder / "costs" / "x.json", _row_path(own, method, 0)
    for path in (cost, row):
        path.parent.mkdir(parents=True)
        path.write_text(text)

    def count():
        with bench._count_cost("x"):
            pass

    for read in (lambda: bench.cost("x"), count, lambda: _read_row(own, method, 0)):
        with pytest.raises(StorageError, match=r"\.json' is damaged; delete it and run the same command again"):
            read()


def test_collages_of_units_with_many_parts(setup, rows):
    found = make_collages(setup, count=2, most=4)
    assert [collage.parts for collage in found] == sorted({collage.parts for collage in found})
    assert all(1 < collage.parts <= 4 and collage.image.width > 400 for collage in found)


def test_properties_of_another_draw(setup, rows):
    assert not has_properties(setup, "ELUDe (gap)", 123)
    (row,) = run_properties(setup, ["ELUDe (gap)"], seed=123, runs=2)
    assert row.stable and has_properties(setup, "ELUDe (gap)", 123)
    assert row.answers()[0] == "yes (1.000)" and len(row.answers()) == len(PROPERTIES)
