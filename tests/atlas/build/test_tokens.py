import json

import numpy as np
import pytest
import torch
from torch import nn

from elude_steer.atlas.build import token_store, tokens
from elude_steer.atlas.build.stages import iterate_shards
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.atlas.build.tokens import collect_shard, merge_shards
from elude_steer.errors import ImageError, ModelError, StorageError
from elude_steer.models.images import image_set
from elude_steer.models.vision import Tower
from elude_steer.specs import TokensSpec


class Net(nn.Module):
    """Sixteen tokens of six pixels each, plus a CLS and a register token in front."""

    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(6, 5)

    def forward(self, x):
        patches = x.reshape(len(x), 16, 6)
        return self.fc2(torch.cat([patches.mean(1, keepdim=True), patches[:, :1] * 0, patches], 1))


@pytest.fixture
def tower():
    torch.manual_seed(0)
    net = Net()
    return Tower(net, "fc2", net.fc2, lambda images: torch.stack(list(images)), skip_tokens=(1,))


def collect(tower, images, folder, spec, shard=64):
    source = image_set(images)
    count = 0
    for number, batches in iterate_shards(source, spec.batch_size, shard):
        collect_shard(tower, batches, [(spec, folder)], number)
        count += 1
    notes = merge_shards(folder, count, "test")
    return TokenStore(folder), notes


@pytest.fixture
def images():
    return list(torch.rand(23, 96, generator=torch.Generator().manual_seed(1)))


def test_all_tokens_are_stored_in_order_without_registers(tower, images, tmp_path):
    store, notes = collect(tower, images, tmp_path, TokensSpec("all", dtype="float32"))
    assert notes == []
    assert len(store) == 23 * 17
    expected = torch.cat([q[0][[0, *range(2, 18)]] for q in tower.encode(images)])
    assert torch.equal(store.read(0, len(store)), expected)
    assert store.places["token"][:3].tolist() == [0, 2, 3]
    assert store.places["image"][-1] == 22
    rows = np.array([50, 3, 3, 390])
    assert torch.equal(store.gather(rows), expected[rows])
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.bin", "places.bin", "shape.json", "merged.json"}


def test_drawn_tokens_depend_only_on_content_and_seed(tower, images, tmp_path):
    spec = TokensSpec(3, seed=42, dtype="float32", batch_size=4)
    store, _ = collect(tower, images, tmp_path / "a", spec)
    assert len(store) == 23 * 3
    turned, _ = collect(tower, images[::-1], tmp_path / "b", spec)

    def tokens_of_image(one, number):
        return one.places["token"][one.places["image"] == number].tolist()

    assert [tokens_of_image(store, i) for i in range(23)] == [tokens_of_image(turned, 22 - i) for i in range(23)]
    other, _ = collect(tower, images, tmp_path / "c", TokensSpec(3, seed=123, dtype="float32", batch_size=4))
    assert any(tokens_of_image(store, i) != tokens_of_image(other, i) for i in range(23))
    assert 1 not in set(store.places["token"].tolist())
    assert len({tuple(tokens_of_image(store, i)) for i in range(23)}) > 10


