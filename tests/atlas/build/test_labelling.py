import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import elude_steer as es
from demos.toyland import labeller
from elude_steer.atlas.build.token_store import strongest_patches
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.errors import AtlasError, EludeSteerWarning, SpecError
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.models.dual_encoder import load_dual_encoder
from elude_steer.models.images import image_set
from elude_steer.models.vlm import Vlm
from tests.helpers.tiny import save_images

SPEC = """
name: named
model: {{id: "{model}", layer: layers.1.mlp.fc2}}
images: {{source: "{images}"}}
tokens: {{per_image: 6}}
clusters: {{top_k: 120, backend: exact, min_cluster_size: 8}}
split: {{winner_rule: gap}}
references: {{keep: 5, thumbnails: 16}}
labels: {{scorer: "{scorer}", vocabulary: toyland, top_k: 12}}
matcher: {{id: toyland/matcher}}
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """An untrained labeller: its labels mean nothing, but they can be compared."""
    folder = tmp_path_factory.mktemp("scorer")
    labeller.save(labeller.new_model(3), folder)
    return folder


@pytest.fixture(scope="module")
def spec(tiny_llava, image_folder, scorer, tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "named.yaml"
    path.write_text(SPEC.format(model=tiny_llava, images=image_folder, scorer=scorer), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def atlas(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    return es.build(spec, out=folder / "atlas", work=folder / "work", quiet=True)


@pytest.fixture(scope="module")
def pooled(atlas, tiny_llava, image_folder):
    """Every sub-unit's strongest patch in every image, the slow way: value and place, `(N, S)`."""
    vlm = Vlm.load(str(tiny_llava), layer="layers.1.mlp.fc2")
    weight, bias = atlas.parameters(range(len(atlas)), vlm.layer.weight.detach(), vlm.layer.bias.detach())
    values, places = [], []
    items = list(image_set(image_folder).items())
    for start in range(0, len(items), 8):
        for q in vlm.encode([item.read()[0] for item in items[start : start + 8]]):
            value, place = (q.flatten(0, 1) @ weight.T + bias).max(0)
            values.append(value)
            places.append(place)
    return torch.stack(values), torch.stack(places), [item.id for item in items]


def test_labels_equal_those_of_the_whole_matrix(atlas, pooled, image_folder, scorer):
    items = list(image_set(image_folder).items())
    model, words = load_dual_encoder(str(scorer)), read_vocabulary("toyland")
    similarities = torch.cat([model.embed_images([item.read()[0]]) for item in items]) @ model.embed_texts(words).T
    alive = ~atlas.dead
    named = dissect(pooled[0][:, alive], similarities, Dissection(top_k=12))
    assert torch.isin(torch.from_numpy(atlas.labels.words[alive.numpy(), 0]), named.words[:, 0]).all()
    agree = atlas.labels.words[alive.numpy(), 0] == named.words[:, 0].numpy()
    assert agree.mean() > 0.98  # a product of another shape rounds differently, and labels of noise are near ties
    np.testing.assert_allclose(atlas.labels.scores[alive.numpy(), 0], named.scores[:, 0], atol=2e-3)
    assert atlas.labels.vocabulary == tuple(words)
    assert atlas.labels.about["scorer"] == str(scorer)
    assert (atlas.labels.words[~alive.numpy()] == -1).all()


def test_references_are_the_strongest_patches_of_whole_images(atlas, pooled):
    values, places, ids = pooled
    order = values.sort(dim=0, descending=True, stable=True)
    torch.testing.assert_close(atlas.references.values, order.values[:5].T, rtol=1e-4, atol=1e-5)
    first = [ids.index(atlas.image_ids[i]) for i in atlas.references.images[:, 0].tolist()]
    agree = np.mean(np.array(first) == order.indices[0].numpy())
    assert agree > 0.98
    tokens = 16
    place = atlas.references.tiles[:, 0] * tokens + atlas.references.tokens[:, 0]
    at = places[torch.tensor(first), torch.arange(len(atlas))]
    assert (place == at).float().mean() > 0.98
    assert len(atlas.unit_references.values) == atlas.d_out


def test_one_thread_gives_the_same_bytes(atlas, spec, tmp_path):
    """Several processes are tested in test_pooling.py."""
    files = {path.name: path.read_bytes() for path in atlas.folder.rglob("*") if path.is_file()}
    again = es.build(spec, out=tmp_path / "again", work=tmp_path / "w1", quiet=True, threads=1)
    assert {path.name: path.read_bytes() for path in again.folder.rglob("*") if path.is_file()} == files


def test_other_batch_sizes_do_not_share_files(spec, tmp_path):
    """Image vectors are in numbered files of whole batches; two batch sizes must not share a folder."""
    images = save_images(tmp_path / "images", 70)
    made = [
        es.build(spec, images=images, out=tmp_path / f"{size}-{turn}", work=tmp_path / "work", quiet=True,
                 settings=[f"tokens.batch_size={size}"])
        for turn, size in enumerate((8, 48, 8))
    ]  # fmt: skip
    assert np.array_equal(made[0].labels.words, made[2].labels.words)


