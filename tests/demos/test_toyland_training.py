"""Toyland's trained models, and the code in demos/toyland that trains and tests them."""

import json

import pytest
import torch

from demos.toyland import captioner, labeller
from demos.toyland.report import caption_scenes, held_out_scenes, report_captions, report_labels
from elude_steer import toyland
from elude_steer.models.vlm import Vlm


@pytest.fixture(scope="module")
def series():
    return list(toyland.scenes(seed=5, n=100))


@pytest.fixture(scope="module")
def vlm():
    return Vlm.load(str(toyland.CAPTIONER))


def test_training_uses_the_tiles_of_the_image_processor(vlm, series):
    for shape in ((96, 96), (192, 96), (96, 192)):
        scene = next(s for s in series if s.image.size == shape)
        pixels = vlm.inputs([scene.image])["pixel_values"][0]
        torch.testing.assert_close(pixels, captioner.tiles(scene.image), atol=2 / 127, rtol=0)
        assert len(pixels) == vlm.grid(shape).tiles == (2 if shape == (96, 96) else 3)


def test_the_training_loss_is_that_of_the_model(vlm, series):
    task = captioner.CaptionerLosses(vlm.model)
    batch = [next(s for s in series if s.image.size == shape) for shape in ((96, 96), (192, 96))]
    stacks = [captioner.tiles(scene.image) for scene in batch]
    with torch.no_grad():
        features = task.patch_features(torch.cat(stacks))
        packed = task.pack(features, batch, [len(stack) for stack in stacks])
        loss = task.caption_loss(packed, batch, captioner.PROMPTS[0])
        expected = []
        for scene, stack in zip(batch, stacks, strict=True):
            inputs = vlm.inputs([scene.image], captioner.PROMPTS[0])
            inputs["pixel_values"] = stack[None]
            answer = vlm.processor.tokenizer(
                scene.caption + "<|im_end|>", add_special_tokens=False, return_tensors="pt"
            )
            ids = torch.cat([inputs["input_ids"], answer.input_ids], 1)
            out = vlm.model(input_ids=ids, pixel_values=inputs["pixel_values"], image_sizes=inputs["image_sizes"])
            logits = out.logits[0, -answer.input_ids.shape[1] - 1 : -1]
            expected.append(torch.nn.functional.cross_entropy(logits, answer.input_ids[0], reduction="none"))
    torch.testing.assert_close(loss, torch.cat(expected).mean(), rtol=1e-3, atol=1e-4)


def test_the_captioner_captions_held_out_scenes(vlm):
    held_out = held_out_scenes(70_001, 120)
    report = report_captions(caption_scenes(vlm, held_out), held_out)
    # The training script measures 1,000 scenes; with fewer scenes the bounds leave room for chance.
    assert report.objects >= 0.90
    assert report.background >= 0.97
    assert report.exact >= 0.78
    assert report.clutter_named <= 0.10
    assert report.well_formed >= 0.97


def test_the_labeller_finds_single_objects():
    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(toyland.LABELLER, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(toyland.LABELLER)

    @torch.inference_mode()
    def score(images, texts):
        inputs = processor(text=list(texts), images=images, padding="max_length", max_length=64, return_tensors="pt")
        return model(**inputs).logits_per_image

    assert report_labels(score, 70_002, each=4) >= 0.95
    assert type(model).__name__ == "SiglipModel"
    assert labeller.LENGTH == 64


def test_the_training_report_is_stored_beside_the_weights():
    report = json.loads((toyland.DATA / "training.json").read_text())
    assert report["captioner"]["exam"]["scenes"] == 1000
    assert report["captioner"]["exam"]["objects"] >= 0.93
    assert report["labeller"]["exam"]["single objects named first"] >= 0.97


def test_the_models_are_small():
    size = sum(path.stat().st_size for path in toyland.DATA.rglob("*") if path.is_file())
    assert size <= 25e6


def test_the_last_phase_leaves_the_tower_as_it_is(series):
    model = captioner.new_model(0)
    parts = captioner.language_parts(model)
    scenes = [scene for scene in series if scene.image.size == (96, 96)][:2]
    captioner.phase_loss(captioner.LANGUAGE_PHASE, captioner.CaptionerLosses(model), scenes, "What?").backward()
    assert all(p.grad is None for p in model.model.vision_tower.parameters())
    assert all(p.grad is not None for part in parts.values() for p in part.parameters())
