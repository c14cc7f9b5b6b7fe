"""Photoland's captioner, and its training: transformers' own LLaVA class, a DINOv2 tower, a small language model.

Only the projector and the language model are trained, from features that were computed once, in three phases. First the
projector alone learns which words the captions of a photo have, so that patches enter the language model as the words
that name them; such a pass costs a twentieth of one with the language model. Then both learn the captions. The five
captions of a photo are packed behind one image prefix: each sees the prefix and itself. At first a photo shows a random
part of its patches, at their own positions, which is faster; half of the time it is its mirror image.

6,000 photos are soon learnt by heart: with little dropout, eight passes brought the loss of training photos down to 1.4
and that of others up to 2.9. Hence few passes, dropout of channels, of projected patches and of words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from demos.photoland.features import MEAN, STD
from demos.photoland.flickr8k import LONGEST, Photo, frequent_words
from demos.photoland.tower import PATCH, SIDE, vision_config
from demos.toyland.captioner import TEMPLATE
from demos.toyland.training_loop import cosine_rate, train_networks
from elude_steer.models.saving import save_processor

PATCHES = (SIDE // PATCH) ** 2
PROMPTS = (
    "Describe this image in one sentence.",
    "Describe this image in one sentence.",
    "What is in this photo?",
    "Describe the photo.",
    "Write a caption for this picture.",
    "What do you see?",
)
SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>")
WIDTH, LAYERS, HEADS, INNER = 256, 4, 4, 768


def caption_words(photos: Sequence[Photo]) -> list[str]:
    """The captioner's vocabulary: special tokens, then the frequent words of captions and those of prompts."""
    prompts = " ".join(PROMPTS).lower().replace(".", " .").replace("?", " ?").split()
    return [*SPECIAL, *sorted({*frequent_words(photos), *prompts, "user", "assistant"})]


def make_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of whole words in lower case, with the special tokens of a conversation."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w'-]+|[^\w\s]"), "removed", invert=True)  # t-shirt is a word
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<image>"],
        clean_up_tokenization_spaces=False,
    )


def new_model(vocabulary: int, tower: Any, seed: int) -> Any:
    """The captioner with a trained tower and an untrained projector and language model."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    ids = {word: i for i, word in enumerate(SPECIAL)}
    special = {
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<pad>"],
        "tie_word_embeddings": True,
    }
    text = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        **special,
    )
    config = LlavaConfig(
        vision_config=vision_config(),
        text_config=text,
        image_token_index=ids["<image>"],
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",  # drops CLS
        **special,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.model.vision_tower.requires_grad_(requires_grad=False)
    return model


def save(model: Any, words: Sequence[str], folder: Path) -> None:
    """Save the captioner in the Hub's format: half-precision weights, image processor, tokenizer, chat template."""
    from transformers import LlavaProcessor
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    images = BitImageProcessorPil(
        size={"height": SIDE, "width": SIDE},  # the whole photo, squeezed to a square
        do_center_crop=False,
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(words),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLS
        chat_template=TEMPLATE,
    )
    save_processor(processor, folder)
    model.half().save_pretrained(folder)
    model.float()


@dataclass(frozen=True)
class Schedule:
    """One training phase: its length, learning rate, and the share of patches that are shown.

    Attributes:
        passes: how often every photo is seen.
        peak: highest learning rate of AdamW; the highest of Muon is twice this.
        shown: share of the patches of a photo.
        seed: of the order of photos, of patches and prompts.
        size: photos per batch.
        photos: how many there are.
        warmup: batches until the learning rate is highest.
    """

    passes: int
    peak: float
    shown: float
    seed: int
    size: int = 32
    photos: int = 6000
    warmup: int = 100

    @property
    def steps(self) -> int:
        """Number of batches."""
        return self.passes * self.photos // self.size

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then half a cosine."""
        return cosine_rate(step, self.steps, self.peak, self.warmup)

    def batches(self, start: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Numbered batches of photos, each photo once a pass, in an order determined by the seed."""
        order = np.concatenate(
            [np.random.default_rng([self.seed, number]).permutation(self.photos) for number in range(self.passes)]
        )
        for number in range(start, self.steps):
            yield number, order[number * self.size : (number + 1) * self.size].tolist()


WORDS = Schedule(passes=5, peak=2e-3, shown=0.5, seed=4, size=50, warmup=50)
PHASES = {
    "some of the patches": Schedule(passes=3, peak=1.5e-3, shown=0.4, seed=1, warmup=50),
    "all patches": Schedule(passes=1, peak=5e-4, shown=1.0, seed=2, warmup=20),
}
# Shares that are left out in training: channels of a patch, projected values, words that a caption sees of itself.
CHANNELS_OUT, VALUES_OUT, WORDS_OUT = 0.1, 0.2, 0.1