def test_finished_images_are_not_encoded_again(spec, tmp_path, monkeypatch):
    work = tmp_path / "work"
    first = es.build(spec, out=tmp_path / "a", work=work, quiet=True)
    calls = []
    whole = Vlm.encode
    monkeypatch.setattr(Vlm, "encode", lambda self, images: calls.append(len(images)) or whole(self, images))
    shard = sorted(next(work.glob("pooled-*")).glob("shard-*"))[0]
    shard.unlink()  # as if the run had been killed
    next(work.glob("strongest-*/*")).unlink()
    again = es.build(spec, out=tmp_path / "b", work=work, quiet=True)
    assert sum(calls) == 40  # one shard
    assert np.array_equal(again.labels.words, first.labels.words)


def test_thumbnails_show_the_reference_images(atlas):
    files = sorted((atlas.folder / "thumbnails").iterdir())
    assert [path.name for path in files] == [f"{i:06d}.jpg" for i in range(len(atlas.image_ids))]
    with Image.open(files[0]) as image:
        assert max(image.size) == 16


def test_search_and_card(atlas):
    found = atlas.search("puppy", limit=4)
    assert len(found) == 4
    assert found[0].label == found[0].via
    assert all(a.similarity >= b.similarity for a, b in pairwise(found))
    for match in found:
        assert atlas.sub_units_of(match.unit)[match.part] == match.sub_unit
    with pytest.raises(SpecError, match="a concept is a word"):
        atlas.search(" ")
    assert "words, by" in atlas.card()
    loaded = es.Atlas.load(atlas.folder)
    assert loaded.labels.counts == atlas.labels.counts


def test_another_method_or_vocabulary_reuses_pooled_activations(spec, atlas, tmp_path):
    work = tmp_path / "work"
    es.build(spec, out=tmp_path / "a", work=work, quiet=True)
    words = tmp_path / "words.txt"
    words.write_text("dog\r\n\r\nÄpfel\r\ndog\r\ncat\r\n", encoding="utf-8")
    for method in ("wpmi", "cos_cubed"):
        settings = [f"labels.method={method}", f"labels.vocabulary={words}"]
        other = es.build(spec, out=tmp_path / method, work=work, quiet=True, settings=settings)
        assert set(other.labels.counts) <= {"dog", "Äpfel", "cat"}
        assert other.labels.words.shape[1] == 3
    assert len(list(work.glob("pooled-*"))) == 1


def test_errors_and_warnings_of_labelling(spec, image_folder, tmp_path):
    with pytest.raises(SpecError, match="a stream can be read only once"):
        es.build(spec, images=(Image.new("RGB", (28, 28)) for _ in range(30)), out=tmp_path / "a", quiet=True)
    with pytest.raises(SpecError, match=r"labels.template is 'a photo'; mark the place of the word"):
        es.build(spec, out=tmp_path / "a", work=tmp_path, quiet=True, settings=["labels.template=a photo"])
    with pytest.raises(SpecError, match=r"vocabulary 'nounz' cannot be read .* Did you mean 'nouns'"):
        es.build(spec, out=tmp_path / "a", work=tmp_path, quiet=True, settings=["labels.vocabulary=nounz"])
    with pytest.warns(EludeSteerWarning, match=r"labels.top_k is 100, but there are only 40 images"):
        es.build(spec, out=tmp_path / "b", work=tmp_path, quiet=True, settings=["labels.top_k=100"])
    unnamed = es.build(
        spec,
        out=tmp_path / "c",
        work=tmp_path,
        quiet=True,
        settings=["labels.scorer=null", "references.thumbnails=null"],
    )
    assert unnamed.labels is None
    with pytest.raises(AtlasError, match="have no labels; build it again with a scorer"):
        unnamed.search("dog")


def test_unreadable_images_are_left_out(spec, image_folder, tmp_path):
    import shutil

    folder = tmp_path / "images"
    shutil.copytree(image_folder, folder)
    (folder / "aaa.png").write_bytes(b"no image")
    with pytest.warns(EludeSteerWarning, match="cannot be read"):
        atlas = es.build(spec, images=folder, out=tmp_path / "a", work=tmp_path / "w", quiet=True)
    assert atlas.labels.about["pictures"] == 40


def test_strongest_patches_take_the_first_of_ties_and_count_through_tiles():
    q = torch.zeros(2, 4, 3)
    q[1, 2] = 1
    weight = torch.tensor([[1.0, 0, 0], [-1, 0, 0]])
    values, places = strongest_patches(q, torch.tensor([1, 2, 3]), weight, torch.zeros(2))
    assert values.tolist() == [1, 0]
    assert places.tolist() == [6, 1]  # second tile, third token; the first that counts


def test_labels_are_saved_as_plain_json(atlas):
    names = json.loads((atlas.folder / "labels.json").read_text(encoding="utf-8"))
    assert names["labels"] == [atlas.labels[i] for i in range(len(atlas))]
    assert names["about"]["method"] == "soft_wpmi"
