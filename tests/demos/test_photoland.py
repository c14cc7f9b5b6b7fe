import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from demos.photoland import captioner, flickr8k, page
from demos.photoland.labeller import words_in
from demos.photoland.parts import Part, get_part
from elude_steer.errors import ImageError, ModelError
from elude_steer.evaluation.edits.photos import photo_world


@pytest.fixture
def flickr(tmp_path):
    """Three photos in the folders of Flickr8k, one of them for each split."""
    from PIL import Image

    folder = tmp_path / "flickr"
    for name in ("Flicker8k_Dataset", "Flicker8k_text"):
        (folder / name).mkdir(parents=True)
    lines = []
    for number, split in enumerate(flickr8k.SPLITS):
        name = f"{number}.jpg"
        Image.new("RGB", (50, 40), (80 * number, 0, 0)).save(folder / "Flicker8k_Dataset" / name)
        lines += [f"{name}#{i}\tA brown dog 's T-shirt is wet ." for i in range(5)]
        (folder / "Flicker8k_text" / flickr8k.SPLITS[split]).write_text(f"{name}\n")
    (folder / "Flicker8k_text" / "Flickr8k.token.txt").write_text("\n".join(lines))
    return folder


def test_photos_are_read_with_clean_captions(flickr):
    (photo,) = flickr8k.read_photos(flickr, "dev")
    assert photo.path.name == "1.jpg"
    assert photo.captions == ("a brown dog's t-shirt is wet",) * 5


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ImageError, match="is not Flickr8k"):
        flickr8k.read_photos(tmp_path, "train")


def test_the_folder_of_captions_is_a_world_of_edits(flickr, tmp_path):
    flickr8k.write_captions(flickr8k.read_photos(flickr, "test"), tmp_path / "test")
    (case,) = photo_world(tmp_path / "test").cases
    assert case.objects == {"dog", "shirt"}
    assert case.image.size == (50, 40)


def test_words_are_counted_over_captions_with_their_plurals():
    photo = flickr8k.Photo("x", ("two dogs run", "a dog", "the cat sat"))
    assert words_in([photo], ["dog", "cat", "horse"]).tolist() == [[2, 1, 0]]


def test_a_part_with_another_hash_is_refused(tmp_path):
    folder = tmp_path / "parts" / "made-up-1.0"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"others")
    with pytest.raises(ModelError, match="has the hash"):
        get_part(Part("made-up==1.0", "weights", "weights", "0" * 64), tmp_path)


def test_each_caption_sees_the_prefix_and_itself():
    groups = torch.tensor([[1, 1, 2, 2, 0]])
    mask = captioner._block_mask(groups, prefix=2)[0, 0] == 0
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]
    assert mask.int().tolist() == expected


def test_batches_are_the_same_after_an_interruption():
    schedule = captioner.Schedule(passes=2, peak=1e-3, shown=1.0, seed=5, size=4, photos=12)
    everything = dict(schedule.batches())
    assert dict(schedule.batches(3)) == {step: batch for step, batch in everything.items() if step >= 3}
    assert sorted(number for step in range(3) for number in everything[step]) == list(range(12))


def test_the_loss_of_packed_captions_equals_the_models_own(monkeypatch):
    """Five captions behind one prefix are scored as each would be alone, behind the whole image."""
    from transformers import Dinov2Config, Dinov2Model

    small = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    monkeypatch.setattr(captioner, "vision_config", lambda: small)
    for name, value in {"PATCHES": 4, "WIDTH": 16, "LAYERS": 1, "HEADS": 2, "INNER": 32}.items():
        monkeypatch.setattr(captioner, name, value)
    torch.manual_seed(1)
    tower = Dinov2Model(small).eval()
    photo = flickr8k.Photo("x", ("a dog runs fast", "a dog", "dog", "the cat", "a cat sees a bird"))
    words = [*captioner.SPECIAL, *sorted({*" ".join(photo.captions).replace("bird", "").split(), "user", "assistant"})]
    model = captioner.new_model(len(words), tower, seed=0).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    pixels = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        states = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[-1].numpy()
        patches = captioner.Patches([states])
        loss = captioner.CaptionLoss(model, words, [photo], patches)
        packed = loss([0], shown=1.0, prompt="", rng=np.random.default_rng(0)).item()
        patches.fold(model.model.multi_modal_projector)
    assert packed == pytest.approx(_alone(model, loss, pixels), rel=1e-4)