@pytest.mark.parametrize("shard", [4, 8, 1000])
def test_the_shard_size_changes_nothing(tower, images, tmp_path, shard):
    spec = TokensSpec(2, batch_size=4)
    collect(tower, images, tmp_path / "a", spec, shard)
    collect(tower, images, tmp_path / "b", spec, 12)
    for name in ("tokens.bin", "places.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_interrupted_merge_continues(tower, images, tmp_path, monkeypatch):
    spec = TokensSpec(2, batch_size=4)
    whole, _ = collect(tower, images, tmp_path / "a", spec, 4)
    folder = tmp_path / "b"
    for number, batches in iterate_shards(image_set(images), 4, 4):
        collect_shard(tower, batches, [(spec, folder)], number)
    append, seen = tokens._append, []

    def interrupted(*args):
        seen.append(args)
        if len(seen) == 4:
            append(*args)
            raise KeyboardInterrupt
        return append(*args)

    monkeypatch.setattr(tokens, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_shards(folder, 6, "test")
    monkeypatch.setattr(tokens, "_append", append)
    merge_shards(folder, 6, "test")
    merge_shards(folder, 6, "test")
    assert torch.equal(TokenStore(folder).read(0, 99), whole.read(0, 99))
    assert TokenStore(folder).image_ids == whole.image_ids


def test_unreadable_images_are_skipped_and_reported(tower, images, tmp_path):
    class Source:
        def __init__(self, bad):
            self.bad = bad

        def __len__(self):
            return len(images)

        def __getitem__(self, i):
            if i in self.bad:
                raise OSError("torn")
            return images[i]

    store, notes = collect(tower, Source({3, 7}), tmp_path / "a", TokensSpec(2))
    assert len(store) == 21 * 2
    assert notes == ["00000003 (torn)", "00000007 (torn)"]
    assert 3 not in store.image_ids
    with pytest.raises(ImageError, match=r"none of the 23 images of test can be read; the first: 00000000 \(torn\)"):
        collect(tower, Source(set(range(23))), tmp_path / "b", TokensSpec(2))


def test_values_beyond_float16_are_refused(tower, tmp_path):
    with pytest.raises(ModelError, match=r"layer 'fc2' do not fit float16; set tokens\.dtype: float32"):
        collect(tower, [torch.full((96,), 1e6)], tmp_path, TokensSpec(2))


@pytest.fixture
def store(tower, images, tmp_path):
    return collect(tower, images, tmp_path, TokensSpec("all", dtype="float32"))[0]


@pytest.mark.parametrize("k", [1, 7, 100, 391, 5000])
@pytest.mark.parametrize("chunk", [1, 3])
def test_strongest_instances_equal_a_top_k_over_the_whole_store(store, tower, k, chunk, monkeypatch):
    monkeypatch.setattr(token_store, "_BLOCK_ROWS", 16)  # several chunks of a small store
    w, b = tower.layer.weight.detach(), tower.layer.bias.detach() - 3  # negative values must be able to enter
    values, rows = strongest_instances(store, w, b, k, chunk_blocks=chunk)
    everything = (store.read(0, len(store)) @ w.T + b).T
    expected = everything.topk(min(k, len(store)), dim=1).values
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(everything.gather(1, rows), values)
    assert all(len(set(unit)) == len(unit) for unit in rows.tolist())


def test_ties_keep_the_order_of_the_store(tower, tmp_path):
    same = [torch.ones(96)] * 5
    store, _ = collect(tower, same, tmp_path, TokensSpec("all", dtype="float32"))
    _, rows = strongest_instances(store, torch.ones(1, 6), torch.zeros(1), 10)
    assert rows.tolist() == [list(range(10))]


def test_the_summary_of_a_shard_is_plain_json(tower, images, tmp_path):
    spec = TokensSpec(2)
    number, batches = next(iterate_shards(image_set(images), spec.batch_size))
    collect_shard(tower, batches, [(spec, tmp_path)], number)
    summary = json.loads((tmp_path / "shard-000000.json").read_text())
    assert summary["rows"] == 46
    assert summary["images"]["0"] == "00000000"


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7"])
@pytest.mark.parametrize("name", ["shape.json", "merged.json"])
def test_damaged_files_of_the_store_are_named(name, text, tower, images, tmp_path):
    collect(tower, images, tmp_path / "a", TokensSpec(2))
    (tmp_path / "a" / name).write_text(text)
    with pytest.raises(StorageError, match=r"the stored tokens in '.*a' are damaged; delete that folder and run again"):
        _ = TokenStore(tmp_path / "a").image_ids
    if name == "merged.json":
        with pytest.raises(StorageError, match=r"the stored tokens in '.*a' are damaged"):
            merge_shards(tmp_path / "a", 1, "test")


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 1}'])
def test_a_damaged_shard_is_named(text, tower, images, tmp_path):
    spec, folder = TokensSpec(2, batch_size=4), tmp_path / "a"
    for number, batches in iterate_shards(image_set(images), 4, 4):
        collect_shard(tower, batches, [(spec, folder)], number)
    path = tokens.shard_path(folder, 2)
    path.write_text(text)
    for read in (lambda: merge_shards(folder, 6, "test"), lambda: tokens._count_images(folder, 6)):
        with pytest.raises(StorageError, match=r"shard-000002\.json' is damaged; delete it and run the same command"):
            read()


def test_a_damaged_count_is_named(tmp_path):
    (tmp_path / "counted.json").write_text("{")
    with pytest.raises(StorageError, match=r"the stored tokens in .* are damaged; delete that folder"):
        tokens._merge_and_report(None, tmp_path)
