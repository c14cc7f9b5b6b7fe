import numpy as np
import pytest
import torch
from torch import nn

import elude_steer as es
from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.streams import FIRING_SHARE, firing_reference, subtract_mean, sum_where_firing
from elude_steer.errors import AtlasError
from elude_steer.models import vision
from elude_steer.models.vlm import Vlm
from elude_steer.recipe_files import load_spec
from tests.helpers.atlases import make_atlas


class Block(nn.Module):
    """A residual block; `maps` puts channels first, `narrow` returns fewer channels."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fc1, self.fc2 = kind, nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        out = x + self.fc2(self.fc1(x).relu())
        if self.kind == "tuple":
            return out, None
        return out.movedim(-1, 1) if self.kind == "maps" else (out[..., :2] if self.kind == "narrow" else out)


def tower_of(kind, shape):
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(kind)])

    def forward(x):
        model.blocks[0](x)
        pytest.fail("the model ran beyond the block")

    model.forward = forward
    pixels = torch.randn(2, *shape)
    return model.blocks[0], pixels, vision.Tower(model, "blocks.0.fc2", model.blocks[0].fc2, lambda _images: pixels)


@pytest.mark.parametrize(
    ("kind", "shape"), [("plain", (5, 4)), ("tuple", (5, 4)), ("maps", (2, 3, 4)), ("narrow", (5, 4))]
)
def test_the_stream_is_what_the_block_of_the_layer_returns(kind, shape):
    block, pixels, tower = tower_of(kind, shape)
    pairs = tower.streams([0, 1])
    assert len(pairs) == 2
    for (q, stream), x in zip(pairs, pixels, strict=True):
        given = block.fc1(x).relu().flatten(0, -2)
        added = block.fc2(given)
        torch.testing.assert_close(q[0], given)
        # If the block returns another shape, the stream is the layer's own output.
        torch.testing.assert_close(stream[0], added if kind == "narrow" else x.flatten(0, -2) + added)
    assert not block._forward_hooks


def test_streams_are_averaged_over_tokens_where_the_sub_unit_fires():
    weight, bias = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0.0, 0.0, 0.5])
    q = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    stream = torch.tensor([[10.0, 1.0], [20.0, 2.0], [30.0, 3.0]])
    sums, counts = sum_where_firing(torch.addmm(bias, q, weight.T), stream, torch.tensor([1.5, 1.0, torch.inf]))
    assert counts.tolist() == [1, 2, 0]
    assert sums.tolist() == [[20, 2], [50, 5], [0, 0]]
    streams = subtract_mean(sums.double(), counts.double())
    assert streams.dtype == torch.float16
    assert streams.tolist() == [
        [-2.5, -0.25],
        [2.5, 0.25],
        [0, 0],
    ]  # means 20 and 25, minus 22.5
    assert subtract_mean(torch.zeros(2, 3), torch.zeros(2)).tolist() == [[0] * 3] * 2
    assert firing_reference(torch.tensor([2.0, 0.0, -1.0])).tolist() == [2.0, np.inf, np.inf]


def test_shipped_streams_agree_with_a_new_measurement():
    """Measured in a simple way on a few images and sub-units, they have nearly the same direction."""
    atlas, vlm = Atlas.load("toyland"), Vlm.load("toyland/captioner")
    images = [scene.image for scene in toyland.scenes(seed=31, n=150)]
    kinds = ("baby", "biker", "flower", "bed")
    some = [s for s in range(len(atlas)) if atlas.labels[s] in kinds]
    weight, bias = atlas.parameters(some, vlm.layer.weight.detach(), vlm.layer.bias.detach())
    rows = []
    for start in range(0, len(images), 30):
        rows += [(q.flatten(0, 1), h.flatten(0, 1)) for q, h in vlm.streams(images[start : start + 30])]
    q, carried = torch.cat([q for q, _ in rows]), torch.cat([h for _, h in rows])
    now = q @ weight.T + bias
    agree = []
    for column, s in enumerate(some):
        fires = now[:, column] >= FIRING_SHARE * atlas.references.activation[s]
        if fires.sum() >= 20:
            mean = carried[fires].mean(0) - carried.mean(0)
            agree.append(float(torch.cosine_similarity(mean, atlas.streams[s].float(), dim=0)))
    assert len(agree) > 20
    assert np.mean(agree) > 0.7


def test_target_levels_are_divided_among_the_sub_units_of_a_unit():
    atlas = make_atlas(layer=nn.Linear(21, 6))
    streams = torch.arange(13 * 6).reshape(13, 6).half()
    atlas = es.Atlas(**{**vars(atlas), "streams": streams})
    units = atlas.units[[1, 2, 9]]
    wanted = streams[[1, 2, 9]].float().mean(0)[units] / torch.tensor([2.0, 2.0, 1.0])
    assert units[0] == units[1] != units[2]
    torch.testing.assert_close(atlas.target_levels([1, 2, 9], "stream"), wanted)
    torch.testing.assert_close(atlas.target_levels([1, 2, 9], "reference"), atlas.references.activation[[1, 2, 9]])
    assert len(atlas.target_levels([], "stream")) == 0
    with pytest.raises(AtlasError, match="has no streams; build it again, or use level: reference"):
        make_atlas(layer=nn.Linear(21, 6)).target_levels([1], "stream")


def test_streams_survive_saving_and_loading(tmp_path):
    atlas = Atlas.load("toyland")
    again = Atlas.load(atlas.save(tmp_path / "copy"))
    assert torch.equal(again.streams, atlas.streams)
    assert atlas.streams.shape == (len(atlas), atlas.d_out)


def test_streams_do_not_depend_on_the_number_of_threads(tmp_path):
    spec = load_spec("toyland")
    small = ["images.limit=40", "labels.top_k=20", "clusters.top_k=200", "clusters.min_cluster_size=20"]
    one, two = (
        es.build(
            spec,
            settings=small,
            out=tmp_path / f"a{threads}",
            work=tmp_path / f"w{threads}",
            threads=threads,
            quiet=True,
        )
        for threads in (1, 2)
    )
    assert one.streams.abs().max() > 0
    assert torch.equal(one.streams, two.streams)
    none = es.build(
        spec, settings=[*small, "references.streams=0"], out=tmp_path / "none", work=tmp_path / "w2", quiet=True
    )
    assert none.streams is None


def test_streams_too_large_for_float16_stay_float32():
    sums, counts = torch.tensor([[1e5, 0], [-1e5, 0]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert subtract_mean(sums, counts).tolist() == [[1e5, 0], [-1e5, 0]]
    assert subtract_mean(sums, counts).dtype == torch.float32
    assert subtract_mean(sums / 10, counts).dtype == torch.float16
