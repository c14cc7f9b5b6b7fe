"""Checkpoints have every file that transformers' `AutoProcessor` reads, and load with and without torchvision."""

import json
import shutil

import pytest
from transformers.models.auto.video_processing_auto import get_video_processor_config

from elude_steer.models.loading import load_processor
from elude_steer.models.saving import has_video_part, save_processor
from elude_steer.models.vlm import Vlm
from elude_steer.utils.files import resolve_id
from tests.helpers.plain_child import needs_torchvision
from tests.helpers.tiny import save_family

VIDEO = "video_preprocessor_config.json"


@pytest.fixture(params=["toyland", "tiny"])
def checkpoint(request, tiny_llava):
    return resolve_id("toyland/captioner") if request.param == "toyland" else str(tiny_llava)


def test_our_checkpoints_have_video_settings(checkpoint):
    settings = get_video_processor_config(checkpoint)
    images = load_processor(checkpoint, "llava_onevision").image_processor
    assert settings["size"] == dict(images.size)
    assert settings["image_mean"] == list(images.image_mean)


@needs_torchvision
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "internvl"])
def test_auto_processor_loads_other_families(family, tmp_path):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(save_family(family, tmp_path))
    assert type(processor.video_processor).__name__.endswith("VideoProcessor")


@needs_torchvision
def test_auto_processor_loads_our_checkpoints(checkpoint):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    assert type(processor.video_processor).__name__ == "LlavaOnevisionVideoProcessor"
    assert dict(processor.video_processor.size) == dict(processor.image_processor.size)


def test_a_saved_processor_keeps_the_video_settings_of_its_checkpoint(tiny_llava, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llava, source)
    settings = json.loads((source / VIDEO).read_text())
    settings["size"] = {"height": 14, "width": 14}
    (source / VIDEO).write_text(json.dumps(settings))
    save_processor(load_processor(str(source), "llava_onevision"), out, model_id=str(source))
    assert get_video_processor_config(str(out))["size"] == {"height": 14, "width": 14}


def test_what_is_saved_does_not_depend_on_what_the_tokenizer_did_last(tiny_llava, tmp_path):
    processor = load_processor(str(tiny_llava), "llava_onevision")
    save_processor(processor, tmp_path / "fresh")
    processor.tokenizer(["a dog", "a"], padding=True, truncation=True, max_length=7)
    save_processor(processor, tmp_path / "used")
    fresh, used = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("fresh", "used"))
    assert "tokenizer.json" in fresh and fresh == used
    assert processor.tokenizer.backend_tokenizer.padding is not None  # the processor itself is as it was


def test_a_saved_tokenizer_has_no_backend_for_images(tiny_llava, tmp_path):
    save_processor(load_processor(str(tiny_llava), "llava_onevision"), tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()).get("backend") in (None, "tokenizers")


def test_processors_without_videos_get_no_video_settings(tmp_path):
    folder = save_family("llava", tmp_path / "model")
    processor = Vlm.load(str(folder)).processor
    assert not has_video_part(processor)
    save_processor(processor, tmp_path / "out", model_id=str(folder))
    assert not (tmp_path / "out" / VIDEO).exists()


def test_a_checkpoint_without_video_settings_loads(tiny_llava, tiny_vlm, tmp_path, image_folder):
    """Such checkpoints were exported by earlier versions."""
    from elude_steer.models.images import open_image

    folder, image = tmp_path / "model", open_image(next(image_folder.glob("*.png")))
    shutil.copytree(tiny_llava, folder)
    (folder / VIDEO).unlink()
    assert Vlm.load(str(folder)).caption([image]) == tiny_vlm.caption([image])
