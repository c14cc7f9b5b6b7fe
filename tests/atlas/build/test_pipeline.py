import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import elude_steer as es
from elude_steer.atlas.build import stages, token_store
from elude_steer.atlas.build.pipeline import load_tower
from elude_steer.errors import AtlasError, EludeSteerWarning, ImageError, SpecError
from elude_steer.method.layers import split_layer
from elude_steer.models.hooks import find_layer, swap_module
from elude_steer.specs import AtlasSpec, ClustersSpec, ImagesSpec, ModelSpec, SplitSpec, TokensSpec

LAYER = "layers.1.mlp.fc2"


@pytest.fixture(autouse=True)
def temporary_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture
def spec(tiny_llava):
    return AtlasSpec(
        "tiny",
        ModelSpec(str(tiny_llava), LAYER),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=200, min_cluster_size=6, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
    )


def membership_bytes(atlas):
    return (atlas.folder / "memberships.safetensors").read_bytes()


def test_a_build_from_images_to_the_loaded_atlas(spec, image_folder, tmp_path):
    atlas = es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True)
    tower = load_tower(spec.model)
    atlas.check(tower.layer)
    assert (atlas.d_out, atlas.d_in) == (16, 40)
    assert len(atlas) > 16, "some unit was split"
    assert atlas.about["layer"].endswith(LAYER)
    assert atlas.about["images"] == 40
    split = split_layer(tower.layer, atlas.members(), atlas.units)
    q = torch.cat([q.flatten(0, 1) for q in tower.encode(_open_images(image_folder)[:5])])
    torch.testing.assert_close(split(q), tower.layer(q), rtol=1e-4, atol=1e-4)

    # references are the activations of the sub-units on the images they name
    best = atlas.references.images[:, 0]
    for sub_unit in (0, len(atlas) - 1):
        name = atlas.image_ids[int(best[sub_unit])]
        q = tower.encode(_open_images([Path(image_folder) / name]))[0]
        tile, token = int(atlas.references.tiles[sub_unit, 0]), int(atlas.references.tokens[sub_unit, 0])
        value = split.sub_units(q[tile, token].half().float())[sub_unit]
        torch.testing.assert_close(value, atlas.references.values[sub_unit, 0], rtol=1e-2, atol=1e-2)
    assert (atlas.references.values.diff(dim=1) <= 0).all()
    mean = atlas.references.values.mean(1)
    assert (atlas.references.activation <= mean + 1e-6).all(), "the mean of 100 is at most that of the best 25"


def _open_images(source):
    from PIL import Image

    paths = sorted(Path(source).rglob("*.png")) if isinstance(source, str | Path) else source
    return [Image.open(path).convert("RGB") for path in paths]


