"""The gate of `elude_steer/trust.py` against the real timm, open_clip and datasets, which the tests replace by stubs.

    python demos/benchmarks/real_loaders.py

It needs an environment with timm, open_clip_torch and datasets, and torchvision 0.28.0 without its dependencies, which
would replace torch by the CUDA build. It exits with 1 if a pickle or a script ran without permission.
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from checks import register_missing_operators  # noqa: E402

from elude_steer.errors import EludeSteerError  # noqa: E402
from elude_steer.models.dual_encoder import load_dual_encoder  # noqa: E402
from elude_steer.models.images import image_set  # noqa: E402
from elude_steer.models.vision import load_timm  # noqa: E402

NAME, TOKENS = "vit_tiny_patch16_224", "blocks.11.mlp.fc2"


class Bomb:
    """A pickle of it leaves a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


def write_timm(folder: Path, *, safe: bool, bomb: bytes | None) -> None:
    """A folder for `local-dir:`, with weights in safetensors, a pickle, or both."""
    import timm
    from safetensors.torch import save_file

    folder.mkdir()
    about = {"num_classes": 0, "input_size": [3, 224, 224]}
    config = {"architecture": NAME, "num_classes": 0, "pretrained_cfg": about, "model_args": {}}
    (folder / "config.json").write_text(json.dumps(config))
    if safe:
        save_file(timm.create_model(NAME, num_classes=0).state_dict(), folder / "model.safetensors")
    if bomb is not None:
        (folder / "pytorch_model.bin").write_bytes(bomb)


def write_clip(folder: Path, bomb: bytes) -> None:
    """A folder for open_clip's `local-dir:`."""
    import open_clip

    folder.mkdir()
    (folder / "open_clip_pytorch_model.bin").write_bytes(bomb)
    config = {"model_cfg": open_clip.get_model_config("ViT-B-32"), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))


def write_dataset(folder: Path, marker: Path, bomb: bytes) -> None:
    """A folder that looks like a dataset with a script and a pickle."""
    folder.mkdir(parents=True)
    (folder / "photos.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    (folder / "train.pkl").write_bytes(bomb)


def attacks(work: Path) -> dict[str, Callable[[], object]]:
    """What a stranger could give to these libraries, without permission."""
    marker = work / "the code ran"
    bomb = pickle.dumps(Bomb(marker))
    write_timm(work / "safe", safe=True, bomb=None)
    write_timm(work / "pickled", safe=False, bomb=bomb)
    write_timm(work / "both", safe=True, bomb=bomb)
    write_clip(work / "clip", bomb)
    write_dataset(work / "stranger" / "photos", marker, bomb)
    (work / "w.pt").write_bytes(bomb)
    names = ("local-dir:safe", "local-dir:pickled", "local-dir:both", "hf-hub:stranger/x", NAME)
    clips = (("ViT-B-32", "w.pt"), ("local-dir:clip", None), ("hf-hub:stranger/clip", None))
    return {
        **{f"timm {name}": lambda name=name: load_timm(name, layer=TOKENS) for name in names},
        **{
            f"open_clip {name} {weights or ''}": lambda name=name, weights=weights: load_dual_encoder(
                name, library="open_clip", pretrained=weights
            )
            for name, weights in clips
        },
        **{f"datasets {name}": lambda name=name: image_set(f"hf:{name}") for name in ("stranger/photos", "pandas")},
    }


def main() -> None:
    """Attack, and print what happened."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    register_missing_operators()
    warnings.simplefilter("ignore")
    ran = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["ELUDE_STEER_HOME"] = f"{folder}/home"
        for name, call in attacks(Path(folder)).items():
            try:
                outcome = f"loaded a {type(call()).__name__}"
            except EludeSteerError as error:
                outcome = f"refused: {str(error)[:150]}"
            if (marker := Path(folder) / "the code ran").exists():
                marker.unlink()
                ran.append(name)
            print(f"{name:36} {'THE CODE RAN' if name in ran else 'no code ran'}  {outcome}")
        os.chdir(ROOT)
    sys.exit(bool(ran))


if __name__ == "__main__":
    main()
