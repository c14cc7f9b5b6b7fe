"""Tiny checkpoints with random weights, and an atlas of each family of vision-language models."""

from dataclasses import dataclass

import pytest
import torch
from PIL import Image

import elude_steer as es
from elude_steer import toyland
from elude_steer.models.vlm import Vlm
from elude_steer.specs import (
    AtlasSpec,
    ClustersSpec,
    LabelsSpec,
    MatcherSpec,
    ModelSpec,
    ReferencesSpec,
    SplitSpec,
    TokensSpec,
)
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import FAMILIES, save_family


def small(**options):
    return dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7, **options)


def bit_processor():
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    return BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


@pytest.fixture(scope="session")
def dinov2(tmp_path_factory):
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dinov2")
    Dinov2Model(Dinov2Config(**small())).save_pretrained(folder)
    bit_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def siglip(tmp_path_factory):
    from transformers import SiglipConfig, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("siglip")
    text = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    words = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = SiglipConfig(vision_config=small(intermediate_size=40), text_config=text | words)
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


SCALE_SETTINGS = {
    "scale": {"mode": "scale", "gamma": -8.0, "nu": "all"},
    "few": {"mode": "scale", "gamma": -20.0, "nu": 3},
}


@pytest.fixture(scope="session")
def num2words():
    """Let SmolVLM's processor load without the package `num2words`, which only its videos need."""
    module = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    with pytest.MonkeyPatch.context() as patch:
        if not module.num2words:
            patch.setattr(module, "num2words", str)
        yield


@dataclass
class Family:
    name: str
    vlm: Vlm
    folder: object
    root: object


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, tmp_path_factory, num2words):
    root = tmp_path_factory.mktemp(request.param)
    folder = save_family(request.param, root / "model")
    return Family(request.param, Vlm.load(str(folder)), folder, root)


@pytest.fixture(scope="session")
def scenes():
    return [scene.image for scene in toyland.scenes(seed=70_001, n=24)]


@pytest.fixture(scope="session")
def family_steerer(family, scenes):
    """A steerer with an atlas of the family's layer, built from toyland's scenes."""
    (family.root / "images").mkdir()
    for number, image in enumerate(scenes):
        image.save(family.root / "images" / f"{number:02d}.png")
    spec = AtlasSpec(
        family.name.replace("_", "-"),
        ModelSpec(str(family.folder), family.vlm.layer_name),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=100, backend="exact", min_cluster_size=8, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
        references=ReferencesSpec(instances=10, keep=4),
        labels=LabelsSpec(scorer="toyland/labeller", vocabulary="toyland", top_k=12),
        matcher=MatcherSpec("toyland/matcher"),
    )
    root = family.root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elude_steer.atlas.build.calibrating.MIN_IMAGES", len(scenes))
        atlas = es.build(spec, images=root / "images", out=root / "atlas", work=root / "work", threads=1, quiet=True)
    return Steerer.from_parts(family.vlm, atlas, atlas.matcher())


def logits(vlm, images):
    with torch.inference_mode():
        return vlm.model(**vlm.inputs(images)).logits


def make_plan(steerer, kind):
    settings = SCALE_SETTINGS.get(kind, {"mode": "place", "fit": 0.5, "force": True, "strength": 20.0})
    minus, plus = two_words(steerer)
    return steerer.plan(minus=[minus], plus=[plus] if kind == "place" else [], kappa=6, **settings)


def two_words(steerer):
    """Return two words that the atlas of a model with random weights happens to have."""
    labels = steerer.atlas.require_labels()
    return [word for word in dict.fromkeys(labels[i] for i in range(len(labels))) if word][:2]


@pytest.fixture(scope="session")
def images(image_folder):
    """Eight images, two of each shape: 2, 3, 3 and 5 tiles."""
    images = []
    for path in sorted(image_folder.rglob("*.png"))[:8]:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    assert len({image.size for image in images}) == 4
    return images


def with_config(vlm, **vision):
    """A new model of the same kind whose vision tower has other settings."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    config = vlm.model.config.to_dict()
    config["vision_config"] |= vision
    torch.manual_seed(0)
    return LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig(**config)).eval()