def test_bytes_do_not_depend_on_threads_order_shards_or_chunks(spec, image_folder, tmp_path, monkeypatch):
    reference = membership_bytes(es.build(spec, images=image_folder, out=tmp_path / "ref", threads=1, quiet=True))

    def build_again(name, images=image_folder, **options):
        return membership_bytes(
            es.build(spec, images=images, out=tmp_path / name, work=tmp_path / f"work-{name}", quiet=True, **options)
        )

    assert build_again("threads", threads=3) == reference
    paths = sorted(Path(image_folder).rglob("*.png"))
    for path in reversed(paths):  # copied in another order to another folder
        target = tmp_path / "moved" / path.relative_to(image_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    assert build_again("order", tmp_path / "moved") == reference
    with monkeypatch.context() as patch:
        patch.setattr(stages, "SHARD_IMAGES", 12)
        assert build_again("shards") == reference
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_blocks_that_fit", lambda weight: 1)
        assert build_again("chunks") == reference


def test_a_stage_runs_again_only_when_one_of_its_causes_changes(spec, image_folder, tmp_path, monkeypatch):
    ran, open_stage = [], stages.Build.open_stage

    def record_stage(self, name, *causes):
        folder = open_stage(self, name, *causes)
        ran.append((name, any(folder.path.iterdir())))
        return folder

    monkeypatch.setattr(stages.Build, "open_stage", record_stage)

    def stages_that_ran(spec, **options):
        ran.clear()
        es.build(spec, images=options.pop("images", image_folder), out=tmp_path / "a", quiet=True, **options)
        return [stage for stage, had_content in ran if not had_content]

    assert stages_that_ran(spec) == ["tokens", "rows", "clusters", "split"]
    assert stages_that_ran(spec) == []
    assert stages_that_ran(replace(spec, split=SplitSpec(winner_rule="unique"))) == ["split"]
    assert stages_that_ran(replace(spec, clusters=replace(spec.clusters, min_cluster_size=7))) == [
        "clusters",
        "split",
    ]
    assert stages_that_ran(replace(spec, clusters=replace(spec.clusters, top_k=150))) == ["rows", "clusters", "split"]
    assert stages_that_ran(replace(spec, tokens=replace(spec.tokens, seed=1)))[0] == "tokens"
    assert stages_that_ran(spec, settings=["tokens.per_image=7"])[0] == "tokens"
    fewer = [str(path) for path in sorted(Path(image_folder).rglob("*.png"))[:30]]
    assert stages_that_ran(spec, images=fewer)[0] == "tokens"


def _build_in_child(spec, images, out, work):
    os.environ["ELUDE_STEER_HOME"] = str(Path(out).parent)
    es.build(spec, images=images, out=out, work=work, threads=1, quiet=True)


def test_a_killed_build_continues_and_gives_the_same_bytes(spec, tiny_llava, tmp_path):
    from tests.helpers.tiny import save_images

    images = save_images(tmp_path / "many", 320, seed=3)
    spec = replace(spec, clusters=replace(spec.clusters, top_k=1500, min_cluster_size=20))
    reference = membership_bytes(es.build(spec, images=images, out=tmp_path / "ref", quiet=True))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["elude_steer.atlas.build.pipeline", "transformers.models.llava_onevision.modeling_llava_onevision"]
    )
    work, out, rng = tmp_path / "work", tmp_path / "killed", random.Random(int.from_bytes(os.urandom(4), "big"))

    def finished_files():
        found = {}
        for path in work.rglob("*"):
            # a shard is finished when its summary exists; the files that merging writes grow
            half = path.name.startswith(("merged", "tokens.", "places.")) or (
                path.name.startswith("shard-") and path.suffix == ".npy"
            )
            if path.is_file() and ".tmp-" not in path.name and not half and path.suffix != ".lock":
                with suppress(FileNotFoundError):  # a shard that was merged and deleted this moment
                    found[path] = path.stat().st_mtime_ns
        return found

    kills, before = 0, {}
    for _ in range(40):
        child = context.Process(target=_build_in_child, args=(spec, images, out, work))
        child.start()
        if kills < 5:
            wanted = len(before) + rng.randint(1, 4)  # kill it after so many more pieces of work
            while child.is_alive() and len(finished_files()) < wanted and not out.exists():
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            if child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
        child.join()
        after = finished_files()
        kept = {path: stamp for path, stamp in before.items() if path.exists()}
        assert all(after[path] == stamp for path, stamp in kept.items()), "finished work was done again"
        shards = [path for path in before if path not in after]
        assert all(path.name.startswith("shard-") for path in shards), "only merged shards may disappear"
        before = after
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        if (tmp_path / "killed").exists():
            es.Atlas.load(out)  # the folder exists only when it is complete
    assert kills == 5
    assert membership_bytes(es.Atlas.load(out)) == reference
    assert not list(tmp_path.glob("killed.tmp*"))


def test_two_processes_give_the_same_bytes_as_one(spec, image_folder, tmp_path, capfd):
    one = es.build(spec, images=str(image_folder), out=tmp_path / "one", quiet=True)
    two = es.build(spec, images=str(image_folder), out=tmp_path / "two", work=tmp_path / "w", processes=2, quiet=True)
    for name in ("memberships.safetensors", "references.safetensors", "images.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    with pytest.raises(es.EludeSteerError, match="layers 0 to 1"):
        bad = replace(spec, model=replace(spec.model, layer="layers.9.mlp.fc2"))
        es.build(bad, images=str(image_folder), out=tmp_path / "three", processes=2, quiet=True)
    assert "Traceback" not in capfd.readouterr().err


def test_another_batch_size_gives_nearly_the_same_atlas(spec, image_folder, tmp_path):
    one = es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True)
    other = es.build(spec, images=image_folder, out=tmp_path / "b", settings=["tokens.batch_size=3"], quiet=True)
    # Rounding in the tower may change a few bits or, rarely, a cluster: compare units with as many sub-units.
    same = [u for u in range(16) if len(one.sub_units_of(u)) == len(other.sub_units_of(u))]
    assert len(same) >= 12
    agree = [
        torch.equal(one.members(list(one.sub_units_of(u))), other.members(list(other.sub_units_of(u)))) for u in same
    ]
    assert np.mean(agree) >= 0.75


