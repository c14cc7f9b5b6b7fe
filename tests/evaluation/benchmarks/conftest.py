import json

import pytest
from PIL import Image

from elude_steer.evaluation.benchmarks.dataset import read_dataset
from elude_steer.toyland.scenes import write_scenes

SEED = 5


@pytest.fixture(autouse=True)
def separate_home(tmp_path, monkeypatch):
    """Keep the work of these tests apart from the user's."""
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def scene_folder(tmp_path_factory):
    """300 scenes of toyland with COCO's files."""
    return write_scenes(tmp_path_factory.mktemp("coco") / "scenes", 300, SEED, coco=True)


@pytest.fixture(scope="session")
def toyland_data(scene_folder):
    """These scenes as annotated images, with captions."""
    return read_dataset(scene_folder / "instances.json", scene_folder, captions=scene_folder / "captions.json")


@pytest.fixture
def write_coco(tmp_path):
    """Call it with the classes of each image, and with captions; returns the dataset."""

    def write(rows, captions=None, **options):
        names = sorted({name for row in rows for name in row})
        content = {"images": [], "annotations": [], "categories": [{"id": n, "name": x} for n, x in enumerate(names)]}
        texts = {"images": content["images"], "annotations": []}
        for number, row in enumerate(rows):
            Image.new("RGB", (20, 10), (number, 0, 0)).save(tmp_path / f"{number}.png")
            content["images"].append({"id": number, "file_name": f"{number}.png", "width": 20, "height": 10})
            content["annotations"] += [{"image_id": number, "category_id": names.index(x), "area": 9} for x in row]
            own = captions[number] if captions else []
            texts["annotations"] += [{"image_id": number, "caption": text} for text in own]
        (tmp_path / "instances_x.json").write_text(json.dumps(content), encoding="utf-8")
        (tmp_path / "captions_x.json").write_text(json.dumps(texts), encoding="utf-8")
        path = tmp_path / "captions_x.json" if captions else None
        return read_dataset(tmp_path / "instances_x.json", tmp_path, captions=path, **options)

    return write