class Patches:
    """The patches of photos or of their mirror images, each channel with mean 0 and deviation 1.

    The channels of the stream differ in size by a factor of a hundred; `fold` puts the scaling into the projector.
    """

    def __init__(self, features: Sequence[np.ndarray]) -> None:
        self.features = features
        sample = features[0][:1000, 1:].astype(np.float32).reshape(-1, features[0].shape[-1])
        self.mean, self.std = torch.from_numpy(sample.mean(0)), torch.from_numpy(sample.std(0) + 1e-6)

    def take(self, batch: Sequence[int], shown: float, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Some patches of each photo `(photos, shown patches, width)`, and which ones they are."""
        at = [np.sort(rng.permutation(PATCHES)[: round(shown * PATCHES)]) for _ in batch]
        sides = rng.integers(0, len(self.features), len(batch))
        values = np.stack([self.features[side][i, 1 + a] for side, i, a in zip(sides, batch, at, strict=True)])
        return (torch.from_numpy(values.astype(np.float32)) - self.mean) / self.std, torch.from_numpy(np.stack(at))

    @torch.no_grad()
    def fold(self, projector: Any) -> None:
        """Change a projector of scaled patches into one that takes the stream as it is."""
        linear = projector.linear_1
        linear.weight /= self.std
        linear.bias -= linear.weight @ self.mean


class WordLoss(nn.Module):
    """Which words do the captions of a photo have? The word's embedding should be close to that of some patch."""

    def __init__(self, model: Any, words: Sequence[str], photos: Sequence[Photo], patches: Patches) -> None:
        super().__init__()
        self.projector, self.embed = model.model.multi_modal_projector, model.model.language_model.embed_tokens
        self.patches = patches
        index = {word: i for i, word in enumerate(words)}
        shares = np.zeros((len(photos), len(words)), np.float32)
        for row, photo in enumerate(photos):
            for caption in photo.captions:
                for word in set(caption.split()) & index.keys():
                    shares[row, index[word]] += 1 / len(photo.captions)
        often = (shares > 0).sum(0) >= min(15, len(photos))
        self.words, self.shares = torch.from_numpy(np.flatnonzero(often)), torch.from_numpy(shares[:, often])
        rate = self.shares.mean(0).clamp(1e-4, 1 - 1e-4)
        self.bias, self.scale = nn.Parameter(rate.logit()), nn.Parameter(torch.tensor(10.0))

    def forward(self, batch: Sequence[int], *, shown: float, rng: np.random.Generator) -> torch.Tensor:
        """The loss of a batch of photos."""
        values, _ = self.patches.take(batch, shown, rng)
        tokens = F.normalize(self.projector(F.dropout(values, CHANNELS_OUT, self.training)), dim=-1)
        scores = self.scale * (tokens @ F.normalize(self.embed(self.words), dim=-1).T)  # (photos, patches, words)
        strongest = scores.logsumexp(1) - np.log(scores.shape[1])
        losses = F.binary_cross_entropy_with_logits(strongest + self.bias, self.shares[batch], reduction="none")
        return losses.sum(1).mean()


class CaptionLoss:
    """Cross-entropy of the five captions of each photo, behind one prefix of its patches and a prompt."""

    def __init__(self, model: Any, words: Sequence[str], photos: Sequence[Photo], patches: Patches) -> None:
        self.model, self.tokenizer, self.patches = model, make_tokenizer(words), patches
        self.captions = [[self._tokens(caption) for caption in photo.captions] for photo in photos]

    def _tokens(self, caption: str) -> list[int]:
        words = caption.split()[:LONGEST]
        end = [self.tokenizer.eos_token_id] if len(words) < LONGEST else []
        return [*self.tokenizer.convert_tokens_to_ids(words), *end]

    def __call__(self, batch: Sequence[int], *, shown: float, prompt: str, rng: np.random.Generator) -> torch.Tensor:
        """The loss of a batch of photos."""
        inner = self.model.model
        patches, at = self.patches.take(batch, shown, rng)
        before, after = self._prompt(prompt)
        captions = [self.captions[i] for i in batch]
        tokens, groups, places = self._pack(captions, len(before) + PATCHES + len(after), after[-1])
        embed, training = inner.language_model.embed_tokens, self.model.training
        unseen = (torch.rand(tokens.shape) < WORDS_OUT) & training
        rows = len(batch)
        inputs = torch.cat(
            [
                embed(before).expand(rows, -1, -1),
                F.dropout(
                    inner.multi_modal_projector(F.dropout(patches, CHANNELS_OUT, training)), VALUES_OUT, training
                ),
                embed(after[:-1]).expand(rows, -1, -1),
                embed(tokens.masked_fill(unseen, self.tokenizer.unk_token_id)),
            ],
            1,
        )
        shown_places = len(before) + at
        fixed = len(before) + PATCHES + torch.arange(len(after) - 1)
        positions = torch.cat(
            [torch.arange(len(before)).expand(rows, -1), shown_places, fixed.expand(rows, -1), places], 1
        )
        prefix = inputs.shape[1] - tokens.shape[1]
        mask = _block_mask(groups, prefix)
        hidden = inner.language_model(
            inputs_embeds=inputs, attention_mask={"full_attention": mask}, position_ids=positions, use_cache=False
        ).last_hidden_state[:, prefix:]
        targets = self._targets(tokens, groups)
        counted = targets >= 0
        logits = self.model.lm_head(F.dropout(hidden[counted], VALUES_OUT, training))
        return F.cross_entropy(logits, targets[counted], label_smoothing=0.1 if training else 0.0)

    def _prompt(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        head, tail = f"<|im_start|>user <image> {prompt}<|im_end|><|im_start|>assistant".split("<image>")
        ids = [
            self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0] for text in (head, tail)
        ]
        return ids[0], ids[1]

    def _pack(
        self, captions: Sequence[Sequence[Sequence[int]]], start: int, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pack the captions of each photo into a row: tokens, which caption each belongs to, and their positions.

        Each caption begins with the last token of the prompt, from which its first word is predicted.
        """
        longest = max(sum(len(one) + 1 for one in five) for five in captions)
        tokens, groups, places = (torch.zeros(len(captions), longest, dtype=torch.long) for _ in range(3))
        for row, five in enumerate(captions):
            column = 0
            for number, one in enumerate(five, 1):
                end = column + len(one) + 1
                tokens[row, column:end] = torch.tensor([int(first), *one])
                groups[row, column:end] = number
                places[row, column:end] = start - 1 + torch.arange(len(one) + 1)
                column = end
        return tokens, groups, places

    def _targets(self, tokens: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The next token of the same caption; -100 where there is none, or an unknown word."""
        following = F.pad(tokens[:, 1:], (0, 1))
        same = (groups == F.pad(groups[:, 1:], (0, 1))) & (groups > 0)
        return following.masked_fill(~same | (following == self.tokenizer.unk_token_id), -100)


def _block_mask(groups: torch.Tensor, prefix: int) -> torch.Tensor:
    """The mask that is added to attention: each token sees the prefix and its own caption, up to itself."""
    rows, length = groups.shape
    of = torch.cat([torch.zeros(rows, prefix, dtype=torch.long), groups.masked_fill(groups == 0, 9)], 1)
    causal = torch.ones(prefix + length, prefix + length, dtype=torch.bool).tril()
    seen = causal & ((of[:, None, :] == 0) | (of[:, None, :] == of[:, :, None]))  # (rows, query, key)
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]


def train(
    model: Any,
    words: Sequence[str],
    photos: Sequence[Photo],
    features: Sequence[np.ndarray],
    work: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train the projector and the language model in place; `features` are of the photos and of their mirror images.

    Returns:
        For the report, the losses of each phase.
    """
    patches = Patches(features)
    model.train()
    model.model.vision_tower.eval()
    named = WordLoss(model, words, photos, patches)

    def word_loss(step: int, batch: list[int]) -> torch.Tensor:
        torch.manual_seed(1_000_000 * WORDS.seed + step)
        return named(batch, shown=WORDS.shown, rng=np.random.default_rng([WORDS.seed, step, 7]))

    phases = {"words": train_networks("captioner, words", {"words": named}, WORDS, word_loss, work / "words.pt", log)}
    loss = CaptionLoss(model, words, photos, patches)
    networks = {"projector": model.model.multi_modal_projector, "language": model.model.language_model}
    for phase, schedule in PHASES.items():

        def compute_loss(step: int, batch: list[int], schedule: Schedule = schedule) -> torch.Tensor:
            rng = np.random.default_rng([schedule.seed, step, 7])
            torch.manual_seed(1_000_000 * schedule.seed + step)  # dropout: the same after an interruption
            return loss(batch, shown=schedule.shown, prompt=PROMPTS[rng.integers(len(PROMPTS))], rng=rng)

        checkpoint = work / f"captioner-{phase.replace(' ', '-')}.pt"
        phases[phase] = train_networks(f"captioner, {phase}", networks, schedule, compute_loss, checkpoint, log)
    patches.fold(model.model.multi_modal_projector)
    model.eval()
    return phases