class Block(nn.Module):
    """A ViT's last steps: patches, a CLS token in front, an MLP."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 7, 7)
        self.cls = nn.Parameter(torch.randn(1, 1, 12))
        self.fc1, self.fc2 = nn.Linear(12, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.fc2(torch.relu(self.fc1(x)))


SMALL = {"tokens": TokensSpec(per_image=6), "clusters": ClustersSpec(top_k=150, min_cluster_size=8, min_samples=3)}


def to_tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB").resize((28, 28)))).permute(2, 0, 1).float() / 255


def test_disentangle_takes_a_folder_a_list_or_a_stream(image_folder, tmp_path):
    torch.manual_seed(0)
    model = Block().train()
    atlas = es.disentangle(
        model, layer="fc2", images=image_folder, preprocess=to_tensor, out=tmp_path / "a", quiet=True, **SMALL
    )
    assert model.training
    assert len(atlas) > 10
    images = _open_images(image_folder)
    listed = es.disentangle(
        model, layer="fc2", images=images, preprocess=to_tensor, out=tmp_path / "b", quiet=True, **SMALL
    )
    tensors = (to_tensor(image) for image in images)
    streamed = es.disentangle(model, layer="fc2", images=tensors, out=tmp_path / "c", quiet=True, **SMALL)
    assert len(listed) > 10
    assert len(streamed) > 10
    assert not list((tmp_path / "home" / "work").glob("stream-*")), "the work of a stream is deleted"
    x = torch.stack([to_tensor(image) for image in images[:4]])
    model.eval()
    expected = model(x)
    name, layer = find_layer(model, "fc2")
    with swap_module(model, name, split_layer(layer, atlas.members(), atlas.units)):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(x), expected)


def test_another_preprocess_does_not_reuse_stages(image_folder, tmp_path):
    torch.manual_seed(0)
    model = Block()
    one = es.disentangle(
        model, layer="fc2", images=image_folder, preprocess=to_tensor, out=tmp_path / "a", quiet=True, **SMALL
    )
    darker = es.disentangle(
        model, layer="fc2", images=image_folder, preprocess=lambda im: to_tensor(im) * 0.3 - 1, out=tmp_path / "b",
        quiet=True, **SMALL,
    )  # fmt: skip
    assert membership_bytes(one) != membership_bytes(darker)


def test_a_convolution_can_be_split(image_folder, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 20, 7, 7), nn.ReLU(), nn.Conv2d(20, 8, 1))
    atlas = es.disentangle(
        model, layer="2", images=image_folder, preprocess=to_tensor, out=tmp_path / "a", quiet=True, **SMALL
    )
    assert len(atlas) > 8


def test_the_settings_that_ablations_change(spec, image_folder, tmp_path):
    def build_with(name, *settings):
        return es.build(spec, images=image_folder, out=tmp_path / name, settings=settings, quiet=True)

    ours, chance = build_with("gap"), build_with("random", "split.winner_rule=random")
    assert torch.equal(ours.units, chance.units), "as many sub-units, split at random"
    owners = torch.zeros(16, 40).index_add_(0, chance.units, chance.members().float())
    assert (owners == 1).all()
    for settings in (["clusters.selection=eom"], ["clusters.min_samples=6"], ["clusters.backend=hdbscan"]):
        assert len(build_with("x", *settings)) >= 16


def test_warnings_and_errors_of_a_build(spec, image_folder, tmp_path):
    with pytest.raises(SpecError, match=r"spec 'tiny' leaves the probing images open; pass --images FOLDER"):
        es.build(spec)
    with pytest.warns(
        EludeSteerWarning, match=r"top_k is 9999, but only 320 instances are stored: all of them are used"
    ):
        es.build(spec, images=image_folder, out=tmp_path / "k", settings=["clusters.top_k=9999"], quiet=True)
    broken = tmp_path / "broken"
    shutil.copytree(image_folder, broken)
    (broken / "torn.png").write_bytes(next(broken.glob("*.png")).read_bytes()[:60])
    (broken / "text.jpg").write_text("no image")
    with pytest.warns(
        EludeSteerWarning, match=r"2 images of .*broken cannot be read and were left out: text.jpg \(no image"
    ):
        es.build(spec, images=broken, out=tmp_path / "b", quiet=True)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "a.png").write_text("x")
    with pytest.raises(ImageError, match=r"none of the 1 images of .* can be read"):
        es.build(spec, images=bad, out=tmp_path / "c", quiet=True)
    with pytest.raises(SpecError, match="several processes need images that each can open"):
        es.build(spec, images=_open_images(image_folder), processes=2)
    assert spec.images == ImagesSpec()


def test_an_atlas_refuses_another_model(spec, image_folder, tmp_path):
    from tests.helpers.tiny import save_llava

    atlas = es.build(spec, images=image_folder, out=tmp_path / "a", quiet=True)
    other = es.Vlm.load(str(save_llava(tmp_path / "other", seed=1)), layer=LAYER)
    with pytest.raises(AtlasError, match="was built for other weights of this layer"):
        atlas.check(other.layer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer": 3}, "the end of a layer's name, not a Block and 3"),
        ({"clusters": {"top_k": 5}}, "clusters: must be a ClustersSpec, not a dict"),
        ({"clusters": ClustersSpec(top_k=-5)}, "clusters.top_k: must be a whole number of at least 2 or auto, not -5"),
        ({"tokens": TokensSpec(dtype="int8")}, "tokens.dtype: must be float16 or float32, not 'int8'"),
        ({"tokens": TokensSpec(per_image=0)}, "tokens.per_image: must be"),
        ({"threads": -1}, "threads is -1; it must be at least 1"),
        ({"name": "../up"}, r"'\.\./up' cannot be the name of an atlas"),
        ({"name": "."}, r"'\.' cannot be the name of an atlas"),
        ({"preprocess": None}, "the model takes tensors, not PngImageFile; pass preprocess="),
        ({"skip_tokens": range(17)}, "skip_tokens leaves none of the 17 tokens"),
        ({"images": None}, "images cannot be taken from None"),
    ],
)
def test_wrong_arguments_are_explained(image_folder, change, text):
    arguments = {"layer": "fc2", "images": image_folder, "preprocess": to_tensor, "quiet": True, **SMALL, **change}
    with pytest.raises(es.EludeSteerError, match=text):
        es.disentangle(Block(), **arguments)


def test_another_activation_function_or_hook_does_not_reuse_stages(image_folder, tmp_path):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 20, 7, 7), nn.ReLU(), nn.Conv2d(20, 8, 1))
    second = nn.Sequential(first[0], nn.Tanh(), first[2])

    def reference_values(model, name):
        atlas = es.disentangle(
            model, layer="2", images=image_folder, preprocess=to_tensor, out=tmp_path / name, quiet=True, **SMALL
        )
        return atlas.references.values

    one, other = reference_values(first, "a"), reference_values(second, "b")
    assert not torch.equal(one, other)
    handle = first[1].register_forward_hook(lambda module, args, output: output * 0.5)
    hooked = reference_values(first, "c")
    handle.remove()
    assert not torch.equal(one, hooked)
    assert torch.equal(one, reference_values(first, "d"))


def test_a_layer_that_runs_twice_is_refused(image_folder):
    class Twice(Block):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    with pytest.raises(es.EludeSteerError, match="the layer ran 2 times in this forward pass"):
        es.disentangle(Twice(), layer="fc2", images=image_folder, preprocess=to_tensor, quiet=True, **SMALL)


def _build_in_race(index, images, folder, queue):
    try:
        torch.manual_seed(0)
        model = Block()
        atlas = es.disentangle(
            model, layer="fc2", images=images, preprocess=to_tensor, out=Path(folder) / f"a{index}",
            work=Path(folder) / "work", threads=1, quiet=True, **SMALL,
        )  # fmt: skip
        queue.put(membership_bytes(atlas))
    except BaseException as error:
        queue.put(repr(error))
        raise


def test_two_builds_at_the_same_time_share_their_work(image_folder, tmp_path):
    context = multiprocessing.get_context("forkserver")
    for round_ in range(3):
        queue, folder = context.Queue(), tmp_path / str(round_)
        folder.mkdir()
        children = [context.Process(target=_build_in_race, args=(i, image_folder, folder, queue)) for i in range(2)]
        for child in children:
            child.start()
        one, other = queue.get(timeout=120), queue.get(timeout=120)
        for child in children:
            child.join()
        assert one == other
        assert isinstance(one, bytes)


def test_damaged_work_is_explained(image_folder, tmp_path):
    torch.manual_seed(0)
    model = Block()

    def run():
        return es.disentangle(
            model, layer="fc2", images=image_folder, preprocess=to_tensor, out=tmp_path / "a", work=tmp_path / "w",
            quiet=True, **SMALL,
        )  # fmt: skip

    run()
    for pattern, text in (
        ("split-*/*.safetensors", "is damaged; delete it and run the same command again"),
        ("tokens-*/places.bin", "the stored tokens in .* are damaged; delete that folder and run again"),
        ("*/backend-*.json", "is damaged; delete it and run the same command again"),
    ):
        path = next((tmp_path / "w").glob(pattern))
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(es.EludeSteerError, match=text):
            run()
        path.write_bytes(data)
    run()


def test_a_build_that_splits_nothing_warns(spec, image_folder, tmp_path):
    with pytest.warns(
        EludeSteerWarning, match="no unit was split: no clusters of at least clusters.min_cluster_size = 190"
    ):
        es.build(spec, images=image_folder, out=tmp_path / "a", settings="clusters.min_cluster_size=190", quiet=True)
