"""How well an atlas tells images of another kind from its own.

    python demos/benchmarks/familiarity.py PHOTOGRAPHS [--count 400]

PHOTOGRAPHS is any folder. Prints the share of images beyond the limit: of new scenes of toyland, of edits of scenes,
and of photographs. The first row is the limit in the shipped atlas, from 3,000 of the scenes it was built from; the
others are distances measured here, on 1,500 of them, with a limit found in the same way.
"""

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import elude_steer as es
from elude_steer import toyland
from elude_steer.atlas.familiarity import describe_image
from elude_steer.models.images import image_set

SEED = 9_201  # neither training nor building uses this seed and the next two
QUANTILE, MARGIN = 0.999, 1.05  # as in the library
Distance = Callable[[torch.Tensor], torch.Tensor]


def make_sets(photographs: Path, count: int) -> dict[str, list[Image.Image]]:
    """Images by the column that shows them."""
    scenes = [scene.image for scene in toyland.scenes(SEED, count)]
    hard = [scene.image for scene in toyland.scenes(SEED + 1, count, wide=0.5, clutter=1.0)]
    files = sorted(path for path in photographs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    photos = [Image.open(path).convert("RGB") for path in files[:: -(-len(files) // count)]]
    return {
        "new scenes": scenes,
        "wide, cluttered": hard,
        "JPEG 40": [compress(image, 40) for image in scenes],
        "twice as large": [image.resize((2 * image.width, 2 * image.height)) for image in scenes],
        "three quarters": [image.resize((image.width * 3 // 4, image.height * 3 // 4)) for image in scenes],
        "cut by a tenth": [cut_border(image) for image in scenes],
        "photographs": photos,
        "at 96 pixels": [photo.resize((96, 96)) for photo in photos],
        "two samples": [Image.fromarray(pixels) for pixels in load_sample_images().images],
    }


def compress(image: Image.Image, quality: int) -> Image.Image:
    """The image after a JPEG file of this quality."""
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    return Image.open(data).convert("RGB")


def cut_border(image: Image.Image) -> Image.Image:
    """The image without a tenth of it at each side."""
    x, y = image.width // 10, image.height // 10
    return image.crop((x, y, image.width - x, image.height - y))


@torch.inference_mode()
def describe(vlm: es.Vlm, images: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The vectors of images by what they are made of, `(n, …)` each."""
    rows = []
    for start in range(0, len(images), 16):
        for q, stream in vlm.streams(images[start : start + 16]):
            output = vlm.layer(q).flatten(0, 1)
            rows.append(
                {
                    "inputs, mean": describe_image(q, vlm.token_indices(q.shape[1])),
                    "outputs, mean": output.mean(0),
                    "outputs, largest": output.amax(0),
                    "stream, mean": stream.flatten(0, 1).mean(0),
                }
            )
    return {name: torch.stack([row[name] for row in rows]).double() for name in rows[0]}


def channel_distance(vectors: torch.Tensor) -> Distance:
    """Distance in deviations of each channel, without their correlations."""
    mean, deviation = vectors.mean(0), vectors.std(0)
    return lambda x: ((x - mean) / deviation).norm(dim=1)


def covariance_distance(vectors: torch.Tensor) -> Distance:
    """Mahalanobis distance, with 1 % of the diagonal added."""
    mean, covariance = vectors.mean(0), torch.cov(vectors.T)
    root = torch.linalg.cholesky(0.99 * covariance + 0.01 * torch.diag(covariance.diag()))
    return lambda x: torch.linalg.solve_triangular(root, (x - mean).T, upper=False).norm(dim=0)


def neighbour_distance(vectors: torch.Tensor) -> Distance:
    """Distance to the nearest scene, in deviations of each channel."""
    deviation = vectors.std(0)
    return lambda x: torch.cdist(x / deviation, vectors / deviation).amin(1)


def print_row(name: str, is_unlike: Callable[[dict[str, torch.Tensor]], torch.Tensor], sets: dict[str, Any]) -> None:
    """One row of the table."""
    shares = [float(is_unlike(vectors).double().mean()) for vectors in sets.values()]
    print("|", " | ".join([name, *(f"{share:.1%}" for share in shares)]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--count", type=int, default=400, help="images of each kind")
    arguments = parser.parse_args()
    vlm, atlas = es.Vlm.load("toyland/captioner"), es.Atlas.load("toyland")
    probing = [item.read()[0] for item in list(image_set("toyland:31", limit=6000).items())[::4]]
    built = describe(vlm, probing)
    sets = {name: describe(vlm, images) for name, images in make_sets(arguments.photographs, arguments.count).items()}
    print("|", " | ".join(["", *sets]), "|")
    print("|---" * (len(sets) + 1) + "|")
    shipped = atlas.familiarity
    print_row("as shipped", lambda x: shipped.distances(x["inputs, mean"]) > shipped.limit, sets)
    kinds = {"channels": channel_distance, "covariance": covariance_distance, "nearest scene": neighbour_distance}
    for vector, vectors in built.items():
        for kind, make_distance in kinds.items():
            distance = make_distance(vectors[::2])
            limit = MARGIN * torch.quantile(distance(vectors[1::2]), QUANTILE)
            print_row(f"{vector}; {kind}", lambda x, v=vector, d=distance, n=limit: d(x[v]) > n, sets)


if __name__ == "__main__":
    main()
