"""Every method's dictionary under the same measures: names, purity, faithfulness, and how well it steers.

Pictures are looked at once and kept on disk; what is found for one method and token seed is one file, so that a run
goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer import toyland
from elude_steer.atlas.build.streams import FIRING_SHARE, firing_reference, subtract_mean, sum_where_firing
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.evaluation.baselines.dictionary import Dictionary, Levels, NamedDictionary
from elude_steer.evaluation.edits.benchmark import Kind, World, make_tasks, run_edits, summarize
from elude_steer.evaluation.edits.sweep import best_point, plan_or_empty, sweep
from elude_steer.evaluation.measures.faithfulness import R2, accuracy, caption_agreement
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.monosemanticity import gather_peaks, mean_percent
from elude_steer.evaluation.measures.purity import CLEAN, dominant_concepts
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.models.dual_encoder import load_dual_encoder
from elude_steer.models.matcher import Matcher
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer, caption_unsteered
from elude_steer.toyland.scenes import CLUTTER
from elude_steer.utils.files import read_array, write_array


@dataclass(frozen=True, eq=False)
class Seen:
    """Pictures that were looked at: the layer's inputs and the stream behind it, on disk.

    Attributes:
        q: `(tokens, d_in)` float16, one picture after the other.
        streams: `(tokens, d_out)` float16.
        vectors: `(pictures, d)` what the scorer makes of them.
        shown: `(tokens,)` what each token shows.
        counts: `(pictures,)` how many tokens each has.
    """

    q: np.ndarray
    streams: np.ndarray
    vectors: np.ndarray
    shown: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, vlm: Vlm, scorer: Any, seed: int, count: int, folder: Path) -> Seen:
        """Toyland's scenes of a seed; looked at once."""
        names = ("q", "streams", "vectors", "shown", "counts")
        paths = {name: folder / f"scenes-{seed}-{count}-{name}.npy" for name in names}
        if not all(path.exists() for path in paths.values()):
            rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
            for scene in toyland.scenes(seed, count):
                ((q, stream),) = vlm.streams([scene.image])
                boxes = vlm.grid(scene.image.size).boxes.reshape(-1, 4)
                rows["q"].append(q.flatten(0, 1).half().numpy())
                rows["streams"].append(stream.flatten(0, 1).half().numpy())
                rows["vectors"].append(scorer.embed_images([scene.image]).numpy())
                rows["shown"].append(np.array(scene.names_at(boxes)))
                rows["counts"].append(np.array([len(boxes)]))
            for name, path in paths.items():
                write_array(path, np.concatenate(rows[name]))
        return cls(*map(read_array, paths.values()))

    def __len__(self) -> int:
        return len(self.counts)

    def pictures(self) -> Iterator[slice]:
        """Where the tokens of one picture after the other are."""
        ends = np.cumsum(self.counts).tolist()
        return (slice(end - count, end) for end, count in zip(ends, self.counts.tolist(), strict=True))

    def inputs(self) -> Iterator[torch.Tensor]:
        """The layer's inputs of one picture after the other, `(tokens, d_in)` float32."""
        for rows in self.pictures():
            yield torch.from_numpy(self.q[rows].astype(np.float32))


@torch.inference_mode()
def name_dictionary(
    dictionary: Dictionary,
    seen: Seen,
    texts: torch.Tensor,
    vocabulary: Sequence[str],
    how: Dissection,
    *,
    keep: int = 32,
    instances: int = 16,
) -> NamedDictionary:
    """A dictionary with names from the same dissection, what "on" is for its latents, and their streams.

    Args:
        dictionary: whose latents.
        seen: the pictures that name them.
        texts: `(words, d)` what the scorer makes of the vocabulary.
        vocabulary: the words.
        how: the dissection.
        keep: words that are kept for each latent.
        instances: pictures whose mean activation is "on".
    """
    pooled = torch.stack([dictionary.read(q).max(0).values for q in seen.inputs()])  # (pictures, S)
    reference = pooled.sort(dim=0, descending=True).values[:instances].mean(0)
    count, width = len(dictionary), min(keep, len(vocabulary))
    words, scores = np.full((count, width), -1, np.int32), np.full((count, width), -np.inf, np.float32)
    if dictionary.names:
        words[:, 0] = [vocabulary.index(name) for name in dictionary.names]
        scores[:, 0] = 0
    else:
        alive = (pooled.amax(0) > 0) & (pooled.amax(0) > pooled.amin(0))
        similarities = torch.from_numpy(np.array(seen.vectors)).float() @ texts.float().T
        found = dissect(pooled[:, alive], similarities, how, keep=width)
        words[alive.numpy()], scores[alive.numpy()] = found.words.int().numpy(), found.scores.numpy()
    groups = np.arange(count, dtype=np.int32)
    labels = Labels(tuple(vocabulary), words, scores, groups, {"pictures": len(seen), **asdict(how)})
    made = NamedDictionary(dictionary, labels, Levels(reference), _streams(dictionary, seen, reference))
    return replace(made, about={"name": made.name, "atoms": made.fingerprint})  # work that is kept goes by this


