from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import nn

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.familiarity import FILE, MIN_IMAGES, Familiarity, describe_image, measure_familiarity
from elude_steer.models.vlm import Vlm
from tests.helpers.atlases import make_atlas


def images_of(directions, count, seed):
    """Vectors that lie in the span of some directions, with a little noise."""
    g = torch.Generator().manual_seed(seed)
    return (
        3 + torch.randn(count, len(directions), generator=g) @ directions + 0.01 * torch.randn(count, 40, generator=g)
    )


@pytest.fixture(scope="module")
def directions():
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def familiarity(directions):
    return measure_familiarity(images_of(directions, 1000, 2))


def test_images_of_the_same_kind_are_within_the_limit_and_others_are_beyond(familiarity, directions):
    same = familiarity.distances(images_of(directions, 2000, 3)) > familiarity.limit
    assert same.double().mean() <= 0.02
    # The same deviations of each channel, but not in the same combinations.
    mixed = torch.stack([column[torch.randperm(200)] for column in images_of(directions, 200, 4).T], 1)
    assert (familiarity.distances(mixed) > familiarity.limit).all()
    assert familiarity.is_unlike(mixed[0])
    assert not familiarity.is_unlike(familiarity.mean)


def test_fewer_images_than_needed_give_none(directions):
    assert measure_familiarity(images_of(directions, MIN_IMAGES - 1, 2)) is None
    assert measure_familiarity(images_of(directions, MIN_IMAGES, 2)) is not None


def test_images_that_say_nothing_give_none(directions):
    assert measure_familiarity(torch.ones(MIN_IMAGES, 7)) is None
    assert measure_familiarity(torch.full((MIN_IMAGES, 7), torch.inf)) is None
    vectors = images_of(directions, 2 * MIN_IMAGES, 2)
    vectors[3] = torch.nan
    assert measure_familiarity(vectors).limit.isfinite()


def test_a_channel_that_is_silent_in_all_images_does_not_decide_alone(directions):
    vectors = images_of(directions, 1000, 2)
    vectors[:, 5] = 0.0
    found = measure_familiarity(vectors)
    vector = vectors[0].clone()
    vector[5] = 1e-4
    assert not found.is_unlike(vector)


def test_the_vector_of_an_image_is_the_mean_over_its_patches():
    q = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([1, 2, 4])
    torch.testing.assert_close(describe_image(q, positions), q[:, [1, 2, 4]].mean((0, 1)))
    assert describe_image(q.bfloat16(), positions).dtype == torch.float32


def test_it_survives_saving_and_loading_and_atlases_without_it_load(tmp_path, familiarity):
    plain = make_atlas(d_in=40, layer=nn.Linear(40, 6))
    old = Atlas.load(plain.save(tmp_path / "old"))
    assert old.familiarity is None
    assert FILE not in old.about["files"]
    new = Atlas.load(replace(plain, familiarity=familiarity).save(tmp_path / "new"))
    assert FILE in new.about["files"]
    for name in Familiarity.__dataclass_fields__:
        assert torch.equal(getattr(new.familiarity, name), getattr(familiarity, name))
    assert new.card() == old.card()
    assert {**new.about["files"], FILE: ""} == {**old.about["files"], FILE: ""}
    assert new.fingerprint == old.fingerprint


def test_toyland_knows_its_scenes_and_no_photographs():
    vlm, familiarity = Vlm.load("toyland/captioner"), Atlas.load("toyland").familiarity
    scenes = [scene.image for scene in toyland.scenes(seed=50_101, n=120)]
    scenes += [scene.image for scene in toyland.scenes(seed=50_102, n=40, wide=1.0, clutter=1.0)]
    scenes += [Image.open(path).convert("RGB") for path in sorted(Path("demos/images").glob("toyland-*.png"))]
    photographs = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]

    def count_unlike(images):
        vectors = [describe_image(q, vlm.token_indices(q.shape[1])) for q in vlm.encode(images)]
        return sum(map(familiarity.is_unlike, vectors))

    assert sum(count_unlike(scenes[start : start + 40]) for start in range(0, 160, 40)) <= 2
    assert count_unlike(scenes[160:]) == 0  # those that the guides show
    assert count_unlike(photographs) == 2
