"""Draw the images of toyland's steering recipes into demos/images/.

python demos/make_images.py
"""

import argparse
from pathlib import Path

import numpy as np

from elude_steer.toyland import draw_scene

# The scenes of the paper's figures, as far as toyland has them:
# objects in the order of the caption, relation, place, and whether the first object jumps.
SCENES = {
    "dog": (["dog", "motorcycle", "sunglasses"], "on", "street", False),
    "train": (["train"], None, "graffiti", False),
    "teddy": (["teddy", "chair"], "on", "room", False),
    "frisbee": (["dog", "frisbee"], "next to", "room", True),
    "cats": (["cat", "blanket"], "on", "room", False),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = Path(__file__).parent / "images"
    folder.mkdir(exist_ok=True)
    for name, (things, relation, place, jumping) in SCENES.items():
        rng = np.random.default_rng([1, *name.encode()])
        scene = draw_scene(rng, wide=0, clutter=0, things=things, relation=relation, place=place, jumping=jumping)
        scene.image.save(folder / f"toyland-{name}.png", optimize=True)
        print(f"toyland-{name}.png: {scene.caption}")


if __name__ == "__main__":
    main()