def _alone(model, loss, pixels):
    before, after = loss._prompt("")
    total, count = 0.0, 0
    for caption in loss.captions[0]:
        image = torch.full((captioner.PATCHES,), captioner.SPECIAL.index("<image>"))
        start = torch.cat([before, image, after])
        ids = torch.cat([start, torch.tensor(caption)])[None]
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits[0]
        targets = torch.tensor(caption)
        known = targets != loss.tokenizer.unk_token_id
        scores = logits[len(start) - 1 : -1].log_softmax(-1)[torch.arange(len(caption)), targets]
        total, count = total - scores[known].sum().item(), count + int(known.sum())
    return total / count


def test_concepts_of_captions_are_scored():
    pytest.importorskip("PIL")
    from demos.photoland.report import score_concepts
    from elude_steer.evaluation.edits.benchmark import Case, Reading

    cases = [
        Case("a.jpg", frozenset({"dog"})),
        Case("b.jpg", frozenset(), frozenset({"dog"})),
        Case("c.jpg", frozenset()),
    ]
    world = types.SimpleNamespace(
        cases=cases, vocabulary=("dog",), read=lambda text: Reading(frozenset({"dog"} & set(text.split())))
    )
    (row,) = score_concepts(world, dict.fromkeys(("a.jpg", "b.jpg", "c.jpg"), "a dog"))
    assert (row["photos"], row["named"], row["wrong"]) == (1, 1, 1)
    assert json.dumps(row)


def test_detectors_are_scored_against_captions_and_boxes():
    from demos.photoland.detectors import Truth, blind_regions

    there = np.array([True, True, False, False])  # two of four patches
    truth = Truth(("dog",), np.array([[1], [0], [-1], [0]]), {(0, 0): there})
    assert truth.areas(np.array([[0.9], [0.1], [5.0], [0.2]]))["auc"] == 1  # what is not known does not count
    assert truth.areas(np.array([[0.1], [0.1], [5.0], [0.2]]))["words"] == {"dog": 0.25}
    found = truth.overlaps({0: np.array([[1.0], [0.3], [0.5], [-1.0]], dtype=np.float32)})
    assert found["iou"] == pytest.approx(1 / 3)  # the region is the first and the third patch
    assert found["patches"] == pytest.approx(3 / 4)
    assert blind_regions(truth, 2)["whole photo"]["all"]["iou"] == pytest.approx(1 / 2)


def test_boxes_are_of_concepts_and_inside_their_photos():
    from demos.photoland.detectors import BOXES
    from elude_steer.evaluation.edits.photos import concept_names

    photos = json.loads(BOXES.read_text(encoding="utf-8"))["photos"]
    assert len(photos) == 40
    for photo in photos.values():
        width, height = photo["size"]
        for concept, boxes in photo["concepts"].items():
            assert concept in concept_names()
            assert all(0 <= left < right <= width and 0 <= top < bottom <= height for left, top, right, bottom in boxes)
            assert boxes


def test_the_page_of_results_is_what_its_numbers_give():
    results = Path(page.__file__).parents[1] / "results"
    text = (results / "photoland.md").read_text(encoding="utf-8")
    numbers, edits, detectors = (
        json.loads((results / f"photoland{name}.json").read_text(encoding="utf-8"))
        for name in ("", "_edits", "_detectors")
    )
    sections = [
        page.caption_section(numbers),
        page.measure_section(numbers["measured"]),
        page.detector_section(detectors),
        page.steer_section(numbers["steered"]),
        page.part_section(edits),
        page.cost_section({"labeller": {"minutes": 9}}, 66 * 60),  # times are not among the numbers
    ]
    for section in sections:
        assert "\n".join(section) in text, section[0]
