import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from elude_steer.evaluation.reproduce.options import ReproduceOptions
from tests.helpers.tiny import save_images, save_llava
from tests.models.test_vision_backbones import DINOV2_NAMES, DINOV2_PREPROCESSOR, dinov2_config, save

SIDE = 56  # pixels: 4 x 4 patches and CLS
SMALL = ("tokens.per_image=8", "clusters.top_k=100", "clusters.min_cluster_size=6")
# The labeller and matcher of toyland stand for the large ones, which are not at hand.
LABELS = ("labels.scorer=toyland/labeller", "labels.vocabulary=toyland", "labels.top_k=24")
MATCHER = ("matcher.id=toyland/matcher", "matcher.trust_remote_code=false")


@dataclass(frozen=True)
class World:
    """Random checkpoints of the real classes, and 24 images to learn from."""

    dino: Path
    llava: Path
    train: Path
    val: Path
    scenes: Path

    def options(self, work, name="interpretability", **more):
        """The options that make a run of a table as small as it can be."""
        backbone = "dinov2-base-layer12-ef4" if name in ("ablations", "generalization") else "dinov2-base-layer12"
        given = {"backbones": {backbone: str(self.dino)}, "seeds": (42,), "preset": "tiny", "changes": SMALL, **more}
        return ReproduceOptions(str(self.train), str(self.val), work, threads=1, **given)

    def steering(self, work, **more):
        """The options of the paper's edits on the tiny model."""
        given = {"backbones": {"llava-onevision-0.5b-unique": str(self.llava)}, "preset": "tiny", **more}
        changes = (*SMALL, *LABELS, *MATCHER)
        return ReproduceOptions(
            str(self.train), work=work, scenes=str(self.scenes), changes=changes, threads=1, **given
        )


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    sizes = {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    (root / "dino").mkdir()
    save(root / "dino", dinov2_config(12, 16), {**DINOV2_PREPROCESSOR, **sizes}, DINOV2_NAMES)
    save_llava(root / "llava", layers=26)
    for number in range(3):  # classes
        save_images(root / "train" / f"class-{number}", 8, seed=number)
        save_images(root / "val" / f"class-{number}", 4, seed=10 + number)
    (root / "scenes").mkdir()
    for name, image in zip(("dog", "train", "teddy", "frisbee"), sorted((root / "val").rglob("*.png")), strict=False):
        shutil.copy(image, root / "scenes" / f"{name}.png")
    shutil.copy(sorted((root / "val").rglob("*.png"))[5], root / "cats-elsewhere.png")
    mapping = {name: f"scenes/{name}.png" for name in ("dog", "train", "teddy", "frisbee")}
    (root / "scenes.json").write_text(json.dumps({**mapping, "cats": "cats-elsewhere.png"}))
    return World(root / "dino", root / "llava", root / "train", root / "val", root / "scenes.json")
