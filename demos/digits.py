"""Train a small network on handwritten digits, split its units and compare their purity.

    python demos/digits.py

It downloads nothing, because scikit-learn includes the digits, and takes about 20 seconds on two cores.
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import elude_steer as es
from elude_steer.method.layers import split_layer
from elude_steer.models.hooks import find_layer, record, swap_module


def train(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    for _ in range(60):
        for batch in torch.randperm(len(images)).split(128):
            loss = F.cross_entropy(model(images[batch] + 0.1 * torch.randn(len(batch), 64)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def purity(activations: torch.Tensor, labels: torch.Tensor, top: int = 30) -> float:
    """Fraction of a unit's most active images that show its most frequent digit, mean over units."""
    strongest = labels[activations.topk(top, dim=0).indices]  # (top, units)
    return float(torch.stack([strongest == digit for digit in range(10)]).float().mean(1).max(0).values.mean())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    data = load_digits()
    images, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = train(images, labels)
    name, layer = find_layer(model, "2")
    with record(layer) as recorded:
        model(images)
    print(f"raw units      {layer.out_features:4d}  purity {purity(layer(recorded.input), labels):.2f}")

    for rule in ("random", "unique", "gap"):
        with tempfile.TemporaryDirectory() as folder:
            atlas = es.disentangle(
                model,
                layer=name,
                images=images,
                clusters=es.ClustersSpec(top_k=900, min_cluster_size=20, min_samples=5),
                split=es.SplitSpec(winner_rule=rule),
                out=f"{folder}/atlas",
                work=f"{folder}/work",
            )
        split = split_layer(layer, atlas.members(), atlas.units)
        print(f"split: {rule:<7} {len(atlas):4d}  purity {purity(split.sub_units(recorded.input), labels):.2f}")

    before = model(images)
    with swap_module(model, name, split):
        print(f"largest change of a logit with the split layer in place: {(model(images) - before).abs().max():.1e}")
    print(f"and after removing it again: {(model(images) - before).abs().max():.0f}")


if __name__ == "__main__":
    main()