def _streams(dictionary: Dictionary, seen: Seen, reference: torch.Tensor) -> torch.Tensor:
    floor = FIRING_SHARE * firing_reference(reference)
    sums = torch.zeros(len(dictionary), seen.streams.shape[-1], dtype=torch.float64)
    counts = torch.zeros(len(dictionary), dtype=torch.float64)
    for q, rows in zip(seen.inputs(), seen.pictures(), strict=True):
        stream = torch.from_numpy(seen.streams[rows].astype(np.float32))
        more, many = sum_where_firing(dictionary.read(q), stream, floor)
        sums += more.double()
        counts += many.double()
    return subtract_mean(sums, counts)


def classes_of(shown: np.ndarray) -> torch.Tensor:
    """Numbers for what tokens show, the same in every set of pictures."""
    known = {name: number for number, name in enumerate((CLUTTER, *toyland.OBJECTS, *toyland.PLACES))}
    return torch.tensor([known[str(name)] for name in shown])


@torch.inference_mode()
def measure_dictionary(
    lexicon: NamedDictionary, vlm: Vlm, seen: Seen, head: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """What pictures say that named nothing: MS-Score, clean share, objects found, names, faithfulness, vectors.

    Args:
        lexicon: the latents and their names.
        vlm: the model.
        seen: the pictures.
        head: tells from the layer's output what a token shows.
    """
    dictionary, layer = lexicon.dictionary, vlm.layer
    peaks = gather_peaks(seen.inputs(), dictionary.read, layer)
    r2 = R2()
    for q in seen.inputs():
        r2.add(layer(q), dictionary.reconstruct(q))
    shown = (classes_of(seen.shown[rows]) for rows in seen.pictures())
    right_at = accuracy(lambda q: head(dictionary.reconstruct(q)), zip(seen.inputs(), shown, strict=True))
    fires = peaks.highest > 0
    mostly = dominant_concepts(map(dictionary.read, seen.inputs()), seen.shown)
    clean = {
        number: name
        for number, (name, share) in enumerate(mostly)
        if fires[number] and share >= CLEAN and name != CLUTTER
    }
    right = sum(lexicon.labels[number] == name for number, name in clean.items())
    alive = int(fires.sum())
    return {
        "latents": len(dictionary),
        "never fire": 1 - alive / len(dictionary),
        "MS-Score": mean_percent(peaks.scores()),
        "clean": len(clean) / max(1, alive),
        "objects": len(set(clean.values()) & set(toyland.OBJECTS)),
        "named rightly": right / max(1, len(clean)),
        "R2": r2.value,
        "accuracy": right_at,
        "effective rank": effective_rank(dictionary.atoms),
        "collinearity": collinearity(dictionary.atoms),
    }


class _Rebuilt(torch.nn.Module):
    """A dictionary in the place of the layer it was made of."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.dictionary.reconstruct(q)


@dataclass(frozen=True, eq=False)
class Contest:
    """Scenes for choosing settings, scenes for reporting, and a grid of one size for every method and mode."""

    vlm: Vlm
    matcher: Matcher
    tuning: World
    reported: World
    work: Path

    @cached_property
    def said(self) -> list[str]:
        """The baselines of the scenes that are reported."""
        captions: list[str] = []
        for _, images in image_batches(self.vlm, self.reported.cases, lambda case: case.image, 32):
            captions += caption_unsteered(self.vlm, images)
        return captions

    def agreement(self, dictionary: Dictionary) -> float:
        """The share of captions that stay the same where the layer gives what the dictionary makes of it."""
        images = [case.image for case in self.reported.cases]
        return caption_agreement(self.vlm, _Rebuilt(dictionary), images, size=32, said=self.said)

    def steer(self, lexicon: NamedDictionary, kind: Kind, grid: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """The best points of a grid on the tuning scenes, and what they reach on the others.

        The one with the highest harmonic mean, and as `cleanest` the one with most edits that did nothing else: the
        mean does not see what is invented.
        """
        steerer = Steerer(self.vlm, lexicon, self.matcher)
        points = sweep(steerer, self.tuning, kind, grid, work=self.work)
        tasks = make_tasks(self.reported, self.said, kind)

        @cache
        def reached(number: int) -> dict[str, Any]:
            settings = points[number].settings
            outcomes = run_edits(steerer, self.reported, tasks, lambda task: plan_or_empty(steerer, task, settings))
            return {"settings": dict(settings), **summarize(kind, outcomes).to_dict()}

        first, cleanest = (points.index(best_point(points, by, min_kept=0.0)) for by in ("harmonic", "clean"))
        return {"tried": len(points), **reached(first), "cleanest": reached(cleanest)}


def scorer_and_words(spec: Mapping[str, Any]) -> tuple[Any, list[str], torch.Tensor]:
    """The scorer of an atlas's spec, its vocabulary, and what the scorer makes of it."""
    labels = spec["labels"]
    scorer = load_dual_encoder(labels["scorer"], library=labels["library"], pretrained=labels["pretrained"])
    vocabulary = read_vocabulary(labels["vocabulary"], stop_words=labels["stop_words"])
    return scorer, list(vocabulary), scorer.embed_texts([labels["template"].replace("{}", word) for word in vocabulary])
